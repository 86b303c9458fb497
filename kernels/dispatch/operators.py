"""Which aten operators `batch_invariant()` replaces, family by family, and what it makes of those that it does not.

A replacement takes the device's `Kernels` and the operator's own arguments. It computes, or raises `Leave` with the
reason why it does not: then the original kernel runs, and the coverage says so. Every replacement also serves its
operator's out= and in-place forms, which code generators call.

Not in any table, since their bits can't depend on the batch: copies and gathers (embedding, index, cat), comparisons
(max, amax, argmax, clamp), integer arithmetic, pointwise operators on a GPU and those that IEEE 754 rounds correctly.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from nondet.kernels.declaration import AtenOperator
from nondet.kernels.dispatch.kernels import DTYPES, Kernels, Leave, kernels_for
from nondet.registry import declared, load_object

__all__ = [
    "ADDS_IF",
    "AT_RISK",
    "CERTIFIABLE",
    "COMPOSED",
    "DTYPES",
    "FAMILIES",
    "OPERATORS",
    "Kernels",
    "Leave",
    "kernels_for",
    "variants",
]

_ATEN: dict[str, AtenOperator] = {aten.name: aten for operator in declared().values() for aten in operator.aten}

FAMILIES: dict[str, str] = {o.family.name: o.family.text for o in declared().values() if o.family is not None}

# family -> operator -> replacement
OPERATORS: dict[str, dict[str, Callable[..., Any]]] = {
    family: {
        aten.name: load_object(aten.replacement)
        for operator in declared().values()
        if operator.family is not None and operator.family.name == family
        for aten in operator.aten
    }
    for family in FAMILIES
}

# Operators that torch composes of others: a replacement of the whole has no gradient, so it is for inference alone.
COMPOSED = frozenset(name for name, aten in _ATEN.items() if aten.composed)


def variants(name: str, replacement: Callable[..., Any]) -> dict[str, Callable[..., Any]]:
    """The operator and its out= and in-place forms: name -> replacement."""
    aten = _ATEN[name]
    forms = {name: replacement}
    if aten.out is not None:
        forms[aten.out] = _into(replacement)
    if aten.in_place:
        forms[f"{name}_"] = _in_place(replacement)
    return forms


def _into(replacement: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    def replace(kernels: Kernels, *args: Any, out: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        result = replacement(kernels, *args, **kwargs)
        if out.dtype != result.dtype:
            raise Leave("an out of another dtype")
        if out.shape != result.shape:
            out.resize_(result.shape)
        return out.copy_(result)

    return replace


def _in_place(replacement: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    def replace(kernels: Kernels, x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        result = replacement(kernels, x, *args, **kwargs)
        if result.shape != x.shape:
            raise Leave("shapes that do not fit")  # torch's own error
        return x.copy_(result)

    return replace


# Operators over one axis without a kernel here. Each (shape, dtype) is proven at its first use: whether stock gives
# every row the bits that the row has alone. Where it does it is left, as certified; where it does not it is at risk.
CERTIFIABLE: tuple[str, ...] = (
    "cumprod",
    "cumsum",
    "linalg_vector_norm",
    "logcumsumexp",
    "prod.dim_int",
    "sort.stable",
    "std.correction",
    "var.correction",
    "var_mean.correction",
)

# Operators that add over more than an axis of one row, or in no fixed order, and have no invariant kernel here; and
# attention kernels that are asked for by their own names. They run as they are, and the coverage counts them. Not seen
# at all: kernels outside of aten (FlashAttention's own library, custom operators).
AT_RISK: tuple[str, ...] = (
    "_efficient_attention_forward",
    "_flash_attention_forward",
    "_fused_rms_norm",
    "_scaled_dot_product_cudnn_attention",
    "_scaled_dot_product_efficient_attention",
    "_scaled_dot_product_flash_attention",
    "_scaled_dot_product_flash_attention_for_cpu",
    "_scaled_grouped_mm",
    "_scaled_mm",
    "addbmm",
    "convolution",
    "native_batch_norm",
    "native_group_norm",
    "scatter_add",
    "scatter_add_",
    "scatter_reduce.two",
)


def _accumulates(x: object, indices: object, values: object, accumulate: bool = False, *rest: object) -> bool:
    return accumulate


# At risk only where the arguments say so: without `accumulate` it writes.
ADDS_IF: dict[str, Callable[..., bool]] = {"_index_put_impl_": _accumulates}
