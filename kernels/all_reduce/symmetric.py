"""Memory that every rank of a process group can read, and the Triton kernels that sum over it.

Members of the class "ranks-chain": `one_shot` and `two_shot` are PyTorch's own kernels (torch.ops.symm_mem), which load
all ranks' numbers and add them in the order of ranks. `peers` is ours, for both classes: a barrier, then a kernel on
the ranks' buffers; `push` needs no barrier. None uses NVLink multicast, because a multimem reduction adds inside the
switch, in an order of its own.

A workspace, and a mailbox (that of `push`), belongs to a group and is used by one stream at a time. Eager calls ensure
that; you must not replay graphs that use the same group on several streams at once. It grows by doubling, and keeps its
old memory, because a CUDA graph may have captured it. Growing is a collective call and needs the host, so it can't
happen while a graph is captured.

PyTorch stores the ranks of symmetric memory under the group's name, from its first workspace on, and keeps them after
the group. So a later group of that name gets no workspace: the ranks check this together at its first use.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import chain
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist
import triton
import triton.language as tl

from nondet.kernels.all_reduce.orders import ByGroup
from nondet.kernels.triton_common import on_device

# Elementwise sums over tensors that several ranks hold, read through NVLink, in a fixed order.
# The operands are one mapped pointer per rank, so each element is a function of the W numbers at its position. Sums are
# kept in float32. "chain" rounds to the operands' dtype after every addition, as a sequence of additions of such
# tensors would; "tree" rounds once, to the result's dtype.

# Triton reads a kernel's annotations itself and allows only tl.constexpr.
# mypy: allow-untyped-defs, allow-incomplete-defs

MAX_RANKS = 8
_BLOCK = 1024
_WARPS = 4


@triton.jit
def _add(x, y, like, ROUND: tl.constexpr):
    total = x + y
    if ROUND:
        total = total.to(like.dtype.element_ty).to(tl.float32)
    return total


@triton.jit
def _total(x0, x1, x2, x3, x4, x5, x6, x7, like, W: tl.constexpr, TREE: tl.constexpr):
    """The sum of the first W of them, float32, in their order."""
    total = x0
    if TREE:  # W is 1, 2, 4 or 8
        if W == 2:
            total = x0 + x1
        if W == 4:
            total = (x0 + x1) + (x2 + x3)
        if W == 8:
            total = ((x0 + x1) + (x2 + x3)) + ((x4 + x5) + (x6 + x7))
    else:
        if W > 1:
            total = _add(total, x1, like, True)
        if W > 2:
            total = _add(total, x2, like, True)
        if W > 3:
            total = _add(total, x3, like, True)
        if W > 4:
            total = _add(total, x4, like, True)
        if W > 5:
            total = _add(total, x5, like, True)
        if W > 6:
            total = _add(total, x6, like, True)
        if W > 7:
            total = _add(total, x7, like, True)
    return total


@triton.jit
def _loaded(ptr, offs, mask, x0, USED: tl.constexpr):
    x = x0
    if USED:
        x = tl.load(ptr + offs, mask=mask, other=0.0).to(tl.float32)
    return x


@triton.jit
def _reduce_peers_kernel(
    p0, p1, p2, p3, p4, p5, p6, p7, out_ptr, start, stop, W: tl.constexpr, TREE: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    offs = start + tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = offs < stop
    x0 = tl.load(p0 + offs, mask=mask, other=0.0).to(tl.float32)
    x1 = _loaded(p1, offs, mask, x0, W > 1)
    x2 = _loaded(p2, offs, mask, x0, W > 2)
    x3 = _loaded(p3, offs, mask, x0, W > 3)
    x4 = _loaded(p4, offs, mask, x0, W > 4)
    x5 = _loaded(p5, offs, mask, x0, W > 5)
    x6 = _loaded(p6, offs, mask, x0, W > 6)
    x7 = _loaded(p7, offs, mask, x0, W > 7)
    total = _total(x0, x1, x2, x3, x4, x5, x6, x7, p0, W, TREE)
    tl.store(out_ptr + offs, total.to(out_ptr.dtype.element_ty), mask=mask)


# The same sums without a barrier: every rank writes its numbers into the others' slots ("push"), and adds what arrives.
#
# A message is cut into shares, one per program, and a share into pieces. Program b writes a piece into its slot on
# every other rank, raises its flag there, and adds the piece before, which has arrived from all ranks by then. So
# writing, which NVLink bounds, and adding, which memory bounds, overlap. Nothing is copied in.
#
# Program b of every call uses channel b: positions in the slots, flags and a counter of its uses that no other program
# touches, whatever the message's size. So sizes may change from call to call. All ranks make the same calls, so a
# channel's uses have the same numbers on all of them. The counter is in the rank's own memory and is increased by the
# program itself, so a replayed graph counts like an eager call. Two invariants:
#
# - A piece has arrived when its flag is seen. A flag holds the largest ticket, (use, piece), and tickets grow; the
#   sender raises it after the piece's numbers, at system scope.
# - Nothing is overwritten while it is read. Uses alternate between two halves of the slots. A sender writes use e + 2
#   after its use e + 1 ended (stream order), which saw this rank's flag of e + 1, which was raised in a launch after
#   the one in which this rank read use e.
#
# A program waits only for the same program of other ranks, and grids are the same. So the lowest unfinished program
# waits for one that runs or is the next to start, and the ranks finish even where not all programs fit at once, as long
# as programs start in their order, as on GPUs. A rank that dies leaves the others waiting, as with every barrier here
# and in PyTorch.


@triton.jit
def _place(use, rank, to, channel, REGION, W: tl.constexpr, CHANNELS: tl.constexpr):
    """Where rank's numbers of this use of the channel begin in the slots of rank `to`, in elements."""
    sender = rank - (rank > to)  # a rank has no slot on itself
    return (((use % 2) * (W - 1) + sender) * CHANNELS + channel) * REGION


