"""The figures of a sampled run, against examples counted by hand."""

from __future__ import annotations

import itertools
import math
import random
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import astuple, replace
from statistics import median
from typing import Any

import msgspec
import numpy as np
import pytest

from nondet.core.records import Completion, Round, Run, Step
from nondet.core.statistics import round_interval
from nondet.core.traces import Trace, tokens_digest, trace_digest
from nondet.sampling.analysis import (
    HOST_NOTE,
    TOO_FEW_ROUNDS,
    Branch,
    FlipMargins,
    Fork,
    Group,
    SampleSummary,
    SpeedRatio,
    TokenFlips,
    compared,
    coverage_rows,
    coverage_text,
    diagnosed_cost,
    forks_of,
    prompt_sets,
    ratio_text,
    smallest_cures,
    speed_ratio_of,
    summarize_all,
)
from nondet.sampling.collect import _beside_captures
from nondet.sampling.plan import Pace, Session
from tests import build
from tests.build import tiers

PIECES = {i: f" w{i}" for i in range(50)}


def trace(tokens: Sequence[int], logprobs: Sequence[float] = (), margins: Sequence[float] = ()) -> Trace:
    values = np.asarray(logprobs or [-0.5] * len(tokens), dtype="<f4").tobytes()
    digest, text = trace_digest(list(tokens), values), "".join(PIECES[t] for t in tokens)
    kept = np.asarray(margins, dtype="<f4").tobytes()
    return Trace(digest=digest, token_ids=list(tokens), logprobs=values, margins=kept, text=text)


def run_of(
    *members: tuple[Trace, int], impl: str = "stock", failed: int = 0, **rounds: Any
) -> tuple[Run, dict[str, Trace]]:
    """A run with each trace as often as said, and one round."""
    run = Run(header=build.header("sample", {"prompts": [{"text": "Once upon", "tokens": 2}]}))
    for t, count in members:
        for _ in range(count):
            run.completions.append(completion(t, len(run.completions), impl))
    for _ in range(failed):
        run.completions.append(completion(trace([]), len(run.completions), impl).refused("x"))
    figures: dict[str, Any] = {"steps": 4, "tokens": 40, "seconds": 2.0} | rounds
    run.rounds.append(Round(impl=impl, round=0, targets=len(run.completions), others=0, **figures))
    return run, {t.digest: t for t, _ in members}


def completion(t: Trace, number: int, impl: str, **more: Any) -> Completion:
    more |= {"tokens_digest": tokens_digest(t.token_ids), "n_tokens": len(t.token_ids), "impl": impl}
    return build.completion(f"t{number:06d}", t.digest, schedule=[[0, 1, 3], [1, 2, 1]], **more)


def summarize(run: Run, traces: dict[str, Trace], impl: str = "stock") -> SampleSummary:
    """The only prompt under one implementation."""
    [only] = [s for s in summarize_all(run, traces, PIECES) if s.impl == impl]
    return only


def summary_of(*members: tuple[Trace, int], **more: Any) -> SampleSummary:
    return summarize(*run_of(*members, **more), more.get("impl", "stock"))


def in_rounds(*rounds: Sequence[Trace]) -> SampleSummary:
    """The summary of these traces, round by round."""
    run, _ = run_of()
    members = [(t, number) for number, round_members in enumerate(rounds) for t in round_members]
    run.completions += [completion(t, i, "stock", round=number) for i, (t, number) in enumerate(members)]
    return summarize(run, {t.digest: t for t, _ in members})


A = trace([1, 2, 3, 4], margins=[1.0, 0.5, 0.25, 2.0])
A2 = trace([1, 2, 3, 4], [-0.5, -0.5, -0.25, -0.5], margins=[1.0, 0.5, 0.125, 2.0])
B = trace([1, 2, 9, 4], margins=[1.0, 0.5, 0.0, 2.0])
C = trace([1, 2, 9, 7], margins=[1.0, 0.5, 0.5, 1.5])


def test_flips_are_counted_by_hand() -> None:
    """Tokens compared end with the one that flips."""
    # the other two of (1, 2, 3, 4) have 4 tokens each, three others 3, because they differ at the third
    assert summary_of((A, 2), (A2, 1), (B, 2), (C, 1)).flips == TokenFlips(3, 2 * 4 + 3 * 3, None, 0)
    assert summary_of((A, 1)).flips is None, "one completion is compared with nothing"


