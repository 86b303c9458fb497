"""The verdict on sampled completions: how many differ, and what that may be blamed on.

Completions met different batches, or they did not: only the first makes divergence batch dependence, and only then
does agreement say anything about the batch. Distinct completions and distinct logprob traces are different findings:
tokens may agree while the numbers under them do not, and that is batch dependence all the same.
"""

from __future__ import annotations

from nondet.errors import UserError
from nondet.reports.batches import BatchEvidence
from nondet.reports.intervals import percent
from nondet.reports.verdict import Finding, Verdict, plural
from nondet.sampling.summary import SampleSummary

__all__ = ["judge_sample"]


def judge_sample(summary: SampleSummary, batches: BatchEvidence) -> Verdict:
    """The verdict on the completions of one prompt under one implementation.

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
    counts = f"{plural(summary.distinct_completions, 'distinct completion')} of {summary.n}"
    if summary.distinct_traces > summary.distinct_completions > 1:
        counts += f" ({summary.distinct_traces} distinct logprob traces)"
    if summary.distinct_traces > 1:
        if summary.distinct_completions == 1:
            counts += f", but {summary.distinct_traces} distinct logprob traces"
            notes.append(
                "The tokens agree while the numbers under them do not: a closer race would part the tokens too."
            )
        finding = _attribute(batches, notes)
        return verdict(finding, f"{counts}, {finding}" if finding != Finding.UNATTRIBUTED else counts)
    if summary.distinct_completions > 1:
        # traces cover the tokens, so this can't be: the file contradicts itself, and no verdict may rest on it
        raise UserError(
            f"the run contradicts itself: {summary.impl} has {summary.distinct_completions} completions in one trace",
            "Was it edited by hand?",
        )
    if batches.constant:
        notes.append("Every completion ran alone, in equal batches: this says nothing about batch dependence.")
    elif not batches.varied:
        notes.append("No two completions are known to have met different batches: batch dependence was hardly tested.")
    bound = percent(summary.rate.high, "up")
    return verdict(Finding.CLEAN, f"{counts}, {Finding.CLEAN} (rate below {bound} at 95%, one-sided)")


def _attribute(batches: BatchEvidence, notes: list[str]) -> Finding:
    """What the divergence of sampled completions may be blamed on."""
    if batches.alone_parted:
        notes.append(
            "Completions that ran alone, in equal batches at every step, parted: the batch is not what changed."
        )
        return Finding.RUN_TO_RUN
    if batches.varied:
        if batches.alone < 2:
            notes.append(
                "Run to run was not tried: repeat the run with its seed; other completions would show that, too."
            )
        return Finding.BATCH
    notes.append("These completions are not known to have met different batches: batch or run may be the cause.")
    return Finding.UNATTRIBUTED
