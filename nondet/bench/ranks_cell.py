"""In a rank: one cell over several ranks, its bits first and then its times, everybody in step.

A barrier stands before every replay, and the number of replays is fixed: ranks that decided by their own clocks would
wait for each other for ever.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch

__all__ = ["REPLAYS", "RankTimes", "RanksWork", "time_cell"]

REPLAYS = 15
# One replay moves about this much, so that a launch from the host or a wait at the barrier is little of it.
_REPLAY_BYTES = {"cpu": 2**20, "cuda": 2**26}
_CALLS_MOST = {"cpu": 16, "cuda": 50}
# what a second set of buffers is for: a call must not find its message where the last one left it
_SETS = 4

Call = Callable[[torch.Tensor], torch.Tensor]


class RanksWork(NamedTuple):
    """What a cell over ranks asks.

    Attributes:
        operator: all_reduce of [m, n] on each rank, or row_parallel: [m, k / ranks] times [n, k / ranks], summed.
        k: 0 for an all_reduce.
    """

    operator: str
    impls: tuple[str, ...]
    device: str
    dtype: str
    m: int
    n: int
    k: int
    seed: int


class RankTimes(NamedTuple):
    """What one rank has to say of a cell under one implementation.

    Attributes:
        row: `nondet.core.compare.digest` of row 0, in company of m - 1 others.
        samples_us: Microseconds a call, one figure a replay.
        failure: (status, reason) where it could not be timed.
    """

    row: str
    samples_us: list[float]
    calls: int
    ran: list[str]
    method: str
    failure: tuple[str, str] | None = None


def time_cell(work: RanksWork) -> dict[str, RankTimes]:
    """Compute the cell once for its bits, then time it: replay i of one implementation beside replay i of all.

    What does not apply here does not apply on any rank, so that all of them time the same implementations.
    """
    from nondet.bench.timing import stopwatch_for
    from nondet.core.compare import digest
    from nondet.core.launch import listen

    stopwatch = stopwatch_for(work.device)
    times: dict[str, RankTimes] = {}
    replays: dict[str, Callable[[], object]] = {}
    runs: dict[str, list[object]] = {}
    kept: list[object] = []  # a captured graph reads its buffers where they lay, and keeps none of them alive
    size = work.m * work.n * getattr(torch, work.dtype).itemsize
    calls = max(1, min(_REPLAY_BYTES[work.device] // size, _CALLS_MOST[work.device]))
    with torch.no_grad():
        for impl in work.impls:
            with listen() as notes:
                try:
                    call, sets = _prepare(work, impl)
                    kept.append((call, sets))
                    result = call(sets[0][0].clone())
                    row, failure = digest(result[0]), None
                    if work.operator == "all_reduce":  # in place: sums of sums would overflow within a replay
                        for (x,) in sets:
                            x.zero_()
                    replays[impl] = stopwatch.record(call, sets, calls)
                except NotImplementedError as error:
                    row, failure = "", ("skipped", str(error))
            times[impl] = RankTimes(row, [], calls, sorted(notes), stopwatch.method, failure)
        for turn in range(REPLAYS + 1):
            for place in range(len(replays)):
                impl = list(replays)[(place + turn) % len(replays)]
                _together(work.device)
                runs.setdefault(impl, []).append(stopwatch.run(replays[impl]))
    for impl, several in runs.items():  # the first replay is not in the figures
        times[impl] = times[impl]._replace(samples_us=[us / calls for us in stopwatch.read(several)[1:]])
    return times


def _together(device: str) -> None:
    import torch.distributed as dist

    dist.barrier()
    if device == "cuda":
        torch.cuda.synchronize()


def _prepare(work: RanksWork, impl: str) -> tuple[Call, list[tuple[torch.Tensor]]]:
    """The call, on one tensor of this rank, and sets of it. Row 0 is the same numbers at every m."""
    import torch.distributed as dist

    from nondet.core.inputs import generator, make

    rank, world, group = dist.get_rank(), dist.get_world_size(), dist.group.WORLD
    assert group is not None  # noqa: S101 - the worker has joined it
    device = torch.device("cuda", rank) if work.device == "cuda" else torch.device("cpu")
    dtype: torch.dtype = getattr(torch, work.dtype)
    width = work.n if work.operator == "all_reduce" else work.k // world
    mine = work.seed * 1000 + rank + 1

    def rows(salt: int) -> torch.Tensor:
        x = make("bell", (work.m, width), dtype, device, generator(mine + 7919 * (work.m + salt), device))
        x[:1] = make("wide", (1, width), dtype, device, generator(mine, device))
        return x

    sets = [(rows(salt),) for salt in range(_SETS)]
    if work.operator == "all_reduce":
        return _sum(impl, group), sets
    weight = make("bell", (work.n, width), dtype, device, generator(mine + 5, device))
    return _row_parallel(impl, weight, group), sets


def _sum(impl: str, group: torch.distributed.ProcessGroup) -> Call:
    import torch.distributed as dist

    from nondet.kernels.all_reduce import chain

    def stock(x: torch.Tensor) -> torch.Tensor:
        dist.all_reduce(x)
        return x

    def ordered(x: torch.Tensor) -> torch.Tensor:
        chain.all_reduce(x, group)
        return x

    return {"stock": stock, "invariant": ordered}[impl]


def _row_parallel(impl: str, weight: torch.Tensor, group: torch.distributed.ProcessGroup) -> Call:
    import torch.distributed as dist
    from torch.nn import functional

    from nondet.core.registry import load_implementation
    from nondet.kernels.all_reduce import chain
    from nondet.kernels.all_reduce.tree import row_parallel

    linear = load_implementation("linear", "invariant", weight.device.type).call

    def stock(x: torch.Tensor) -> torch.Tensor:
        y = functional.linear(x, weight)
        dist.all_reduce(y)
        return y

    def ordered(x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = linear(x, weight)
        chain.all_reduce(y, group)
        return y

    def rank_free(x: torch.Tensor) -> torch.Tensor:
        return row_parallel(x, weight, None, group)

    return {"stock": stock, "invariant": ordered, "rank-free": rank_free}[impl]
