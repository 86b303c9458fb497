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


_FIRST = ("arm", "other bits", "K3", "95%", "KL, whole rows", "outside 1%")
_MORE = ("ratios", "|d|: middle, 99%, 99.9%", "mean of exp |d|", "4,096 tokens in 0.5 to 2", "s, sample + train")


def _table(arms: Sequence[Pair]) -> Table:
    """A row per arm."""
    rows: list[Cells] = []
    for p in arms:
        f, kl = p.figures, f"{p.kl:.1e}" if p.rows_differ else "0" if p.whole else "–"
        seconds = f"{p.cost.sample_seconds:.1f} + {p.cost.train_seconds:.1f}" if p.cost else "–"
        cells: tuple[str, ...] = ("–", "–", "–", kl, *["–"] * 5)
        if f is not None:
            span = "{:.1e} to {:.1e}".format(*f.k3_interval) if f.k3_interval and f.differ else "–"
            first = (f"{counted(f.differ)} of {counted(f.tokens)}", f"{f.k3:.1e}" if f.k3 else "0", span, kl)
            tails = ", ".join(f"{f.tails[q]:.1e}" for q in (0.5, 0.99, 0.999))
            ratios = (f"{f.outside / f.tokens:.1%}", "{:.3f} to {:.3f}".format(*f.ratios))
            cells = (*first, *ratios, tails, f"{f.mult_prob_error:.4f}", f"{f.long[1]:.1%}")
        rows.append((Bit(one_line(p.impl, 60), "code"), *cells, seconds))
    return Table((*_FIRST, *_MORE), rows, ("nowrap", *["num"] * 10), unshown=_MORE, only=ALL)


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
    rows: list[Cells] = []
    for b in bins:
        span = f"{b.low:{form}} to {b.high:{form}}" if b.high > b.low else f"{b.low:{form}}"
        rows.append((span, counted(b.tokens), *(f"{x:.1e}" for x in (b.k3, b.mean_abs, b.max_abs))))
    return Table((name, "tokens", "K3", "mean |d|", "largest |d|"), rows, ("nowrap", *["num"] * 4))


def mismatch_blocks(run: Run, number: int, opened: bool) -> list[Block]:
    """The arms, the pictures, the hypotheses, and by position and probability."""
    place, listed = f"mismatch-{number}", pairs(run)
    figure = mismatch_figure(run, f"{place}-plot")
    parts: list[Block] = [_table(listed), *([figure] if figure else [])]
    for pair in listed:
        f = pair.figures
        if f is None or not f.differ:
            continue
        tables = [(": hypotheses, each fitted", [_kinds(pair)])] if pair.kinds else []
        by = [("position", f.positions, ".0f"), ("the sampler's probability", f.probabilities, "g")]
        by.append(("step", pair.steps, ".0f"))
        tables += [(f": by {name}", [_bins(bins, name, form)]) for name, bins, form in by if bins]
        arm = Bit(one_line(pair.impl, 60), "code")
        parts += [Details((arm, title), table, fold=True, only="mp") for title, table in tables]
    parts.append(Paragraph(_NOTE, "soft"))
    return [Details("Arms", parts, place, plural(len(listed), "arm"), "arms", opened=opened)]


_Drawn = Sequence[tuple[int, Figures]]  # an arm's number, and its figures


def mismatch_figure(run: Run, place: str = "fig-answer") -> Figure | None:
    """Four panels over the arms that differ, and one by step of training; None where none differs."""
    arms = pairs(run)
    shown = [(i, p.figures) for i, p in enumerate(arms) if p.figures is not None and p.figures.differ]
    if not shown:
        return None
    by_probability = [(i, [((b.low + b.high) / 2, b.mean_abs) for b in f.probabilities]) for i, f in shown]
    by_position = [(i, [(b.low + 1, b.k3) for b in f.positions]) for i, f in shown]
    by_step = [(i, [(b.low, b.k3) for b in p.steps]) for i, p in enumerate(arms) if p.steps]
    longest = max(x for _, points in by_position for x, _ in points)
    scale = decades([1.0, *(math.exp(min(f.sampler.min(), f.trainer.min())) for _, f in shown)])
    tokens = _spots([(i, np.exp(f.sampler).tolist(), np.exp(f.trainer).tolist()) for i, f in shown], scale, scale)
    title = "mean |d| by the sampler's probability"
    panels = [
        _panel("probability of each token", "trainer's", "sampler's", scale, scale, tokens),
        _curves(title, "sampler's probability", linear(0.0, 1.0), by_probability),
        _curves("K3 by position", "token of the rollout", doublings(1, max(2, longest)), by_position),
        _rollouts(shown),
    ]
    if by_step:
        ends = [x for _, points in by_step for x, _ in points]
        panels.append(_curves("K3 by step", "step of training", linear(min(ends), max(ends)), by_step))
    return Figure("plots", Plots([(one_line(p.impl, 60), "") for p in arms], panels), place, PLOTS)


def _rollouts(shown: _Drawn) -> Panel:
    most = max(1.2, *(math.exp(min(3.0, float(np.abs(f.sequences).max()))) for _, f in shown))
    high = math.log(most)
    across = linear(0.0, float(max(max(f.lengths) for _, f in shown)))
    up = linear(0.0, high, {f"{math.exp(v):.3g}": v for v in (0.0, high / 2, high)})
    marks = [limit(math.log(cap), up) for cap in _CAPS if cap <= most]
    marks += _spots([(i, list(f.lengths), np.abs(f.sequences).tolist()) for i, f in shown], across, up)
    unit = f"the larger of both; caps {_CAPS[0]:g} and {_CAPS[1]:g} where in sight"
    return _panel("ratio of each rollout, or its inverse", unit, "tokens of the rollout", across, up, marks)


def _spots(lines: Sequence[tuple[int, list[float], list[float]]], across: Scale, up: Scale) -> list[Mark]:
    """Each arm's points, thinned to what a picture can show."""
    marks = []
    for i, xs, ys in lines:
        step = max(1, len(xs) // _POINTS)
        marks.append(Mark("spot", i, placed(zip(xs[::step], ys[::step], strict=True), across, up)))
    return marks


def _curves(title: str, axis: str, across: Scale, lines: Sequence[tuple[int, Sequence[tuple[float, float]]]]) -> Panel:
    up = decades([y for _, points in lines for _, y in points])
    return _panel(title, "nats", axis, across, up, [Mark("curve", i, placed(p, across, up)) for i, p in lines if p])


def _panel(title: str, unit: str, axis: str, across: Scale, up: Scale, marks: Sequence[Mark]) -> Panel:
    return Panel(title, [Plot(unit, 150, up.levels, marks, title)], across.ticks, axis)
