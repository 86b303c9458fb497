"""Declaration of attention: prefill, chunks of it and decode in one order."""

from __future__ import annotations

from collections.abc import Iterator

from nondet.core import operator as spec
from nondet.kernels.matmul.operator import implementations, on_both

_FOLDER = "nondet.kernels.attention"
_STOCK = "nondet.kernels.stock"
_KINDS = ("bell", "wide", "outlier")

SEGMENTS = spec.OrderClass(
    name="segments",
    device="cuda",
    dtypes=("bfloat16", "float16", "float32"),
    accumulator="float32",
    order=(
        "For one query of one head: keys in segments of 512, each in tiles anchored at key 0 (128 keys for half "
        "precision and head dims to 128, 64 up to 256, 32 for float32). In a segment an online softmax over its tiles "
        "in order: scores by one chain over the head dim; the maximum in units of raw scores; p = exp2(fma(s, scale "
        "log2 e, -max scale log2 e)); row sums in 8 partial sums by halving, before p is rounded to the input's dtype; "
        "acc = acc alpha + p v, one chain over the tile's keys. Segments are then merged in order, and the result is "
        "acc / l, rounded once. No contraction but the fma's of the source."
    ),
    formula=(
        "L' = fma(L, exp2((M-M')c), l exp2((m-M')c)),  A' likewise,  M' = max(M, m),  c = scale log2(e);  out = A/L"
    ),
)
CPU_BLOCKS = spec.OrderClass(
    name="cpu-blocks",
    device="cpu",
    dtypes=("bfloat16", "float32"),
    accumulator="float32",
    order=(
        "For one query: keys in blocks of 64 anchored at the request's first key; in each the library's order at a "
        "certified tile; the largest score of all blocks is subtracted from each; sums of exponentials and weighted "
        "values are added block by block, in order, in float32."
    ),
    formula="p = exp(s - max s);  l = l + sum p,  acc = acc + p v,  block by block;  out = acc/l",
)

_Pairs = tuple[tuple[int, int], ...]
_DECODE: _Pairs = ((1, 1024), (1, 8192), (1, 32768), (8, 4096), (32, 2048), (64, 2048), (64, 8192))  # requests, keys
_CPU_DECODE: _Pairs = ((1, 512), (4, 256))
_PREFILL: tuple[int, ...] = (4096, 16384)
_CPU_PREFILL: tuple[int, ...] = (256,)
_GIVEN_BATCHES, _GIVEN_KEYS = (1, 8, 64), 2048  # where the user gave only the other one


def _cells(sizes: spec.Sizes, device: str) -> list[spec.BenchCell]:
    heads = {"Hq": 8, "Hkv": 2, "D": 64} if device == "cpu" else {"Hq": 32, "Hkv": 8, "D": 128}
    decode, prefill = (_CPU_DECODE, _CPU_PREFILL) if device == "cpu" else (_DECODE, _PREFILL)
    if sizes.m is not None or sizes.k is not None:
        keys = sizes.k if sizes.k is not None else _GIVEN_KEYS
        decode, prefill = tuple((b, keys) for b in sizes.m or _GIVEN_BATCHES), (keys,)
    steps = [spec.BenchCell("attention decode", {"B": b, "Tq": 1, "Tk": keys, **heads}) for b, keys in decode]
    return steps + [spec.BenchCell("attention prefill", {"B": 1, "Tq": t, "Tk": t, **heads}) for t in prefill]


def _work(s: spec.Shape) -> tuple[int, int]:
    """Query i of Tq has position Tk - Tq + i; a masked score is not counted as work. Two products of D."""
    queries, keys = s["Tq"], s["Tk"]
    pairs = queries * (keys - queries) + queries * (queries + 1) // 2
    elements = 2 * s["B"] * s["Hq"] * queries * s["D"] + 2 * s["B"] * s["Hkv"] * keys * s["D"]
    return elements, 4 * s["B"] * s["Hq"] * s["D"] * pairs


