"""Verdicts on completions: what may be blamed on the batch, and what may not."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from nondet.core.records import Row, Run, Status
from nondet.errors import UserError
from nondet.reports.content import build
from nondet.reports.document import Details, Table
from nondet.reports.samples import sample_blocks
from nondet.verdict.findings import BatchEvidence, Finding
from nondet.verdict.samples import SampleCounts, judge_counts, subjects
from tests.reports.factory import replayed, sampled

VARIED = BatchEvidence(known=60, different=60, alone=0, alone_parted=False)
CONSTANT = BatchEvidence(known=60, different=1, alone=60, alone_parted=False)


def subject(run: Run, impl: str) -> tuple[SampleCounts, BatchEvidence]:
    """The only prompt under one implementation."""
    [only] = [(counts, batches) for counts, batches in subjects(run) if counts.impl == impl]
    return only


def batch_evidence(run: Run, impl: str) -> BatchEvidence:
    return subject(run, impl)[1]


@pytest.fixture(scope="module")
def counts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, SampleCounts]:
    """Stock with 4 completions and 5 traces of 60; "quiet" with one completion in two traces; invariant with one."""
    folder = tmp_path_factory.mktemp("runs")

    def variants(impl: str, number: int) -> tuple[tuple[()], int]:
        return (), number % 2 if impl == "quiet" else 0

    plain = sampled(folder)
    quiet = sampled(folder, impls=("quiet",), variants=variants, name="quiet.jsonl")
    runs = {"stock": plain, "invariant": plain, "quiet": quiet}
    return {impl: subject(run, impl)[0] for impl, run in runs.items()}


def test_distinct_completions_under_changing_batches_are_batch_dependence(counts: dict[str, SampleCounts]) -> None:
    """The counts come first, completions and traces apart, and run to run is not ruled out in silence."""
    verdict = judge_counts(counts["stock"], VARIED, [replay(0)])
    assert verdict.finding == Finding.BATCH
    assert verdict.text == "4 distinct completions of 60 (5 distinct logprob traces), batch-dependent"
    unknown = judge_counts(counts["stock"], VARIED)
    assert unknown.finding == Finding.UNATTRIBUTED
    assert unknown.notes == ("No round was run again: batch or run may be the cause.",)


def test_one_completion_with_several_traces_is_batch_dependence_too(counts: dict[str, SampleCounts]) -> None:
    """Tokens that agree over numbers that don't are not a clean run."""
    verdict = judge_counts(counts["quiet"], VARIED, [replay(0, "quiet")])
    assert verdict.finding == Finding.BATCH
    assert verdict.text == "1 distinct completion of 60, but 2 distinct logprob traces, batch-dependent"
    assert any("tokens agree" in note for note in verdict.notes)


