"""Classes of equal bits: runs of values, each class's kernels and their kind, and the geometry of class maps."""

from __future__ import annotations

import functools
import itertools
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from nondet.core.records import Row, Value
from nondet.errors import one_line
from nondet.reports.plots import WIDTH, Tick

# The kind of a device kernel is what its name shows and no more: a tile whose name shows no split may still add in
# another order than another tile. `docs/classes.md` has what each pattern usually means. The first counts whose pattern
# any name of a set has: a split decides the order wherever it shows.
_PATTERNS = {
    "split": r"split_?k(?!v)|stream_?k|splitkv.*combine|merge_(?:all_)?kernel|combine_kernel",
    "GEMV": r"gemv|gemmSN",
    "tile": r"gemm|nvjet|xmma|cutlass|matmul|flash|fmha|sdpa|attend|prefill|decode_kernel|grouped",
    "atomics": r"indexFunc|scatter_gather|atomic|index_put",
    "row reduction": r"softmax|layer_?norm|rms_norm|reduce_kernel|reduction|logsumexp|cross_entropy|sum|mean",
}
KINDS = {
    "split": "K, or the keys, cut into parts that are added afterwards (split-K)",
    "GEMV": "a matrix-vector kernel, for one row or a few",
    "tile": "tiles of the result; the name shows no split",
    "row reduction": "one row is summed by a block of threads",
    "atomics": "added in the order in which threads arrive",
    "other": "the name shows no order",
    "not seen": "no profiler saw kernels here, as on a CPU",
}


def kind_of(names: Sequence[str]) -> str:
    """The kind of a set of kernels, by the one that decides its order."""
    found = (kind for kind in _PATTERNS if any(_is_of(kind, name) for name in names))
    return next(found, "other") if names else "not seen"


@functools.cache  # thousands of results have the same few names
def _is_of(kind: str, name: str) -> bool:
    return re.search(_PATTERNS[kind], name, re.IGNORECASE) is not None


# Letters number the classes of one row by first appearance. They mean nothing across rows: A of stock and A of
# invariant are different bits unless a comparison shows otherwise.

_ROW_OPERATORS = {"linear", "matmul", "grouped_matmul", "rms_norm", "rms_norm_residual", "softmax", "log_softmax"}
_ROW_OPERATORS |= {"logsumexp", "sum", "mean"}


class Segment(NamedTuple):
    """Consecutive values of one class and one set of kernels: indices into `Row.values`, `stop` excluded, and into the
    row's distinct kernel sets, by first appearance (-1 where nothing was profiled)."""

    label: int
    start: int
    stop: int
    first: Value
    last: Value
    kernels: int


@dataclass(frozen=True)
class ClassInfo:
    """One class of one row: its values as text ("1-3, 8-15"; empty where not listed), and its sets of kernels."""

    label: int
    count: int
    ranges: str
    kernels: Sequence[Sequence[str]]