@pytest.mark.parametrize("runs", tiers([30], [200]))
def test_the_rate_of_flips_has_an_interval_by_round(runs: int) -> None:
    """What rounds share is what is drawn: of runs whose rounds flip together, the true rate is in 95% or more."""
    rng = random.Random(5)  # noqa: S311 - a simulation
    ways = [trace([*([1] * k), *([2] * (k < 8)), *([1] * (7 - k))]) for k in range(9)]  # differs at token k

    def draw(chance: float) -> Trace:
        return ways[next((k for k in range(8) if rng.random() < chance), 8)]

    chances = (0.0, 0.08)  # of a token to flip, by round
    true = sum(1 - (1 - p) ** 8 for p in chances) / sum((1 - p) ** k for p in chances for k in range(8))
    inside, widths = 0, []
    for _ in range(runs):
        rounds = [[ways[8]], *([draw(p) for _ in range(12)] for p in rng.choices(chances, k=24))]
        flips, tokens, (low, high), _ = astuple(in_rounds(*rounds).flips)
        assert low <= flips / tokens <= high
        inside += low <= true <= high
        widths.append(high / max(low, 1e-9))
    assert inside >= 0.95 * runs
    assert median(widths) < 30, "an interval that holds everything says nothing"
    flips, tokens, (_, most), _ = astuple(in_rounds([*[trace([])] * 4, trace([1])], [trace([])] * 4).flips)
    assert (flips, tokens, most) == (1, 1, 1.0), "most completions are empty"
    flips, tokens, (least, most), rounds_held = astuple(in_rounds(*[[ways[8]] * 4] * 3).flips)
    assert (flips, tokens, rounds_held, least, most > 0) == (0, 11 * 8, 2, 0.0, True)


def test_counts_and_forks_of_a_small_tree() -> None:
    """Six completions, three of them distinct, four traces: every figure counted by hand. Of texts that are as common,
    the file's order does not matter."""
    s = summary_of((A, 2), (A2, 1), (B, 2), (C, 1), failed=1)
    assert (s.n, s.failed, s.distinct_completions, s.distinct_traces) == (6, 1, 3, 4)
    assert [(d.count, d.parts_at) for d in s.completions] == [(3, None), (2, 2), (1, 2)]
    branches = Branch(3, " w3", 3, " w4", 0.125, 0.25), Branch(9, " w9", 3, " w4", 0.0, 0.0)
    assert s.first_fork == Fork(2, "Once upon w1 w2", branches)
    assert s.survival == (1.0, 1.0, 1.0, 0.5, 0.5)
    assert s.logprob_spread == 0.25
    assert (s.agree.k, s.agree.n, s.rate.k) == (3, 6, 3)
    assert s.tokens_per_second == 20.0
    run, traces = run_of((B, 2), (A, 2), (C, 2))
    backwards = msgspec.structs.replace(run, completions=run.completions[::-1])
    assert summarize(run, traces) == summarize(backwards, traces)
    # a completion that ends where others continue differs there; forks themselves are held to brute force below
    for count, survival in [(2, (1.0, 1.0, 1.0, 0.6, 0.6)), (3, (1.0, 1.0, 1.0))]:
        ended = summary_of((A, 5 - count), (trace([1, 2], margins=[1.0, 0.5]), count))
        assert [(d.count, d.parts_at) for d in ended.completions] == [(3, None), (2, 2)]
        assert ended.survival == survival


def test_intervals_hold_whenever_they_are_looked_at() -> None:
    """After a divergence the interval is the anytime-valid one, over rounds: a single round gives none."""
    s = summary_of((A, 90), (B, 10))
    assert (s.rate.method, s.rate.rounds, s.rate.low, s.rate.high) == ("no interval: too few rounds", 0, 0.0, 1.0)
    s = in_rounds([A] * 9 + [B], [A] * 10, [A] * 7 + [B] * 3, [A] * 8 + [C] * 2)
    assert (s.rate.method, s.rate.rounds, s.rounds) == ("anytime-valid", 3, 4)
    # of the first text to come: at 97.5%
    assert (s.rate.low, s.rate.high) == round_interval([0, 3, 2], [10, 10, 10], 0.975)
    assert (s.agree.low, s.agree.high) == (1 - s.rate.high, 1 - s.rate.low)
    assert s.held_rounds == {1: (4,) * 10, 2: (2,) * 3 + (4,) * 7, 3: (2,) * 2 + (4,) * 8}
    assert s.band(3) == pytest.approx(tuple(1 - x for x in (s.rate.high, s.rate.low)), abs=1e-9)
    assert s.band(2) == round_interval([10] * 3, [10] * 3, 0.975)


