"""The verdict on sampled completions: how many differ, the possible cause, and what followed an axis.

Only where completions ran in different batches is divergence batch dependence, and only then does agreement show
anything about the batch. Distinct completions and distinct logprob traces are different findings: if the numbers under
equal tokens differ, that is batch dependence too.

A round that is run again in equal batches distinguishes run-to-run nondeterminism from batch dependence, but only for
its own completions: traces that differ only in rounds that were not run again may be noise of one run. So the batch is
named only where traces differ among completions whose rounds came out the same, bit for bit, when they were run again.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from nondet.core.records import BASE_ARM, AxisValue, Completion, Row, Run, Status
from nondet.core.statistics import one_sided_bound
from nondet.errors import UserError
from nondet.sampling.plan import UNSEEDED
from nondet.verdict.findings import (
    Answers,
    BatchEvidence,
    Finding,
    Verdict,
    answers_of,
    batch_evidence,
    called_wrong,
    change_of,
    distinct,
    ended_otherwise,
    ends_reasons,
    round_totals,
    sort_impls,
    strongest_first,
    successful,
)
from nondet.verdict.wording import Reason, reason, words

# The operator of the row that compares a round with its repetition.
REPLAY = "engine"


@dataclass(frozen=True)
class SampleCounts:
    """The completions of one prompt under one implementation, counted by what they gave and where.

    Attributes:
        n: Completions that succeeded.
        failed: Requests that did not, and are in no other figure.
        nonfinite: Completions with a logprob that is NaN or infinite.
        completions: Digest of the tokens -> count.
        traces: Round -> digest of the trace -> count.
        answers: (digest of the trace, reason why it ended) -> count.
    """

    impl: str
    prompt: int
    n: int
    failed: int
    nonfinite: int
    completions: Mapping[str, int]
    traces: Mapping[int, Mapping[str, int]]
    answers: Answers = field(default_factory=dict)

    @property
    def distinct_completions(self) -> int:
        """Different token sequences."""
        return len(self.completions)

    @property
    def distinct_traces(self) -> int:
        """Different sequences of tokens with the bits of their logprobs."""
        return len(self.traces_in(self.traces))

    def traces_in(self, rounds: Iterable[int]) -> set[str]:
        """The traces of these rounds."""
        return {trace for number in rounds for trace in self.traces.get(number, {})}


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


def repeated(again: Sequence[Row]) -> str:
    """The result of the repeated rounds, in a phrase."""
    return words(_repetition(again))


def _repetition(again: Sequence[Row]) -> Reason:
    """A repetition is one trial, however many requests were in it."""
    if not again:
        return reason("again-none")
    requests, other = (sum(int(r.extra.get(key, 0)) for r in again) for key in ("requests", "requests_parted"))
    code = "again-parted" if any(r.parted for r in again) else "again-equal"
    return reason(code, n=other, of=requests, rounds=len(again))


def subjects(run: Run) -> Iterator[tuple[SampleCounts, BatchEvidence]]:
    """Each prompt under each implementation, prompt by prompt, stock first; in one pass: a set has thousands."""
    order = {impl: i for i, impl in enumerate(sort_impls(c.impl for c in run.completions))}
    members: dict[tuple[int, int, str], list[Completion]] = {}
    for c in run.completions:
        members.setdefault((c.prompt, order[c.impl], c.impl), []).append(c)
    totals = {impl: round_totals(run, impl) for impl in order}
    load = run.header.plan.get("load")
    padded = isinstance(load, dict) and bool(load.get("graphs"))
    for (prompt, _, impl), mine in sorted(members.items()):
        good = successful(mine)
        traces: dict[int, Counter[str]] = {}
        for c in good:
            traces.setdefault(c.round, Counter())[c.trace] += 1
        counts = SampleCounts(
            impl=impl,
            prompt=prompt,
            n=len(good),
            failed=len(mine) - len(good),
            nonfinite=sum(c.nonfinite > 0 for c in good),
            completions=Counter(c.tokens_digest for c in good),
            traces=traces,
            answers=answers_of(good),
        )
        yield counts, batch_evidence(good, totals[impl], run.header.plan["prompts"][prompt]["tokens"], padded)


def judge_samples(run: Run) -> list[Verdict]:
    """A verdict for each prompt and implementation, prompt by prompt, stock first. Raises UserError: the records
    contradict each other."""
    again = replays(run)
    unseeded = UNSEEDED if run.header.plan.get("sampling") else ()
    verdicts = []
    for counts, batches in subjects(run):
        verdict = judge_counts(counts, batches, again.get(counts.impl, []))
        if counts.impl in unseeded:
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
    verdict = _judge_bits(counts, batches, again)
    if not counts.nonfinite:
        return verdict
    if verdict.finding == Finding.CLEAN:
        verdict = replace(verdict, reasons=(*verdict.reasons, reason("nan-agrees")))
    return called_wrong(verdict, reason("nonfinite", n=counts.nonfinite, of=counts.n))


def _judge_bits(counts: SampleCounts, batches: BatchEvidence, again: Sequence[Row]) -> Verdict:
    reasons = [reason("requests-failed", n=counts.failed)] if counts.failed else []
    if counts.n < 2:
        lone = counts.failed and not counts.n
        clause = reason("all-failed", n=counts.failed) if lone else reason("too-few", n=counts.n)
        return Verdict(counts.impl, (Finding.UNTESTED,), (clause,), tuple(reasons), counts.prompt)
    if counts.distinct_completions > 1 and counts.distinct_traces == 1:
        # a trace is the tokens and their logprobs: other tokens in one trace mean that the file contradicts itself, so
        # it can't have a verdict
        raise UserError(
            f"the run contradicts itself: {counts.impl} has {counts.distinct_completions} completions in one trace",
            "Was it edited by hand?",
        )
    reasons += ends_reasons(counts.answers)
    reasons += [reason("again", what=_repetition(again))] if again else []
    finding, limits = _attribute(counts, batches, again)
    clauses = distinct(counts.n, counts.distinct_completions, counts.distinct_traces, counts.answers)
    return Verdict(
        counts.impl,
        (finding,),
        (*clauses, reason("finding", findings=finding)),
        (*reasons, *limits),
        counts.prompt,
        (_bound(counts),) if finding == Finding.CLEAN else (),
        # one trace is one text: if it diverged, its end differs or a repeated run
        change_of(max(counts.distinct_completions, len({finish for _, finish in counts.answers})), (finding,)),
    )


def _bound(counts: SampleCounts) -> Reason:
    """The bound on the rate where nothing diverged. Completions of one round share its batches, and are not
    independent; the others are compared with the first round."""
    rounds, rate = len(counts.traces) - 1, one_sided_bound(counts.n - 1)
    if not rounds:
        return reason("bounds-one-round", completions=rate)
    return reason("bounds", rounds=one_sided_bound(rounds), n=rounds, completions=rate)


def _attribute(counts: SampleCounts, batches: BatchEvidence, again: Sequence[Row]) -> tuple[Finding, list[Reason]]:
    """The possible cause where completions differ, what agreement leaves open, and why."""
    if any(r.parted for r in again):
        return Finding.RUN_TO_RUN, []
    if counts.distinct_traces == 1:
        if ended_otherwise(counts.answers):  # one trace, and more than one answer nevertheless
            return Finding.UNATTRIBUTED, [reason("ends-alone")]
        if batches.constant:
            return Finding.CLEAN, [reason("constant")]
        if not batches.varied:
            return Finding.CLEAN, [reason("hardly-tested")]
        return Finding.CLEAN, [reason("graphs-padded")] if batches.padded else []
    reasons = [reason("tokens-agree")] if counts.distinct_completions == 1 else []
    reasons += [reason("graphs-first")] if batches.padded else []
    if batches.alone_parted:
        return Finding.RUN_TO_RUN, [*reasons, reason("alone-parted")]
    if not batches.varied:
        return Finding.UNATTRIBUTED, [*reasons, reason("batches-unknown")]
    # rows from before schema 3 are about the first round
    shown = counts.traces_in({int(row.extra.get("round", 0)) for row in again})
    if len(shown) < 2:
        return Finding.UNATTRIBUTED, [*reasons, reason("others-again" if again else "none-again")]
    unshown = counts.distinct_traces - len(shown)
    return Finding.BATCH, [*reasons, *([reason("traces-open", n=unshown)] if unshown else [])]


# What `nondet sample --vary` shows: along each axis, how many texts and traces, and what followed the axis. *Within* a
# value the batches change from completion to completion, as in any sample. *Across* values the plan is the same for
# each request: where a request's trace at a value is not its trace at the base, only the axis changed, so the bits
# followed it. That holds only while the same session run twice gives the same bits, and only for values that took
# effect. For an axis that changes the arithmetic itself (dtype, attention, threads) completions of different values are
# counted and not compared.


def is_varied(run: Run) -> bool:
    """Whether the run's completions belong to values of axes."""
    return "vary" in run.header.plan


