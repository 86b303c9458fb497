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
from nondet.core.statistics import one_sided_bound, percent
from nondet.errors import UserError
from nondet.sampling.plan import UNSEEDED
from nondet.verdict.findings import (
    BatchEvidence,
    Ends,
    Finding,
    Verdict,
    ended_otherwise,
    ends_of,
    ends_text,
    evidence_of,
    padded,
    plural,
    round_totals,
    sort_impls,
)

# The operator of the row that says how a round, run twice, compared with itself.
REPLAY = "engine"
_UNSEEDED_NOTE = (
    "The engine draws from one generator for the whole batch, so a seed is nobody's own: who else is there changes "
    "what is drawn, whatever the logits."
)


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
    """What the repeated rounds showed, in a phrase. A repetition is one trial, however many requests rode in it."""
    if not again:
        return "not tried"
    requests, other = (sum(int(r.extra.get(key, 0)) for r in again) for key in ("requests", "requests_parted"))
    rounds = plural(len(again), "round")
    if any(r.parted for r in again):
        return f"{other:,} of {plural(requests, 'request')} in {rounds} came out otherwise"
    return f"{rounds} of {plural(requests, 'request')} the same, bit for bit: {plural(len(again), 'repetition')}"


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
            verdict = replace(verdict, notes=(*verdict.notes, _UNSEEDED_NOTE))
        verdicts.append(verdict)
    return verdicts


def judge_counts(counts: SampleCounts, batches: BatchEvidence, again: Sequence[Row] = ()) -> Verdict:
    """The verdict on the completions of one prompt under one implementation.

    Args:
        again: The rows of rounds that were run again, in equal batches.

    Raises:
        UserError: the counts contradict each other.
    """
    notes = []
    if counts.failed:
        notes.append(f"{plural(counts.failed, 'failed request')} counted in no other figure.")

    def verdict(*findings: Finding, text: str) -> Verdict:
        first, *others = findings
        return Verdict(counts.impl, first, text, tuple(notes), counts.prompt, tuple(others))

    if not counts.n and counts.failed:
        text = f"nothing was compared: {plural(counts.failed, 'request')} failed and none succeeded"
        return verdict(Finding.UNTESTED, text=text)
    wrong = (Finding.WRONG,) if counts.nonfinite else ()
    lost = f"{plural(counts.nonfinite, 'completion')} of {counts.n:,} hold NaN or infinite logprobs: wrong"
    if counts.n < 2:
        text = f"{plural(counts.n, 'completion')}, so nothing was compared"
        return verdict(*wrong, Finding.UNTESTED, text=f"{lost}; {text}" if wrong else text)
    if counts.distinct_completions > 1 and counts.distinct_traces == 1:
        # a trace is the tokens and their logprobs: other tokens in one trace mean that the file contradicts itself, and
        # no verdict may rest on it
        raise UserError(
            f"the run contradicts itself: {counts.impl} has {counts.distinct_completions} completions in one trace",
            "Was it edited by hand?",
        )
    text = _counts_text(counts)
    odd = ended_otherwise([counts.ends])
    if ended := ends_text([counts.ends]):
        notes.append(ended)
    if wrong:
        text = f"{lost}; {text}"
    if again:
        notes.append(f"Run again: {repeated(again)}.")
        if any(r.parted for r in again):
            return verdict(*wrong, Finding.RUN_TO_RUN, text=f"{text}, {Finding.RUN_TO_RUN}")
    if counts.distinct_traces > 1:
        if counts.distinct_completions == 1:
            notes.append("The tokens agree while the numbers under them do not: a closer race would part the tokens.")
        if batches.padded:
            notes.append(
                "Steps ran as CUDA graphs: in each round the first step of a size runs without one. Where that gives "
                "other bits than a replay, who came first in the round shows as the batch."
            )
        finding = _attribute(counts, batches, again, notes)
        return verdict(*wrong, finding, text=f"{text}, {finding}")
    if odd:  # the run that has one trace alone has more than one answer all the same
        notes.append("Answers that ended otherwise agree in all else: batch or run may be the cause.")
        return verdict(*wrong, Finding.UNATTRIBUTED, text=f"{text}, {Finding.UNATTRIBUTED}")
    if batches.constant:
        notes.append("Every completion ran alone, in equal batches: this says nothing about batch dependence.")
    elif not batches.varied:
        notes.append("No two completions are known to have met different batches: batch dependence was hardly tested.")
    elif batches.padded:
        notes.append("Steps ran as CUDA graphs, padded to a few sizes: products met those sizes, and no others.")
    if wrong:
        notes.append("NaN agrees with itself whatever was computed: that nothing diverged says nothing here.")
        return verdict(*wrong, text=text)
    return verdict(Finding.CLEAN, text=f"{text}, {Finding.CLEAN} ({_bounds(counts)})")


