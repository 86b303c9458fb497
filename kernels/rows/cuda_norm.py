"""RMSNorm on CUDA, also with the residual's addition before it: one pass over memory, invariant over rows.

The mean of squares is added up in the order of `nondet.kernels.rows.cuda_parts`, which follows from the width alone;
everything else is elementwise. A row of at most 16384 elements is read once and held in registers; the squares of a
wider one are added up in chunks first, by as many programs. Forward only.
"""

# Triton reads a kernel's annotations itself: only tl.constexpr may stand there.
# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

import torch
import triton
import triton.language as tl

from nondet.core.launch import note
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
from nondet.kernels.triton_common import accumulator, on_device, require

__all__ = ["rms_norm", "rms_norm_residual"]

_MANY = 1024  # rows from which bandwidth counts for more than latency


@triton.jit(do_not_specialize=["M"])
def _rms_norm_kernel(
    x_ptr,
    residual_ptr,
    weight_ptr,
    out_ptr,
    added_ptr,
    M,
    WIDTH,
    stride_row,
    stride_col,
    stride_residual_row,
    stride_residual_col,
    EPS: tl.constexpr,
    RESIDUAL: tl.constexpr,
    EARLY: tl.constexpr,
    ROWS: tl.constexpr,
    SPAN: tl.constexpr,
    HALVES: tl.constexpr,
    LEVELS: tl.constexpr,
    ACC: tl.constexpr,
):
    first = tl.program_id(0) * ROWS
    cols = tl.arange(0, SPAN)[None, :]
    if EARLY:  # before the row is waited for: sooner done, but in registers that could hold other programs
        weight = tl.load(weight_ptr + cols, mask=cols < WIDTH, other=0.0)
    x = load_tile(x_ptr, first, 0, WIDTH, stride_row, stride_col, M, ROWS, SPAN, 0.0)
    if RESIDUAL:
        residual = load_tile(
            residual_ptr, first, 0, WIDTH, stride_residual_row, stride_residual_col, M, ROWS, SPAN, 0.0
        )
        # rounded as torch's addition rounds, and normalized as rounded
        x = (x.to(ACC) + residual.to(ACC)).to(x.dtype)
        store_tile(added_ptr, x, first, 0, WIDTH, WIDTH, M, ROWS, SPAN)
    wide = x.to(ACC)
    total = add_tree(wide * wide, ROWS, SPAN, HALVES, LEVELS)
    if not EARLY:
        weight = tl.load(weight_ptr + cols, mask=cols < WIDTH, other=0.0)
    out = wide * tl.rsqrt(total / WIDTH + EPS) * weight.to(ACC)
    store_tile(out_ptr, out, first, 0, WIDTH, WIDTH, M, ROWS, SPAN)


@triton.jit(do_not_specialize=["M"])
def _scale_kernel(
    x_ptr,
    parts_ptr,
    weight_ptr,
    out_ptr,
    M,
    WIDTH,
    stride_row,
    stride_col,
    CHUNKS,
    EPS: tl.constexpr,
    SPAN: tl.constexpr,
    MERGE: tl.constexpr,
    MERGE_LEVELS: tl.constexpr,
    ACC: tl.constexpr,
):
    row = tl.program_id(0) // CHUNKS
    start = tl.program_id(0) % CHUNKS * SPAN
    cols = start + tl.arange(0, SPAN)[None, :]
    x = load_tile(x_ptr, row, start, WIDTH, stride_row, stride_col, M, 1, SPAN, 0.0).to(ACC)
    weight = tl.load(weight_ptr + cols, mask=cols < WIDTH, other=0.0).to(ACC)
    total = merged_sum(parts_ptr, row, CHUNKS, MERGE, MERGE_LEVELS)
    store_tile(out_ptr, x * tl.rsqrt(total / WIDTH + EPS) * weight, row, start, WIDTH, WIDTH, M, 1, SPAN)


