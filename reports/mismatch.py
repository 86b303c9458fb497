"""A sampler and a trainer as blocks of a report: a row per arm, what each hypothesis leaves, where tokens differ."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from nondet.core.records import MismatchKind, Run
from nondet.errors import one_line
from nondet.mismatch.figures import Bin, Figures
from nondet.reports.document import ALL, Bit, Block, Cells, Details, Figure, Inline, Paragraph, Table
from nondet.reports.plots import Mark, Panel, Plot, Plots, Scale, decades, doublings, limit, linear, placed
from nondet.reports.text import counted
from nondet.verdict.findings import plural
from nondet.verdict.mismatch import Pair, pairs, removed

_POINTS, _KINDS_MOST = 1500, 12
_CAPS = (2.0, 3.0)  # where truncated importance weights are cut: verl's, TRL's
PLOTS = "Where sampler and trainer differ"
_NOTE = (
    "d is the trainer's logprob less the sampler's, a ratio exp(d), K3 the mean of ratio - 1 - d. Its interval is by "
    "sequence: percentiles of 2,000 resamples of whole rollouts. Where tokens were not drawn at temperature 1, K3 is a "
    "distance and estimates no KL."
)


def mismatch_figure(run: Run, place: str = "fig-answer") -> Figure | None:
    """The plots of a run's arms."""
    data = mismatch_plots(pairs(run))
    return Figure("plots", data, place, PLOTS) if data else None


_FIRST = ("arm", "other bits", "K3", "95%", "KL, whole rows", "outside 1%")
_MORE = ("ratios", "|d|: middle, 99%, 99.9%", "mean of exp |d|", "4,096 tokens in 0.5 to 2", "s, sample + train")


def _table(told: Sequence[Pair]) -> Table:
    """A row per arm; whole rows have a column where any arm has them."""
    rows = [[Bit(one_line(p.impl, 60), "code"), *_cells(p)] for p in told]
    head: list[Inline] = [*_FIRST, *_MORE]
    if not any(p.whole for p in told):
        place = head.index("KL, whole rows")
        for line in (head, *rows):
            del line[place]
    return Table(head, rows, ("nowrap", *["num"] * len(head)), unshown=_MORE, only=ALL)


def _cells(p: Pair) -> list[Inline]:
    """All columns of an arm but the first."""
    kl = f"{p.kl:.1e}" if p.rows_differ else "0" if p.whole else "–"
    seconds = f"{p.cost.sample_seconds:.1f} + {p.cost.train_seconds:.1f}" if p.cost else "–"
    f = p.figures
    if f is None:
        return ["–", "–", "–", kl, *["–"] * 5, seconds]
    return [
        f"{counted(f.differ)} of {counted(f.tokens)}",
        f"{f.k3:.1e}" if f.k3 else "0",
        "{:.1e} to {:.1e}".format(*f.k3_interval) if f.k3_interval and f.differ else "–",
        kl,
        f"{f.outside / f.tokens:.1%}",
        "{:.3f} to {:.3f}".format(*f.ratios),
        ", ".join(f"{f.tails[q]:.1e}" for q in (0.5, 0.99, 0.999)),
        f"{f.mult_prob_error:.4f}",
        f"{f.long[1]:.1%}",
        seconds,
    ]


def _kinds(pair: Pair) -> Table:
    named = pair.named
    best: dict[tuple[str, str], MismatchKind] = {(k.cause, k.side): k for k in reversed(pair.kinds)}
    rows: list[Cells] = []
    for k in sorted(best.values(), key=lambda k: (k is not named, k.left))[:_KINDS_MOST]:
        cause: Inline = (Bit(k.cause, "bad"), " (named)") if k == named else Bit(k.cause)
        away = f"{min(1.0, max(0.0, removed(k))):.0%}" if k.k3 > k.floor else "–"
        exactly = f"{k.exactly:.0%}" if k.exactly else "–"
        rows.append((cause, k.side, Bit(k.fitted), f"{k.left:.1e}" if k.left else "0", away, exactly))
    head = ("hypothesis", "side", "fitted", "K3 left", "taken away", "very bits")
    return Table(head, rows, ("wide", "nowrap", "wide", "num", "num", "num"))


def _bins(bins: Sequence[Bin], name: str, form: str) -> Table:
    rows = [
        (
            f"{b.low:{form}} to {b.high:{form}}" if b.high > b.low else f"{b.low:{form}}",
            counted(b.tokens),
            *(f"{x:.1e}" for x in (b.k3, b.mean_abs, b.max_abs)),
        )
        for b in bins
    ]
    return Table((name, "tokens", "K3", "mean |d|", "largest |d|"), rows, ("nowrap", *["num"] * 4))


