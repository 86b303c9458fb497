"""A verdict goes no further than its records: each finding beside the records that just do not allow it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import msgspec
import numpy as np

from nondet.core.records import AxisTried, Culprit, Diagnosis, Replay, Run, Step, TraceVerdict
from nondet.core.statistics import percent_range, round_interval
from nondet.diagnose.steps import greedy_step, margin_step
from nondet.diagnose.verdict import QUESTIONS, batch_step, cause_of, conclude, cure_step, settled
from nondet.reports.traces import Story
from nondet.sampling.plan import Outcome, Request, Session
from tests.build import completion, header, replayed


def run_of(outcomes: dict[str, str], *, repeated: int = 1, steps: Sequence[Step] = (), **more: Any) -> Run:
    figures = {"n": 40.0, "rounds": 4.0, "repeated_round_traces": float(repeated)}
    made = [
        Step(name=name, outcome=outcome, sentence=f"what {name} found", figures=figures if name == "batch" else {})
        for name, outcome in outcomes.items()
    ]
    return Run(header=header("diagnose", {}), steps=[*made, *steps], **more)


def traced(finding: str, *replays: tuple[str, str]) -> dict[str, Any]:
    culprit = Culprit(
        number=1, replaced=[], position=1, token=-1, layer="0", module="m", call="linear", occurrence=0, requests=[],
        shapes=[], axes={}, digests={}, differences={}, kernels=[], family="matmul", sentence="it parts",
        replays=[Replay(name=name, status=status, sentence=f"{name} {status}") for name, status in replays],
    )  # fmt: skip
    verdict = TraceVerdict(finding=finding, culprits=[], families=["matmul"], sentences=["it parts"])
    return {"culprits": [culprit], "trace_verdicts": [verdict]}


PARTED = {"greedy": "yes", "run": "yes", "batch": "yes", "axes": "yes"}
CLEAN = {"greedy": "yes", "run": "yes", "batch": "no", "axes": "no"}


def test_the_finding_is_what_the_records_allow() -> None:
    """The batch is blamed only where equal batches gave equal bits; clean is said only of what was asked."""
    for run, finding in [
        (run_of({"greedy": "no"}), "not greedy"),
        (run_of(PARTED | {"run": "no"}), "run-to-run nondeterministic"),
        (run_of(PARTED, **traced("run-to-run")), "run-to-run nondeterministic"),
        (run_of(PARTED, **traced("batch-dependent", ("repeat", "divergent"))), "run-to-run nondeterministic"),
        (run_of(PARTED, repeated=0, **traced("batch-dependent", ("values", "identical"))), "batch-dependent"),
        (run_of(PARTED, **traced("batch-dependent", ("values", "divergent"))), "a defect"),
        (run_of(PARTED, **traced("batch-dependent", ("exact", "divergent"))), "a defect"),
        (run_of(PARTED), "batch-dependent"),  # the round that parted came again equal
        (run_of(PARTED, repeated=0), "divergent"),  # it did not: batch or run may be the cause
        (run_of(CLEAN), "no divergence observed"),
        (run_of({"greedy": "yes", "run": "yes", "batch": "no"}), "unknown"),  # stopped before the axes
        (run_of(CLEAN | {"run": "unknown"}), "no divergence observed"),
        (run_of(CLEAN | {"batch": "unknown"}), "unknown"),
        (run_of({}), "unknown"),
    ]:
        assert conclude(run).finding == finding
    assert cause_of(run_of(PARTED)) == "unknown"  # a cause comes from a trace


def test_a_cure_is_only_told_where_it_was_seen() -> None:
    """A divergence left under the cure is said, and a step that was not taken is a limit. A clean verdict has both
    bounds, by round and by completion, and what was varied by itself."""
    axis = AxisTried(
        axis="batch size", impl="stock", held="all else", values=["2"], parted=["2"], tried=2, traces=1, tokens=0,
    )  # fmt: skip
    verdict = conclude(run_of(PARTED | {"cure": "no", "cost": "skipped"}, axes=[axis]))
    assert "no cure here" in verdict.cure
    assert not verdict.cost
    assert any("Not tested" in line for line in verdict.limits)
    assert "left no divergence" in conclude(run_of(PARTED | {"cure": "yes"})).cure
    run = run_of(CLEAN, axes=[msgspec.structs.replace(axis, parted=[], traces=0)])
    run.completions += [completion(f"t{i}", "a", round=i // 10, tokens_digest="t") for i in range(40)]
    run.steps[0] = msgspec.structs.replace(run.steps[0], facts={"trace": "a", "tokens": "t"})
    run.steps[2] = batch_step(run)
    for said in ("52.8% of rounds", "7.22% of completions", "no difference seen from changing batch size (0 of 2"):
        assert said in conclude(run).whether


def test_settled_questions_are_not_asked() -> None:
    """Each exit stops what follows from it and nothing else."""
    assert all(settled(run_of({"greedy": "no"}), name) for name in list(QUESTIONS)[1:])
    unsteady = run_of({"greedy": "yes", "run": "no"})
    assert [name for name in QUESTIONS if settled(unsteady, name)] == ["batch", "axes", "margin"]
    assert [name for name in QUESTIONS if settled(run_of(CLEAN), name)] == ["operator", "margin", "cure", "cost"]
    assert not any(settled(run_of(PARTED), name) for name in QUESTIONS)
    for unanswered in ({"axes": "skipped"}, {"axes": "unknown"}, {"batch": "unknown"}):  # there is nothing to trace
        assert settled(run_of(CLEAN | unanswered), "operator")


def session(tokens: str, tops: list[tuple[float, float, int, int]], value: float = 0.0, **fields: Any) -> Session:
    """One request's, whose logprobs have this value."""
    mine = Outcome(
        request=Request("r", True, (1,), 9, 0), token_ids=list(map(int, tokens)), margins=b"", runner_up=[],
        logprobs=np.full(len(tokens), value, "<f4").tobytes(), finish="length", schedule=[], batch_min=1, batch_max=1,
    )  # fmt: skip
    return Session(outcomes=[replace(mine, **fields)], steps=1, tokens=1, seconds=1.0, tops={"r": tops})


