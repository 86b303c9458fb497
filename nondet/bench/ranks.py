"""Cells over several ranks, timed in step: the all-reduce by message size, and a row-parallel layer with its own.

The ranks are processes of nondet's own (`nondet.ranks.group`). A replay's time is the slowest rank's. Implementations
take turns replay by replay, as elsewhere, with a barrier of all ranks before each.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from nondet.bench.cells import quartiles
from nondet.bench.collect import groups_of
from nondet.bench.work import ITEM_BYTES, RANK_OPERATORS
from nondet.core.records import Cell, Record, Row, Status, Timed
from nondet.errors import UnknownNameError
from nondet.ranks.group import RankError, shared_group

# In a rank: one cell over several ranks, its bits first and then its times, everybody in step.
#
# A barrier stands before every replay, and the number of replays is fixed: ranks that decided by their own clocks
# would wait for each other for ever.

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
    from nondet.bench.cells import stopwatch_for
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


_CELL = "nondet.bench.ranks"
_ROWS = {"cuda": (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192), "cpu": (1, 8, 64, 256)}
_LAYER_ROWS = {"cuda": (1, 8, 64, 256, 1024, 4096), "cpu": (1, 8, 64)}
_WIDTH = {"cuda": 4096, "cpu": 512}
# (K, N): o_proj and down_proj of Qwen3-8B and 32B
_LAYERS = {"cuda": ((4096, 4096), (12288, 4096), (8192, 5120), (25600, 5120)), "cpu": ((768, 256),)}


@dataclass(frozen=True)
class RanksCase:
    """One cell, without an implementation; sizes as in `RanksWork`."""

    operator: str
    world: int
    dtype: str
    m: int
    n: int
    k: int = 0

    @property
    def section(self) -> str:
        """The table that it stands in."""
        return f"{self.operator.replace('_', '-')}, {self.world} ranks"

    @property
    def shape(self) -> dict[str, int]:
        """Its sizes by name."""
        return {"M": self.m} | ({"K": self.k} if self.k else {}) | {"N": self.n, "ranks": self.world}

    @property
    def name(self) -> str:
        """As `Cell.case`."""
        return " ".join(f"{key}={size}" for key, size in self.shape.items())

    @property
    def group(self) -> str:
        """As `Cell.group`: everything but M."""
        return self.name.partition(" ")[2]

    @property
    def message_bytes(self) -> int:
        """What each rank gives to the sum."""
        return self.m * self.n * ITEM_BYTES[self.dtype]


def plan_ranks(
    names: Sequence[str],
    ranks: Sequence[int],
    device: str,
    dtypes: Sequence[str],
    *,
    m: Sequence[int] | None = None,
    n: int | None = None,
    k: int | None = None,
) -> list[RanksCase]:
    """Every cell, in the order of the run.

    Raises:
        UnknownNameError: a dtype that is not timed.
    """
    cases = []
    for dtype in dtypes:
        if dtype not in ITEM_BYTES:
            raise UnknownNameError("dtype", dtype, ITEM_BYTES)
        for world in ranks:
            if "all-reduce" in names:
                width = n or _WIDTH[device]
                cases += [RanksCase("all_reduce", world, dtype, rows, width) for rows in m or _ROWS[device]]
            if "row-parallel" in names:
                own = ((k or _LAYERS[device][0][0], n or _WIDTH[device]),)
                layers = _LAYERS[device] if k is None and n is None else own
                cases += [
                    RanksCase("row_parallel", world, dtype, rows, columns, depth)
                    for depth, columns in layers
                    for rows in m or _LAYER_ROWS[device]
                ]
    return cases


def _impls(case: RanksCase, wanted: Sequence[str]) -> list[str]:
    return [impl for impl in RANK_OPERATORS[case.operator.replace("_", "-")] if impl in wanted]


def ranks_keys(cases: Sequence[RanksCase], wanted: Sequence[str], device: str) -> list[tuple[str, ...]]:
    """Keys of every record, for a progress bar and for resuming."""
    keys: list[tuple[str, ...]] = []
    for group in groups_of(cases):
        keys += [_cell_key(case, device) for case in group]
        keys += [_head(group, impl, device).key for impl in _impls(group[0], wanted)]
    return keys


def _cell_key(case: RanksCase, device: str) -> tuple[str, ...]:
    return ("cell", case.section, case.name, case.dtype, device)


def collect_ranks(
    cases: Sequence[RanksCase], wanted: Sequence[str], device: str, seed: int, done: Collection[tuple[str, ...]] = ()
) -> Iterator[Record]:
    """Measure what is not in `done`, group by group: its cells, then a row on its bits for each implementation.

    A group of which anything is missing is measured whole, since its bits are compared with one another; what is done
    already is not given again.
    """
    for group in groups_of(cases):
        impls = _impls(group[0], wanted)
        keys = [_cell_key(case, device) for case in group] + [_head(group, impl, device).key for impl in impls]
        if all(key in done for key in keys):
            continue
        rows: dict[str, list[tuple[int, RankTimes | None, str]]] = {impl: [] for impl in impls}
        for case in group:
            started = time.perf_counter()
            answers, failure = _ask(case, impls, device, seed)
            timed = []
            for impl in impls:
                times = [answer[impl] for answer in answers]
                rows[impl].append((case.m, times[0] if times else None, failure))
                timed.append(_timed(impl, times, failure))
            if _cell_key(case, device) not in done:
                yield _cell(case, device, timed, time.perf_counter() - started, rows)
        for impl in impls:
            row = _bits(group, impl, device, rows[impl])
            if row.key not in done:
                yield row


def _ask(case: RanksCase, impls: Sequence[str], device: str, seed: int) -> tuple[list[dict[str, RankTimes]], str]:
    """What each rank has to say, or why there is nothing: a rank that died takes its group with it, not the run."""
    work = RanksWork(case.operator, tuple(impls), device, case.dtype, case.m, case.n, case.k, seed)
    try:
        answers: list[dict[str, RankTimes]] = shared_group(case.world, device).ask(f"{_CELL}:time_cell", work)
    except RankError as error:
        return [], str(error)
    return answers, ""


def _timed(impl: str, times: list[RankTimes], failure: str) -> Timed:
    if not times:
        return Timed(impl=impl, status=Status.ERROR, reason=failure)
    missing = next((t.failure for t in times if t.failure is not None), None)
    if missing is not None:
        return Timed(impl=impl, status=missing[0], reason=missing[1], ran=times[0].ran)
    samples = [max(replay) for replay in zip(*(t.samples_us for t in times), strict=True)]
    low, median, high = quartiles(samples)
    return Timed(
        impl=impl,
        status=Status.TIMED,
        samples_us=[round(us, 4) for us in samples],
        median_us=round(median, 4),
        low_us=round(low, 4),
        high_us=round(high, 4),
        ran=times[0].ran,
    )


def _cell(
    case: RanksCase,
    device: str,
    timed: list[Timed],
    seconds: float,
    rows: dict[str, list[tuple[int, RankTimes | None, str]]],
) -> Cell:
    times = [book[-1][1] for book in rows.values()]
    known = next((t for t in times if t is not None), None)
    flops = 2 * case.m * case.n * case.k // case.world
    return Cell(
        section=case.section,
        operator=case.operator,
        case=case.name,
        group=case.group,
        axis="M",
        shape=case.shape,
        dtype=case.dtype,
        device=device,
        bytes=case.message_bytes,
        flops=flops,
        limit_us=None,
        limited_by="",
        method=f"{known.method if known else 'not timed'}, the slowest rank",
        sets=4,
        calls=max((t.calls for t in times if t is not None), default=0),
        cold=False,
        bus_bytes=2 * (case.world - 1) * case.message_bytes // case.world if case.operator == "all_reduce" else 0,
        timed=timed,
        seconds=seconds,
    )


def _head(group: Sequence[RanksCase], impl: str, device: str) -> Row:
    first = group[0]
    return Row(
        probe="bench",
        case=f"{first.section} {first.group}: row 0 of M rows",
        operator=first.operator,
        shape={key: size for key, size in first.shape.items() if key != "M"},
        dtype=first.dtype,
        device=device,
        inputs="wide",
        varied="batch_size",
        impl=impl,
        status="",
        group=first.group,
        claims_invariance=impl != "stock",
    )


def _bits(group: Sequence[RanksCase], impl: str, device: str, book: list[tuple[int, RankTimes | None, str]]) -> Row:
    """Row 0 at every M of the group, by the digest of its bits on rank 0."""
    import msgspec

    head = _head(group, impl, device)
    good = [(m, times) for m, times, _ in book if times is not None and times.row]
    if len(good) < 2:
        failures = [why for _, _, why in book if why] + [t.failure[1] for _, t, _ in book if t and t.failure]
        status = Status.ERROR if any(why for _, _, why in book) else Status.SKIPPED
        reason = failures[0] if failures else "one number of rows: nothing to compare it with"
        return msgspec.structs.replace(head, status=status, reason=reason)
    seen: dict[str, int] = {}
    labels = [seen.setdefault(times.row, len(seen)) for _, times in good]
    return msgspec.structs.replace(
        head,
        status=Status.DIVERGENT if len(seen) > 1 else Status.IDENTICAL,
        ran=sorted({name for _, times in good for name in times.ran}),
        values=[m for m, _ in good],
        labels=labels,
        class_sizes=[labels.count(label) for label in range(len(seen))],
        trials=len(good),
        distinct=len(seen),
    )
