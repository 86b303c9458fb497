"""Geometry of class maps: numbers only; templates draw them.

Horizontal places are in thousandths of the plot's width, so that a plot stretches to any screen while its text doesn't.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

from nondet.reports.classmap import letter, segments
from nondet.result import Row, Value
from nondet.text import one_line

__all__ = ["WIDTH", "Lane", "MapFigure", "Panel", "Tick", "map_figures", "size_bar"]

WIDTH = 1000.0
_ORDINAL_MOST = 96  # so many values still get a cell each that the eye can tell apart
_LANES_MOST = 64
_BAR_MOST = 24


@dataclass(frozen=True)
class Tick:
    """A mark on the horizontal axis, in thousandths, and its text."""

    x: float
    text: str

    @property
    def anchor(self) -> str:
        """Text at the ends must not leave the plot."""
        return "start" if self.x < 25 else "end" if self.x > 975 else "middle"


@dataclass(frozen=True)
class Lane:
    """One class's lane: `path` fills the cells of its values."""

    label: int
    letter: str
    y: float
    height: float
    path: str

    @property
    def named(self) -> bool:
        """Whether the lane is high enough for its letter."""
        return self.height >= 10


@dataclass(frozen=True)
class Panel:
    """One implementation's lanes, and under them a strip of kernel sets: (x, width, number from 1)."""

    impl: str
    lanes: tuple[Lane, ...]
    height: float
    strip: tuple[tuple[float, float, int], ...]


@dataclass(frozen=True)
class MapFigure:
    """Panels of implementations that tried the same values, over one axis."""

    panels: tuple[Panel, ...]
    ticks: tuple[Tick, ...]
    scale: str


def map_figures(rows: Sequence[Row]) -> list[MapFigure]:
    """Rows with listed values, together where they tried the same. Rows of too many classes are left to `size_bar`."""
    groups: dict[tuple[Value, ...], list[Row]] = {}
    for row in rows:
        if row.labels and row.distinct <= _LANES_MOST:
            groups.setdefault(tuple(row.values), []).append(row)
    return [_map_figure(values, group) for values, group in groups.items()]


def _map_figure(values: tuple[Value, ...], rows: Sequence[Row]) -> MapFigure:
    edges, scale = _edges(values)
    return MapFigure(tuple(_panel(row, edges) for row in rows), tuple(_value_ticks(values, edges)), scale)


def _edges(values: Sequence[Value]) -> tuple[list[float], str]:
    """Left edges of all cells and the right edge of the last, in thousandths."""
    count = len(values)
    numbers = [v for v in values if isinstance(v, int)]
    rising = len(numbers) == count and all(a < b for a, b in itertools.pairwise(numbers))
    if count <= _ORDINAL_MOST or not rising or numbers[0] < 1:
        return [WIDTH * i / count for i in range(count + 1)], "every value tried has the same width"
    places = [math.log2(v) for v in numbers] + [math.log2(2 * numbers[-1] - numbers[-2])]
    span = places[-1] - places[0]
    return [WIDTH * (p - places[0]) / span for p in places], "log2 axis; a cell reaches to the next value tried"


def _panel(row: Row, edges: Sequence[float]) -> Panel:
    height = 16.0 if row.distinct <= 6 else 11.0 if row.distinct <= 16 else 6.0 if row.distinct <= 32 else 4.0
    runs = segments(row)
    cells: dict[int, list[tuple[float, float]]] = {}
    for s in runs:
        _extend(cells.setdefault(s.label, []), edges[s.start], edges[s.stop])
    lanes = tuple(
        Lane(label, letter(label), i * height, height, _cells_path(cells[label], i * height, height))
        for i, label in enumerate(sorted(cells))
    )
    strip: list[tuple[float, float, int]] = []
    if row.kernels:
        for s in runs:
            left, right, number = edges[s.start], edges[s.stop], s.kernels + 1
            if strip and strip[-1][2] == number:
                strip[-1] = (strip[-1][0], right - strip[-1][0], number)
            else:
                strip.append((left, right - left, number))
    return Panel(one_line(row.impl, 80), lanes, len(lanes) * height, tuple(strip))


def _extend(cells: list[tuple[float, float]], left: float, right: float) -> None:
    """Add a cell, at least a thousandth wide; join it to the last one if no gap would show."""
    right = max(right, left + 1.0)
    if cells and left - cells[-1][1] < 0.5:
        cells[-1] = (cells[-1][0], max(right, cells[-1][1]))
    else:
        cells.append((left, right))


def _cells_path(cells: Sequence[tuple[float, float]], y: float, height: float) -> str:
    return "".join(f"M{left:.1f} {y + 1:g}H{right:.1f}V{y + height - 1:g}H{left:.1f}Z" for left, right in cells)


def _value_ticks(values: Sequence[Value], edges: Sequence[float]) -> list[Tick]:
    """About eight, none on top of another. Names (not numbers) only where all fit."""
    count = len(values)
    if any(isinstance(v, str) for v in values):
        if sum(len(str(v)) for v in values) > 60:
            return []
        chosen = list(range(count))
    elif count <= 12:
        chosen = list(range(count))
    elif edges[1] - edges[0] > 1.5 * (edges[-1] - edges[-2]):  # logarithmic
        powers = {i for i, v in enumerate(values) if isinstance(v, int) and v & (v - 1) == 0}
        every = 1 if len(powers) <= 8 else 2
        chosen = sorted(powers)[::every]
    else:
        step = -(-count // 8)
        chosen = list(range(0, count, step))
    ticks: list[Tick] = []
    for i in sorted({*chosen, count - 1}):
        x = (edges[i] + edges[i + 1]) / 2
        if ticks and x - ticks[-1].x < max(45, 22 * len(str(values[i]))):  # a digit's width on a phone
            if i != count - 1 or len(ticks) == 1:
                continue
            ticks.pop()
        ticks.append(Tick(x, one_line(str(values[i]), 24)))
    return ticks


def size_bar(row: Row) -> list[tuple[float, float, int]]:
    """Class sizes side by side, the largest first: (x, width, label); label -1 holds all that would be too thin."""
    total = sum(row.class_sizes)
    ranked = sorted(range(len(row.class_sizes)), key=lambda i: -row.class_sizes[i])
    bars: list[tuple[float, float, int]] = []
    x = 0.0
    for label in ranked[:_BAR_MOST]:
        width = WIDTH * row.class_sizes[label] / total
        bars.append((x, width, label))
        x += width
    if len(ranked) > _BAR_MOST:
        bars.append((x, WIDTH - x, -1))
    return bars
