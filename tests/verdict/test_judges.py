"""NaN and infinity through every judge: they agree with themselves bit for bit, and a gate must not open on that."""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import numpy as np
import pytest
import torch

from nondet.core.records import Run
from nondet.core.traces import nonfinite_logprobs
from nondet.diagnose.steps import greedy_step
from nondet.diagnose.verdict import conclude, cure_step
from nondet.probes.functions import check
from nondet.sampling.plan import Outcome, Request, Session
from nondet.verdict.findings import Finding, Verdict
from nondet.verdict.gate import decide, exit_code, judge
from tests.diagnose.test_batch import IMPL, under_the_cure
from tests.reports.factory import header
from tests.verdict.test_axes import BASE, varied
from tests.verdict.test_served_review import changed, simple


def logprobs(value: float) -> bytes:
    return np.asarray([value, -0.25], "<f4").tobytes()


def computed(run: Run, value: float) -> Run:
    """As the collectors count it: completions that all hold this logprob."""
    return changed(run, lambda _: {"nonfinite": nonfinite_logprobs(logprobs(value))})


def of_rows(value: float) -> Run:
    return check(lambda x: x * value, lambda size: torch.ones(8, 16)[:size], [1, 2, 4])


def of_samples(value: float) -> Run:
    run = under_the_cure()
    plan = {"prompts": [{"text": "p", "tokens": 4}], "impls": [IMPL]}
    return computed(msgspec.structs.replace(run, header=header("sample", plan), complete=True), value)


def of_axes(value: float) -> Run:
    return computed(varied(BASE | {"chunk=5": "AAAA"}), value)


def of_servers(value: float) -> Run:
    return computed(msgspec.structs.replace(simple(), complete=True), value)


JUDGES: tuple[Callable[[float], Run], ...] = (of_rows, of_samples, of_axes, of_servers)
VALUES = (float("nan"), float("inf"), float("-inf"))


@pytest.mark.parametrize("made", JUDGES)
@pytest.mark.parametrize("value", [*VALUES, -0.5])
def test_every_judge_calls_it_wrong_and_the_gate_stays_shut(made: Callable[[float], Run], value: float) -> None:
    """With a number in its place the same run is clean and opens the gate."""
    run = msgspec.structs.replace(made(value), complete=True)
    sound = value == -0.5
    [verdict] = judge(run)
    assert verdict.findings == ((Finding.CLEAN,) if sound else (Finding.WRONG,))
    assert exit_code(run, "divergent") == ((0, "") if sound else (3, ""))
    assert (decide(run, rate=0.9, confidence=0.5, by="request").code == 3) == (not sound)


def untested(run: Run) -> tuple[Verdict, int]:
    [verdict] = judge(run)
    return verdict, exit_code(run, "divergent")[0]


@pytest.mark.parametrize("value", VALUES)
def test_nothing_compared_hides_no_wrong_answer(value: float) -> None:
    """One completion, an axis without effect, one answer of a server: wrong is said before that."""
    lone, sample = simple(loads=0), of_samples(value)
    runs = [
        msgspec.structs.replace(sample, completions=sample.completions[:1]),
        computed(varied(BASE | {"chunk=5": "AAAA"}, "chunk=5"), value),
        computed(msgspec.structs.replace(lone, completions=lone.completions[:1]), value),
    ]
    told = [untested(run) for run in runs]
    assert [(verdict.findings, code) for verdict, code in told] == [((Finding.WRONG, Finding.UNTESTED), 3)] * 3
    assert all("hold NaN or infinite logprobs: wrong; " in verdict.text for verdict, _ in told)


@pytest.mark.parametrize("value", VALUES)
def test_a_diagnosis_calls_it_wrong_and_no_cure(value: float) -> None:
    """What the model computes comes before the batch; completions that agree in NaN show no cure."""
    mine = Outcome(
        request=Request("r0", True, (1, 2), 2, 0), token_ids=[7, 7], logprobs=logprobs(value), margins=b"",
        runner_up=[], finish="length", schedule=[], batch_min=1, batch_max=1,
    )  # fmt: skip
    session = Session(outcomes=[mine], steps=2, tokens=2, seconds=1.0, tops={"r0": [(value, 1.0, 7, 8)] * 2})
    run = Run(header=header("diagnose", {}), steps=[greedy_step((session,), str)])
    assert conclude(run).finding == Finding.WRONG
    assert cure_step(under_the_cure(), IMPL, "a", ()).outcome == "yes"
    cure = cure_step(computed(under_the_cure(), value), IMPL, "a", ())
    assert cure.outcome == "no"
    assert "6 completions hold NaN or infinite logprobs" in cure.sentence
