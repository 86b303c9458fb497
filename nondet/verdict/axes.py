"""What a run of `nondet sample --vary` shows: along each axis, how many texts and traces, and what followed the axis.

Two questions, told apart. *Within* a value the batches change from completion to completion, as in any sample. *Across*
values the plan is the same to the request: where a request's trace at a value is not its trace at the base, nothing but
the axis was changed, so the bits followed it. That holds only while the same session run twice gives the same bits, and
only of values that took effect. Of an axis that changes the arithmetic itself (dtype, attention, threads) completions
of different values are counted and not held against each other.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from nondet.core.records import BASE_ARM, AxisValue, Completion, Run
from nondet.core.statistics import one_sided_bound, percent
from nondet.verdict.findings import Finding, Verdict, plural, sort_impls
from nondet.verdict.samples import repeated, replays

__all__ = ["AxisTally", "ValueTally", "is_varied", "judge_axes", "tally_axes"]


_NO_EFFECT = "no axis took effect at any value"


def is_varied(run: Run) -> bool:
    """Whether the run's completions belong to values of axes."""
    return "vary" in run.header.plan


@dataclass(frozen=True)
class ValueTally:
    """The completions at one value.

    Attributes:
        n: Completions that succeeded.
        texts, traces: Digest -> how many.
        moved: Requests whose trace is not that of the same request at the base, of `compared`.
        moved_texts: Those among them whose tokens differ too.
        moved_first: Those among `moved` that ran in the plan's first round, the one that the base ran again.
    """

    record: AxisValue
    n: int
    failed: int
    nonfinite: int
    texts: Mapping[str, int]
    traces: Mapping[str, int]
    moved: int
    moved_texts: int
    moved_first: int
    compared: int


@dataclass(frozen=True)
class AxisTally:
    """One axis under one implementation; only values that took effect are counted.

    Attributes:
        values: The base's first.
        unproven: Values that did not take effect, or that nothing shows to have.
        idle: The completions at these.
        note: Why nothing was run.
    """

    impl: str
    axis: str
    held: bool
    values: tuple[ValueTally, ...]
    unproven: tuple[AxisValue, ...]
    note: str
    idle: tuple[ValueTally, ...] = ()

    @property
    def tried(self) -> tuple[ValueTally, ...]:
        """Values beside the base's."""
        return tuple(v for v in self.values if v.record.arm != BASE_ARM)

    @property
    def n(self) -> int:
        """Completions, the base's among them."""
        return sum(v.n for v in self.values)

    @property
    def texts(self) -> int:
        """Distinct texts over all values."""
        return len({digest for v in self.values for digest in v.texts})

    @property
    def traces(self) -> int:
        """Distinct traces over all values."""
        return len({digest for v in self.values for digest in v.traces})

    @property
    def traces_within(self) -> int:
        """Distinct traces of the value that has most."""
        return max((len(v.traces) for v in self.values), default=0)

    @property
    def texts_within(self) -> int:
        """Distinct texts of the value that has most."""
        return max((len(v.texts) for v in self.values), default=0)

    @property
    def moved(self) -> int:
        """Requests whose trace followed the axis."""
        return sum(v.moved for v in self.tried)

    @property
    def compared(self) -> int:
        """Requests that were held against themselves at the base."""
        return sum(v.compared for v in self.tried)


def tally_axes(run: Run, impl: str) -> list[AxisTally]:
    """Every axis under one implementation, in the order of the run."""
    by_arm: dict[str, list[Completion]] = {}
    for completion in run.completions:
        if completion.impl == impl:
            by_arm.setdefault(completion.arm, []).append(completion)
    base = {_name(c): c for c in by_arm.get(BASE_ARM, []) if c.status == "ok"}
    axes: dict[str, list[AxisValue]] = {}
    for record in run.axis_values:
        if record.impl == impl:
            axes.setdefault(record.axis, []).append(record)
    return [
        AxisTally(
            impl=impl,
            axis=axis,
            held=records[0].held,
            values=tuple(_tally(r, by_arm.get(r.arm, []), base) for r in records if r.proven),
            unproven=tuple(r for r in records if not r.proven and r.arm),
            note=next((r.note for r in records if r.note), ""),
            idle=tuple(_tally(r, by_arm.get(r.arm, []), base) for r in records if not r.proven and r.arm),
        )
        for axis, records in axes.items()
    ]


def _name(completion: Completion) -> str:
    """The request that it is of, the same in every arm."""
    return completion.request.rpartition(" ")[2]


def _tally(record: AxisValue, mine: Sequence[Completion], base: Mapping[str, Completion]) -> ValueTally:
    good = [c for c in mine if c.status == "ok"]
    pairs = [(c, base[_name(c)]) for c in good if _name(c) in base] if record.arm != BASE_ARM else []
    return ValueTally(
        record=record,
        n=len(good),
        failed=len(mine) - len(good),
        nonfinite=sum(c.nonfinite > 0 for c in good),
        texts=_counts([c.tokens_digest for c in good]),
        traces=_counts([c.trace for c in good]),
        moved=sum(a.trace != b.trace for a, b in pairs),
        moved_texts=sum(a.tokens_digest != b.tokens_digest for a, b in pairs),
        moved_first=sum(a.trace != b.trace and b.round == 0 for a, b in pairs),
        compared=len(pairs),
    )


def _counts(digests: Sequence[str]) -> dict[str, int]:
    counts: dict[str, int] = {}
    for digest in digests:
        counts[digest] = counts.get(digest, 0) + 1
    return counts


def judge_axes(run: Run) -> list[Verdict]:
    """A verdict for each implementation."""
    return [_judge(run, impl) for impl in sort_impls(c.impl for c in run.completions)]


