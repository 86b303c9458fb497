"""Cases of probes, gathered: one case under every implementation, one question on several inputs, one probe."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from nondet.core.records import Row
from nondet.core.registry import PROBES
from nondet.errors import one_line
from nondet.reports.classmap import axis_name
from nondet.verdict.findings import plural, sort_impls

__all__ = ["CaseFamily", "CaseGroup", "ProbeSection", "probe_sections"]

# Rows that come with completions, not from a probe.
_HELP = {
    "sample": "the model's own operators, at the sizes that the completions met",
    "bench": "row 0, or the last query, beside company of every size that was timed",
}


@dataclass(frozen=True)
class CaseGroup:
    """One case under every implementation that it was put to; the rows differ in `impl` and their figures alone."""

    rows: tuple[Row, ...]

    @property
    def head(self) -> Row:
        """The row to read the case's own fields from."""
        return self.rows[0]

    @property
    def parted(self) -> bool:
        """Whether any implementation parted."""
        return any(r.parted for r in self.rows)

    @property
    def axis(self) -> str:
        """What the values are called."""
        return axis_name(self.head)

    @property
    def measured(self) -> tuple[Row, ...]:
        """Rows that hold figures."""
        return tuple(r for r in self.rows if r.measured)


@dataclass(frozen=True)
class CaseFamily:
    """Cases that differ in the kind of input alone: tabs of one figure."""

    cases: tuple[CaseGroup, ...]

    @property
    def title(self) -> str:
        """The case's name without the kind of input."""
        return _without_inputs(self.cases[0].head)

    @property
    def parted(self) -> bool:
        """Whether any implementation parted on any input."""
        return any(c.parted for c in self.cases)


def _without_inputs(row: Row) -> str:
    return one_line(row.case.removesuffix(f", {row.inputs}"), 400)


@dataclass(frozen=True)
class ProbeSection:
    """One probe's cases, in the order of the run file; demonstrations come after measurements."""

    name: str
    help: str
    cases: tuple[CaseGroup, ...]

    @property
    def demonstration(self) -> bool:
        """Whether it shows a cause on purpose, and is no finding about a library."""
        return all(c.head.demonstration for c in self.cases)

    @property
    def families(self) -> tuple[CaseFamily, ...]:
        """The cases that were measured, those of one question on several inputs together; those that parted first."""
        grouped: dict[tuple[str, str, str, str], list[CaseGroup]] = {}
        for case in self.cases:
            if case.measured:
                head = case.head
                grouped.setdefault((_without_inputs(head), head.dtype, head.device, head.varied), []).append(case)
        families = [CaseFamily(tuple(cases)) for cases in grouped.values()]
        return tuple(sorted(families, key=lambda f: not f.parted))

    @property
    def parted(self) -> tuple[CaseGroup, ...]:
        """Cases in which an implementation parted."""
        return tuple(c for c in self.cases if c.parted)

    @property
    def clean(self) -> tuple[CaseGroup, ...]:
        """Cases that were measured and in which none did. What was not measured at all is a problem, not a result."""
        return tuple(c for c in self.cases if c.measured and not c.parted)

    @property
    def summary(self) -> str:
        """ "stock parted in 3 of 8 cases, invariant in 0 of 8"."""
        rows = [r for c in self.cases for r in c.measured]
        counts = []
        for impl in sort_impls(r.impl for r in rows):
            mine = [r for r in rows if r.impl == impl]
            counts.append(f"{impl} parted in {sum(r.parted for r in mine)} of {plural(len(mine), 'case')}")
        return ", ".join(counts) or "nothing was measured"


def probe_sections(rows: Sequence[Row]) -> list[ProbeSection]:
    """A section for each probe, demonstrations last."""
    grouped: dict[str, dict[tuple[str, str, str], list[Row]]] = {}
    for row in rows:
        grouped.setdefault(row.probe, {}).setdefault((row.case, row.dtype, row.device), []).append(row)
    sections = [
        ProbeSection(
            name=name,
            help=_HELP.get(name, PROBES[name][1] if name in PROBES else ""),
            cases=tuple(CaseGroup(tuple(_by_impl(rows_of_case))) for rows_of_case in cases.values()),
        )
        for name, cases in grouped.items()
    ]
    return sorted(sections, key=lambda s: s.demonstration)


def _by_impl(rows: list[Row]) -> list[Row]:
    order = {impl: i for i, impl in enumerate(sort_impls(r.impl for r in rows))}
    return sorted(rows, key=lambda r: order[r.impl])
