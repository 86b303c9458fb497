"""What is bound on CUDA for calls like one before: what they need and nothing more.

The first call of an operator goes through its replacement, which checks everything. Then its binder, called with the
same arguments, gives a function of them in which all is settled that dtypes, shapes, strides, alignment and the
binder's settings decide; None where there is nothing shorter. The table of decisions
(`nondet.kernels.dispatch.functions.replacing`) has it called for later calls of the same key. The numbers in a tensor
and its address are open, and the bits are those of the replacement, because it is the same launch.

Arguments are plain tensors without gradients, and torch calls in here go to the originals.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch

from nondet.kernels.dispatch.replacements import note_hidden
from nondet.kernels.dispatch.state import DTYPES

_Bound = Callable[..., Any] | None
ALIGNMENT = {"cpu": 64, "cuda": 256}  # the most bytes of an address that a kernel's choice depends on


class Binder(NamedTuple):
    """What decides later calls of an operator."""

    # bind(*args, **kwargs) -> what gives the bits of the replacement for calls like this one, or None
    bind: Callable[..., _Bound]
    # gives what the process may change meanwhile and by which `bind` gives another function
    settings: Callable[[], object]


def _product_on_cuda(linear: bool, a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None = None) -> _Bound:
    products = sys.modules.get("nondet.kernels.matmul.cuda")  # imported with the first product, as every kernel
    bound: _Bound = None if products is None else products.bound(linear, a, b, bias)
    return bound


def _addmm_on_cuda(
    bias: torch.Tensor, a: torch.Tensor, b: torch.Tensor, *, beta: float = 1, alpha: float = 1
) -> _Bound:
    if beta != 1 or alpha != 1 or b.dim() != 2 or bias.shape != b.shape[1:]:
        return None
    product = _product_on_cuda(True, a, b.mT, bias)
    return None if product is None else lambda bias, a, b, **scales: product(a, b.mT, bias)


def _launches(what: object, *tensors: torch.Tensor | None) -> Any:
    """What makes the launches of an earlier call of `what` on tensors like these: all their results, as a list."""
    common = sys.modules.get("nondet.kernels.triton_common")  # as above
    return None if common is None else common.bound(what, *tensors)


def _normalized_on_cuda(name: str, x: torch.Tensor, dim: int, half_to_float: bool) -> _Bound:
    axes = x.dim()
    if half_to_float or not axes or dim not in (-1, axes - 1):
        return None
    launches = _launches(name, x)

    def compute(x: torch.Tensor, dim: int, half_to_float: bool) -> Any:
        if axes > 2:
            note_hidden(name, x)  # by its numbers
        return launches(x)[0]

    return launches and compute


def _reduced_on_cuda(
    name: str, x: torch.Tensor, dim: Sequence[int] | None, keepdim: bool = False, *, dtype: Any = None
) -> _Bound:
    axes = x.dim()
    if dtype is not None or not dim or len(dim) != 1 or not axes or dim[0] not in (-1, axes - 1):
        return None
    launches = _launches(name, x)
    if keepdim:
        return launches and (lambda x, *rest: launches(x)[0].unsqueeze(-1))
    return launches and (lambda x, *rest: launches(x)[0])


def _rms_norm_on_cuda(
    x: torch.Tensor, shape: Sequence[int], weight: torch.Tensor | None = None, eps: float | None = None
) -> _Bound:
    if weight is None or eps is None or weight.dtype is not x.dtype or x.shape[-1:] != (*shape,):
        return None
    launches = _launches(("rms_norm", eps), x, weight)
    return launches and (lambda x, shape, weight, eps: launches(x, weight)[0])


def _layer_norm_on_cuda(
    x: torch.Tensor, shape: Sequence[int], weight: torch.Tensor | None, bias: torch.Tensor | None, eps: float
) -> _Bound:
    if x.shape[-1:] != (*shape,):
        return None
    launches = _launches(("layer_norm", eps), x, weight, bias)
    return launches and (lambda x, shape, weight, bias, eps: (*launches(x, weight, bias),))


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
) -> _Bound:
    shape, keys = q.shape, k.shape
    if attn_mask is not None or dropout_p or q.dtype not in DTYPES or len(shape) != 4 or len(keys) != 4:
        return None
    if (is_causal and shape[2] != keys[2]) or (shape[1] != keys[1] and not enable_gqa):
        return None
    launches = _launches(("attention", is_causal or shape[2] == 1, scale, None, None), q, k, v)
    # laid out as models need it
    return launches and (lambda q, k, v, *rest, **more: launches(q, k, v)[0].transpose(1, 2))


_PRODUCTS_ON_CUDA: dict[str, Callable[..., _Bound]] = {
    "linear": partial(_product_on_cuda, True),
    "mm": partial(_product_on_cuda, False),
    "addmm": _addmm_on_cuda,
}
_LAUNCHES_ON_CUDA: dict[str, Callable[..., _Bound]] = {
    "_softmax": partial(_normalized_on_cuda, "softmax"),
    "_log_softmax": partial(_normalized_on_cuda, "log_softmax"),
    "mean.dim": partial(_reduced_on_cuda, "mean"),
    "sum.dim_IntList": partial(_reduced_on_cuda, "sum"),
    "rms_norm": _rms_norm_on_cuda,
    "native_layer_norm": _layer_norm_on_cuda,
    "scaled_dot_product_attention": _attention_on_cuda,
}
# float32 products are in TF32 where torch's switch says so; a library's other switches are not for our launches
_products_precision = partial(torch._C._get_fp32_precision_getter, "cuda", "matmul")
# launches are made on the current device, and are bound to tensors there
_current_device: Callable[[], object] = getattr(torch._C, "_cuda_getDevice", int)

# aten operator on CUDA -> its binder; on a CPU every call goes through its replacement
BINDERS = {name: Binder(bind, _products_precision) for name, bind in _PRODUCTS_ON_CUDA.items()}
BINDERS |= {name: Binder(bind, _current_device) for name, bind in _LAUNCHES_ON_CUDA.items()}
