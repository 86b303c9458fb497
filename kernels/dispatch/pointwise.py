"""Pointwise operators on a CPU, each by one formula: what a vector loop and its scalar rest may compute differently.

Which of them do differs from one instruction set, dtype and build of torch to the next, so none is trusted.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from nondet.kernels.dispatch.kernels import Kernels, Leave, require

__all__ = [
    "VECTORS_ALONE",
    "acos",
    "acosh",
    "asin",
    "asinh",
    "atan",
    "atanh",
    "cos",
    "cosh",
    "digamma",
    "elu",
    "erf",
    "erfc",
    "erfinv",
    "exp",
    "exp2",
    "expm1",
    "gelu",
    "hardsigmoid",
    "hardswish",
    "i0",
    "lgamma",
    "log",
    "log1p",
    "log2",
    "log10",
    "logit",
    "mish",
    "pow_scalar",
    "pow_scalar_",
    "rsqrt",
    "sigmoid",
    "silu",
    "sin",
    "sinc",
    "sinh",
    "softplus",
    "softshrink",
    "sqrt",
    "tan",
    "tanh",
]

_FLOATING_ONLY = frozenset(
    {"silu", "gelu", "mish", "softplus", "elu", "hardswish", "hardsigmoid", "softshrink", "pow.Tensor_Scalar"}
)


# Operators that are replaced by torch's own over vectors alone.
VECTORS_ALONE: set[str] = set()


def _elementwise(name: str) -> Callable[..., torch.Tensor]:
    """The operator by its vector body alone; integers as numbers of the default dtype, where torch takes them."""
    packet, _, overload = name.partition(".")
    operator = getattr(getattr(torch.ops.aten, packet), overload or "default")
    VECTORS_ALONE.add(name)

    def replace(kernels: Kernels, x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        from nondet.kernels.pointwise.cpu import vectors_only

        if not (x.dtype.is_floating_point or x.dtype.is_complex):
            if name in _FLOATING_ONLY:
                raise Leave  # torch's own error, or integers
            x = x.to(torch.get_default_dtype())
        return vectors_only(lambda piece: operator(piece, *args, **kwargs), x)

    return replace


def rsqrt(kernels: Kernels, x: torch.Tensor) -> torch.Tensor:
    """Two operations that IEEE 754 rounds correctly, so that no formula is left to choose; in float32, rounded last."""
    from nondet.kernels.rows.cpu import square_roots

    require(x)
    return (1.0 / square_roots(x.float())).to(x.dtype)


exp, exp2, expm1, log, log2 = map(_elementwise, ("exp", "exp2", "expm1", "log", "log2"))
log10, log1p, sin, cos, tan = map(_elementwise, ("log10", "log1p", "sin", "cos", "tan"))
sinh, cosh, tanh, asin, acos = map(_elementwise, ("sinh", "cosh", "tanh", "asin", "acos"))
atan, asinh, acosh, atanh, erf = map(_elementwise, ("atan", "asinh", "acosh", "atanh", "erf"))
erfc, erfinv, lgamma, digamma, i0 = map(_elementwise, ("erfc", "erfinv", "lgamma", "digamma", "i0"))
sinc, logit = map(_elementwise, ("sinc", "logit"))
silu, sigmoid, gelu, mish, softplus = map(_elementwise, ("silu", "sigmoid", "gelu", "mish", "softplus"))
sqrt = _elementwise("sqrt")  # MKL's, where torch was built with it: not the correctly rounded one
elu, hardswish, hardsigmoid, softshrink = map(_elementwise, ("elu", "hardswish", "hardsigmoid", "softshrink"))
pow_scalar = _elementwise("pow.Tensor_Scalar")


def pow_scalar_(kernels: Kernels, x: torch.Tensor, exponent: Any) -> torch.Tensor:
    """x ** exponent, in place."""
    return x.copy_(pow_scalar(kernels, x, exponent))
