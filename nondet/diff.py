"""Two run files side by side, record by record, matched by key. Functions of records only: no torch, no files.

A run keeps classes of equal bits, not the bits: a row that is identical in both runs agrees with itself in each, but
the bits of the two runs may differ. Only completions carry digests of their contents, of tokens and of traces (tokens
with logprob bits), which are valid across runs and machines.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from nondet.core import records
from nondet.core.records import Cell, Completion, Record, Row, Run, Status
from nondet.errors import UnknownNameError, one_line
from nondet.verdict.findings import Finding, Verdict, plural, successful
from nondet.verdict.gate import judge

# Entries of a plan that must be equal for completions to be comparable.
_SETTINGS = ("max_tokens", "temperature", "request_seed", "eos", "ignore_eos", "extra", "sampling", "top_k", "top_p")
# Fields that hold only times.
_TIMES = {"seconds", "samples_us", "median_us", "low_us", "high_us", "started", "sample_seconds", "train_seconds"}
_LIST_MOST = 6
# Records of the settings and of the server: equal ones are not a comparison of results.
_ABOUT = (records.AxisValue, records.Limit, records.ServerSeen)
_LEFT_OUT = ("completions", "rounds", "tapes")  # compared by themselves, or what completions came from

Group = tuple[str, str, str]  # a prompt, an implementation, an arm


class CompletionDiff:
    """The completions of one prompt under one implementation, in one arm, in both runs."""

    def __init__(
        self, group: Group, reason: str, a: list[Completion], b: list[Completion], *, with_logprobs: bool
    ) -> None:
        self.prompt, self.impl, self.arm = group
        self.reason = reason  # why they can't be compared; empty where they can
        good_a, good_b = successful(a), successful(b)
        self.failed_a, self.failed_b = len(a) - len(good_a), len(b) - len(good_b)  # even where there is a reason
        if reason:
            good_a, good_b = [], []
        self.n_a, self.n_b = len(good_a), len(good_b)
        # whether traces hold logprobs in both runs; else only tokens were compared
        self.with_logprobs = with_logprobs or bool(reason)

        def digest(c: Completion) -> str:
            return c.trace if with_logprobs else c.tokens_digest

        def counts(digest_of: Callable[[Completion], str]) -> dict[str, tuple[int, int]]:
            in_a, in_b = (Counter(map(digest_of, good)) for good in (good_a, good_b))
            return {name: (in_a[name], in_b[name]) for name in in_a | in_b}

        # digests -> (how many in A, how many in B)
        self.tokens, self.traces = counts(lambda c: c.tokens_digest), counts(digest)
        theirs = {c.request: c for c in good_b}
        pairs = [(c, theirs[c.request]) for c in {c.request: c for c in good_a}.values() if c.request in theirs]
        alike = [(x, y) for x, y in pairs if digest(x) == digest(y)]
        # requests of one name in both runs; those with equal digests; equal ones that ended for another reason
        self.pairs = len(pairs)
        self.tokens_alike = sum(x.tokens_digest == y.tokens_digest for x, y in pairs)
        self.traces_alike = len(alike) if with_logprobs else 0
        self.ended_otherwise = sum(x.finish != y.finish for x, y in alike)

    @property
    def same(self) -> bool:
        """Whether both runs gave the same set of traces, and requests of one name ended for the same reason."""
        return not self.reason and not self.ended_otherwise and all(x and y for x, y in self.traces.values())

    @property
    def most_common(self) -> tuple[str, str] | None:
        """The most common trace of each run."""
        if not self.traces:
            return None
        a, b = (max(self.traces, key=lambda digest: self.traces[digest][side]) for side in (0, 1))
        return a, b


def compare_completions(a: Run, b: Run) -> Iterator[CompletionDiff]:
    """Every prompt, implementation and arm that either run has."""
    of_all = _other_settings(a, b)
    mine, theirs = _groups(a), _groups(b)
    for group in dict.fromkeys([*mine, *theirs]):
        x, y = mine.get(group, []), theirs.get(group, [])
        # how tokens are identified (by ids in a run of ours), and whether there are logprobs
        known = [[(s.known_by, s.logprobs) for s in run.servers if s.impl == group[1]] for run in (a, b)]
        (ids_a, logprobs_a), (ids_b, logprobs_b) = ([*of, ("ids", True)][0] for of in known)
        if not x or not y:
            reason = f"only {'A' if x else 'B'} has completions of it"
        elif not of_all and ids_a != ids_b:
            reason = f"they are known by {ids_a} in A and by {ids_b} in B"
        else:
            reason = of_all or ("" if successful(x) and successful(y) else "one run has none that succeeded")
        yield CompletionDiff(group, reason, x, y, with_logprobs=logprobs_a and logprobs_b)


def _groups(run: Run) -> dict[Group, list[Completion]]:
    prompts = run.header.plan.get("prompts", [])
    groups: dict[Group, list[Completion]] = {}
    for completion in run.completions:
        prompt = prompts[completion.prompt]
        seed = f" [seed {prompt['seed']}]" if prompt.get("seed") is not None else ""
        groups.setdefault((f"{prompt['text']}{seed}", completion.impl, completion.arm), []).append(completion)
    return groups


def _other_settings(a: Run, b: Run) -> str:
    """Why the two runs' completions are not comparable; "" where they are."""
    mine, theirs = a.header.plan, b.header.plan
    for name in _SETTINGS:
        if mine.get(name) != theirs.get(name):
            return f"they were run with another {name.replace('_', ' ')}"
    models = [model if isinstance(model := plan.get("model"), dict) else {"name": model} for plan in (mine, theirs)]
    weights = [model.get("weights") for model in models]
    if all(weights):
        return "" if weights[0] == weights[1] else "their models have other weights"
    named = [model.get("name") for model in models]
    return "" if named[0] == named[1] else f"their models have other names ({named[0]}, {named[1]})"


