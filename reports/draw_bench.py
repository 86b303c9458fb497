"""Geometry of bench plots: share of the limit over M, where the jigsaw of tiles shows, and the ratio under it.

Places are in thousandths of the plot's width and hundredths of its height, as in `draw_samples`. The share, not the
rate, is drawn: over M = 1 ... 8192 the rate spans three decades, in which no jigsaw could be seen, while the share has
the limit as a straight line on top.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from nondet.bench.summary import Comparison, Section, is_stock
from nondet.errors import one_line
from nondet.reports.draw_classes import WIDTH, Tick

__all__ = ["BenchFigure", "BenchLine", "BenchPanel", "bench_figure"]

# Fewer sizes than this are a table, not a curve.
_POINTS_LEAST = 4
_STOCK = "best stock"


@dataclass(frozen=True)
class BenchLine:
    """One implementation's line; `index` numbers implementations alike in every panel."""

    impl: str
    index: int
    path: str


@dataclass(frozen=True)
class BenchPanel:
    """One group: shares above, ratios below.

    Attributes:
        limit: Height of the limit's line.
        levels, ratio_levels: (text, height) of the grid lines.
        at_one: Height of ratio 1.
    """

    title: str
    lines: tuple[BenchLine, ...]
    ratios: tuple[BenchLine, ...]
    ticks: tuple[Tick, ...]
    limit: float
    levels: tuple[tuple[str, float], ...]
    at_one: float
    ratio_levels: tuple[tuple[str, float], ...]


@dataclass(frozen=True)
class BenchFigure:
    """The panels of one section, and its implementations in the order of their lines."""

    axis: str
    impls: tuple[str, ...]
    panels: tuple[BenchPanel, ...]


def bench_figure(section: Section) -> BenchFigure | None:
    """A panel for each group with enough sizes on its axis; None where there is none."""
    impls = (_STOCK, *(impl for impl in section.impls if not is_stock(impl)))
    wide = {title: rows for title, rows in section.groups.items() if len(_sizes(rows)) >= _POINTS_LEAST}
    if not wide:
        return None
    panels = tuple(_panel(title, rows, impls) for title, rows in wide.items())
    return BenchFigure(section.cells[0].axis, tuple(one_line(i, 80) for i in impls), panels)


def _sizes(rows: Sequence[tuple[Comparison, ...]]) -> list[int]:
    return sorted({row[0].cell.shape[row[0].cell.axis] for row in rows})


def _panel(title: str, rows: Sequence[tuple[Comparison, ...]], impls: Sequence[str]) -> BenchPanel:
    sizes = _sizes(rows)
    first, span = math.log2(sizes[0]), math.log2(sizes[-1] / sizes[0]) or 1.0

    def place(size: int) -> float:
        return WIDTH * (math.log2(size) - first) / span

    shares: dict[str, list[tuple[int, float]]] = {impl: [] for impl in impls}
    ratios: dict[str, list[tuple[int, float]]] = {impl: [] for impl in impls}
    for row in sorted(rows, key=lambda r: r[0].cell.shape[r[0].cell.axis]):
        for c in row:
            name = _STOCK if c.timed is c.baseline else c.timed.impl
            size = c.cell.shape[c.cell.axis]
            if name in shares and c.share is not None:
                shares[name].append((size, c.share))
            if name in ratios and name != _STOCK and c.ratio is not None:
                ratios[name].append((size, c.ratio))
    top = max([1.0, *(share for points in shares.values() for _, share in points)]) * 1.04
    drawn = [ratio for points in ratios.values() for _, ratio in points]
    low, high = _span(drawn)

    def height(value: float, bottom: float, ceiling: float) -> float:
        return 100.0 - 100.0 * (min(max(value, bottom), ceiling) - bottom) / (ceiling - bottom)

    def path(points: Sequence[tuple[int, float]], bottom: float, ceiling: float) -> str:
        return "M" + " ".join(f"{place(size):.1f} {height(v, bottom, ceiling):.2f}" for size, v in points)

    def lines(points_of: dict[str, list[tuple[int, float]]], bottom: float, ceiling: float) -> tuple[BenchLine, ...]:
        return tuple(
            BenchLine(one_line(impl, 80), i, path(points_of[impl], bottom, ceiling))
            for i, impl in enumerate(impls)
            if len(points_of[impl]) > 1
        )

    return BenchPanel(
        title=one_line(title, 120),
        lines=lines(shares, 0.0, top),
        ratios=lines(ratios, low, high),
        ticks=tuple(_ticks(sizes, place)),
        limit=height(1.0, 0.0, top),
        levels=tuple((f"{share:.0%}", height(share, 0.0, top)) for share in (0.0, 0.5, 1.0)),
        at_one=height(1.0, low, high),
        ratio_levels=tuple((f"{x:.4g}", height(x, low, high)) for x in (low, 1.0, high)),
    )


def _span(ratios: Sequence[float]) -> tuple[float, float]:
    """The ratios' axis: tenths around all of them and 1, never tighter than 0.8 to 1.2."""
    low = min([0.8, *ratios])
    high = max([1.2, *ratios])
    return math.floor(low * 10.0 + 1e-9) / 10.0, math.ceil(high * 10.0 - 1e-9) / 10.0


def _ticks(sizes: Sequence[int], place: Callable[[int], float]) -> list[Tick]:
    """Powers of two, about seven of them."""
    first, last = math.ceil(math.log2(sizes[0])), math.floor(math.log2(sizes[-1]))
    step = max(1, -(-(last - first + 1) // 7))
    return [Tick(place(2**e), f"{2**e:,}") for e in range(first, last + 1, step)]
