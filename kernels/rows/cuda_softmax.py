"""softmax, log_softmax, logsumexp and cross-entropy on CUDA, invariant over rows by a written-out order.

A row is cut into the chunks of `nondet.kernels.rows.cuda_parts` (one, up to a width of 16384). With T the trees of
that module, the class "lanes", m_c the exact maximum of chunk c and M that of the row:

    s_c = T over the chunk of exp(x - m_c)        S = T over chunks of s_c * exp(m_c - M)

    softmax = exp(x - M) * (1 / S)       log_softmax = (x - M) - log(S)
    logsumexp = log(S) + M               loss at target t = -((x[t] - M) - log(S))

where an infinite maximum is replaced by 0 as a subtrahend in s_c, S and logsumexp, so that a row of nothing but -inf
has S = 0. This follows from the width alone. exp is the hardware's (ex2.approx for float32, about 2 ULP of its
argument; subnormal results are 0), the same for every element.

Which launch computes a row is a matter of speed, not of bits: a row of one chunk is read once and held in registers. So
is a wider one, of many in half precision on Hopper, by warps that exchange the pairs (m_c, s_c) of their chunks
(`nondet.kernels.rows.cuda_softmax_held`). Another wide row is read twice, the second time from the cache. If all rows
fit there, one launch makes the pairs, another merges each row's pairs and writes the result. Otherwise one launch does
both, with the second reading of a row some megabytes behind the first.
"""

# Triton reads a kernel's annotations itself: only tl.constexpr may stand there.
# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from nondet.core.launch import note
from nondet.kernels.rows.cuda_parts import DTYPES, Plan, as_rows, load_tile, plan, store_tile
from nondet.kernels.rows.cuda_softmax_held import held, takes
from nondet.kernels.rows.cuda_softmax_parts import (
    normalized,
    one_each,
    one_each_merge_kernel,
    pairs_kernel,
    results_kernel,
    sum_exp,
    turns_kernel,
)
from nondet.kernels.triton_common import accumulator, on_device, require

__all__ = ["cross_entropy", "log_softmax", "logsumexp", "softmax"]

_CACHED_BYTES = 24 * 2**20  # read again from the L2 cache (50 to 60 MB on Hopper, half of it near) in a second launch
_LAG_BYTES = 12 * 2**20  # between the two readings in one launch: more than all programs at work hold at once
_EACH = 2  # chunks of a program in one launch: the second is on its way while the first is computed


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
    SPAN: tl.constexpr,
    HALVES: tl.constexpr,
    LEVELS: tl.constexpr,
    ACC: tl.constexpr,
):
    first = tl.program_id(0) * ROWS
    x = load_tile(x_ptr, first, 0, WIDTH, stride_row, stride_col, M, ROWS, SPAN, float("-inf")).to(ACC)
    top = tl.max(x, axis=1)[:, None]
    total = sum_exp(x, top, ROWS, SPAN, HALVES, LEVELS)
    store_tile(out_ptr, normalized(x, top, total, LOG), first, 0, WIDTH, WIDTH, M, ROWS, SPAN)


@triton.jit(do_not_specialize=["M", "IGNORE"])
def _one_each_kernel(
    x_ptr,
    target_ptr,
    out_ptr,
    M,
    WIDTH,
    stride_row,
    stride_col,
    IGNORE,
    LOSS: tl.constexpr,
    ROWS: tl.constexpr,
    SPAN: tl.constexpr,
    HALVES: tl.constexpr,
    LEVELS: tl.constexpr,
    ACC: tl.constexpr,
):
    first = tl.program_id(0) * ROWS
    rows = (first.to(tl.int64) + tl.arange(0, ROWS))[:, None]
    x = load_tile(x_ptr, first, 0, WIDTH, stride_row, stride_col, M, ROWS, SPAN, float("-inf")).to(ACC)
    top = tl.max(x, axis=1)[:, None]
    total = sum_exp(x, top, ROWS, SPAN, HALVES, LEVELS)
    out = one_each(x_ptr, target_ptr, rows, top, total, WIDTH, IGNORE, stride_row, stride_col, M, LOSS)
    store_tile(out_ptr, out, first, 0, 1, 1, M, ROWS, 1)


def _pairs(rows: torch.Tensor, how: Plan) -> tuple[torch.Tensor, torch.Tensor]:
    """Launch the making of the pairs (m_c, s_c) of rows [M, V]: two of [M, chunks] in the accumulator's dtype."""
    m, width = rows.shape
    tops, sums = _empty_pairs(rows, how)
    pairs_kernel[(m * how.chunks,)](
        *(rows, tops, sums, m, width, *rows.stride(), how.chunks),
        **how.tree(),
        ACC=accumulator(rows.dtype),
        num_warps=how.few[1],
        enable_fp_fusion=False,
    )
    return tops, sums


def _empty_pairs(rows: torch.Tensor, how: Plan) -> tuple[torch.Tensor, torch.Tensor]:
    wide = torch.float64 if rows.dtype == torch.float64 else torch.float32
    tops, sums = torch.empty((2, rows.shape[0], how.chunks), device=rows.device, dtype=wide)
    return tops, sums