@dataclass(frozen=True)
class Change:
    """A record that differs: `worse` if B has a fault and A none, or only A measured it; `better` if A's fault went."""

    kind: str
    name: str
    what: tuple[str, ...]
    worse: bool = False
    better: bool = False


@dataclass(frozen=True)
class Kind:
    """Records of one kind. `matched` counts keys that both runs have, `same` those with equal records (times left out),
    `measured` those that both runs measured; `only_a` and `only_b` name the others."""

    name: str
    matched: int
    measured: int
    same: int
    only_a: tuple[str, ...]
    only_b: tuple[str, ...]


class RunDiff:
    """Two runs matched by key: of A only `impl`, if given, of B `against`, or the same. Raises UnknownNameError."""

    def __init__(self, a: Run, b: Run, *, impl: str = "", against: str = "") -> None:
        if impl:
            a, b = _of(a, impl, impl), _of(b, against or impl, impl)
        names = [n for n in records.RECORDS.values() if n not in _LEFT_OUT and (getattr(a, n) or getattr(b, n))]
        found = [_kind(name, getattr(a, name), getattr(b, name)) for name in names]
        self.kinds = [kind for kind, _ in found]
        changes = [change for _, changes in found for change in changes]
        self.changes = sorted(changes, key=lambda change: (not change.worse, not change.better))
        self.completions = list(compare_completions(a, b))
        self.environment = list(_fields(a.header.environment, b.header.environment))
        plans = [{"command": run.header.command, **run.header.plan} for run in (a, b)]
        self.plan = list(_fields(plans[0], plans[1]))
        self.verdicts = list(_verdicts(a, b))  # of implementations that diverge in one run only
        self.notes = []
        if any(kind.name in ("rows", "cells") and kind.matched for kind in self.kinds):
            self.notes.append(
                "A run file stores which sizes gave equal bits, not the bits themselves. Two runs can both be "
                "consistent and still differ from each other."
            )
        if impl and against and impl != against:
            self.notes.append(f"Records of {impl} in A are compared with those of {against} in B.")
        self.notes += [f"{name} did not finish." for name, run in (("A", a), ("B", b)) if not run.complete]
        self.worse = sum(change.worse for change in self.changes)  # records that got worse
        # groups of completions that were compared and are not the same set; those of which more failed in B than in A
        self.differing = [c for c in self.completions if not c.reason and not c.same]
        self.failed_more = sum(c.failed_b > c.failed_a for c in self.completions)
        # whether anything could be compared: completions, or records that both runs measured
        self.held = any(kind.measured for kind in self.kinds) or any(not c.reason for c in self.completions)
        # whether "no change" is justified: every group of completions was compared; without any, some record
        self.compared = all(not c.reason for c in self.completions) if self.completions else self.held