def test_logprobs_that_are_no_numbers_are_wrong() -> None:
    """A model that computes NaN is neither greedy nor clean, whatever the batch, and completions that agree in NaN show
    no cure; one that computes numbers is."""
    for value in [float("nan"), float("inf"), float("-inf")]:
        step = greedy_step((session("7", [(value, 1.0, 7, 8)], value=value),))
        assert msgspec.json.decode(msgspec.json.encode(step), type=Step) == step
        run = run_of({}, steps=[step])
        assert (step.outcome, conclude(run).finding) == ("no", "wrong")
        assert "1 of 1 chosen tokens, solo and in batches, have a NaN or infinite logprob" in conclude(run).whether
        assert settled(run, "batch")
    sound = greedy_step((session("7", [(2.0, 1.0, 7, 8)], value=-0.5),))
    assert (sound.outcome, conclude(run_of({}, steps=[sound])).finding) == ("yes", "unknown")
    run = under_the_cure()
    run.completions[0] = msgspec.structs.replace(run.completions[0], nonfinite=1)
    cure = cure_step(run, "a")
    assert (cure.outcome, "1 completion hold NaN or infinite logprobs" in cure.sentence) == ("no", True)


def together(*sessions: Session) -> Session:
    """One session of their requests, each under a name of its own."""
    each = [(str(i), s.outcomes[0], s.tops["r"]) for i, s in enumerate(sessions)]
    outcomes = [replace(one, request=replace(one.request, id=name)) for name, one, _ in each]
    return replace(sessions[0], outcomes=outcomes, tops={name: tops for name, _, tops in each})


def test_flips_are_held_against_what_company_does_to_the_logits() -> None:
    """The spread is measured up to the first other token, whose own logits are the flip's; NaN moves nothing."""
    alone = session("121", [(5.0, 3.0, 1, 2), (4.0, 3.5, 2, 1), (9.0, 9.0, 1, 2)])
    near = session("111", [(5.25, 3.0, 1, 3), (4.0, 4.0, 1, 2), (0.0, 0.0, 1, 2)])
    same = session("121", [(5.0, float("nan"), 1, 2), (4.0, 3.5, 2, 1), (9.0, 9.0, 1, 2)])
    unfit = [
        session("222", near.tops["r"], finish="error"),
        session("222", near.tops["r"], request=Request("r", False, (1,), 9, 0)),
    ]
    step = margin_step(alone, together(near, same, *unfit))
    assert step.outcome == "yes"
    assert step.figures == {"flips": 1, "within": 1, "spread": 0.25}
    assert step.sentence == (
        "1 completion flipped, the first at token 1; solo, the two largest logits at a flip are at most 0.5 apart; the "
        "logits of the top tokens differ by up to 0.25 between the arms, so 1 of 1 flips are within it (at most twice "
        "that)"
    )
    far = margin_step(alone, session("111", [(5.125, 3.0, 1, 2), (4.0, 3.0, 1, 2)]))  # 0.5 > 2 * 0.125
    assert (far.outcome, far.sentence.endswith("more than this rounding explains")) == ("no", True)
    quiet = margin_step(alone, same)
    assert quiet.outcome == "unknown"
    assert quiet.sentence.startswith("no token flipped in the rounds that were compared; ")


