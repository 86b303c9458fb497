"""Declarations of FP8 products with scales: torch._scaled_mm, its grouped form, and how activations are quantized."""

from __future__ import annotations

from collections.abc import Iterator

from nondet.core import operator as spec
from nondet.kernels.matmul.operator import implementations

_FOLDER, _REPLACE = "nondet.kernels.scaled", "nondet.kernels.dispatch.replacements"

SCALED = spec.Family("fp8", "FP8 products with scales: _scaled_mm, and transformers' FP8 linears")

_ORDER = (
    "K is cut into stretches of 128, from 0 on. {sums} A stretch's sum is a float32 number; where scales are in blocks "
    "it is multiplied by the product of its two scales; then it is added to a float32 total, in the order of k{fused}. "
    "Where b has one scale, the total is multiplied by the product of both; where each column has one, {rows}. A bias "
    "is added in float32; one rounding to the result's dtype ends it. No stretch is longer or shorter for another "
    "batch, and K is never split."
)
CHAIN_FP8 = spec.OrderClass(
    name="chain-fp8",
    device="cuda",
    dtypes=("float8_e4m3fn", "float8_e5m2"),
    accumulator="the matrix unit's within 128 k; float32 over them",
    order=_ORDER.format(
        sums="Within a stretch the matrix instruction's own accumulator runs from zero, and is never fed back.",
        fused=", by one fused multiply-add",
        rows="first by the column's and then by the row's",
    ),
    formula="c = round(((sum_s mma(0, a[m,ks], b[ks,n])) * sb[n]) * sa[m])  or  fma(mma(...), sa[m,s] * sb[s,n], sum)",
)
CPU_FP8 = spec.OrderClass(
    name="cpu-fp8",
    device="cpu",
    dtypes=("float8_e4m3fn", "float8_e5m2"),
    accumulator="exact within 128 k; float32 over them",
    order=_ORDER.format(
        sums="Within a stretch products and their sum are exact, and rounded to float32 once (float8_e5m2 is taken "
        "apart at 1, and the exact sums of the parts are added in float64).",
        fused="",
        rows="again by the product of both",
    ),
    formula="c = round((sum_s fl32(sum_k a[m,k] b[k,n])) * (sa[m] * sb[n]))  or  sum_s fl32(...) * (sa[m,s] * sb[s,n])",
)
_SOURCE = "gamma_K ||a|| ||b|| of a sum over K in any order (Higham 2002, 3.1); on a GPU of sums of 13 bits"

# (K, N) of Qwen3-8B's layers: 4 weights, 5 numbers of rows and 2 kinds of scales are 40 cases
_WEIGHTS = {"cuda": ((4096, 6144), (4096, 24576), (12288, 4096), (4096, 4096)), "cpu": ((1024, 1024), (2048, 512))}
_ROWS = {"cuda": (1, 16, 64, 512, 4096), "cpu": (1, 16, 128)}