def test_a_clean_sample_has_its_bound(counts: dict[str, SampleCounts]) -> None:
    """One completion of 60 is an observation: a bound by what is independent, and one by completion beside it."""
    verdict = judge_counts(counts["invariant"], VARIED)
    assert verdict.finding == Finding.CLEAN
    assert verdict.text == (
        "1 distinct completion of 60, no divergence observed (at 95%, one-sided: below 4.96% of completions if they "
        "were independent; one round bounds no rate of rounds)"
    )
    [(trace, n)] = counts["invariant"].traces[0].items()
    five = replace(counts["invariant"], traces={number: {trace: n // 5} for number in range(5)})
    # of five rounds four are held against the first, which a difference of whole rounds may have made its own
    assert "below 52.8% of rounds (4 compared), below 4.96%" in judge_counts(five, VARIED).text
    assert verdict.notes == ()


def test_another_end_is_no_clean_sample(counts: dict[str, SampleCounts]) -> None:
    """Equal tokens and logprobs that ended for two reasons: told, and not clean; other texts end as they do."""
    [(trace, _)] = counts["invariant"].answers
    answers = {(trace, "length"): 57, (trace, "eos"): 3}
    verdict = judge_counts(replace(counts["invariant"], answers=answers), VARIED)
    assert verdict.finding == Finding.UNATTRIBUTED
    assert verdict.text == "1 distinct completion of 60, 3 of which ended otherwise than equal ones, divergent"
    assert "Completions ended for different reasons: eos 3, length 57; 3 of them otherwise" in verdict.notes[0]
    answers = {(t, "eos" if i else "length"): 1 for i, (t, _) in enumerate(counts["stock"].answers)}
    other = judge_counts(replace(counts["stock"], answers=answers), VARIED, [replay(0)])
    assert (other.finding, other.notes[0]) == (
        Finding.BATCH,
        "Completions ended for different reasons: eos 4, length 1.",
    )


def test_a_clean_sample_in_constant_batches_says_nothing_of_the_batch(counts: dict[str, SampleCounts]) -> None:
    """Requests that all ran alone never tested what the tool is about."""
    notes = judge_counts(counts["invariant"], CONSTANT).notes
    assert notes == ("Every completion ran alone, in equal batches: this says nothing about batch dependence.",)
    unknown = judge_counts(counts["invariant"], BatchEvidence(0, 0, 0, False)).notes
    assert any("hardly tested" in note for note in unknown)


def test_parting_alone_is_run_to_run(counts: dict[str, SampleCounts]) -> None:
    """Equal batches and other bits: the batch is not to blame, even where other requests did have company."""
    for evidence in (replace(CONSTANT, alone_parted=True), replace(VARIED, alone=5, alone_parted=True)):
        assert judge_counts(counts["stock"], evidence).finding == Finding.RUN_TO_RUN


def test_parting_in_unknown_batches_is_blamed_on_nothing(counts: dict[str, SampleCounts]) -> None:
    """Without schedules, divergence is a fact and its cause is open."""
    verdict = judge_counts(counts["stock"], BatchEvidence(known=0, different=0, alone=0, alone_parted=False))
    assert verdict.finding == Finding.UNATTRIBUTED
    assert verdict.finding.is_divergence
    assert "batch-dependent" not in verdict.text


@pytest.mark.parametrize("n", [0, 1])
def test_a_single_completion_compares_nothing(counts: dict[str, SampleCounts], n: int) -> None:
    """One completion agrees with itself: that is no result."""
    lone = replace(counts["invariant"], n=n, failed=3)
    verdict = judge_counts(lone, VARIED)
    assert verdict.finding == Finding.UNTESTED
    assert verdict.notes == ("3 failed requests counted in no other figure.",)


def test_a_run_that_contradicts_itself_gets_no_verdict(counts: dict[str, SampleCounts]) -> None:
    """Traces cover the tokens: more completions than one in one trace is a damaged file."""
    with pytest.raises(UserError, match="contradicts itself"):
        judge_counts(replace(counts["stock"], traces={0: {"one": 60}}), VARIED)


def test_batches_are_read_off_the_schedules(tmp_path: Path) -> None:
    """Requests among others met different batches; requests one after the other met equal ones, alone."""
    mixed = batch_evidence(sampled(tmp_path), "stock")
    assert mixed.varied
    assert not mixed.constant
    assert mixed.known == 60
    alone = batch_evidence(sampled(tmp_path, alone=True, impls=("invariant",)), "invariant")
    assert alone == BatchEvidence(known=60, different=1, alone=60, alone_parted=False)
    assert alone.constant


def test_parting_alone_is_seen_in_the_schedules(tmp_path: Path) -> None:
    """The same requests one after the other, with stock's divergence: other traces in equal batches."""
    evidence = batch_evidence(sampled(tmp_path, alone=True), "stock")
    assert evidence.alone_parted


def test_padded_steps_are_said(tmp_path: Path, counts: dict[str, SampleCounts]) -> None:
    """Under CUDA graphs the sizes on record are not those computed, and that nothing diverged is said of few."""
    run = sampled(tmp_path, impls=("invariant",))
    assert not batch_evidence(run, "invariant").padded
    run.header.plan["load"] = {"graphs": True}
    evidence = batch_evidence(run, "invariant")
    assert evidence.padded
    assert any("padded to a few sizes" in note for note in judge_counts(counts["invariant"], evidence).notes)
    assert not any("padded" in note for note in judge_counts(counts["invariant"], VARIED).notes)
    for met, said in (
        (replace(VARIED, padded=True), True),
        (VARIED, False),
    ):  # and where it parted, what else it may be
        assert any("without one" in note for note in judge_counts(counts["stock"], met).notes) == said


def test_keys_of_a_shared_prefix_are_company(tmp_path: Path) -> None:
    """Pages computed in somebody else's batch bring its bits along: parting on them is no run-to-run nondeterminism."""
    run = sampled(tmp_path, alone=True)
    assert batch_evidence(run, "stock").alone_parted
    run.header.plan["prompts"][0]["tokens"] = 20  # of which each request computed 4, and took 16 from the cache
    shared = batch_evidence(run, "stock")
    assert (shared.alone, shared.alone_parted, shared.constant) == (0, False, False)


def test_a_round_cut_short_has_no_batches(tmp_path: Path) -> None:
    """Without the round's record the company is unknown: no completion of it may be called alone."""
    run = sampled(tmp_path, alone=True)
    run.rounds.clear()
    assert batch_evidence(run, "stock") == BatchEvidence(known=0, different=0, alone=0, alone_parted=False)


def replay(parted: int, impl: str = "stock", number: int = 0) -> Row:
    """A round of 60 requests, run twice."""
    return replayed(impl, 60, parted, number)


def test_a_repeated_round_that_agrees_leaves_the_batch_to_blame(counts: dict[str, SampleCounts]) -> None:
    """A round that came out the same is one repetition, however many requests rode in it."""
    verdict = judge_counts(counts["stock"], VARIED, [replay(0)])
    assert verdict.finding == Finding.BATCH
    assert verdict.notes == ("Run again: 1 round of 60 requests the same, bit for bit: 1 repetition.",)


@pytest.mark.parametrize("impl", ["stock", "invariant"])
def test_a_repeated_round_that_parts_is_run_to_run(counts: dict[str, SampleCounts], impl: str) -> None:
    """Neither batch dependence nor a clean sample survives requests that come out otherwise in the same batches."""
    verdict = judge_counts(counts[impl], VARIED, [replay(3)])
    assert verdict.finding == Finding.RUN_TO_RUN
    assert "batch-dependent" not in verdict.text
    assert "no divergence" not in verdict.text
    assert "Run again: 3 of 60 requests in 1 round came out otherwise." in verdict.notes


def test_the_repeated_round_is_evidence_and_no_probe_of_its_own(tmp_path: Path) -> None:
    """The row reaches its implementation's verdict and the figures, and makes no section; a failed one is listed."""
    run = sampled(tmp_path, again=False)
    run.rows += [replay(2), replay(0, "invariant")]
    (section,) = build([run]).runs
    assert [(v.impl, v.finding) for v in section.verdicts] == [
        ("stock", Finding.RUN_TO_RUN),
        ("invariant", Finding.CLEAN),
    ]
    assert section.probes == ()
    assert section.sampled is not None
    counts = next(b for b in sample_blocks(section.sampled, 1, True) if isinstance(b, Details)).blocks[0]
    assert isinstance(counts, Table)
    assert [row[1] for row in counts.rows if row[0] == "run again"] == [
        "2 of 60 requests in 1 round came out otherwise"
    ]
    run.rows[0] = msgspec.structs.replace(replay(0), status=Status.ERROR, reason="out of memory")
    (failed,) = build([run]).runs
    assert failed.samples[0].replays.keys() == {"invariant"}
    assert [p.reason for p in failed.problems] == ["out of memory"]


def test_noise_in_a_round_that_nobody_ran_again_is_not_blamed_on_the_batch() -> None:
    """One trace of 180 parts in round 2, and round 0 came out the same twice: that says nothing of round 2."""
    rare = SampleCounts(
        impl="stock", prompt=0, n=180, failed=0, nonfinite=0, completions={"a": 179, "b": 1},
        traces={0: {"a": 60}, 1: {"a": 60}, 2: {"a": 59, "b": 1}},
    )  # fmt: skip
    verdict = judge_counts(rare, VARIED, [replay(0)])
    assert verdict.finding == Finding.UNATTRIBUTED
    assert "batch-dependent" not in verdict.text
    assert any("were not run again" in note for note in verdict.notes)
    shown = judge_counts(rare, VARIED, [replay(0), replay(0, number=2)])  # round 2 gives the same bits again
    assert shown.finding == Finding.BATCH
    noise = judge_counts(rare, VARIED, [replay(0), replay(1, number=2)])
    assert noise.finding == Finding.RUN_TO_RUN
    assert noise.is_fault


def test_completions_of_nan_are_wrong_however_alike(counts: dict[str, SampleCounts]) -> None:
    """A model that computes NaN gives equal completions; they must not pass as clean."""
    lost = replace(counts["invariant"], nonfinite=60)
    verdict = judge_counts(lost, VARIED, [replay(0, "invariant")])
    assert verdict.finding == Finding.WRONG
    assert verdict.text.startswith("60 completions of 60 hold NaN or infinite logprobs: wrong")
    assert "no divergence" not in verdict.text
    assert judge_counts(replace(counts["stock"], nonfinite=1), VARIED, [replay(0)]).findings == (
        Finding.WRONG,
        Finding.BATCH,
    )


@pytest.mark.parametrize(("completions", "traces"), [(1, 1), (1, 2), (2, 2), (2, 1)])
def test_tokens_are_a_part_of_a_trace(counts: dict[str, SampleCounts], completions: int, traces: int) -> None:
    """At the limit: as many traces as completions or more; two completions in one trace are a contradiction."""
    made = replace(
        counts["stock"], completions={f"c{i}": 30 for i in range(completions)},
        traces={0: {f"t{i}": 30 for i in range(traces)}}, answers={},
    )  # fmt: skip
    if completions > traces:
        with pytest.raises(UserError, match="stock has 2 completions in one trace"):
            judge_counts(made, VARIED)
    else:
        assert judge_counts(made, VARIED).finding.is_divergence == (traces > 1)
