"""Classes of equal bits over what varied: runs of values, kernels of each class, and the same as one line of text.

Letters number the classes of one row by first appearance. They mean nothing across rows: A of stock and A of invariant
are different bits unless something else says so.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from nondet.core.records import Row, Value
from nondet.errors import one_line

__all__ = [
    "ClassInfo",
    "Segment",
    "axis_name",
    "classes",
    "kernel_sets",
    "letter",
    "map_text",
    "segments",
    "short_kernel",
    "value_range",
]

_ROW_OPERATORS = {
    "linear",
    "matmul",
    "grouped_matmul",
    "rms_norm",
    "rms_norm_residual",
    "softmax",
    "log_softmax",
    "logsumexp",
    "sum",
    "mean",
}


@dataclass(frozen=True)
class Segment:
    """Neighbouring values (in the order tried) of one class and one set of kernels.

    Attributes:
        start, stop: Indices into `Row.values`, stop excluded.
        kernels: Index into the row's distinct kernel sets, by first appearance; -1 where nothing was profiled.
    """

    label: int
    start: int
    stop: int
    first: Value
    last: Value
    kernels: int


@dataclass(frozen=True)
class ClassInfo:
    """One class of one row.

    Attributes:
        ranges: Its values as text: "1-3, 8-15"; empty where values are not listed.
        kernels: Sets of kernels that gave it, each with its number in the row (from 1, by first appearance).
    """

    label: int
    letter: str
    count: int
    ranges: str
    kernels: tuple[tuple[int, tuple[str, ...]], ...]


def letter(label: int) -> str:
    """0 -> A, 25 -> Z, 26 -> AA, as columns of a spreadsheet."""
    out = ""
    label += 1
    while label:
        label, digit = divmod(label - 1, 26)
        out = chr(ord("A") + digit) + out
    return out


def axis_name(row: Row) -> str:
    """What the values are called: M for the rows of a product or a row operator, else what varied."""
    if row.varied in ("batch_size", "class") and row.operator in _ROW_OPERATORS:
        return "M"
    return one_line(row.varied.replace("_", " "), 40)


def kernel_sets(row: Row) -> list[tuple[str, ...]]:
    """Distinct sets of kernels, by first appearance."""
    return [tuple(names) for names in row.kernel_sets]


def segments(row: Row) -> list[Segment]:
    """Run-length form of values, labels and kernels; empty where values are not listed."""
    kernels = row.kernels or [-1] * len(row.labels)
    runs: list[Segment] = []
    start = 0
    for i in range(1, len(row.labels) + 1):
        if i == len(row.labels) or (row.labels[i], kernels[i]) != (row.labels[start], kernels[start]):
            runs.append(Segment(row.labels[start], start, i, row.values[start], row.values[i - 1], kernels[start]))
            start = i
    return runs


def classes(row: Row, most_ranges: int = 12) -> list[ClassInfo]:
    """Every class with its size, its values and its kernels."""
    sets = kernel_sets(row)
    runs = segments(row)
    out = []
    for label, count in enumerate(row.class_sizes):
        mine = [s for s in runs if s.label == label]
        used = tuple((i + 1, sets[i]) for i in dict.fromkeys(s.kernels for s in mine) if i >= 0)
        out.append(ClassInfo(label, letter(label), count, _ranges(_merge(mine), most_ranges), used))
    return out


def _merge(runs: Sequence[Segment]) -> list[tuple[Value, Value]]:
    """Join neighbours that differ in kernels alone."""
    merged: list[tuple[int, Value, Value]] = []
    for s in runs:
        if merged and merged[-1][0] == s.start:
            merged[-1] = (s.stop, merged[-1][1], s.last)
        else:
            merged.append((s.stop, s.first, s.last))
    return [(first, last) for _, first, last in merged]


def value_range(first: Value, last: Value) -> str:
    """As "1-3"; names with dots between."""
    if first == last:
        return one_line(str(first), 60)
    join = "-" if isinstance(first, int) and isinstance(last, int) and 0 <= first < last else " … "
    return f"{one_line(str(first), 60)}{join}{one_line(str(last), 60)}"


def _ranges(runs: Sequence[tuple[Value, Value]], most: int) -> str:
    text = ", ".join(value_range(first, last) for first, last in runs[:most])
    return text + (f" and {len(runs) - most} more ranges" if len(runs) > most else "")


def map_text(row: Row, most: int = 8) -> str:
    """ "M 1-3: A | 4-64: B (nvjet_splitK)": the map on one line, a kernel named where it first appears with a class.

    Without listed values: "102 classes, the largest 812 of 10000".
    """
    if row.distinct > 1 and (not row.labels or row.varied == "run"):  # which run gave which says nothing
        return f"{len(row.class_sizes)} classes, the largest {max(row.class_sizes)} of {row.trials}"
    if not row.labels:
        return f"all {row.trials}: A" if row.class_sizes else ""
    sets = kernel_sets(row)
    parts: list[tuple[int, Value, Value, int]] = []  # label, first, last, kernels
    for s in segments(row):
        if parts and parts[-1][0] == s.label:
            parts[-1] = (s.label, parts[-1][1], s.last, parts[-1][3])
        else:
            parts.append((s.label, s.first, s.last, s.kernels))
    words, named = [], set()
    for label, first, last, kernels in parts[:most]:
        word = f"{value_range(first, last)}: {letter(label)}"
        if kernels >= 0 and (label, kernels) not in named and row.distinct > 1:
            named.add((label, kernels))
            word += f" ({' + '.join(short_kernel(k) for k in sets[kernels])})"
        words.append(word)
    rest = f" | … {len(parts) - most} more" if len(parts) > most else ""
    return f"{axis_name(row)} {' | '.join(words)}{rest}"


def short_kernel(name: str, limit: int = 56) -> str:
    """A kernel's name without return type, namespaces, template and call arguments: hundreds of characters."""
    plain = one_line(name, 4000)
    head = plain.replace("(anonymous namespace)::", "")
    while (shorter := re.sub(r"<[^<>]*>", "", head)) != head:
        head = shorter
    head = re.split(r"[<(]", head, maxsplit=1)[0].strip()
    head = head.rsplit("::", 1)[-1].rsplit(" ", 1)[-1] or plain
    return head if len(head) <= limit else head[: limit - 1] + "…"