def _verdicts(a: Run, b: Run) -> Iterator[str]:
    """The verdicts of each run, of implementations that have a fault in only one of the two."""
    order, worst = list(Finding), list[dict[str, Verdict]]()
    for run in (a, b):
        by_gravity = sorted(judge(run), key=lambda v: order.index(v.finding), reverse=True)
        worst.append({v.impl: v for v in by_gravity})
    for impl in dict.fromkeys(v.impl for v in judge(a)):
        mine, theirs = worst[0][impl], worst[1].get(impl)
        if theirs is not None and mine.is_fault != theirs.is_fault:
            yield f"{impl}: {mine.finding} in A, {theirs.finding} in B"


def _of(run: Run, impl: str, name: str) -> Run:
    """The records of one implementation, filed under another name; of benchmark cases only its times."""
    names = {getattr(r, "impl", "") for r in run.records()} | {t.impl for cell in run.cells for t in cell.timed}
    if impl not in names:
        raise UnknownNameError(f"implementation in {run.source or 'the run'}", impl, names - {""})

    def renamed(record: Record) -> Record | None:
        if isinstance(record, Cell):
            timed = [msgspec.structs.replace(t, impl=name) for t in record.timed if t.impl == impl]
            return msgspec.structs.replace(record, timed=timed) if timed else None
        if not hasattr(record, "impl"):
            return record
        return msgspec.structs.replace(record, impl=name) if record.impl == impl else None

    kept = {kind: [r for r in map(renamed, getattr(run, kind)) if r is not None] for kind in records.RECORDS.values()}
    return msgspec.structs.replace(run, **kept)


def _fields(a: dict[str, Any], b: dict[str, Any], prefix: str = "") -> Iterator[dict[str, Any]]:
    """Each difference between the two headers: its name, "a" and "b", None where one of them lacks the field."""
    for name in sorted(a.keys() | b.keys()):
        mine, theirs = a.get(name), b.get(name)
        if isinstance(mine, dict) and isinstance(theirs, dict):
            yield from _fields(mine, theirs, f"{prefix}{name}.")
        elif mine != theirs:
            sets = [
                x for x in (mine, theirs) if isinstance(x, list) and x == sorted(map(str, x))
            ]  # as they are written
            if len(sets) == 2:  # only what the other lacks matters
                mine, theirs = (sorted(set(x) - set(y)) for x, y in (sets, sets[::-1]))
            yield {"name": f"{prefix}{name}", "a": mine, "b": theirs}


def _kind(name: str, a: Sequence[Record], b: Sequence[Record]) -> tuple[Kind, list[Change]]:
    mine, theirs = {r.key: r for r in a}, {r.key: r for r in b}
    both = [(mine[key], theirs[key]) for key in mine if key in theirs]
    changes = [change for x, y in both if (change := _change(name, x, y))]
    only_a = tuple(_name(r) for key, r in mine.items() if key not in theirs)
    only_b = tuple(_name(r) for key, r in theirs.items() if key not in mine)
    measured = sum(_measured(x, y) for x, y in both)
    return Kind(name, len(both), measured, len(both) - len(changes), only_a, only_b), changes


def _measured(a: Record, b: Record) -> bool:
    """Whether both hold something that was measured; in benchmark cases, of the same implementation."""
    if isinstance(a, Row) and isinstance(b, Row):
        return a.measured and b.measured
    if isinstance(a, Cell) and isinstance(b, Cell):
        timed = [{t.impl for t in cell.timed if t.status == Status.TIMED} for cell in (a, b)]
        return bool(timed[0] & timed[1])
    return not isinstance(a, _ABOUT)


def _name(record: Record) -> str:
    return ", ".join(part for part in record.key[1:] if part) or record.key[0]