def test_the_most_common_is_compared_with_rounds_after_its_first() -> None:
    """It is chosen by the data: the third text to come, over the two rounds after, at 1 - 0.05 / 12; of texts that are
    as common the one that came first."""
    s = in_rounds([B, B, C], [A] * 3, [A, B, A], [A] * 3)
    assert (list(s.completions[0].token_ids), s.rate.k, s.rate.rounds) == (A.token_ids, 4, 2)
    low, high = round_interval([1, 0], [3, 3], 1 - 0.05 / 12)
    assert (s.rate.low, s.rate.high) == (low, max(high, 4 / 12))
    assert in_rounds([B], [A]).completions[0].token_ids == tuple(B.token_ids)
    assert in_rounds([B], [A, A]).rate.method == "no interval: too few rounds"


def test_a_failed_request_leaves_the_others_figures() -> None:
    """Without logprobs in one trace the others' still count."""
    run, traces = run_of((A, 3), failed=1)
    [s] = summarize_all(run, traces, PIECES)
    assert (s.n, s.failed, s.distinct_completions) == (3, 1, 1)
    assert summarize_all(run_of(failed=2)[0], {}, PIECES) == []
    bare = Trace(digest="bare", token_ids=[1, 2, 9], logprobs=b"", margins=b"", text="")
    assert summary_of((A, 1), (bare, 1)).has_logprobs
    assert not summary_of((bare, 2)).has_logprobs


def test_margins_at_forks_are_compared_with_the_others() -> None:
    """The flip of B and of A is at token 3, margin 0 and 0.5; the other positions of both are the rest. K3 goes over
    the three tokens that are shared, one of them 0.1 nats apart."""
    one = trace([1, 2, 3, 4], margins=[2.0, 2.0, 2.0, 0.5])
    two = trace([1, 2, 3, 5], [-0.5, -0.6, -0.5, -9.0], margins=[2.0, 0.25, 2.0, 0.0])
    s = summary_of((one, 3), (two, 2))
    assert s.margins == pytest.approx(FlipMargins(2, 0.25, 0.5, 2, 6, 2.0, 1 / 6))
    assert s.k3 == pytest.approx((math.exp(-0.1) - 1 + 0.1) / 3, rel=1e-5)
    same = summary_of((one, 5))
    assert (same.margins, same.k3) == (None, None)


def test_overall_figures() -> None:
    """Every prompt is compared with itself; bounds are by the rounds that were compared."""
    s = summary_of((A, 8), (B, 2))
    (both,) = prompt_sets([replace(s, prompt=i) for i in range(3)], {"stock": 4})
    assert (both.prompts, both.differing_texts, both.n, both.rounds) == (3, 3, 30, 4)
    assert both.bound_rounds is None
    clean = replace(summary_of((A, 8), impl="invariant"), held_rounds=dict.fromkeys(range(1, 5), (4, 4)))
    stock, invariant = prompt_sets([s, clean], {"stock": 4, "invariant": 4})
    assert invariant.bound_rounds == pytest.approx(1 - 0.05 ** (1 / 4))
    assert invariant.bound_completions == pytest.approx(1 - 0.05 ** (1 / 7))
    pair = compared(stock, invariant)
    assert (pair.only_first, pair.only_second, pair.p) == (1, 0, 1.0)
    # ten prompts with a completion in each of two rounds: the second is compared with the first
    s = in_rounds([A], [A])
    assert (s.held_rounds, summary_of((A, 2)).held_rounds) == ({1: (4,)}, {})
    (both,) = prompt_sets([replace(s, prompt=i) for i in range(10)], {"stock": 2})
    assert both.bound_rounds == pytest.approx(0.95)


