"""What stands around the experts' products on CUDA: the choice of experts, and the sum of what they give.

Orders: `topk` gives the largest first, and of equal numbers the one with the lower index first, so that ties between
experts (bfloat16 router logits have many) are decided by the row alone; torch.topk says nothing about ties, and chooses
its algorithm by the number of rows. `sum_middle` and `index_add_` add one number after the other, in float32, in the
order of the axis or of the index, and round once; no atomics. Nothing is read back to the host.
"""

# Triton reads a kernel's annotations itself: only tl.constexpr may stand there.
# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

import torch
import triton
import triton.language as tl

from nondet.core.launch import note
from nondet.kernels.experts import topk as ordered_topk
from nondet.kernels.triton_common import accumulator, on_device, require

__all__ = ["index_add_", "sum_middle", "topk"]

_DTYPES = (torch.float16, torch.bfloat16, torch.float32)
_MAX_EXPERTS = 1024
_MAX_TOP = 64


@triton.jit
def _topk_kernel(
    x_ptr, values_ptr, indices_ptr, M, WIDTH, K, stride_row, stride_col, ROWS: tl.constexpr, BLOCK: tl.constexpr
):
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    cols = tl.arange(0, BLOCK)
    inside = (rows[:, None] < M) & (cols[None, :] < WIDTH)
    x = tl.load(x_ptr + rows[:, None] * stride_row + cols[None, :] * stride_col, mask=inside, other=0.0)
    x = x.to(tl.float32) + 0.0  # -0.0 equals 0.0, and becomes it
    bits = x.to(tl.int32, bitcast=True)
    bits = tl.where(x != x, 0x7FFFFFFF, bits)  # NaN is the greatest, as for torch
    ordered = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits).to(tl.int64)
    # One integer for number and place: the greatest of them is the greatest number at its lowest index.
    keys = tl.where(inside, ordered * 4294967296 + (BLOCK - 1 - cols[None, :]), -9223372036854775807)
    for rank in range(K):
        best = tl.max(keys, axis=1)
        index = BLOCK - 1 - (best & 0xFFFFFFFF)
        out = rows * K + rank
        value = tl.load(x_ptr + rows * stride_row + index * stride_col, mask=rows < M, other=0.0)
        tl.store(values_ptr + out, value, mask=rows < M)
        tl.store(indices_ptr + out, index, mask=rows < M)
        keys = tl.where(keys == best[:, None], -9223372036854775807, keys)


