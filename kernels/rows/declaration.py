"""Operators over the last axis: norms, softmaxes, sums."""

from __future__ import annotations

from nondet.kernels.declaration import ANY, AtenOperator, Claim, Family, Implementation, Operator, OrderClass

__all__ = [
    "CROSS_ENTROPY",
    "LAYER_NORM",
    "LOGSUMEXP",
    "LOG_SOFTMAX",
    "MEAN",
    "RMS_NORM",
    "RMS_NORM_RESIDUAL",
    "SOFTMAX",
    "SUM",
]

_FOLDER = "nondet.kernels.rows"
_REPLACE = "nondet.kernels.dispatch.rows"

NORMS = Family(
    "norm",
    "mean over axes, which transformers' RMSNorm is made of; those modules as a whole; rms_norm and layer_norm",
)
SOFTMAXES = Family("softmax", "softmax, log_softmax and logsumexp")
SUMS = Family("reduction", "sum over axes")

LANES = OrderClass(
    name="lanes",
    device="cuda",
    dtypes=("bfloat16", "float16", "float32"),
    accumulator="float32; float64 for float64",
    order=(
        "Over the last axis of width W. A row of at most 16384 is one chunk, a wider one is cut into chunks of 4096 "
        "from element 0. In a chunk, filled up with zeros to a power of two: element j is added to element j + n/2, "
        "for n = the length, half of it, ... until LANES are left (a quarter of the length, but at least 256 and at "
        "most 2048, and never more than the length); then 2j to 2j + 1 until one is left. Chunks' results, filled up "
        "to a power of two, 2j to 2j + 1 again. No contraction; one rounding at the end. Softmax and RMSNorm add "
        "their exponentials and squares in this order."
    ),
    formula="x'[j] = x[j] + x[j+n/2] for n > LANES;  x'[j] = x[2j] + x[2j+1] for n <= LANES;  sum = x'[0]",
)
CPU_ROWS = OrderClass(
    name="cpu-rows",
    device="cpu",
    dtypes=("bfloat16", "float32"),
    accumulator="float32",
    order="The library's own order for one row, as a row alone has it.",
    formula="y[m] = library(x[m])",
)
_CLAIMS = (Claim(order=LANES), Claim(order=CPU_ROWS))


def _implementations(name: str, *others: Implementation, **entries: dict[str, str]) -> tuple[Implementation, ...]:
    """Stock, others that are, and the invariant one on both devices."""
    stock = Implementation(name="stock", stock=True, targets={ANY: f"nondet.kernels.stock:{name}"})
    targets = {"cuda": f"{_FOLDER}.cuda:{name}", "cpu": f"{_FOLDER}.cpu:{name}"}
    return stock, *others, Implementation(name="invariant", invariant=True, targets=targets, entries=entries)


RMS_NORM = Operator(
    name="rms_norm",
    reference="nondet.kernels.reference:rms_norm",
    implementations=_implementations(
        "rms_norm",
        Implementation(name="stock-hf", stock=True, targets={ANY: "nondet.kernels.stock:rms_norm_hf"}),
    ),
    family=NORMS,
    aten=(AtenOperator(name="rms_norm", replacement=f"{_REPLACE}:rms_norm", composed=True),),
    claims=_CLAIMS,
)
RMS_NORM_RESIDUAL = Operator(
    name="rms_norm_residual",
    reference="nondet.kernels.reference:rms_norm_residual",
    implementations=_implementations("rms_norm_residual"),
    claims=_CLAIMS,
)
LAYER_NORM = Operator(
    name="layer_norm",
    family=NORMS,
    aten=(AtenOperator(name="native_layer_norm", replacement=f"{_REPLACE}:layer_norm"),),
)
MEAN = Operator(
    name="mean",
    reference="nondet.kernels.reference:mean",
    implementations=_implementations("mean"),
    family=NORMS,
    aten=(AtenOperator(name="mean.dim", replacement=f"{_REPLACE}:mean", out="mean.out"),),
    claims=_CLAIMS,
)
SOFTMAX = Operator(
    name="softmax",
    reference="nondet.kernels.reference:softmax",
    implementations=_implementations("softmax"),
    family=SOFTMAXES,
    aten=(AtenOperator(name="_softmax", replacement=f"{_REPLACE}:softmax", out="_softmax.out"),),
    claims=_CLAIMS,
)
LOG_SOFTMAX = Operator(
    name="log_softmax",
    reference="nondet.kernels.reference:log_softmax",
    implementations=_implementations("log_softmax"),
    family=SOFTMAXES,
    aten=(AtenOperator(name="_log_softmax", replacement=f"{_REPLACE}:log_softmax", out="_log_softmax.out"),),
    claims=_CLAIMS,
)
LOGSUMEXP = Operator(
    name="logsumexp",
    reference="nondet.kernels.reference:logsumexp",
    implementations=_implementations("logsumexp"),
    family=SOFTMAXES,
    aten=(AtenOperator(name="logsumexp", replacement=f"{_REPLACE}:logsumexp", out="logsumexp.out"),),
    claims=_CLAIMS,
)
CROSS_ENTROPY = Operator(  # under `batch_invariant()` it is made of log_softmax
    name="cross_entropy",
    reference="nondet.kernels.reference:cross_entropy",
    implementations=_implementations("cross_entropy"),
    claims=_CLAIMS,
)
SUM = Operator(
    name="sum",
    reference="nondet.kernels.reference:sum",
    implementations=_implementations("sum", sum_middle={"cuda": "nondet.kernels.experts.cuda_routing:sum_middle"}),
    family=SUMS,
    aten=(AtenOperator(name="sum.dim_IntList", replacement=f"{_REPLACE}:sum", out="sum.IntList_out"),),
    claims=(Claim(order=LANES, anchor=f"{_FOLDER}.members:lanes_sum"), Claim(order=CPU_ROWS)),
)