def mismatch_blocks(run: Run, number: int, opened: bool) -> list[Block]:
    """The arms, the pictures, the hypotheses, and by position and probability."""
    place, told = f"mismatch-{number}", pairs(run)
    figure = mismatch_figure(run, f"{place}-plot")
    parts: list[Block] = [_table(told), *([figure] if figure else [])]
    for pair in told:
        if pair.figures is None or not pair.figures.differ:
            continue
        arm = one_line(pair.impl, 60)
        if pair.kinds:
            parts.append(Details((Bit(arm, "code"), ": hypotheses, each fitted"), [_kinds(pair)], fold=True, only="mp"))
        parts += [
            Details((Bit(arm, "code"), f": by {name}"), [_bins(bins, name, form)], fold=True, only="mp")
            for name, bins, form in (
                ("position", pair.figures.positions, ".0f"),
                ("the sampler's probability", pair.figures.probabilities, "g"),
                ("step", pair.steps, ".0f"),
            )
            if bins
        ]
    parts.append(Paragraph(_NOTE, "soft"))
    return [Details("Arms", parts, place, plural(len(told), "arm"), "arms", opened=opened)]


_Drawn = Sequence[tuple[int, Figures]]  # an arm's number, and its figures


def mismatch_plots(told: Sequence[Pair]) -> Plots | None:
    """Four panels over the arms that differ, and one by step of training; None where none differs."""
    shown = [(i, p.figures) for i, p in enumerate(told) if p.figures is not None and p.figures.differ]
    if not shown:
        return None
    panels = [_scatter(shown), _by_probability(shown), _by_position(shown), _rollouts(shown)]
    by_step = [(i, [(b.low, b.k3) for b in p.steps]) for i, p in enumerate(told) if p.steps]
    if by_step:
        ends = [x for _, points in by_step for x, _ in points]
        panels.append(_curves("K3 by step", "step of training", linear(min(ends), max(ends)), by_step))
    return Plots([(one_line(p.impl, 60), "") for p in told], panels)


def _scatter(shown: _Drawn) -> Panel:
    title, scale = (
        "probability of each token",
        decades([1.0, *(math.exp(min(f.sampler.min(), f.trainer.min())) for _, f in shown)]),
    )
    marks = []
    for i, f in shown:
        step = max(1, f.tokens // _POINTS)
        points = zip(np.exp(f.sampler[::step]).tolist(), np.exp(f.trainer[::step]).tolist(), strict=True)
        marks.append(Mark("spot", i, placed(points, scale, scale)))
    return _panel(title, "trainer's", "sampler's", scale, scale, marks)


def _by_probability(shown: _Drawn) -> Panel:
    lines = [(i, [((b.low + b.high) / 2, b.mean_abs) for b in f.probabilities]) for i, f in shown]
    return _curves("mean |d| by the sampler's probability", "sampler's probability", linear(0.0, 1.0), lines)


def _by_position(shown: _Drawn) -> Panel:
    lines = [(i, [(b.low + 1, b.k3) for b in f.positions]) for i, f in shown]
    longest = max(x for _, points in lines for x, _ in points)
    return _curves("K3 by position", "token of the rollout", doublings(1, max(2, longest)), lines)


def _rollouts(shown: _Drawn) -> Panel:
    most = max(1.2, *(math.exp(min(3.0, float(np.abs(f.sequences).max()))) for _, f in shown))
    high = math.log(most)
    across = linear(0.0, float(max(max(f.lengths) for _, f in shown)))
    up = linear(0.0, high, {f"{math.exp(v):.3g}": v for v in (0.0, high / 2, high)})
    marks = [limit(math.log(cap), up) for cap in _CAPS if cap <= most]
    for i, f in shown:
        step = max(1, len(f.lengths) // _POINTS)
        points = zip(list(f.lengths)[::step], np.abs(f.sequences)[::step].tolist(), strict=True)
        marks.append(Mark("spot", i, placed(points, across, up)))
    unit = f"the larger of both; caps {_CAPS[0]:g} and {_CAPS[1]:g} where in sight"
    return _panel("ratio of each rollout, or its inverse", unit, "tokens of the rollout", across, up, marks)


def _curves(title: str, axis: str, across: Scale, lines: Sequence[tuple[int, Sequence[tuple[float, float]]]]) -> Panel:
    up = decades([y for _, points in lines for _, y in points])
    return _panel(title, "nats", axis, across, up, [Mark("curve", i, placed(p, across, up)) for i, p in lines if p])


def _panel(title: str, unit: str, axis: str, across: Scale, up: Scale, marks: Sequence[Mark]) -> Panel:
    return Panel(title, [Plot(unit, 150, up.levels, marks, title)], across.ticks, axis)
