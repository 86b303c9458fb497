"""Elementwise operators on CUDA in one launch, with stock's bits: transformers' rotary embedding, SiLU times a gate.

`apply_rotary_pos_emb` runs as some twelve launches (halves, negation, concatenation, two products and a sum, for
queries and for keys). Nothing is reduced, so stock is already batch-invariant, but the launches are slow. Each product
is rounded to the dtype, and so is their sum, as the operators round; multiplications are not contracted into additions
(enable_fp_fusion=False). So the result has stock's bits, in any batch. SiLU likewise: its exponential is CUDA's own,
its quotient rounded as in IEEE 754, its result rounded to the dtype before it is multiplied.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra import libdevice

from nondet.core.launch import note
from nondet.kernels.triton_common import INTERPRETED, Step, again, launch, on_device, remember

# Triton reads a kernel's annotations itself and allows only tl.constexpr.
# mypy: allow-untyped-defs, allow-incomplete-defs

_DTYPES = (torch.float16, torch.bfloat16, torch.float32)


@triton.jit
def _rotate(x_ptr, out_ptr, cos_ptr, sin_ptr, stride_h, out_stride_h, HEADS, BLOCK_H: tl.constexpr, HALF: tl.constexpr):
    heads, cols = tl.arange(0, BLOCK_H)[:, None], tl.arange(0, HALF)[None, :]
    inside = heads < HEADS
    at = x_ptr + heads * stride_h + cols
    low = tl.load(at, mask=inside, other=0.0).to(tl.float32)
    high = tl.load(at + HALF, mask=inside, other=0.0).to(tl.float32)
    cos_low, cos_high = tl.load(cos_ptr + cols).to(tl.float32), tl.load(cos_ptr + HALF + cols).to(tl.float32)
    sin_low, sin_high = tl.load(sin_ptr + cols).to(tl.float32), tl.load(sin_ptr + HALF + cols).to(tl.float32)
    dtype = out_ptr.dtype.element_ty
    first = (low * cos_low).to(dtype).to(tl.float32) + (-high * sin_low).to(dtype).to(tl.float32)
    second = (high * cos_high).to(dtype).to(tl.float32) + (low * sin_high).to(dtype).to(tl.float32)
    to = out_ptr + heads * out_stride_h + cols
    tl.store(to, first.to(dtype), mask=inside)
    tl.store(to + HALF, second.to(dtype), mask=inside)


@triton.jit(do_not_specialize=["T"])
def _rotary_kernel(
    q_ptr,
    k_ptr,
    cos_ptr,
    sin_ptr,
    q_out_ptr,
    k_out_ptr,
    T,
    q_stride_b,
    q_stride_h,
    q_stride_t,
    k_stride_b,
    k_stride_h,
    k_stride_t,
    cos_stride_b,
    cos_stride_t,
    q_out_stride_b,
    q_out_stride_h,
    q_out_stride_t,
    k_out_stride_b,
    k_out_stride_h,
    k_out_stride_t,
    HEADS_Q: tl.constexpr,
    HEADS_K: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_K: tl.constexpr,
    HALF: tl.constexpr,
):
    row = tl.program_id(0)
    b, t = (row // T).to(tl.int64), (row % T).to(tl.int64)
    cos_at = b * cos_stride_b + t * cos_stride_t
    _rotate(
        q_ptr + b * q_stride_b + t * q_stride_t,
        q_out_ptr + b * q_out_stride_b + t * q_out_stride_t,
        cos_ptr + cos_at,
        sin_ptr + cos_at,
        q_stride_h,
        q_out_stride_h,
        HEADS_Q,
        BLOCK_Q,
        HALF,
    )
    _rotate(
        k_ptr + b * k_stride_b + t * k_stride_t,
        k_out_ptr + b * k_out_stride_b + t * k_out_stride_t,
        cos_ptr + cos_at,
        sin_ptr + cos_at,
        k_stride_h,
        k_out_stride_h,
        HEADS_K,
        BLOCK_K,
        HALF,
    )


def rotary(
    q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor] | None:
    """q [B, Hq, T, D], k [B, Hk, T, D], cos, sin [B or 1, T, D] of one dtype -> rotated in stock's strides, or None."""
    batch, heads_q, tokens, dim = q.shape
    half = dim // 2
    if (
        q.dtype not in _DTYPES
        or not (q.dtype == k.dtype == cos.dtype == sin.dtype)
        or half & (half - 1)
        or half < 16
        or cos.dim() != 3
        or cos.shape != sin.shape
        or cos.stride() != sin.stride()
        or cos.shape[0] not in (1, batch)
        or cos.shape[1:] != (tokens, dim)
        or not (q.stride(3) == k.stride(3) == cos.stride(2) == 1)
    ):
        return None
    heads_k = k.shape[1]
    q_out, k_out = torch.empty_like(q), torch.empty_like(k)
    if q_out.stride(3) != 1 or k_out.stride(3) != 1:
        return None
    if not batch * tokens:
        return q_out, k_out
    many = batch > 1  # the one entry's stride grows with T and is not used: without it one compiled kernel serves all T
    of_cos = (cos.stride(0) if many and cos.shape[0] > 1 else 0, cos.stride(1))
    strides = (*_strides(q, many), *_strides(k, many), *of_cos, *_strides(q_out, many), *_strides(k_out, many))
    note("rotary")
    constants = {"HEADS_Q": heads_q, "HEADS_K": heads_k, "BLOCK_Q": triton.next_power_of_2(heads_q)}
    constants |= {"BLOCK_K": triton.next_power_of_2(heads_k), "HALF": half}
    tensors, numbers = (q, k, cos, sin, q_out, k_out), (tokens, *strides)
    with on_device(q):
        launch(_rotary_kernel, (batch * tokens,), tensors, numbers, constants, num_warps=4, enable_fp_fusion=False)
    return q_out, k_out


