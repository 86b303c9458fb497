"""Verdicts on completions: what may be blamed on the batch, and what may not."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest

from nondet.core.records import AxisValue, Completion, Round, Row, Run, Status
from nondet.errors import UserError
from nondet.reports.content import build
from nondet.reports.document import Details, Table
from nondet.reports.samples import sample_blocks
from nondet.verdict import samples
from nondet.verdict.findings import Finding, Verdict
from nondet.verdict.gate import exit_code, judge
from nondet.verdict.samples import BatchEvidence, SampleCounts, subjects, tally_axes
from tests.build import header, replayed, sampled

VARIED = BatchEvidence(known=60, different=60, alone=0, alone_differ=False)
CONSTANT = BatchEvidence(known=60, different=1, alone=60, alone_differ=False)


def subject(run: Run, impl: str) -> SampleCounts:
    """The only prompt under one implementation, with the batches that its schedules show."""
    [only] = [counts for counts in subjects(run) if counts.impl == impl]
    return only


def judge_counts(counts: SampleCounts, batches: BatchEvidence, again: Sequence[Row] = ()) -> Verdict:
    """The verdict on the counts, had they run in these batches."""
    return samples.judge_counts(replace(counts, batches=batches), again)


@pytest.fixture(scope="module")
def counts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, SampleCounts]:
    """Stock with 4 completions and 5 traces of 60; "quiet" with one completion in two traces; invariant with one."""
    folder = tmp_path_factory.mktemp("runs")

    def variants(impl: str, number: int) -> tuple[tuple[()], int]:
        return (), number % 2 if impl == "quiet" else 0

    plain = sampled(folder)
    quiet = sampled(folder, impls=("quiet",), variants=variants, name="quiet.jsonl")
    runs = {"stock": plain, "invariant": plain, "quiet": quiet}
    return {impl: subject(run, impl) for impl, run in runs.items()}


def test_distinct_completions_under_changing_batches_are_batch_dependence(counts: dict[str, SampleCounts]) -> None:
    """The counts come first, completions and traces apart, and run to run is not ruled out in silence."""
    verdict = judge_counts(counts["stock"], VARIED, [replay(0)])
    assert verdict.finding == Finding.BATCH
    assert verdict.text == "4 distinct completions of 60 (5 distinct logprob traces), batch-dependent"
    unknown = judge_counts(counts["stock"], VARIED)
    assert unknown.finding == Finding.UNATTRIBUTED
    assert unknown.notes == ("No round was repeated: differences may be batch or run-to-run effects.",)


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
    five = replace(counts["invariant"], rounds=dict.fromkeys(range(5), counts["invariant"].rounds[0]))
    # of five rounds four are held against the first, which a difference of whole rounds may have made its own
    assert "below 52.8% of rounds (4 compared), below 4.96%" in judge_counts(five, VARIED).text
    assert verdict.notes == ()


def test_another_end_is_no_clean_sample(counts: dict[str, SampleCounts]) -> None:
    """Equal tokens and logprobs that ended for two reasons: told, and not clean; other texts end as they do."""
    [(trace, _)] = counts["invariant"].answers
    answers = Counter({(trace, "length"): 57, (trace, "eos"): 3})
    verdict = judge_counts(replace(counts["invariant"], answers=answers), VARIED)
    assert verdict.finding == Finding.UNATTRIBUTED
    assert verdict.text == "1 distinct completion of 60, 3 of which ended for another reason than equal ones, divergent"
    assert "Completions ended for different reasons: eos 3, length 57; 3 of them for another reason" in verdict.notes[0]
    answers = Counter((t, "eos" if i else "length") for i, (t, _) in enumerate(counts["stock"].answers))
    other = judge_counts(replace(counts["stock"], answers=answers), VARIED, [replay(0)])
    assert (other.finding, other.notes[0]) == (
        Finding.BATCH,
        "Completions ended for different reasons: eos 4, length 1.",
    )


def test_parting_alone_is_run_to_run(counts: dict[str, SampleCounts]) -> None:
    """Equal batches and other bits: the batch is not to blame, even where other requests did have company."""
    for evidence in (replace(CONSTANT, alone_differ=True), replace(VARIED, alone=5, alone_differ=True)):
        assert judge_counts(counts["stock"], evidence).finding == Finding.RUN_TO_RUN


def test_batches_are_read_off_the_schedules(tmp_path: Path) -> None:
    """Requests among others met different batches; requests one after the other met equal ones, alone."""
    mixed = subject(sampled(tmp_path), "stock").batches
    assert mixed.varied
    assert not mixed.constant
    assert mixed.known == 60
    alone = subject(sampled(tmp_path, alone=True, impls=("invariant",)), "invariant").batches
    assert alone == BatchEvidence(known=60, different=1, alone=60, alone_differ=False)
    assert alone.constant


def test_parting_alone_is_seen_in_the_schedules(tmp_path: Path) -> None:
    """The same requests one after the other, with stock's divergence: other traces in equal batches."""
    evidence = subject(sampled(tmp_path, alone=True), "stock").batches
    assert evidence.alone_differ


