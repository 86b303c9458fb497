"""Elementwise sums over tensors that several ranks hold, read through NVLink: one Triton kernel, a fixed order.

The operands are one pointer a rank, which the caller has mapped (`nondet.kernels.all_reduce.symmetric`), so each
element is a function of the W numbers at its place. Sums are kept in float32. "chain" rounds to the operands' dtype
after every addition, as a sequence of additions of such tensors would; "tree" rounds once, to the result's dtype.
"""

# Triton reads a kernel's annotations itself: only tl.constexpr may stand there.
# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from nondet.kernels.triton_common import on_device

__all__ = ["MAX_RANKS", "gather_slices", "reduce_peers"]

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
