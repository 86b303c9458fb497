"""Verdicts on completions: what may be blamed on the batch, and what may not."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from nondet.errors import UserError
from nondet.reports.batches import BatchEvidence, batch_evidence
from nondet.reports.content import build, load_summaries
from nondet.reports.figures import sample_table
from nondet.reports.verdict import Finding
from nondet.reports.verdict_samples import judge_sample
from nondet.result import Row, Status
from nondet.sampling.summary import SampleSummary
from tests.reports.factory import row, sampled

VARIED = BatchEvidence(known=60, different=60, alone=0, alone_parted=False)
CONSTANT = BatchEvidence(known=60, different=1, alone=60, alone_parted=False)


@pytest.fixture(scope="module")
def summaries(tmp_path_factory: pytest.TempPathFactory) -> dict[str, SampleSummary]:
    """Stock with 4 completions and 5 traces of 60; "quiet" with one completion in two traces; invariant with one."""
    folder = tmp_path_factory.mktemp("runs")

    def variants(impl: str, number: int) -> tuple[tuple[()], int]:
        return (), number % 2 if impl == "quiet" else 0

    plain = load_summaries(sampled(folder))
    quiet = load_summaries(sampled(folder, impls=("quiet",), variants=variants, name="quiet.jsonl"))
    return {s.impl: s for s in [*plain, *quiet]}


def test_distinct_completions_under_changing_batches_are_batch_dependence(summaries: dict[str, SampleSummary]) -> None:
    """The counts come first, completions and traces apart, and run to run is not ruled out in silence."""
    verdict = judge_sample(summaries["stock"], VARIED)
    assert verdict.finding == Finding.BATCH
    assert verdict.text == "4 distinct completions of 60 (5 distinct logprob traces), batch-dependent"
    assert any("Run to run was not tried" in note for note in verdict.notes)


def test_one_completion_with_several_traces_is_batch_dependence_too(summaries: dict[str, SampleSummary]) -> None:
    """Tokens that agree over numbers that don't are not a clean run."""
    verdict = judge_sample(summaries["quiet"], VARIED)
    assert verdict.finding == Finding.BATCH
    assert verdict.text == "1 distinct completion of 60, but 2 distinct logprob traces, batch-dependent"
    assert any("tokens agree" in note for note in verdict.notes)


def test_a_clean_sample_has_its_bound(summaries: dict[str, SampleSummary]) -> None:
    """One completion of 60 is an observation: 59 comparisons leave a rate of up to 4.96%."""
    verdict = judge_sample(summaries["invariant"], VARIED)
    assert verdict.finding == Finding.CLEAN
    assert verdict.text == "1 distinct completion of 60, no divergence observed (rate below 4.96% at 95%, one-sided)"
    assert verdict.notes == ()


def test_a_clean_sample_in_constant_batches_says_nothing_of_the_batch(summaries: dict[str, SampleSummary]) -> None:
    """Requests that all ran alone never tested what the tool is about."""
    notes = judge_sample(summaries["invariant"], CONSTANT).notes
    assert notes == ("Every completion ran alone, in equal batches: this says nothing about batch dependence.",)
    unknown = judge_sample(summaries["invariant"], BatchEvidence(0, 0, 0, False)).notes
    assert any("hardly tested" in note for note in unknown)


def test_parting_alone_is_run_to_run(summaries: dict[str, SampleSummary]) -> None:
    """Equal batches and other bits: the batch is not to blame, even where other requests did have company."""
    for evidence in (replace(CONSTANT, alone_parted=True), replace(VARIED, alone=5, alone_parted=True)):
        assert judge_sample(summaries["stock"], evidence).finding == Finding.RUN_TO_RUN


def test_parting_in_unknown_batches_is_blamed_on_nothing(summaries: dict[str, SampleSummary]) -> None:
    """Without schedules, divergence is a fact and its cause is open."""
    verdict = judge_sample(summaries["stock"], BatchEvidence(known=0, different=0, alone=0, alone_parted=False))
    assert verdict.finding == Finding.UNATTRIBUTED
    assert verdict.finding.is_divergence
    assert "batch-dependent" not in verdict.text


@pytest.mark.parametrize("n", [0, 1])
def test_a_single_completion_compares_nothing(summaries: dict[str, SampleSummary], n: int) -> None:
    """One completion agrees with itself: that is no result."""
    lone = replace(summaries["invariant"], n=n, failed=3)
    verdict = judge_sample(lone, VARIED)
    assert verdict.finding == Finding.UNTESTED
    assert verdict.notes == ("3 failed requests counted in no other figure.",)


