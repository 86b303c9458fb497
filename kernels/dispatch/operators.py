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

from nondet.kernels.dispatch import moe as dispatch_moe
from nondet.kernels.dispatch import products as dispatch_products
from nondet.kernels.dispatch import rows as dispatch_rows
from nondet.kernels.dispatch.kernels import DTYPES, Kernels, Leave, kernels_for
from nondet.kernels.dispatch.rows import elementwise, normalizing, reducing

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

FAMILIES: dict[str, str] = {
    "matmul": "matrix products: linear, matmul, mm, addmm, bmm, mv",
    "attention": "scaled_dot_product_attention, and the paged attention of transformers' continuous batching",
    "norm": "mean over axes, which transformers' RMSNorm is made of; those modules as a whole; rms_norm and layer_norm",
    "softmax": "softmax, log_softmax and logsumexp",
    "reduction": "sum over axes",
    "pointwise": "on a CPU, operators like silu whose last elements take another formula; on a GPU nothing that needs "
    "it, but transformers' rotary embedding in one launch, with stock's bits",
    **dispatch_moe.FAMILIES,
}

# family -> operator -> replacement
OPERATORS: dict[str, dict[str, Callable[..., Any]]] = {
    "matmul": {
        "linear": dispatch_products.linear,
        "mm": dispatch_products.mm,
        "addmm": dispatch_products.addmm,
        "bmm": dispatch_products.bmm,
        "baddbmm": dispatch_products.baddbmm,
        "mv": dispatch_products.mv,
        "addmv": dispatch_products.addmv,
        "dot": dispatch_products.dot,
    },
    "attention": {"scaled_dot_product_attention": dispatch_products.attention},
    "norm": {
        "mean.dim": reducing("mean"),
        "rms_norm": dispatch_rows.rms_norm,
        "native_layer_norm": dispatch_rows.layer_norm,
    },
    "softmax": {
        "_softmax": normalizing("softmax"),
        "_log_softmax": normalizing("log_softmax"),
        "logsumexp": dispatch_rows.logsumexp,
    },
    "reduction": {"sum.dim_IntList": reducing("sum")},
    # those of torch 2.11 and 2.13 that were seen to differ between vector body and scalar rest, with AVX2 and AVX-512
    "pointwise": {
        "rsqrt": dispatch_rows.rsqrt,
        **{name: elementwise(name) for name in ("silu", "sigmoid", "gelu", "mish", "softplus", "elu", "exp2")},
    },
    **dispatch_moe.OPERATORS,
}

# Operators that torch composes of others: a replacement of the whole has no gradient, so it is for inference alone.
COMPOSED = frozenset({"linear", "scaled_dot_product_attention", "rms_norm"})

# The out= and in-place forms that have a kernel of their own in torch.
_OUT = {
    "mean.dim": "mean.out",
    "sum.dim_IntList": "sum.IntList_out",
    **{
        name: f"{name}.out"
        for name in (
            *("mm", "addmm", "bmm", "baddbmm", "mv", "addmv", "dot", "_softmax", "_log_softmax", "logsumexp"),
            *("rsqrt", "silu", "sigmoid", "gelu", "mish", "softplus", "elu", "exp2"),
        )
    },
}
_IN_PLACE = ("addmm", "baddbmm", "addmv", "rsqrt", "silu", "sigmoid", "gelu", "mish", "elu", "exp2")


def variants(name: str, replacement: Callable[..., Any]) -> dict[str, Callable[..., Any]]:
    """The operator and its out= and in-place forms: name -> replacement."""
    found = {name: replacement}
    if name in _OUT:
        found[_OUT[name]] = _into(replacement)
    if name in _IN_PLACE:
        found[f"{name}_"] = _in_place(replacement)
    return found


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
