"""Operators over the last axis on CUDA: sum, mean, softmax, log_softmax and RMSNorm, invariant by a written-out order.

The order of every sum here is in the source, not in the compiler's layout: with BLOCK a power of two fixed by the width
alone,

  1. lane j adds elements j, j + BLOCK, j + 2 BLOCK, ... in that order, one addition each, starting from zero;
  2. neighbouring lanes are added, 2j to 2j + 1, again and again until one is left.

A step of either kind adds exactly two numbers, and floating addition commutes, so neither the number of rows, nor the
row's place, its alignment or strides, nor the number of warps or of rows in a program can change a bit: they decide who
adds, never what is added to what. (`tl.sum` over a whole block would leave the order to the layout, which follows the
alignment of the pointer.) Maxima are exact in any order. Multiplications are not contracted into additions
(enable_fp_fusion=False), which leaves the rounding to the source too.

Sums are kept in float32, in float64 for float64; results are rounded once, to the input's dtype. Forward only.
"""

# Triton reads a kernel's annotations itself: only tl.constexpr may stand there.
# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from nondet.kernels.launch import note
from nondet.kernels.triton_common import accumulator, on_device, require

__all__ = ["log_softmax", "mean", "rms_norm", "softmax", "sum"]

_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_MAX_BLOCK = 4096


@triton.jit
def _add_lanes(x, ROWS: tl.constexpr, BLOCK: tl.constexpr, LEVELS: tl.constexpr):
    """x [ROWS, BLOCK] -> [ROWS, 1]: neighbours are added, again and again; a thread's own lanes come first that way."""
    for level in tl.static_range(LEVELS):
        x = tl.sum(tl.reshape(x, (ROWS, BLOCK >> (level + 1), 2)), axis=2)
    return x


@triton.jit
def _tile(x_ptr, start, WIDTH, stride_row, stride_col, M, ROWS: tl.constexpr, BLOCK: tl.constexpr, OTHER: tl.constexpr):
    """Elements start ... start + BLOCK of this program's rows, OTHER beyond the end; the last row for rows beyond M."""
    rows = tl.minimum(tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS), M - 1)
    cols = start + tl.arange(0, BLOCK)
    inside = cols[None, :] < WIDTH
    return tl.load(x_ptr + rows[:, None] * stride_row + cols[None, :] * stride_col, mask=inside, other=OTHER)


@triton.jit
def _store(out_ptr, values, start, WIDTH, M, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """Write [ROWS, BLOCK] at `start` of this program's rows of the contiguous [M, WIDTH] result."""
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    cols = start + tl.arange(0, BLOCK)
    inside = (rows[:, None] < M) & (cols[None, :] < WIDTH)
    tl.store(out_ptr + rows[:, None] * WIDTH + cols[None, :], values.to(out_ptr.dtype.element_ty), mask=inside)


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
    BLOCK: tl.constexpr,
    LEVELS: tl.constexpr,
    ACC: tl.constexpr,
):
    lanes = tl.zeros((ROWS, BLOCK), dtype=ACC)
    for start in range(0, WIDTH, BLOCK):
        lanes += _tile(x_ptr, start, WIDTH, stride_row, stride_col, M, ROWS, BLOCK, 0.0).to(ACC)
    total = _add_lanes(lanes, ROWS, BLOCK, LEVELS)
    if MEAN:
        total = total / WIDTH
    _store(out_ptr, total, 0, 1, M, ROWS, 1)


@triton.jit(do_not_specialize=["M"])
def _softmax_kernel(
    x_ptr,
    out_ptr,
    M,
    WIDTH,
    stride_row,
    stride_col,
    LOG: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    LEVELS: tl.constexpr,
    ACC: tl.constexpr,
):
    NEG: tl.constexpr = float("-inf")
    highest = tl.full((ROWS, BLOCK), NEG, dtype=ACC)
    for start in range(0, WIDTH, BLOCK):
        highest = tl.maximum(highest, _tile(x_ptr, start, WIDTH, stride_row, stride_col, M, ROWS, BLOCK, NEG).to(ACC))
    top = tl.max(highest, axis=1)[:, None]
    # Exponents of -inf beyond the end are 0. A row of nothing but -inf gives NaN, as it does in PyTorch; there the
    # lanes beyond the end are NaN as well, and so is the sum.
    lanes = tl.zeros((ROWS, BLOCK), dtype=ACC)
    for start in range(0, WIDTH, BLOCK):
        lanes += tl.exp(_tile(x_ptr, start, WIDTH, stride_row, stride_col, M, ROWS, BLOCK, NEG).to(ACC) - top)
    total = _add_lanes(lanes, ROWS, BLOCK, LEVELS)
    log_total = tl.log(total)
    for start in range(0, WIDTH, BLOCK):
        shifted = _tile(x_ptr, start, WIDTH, stride_row, stride_col, M, ROWS, BLOCK, NEG).to(ACC) - top
        if LOG:
            _store(out_ptr, shifted - log_total, start, WIDTH, M, ROWS, BLOCK)
        else:
            _store(out_ptr, tl.exp(shifted) / total, start, WIDTH, M, ROWS, BLOCK)