# (query heads, key heads, head dim) by default, and with --full; tokens; chunks
_Heads = tuple[tuple[int, int, int], ...]
_TESTED: dict[str, tuple[_Heads, _Heads, int, tuple[int, ...]]] = {
    "cuda": (((8, 2, 128), (4, 4, 64)), ((4, 1, 256), (4, 2, 96)), 1100, (128, 100)),
    "cpu": (((4, 2, 64),), ((2, 2, 128),), 200, (64, 50, 17)),
}


def _questions(sizes: spec.Sizes, device: str, dtype: str) -> Iterator[spec.CertifyCell]:
    """Prompts of three requests, whole and in chunks; of other dtypes than the first only some, unless named."""
    if (device, dtype) == ("cuda", "float32") and sizes.dtypes is None:
        return
    usual, more, tokens, chunks = _TESTED[device]
    values = ("prefill", "alone", "decode", "decode alone", *(f"chunks of {c}" for c in chunks), "ragged")
    named = sizes.full or sizes.dtypes is not None or dtype == "bfloat16"
    for query, key, dim in (*(usual if named else usual[:1]), *(more if sizes.full else ())):
        shape = {"B": 3, "Hq": query, "Hkv": key, "T": tokens, "D": dim}
        yield spec.CertifyCell(shape, values, _KINDS, "GQA" if query != key else "MHA")


ATTENTION = spec.Operator(
    name="attention",
    reference="nondet.kernels.reference:attention",
    implementations=implementations(
        _FOLDER,
        "attention",
        spec.Implementation(name="stock-flash", stock=True, targets={spec.ANY: f"{_STOCK}:attention_flash"}),
        spec.Implementation(name="stock-efficient", stock=True, targets={"cuda": f"{_STOCK}:attention_efficient"}),
        spec.Implementation(name="stock-cudnn", stock=True, targets={"cuda": f"{_STOCK}:attention_cudnn"}),
        # writes every score to memory, so a long prefill takes seconds
        spec.Implementation(name="stock-math", stock=True, slow=True, targets={spec.ANY: f"{_STOCK}:attention_math"}),
        attention_varlen=on_both(_FOLDER, "attention_varlen"),
        attention_backward=on_both(f"{_FOLDER}_backward", "attention_backward"),
        max_head_dim=on_both(_FOLDER, "MAX_HEAD_DIM"),
    ),
    family=spec.Family(
        "attention", "scaled_dot_product_attention, and the paged attention of transformers' continuous batching"
    ),
    aten=(
        spec.AtenOperator(
            name="scaled_dot_product_attention",
            replacement="nondet.kernels.dispatch.replacements:attention",
            composed=True,
        ),
    ),
    accuracy=spec.AccuracyBound(
        "nondet.core.watch:of_attention", "errors of the scores through exp, and gamma_Tk max|v|"
    ),
    claims=(
        spec.Claim(
            order=SEGMENTS,
            anchor=f"{_FOLDER}.cuda:attention_by_one_plan",
            members={
                "invariant": spec.INVARIANT,
                "hopper": f"{_FOLDER}.hopper:prefill",
                "split": f"{_FOLDER}.cuda:attention_split",
                "varlen": f"{_FOLDER}.cpu:segments_varlen",
            },
        ),
        spec.Claim(
            order=CPU_BLOCKS,
            anchor=f"{_FOLDER}.cpu:attention",
            members={"invariant": spec.INVARIANT, "varlen": f"{_FOLDER}.cpu:blocks_varlen"},
        ),
    ),
    operands=(
        spec.Operand(("B", "Hq", "Tq", "D")),
        spec.Operand(("B", "Hkv", "Tk", "D")),
        spec.Operand(("B", "Hkv", "Tk", "D")),
    ),
    bench=spec.Bench(cells=_cells, work=_work, group=("Tk",)),
    drawn_by="nondet.core.operands:of_attention",
    questions=_questions,
)
