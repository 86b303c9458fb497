"""Declarations for mixtures of experts: grouped products, the choice of experts, additions at indices."""

from __future__ import annotations

from collections.abc import Iterator

from nondet.core import operator as spec
from nondet.kernels.matmul.operator import BATCHES, CPU_TILES, PRODUCTS_SOURCE, implementations, on_both

_FOLDER = "nondet.kernels.experts"
_REPLACE = "nondet.kernels.dispatch.replacements"

EXPERTS = spec.Family(
    "moe", "mixtures of experts: grouped products, the choice of experts by topk, index_add, scatter_add"
)

GROUPED = spec.OrderClass(
    name="grouped",
    device="cuda",
    dtypes=("bfloat16", "float16", "float32"),
    accumulator="float32",
    order="Each row times its expert's weight, in class chain: the bits of that row's own plain product.",
    formula="y[r,n] = chain(x[r,:], w[expert(r),:,n])",
)


def _cells(sizes: spec.Sizes, device: str) -> list[spec.BenchCell]:
    experts, k, n, rows = (8, 256, 512, (8, 64)) if device == "cpu" else (64, 2048, 1536, (8, 64, 512, 4096, 16384))
    weight = {"K": sizes.k or k, "N": sizes.n or n, "E": experts}
    return [spec.BenchCell("grouped", {"M": m, **weight}) for m in sizes.m or rows]


def _work(s: spec.Shape) -> tuple[int, int]:
    """An expert's weight is read once if it has a row: M rows spread evenly reach min(E, M) of them."""
    used = min(s["E"], s["M"])
    return s["M"] * s["K"] + used * s["N"] * s["K"] + s["M"] * s["N"], 2 * s["M"] * s["N"] * s["K"]


_TESTED = {"cuda": ((16, 2048, 768), (8, 1000, 264)), "cpu": ((4, 256, 192),)}  # experts, K, N


def _questions(sizes: spec.Sizes, device: str, dtype: str) -> Iterator[spec.CertifyCell]:
    for place, (experts, k, n) in enumerate(_TESTED[device]):
        shape = {"E": experts, "K": sizes.k or k, "N": sizes.n or n}
        tiles = dtype == GROUPED.dtypes[0] and place == 0
        yield spec.CertifyCell(shape, BATCHES[device], layout="experts by columns", tiles=tiles)


GROUPED_MATMUL = spec.Operator(
    name="grouped_matmul",
    reference="nondet.kernels.reference:grouped_matmul",
    implementations=implementations(_FOLDER, "grouped_matmul"),
    family=EXPERTS,
    aten=(spec.AtenOperator(name="_grouped_mm", replacement=f"{_REPLACE}:grouped_mm"),),
    accuracy=spec.AccuracyBound("nondet.core.watch:of_grouped", PRODUCTS_SOURCE),
    claims=(
        spec.Claim(
            order=GROUPED,
            anchor=f"{_FOLDER}.cpu:grouped_anchor",
            members={"invariant": spec.INVARIANT, "triton/*": f"{_FOLDER}.cpu:grouped_tiles"},
        ),
        spec.Claim(order=CPU_TILES, anchor=f"{_FOLDER}.cpu:each_row_by_cpu_matmul"),
    ),
    operands=(
        spec.Operand(("M", "K")),
        spec.Operand(("E", "N", "K"), transposed=True),  # as models store it: each expert's like a linear layer's
        spec.Operand(("E",), made_by=f"{_FOLDER}.topk:even_shares"),
    ),
    bench=spec.Bench(cells=_cells, work=_work, group=("E", "K", "N"), options=frozenset({"n"}), aliases=("grouped",)),
    questions=_questions,
)
TOPK = spec.Operator(
    name="topk",
    reference="nondet.kernels.reference:topk",
    implementations=(
        spec.Implementation(name="stock", stock=True, targets={spec.ANY: "nondet.kernels.stock:topk"}),
        spec.Implementation(
            name="invariant",
            invariant=True,
            targets={"cuda": f"{_FOLDER}.cuda:topk", spec.ANY: "nondet.kernels.experts.topk:topk"},
        ),
    ),
    family=EXPERTS,
    aten=(spec.AtenOperator(name="topk", replacement=f"{_REPLACE}:topk"),),
)


def _implementations(name: str, **entries: dict[str, str]) -> tuple[spec.Implementation, ...]:
    target = {spec.ANY: f"nondet.kernels.experts.cpu:{name}"}
    return (
        spec.Implementation(name="stock", stock=True, targets={spec.ANY: f"nondet.kernels.stock:{name}"}),
        spec.Implementation(name="invariant", invariant=True, targets=target, entries=entries),
    )


_BOUND = spec.AccuracyBound("nondet.core.watch:of_scattered", "gamma_n sum|x| of n additions in the result's dtype")

INDEX_ADD = spec.Operator(
    name="index_add",
    reference="nondet.kernels.reference:index_add",
    implementations=_implementations("index_add", index_add_=on_both(_FOLDER, "index_add_")),
    family=EXPERTS,  # experts are added onto the sequence with it
    aten=(
        spec.AtenOperator(name="index_add_", replacement=f"{_REPLACE}:index_add_"),
        spec.AtenOperator(name="index_add", replacement=f"{_REPLACE}:index_add"),
        # of an embedding's gradient, and of a gather's
        spec.AtenOperator(
            name="embedding_dense_backward", replacement="nondet.kernels.dispatch.gradients:embedding_backward"
        ),
        spec.AtenOperator(name="_index_put_impl_", replacement="nondet.kernels.dispatch.gradients:index_put"),
    ),
    accuracy=_BOUND,
)
SCATTER_ADD = spec.Operator(
    name="scatter_add",
    reference="nondet.kernels.reference:scatter_add",
    implementations=_implementations("scatter_add"),
    family=EXPERTS,
    aten=(
        spec.AtenOperator(
            name="scatter_add", replacement=f"{_REPLACE}:scatter_add", out="scatter_add.out", in_place=True
        ),
    ),
    accuracy=_BOUND,
)
