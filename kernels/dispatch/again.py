"""Plans: what a call like one before needs and nothing more.

A first call of an operator goes through its replacement, which looks at everything. What it found out holds for every
call of the same dtypes, shapes, strides, alignment and settings, and those are a plan's key; the numbers in a tensor
and its place in memory are not. So a model's layers of one shape share one plan, and a weight that changed is met as
any other. The bits are those of the replacement: the same library call, or the same arithmetic in fewer steps.

A short way takes the operator's own arguments and gives its result; None where it has none, and the replacement runs.
It is asked for plain tensors without gradients, while its family is on (see
`nondet.kernels.dispatch.functions.replacing`), and with `inside.active`: its own torch calls go to the originals.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch

from nondet.core.launch import note
from nondet.kernels.dispatch.replacements import note_hidden
from nondet.kernels.dispatch.state import DTYPES
from nondet.kernels.matmul import cpu as matmul_cpu
from nondet.kernels.pointwise.cpu import in_vectors, vectors_only
from nondet.kernels.rows import cpu as rows_cpu

Short = Callable[..., Any]

_CPU = torch._C.DispatchKeySet(torch._C.DispatchKey.CPU)
_FLOATING, _ONE = frozenset(DTYPES), np.float32(1.0)


def short_way(name: str, device: str, stock: Callable[..., Any], vectors_alone: bool) -> Short | None:
    """The short way of aten's `name` on "CPU" or "CUDA"; None where it has none.

    Args:
        stock: The original, boxed.
        vectors_alone: It is replaced by the original over vectors alone.
    """
    if device == "CUDA":
        return _WAYS_ON_CUDA.get(name)
    if vectors_alone:
        return _pointwise(stock)
    if name in ("_softmax", "_log_softmax"):
        return _normalizing(name.removeprefix("_"), stock)
    return _WAYS.get(name)


def _addmm(
    bias: torch.Tensor, a: torch.Tensor, b: torch.Tensor, *, beta: float = 1, alpha: float = 1
) -> torch.Tensor | None:
    return matmul_cpu.mm_again(a, b, bias) if beta == 1 and alpha == 1 else None


def _normalizing(name: str, stock: Callable[..., Any]) -> Short:
    def short(x: torch.Tensor, dim: int, half_to_float: bool) -> Any:
        shape, dtype = x.shape, x.dtype
        axes = len(shape)
        if half_to_float or not axes or dim not in (-1, axes - 1) or dtype not in _FLOATING:
            return None
        if not (x.is_contiguous() and x.numel()):
            return None
        rows = x if axes == 2 else x.view(-1, shape[-1])
        if dtype is not torch.float32:
            rows = rows.float()
        label = rows_cpu.whole(name, rows)
        if label is None or rows.data_ptr() & 63:
            return None
        note_hidden(name, x)
        note(label)
        out = stock(_CPU, rows, 1, False)
        if dtype is not torch.float32:
            out = out.to(dtype)
        return out if axes == 2 else out.view(shape)

    return short


def _numbers(x: torch.Tensor, width: int) -> tuple[torch.Tensor, np.ndarray[Any, Any]] | None:
    """x in float32, contiguous, and the same memory as rows [M, width]; None where it is not for these ways."""
    if x.dtype not in _FLOATING or not x.numel():
        return None
    wide = (x.detach() if x.requires_grad else x).float().contiguous()
    return wide, wide.numpy().reshape(-1, width)


@np.errstate(all="ignore")  # of infinities and NaN nobody is told by torch either
def _reduced(
    mean: bool, x: torch.Tensor, dim: Sequence[int] | None, keepdim: bool = False, *, dtype: Any = None
) -> torch.Tensor | None:
    axes = x.dim()
    if dtype is not None or not dim or len(dim) != 1 or not axes or dim[0] not in (-1, axes - 1):
        return None
    width = x.shape[-1]
    found = _numbers(x, width)
    if found is None:
        return None
    out = torch.empty((*x.shape[:-1], 1) if keepdim else x.shape[:-1], dtype=torch.float32)
    into = out.numpy().reshape(-1)
    rows_cpu.sums_of(found[1], into)
    if mean:
        into /= np.float32(width)
    return out if x.dtype is torch.float32 else out.to(x.dtype)


def _factor(x: torch.Tensor) -> np.ndarray[Any, Any]:
    """A norm's weight or bias in float32."""
    numbers: np.ndarray[Any, Any] = (x.detach() if x.requires_grad else x).float().numpy()
    return numbers


