"""Which aten operators `batch_invariant()` replaces, family by family, and what it makes of those that it does not.

A replacement takes the device's `Kernels` and the operator's own arguments. It computes, or raises `Leave` with the
reason why it does not: then the original kernel runs, and the coverage says so. Every replacement also serves its
operator's out= and in-place forms, which code generators call.

What needs no table, since its bits can't depend on the batch, is the list of `nondet.kernels.dispatch.exact`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from nondet.core.operator import AtenOperator
from nondet.core.registry import declared, load_object
from nondet.kernels.dispatch.kernels import DTYPES, Kernels, Leave, kernels_for

__all__ = [
    "CERTIFIABLE",
    "COMPOSED",
    "COMPUTES",
    "DTYPES",
    "EXEMPT",
    "FAMILIES",
    "OPERATORS",
    "ORDERED_BY_SIZES",
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


def _power_is_exact(x: torch.Tensor, exponent: Any, *rest: Any, **more: Any) -> bool:
    return not x.dtype.is_complex and exponent in (0, 1, 2)


# Calls of replaced operators that need no replacement: a constant, a copy, a product that is rounded once.
EXEMPT: dict[str, Callable[..., bool]] = dict.fromkeys(
    ("pow.Tensor_Scalar", "pow.Tensor_Scalar_out", "pow_.Scalar"), _power_is_exact
)


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
    "_logcumsumexp",
    "prod.dim_int",
    "sort.stable",
    "std.correction",
    "var.correction",
    "var_mean.correction",
)


def _chain(matrices: Any, *rest: Any, **more: Any) -> bool:
    return len(matrices) > 2


def _planned(equation: str, operands: Any, *, path: Any = None) -> bool:
    if len(operands) > 2:
        return path is not None
    return len(operands) == 2 and _weight_is_open(equation)


@functools.lru_cache(maxsize=1024)
def _weight_is_open(equation: str) -> bool:
    """Is it matrices with vectors, of which torch takes one or the other for the last operand, as their sizes are?

    "btk,bk->bt" of one batch is another product than of two; "k,tk->t" and "hk,bhk->bh" take all rows for the weight.
    Only "tk,k->t" always ends in rows with one vector.
    """
    inputs, arrow, output = equation.replace(" ", "").replace("...", ".").partition("->")
    left, right = (set(labels) for labels in inputs.split(","))
    kept = set(output) if arrow else left ^ right
    own_left, own_right = (left - right) & kept, (right - left) & kept
    if bool(own_left) == bool(own_right):
        return False
    return bool(own_right) or len(left) > 2 or "." in left


# Composed of products that are replaced, in a way that the sizes decide, the number of rows among them: at risk.
ORDERED_BY_SIZES: dict[str, Callable[..., bool]] = {
    "einsum": _planned,
    "linalg_multi_dot": _chain,
    "linalg_multi_dot.out": _chain,
}

# Operators that torch registers for every device at once, as if composed of others, but that compute past the
# dispatcher: nothing else would be seen of them. What else has no kernel of its own for a device is made of operators
# that have one, and is seen as those. (All that has one, and is in none of these tables and not in
# `nondet.kernels.dispatch.exact`, is at risk.)
COMPUTES: tuple[str, ...] = (
    "_convolution",
    "_foreach_mm",
    "_grid_sampler_2d_cpu_fallback",
    "_grid_sampler_2d_cpu_fallback_backward",
    "_nnpack_spatial_convolution",
    "conv_tbc",
    "convolution",
    "convolution_backward",
    "mkldnn_convolution",
)
