"""Coverage from a run file's rounds: grouped, counted over rounds, and never quiet about what is exposed."""

from __future__ import annotations

from dataclasses import replace

import pytest

from nondet.core.records import FORMAT, SCHEMA_VERSION, Header, Round, Run, Step
from nondet.sampling.analysis import (
    SpeedRatio,
    coverage_of,
    coverage_rows,
    coverage_text,
    diagnosed_cost,
    ratio_text,
    speed_ratio,
    speed_ratio_of,
)


def run_of(*rounds: tuple[str, dict[str, int]]) -> Run:
    header = Header(format=FORMAT, schema=SCHEMA_VERSION, command="sample", plan={}, environment={}, started="")
    records = [
        Round(impl=impl, round=i, targets=1, others=0, steps=1, tokens=1, seconds=1.0, ran=ran)
        for i, (impl, ran) in enumerate(rounds)
    ]
    return Run(header=header, rounds=records)


def test_rounds_add_up_by_group() -> None:
    """What launchers launched is no coverage; stock has none."""
    run = run_of(
        ("stock", {}),
        ("invariant", {"replaced: linear": 3, "matmul_chain[16x32x64]": 3}),
        ("invariant", {"replaced: linear": 4, "certified stock: cumsum float32: each row as alone": 1}),
    )
    assert coverage_of(run, "invariant") == {
        "replaced": {"linear": 7},
        "certified stock": {"cumsum float32: each row as alone": 1},
    }
    assert coverage_of(run, "stock") == {}
    assert coverage_rows(run)[0] == ("invariant", "replaced", "linear", 7)
    [line] = coverage_text(run)
    assert line.startswith("invariant: 7 calls replaced, 1 calls certified stock")
    assert line.endswith("none left stock unproven or at risk")


def test_what_is_exposed_is_said() -> None:
    """An operator at risk is named, and then nothing says that all is well."""
    run = run_of(("invariant", {"replaced: linear": 3, "at risk: cumsum float32": 2}))
    assert coverage_rows(run)[-1] == ("invariant", "at risk", "cumsum float32", 2)
    assert coverage_text(run) == ["invariant: 3 calls replaced, 2 calls at risk"]


def test_there_is_one_speed_ratio() -> None:
    """Invariant over the fastest stock, by the median over rounds: one that compiled or proved does not count."""
    run = run_of(("stock", {}), ("invariant", {}))
    run.rounds.clear()
    for impl, seconds in (("stock", [9.0, 4.0, 4.0]), ("stock-no-cudnn", [90.0, 2.0, 2.0]), ("invariant", [5, 1, 1])):
        run.rounds += [
            Round(impl=impl, round=i, targets=1, others=0, steps=1, tokens=100, seconds=s)
            for i, s in enumerate(seconds)
        ]
    assert speed_ratio_of(run) == SpeedRatio("stock-no-cudnn", 50.0, 100.0, rounds=3)
    del run.rounds[3:]
    assert speed_ratio_of(run) is None


def test_a_ratio_against_a_stock_that_waits_for_the_host_is_no_cost() -> None:
    """On a GPU plain stock may be cuDNN's host side; without cuDNN, under CUDA graphs and on a CPU the ratio stands."""
    run = run_of(("stock", {}), ("invariant", {}))
    speed = speed_ratio_of(run)
    assert speed is not None
    assert not speed.host_bound
    run.header.plan.update(device="cuda", load={"graphs": False})
    assert speed_ratio_of(run) == replace(speed, host_bound=True)
    told = ratio_text(replace(speed, host_bound=True, interval=(0.5, 0.7)))
    assert told.startswith("cost not measured: stock's attention may be cuDNN's")
    assert "0." not in told
    run.header.plan.update(load={"graphs": True})
    assert speed_ratio_of(run) == speed
    assert "no cost" not in ratio_text(speed)
    assert speed_ratio({"stock-no-cudnn": 2.0, "invariant": 1.0}, host_bound=True) == SpeedRatio(
        "stock-no-cudnn", 2.0, 1.0
    )


def test_a_diagnosis_has_one_ratio() -> None:
    """That of its timed rounds, in its answer as in its tables; the sampled rounds proved and compiled."""
    run = run_of(("stock", {}), ("invariant", {}))
    figures = {"stock_tokens_per_second": 100.0, "invariant_tokens_per_second": 50.0, "invariant_ratio": 0.5}
    figures["invariant:attention_tokens_per_second"] = 60.0
    run.steps.append(Step(name="cost", outcome="yes", sentence="a warm round", figures=figures))
    speed = speed_ratio_of(run)
    assert speed is not None
    assert speed.ratio == 0.5
    assert speed.interval is None
    assert diagnosed_cost(run) == "A warm round."
    figures |= {"rounds": 2, "invariant_ratio_low": 0.45, "invariant_ratio_high": 0.55}
    assert speed_ratio_of(run) == replace(speed, interval=(0.45, 0.55), rounds=2)
    said = "Speed ratio 0.50 (0.45 to 0.55 in 2 rounds; 50 against 100 tokens/s, warm; attention alone 0.60)."
    assert diagnosed_cost(run) == said
    assert ratio_text(replace(speed, interval=(0.45, 0.55), rounds=2)).endswith(
        " against stock (0.45 to 0.55, 2 rounds)"
    )


@pytest.mark.parametrize(("rounds", "interval"), [(2, None), (5, None), (6, (0.5, 0.75)), (9, (0.5, 0.75))])
def test_a_ratio_of_few_rounds_is_no_cost(rounds: int, interval: tuple[float, float] | None) -> None:
    """Where not even the extremes of the rounds hold the median with 95% nothing is told but tokens per second."""
    run = run_of(("stock", {}), ("invariant", {}))
    run.rounds.clear()
    for impl, seconds in (("stock", [2.0, 3.0]), ("invariant", [4.0])):
        run.rounds += [
            Round(impl=impl, round=i, targets=1, others=0, steps=1, tokens=100, seconds=seconds[i % len(seconds)])
            for i in range(rounds)
        ]
    speed = speed_ratio_of(run)
    assert speed is not None
    assert (speed.interval, speed.is_cost, speed.rounds) == (interval, interval is not None, rounds)
    assert ("not measured" in ratio_text(speed)) == (interval is None)