def _bounds(counts: SampleCounts) -> str:
    """What no divergence leaves, by both units: completions of one round ride in one batch, and are not independent."""
    by_completion = f"below {percent(one_sided_bound(counts.n - 1), 'up')} of completions if they were independent"
    rounds = len(counts.traces) - 1  # the first is what the others are held against
    if rounds < 1:
        return f"at 95%, one-sided: {by_completion}; one round bounds no rate of rounds"
    by_round = f"below {percent(one_sided_bound(rounds), 'up')} of rounds"
    return f"at 95%, one-sided: {by_round} ({rounds:,} compared), {by_completion}"


def _counts_text(counts: SampleCounts) -> str:
    """Distinct completions, and distinct traces where there are more of them."""
    text = f"{plural(counts.distinct_completions, 'distinct completion')} of {counts.n:,}"
    if counts.distinct_traces != counts.distinct_completions:
        traces = f"{counts.distinct_traces:,} distinct logprob traces"
        text += f", but {traces}" if counts.distinct_completions == 1 else f" ({traces})"
    odd = ended_otherwise([counts.ends])
    return f"{text}, {odd:,} of which ended otherwise than equal ones" if odd else text


def _attribute(counts: SampleCounts, batches: BatchEvidence, again: Sequence[Row], notes: list[str]) -> Finding:
    """What the divergence of sampled completions may be blamed on. No repetition came out otherwise."""
    if batches.alone_parted:
        notes.append(
            "Completions that ran alone, in equal batches at every step, parted: the batch is not what changed."
        )
        return Finding.RUN_TO_RUN
    if not batches.varied:
        notes.append("These completions are not known to have met different batches: batch or run may be the cause.")
        return Finding.UNATTRIBUTED
    shown = {_round_of(row) for row in again}
    if len(counts.traces_in(sorted(shown))) > 1:
        open_ = len(counts.traces_in(counts.traces) - counts.traces_in(sorted(shown)))
        if open_:
            others = plural(open_, "other trace was", "other traces were")
            notes.append(f"{others} seen only in rounds that were not run again: batch or run may be their cause.")
        return Finding.BATCH
    if again:
        notes.append("The rounds in which traces parted were not run again: batch or run may be the cause.")
    else:
        notes.append("No round was run again: batch or run may be the cause.")
    return Finding.UNATTRIBUTED


# What a run of `nondet sample --vary` shows: along each axis, how many texts and traces, and what followed the axis.
#
# Two questions, told apart. *Within* a value the batches change from completion to completion, as in any sample.
# *Across* values the plan is the same to the request: where a request's trace at a value is not its trace at the base,
# nothing but the axis was changed, so the bits followed it. That holds only while the same session run twice gives the
# same bits, and only of values that took effect. Of an axis that changes the arithmetic itself (dtype, attention,
# threads) completions of different values are counted and not held against each other.

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
        texts=_counts_axes([c.tokens_digest for c in good]),
        traces=_counts_axes([c.trace for c in good]),
        moved=sum(a.trace != b.trace for a, b in pairs),
        moved_texts=sum(a.tokens_digest != b.tokens_digest for a, b in pairs),
        moved_first=sum(a.trace != b.trace and b.round == 0 for a, b in pairs),
        compared=len(pairs),
    )


def _counts_axes(digests: Sequence[str]) -> dict[str, int]:
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
