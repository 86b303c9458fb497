"""Declarations of gradients of single operators, for a row or a request of attention.

`nondet probe backward` tests the same under autograd, and in addition the sums over the batch.
"""

from __future__ import annotations

from nondet.core import operator as spec

_X = spec.Operand(("M", "W"), hard_scale=2.0**-8)
_BATCHES = (1, 2, 3, 4, 7, 8, 15, 16, 17, 64)
_HEADS = {"cuda": {"Hq": 32, "Hkv": 8, "D": 128}, "cpu": {"Hq": 8, "Hkv": 2, "D": 64}}
_REQUESTS = {"cuda": ((1, 4096), (4, 1024)), "cpu": ((1, 256), (4, 64))}  # requests, tokens

CPU_GRADIENTS = spec.OrderClass(
    name="cpu-gradients",
    device="cpu",
    dtypes=("bfloat16", "float32"),
    accumulator="float32",
    order=(
        "Of a row: its sums in the order of class cpu-rows, all else element by element in float32, by torch's vectors "
        "where IEEE 754 does not round it. Of a request of attention: queries in blocks of 128, keys to a multiple "
        "of 64, both from its first; products in class cpu-tiles, sums over keys pairwise; blocks added in order."
    ),
    formula="softmax: p (g - sum g p);  log_softmax: g - exp(y) sum g;  rms_norm: r (wg - n mean(wg n)), n = x r",
)


def _gradient(
    name: str, operands: tuple[spec.Operand, ...], bench: spec.Bench, questions: spec.Questions
) -> spec.Operator:
    ours = f"nondet.kernels.dispatch.differentiable:{name}_gradient"
    return spec.Operator(
        name=f"{name}_gradient",
        reference=f"nondet.kernels.reference:{name}_gradient",
        implementations=(
            spec.Implementation(name="stock", stock=True, targets={spec.ANY: f"nondet.kernels.stock:{name}_gradient"}),
            spec.Implementation(name="invariant", invariant=True, targets={spec.ANY: ours}),
        ),
        claims=(spec.Claim(order=CPU_GRADIENTS),),
        operands=operands,
        bench=bench,
        questions=questions,
    )


def _of_rows(
    name: str, kinds: tuple[str, ...], shapes: tuple[tuple[int, int], ...], weight: bool = False
) -> spec.Operator:
    section = f"{name} gradient"

    def work(s: spec.Shape) -> tuple[int, int]:
        return 3 * s["M"] * s["W"] + weight * s["W"], 0

    operands = (_X, spec.Operand(("M", "W")), *([spec.Operand(("W",))] if weight else []))
    questions = spec.row_questions(kinds, {"cpu": (1024, 1000, 128)}, {"cpu": _BATCHES})
    return _gradient(
        name, operands, spec.Bench(cells=spec.row_cells(section, "W", shapes), work=work, group=("W",)), questions
    )


def _requests(sizes: spec.Sizes, device: str) -> list[spec.BenchCell]:
    pairs: tuple[tuple[int, int], ...] = _REQUESTS[device]
    if sizes.m is not None or sizes.k is not None:
        pairs = tuple((m, sizes.k or pairs[0][1]) for m in sizes.m or (1, 4))
    return [spec.BenchCell("attention gradient", {"M": m, "T": tokens, **_HEADS[device]}) for m, tokens in pairs]


def _of_attention(s: spec.Shape) -> tuple[int, int]:
    tokens, pairs = s["M"] * s["T"] * s["D"], s["T"] * (s["T"] + 1) // 2
    return tokens * (3 * s["Hq"] + 4 * s["Hkv"]), 12 * s["M"] * s["Hq"] * s["D"] * pairs


_LOGITS, _HIDDEN = ((256, 151936), (4096, 151936)), ((256, 4096), (4096, 4096), (65536, 4096))
SOFTMAX_GRADIENT = _of_rows("softmax", ("bell", "outlier", "wide"), _LOGITS)
LOG_SOFTMAX_GRADIENT = _of_rows("log_softmax", ("bell", "outlier", "wide"), _LOGITS)
SILU_GRADIENT = _of_rows("silu", ("bell", "wide"), ((256, 12288), (4096, 12288)))
RMS_NORM_GRADIENT = _of_rows("rms_norm", ("wide", "cancel", "outlier", "bell"), _HIDDEN, weight=True)
ATTENTION_GRADIENT = _gradient(
    "attention",
    tuple(spec.Operand(("M", heads, "T", "D")) for heads in ("Hq", "Hq", "Hkv", "Hkv")),
    spec.Bench(cells=_requests, work=_of_attention, group=("T",)),
    spec.row_questions(
        ("bell", "wide", "outlier"), {"cpu": (64,)}, {"cpu": (1, 2, 3, 5)}, {"Hq": 4, "Hkv": 2, "T": 100}
    ),
)
