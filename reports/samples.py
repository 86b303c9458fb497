"""Sampled completions: all prompts together as text, and the geometry of agreement, branches and survival."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from nondet.core.records import Role, role_of
from nondet.core.statistics import SurvivalStep, percent, percent_range
from nondet.errors import one_line
from nondet.reports import text
from nondet.reports.classes import WIDTH, Tick, letter
from nondet.reports.document import (
    BRIEF,
    Bit,
    Block,
    Cells,
    Code,
    Details,
    Figure,
    Heading,
    Inline,
    Items,
    Paragraph,
    Table,
)
from nondet.sampling.analysis import (
    COUNTS,
    DEFINITION,
    NAME,
    TOO_FEW,
    Branch,
    Comparison,
    DistinctCompletion,
    Overall,
    SampleSummary,
    compared,
    ratio_text,
)
from nondet.verdict.findings import plural

if TYPE_CHECKING:
    from nondet.reports.content import Report, RunSection, SampleSection

CURVE_TITLE = "Agreement with the commonest completion, over position"

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


# Distinct completions on a page, the commonest ones; the others are in the run's side file.
COMPLETIONS_MOST = 100
_BRANCHES_MOST = 12
_NODES_MOST = 24
_SURVIVAL_POINTS = 8
_BARS = "▁▂▃▄▅▆▇█"


def sample_parts(report: Report, section: RunSection, number: int) -> list[Block]:
    """All prompts together, then each of those that are shown."""
    made: list[Block] = []
    if section.overall:
        made += _overall(section, number)
    for i, sample in enumerate(section.shown, 1):
        made += _sample(report, section, sample, f"sample-{number}-{i}")
    return made


def _overall(section: RunSection, number: int) -> list[Block]:
    parts = section.overall
    impls = [Bit(o.impl, "code") for o in parts]
    head, prompts, left = prompt_table(parts, COMPLETIONS_MOST)
    listed: list[Block] = [Table(head, [tuple(map(Bit, row)) for row in prompts])]
    if left:
        listed.append(Paragraph(f"… and {plural(left, parts[0].unit)} that part less.", "soft"))
    shown = f"Told one by one below: the {len(section.shown)} that part most."
    return [
        *(Paragraph(line_of(o), only=BRIEF, room=1) for o in parts),
        Heading(f"All {plural(len(section.samples), parts[0].unit)}", f"overall-{number}"),
        Table(("", *impls), [(name, *cells) for name, cells in overall_table(parts)], ("", *("cell",) * len(parts))),
        *([Items(comparison_lines(parts))] if comparison_lines(parts) else []),
        Details("One by one", listed, only="mp"),
        *([Paragraph(shown, "soft", "mp")] if len(section.shown) < len(section.samples) else []),
    ]


def _sample(report: Report, section: RunSection, sample: SampleSection, place: str) -> list[Block]:
    """One prompt under every implementation."""
    several = len(section.samples) > 1
    title = f"Completions of {sample.name}" if several else "Completions"
    made: list[Block] = [] if section.endpoint else _brief(sample, several)
    made += [Heading(title, place, title.lower()), Code(sample.prompt_text), Figure("facts", sample)]
    if sample.speed is not None:
        made.append(Paragraph(text.sentence(ratio_text(sample.speed).replace(NAME, NAME.capitalize(), 1))))
        made.append(Paragraph(f"{DEFINITION.capitalize()}.", "soft"))
    if sample.families:
        left = [
            (f, f"{text.counted(f.summary.distinct_completions)} of {text.counted(f.summary.n)}")
            for f in sample.families
        ]
        rows = [(Bit(f.family, "code"), n, text.counted(f.summary.distinct_traces), f.result) for f, n in left]
        note = "One family of operators replaced at a time, all others stock, under the same load plan."
        grid = Table(
            ("replaced", "distinct completions", "distinct traces", "result"), rows, ("", "num", "num", "wide")
        )
        made += [Heading("Which family is guilty", level=4), Paragraph(note, "soft"), grid]
    measures = [(name, *cells) for name, cells in text.sample_table(sample.summaries, sample.replays)]
    head: Cells = ("", *(Bit(s.impl, "code") for s in sample.summaries))
    where: list[Block] = [Table(head, measures, ("", *("cell",) * len(sample.summaries)))]
    where += [block for s in sample.main for block in _fork(s)]
    figure = curve_figure(sample.main)
    if figure:
        where.append(Figure("curve", figure, f"{place}-curve", CURVE_TITLE))
    where += _survival(sample)
    for i, s in enumerate(sample.main, 1):
        where += _branches(s, f"{place}-tree-{i}")
    if sample.partial:
        rest = [block for i, s in enumerate(sample.partial, 1) for block in _partial(s, f"{place}-part-{i}")]
        where.append(Details("Forks and branches with one family replaced", rest, only="p"))
    title, said = "Counts, forks, branches", "where they part, what each goes on with"
    made.append(Details(title, where, f"{place}-where", said, opened=not report.folded))
    return made


def _brief(sample: SampleSection, several: bool) -> list[Block]:
    made: list[Block] = []
    for s in sample.summaries:
        main = role_of(s.impl) != Role.PART and not several
        line = f"{sample.name}, " if several else ""
        line += f"{s.impl}: {text.counted(s.distinct_completions)} distinct of {text.counted(s.n)}, "
        line += plural(s.distinct_traces, "logprob trace") + (f", {s.tokens_per_second:,.0f} tokens/s" if main else "")
        made.append(Paragraph(line, only=BRIEF, room=1))
        if main and len(s.survival) > 1 and s.distinct_completions > 1:
            made.append(Items([Bit(f"agreement by token {sparkline(s.survival, 40)}", "soft")], only=BRIEF))
    return made


def _fork(s: SampleSummary) -> list[Block]:
    """The first divergent token, and on a page those after it."""
    if s.first_fork is None:
        return []
    head = ("token", "id", "completions", "top-1 − top-2 logit, min / median", "goes on")
    rows = []
    for b in s.first_fork.branches:
        margin = "not recorded" if b.margin_min is None else text.number(b.margin_min)
        margin += "" if b.margin_median is None else f" / {text.number(b.margin_median)}"
        count = f"{text.counted(b.count)} of {text.counted(s.n)}"
        rows.append((Bit(text.token(b.text), "code"), str(b.token_id), count, margin, Bit(b.continuation, "code")))
    later = [f for f in s.forks[:COMPLETIONS_MOST] if f is not s.first_fork]
    forks = [(str(f.index), Bit(f.before[-60:], "code"), _branch_texts(f.branches)) for f in later]
    grid = Table(("index", "before", "branches"), forks, ("num", "wide", ""))
    named = f"First divergent token of `{s.impl}`: index {s.first_fork.index}, after "
    before = Bit(s.first_fork.before, "code")
    made: list[Block] = [Paragraph((named, before)), Table(head, rows, ("nowrap", "num", "num", "num", "wide"))]
    return [*made, *([Details(plural(len(forks), "later fork"), [grid], only="p")] if forks else [])]


def _branch_texts(branches: Sequence[Branch]) -> Inline:
    parts: list[str | Bit] = []
    for b in branches:
        margin = "" if b.margin_min is None else f" (margin {text.number(b.margin_min)} or more)"
        parts += [Bit(text.token(b.text), "code"), f" {text.counted(b.count)} ×{margin} "]
    return tuple(parts)


def _survival(sample: SampleSection) -> list[Block]:
    """Agreement at a few positions, for all implementations in one table."""
    drawn = [s for s in sample.main if len(s.survival) > 1]
    if not any(s.survival[-1] < 1 for s in drawn):
        return []
    length = max(len(s.survival) for s in drawn) - 1
    places = sorted({round(length * i / _SURVIVAL_POINTS) for i in range(_SURVIVAL_POINTS + 1)})
    rows: list[Cells] = [
        (
            (Bit(s.impl, "code"), f" (n = {s.n})"),
            *(percent(s.survival[p]) if p < len(s.survival) else "–" for p in places),
        )
        for s in drawn
    ]
    note = "Share that agrees with the commonest completion, by tokens:"
    grid = Table(("tokens", *map(str, places)), rows, ("", *("num",) * len(places)), only="vm")
    return [Paragraph(note, only="vm"), grid]


def _branches(s: SampleSummary, place: str) -> list[Block]:
    """The tree of branches, and branches side by side; the one completion where there is one."""
    if s.distinct_completions < 2:
        only = [Details(f"The one completion of `{s.impl}`", [Code(s.completions[0].text)], only="p")]
        return list(only) if s.completions else []
    views = branch_views(s)
    texts: list[Block] = []
    for view in views[:_BRANCHES_MOST]:
        where = "" if view.parts_at is None else f", token {view.parts_at}"
        texts += [Paragraph((Bit(view.letter, "strong"), f", {view.count} of {s.n}{where}")), Code(_marked(view))]
    if len(views) > _BRANCHES_MOST:
        texts.append(Paragraph(f"… and {len(views) - _BRANCHES_MOST} rarer ones."))
    title = f"{plural(len(views), 'branch', 'branches')} of `{s.impl}`, the first different token in ⟦ ⟧"
    tree = tree_figure(s)
    drawn = [Figure("tree", (s, tree), place, f"Tree of branches: {s.impl}")] if tree else []
    return [
        *drawn,
        Details("Tree of branches", [Items(_tree_lines(s))], only="v"),
        Figure("branches", (s, views), "", f"Branches side by side: {s.impl}"),
        Details(title, texts, only="vm"),
    ]


def _marked(view: BranchView) -> str:
    if view.ends:
        return f"{view.before}⟦ends here⟧"
    return f"{view.before}⟦{text.visible(view.token)}⟧{view.after}" if view.token else view.before + view.after


def _tree_lines(s: SampleSummary) -> list[Inline]:
    """Tokens shared and their count at each node, the children of one deeper. A loop: trees may be deep."""
    lines: list[Inline] = []
    pending = [(s.tree, 0)]
    while pending and len(lines) < _NODES_MOST:
        node, depth = pending.pop()
        span = f"tokens {node.start}-{node.start + node.length - 1}" if node.length else f"ends at {node.start}"
        lines.append((f"{'· ' * depth}{node.count} of {s.n}, {span} ", Bit(one_line(node.text, 36), "soft")))
        pending += [(child, depth + 1) for child in reversed(node.children)]
    return lines + ([f"… {len(pending)} more"] if pending else [])


def _partial(s: SampleSummary, place: str) -> list[Block]:
    if s.first_fork is None:
        return [Paragraph(f"`{s.impl}`: no fork in {text.counted(s.n)} completions.")]
    return [*_fork(s), *_branches(s, place)]


def sparkline(shares: Sequence[float], width: int) -> str:
    """Shares as bars, the lowest of each stretch; full height is 1, the foot is the lowest of all."""
    low = min(shares)
    if low >= 1.0:
        return _BARS[-1] * min(width, len(shares))
    cells = []
    count = min(width, len(shares))
    for i in range(count):
        stretch = shares[i * len(shares) // count : (i + 1) * len(shares) // count]
        cells.append(_BARS[round((min(stretch) - low) / (1.0 - low) * (len(_BARS) - 1))])
    return "".join(cells)


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
