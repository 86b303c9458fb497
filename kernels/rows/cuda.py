"""Operators over the last axis on CUDA, invariant by an explicit order: sum, mean and norms, transformers' modules too.

The order of every sum is that of `nondet.kernels.rows.cuda_softmax`, the class "lanes", which depends only on the
width. A row of at most 16384 elements is read once and held in registers; a wider one is cut into chunks, one per
program, and a second launch adds up their results. Results are rounded once, to the input's dtype. Forward only.
NotImplementedError: a device or dtype without a kernel; ValueError: tensors whose shapes, dtypes or devices do not fit.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from nondet.core.launch import note
from nondet.kernels.rows.cuda_softmax import (
    DTYPES,
    add_tree,
    as_rows,
    load_tile,
    merged_sum,
    plan,
    reciprocal_root,
    store_tile,
    sum_parts,
)
from nondet.kernels.rows.cuda_softmax import cross_entropy as cross_entropy
from nondet.kernels.rows.cuda_softmax import log_softmax as log_softmax
from nondet.kernels.rows.cuda_softmax import logsumexp as logsumexp
from nondet.kernels.rows.cuda_softmax import softmax as softmax
from nondet.kernels.triton_common import Step, accumulator, again, on_device, remember, require

# RMSNorm, also with the residual's addition before it, in one pass over memory. A mean of squares is added up in the
# class's order; everything else is elementwise.

# Triton reads a kernel's annotations itself and allows only tl.constexpr.
# mypy: allow-untyped-defs, allow-incomplete-defs

_MANY = 1024  # rows from which bandwidth matters more than latency


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
    HEADS: tl.constexpr,
    EARLY: tl.constexpr,
    ROWS: tl.constexpr,
    SPAN: tl.constexpr,
    HALVES: tl.constexpr,
    LEVELS: tl.constexpr,
    ACC: tl.constexpr,
):
    first = tl.program_id(0) * ROWS
    cols = tl.arange(0, SPAN)[None, :]
    if EARLY:  # before the wait for the row: faster, but in registers that could hold other programs
        weight = tl.load(weight_ptr + cols, mask=cols < WIDTH, other=0.0)
    if HEADS:  # this many rows `stride_row` apart in each block of a residual's row distance; there is no residual
        rows = tl.minimum(first.to(tl.int64) + tl.arange(0, ROWS), M - 1)
        at = rows // HEADS * stride_residual_row + rows % HEADS * stride_row
        x = tl.load(x_ptr + at[:, None] + cols * stride_col, mask=cols < WIDTH, other=0.0)
    else:
        x = load_tile(x_ptr, first, 0, WIDTH, stride_row, stride_col, M, ROWS, SPAN, 0.0)
    if RESIDUAL:
        residual = load_tile(
            residual_ptr, first, 0, WIDTH, stride_residual_row, stride_residual_col, M, ROWS, SPAN, 0.0
        )
        # rounded as torch's addition rounds, then normalized
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
    if x.ndim < 1 or weight.shape != x.shape[-1:] or weight.device != x.device:
        raise ValueError(f"{name} takes [..., H] and [H] on one device, got {tuple(x.shape)} and {tuple(weight.shape)}")
    require(name, DTYPES, x)
    require(name, DTYPES, weight)
    return weight.contiguous()


def _lies_by_heads(x: torch.Tensor) -> bool:
    """Whether x is [T, heads, H] with T strided, as a slice of q, k and v in one: it needs no copy."""
    return x.ndim == 3 and x.stride(0) != x.shape[1] * x.stride(1) and 1 not in x.shape[:2] and x.stride(2) == 1


def _norm(
    name: str, x: torch.Tensor, residual: torch.Tensor | None, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    given, weight = weight, _checked(name, x, weight)
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
                *(rows, parts, weight, out, m, width, *rows.stride(), how.chunks),
                EPS=eps,
                SPAN=how.span,
                **how.merging(),
                ACC=accumulator(x.dtype),
                num_warps=8,
                enable_fp_fusion=False,
            )
        return out, added
    heads = x.shape[1] if residual is None and _lies_by_heads(x) else 0
    rows = x[0] if heads else as_rows(x)
    other = x[:, 0] if heads else rows if residual is None else as_rows(residual)
    added = x if residual is None else torch.empty(x.shape, device=x.device, dtype=x.dtype)
    m = x.numel() // width
    label = f"{name}_rows[{how.span}]"
    note(label)
    launched = how.launch(
        _rms_norm_kernel,
        m,
        (rows, other, weight, out, added),
        (m, width, *rows.stride(), *other.stride()),
        EPS=eps,
        RESIDUAL=residual is not None,
        HEADS=heads,
        EARLY=m < _MANY or (how.span >= 4096 and 4 * width > 3 * how.span),
        ACC=accumulator(x.dtype),
    )
    if residual is None and rows.data_ptr() == x.data_ptr() and weight is given:
        remember(("rms_norm", eps), (x, weight), (out,), label, Step(launched, (0, 0, 1, 2, 0)))
    return out, added


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float = 1e-6) -> torch.Tensor:
    """x [..., H] * rsqrt(mean(x^2) + eps) * weight [H] -> [..., H] in x's dtype.

    All of it in float32, rounded once at the end. transformers' own RMSNorm modules round twice: they cast x *
    rsqrt(...) to the input's dtype before multiplying by the weight. So in half precision results differ from theirs by
    up to about one ULP; neither depends on the batch. The weight has any floating dtype.
    """
    made = again(("rms_norm", eps), x, weight)
    return _norm("rms_norm", x, None, weight, eps)[0] if made is None else made[0]


def rms_norm_residual(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float = 1e-6
) -> tuple[torch.Tensor, torch.Tensor]:
    """The pair that a decoder layer needs: (rms_norm(x + residual, weight, eps), x + residual), both [..., H].

    Bit for bit the two operators in sequence: the sum is rounded to x's dtype, as torch rounds it, and then normalized.
    One pass: two reads and two writes per element. The residual has x's shape and dtype and any strides, the weight [H]
    any floating dtype.
    """
    if residual.shape != x.shape:
        raise ValueError(f"rms_norm_residual takes two of one shape, got {tuple(x.shape)} and {tuple(residual.shape)}")
    require("rms_norm_residual", DTYPES, x, residual)
    return _norm("rms_norm_residual", x, residual, weight, eps)


# LayerNorm in one launch, with the bits of the same steps one by one
# (`nondet.kernels.dispatch.replacements.layer_norm`): each mean is divided as `_sum_kernel` divides, and the root and
# its reciprocal are rounded as torch rounds them on CUDA, including subnormal numbers, which Triton's own operators
# would flush.


@triton.jit(do_not_specialize=["M"])
def _layer_norm_kernel(
    x_ptr,
    weight_ptr,
    bias_ptr,
    out_ptr,
    mean_ptr,
    scale_ptr,
    M,
    WIDTH,
    stride_row,
    stride_col,
    EPS: tl.constexpr,
    ROWS: tl.constexpr,
    SPAN: tl.constexpr,
    HALVES: tl.constexpr,
    LEVELS: tl.constexpr,
):
    first = tl.program_id(0) * ROWS
    cols = tl.arange(0, SPAN)[None, :]
    x = load_tile(x_ptr, first, 0, WIDTH, stride_row, stride_col, M, ROWS, SPAN, 0.0).to(tl.float32)
    mean = add_tree(x, ROWS, SPAN, HALVES, LEVELS) / WIDTH
    centred = x - mean
    squares = tl.where(cols < WIDTH, centred * centred, 0.0)
    scale = reciprocal_root(add_tree(squares, ROWS, SPAN, HALVES, LEVELS) / WIDTH + EPS)
    out = centred * scale
    if weight_ptr is not None:
        out = out * tl.load(weight_ptr + cols, mask=cols < WIDTH, other=0.0).to(tl.float32)
    if bias_ptr is not None:
        out = out + tl.load(bias_ptr + cols, mask=cols < WIDTH, other=0.0).to(tl.float32)
    store_tile(out_ptr, out, first, 0, WIDTH, WIDTH, M, ROWS, SPAN)
    store_tile(mean_ptr, mean, first, 0, 1, 1, M, ROWS, 1)
    store_tile(scale_ptr, scale, first, 0, 1, 1, M, ROWS, 1)


def layer_norm(
    x: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None, eps: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None:
    """x [..., H] -> [..., H] in x's dtype, and mean and 1 / deviation [..., 1] in float32; None for rows of chunks.

    (x - mean) * (1 / sqrt(mean((x - mean)^2) + eps)) * weight + bias, each step in float32 and rounded once at the end.
    Weight and bias are [H], of any floating dtype, or None.
    """
    name, given = "layer_norm", (x, weight, bias)
    made = again((name, eps), *given)
    if made is not None:
        return made[0], made[1], made[2]
    require(name, _DTYPES, x)
    weight, bias = (None if p is None else _checked(name, x, p) for p in (weight, bias))
    width = x.shape[-1]
    how = plan(width, 4)
    if how.chunks > 1 or not x.numel():
        return None
    out = torch.empty(x.shape, device=x.device, dtype=x.dtype)
    mean, scale = (torch.empty((*x.shape[:-1], 1), device=x.device, dtype=torch.float32) for _ in range(2))
    rows = as_rows(x)
    label, tensors = f"{name}_rows[{how.span}]", (rows, weight, bias, out, mean, scale)
    note(label)
    launched = how.launch(_layer_norm_kernel, len(rows), tensors, (len(rows), width, *rows.stride()), EPS=eps)
    if rows.data_ptr() == x.data_ptr() and weight is given[1] and bias is given[2]:
        remember((name, eps), given, (out, mean, scale), label, Step(launched, (0, 1, 2, 3, 4, 5)))
    return out, mean, scale


# transformers' RMSNorm modules in one launch. A module runs as six or seven operators: x to float32, squares, mean, +
# eps, rsqrt, product, rounding, weight. The kernel computes and rounds the same in one pass over memory:
#
#   scale = rsqrt(sum(x^2) / H + eps)                         float32; the sum in class "lanes"
#   ROUND_FIRST:      round(weight * round(x * scale))        Llama, Qwen3, Mistral: rounded twice
#   otherwise:        round(x * scale * weight)               OLMo
#   and with PLUS_ONE round(x * scale * (1 + weight))         Gemma
#
# Invariance: a row's bits depend only on the row, the width and the dtype, because the order of the one sum follows the
# width and the rest is elementwise, without contraction (enable_fp_fusion=False).


_DTYPES = (torch.float16, torch.bfloat16, torch.float32)


@triton.jit(do_not_specialize=["M"])
def _module_norm_kernel(
    x_ptr,
    weight_ptr,
    out_ptr,
    M,
    WIDTH: tl.constexpr,
    EPS: tl.constexpr,
    ROUND_FIRST: tl.constexpr,
    PLUS_ONE: tl.constexpr,
    ROWS: tl.constexpr,
    SPAN: tl.constexpr,
    HALVES: tl.constexpr,
    LEVELS: tl.constexpr,
):
    first = tl.program_id(0) * ROWS
    x = load_tile(x_ptr, first, 0, WIDTH, WIDTH, 1, M, ROWS, SPAN, 0.0).to(tl.float32)
    scale = tl.rsqrt(add_tree(x * x, ROWS, SPAN, HALVES, LEVELS) / WIDTH + EPS)
    cols = tl.arange(0, SPAN)[None, :]
    weight = tl.load(weight_ptr + cols, mask=cols < WIDTH, other=0.0).to(tl.float32)
    if PLUS_ONE:
        weight = 1.0 + weight
    normed = x * scale
    if ROUND_FIRST:
        normed = normed.to(out_ptr.dtype.element_ty).to(tl.float32)
    store_tile(out_ptr, normed * weight, first, 0, WIDTH, WIDTH, M, ROWS, SPAN)


def module_norm(
    x: torch.Tensor, weight: torch.Tensor, eps: float, *, round_first: bool, plus_one: bool
) -> torch.Tensor | None:
    """x [..., H], weight [H], one dtype -> [..., H] in it; None where the kernel does not support it.

    Args:
        round_first: Round x * scale to the dtype before the weight is applied.
        plus_one: The weight is 1 + weight.
    """
    what = ("module_norm", eps, round_first, plus_one)
    made = again(what, x, weight)
    if made is not None:
        return made[0]
    given, width = (x, weight), x.shape[-1]
    how = plan(width, x.element_size())
    if x.dtype not in _DTYPES or weight.dtype != x.dtype or weight.shape != (width,) or how.chunks != 1:
        return None
    x, weight = x.contiguous(), weight.contiguous()
    out = torch.empty_like(x)
    m = x.numel() // width if width else 0
    if m == 0:
        return out
    note("module_norm")
    forms = {"WIDTH": width, "EPS": eps, "ROUND_FIRST": round_first, "PLUS_ONE": plus_one}
    launched = how.launch(_module_norm_kernel, m, (x, weight, out), (m,), **forms)
    if x is given[0] and weight is given[1]:
        remember(what, given, (out,), "module_norm", Step(launched, (0, 1, 2)))
    return out


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
    made = again(name, x)
    if made is not None:
        return made[0]
    if x.ndim < 1:
        raise ValueError(f"{name} takes [..., K], got a scalar")
    require(name, DTYPES, x)
    out = torch.empty(x.shape[:-1], device=x.device, dtype=x.dtype)
    if not out.numel():
        return out
    rows = as_rows(x)
    m, width = rows.shape
    how = plan(width, x.element_size())
    if how.chunks > 1:
        with on_device(x):
            note(f"{name}_rows[{how.chunks}x{how.span}]")
            parts = sum_parts(rows, how, square=False)
            _sum_merge_kernel[(m,)](
                parts, out, m, width, how.chunks, MEAN=mean, **how.merging(), num_warps=1, enable_fp_fusion=False
            )
            return out
    label, numbers = f"{name}_rows[{how.span}]", (m, width, *rows.stride())
    note(label)
    launched = how.launch(_sum_kernel, m, (rows, out), numbers, MEAN=mean, ACC=accumulator(x.dtype))
    if width and rows.data_ptr() == x.data_ptr():
        remember(name, (x,), (out,), label, Step(launched, (0, 1)))
    return out


def sum(x: torch.Tensor) -> torch.Tensor:
    """Over the last axis of x [..., K] -> [...]; any width, any strides. Order and invariance as in the module."""
    return _reduce("sum", x, mean=False)


def mean(x: torch.Tensor) -> torch.Tensor:
    """`sum`, divided by K before the one rounding: x [..., K] -> [...]."""
    return _reduce("mean", x, mean=True)


_ONE_CHUNK, _CHUNK, _LEAST_LANES, _MOST_LANES = 16384, 4096, 256, 2048


def lanes_sum(x: torch.Tensor) -> torch.Tensor:
    """x [..., W] -> [...]: the order of class lanes in PyTorch's elementwise additions, which have no order to choose.

    Written only from the class's words (`nondet.core.registry`). float32, float64 for float64; any device.
    """
    wide = x.to(torch.float64 if x.dtype == torch.float64 else torch.float32)
    width = x.shape[-1]
    size = _power_of_two(width) if width <= _ONE_CHUNK else _CHUNK
    lanes = min(size, max(_LEAST_LANES, min(size // 4, _MOST_LANES)))
    sums = []
    for start in range(0, max(width, 1), size):
        part = wide[..., start : start + size]
        part = torch.nn.functional.pad(part, (0, size - part.shape[-1]))
        while part.shape[-1] > lanes:
            half = part.shape[-1] // 2
            part = part[..., :half] + part[..., half:]
        sums.append(_neighbours(part))
    chunks = torch.stack(sums, -1)
    return _neighbours(torch.nn.functional.pad(chunks, (0, _power_of_two(len(sums)) - len(sums)))).to(x.dtype)


def _neighbours(x: torch.Tensor) -> torch.Tensor:
    while x.shape[-1] > 1:
        x = x[..., 0::2] + x[..., 1::2]
    return x[..., 0]


def _power_of_two(n: int) -> int:
    return 1 << max(n - 1, 0).bit_length()
