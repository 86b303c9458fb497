"""Batch-invariant reductions and norms over the last axis on a CPU: libraries', at row counts certified to agree.

Numerics: rows are widened to float32 (float64 stays), reduced by NumPy's add.reduce (pairwise, depending only on the
width) or torch's softmax or log_softmax, whose order along the row depends on width, instruction set and number of
threads; one rounding to the dtype ends it.

Invariance: NumPy and torch reduce each row of a contiguous matrix by itself, except where torch distributes a single
long row among its threads. So most row counts agree, and `nondet.kernels.matmul.cpu_tiles` finds them; the others are
padded or cut. All other steps (products, square roots, quotients) are correctly rounded by IEEE 754, and so do not
depend on whether an element is in a vector register or in the scalar rest, unlike `torch.rsqrt` in bfloat16. Square
roots are NumPy's, the processor's own: torch's are MKL's where it was built with MKL, and those are off by one unit in
the last place for one float32 in 200.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from nondet.core.inputs import order_revealing
from nondet.core.launch import note
from nondet.errors import UserError
from nondet.kernels import originals
from nondet.kernels.matmul.cpu_tiles import Tiles, environment_key, prove, proven, sizes_for

# A sum is one number per row: in a short row two orders of additions may well agree in it, so many rows are drawn.
_SEEDS, _SEEDS_IF_LONG = tuple(range(31, 43)), (31, 32, 33)
_CHUNK = 32  # of `sum_over_rows`
_WORK_PER_TERM = 128  # of a reduction, which is bound by memory, in multiply-adds of a GEMM
_LONG, _FEW = 2**14, (1, 2, 4, 8, 16)  # beyond this width, inputs for more rows take longer to draw than to reduce


@np.errstate(all="ignore")  # torch does not report infinities or NaN either
def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float = 1e-6) -> torch.Tensor:
    """x [..., H] / sqrt(mean(x^2) + eps) * weight [H] -> [..., H] in x's dtype, rounded once."""
    rows = _wide(x)
    out = rows * rows
    normed = out.numpy()
    np.divide(rows.detach().numpy(), _roots(out, eps), out=normed)
    normed *= _numbers(weight, rows)
    return out.to(x.dtype).view(x.shape)


