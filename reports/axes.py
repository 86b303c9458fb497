"""What was varied alone, as a table: distinct texts and traces along each axis, what followed the axis, where first.

The same in every report. Numbers in brackets are of the value that has most: there only the batch changes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from nondet.core.records import Role, Run, role_of
from nondet.core.traces import Trace, check_traces, read_traces
from nondet.errors import one_line
from nondet.reports.document import BRIEF, Bit, Block, Code, Details, Figure, Heading, Inline, Items, Paragraph, Table
from nondet.verdict.findings import plural, sort_impls
from nondet.verdict.samples import AxisTally, is_varied, tally_axes

if TYPE_CHECKING:
    from nondet.reports.content import Report, RunSection

_ABREAST_MOST = 3  # implementations beside each other in 80 columns


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


def axes_parts(report: Report, section: RunSection, number: int) -> list[Block]:
    """The prompt, a line an axis, the bars, and what proves that each value took effect."""
    table = section.axes
    if table is None:
        return []
    place = f"axes-run-{number}"
    head: list[Inline] = ["axis", "values"]
    for impl in table.impls:
        head += [(Bit(impl, "code"), ": traces"), "texts", "moved", "first"]
    proofs = [
        ((line.axis, Bit(f"{value}"), Bit(impl, "code"), "yes" if holds else "unproven", Bit(proof)))
        for line in table.lines
        for value, impl, holds, proof in line.proofs
    ]
    proven = Table(("axis", "value", "under", "took effect", "proof"), proofs)
    changes = Items([f"{line.axis}: {line.changes}" for line in table.lines], only="p")
    made: list[Block] = [
        *brief_blocks(table),
        Heading("One thing about the engine varied at a time", place, "axes"),
        Code(table.prompt),
        Figure("axes", table, f"{place}-bars", "Distinct traces by axis"),
        Table(head, [_full(line, table.impls) for line in table.lines], ("", "", *("num",) * 4 * len(table.impls))),
        Paragraph(table.legend, "soft"),
        Details("What each axis changes, and what proves that it took effect", [changes, proven]),
    ]
    if table.made_longer:
        made.append(Paragraph(table.made_longer, "soft"))
    return made


def _full(line: AxisLine, impls: Sequence[str]) -> list[Inline]:
    values = ", ".join(line.values) or "–"
    values += f"; unproven, not counted: {', '.join(line.unproven)}" if line.unproven else ""
    row: list[Inline] = [line.axis, Bit(line.note or values)]
    for impl in impls:
        cell = line.cells.get(impl)
        if cell is None:
            row += [Bit("not compared", "soft"), "", "", ""]
        else:
            traces = Bit(cell.traces, "bad" if cell.moves else "")
            row += [traces, cell.texts, cell.moved or "may differ", "–" if cell.first is None else str(cell.first)]
    return row


def brief_blocks(table: AxesTable) -> list[Block]:
    """The table for 80 columns: of more than three implementations only stock, or its backend, and invariant."""
    impls = table.impls
    if len(impls) > _ABREAST_MOST:
        stock = [i for i in impls if role_of(i) in (Role.STOCK, Role.BACKEND)]
        cured = [i for i in impls if role_of(i) == Role.INVARIANT]
        impls = (*stock[:1], *cured[:1]) if stock and cured else impls[:_ABREAST_MOST]
    head = ["varied", "values", *(name for impl in impls for name in (one_line(impl, 14), "moved", "first"))]
    rows = []
    for line in table.lines:
        row = [line.axis, f"{len(line.values)}" + (f"+{len(line.unproven)}?" if line.unproven else "")]
        for impl in impls:
            cell = line.cells.get(impl)
            if cell is None:
                row += [one_line(line.note, 40) or "unproven", "", ""]
            else:
                moved = cell.moved.replace(" of ", "/") or "may differ"
                row += [cell.traces, moved, "-" if cell.first is None else str(cell.first)]
        rows.append(row)
    legend = f"traces: distinct over all values (at one value); {table.n:,} completions a value"
    legend += "; ?: unproven, not counted" if any(line.unproven for line in table.lines) else ""
    return [Table(head, rows, clipped=True, only=BRIEF), Paragraph(legend, only=BRIEF)]


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