@np.errstate(all="ignore")  # as above
def _rms_norm(
    x: torch.Tensor, shape: Sequence[int], weight: torch.Tensor | None = None, eps: float | None = None
) -> torch.Tensor | None:
    if weight is None or eps is None or not x.dim() or len(shape) != 1 or weight.dtype is not x.dtype:
        return None
    width = x.shape[-1]
    found = _numbers(x, width) if weight.shape == x.shape[-1:] and shape[0] == width else None
    if found is None:
        return None
    wide, rows = found
    out = torch.empty_like(wide)
    normed = out.numpy().reshape(-1, width)
    np.multiply(rows, rows, out=normed)
    np.divide(rows, _roots(normed, eps)[:, None], out=normed)
    normed *= _factor(weight)
    return out if x.dtype is torch.float32 else out.to(x.dtype)


@np.errstate(all="ignore")  # as above
def _layer_norm(
    x: torch.Tensor, shape: Sequence[int], weight: torch.Tensor | None, bias: torch.Tensor | None, eps: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None:
    if not x.dim() or len(shape) != 1:
        return None
    ends, dtype = x.shape[-1:], x.dtype
    width = ends[0]
    if shape[0] != width or not (weight is None or weight.shape == ends) or not (bias is None or bias.shape == ends):
        return None
    dtypes = {p.dtype for p in (weight, bias) if p is not None}
    found = _numbers(x, width) if len(dtypes) < 2 and dtypes <= {dtype, torch.float32} else None
    if found is None:
        return None
    wide, rows = found
    out = torch.empty_like(wide)
    normed = out.numpy().reshape(-1, width)
    mean = rows_cpu.sums_of(rows)
    mean /= np.float32(width)
    np.subtract(rows, mean[:, None], out=normed)  # rounded, as what is squared and scaled below
    scale = _roots(normed * normed, eps)
    np.divide(_ONE, scale, out=scale)
    normed *= scale[:, None]
    if weight is not None:
        normed *= _factor(weight)
    if bias is not None:
        normed += _factor(bias)
    one_each = (*x.shape[:-1], 1)
    means, scales = torch.from_numpy(mean.reshape(one_each)), torch.from_numpy(scale.reshape(one_each))
    if dtype is torch.float32 and (weight is None or weight.dtype is dtype):
        return out, means, scales
    saved = dtype if weight is None else weight.dtype
    return out.to(dtype), means.to(saved), scales.to(saved)


def _roots(squares: np.ndarray[Any, Any], eps: float) -> np.ndarray[Any, Any]:
    """squares [M, K] -> sqrt(their sums / K + eps) [M], each step rounded."""
    scale = rows_cpu.sums_of(squares)
    scale /= np.float32(squares.shape[1])
    scale += np.float32(eps)
    return np.sqrt(scale, out=scale)


def _pointwise(stock: Callable[..., Any]) -> Short:
    def whole(x: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        """The original, straight, over vectors alone: as it is where no element of x is left to scalar code."""
        if not (x.dtype.is_floating_point and x.is_contiguous() and x.numel()):
            return None
        if in_vectors(x.numel()):
            return stock(_CPU, x, *args, **kwargs)
        return vectors_only(lambda piece: stock(_CPU, piece, *args, **kwargs), x)

    return whole


_WAYS: dict[str, Short] = {
    "linear": matmul_cpu.linear_again,
    "mm": matmul_cpu.mm_again,
    "addmm": _addmm,
    "mean.dim": partial(_reduced, True),
    "sum.dim_IntList": partial(_reduced, False),
    "rms_norm": _rms_norm,
    "native_layer_norm": _layer_norm,
}


def _on_cuda(linear: bool, a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor | None:
    products = sys.modules.get("nondet.kernels.matmul.cuda")  # imported with the first product, as every kernel
    again = getattr(products, "again", None)
    out: torch.Tensor | None = None if again is None else again(linear, a, b, bias)
    return out


def _addmm_on_cuda(
    bias: torch.Tensor, a: torch.Tensor, b: torch.Tensor, *, beta: float = 1, alpha: float = 1
) -> torch.Tensor | None:
    if beta != 1 or alpha != 1 or b.dim() != 2 or bias.shape != b.shape[1:]:
        return None
    return _on_cuda(True, a, b.mT, bias)


def _all_launched(what: object, *tensors: torch.Tensor | None) -> Any:
    """The results of a call like one that is remembered, a list; None where there was none."""
    common = sys.modules.get("nondet.kernels.triton_common")  # as above
    return None if common is None else common.again(what, *tensors)


def _launched(what: object, *tensors: torch.Tensor | None) -> Any:
    """The first of them."""
    made = _all_launched(what, *tensors)
    return None if made is None else made[0]


def _normalized_on_cuda(name: str, x: torch.Tensor, dim: int, half_to_float: bool) -> torch.Tensor | None:
    axes = x.dim()
    if half_to_float or not axes or dim not in (-1, axes - 1):
        return None
    out: torch.Tensor | None = _launched(name, x)
    if out is not None and axes > 2:
        note_hidden(name, x)
    return out


def _reduced_on_cuda(
    name: str, x: torch.Tensor, dim: Sequence[int] | None, keepdim: bool = False, *, dtype: Any = None
) -> torch.Tensor | None:
    axes = x.dim()
    if dtype is not None or not dim or len(dim) != 1 or not axes or dim[0] not in (-1, axes - 1):
        return None
    out: torch.Tensor | None = _launched(name, x)
    return out.unsqueeze(-1) if keepdim and out is not None else out


def _rms_norm_on_cuda(
    x: torch.Tensor, shape: Sequence[int], weight: torch.Tensor | None = None, eps: float | None = None
) -> torch.Tensor | None:
    if weight is None or eps is None or weight.dtype is not x.dtype or x.shape[-1:] != (*shape,):
        return None
    out: torch.Tensor | None = _launched(("rms_norm", eps), x, weight)
    return out


def _layer_norm_on_cuda(
    x: torch.Tensor, shape: Sequence[int], weight: torch.Tensor | None, bias: torch.Tensor | None, eps: float
) -> tuple[torch.Tensor, ...] | None:
    made = _all_launched(("layer_norm", eps), x, weight, bias) if x.shape[-1:] == (*shape,) else None
    return None if made is None else (*made,)


def _attention_on_cuda(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor | None:
    shape, keys = q.shape, k.shape
    if attn_mask is not None or dropout_p or q.dtype not in _FLOATING or len(shape) != 4 or len(keys) != 4:
        return None
    if (is_causal and shape[2] != keys[2]) or (shape[1] != keys[1] and not enable_gqa):
        return None
    out: torch.Tensor | None = _launched(("attention", is_causal or shape[2] == 1, scale, None, None), q, k, v)
    return None if out is None else out.transpose(1, 2)  # laid out as models want it back


_WAYS_ON_CUDA: dict[str, Short] = {
    "linear": partial(_on_cuda, True),
    "mm": partial(_on_cuda, False),
    "addmm": _addmm_on_cuda,
    "_softmax": partial(_normalized_on_cuda, "softmax"),
    "_log_softmax": partial(_normalized_on_cuda, "log_softmax"),
    "mean.dim": partial(_reduced_on_cuda, "mean"),
    "sum.dim_IntList": partial(_reduced_on_cuda, "sum"),
    "rms_norm": _rms_norm_on_cuda,
    "native_layer_norm": _layer_norm_on_cuda,
    "scaled_dot_product_attention": _attention_on_cuda,
}
