"""What may be said of a run, and what an exit code may rest on. Functions of records alone: no torch, no reports."""

from nondet.verdict.axes import AxisTally, ValueTally, is_varied, judge_axes, tally_axes
from nondet.verdict.batches import BatchEvidence, batch_evidence
from nondet.verdict.findings import Finding, Verdict, plural, sort_impls, subject_name, subject_unit
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
from nondet.verdict.served import Comparison, compare_arms, judge_served, pooled_odds
from nondet.verdict.served_arms import ArmEvidence, arm_evidence, evidence, is_endpoint

__all__ = [
    "ArmEvidence",
    "AxisTally",
    "BatchEvidence",
    "Comparison",
    "Finding",
    "SampleCounts",
    "ValueTally",
    "Verdict",
    "arm_evidence",
    "axis_of",
    "batch_evidence",
    "compare_arms",
    "evidence",
    "exit_code",
    "is_endpoint",
    "is_replay",
    "is_varied",
    "judge",
    "judge_axes",
    "judge_counts",
    "judge_rows",
    "judge_samples",
    "judge_served",
    "plural",
    "pooled_odds",
    "repeated",
    "replays",
    "sample_counts",
    "sort_impls",
    "subject_name",
    "subject_unit",
    "tally_axes",
]
