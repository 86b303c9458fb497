"""What was varied alone, as a table: distinct texts and traces along each axis, what followed the axis, where first.

The same in every report. Numbers in brackets are of the value that has most: there only the batch changes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from nondet.core.records import Role, Run, role_of
from nondet.core.traces import Trace, check_traces, read_traces
from nondet.errors import one_line, printable
from nondet.verdict.findings import plural, sort_impls
from nondet.verdict.samples import AxisTally, is_varied, tally_axes

_ROWS_MOST = 12  # of a terminal's table with a line for each axis and implementation


@dataclass(frozen=True)
class AxisCell:
    """One axis under one implementation.

    Attributes:
        traces, texts: "12 (7)": distinct over all values, and at the value with most.
        moved: "7 of 10": requests whose trace is not that of the same request at the base; "" where values may differ.
        first: The first generated token at which anything differed; None where nothing did.
        count: The traces that are drawn: over all values, or at the value with most.
        moves: Whether requests followed the axis, or, at one value, the batch.
    """

    traces: str
    texts: str
    moved: str
    first: int | None
    count: int
    moves: bool


@dataclass(frozen=True)
class AxisLine:
    """One axis.

    Attributes:
        values: Those that took effect, the base's first.
        unproven: The others.
        proofs: (value, implementation, took effect, figures) of each.
        cells: By implementation; none where nothing was run, see `note`.
    """

    axis: str
    changes: str
    held: bool
    values: tuple[str, ...]
    unproven: tuple[str, ...]
    proofs: tuple[tuple[str, str, bool, str], ...]
    cells: Mapping[str, AxisCell]
    note: str


@dataclass(frozen=True)
class AxesTable:
    """All axes of a run.

    Attributes:
        n: Completions at each value.
        lengthened: Tokens by which the prompt was lengthened with its own completion.
    """

    impls: tuple[str, ...]
    lines: tuple[AxisLine, ...]
    n: int
    prompt: str
    lengthened: int

    @property
    def legend(self) -> str:
        """How the numbers are meant."""
        return (
            f"{self.n:,} completions at each value. Traces and texts: distinct over all values, in brackets at the "
            "value with most, where the batch alone changes. Where the axis may change the arithmetic itself (dtype, "
            "attention, threads; ranks, but for rank-free) only the brackets count against it. Moved: requests whose "
            "trace is not that of the same request at the base: of these the axis is the cause. First: the first "
            "generated token with other bits."
        )

    @property
    def made_longer(self) -> str:
        """A sentence on the prompt; "" where it was long enough."""
        if not self.lengthened:
            return ""
        return (
            f"The prompt is followed by {plural(self.lengthened, 'token')} of its own completion, to be cut and shared."
        )


def axes_table(run: Run) -> AxesTable | None:
    """The table of a run of `nondet sample --vary`; None for other runs.

    Raises:
        UserError: the side file is missing, malformed or another run's.
    """
    if not is_varied(run) or not run.axis_values:
        return None
    traces: dict[str, Trace] = {}
    if any(c.status == "ok" for c in run.completions):
        traces, _ = read_traces(Path(run.source))
        check_traces(run, traces)
    impls = tuple(sort_impls(record.impl for record in run.axis_values))
    tallies = {impl: {t.axis: t for t in tally_axes(run, impl)} for impl in impls}
    changes = {record.axis: record.changes for record in run.axis_values}
    names = dict.fromkeys(name for impl in impls for name in tallies[impl])
    lengthened = run.header.plan.get("prompt_lengthened_by", 0)
    return AxesTable(
        impls=impls,
        lines=tuple(_line(name, changes[name], {i: tallies[i].get(name) for i in impls}, traces) for name in names),
        n=max((v.n for of in tallies.values() for t in of.values() for v in t.values), default=0),
        prompt=str(run.header.plan["prompts"][0]["text"]) if run.header.plan.get("prompts") else "",
        lengthened=lengthened if isinstance(lengthened, int) else 0,
    )


def _line(axis: str, changes: str, tallies: Mapping[str, AxisTally | None], traces: Mapping[str, Trace]) -> AxisLine:
    there = {impl: tally for impl, tally in tallies.items() if tally is not None}
    proofs = [
        (record.value, impl, record.proven, record.proof)
        for impl, tally in there.items()
        for record in [*(v.record for v in tally.values), *tally.unproven]
    ]
    proven = dict.fromkeys(value for value, _, holds, _ in proofs if holds)
    lacking: dict[str, list[str]] = {}
    for value, impl, holds, _ in proofs:
        if not holds:
            lacking.setdefault(value, []).append(impl)
    return AxisLine(
        axis=axis,
        changes=changes,
        held=all(tally.held for tally in there.values()),
        values=tuple(proven),
        unproven=tuple(
            value if len(impls) == len(there) else f"{value} ({', '.join(impls)})" for value, impls in lacking.items()
        ),
        proofs=tuple(proofs),
        cells={impl: _cell(tally, traces) for impl, tally in there.items() if tally.tried},
        note=next((t.note for t in there.values() if t.note), ""),
    )


def _cell(tally: AxisTally, traces: Mapping[str, Trace]) -> AxisCell:
    together = [{d for v in tally.values for d in v.traces}]
    groups = together if tally.held else [set(v.traces) for v in tally.values]
    firsts = [_first(group, traces) for group in groups]
    return AxisCell(
        traces=f"{tally.traces:,} ({tally.traces_within:,})",
        texts=f"{tally.texts:,} ({tally.texts_within:,})",
        moved=f"{tally.moved:,} of {tally.compared:,}" if tally.held else "",
        first=min((f for f in firsts if f is not None), default=None),
        count=tally.traces if tally.held else tally.traces_within,
        moves=tally.moved > 0 if tally.held else tally.traces_within > 1,
    )


def _first(digests: Iterable[str], traces: Mapping[str, Trace]) -> int | None:
    """The first token at which any two of these traces differ, in the token or in the bits of its logprob."""
    group = [traces[digest] for digest in sorted(digests) if digest in traces]
    places = [_apart(group[0], other) for other in group[1:]]
    return min(places, default=None)


def _apart(a: Trace, b: Trace) -> int:
    length = min(len(a.token_ids), len(b.token_ids))
    other = np.asarray(a.token_ids[:length]) != np.asarray(b.token_ids[:length])
    if len(a.logprobs) >= 4 * length <= len(b.logprobs):
        other |= np.frombuffer(a.logprobs, dtype="<i4")[:length] != np.frombuffer(b.logprobs, dtype="<i4")[:length]
    return int(other.argmax()) if other.any() else length


def terminal_lines(table: AxesTable, width: int) -> list[str]:
    """The table: a line an axis, a head, the legend in short.

    Where not all implementations fit beside each other they stand below one another, or, with many axes, only stock and
    invariant are there.
    """
    lines = _columns(table, table.impls)
    if max(map(len, lines)) > width:
        if len(table.lines) * len(table.impls) <= _ROWS_MOST:
            lines = _rows(table)
        else:
            stock = [i for i in table.impls if role_of(i) in (Role.STOCK, Role.BACKEND)]
            cured = [i for i in table.impls if role_of(i) == Role.INVARIANT]
            lines = _columns(table, stock[:1] + cured[:1] if stock and cured else table.impls[:2])
    legend = f"traces: distinct over all values (at one value); {table.n:,} completions a value"
    if any(line.unproven for line in table.lines):
        legend += "; ?: unproven, not counted"
    return [printable(line)[:width] for line in [*lines, legend]]


def _values_count(line: AxisLine) -> str:
    return f"{len(line.values)}" + (f"+{len(line.unproven)}?" if line.unproven else "")


def _values_named(line: AxisLine) -> str:
    named = ", ".join(one_line(value, 20) for value in line.values)
    return named if len(named) <= 20 and not line.unproven else _values_count(line)


def _rows(table: AxesTable) -> list[str]:
    """A line an axis and implementation."""
    rows = [("varied", "values", "", "traces", "moved", "first")]
    for line in table.lines:
        for number, impl in enumerate(table.impls):
            cell = line.cells.get(impl)
            told = ("unproven" if line.cells else one_line(line.note, 40), "", "")
            if cell is not None:
                moved = cell.moved.replace(" of ", "/") or "may differ"
                told = (cell.traces, moved, "-" if cell.first is None else str(cell.first))
            head = ("", "") if number else (line.axis, _values_named(line))
            rows.append((*head, one_line(impl, 24), *told))
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return ["  ".join(f"{text:{w}}" for text, w in zip(row, widths, strict=True)).rstrip() for row in rows]


def _columns(table: AxesTable, impls: Sequence[str]) -> list[str]:
    rows = [["varied", "values"]]
    for line in table.lines:
        rows.append([line.axis, _values_count(line)])
    for impl in impls:
        cells = [[one_line(impl, 14), "moved", "first"]]
        for line in table.lines:
            cell = line.cells.get(impl)
            if cell is None:
                cells.append(["unproven" if line.cells else "", "", ""])
                continue
            first = "-" if cell.first is None else str(cell.first)
            cells.append([cell.traces, cell.moved.replace(" of ", "/") or "may differ", first])
        # the implementation's name may reach into the next column: it is longer than what stands below it
        both = max(len(f"{left} {right}") for left, right, _ in cells)
        for row, (left, right, first) in zip(rows, cells, strict=True):
            row += ["|", f"{left}{right:>{both - len(left)}}", f"{first:>5}"]
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = [" ".join(f"{text:{w}}" for text, w in zip(row, widths, strict=True)).rstrip() for row in rows]
    for i, line in enumerate(table.lines):
        if impls and not any(impl in line.cells for impl in impls):
            lines[i + 1] = f"{' '.join(f'{t:{w}}' for t, w in zip(rows[i + 1][:2], widths, strict=False))} | " + (
                line.note or "unproven"
            )
    return lines


@dataclass(frozen=True)
class AxisBar:
    """The bars of one axis: (implementation, its number, distinct traces, length in hundredths of the widest)."""

    axis: str
    bars: tuple[tuple[str, int, int, float], ...]


def axes_bars(table: AxesTable) -> Sequence[AxisBar]:
    """The picture: distinct traces by axis, a bar for each implementation."""
    most = max((cell.count for line in table.lines for cell in line.cells.values()), default=1)
    return [
        AxisBar(
            line.axis,
            tuple(
                (impl, i, line.cells[impl].count, round(100.0 * line.cells[impl].count / most, 2))
                for i, impl in enumerate(table.impls)
                if impl in line.cells
            ),
        )
        for line in table.lines
        if line.cells
    ]