def test_keys_of_a_shared_prefix_are_company(tmp_path: Path) -> None:
    """Pages computed in somebody else's batch bring its bits along: parting on them is no run-to-run nondeterminism."""
    run = sampled(tmp_path, alone=True)
    assert subject(run, "stock").batches.alone_differ
    run.header.plan["prompts"][0]["tokens"] = 20  # of which each request computed 4, and took 16 from the cache
    shared = subject(run, "stock").batches
    assert (shared.alone, shared.alone_differ, shared.constant) == (0, False, False)


def test_a_round_cut_short_has_no_batches(tmp_path: Path) -> None:
    """Without the round's record the company is unknown: no completion of it may be called alone."""
    run = sampled(tmp_path, alone=True)
    run.rounds.clear()
    assert subject(run, "stock").batches == BatchEvidence(known=0, different=0, alone=0, alone_differ=False)


def replay(parted: int, impl: str = "stock", number: int = 0) -> Row:
    """A round of 60 requests, run twice."""
    return replayed(impl, 60, parted, number)


def test_a_repeated_round_that_parts_is_run_to_run(counts: dict[str, SampleCounts]) -> None:
    """Neither batch dependence nor a clean sample survives requests that come out otherwise in the same batches."""
    for impl in ["stock", "invariant"]:
        verdict = judge_counts(counts[impl], VARIED, [replay(3)])
        assert verdict.finding == Finding.RUN_TO_RUN
        assert "batch-dependent" not in verdict.text
        assert "no divergence" not in verdict.text
        assert "Run again: 3 of 60 requests in 1 round differed." in verdict.notes


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
    folded = [b for b in sample_blocks(section.sampled, 1, True) if isinstance(b, Details)]
    tables = [block for b in folded for block in b.blocks if isinstance(block, Table)]
    assert [row[1] for counts in tables for row in counts.rows if row[0] == "run again"] == [
        "2 of 60 requests in 1 round differed"
    ]
    run.rows[0] = msgspec.structs.replace(replay(0), status=Status.ERROR, reason="out of memory")
    (failed,) = build([run]).runs
    assert failed.samples[0].replays.keys() == {"invariant"}
    assert [p.reason for p in failed.problems] == ["out of memory"]


