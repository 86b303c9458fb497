"""A sampler and a trainer as blocks of a report: a row per arm, what each hypothesis leaves, where tokens differ."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any

import numpy as np

from nondet.core.records import MismatchKind, Run
from nondet.errors import one_line
from nondet.mismatch.figures import Bin, Figures
from nondet.reports.document import BRIEF, WHOLE, Bit, Block, Details, Figure, Inline, Paragraph, Table, grid
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


class Sides:
    """The arms of a run."""

    def __init__(self, run: Run) -> None:
        self.pairs = pairs(run)

    @cached_property
    def figure(self) -> Figure | None:
        """Its plots."""
        data = mismatch_plots(self.pairs)
        return Figure("plots", data, "fig-answer", PLOTS, of=self) if data else None


def _table(told: Sequence[Pair], **more: Any) -> Table:
    def interval(f: Figures) -> str:
        ends = f.k3_interval
        return f"{ends[0]:.1e} to {ends[1]:.1e}" if ends and f.differ else "–"

    def of(text: Callable[[Figures], str]) -> Callable[[Pair], Inline]:
        return lambda p: text(p.figures) if p.figures else "–"

    def seconds(p: Pair) -> str:
        return f"{p.cost.sample_seconds:.1f} + {p.cost.train_seconds:.1f}" if p.cost else "–"

    columns: dict[str, tuple[str, Callable[[Pair], Inline]]] = {
        "arm": ("nowrap", lambda p: Bit(one_line(p.impl, 60), "code")),
        "other bits": ("num", of(lambda f: f"{counted(f.differ)} of {counted(f.tokens)}")),
        "K3": ("num", of(lambda f: f"{f.k3:.1e}" if f.k3 else "0")),
        "95%": ("num", of(interval)),
        "KL, whole rows": ("num", lambda p: f"{p.kl:.1e}" if p.rows_differ else "0" if p.whole else "–"),
        "outside 1%": ("num", of(lambda f: f"{f.outside / f.tokens:.1%}")),
        "ratios": ("num", of(lambda f: "{:.3f} to {:.3f}".format(*f.ratios))),
        "|d|: middle, 99%, 99.9%": ("num", of(lambda f: ", ".join(f"{f.tails[q]:.1e}" for q in (0.5, 0.99, 0.999)))),
        "mean of exp |d|": ("num", of(lambda f: f"{f.mult_prob_error:.4f}")),
        "4,096 tokens in 0.5 to 2": ("num", of(lambda f: f"{f.long[1]:.1%}")),
        "s, sample + train": ("num", seconds),
    }
    if not any(p.whole for p in told):
        del columns["KL, whole rows"]
    return grid(told, columns, unshown=list(columns)[list(columns).index("ratios") :], **more)


def _kinds(pair: Pair, **more: Any) -> Table:
    named = pair.named
    best: dict[tuple[str, str], MismatchKind] = {(k.cause, k.side): k for k in reversed(pair.kinds)}
    rows = sorted(best.values(), key=lambda k: (k is not named, k.left))[:_KINDS_MOST]
    columns: dict[str, tuple[str, Callable[[MismatchKind], Inline]]] = {
        "hypothesis": ("wide", lambda k: (Bit(k.cause, "bad"), " (named)") if k == named else Bit(k.cause)),
        "side": ("nowrap", lambda k: k.side),
        "fitted": ("wide", lambda k: Bit(k.fitted)),
        "K3 left": ("num", lambda k: f"{k.left:.1e}" if k.left else "0"),
        "taken away": ("num", lambda k: f"{min(1.0, max(0.0, removed(k))):.0%}" if k.k3 > k.floor else "–"),
        "very bits": ("num", lambda k: f"{k.exactly:.0%}" if k.exactly else "–"),
    }
    return grid(rows, columns, **more)


def _bins(bins: Sequence[Bin], name: str, form: str) -> Table:
    columns: dict[str, tuple[str, Callable[[Bin], Inline]]] = {
        name: ("nowrap", lambda b: f"{b.low:{form}} to {b.high:{form}}" if b.high > b.low else f"{b.low:{form}}"),
        "tokens": ("num", lambda b: counted(b.tokens)),
        "K3": ("num", lambda b: f"{b.k3:.1e}"),
        "mean |d|": ("num", lambda b: f"{b.mean_abs:.1e}"),
        "largest |d|": ("num", lambda b: f"{b.max_abs:.1e}"),
    }
    return grid(bins, columns)


def mismatch_blocks(sides: Sides, number: int, opened: bool) -> list[Block]:
    """The arms, the pictures, the hypotheses, and by position and probability."""
    place, told = f"mismatch-{number}", sides.pairs
    parts: list[Block] = [_table(told, only=BRIEF + WHOLE)]
    parts += [replace(sides.figure, id=f"{place}-plot")] if sides.figure else []
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
