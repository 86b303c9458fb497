"""Timing: rotating buffers, replays in turn, medians; with a clock made by hand, so that every figure is known."""

from __future__ import annotations

import time
from collections.abc import Sequence
from statistics import median
from typing import Any

import pytest
import torch

from nondet.bench.cells import CudaGraphs, PerfCounter, interleave, rotation, stopwatch_for, timed_of

MIB = 2**20


class FakeStopwatch(PerfCounter):
    """A stopwatch whose clock moves when a call says so."""

    def __init__(self) -> None:
        self.now = 0.0
        super().__init__(lambda: self.now)

    def taking(self, name: str, seconds: Sequence[float], log: list[str]) -> Any:
        """A replay that takes each of `seconds` in turn, the last for ever."""
        left = list(seconds)

        def replay() -> None:
            log.append(name)
            self.now += left.pop(0) if len(left) > 1 else left[0]

        return replay


@pytest.mark.parametrize(
    ("set_bytes", "limit_us", "sets", "calls", "cold"),
    [
        (50 * MIB, 13.0, 4, 40, True),  # a weight of 8B: 200 MiB rotate; 10 passes make half a millisecond
        (400 * MIB, 900.0, 2, 2, True),  # one call is longer than a replay has to be
        (2 * MIB, 0.5, 64, 256, False),  # 128 MiB of sets stay below three caches of 60
        (0, None, 64, 256, False),  # nothing known
        (90 * MIB, 1e9, 2, 2, True),
    ],
)
def test_rotation(set_bytes: int, limit_us: float | None, sets: int, calls: int, cold: bool) -> None:
    """Sets exceed the cache three times where they may, calls fill a replay, and a cell that stays warm is said so."""
    turns = rotation(set_bytes, limit_us, 60 * MIB)
    assert (turns.sets, turns.calls, turns.cold) == (sets, calls, cold)
    assert turns.calls % turns.sets == 0  # every set is used as often as any other


def test_a_replay_walks_over_the_sets_in_turn() -> None:
    """No set is used twice in a row, and each as often: what is counted is not one buffer in the cache."""
    seen: list[int] = []
    watch = PerfCounter()
    replay = watch.record(seen.append, [(0,), (1,), (2,)], 6)
    assert seen == [0, 1]  # the warm-up
    seen.clear()
    replay()
    assert seen == [0, 1, 2, 0, 1, 2]


def test_replays_stand_side_by_side_and_the_first_round_counts_for_nothing() -> None:
    """The slow first replay of a kernel is in no figure, everybody runs once a round, and the order turns."""
    watch, log = FakeStopwatch(), []
    watch.budget_us = 30_000.0
    replays = {
        "stock": watch.taking("stock", [0.5e-2, 1e-3], log),
        "ours": watch.taking("ours", [0.5e-2, 2e-3], log),
    }
    samples = interleave(replays, watch, least=3, most=5)
    assert [len(s) for s in samples.values()] == [5, 5]
    assert samples["stock"] == pytest.approx([1000.0] * 5)
    assert samples["ours"] == pytest.approx([2000.0] * 5)
    assert log == ["stock", "ours"] + ["stock", "ours", "ours", "stock"] * 2 + ["stock", "ours"]


def test_slow_replays_are_few_and_never_fewer_than_asked() -> None:
    """A budget bounds the time of a cell; a second a replay still gives the least number of them."""
    watch, log = FakeStopwatch(), []
    samples = interleave({"slow": watch.taking("slow", [1.0], log)}, watch, least=4)
    assert len(samples["slow"]) == 4
    assert interleave({}, watch) == {}


def test_what_comes_before_a_replay_is_not_timed() -> None:
    """A barrier before each one, the uncounted round's too; and as many rounds as are asked for, whatever they take."""
    watch, log = FakeStopwatch(), []

    def before() -> None:
        log.append("before")
        watch.now += 60.0

    samples = interleave({"ours": watch.taking("ours", [2e-3], log)}, watch, least=3, most=3, before=before)
    assert log == ["before", "ours"] * 4
    assert samples["ours"] == pytest.approx([2000.0] * 3)


def test_quartiles() -> None:
    """As NumPy's default: interpolated between neighbours."""
    four, one = (timed_of("stock", samples, []) for samples in ([4.0, 1.0, 3.0, 2.0], [7.0]))
    assert (four.low_us, four.median_us, four.high_us) == (1.75, 2.5, 3.25)
    assert (one.low_us, one.median_us, one.high_us) == (7.0, 7.0, 7.0)


def test_a_cpu_is_timed_by_the_clock() -> None:
    """A real call takes a real time, more of them take longer."""
    watch = stopwatch_for("cpu")
    a = torch.ones(256, 256)
    one, many = (watch.record(torch.mm, [(a, a)], calls) for calls in (1, 64))
    samples = interleave({"one": one, "many": many}, watch, least=5, most=5)
    assert 0 < median(samples["one"]) < median(samples["many"])


def test_cpu_time_leaves_waiting_out() -> None:
    """What sleeps has next to no time of its own; what works has."""
    watch = stopwatch_for("cpu", "cpu")
    assert watch.method == "process_time"
    a = torch.ones(256, 256)
    asleep, awake = (watch.record(call, [(x,)], 1) for call, x in ((time.sleep, 0.02), (lambda a: a @ a @ a @ a, a)))
    samples = interleave({"asleep": asleep, "awake": awake}, watch, least=3, most=3)
    assert min(samples["asleep"]) < 10_000
    assert min(samples["awake"]) > 100


@pytest.mark.gpu
def test_graphs_time_what_the_device_does() -> None:
    """A product of eight times the work takes longer, and far less than a second: microseconds, not milliseconds."""
    watch = CudaGraphs()
    small, large = (torch.randn(n, n, device="cuda", dtype=torch.bfloat16) for n in (4096, 8192))
    replays = {
        "small": watch.record(torch.mm, [(small, small)] * 2, 4),
        "large": watch.record(torch.mm, [(large, large)] * 2, 4),
    }
    samples = interleave(replays, watch, least=5, most=5)
    assert 400 < median(samples["small"]) < median(samples["large"]) / 4 < 100_000
    assert watch.cache_bytes > MIB