@np.errstate(all="ignore")  # as above
def layer_norm(
    x: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None, eps: float = 1e-5
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(x [..., H] minus its mean) / sqrt(their mean square + eps) * weight [H] + bias [H] in x's dtype, rounded once.

    Also the means and the factors [..., 1], in the parameters' dtype or else x's, as torch's backward takes them.
    """
    rows = _wide(x)
    means = row_sums(rows)[:, None].div_(rows.shape[1])
    out = rows - means
    normed = out.numpy()
    factors = 1.0 / _roots(out * out, eps)
    normed *= factors
    if weight is not None:
        normed *= _numbers(weight, rows)
    if bias is not None:
        normed += _numbers(bias, rows)
    saved, one_each = x.dtype if weight is None else weight.dtype, (*x.shape[:-1], 1)
    mean, factor = (t.to(saved).view(one_each) for t in (means, torch.from_numpy(factors)))
    return out.to(x.dtype).view(x.shape), mean, factor


def _roots(squares: torch.Tensor, eps: float) -> np.ndarray[Any, Any]:
    scale = row_sums(squares)[:, None].numpy()
    scale /= squares.shape[1]
    scale += eps
    return np.sqrt(scale, out=scale)


def _numbers(x: torch.Tensor, like: torch.Tensor) -> np.ndarray[Any, Any]:
    numbers: np.ndarray[Any, Any] = x.detach().to(like.dtype).numpy()
    return numbers


def rms_norm_residual(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float = 1e-6
) -> tuple[torch.Tensor, torch.Tensor]:
    """(`rms_norm` of x + residual, x + residual), [..., H]; the sum is rounded first. UserError: shapes or dtypes
    differ.
    """
    if residual.shape != x.shape or residual.dtype != x.dtype:
        raise UserError(
            f"rms_norm_residual got {x.dtype} {tuple(x.shape)} and {residual.dtype} {tuple(residual.shape)}",
            "Give two tensors of one shape and dtype.",
        )
    added = x + residual
    return rms_norm(added, weight, eps), added


def softmax(x: torch.Tensor) -> torch.Tensor:
    """Over the last axis of x [..., V], in x's dtype."""
    return _reduced("softmax", _softmax, _wide(x), scalar=False).to(x.dtype).view(x.shape)


def log_softmax(x: torch.Tensor) -> torch.Tensor:
    """Over the last axis of x [..., V], in x's dtype."""
    return _reduced("log_softmax", _log_softmax, _wide(x), scalar=False).to(x.dtype).view(x.shape)


def logsumexp(x: torch.Tensor) -> torch.Tensor:
    """Over the last axis of x [..., V] -> [...], in x's dtype: max - log_softmax at the maximum; -inf for only -inf.

    At the maximum log_softmax is -log(sum of exp(x - max)), so it is one addition away and as invariant.
    (torch.logsumexp takes the exponentials of all rows at once, in vectors and a rest, so their number matters.)
    """
    if not x.shape[-1]:
        return x.new_full(x.shape[:-1], -torch.inf)
    rows = _wide(x)
    top, at = rows.max(-1, keepdim=True)
    log_sum = -_reduced("log_softmax", _log_softmax, rows, scalar=False).gather(-1, at)
    return torch.where(top.isinf(), top, top + log_sum).to(x.dtype).view(x.shape[:-1])


def cross_entropy(x: torch.Tensor, target: torch.Tensor, ignore_index: int = -100) -> torch.Tensor:
    """-`log_softmax` of x [..., V] at targets [...], bit for bit: 0 at `ignore_index`, NaN where it is not a column."""
    ignored, missing = target == ignore_index, (target < 0) | (target >= x.shape[-1])
    at = target.long().masked_fill(missing, 0)[..., None]
    losses = -log_softmax(x).gather(-1, at)[..., 0]
    return losses.masked_fill(missing, torch.nan).masked_fill(ignored, 0.0)


def sum(x: torch.Tensor) -> torch.Tensor:
    """Over the last axis of x [..., K] -> [...], in x's dtype."""
    return row_sums(_wide(x)).to(x.dtype).view(x.shape[:-1])


def row_sums(rows: torch.Tensor) -> torch.Tensor:
    """rows [M, K], contiguous, float32 or float64 -> [M]: `sum` without its checks."""
    return _reduced("sum", _add_up, rows, scalar=True)


def sum_over_rows(x: torch.Tensor, axis: int) -> torch.Tensor:
    """The sum over an axis that is not the last: x [..., T, ..., H] -> [..., ..., H] in float32 (float64 stays).

    Only by elementwise additions: in chunks of 32 along the axis, anchored at its first position, by halves within a
    chunk, chunk by chunk. So it depends neither on the other axes nor on appended zeros: a masked sum has the same bits
    for any padding behind it. (Zeros in front move the chunks.)
    """
    rows = x.movedim(axis, 0).to(torch.float64 if x.dtype == torch.float64 else torch.float32)
    total: torch.Tensor | None = None
    for start in range(0, rows.shape[0], _CHUNK):
        part = rows[start : start + _CHUNK]
        if part.shape[0] < _CHUNK:
            part = torch.cat([part, part.new_zeros((_CHUNK - part.shape[0], *part.shape[1:]))])
        while part.shape[0] > 1:
            half = part.shape[0] // 2
            part = part[:half] + part[half:]
        total = part[0] if total is None else total + part[0]
    return rows.new_zeros(rows.shape[1:]) if total is None else total


def mean(x: torch.Tensor) -> torch.Tensor:
    """Over the last axis of x [..., K] -> [...], in x's dtype: the sum divided by K."""
    rows = _wide(x)
    return row_sums(rows).div_(rows.shape[1]).to(x.dtype).view(x.shape[:-1])


def square_roots(x: torch.Tensor) -> torch.Tensor:
    """Of float32 or float64 numbers, any shape, in torch's strides, correctly rounded; NaN of negative numbers."""
    out = torch.empty_like(x)
    with np.errstate(invalid="ignore"):
        np.sqrt(x.detach().numpy(), out=out.numpy())
    return out


def _wide(x: torch.Tensor) -> torch.Tensor:
    if not x.dtype.is_floating_point:
        raise UserError(f"cpu_rows has no {x.dtype}", "Use a floating dtype; integer sums do not depend on the order.")
    if torch.is_grad_enabled() and x.requires_grad:
        raise UserError("cpu_rows computes no gradients", "Call it under torch.no_grad().")
    accumulator = torch.float64 if x.dtype == torch.float64 else torch.float32
    return x.reshape(-1, x.shape[-1]).to(accumulator).contiguous()


@np.errstate(all="ignore")  # torch does not report infinities or NaN either
def _add_up(rows: torch.Tensor, out: torch.Tensor) -> None:
    """NumPy's pairwise sum, row by row: it depends on no thread count, dispatcher or vector rest."""
    np.add.reduce(rows.detach().numpy(), axis=-1, out=out.numpy())


def _softmax(rows: torch.Tensor, out: torch.Tensor) -> None:
    originals.call("_softmax.out", rows, -1, False, out=out)


def _log_softmax(rows: torch.Tensor, out: torch.Tensor) -> None:
    torch.log_softmax(rows, -1, out=out)


def _reduced(name: str, call: Callable[..., None], rows: torch.Tensor, *, scalar: bool) -> torch.Tensor:
    count, width = rows.shape
    out = rows.new_empty((count,) if scalar else (count, width))
    if count == 0 or width == 0:
        return out.zero_()
    tiles = _proven(name, call, rows, scalar=scalar)
    note(tiles.plan(count).label)
    return tiles.apply((rows,), out, call)


def _proven(name: str, call: Callable[..., None], rows: torch.Tensor, *, scalar: bool) -> Tiles:
    width = rows.shape[1]

    def make() -> Tiles:
        long = width > _LONG
        sizes = _FEW if long else sizes_for(width * _WORK_PER_TERM)
        seeds = _SEEDS if scalar and not long else _SEEDS_IF_LONG
        binades = None if scalar else 6  # in a softmax, wide exponents leave only one significant term

        def case(seed: int) -> tuple[Callable[..., None], tuple[torch.Tensor]]:
            return call, (order_revealing(max(sizes), width, rows.dtype, seed, negate=scalar, binades=binades),)

        def out_of(n: int) -> torch.Tensor:
            return rows.new_empty((n,) if scalar else (n, width))

        return prove(f"cpu_rows {name}", [case(s) for s in seeds], out_of, sizes)

    settings = ("numpy",) if name == "sum" else environment_key()  # NumPy's sums do not depend on torch's settings
    return proven(f"cpu_rows {name}", ("rows", name, width, rows.dtype, *settings), make)
