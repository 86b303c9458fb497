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
from nondet.kernels.matmul.cpu_tiles import Case, Tiles, environment_key, prove, proven, sizes_for

# A sum is one number per row: in a short row two orders of additions may well agree in it, so many rows are drawn.
_SEEDS, _SEEDS_IF_LONG, _MORE = tuple(range(31, 43)), (31, 32, 33), 64
_MODULES = (torch.float16, torch.bfloat16, torch.float32)
_CHUNK = 32  # of `sum_over_rows`
_WORK_PER_TERM = 128  # of a reduction, which is bound by memory, in multiply-adds of a GEMM
_LONG, _FEW = 2**14, (1, 2, 4, 8, 16)  # beyond this width, inputs for more rows take longer to draw than to reduce
_guards: Any = torch._C._dynamo.guards


@np.errstate(all="ignore")  # torch does not report infinities or NaN either
def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float = 1e-6) -> torch.Tensor:
    """x [..., H] / sqrt(mean(x^2) + eps) * weight [H] -> [..., H] in x's dtype, rounded once."""
    rows = wide(x)
    out = _space_for(rows)
    numbers, normed = _numbers(rows, rows), out.numpy()
    np.multiply(numbers, numbers, out=normed)
    np.divide(numbers, _roots(out, eps), out=normed)
    normed *= _numbers(weight, rows)
    return _narrow(out, x)


