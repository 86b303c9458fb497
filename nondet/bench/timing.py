"""Timing: every implementation of a cell in turn, replay by replay, over rotating buffers.

A *replay* makes `calls` calls that walk over `sets` sets of buffers. On CUDA it is one replay of a graph, so that no
launch from the host is in the figure; the outputs of one rotation are kept until the next, so that they rotate, too.
Replay i of every implementation follows replay i of the others: whatever the machine does over time (clocks, heat,
neighbours) falls on all of them alike, and ratios are taken within a run.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch

__all__ = [
    "CLOCKS",
    "CudaGraphs",
    "PerfCounter",
    "ProcessTime",
    "Rotation",
    "Stopwatch",
    "interleave",
    "quartiles",
    "rotation",
    "stopwatch_for",
]

Call = Callable[..., Any]
Replay = Callable[[], Any]

CLOCKS = ("wall", "cpu")

# The last cache of a CPU is rarely told to programs: most have less than this per core complex.
_CPU_CACHE_BYTES = 32 * 2**20
# Sets together exceed the cache by this factor, so that what is read again was surely thrown out.
_CACHE_FACTOR = 3
_SETS_MOST = 64
_CALLS_MOST = 256
# Launching a graph takes some microseconds: at this length that is about one percent of a replay.
_REPLAY_US = 500.0
# No kernel is shorter than about this, whatever its bytes say.
_SHORTEST_US = 2.0


class Rotation:
    """How many sets of buffers, how many calls a replay, and whether no call can find its inputs in the cache."""

    def __init__(self, sets: int, calls: int, cold: bool) -> None:
        self.sets, self.calls, self.cold = sets, calls, cold


def rotation(set_bytes: int, limit_us: float | None, cache_bytes: int, replay_us: float = _REPLAY_US) -> Rotation:
    """The rotation for a cell whose inputs and output take `set_bytes`.

    It does not depend on the implementation, so all of a cell are timed alike.
    """
    sets = min(max(math.ceil(_CACHE_FACTOR * cache_bytes / max(1, set_bytes)), 2), _SETS_MOST)
    shortest = max(limit_us or 0.0, _SHORTEST_US)
    passes = max(1, min(math.ceil(replay_us / (sets * shortest)), _CALLS_MOST // sets))
    return Rotation(sets, sets * passes, sets * set_bytes >= _CACHE_FACTOR * cache_bytes)


class Stopwatch(Protocol):
    """Makes replays and times them."""

    method: str
    cache_bytes: int
    budget_us: float
    replay_us: float

    def record(self, call: Call, sets: Sequence[tuple[Any, ...]], calls: int) -> Replay:
        """A replay of `calls` calls over the sets in turn; every call was made once before, so nothing compiles."""
        ...

    def run(self, replay: Replay) -> Any:
        """Run it once; the result goes to `read`."""
        ...

    def read(self, runs: Sequence[Any]) -> list[float]:
        """Microseconds of each run."""
        ...


class CudaGraphs:
    """CUDA graphs, timed by events that the device itself stamps."""

    method = "cuda graph"
    budget_us = 80_000.0
    replay_us = _REPLAY_US

    def __init__(self) -> None:
        properties = torch.cuda.get_device_properties(torch.cuda.current_device())
        self.cache_bytes = int(properties.L2_cache_size)

    def record(self, call: Call, sets: Sequence[tuple[Any, ...]], calls: int) -> Replay:
        """Capture the calls. Raises whatever a call that can't be captured raises."""
        for arguments in sets[:2]:  # compiles, tunes, proves; a second time for what happens on the second call only
            call(*arguments)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        outputs: list[Any] = [None] * len(sets)
        with torch.cuda.graph(graph):
            for i in range(calls):
                outputs[i % len(sets)] = call(*sets[i % len(sets)])
        outputs.clear()  # their memory belongs to the graph, and stays with it
        graph.replay()
        torch.cuda.synchronize()
        return graph.replay

    def run(self, replay: Replay) -> Any:
        """Nothing waits here: the device works through what is queued, with no gap for the host."""
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        replay()
        end.record()
        return start, end

    def read(self, runs: Sequence[Any]) -> list[float]:
        """Wait for the last, then read all."""
        torch.cuda.synchronize()
        return [start.elapsed_time(end) * 1e3 for start, end in runs]


class PerfCounter:
    """Python's clock around the calls, for a CPU: operators return when they are done."""

    method: str = "perf_counter"
    cache_bytes = _CPU_CACHE_BYTES
    budget_us = 60_000.0
    replay_us = 2_000.0

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock

    def record(self, call: Call, sets: Sequence[tuple[Any, ...]], calls: int) -> Replay:
        """A loop; the first calls are made here."""
        for arguments in sets[:2]:
            call(*arguments)

        def replay() -> None:
            outputs: list[Any] = [None] * len(sets)
            for i in range(calls):
                outputs[i % len(sets)] = call(*sets[i % len(sets)])

        return replay

    def run(self, replay: Replay) -> Any:
        """Seconds between before and after."""
        before = self._clock()
        replay()
        return self._clock() - before

    def read(self, runs: Sequence[Any]) -> list[float]:
        """As microseconds."""
        return [seconds * 1e6 for seconds in runs]


class ProcessTime(PerfCounter):
    """The CPU time of this process, its threads' together: what others run meanwhile is not in it, nor is waiting.

    On a loaded machine a replay that outlasts a time slice is interrupted and a shorter one is not, so that by the
    clock on the wall the slower of two implementations looks slower than it is, in its fastest replay too.
    """

    method = "process_time"

    def __init__(self, clock: Callable[[], float] = time.process_time) -> None:
        super().__init__(clock)


def stopwatch_for(device: str, clock: str = "wall") -> Stopwatch:
    """The way to time on the device type: by the clock on the wall, or on a CPU by "cpu" time."""
    if device == "cuda":
        return CudaGraphs()
    return ProcessTime() if clock == "cpu" else PerfCounter()


def interleave(
    replays: Mapping[str, Replay], stopwatch: Stopwatch, *, least: int = 7, most: int = 41
) -> dict[str, list[float]]:
    """Microseconds of each replay, by implementation: round after round, everybody once a round.

    The order within a round turns by one each time, so nobody always follows the same neighbour. A first round, which
    decides how many follow within the stopwatch's budget, is not in the figures.
    """
    names = list(replays)
    if not names:
        return {}
    first = stopwatch.read([stopwatch.run(replays[name]) for name in names])
    rounds = min(max(math.ceil(stopwatch.budget_us * len(names) / max(sum(first), 1e-3)), least), most)
    runs: dict[str, list[Any]] = {name: [] for name in names}
    for number in range(rounds):
        turn = number % len(names)
        for name in names[turn:] + names[:turn]:
            runs[name].append(stopwatch.run(replays[name]))
    return {name: stopwatch.read(own) for name, own in runs.items()}


def quartiles(samples: Sequence[float]) -> tuple[float, float, float]:
    """(lower quartile, median, upper quartile), interpolated between neighbours."""
    ordered = sorted(samples)

    def at(share: float) -> float:
        place = share * (len(ordered) - 1)
        below = math.floor(place)
        above = min(below + 1, len(ordered) - 1)
        return ordered[below] + (place - below) * (ordered[above] - ordered[below])

    return at(0.25), at(0.5), at(0.75)