def topk(x: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The k largest of each row of x [..., W]: values [..., k] in x's dtype and indices [..., k] int64, largest first.

    Exact. Equal numbers come in ascending order of their indices; NaN counts as the greatest. Rows wider than any
    router's, or of float64, go to `nondet.kernels.experts.topk`, which has the same order.
    """
    width = x.shape[-1]
    if x.dtype not in _DTYPES or width > _MAX_EXPERTS or k > _MAX_TOP:
        return ordered_topk.topk(x, k)
    require("topk", _DTYPES, x)
    rows = x.reshape(x.shape[:-1].numel(), width)
    values = torch.empty(*x.shape[:-1], k, device=x.device, dtype=x.dtype)
    indices = torch.empty(*x.shape[:-1], k, device=x.device, dtype=torch.int64)
    if values.numel() == 0:
        return values, indices
    block = triton.next_power_of_2(width)
    together = max(1, 512 // block)
    note(f"routing_topk[{together}x{block}]")
    with on_device(x):
        _topk_kernel[(triton.cdiv(rows.shape[0], together),)](
            rows, values, indices, rows.shape[0], width, k, *rows.stride(), ROWS=together, BLOCK=block, num_warps=4
        )
    return values, indices


@triton.jit
def _sum_middle_kernel(x_ptr, out_ptr, R, C, stride_a, stride_r, stride_c, BLOCK: tl.constexpr, ACC: tl.constexpr):
    a = tl.program_id(0).to(tl.int64)
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = cols < C
    x_ptrs = x_ptr + a * stride_a + cols.to(tl.int64) * stride_c
    total = tl.zeros((BLOCK,), dtype=ACC)
    for _ in range(R):
        total += tl.load(x_ptrs, mask=inside, other=0.0).to(ACC)
        x_ptrs += stride_r
    tl.store(out_ptr + a * C + cols, total.to(out_ptr.dtype.element_ty), mask=inside)


def sum_middle(x: torch.Tensor) -> torch.Tensor:
    """Over the middle axis of x [A, R, C] -> [A, C]: a token's experts, weighted, in the order of their rank.

    Accumulated in float32, from the first to the last of R, rounded once. A row depends on its own numbers alone.

    Raises:
        NotImplementedError: a device or dtype without a kernel.
        ValueError: not three axes.
    """
    if x.ndim != 3:
        raise ValueError(f"sum_middle takes [A, R, C], got {tuple(x.shape)}")
    require("sum_middle", _DTYPES, x)
    first, between, columns = x.shape
    out = torch.empty(first, columns, device=x.device, dtype=x.dtype)
    if out.numel() == 0:
        return out
    block = min(1024, triton.next_power_of_2(columns))
    note(f"routing_sum[{block}]")
    with on_device(x):
        _sum_middle_kernel[(first, triton.cdiv(columns, block))](
            x, out, between, columns, *x.stride(), BLOCK=block, ACC=accumulator(x.dtype), num_warps=4
        )
    return out


@triton.jit(do_not_specialize=["n"])
def _index_add_kernel(
    target_ptr,
    row_ptr,
    order_ptr,
    source_ptr,
    n,
    R,
    C,
    alpha,
    stride_tr,
    stride_tc,
    stride_sr,
    stride_sc,
    BLOCK: tl.constexpr,
    ACC: tl.constexpr,
):
    """row_ptr [n] ascends; the program of a row's first entry adds all of them, one after the other."""
    place = tl.program_id(0)
    row = tl.load(row_ptr + place)
    tl.device_assert((row >= 0) & (row < R), "index_add_: an index outside of the target")
    before = tl.load(row_ptr + place - 1, mask=place > 0, other=-1)
    if row != before:
        cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        inside = cols < C
        targets = target_ptr + row * stride_tr + cols.to(tl.int64) * stride_tc
        total = tl.load(targets, mask=inside, other=0.0).to(ACC)
        more = place < n
        while more:
            source = tl.load(order_ptr + place)
            sources = source_ptr + source * stride_sr + cols.to(tl.int64) * stride_sc
            total += tl.load(sources, mask=inside, other=0.0).to(ACC) * alpha
            place += 1
            more = tl.load(row_ptr + place, mask=place < n, other=-1) == row
        tl.store(targets, total.to(target_ptr.dtype.element_ty), mask=inside)


def index_add_(target: torch.Tensor, index: torch.Tensor, source: torch.Tensor, alpha: float = 1.0) -> torch.Tensor:
    """target [R, C], in place, with alpha times source [n, C] added to its rows index [n]; any strides.

    A row's additions follow the order of `index`, onto the row's own number, in float32; rounded once. So a row depends
    on what is added to it, in that order, and on nothing else. A row named very often makes one program add for long.

    Raises:
        NotImplementedError: a device or dtype without a kernel.
        ValueError: shapes that do not fit.
    """
    if target.ndim != 2 or index.ndim != 1 or source.shape != (index.shape[0], target.shape[1]):
        raise ValueError(
            f"index_add_ takes [R, C], [n] and [n, C], got {tuple(target.shape)}, {tuple(index.shape)} and "
            f"{tuple(source.shape)}"
        )
    require("index_add_", _DTYPES, target, source)
    if source.numel() == 0:
        return target
    row, order = torch.sort(index.to(torch.int64), stable=True)
    columns = target.shape[1]
    block = min(1024, triton.next_power_of_2(columns))
    note(f"routing_index_add[{block}]")
    with on_device(target):
        _index_add_kernel[(index.shape[0], triton.cdiv(columns, block))](
            target,
            row,
            order,
            source,
            index.shape[0],
            target.shape[0],
            columns,
            float(alpha),
            *target.stride(),
            *source.stride(),
            BLOCK=block,
            ACC=accumulator(target.dtype),
            num_warps=4,
            enable_fp_fusion=False,
            debug=True,
        )
    return target
