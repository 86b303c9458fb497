"""The verdict on sampled completions: how many differ, and what that may be blamed on.

Completions met different batches, or they did not: only the first makes divergence batch dependence, and only then
does agreement say anything about the batch. Distinct completions and distinct logprob traces are different findings:
tokens may agree while the numbers under them do not, and that is batch dependence all the same. A round that was run
twice tells run-to-run nondeterminism from both.
"""

from __future__ import annotations

from nondet.errors import UserError
from nondet.reports.batches import BatchEvidence
from nondet.reports.intervals import one_sided_bound, percent
from nondet.reports.verdict import Finding, Verdict, parted, plural
from nondet.result import Row, Run, Status
from nondet.sampling.summary import SampleSummary

__all__ = ["REPLAY", "is_replay", "judge_sample", "repeated", "replays"]

# The operator of the row that says how a round, run twice, compared with itself.
REPLAY = "engine"


def replays(run: Run) -> dict[str, Row]:
    """The rows that compare a round with its repetition, by implementation; without those that failed."""
    return {r.impl: r for r in run.rows if is_replay(r) and r.status in (Status.IDENTICAL, Status.DIVERGENT)}


def is_replay(row: Row) -> bool:
    """Whether the row compares a round of completions with its repetition."""
    return row.operator == REPLAY and row.varied == "run"


def repeated(replay: Row | None) -> str:
    """What the repeated round showed, in a phrase."""
    if replay is None:
        return "not tried"
    requests, other = (int(replay.extra.get(key, 0)) for key in ("requests", "requests_parted"))
    if parted(replay):
        return f"{other:,} of {plural(requests, 'request')} came out otherwise"
    if not requests:
        return "the same, bit for bit"
    bound = percent(one_sided_bound(requests), "up")
    return f"all {plural(requests, 'request')} the same, bit for bit (others below {bound} at 95%, one-sided)"


def judge_sample(summary: SampleSummary, batches: BatchEvidence, replay: Row | None = None) -> Verdict:
    """The verdict on the completions of one prompt under one implementation.

    Args:
        replay: The row of a round that was run twice, in equal batches.

    Raises:
        UserError: the counts contradict each other.
    """
    notes = []
    if summary.failed:
        notes.append(f"{plural(summary.failed, 'failed request')} counted in no other figure.")

    def verdict(finding: Finding, text: str) -> Verdict:
        return Verdict(summary.impl, finding, text, tuple(notes), summary.prompt)

    if summary.n < 2:
        return verdict(Finding.UNTESTED, f"{plural(summary.n, 'completion')}, so nothing was compared")
    if summary.distinct_completions > 1 and summary.distinct_traces == 1:
        # traces cover the tokens, so this can't be: the file contradicts itself, and no verdict may rest on it
        raise UserError(
            f"the run contradicts itself: {summary.impl} has {summary.distinct_completions} completions in one trace",
            "Was it edited by hand?",
        )
    counts = _counts(summary)
    if replay is not None:
        notes.append(f"One round was run twice: {repeated(replay)}.")
        if parted(replay):
            return verdict(Finding.RUN_TO_RUN, f"{counts}, {Finding.RUN_TO_RUN}")
    if summary.distinct_traces > 1:
        if summary.distinct_completions == 1:
            notes.append("The tokens agree while the numbers under them do not: a closer race would part the tokens.")
        finding = _attribute(batches, replay, notes)
        return verdict(finding, f"{counts}, {finding}" if finding != Finding.UNATTRIBUTED else counts)
    if batches.constant:
        notes.append("Every completion ran alone, in equal batches: this says nothing about batch dependence.")
    elif not batches.varied:
        notes.append("No two completions are known to have met different batches: batch dependence was hardly tested.")
    bound = percent(summary.rate.high, "up")
    return verdict(Finding.CLEAN, f"{counts}, {Finding.CLEAN} (rate below {bound} at 95%, one-sided)")


def _counts(summary: SampleSummary) -> str:
    """Distinct completions, and distinct traces where there are more of them."""
    text = f"{plural(summary.distinct_completions, 'distinct completion')} of {summary.n:,}"
    if summary.distinct_traces == summary.distinct_completions:
        return text
    if summary.distinct_completions == 1:
        return f"{text}, but {summary.distinct_traces:,} distinct logprob traces"
    return f"{text} ({summary.distinct_traces:,} distinct logprob traces)"


def _attribute(batches: BatchEvidence, replay: Row | None, notes: list[str]) -> Finding:
    """What the divergence of sampled completions may be blamed on."""
    if batches.alone_parted:
        notes.append(
            "Completions that ran alone, in equal batches at every step, parted: the batch is not what changed."
        )
        return Finding.RUN_TO_RUN
    if batches.varied:
        if replay is None and batches.alone < 2:
            notes.append("Run to run was not tried, so it is not ruled out as the cause.")
        return Finding.BATCH
    notes.append("These completions are not known to have met different batches: batch or run may be the cause.")
    return Finding.UNATTRIBUTED