@dataclass(frozen=True)
class ValueTally:
    """The completions at one value.

    Attributes:
        texts, traces: Digest -> count.
        moved: Requests whose trace is not that of the same request at the base, of `compared`.
        moved_first: Those among them that ran in the plan's first round, which the base ran again.
    """

    record: AxisValue
    n: int
    texts: Mapping[str, int]
    traces: Mapping[str, int]
    moved: int
    moved_first: int
    compared: int

    @property
    def comparisons(self) -> int:
        """With the base where the axis must not change anything, else of completions with the first."""
        return self.compared if self.record.held else max(0, self.n - 1)

    @property
    def parted(self) -> bool:
        """Whether any of these differed."""
        return self.moved > 0 if self.record.held else len(self.traces) > 1


@dataclass(frozen=True)
class AxisTally:
    """One axis under one implementation; only values that took effect are counted.

    Attributes:
        values: The base's first.
        idle: Values that did not take effect, or are not shown to have.
        texts, traces: Distinct ones over all values; within: of the value with the most.
    """

    axis: str
    held: bool
    values: tuple[ValueTally, ...]
    idle: tuple[ValueTally, ...]
    note: str
    texts: int
    texts_within: int
    traces: int
    traces_within: int

    @property
    def tried(self) -> tuple[ValueTally, ...]:
        """The values other than the base's."""
        return tuple(v for v in self.values if v.record.arm != BASE_ARM)

    @property
    def unproven(self) -> tuple[AxisValue, ...]:
        """The records of the values that are not counted."""
        return tuple(v.record for v in self.idle)

    @property
    def moved(self) -> int:
        """Requests whose trace followed the axis."""
        return sum(v.moved for v in self.tried)

    @property
    def compared(self) -> int:
        """Requests that were compared with themselves at the base."""
        return sum(v.compared for v in self.tried)