def test_a_run_that_contradicts_itself_gets_no_verdict(summaries: dict[str, SampleSummary]) -> None:
    """Traces cover the tokens: more completions than one in one trace is a damaged file."""
    with pytest.raises(UserError, match="contradicts itself"):
        judge_sample(replace(summaries["stock"], distinct_traces=1), VARIED)


def test_batches_are_read_off_the_schedules(tmp_path: Path) -> None:
    """Requests among others met different batches; requests one after the other met equal ones, alone."""
    mixed = batch_evidence(sampled(tmp_path), "stock", 0)
    assert mixed.varied
    assert not mixed.constant
    assert mixed.known == 60
    alone = batch_evidence(sampled(tmp_path, alone=True, impls=("invariant",)), "invariant", 0)
    assert alone == BatchEvidence(known=60, different=1, alone=60, alone_parted=False)
    assert alone.constant


def test_parting_alone_is_seen_in_the_schedules(tmp_path: Path) -> None:
    """The same requests one after the other, with stock's divergence: other traces in equal batches."""
    evidence = batch_evidence(sampled(tmp_path, alone=True), "stock", 0)
    assert evidence.alone_parted


def test_keys_of_a_shared_prefix_are_company(tmp_path: Path) -> None:
    """Pages computed in somebody else's batch bring its bits along: parting on them is no run-to-run nondeterminism."""
    run = sampled(tmp_path, alone=True)
    assert batch_evidence(run, "stock", 0).alone_parted
    run.header.plan["prompts"][0]["tokens"] = 20  # of which each request computed 4, and took 16 from the cache
    shared = batch_evidence(run, "stock", 0)
    assert (shared.alone, shared.alone_parted, shared.constant) == (0, False, False)


def test_a_round_cut_short_has_no_batches(tmp_path: Path) -> None:
    """Without the round's record the company is unknown: no completion of it may be called alone."""
    run = sampled(tmp_path, alone=True)
    run.rounds.clear()
    assert batch_evidence(run, "stock", 0) == BatchEvidence(known=0, different=0, alone=0, alone_parted=False)


def replay(parted: int, impl: str = "stock") -> Row:
    """A round of 60 requests, run twice."""
    return row(
        [0, int(parted > 0)], probe="sample", case="the first round, twice", operator="engine", varied="run", impl=impl,
        difference=None, extra={"requests": 60, "requests_parted": parted},
    )  # fmt: skip


def test_a_repeated_round_that_agrees_leaves_the_batch_to_blame(summaries: dict[str, SampleSummary]) -> None:
    """Equal batches gave equal bits 60 times over: stated with its bound, in place of the doubt."""
    verdict = judge_sample(summaries["stock"], VARIED, replay(0))
    assert verdict.finding == Finding.BATCH
    assert verdict.notes == (
        "One round was run twice: all 60 requests the same, bit for bit (others below 4.88% at 95%, one-sided).",
    )


@pytest.mark.parametrize("impl", ["stock", "invariant"])
def test_a_repeated_round_that_parts_is_run_to_run(summaries: dict[str, SampleSummary], impl: str) -> None:
    """Neither batch dependence nor a clean sample survives requests that come out otherwise in the same batches."""
    verdict = judge_sample(summaries[impl], VARIED, replay(3))
    assert verdict.finding == Finding.RUN_TO_RUN
    assert "batch-dependent" not in verdict.text
    assert "no divergence" not in verdict.text
    assert "One round was run twice: 3 of 60 requests came out otherwise." in verdict.notes


def test_the_repeated_round_is_evidence_and_no_probe_of_its_own(tmp_path: Path) -> None:
    """The row reaches its implementation's verdict and the figures, and makes no section; a failed one is listed."""
    run = sampled(tmp_path)
    run.rows += [replay(2), replay(0, "invariant")]
    (section,) = build([run]).runs
    assert [(v.impl, v.finding) for v in section.verdicts] == [
        ("stock", Finding.RUN_TO_RUN),
        ("invariant", Finding.CLEAN),
    ]
    assert section.probes == ()
    table = dict(sample_table(section.samples[0].summaries, section.samples[0].replays))
    assert table["one round, run twice"][0] == "2 of 60 requests came out otherwise"
    run.rows[0] = msgspec.structs.replace(replay(0), status=Status.ERROR, reason="out of memory")
    (failed,) = build([run]).runs
    assert failed.samples[0].replays.keys() == {"invariant"}
    assert [p.reason for p in failed.problems] == ["out of memory"]