def _strides(x: torch.Tensor, many: bool) -> tuple[int, int, int]:
    return x.stride(0) if many else 0, x.stride(1), x.stride(2)


_COMPILED = tl.constexpr(not INTERPRETED)
_SILU_BLOCK = 1024


@triton.jit
def _silu_mul_kernel(x_ptr, out_ptr, WIDTH, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = cols < WIDTH
    x = tl.load(x_ptr + row * 2 * WIDTH + cols, mask=inside, other=0.0).to(tl.float32)
    gate = tl.load(x_ptr + row * 2 * WIDTH + WIDTH + cols, mask=inside, other=0.0).to(tl.float32)
    dtype = out_ptr.dtype.element_ty
    out = tl.math.div_rn(x, 1.0 + (libdevice.exp(-x) if _COMPILED else tl.exp(-x))).to(dtype).to(tl.float32)
    tl.store(out_ptr + row * WIDTH + cols, (out * gate).to(dtype), mask=inside)


def silu_mul(x: torch.Tensor) -> torch.Tensor | None:
    """silu(x[..., :H]) * x[..., H:] of contiguous x [..., 2 H], float16 or bfloat16 -> [..., H]; None of any other."""
    if x.dtype not in _DTYPES[:2] or x.ndim < 1 or x.shape[-1] % 2 or not x.is_contiguous():
        return None
    made = again("silu_mul", x)
    if made is not None:
        return made[0]
    width = x.shape[-1] // 2
    out = torch.empty((*x.shape[:-1], width), device=x.device, dtype=x.dtype)
    if not out.numel():
        return out
    note("silu_mul")
    grid = (out.numel() // width, -(-width // _SILU_BLOCK))
    with on_device(x):
        launched = launch(
            _silu_mul_kernel, grid, (x, out), (width,), {"BLOCK": _SILU_BLOCK}, num_warps=4, enable_fp_fusion=False
        )
    remember("silu_mul", (x,), (out,), "silu_mul", Step(launched, (0, 1)))
    return out
