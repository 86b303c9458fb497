"""The verdict on sampled completions: how many differ, what that may be blamed on, and what followed an axis.

Completions met different batches, or they did not: only the first makes divergence batch dependence, and only then
does agreement say anything about the batch. Distinct completions and distinct logprob traces are different findings:
tokens may agree while the numbers under them do not, and that is batch dependence all the same.

A round that is run again in equal batches tells run-to-run nondeterminism from batch dependence, and it tells for its
own completions alone: traces that part only in rounds that nobody ran again may be noise of one run. So the batch is
named only where traces part among completions whose rounds came out the same, bit for bit, when they were run again.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from nondet.core.records import BASE_ARM, AxisValue, Completion, Row, Run, Status
from nondet.core.statistics import one_sided_bound
from nondet.errors import UserError
from nondet.sampling.plan import UNSEEDED
from nondet.verdict.findings import (
    BatchEvidence,
    Ends,
    Finding,
    Verdict,
    distinct,
    ended_otherwise,
    ends_of,
    ends_reasons,
    evidence_of,
    padded,
    round_totals,
    sort_impls,
)
from nondet.verdict.wording import Reason, reason, words

# The operator of the row that says how a round, run twice, compared with itself.
REPLAY = "engine"


@dataclass(frozen=True)
class SampleCounts:
    """The completions of one prompt under one implementation, counted by what they gave and where.

    Attributes:
        n: Completions that succeeded.
        failed: Requests that did not: in no other figure.
        nonfinite: Completions with a logprob that is NaN or infinite.
        completions: Digest of the tokens -> how many.
        traces: Round -> digest of the trace -> how many.
        ends: Digest of the trace -> reason why it ended -> how many.
    """

    impl: str
    prompt: int
    n: int
    failed: int
    nonfinite: int
    completions: Mapping[str, int]
    traces: Mapping[int, Mapping[str, int]]
    ends: Ends = field(default_factory=dict)

    @property
    def distinct_completions(self) -> int:
        """Different token sequences."""
        return len(self.completions)

    @property
    def distinct_traces(self) -> int:
        """Different sequences of tokens with the bits of their logprobs."""
        return len(self.traces_in(self.traces))

    def traces_in(self, rounds: Sequence[int] | Mapping[int, object]) -> set[str]:
        """The traces of these rounds."""
        return {trace for number in rounds for trace in self.traces.get(number, {})}


def sample_counts(run: Run, impl: str, prompt: int) -> SampleCounts:
    """Count the completions of `prompt` under `impl`."""
    return _counts([c for c in run.completions if c.impl == impl and c.prompt == prompt], impl, prompt)


def _counts(mine: Sequence[Completion], impl: str, prompt: int) -> SampleCounts:
    good = [c for c in mine if c.status == "ok"]
    traces: dict[int, Counter[str]] = {}
    for completion in good:
        traces.setdefault(completion.round, Counter())[completion.trace] += 1
    return SampleCounts(
        impl=impl,
        prompt=prompt,
        n=len(good),
        failed=len(mine) - len(good),
        nonfinite=sum(c.nonfinite > 0 for c in good),
        completions=Counter(c.tokens_digest for c in good),
        traces=traces,
        ends=ends_of(good),
    )


def is_replay(row: Row) -> bool:
    """Whether the row compares a round of completions with its repetition."""
    return row.operator == REPLAY and row.varied == "run"


def replays(run: Run) -> dict[str, list[Row]]:
    """The rows that compare a round with its repetition, by implementation; without those that failed."""
    rows: dict[str, list[Row]] = {}
    for row in run.rows:
        if is_replay(row) and row.status in (Status.IDENTICAL, Status.DIVERGENT):
            rows.setdefault(row.impl, []).append(row)
    return rows


def _round_of(replay: Row) -> int:
    """The round that was run again; rows from before schema 3 are about the first."""
    return int(replay.extra.get("round", 0))


def repeated(again: Sequence[Row]) -> str:
    """What the repeated rounds showed, in a phrase."""
    return words(_repetition(again))


def _repetition(again: Sequence[Row]) -> Reason:
    """A repetition is one trial, however many requests rode in it."""
    if not again:
        return reason("again-none")
    requests, other = (sum(int(r.extra.get(key, 0)) for r in again) for key in ("requests", "requests_parted"))
    code = "again-parted" if any(r.parted for r in again) else "again-equal"
    return reason(code, n=other, of=requests, rounds=len(again))


def judge_samples(run: Run) -> list[Verdict]:
    """A verdict for each prompt and implementation, prompt by prompt, stock first.

    Raises:
        UserError: the records contradict each other.
    """
    again = replays(run)
    order = {impl: i for i, impl in enumerate(sort_impls(c.impl for c in run.completions))}
    # in one pass: a set has thousands of prompts
    subjects: dict[tuple[int, int, str], list[Completion]] = {}
    for c in run.completions:
        subjects.setdefault((c.prompt, order[c.impl], c.impl), []).append(c)
    totals = {impl: round_totals(run, impl) for impl in order}
    prompts = run.header.plan["prompts"] if subjects else []
    drawn = bool(run.header.plan.get("sampling"))
    verdicts = []
    for (prompt, _, impl), mine in sorted(subjects.items()):
        evidence = evidence_of(mine, totals[impl], prompts[prompt]["tokens"], padded(run))
        verdict = judge_counts(_counts(mine, impl, prompt), evidence, again.get(impl, []))
        if drawn and impl in UNSEEDED:
            verdict = replace(verdict, reasons=(*verdict.reasons, reason("unseeded-engine")))
        verdicts.append(verdict)
    return verdicts


def judge_counts(counts: SampleCounts, batches: BatchEvidence, again: Sequence[Row] = ()) -> Verdict:
    """The verdict on the completions of one prompt under one implementation.

    Args:
        again: The rows of rounds that were run again, in equal batches.

    Raises:
        UserError: the counts contradict each other.
    """
    reasons = [reason("requests-failed", n=counts.failed)] if counts.failed else []
    wrong = [Finding.WRONG] if counts.nonfinite else []
    clauses = [reason("nonfinite", n=counts.nonfinite, of=counts.n)] if counts.nonfinite else []

    def verdict(finding: Finding, *, bounds: tuple[Reason, ...] = ()) -> Verdict:
        if finding != Finding.UNTESTED:
            clauses.append(reason("finding", findings=finding))
        first, *others = [*wrong, finding]
        return Verdict(counts.impl, first, tuple(clauses), tuple(reasons), counts.prompt, tuple(others), bounds)

    if counts.n < 2:
        lone = counts.failed and not counts.n
        clauses.append(reason("all-failed", n=counts.failed) if lone else reason("too-few", n=counts.n))
        return verdict(Finding.UNTESTED)
    if counts.distinct_completions > 1 and counts.distinct_traces == 1:
        # a trace is the tokens and their logprobs: other tokens in one trace mean that the file contradicts itself, and
        # no verdict may rest on it
        raise UserError(
            f"the run contradicts itself: {counts.impl} has {counts.distinct_completions} completions in one trace",
            "Was it edited by hand?",
        )
    odd = ended_otherwise([counts.ends])
    clauses += distinct(counts.n, counts.distinct_completions, counts.distinct_traces, [counts.ends])
    reasons += ends_reasons([counts.ends])
    if again:
        reasons.append(reason("again", what=_repetition(again)))
        if any(r.parted for r in again):
            return verdict(Finding.RUN_TO_RUN)
    if counts.distinct_traces > 1:
        if counts.distinct_completions == 1:
            reasons.append(reason("tokens-agree"))
        if batches.padded:
            reasons.append(reason("graphs-first"))
        return verdict(_attribute(counts, batches, again, reasons))
    if odd:  # the run that has one trace alone has more than one answer all the same
        reasons.append(reason("ends-alone"))
        return verdict(Finding.UNATTRIBUTED)
    if batches.constant:
        reasons.append(reason("constant"))
    elif not batches.varied:
        reasons.append(reason("hardly-tested"))
    elif batches.padded:
        reasons.append(reason("graphs-padded"))
    if wrong:
        reasons.append(reason("nan-agrees"))
        return Verdict(counts.impl, Finding.WRONG, tuple(clauses), tuple(reasons), counts.prompt)
    # completions of one round ride in one batch, and are not independent; the first round is what the others are held
    # against
    rounds, rate = len(counts.traces) - 1, one_sided_bound(counts.n - 1)
    bounds = reason("bounds-one-round", completions=rate)
    if rounds:
        bounds = reason("bounds", rounds=one_sided_bound(rounds), n=rounds, completions=rate)
    return verdict(Finding.CLEAN, bounds=(bounds,))


def _attribute(counts: SampleCounts, batches: BatchEvidence, again: Sequence[Row], reasons: list[Reason]) -> Finding:
    """What the divergence of sampled completions may be blamed on. No repetition came out otherwise."""
    if batches.alone_parted:
        reasons.append(reason("alone-parted"))
        return Finding.RUN_TO_RUN
    if not batches.varied:
        reasons.append(reason("batches-unknown"))
        return Finding.UNATTRIBUTED
    shown = counts.traces_in(sorted({_round_of(row) for row in again}))
    if len(shown) > 1:
        if unshown := len(counts.traces_in(counts.traces) - shown):
            reasons.append(reason("traces-open", n=unshown))
        return Finding.BATCH
    reasons.append(reason("others-again" if again else "none-again"))
    return Finding.UNATTRIBUTED


# What a run of `nondet sample --vary` shows: along each axis, how many texts and traces, and what followed the axis.
#
# Two questions, told apart. *Within* a value the batches change from completion to completion, as in any sample.
# *Across* values the plan is the same to the request: where a request's trace at a value is not its trace at the base,
# nothing but the axis was changed, so the bits followed it. That holds only while the same session run twice gives the
# same bits, and only of values that took effect. Of an axis that changes the arithmetic itself (dtype, attention,
# threads) completions of different values are counted and not held against each other.


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
        texts=Counter(c.tokens_digest for c in good),
        traces=Counter(c.trace for c in good),
        moved=sum(a.trace != b.trace for a, b in pairs),
        moved_texts=sum(a.tokens_digest != b.tokens_digest for a, b in pairs),
        moved_first=sum(a.trace != b.trace and b.round == 0 for a, b in pairs),
        compared=len(pairs),
    )


def judge_axes(run: Run) -> list[Verdict]:
    """A verdict for each implementation."""
    return [_judge(run, impl) for impl in sort_impls(c.impl for c in run.completions)]


def _judge(run: Run, impl: str) -> Verdict:
    axes = [t for t in tally_axes(run, impl) if not t.note]
    again = replays(run).get(impl, [])
    mine = [c for c in run.completions if c.impl == impl]
    good = [c for c in mine if c.status == "ok"]
    values = [(t, r) for t in axes for r in t.unproven]
    reasons = [reason("value-unproven", axis=t.axis, value=r.value, proof=r.proof) for t, r in values]
    reasons += [reason("axes-failed", n=len(mine) - len(good))] if len(mine) > len(good) else []
    lost = sum(c.nonfinite > 0 for c in good)
    wrong = [Finding.WRONG] if lost else []
    clauses = [reason("nonfinite-values", n=lost)] if lost else []

    def verdict(*findings: Finding, bounds: tuple[Reason, ...] = ()) -> Verdict:
        first, *others = [*wrong, *findings]
        return Verdict(impl, first, tuple(clauses), tuple(reasons), 0, tuple(others), bounds)

    tested = [t for t in axes if any(_compared(t, v) for v in t.values)]
    # where bits parted though nothing shows the value to have taken effect: by what, nobody knows
    idle = [(t, v) for t in axes for v in t.idle if (v.moved if t.held else len(v.traces) > 1)]
    parted = reason("parted-idly", values=tuple(f"{t.axis}={v.record.value}" for t, v in idle))
    unattributed = reason("findings", findings=Finding.UNATTRIBUTED)
    if not tested:
        clauses.append(reason("no-pair" if any(t.tried for t in axes) else "no-effect"))
        clauses += [reason("but", what=parted), unattributed] if idle else [reason("so-nothing")]
        return verdict(Finding.UNATTRIBUTED if idle else Finding.UNTESTED)
    held = [t for t in tested if t.held]
    following = tuple(t.axis for t in held if t.moved)
    within = max(t.traces_within for t in tested)
    if held:
        which = reason("which", names=following) if following else None
        clauses.append(reason("axes-followed", n=len(following), of=len(held), which=which))
    # what may change the arithmetic is no fault, and still what was asked for
    clauses += [reason("axis-apart", n=t.traces, axis=t.axis) for t in tested if not t.held and t.traces > 1]
    clauses.append(reason("within", n=within) if within > 1 else reason("within-one"))
    reasons.append(reason("again", what=_repetition(again)) if again else reason("base-once"))
    if any(r.parted for r in again):
        clauses.append(reason("finding", findings=Finding.RUN_TO_RUN))
        return verdict(Finding.RUN_TO_RUN)
    if not following and within == 1:
        if idle:
            clauses += [parted, unattributed]
            return verdict(Finding.UNATTRIBUTED)
        if wrong:
            return verdict()
        clauses.append(reason("finding", findings=Finding.CLEAN))
        untested = _untested(axes, tested)
        bounds = (_bound(run, impl, tested), *([reason("but", what=untested)] if untested else []))
        return verdict(Finding.UNPROVEN if untested else Finding.CLEAN, bounds=bounds)
    findings = []
    if within > 1:
        findings.append(_within(run, impl) if again else Finding.UNATTRIBUTED)
    if following:
        # a later round was run once: there the run itself may be what moved the bits
        first = any(v.moved_first for t in held for v in t.tried)
        findings.append(Finding.OTHER if again and first else Finding.UNATTRIBUTED)
        if again and not first:
            reasons.append(reason("followed-once"))
    ordered = tuple(f for f in Finding if f in findings)
    clauses.append(reason("findings", findings=ordered))
    return verdict(*ordered)


def _compared(tally: AxisTally, value: ValueTally) -> int:
    """Comparisons at a value: with the base where the axis must move nothing, else of completions with the first."""
    return value.compared if tally.held else max(0, value.n - 1)


def _untested(axes: Iterable[AxisTally], tested: Sequence[AxisTally]) -> tuple[Reason, ...]:
    """Which of the axes that were asked for say nothing, and why."""
    idle = tuple(t.axis for t in axes if not t.tried)
    alone = tuple(t.axis for t in axes if t.tried and t not in tested)
    return tuple(reason(code, axes=names) for code, names in (("idle-axes", idle), ("lone-axes", alone)) if names)


def _within(run: Run, impl: str) -> Finding:
    """Batch-dependent where the round that was run again, and came out the same, holds several traces."""
    first = [c for c in run.completions if c.impl == impl and c.arm == BASE_ARM and c.round == 0 and c.status == "ok"]
    return Finding.BATCH if len({c.trace for c in first}) > 1 else Finding.UNATTRIBUTED


def _bound(run: Run, impl: str, tested: Sequence[AxisTally]) -> Reason:
    """What no divergence leaves: sessions of many values are no draws from one rate, so the least is told."""
    least = min((n for t in tested for v in t.tried if (n := _compared(t, v))), default=0)
    rounds = len({r.round for r in run.rounds if r.impl == impl and r.arm == BASE_ARM})
    if least < 1 or rounds < 1:
        return reason("bounds-none")
    rounds -= any(not t.held for t in tested)  # there the first completion is what the others are held against
    by_round = reason("bounds-rounds", rate=one_sided_bound(rounds), n=rounds) if rounds else None
    return reason("bounds-values", rounds=by_round, completions=one_sided_bound(least), n=least)
