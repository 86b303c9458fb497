"""Benchmark cases over several ranks: the all-reduce by message size, and a row-parallel layer with its own.

The ranks are processes of nondet's own (`nondet.ranks.group`). A replay's time is the slowest rank's. Implementations
alternate replay by replay, as elsewhere, with a barrier of all ranks before each.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import NamedTuple

import msgspec
import torch

from nondet.bench.cells import BenchCase, Failure, Key, groups_of, interleave, sizes_text, stopwatch_for, timed_of
from nondet.bench.work import ITEM_BYTES, RANK_OPERATORS
from nondet.core.measure import row_of
from nondet.core.records import Cell, Record, Row, Status
from nondet.errors import UnknownNameError
from nondet.ranks.group import RankError, shared_group

# In a rank: one case, its bits first and then its times. There is a barrier before every replay, and the number of
# replays is fixed, because ranks that decided by their own clocks would wait for each other for ever.

REPLAYS = 15
# Bytes that one replay moves, about, so that a launch from the host or a wait at the barrier is little of it.
_REPLAY_BYTES = {"cpu": 2**20, "cuda": 2**26}
_CALLS_MOST = {"cpu": 16, "cuda": 50}
# a call must not find its message where the last one left it
_SETS = 4

Call = Callable[[torch.Tensor], torch.Tensor]


def message_bytes(case: BenchCase) -> int:
    """Bytes that each rank gives to the sum."""
    return case.shape["M"] * case.shape["N"] * ITEM_BYTES[case.dtype]


class RankTimes(NamedTuple):
    """One rank's measurements of a case under one implementation."""

    row: str  # `nondet.core.compare.digest` of row 0, among m - 1 others
    samples_us: list[float]  # microseconds per call, one figure per replay
    calls: int
    ran: list[str]
    method: str
    failure: Failure | None = None  # (status, reason) where it could not be timed