@triton.jit(do_not_specialize=["M"])
def _rms_norm_kernel(
    x_ptr,
    weight_ptr,
    out_ptr,
    M,
    WIDTH,
    stride_row,
    stride_col,
    EPS: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    LEVELS: tl.constexpr,
    ACC: tl.constexpr,
):
    lanes = tl.zeros((ROWS, BLOCK), dtype=ACC)
    for start in range(0, WIDTH, BLOCK):
        x = _tile(x_ptr, start, WIDTH, stride_row, stride_col, M, ROWS, BLOCK, 0.0).to(ACC)
        lanes += x * x
    scale = tl.rsqrt(_add_lanes(lanes, ROWS, BLOCK, LEVELS) / WIDTH + EPS)
    for start in range(0, WIDTH, BLOCK):
        x = _tile(x_ptr, start, WIDTH, stride_row, stride_col, M, ROWS, BLOCK, 0.0).to(ACC)
        cols = start + tl.arange(0, BLOCK)[None, :]
        weight = tl.load(weight_ptr + cols, mask=cols < WIDTH, other=0.0).to(ACC)
        _store(out_ptr, x * scale * weight, start, WIDTH, M, ROWS, BLOCK)


def _launch(kernel: Any, name: str, x: torch.Tensor, out: torch.Tensor, *tensors: torch.Tensor, **extra: Any) -> None:
    """Launch over all rows of x. Block, rows a program and warps follow the width alone."""
    width = x.shape[-1]
    rows = x.reshape(x.shape[:-1].numel(), width)  # a view where there is one, a copy where there is none
    block = min(_MAX_BLOCK, triton.next_power_of_2(max(width, 1)))
    together = max(1, 1024 // block)
    m = rows.shape[0]
    note(f"{name}[{together}x{block}]")
    with on_device(x):
        kernel[(triton.cdiv(m, together),)](
            rows,
            *tensors,
            out,
            m,
            width,
            *rows.stride(),
            **extra,
            ROWS=together,
            BLOCK=block,
            LEVELS=block.bit_length() - 1,
            ACC=accumulator(x.dtype),
            num_warps=4 if block < _MAX_BLOCK else 8,
            enable_fp_fusion=False,
        )


def _reduce(name: str, x: torch.Tensor, *, mean: bool) -> torch.Tensor:
    if x.ndim < 1:
        raise ValueError(f"{name} takes [..., K], got a scalar")
    require(name, _DTYPES, x)
    out = torch.empty(x.shape[:-1], device=x.device, dtype=x.dtype)
    if out.numel():
        _launch(_sum_kernel, f"{name}_rows", x, out, MEAN=mean)
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


def _softmax(name: str, x: torch.Tensor, *, log: bool) -> torch.Tensor:
    if x.ndim < 1:
        raise ValueError(f"{name} takes [..., V], got a scalar")
    require(name, _DTYPES, x)
    out = torch.empty(x.shape, device=x.device, dtype=x.dtype)
    if out.numel():
        _launch(_softmax_kernel, f"{name}_rows", x, out, LOG=log)
    return out


def softmax(x: torch.Tensor) -> torch.Tensor:
    """Over the last axis of x [..., V] -> [..., V]: exp(x - max) over its sum, in the module's order.

    The maximum is exact, so the exponents are those of the row alone. exp is the hardware's (ex2.approx for float32,
    about 2 ULP), the same instruction for every element.

    Raises:
        NotImplementedError: a device or dtype without a kernel.
    """
    return _softmax("softmax", x, log=False)


def log_softmax(x: torch.Tensor) -> torch.Tensor:
    """Over the last axis of x [..., V] -> [..., V]: x - max - log(sum of exp(x - max)), in the module's order.

    Raises:
        NotImplementedError: a device or dtype without a kernel.
    """
    return _softmax("log_softmax", x, log=True)


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
    if x.ndim < 1 or weight.shape != x.shape[-1:] or weight.device != x.device:
        raise ValueError(
            f"rms_norm takes [..., H] and [H] on one device, got {tuple(x.shape)} and {tuple(weight.shape)}"
        )
    require("rms_norm", _DTYPES, x)
    require("rms_norm", _DTYPES, weight)
    out = torch.empty(x.shape, device=x.device, dtype=x.dtype)
    if out.numel():
        _launch(_rms_norm_kernel, "rms_norm_rows", x, out, weight.contiguous(), EPS=eps)
    return out
