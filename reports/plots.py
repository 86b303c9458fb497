"""Plots as numbers: scales, marks and panels, which a page's macro and `nondet.export.figures` draw.

Positions are shares of a plot's width and, from its foot, of its height. On a page they are thousandths of the width
and hundredths of the height, so that a plot stretches to any screen while its text does not.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

WIDTH = 1000.0


class Tick(NamedTuple):
    """A mark on the horizontal axis, in thousandths, its text, and whether a class ends there and another begins."""

    x: float
    text: str
    border: bool = False


class Scale(NamedTuple):
    """The texts along an axis, each with its value, and the position of a value: 0 at the foot, 1 at the end."""

    marks: Mapping[str, float]
    at: Callable[[float], float]

    @property
    def ticks(self) -> list[Tick]:
        """Along the horizontal axis."""
        return [Tick(WIDTH * self.at(value), text) for text, value in self.marks.items()]

    @property
    def levels(self) -> list[tuple[str, float]]:
        """(text, height) of the horizontal lines of a grid."""
        return [(text, self.at(value)) for text, value in self.marks.items()]


Points = Sequence[tuple[float, float]]


class Mark(NamedTuple):
    """Points of one style: curve, thin (a seed's curve), spot, band, hit (where words are read) or limit. `impl` is the
    number of its implementation, whose colour it has; `words` appear under the pointer."""

    style: str
    impl: int | None
    points: Points
    words: str = ""

    @property
    def path(self) -> str:
        """As a page draws it: spots separately, other points joined."""
        places = [f"{WIDTH * x:.1f} {100.0 - 100.0 * y:.2f}" for x, y in self.points]
        if self.style == "spot":
            return " ".join(f"M{place}h0" for place in places)
        return f"M{' '.join(places)}{'Z' if self.style == 'band' else ''}"


class Plot(NamedTuple):
    """Marks over the levels of a grid; `unit` is that of the levels, `label` the text for a screen reader."""

    unit: str
    height: int
    levels: Sequence[tuple[str, float]]
    marks: Sequence[Mark]
    label: str


class Panel(NamedTuple):
    """Plots above one horizontal axis."""

    title: str
    plots: Sequence[Plot]
    ticks: Sequence[Tick]
    axis: str


class Plots(NamedTuple):
    """Panels with one legend: (implementation, the text after its name); `limit` says what a dotted line is."""

    impls: Sequence[tuple[str, str]]
    panels: Sequence[Panel]
    limit: str = ""
    caption: str = ""


def linear(low: float, high: float, marks: Mapping[str, float] | None = None) -> Scale:
    """A scale that draws values beyond its ends at them; without marks its ends and its middle are labelled."""
    span = high - low or 1.0
    written = {f"{v:g}": v for v in (low, (low + high) / 2, high)} if marks is None else marks
    return Scale(written, lambda value: (min(max(value, low), high) - low) / span)


def decades(values: Iterable[float], foot: float = 0.0) -> Scale:
    """Powers of ten around all values above 0; the others are at the foot, which takes that share of the height."""
    above = [math.log10(v) for v in values if 0 < v < math.inf]
    low = max(-16, math.floor(min(above, default=-6.0)))
    high = max(low + 1, math.ceil(max(above, default=-3.0) - 1e-9))

    def at(value: float) -> float:
        if value <= 0:
            return 0.0
        return foot + (1.0 - foot) * (min(high, max(low, math.log10(value))) - low) / (high - low)

    written = {"1" if e == 0 else f"1e{e}": 10.0**e for e in range(low, high + 1, max(1, (high - low) // 3))}
    return Scale({"0": 0.0} | written if foot else written, at)


def doublings(low: float, high: float) -> Scale:
    """Powers of two, about seven of them written."""
    first, span = math.log2(low), math.log2(high / low) or 1.0
    powers = range(math.ceil(first), math.floor(math.log2(high)) + 1)
    written = {f"{2**e:,}": 2.0**e for e in powers[:: max(1, -(-len(powers) // 7))]}
    return Scale(written, lambda value: (math.log2(max(low, value)) - first) / span)


def placed(points: Iterable[tuple[float, float]], across: Scale, up: Scale) -> Points:
    """The positions of these values."""
    return [(across.at(x), up.at(y)) for x, y in points]


def limit(y: float, up: Scale) -> Mark:
    """A dotted line across."""
    return Mark("limit", None, [(0.0, up.at(y)), (1.0, up.at(y))])
