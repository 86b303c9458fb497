"""transformers' RMSNorm modules on CUDA in one launch, rounded where the modules round.

A module runs as six or seven operators, each one launch and one pass over memory: x to float32, squares, mean, + eps,
rsqrt, product, rounding, weight. The kernel here does the same arithmetic in one pass:

  scale = rsqrt(sum(x^2) / H + eps)             float32; the sum in class "lanes" of `nondet.kernels.rows.cuda_parts`
  ROUND_FIRST:      round(weight * round(x * scale))        Llama, Qwen3, Mistral: rounded twice
  otherwise:        round(x * scale * weight)               OLMo
  and with PLUS_ONE round(x * scale * (1 + weight))         Gemma

`nondet.kernels.rows.cuda.rms_norm` is the same sum, always rounded once.

Invariance: a row's bits are decided by the row, the width and the dtype alone, since the order of the one sum follows
the width (see the class) and all else is elementwise, without contraction (enable_fp_fusion=False).
"""

# Triton reads a kernel's annotations itself: only tl.constexpr may stand there.
# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from nondet.core.launch import note
from nondet.kernels.rows.cuda_parts import Plan, add_tree, load_tile, plan, store_tile
from nondet.kernels.triton_common import on_device

__all__ = ["module_norm"]

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


class _Bound(NamedTuple):
    """A compiled kernel and what it is launched with: Triton's own way to find it again takes several times as long."""

    kernel: Any
    constants: tuple[Any, ...]


_bound: dict[tuple[Any, ...], _Bound] = {}


def module_norm(
    x: torch.Tensor, weight: torch.Tensor, eps: float, *, round_first: bool, plus_one: bool
) -> torch.Tensor | None:
    """x [..., H], weight [H], one dtype -> [..., H] in it; None where this kernel does not do it.

    Args:
        round_first: Round x * scale to the dtype before the weight is applied.
        plus_one: The weight is 1 + weight.
    """
    width = x.shape[-1]
    how = plan(width, x.element_size())
    if x.dtype not in _DTYPES or weight.dtype != x.dtype or weight.shape != (width,) or how.chunks != 1:
        return None
    x, weight = x.contiguous(), weight.contiguous()
    out = torch.empty_like(x)
    m = x.numel() // width if width else 0
    if m == 0:
        return out
    rows, warps = how.rows_and_warps(m)
    note("module_norm")
    grid = (-(-m // rows), 1, 1)
    low = x.data_ptr() | weight.data_ptr()
    if x.is_cuda and x.get_device() != torch.cuda.current_device():
        with on_device(x):
            _launch(x, weight, out, m, width, eps, round_first, plus_one, how, rows, warps, grid)
        return out
    key = (width, x.dtype, x.get_device(), rows, eps, round_first, plus_one, low % 16 == 0)
    bound = _bound.get(key)
    if bound is not None:
        bound.kernel[grid](x, weight, out, m, *bound.constants)
        return out
    kernel = _launch(x, weight, out, m, width, eps, round_first, plus_one, how, rows, warps, grid)
    if kernel is not None:  # the interpreter gives None
        constants = (width, eps, round_first, plus_one, rows, how.span, how.halves, how.levels)
        _bound[key] = _Bound(kernel, constants)
    return out


def _launch(
    x: torch.Tensor,
    weight: torch.Tensor,
    out: torch.Tensor,
    m: int,
    width: int,
    eps: float,
    round_first: bool,
    plus_one: bool,
    how: Plan,
    rows: int,
    warps: int,
    grid: tuple[int, int, int],
) -> Any:
    return _module_norm_kernel[grid](
        x,
        weight,
        out,
        m,
        width,
        eps,
        round_first,
        plus_one,
        ROWS=rows,
        **how.tree(),
        num_warps=warps,
        enable_fp_fusion=False,
    )
