"""The members of class "ranks-chain" by name: ways to sum a flat message over the ranks of a group, in place.

A member takes (x, group), x flat and contiguous, the same size and dtype on all ranks, and is called by all of them. It
raises NotImplementedError, on all ranks alike, where it does not apply. `ordered_gather` is the anchor: it does what
the class says, with no more than an all-gather, whose bits nobody questions.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist

from nondet.kernels.all_reduce.orders import chain

__all__ = [
    "ANCHOR",
    "MEMBERS",
    "Member",
    "exchange",
    "gather_into",
    "library",
    "one_shot",
    "ordered_gather",
    "peers_one_shot",
    "peers_two_shot",
    "two_shot",
]

Member = Callable[[torch.Tensor, dist.ProcessGroup], None]

_TORCH_DTYPES = (torch.bfloat16, torch.float32)
_PEER_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def ordered_gather(x: torch.Tensor, group: dist.ProcessGroup) -> None:
    """Everybody gets everything, and adds it in the order of ranks. Any device; W messages of memory and traffic."""
    world = dist.get_world_size(group)
    gathered = torch.empty(world * x.numel(), dtype=x.dtype, device=x.device)
    gather_into(gathered, x, group)
    x.copy_(chain(gathered.view(world, -1).unbind(0)))


def gather_into(out: torch.Tensor, x: torch.Tensor, group: dist.ProcessGroup) -> None:
    """Flat `out` [W * n] from every rank's flat x [n], in the order of ranks."""
    name = (
        "all_gather_single" if hasattr(dist, "all_gather_single") else "all_gather_into_tensor"
    )  # torch 2.13: renamed
    getattr(dist, name)(out, x, group=group)


def exchange(x: torch.Tensor, group: dist.ProcessGroup) -> None:
    """Each rank gets its share of every message, adds it in the order of ranks, and hands the sum round.

    Any device; the traffic of an all-reduce, in two messages: W times less to add than `ordered_gather`.
    """
    world = dist.get_world_size(group)
    share = -(-x.numel() // world)
    padded = x
    if share * world != x.numel():
        padded = torch.zeros(share * world, dtype=x.dtype, device=x.device)
        padded[: x.numel()] = x
    parts = torch.empty_like(padded)
    dist.all_to_all_single(parts, padded, group=group)
    total = chain(parts.view(world, share).unbind(0)).contiguous()
    gather_into(parts, total, group)
    x.copy_(parts[: x.numel()])


def library(x: torch.Tensor, group: dist.ProcessGroup) -> None:
    """The library's own all-reduce (NCCL's, gloo's), of two ranks: a + b and b + a have the same bits.

    Raises:
        NotImplementedError: more ranks, whose order the library chooses by the message's size.
    """
    if dist.get_world_size(group) > 2:
        raise NotImplementedError("the library's order is its own where there are more than two ranks")
    dist.all_reduce(x, group=group)


def one_shot(x: torch.Tensor, group: dist.ProcessGroup) -> None:
    """PyTorch's symmetric-memory kernel: every rank reads all messages. For small ones.

    Raises:
        NotImplementedError: no symmetric memory for this message.
    """
    _symmetric("one_shot", x, group, _TORCH_DTYPES)


def two_shot(x: torch.Tensor, group: dist.ProcessGroup) -> None:
    """PyTorch's symmetric-memory kernel: each rank reduces a share and reads the others' shares. For large messages.

    Raises:
        NotImplementedError: no symmetric memory for this message.
    """
    _symmetric("two_shot", x, group, _TORCH_DTYPES)


def peers_one_shot(x: torch.Tensor, group: dist.ProcessGroup) -> None:
    """Our kernel over the ranks' buffers, between two barriers: every rank reads all messages.

    Raises:
        NotImplementedError: no symmetric memory for this message.
    """
    _symmetric("chain_one_shot", x, group, _PEER_DTYPES)


def peers_two_shot(x: torch.Tensor, group: dist.ProcessGroup) -> None:
    """Our kernel over the ranks' buffers: each rank reduces a share, and reads the others' shares after a barrier.

    Raises:
        NotImplementedError: no symmetric memory for this message.
    """
    _symmetric("chain_two_shot", x, group, _PEER_DTYPES)


def _symmetric(name: str, x: torch.Tensor, group: dist.ProcessGroup, dtypes: tuple[torch.dtype, ...]) -> None:
    if x.device.type != "cuda":
        raise NotImplementedError("symmetric memory is for CUDA devices")
    from nondet.kernels.all_reduce import symmetric

    if x.dtype not in dtypes:
        raise NotImplementedError(f"no such symmetric-memory all-reduce of {x.dtype}")
    if not symmetric.available(group, x.device):
        raise NotImplementedError("the ranks of this group can't read each other's memory")
    space = symmetric.workspace(group, x.device, (x.numel() + 4096) * x.element_size())
    if space is None:
        raise NotImplementedError("no workspace of this size: it can't grow while a CUDA graph is captured")
    with space.turn():
        getattr(symmetric, name)(x, group, space)


ANCHOR = "ordered_gather"
MEMBERS: dict[str, Member] = {
    "ordered_gather": ordered_gather,
    "exchange": exchange,
    "library": library,
    "one_shot": one_shot,
    "two_shot": two_shot,
    "peers_one_shot": peers_one_shot,
    "peers_two_shot": peers_two_shot,
}