def letter(label: int) -> str:
    """0 -> A, 25 -> Z, 26 -> AA, like the columns of a spreadsheet."""
    return (letter(label // 26 - 1) if label > 25 else "") + chr(ord("A") + label % 26)


def axis_name(row: Row) -> str:
    """What the values are called: M for the rows of a product or a row operator, else what varied."""
    if row.varied in ("batch_size", "class") and row.operator in _ROW_OPERATORS:
        return "M"
    return one_line(row.varied.replace("_", " "), 40)


def segments(row: Row) -> list[Segment]:
    """Run-length form of values, labels and kernels; empty where values are not listed."""
    kernels = row.kernels or [-1] * len(row.labels)
    runs: list[Segment] = []
    for (label, names), members in itertools.groupby(zip(row.labels, kernels, strict=True)):
        start = runs[-1].stop if runs else 0
        stop = start + sum(1 for _ in members)
        runs.append(Segment(label, start, stop, row.values[start], row.values[stop - 1], names))
    return runs


def _stretches(row: Row) -> list[list[Segment]]:
    return [list(run) for _, run in itertools.groupby(segments(row), lambda s: s.label)]


def classes(row: Row) -> list[ClassInfo]:
    """Every class with its size, its values and its kernels."""
    stretches, out = _stretches(row), []
    for label, count in enumerate(row.class_sizes):
        mine = [run for run in stretches if run[0].label == label]
        sets = dict.fromkeys(s.kernels for run in mine for s in run if s.kernels >= 0)
        ranges = ", ".join(value_range(run[0].first, run[-1].last) for run in mine[:_RANGES_MOST])
        ranges += f" and {len(mine) - _RANGES_MOST} more ranges" if len(mine) > _RANGES_MOST else ""
        out.append(ClassInfo(label, count, ranges, [row.kernel_sets[i] for i in sets]))
    return out


def value_range(first: Value, last: Value) -> str:
    """As "1-3"; names with dots between."""
    if first == last:
        return one_line(str(first), 60)
    join = "-" if isinstance(first, int) and isinstance(last, int) and 0 <= first < last else " … "
    return f"{one_line(str(first), 60)}{join}{one_line(str(last), 60)}"


def map_text(row: Row, most: int = 8) -> str:
    """ "M 1-3: A | 4-64: B (nvjet_splitK)": the map on one line, a kernel named where it first appears with a class.
    Without listed values: "102 classes, the largest 812 of 10000"."""
    if row.distinct > 1 and (not row.labels or row.varied == "run"):  # which run gave which shows nothing
        largest = f", the largest {max(row.class_sizes)} of {row.trials}" if row.class_sizes else ""
        return f"{row.distinct} classes{largest}"
    if not row.labels:
        return f"all {row.trials}: A" if row.class_sizes else ""
    parts = _stretches(row)
    if len(parts) == most + 1:
        most += 1  # "… 1 more" would be as long as what it hides
    words, named = [], set()
    for run in parts[:most]:
        label, kernels = run[0].label, run[0].kernels
        words.append(f"{value_range(run[0].first, run[-1].last)}: {letter(label)}")
        if kernels >= 0 and (label, kernels) not in named and row.distinct > 1:
            named.add((label, kernels))
            words[-1] += f" ({_names([row.kernel_sets[kernels]])})"
    words += [f"… {len(parts) - most} more"] if len(parts) > most else []
    return f"{axis_name(row)} {' | '.join(words)}"


@functools.cache
def short_kernel(name: str, limit: int = 56) -> str:
    """A kernel's name without return type, namespaces, template and call arguments: hundreds of characters. A longer
    name is cut in its middle, because names of one library differ at their ends."""
    plain = one_line(name, 4000)
    head = plain.replace("(anonymous namespace)::", "")
    while (shorter := re.sub(r"<[^<>]*>", "", head)) != head:
        head = shorter
    head = re.split(r"[<(]", head, maxsplit=1)[0].strip()
    head = head.rsplit("::", 1)[-1].rsplit(" ", 1)[-1] or plain
    return head if len(head) <= limit else f"{head[: limit - 16]}…{head[-15:]}"


# Geometry of class maps: only numbers, in the units of `plots`; templates draw them.

_RANGES_MOST = 12  # of a class in a table
_LANES_MOST = 64
_NAMED_MOST = 16  # most lanes that are labelled with kernels
# Segments of a lane that are drawn one by one; beyond them a lane is one shape per kind of kernel.
_CELLS_MOST = 120


def map_figures(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """The data of the page's macro: rows with listed values, grouped where they tried the same values, over one axis.
    Each implementation has a lane per class, with the class's kernels. Rows with too many classes are left out."""
    groups: dict[tuple[Value, ...], list[Row]] = {}
    for row in rows:
        if row.labels and row.distinct <= _LANES_MOST:
            groups.setdefault(tuple(row.values), []).append(row)
    figures = []
    for values, group in groups.items():
        marks, scale = _marks(values, group[0].varied)
        panels = []
        for row in group:
            high = 16.0 if row.distinct <= _NAMED_MOST else 6.0 if row.distinct <= 32 else 4.0
            lanes = [
                {"label": c.label, "height": high, "kernels": _names(c.kernels), "cells": _cells(row, c.label, marks)}
                for c in classes(row)
            ]
            panels.append({"row": row, "lanes": lanes})
        ticks = _value_ticks(values, marks, group)
        figures.append({"panels": panels, "ticks": ticks, "axis": axis_name(group[0]), "scale": scale})
    return figures


@dataclass(frozen=True)
class ProductMap:
    """Classes over M and one other size, `axis`: a line for each row that tried every M, by rising size."""

    axis: str
    rows: dict[str, tuple[Row, ...]]

    @property
    def texts(self) -> list[tuple[str, str]]:
        """(implementation, "N 20-320: M 1: A | 2-128: B"): equal lines are merged."""
        lines = []
        for impl, rows in self.rows.items():
            ranges: dict[str, list[str]] = {}
            for text, run in itertools.groupby(rows, lambda row: map_text(row) + _unequal(row)):
                sizes = [row.shape[self.axis] for row in run]
                ranges.setdefault(text, []).append(value_range(sizes[0], sizes[-1]))
            lines += [(impl, f"{self.axis} {', '.join(found)}: {text}") for text, found in ranges.items()]
        return lines

    @property
    def drawn(self) -> dict[str, Any]:
        """Like an entry of `map_figures`: a lane per row, or one if rows have one class each; M on a log scale."""
        every = [row for rows in self.rows.values() for row in rows]
        values = max((row.values for row in every), key=len)
        places = [WIDTH * math.log2(m) / math.log2(len(values) + 1) for m in range(1, len(values) + 2)]
        marks = list(itertools.pairwise(places))
        panels = []
        for rows in self.rows.values():
            one = all(row.distinct == 1 and row.values == values for row in rows)
            lanes = []
            for row in rows[: 1 if one else None]:
                size = row.shape[self.axis]
                at = f"every {self.axis}" if one else f"{self.axis} {size}"
                cells = [cell for label in range(row.distinct) for cell in _cells(row, label, marks)]
                cells = [cell | {"words": f"{at}, {cell['words']}"} for cell in cells]
                lanes.append({"name": "all" if one else f"{size:,}", "height": 16.0, "cells": cells})
            panels.append({"row": max(rows, key=lambda row: row.distinct), "lanes": lanes})
        return {"panels": panels, "ticks": _value_ticks(values, marks, every), "axis": "M", "scale": "log2 scale"}


def product_map(rows: Sequence[Row]) -> ProductMap | None:
    """The map of these rows, if they tried every M up to some; the row is checked, because a file may be edited."""
    axes = [row.extra["map"].get("axis") for row in rows if isinstance(row.extra.get("map"), dict)]
    axis = next((axis for axis in ("N", "K") if axes and axes == [axis] * len(rows)), "")
    lines: dict[str, list[Row]] = {}
    for row in rows if axis else ():
        if axis in row.shape and row.values and row.values == list(range(1, len(row.labels) + 1)):
            lines.setdefault(row.impl, []).append(row)
    sizes = {impl: tuple(sorted(found, key=lambda row: row.shape[axis])) for impl, found in lines.items()}
    return ProductMap(axis, sizes) if sizes else None


def _unequal(row: Row) -> str:
    found = row.extra.get("map")
    labels = found.get("unequal") if isinstance(found, dict) else None
    known = [i for i in labels if isinstance(i, int) and 0 <= i < row.distinct] if isinstance(labels, list) else []
    return f"; equal rows of one call got unequal bits in {', '.join(map(letter, known))}" if known else ""


def _marks(values: Sequence[Value], varied: str) -> tuple[list[tuple[float, float]], str]:
    """Left and right edge of each value's mark, in thousandths, and what the axis is besides a list of values. On a log
    axis a mark covers only its own value: what was not tried is left empty."""
    count = len(values)
    numbers = [v for v in values if isinstance(v, int)]
    rising = len(numbers) == count and all(a < b for a, b in itertools.pairwise(numbers))
    if varied == "run" or not rising or numbers[0] < 1 or numbers[-1] < 4 * numbers[0]:
        gap = min(4.0, WIDTH / count / 8)
        return [(WIDTH * i / count + gap, WIDTH * (i + 1) / count - gap) for i in range(count)], ""
    places = [math.log2(v / numbers[0]) for v in numbers]
    least = min(b - a for a, b in itertools.pairwise(places)) / places[-1]
    half = min(20.0, max(4.0, 0.4 * WIDTH * least))
    middles = [half + (WIDTH - 2 * half) * p / places[-1] for p in places]
    return [(x - half, x + half) for x in middles], "log2 scale"


def _names(used: Sequence[Sequence[str]]) -> str:
    """Of the first set the two that decide most, because a kernel that only picks the rows may come first."""
    if not used:
        return ""
    ranked = sorted(dict.fromkeys(used[0]), key=lambda name: kind_of([name]) == "other")
    names = " + ".join(dict.fromkeys(short_kernel(name, 36) for name in ranked[:2])) or "no kernel"
    return names + (f", {len(used) - 1} more" if len(used) > 1 else "")


def _cells(row: Row, label: int, marks: Sequence[tuple[float, float]]) -> list[dict[str, Any]]:
    """A shape and its description for consecutive values of one class and one set of kernels. Where they are too many
    to be shown one by one, one shape for each kind of kernel."""
    mine = [s for s in segments(row) if s.label == label]
    shapes: dict[str, tuple[str, list[tuple[float, float]]]] = {}
    for i, s in enumerate(mine):
        kind = kind_of(row.kernel_sets[s.kernels] if s.kernels >= 0 else ())
        if len(mine) > _CELLS_MOST:
            place, words = kind, f"class {letter(s.label)}, {kind}"
        else:
            place, words = str(i), f"{axis_name(row)} {value_range(s.first, s.last)}: class {letter(s.label)}"
            if s.kernels >= 0:
                names = dict.fromkeys(short_kernel(k, 40) for k in row.kernel_sets[s.kernels][:2])
                words += f", {kind}, {' + '.join(names) or 'no kernel'}"
        parts = shapes.setdefault(place, (one_line(words, 160), []))[1]
        for left, right in marks[s.start : s.stop]:
            if parts and left - parts[-1][1] < 0.5:  # no gap would show
                parts[-1] = (parts[-1][0], right)
            else:
                parts.append((left, right))
    return [{"label": label, "spans": parts, "words": words} for words, parts in shapes.values()]


def span_path(cells: Sequence[tuple[float, float]], height: float) -> str:
    """Bars of that height, as a page draws them."""
    return "".join(f"M{left:.1f} 1H{right:.1f}V{height - 1:g}H{left:.1f}Z" for left, right in cells)


def _value_ticks(values: Sequence[Value], marks: Sequence[tuple[float, float]], rows: Sequence[Row]) -> list[Tick]:
    """Those of borders first, then of the ends and of round values, as far as their texts have room."""
    ticks: list[Tick] = []
    count, named = len(values), any(isinstance(v, str) for v in values)
    if named and sum(len(str(v)) for v in values) > 60:
        return ticks  # names, not numbers: all of them or none
    borders = {run[0].start for row in rows for run in _stretches(row)[1:]}
    wanted: Sequence[int] = range(count)
    if count > 12 and not named:
        wanted = range(0, count, -(-count // 8))
        if marks[1][0] - marks[0][0] > 1.5 * (marks[-1][0] - marks[-2][0]):  # logarithmic
            wanted = [i for i, v in enumerate(values) if isinstance(v, int) and v & (v - 1) == 0]
    for i in dict.fromkeys([*sorted(borders), 0, count - 1, *wanted]):
        text, x = one_line(str(values[i]), 24), sum(marks[i]) / 2
        if all(abs(x - t.x) >= 15 * (len(text) + len(t.text)) + 20 for t in ticks):  # half widths, on a phone
            ticks.append(Tick(x, text, i in borders))
    return sorted(ticks, key=lambda t: t.x)