def tally_axes(run: Run, impl: str) -> list[AxisTally]:
    """Every axis under one implementation, in the order of the run."""
    by_arm: dict[str, list[Completion]] = {}
    for c in successful(run.completions):
        if c.impl == impl:
            by_arm.setdefault(c.arm, []).append(c)
    base = {_name(c): c for c in by_arm.get(BASE_ARM, [])}
    axes: dict[str, list[AxisValue]] = {}
    for record in run.axis_values:
        if record.impl == impl:
            axes.setdefault(record.axis, []).append(record)
    tallies = []
    for axis, records in axes.items():
        values, idle = (
            tuple(_tally(r, by_arm.get(r.arm, []), base) for r in records if r.proven == proven and (r.arm or proven))
            for proven in (True, False)
        )
        texts, traces = [v.texts for v in values], [v.traces for v in values]
        tallies.append(
            AxisTally(
                axis=axis,
                held=records[0].held,
                values=values,
                idle=idle,
                note=next((r.note for r in records if r.note), ""),
                texts=len(set().union(*texts)),
                texts_within=max(map(len, texts), default=0),
                traces=len(set().union(*traces)),
                traces_within=max(map(len, traces), default=0),
            )
        )
    return tallies


def _name(completion: Completion) -> str:
    """The request of the completion, the same in every arm."""
    return completion.request.rpartition(" ")[2]


def _tally(record: AxisValue, good: Sequence[Completion], base: Mapping[str, Completion]) -> ValueTally:
    pairs = [(c, base[_name(c)]) for c in good if _name(c) in base] if record.arm != BASE_ARM else []
    return ValueTally(
        record=record,
        n=len(good),
        texts=Counter(c.tokens_digest for c in good),
        traces=Counter(c.trace for c in good),
        moved=sum(a.trace != b.trace for a, b in pairs),
        moved_first=sum(a.trace != b.trace and b.round == 0 for a, b in pairs),
        compared=len(pairs),
    )


def judge_axes(run: Run) -> list[Verdict]:
    """A verdict for each implementation."""
    again = replays(run)
    verdicts = []
    for impl in sort_impls(c.impl for c in run.completions):
        mine = [c for c in run.completions if c.impl == impl]
        verdict = _judge_values(run, impl, len(mine) - len(successful(mine)), again.get(impl, []))
        lost = sum(c.nonfinite > 0 for c in successful(mine))
        verdicts.append(called_wrong(verdict, reason("nonfinite-values", n=lost)) if lost else verdict)
    return verdicts


