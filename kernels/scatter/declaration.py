"""Additions at indices. The stock forms add in whatever order threads arrive, the invariant ones in index order."""

from __future__ import annotations

from nondet.core.operator import ANY, AccuracyBound, AtenOperator, Implementation, Operator
from nondet.kernels.experts.declaration import EXPERTS

__all__ = ["INDEX_ADD", "SCATTER_ADD"]


def _implementations(name: str) -> tuple[Implementation, ...]:
    return (
        Implementation(name="stock", stock=True, targets={ANY: f"nondet.kernels.stock:{name}"}),
        Implementation(name="invariant", invariant=True, targets={ANY: f"nondet.kernels.scatter.ordered:{name}"}),
    )


_BOUND = AccuracyBound("nondet.core.watch:of_scattered", "gamma_n sum|x| of n additions in the result's dtype")

INDEX_ADD = Operator(
    name="index_add",
    reference="nondet.kernels.reference:index_add",
    implementations=_implementations("index_add"),
    family=EXPERTS,  # expert by expert, tokens are added onto the sequence by it
    aten=tuple(
        AtenOperator(name=name, replacement=f"nondet.kernels.dispatch.moe:{name}")
        for name in ("index_add_", "index_add")
    ),
    accuracy=_BOUND,
)
SCATTER_ADD = Operator(
    name="scatter_add",
    reference="nondet.kernels.reference:scatter_add",
    implementations=_implementations("scatter_add"),
    family=EXPERTS,
    aten=(
        AtenOperator(
            name="scatter_add",
            replacement="nondet.kernels.dispatch.moe:scatter_add",
            out="scatter_add.out",
            in_place=True,
        ),
    ),
    accuracy=_BOUND,
)