def test_a_race_that_a_replay_found_is_told_by_it() -> None:
    """Not by the trace's verdict on the two batches, which says "batch-dependent"; no pair's cure is told beside it."""
    run = run_of(PARTED | {"cure": "no"}, **traced("batch-dependent", ("repeat", "divergent")))
    run.steps.append(Step(name="operator", outcome="yes", sentence="named", facts={"families": "matmul"}))
    verdict = conclude(run)
    assert verdict.whether.startswith("Run-to-run nondeterministic: `linear` of m: repeat divergent. ")
    assert verdict.why.startswith("The first operator to differ: it parts. Repeat divergent.")
    assert verdict.cure == "batch_invariant() is no cure here: what cure found."
    steady = run_of(PARTED, **traced("batch-dependent", ("repeat", "identical")))
    steady.steps.append(run.steps[-1])
    assert conclude(steady).cure.startswith("Replacing matmul by the invariant implementation removes the divergence")


def test_the_story_of_a_stopped_run_is_told_as_far_as_it_came() -> None:
    """A run without its verdict still gives a report, which says what was not reached."""
    told = Story(run_of({"greedy": "yes"}))
    assert told.finding == "unknown"
    assert any("ended before" in line for line in told.limits)
    recorded = [Diagnosis(finding=finding, whether="Yes.") for finding in ("batch-dependent", "wrong")]
    same, other = (Story(run_of(PARTED, diagnoses=[diagnosis])).answers for diagnosis in recorded)
    assert same == {"Whether": "Batch-dependent: what batch found."}  # in the words of this version
    assert other == {"Whether": "Yes."}  # which comes to another finding, so the recorded one stands


def test_the_story_tells_intervals_by_the_formulas_of_today() -> None:
    """A run file keeps the sentence of the version that made it; its completions say what is told of it. Five rounds of
    twelve, all other than the one alone, exclude no more of rounds than five rounds can."""
    run = run_of(PARTED)
    run.completions += [
        completion(f"t{i}", "b", round=i // 12, tokens_digest="t" if i % 12 else "u") for i in range(60)
    ]
    run.steps[0] = msgspec.structs.replace(run.steps[0], facts={"trace": "a", "tokens": "t"})
    told = batch_step(run)
    assert told.sentence == (
        "of 60 completions in 5 rounds, 60 have other logprob bits than the same prompt solo (at 95%, one-sided: "
        "above 54.9% of rounds, above 95.1% of completions if they were independent), in 5 of 5 rounds; 5 have other "
        f"tokens (95%: {percent_range(*round_interval([1] * 5, [12] * 5))}), in 5 of 5 rounds"
    )
    for figures, sentence in ((told.figures, told.sentence), ({"n": 59.0}, "old words")):
        run.steps[2] = msgspec.structs.replace(run.steps[2], sentence="old words", figures=figures)
        run.diagnoses[:] = [Diagnosis(finding="batch-dependent", whether="Batch-dependent: old words.")]
        seen = Story(run)
        assert seen.answers["Whether"] == f"Batch-dependent: {sentence}."
        assert seen.steps[2].sentence == sentence


# What the completions of a diagnosis may be said to show, from records made up for it.

IMPL = "invariant"


def under_the_cure(count: int = 6, failed: int = 0, again: bool = True) -> Run:
    """So many completions of one trace, the last ones failed, and the round that came again."""
    completions = [completion(f"t{i}", "a" * (i < count - failed), impl=IMPL) for i in range(count)]
    run = Run(header=header("diagnose", {}), completions=completions)
    run.rows += [replayed(IMPL, count)] if again else []
    return run


def test_a_cure_is_only_what_was_seen() -> None:
    """Equal completions and a round that was bit-identical are a cure; a trace that is not the solo one is none.
    Without a repetition, or with completions that failed, neither a cure nor its absence is shown."""
    for run, solo, outcome, words in [
        (under_the_cure(), "a", "yes", "run again: 1 round (6 requests), bit-identical"),
        (under_the_cure(), "b", "no", "2 distinct traces"),
        (under_the_cure(again=False), "b", "no", "2 distinct traces"),
        (under_the_cure(again=False), "a", "unknown", "run again: not tried"),
        (under_the_cure(60, failed=59), "a", "unknown", "59 completions failed"),
        (under_the_cure(failed=6), "a", "unknown", "6 completions failed"),
    ]:
        step = cure_step(run, solo)
        assert step.outcome == outcome
        assert words in step.sentence
        assert ("bit-identical" in step.sentence) == any(run.rows)
