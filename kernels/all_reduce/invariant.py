"""The all-reduce whose bits do not follow the message's size: class "ranks-chain", by its fastest member.

y = ((x0 + x1) + x2) + ..., rank by rank, each addition rounded to the message's dtype, elementwise. So an element's
bits depend on the W numbers at its place and on nothing else. Which member computes it is a matter of speed
(`_preferences`); whether it may is a matter of proof (`nondet.kernels.all_reduce.agreement`): bits against
`ordered_gather`, on messages of several sizes whose sums are made of rounding errors. While a CUDA graph is captured
nothing can be proven, and the next agreed member runs.

What a certificate covers: the sizes of the proof, in the evidence. That other sizes have the same order is what the
members' sources say (elementwise kernels, in the order of ranks), not what was tried.
"""

from __future__ import annotations

import functools
from functools import partial

import torch
import torch.distributed as dist

from nondet.core.compare import identical
from nondet.core.inputs import generator, make
from nondet.core.launch import note
from nondet.kernels.all_reduce.agreement import agreed, forget, together
from nondet.kernels.all_reduce.members import ANCHOR, MEMBERS

__all__ = [
    "DTYPES",
    "PROOF_KINDS",
    "PROOF_SIZES",
    "all_reduce",
    "choice",
    "class_key",
    "contributions",
    "forget",
    "prove",
]

DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
PROOF_SIZES = {"cpu": (1, 7, 4096, 20483), "cuda": (1, 7, 4096, 20483, 262152, 2097152)}  # elements
PROOF_KINDS = ("order", "wide", "bell")

_KIB = 2**10
# By (ranks at most, bytes at most), fastest first, copies to and from symmetric memory counted. Two ranks: as measured
# on two H200s (docs/evidence/h200-x2). More ranks: one-shot for small messages and two-shot for others, as PyTorch's
# kernels alone compared on four H200s; the borders are not measured.
_CUDA: tuple[tuple[int, int, tuple[str, ...]], ...] = (
    (2, 512 * _KIB, ("one_shot", "peers_one_shot", "library")),
    (2, 2**62, ("peers_one_shot", "two_shot", "library")),
    (8, 256 * _KIB, ("one_shot", "peers_one_shot")),
    (8, 2**62, ("peers_two_shot", "two_shot", "exchange")),
)
_CPU: tuple[tuple[int, int, tuple[str, ...]], ...] = (
    (2, 2**62, ("library",)),
    (2**31, 64 * _KIB, ()),
    (2**31, 2**62, ("exchange",)),
)


def all_reduce(x: torch.Tensor, group: dist.ProcessGroup) -> str:
    """Sum x over the ranks of the group, in place, on every rank: class "ranks-chain".

    Args:
        x: Any shape; bfloat16, float16, float32 or float64, the same shape and dtype on all ranks.

    Returns:
        The name of the member that ran.

    Raises:
        NotImplementedError: another dtype.
    """
    if x.dtype not in DTYPES:
        raise NotImplementedError(f"no all-reduce in a fixed order of {x.dtype}")
    if x.numel() == 0 or group.size() == 1:
        return ANCHOR
    flat = x.view(-1) if x.is_contiguous() else x.contiguous().view(-1)
    name = _run(flat, group)
    if flat.data_ptr() != x.data_ptr():
        x.copy_(flat.view(x.shape))
    note(f"all_reduce[{name}, {group.size()} ranks]")
    return name


def _run(flat: torch.Tensor, group: dist.ProcessGroup) -> str:
    world = group.size()
    for name in _preferences(flat, world):
        key = class_key(name, flat.dtype, world)
        if not agreed(name, key, flat.device, group, partial(prove, name, flat.dtype, flat.device, group)):
            continue
        try:
            MEMBERS[name](flat, group)
        except NotImplementedError:  # for all ranks alike: the size, the group, a capture
            continue
        return name
    MEMBERS[ANCHOR](flat, group)
    return ANCHOR


def choice(x: torch.Tensor, group: dist.ProcessGroup) -> list[str]:
    """The members that would be tried for x, fastest first; all ranks give the same."""
    return [*_preferences(x, dist.get_world_size(group)), ANCHOR]


def _preferences(x: torch.Tensor, world: int) -> tuple[str, ...]:
    size = x.numel() * x.element_size()
    for ranks, limit, names in _CUDA if x.is_cuda else _CPU:
        if world <= ranks and size <= limit:
            return names
    return ()


@functools.cache
def class_key(name: str, dtype: torch.dtype, world: int) -> str:
    """What a certificate of this class is about: "ranks-chain bfloat16 W=4"."""
    key = f"ranks-chain {str(dtype).removeprefix('torch.')} W={world}"
    if name in ("library", "exchange") and torch.cuda.is_available():
        key += f" nccl {'.'.join(map(str, torch.cuda.nccl.version()))}"
    return key


def prove(name: str, dtype: torch.dtype, device: torch.device, group: dist.ProcessGroup) -> tuple[bool, str]:
    """Whether a member gives the anchor's bits on every rank, and the evidence. Called by all ranks.

    Raises:
        NotImplementedError: it does not apply to this group, device or dtype.
    """
    world, rank = dist.get_world_size(group), dist.get_rank(group)
    compared, apart = 0, ""
    for kind in PROOF_KINDS:
        for size in PROOF_SIZES[device.type]:
            mine = contributions(kind, world, size, dtype, device)[rank].contiguous()
            expected, got = mine.clone(), mine.clone()
            MEMBERS[ANCHOR](expected, group)
            MEMBERS[name](got, group)
            if not apart and not identical(expected, got):
                apart = f"{kind}: {int((expected != got).sum())} of {size} elements differ"
            compared += size
    sizes = ", ".join(map(str, PROOF_SIZES[device.type]))
    evidence = f"{compared} elements equal on every rank, on {', '.join(PROOF_KINDS)}, messages of {sizes} elements"
    return together(apart, evidence, device, group)


def contributions(kind: str, world: int, size: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """[W, size], the same on every rank. "order": two ranks, others for each element, nearly cancel; the rest is small.

    What such a sum is left with depends on when the large numbers meet.
    """
    rng = generator(size + world, device)
    if kind != "order":
        return make(kind, (world, size), dtype, device, rng)
    parts = make("bell", (world, size), torch.float32, device, rng)
    big = make("wide", (size,), torch.float32, device, rng) * 64.0
    first = torch.randint(0, world, (size,), generator=rng, device=device)
    step = torch.randint(1, max(world, 2), (size,), generator=rng, device=device)
    parts.scatter_(0, first[None], big[None])
    parts.scatter_(0, ((first + step) % world)[None], -big[None] * (1.0 + 2.0**-6))
    return parts.to(dtype)
