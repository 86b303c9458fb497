"""split_k: K cut into parts, which shows a cause and is nobody's stock.

On a CPU its "atomics" are a shuffle from a generator: what is shown there is that an order matters, not that a CPU
would choose it.
"""

from __future__ import annotations

from nondet.core.operator import AccuracyBound, Implementation, Operator
from nondet.kernels.matmul.declaration import PRODUCTS_SOURCE

__all__ = ["SPLIT_K"]

_FOLDER = "nondet.kernels.demos"

SPLIT_K = Operator(
    name="split_k",
    # by a name of its own: the probe says how K is cut, so the product's arguments are not the operator's
    reference=f"{_FOLDER}.split_k_cpu:reference",
    implementations=(
        Implementation(
            name="stock",  # so called beside the cure; `Implementation.stock` would say that users get it
            targets={"cuda": f"{_FOLDER}.split_k_cuda:split_k", "cpu": f"{_FOLDER}.split_k_cpu:split_k"},
        ),
        Implementation(
            name="invariant",
            invariant=True,
            targets={"cuda": f"{_FOLDER}.split_k_cuda:fixed_chunk", "cpu": f"{_FOLDER}.split_k_cpu:fixed_chunk"},
        ),
    ),
    accuracy=AccuracyBound("nondet.core.watch:of_matmul", PRODUCTS_SOURCE),
)
