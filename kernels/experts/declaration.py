"""Mixtures of experts: products of rows with their experts' weights, and the choice of experts."""

from __future__ import annotations

from nondet.kernels.declaration import ANY, INVARIANT, AtenOperator, Claim, Family, Implementation, Operator, OrderClass
from nondet.kernels.matmul.declaration import CPU_TILES

__all__ = ["EXPERTS", "GROUPED_MATMUL", "TOPK"]

_FOLDER = "nondet.kernels.experts"
_REPLACE = "nondet.kernels.dispatch.moe"

EXPERTS = Family("moe", "mixtures of experts: grouped products, the choice of experts by topk, index_add")

GROUPED = OrderClass(
    name="grouped",
    device="cuda",
    dtypes=("bfloat16", "float16", "float32"),
    accumulator="float32",
    order="Each row times its expert's weight, in class chain: the bits of that row's own plain product.",
    formula="y[r,n] = chain(x[r,:], w[expert(r),:,n])",
)

GROUPED_MATMUL = Operator(
    name="grouped_matmul",
    reference="nondet.kernels.reference:grouped_matmul",
    implementations=(
        Implementation(name="stock", stock=True, targets={ANY: "nondet.kernels.stock:grouped_matmul"}),
        Implementation(
            name="invariant",
            invariant=True,
            targets={"cuda": f"{_FOLDER}.cuda:grouped_matmul", "cpu": f"{_FOLDER}.cpu:grouped_matmul"},
        ),
    ),
    family=EXPERTS,
    aten=(AtenOperator(name="_grouped_mm", replacement=f"{_REPLACE}:grouped_mm"),),
    claims=(
        Claim(
            order=GROUPED,
            anchor=f"{_FOLDER}.members:grouped_anchor",
            members={"invariant": INVARIANT, "triton/*": f"{_FOLDER}.members:grouped_tiles"},
        ),
        Claim(order=CPU_TILES, anchor=f"{_FOLDER}.members:each_row_by_cpu_matmul"),
    ),
)
TOPK = Operator(
    name="topk",
    reference="nondet.kernels.reference:topk",
    implementations=(
        Implementation(name="stock", stock=True, targets={ANY: "nondet.kernels.stock:topk"}),
        Implementation(
            name="invariant",
            invariant=True,
            targets={"cuda": f"{_FOLDER}.cuda_routing:topk", ANY: f"{_FOLDER}.topk:topk"},
        ),
    ),
    family=EXPERTS,
    aten=(AtenOperator(name="topk", replacement=f"{_REPLACE}:topk"),),
)
