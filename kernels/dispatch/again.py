"""Calls like one before: what they need and nothing more. On CUDA by short ways, on a CPU by what was bound for them.

The first call of an operator goes through its replacement, which checks everything. What it found holds for every call
of the same dtypes, shapes, strides, alignment and settings, which are the key of the cached launch; the numbers in a
tensor and its address are not. The bits are those of the replacement, because it is the same launch.

A short way takes the operator's own arguments and gives its result; None where nothing is cached, and the replacement
runs. It is called with plain tensors without gradients, while its family is on (see
`nondet.kernels.dispatch.functions.replacing`), and with `inside.active`: its own torch calls go to the originals.

On a CPU the table of decisions (`nondet.kernels.dispatch.functions.replacing`) remembers what a binder gave after the
replacement has computed such a call: a function of the same arguments, in which all that they decide is settled.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from nondet.kernels.attention import cpu as attention
from nondet.kernels.dispatch.replacements import note_hidden
from nondet.kernels.dispatch.state import DTYPES
from nondet.kernels.matmul import cpu as matmul
from nondet.kernels.rows import cpu as rows

_FLOATING = frozenset(DTYPES)


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
    common = sys.modules.get("nondet.kernels.triton_common")  # as above
    return None if common is None else common.again(what, *tensors)


def _launched(what: object, *tensors: torch.Tensor | None) -> Any:
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
    return None if out is None else out.transpose(1, 2)  # laid out as models need it


SHORT_WAYS: dict[str, Callable[..., Any]] = {
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


_Bound = Callable[..., Any] | None


def _bound_softmax(name: str, x: torch.Tensor, dim: int, half_to_float: bool) -> _Bound:
    if half_to_float or x.dim() < 2 or dim not in (-1, x.dim() - 1):
        return None
    kernel, reduce = getattr(rows, name), rows.reduction(name, rows.wide(x))

    def compute(x: torch.Tensor, dim: int, half_to_float: bool) -> Any:
        note_hidden(name, x)  # by its numbers
        return kernel(x, reduce)

    return compute


def _bound_reduction(
    name: str, x: torch.Tensor, dim: Sequence[int] | None, keepdim: bool = False, **options: Any
) -> _Bound:
    if options or x.dim() < 2 or not dim or len(dim) != 1 or dim[0] not in (-1, x.dim() - 1):
        return None
    kernel, reduce = getattr(rows, name), rows.reduction("sum", rows.wide(x))

    def compute(x: torch.Tensor, dim: Sequence[int], keepdim: bool = False) -> Any:
        out = kernel(x, reduce)
        return out.unsqueeze(-1) if keepdim else out

    return compute


def _bound_norm(kernel: Callable[..., Any], x: torch.Tensor, shape: Sequence[int], *more: Any) -> _Bound:
    sums = rows.reduction("sum", rows.wide(x))
    return lambda x, shape, *more: kernel(x, *more, sums)


def _bound_attention(
    q: torch.Tensor, k: torch.Tensor, v: Any, mask: Any = None, dropout: Any = 0, causal: bool = False, **options: Any
) -> _Bound:
    if mask is not None or (causal and q.shape[2] != k.shape[2]):
        return None
    way = attention.Way(causal or q.shape[2] == 1, None, None, options.get("scale"))
    return lambda q, k, v, *more, **options: attention.attend(q, k, v, way)


# aten operator -> its binder for a CPU
BINDERS: dict[str, Callable[..., _Bound]] = {
    "linear": matmul.bound_linear,
    "mm": matmul.bound_mm,
    "_softmax": partial(_bound_softmax, "softmax"),
    "_log_softmax": partial(_bound_softmax, "log_softmax"),
    "mean.dim": partial(_bound_reduction, "mean"),
    "sum.dim_IntList": partial(_bound_reduction, "sum"),
    "rms_norm": partial(_bound_norm, rows.rms_norm),
    "native_layer_norm": partial(_bound_norm, rows.layer_norm),
    "scaled_dot_product_attention": _bound_attention,
}