def test_no_divergence_states_a_bound_and_nothing_more() -> None:
    """Where all agree, the rate that n - 1 comparisons exclude is stated, one-sided: 1 - 0.05^(1/(n-1)); of one
    completion none. Equal tokens with other logprobs are other traces."""
    s = summary_of((A, 60))
    assert (s.distinct_completions, s.distinct_traces, s.first_fork) == (1, 1, None)
    assert (s.rate.k, s.rate.n, s.rate.low, s.rate.method) == (0, 60, 0.0, "0 of n, one-sided")
    assert s.rate.high == pytest.approx(1 - 0.05 ** (1 / 59))
    assert (s.survival, s.logprob_spread) == ((1.0,) * 5, 0.0)
    one, both = summary_of((A, 1)), summary_of((A, 5), (A2, 5))
    assert (one.n, one.rate.high, one.agree.k) == (1, 1.0, 1)
    assert (both.distinct_completions, both.distinct_traces, both.first_fork, both.logprob_spread) == (1, 2, None, 0.25)


def test_batches_are_summed_over_all_requests() -> None:
    """Distinct batch sizes count what the steps held, background included; other rounds and implementations do not."""
    run, traces = run_of((A, 2), background={"b": [[0, 1, 10], [5, 1, 99]]})
    run.completions.append(completion(A, 9, "invariant"))
    s = summarize(run, traces)
    # step 0: 3 + 3 + 10; steps 1 and 2: 1 + 1; step 5 has no target
    assert (s.distinct_batches, s.n) == (2, 2)
    with pytest.raises(KeyError):  # a file of traces that is another run's
        summarize(run, {})


def test_only_a_replacement_that_is_enough_by_itself_is_a_cure() -> None:
    """Replacing only attention removes it, only matmul does not: attention is named, if stock diverged at all."""
    stock = summary_of((A, 5), (B, 5))
    attention = replace(summary_of((A, 10)), impl="invariant:attention")
    matmul = replace(summary_of((A, 8), (A2, 2)), impl="invariant:matmul")
    both = replace(attention, impl="invariant:attention+matmul")
    few = replace(summary_of((A, 2)), impl="invariant:attention")
    for summaries, cures in [
        ([stock, attention, matmul], ["attention"]),
        *((nothing, []) for nothing in ([stock, matmul], [replace(attention, impl="stock"), attention], [attention])),
        ([stock, matmul, both], ["attention+matmul"]),  # neither was enough by itself
        ([stock, both, attention], ["attention"]),  # a larger set shows nothing that its part does not
        ([stock, few], []),  # two completions that agree prove little against ten
    ]:
        assert smallest_cures(summaries) == cures


@pytest.mark.slow
def test_reading_a_run_needs_no_torch() -> None:
    """A report is made anywhere: neither the analysis nor a reporter loads torch or what is as heavy."""
    modules = "sampling.analysis reports.html reports.markdown reports.terminal"
    heavy = {"torch", "transformers", "pandas", "matplotlib", "triton"}
    code = f"import sys, {', '.join(f'nondet.{name}' for name in modules.split())}; print({heavy} & {{*sys.modules}})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"


# Coverage and speed, from a run file's rounds.


def run_with(*rounds: Round, **plan: Any) -> Run:
    return Run(header=build.header("sample", {"turns": True} | plan), rounds=list(rounds))


def timed(*seconds: float, impl: str, **more: Any) -> list[Round]:
    same: dict[str, Any] = {"impl": impl, "targets": 1, "others": 0, "steps": 4, "tokens": 100}
    return [Round(round=i, seconds=s, **same, **more) for i, s in enumerate(seconds)]


def test_calls_add_up_by_group() -> None:
    """What launchers launched is no coverage; stock has none; an operator at risk is named, and all is not well."""
    run = run_with(
        *timed(1.0, impl="stock"),
        *timed(1.0, impl="invariant", ran={"replaced: linear": 3, "matmul_chain[16x32x64]": 3}),
        *timed(1.0, impl="invariant", ran={"replaced: linear": 4, "certified stock: cumsum: each row as solo": 1}),
    )
    certified = ("invariant", "certified stock", "cumsum: each row as solo", 1)
    assert coverage_rows(run) == [("invariant", "replaced", "linear", 7), certified]
    [said] = coverage_text(run)
    assert said == "invariant: 7 calls replaced, 1 calls certified stock, none left stock unproven or at risk"
    exposed = run_with(*timed(1.0, impl="invariant", ran={"replaced: linear": 3, "at risk: cumsum float32": 2}))
    assert coverage_rows(exposed)[-1] == ("invariant", "at risk", "cumsum float32", 2)
    assert coverage_text(exposed) == ["invariant: 3 calls replaced, 2 calls at risk"]


