"""What differs between two runs, record by record, matched by key. Functions of records alone: no torch, no files.

A run keeps classes of equal bits, not the bits: that a row is identical in both runs says that each agrees with itself,
and nothing of one machine's bits against the other's. Only completions carry digests of what they are.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from nondet.core.records import (
    RECORDS,
    AxisValue,
    Cell,
    ContractAnswer,
    Limit,
    Record,
    Row,
    Run,
    ServerSeen,
    Status,
    Tape,
    Timed,
)
from nondet.diffing.completions import CompletionDiff, compare_completions
from nondet.errors import UnknownNameError
from nondet.verdict.findings import plural

__all__ = ["Change", "Field", "Kind", "RunDiff", "diff_runs"]

# What is time and nothing else.
_TIMES = {"seconds", "samples_us", "median_us", "low_us", "high_us", "started"}
_LIST_MOST = 6
# Records of what was asked, and of what answered: equal ones are no comparison of what came out.
_ABOUT = (AxisValue, Limit, ServerSeen, Tape)


@dataclass(frozen=True)
class Field:
    """Something that the two headers say otherwise; None where one of them does not say it."""

    name: str
    a: Any
    b: Any


@dataclass(frozen=True)
class Change:
    """A record that both have, and that is not the same.

    Attributes:
        worse: What B has is a divergence, a wrong result or a failure, and what A has is none, or A alone measured it;
            better: A has one of these, and what B measured is none.
    """

    kind: str
    name: str
    what: tuple[str, ...]
    worse: bool = False
    better: bool = False


@dataclass(frozen=True)
class Kind:
    """Records of one kind.

    Attributes:
        matched: Keys that both runs have; same: those whose records are the same, times left out.
        measured: Matched keys under which both runs measured something.
        only_a, only_b: Names of the others.
    """

    name: str
    matched: int
    measured: int
    same: int
    only_a: tuple[str, ...]
    only_b: tuple[str, ...]


@dataclass(frozen=True)
class RunDiff:
    """Everything that two runs have between them."""

    environment: tuple[Field, ...]
    plan: tuple[Field, ...]
    kinds: tuple[Kind, ...]
    changes: tuple[Change, ...]
    completions: tuple[CompletionDiff, ...]
    notes: tuple[str, ...]

    @property
    def worse(self) -> int:
        """Records that got worse."""
        return sum(change.worse for change in self.changes)

    @property
    def parted(self) -> list[CompletionDiff]:
        """Groups of completions that were compared and are not the same set."""
        return [c for c in self.completions if not c.reason and not c.same]

    @property
    def failed_more(self) -> int:
        """Groups of completions of which more failed in B than in A."""
        return sum(c.failed_b > c.failed_a for c in self.completions)

    @property
    def held(self) -> bool:
        """Whether there was anything to hold against each other: completions, or records that both runs measured."""
        return any(kind.measured for kind in self.kinds) or any(not c.reason for c in self.completions)

    @property
    def compared(self) -> bool:
        """Whether "nothing moved" may be said: every group of completions was compared; without any, some record."""
        if self.completions:
            return all(not c.reason for c in self.completions)
        return self.held


def diff_runs(a: Run, b: Run, *, impl: str = "", against: str = "") -> RunDiff:
    """Match the records of two runs by key.

    Args:
        impl: Of A the records of this implementation alone; of B those of `against`, or of the same one.

    Raises:
        UnknownNameError: a run holds nothing of that implementation.
    """
    if impl:
        a, b = _of(a, impl, impl), _of(b, against or impl, impl)
    kinds, changes = [], []
    for field in RECORDS.values():
        if field in ("completions", "rounds"):
            continue
        kind, moved = _kind(field, getattr(a, field), getattr(b, field))
        if kind.matched or kind.only_a or kind.only_b:
            kinds.append(kind)
        changes += moved
    groups = compare_completions(a, b)
    notes = []
    if any(kind.name in ("rows", "cells") and kind.matched for kind in kinds):
        notes.append(
            "Rows keep classes of equal bits, not the bits: that a case agrees with itself in both runs says nothing "
            "of one run's bits against the other's."
        )
    if impl and against and impl != against:
        notes.append(f"Records of {impl} in A are held against those of {against} in B.")
    for name, run in (("A", a), ("B", b)):
        if not run.complete:
            notes.append(f"{name} did not come to its end.")
    asked = [{"command": run.header.command, **run.header.plan} for run in (a, b)]
    return RunDiff(
        environment=tuple(_fields(a.header.environment, b.header.environment)),
        plan=tuple(_fields(asked[0], asked[1])),
        kinds=tuple(kinds),
        changes=tuple(sorted(changes, key=lambda change: (not change.worse, not change.better))),
        completions=tuple(groups),
        notes=tuple(notes),
    )


def _of(run: Run, impl: str, name: str) -> Run:
    """The records of one implementation, filed under another name; of cells that one's times alone."""
    names = {getattr(r, "impl", "") for r in run.records()} | {t.impl for cell in run.cells for t in cell.timed}
    if impl not in names:
        raise UnknownNameError(f"implementation in {run.source or 'the run'}", impl, names - {""})
    kept: dict[str, list[Record]] = {}
    for field in RECORDS.values():
        kept[field] = []
        for record in getattr(run, field):
            if isinstance(record, Cell):
                timed = [msgspec.structs.replace(t, impl=name) for t in record.timed if t.impl == impl]
                if timed:
                    kept[field].append(msgspec.structs.replace(record, timed=timed))
            elif getattr(record, "impl", None) == impl:
                kept[field].append(msgspec.structs.replace(record, impl=name))
            elif not hasattr(record, "impl"):
                kept[field].append(record)
    return msgspec.structs.replace(run, **kept)