def _cells(sizes: spec.Sizes, device: str) -> list[spec.BenchCell]:
    pairs = _WEIGHTS[device]
    if sizes.k is not None or sizes.n is not None:
        pairs = ((sizes.k or sizes.n or 0, sizes.n or sizes.k or 0),)
    return [
        spec.BenchCell(
            f"scaled_matmul, {how}", {"M": m, "K": k, "N": n, "scales": -(-k // 128) if how == "blocks" else 1}
        )
        for how in ("rows", "blocks")
        for k, n in pairs
        for m in sizes.m or _ROWS[device]
        if how == "rows" or k > 128
    ]


def _work(s: spec.Shape) -> tuple[int, int]:
    M, K, N, scales = (s[axis] for axis in ("M", "K", "N", "scales"))
    of_b = N if scales == 1 else scales * -(-N // 128)
    return M * K + N * K + 2 * M * N + 4 * (M * scales + of_b), 2 * M * N * K


_TESTED = {"cuda": ((4096, 4096), (12288, 1024), (1000, 777)), "cpu": ((1024, 192), (333, 217))}  # K, N
_BATCHES = {"cuda": (1, 2, 8, 16, 17, 33, 64, 65, 128, 129, 512, 1024, 4096), "cpu": (1, 2, 7, 16, 17, 33, 64)}


def _questions(sizes: spec.Sizes, device: str, dtype: str) -> Iterator[spec.CertifyCell]:
    for place, (K, N) in enumerate((sizes.layer,) if sizes.layer else _TESTED[device]):
        for how in ("tensor", "row", "block"):
            for out in ("float32", "bfloat16") if place == 0 else ("float32",):
                yield spec.CertifyCell({"K": K, "N": N}, _BATCHES[device], layout=f"{how} into {out}")


SCALED_MATMUL = spec.Operator(
    name="scaled_matmul",
    reference="nondet.kernels.reference:scaled_matmul",
    implementations=implementations(
        _FOLDER,
        "scaled_matmul",
        spec.Implementation(name="stock-padded", stock=True, targets={"cuda": f"{_FOLDER}.cuda:padded"}),
    ),
    family=SCALED,
    aten=(
        spec.AtenOperator(name="_scaled_mm", replacement=f"{_REPLACE}:scaled_mm", out="_scaled_mm.out"),
        spec.AtenOperator(name="_scaled_mm_v2", replacement=f"{_REPLACE}:scaled_mm_v2", out="_scaled_mm_v2.out"),
    ),
    accuracy=spec.AccuracyBound(f"{_FOLDER}.functions:bound", _SOURCE),
    operands=(
        spec.Operand(("M", "K")),
        spec.Operand(("N", "K"), transposed=True),
        spec.Operand(("M", "scales"), made_by=f"{_FOLDER}.functions:row_scales"),
        spec.Operand(("N", "scales"), made_by=f"{_FOLDER}.functions:column_scales"),
        spec.Operand((), made_by=f"{_FOLDER}.functions:result_dtype"),
    ),
    bench=spec.Bench(cells=_cells, work=_work, group=("K", "N", "scales"), options=frozenset({"n"}), fp8=True),
    claims=(
        spec.Claim(
            order=CHAIN_FP8,
            anchor=f"{_FOLDER}.cuda:anchor",
            members={
                "invariant": spec.INVARIANT,
                "triton/*": f"{_FOLDER}.cuda:tile_members",
                "library/*": f"{_FOLDER}.cuda:library_member",
            },
        ),
        spec.Claim(order=CPU_FP8, anchor=f"{_FOLDER}.cpu:anchor"),
    ),
    drawn_by=f"{_FOLDER}.functions:drawn",
    questions=_questions,
)
SCALED_GROUPED_MATMUL = spec.Operator(
    name="scaled_grouped_matmul",
    family=SCALED,
    aten=(
        spec.AtenOperator(name="_scaled_grouped_mm", replacement=f"{_REPLACE}:scaled_grouped_mm"),
        spec.AtenOperator(name="_scaled_grouped_mm_v2", replacement=f"{_REPLACE}:scaled_grouped_mm_v2"),
    ),
    reference="nondet.kernels.reference:scaled_grouped_matmul",
    implementations=implementations(_FOLDER, "scaled_grouped_matmul"),
    accuracy=spec.AccuracyBound(f"{_FOLDER}.functions:bound_grouped", _SOURCE),
)
QUANTIZE = spec.Operator(
    name="quantize",
    reference="nondet.kernels.reference:quantize",
    implementations=(
        spec.Implementation(name="stock", stock=True, targets={spec.ANY: f"{_FOLDER}.functions:quantize_tensor"}),
        spec.Implementation(name="stock-block", stock=True, targets={spec.ANY: f"{_FOLDER}.functions:quantize_block"}),
        spec.Implementation(name="invariant", invariant=True, targets={spec.ANY: f"{_FOLDER}.functions:quantize_row"}),
    ),
)
