"""Declarations of operators over the last axis: norms, softmaxes, sums."""

from __future__ import annotations

from functools import partial

from nondet.core import operator as spec
from nondet.kernels.matmul.operator import implementations

_FOLDER = "nondet.kernels.rows"
_REPLACE = "nondet.kernels.dispatch.replacements"
_GRADIENTS = "nondet.kernels.dispatch.gradients"

NORMS = spec.Family(
    "norm", "mean over axes, which transformers' RMSNorm is made of; those modules as a whole; rms_norm and layer_norm"
)
SOFTMAXES = spec.Family("softmax", "softmax, log_softmax and logsumexp")
SUMS = spec.Family("reduction", "sum over axes")

LANES = spec.OrderClass(
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
CPU_ROWS = spec.OrderClass(
    name="cpu-rows",
    device="cpu",
    dtypes=("bfloat16", "float32"),
    accumulator="float32",
    order=(
        "The library's own order for one row, as a row alone has it: NumPy's pairwise sum for sums, means and norms, "
        "torch's for softmax."
    ),
    formula="y[m] = library(x[m])",
)
_CLAIMS = (spec.Claim(order=LANES), spec.Claim(order=CPU_ROWS))


_implementations = partial(implementations, _FOLDER)
_VOCABULARY = 151936
_LOGITS = (
    (1, _VOCABULARY),
    (256, _VOCABULARY),
    (4096, _VOCABULARY),
)  # (rows, width): decode steps and beyond the cache
_HIDDEN = ((1, 4096), (256, 4096), (4096, 4096), (65536, 4096))


def _bench(section: str, axis: str, shapes: tuple[tuple[int, int], ...], passes: int, extra: str) -> spec.Bench:
    """Rows [M, axis] read or written `passes` times, and `extra` once: a weight as wide as a row, or a number each."""

    def work(s: spec.Shape) -> tuple[int, int]:
        once = {"weight": s[axis], "number a row": s["M"], "": 0}[extra]
        return passes * s["M"] * s[axis] + once, 0

    return spec.Bench(cells=spec.row_cells(section, axis, shapes), work=work, group=(axis,))


_SUM_KINDS = ("order", "wide", "cancel", "outlier", "bell")

_WIDTHS = {"cuda": (4096, 1000, 128, _VOCABULARY), "cpu": (1024, 1000, 128)}
_BATCHES = (1, 2, 3, 4, 7, 8, 15, 16, 17, 64, 100)
_ROWS = {"cuda": (*_BATCHES, 512), "cpu": _BATCHES}
_OF_NORMS = spec.row_questions(_SUM_KINDS[1:], _WIDTHS, _ROWS)
_OF_SUMS = spec.row_questions(_SUM_KINDS, _WIDTHS, _ROWS)
_OF_LOGITS = spec.row_questions(("bell", "outlier", "wide"), _WIDTHS, _ROWS)

# an odd width, and the vocabularies of Llama 2 and Qwen3
_OVER_LOGITS = spec.RowProbing(widths=(1000, 32000, _VOCABULARY), width_keys=("vocabulary",), numbers=("masked",))
_X_LOGITS = spec.Operand(("M", "V"), hard_scale=2.0**-8)  # unscaled, the largest logit takes all and no sum is rounded
_X_SUMS = spec.Operand(("M", "K"), hard_scale=2.0**-4)  # unscaled, a sum of 4,096 overflows float16


_LOGARITHM = spec.AccuracyBound(
    "nondet.core.watch:of_logarithm", "gamma_V, and roundings of max|x| and of the logarithm"
)

RMS_NORM = spec.Operator(
    name="rms_norm",
    reference="nondet.kernels.reference:rms_norm",
    implementations=_implementations(
        "rms_norm",
        spec.Implementation(name="stock-hf", stock=True, targets={spec.ANY: "nondet.kernels.stock:rms_norm_hf"}),
    ),
    family=NORMS,
    aten=(spec.AtenOperator(name="rms_norm", replacement=f"{_REPLACE}:rms_norm", composed=True),),
    accuracy=spec.AccuracyBound("nondet.core.watch:of_rms_norm", "gamma_H |y| of a sum of squares"),
    claims=_CLAIMS,
    operands=(spec.Operand(("M", "H")), spec.Operand(("H",))),
    # of Qwen3-8B, and an odd one
    probe=spec.RowProbing(widths=(4096, 128, 4097), width_keys=("hidden", "head_dim"), numbers=("tiny", "infinite")),
    bench=_bench("rms_norm", "H", (*_HIDDEN, (131072, 128)), 2, "weight"),
    questions=_OF_NORMS,
)
RMS_NORM_RESIDUAL = spec.Operator(
    name="rms_norm_residual",
    reference="nondet.kernels.reference:rms_norm_residual",
    implementations=_implementations("rms_norm_residual"),
    claims=_CLAIMS,
    operands=(spec.Operand(("M", "H")), spec.Operand(("M", "H")), spec.Operand(("H",))),
    bench=_bench("rms_norm_residual", "H", _HIDDEN, 4, "weight"),
    questions=_OF_NORMS,
)
LAYER_NORM = spec.Operator(
    name="layer_norm",
    family=NORMS,
    aten=(
        spec.AtenOperator(name="native_layer_norm", replacement=f"{_REPLACE}:layer_norm"),
        spec.AtenOperator(name="native_layer_norm_backward", replacement=f"{_GRADIENTS}:layer_norm_backward"),
    ),
)
MEAN = spec.Operator(
    name="mean",
    reference="nondet.kernels.reference:mean",
    implementations=_implementations("mean"),
    family=NORMS,
    aten=(spec.AtenOperator(name="mean.dim", replacement=f"{_REPLACE}:mean", out="mean.out"),),
    accuracy=spec.AccuracyBound("nondet.core.watch:of_mean", "gamma_K mean|x| (Higham 2002, 3.1)"),
    claims=_CLAIMS,
    operands=(_X_SUMS,),
    bench=_bench("mean", "K", _HIDDEN, 1, "number a row"),
    questions=_OF_SUMS,
)


def _of_logits(
    name: str, aten: str, moved: int, unit: str, accuracy: spec.AccuracyBound, *backward: spec.AtenOperator
) -> spec.Operator:
    return spec.Operator(
        name=name,
        reference=f"nondet.kernels.reference:{name}",
        implementations=_implementations(name),
        family=SOFTMAXES,
        aten=(spec.AtenOperator(name=aten, replacement=f"{_REPLACE}:{name}", out=f"{aten}.out"), *backward),
        accuracy=accuracy,
        claims=_CLAIMS,
        operands=(_X_LOGITS,),
        probe=_OVER_LOGITS,
        bench=_bench(name, "V", _LOGITS, moved, unit),
        questions=_OF_LOGITS,
    )


_PROBABILITIES = spec.AccuracyBound("nondet.core.watch:of_softmax", "gamma_V p, and the error of exp at x - max")
_OF_SOFTMAX = spec.AtenOperator(name="_softmax_backward_data", replacement=f"{_GRADIENTS}:softmax_backward")
_OF_LOG = spec.AtenOperator(name="_log_softmax_backward_data", replacement=f"{_GRADIENTS}:log_softmax_backward")
SOFTMAX = _of_logits("softmax", "_softmax", 2, "", _PROBABILITIES, _OF_SOFTMAX)
LOG_SOFTMAX = _of_logits("log_softmax", "_log_softmax", 2, "", _LOGARITHM, _OF_LOG)
LOGSUMEXP = _of_logits("logsumexp", "logsumexp", 1, "number a row", _LOGARITHM)
CROSS_ENTROPY = spec.Operator(  # under `batch_invariant()` it is made of log_softmax and a gather
    name="cross_entropy",
    family=SOFTMAXES,
    aten=(spec.AtenOperator(name="nll_loss_forward", replacement=f"{_GRADIENTS}:nll_loss"),),
    reference="nondet.kernels.reference:cross_entropy",
    implementations=_implementations("cross_entropy"),
    accuracy=_LOGARITHM,
    claims=_CLAIMS,
    operands=(_X_LOGITS, spec.Operand(("M",), below="V")),
    questions=_OF_LOGITS,
)
CUMSUM = spec.Operator(  # torch's own under `batch_invariant()`, which proves it at its first use
    name="cumsum",
    reference="nondet.kernels.reference:cumsum",
    implementations=(spec.Implementation(name="stock", stock=True, targets={spec.ANY: "nondet.kernels.stock:cumsum"}),),
    accuracy=spec.AccuracyBound(
        "nondet.core.watch:of_cumsum", "gamma_j sum|x| of the j elements so far (Higham 2002, 3.1)"
    ),
    operands=(_X_LOGITS,),
    probe=spec.RowProbing(
        widths=(1000, 32000), width_keys=("vocabulary",), adds=True, numbers=("denormal", "infinite")
    ),
)
SUM = spec.Operator(
    name="sum",
    reference="nondet.kernels.reference:sum",
    implementations=_implementations("sum", sum_middle={"cuda": "nondet.kernels.experts.cuda:sum_middle"}),
    family=SUMS,
    aten=(spec.AtenOperator(name="sum.dim_IntList", replacement=f"{_REPLACE}:sum", out="sum.IntList_out"),),
    accuracy=spec.AccuracyBound("nondet.core.watch:of_sum", "gamma_K sum|x| (Higham 2002, 3.1)"),
    claims=(spec.Claim(order=LANES, anchor=f"{_FOLDER}.cuda:lanes_sum"), spec.Claim(order=CPU_ROWS)),
    operands=(_X_SUMS,),
    questions=_OF_SUMS,
)