def test_noise_in_a_round_that_nobody_ran_again_is_not_blamed_on_the_batch() -> None:
    """One trace of 180 parts in round 2, and round 0 came out the same twice: that says nothing of round 2."""
    answers = Counter({("a", "length"): 179, ("b", "length"): 1})
    rare = SampleCounts(
        impl="stock", prompt=0, completions=Counter(a=179, b=1), answers=answers, failed=Counter(), nonfinite=0,
        rounds={0: {"a"}, 1: {"a"}, 2: {"a", "b"}}, batches=VARIED,
    )  # fmt: skip
    verdict = judge_counts(rare, VARIED, [replay(0)])
    assert verdict.finding == Finding.UNATTRIBUTED
    assert "batch-dependent" not in verdict.text
    assert any("were not repeated" in note for note in verdict.notes)
    shown = judge_counts(rare, VARIED, [replay(0), replay(0, number=2)])  # round 2 gives the same bits again
    assert shown.finding == Finding.BATCH
    noise = judge_counts(rare, VARIED, [replay(0), replay(1, number=2)])
    assert noise.finding == Finding.RUN_TO_RUN
    assert noise.is_fault


def test_tokens_are_a_part_of_a_trace(counts: dict[str, SampleCounts]) -> None:
    """At the limit: as many traces as completions or more; two completions in one trace are a contradiction."""
    for completions, traces in [(1, 1), (1, 2), (2, 2), (2, 1)]:
        made = replace(
            counts["stock"],
            completions=Counter({f"c{i}": 30 for i in range(completions)}),
            answers=Counter({(f"t{i}", "length"): 30 for i in range(traces)}),
        )
        if completions > traces:
            with pytest.raises(UserError, match=r"stock has 2 completions in one trace\b.*edited by hand"):
                judge_counts(made, VARIED)
        else:
            assert judge_counts(made, VARIED).finding.is_divergence == (traces > 1)


# Axes varied alone: a verdict and a gate rest on what was compared, and on values that took effect.

# axis=value -> traces of its requests in their order, "" for a failed one; two requests make a round
Arms = dict[str, str | list[str]]


