"""Memory that every rank of a process group can read: workspaces, and the Triton kernel that sums over them.

Members of the class "ranks-chain": `one_shot` and `two_shot` are PyTorch's own kernels (torch.ops.symm_mem), which load
all ranks' numbers and add them in the order of ranks. `peers` is ours, for both classes: a barrier, then
`nondet.kernels.all_reduce.symmetric` on the ranks' buffers. NVLink multicast is not used by any of them: a multimem
reduction adds inside the switch, in an order of its own.

A workspace belongs to a group. It is used by one stream at a time: eager calls see to that, and graphs that use the
same group must not be replayed at once on several streams. It grows by doubling; what it
has outgrown stays allocated, since a CUDA graph may have captured it. Growing is a collective call and needs the host,
so it can't happen while a graph is captured.

PyTorch knows the ranks and the store of symmetric memory by the group's name, from its first workspace on, and does not
forget them with the group. So a later group of that name has no workspace: the ranks ask each other at its first use.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
import triton
import triton.language as tl

from nondet.kernels.all_reduce.orders import ByGroup
from nondet.kernels.triton_common import on_device

# Elementwise sums over tensors that several ranks hold, read through NVLink: one Triton kernel, a fixed order.
#
# The operands are one pointer a rank, which the caller has mapped (`nondet.kernels.all_reduce.symmetric`), so each
# element is a function of the W numbers at its place. Sums are kept in float32. "chain" rounds to the operands' dtype
# after every addition, as a sequence of additions of such tensors would; "tree" rounds once, to the result's dtype.

# Triton reads a kernel's annotations itself: only tl.constexpr may stand there.
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
def _reduce_peers_kernel(
    p0, p1, p2, p3, p4, p5, p6, p7, out_ptr, start, stop, W: tl.constexpr, TREE: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    offs = start + tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = offs < stop
    x0 = tl.load(p0 + offs, mask=mask, other=0.0).to(tl.float32)
    total = x0
    if W > 1:
        x1 = tl.load(p1 + offs, mask=mask, other=0.0).to(tl.float32)
    if W > 2:
        x2 = tl.load(p2 + offs, mask=mask, other=0.0).to(tl.float32)
    if W > 3:
        x3 = tl.load(p3 + offs, mask=mask, other=0.0).to(tl.float32)
    if W > 4:
        x4 = tl.load(p4 + offs, mask=mask, other=0.0).to(tl.float32)
    if W > 5:
        x5 = tl.load(p5 + offs, mask=mask, other=0.0).to(tl.float32)
    if W > 6:
        x6 = tl.load(p6 + offs, mask=mask, other=0.0).to(tl.float32)
    if W > 7:
        x7 = tl.load(p7 + offs, mask=mask, other=0.0).to(tl.float32)
    if TREE:  # W is 1, 2, 4 or 8
        if W == 2:
            total = x0 + x1
        if W == 4:
            total = (x0 + x1) + (x2 + x3)
        if W == 8:
            total = ((x0 + x1) + (x2 + x3)) + ((x4 + x5) + (x6 + x7))
    else:
        if W > 1:
            total = _add(total, x1, p0, True)
        if W > 2:
            total = _add(total, x2, p0, True)
        if W > 3:
            total = _add(total, x3, p0, True)
        if W > 4:
            total = _add(total, x4, p0, True)
        if W > 5:
            total = _add(total, x5, p0, True)
        if W > 6:
            total = _add(total, x6, p0, True)
        if W > 7:
            total = _add(total, x7, p0, True)
    tl.store(out_ptr + offs, total.to(out_ptr.dtype.element_ty), mask=mask)


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
    """Sum elements [start, stop) of W flat tensors into the same elements of `out`.

    Args:
        parts: One flat tensor a rank, in the order of ranks: float16, bfloat16 or float32, contiguous.
        out: Flat, contiguous; with "chain" of the parts' dtype.
        order: "chain" or "tree"; see `nondet.kernels.all_reduce.orders`.
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
    """out[r * share : (r + 1) * share] from the same place of parts[r], for every rank r. Copies: no arithmetic."""
    if out.numel():
        grid = (triton.cdiv(share, _BLOCK), len(parts))
        with on_device(out):
            _gather_slices_kernel[grid](*_pointers(parts), out, out.numel(), share, BLOCK=_BLOCK, num_warps=_WARPS)


