"""The class "ranks-chain": all-reduce and reduce-scatter in the order of ranks, by the fastest proven member."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from nondet.core.certificates import certificates
from nondet.core.compare import identical
from nondet.core.inputs import generator, make
from nondet.core.launch import note, proving
from nondet.kernels.all_reduce.orders import ByGroup, chain

# The members of class "ranks-chain" by name: ways to sum a flat message over the ranks of a group, in place.
# A member takes (x, group), x flat and contiguous, the same size and dtype on all ranks, and is called by all of them.
# It raises NotImplementedError, on all ranks alike, where it does not apply. `ordered_gather` is the anchor, because it
# needs only an all-gather, which adds nothing.

Member = Callable[[torch.Tensor, dist.ProcessGroup], None]

_TORCH_DTYPES = (torch.bfloat16, torch.float32)
_PEER_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def ordered_gather(x: torch.Tensor, group: dist.ProcessGroup) -> None:
    """All ranks gather all messages and add them in the order of ranks. Any device; W messages of memory."""
    world = dist.get_world_size(group)
    gathered = torch.empty(world * x.numel(), dtype=x.dtype, device=x.device)
    gather_into(gathered, x, group)
    x.copy_(chain(gathered.view(world, -1).unbind(0)))


def gather_into(out: torch.Tensor, x: torch.Tensor, group: dist.ProcessGroup) -> None:
    """Flat `out` [W * n] from every rank's flat x [n], in the order of ranks."""
    name = "all_gather_single" if hasattr(dist, "all_gather_single") else "all_gather_into_tensor"  # renamed in 2.13
    getattr(dist, name)(out, x, group=group)