def varied(arms: Arms, unproven: str = "", per_round: int = 4, note: str = "", lost: str = "") -> Run:
    """The base and these arms under stock; dtype is the axis that changes the arithmetic itself.

    Args:
        lost: The traces that hold NaN.
    """
    completions, rounds, values = [], [], []
    first = 0
    for arm, traces in arms.items():
        for i, trace in enumerate(traces):
            completions.append(
                Completion(
                    impl="stock", request=f"{arm} t{i}", round=first + i // per_round, prompt=0, tokens_digest="T",
                    trace=trace, n_tokens=4, finish="length" if trace else "error", arrival_step=0, schedule=[],
                    batch_min=1, batch_max=4, status="ok" if trace else "error", arm=arm,
                    nonfinite=int(bool(trace) and trace in lost),
                )
            )  # fmt: skip
        numbers = range(first, first + -(-len(traces) // per_round))
        figures: dict[str, Any] = {"targets": per_round, "others": 0, "steps": 1, "tokens": 1, "seconds": 1.0}
        rounds += [Round(impl="stock", round=n, arm=arm, **figures) for n in numbers]
        first = numbers.stop
        axis, _, value = arm.partition("=")
        if axis != "base":
            shared: dict[str, Any] = {"impl": "stock", "axis": axis, "held": axis != "dtype", "changes": "c"}
            values.append(AxisValue(value="as it is", arm="base", proven=True, proof="p", **shared))
            values.append(AxisValue(value=value, arm=arm, proven=arm != unproven, proof="p", **shared))
    if note:
        values.append(
            AxisValue(
                impl="stock", axis="graphs", value="", arm="", held=True, proven=False, proof="", changes="c", note=note
            )
        )
    return Run(
        header=header("sample", {"vary": {}, "prompts": [{"text": "p", "tokens": 5}], "impls": ["stock"]}),
        completions=completions, rounds=rounds, axis_values=values, rows=[replayed("stock", 4)], complete=True,
    )  # fmt: skip


BASE: Arms = {"base": "AAAA"}


def beside(stock: Run, other: Run, impl: str = "invariant") -> Run:
    """Both in one file, the second under another name."""
    fields = ("completions", "rounds", "axis_values", "rows")
    moved = {name: [msgspec.structs.replace(r, impl=impl) for r in getattr(other, name)] for name in fields}
    return msgspec.structs.replace(stock, **{name: getattr(stock, name) + moved[name] for name in fields})


def test_nan_that_agrees_with_itself_is_wrong() -> None:
    """Whatever else is found: the gate fails, and the count of such completions comes first."""
    for other in ["AAAA", "BBBB"]:
        run = varied(BASE | {"chunk=5": other}, lost="A")
        (verdict,) = judge(run)
        assert verdict.finding == Finding.WRONG
        assert (Finding.OTHER in verdict.findings) == (other == "BBBB")
        assert verdict.text.startswith(
            f"{8 if other == 'AAAA' else 4} completions of 8 hold NaN or infinite logprobs: wrong"
        )
        sound = judge(varied(BASE | {"chunk=5": other}))[0]
        kept = sound.counts[:-1] if other == "AAAA" else sound.counts  # what else was counted is told as well
        assert (verdict.counts[1:], verdict.bounds) == (kept, ())
        assert exit_code(run, "divergent") == (3, "")


def test_each_implementation_has_its_own_completions() -> None:
    """NaN, failures, bits that follow an axis and noise of one are nothing of the other's, whichever it is."""
    clean = varied(BASE | {"chunk=5": "AAAA"})
    faulty = {
        Finding.WRONG: varied(BASE | {"chunk=5": "AAAA"}, lost="A"),
        Finding.OTHER: varied(BASE | {"chunk=5": "BBBB"}),
        Finding.BATCH: varied({"base": "AABB", "chunk=5": "AABB"}),
        Finding.UNTESTED: varied(BASE | {"chunk=5": ["", "", "", ""]}),
    }
    found = [
        ([v.finding for v in judge(beside(clean, run))], [v.finding for v in judge(beside(run, clean))], finding)
        for finding, run in faulty.items()
    ]
    assert found == [([Finding.CLEAN, finding], [finding, Finding.CLEAN], finding) for finding in faulty]
    assert [tally_axes(beside(clean, run), "stock") for run in faulty.values()] == [tally_axes(clean, "stock")] * 4
    several = varied(BASE | {"chunk=5": "AAAA"}, per_round=1)
    assert judge(beside(clean, several))[0].text == judge(clean)[0].text  # its own rounds bound it
    later, first = (varied({"base": t, "chunk=5": t}, per_round=2) for t in ("AAAB", "ABAB"))
    assert [v.finding for v in judge(beside(later, first))] == [Finding.UNATTRIBUTED, Finding.BATCH]
    idle = varied(BASE | {"chunk=5": "AAAA", "page=4": "AAAA"}, "page=4", note="needs CUDA")
    assert tally_axes(beside(clean, idle), "stock") == tally_axes(clean, "stock")
    assert len(tally_axes(beside(clean, idle), "invariant")) == 3
    sound, failed = judge(beside(clean, faulty[Finding.UNTESTED]))
    assert (any("failed" in n for n in sound.notes), any("4 failed requests" in n for n in failed.notes)) == (
        False,
        True,
    )


def test_one_failed_request_takes_no_other_with_it() -> None:
    """Its own comparison is gone and told; the other three stand, and decide."""
    [tally] = tally_axes(varied(BASE | {"chunk=5": ["A", "", "A", "B"]}), "stock")
    assert ([v.n for v in tally.values], tally.compared, tally.moved) == ([4, 3], 3, 1)
    assert (tally.traces, tally.traces_within, tally.texts, tally.texts_within) == (2, 2, 1, 1)
    (verdict,) = judge(varied(BASE | {"chunk=5": ["A", "", "A", "A"]}))
    assert (verdict.finding, verdict.notes[0]) == (Finding.CLEAN, "1 failed request is counted in no other figure.")
    assert "below 63.2% of completions if they were independent (3)" in verdict.text