def _wide(rows: torch.Tensor, out: torch.Tensor, how: Plan, *, log: bool, at_once: bool) -> None:
    """Launch for rows [M, V] of several chunks: two launches, or one that does both."""
    m, width = rows.shape
    extra: dict[str, Any] = {"LOG": log, "ACC": accumulator(rows.dtype), "num_warps": how.few[1]}
    if at_once:
        lag = min(m, triton.cdiv(_LAG_BYTES, width * rows.element_size()))
        made = torch.zeros(m + 1, device=rows.device, dtype=torch.int32)  # the last counts programs as they start
        turns_kernel[(2 * (m + lag) * triton.cdiv(how.chunks, _EACH),)](
            *(rows, out, *_empty_pairs(rows, how), made, m, width, *rows.stride(), how.chunks, lag),
            **how.tree(),
            **how.merging(),
            **extra,
            EACH=_EACH,
            enable_fp_fusion=False,
        )
        return
    results_kernel[(m * how.chunks,)](
        *(rows, out, *_pairs(rows, how), m, width, *rows.stride(), how.chunks),
        SPAN=how.span,
        **how.merging(),
        **extra,
        enable_fp_fusion=False,
    )


def _softmax(name: str, x: torch.Tensor, *, log: bool, at_once: bool | None = None) -> torch.Tensor:
    """`at_once` chooses the launch for rows of several chunks; None for what the size suggests."""
    if x.ndim < 1:
        raise ValueError(f"{name} takes [..., V], got a scalar")
    require(name, DTYPES, x)
    out = torch.empty(x.shape, device=x.device, dtype=x.dtype)
    if not out.numel():
        return out
    rows = as_rows(x)
    m, width = rows.shape
    how = plan(width, x.element_size())
    with on_device(x):
        if how.chunks > 1:
            if at_once is None and takes(rows, how):
                note(f"{name}_rows[{how.chunks}x{how.span} held]")
                held(rows, out, how, log=log)
                return out
            if at_once is None:
                at_once = m * width * x.element_size() > _CACHED_BYTES
            note(f"{name}_rows[{how.chunks}x{how.span}{' at once' if at_once else ''}]")
            _wide(rows, out, how, log=log, at_once=at_once)
            return out
        together, warps = how.rows_and_warps(m)
        note(f"{name}_rows[{how.span}]")
        _softmax_kernel[(triton.cdiv(m, together),)](
            *(rows, out, m, width, *rows.stride()),
            LOG=log,
            ROWS=together,
            **how.tree(),
            ACC=accumulator(x.dtype),
            num_warps=warps,
            enable_fp_fusion=False,
        )
    return out


def _one_each(name: str, x: torch.Tensor, target: torch.Tensor | None, ignore: int) -> torch.Tensor:
    """One number for each row of x [..., V], V > 0, contiguous targets [...] or None."""
    require(name, DTYPES, x)
    out = torch.empty(x.shape[:-1], device=x.device, dtype=x.dtype)
    if not out.numel():
        return out
    rows = as_rows(x)
    m, width = rows.shape
    how = plan(width, x.element_size())
    place: tuple[Any, ...] = (m, width, *rows.stride())
    other = rows if target is None else target  # any pointer will do where none is read
    with on_device(x):
        if how.chunks > 1:
            note(f"{name}_rows[{how.chunks}x{how.span}]")
            tops, sums = _pairs(rows, how)
            one_each_merge_kernel[(m,)](
                *(rows, other, tops, sums, out, *place, how.chunks, ignore),
                LOSS=target is not None,
                **how.merging(),
                num_warps=1,
                enable_fp_fusion=False,
            )
            return out
        together, warps = how.rows_and_warps(m)
        note(f"{name}_rows[{how.span}]")
        _one_each_kernel[(triton.cdiv(m, together),)](
            *(rows, other, out, *place, ignore),
            LOSS=target is not None,
            ROWS=together,
            **how.tree(),
            ACC=accumulator(x.dtype),
            num_warps=warps,
            enable_fp_fusion=False,
        )
    return out


def softmax(x: torch.Tensor) -> torch.Tensor:
    """Over the last axis of x [..., V] -> [..., V]: exp(x - max) over its sum, in the module's order.

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


def logsumexp(x: torch.Tensor) -> torch.Tensor:
    """Over the last axis of x [..., V] -> [...]: max + log(sum of exp(x - max)); -inf for nothing but -inf.

    Raises:
        NotImplementedError: a device or dtype without a kernel.
        ValueError: a scalar.
    """
    if x.ndim < 1:
        raise ValueError("logsumexp takes [..., V], got a scalar")
    if not x.shape[-1]:
        require("logsumexp", DTYPES, x)
        return torch.full(x.shape[:-1], -torch.inf, device=x.device, dtype=x.dtype)
    return _one_each("logsumexp", x, None, 0)


def cross_entropy(x: torch.Tensor, target: torch.Tensor, ignore_index: int = -100) -> torch.Tensor:
    """Losses of logits x [..., V] for targets [...] of integers -> [...] in x's dtype, not reduced.

    Bit for bit -log_softmax(x) at the target, without writing the rest of it. 0 where the target is `ignore_index`, and
    NaN where it is no column otherwise: a kernel can't raise.

    Raises:
        NotImplementedError: a device or dtype without a kernel.
        ValueError: targets of another shape, device or kind; no columns.
    """
    if x.ndim < 1 or target.shape != x.shape[:-1] or target.device != x.device:
        raise ValueError(
            f"cross_entropy takes [..., V] and [...] on one device, got {tuple(x.shape)} and {tuple(target.shape)}"
        )
    if target.dtype not in (torch.int64, torch.int32):
        raise ValueError(f"cross_entropy takes targets in int64 or int32, got {target.dtype}")
    if not x.shape[-1]:
        raise ValueError("cross_entropy takes at least one column, got none")
    return _one_each("cross_entropy", x, target.contiguous(), ignore_index)
