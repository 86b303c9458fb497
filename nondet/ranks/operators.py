"""The collectives as operators of the registry: called outside of the ranks, computed inside of them on messages.

Each takes a `Message`, starts its ranks where they are not running, and gives the tested row, as the rank `answers` has
it. The notes and kernels of the ranks' launchers count for the current variant here.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from nondet.core.inputs import generator, make
from nondet.core.launch import listen, note
from nondet.core.measure import launched_elsewhere, profile_variants
from nondet.core.registry import load_object
from nondet.ranks.group import library_choice, shared_gpus, shared_group

# Messages that ranks reduce, made by each rank for itself from a seed.
#
# A message is [rows, width] on every rank. The tested row holds the same numbers whatever the number of rows and its
# position; the other rows hold other numbers. So its sum over the ranks should be the same.


@dataclass(frozen=True)
class Message:
    """One call of a collective, as it is sent to every rank."""

    world: int
    device: str
    operator: str  # "all_reduce", "reduce_scatter" (rows on each rank afterwards) or "all_gather" (rows before)
    impl: str  # "stock", "invariant", or a user's "module:function" of (x, group), in place, for "all_reduce"
    dtype: str
    # `rows`, `width`: of the message
    rows: int
    width: int
    place: int = 0  # index of the tested row; negative counts from the end
    kind: str = "wide"  # of input (`nondet.core.inputs.KINDS`)
    seed: int = 0
    environment: tuple[tuple[str, str], ...] = ()
    registered: bool = False  # the message lies in memory that NCCL has registered
    answers: int = 0  # rank whose row is given, 0 for a reduce_scatter
    names: bool = False  # report device kernels and the library's own choice
    # lists of each rank's contributions, repeated over all numbers of the message, whose sums are given then; empty:
    # drawn numbers
    terms: tuple[tuple[float, ...], ...] = ()


class Outcome(NamedTuple):
    """The result of one rank: the tested row as bytes of its dtype (None on ranks that do not hold it), the launchers'
    notes, and device kernels of the call."""

    row: bytes | None
    notes: list[str]
    kernels: list[str]


def row_of(message: Message, rank: int, device: str | torch.device) -> torch.Tensor:
    """[width]: what a rank contributes to the row."""
    dtype: torch.dtype = getattr(torch, message.dtype)
    return make(message.kind, (message.width,), dtype, device, generator(message.seed * 1000 + rank + 1, device))


def reference(message: Message) -> torch.Tensor:
    """[width]: the row's sum over all ranks in float64 (the row itself for a gather). The ranks draw on devices of the
    same kind as here, so they have the same numbers."""
    parts = [row_of(message, rank, message.device).double() for rank in range(message.world)]
    return parts[0] if message.operator == "all_gather" else torch.stack(parts).sum(0)


def collect(message: Message) -> Outcome:
    """In a rank: make the message, call the collective, and give the tested row."""
    rank, world = dist.get_rank(), dist.get_world_size()
    device = torch.device("cuda", torch.cuda.current_device()) if message.device == "cuda" else torch.device("cpu")
    dtype: torch.dtype = getattr(torch, message.dtype)
    share = message.operator == "reduce_scatter"
    rows = message.rows * world if share else message.rows
    x = make("bell", (rows, message.width), dtype, device, generator(7919 * (rank + 1) + message.rows, device))
    at = message.place % message.rows  # of the first rank's share, where the rows are divided among ranks
    x[at] = row_of(message, rank, device)
    if message.terms:
        lists = torch.tensor(message.terms, dtype=dtype, device=device)[:, rank]
        x = lists[torch.arange(x.numel(), device=device) % len(lists)].view_as(x)
    if message.registered:
        x = _registered(x)
    call = _call(message, x)
    library_choice()
    with listen() as noted:
        out = call()
    noted.update(f"nccl {choice}" for choice in (library_choice() if message.impl == "stock" else ()))
    kernels = _kernels(call) if message.names and device.type == "cuda" else []
    if device.type == "cuda":
        torch.cuda.synchronize()
    holds = not share or rank == 0
    row = (out if message.terms else out[at]).contiguous().cpu().view(torch.uint8).numpy().tobytes() if holds else None
    return Outcome(row, sorted(noted), kernels)


def _call(message: Message, x: torch.Tensor) -> Callable[[], torch.Tensor]:
    from nondet.kernels.all_reduce import chain

    group, world = _group(), dist.get_world_size()
    flat = (message.rows, message.width)
    invariant = message.impl == "invariant"
    function: Any = load_object(message.impl) if ":" in message.impl else chain.all_reduce if invariant else None
    if function is None and message.impl != "stock":
        raise NotImplementedError(f"{message.operator} has no {message.impl!r} implementation")
    if invariant and x.is_cuda and (shared := shared_gpus(world)):
        raise NotImplementedError(f"no kernel of ours runs with{shared[1:]}")

    def all_reduce() -> torch.Tensor:
        y = x.clone() if not message.registered else x
        if function is None:
            dist.all_reduce(y)
        else:
            function(y, group)
        return y

    def reduce_scatter() -> torch.Tensor:
        y = torch.empty(flat, dtype=x.dtype, device=x.device)
        if invariant:
            chain.reduce_scatter(y, x, group)
        else:
            chain.stock_into(y.view(-1), x.view(-1), group)
        return y

    def all_gather() -> torch.Tensor:
        y = torch.empty(world * x.numel(), dtype=x.dtype, device=x.device)
        chain.gather_into(y, x.view(-1), group)
        return y.view(world * message.rows, message.width)

    return {"all_reduce": all_reduce, "reduce_scatter": reduce_scatter, "all_gather": all_gather}[message.operator]


def _group() -> dist.ProcessGroup:
    group = dist.group.WORLD
    assert group is not None  # noqa: S101 - the worker has joined it
    return group


def _kernels(call: Callable[[], object]) -> list[str]:
    with profile_variants("cuda") as profile, profile.variant(0):
        call()
    return profile.kernels(1)[0]


_pools: list[Any] = []


def _registered(x: torch.Tensor) -> torch.Tensor:
    """A copy of x in memory that NCCL allocates and registers; a NotImplementedError without CUDA, or in older
    torch."""
    if not x.is_cuda:
        raise NotImplementedError("buffers are registered with NCCL, on CUDA")
    if not _pools:
        backend: Any = _group()._get_backend(x.device)
        if not hasattr(backend, "mem_allocator") or not hasattr(backend, "register_mem_pool"):
            raise NotImplementedError("this torch has no pools of memory registered with NCCL")
        pool = torch.cuda.MemPool(backend.mem_allocator)
        with torch.cuda.use_mem_pool(pool):
            torch.empty(2**26, dtype=torch.uint8, device=x.device)
        backend.register_mem_pool(pool)
        _pools.append(pool)
    with torch.cuda.use_mem_pool(_pools[0]):
        return x.clone()


def stock(message: Message) -> torch.Tensor:
    """torch.distributed's own: NCCL's on CUDA, gloo's on a CPU."""
    return collective(replace(message, impl="stock"))


def invariant(message: Message) -> torch.Tensor:
    """In the order of ranks, see `nondet.kernels.all_reduce.chain`; a gather is a copy anyway."""
    return collective(replace(message, impl="invariant"))


def collective(message: Message) -> torch.Tensor:
    """The row [width], on the CPU. Raises RankError: a rank failed, died or hung; NotImplementedError: the
    implementation does not apply."""
    group = shared_group(message.world, message.device, dict(message.environment))
    outcomes: list[Outcome] = group.call("nondet.ranks.operators:collect", message)
    for name in outcomes[0].notes:
        note(name)
    launched_elsewhere([*outcomes[0].kernels, *(n for n in outcomes[0].notes if n.startswith("nccl "))])
    row = outcomes[message.answers].row
    if row is None:
        raise NotImplementedError(f"rank {message.answers} holds no part of the row")
    return torch.frombuffer(bytearray(row), dtype=getattr(torch, message.dtype))