def _checked(name: str, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """The weight, contiguous.

    Raises:
        NotImplementedError: a device or dtype without a kernel.
        ValueError: a weight of another shape or device.
    """
    if x.ndim < 1 or weight.shape != x.shape[-1:] or weight.device != x.device:
        raise ValueError(f"{name} takes [..., H] and [H] on one device, got {tuple(x.shape)} and {tuple(weight.shape)}")
    require(name, DTYPES, x)
    require(name, DTYPES, weight)
    return weight.contiguous()


def _norm(
    name: str, x: torch.Tensor, residual: torch.Tensor | None, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """The normalized tensor, and what was normalized: x itself, or x + residual."""
    weight = _checked(name, x, weight)
    out = torch.empty(x.shape, device=x.device, dtype=x.dtype)
    if not out.numel():
        return out, out if residual is None else torch.empty_like(out)
    width = x.shape[-1]
    how = plan(width, x.element_size())
    if how.chunks > 1:
        added = x if residual is None else x + residual
        rows = as_rows(added)
        m = rows.shape[0]
        note(f"{name}_rows[{how.chunks}x{how.span}]")
        with on_device(x):
            parts = sum_parts(rows, how, square=True)
            _scale_kernel[(m * how.chunks,)](
                rows,
                parts,
                weight,
                out,
                m,
                width,
                *rows.stride(),
                how.chunks,
                EPS=eps,
                SPAN=how.span,
                **how.merging(),
                ACC=accumulator(x.dtype),
                num_warps=8,
                enable_fp_fusion=False,
            )
        return out, added
    rows = as_rows(x)
    other = rows if residual is None else as_rows(residual)
    added = x if residual is None else torch.empty(x.shape, device=x.device, dtype=x.dtype)
    m = rows.shape[0]
    together, warps = how.rows_and_warps(m)
    note(f"{name}_rows[{how.span}]")
    with on_device(x):
        _rms_norm_kernel[(triton.cdiv(m, together),)](
            rows,
            other,
            weight,
            out,
            added,
            m,
            width,
            *rows.stride(),
            *other.stride(),
            EPS=eps,
            RESIDUAL=residual is not None,
            EARLY=m < _MANY or (how.span >= 4096 and 4 * width > 3 * how.span),
            ROWS=together,
            **how.tree(),
            ACC=accumulator(x.dtype),
            num_warps=warps,
            enable_fp_fusion=False,
        )
    return out, added


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float = 1e-6) -> torch.Tensor:
    """x [..., H] * rsqrt(mean(x^2) + eps) * weight [H] -> [..., H] in x's dtype.

    All of it in float32, rounded once at the end. transformers' own RMSNorm modules round twice: they cast
    x * rsqrt(...) to the input's dtype before multiplying by the weight. So in half precision results differ from
    theirs by up to about one ULP; neither depends on the batch.

    Args:
        weight: [H], of any floating dtype on x's device.

    Raises:
        NotImplementedError: a device or dtype without a kernel.
        ValueError: a weight of another shape or device.
    """
    return _norm("rms_norm", x, None, weight, eps)[0]


def rms_norm_residual(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float = 1e-6
) -> tuple[torch.Tensor, torch.Tensor]:
    """The pair that a decoder layer needs: (rms_norm(x + residual, weight, eps), x + residual), both [..., H].

    Bit for bit the two operators one after the other: the sum is rounded to x's dtype, as torch rounds it, and what is
    normalized is the rounded sum. One pass: two reads and two writes an element.

    Args:
        residual: As x, in shape, dtype and device; strides are its own.
        weight: [H], of any floating dtype on x's device.

    Raises:
        NotImplementedError: a device or dtype without a kernel.
        ValueError: shapes, dtypes or devices that do not fit.
    """
    if residual.shape != x.shape:
        raise ValueError(f"rms_norm_residual takes two of one shape, got {tuple(x.shape)} and {tuple(residual.shape)}")
    require("rms_norm_residual", DTYPES, x, residual)
    return _norm("rms_norm_residual", x, residual, weight, eps)
