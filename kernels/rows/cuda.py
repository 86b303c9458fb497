"""Operators over the last axis on CUDA, invariant by a written-out order: sum, mean, and by name softmax and RMSNorm.

The order of every sum is that of `nondet.kernels.rows.cuda_parts`, the class "lanes", which follows from the width
alone. A row of at most 16384 elements is read once and held in registers; a wider one is cut into chunks for as many
programs, whose results a second launch adds up.

Results are rounded once, to the input's dtype. Forward only.
"""

# Triton reads a kernel's annotations itself: only tl.constexpr may stand there.
# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

import torch
import triton
import triton.language as tl

from nondet.core.launch import note
from nondet.kernels.rows.cuda_norm import rms_norm, rms_norm_residual
from nondet.kernels.rows.cuda_parts import (
    DTYPES,
    add_tree,
    as_rows,
    load_tile,
    merged_sum,
    plan,
    store_tile,
    sum_parts,
)
from nondet.kernels.rows.cuda_softmax import cross_entropy, log_softmax, logsumexp, softmax
from nondet.kernels.triton_common import accumulator, on_device, require

__all__ = [
    "cross_entropy",
    "log_softmax",
    "logsumexp",
    "mean",
    "rms_norm",
    "rms_norm_residual",
    "softmax",
    "sum",
]


@triton.jit(do_not_specialize=["M"])
def _sum_kernel(
    x_ptr,
    out_ptr,
    M,
    WIDTH,
    stride_row,
    stride_col,
    MEAN: tl.constexpr,
    ROWS: tl.constexpr,
    SPAN: tl.constexpr,
    HALVES: tl.constexpr,
    LEVELS: tl.constexpr,
    ACC: tl.constexpr,
):
    first = tl.program_id(0) * ROWS
    x = load_tile(x_ptr, first, 0, WIDTH, stride_row, stride_col, M, ROWS, SPAN, 0.0).to(ACC)
    total = add_tree(x, ROWS, SPAN, HALVES, LEVELS)
    if MEAN:
        total = total / WIDTH
    store_tile(out_ptr, total, first, 0, 1, 1, M, ROWS, 1)


@triton.jit(do_not_specialize=["M"])
def _sum_merge_kernel(
    parts_ptr, out_ptr, M, WIDTH, CHUNKS, MEAN: tl.constexpr, MERGE: tl.constexpr, MERGE_LEVELS: tl.constexpr
):
    row = tl.program_id(0)
    total = merged_sum(parts_ptr, row, CHUNKS, MERGE, MERGE_LEVELS)
    if MEAN:
        total = total / WIDTH
    store_tile(out_ptr, tl.full((1, 1), total, total.dtype), row, 0, 1, 1, M, 1, 1)


def _reduce(name: str, x: torch.Tensor, *, mean: bool) -> torch.Tensor:
    if x.ndim < 1:
        raise ValueError(f"{name} takes [..., K], got a scalar")
    require(name, DTYPES, x)
    out = torch.empty(x.shape[:-1], device=x.device, dtype=x.dtype)
    if not out.numel():
        return out
    rows = as_rows(x)
    m, width = rows.shape
    how = plan(width, x.element_size())
    with on_device(x):
        if how.chunks > 1:
            note(f"{name}_rows[{how.chunks}x{how.span}]")
            parts = sum_parts(rows, how, square=False)
            _sum_merge_kernel[(m,)](
                parts, out, m, width, how.chunks, MEAN=mean, **how.merging(), num_warps=1, enable_fp_fusion=False
            )
            return out
        together, warps = how.rows_and_warps(m)
        note(f"{name}_rows[{how.span}]")
        _sum_kernel[(triton.cdiv(m, together),)](
            rows,
            out,
            m,
            width,
            *rows.stride(),
            MEAN=mean,
            ROWS=together,
            **how.tree(),
            ACC=accumulator(x.dtype),
            num_warps=warps,
            enable_fp_fusion=False,
        )
    return out


def sum(x: torch.Tensor) -> torch.Tensor:
    """Over the last axis of x [..., K] -> [...]; any width, any strides. Order and invariance as the module says.

    Raises:
        NotImplementedError: a device or dtype without a kernel.
    """
    return _reduce("sum", x, mean=False)


def mean(x: torch.Tensor) -> torch.Tensor:
    """`sum`, divided by K before the one rounding: x [..., K] -> [...].

    Raises:
        NotImplementedError: a device or dtype without a kernel.
    """
    return _reduce("mean", x, mean=True)
