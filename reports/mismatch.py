"""A sampler and a trainer as blocks of a report: an arm a row, what each hypothesis leaves, where tokens differ."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any

import numpy as np

from nondet.core.records import MismatchKind, Run
from nondet.errors import one_line
from nondet.mismatch.figures import Bin, Figures
from nondet.reports.classes import WIDTH, Tick
from nondet.reports.document import BRIEF, Bit, Block, Details, Figure, Inline, Paragraph, Table, grid
from nondet.reports.text import counted
from nondet.verdict.findings import Verdict, plural
from nondet.verdict.mismatch import KINDS, Pair, pairs, removed
from nondet.verdict.wording import phrase, words

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
    def figure(self) -> dict[str, Any] | None:
        """What the page's macro draws."""
        return mismatch_figure(self.pairs)


def mismatch_headline(verdicts: Sequence[Verdict]) -> str:
    """What each arm's verdict begins with, and of the first that differs what kind it is and where it begins.

    Without the last full stop.
    """
    said = "; ".join(f"{one_line(v.impl, 60)}: {phrase(v.counts[:1], brief=True)}" for v in verdicts)
    reasons = [r for v in verdicts for r in v.reasons]
    told = [next((words(r) for r in reasons if r.code in codes), "") for codes in (KINDS, ("mm-where",))]
    return " ".join([f"{said}.", *filter(None, told)]).removesuffix(".")


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
    place, data, told = f"mismatch-{number}", sides.figure if number > 1 else None, sides.pairs  # the first's is on top
    parts: list[Block] = [_table(told)]
    parts += [Figure("mismatch", data, f"{place}-plot", PLOTS)] if data else []
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
    return [
        _table(told, only=BRIEF),
        Details("Arms", parts, place, plural(len(told), "arm"), "arms", opened=opened, only="vmp"),
    ]


# Geometry of the plots. Places are in thousandths of the plot's width and hundredths of its height.

_Places = Callable[[float], float]


def mismatch_figure(told: Sequence[Pair]) -> dict[str, Any] | None:
    """What the page's macro draws: four panels over the arms that differ; None where none does."""
    shown = [(i, p.figures) for i, p in enumerate(told) if p.figures is not None and p.figures.differ]
    if not shown:
        return None
    probability = _decades([float(np.exp(min(f.sampler.min(), f.trainer.min()))) for _, f in shown] + [1.0])
    panels = [
        _panel("probability of each token", "trainer's", "sampler's", probability, probability, points=[
            (i, np.exp(f.sampler[::step]), np.exp(f.trainer[::step])) for i, f in shown
            for step in (max(1, f.tokens // _POINTS),)
        ]),
        _binned("mean |d| by the sampler's probability", "nats", "sampler's probability",
                [(i, [((b.low + b.high) / 2, b.mean_abs) for b in f.probabilities]) for i, f in shown], linear=True),
        _binned("K3 by position", "nats", "token of the rollout",
                [(i, [(b.low + 1, b.k3) for b in f.positions]) for i, f in shown], linear=False),
        _sequences(shown),
    ]  # fmt: skip
    steps = [(i, [(b.low, b.k3) for b in p.steps]) for i, p in enumerate(told) if p.steps]
    if steps:
        ends = [x for _, line in steps for x, _ in line]
        across, up = _linear(min(ends), max(ends)), _decades([y for _, line in steps for _, y in line])
        panels.append(_panel("K3 by step", "nats", "step of training", across, up, lines=steps))
    return {"impls": [one_line(p.impl, 60) for p in told], "panels": panels}


def _panel(
    title: str, unit: str, axis: str, across: _Scale, up: _Scale, points: Sequence[Any] = (), lines: Sequence[Any] = (),
    caps: Sequence[float] = (),
) -> dict[str, Any]:  # fmt: skip
    def at(x: float, y: float) -> str:
        return f"{across[1](x) * WIDTH / 100:.1f} {100 - up[1](y):.2f}"

    drawn = [(i, " ".join(f"M{at(x, y)}h0" for x, y in zip(xs, ys, strict=True))) for i, xs, ys in points]
    paths = [(i, "M" + " ".join(at(x, y) for x, y in line)) for i, line in lines if line]
    return {
        "title": title, "unit": unit, "axis": axis, "points": drawn, "lines": paths,
        "levels": [(text, 100 - place) for text, place in up[0]], "caps": [100 - up[1](c) for c in caps],
        "ticks": [Tick(place * WIDTH / 100, text) for text, place in across[0]],
    }  # fmt: skip


def _binned(title: str, unit: str, axis: str, lines: Sequence[Any], *, linear: bool) -> dict[str, Any]:
    up = _decades([y for _, line in lines for _, y in line])
    across = _linear(0.0, 1.0) if linear else _doublings(max(x for _, line in lines for x, _ in line))
    return _panel(title, unit, axis, across, up, lines=lines)


def _sequences(shown: Sequence[tuple[int, Figures]]) -> dict[str, Any]:
    most = max(1.2, *(math.exp(min(3.0, float(np.abs(f.sequences).max()))) for _, f in shown))
    high = math.log(most)
    longest = max(max(f.lengths) for _, f in shown)
    points = [
        (i, list(f.lengths)[::step], [min(high, float(v)) for v in np.abs(f.sequences)[::step]])
        for i, f in shown
        for step in (max(1, len(f.lengths) // _POINTS),)
    ]
    levels = [(f"{math.exp(v):.3g}", 100.0 * v / high) for v in (0.0, high / 2, high)]
    up = (levels, lambda v: 100.0 * v / high)
    caps = [math.log(c) for c in _CAPS if c <= most]
    title, axis = "ratio of each rollout, or its inverse", "tokens of the rollout"
    return _panel(title, f"the larger of both; caps {_CAPS[0]:g} and {_CAPS[1]:g} where in sight", axis,
                  _linear(0.0, float(longest)), up, points=points, caps=caps)  # fmt: skip


_Scale = tuple[list[tuple[str, float]], _Places]  # what is marked, and a value's place, in hundredths


def _linear(low: float, high: float) -> _Scale:
    def place(value: float) -> float:
        return 100.0 * (value - low) / (high - low)

    return [(f"{v:g}", place(v)) for v in (low, (low + high) / 2, high)], place


def _decades(values: Sequence[float]) -> _Scale:
    above = [math.log10(v) for v in values if 0 < v < math.inf]
    low = max(-16, math.floor(min(above, default=-1.0)))
    high = max(low + 1, math.ceil(max(above, default=0.0) - 1e-9))

    def place(value: float) -> float:
        return 100.0 * (min(high, max(low, math.log10(value) if value > 0 else low)) - low) / (high - low)

    step = max(1, (high - low) // 3)
    return [(f"1e{e}" if e else "1", place(10.0**e)) for e in range(low, high + 1, step)], place


def _doublings(most: float) -> _Scale:
    top = max(1.0, math.log2(most))
    marks = range(0, math.floor(top) + 1, max(1, math.floor(top) // 4))
    return [(f"{2**e:,}", 100.0 * e / top) for e in marks], lambda v: 100.0 * math.log2(max(1.0, v)) / top
