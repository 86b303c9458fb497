"""Operators on single elements whose last elements take another formula on a CPU: replaced there, and never compared.

Those of torch 2.11 and 2.13 that were seen to differ between vector body and scalar rest, with AVX2 and AVX-512.
"""

from __future__ import annotations

from nondet.kernels.declaration import AtenOperator, Family, Operator

__all__ = ["POINTWISE"]

_REPLACE = "nondet.kernels.dispatch.rows"
_NO_IN_PLACE = ("softplus",)

POINTWISE = Operator(
    name="pointwise",
    family=Family(
        "pointwise",
        "on a CPU, operators like silu whose last elements take another formula; on a GPU nothing that needs "
        "it, but transformers' rotary embedding in one launch, with stock's bits",
    ),
    aten=tuple(
        AtenOperator(name=name, replacement=f"{_REPLACE}:{name}", out=f"{name}.out", in_place=name not in _NO_IN_PLACE)
        for name in ("rsqrt", "silu", "sigmoid", "gelu", "mish", "softplus", "elu", "exp2")
    ),
)