def _fields(a: dict[str, Any], b: dict[str, Any], prefix: str = "") -> Iterator[Field]:
    """What differs, through nested mappings."""
    for name in sorted(a.keys() | b.keys()):
        mine, theirs = a.get(name), b.get(name)
        if isinstance(mine, dict) and isinstance(theirs, dict):
            yield from _fields(mine, theirs, f"{prefix}{name}.")
        elif mine != theirs:
            if isinstance(mine, list) and isinstance(theirs, list) and _is_set(mine) and _is_set(theirs):
                mine, theirs = sorted(set(mine) - set(theirs)), sorted(set(theirs) - set(mine))
            yield Field(f"{prefix}{name}", mine, theirs)


def _is_set(values: list[Any]) -> bool:
    """Whether a list holds names in order, as sets are written: then only what the other lacks is of interest."""
    return values == sorted(map(str, values))


def _kind(field: str, a: Sequence[Record], b: Sequence[Record]) -> tuple[Kind, list[Change]]:
    mine, theirs = {r.key: r for r in a}, {r.key: r for r in b}
    both = [key for key in mine if key in theirs]
    changes, same = [], 0
    for key in both:
        change = _change(field, mine[key], theirs[key])
        if change is None:
            same += 1
        else:
            changes.append(change)
    only_a, only_b = (
        tuple(_name(r) for key, r in one.items() if key not in other) for one, other in ((mine, theirs), (theirs, mine))
    )
    measured = sum(_measured(mine[key], theirs[key]) for key in both)
    return Kind(field, len(both), measured, same, only_a, only_b), changes


def _measured(a: Record, b: Record) -> bool:
    """Whether both hold something that was measured; of the same implementation, in cells."""
    if isinstance(a, Row) and isinstance(b, Row):
        return a.measured and b.measured
    if isinstance(a, Cell) and isinstance(b, Cell):
        timed = [{t.impl for t in cell.timed if t.status == Status.TIMED} for cell in (a, b)]
        return bool(timed[0] & timed[1])
    return not isinstance(a, _ABOUT)


def _name(record: Record) -> str:
    return ", ".join(part for part in record.key[1:] if part) or record.key[0]


def _change(field: str, a: Record, b: Record) -> Change | None:
    if isinstance(a, Row) and isinstance(b, Row):
        return _row_change(a, b)
    if isinstance(a, Cell) and isinstance(b, Cell):
        return _cell_change(a, b)
    mine, theirs = (_without_times(msgspec.to_builtins(record)) for record in (a, b))
    if mine == theirs:
        return None
    what = [f"{name}: {_short(mine.get(name))} -> {_short(theirs.get(name))}" for name in _differing(mine, theirs)]
    return Change(field, _name(a), tuple(what[:_LIST_MOST]), _kept(a) and not _kept(b), _kept(b) and not _kept(a))


