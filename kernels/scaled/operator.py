"""FP8 products with scales, declared: torch._scaled_mm, its grouped form, and how activations are quantized."""

from __future__ import annotations

from nondet.core.operator import (
    ANY,
    INVARIANT,
    AccuracyBound,
    AtenOperator,
    Claim,
    Family,
    Implementation,
    Operator,
    OrderClass,
    ScaledForm,
)

_FOLDER, _REPLACE = "nondet.kernels.scaled", "nondet.kernels.dispatch.replacements"

SCALED = Family("fp8", "FP8 products with scales: _scaled_mm, and transformers' FP8 linears")

_ORDER = (
    "K is cut into stretches of 128, from 0 on. {sums} A stretch's sum is a float32 number; where scales are in blocks "
    "it is multiplied by the product of its two scales; then it is added to a float32 total, in the order of k. Where "
    "scales are per row or per tensor, the total is multiplied by the product of its two scales. A bias is added in "
    "float32; one rounding to the result's dtype ends it. No stretch is longer or shorter for another batch, and K is "
    "never split."
)
CHAIN_FP8 = OrderClass(
    name="chain-fp8",
    device="cuda",
    dtypes=("float8_e4m3fn", "float8_e5m2"),
    accumulator="the matrix unit's within 128 k; float32 over them",
    order=_ORDER.format(
        sums="Within a stretch the matrix instruction's own accumulator runs from zero, and is never fed back."
    ),
    formula="c = round((sum_s mma(0, a[m,ks], b[ks,n])) * (sa[m] * sb[n]))  or  sum_s mma(...) * (sa[m,s] * sb[s,n])",
)
CPU_FP8 = OrderClass(
    name="cpu-fp8",
    device="cpu",
    dtypes=("float8_e4m3fn", "float8_e5m2"),
    accumulator="exact within 128 k; float32 over them",
    order=_ORDER.format(
        sums="Within a stretch products and their sum are exact, and rounded to float32 once (float8_e5m2 is taken "
        "apart at 1, and the exact sums of the parts are added in float64)."
    ),
    formula="c = round((sum_s fl32(sum_k a[m,k] b[k,n])) * (sa[m] * sb[n]))  or  sum_s fl32(...) * (sa[m,s] * sb[s,n])",
)
_SOURCE = "gamma_K ||a|| ||b|| of a sum over K in any order (Higham 2002, 3.1); on a GPU of sums of 13 bits"

SCALED_MATMUL = Operator(
    name="scaled_matmul",
    reference="nondet.kernels.reference:scaled_matmul",
    implementations=(
        Implementation(name="stock", stock=True, targets={ANY: "nondet.kernels.stock:scaled_matmul"}),
        Implementation(
            name="invariant",
            invariant=True,
            targets={"cuda": f"{_FOLDER}.cuda:scaled_matmul", "cpu": f"{_FOLDER}.cpu:scaled_matmul"},
        ),
    ),
    family=SCALED,
    aten=(
        AtenOperator(name="_scaled_mm", replacement=f"{_REPLACE}:scaled_mm", out="_scaled_mm.out"),
        AtenOperator(name="_scaled_mm_v2", replacement=f"{_REPLACE}:scaled_mm_v2", out="_scaled_mm_v2.out"),
    ),
    accuracy=AccuracyBound(f"{_FOLDER}.functions:bound", _SOURCE),
    claims=(
        Claim(
            order=CHAIN_FP8,
            anchor=f"{_FOLDER}.cuda:anchor",
            members={"invariant": INVARIANT, "triton/*": f"{_FOLDER}.cuda:tile_members"},
        ),
        Claim(order=CPU_FP8, anchor=f"{_FOLDER}.cpu:anchor"),
    ),
    questions={
        "cuda": ScaledForm(
            layers=((4096, 4096), (12288, 1024), (1000, 777)),
            batches=(1, 2, 8, 16, 17, 33, 64, 65, 128, 129, 512, 1024, 4096),
        ),
        "cpu": ScaledForm(layers=((1024, 192), (333, 217)), batches=(1, 2, 7, 16, 17, 33, 64)),
    },
)
SCALED_GROUPED_MATMUL = Operator(
    name="scaled_grouped_matmul",
    reference="nondet.kernels.reference:scaled_grouped_matmul",
    implementations=(
        Implementation(name="stock", stock=True, targets={ANY: "nondet.kernels.stock:scaled_grouped_matmul"}),
        Implementation(
            name="invariant",
            invariant=True,
            targets={device: f"{_FOLDER}.{device}:scaled_grouped_matmul" for device in ("cuda", "cpu")},
        ),
    ),
    accuracy=AccuracyBound(f"{_FOLDER}.functions:bound_grouped", _SOURCE),
)
QUANTIZE = Operator(
    name="quantize",
    reference="nondet.kernels.reference:quantize",
    implementations=(
        Implementation(name="stock", stock=True, targets={ANY: f"{_FOLDER}.functions:quantize_tensor"}),
        Implementation(name="stock-block", stock=True, targets={ANY: f"{_FOLDER}.functions:quantize_block"}),
        Implementation(name="invariant", invariant=True, targets={ANY: f"{_FOLDER}.functions:quantize_row"}),
    ),
)