def test_there_is_one_speed_ratio() -> None:
    """Invariant over the fastest stock, by the median over rounds: one that compiled or proved does not count. On a GPU
    plain stock may wait for cuDNN's host side; without cuDNN, under CUDA graphs and on a CPU the ratio is a cost."""
    stock, bare = timed(9.0, 4.0, 4.0, impl="stock"), timed(90.0, 2.0, 2.0, impl="stock-no-cudnn")
    invariant = timed(5.0, 1.0, 1.0, impl="invariant")
    fastest = SpeedRatio("stock-no-cudnn", 50.0, 100.0, rounds=3, no_cost=TOO_FEW_ROUNDS)
    assert speed_ratio_of(run_with(*stock, *bare, *invariant)) == fastest
    assert speed_ratio_of(run_with(*stock, *bare, *invariant, device="cuda")) == fastest
    assert speed_ratio_of(run_with(*stock, *bare)) is None
    run = run_with(*stock, *invariant)
    speed = SpeedRatio("stock", 25.0, 100.0, rounds=3, no_cost=TOO_FEW_ROUNDS)
    assert speed_ratio_of(run) == speed
    run.header.plan.update(device="cuda", load={"graphs": False})
    assert speed_ratio_of(run) == (bound := replace(speed, no_cost=HOST_NOTE))
    assert ratio_text(replace(bound, interval=(0.5, 0.7))) == f"cost not measured: {HOST_NOTE}"
    run.header.plan.update(load={"graphs": True})
    assert speed_ratio_of(run) == speed


def test_a_diagnosis_has_one_ratio() -> None:
    """That of its timed rounds, in its answer as in its tables; the sampled rounds proved and compiled."""
    run = run_with(*timed(1.0, impl="stock"), *timed(1.0, impl="invariant"))
    figures = {"stock_tokens_per_second": 100.0, "invariant_tokens_per_second": 50.0, "invariant_ratio": 0.5}
    run.steps.append(Step(name="cost", outcome="yes", sentence="a warm round", figures=figures))
    speed = speed_ratio_of(run)
    assert (speed.ratio, speed.interval) == (0.5, None)
    rates = "(50 against 100 tokens/s, warm)"
    assert diagnosed_cost(run) == f"Not measured: too few rounds were timed for an interval {rates}."
    figures |= {"rounds": 2, "invariant_ratio_low": 0.45, "invariant_ratio_high": 0.55}
    assert speed_ratio_of(run) == replace(speed, interval=(0.45, 0.55), rounds=2, no_cost="")
    assert diagnosed_cost(run) == "Speed ratio 0.45 to 0.55 against stock (2 rounds)."
    run.header.plan.update(device="cuda", load={"graphs": False})
    assert diagnosed_cost(run).startswith("Not measured: stock may run cuDNN's attention")
    assert "0.50" not in diagnosed_cost(run)


def test_a_ratio_of_few_rounds_is_no_cost() -> None:
    """Where not even the extremes of the rounds hold the median with 95% only tokens per second are shown. A round with
    other batches shows nothing about the kernels; what capturing took is in no rate."""
    for count, interval in [(2, None), (5, None), (6, (0.5, 0.75)), (9, (0.5, 0.75))]:
        stock = timed(*[2.0, 3.0] * 5, impl="stock")[:count]
        speed = speed_ratio_of(run_with(*stock, *timed(*[4.0] * count, impl="invariant")))
        assert (speed.interval, not speed.no_cost, speed.rounds) == (interval, interval is not None, count)
        assert ("not measured" in ratio_text(speed)) == (interval is None)
    run = run_with(*timed(*[4.0] * 7, impl="stock"), *timed(*[2.0] * 7, impl="invariant"))
    run.rounds[7] = msgspec.structs.replace(run.rounds[7], steps=5)
    speed = speed_ratio_of(run)
    assert (speed.ratio, speed.interval, speed.rounds) == (2.0, (2.0, 2.0), 6)
    pace = [Pace(3.0, 10, True), Pace(0.5, 8, False), Pace(0.25, 8, False)]
    figures = _beside_captures(Session(outcomes=[], steps=3, tokens=26, seconds=3.75, pace=pace))
    run.rounds[:] = timed(*[3.75] * 7, impl="stock", figures=figures) + timed(*[1.0] * 7, impl="invariant")
    assert speed_ratio_of(run).stock == pytest.approx(16 / 0.75)
    assert _beside_captures(Session(outcomes=[], steps=1, tokens=8, seconds=0.5, pace=pace[1:])) == {}


