"""Declarations of products: linear (a weight [N, K], as layers store it), matmul (a times b), and K cut into parts."""

from __future__ import annotations

from collections.abc import Iterator

from nondet.core import operator as spec

_FOLDER = "nondet.kernels.matmul"
_REPLACE = "nondet.kernels.dispatch.replacements"

PRODUCTS = spec.Family("matmul", "matrix products: linear, matmul, mm, addmm, bmm, mv")

CHAIN = spec.OrderClass(
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
CHAIN_TF32 = spec.OrderClass(
    name="chain-tf32",
    device="cuda",
    dtypes=("float32",),
    accumulator="float32",
    order="As chain, of float32 operands that the matrix instruction takes as TF32 (10 bits of mantissa).",
    formula="c[m,n] = acc_K + bias[n],  acc_0 = 0,  acc_(s+1) = mma(acc_s, tf32(a[m,ks]), tf32(b[ks,n]))",
)
CPU_TILES = spec.OrderClass(
    name="cpu-tiles",
    device="cpu",
    dtypes=("bfloat16", "float16", "float32"),
    accumulator="the library's: float32 for the dtypes here",
    order=(
        "Whatever order the library takes for a row in its base tile, a number of rows at which no row minds its place "
        "or its neighbours: `nondet.kernels.matmul.cpu_tiles` finds it for each weight at first use. The library is "
        "oneDNN's inner product for a float32 weight of 2^14 numbers or more in a layer's layout, where that can be "
        "proven, else the GEMM that torch was built with. So the class belongs to the weight's shape and layout, the "
        "instruction set and the thread count, never to M."
    ),
    formula="y[m,:] = library(base tile that holds x[m])[m]",
)


def on_both(folder: str, name: str) -> dict[str, str]:
    """What is called so in the folder's cuda.py and cpu.py."""
    return {device: f"{folder}.{device}:{name}" for device in ("cuda", "cpu")}


def implementations(
    folder: str, name: str, *others: spec.Implementation, **entries: dict[str, str]
) -> tuple[spec.Implementation, ...]:
    """torch's own, `others`, and the invariant one: the functions of that name `on_both` devices."""
    stock = spec.Implementation(name="stock", stock=True, targets={spec.ANY: f"nondet.kernels.stock:{name}"})
    ours = spec.Implementation(name="invariant", invariant=True, targets=on_both(folder, name), entries=entries)
    return stock, *others, ours


def _claims(operator: str) -> tuple[spec.Claim, ...]:
    members = f"{_FOLDER}.cuda"
    chain = spec.Claim(
        order=CHAIN,
        anchor=f"{members}:chain_anchor_{operator}",
        members={
            "invariant": spec.INVARIANT,
            "cublaslt": f"{members}:cublaslt_{operator}",
            "cublaslt/*": f"{members}:cublaslt_ranks_{operator}",
            "triton/*": f"{members}:triton_tiles_{operator}",
            "tma/*": f"{members}:tma_tiles_{operator}",
            "hopper/*": f"{members}:hopper_tiles_{operator}",
        },
    )
    # cuBLASLt's TF32 kernels lack the chain's bits on an H200, so they claim nothing and the dispatcher skips them
    tf32 = spec.Claim(
        order=CHAIN_TF32,
        anchor=f"{members}:chain_anchor_{operator}_tf32",
        members={"invariant": f"{members}:tf32_{operator}", "triton/*": f"{members}:triton_tiles_{operator}_tf32"},
    )
    return chain, tf32, spec.Claim(order=CPU_TILES)


def _in_all_forms(name: str) -> spec.AtenOperator:
    in_place = name in ("addmm", "baddbmm", "addmv")
    return spec.AtenOperator(name=name, replacement=f"{_REPLACE}:{name}", out=f"{name}.out", in_place=in_place)


# (K, N) of the layers of Qwen3-8B and Qwen3-0.6B, a square, and a long K with few columns: the hardest for a chain
_WEIGHTS = ((4096, 6144), (4096, 24576), (12288, 4096), (8192, 8192), (4096, 4096), (1024, 3072), (14336, 1024))
_ROWS = (1, 8, 16, 64, 128, 256, 512, 1024, 2048, 4096, 8192)
_CPU_WEIGHTS, _CPU_ROWS = ((1024, 1024), (2048, 512)), (1, 16, 128)


def product_bench(section: str, weights: tuple[tuple[int, int], ...], rows: tuple[int, ...]) -> spec.Bench:
    """The weights and rows of a GPU; a CPU has its own. A single size applies to K and N."""

    def cells(sizes: spec.Sizes, device: str) -> list[spec.BenchCell]:
        on_cpu = device == "cpu"
        pairs = _CPU_WEIGHTS if on_cpu else weights
        if sizes.k is not None or sizes.n is not None:
            pairs = ((sizes.k or sizes.n or 0, sizes.n or sizes.k or 0),)
        jigsaw = spec.tile_borders(1, 256 if on_cpu else 4096) if sizes.jigsaw else None
        batches = sizes.m or jigsaw or (_CPU_ROWS if on_cpu else rows)
        return [spec.BenchCell(section, {"M": m, "K": k, "N": n}) for k, n in pairs for m in batches]

    return spec.Bench(cells=cells, work=_work, group=("K", "N"), options=frozenset({"n", "jigsaw"}))


def _work(s: spec.Shape) -> tuple[int, int]:
    return s["M"] * s["K"] + s["N"] * s["K"] + s["M"] * s["N"], 2 * s["M"] * s["N"] * s["K"]


_QWEN_SMALL = ("Qwen3-0.6B down_proj", 3072, 1024)
_LAYERS = {
    "cuda": {
        "bfloat16": (
            ("Qwen3-8B qkv_proj", 4096, 6144),
            ("Qwen3-8B o_proj", 4096, 4096),
            ("Qwen3-8B down_proj", 12288, 4096),
            _QWEN_SMALL,
            ("Qwen3-0.6B gate_proj up_proj", 1024, 3072),
            ("Llama-3.2-1B down_proj", 8192, 2048),
        ),
        "float16": (("Qwen3-8B o_proj", 4096, 4096), _QWEN_SMALL),
        "float32": (_QWEN_SMALL,),
        "float64": (("", 512, 384),),
    },
    "cpu": {
        "bfloat16": (("Qwen3-0.6B gate_proj up_proj", 1024, 3072), ("", 768, 2048), ("", 1000, 1024)),
        "float32": (("Qwen3-0.6B o_proj", 2048, 1024), ("", 768, 2048)),
        "float16": (("", 1024, 1024),),
    },
}
BATCHES = {
    "cuda": (1, 2, 3, 4, 7, 8, 15, 16, 17, 31, 32, 33, 64, 65, 100, 128, 129, 255, 256, 384, 513, 1024, 2048, 4096),
    "cpu": (1, 2, 3, 5, 8, 13, 16, 17, 31, 33, 64, 65, 100, 128),
}
_FEW = {"cuda": (1, 2, 7, 16, 17, 33, 64, 129, 300, 1024), "cpu": (1, 2, 7, 16, 17, 33, 64)}
_ODD = {"cuda": {"K": 1000, "N": 777}, "cpu": {"K": 333, "N": 217}}
_BATCHED = {"cuda": {"K": 128, "N": 1024}, "cpu": {"K": 128, "N": 192}}


def _questions(
    main: str,
    layouts: tuple[str, ...],
    odd_layouts: tuple[str, ...],
    full_layouts: tuple[str, ...] = (),
    batched: tuple[str, ...] = (),
) -> spec.Questions:
    """Of every layer in the `main` layout, if any, and of the first layer in the others. The first dtype has
    every batch size and every member. `odd_layouts`: of sizes that are multiples of no tile."""

    def questions(sizes: spec.Sizes, device: str, dtype: str) -> Iterator[spec.CertifyCell]:
        leading, few = dtype == next(iter(_LAYERS[device])), _FEW[device]
        given = (("", *sizes.layer),) if sizes.layer else sizes.layers
        weights = [{"K": K, "N": N} for _, K, N in given or _LAYERS[device][dtype]]
        for weight in weights if main else ():
            yield spec.CertifyCell(weight, BATCHES[device] if leading else few, (), main, tiles=leading)
        others = [(weights[0], layout) for layout in layouts]
        others += [(_ODD[device], layout) for layout in odd_layouts if not given]
        others += [(weights[0], layout) for layout in full_layouts if sizes.full]
        inner = weights[0] if given else _BATCHED[device]
        others += [({"B": 4, **inner}, layout) for i, layout in enumerate(batched) if i == 0 or sizes.full]
        for weight, layout in others:
            yield spec.CertifyCell(weight, few, (), layout, tiles=False)

    return questions


PRODUCTS_SOURCE = "gamma_K ||x|| ||w|| of a sum over K in any order (Higham 2002, 3.1)"

LINEAR = spec.Operator(
    name="linear",
    reference="nondet.kernels.reference:linear",
    implementations=implementations(_FOLDER, "linear"),
    family=PRODUCTS,
    aten=(spec.AtenOperator(name="linear", replacement=f"{_REPLACE}:linear", composed=True),),
    accuracy=spec.AccuracyBound("nondet.core.watch:of_linear", PRODUCTS_SOURCE),
    claims=_claims("linear"),
    operands=(spec.Operand(("M", "K")), spec.Operand(("N", "K"))),
    bench=product_bench("linear", _WEIGHTS, _ROWS),
    drawn_by="nondet.core.operands:of_linear",
    questions=_questions("nt", ("nt, bias", "nt, strided"), ("nt", "nt, bias"), ("nt, offset", "nt, strided, bias")),
)
MATMUL = spec.Operator(
    name="matmul",
    reference="nondet.kernels.reference:matmul",
    implementations=implementations(  # separate entries for two and three dimensions, and with a bias
        _FOLDER, "matmul", mm=on_both(_FOLDER, "mm"), bmm=on_both(_FOLDER, "bmm")
    ),
    family=PRODUCTS,
    aten=tuple(_in_all_forms(name) for name in ("mm", "addmm", "bmm", "baddbmm", "mv", "addmv", "dot")),
    accuracy=spec.AccuracyBound("nondet.core.watch:of_matmul", PRODUCTS_SOURCE),
    claims=_claims("matmul"),
    operands=(spec.Operand(("M", "K")), spec.Operand(("K", "N"))),
    bench=product_bench("matmul", ((4096, 4096), (1024, 3072)), (1, 16, 128, 1024, 4096)),
    drawn_by="nondet.core.operands:of_matmul",
    questions=_questions("", ("nn", "tn", "nt"), ("nn",), batched=("nn", "nt")),
)


# split_k: K cut into parts, which demonstrates a cause and is not a stock implementation. On a CPU its "atomics" are a
# shuffle from a generator: it shows that the order matters, not that a CPU would choose it.

SPLIT_K = spec.Operator(
    name="split_k",
    # by a name of its own: the probe chooses how K is cut, so the arguments differ from the operator's
    reference=f"{_FOLDER}.split_k_cpu:reference",
    implementations=(
        spec.Implementation(
            name="stock",  # its name next to the fix; `Implementation.stock` would mean that users get it
            targets={"cuda": f"{_FOLDER}.split_k_cuda:split_k", "cpu": f"{_FOLDER}.split_k_cpu:split_k"},
        ),
        spec.Implementation(
            name="invariant",
            invariant=True,
            targets={"cuda": f"{_FOLDER}.split_k_cuda:fixed_chunk", "cpu": f"{_FOLDER}.split_k_cpu:fixed_chunk"},
        ),
    ),
    accuracy=spec.AccuracyBound("nondet.core.watch:of_matmul", PRODUCTS_SOURCE),
)
