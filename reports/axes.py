"""The effect of each varied axis as a table: distinct texts and traces, which requests followed the axis, where first.

Every reporter uses it. Numbers in brackets are those of the value with the most traces: there only the batch changes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from nondet.core.records import AxisValue, Run
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
    """One axis under each implementation; `cells` holds those that tried a value other than the base's."""

    axis: str
    changes: str
    tallies: Mapping[str, AxisTally]
    cells: Mapping[str, AxisCell]

    @property
    def note(self) -> str:
        """Why no value was tried."""
        return next((t.note for t in self.tallies.values() if t.note), "")

    @property
    def proofs(self) -> Iterator[tuple[str, AxisValue]]:
        """Each value, by implementation, those of the base first."""
        for impl, tally in self.tallies.items():
            yield from (
                (impl, record) for record in (*(v.record for v in tally.values), *(v.record for v in tally.idle))
            )

    @property
    def values(self) -> str:
        """The values that took effect, and those that did not."""
        lacking: dict[str, list[str]] = {}
        for impl, record in self.proofs:
            if not record.proven:
                lacking.setdefault(record.value, []).append(impl)
        unproven = [v if len(i) == len(self.tallies) else f"{v} ({', '.join(i)})" for v, i in lacking.items()]
        text = ", ".join(dict.fromkeys(record.value for _, record in self.proofs if record.proven)) or "–"
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
    changes = {record.axis: record.changes for record in run.axis_values}
    tallies: dict[str, dict[str, AxisTally]] = {}
    for impl in impls:
        for tally in tally_axes(run, impl):
            tallies.setdefault(tally.axis, {})[impl] = tally
    lines = []
    for axis, mine in tallies.items():
        cells = {impl: AxisCell(tally, _first(tally, traces)) for impl, tally in mine.items() if tally.tried}
        lines.append(AxisLine(axis, changes[axis], mine, cells))
    most = max((v.n for line in lines for t in line.tallies.values() for v in t.values), default=0)
    prompts, lengthened = run.header.plan.get("prompts"), run.header.plan.get("prompt_lengthened_by", 0)
    prompt = str(prompts[0]["text"]) if prompts else ""
    return AxesTable(impls, tuple(lines), most, prompt, lengthened if isinstance(lengthened, int) else 0)


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
        (line.axis, Bit(one.value), Bit(impl, "code"), "yes" if one.proven else "unproven", Bit(one.proof))
        for line in table.lines
        for impl, one in line.proofs
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