# Forks by sorting and ranges, against the same figures by brute force.


def forest(seed: int) -> tuple[list[Group], dict[str, Trace]]:
    """Few tokens, so that many texts share beginnings and some end where others continue; some traces lack figures."""
    rng = random.Random(seed)  # noqa: S311 - an example, not a secret
    groups: dict[tuple[int, ...], Group] = {}
    traces: dict[str, Trace] = {}
    for _ in range(rng.randint(1, 12)):
        tokens = tuple(rng.randint(0, 1) for _ in range(rng.randint(0, 6)))
        group = groups.setdefault(tokens, Group(tokens))
        for _ in range(rng.randint(1, 3)):
            values = [rng.choice((-0.5, -0.25, -1.5, math.nan, -math.inf)) for _ in tokens]
            logprobs = np.array(values, dtype="<f4").tobytes() if rng.random() < 0.8 else b""
            margins = [rng.choice((0.0, 0.5, 1.0, math.inf)) for _ in tokens]
            made = np.array(margins, dtype="<f4").tobytes() if rng.random() < 0.8 else b""
            digest = trace_digest(list(tokens), logprobs)
            traces.setdefault(digest, Trace(digest=digest, token_ids=list(tokens), logprobs=logprobs, margins=made))
            group.traces[digest] += 1
            group.count += 1
    return sorted(groups.values(), key=lambda g: (-g.count, g.tokens)), traces


def widest(groups: list[Group], traces: dict[str, Trace]) -> float:
    """Over every pair of traces, every token up to the first that differs."""
    spread = 0.0
    members = [(g.tokens, traces[d].logprob_array) for g in groups for d in g.traces if traces[d].logprobs]
    for (one, mine), (other, theirs) in itertools.combinations(members, 2):
        for i, (x, y) in enumerate(zip(one, other, strict=False)):
            if x != y:
                break
            if np.isfinite(mine[i]) and np.isfinite(theirs[i]):
                spread = max(spread, abs(float(mine[i]) - float(theirs[i])))
    return spread


def histories(groups: list[Group]) -> dict[tuple[int, ...], dict[int, int]]:
    """Every history after which texts continue in several ways: token (-1: the end) -> completions."""
    ways: dict[tuple[int, ...], dict[int, int]] = {}
    for g in groups:
        for i in range(len(g.tokens) + 1):
            on = ways.setdefault(g.tokens[:i], {})
            on[g.token(i)] = on.get(g.token(i), 0) + g.count
    return {history: on for history, on in ways.items() if len(on) > 1}


def test_forks_and_spread_are_those_of_brute_force() -> None:
    """150 small forests: the first fork's index, ways, counts and margins, who takes part in each, the spread."""
    forked = spread = 0
    for seed in range(150):
        groups, traces = forest(seed)
        result = forks_of(groups, traces, {0: "a", 1: "b"}, "P")
        expected = histories(groups)
        for group, positions in zip(groups, result.positions, strict=True):
            assert list(positions) == sorted(len(h) for h in expected if group.tokens[: len(h)] == h)
        assert result.spread == widest(groups, traces)
        assert (result.first is None) == (not expected)
        if result.first is not None:
            history = min(expected, key=len)
            index = len(history)
            assert (result.first.index, result.first.before) == (index, "P" + "".join("ab"[t] for t in history))
            ways = sorted(expected[history].items(), key=lambda way: (-way[1], way[0]))
            assert [(b.token_id, b.count) for b in result.first.branches] == ways
            for branch in result.first.branches:
                margins = [
                    float(traces[d].margin_array[index])
                    for g in groups
                    if g.token(index) == branch.token_id
                    for d, count in g.traces.items()
                    for _ in range(count)
                    if index < len(traces[d].margin_array) and np.isfinite(traces[d].margin_array[index])
                ]
                assert branch.margin_min == (min(margins) if margins else None)
                assert branch.margin_median == (median(margins) if margins else None)
        forked += len(expected)
        spread += result.spread > 0
    assert forked > 250
    assert spread > 50
    deep = [Group(tuple([1] * i + [2]), 1) for i in range(1100)]  # deeper than Python recurses
    assert max(map(len, forks_of(deep, {}, {}, "").positions)) == 1099
