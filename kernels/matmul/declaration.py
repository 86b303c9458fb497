"""Products: linear (a weight [N, K], as layers hold it) and matmul (a times b, batched or not)."""

from __future__ import annotations

from nondet.kernels.declaration import ANY, INVARIANT, AtenOperator, Claim, Family, Implementation, Operator, OrderClass

__all__ = ["CHAIN", "CPU_TILES", "LINEAR", "MATMUL", "PRODUCTS"]

_FOLDER = "nondet.kernels.matmul"
_REPLACE = "nondet.kernels.dispatch.products"

PRODUCTS = Family("matmul", "matrix products: linear, matmul, mm, addmm, bmm, mv")

CHAIN = OrderClass(
    name="chain",
    device="cuda",
    dtypes=("bfloat16", "float16", "float32", "float64"),
    accumulator="float32; float64 for float64",
    order=(
        "Each element of the result is one chain over K, from 0 to K - 1, in one accumulator that starts from zero; "
        "the bias is added to the accumulator; one rounding to the result's dtype ends it. Within a step of a matrix "
        "instruction (16 k for half precision on Hopper) the hardware's own order holds, so the anchor's instruction "
        "is part of the class: no split of K, no second accumulator, no running total that is fed back in another "
        "format. float32 goes through fused multiply-adds, one k after the other, never TF32."
    ),
    formula="c[m,n] = round(acc_K + bias[n]),  acc_0 = 0,  acc_(s+1) = mma(acc_s, a[m,ks], b[ks,n]), s rising",
)
CHAIN_TF32 = OrderClass(
    name="chain-tf32",
    device="cuda",
    dtypes=("float32",),
    accumulator="float32",
    order="As chain, of float32 operands that the matrix instruction takes as TF32 (10 bits of mantissa).",
    formula="c[m,n] = acc_K + bias[n],  acc_0 = 0,  acc_(s+1) = mma(acc_s, tf32(a[m,ks]), tf32(b[ks,n]))",
)
CPU_TILES = OrderClass(
    name="cpu-tiles",
    device="cpu",
    dtypes=("bfloat16", "float16", "float32"),
    accumulator="the library's: float32 for the dtypes here",
    order=(
        "Whatever order the library takes for a row in its base tile, a number of rows at which no row minds its place "
        "or its neighbours: `nondet.kernels.matmul.cpu_tiles` finds it for each weight at first use. So the class "
        "belongs to the weight's shape and layout, the instruction set and the thread count, never to M."
    ),
    formula="y[m,:] = library(base tile that holds x[m])[m]",
)


def _claims(operator: str) -> tuple[Claim, ...]:
    members = f"{_FOLDER}.members"
    chain = Claim(
        order=CHAIN,
        anchor=f"{members}:chain_anchor_{operator}",
        members={
            "invariant": INVARIANT,
            "cublaslt": f"{members}:cublaslt_{operator}",
            "cublaslt/*": f"{members}:cublaslt_ranks_{operator}",
            "triton/*": f"{members}:triton_tiles_{operator}",
            "tma/*": f"{members}:tma_tiles_{operator}",
        },
    )
    # cuBLASLt's TF32 kernels never had the chain's bits on an H200, so they claim nothing and the dispatcher asks none
    tf32 = Claim(
        order=CHAIN_TF32,
        anchor=f"{members}:chain_anchor_{operator}_tf32",
        members={"invariant": f"{members}:tf32_{operator}", "triton/*": f"{members}:triton_tiles_{operator}_tf32"},
    )
    return chain, tf32, Claim(order=CPU_TILES)


def _in_all_forms(name: str) -> AtenOperator:
    in_place = name in ("addmm", "baddbmm", "addmv")
    return AtenOperator(name=name, replacement=f"{_REPLACE}:{name}", out=f"{name}.out", in_place=in_place)


LINEAR = Operator(
    name="linear",
    reference="nondet.kernels.reference:linear",
    implementations=(
        Implementation(name="stock", stock=True, targets={ANY: "nondet.kernels.stock:linear"}),
        Implementation(
            name="invariant", invariant=True, targets={"cuda": f"{_FOLDER}.cuda:linear", "cpu": f"{_FOLDER}.cpu:linear"}
        ),
    ),
    family=PRODUCTS,
    aten=(AtenOperator(name="linear", replacement=f"{_REPLACE}:linear", composed=True),),
    claims=_claims("linear"),
)
MATMUL = Operator(
    name="matmul",
    reference="nondet.kernels.reference:matmul",
    implementations=(
        Implementation(name="stock", stock=True, targets={ANY: "nondet.kernels.stock:matmul"}),
        Implementation(
            name="invariant",
            invariant=True,
            targets={"cuda": f"{_FOLDER}.cuda:matmul", "cpu": f"{_FOLDER}.cpu:matmul"},
            entries={  # two and three dimensions apart, and with a bias
                "mm": {"cuda": f"{_FOLDER}.cuda:mm", "cpu": f"{_FOLDER}.cpu:mm"},
                "bmm": {"cuda": f"{_FOLDER}.cuda:bmm", "cpu": f"{_FOLDER}.cpu:bmm"},
            },
        ),
    ),
    family=PRODUCTS,
    aten=tuple(_in_all_forms(name) for name in ("mm", "addmm", "bmm", "baddbmm", "mv", "addmv", "dot")),
    claims=_claims("matmul"),
)