def exchange(x: torch.Tensor, group: dist.ProcessGroup) -> None:
    """Each rank adds its share of every message in the order of ranks, and sends the sum to all ranks. Any device."""
    world = dist.get_world_size(group)
    share = -(-x.numel() // world)
    padded = x
    if share * world != x.numel():
        padded = torch.zeros(share * world, dtype=x.dtype, device=x.device)
        padded[: x.numel()] = x
    total, parts = padded.new_empty(share), torch.empty_like(padded)
    scatter_exchange(total, padded, group)
    gather_into(parts, total, group)
    x.copy_(parts[: x.numel()])


def library(x: torch.Tensor, group: dist.ProcessGroup) -> None:
    """The library's own all-reduce, only of two ranks, where a + b and b + a have the same bits; else
    NotImplementedError.
    """
    _check_two(group)
    dist.all_reduce(x, group=group)


def _check_two(group: dist.ProcessGroup) -> None:
    if dist.get_world_size(group) > 2:
        raise NotImplementedError("the library's order is its own where there are more than two ranks")


def _torchs(name: str, x: torch.Tensor, group: dist.ProcessGroup) -> None:
    from nondet.kernels.all_reduce import symmetric

    with _space(x, group, _TORCH_DTYPES, x.numel() + 4096) as space:
        getattr(symmetric, name)(x, group, space)


def _peers(name: str, x: torch.Tensor, group: dist.ProcessGroup) -> None:
    from nondet.kernels.all_reduce import symmetric

    with _space(x, group, _PEER_DTYPES, x.numel() + 4096) as space:
        space.flat(x.numel(), x.dtype).copy_(x)
        getattr(symmetric, name)(x.numel(), x.dtype, x, "chain", space)


def push(x: torch.Tensor, group: dist.ProcessGroup) -> None:
    """Every rank writes its message to the others, and adds what arrives: `nondet.kernels.all_reduce.symmetric`."""
    from nondet.kernels.all_reduce import symmetric

    with _space(x, group, _PEER_DTYPES, x.numel(), mail=True) as box:
        symmetric.push(x, x, "chain", box)


@contextmanager
def _space(
    x: torch.Tensor, group: dist.ProcessGroup, dtypes: tuple[torch.dtype, ...], count: int, *, mail: bool = False
) -> Iterator[Any]:
    """Exclusive use of a workspace of `count` elements of x's dtype, or of a mailbox for such messages."""
    if x.device.type != "cuda":
        raise NotImplementedError("symmetric memory is for CUDA devices")
    from nondet.kernels.all_reduce import symmetric

    if x.dtype not in dtypes:
        raise NotImplementedError(f"no such symmetric-memory collective of {x.dtype}")
    if not symmetric.available(group, x.device):
        raise NotImplementedError("the ranks of this group can't read each other's memory")
    space: Any
    if mail:
        space = symmetric.mailbox(group, x.device, count, x.element_size())
    else:
        space = symmetric.workspace(group, x.device, count * x.element_size())
    if space is None:
        raise NotImplementedError("no workspace of this size: it can't grow while a CUDA graph is captured")
    with space.turn():
        yield space


ANCHOR = "ordered_gather"
MEMBERS: dict[str, Member] = {
    "ordered_gather": ordered_gather,
    "exchange": exchange,
    "library": library,
    # PyTorch's symmetric-memory kernels: every rank reads all messages, for small ones; or each reduces a share, and
    # reads the others' shares
    "one_shot": partial(_torchs, "one_shot"),
    "two_shot": partial(_torchs, "two_shot"),
    "peers_one_shot": partial(_peers, "peers_one_shot"),
    "peers_two_shot": partial(_peers, "peers_two_shot"),
    "push": push,
}


# Whether a member over ranks may be used: all ranks prove it together, and agree.
# At its first use in a process the ranks read this machine's certificates together, prove what none of them has proven,
# and agree. If it fails on one rank, no rank uses it, because ranks that chose differently would wait for each other
# for ever. Nothing can be proven while a CUDA graph is captured: what is not agreed on by then is not used. An
# agreement belongs to the group, and not to the next one of its name (`nondet.kernels.all_reduce.orders`).

_agreed: ByGroup[dict[tuple[str, str], bool]] = ByGroup(lambda _: {})


def forget() -> None:
    """Read the certificates again, after they have changed within the process. Call it on all ranks, or on none."""
    _agreed.clear()


def agreed(
    member: str, key: str, device: torch.device, group: dist.ProcessGroup, prove: Callable[[], tuple[bool, str]]
) -> bool:
    """Whether the member is proven at the key on all ranks; proven now where one of them has no proof.

    Args:
        prove: Called by all ranks at once. Returns whether it holds, the same on all of them (see `together`), and the
            evidence. NotImplementedError, on all ranks alike: it does not apply to this group, and nothing is kept.
    """
    mine, at = _agreed.of(group), (member, key)
    known = mine.get(at)
    if known is not None:
        return known
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        return False
    with proving():
        mine[at] = holds = _vote(member, key, device, group, prove)
    return holds


def _vote(
    member: str, key: str, device: torch.device, group: dist.ProcessGroup, prove: Callable[[], tuple[bool, str]]
) -> bool:
    store = certificates(device.type)
    standing = store.standing(member, key)
    votes = torch.tensor([standing is None, standing is False], dtype=torch.int32, device=device)
    dist.all_reduce(votes, op=dist.ReduceOp.MAX, group=group)
    unknown, excluded = (bool(v) for v in votes.tolist())
    if excluded or not unknown:
        return not excluded
    try:
        holds, evidence = prove()
    except NotImplementedError:
        return False
    if dist.get_rank(group) == 0:
        store.record(member, key, holds, evidence)
    return holds


def together(apart: str, evidence: str, device: torch.device, group: dist.ProcessGroup) -> tuple[bool, str]:
    """The ranks' common verdict: it holds if it held on every rank.

    Args:
        apart: Where this rank's bits differed; "" where they did not.
        evidence: What was compared, for a verdict that holds.
    """
    world = dist.get_world_size(group)
    vote = torch.tensor([1 if apart else 0], dtype=torch.int32, device=device)
    votes = torch.empty(world, dtype=torch.int32, device=device)
    gather_into(votes, vote, group)
    failed = votes.tolist()
    if not any(failed):
        return True, evidence
    where = ", ".join(str(r) for r, v in enumerate(failed) if v)
    return False, f"not the bits of the anchor on rank {where}{': ' + apart if apart else ''}"


# All-reduce in class "ranks-chain", by its fastest member, whatever the message's size.
# y = ((x0 + x1) + x2) + ..., rank by rank, each addition rounded to the message's dtype, elementwise. So an element's
# bits depend only on the W numbers at its position. `_preferences` orders members by speed; each is compared bit for
# bit with `ordered_gather`, on messages of several sizes whose sums consist of rounding errors. While a CUDA graph is
# captured nothing can be proven, and the next agreed member runs.
# A certificate covers the sizes of the proof, in the evidence. That other sizes have the same order follows from the
# members' sources (elementwise kernels, in the order of ranks), and was not tested.

DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
PROOF_SIZES = {"cpu": (1, 7, 4096, 20483), "cuda": (1, 7, 4096, 20483, 262152, 2097152)}  # elements
PROOF_KINDS = ("order", "wide", "bell")

_KIB = 2**10
# By (ranks at most, bytes at most), fastest first, including copies to and from symmetric memory. Two ranks: measured
# on two H100s (docs/evidence/h100-x2), the rest after `push` on two H200s (docs/evidence/h200-x2). Up to four: measured
# on four H200s (docs/evidence/h200-x4), where `push` is faster than NCCL up to 4 MiB, and takes 2 to 5% longer than
# PyTorch's two-shot above, with mailboxes of four messages. Up to eight: the same, not measured.
_CUDA: tuple[tuple[int, int, tuple[str, ...]], ...] = (
    (2, 512 * _KIB, ("push", "one_shot", "library")),
    (2, 2**62, ("push", "peers_one_shot", "library")),
    (8, 256 * _KIB, ("push", "one_shot", "peers_one_shot")),
    (8, 4 * _KIB * _KIB, ("push", "peers_two_shot", "two_shot", "exchange")),
    (8, 2**62, ("two_shot", "peers_two_shot", "exchange")),
)
_CPU: tuple[tuple[int, int, tuple[str, ...]], ...] = (
    (2, 2**62, ("library",)),
    (2**31, 64 * _KIB, ()),
    (2**31, 2**62, ("exchange",)),
)


def all_reduce(x: torch.Tensor, group: dist.ProcessGroup) -> str:
    """Sum x over the ranks of the group, in place, on every rank: class "ranks-chain".

    `x`: any shape; bfloat16, float16, float32 or float64, the same shape and dtype on all ranks. Returns the name of
    the member that ran. Raises NotImplementedError: another dtype.
    """
    if x.dtype not in DTYPES:
        raise NotImplementedError(f"no all-reduce in a fixed order of {x.dtype}")
    if x.numel() == 0 or group.size() == 1:
        return ANCHOR
    flat = x.view(-1) if x.is_contiguous() else x.contiguous().view(-1)
    name = _run(MEMBERS, (*_preferences(flat, group.size()), ANCHOR), "", prove, flat, group)
    if flat.data_ptr() != x.data_ptr():
        x.copy_(flat.view(x.shape))
    note(f"all_reduce[{name}, {group.size()} ranks]")
    return name


def _run(
    members: Mapping[str, Callable[..., None]],
    names: tuple[str, ...],
    collective: str,
    prove: Callable[[str, torch.dtype, torch.device, dist.ProcessGroup], tuple[bool, str]],
    *operands: Any,
) -> str:
    """Call the first member that all ranks hold proven, else the last, and return its name."""
    x, group = operands[-2:]
    for name in names[:-1]:
        key = f"{collective}{class_key(name, x.dtype, group.size())}"
        if not agreed(name, key, x.device, group, partial(prove, name, x.dtype, x.device, group)):
            continue
        try:
            members[name](*operands)
        except NotImplementedError:  # on all ranks alike: the size, the group, a capture
            continue
        return name
    members[names[-1]](*operands)
    return names[-1]


def _preferences(x: torch.Tensor, world: int) -> tuple[str, ...]:
    size = x.numel() * x.element_size()
    for ranks, limit, names in _CUDA if x.is_cuda else _CPU:
        if world <= ranks and size <= limit:
            return names
    return ()


@functools.cache
def class_key(name: str, dtype: torch.dtype, world: int) -> str:
    """The key of a certificate of this class: "ranks-chain bfloat16 W=4"."""
    key = f"ranks-chain {str(dtype).removeprefix('torch.')} W={world}"
    if name in ("library", "exchange") and torch.cuda.is_available():
        key += f" nccl {'.'.join(map(str, torch.cuda.nccl.version()))}"
    return key


def prove(name: str, dtype: torch.dtype, device: torch.device, group: dist.ProcessGroup) -> tuple[bool, str]:
    """Whether a member gives the anchor's bits, and the evidence. Collective. NotImplementedError: does not apply."""

    def both(mine: torch.Tensor, _: int) -> tuple[torch.Tensor, torch.Tensor]:
        expected, got = mine.clone(), mine.clone()
        MEMBERS[ANCHOR](expected, group)
        MEMBERS[name](got, group)
        return expected, got

    more: tuple[int, ...] = ()
    if name == "push" and device.type == "cuda":
        from nondet.kernels.all_reduce.symmetric import counts_in_pieces

        more = counts_in_pieces(dtype.itemsize, dist.get_world_size(group), narrowed=False)
    return prove_on_messages(both, "messages of {} elements", dtype, device, group, more=more)


def prove_on_messages(
    both: Callable[[torch.Tensor, int], tuple[torch.Tensor, torch.Tensor]],
    what: str,
    dtype: torch.dtype,
    device: torch.device,
    group: dist.ProcessGroup,
    parts: int = 1,
    more: tuple[int, ...] = (),
) -> tuple[bool, str]:
    """Whether both(message, n) gives equal tensors of n elements on all ranks, at PROOF_SIZES and the sizes `more`."""
    world, rank = dist.get_world_size(group), dist.get_rank(group)
    compared, apart, most = 0, "", PROOF_SIZES[device.type][-1] * parts
    sizes = *more, *PROOF_SIZES[device.type]  # the largest first: a mailbox that grows keeps its old memory
    for kind in PROOF_KINDS:
        for size in sizes:
            mine = contributions(kind, world, min(size * parts, most), dtype, device)[rank].contiguous()
            if size * parts > most:  # by an odd number of elements, so that no two pieces are equal
                mine = mine[1:].repeat(-(-size * parts // (most - 1)))[: size * parts]
            expected, got = both(mine, size)
            if not apart and not identical(expected, got):
                apart = f"{kind}: {int((expected != got).sum())} of {size} elements differ"
            compared += size
    on = f"{', '.join(PROOF_KINDS)}, {what.format(', '.join(map(str, sizes)))}"
    return together(apart, f"{compared} elements equal on every rank, on {on}", device, group)


def contributions(kind: str, world: int, size: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """[W, size], equal on every rank. "order": two ranks nearly cancel, and the rest depends on when they are added."""
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


# Reduce-scatter in class "ranks-chain": each rank gets its share of the sum, added in the order of ranks.
# A share has the bits that the same position of an all-reduce has, because the elementwise order is the same.
# `exchange` is the anchor: every rank gets its share of all messages, by copies, and adds them in plain torch.

ScatterMember = Callable[[torch.Tensor, torch.Tensor, dist.ProcessGroup], None]


def reduce_scatter(out: torch.Tensor, x: torch.Tensor, group: dist.ProcessGroup) -> str:
    """out [n] = this rank's share of the sum of x [W * n] over the ranks, in the order of "ranks-chain"; any shapes.

    bfloat16, float16, float32 or float64, the same on all ranks. Returns the name of the member that ran. Raises
    NotImplementedError: another dtype; ValueError: sizes or dtypes that do not fit.
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
        return SCATTER_ANCHOR
    flat = x.contiguous().view(-1)
    share = out.view(-1) if out.is_contiguous() else torch.empty(out.numel(), dtype=out.dtype, device=out.device)
    names = (*_preferences_scatter(flat, world), SCATTER_ANCHOR)
    name = _run(SCATTER_MEMBERS, names, "reduce-scatter ", prove_scatter, share, flat, group)
    if share.data_ptr() != out.data_ptr():
        out.copy_(share.view(out.shape))
    note(f"reduce_scatter[{name}, {world} ranks]")
    return name


def _preferences_scatter(x: torch.Tensor, world: int) -> tuple[str, ...]:
    """Fastest first, not measured."""
    if world == 2:
        return ("library", "peers") if x.is_cuda else ("library",)
    return ("peers",) if x.is_cuda else ()


def scatter_exchange(out: torch.Tensor, x: torch.Tensor, group: dist.ProcessGroup) -> None:
    """Every rank gets its share of all messages, and adds them in the order of ranks. Any device."""
    parts = torch.empty_like(x)
    dist.all_to_all_single(parts, x, group=group)
    out.copy_(chain(parts.view(dist.get_world_size(group), -1).unbind(0)))


def scatter_library(out: torch.Tensor, x: torch.Tensor, group: dist.ProcessGroup) -> None:
    """As `library`, for the reduce-scatter; only two ranks."""
    _check_two(group)
    stock_into(out, x, group)


def stock_into(out: torch.Tensor, x: torch.Tensor, group: dist.ProcessGroup) -> None:
    """torch.distributed's own reduce-scatter of flat x [W * n] into flat out [n]."""
    name = "reduce_scatter_single" if hasattr(dist, "reduce_scatter_single") else "reduce_scatter_tensor"
    getattr(dist, name)(out, x, group=group)


def scatter_peers(out: torch.Tensor, x: torch.Tensor, group: dist.ProcessGroup) -> None:
    """Our kernel over the ranks' buffers, between two barriers. NotImplementedError: no symmetric memory for x."""
    from nondet.kernels.all_reduce import symmetric

    with _space(x, group, _PEER_DTYPES, x.numel()) as space:
        symmetric.peers_scatter(out, x, space)


SCATTER_ANCHOR = "exchange"
SCATTER_MEMBERS: dict[str, ScatterMember] = {
    "exchange": scatter_exchange,
    "library": scatter_library,
    "peers": scatter_peers,
}


def prove_scatter(name: str, dtype: torch.dtype, device: torch.device, group: dist.ProcessGroup) -> tuple[bool, str]:
    """As `prove`, for a member of the reduce-scatter."""

    def both(mine: torch.Tensor, size: int) -> tuple[torch.Tensor, torch.Tensor]:
        expected, got = (torch.empty(size, dtype=dtype, device=device) for _ in range(2))
        SCATTER_MEMBERS[SCATTER_ANCHOR](expected, mine, group)
        SCATTER_MEMBERS[name](got, mine, group)
        return expected, got

    return prove_on_messages(both, "shares of {} elements", dtype, device, group, dist.get_world_size(group))