@triton.jit
def _mine(x, start, n, SPLITS: tl.constexpr, BLOCK: tl.constexpr):
    """A piece of this rank's numbers: of x [n], or of the sum of x [SPLITS, n] along its tree."""
    offs = start + tl.arange(0, BLOCK)
    mask = offs < n
    x0 = tl.load(x + offs, mask=mask, other=0.0)
    if SPLITS > 1:
        x1 = _loaded(x + n, offs, mask, x0, SPLITS > 1)
        x2 = _loaded(x + 2 * n, offs, mask, x0, SPLITS > 2)
        x3 = _loaded(x + 3 * n, offs, mask, x0, SPLITS > 3)
        x4 = _loaded(x + 4 * n, offs, mask, x0, SPLITS > 4)
        x5 = _loaded(x + 5 * n, offs, mask, x0, SPLITS > 5)
        x6 = _loaded(x + 6 * n, offs, mask, x0, SPLITS > 6)
        x7 = _loaded(x + 7 * n, offs, mask, x0, SPLITS > 7)
        x0 = _total(x0, x1, x2, x3, x4, x5, x6, x7, x, SPLITS, True)
    return x0


@triton.jit
def _raise(flags, ticket, channel, W: tl.constexpr, RANK: tl.constexpr, CHANNELS: tl.constexpr):
    tl.debug_barrier()  # one thread raises the flag after all of them have written
    for to in tl.static_range(W):
        if to != RANK:
            tl.atomic_max(flags[to] + RANK * CHANNELS + channel, ticket, sem="release", scope="sys")


@triton.jit
def _await(flags, ticket, channel, W: tl.constexpr, RANK: tl.constexpr, CHANNELS: tl.constexpr):
    for sender in tl.static_range(W):
        if sender != RANK:
            flag = flags[RANK] + sender * CHANNELS + channel
            while tl.atomic_add(flag, 0, sem="acquire", scope="sys") < ticket:
                pass
    tl.debug_barrier()  # one thread has seen the flags, for all threads that read now


