"""The first words of a report: what changes, by the facts of each kind of run and never by its sentences."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from nondet.core.records import Control, Neighbours, Run, TraceVerdict
from nondet.reports.content import build
from nondet.reports.first_screen import FirstScreen
from nondet.verdict.findings import Effect
from nondet.verdict.samples import judge_axes
from tests.build import bench_run, failed, row, run_of, sampled
from tests.diagnose.test_verdict import CLEAN, PARTED, traced
from tests.diagnose.test_verdict import run_of as diagnosis
from tests.verdict.test_samples import BASE, varied


def screen_of(*runs: Run) -> FirstScreen:
    return FirstScreen(build(list(runs)))


def test_of_completions(tmp_path_factory: pytest.TempPathFactory) -> None:
    for how, effect in [
        ({}, Effect.OUTPUT),
        ({"variants": lambda impl, i: ((), i % 2 if impl == "stock" else 0)}, Effect.LOGPROBS),
        ({"variants": lambda *_: ((), 0)}, Effect.NONE),
        ({"variants": lambda *_: ((), 0), "finish": False}, Effect.SO_FAR),
        ({"impls": ("invariant",)}, Effect.NO_STOCK),
        ({"impls": ("invariant",), "variants": lambda _, number: (((4, number % 2),), 0)}, Effect.OUTPUT),
    ]:
        assert screen_of(sampled(tmp_path_factory.mktemp("case"), **how)).effect is effect


def test_of_operators() -> None:
    """What differs beside any model changes no output yet; a wrong result stands before all."""
    beside = Neighbours(
        impl="stock", arm="batch", pooling="mean", texts=4, parted=4, max_ulp=1, cosine_distance=0.0, k=2,
        top1_changed=1, topk_changed=0, topk_reordered=0,
    )  # fmt: skip
    for run, effect in [
        (run_of(row([0, 1])), Effect.KERNELS),
        (run_of(row([0, 0])), Effect.NONE),
        (run_of(row([0, 1]), complete=False), Effect.KERNELS),
        (run_of(row([0, 0], status="wrong")), Effect.WRONG),
        (run_of(failed()), Effect.NOTHING),
        (run_of(row([0, 1]), neighbours=[beside]), Effect.NEIGHBOURS),
        (run_of(row([0, 1]), neighbours=[msgspec.structs.replace(beside, top1_changed=0)]), Effect.VECTORS),
    ]:
        assert screen_of(run).effect is effect


def test_of_a_trace() -> None:
    for figures, effect in [
        ({"parting": {"first_logprob": 4.0, "first_token": 9.0}}, Effect.OUTPUT),
        ({"parting": {"first_logprob": 4.0, "first_token": -1.0}, "company": {"tokens": 3.0}}, Effect.OUTPUT),
        ({"parting": {"first_logprob": 4.0, "first_token": -1.0}, "company": {"tokens": 0.0}}, Effect.LOGPROBS),
        ({"parting": {"first_logprob": 4.0, "first_token": -1.0}}, Effect.MODEL),
        ({}, Effect.MODEL),
    ]:
        controls = [Control(name=name, passed=None, sentence="", figures=of) for name, of in figures.items()]
        verdict = TraceVerdict(finding="batch-dependent", culprits=[], families=None, sentences=["Output changes"])
        assert screen_of(run_of(controls=controls, trace_verdicts=[verdict])).effect is effect
    for finding, effect in (("no divergence observed", Effect.NONE), ("unknown", Effect.UNKNOWN)):
        other = msgspec.structs.replace(verdict, finding=finding, sentences=[finding])
        screen = screen_of(run_of(controls=controls, trace_verdicts=[other]))
        assert (screen.effect, screen.answer) == (effect, f"{finding}.")
        beside = screen_of(run_of(row([0, 1]), trace_verdicts=[other]))
        first = (Effect.NONE, "dull") if effect is Effect.NONE else (Effect.KERNELS, "bad")
        assert (beside.effect, beside.style) == first


def test_of_a_diagnosis() -> None:
    def of(outcomes: dict[str, str], tokens: float = 0.0, **more: Any) -> Effect:
        run = diagnosis(outcomes, **more)
        steps = [
            msgspec.structs.replace(s, figures=s.figures | {"tokens": tokens * (s.name == "batch")}) for s in run.steps
        ]
        return screen_of(msgspec.structs.replace(run, steps=steps)).effect

    assert of(PARTED, 3.0, **traced("batch-dependent")) is Effect.OUTPUT
    assert of(PARTED, **traced("batch-dependent")) is Effect.LOGPROBS
    assert of(PARTED, 3.0, **traced("batch-dependent", ("values", "divergent"))) is Effect.WRONG
    assert of(PARTED | {"run": "no"}) is Effect.RUNS
    assert of(CLEAN) is Effect.NONE
    assert of({"greedy": "no"}) is Effect.NOT_GREEDY
    assert of({"greedy": "yes"}) is Effect.UNKNOWN
    assert screen_of(run_of(row([0, 0])), diagnosis({"greedy": "no"})).effect is Effect.NOT_GREEDY
    assert screen_of(run_of(row([0, 1])), diagnosis({"greedy": "no"})).effect is Effect.KERNELS


def test_of_axes() -> None:
    """Where an axis may change the arithmetic only what differs at one value is a change of the output."""
    for arms, other_texts, effect in [
        ({"chunk=5": "BBBB"}, True, Effect.OUTPUT),
        ({"chunk=5": "BBBB"}, False, Effect.LOGPROBS),
        ({"dtype=float16": "BBBB"}, True, Effect.NONE),
        ({"dtype=float16": "BBCC"}, False, Effect.LOGPROBS),
        ({"dtype=float16": "BBCC"}, True, Effect.OUTPUT),
    ]:
        run = varied(BASE | arms)
        if other_texts:
            run.completions[:] = [msgspec.structs.replace(c, tokens_digest=c.trace) for c in run.completions]
        (verdict,) = judge_axes(run)
        assert verdict.effect is effect


def test_a_bench_has_a_card_of_its_own() -> None:
    screen = screen_of(bench_run())
    assert (screen.effect, screen.steps, screen.picture) == (Effect.SPEED, (), None)
    assert screen_of(bench_run(), run_of(row([0, 1]))).effect is Effect.KERNELS
    parting = bench_run()
    parting.rows[:] = [row([0, 1], probe="bench")]
    assert screen_of(parting).effect is Effect.SPEED
    beside = screen_of(parting, run_of(row([0, 0])))
    answer = "probe.jsonl: stock: batch-dependent in 1 of 1 case (linear)."
    assert (beside.effect, beside.answer) == (Effect.KERNELS, answer)


def test_the_model_s_own_answer_comes_first(tmp_path: Path) -> None:
    """A backend that stock does not take by default is never the headline beside stock's own answer."""
    sampled_run = sampled(tmp_path)
    wrong_backend = row([0, 0], impl="stock-math", status="wrong", reason="NaN in hidden keys")
    for rows, alone, said in [
        ([row([0, 1]), wrong_backend], Effect.KERNELS, "in 1 of 1 case (linear); stock-math: wrong"),
        ([row([0, 0]), wrong_backend], Effect.NONE, "stock-math: wrong in 1 of 1 case (linear)"),
        ([wrong_backend], Effect.WRONG, "stock-math: wrong in 1 of 1 case (linear)"),
        ([row([0, 0], status="wrong")], Effect.WRONG, "stock: wrong in 1 of 1 case (linear)"),
    ]:
        probed = run_of(*rows)
        screen = screen_of(probed)
        assert (screen.effect, said in screen.answer) == (alone, True), rows
        for runs in ((probed, sampled_run), (sampled_run, probed)):
            screen = screen_of(*runs)
            assert (screen.effect, screen.section.run) == (Effect.OUTPUT, sampled_run)
            (isolated,) = [step.text for step in screen.steps if step.label == "isolated"] or [""]
            assert (said in isolated) is alone.is_change
    clean = sampled(tmp_path / "clean", variants=lambda *_: ((), 0))
    screen = screen_of(run_of(row([0, 0], status="wrong")), clean)
    assert (screen.effect, screen.style) == (Effect.NONE, "dull")


def test_a_picture_denies_no_fault(tmp_path: Path) -> None:
    stock, ours = "Stock kernels: 60 requests, ", "; Batch-invariant kernels: 60 requests, "
    odd = lambda impl, i: (((4, 1),) if impl != "stock" and i == 3 else (), 0)  # noqa: E731 - one line
    for run, panels in (
        (sampled(tmp_path), f"{stock}4 different answers{ours}1 answer"),
        (sampled(tmp_path, variants=odd, name="b.jsonl"), f"{stock}1 answer{ours}2 different answers"),
        (sampled(tmp_path, variants=lambda *_: ((), 0), impls=("stock",), name="c.jsonl"), f"{stock}1 answer"),
    ):
        assert screen_of(run).picture.data.label == panels
    run.completions[0] = msgspec.structs.replace(run.completions[0], finish="stop")
    screen = screen_of(run)
    assert (screen.effect, screen.picture, screen.card) == (Effect.OUTPUT, None, None)
