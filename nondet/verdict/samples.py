"""The verdict on sampled completions: how many differ, and what that may be blamed on.

Completions met different batches, or they did not: only the first makes divergence batch dependence, and only then
does agreement say anything about the batch. Distinct completions and distinct logprob traces are different findings:
tokens may agree while the numbers under them do not, and that is batch dependence all the same.

A round that is run again in equal batches tells run-to-run nondeterminism from batch dependence, and it tells for its
own completions alone: traces that part only in rounds that nobody ran again may be noise of one run. So the batch is
named only where traces part among completions whose rounds came out the same, bit for bit, when they were run again.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from nondet.core.records import Completion, Row, Run, Status
from nondet.core.statistics import one_sided_bound, percent
from nondet.errors import UserError
from nondet.verdict.batches import BatchEvidence, evidence_of, padded, round_totals
from nondet.verdict.ends import Ends, ended_otherwise, ends_of, ends_text
from nondet.verdict.findings import Finding, Verdict, plural, sort_impls

__all__ = [
    "REPLAY",
    "UNSEEDED",
    "SampleCounts",
    "is_replay",
    "judge_counts",
    "judge_samples",
    "repeated",
    "replays",
    "sample_counts",
]

# The operator of the row that says how a round, run twice, compared with itself.
REPLAY = "engine"
# Implementations whose draw is left to the engine.
UNSEEDED = ("stock", "unseeded-invariant")
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