def time_cell(case: BenchCase, impls: Sequence[str], device: str, seed: int) -> dict[str, RankTimes]:
    """Compute the case once for its bits, then time it: replay i of one implementation next to replay i of all. An
    implementation that does not apply on one rank does not apply on any, so that all time the same ones."""
    from nondet.core.compare import digest
    from nondet.core.launch import listen

    stopwatch = stopwatch_for(device)
    times: dict[str, RankTimes] = {}
    replays: dict[str, Callable[[], object]] = {}
    kept: list[object] = []  # a captured graph reads its buffers at their addresses, but does not keep them alive
    calls = max(1, min(_REPLAY_BYTES[device] // message_bytes(case), _CALLS_MOST[device]))
    with torch.no_grad():
        for impl in impls:
            with listen() as notes:
                try:
                    call, sets = _prepare(case, impl, device, seed)
                    kept.append((call, sets))
                    result = call(sets[0][0].clone())
                    row, failure = digest(result[0]), None
                    if case.operator == "all_reduce":  # in place: sums of sums would overflow within a replay
                        for (x,) in sets:
                            x.zero_()
                    replays[impl] = stopwatch.record(call, sets, calls)
                except NotImplementedError as error:
                    row, failure = "", (Status.SKIPPED, str(error))
            times[impl] = RankTimes(row, [], calls, sorted(notes), stopwatch.method, failure)
        runs = interleave(replays, stopwatch, least=REPLAYS, most=REPLAYS, before=lambda: _together(device))
    return {impl: t._replace(samples_us=[us / calls for us in runs.get(impl, [])]) for impl, t in times.items()}


def _together(device: str) -> None:
    import torch.distributed as dist

    dist.barrier()
    if device == "cuda":
        torch.cuda.synchronize()


def _prepare(case: BenchCase, impl: str, device_type: str, seed: int) -> tuple[Call, list[tuple[torch.Tensor]]]:
    """The call, on one tensor of this rank, and sets of it. Row 0 has the same numbers at every m."""
    import torch.distributed as dist

    from nondet.core.inputs import generator, make

    rank, world, group = dist.get_rank(), dist.get_world_size(), dist.group.WORLD
    assert group is not None  # noqa: S101 - the worker has joined it
    device = torch.device("cuda", rank) if device_type == "cuda" else torch.device("cpu")
    dtype, m, n = case.torch_dtype, case.shape["M"], case.shape["N"]
    width = n if case.operator == "all_reduce" else case.shape["K"] // world
    mine = seed * 1000 + rank + 1

    def rows(salt: int) -> torch.Tensor:
        x = make("bell", (m, width), dtype, device, generator(mine + 7919 * (m + salt), device))
        x[:1] = make("wide", (1, width), dtype, device, generator(mine, device))
        return x

    sets = [(rows(salt),) for salt in range(_SETS)]
    weight = None
    if case.operator == "row_parallel":
        weight = make("bell", (n, width), dtype, device, generator(mine + 5, device))
    return _call(impl, weight, group), sets


def _call(impl: str, weight: torch.Tensor | None, group: torch.distributed.ProcessGroup) -> Call:
    import torch.distributed as dist
    from torch.nn.functional import linear

    from nondet.core.registry import load_implementation
    from nondet.kernels.all_reduce import chain
    from nondet.kernels.all_reduce.tree import row_parallel

    if weight is not None and impl == "rank-free":
        return lambda x: row_parallel(x, weight, None, group)
    product: Callable[..., torch.Tensor] = linear
    if weight is not None and impl == "invariant":
        product = load_implementation("linear", "invariant", weight.device.type).call

    def call(x: torch.Tensor) -> torch.Tensor:
        y = x if weight is None else product(x, weight)
        if impl == "stock":
            dist.all_reduce(y)
        else:
            chain.all_reduce(y, group)
        return y

    return call


_CELL = "nondet.bench.ranks"
_ROWS = {"cuda": (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192), "cpu": (1, 8, 64, 256)}
_LAYER_ROWS = {"cuda": (1, 8, 64, 256, 1024, 4096), "cpu": (1, 8, 64)}
_WIDTH = {"cuda": 4096, "cpu": 512}
# (K, N): o_proj and down_proj of Qwen3-8B and 32B
_LAYERS = {"cuda": ((4096, 4096), (12288, 4096), (8192, 5120), (25600, 5120)), "cpu": ((768, 256),)}


def _case(operator: str, world: int, dtype: str, m: int, n: int, k: int = 0) -> BenchCase:
    """An all_reduce of [M, N] on each rank, or a row_parallel of [M, K / ranks] times [N, K / ranks]."""
    same = ({"K": k} if k else {}) | {"N": n, "ranks": world}
    section = f"{operator.replace('_', '-')}, {world} ranks"
    return BenchCase(section, operator, sizes_text(same), "M", {"M": m} | same, dtype)


def plan_ranks(
    names: Sequence[str],
    ranks: Sequence[int],
    device: str,
    dtypes: Sequence[str],
    *,
    m: Sequence[int] | None = None,
    n: int | None = None,
    k: int | None = None,
) -> list[BenchCase]:
    """Every case, in the order of the run. Raises UnknownNameError: a dtype that is not timed."""
    cases = []
    for dtype in dtypes:
        if dtype not in ITEM_BYTES:
            raise UnknownNameError("dtype", dtype, ITEM_BYTES)
        for world in ranks:
            if "all-reduce" in names:
                width = n or _WIDTH[device]
                cases += [_case("all_reduce", world, dtype, rows, width) for rows in m or _ROWS[device]]
            if "row-parallel" in names:
                own = ((k or _LAYERS[device][0][0], n or _WIDTH[device]),)
                layers = _LAYERS[device] if k is None and n is None else own
                cases += [
                    _case("row_parallel", world, dtype, rows, columns, depth)
                    for depth, columns in layers
                    for rows in m or _LAYER_ROWS[device]
                ]
    return cases


def _impls(case: BenchCase, wanted: Sequence[str]) -> list[str]:
    return [impl for impl in RANK_OPERATORS[case.operator.replace("_", "-")] if impl in wanted]


def ranks_keys(cases: Sequence[BenchCase], wanted: Sequence[str], device: str) -> list[Key]:
    """Keys of every record, for a progress bar and for resuming."""
    keys: list[Key] = []
    for group in groups_of(cases):
        keys += [case.key(device) for case in group]
        keys += [_head(group[0], impl, device).key for impl in _impls(group[0], wanted)]
    return keys


def collect_ranks(
    cases: Sequence[BenchCase], wanted: Sequence[str], device: str, seed: int, done: Collection[Key] = ()
) -> Iterator[Record]:
    """Measure what is not in `done`, group by group: its cases, then a row on its bits for each implementation. An
    incomplete group is measured whole, since its bits are compared with one another."""
    for group in groups_of(cases):
        if not all(key in done for key in ranks_keys(group, wanted, device)):
            records = _measured(group, _impls(group[0], wanted), device, seed)
            yield from (record for record in records if record.key not in done)


def _measured(group: Sequence[BenchCase], impls: Sequence[str], device: str, seed: int) -> Iterator[Record]:
    firsts: list[dict[str, RankTimes]] = []  # of the first rank, case by case
    for case in group:
        began = time.perf_counter()
        answers = _ask(case, impls, device, seed)
        firsts.append(answers[0])
        yield _cell(case, device, answers, began)
    for impl in impls:
        yield _bits(group, impl, device, [times[impl] for times in firsts])


def _ask(case: BenchCase, impls: Sequence[str], device: str, seed: int) -> list[dict[str, RankTimes]]:
    """Each rank's measurements, or why it failed. A rank that died ends its group of ranks, not the run."""
    try:
        group = shared_group(case.shape["ranks"], device)
        answers: list[dict[str, RankTimes]] = group.call(f"{_CELL}:time_cell", case, tuple(impls), device, seed)
    except RankError as error:
        lost = RankTimes("", [], 0, [], "not timed", (Status.ERROR, str(error)))
        return [dict.fromkeys(impls, lost)]
    return answers


def _cell(case: BenchCase, device: str, answers: Sequence[dict[str, RankTimes]], began: float) -> Cell:
    timed = []
    for impl in answers[0]:
        times = [answer[impl] for answer in answers]
        missing = next((t.failure for t in times if t.failure is not None), None)
        samples = [max(replay) for replay in zip(*(t.samples_us for t in times), strict=True)]
        timed.append(timed_of(impl, samples, times[0].ran, failure=missing))
    first, world = list(answers[0].values()), case.shape["ranks"]
    return case.cell(
        device,
        timed,
        began,
        bytes=message_bytes(case),
        flops=2 * case.shape["M"] * case.shape["N"] * case.shape.get("K", 0) // world,
        method=f"{first[0].method if first else 'not timed'}, the slowest rank",
        sets=_SETS,
        calls=max((t.calls for t in first), default=0),
        bus_bytes=2 * (world - 1) * message_bytes(case) // world if case.operator == "all_reduce" else 0,
    )


def _head(case: BenchCase, impl: str, device: str) -> Row:
    title = f"{case.section} {case.group}: row 0 of M rows"
    claims = impl != "stock"
    return case.row(impl, device, case=title, inputs="wide", varied="batch_size", claims_invariance=claims)


def _bits(group: Sequence[BenchCase], impl: str, device: str, times: Sequence[RankTimes]) -> Row:
    """Row 0 at every M of the group, by the digest of its bits on rank 0."""
    head = _head(group[0], impl, device)
    good = [(case.shape["M"], t) for case, t in zip(group, times, strict=True) if t.row]
    if len(good) < 2:
        alone = Status.SKIPPED, "one number of rows: nothing to compare it with"
        failures = [t.failure for t in times if t.failure is not None]
        status, reason = next((f for f in failures if f[0] == Status.ERROR), (failures or [alone])[0])
        return msgspec.structs.replace(head, status=status, reason=reason)
    ran = sorted({name for _, t in good for name in t.ran})
    return row_of(head, [m for m, _ in good], [t.row for _, t in good], ran=ran)
