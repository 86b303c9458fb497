"""The reduce-scatter of class "ranks-chain": each rank has its share of the sum, added in the order of ranks.

The order, elementwise, is that of `nondet.kernels.all_reduce.invariant`, so a share has the bits that the same place
of an all-reduce has. `exchange` is the anchor: every rank gets its share of all messages, by copies, and adds them in
plain torch. The others run where the ranks have proven them together (`nondet.kernels.all_reduce.agreement`).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
import torch.distributed as dist

from nondet.core.compare import identical
from nondet.core.launch import note
from nondet.kernels.all_reduce.agreement import agreed, together
from nondet.kernels.all_reduce.invariant import DTYPES, PROOF_KINDS, PROOF_SIZES, class_key, contributions
from nondet.kernels.all_reduce.orders import chain

__all__ = ["ANCHOR", "MEMBERS", "prove", "reduce_scatter", "stock_into"]

Member = Callable[[torch.Tensor, torch.Tensor, dist.ProcessGroup], None]

_PEER_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def reduce_scatter(out: torch.Tensor, x: torch.Tensor, group: dist.ProcessGroup) -> str:
    """out [n] = this rank's share of the sum of x [W * n] over the ranks, in the order of "ranks-chain".

    Args:
        out, x: Any shapes of that many elements; bfloat16, float16, float32 or float64, the same on all ranks.

    Returns:
        The name of the member that ran.

    Raises:
        NotImplementedError: another dtype.
        ValueError: sizes or dtypes that do not fit.
    """
    world = dist.get_world_size(group)
    if x.dtype not in DTYPES:
        raise NotImplementedError(f"no reduce-scatter in a fixed order of {x.dtype}")
    if out.numel() * world != x.numel() or out.dtype != x.dtype:
        raise ValueError(
            f"a reduce-scatter over {world} ranks takes {out.numel() * world} elements of {out.dtype}, "
            f"got {x.numel()} of {x.dtype}"
        )
    if x.numel() == 0:
        return ANCHOR
    flat = x.contiguous().view(-1)
    share = out.view(-1) if out.is_contiguous() else torch.empty(out.numel(), dtype=out.dtype, device=out.device)
    name = _run(share, flat, group)
    if share.data_ptr() != out.data_ptr():
        out.copy_(share.view(out.shape))
    note(f"reduce_scatter[{name}, {world} ranks]")
    return name


def _run(out: torch.Tensor, x: torch.Tensor, group: dist.ProcessGroup) -> str:
    world = dist.get_world_size(group)
    for name in _preferences(x, world):
        key = f"reduce-scatter {class_key(name, x.dtype, world)}"
        if not agreed(name, key, x.device, group, partial(prove, name, x.dtype, x.device, group)):
            continue
        try:
            MEMBERS[name](out, x, group)
        except NotImplementedError:  # for all ranks alike: the size, the group, a capture
            continue
        return name
    MEMBERS[ANCHOR](out, x, group)
    return ANCHOR


def _preferences(x: torch.Tensor, world: int) -> tuple[str, ...]:
    """Fastest first, not measured: of two ranks the library is what would have run anyway."""
    if world == 2:
        return ("library", "peers") if x.is_cuda else ("library",)
    return ("peers",) if x.is_cuda else ()


def exchange(out: torch.Tensor, x: torch.Tensor, group: dist.ProcessGroup) -> None:
    """Every rank gets its share of all messages, and adds them in the order of ranks. Any device."""
    parts = torch.empty_like(x)
    dist.all_to_all_single(parts, x, group=group)
    out.copy_(chain(parts.view(dist.get_world_size(group), -1).unbind(0)))


def library(out: torch.Tensor, x: torch.Tensor, group: dist.ProcessGroup) -> None:
    """The library's own (NCCL's, gloo's), of two ranks: a + b and b + a have the same bits.

    Raises:
        NotImplementedError: more ranks, whose order the library chooses by the message's size.
    """
    if dist.get_world_size(group) > 2:
        raise NotImplementedError("the library's order is its own where there are more than two ranks")
    stock_into(out, x, group)


def stock_into(out: torch.Tensor, x: torch.Tensor, group: dist.ProcessGroup) -> None:
    """torch.distributed's own reduce-scatter of flat x [W * n] into flat out [n]."""
    name = "reduce_scatter_single" if hasattr(dist, "reduce_scatter_single") else "reduce_scatter_tensor"
    getattr(dist, name)(out, x, group=group)


def peers(out: torch.Tensor, x: torch.Tensor, group: dist.ProcessGroup) -> None:
    """Our kernel over the ranks' buffers, between two barriers: every rank reads its share of all messages.

    Raises:
        NotImplementedError: no symmetric memory for this message.
    """
    if x.device.type != "cuda" or x.dtype not in _PEER_DTYPES:
        raise NotImplementedError("symmetric memory is for CUDA devices, and for half and single precision")
    from nondet.kernels.all_reduce import symmetric

    if not symmetric.available(group, x.device):
        raise NotImplementedError("the ranks of this group can't read each other's memory")
    space = symmetric.workspace(group, x.device, x.numel() * x.element_size())
    if space is None:
        raise NotImplementedError("no workspace of this size: it can't grow while a CUDA graph is captured")
    with space.turn():
        symmetric.peers_scatter(out, x, space)


ANCHOR = "exchange"
MEMBERS: dict[str, Member] = {"exchange": exchange, "library": library, "peers": peers}


def prove(name: str, dtype: torch.dtype, device: torch.device, group: dist.ProcessGroup) -> tuple[bool, str]:
    """Whether a member gives the anchor's bits on every rank, and the evidence. Called by all ranks.

    Raises:
        NotImplementedError: it does not apply to this group, device or dtype.
    """
    world, rank = dist.get_world_size(group), dist.get_rank(group)
    compared, apart = 0, ""
    for kind in PROOF_KINDS:
        for size in PROOF_SIZES[device.type]:
            mine = contributions(kind, world, size * world, dtype, device)[rank].contiguous()
            expected, got = (torch.empty(size, dtype=dtype, device=device) for _ in range(2))
            MEMBERS[ANCHOR](expected, mine, group)
            MEMBERS[name](got, mine, group)
            if not apart and not identical(expected, got):
                apart = f"{kind}: {int((expected != got).sum())} of {size} elements differ"
            compared += size
    sizes = ", ".join(map(str, PROOF_SIZES[device.type]))
    evidence = f"{compared} elements equal on every rank, on {', '.join(PROOF_KINDS)}, shares of {sizes} elements"
    return together(apart, evidence, device, group)
