"""Declarations of elementwise operators that IEEE 754 does not round correctly.

A CPU may use another formula for their last elements: which operators, depends on instruction set, dtype and build.
"""

from __future__ import annotations

from nondet.core.operator import AtenOperator, Family, Operator

_REPLACE = "nondet.kernels.dispatch.replacements"
_GRADIENTS = "nondet.kernels.dispatch.gradients"
_BACKWARD = ("silu_backward", "gelu_backward", "sigmoid_backward", "tanh_backward")
_NO_IN_PLACE = ("softplus", "softshrink")
NAMES = (
    *("sqrt", "rsqrt", "silu", "sigmoid", "gelu", "mish", "softplus", "elu", "hardswish", "hardsigmoid", "softshrink"),
    *("exp", "exp2", "expm1", "log", "log2", "log10", "log1p", "sin", "cos", "tan", "sinh", "cosh", "tanh", "asin"),
    *("acos", "atan", "asinh", "acosh", "atanh", "erf", "erfc", "erfinv", "lgamma", "digamma", "i0", "sinc", "logit"),
)

POINTWISE = Operator(
    name="pointwise",
    family=Family(
        "pointwise",
        "on a CPU, operators like silu whose last elements take another formula; on a GPU nothing that needs "
        "it, but transformers' rotary embedding in one launch, with stock's bits",
    ),
    aten=(
        *(
            AtenOperator(name=n, replacement=f"{_REPLACE}:{n}", out=f"{n}.out", in_place=n not in _NO_IN_PLACE)
            for n in NAMES
        ),
        *(AtenOperator(name=n, replacement=f"{_GRADIENTS}:{n}") for n in _BACKWARD),
        AtenOperator(name="pow.Tensor_Scalar", replacement=f"{_REPLACE}:pow_scalar", out="pow.Tensor_Scalar_out"),
        AtenOperator(name="pow_.Scalar", replacement=f"{_REPLACE}:pow_scalar_"),
    ),
)