def _judge(run: Run, impl: str) -> Verdict:
    axes = [t for t in tally_axes(run, impl) if not t.note]
    again = replays(run).get(impl, [])
    mine = [c for c in run.completions if c.impl == impl]
    good = [c for c in mine if c.status == "ok"]
    notes = [f"{t.axis}={r.value} is unproven, and counts nowhere: {r.proof}." for t in axes for r in t.unproven]
    notes += [f"{plural(len(mine) - len(good), 'failed request')} in no other figure."] if len(mine) > len(good) else []
    tested = [t for t in axes if any(_compared(t, v) for v in t.values)]

    def verdict(text: str, *findings: Finding) -> Verdict:
        first, *others = findings
        return Verdict(impl, first, text, tuple(notes), 0, tuple(others))

    parted = _parted_idly(axes)
    lost = sum(c.nonfinite > 0 for c in good)
    wrong = (Finding.WRONG,) if lost else ()
    head = f"{plural(lost, 'completion')} hold NaN or infinite logprobs: wrong; " if lost else ""
    if not tested:
        why = "no two completions can be held against each other" if any(t.tried for t in axes) else _NO_EFFECT
        if parted:
            return verdict(f"{head}{why}, but {parted}: {Finding.UNATTRIBUTED}", *wrong, Finding.UNATTRIBUTED)
        return verdict(f"{head}{why}, so nothing was compared", *wrong, Finding.UNTESTED)
    held = [t for t in tested if t.held]
    following = [t.axis for t in held if t.moved]
    within = max(t.traces_within for t in tested)
    clauses = []
    if held:
        which = f" ({', '.join(following)})" if following else ""
        of = plural(len(held), "axis", "axes")
        clauses.append(f"logprob traces follow {len(following)} of {of} varied alone{which}")
    # what may change the arithmetic is no fault, and still what was asked for
    apart = [t for t in tested if not t.held and t.traces > 1]
    clauses += [f"{t.traces:,} distinct traces over the values of {t.axis}, which may change them" for t in apart]
    clauses.append(f"at one value up to {within:,} distinct traces" if within > 1 else "one trace at every value")
    text = head + "; ".join(clauses)
    notes += [f"Run again: {repeated(again)}."] if again else ["The base was not run again: run may be the cause."]
    if any(r.parted for r in again):
        return verdict(f"{text}, {Finding.RUN_TO_RUN}", *wrong, Finding.RUN_TO_RUN)
    if not following and within == 1:
        if parted:
            return verdict(f"{text}; {parted}: {Finding.UNATTRIBUTED}", *wrong, Finding.UNATTRIBUTED)
        if wrong:
            return verdict(text, *wrong)
        text = f"{text}, {Finding.CLEAN} ({_bound(run, impl, tested)})"
        untested = _untested(axes, tested)
        return verdict(f"{text}, but {untested}", Finding.UNPROVEN) if untested else verdict(text, Finding.CLEAN)
    findings = []
    if within > 1:
        findings.append(_within(run, impl) if again else Finding.UNATTRIBUTED)
    if following:
        # a later round was run once: there the run itself may be what moved the bits
        first = any(v.moved_first for t in held for v in t.tried)
        findings.append(Finding.OTHER if again and first else Finding.UNATTRIBUTED)
        if again and not first:
            notes.append("What followed an axis did so in rounds that were not run again: run may be the cause.")
    found = [f for f in Finding if f in findings]
    return verdict(f"{text}: {', '.join(found)}", *wrong, *found)


def _compared(tally: AxisTally, value: ValueTally) -> int:
    """Comparisons at a value: with the base where the axis must move nothing, else of completions with the first."""
    return value.compared if tally.held else max(0, value.n - 1)


def _parted_idly(axes: Iterable[AxisTally]) -> str:
    """Where bits parted though nothing shows the value to have taken effect: by what, nobody knows. "" for nowhere."""
    idle = [(t, v) for t in axes for v in t.idle if (v.moved if t.held else len(v.traces) > 1)]
    names = ", ".join(f"{t.axis}={v.record.value}" for t, v in idle)
    return f"bits parted at {names}, which nothing shows to have taken effect" if idle else ""


def _untested(axes: Iterable[AxisTally], tested: Sequence[AxisTally]) -> str:
    """Which of the axes that were asked for say nothing, and why; "" where all do."""
    idle = [t.axis for t in axes if not t.tried]
    alone = [t.axis for t in axes if t.tried and t not in tested]
    why = [f"of {', '.join(idle)} no value took effect"] if idle else []
    return "; ".join(why + ([f"of {', '.join(alone)} nothing was compared"] if alone else []))


def _within(run: Run, impl: str) -> Finding:
    """Batch-dependent where the round that was run again, and came out the same, holds several traces."""
    first = [c for c in run.completions if c.impl == impl and c.arm == BASE_ARM and c.round == 0 and c.status == "ok"]
    return Finding.BATCH if len({c.trace for c in first}) > 1 else Finding.UNATTRIBUTED


def _bound(run: Run, impl: str, tested: Sequence[AxisTally]) -> str:
    """What no divergence leaves: sessions of many values are no draws from one rate, so the least is told."""
    least = min((n for t in tested for v in t.tried if (n := _compared(t, v))), default=0)
    rounds = len({r.round for r in run.rounds if r.impl == impl and r.arm == BASE_ARM})
    if least < 1 or rounds < 1:
        return "too few for a bound"
    rounds -= any(not t.held for t in tested)  # there the first completion is what the others are held against
    by_round = (
        f"below {percent(one_sided_bound(rounds), 'up')} of rounds ({plural(rounds, 'round')}), " if rounds else ""
    )
    by_completion = f"below {percent(one_sided_bound(least), 'up')} of completions if they were independent"
    return f"at 95%, one-sided, at each value: {by_round}{by_completion} ({least:,})"