def _judge_values(run: Run, impl: str, failed: int, again: Sequence[Row]) -> Verdict:
    axes = [t for t in tally_axes(run, impl) if not t.note]
    tested, texts = [t for t in axes if any(v.comparisons for v in t.values)], _texts(axes)
    reasons = [reason("value-unproven", axis=t.axis, value=r.value, proof=r.proof) for t in axes for r in t.unproven]
    reasons += [reason("requests-failed", n=failed)] if failed else []
    # where bits parted though the value is not shown to have taken effect, the cause is unknown
    idle = tuple(f"{t.axis}={v.record.value}" for t in axes for v in t.idle if v.parted)
    astray = reason("parted-idly", values=idle)
    unattributed = reason("findings", findings=Finding.UNATTRIBUTED)
    bounds: tuple[Reason, ...] = ()
    if not tested:
        clauses = [reason("no-pair" if any(t.tried for t in axes) else "no-effect")]
        clauses += [reason("but", what=astray), unattributed] if idle else [reason("so-nothing")]
        finding = Finding.UNATTRIBUTED if idle else Finding.UNTESTED
        return Verdict(impl, (finding,), tuple(clauses), tuple(reasons), 0, changes=change_of(texts, ()))
    clauses = _axis_clauses(tested)
    reasons.append(reason("again", what=_repetition(again)) if again else reason("base-once"))
    if any(r.parted for r in again):
        clauses.append(reason("finding", findings=Finding.RUN_TO_RUN))
        changes = change_of(texts, (Finding.RUN_TO_RUN,))
        return Verdict(impl, (Finding.RUN_TO_RUN,), tuple(clauses), tuple(reasons), 0, changes=changes)
    findings, limits = _attribute_axes(run, impl, tested, bool(again))
    reasons += limits
    if findings:
        clauses.append(reason("findings", findings=findings))
    elif idle:
        findings = (Finding.UNATTRIBUTED,)
        clauses += [astray, unattributed]
    else:
        clauses.append(reason("finding", findings=Finding.CLEAN))
        without = (
            ("idle-axes", [t for t in axes if not t.tried]),
            ("lone-axes", [t for t in axes if t.tried and t not in tested]),
        )
        untested = tuple(reason(code, axes=tuple(t.axis for t in of)) for code, of in without if of)
        findings = (Finding.UNPROVEN if untested else Finding.CLEAN,)
        bounds = (_value_bound(run, impl, tested), *([reason("but", what=untested)] if untested else []))
    return Verdict(impl, findings, tuple(clauses), tuple(reasons), 0, bounds, change_of(texts, findings))


def _texts(axes: Sequence[AxisTally]) -> int:
    """Distinct texts of the axis with the most; of one that may change the arithmetic, at the value with the most."""
    every = [(t.held, [v.texts for v in (*t.values, *t.idle)]) for t in axes]
    return max((len(set().union(*of)) if held else max(map(len, of), default=0) for held, of in every), default=0)


def _axis_clauses(tested: Sequence[AxisTally]) -> list[Reason]:
    held = [t for t in tested if t.held]
    following = tuple(t.axis for t in held if t.moved)
    within = max(t.traces_within for t in tested)
    which = reason("which", names=following) if following else None
    clauses = [reason("axes-followed", n=len(following), of=len(held), which=which)] if held else []
    # what may change the arithmetic is not a fault, but it was requested
    clauses += [reason("axis-apart", n=t.traces, axis=t.axis) for t in tested if not t.held and t.traces > 1]
    return [*clauses, reason("within", n=within) if within > 1 else reason("within-one")]


def _attribute_axes(
    run: Run, impl: str, tested: Sequence[AxisTally], again: bool
) -> tuple[tuple[Finding, ...], list[Reason]]:
    """What the bits followed, where the repeated round came out the same; nothing where they did not change."""
    findings, reasons = set(), []
    if any(t.traces_within > 1 for t in tested):
        good = successful(run.completions)
        first = {c.trace for c in good if (c.impl, c.arm, c.round) == (impl, BASE_ARM, 0)}
        findings.add(Finding.BATCH if again and len(first) > 1 else Finding.UNATTRIBUTED)
    moved = [v for t in tested if t.held for v in t.tried if v.moved]
    if moved:
        # a later round was run once: there the run itself may have changed the bits
        at_first = any(v.moved_first for v in moved)
        findings.add(Finding.OTHER if again and at_first else Finding.UNATTRIBUTED)
        reasons += [reason("followed-once")] if again and not at_first else []
    return strongest_first(findings), reasons


def _value_bound(run: Run, impl: str, tested: Sequence[AxisTally]) -> Reason:
    """The bound without a divergence: sessions of many values don't share one rate, so the smallest sample counts."""
    least = min((v.comparisons for t in tested for v in t.tried if v.comparisons), default=0)
    rounds = len({r.round for r in run.rounds if r.impl == impl and r.arm == BASE_ARM})
    if least < 1 or rounds < 1:
        return reason("bounds-none")
    rounds -= any(not t.held for t in tested)  # there the others are compared with the first completion
    by_round = reason("bounds-rounds", rate=one_sided_bound(rounds), n=rounds) if rounds else None
    return reason("bounds-values", rounds=by_round, completions=one_sided_bound(least), n=least)
