"""What may be said of a run, and what an exit code may rest on. Functions of records alone: no torch, no reports."""

from nondet.verdict.batches import BatchEvidence, batch_evidence
from nondet.verdict.findings import Finding, Verdict, plural, sort_impls
from nondet.verdict.gate import exit_code, judge
from nondet.verdict.rows import axis_of, judge_rows
from nondet.verdict.samples import (
    SampleCounts,
    is_replay,
    judge_counts,
    judge_samples,
    repeated,
    replays,
    sample_counts,
)

__all__ = [
    "BatchEvidence",
    "Finding",
    "SampleCounts",
    "Verdict",
    "axis_of",
    "batch_evidence",
    "exit_code",
    "is_replay",
    "judge",
    "judge_counts",
    "judge_rows",
    "judge_samples",
    "plural",
    "repeated",
    "replays",
    "sample_counts",
    "sort_impls",
]