def _change(kind: str, a: Record, b: Record) -> Change | None:
    worse, better = _is_bad(b) and not _is_bad(a), _is_bad(a) and not _is_bad(b)
    if isinstance(a, Row) and isinstance(b, Row):
        what = list(_row_changes(a, b))
        worse, better = worse or (a.measured and not b.measured), better and b.measured
    elif isinstance(a, Cell) and isinstance(b, Cell):
        what, worse = _cell_changes(a, b)
    else:
        mine, theirs = (_without_times(msgspec.to_builtins(record)) for record in (a, b))
        names = [name for name in sorted(mine.keys() | theirs.keys()) if mine.get(name) != theirs.get(name)]
        listed = [(name, *(one_line(str(of.get(name)), 60) for of in (mine, theirs))) for name in names[:_LIST_MOST]]
        what = [f"{name}: {before} -> {after}" for name, before, after in listed]
    return Change(kind, _name(a), tuple(what), worse, better) if what else None


def _without_times(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _without_times(part) for name, part in value.items() if name not in _TIMES}
    return [_without_times(part) for part in value] if isinstance(value, list) else value


def _is_bad(record: Record) -> bool:
    """A divergence, a wrong result, a failure; a value that took no effect, a check that a server does not pass."""
    if isinstance(record, Row):
        return record.wrong or record.differs or record.replays_parted > 0 or record.status == Status.ERROR
    if isinstance(record, records.AxisValue):
        return not record.proven
    return isinstance(record, records.ContractAnswer) and record.answer != "yes"


def _row_changes(a: Row, b: Row) -> Iterator[str]:
    if a.status != b.status:
        yield f"{a.status} -> {b.status}{f' ({b.reason})' if b.reason and not b.measured else ''}"
    if a.distinct != b.distinct:
        yield f"{plural(a.distinct, 'class', 'classes')} -> {b.distinct}"
    elif a.values == b.values and a.labels != b.labels:
        first = next(value for value, x, y in zip(a.values, a.labels, b.labels, strict=True) if x != y)
        yield f"classes end at other values, first at {a.varied.replace('_', ' ')} {first}"
    if a.measured and b.measured and a.values != b.values:
        yield f"other variants were tried ({a.trials} -> {b.trials})"
    if (a.replays_parted > 0) != (b.replays_parted > 0):
        yield "it now differs from run to run" if b.replays_parted else "it no longer differs from run to run"
    if set(a.ran) != set(b.ran):
        yield f"other kernels ran: {_lacking(a.ran, b.ran)} -> {_lacking(b.ran, a.ran)}"
    if a.worst_error != b.worst_error and a.worst_error is not None and b.worst_error is not None:
        norms = [e.relative_norm for e in (a.worst_error, b.worst_error)]
        shown = " -> ".join("not finite" if x is None else f"{x:.3g}" for x in norms)
        yield f"error against float64 {shown}, so some bits are others"


def _lacking(names: Sequence[str], others: Sequence[str]) -> str:
    """The first names that the others do not have."""
    own = sorted({*names} - {*others})
    more = f" and {len(own) - 3} more" if len(own) > 3 else ""
    return (", ".join(one_line(name, 48) for name in own[:3]) + more) or "none"


def _cell_changes(a: Cell, b: Cell) -> tuple[list[str], bool]:
    """What differs, in A's order, and whether it is worse. Times changed where the quartiles of the two runs don't
    overlap; the cause is not examined."""
    mine, theirs = {t.impl: t for t in a.timed}, {t.impl: t for t in b.timed}
    what = [f"{name}: {'only in A' if name in mine else 'only in B'}" for name in sorted(mine.keys() ^ theirs.keys())]
    worse = False
    for name, x in mine.items():
        y = theirs.get(name, x)
        if x.status != y.status:
            what.append(f"{name}: {x.status} -> {y.status}")
            worse |= y.status == Status.ERROR or x.status == Status.TIMED
        elif x.status == Status.TIMED and (x.low_us > y.high_us or y.low_us > x.high_us):
            times = f"{x.median_us:.4g} -> {y.median_us:.4g} us ({y.median_us / x.median_us:.2f} times)"
            what.append(f"{name}: {times}")
    return what, worse
