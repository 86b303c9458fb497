"""Sampled completions: all prompts together as text, and the geometry of agreement, branches and survival."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from nondet.core.records import Role, role_of
from nondet.core.statistics import SurvivalStep, percent, percent_range
from nondet.errors import one_line
from nondet.reports import text
from nondet.reports.classes import WIDTH, Tick, letter
from nondet.sampling.analysis import COUNTS, TOO_FEW, Comparison, DistinctCompletion, Overall, SampleSummary, compared
from nondet.verdict.findings import plural

_POINTS = 5
_TEXT = 60


def line_of(o: Overall) -> str:
    """One implementation in a line."""
    return (
        f"{o.impl}: of {plural(o.prompts, o.unit)}, traces part on {o.parted_traces:,}, texts on "
        f"{o.parted_tokens:,}; {plural(o.n, 'completion')} in {plural(o.rounds, 'round')}"
    )


def overall_table(parts: Sequence[Overall]) -> list[tuple[str, list[str]]]:
    """Measures down, implementations across."""

    def measure(name: str, cell: Callable[[Overall], str]) -> tuple[str, list[str]]:
        return name, [cell(o) for o in parts]

    unit = parts[0].unit if parts else "prompt"
    return [
        measure(f"{unit}s", lambda o: text.counted(o.prompts)),
        measure("completions (failed), rounds", lambda o: f"{o.n:,} ({o.failed:,}), {o.rounds:,}"),
        measure(f"{unit}s whose logprob traces part", _traces_text),
        measure(f"{unit}s whose texts part", lambda o: f"{o.parted_tokens:,} of {o.prompts:,}"),
        measure(f"pairs that differ, mean over {unit}s", lambda o: _share(o.disagreement)),
        measure(f"chance of a new text next, mean over {unit}s", lambda o: _share(o.new)),
        measure("agree so far (Kaplan-Meier)", _curve_text),
    ]


def _share(value: float | None) -> str:
    return "–" if value is None else percent(value)


def _traces_text(o: Overall) -> str:
    counts = f"{o.parted_traces:,} of {o.prompts:,}"
    if o.bound_completions is not None:
        rounds = "" if o.bound_rounds is None else f"below {percent(o.bound_rounds, 'up')} of rounds, "
        bound = f"below {percent(o.bound_completions, 'up')} of completions if they were independent"
        return f"{counts} (at 95%, one-sided: {rounds}{bound})"
    if o.prompts < 2:
        return counts
    return f"{counts} (95% {percent_range(o.share_low, o.share_high)} of {o.unit}s drawn like these, under such loads)"


def _curve_text(o: Overall) -> str:
    """ "100% at token 0, 88.0% (80.1% to 93.0%) from token 17"; steps evenly chosen."""
    if not o.curve:
        return "–"
    steps = list(o.curve)
    if len(steps) > _POINTS:
        steps = [steps[round(i * (len(steps) - 1) / (_POINTS - 1))] for i in range(_POINTS)]
    if len(steps) == 1:
        return "nothing parted"
    return "; ".join(_step_text(s) for s in steps[1:])


def _step_text(s: SurvivalStep) -> str:
    span = percent_range(s.low, s.high) if s.high - s.low < 1.0 else TOO_FEW
    return f"{percent(s.survival)} from token {s.time} on ({span})"


def comparison_lines(parts: Sequence[Overall]) -> list[str]:
    """Stock against invariant, where both are there: one sentence for each question."""
    first = next((o for o in parts if role_of(o.impl) == Role.STOCK), None)
    second = next((o for o in parts if role_of(o.impl) == Role.INVARIANT), None)
    if first is None or second is None:
        return []
    c = compared(first, second)
    return _comparison(c) if c.prompts > 1 else []


def _comparison(c: Comparison) -> list[str]:
    return [
        f"Texts part under {c.first} alone on {plural(c.only_first, c.unit)}, under {c.second} alone on "
        f"{c.only_second:,}, of {c.prompts:,} (McNemar, exact: p = {_p(c.mcnemar)}).",
        f"Shares of pairs that differ, {c.unit} by {c.unit}: p = {_p(c.permutation)} (sign-flip permutation).",
        f"When completions first part, each {c.unit} by itself: {c.log_rank.observed:,} under {c.first}, "
        f"{c.log_rank.expected:.1f} expected if both parted alike (log-rank by round: p = "
        f"{_p(c.log_rank.p)}).",
    ]


def _p(p: float) -> str:
    return "1" if p >= 1.0 else f"{p:.2g}" if p >= 1e-300 else "below 1e-300"


def prompt_table(parts: Sequence[Overall], most: int) -> tuple[tuple[str, ...], list[tuple[str, ...]], int]:
    """(head, one row for each prompt, how many are left out): those that part most come first, then by number."""
    prompts = sorted({p for o in parts for p in o.summaries}, key=lambda p: _weight(parts, p))
    rows = []
    for p in prompts[:most]:
        texts = [o.summaries[p].prompt_text for o in parts if p in o.summaries]
        cells = [_cell(o, p) for o in parts]
        rows.append((str(p + 1), one_line(texts[0], _TEXT), *cells))
    head = ("", "prompt", *(f"{o.impl}: texts / traces, first parting" for o in parts))
    return head, rows, max(0, len(prompts) - most)


def _weight(parts: Sequence[Overall], prompt: int) -> tuple[int, int, int]:
    mine = [o.summaries[prompt] for o in parts if prompt in o.summaries]
    return (-max(s.distinct_completions for s in mine), -max(s.distinct_traces for s in mine), prompt)


def _cell(o: Overall, prompt: int) -> str:
    s = o.summaries.get(prompt)
    if s is None:
        return "–"
    where = f", token {s.first_fork.index}" if s.first_fork else ""
    return f"{s.distinct_completions:,} / {s.distinct_traces:,} of {s.n:,}{where}"


# Geometry of what sampled completions show: agreement over position, the tree of branches, branches side by side.
#
# Places are in thousandths of the plot's width, as in `draw_classes`.

_LEAVES_MOST = 40
_BEFORE, _AFTER = 160, 360  # characters around the place where a branch parts


@dataclass(frozen=True)
class Curve:
    """Agreement of one implementation: a stepped line, and the band of its pointwise interval or ""."""

    impl: str
    n: int
    line: str
    band: str


@dataclass(frozen=True)
class CurveFigure:
    """Agreement over position. `low` is the share at the foot of the vertical axis."""

    curves: tuple[Curve, ...]
    ticks: tuple[Tick, ...]
    low: float
    length: int
    levels: tuple[tuple[float, float], ...]


@dataclass(frozen=True)
class TreeLeaf:
    """A row of the tree: the completion that ends there."""

    letter: str
    label: int
    count: int
    parts_at: int | None
    token: str


@dataclass(frozen=True)
class TreeFigure:
    """A tree drawn sideways: rows of equal height, a line for each run of shared tokens.

    Attributes:
        lines: (path, width in pixels, class label): the label is that of the commonest completion below it.
        hidden: Distinct completions left out, and the requests that gave them.
    """

    leaves: tuple[TreeLeaf, ...]
    lines: tuple[tuple[str, float, int], ...]
    ticks: tuple[Tick, ...]
    hidden: tuple[int, int]


def curve_figure(summaries: Sequence[SampleSummary]) -> CurveFigure | None:
    """The agreement curves of one prompt, in one chart; None where there is nothing to draw."""
    drawn = [s for s in summaries if len(s.survival) > 1 and s.n > 0]
    if not drawn:
        return None
    length = max(len(s.survival) - 1 for s in drawn)
    worst = min(min(s.survival) for s in drawn)
    # the axis starts at the nearest of a few round shares below the data: a curve along the top edge shows nothing
    low = max((x for x in (0.0, 0.5, 0.8, 0.9, 0.95) if x < worst - (1 - worst) * 0.15 - 0.005), default=0.0)
    levels = tuple((low + (1 - low) * i / 4, 100.0 - 25.0 * i) for i in range(5))
    curves = tuple(_curve(s, length, low) for s in drawn)
    step = next(x for x in (1, 2, 5, 10, 20, 25, 50, 100, 200, 250, 500, 1000, 2000, 5000, length) if length / x <= 8)
    ticks = tuple(Tick(WIDTH * i / length, str(i)) for i in range(0, length + 1, step))
    return CurveFigure(curves, ticks, low, length, levels)


def _curve(summary: SampleSummary, length: int, low: float) -> Curve:
    def height(share: float) -> str:
        return f"{100.0 - 100.0 * (min(max(share, low), 1.0) - low) / (1.0 - low):.2f}"

    n, shares = summary.n, summary.survival
    corners = [0, *(i for i in range(1, len(shares)) if shares[i] != shares[i - 1]), len(shares) - 1]
    line, top, bottom = [], [], []
    for begin, end in itertools.pairwise(corners):
        left, right = WIDTH * begin / length, WIDTH * end / length
        under, over = summary.band(begin)
        line.append(f"{left:.1f} {height(shares[begin])} {right:.1f} {height(shares[begin])}")
        top.append(f"{left:.1f} {height(over)} {right:.1f} {height(over)}")
        bottom.append(f"{right:.1f} {height(under)} {left:.1f} {height(under)}")
    last = f" {WIDTH * corners[-1] / length:.1f} {height(shares[-1])}"
    # a server's arms together are no sample of one thing, and a single round none of rounds: a line, and no band
    band = "" if summary.agree.method == COUNTS or not summary.held_rounds else "M" + " ".join(top + bottom[::-1]) + "Z"
    return Curve(summary.impl, n, "M" + " ".join(line) + last, band)


def tree_figure(summary: SampleSummary) -> TreeFigure | None:
    """The tree of the commonest distinct completions; None where there is only one."""
    shown = summary.completions[:_LEAVES_MOST]
    rest = summary.completions[_LEAVES_MOST:]
    if len(shown) < 2:
        return None
    length = max(len(c.token_ids) for c in shown) or 1
    order: list[tuple[DistinctCompletion, int]] = []
    lines: list[tuple[str, float, int]] = []
    labels = {id(c): i for i, c in enumerate(shown)}

    def walk(group: list[DistinctCompletion], start: int) -> int:
        """Draw the run that the group shares from `start`; returns its row, that of its commonest completion."""
        stop = _shared(group)
        row = len(order)
        if len(group) == 1:
            order.append((group[0], labels[id(group[0])]))
        else:
            branches: dict[int | None, list[DistinctCompletion]] = {}
            for c in group:
                branches.setdefault(c.token_ids[stop] if stop < len(c.token_ids) else None, []).append(c)
            for i, branch in enumerate(sorted(branches.values(), key=lambda b: -sum(c.count for c in b))):
                child = walk(branch, stop)
                if i:
                    x = WIDTH * stop / length
                    lines.append((f"M{x:.1f} {row + 0.5}V{child + 0.5}", 1.0, labels[id(branch[0])]))
        width = 1.5 + 5.0 * sum(c.count for c in group) / max(1, summary.n)
        path = f"M{WIDTH * start / length:.1f} {row + 0.5}H{WIDTH * stop / length:.1f}"
        lines.append((path, width, labels[id(group[0])]))
        return row

    walk(list(shown), 0)
    leaves = tuple(TreeLeaf(letter(label), label, c.count, c.parts_at, _token_at(c, c.parts_at)) for c, label in order)
    step = max(1, -(-length // 5))
    ticks = tuple(Tick(WIDTH * i / length, str(i)) for i in range(0, length + 1, step))
    return TreeFigure(leaves, tuple(lines), ticks, (len(rest), sum(c.count for c in rest)))


def _token_at(completion: DistinctCompletion, index: int | None) -> str:
    """Text of one token; empty where the completion has none there."""
    return "" if index is None or index >= len(completion.pieces) else completion.pieces[index]


def _shared(group: Sequence[DistinctCompletion]) -> int:
    """Length of the common prefix."""
    first = min(group, key=lambda c: len(c.token_ids)).token_ids
    for i, token in enumerate(first):
        if any(c.token_ids[i] != token for c in group):
            return i
    return len(first)


@dataclass(frozen=True)
class BranchView:
    """One distinct completion around the place where it parts from the commonest.

    Attributes:
        before, token, after: Text up to there, the first token that differs, and what follows; cut on both sides.
        ends: It stops where the other goes on.
        parts_at: Index of `token`; for the commonest completion, the first fork of all.
    """

    letter: str
    label: int
    count: int
    parts_at: int | None
    before: str
    token: str
    after: str
    ends: bool
    text: str


def branch_views(summary: SampleSummary) -> list[BranchView]:
    """Every distinct completion, the commonest first, with the first different token apart."""
    first = summary.first_fork.index if summary.first_fork is not None else None
    return [_view(i, c, first if c.parts_at is None else c.parts_at) for i, c in enumerate(summary.completions)]


def _view(label: int, completion: DistinctCompletion, at: int | None) -> BranchView:
    pieces = completion.pieces
    place = len(pieces) if at is None else at
    before, after = "".join(pieces[:place]), "".join(pieces[place + 1 :])
    return BranchView(
        letter=letter(label),
        label=label,
        count=completion.count,
        parts_at=at,
        before=before if len(before) <= _BEFORE else "…" + before[-_BEFORE:],
        token=pieces[place] if place < len(pieces) else "",
        after=after if len(after) <= _AFTER else after[:_AFTER] + "…",
        ends=at is not None and at >= len(pieces),
        text=completion.text,
    )