@np.errstate(all="ignore")  # as above
def layer_norm(
    x: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None, eps: float = 1e-5
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(x [..., H] minus its mean) / sqrt(their mean square + eps) * weight [H] + bias [H] in x's dtype, rounded once.

    Also the means and the factors [..., 1], in the parameters' dtype or else x's, as torch's backward takes them.
    """
    rows = wide(x)
    mean, out = row_sums(rows).numpy()[:, None], _space_for(rows)
    normed = out.numpy()
    mean /= rows.shape[1]
    np.subtract(_numbers(rows, rows), mean, out=normed)
    factors = 1.0 / _roots(torch.from_numpy(normed * normed), eps)
    normed *= factors
    if weight is not None:
        normed *= _numbers(weight, rows)
    if bias is not None:
        normed += _numbers(bias, rows)
    saved = x.dtype if weight is None else weight.dtype
    return _narrow(out, x), _column(mean, x, saved), _column(factors, x, saved)


@np.errstate(all="ignore")  # as above
def module_norm(
    x: torch.Tensor, weight: torch.Tensor, eps: float, *, round_first: bool, plus_one: bool
) -> torch.Tensor | None:
    """As `nondet.kernels.rows.cuda.module_norm`: the bits of the operators that the module consists of."""
    if x.dtype not in _MODULES or weight.dtype is not x.dtype or weight.shape != x.shape[-1:] or not x.numel():
        return None
    rows = wide(x)
    out = _space_for(rows)
    numbers, normed = _numbers(rows, rows), out.numpy()
    np.multiply(numbers, numbers, out=normed)
    np.multiply(numbers, 1.0 / _roots(out, eps), out=normed)
    if round_first:
        return _narrow(out, x).mul_(weight)
    scale = _numbers(weight, rows)
    normed *= scale + 1.0 if plus_one else scale
    return _narrow(out, x)


def _roots(squares: torch.Tensor, eps: float) -> np.ndarray[Any, Any]:
    """squares [M, H] -> sqrt(their sum / H + eps) [M, 1], each step rounded."""
    scale = row_sums(squares).numpy()[:, None]
    scale /= squares.shape[1]
    scale += eps
    return np.sqrt(scale, out=scale)


def _space_for(rows: torch.Tensor) -> torch.Tensor:
    """Uninitialized memory for a result of [M, width], from torch's allocator, past its dispatcher."""
    count, width = rows.shape
    out: torch.Tensor = _guards._empty_strided_cpu((count, width), (width, 1), rows.dtype)
    return out


def _column(numbers: np.ndarray[Any, Any], x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """A number for each row of x, [M, 1], as [..., 1] in the dtype."""
    column = torch.from_numpy(numbers)
    column = column if column.dtype is dtype else column.to(dtype)
    return column if x.dim() == 2 else column.view((*x.shape[:-1], 1))


def _numbers(x: torch.Tensor, like: torch.Tensor) -> np.ndarray[Any, Any]:
    x = x.detach() if x.requires_grad else x
    numbers: np.ndarray[Any, Any] = (x if x.dtype is like.dtype else x.to(like.dtype)).numpy()
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
    return _narrow(_reduced("softmax", wide(x)), x)


def log_softmax(x: torch.Tensor) -> torch.Tensor:
    """Over the last axis of x [..., V], in x's dtype."""
    return _narrow(_reduced("log_softmax", wide(x)), x)


def logsumexp(x: torch.Tensor) -> torch.Tensor:
    """Over the last axis of x [..., V] -> [...], in x's dtype: max - log_softmax at the maximum; -inf for only -inf.

    At the maximum log_softmax is -log(sum of exp(x - max)), so it is one addition away and as invariant.
    (torch.logsumexp takes the exponentials of all rows at once, in vectors and a rest, so their number matters.)
    """
    if not x.shape[-1]:
        return x.new_full(x.shape[:-1], -torch.inf)
    rows = wide(x)
    top, at = rows.max(-1, keepdim=True)
    log_sum = -_reduced("log_softmax", rows).gather(-1, at)
    return torch.where(top.isinf(), top, top + log_sum).to(x.dtype).view(x.shape[:-1])


def cross_entropy(x: torch.Tensor, target: torch.Tensor, ignore_index: int = -100) -> torch.Tensor:
    """-`log_softmax` of x [..., V] at targets [...], bit for bit: 0 at `ignore_index`, NaN where it is not a column."""
    ignored, missing = target == ignore_index, (target < 0) | (target >= x.shape[-1])
    at = target.long().masked_fill(missing, 0)[..., None]
    losses = -log_softmax(x).gather(-1, at)[..., 0]
    return losses.masked_fill(missing, torch.nan).masked_fill(ignored, 0.0)


def sum(x: torch.Tensor) -> torch.Tensor:
    """Over the last axis of x [..., K] -> [...], in x's dtype."""
    return row_sums(wide(x)).to(x.dtype).view(x.shape[:-1])


@np.errstate(all="ignore")  # as above
def row_sums(rows: torch.Tensor) -> torch.Tensor:
    """rows [M, K], contiguous, float32 or float64 -> [M]: `sum` without its checks."""
    return _reduced("sum", rows)


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
    rows = wide(x)
    return row_sums(rows).div_(rows.shape[1]).to(x.dtype).view(x.shape[:-1])


def square_roots(x: torch.Tensor) -> torch.Tensor:
    """Of float32 or float64 numbers, any shape, in torch's strides, correctly rounded; NaN of negative numbers."""
    out = torch.empty_like(x)
    with np.errstate(invalid="ignore"):
        np.sqrt(x.detach().numpy(), out=out.numpy())
    return out


def wide(x: torch.Tensor) -> torch.Tensor:
    """x as a contiguous [rows, width] in float32, or in float64 if it is that."""
    if not x.dtype.is_floating_point:
        raise UserError(f"cpu_rows has no {x.dtype}", "Use a floating dtype; integer sums do not depend on the order.")
    if torch.is_grad_enabled() and x.requires_grad:
        raise UserError("cpu_rows computes no gradients", "Call it under torch.no_grad().")
    accumulator = torch.float64 if x.dtype == torch.float64 else torch.float32
    rows = x if x.dim() == 2 else x.reshape(-1, x.shape[-1])
    return (rows if rows.dtype is accumulator else rows.to(accumulator)).contiguous()


def _narrow(rows: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """rows [M, width] in x's dtype and shape."""
    out = rows if rows.dtype is x.dtype else rows.to(x.dtype)
    return out if x.dim() == 2 else out.view(x.shape)


def _add_up(rows: torch.Tensor) -> torch.Tensor:
    """NumPy's pairwise sum, which takes rows one by one: no thread count, no dispatcher and no vector rest in it."""
    return torch.from_numpy(np.add.reduce(_numbers(rows, rows), axis=-1))


def _softmax(rows: torch.Tensor) -> torch.Tensor:
    return originals.call("_softmax", rows, -1, False)


def _log_softmax(rows: torch.Tensor) -> torch.Tensor:
    return torch.log_softmax(rows, -1)


# name -> what reduces rows, and whether a row gives one number
_REDUCTIONS: dict[str, tuple[Callable[[torch.Tensor], torch.Tensor], bool]] = {
    "sum": (_add_up, True),
    "softmax": (_softmax, False),
    "log_softmax": (_log_softmax, False),
}


def _reduced(name: str, rows: torch.Tensor) -> torch.Tensor:
    """Rows [M, K] reduced at certified row counts: a sum to [M], else to [M, K]."""
    call, scalar = _REDUCTIONS[name]
    count, width = rows.shape
    if count == 0 or width == 0:
        return rows.new_zeros((count,) if scalar else (count, width))
    tiles = _proven(name, rows.dtype, width)
    if scalar and not tiles.rejected:  # NumPy takes any number of rows
        note(f"cpu_rows {name}[{count}]")
        return call(rows)
    note(tiles.plan(count).label)
    return tiles.apply((rows,), call)


def _proven(name: str, dtype: torch.dtype, width: int) -> Tiles:
    call, scalar = _REDUCTIONS[name]

    def make() -> Tiles:
        long = width > _LONG
        sizes = _FEW if long else sizes_for(width * _WORK_PER_TERM)
        seeds = _SEEDS if scalar and not long else _SEEDS_IF_LONG
        binades = None if scalar else 6  # in a softmax, wide exponents leave only one significant term

        def case(seed: int) -> Case:
            most = max(sizes) if seed in _SEEDS_IF_LONG else min(max(sizes), _MORE)  # large sizes have rows enough
            return call, (order_revealing(most, width, dtype, seed, negate=scalar, binades=binades),)

        return prove(f"cpu_rows {name}", [case(s) for s in seeds], sizes)

    settings = ("numpy",) if name == "sum" else environment_key()  # NumPy's sums do not depend on torch's settings
    return proven(f"cpu_rows {name}", ("rows", name, width, dtype, *settings), make)