@triton.jit
def _give(piece, slots, flags, use, ticket, channel, at, rest, REGION, W: tl.constexpr, RANK: tl.constexpr, CHANNELS: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip  # noqa: E501
    lanes = tl.arange(0, BLOCK)
    for to in tl.static_range(W):
        if to != RANK:
            place = slots[to] + _place(use, RANK, to, channel, REGION, W, CHANNELS) + at
            tl.store(place + lanes, piece, mask=lanes < rest)
    _raise(flags, ticket, channel, W, RANK, CHANNELS)


@triton.jit
def _from(rank: tl.constexpr, piece, slots, use, channel, at, rest, REGION, W: tl.constexpr, RANK: tl.constexpr, CHANNELS: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip  # noqa: E501
    x = piece.to(tl.float32)
    if rank < W and rank != RANK:  # past the first-level cache, which does not see other ranks' writes
        lanes = tl.arange(0, BLOCK)
        place = slots[RANK] + _place(use, rank, RANK, channel, REGION, W, CHANNELS) + at
        x = tl.load(place + lanes, mask=lanes < rest, other=0.0, cache_modifier=".cg").to(tl.float32)
    return x


@triton.jit
def _added(piece, slots, use, channel, at, rest, REGION, W: tl.constexpr, RANK: tl.constexpr, CHANNELS: tl.constexpr, TREE: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip  # noqa: E501
    x0 = _from(0, piece, slots, use, channel, at, rest, REGION, W, RANK, CHANNELS, BLOCK)
    x1 = _from(1, piece, slots, use, channel, at, rest, REGION, W, RANK, CHANNELS, BLOCK)
    x2 = _from(2, piece, slots, use, channel, at, rest, REGION, W, RANK, CHANNELS, BLOCK)
    x3 = _from(3, piece, slots, use, channel, at, rest, REGION, W, RANK, CHANNELS, BLOCK)
    x4 = _from(4, piece, slots, use, channel, at, rest, REGION, W, RANK, CHANNELS, BLOCK)
    x5 = _from(5, piece, slots, use, channel, at, rest, REGION, W, RANK, CHANNELS, BLOCK)
    x6 = _from(6, piece, slots, use, channel, at, rest, REGION, W, RANK, CHANNELS, BLOCK)
    x7 = _from(7, piece, slots, use, channel, at, rest, REGION, W, RANK, CHANNELS, BLOCK)
    return _total(x0, x1, x2, x3, x4, x5, x6, x7, slots[RANK], W, TREE)


@triton.jit
def _take(piece, slots, flags, out, use, ticket, channel, at, rest, REGION, W: tl.constexpr, RANK: tl.constexpr, CHANNELS: tl.constexpr, TREE: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip  # noqa: E501
    _await(flags, ticket, channel, W, RANK, CHANNELS)
    total = _added(piece, slots, use, channel, at, rest, REGION, W, RANK, CHANNELS, TREE, BLOCK)
    lanes = tl.arange(0, BLOCK)
    tl.store(out + lanes, total.to(out.dtype.element_ty), mask=lanes < rest)


@triton.jit
def _push_kernel(
    x,
    out,
    slots,
    flags,
    uses,
    n,
    share,
    REGION,
    W: tl.constexpr,
    RANK: tl.constexpr,
    CHANNELS: tl.constexpr,
    TICKETS: tl.constexpr,
    SPLITS: tl.constexpr,
    TREE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    channel = tl.program_id(0)
    use = tl.load(uses + channel)
    start = channel.to(tl.int64) * share
    ticket = use * TICKETS + 1
    piece = _mine(x, start, n, SPLITS, BLOCK)
    _give(piece, slots, flags, use, ticket, channel, 0, n - start, REGION, W, RANK, CHANNELS, BLOCK)
    for at in range(BLOCK, share, BLOCK):
        ahead = _mine(x, start + at, n, SPLITS, BLOCK)
        rest = n - start - at
        _give(ahead, slots, flags, use, ticket + 1, channel, at, rest, REGION, W, RANK, CHANNELS, BLOCK)
        _take(piece, slots, flags, out + start + at - BLOCK, use, ticket, channel, at - BLOCK, rest + BLOCK, REGION, W, RANK, CHANNELS, TREE, BLOCK)  # fmt: skip  # noqa: E501
        piece = ahead
        ticket += 1
    at = share - BLOCK
    _take(piece, slots, flags, out + start + at, use, ticket, channel, at, n - start - at, REGION, W, RANK, CHANNELS, TREE, BLOCK)  # fmt: skip  # noqa: E501
    tl.store(uses + channel, use + 1)


# For large messages a share has a part for each rank, which adds it for all. A rank sends its numbers of the others'
# parts (as above), adds what arrives for its own, and sends the rounded sums to all others, which copy them. With W
# ranks each sends 2 (W - 1) / W of a message instead of W - 1; with two, where float32 sums are rounded to half the
# width, 3 bytes per element instead of 4. Tickets, in the order in which a program raises them: those of pieces 0, 1,
# 2, ... to be added are 0, 1, 3, 5, ..., those of their sums 2, 4, 6, ...


@triton.jit
def _deal(x, slots, flags, first, n, part, use, ticket, channel, at, REGION, W: tl.constexpr, RANK: tl.constexpr, CHANNELS: tl.constexpr, SPLITS: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip  # noqa: E501
    lanes = tl.arange(0, BLOCK)
    for to in tl.static_range(W):
        if to != RANK:
            start = first + to * part + at
            piece = _mine(x, start, n, SPLITS, BLOCK)
            place = slots[to] + _place(use, RANK, to, channel, REGION, W, CHANNELS) + at
            tl.store(place + lanes, piece, mask=lanes < n - start)
    _raise(flags, ticket, channel, W, RANK, CHANNELS)


@triton.jit
def _copy(slots, flags, out, first, n, part, use, ticket, channel, at, behind, REGION, W: tl.constexpr, RANK: tl.constexpr, CHANNELS: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip  # noqa: E501
    _await(flags, ticket, channel, W, RANK, CHANNELS)
    lanes = tl.arange(0, BLOCK)
    for sender in tl.static_range(W):
        if sender != RANK:
            place = slots[RANK] + _place(use, sender, RANK, channel, REGION, W, CHANNELS) + behind + at
            start = first + sender * part + at
            mask = lanes < n - start
            tl.store(out + start + lanes, tl.load(place + lanes, mask=mask, cache_modifier=".cg"), mask=mask)


@triton.jit
def _push_parts_kernel(
    x,
    out,
    slots,
    slots_out,
    flags,
    uses,
    n,
    part,
    behind,
    REGION,
    REGION_OUT,
    W: tl.constexpr,
    RANK: tl.constexpr,
    CHANNELS: tl.constexpr,
    TICKETS: tl.constexpr,
    SPLITS: tl.constexpr,
    TREE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Sum x over the ranks into out. Rounded sums lie `behind` a part's numbers, in their own unit."""
    channel = tl.program_id(0)
    use = tl.load(uses + channel)
    first = channel.to(tl.int64) * W * part
    ticket = use * TICKETS + 1
    _deal(x, slots, flags, first, n, part, use, ticket, channel, 0, REGION, W, RANK, CHANNELS, SPLITS, BLOCK)
    for at in range(0, part, BLOCK):
        if at + BLOCK < part:
            _deal(x, slots, flags, first, n, part, use, ticket + 1, channel, at + BLOCK, REGION, W, RANK, CHANNELS, SPLITS, BLOCK)  # fmt: skip  # noqa: E501
        start = first + RANK * part + at
        piece = _mine(x, start, n, SPLITS, BLOCK)
        _await(flags, tl.where(at == 0, ticket, ticket - 1), channel, W, RANK, CHANNELS)
        total = _added(piece, slots, use, channel, at, n - start, REGION, W, RANK, CHANNELS, TREE, BLOCK)
        total = total.to(out.dtype.element_ty)
        lanes = tl.arange(0, BLOCK)
        tl.store(out + start + lanes, total, mask=lanes < n - start)
        _give(total, slots_out, flags, use, ticket + 2, channel, behind + at, n - start, REGION_OUT, W, RANK, CHANNELS, BLOCK)  # fmt: skip  # noqa: E501
        if at > 0:  # the sums that the others computed meanwhile
            _copy(slots_out, flags, out, first, n, part, use, ticket, channel, at - BLOCK, behind, REGION_OUT, W, RANK, CHANNELS, BLOCK)  # fmt: skip  # noqa: E501
        ticket += 2
    _copy(slots_out, flags, out, first, n, part, use, ticket, channel, part - BLOCK, behind, REGION_OUT, W, RANK, CHANNELS, BLOCK)  # fmt: skip  # noqa: E501
    tl.store(uses + channel, use + 1)


@triton.jit
def _gather_slices_kernel(p0, p1, p2, p3, p4, p5, p6, p7, out_ptr, n, share, BLOCK: tl.constexpr):
    rank = tl.program_id(1)
    first = rank.to(tl.int64) * share
    offs = first + tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = (offs < n) & (offs < first + share)
    ptr = p0
    if rank == 1:
        ptr = p1
    if rank == 2:
        ptr = p2
    if rank == 3:
        ptr = p3
    if rank == 4:
        ptr = p4
    if rank == 5:
        ptr = p5
    if rank == 6:
        ptr = p6
    if rank == 7:
        ptr = p7
    tl.store(out_ptr + offs, tl.load(ptr + offs, mask=mask), mask=mask)


def _pointers(parts: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    if not 1 <= len(parts) <= MAX_RANKS:
        raise NotImplementedError(f"1 to {MAX_RANKS} ranks, got {len(parts)}")
    return [*parts, *[parts[0]] * (MAX_RANKS - len(parts))]


def reduce_peers(
    parts: Sequence[torch.Tensor], out: torch.Tensor, order: str, start: int = 0, stop: int | None = None
) -> None:
    """Sum elements [start, stop) of W flat tensors, one per rank in their order, into the same elements of flat `out`.

    float16, bfloat16 or float32, contiguous; with "chain" `out` has the parts' dtype. `order` is "chain" or "tree"; see
    `nondet.kernels.all_reduce.orders`.
    """
    stop = out.numel() if stop is None else stop
    if stop <= start:
        return
    grid = (triton.cdiv(stop - start, _BLOCK),)
    with on_device(out):
        _reduce_peers_kernel[grid](
            *_pointers(parts), out, start, stop, W=len(parts), TREE=order == "tree", BLOCK=_BLOCK, num_warps=_WARPS
        )


def gather_slices(parts: Sequence[torch.Tensor], out: torch.Tensor, share: int) -> None:
    """out[r * share : (r + 1) * share] from the same position of parts[r], for every rank r. Copies: no arithmetic."""
    if out.numel():
        grid = (triton.cdiv(share, _BLOCK), len(parts))
        with on_device(out):
            _gather_slices_kernel[grid](*_pointers(parts), out, out.numel(), share, BLOCK=_BLOCK, num_warps=_WARPS)


CHANNELS = 512  # of a mailbox: no call has more programs; with 256 a message of two ranks takes up to 1.18 of its time
_TICKETS = 2**20  # per use of a channel; more than a share has pieces
_WHOLE_BYTES = 4 * 2**20  # for narrowed float32 sums of two ranks; larger messages go in parts
_WHOLE_BYTES_MANY = 512 * 2**10  # for more ranks
_PROGRAMS_MANY = 264  # for more ranks, in parts


class Plan(NamedTuple):
    """How `push` cuts a message: `share` elements per program, in pieces of `block`; or each rank adds a part."""

    block: int
    share: int
    warps: int
    in_parts: bool = False


def plan_push(count: int, itemsize: int, world: int, narrowed: bool) -> Plan:
    """By the size: the fastest of thirteen plans or near it for large messages (docs/evidence/h200-x2, -x4).

    Small messages of two ranks took up to 1.9 times the fastest's time there. More than four ranks use the plan of
    four, which is not measured. `narrowed`: sums are rounded to half the width.
    """
    in_parts = count * itemsize > (_WHOLE_BYTES_MANY if world > 2 else _WHOLE_BYTES if narrowed else 2**62)
    block = (8192 if world > 2 else 16384) // itemsize
    programs = _PROGRAMS_MANY if in_parts and world > 2 else CHANNELS
    step = block * (world if in_parts else 1)
    return Plan(block, triton.cdiv(triton.cdiv(count, programs), step) * step, 8, in_parts)


def counts_in_pieces(itemsize: int, world: int, *, narrowed: bool) -> tuple[int, ...]:
    """Message sizes for a proof: about the smallest with several pieces for each way, and one not a multiple of 16."""
    found: dict[bool, tuple[int, int]] = {}
    for count in (2**k + 16 for k in range(28)):
        plan = plan_push(count, itemsize, world, narrowed)
        if plan.share > plan.block * (world if plan.in_parts else 1):
            found.setdefault(plan.in_parts, (count, count + 1))
    return (*chain.from_iterable(found.values()),)


def mail_bytes(count: int, itemsize: int, world: int) -> int:
    """Bytes of a mailbox for messages of `count` elements: a slot per sender in each half, for all channels."""
    plans = [plan_push(count, itemsize, world, narrowed) for narrowed in (False, True)]
    place = max(2 * plan.share // world if plan.in_parts else plan.share for plan in plans)
    return 2 * (world - 1) * CHANNELS * place * itemsize


def region_bytes(size_bytes: int, world: int) -> int:
    """Bytes of a channel for one sender in one half of a mailbox of that size: the same for all messages."""
    return size_bytes // (2 * (world - 1) * CHANNELS) // 256 * 256


def push(x: torch.Tensor, out: torch.Tensor, order: str, box: Mailbox) -> None:
    """Sum flat x over the ranks into flat `out` (which may be x), as `reduce_peers` would, without a barrier.

    x is [n], contiguous, float16, bfloat16 or float32; or float32 [splits, n], added along their tree first. The box
    must have enough memory for the message, by `mail_bytes`.
    """
    splits, count, width = x.numel() // out.numel(), out.numel(), x.element_size()
    plan = plan_push(count, width, box.world, out.element_size() < width)
    region = region_bytes(box.bytes, box.world)
    slots, flags = tuple(slot.view(x.dtype) for slot in box.slots), tuple(box.flags)
    # without stages, because a load that is made before its flag would read old numbers
    options = {"W": box.world, "RANK": box.rank, "CHANNELS": CHANNELS, "TICKETS": _TICKETS, "SPLITS": splits}
    options |= {"TREE": order == "tree", "BLOCK": plan.block, "num_warps": plan.warps, "num_stages": 1}
    grid = (triton.cdiv(count, plan.share),)
    with on_device(out):
        if plan.in_parts:
            part, rounded = plan.share // box.world, tuple(slot.view(out.dtype) for slot in box.slots)
            behind = part * width // out.element_size()
            regions = region // width, region // out.element_size()
            _push_parts_kernel[grid](x, out, slots, rounded, flags, box.uses, count, part, behind, *regions, **options)
            return
        _push_kernel[grid](x, out, slots, flags, box.uses, count, plan.share, region // width, **options)


_LEAST_BYTES = 64 * 2**20
_MOST_BYTES = 2**30
_ALIGNMENT_BYTES = 256


class _Shared:
    def __init__(self, group: dist.ProcessGroup, device: torch.device, size_bytes: int) -> None:
        self.group_name = group.group_name
        self.world = dist.get_world_size(group)
        self.rank = dist.get_rank(group)
        self.bytes = size_bytes
        self._device = device
        self._stream: torch.cuda.Stream | None = None

    @contextmanager
    def turn(self) -> Iterator[None]:
        """Use the memory inside this: it waits for what another stream does with the memory."""
        stream = torch.cuda.current_stream(self._device)
        if self._stream is not None and self._stream != stream and not torch.cuda.is_current_stream_capturing():
            stream.wait_stream(self._stream)
        yield
        self._stream = stream


class Workspace(_Shared):
    """`buffer` for contributions, `result` for what a rank has reduced for all."""

    def __init__(self, group: dist.ProcessGroup, device: torch.device, size_bytes: int) -> None:
        from torch.distributed import _symmetric_memory as symmetric

        super().__init__(group, device, size_bytes)
        self.buffer = symmetric.empty((size_bytes,), dtype=torch.uint8, device=device)
        self.result = symmetric.empty((size_bytes,), dtype=torch.uint8, device=device)
        self.handle: Any = symmetric.rendezvous(self.buffer, group)
        self.result_handle: Any = symmetric.rendezvous(self.result, group)
        self._peers: dict[tuple[bool, int, torch.dtype], list[torch.Tensor]] = {}

    def flat(self, count: int, dtype: torch.dtype) -> torch.Tensor:
        """The first `count` elements of this rank's buffer."""
        return self.buffer.view(dtype)[:count]

    def peers(self, count: int, dtype: torch.dtype, *, result: bool = False) -> list[torch.Tensor]:
        """The first `count` elements of every rank's buffer (or result), in the order of ranks."""
        at = (result, count, dtype)
        if at not in self._peers:
            handle = self.result_handle if result else self.handle
            self._peers[at] = [handle.get_buffer(rank, (count,), dtype) for rank in range(self.world)]
        return self._peers[at]


class Mailbox(_Shared):
    """What `push` works with: slots and flags of every rank, mapped on this one, and its own counters."""

    def __init__(self, group: dist.ProcessGroup, device: torch.device, size_bytes: int) -> None:
        from torch.distributed import _symmetric_memory as symmetric

        super().__init__(group, device, size_bytes)
        flags, ranks = CHANNELS * self.world, range(self.world)
        memory = symmetric.empty((size_bytes + 8 * flags,), dtype=torch.uint8, device=device)
        memory[size_bytes:].zero_()
        self.uses = torch.zeros(CHANNELS, dtype=torch.int64, device=device)
        torch.cuda.synchronize(device)  # before the ranks' barrier: after it the others may raise flags
        self._handle: Any = symmetric.rendezvous(memory, group)
        self.slots = [self._handle.get_buffer(r, (size_bytes,), torch.uint8) for r in ranks]
        self.flags = [self._handle.get_buffer(r, (flags,), torch.int64, size_bytes // 8) for r in ranks]


class Spaces:
    """A group's workspaces and mailboxes, by kind and device.

    Attributes:
        before: Those of earlier groups of the name, kept because a CUDA graph may have captured them.
        usable: Whether no rank had any under this name before; None until the ranks have exchanged this.
    """

    def __init__(self, last: Spaces | None) -> None:
        self.before: list[_Shared] = []
        if last is not None:
            self.before = [*last.before, *chain.from_iterable(last.kept.values())]
        self.kept: dict[tuple[type, int], list[Any]] = {}
        self.usable: bool | None = None

    def ask(self, group: dist.ProcessGroup, device: torch.device) -> bool:
        """Whether the group may have workspaces. Collective at the first call."""
        if self.usable is None:
            vote = torch.tensor([bool(self.before)], dtype=torch.int32, device=device)
            dist.all_reduce(vote, op=dist.ReduceOp.MAX, group=group)
            self.usable = not vote.item()
        return self.usable


SPACES: ByGroup[Spaces] = ByGroup(Spaces)
S = TypeVar("S", bound=_Shared)


def available(group: dist.ProcessGroup, device: torch.device) -> bool:
    """Whether this group's ranks can read each other's memory here: CUDA, NCCL, up to 8 ranks of one host."""
    if device.type != "cuda" or dist.get_world_size(group) > MAX_RANKS:
        return False
    if not hasattr(torch.ops.symm_mem, "two_shot_all_reduce_out"):
        return False
    peers = range(torch.cuda.device_count())
    if dist.get_world_size(group) > len(peers):  # ranks of other hosts, or ranks that share a GPU
        return False
    return all(i == device.index or torch.cuda.can_device_access_peer(device.index, i) for i in peers)


def workspace(group: dist.ProcessGroup, device: torch.device, size_bytes: int) -> Workspace | None:
    """A workspace of at least that size; None where there can't be one. Collective: all ranks pass the same size."""
    return _shared(Workspace, group, device, size_bytes)


def mailbox(group: dist.ProcessGroup, device: torch.device, count: int, itemsize: int) -> Mailbox | None:
    """As `workspace`, for a `push` of `count` elements."""
    return _shared(Mailbox, group, device, mail_bytes(count, itemsize, dist.get_world_size(group)))


def _shared(kind: type[S], group: dist.ProcessGroup, device: torch.device, size_bytes: int) -> S | None:
    spaces = SPACES.of(group)
    kept = spaces.kept.setdefault((kind, device.index or 0), [])
    if kept and kept[-1].bytes >= size_bytes:
        return kept[-1]
    if size_bytes > _MOST_BYTES or torch.cuda.is_current_stream_capturing() or not spaces.ask(group, device):
        return None
    size = _LEAST_BYTES
    while size < size_bytes:
        size *= 2
    kept.append(kind(group, device, size))
    return kept[-1]


def _padded(count: int, dtype: torch.dtype, world: int) -> int:
    step = _ALIGNMENT_BYTES // dtype.itemsize * world
    return -(-count // step) * step


def one_shot(x: torch.Tensor, group: dist.ProcessGroup, space: Workspace) -> None:
    """Sum flat x over the ranks, in place: every rank reads all of every rank's message."""
    count = _padded(x.numel(), x.dtype, 1)
    if count == x.numel():
        torch.ops.symm_mem.one_shot_all_reduce_copy_out(space.flat(count, x.dtype), x, "sum", space.group_name, x)
        return
    mine = space.flat(count, x.dtype)
    mine[: x.numel()].copy_(x)
    x.copy_(torch.ops.symm_mem.one_shot_all_reduce(mine, "sum", space.group_name)[: x.numel()])


def two_shot(x: torch.Tensor, group: dist.ProcessGroup, space: Workspace) -> None:
    """Sum flat x over the ranks, in place: each rank reduces its share, then reads the others' shares."""
    count = _padded(x.numel(), x.dtype, space.world)
    mine = space.flat(count, x.dtype)
    mine[: x.numel()].copy_(x)
    if count == x.numel():
        torch.ops.symm_mem.two_shot_all_reduce_out(mine, "sum", space.group_name, x)
        return
    torch.ops.symm_mem.two_shot_all_reduce_(mine, "sum", space.group_name)
    x.copy_(mine[: x.numel()])


def peers_one_shot(count: int, dtype: torch.dtype, out: torch.Tensor, order: str, space: Workspace) -> None:
    """Sum every rank's buffer into flat `out`. The second barrier keeps buffers until all ranks have read them."""
    space.handle.barrier(channel=0)
    reduce_peers(space.peers(count, dtype), out, order)
    space.handle.barrier(channel=1)


def peers_two_shot(count: int, dtype: torch.dtype, out: torch.Tensor, order: str, space: Workspace) -> None:
    """As `peers_one_shot`, but each rank reduces its share, which the others then read.

    Two barriers are enough: the shares are read before the next call's first barrier, and the buffers before this one's
    second.
    """
    share = _padded(-(-count // space.world), out.dtype, 1)
    first = min(space.rank * share, count)
    space.handle.barrier(channel=0)
    mine = space.peers(count, out.dtype, result=True)[space.rank]
    reduce_peers(space.peers(count, dtype), mine, order, first, min(first + share, count))
    space.handle.barrier(channel=1)
    gather_slices(space.peers(count, out.dtype, result=True), out, share)


def peers_scatter(out: torch.Tensor, x: torch.Tensor, space: Workspace) -> None:
    """out [n] = this rank's share of the sum of flat x [W * n] over the ranks, in their order, rounded at each step."""
    count = out.numel()
    space.flat(x.numel(), x.dtype).copy_(x)
    space.handle.barrier(channel=0)
    first = space.rank * count
    reduce_peers([p[first : first + count] for p in space.peers(x.numel(), x.dtype)], out, "chain")
    space.handle.barrier(channel=1)