_LEAST_BYTES = 64 * 2**20
_MOST_BYTES = 2**30
_ALIGNMENT_BYTES = 256


class Workspace:
    """Symmetric memory of one group: `buffer` for contributions, `result` for what a rank has reduced for all."""

    def __init__(self, group: dist.ProcessGroup, device: torch.device, size_bytes: int) -> None:
        from torch.distributed import _symmetric_memory as symmetric

        self.group_name = group.group_name
        self.world = dist.get_world_size(group)
        self.rank = dist.get_rank(group)
        self.bytes = size_bytes
        self.buffer = symmetric.empty((size_bytes,), dtype=torch.uint8, device=device)
        self.result = symmetric.empty((size_bytes,), dtype=torch.uint8, device=device)
        self.handle: Any = symmetric.rendezvous(self.buffer, group)
        self.result_handle: Any = symmetric.rendezvous(self.result, group)
        self._stream: torch.cuda.Stream | None = None
        self._peers: dict[tuple[bool, int, torch.dtype], list[torch.Tensor]] = {}

    @contextmanager
    def turn(self) -> Iterator[None]:
        """Use the workspace inside this: what another stream does with it comes first."""
        stream = torch.cuda.current_stream(self.buffer.device)
        if self._stream is not None and self._stream != stream and not torch.cuda.is_current_stream_capturing():
            stream.wait_stream(self._stream)
        yield
        self._stream = stream

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


class _Spaces:
    """A group's workspaces, by device.

    Attributes:
        before: Those of earlier groups of the name, which stay: a CUDA graph may have captured them.
        usable: Whether no rank had any under this name before; None until the ranks have asked each other.
    """

    def __init__(self, last: _Spaces | None) -> None:
        self.before: list[Workspace] = []
        if last is not None:
            self.before = [*last.before, *chain.from_iterable(last.kept.values())]
        self.kept: dict[int, list[Workspace]] = {}
        self.usable: bool | None = None

    def ask(self, group: dist.ProcessGroup, device: torch.device) -> bool:
        """Whether the group may have workspaces. Collective at the first call."""
        if self.usable is None:
            vote = torch.tensor([bool(self.before)], dtype=torch.int32, device=device)
            dist.all_reduce(vote, op=dist.ReduceOp.MAX, group=group)
            self.usable = not vote.item()
        return self.usable


_spaces: ByGroup[_Spaces] = ByGroup(_Spaces)


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
    """A workspace of at least that size, the same on all ranks; None where it can't be had (capture, size, group).

    Collective: every rank of the group calls it with the same size.
    """
    spaces = _spaces.of(group)
    kept = spaces.kept.setdefault(device.index or 0, [])
    if kept and kept[-1].bytes >= size_bytes:
        return kept[-1]
    if size_bytes > _MOST_BYTES or torch.cuda.is_current_stream_capturing():
        return None
    if not spaces.ask(group, device):
        return None
    size = _LEAST_BYTES
    while size < size_bytes:
        size *= 2
    kept.append(Workspace(group, device, size))
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


def chain_one_shot(x: torch.Tensor, group: dist.ProcessGroup, space: Workspace) -> None:
    """Sum flat x over the ranks, in place, by `peers_one_shot`."""
    space.flat(x.numel(), x.dtype).copy_(x)
    peers_one_shot(x.numel(), x.dtype, x, "chain", space)


def chain_two_shot(x: torch.Tensor, group: dist.ProcessGroup, space: Workspace) -> None:
    """Sum flat x over the ranks, in place, by `peers_two_shot`."""
    space.flat(x.numel(), x.dtype).copy_(x)
    peers_two_shot(x.numel(), x.dtype, x, "chain", space)


def peers_one_shot(count: int, dtype: torch.dtype, out: torch.Tensor, order: str, space: Workspace) -> None:
    """Sum what every rank has put into its buffer into flat `out`, every rank all of it.

    The second barrier keeps a rank from overwriting its buffer while another one still reads it.
    """
    space.handle.barrier(channel=0)
    reduce_peers(space.peers(count, dtype), out, order)
    space.handle.barrier(channel=1)


def peers_two_shot(count: int, dtype: torch.dtype, out: torch.Tensor, order: str, space: Workspace) -> None:
    """As `peers_one_shot`, each rank its share, which the others then read.

    Two barriers do: the shares are read before the next call's first barrier, and the buffers before this one's second.
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
