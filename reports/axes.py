"""The effect of each varied axis as a table: distinct texts and traces, which requests followed the axis, where first.

Every reporter uses it. Numbers in brackets are those of the value with the most traces: there only the batch changes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from nondet.core.records import Run
from nondet.core.traces import Trace
from nondet.reports.document import ALL, Bit, Block, Code, Details, Figure, Heading, Inline, Items, Paragraph, Table
from nondet.reports.endpoint import parting
from nondet.verdict.findings import plural, sort_impls
from nondet.verdict.samples import AxisTally, tally_axes


@dataclass(frozen=True)
class AxisCell:
    """One axis under one implementation; `first` is the first generated token at which anything differed, or None."""

    tally: AxisTally
    first: int | None

    @property
    def traces(self) -> str:
        """ "12 (7)": distinct over all values, and at the value with most."""
        return f"{self.tally.traces:,} ({self.tally.traces_within:,})"

    @property
    def count(self) -> int:
        """The traces that are drawn: over all values, or at the value with the most."""
        return self.tally.traces if self.tally.held else self.tally.traces_within

    @property
    def moves(self) -> bool:
        """Whether requests followed the axis, or, at one value, the batch."""
        return self.tally.moved > 0 if self.tally.held else self.tally.traces_within > 1


@dataclass(frozen=True)
class AxisLine:
    """One axis; `proofs` holds (value, implementation, took effect, figures), those of the base first."""

    axis: str
    changes: str
    impls: Sequence[str]
    proofs: Sequence[tuple[str, str, bool, str]]
    cells: Mapping[str, AxisCell]
    note: str

    @property
    def values(self) -> str:
        """The values that took effect, and those that did not."""
        lacking: dict[str, list[str]] = {}
        for value, impl, holds, _ in self.proofs:
            if not holds:
                lacking.setdefault(value, []).append(impl)
        unproven = [v if len(i) == len(self.impls) else f"{v} ({', '.join(i)})" for v, i in lacking.items()]
        text = ", ".join(dict.fromkeys(value for value, _, holds, _ in self.proofs if holds)) or "–"
        return text + (f"; unproven, not counted: {', '.join(unproven)}" if unproven else "")


@dataclass(frozen=True)
class AxesTable:
    """All axes of a run: `n` completions per value, a prompt lengthened by `lengthened` tokens of its own
    completion."""

    impls: tuple[str, ...]
    lines: tuple[AxisLine, ...]
    n: int
    prompt: str
    lengthened: int

    @property
    def bars(self) -> list[tuple[str, list[tuple[str, int, int, float]]]]:
        """The picture: (axis, [(implementation, its number, distinct traces, length in hundredths of the widest)])."""
        most = max((cell.count for line in self.lines for cell in line.cells.values()), default=1)
        counts = [(line.axis, {impl: cell.count for impl, cell in line.cells.items()}) for line in self.lines]
        return [
            (axis, [(i, n, of[i], round(100.0 * of[i] / most, 2)) for n, i in enumerate(self.impls) if i in of])
            for axis, of in counts
            if of
        ]


def axes_table(run: Run, traces: Mapping[str, Trace]) -> AxesTable | None:
    """The table of a run of `nondet sample --vary`; None where no axis was started."""
    if not run.axis_values:
        return None
    impls = tuple(sort_impls(record.impl for record in run.axis_values))
    tallies: dict[str, dict[str, AxisTally]] = {}
    for impl in impls:
        for tally in tally_axes(run, impl):
            tallies.setdefault(tally.axis, {})[impl] = tally
    changes = {record.axis: record.changes for record in run.axis_values}
    prompts, lengthened = run.header.plan.get("prompts"), run.header.plan.get("prompt_lengthened_by", 0)
    return AxesTable(
        impls=impls,
        lines=tuple(_line(axis, changes[axis], by_impl, traces) for axis, by_impl in tallies.items()),
        n=max((v.n for by_impl in tallies.values() for t in by_impl.values() for v in t.values), default=0),
        prompt=str(prompts[0]["text"]) if prompts else "",
        lengthened=lengthened if isinstance(lengthened, int) else 0,
    )


def _line(axis: str, changes: str, tallies: Mapping[str, AxisTally], traces: Mapping[str, Trace]) -> AxisLine:
    return AxisLine(
        axis=axis,
        changes=changes,
        impls=list(tallies),
        proofs=[
            (record.value, impl, record.proven, record.proof)
            for impl, tally in tallies.items()
            for record in [*(v.record for v in tally.values), *tally.unproven]
        ],
        cells={impl: AxisCell(tally, _first(tally, traces)) for impl, tally in tallies.items() if tally.tried},
        note=next((t.note for t in tallies.values() if t.note), ""),
    )


def _first(tally: AxisTally, traces: Mapping[str, Trace]) -> int | None:
    groups = [set(v.traces) for v in tally.values]
    places = []
    for group in [set[str]().union(*groups)] if tally.held else groups:
        known = [traces[digest] for digest in sorted(group) if digest in traces]
        parted = [parting(known[0], other) for other in known[1:]]
        places += [place for p in parted for place in (p.token, p.bits) if place is not None]
    return min(places, default=None)


def axes_blocks(table: AxesTable, number: int, opened: bool) -> list[Block]:
    """The prompt, a line per axis, the bars, and what proves that each value took effect."""
    place = f"axes-run-{number}"
    head: list[Inline] = ["axis", "values"]
    for impl in table.impls:
        head += [(Bit(impl, "code"), ": traces"), "texts", "changed", "first"]
    proofs = [
        (line.axis, Bit(value), Bit(impl, "code"), "yes" if holds else "unproven", Bit(proof))
        for line in table.lines
        for value, impl, holds, proof in line.proofs
    ]
    proven = Table(("axis", "value", "under", "took effect", "proof"), proofs)
    changes = Items([f"{line.axis}: {line.changes}" for line in table.lines], only="p")
    legend = (
        f"{table.n:,} completions at each value. Traces and texts: distinct over all values, in brackets at the value "
        "with most, where only the batch changes. Where the axis may change the arithmetic itself (dtype, attention, "
        "threads; ranks, but for rank-free) only the brackets count against it. Changed: requests whose trace is not "
        "that of the same request at the base: there the axis is the cause. First: the first generated token with "
        "other bits."
    )
    made: list[Block] = [
        Heading("One setting of the engine changed at a time", place, "axes"),
        Code(table.prompt),
        *([axes_figure(table, f"{place}-bars")] if table.bars else []),
        Table(
            head,
            [_full(line, table.impls) for line in table.lines],
            ("", "", *("num",) * 4 * len(table.impls)),
            unshown=("values", "texts"),
            only=ALL,
        ),
        Paragraph(legend, "soft"),
        Details("What each axis changes, and what proves that it took effect", [changes, proven]),
    ]
    if table.lengthened:
        longer = f"The prompt is followed by {plural(table.lengthened, 'token')} of its own completion"
        made.append(Paragraph(f"{longer}, to be cut and shared.", "soft"))
    return made


def axes_figure(table: AxesTable, place: str) -> Figure:
    """Bars: distinct traces by axis."""
    return Figure("axes", table, place, "Distinct traces by axis", of=table)


def _full(line: AxisLine, impls: Sequence[str]) -> list[Inline]:
    row: list[Inline] = [line.axis, Bit(line.note or line.values)]
    for impl in impls:
        cell = line.cells.get(impl)
        if cell is None:
            row += [Bit("not compared", "soft"), "", "", ""]
            continue
        t, first = cell.tally, "–" if cell.first is None else str(cell.first)
        changed = f"{t.moved:,} of {t.compared:,}" if t.held else "may differ"
        row += [Bit(cell.traces, "bad" if cell.moves else ""), f"{t.texts:,} ({t.texts_within:,})", changed, first]
    return row