def _kept(record: Record) -> bool:
    """Whether a value of an axis took effect, or a server keeps to a question of the contract."""
    if isinstance(record, AxisValue):
        return record.proven
    return isinstance(record, ContractAnswer) and record.answer == "yes"


def _without_times(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _without_times(part) for name, part in value.items() if name not in _TIMES}
    return [_without_times(part) for part in value] if isinstance(value, list) else value


def _differing(a: dict[str, Any], b: dict[str, Any]) -> list[str]:
    return [name for name in sorted(a.keys() | b.keys()) if a.get(name) != b.get(name)]


def _short(value: Any) -> str:
    text = str(value)
    return text if len(text) <= 60 else text[:59] + "…"


def _is_bad(row: Row) -> bool:
    return row.wrong or row.parted or row.replays_parted > 0 or row.status == Status.ERROR


def _row_change(a: Row, b: Row) -> Change | None:
    what = []
    if a.status != b.status:
        what.append(f"{a.status} -> {b.status}{f' ({b.reason})' if b.reason and not b.measured else ''}")
    if a.distinct != b.distinct:
        what.append(f"{plural(a.distinct, 'class', 'classes')} -> {b.distinct}")
    elif a.values == b.values and a.labels != b.labels:
        moved = [value for value, x, y in zip(a.values, a.labels, b.labels, strict=True) if x != y]
        what.append(f"classes have other borders, first at {a.varied.replace('_', ' ')} {moved[0]}")
    if a.measured and b.measured and a.values != b.values:
        what.append(f"other variants were tried ({a.trials} -> {b.trials})")
    if (a.replays_parted > 0) != (b.replays_parted > 0):
        what.append("it came to differ from run to run" if b.replays_parted else "it no longer differs from run to run")
    if set(a.ran) != set(b.ran):
        gone, come = (sorted(x - y) for x, y in ((set(a.ran), set(b.ran)), (set(b.ran), set(a.ran))))
        what.append(f"other kernels ran: {_names(gone)} -> {_names(come)}")
    if a.worst_error != b.worst_error and a.worst_error is not None and b.worst_error is not None:
        norms = [e.relative_norm for e in (a.worst_error, b.worst_error)]
        shown = " -> ".join("not finite" if x is None else f"{x:.3g}" for x in norms)
        what.append(f"error against float64 {shown}, so some bits are others")
    if not what:
        return None
    worse = (_is_bad(b) and not _is_bad(a)) or (a.measured and not b.measured)
    return Change("rows", _name(a), tuple(what), worse, b.measured and _is_bad(a) and not _is_bad(b))


def _names(names: Sequence[str]) -> str:
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return (", ".join(name if len(name) <= 48 else name[:47] + "…" for name in names[:3]) + more) or "none"


def _cell_change(a: Cell, b: Cell) -> Change | None:
    """Times moved where the quartiles of the two runs don't meet; nothing is said of why."""
    mine, theirs = {t.impl: t for t in a.timed}, {t.impl: t for t in b.timed}
    what = [f"{name}: {'only in A' if name in mine else 'only in B'}" for name in sorted(mine.keys() ^ theirs.keys())]
    worse = False
    for name in (name for name in mine if name in theirs):  # in A's order
        text, slower = _timed_change(mine[name], theirs[name])
        worse |= slower
        if text:
            what.append(f"{name}: {text}")
    return Change("cells", _name(a), tuple(what), worse) if what else None


def _timed_change(a: Timed, b: Timed) -> tuple[str, bool]:
    if a.status != b.status:
        return f"{a.status} -> {b.status}", b.status == Status.ERROR or a.status == Status.TIMED
    if a.status != Status.TIMED or (a.low_us <= b.high_us and b.low_us <= a.high_us):
        return "", False
    return f"{a.median_us:.4g} -> {b.median_us:.4g} us ({b.median_us / a.median_us:.2f} times)", False
