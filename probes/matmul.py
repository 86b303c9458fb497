"""A product of a batch with a weight: some rows of it while batch size, position or the other rows change.

GEMM libraries choose tiles, and whether to split K, by the sizes: where the choice changes the order of the sum over K,
the bits of a row depend on the number of rows in the batch. The sweep maps M onto classes of equal bits. Stream-K goes
further: its split of K depends on a tile's position in the grid, so that the same row at another position may differ
(He & Thinking Machines Lab 2025, doi 10.64434/tml.20250910).
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from nondet.core.compare import bits, identical
from nondet.core.inputs import EXACT, generator, make, product_operands
from nondet.core.measure import LISTED_VARIANTS, Trial
from nondet.core.operands import laid_out
from nondet.errors import UserError
from nondet.probes import base
from nondet.probes.base import Case, Classes, Operator, Options, Probe, dtypes, kinds, require_memory, some, sweep
from nondet.probes.reduction_order import trees_of_product

_MAPPED = {"cuda": 512, "cpu": 128}  # the largest M
_LINES = 16  # of N, or of K; a full map has four times as many


def _map_cases(options: Options) -> Iterable[Case]:
    """A line of the map per case: every M, since nothing says that classes are contiguous."""
    axis, device, lines = options.map[1].upper(), options.device, _LINES * (4 if options.full else 1)
    largest = base.largest_batch(options, _MAPPED[device])
    if largest > LISTED_VARIANTS:
        raise UserError(f"--m {largest}: a map holds every M up to {LISTED_VARIANTS:,}", "Give --m as much or less.")
    layers, _ = _layers(options, (_SMALL[device],))
    for name, K, N in layers:
        for dtype in dtypes(options, "matmul", _LAYER_DTYPES[device]):
            for kind in kinds(options, ("order",)):
                for size in sorted({max(1, (K if axis == "K" else N) * i // lines) for i in range(1, lines + 1)}):
                    shape = {"M": largest, "N": N, "K": K} | {axis: size}
                    _check_memory(device, largest, (name, shape["K"], shape["N"]), dtype)
                    title = f"map of M x {axis}, every row of M equal ones, K={shape['K']} N={shape['N']}, {kind}"
                    data = {"values": list(range(1, largest + 1)), "layer": name, "layout": "", "map": axis}
                    yield Case(title, "linear", shape, dtype, "batch_size", kind, data=data)


def _first_and_odd(result: torch.Tensor) -> torch.Tensor:
    """result [M, N] of M equal rows -> [2, N]: row 0, and the first row with other bits, or row 0 again."""
    pattern = bits(result)
    odd = (pattern != pattern[:1]).any(1).to(torch.uint8).argmax()  # of equals the first: row 0 where none is odd
    return result.index_select(0, torch.stack([torch.zeros_like(odd), odd]))


Layer = tuple[str, int, int]


# (name, K, N). The first gets the hard inputs, every dtype, and the position and run cases. Those of a CPU are small
# enough for two cores; (1000, 512) is a multiple of no tile along K.
_LAYERS: dict[str, tuple[Layer, ...]] = {
    "cuda": (
        ("Qwen3-0.6B down_proj", 3072, 1024),
        ("Qwen3-8B down_proj", 12288, 4096),
        ("Qwen3-8B o_proj", 4096, 4096),
        ("Qwen3-8B qkv_proj", 4096, 6144),
    ),
    "cpu": (
        ("Qwen3-0.6B o_proj", 2048, 1024),
        ("Qwen3-0.6B gate_proj up_proj", 1024, 3072),
        ("", 1000, 512),
        ("", 768, 320),
    ),
}
# The layer for other rows, layouts and call orders, unless the user chose one.
_SMALL: dict[str, Layer] = {"cuda": _LAYERS["cuda"][0], "cpu": _LAYERS["cpu"][3]}
_DTYPES = ("bfloat16", "float32")
_LAYER_DTYPES = {"cuda": _DTYPES[:1], "cpu": _DTYPES[1:]}  # of layers that only get a sweep
_LARGEST = {"cuda": 4096, "cpu": 256}
_POSITIONS = {"cuda": (64, 1000, 4096), "cpu": (17, 100, 300)}
_RUNS = {"cuda": 100, "cpu": 20}
_HARD = ("order-wide", "wide", "cancel", "outlier")
_LINSPACE = (2048, 4096, 4096)
_LINSPACE_ON_CPU = (64, 4096, 512)  # unless the sweep is full: 137 GFLOP more would take as long as all the rest
_ROWS = 16  # rows that are tested at every batch size; a row has N sums, each with its own rounding
_ROWS_PER_POSITION = 4
_FEW = (1, 2, 3, 8, 17, 33, 64, 100)
_FEWEST = (1, 2, 17)  # and the largest: for inputs that show less than others
_MORE_SIZES = (*range(65, 129), 257, 258, 300, 384, 512, 513, 600)  # for inputs that show an order, at one layer
_LAYOUTS = (
    *("bias", "strided rows", "3-D", "x stored [K, M]"),
    *("columns of a wider weight", "rows of a fused weight", "weight stored [K, N]"),
)
# Columns that are left out, so that a tuner which identifies a product by K and N sees a new one: where the first call
# has one row, and where it has many. No sound rule of N has the one and not the other.
_ANEW = ((1, 4), (2, 3))
_OWN_NUMBERS = ("denormal", "infinite")
TREES = (12, 3)  # classes of a sweep whose trees are measured: of this probe by itself, and among all


class Matmul(Probe):
    """A block of rows in batches of M rows, the same rows at every position, other rows, call orders and runs."""

    name = "matmul"
    answers = EXACT

    def cases(self, options: Options) -> Iterable[Case]:
        """For each layer a sweep over M; for the first one all other cases; one layer is drawn from the seed."""
        if options.map:
            yield from _map_cases(options)
            return
        device = options.device
        layers, chosen = _layers(options, _LAYERS[device])
        largest = base.largest_batch(options, 4096 if options.full else _LARGEST[device])
        has_all = layers[0] if chosen else _SMALL[device]
        for layer in layers:
            default = _DTYPES if layer in (layers[0], has_all) else _LAYER_DTYPES[device]
            chosen_dtypes = dtypes(options, "matmul", default)
            for dtype in chosen_dtypes:
                _check_memory(device, largest, layer, dtype)
                if layer is layers[0]:  # first, so that its first call is the first of its shape in the process
                    yield from _shared_cases(options, has_all, dtype, largest, first=dtype == chosen_dtypes[0])
                    repeated = range(options.runs or _RUNS[device])
                    yield _case(layer, dtype, "mixed", "run", repeated, rows=min(largest, 64))
                hard = layer is layers[0] and dtype == chosen_dtypes[0]
                shown = chosen or not options.one_of_all or layer in (layers[0], has_all)
                every = ("bell", "order", *(_HARD if hard else ()), "integers") if shown else ("order",)
                for kind in kinds(options, every):
                    sizes = _batch_sizes(options, kind, largest, all_cases=layer == has_all, hard=hard, chosen=chosen)
                    has_trees = kind == "order" and (layer == has_all or not options.one_of_all)
                    trees = TREES[options.one_of_all] if has_trees else 0
                    yield _case(layer, dtype, kind, "batch_size", sizes, trees=trees)
                if layer is layers[0]:
                    for positions in (largest,) if options.m else _POSITIONS[device]:
                        yield _case(layer, dtype, "order", "position", rows=positions)
        if not chosen:
            yield from _unlisted(options)

    def prepare(self, case: Case, device: str, seed: int) -> Any:
        """x [M, K], w [N, K] and bias [N] or None, of the case's dtype; a [M, K] and b [K, N] of the linspace case."""
        M, K, N = (case.shape[axis] for axis in "MKN")
        if case.inputs == "linspace":
            a, b = (torch.linspace(-1000, 1000, n * 4096, device=device).view(n, 4096) for n in (2048, 4096))
            return {"x": a[:M], "w": b[:, :N].contiguous(), "bias": None}
        rows = {"position": _ROWS_PER_POSITION, "batch_size": max(M, _ROWS)}.get(case.varied, M)
        rows = 1 if "map" in case.data else rows
        x, w = product_operands(case.inputs, (rows, K), (N, K), case.torch_dtype, device, seed, weight_kind="bell")
        w *= base.weight_scale(K)
        layout, bias = case.data["layout"], None
        if layout == "bias":
            kind = "integers" if case.inputs in EXACT else "bell"
            bias = make(kind, (N,), case.torch_dtype, device, generator(seed + 2, device))
            # as small as the rounding errors: a larger bias would hide them
            bias *= 2.0**-14 if case.inputs in ("order", "mixed") else 1.0
        elif layout == "rows of a fused weight":
            w = torch.cat([w, w, w])[N : 2 * N]
        w = laid_out(w, {"columns of a wider weight": "strided", "weight stored [K, N]": "columns"}.get(layout, ""))
        x = x.repeat(M, 1) if "map" in case.data else x
        return {"x": x, "w": w, "bias": bias}

    def trials(self, case: Case, inputs: Any, operator: Operator) -> Iterator[Trial]:
        """A block of rows for every M; some rows at every position; or the whole product at other times."""
        x, w = inputs["x"], inputs["w"]
        more = () if inputs["bias"] is None else (inputs["bias"],)
        if more:
            base.require_arguments(operator, x, w, *more)

        if case.data.get("anew"):
            for i, what in enumerate(("one row", "many rows")):
                yield Trial(f"{what} first", partial(_anew, operator, _call(inputs), i))
        elif case.inputs == "linspace" or "map" in case.data:
            for M in case.data["values"]:
                yield Trial(M, partial(operator, x[:M], w))
        else:
            compute = partial(_in_layout, lambda x: operator(x, w, *more), case.data["layout"])
            yield from base.batch_trials(case, compute, x, _ROWS, _call(inputs), operator)

    def join(self, case: Case, parts: Any) -> torch.Tensor:
        """For a map, two rows that represent all rows of a call; for the post's product, row 0."""
        return _first_and_odd(parts) if "map" in case.data else parts[:1] if case.inputs == "linspace" else parts

    def findings(self, case: Case, inputs: Any, classes: Classes, operator: Operator) -> dict[str, Any]:
        """Where classes change over M, and the reduction tree of row 0 in each, if the case has it."""
        if "map" in case.data:
            odd = [i for i, (first, other) in enumerate(classes.results) if not identical(first, other)]
            return {"map": {"axis": case.data["map"], "unequal": odd}}
        most = case.data.get("trees", 0)
        return trees_of_product(operator, inputs["w"], classes, most) if most else {}


def _batch_sizes(options: Options, kind: str, largest: int, *, all_cases: bool, hard: bool, chosen: bool) -> list[int]:
    """The sweep of a layer: every size that shows an order at the one with `all_cases`; else mostly fewer."""
    shortened = not (chosen or options.m or options.inputs or options.full)
    if kind == "integers" or (shortened and kind != "order"):
        few = _FEWEST if shortened and not (hard and kind in ("bell", "order-wide")) else _FEW
        return some(few, largest, options)
    shows = kind == "order" and all_cases
    return sorted({*sweep(largest, options, dense=shows), *(_MORE_SIZES if shows and options.m is None else ())})


def _unlisted(options: Options) -> Iterator[Case]:
    """A layer and batch sizes that are drawn from the seed, and the post's product."""
    rng = random.Random(options.seed)  # noqa: S311 - sizes, not a secret
    K, N, limit = (6000, 1500, 200) if options.device == "cpu" else (9000, 8192, 2000)
    layer = f"drawn from seed {options.seed}", rng.randint(64, K), rng.randint(16, N)
    sizes = sorted({1, *(rng.randint(2, limit) for _ in range(9))})
    for dtype in dtypes(options, "matmul", _LAYER_DTYPES[options.device]):
        for kind in kinds(options, ("order",)):
            trees = TREES[0] if kind == "order" and not options.one_of_all else 0
            yield _case(layer, dtype, kind, "batch_size", sizes, trees=trees)
    if (options.dtypes is None or "float32" in options.dtypes) and options.inputs is None:
        part = options.device == "cpu" and not options.full
        M, K, N = _LINSPACE_ON_CPU if part else _LINSPACE
        a, b = (f"a[:{M}]", f"b[:, :{N}]") if part else ("a", "b")
        title = f"linspace of the post, mm(a[:1], {b}) against mm({a}, {b})[:1], M={M} K={K} N={N}"
        shape = {"M": M, "N": N, "K": K}
        yield Case(title, "matmul", shape, "float32", "batch_size", "linspace", data={"values": [1, M]})


def _layers(options: Options, default: tuple[Layer, ...]) -> tuple[tuple[Layer, ...], bool]:
    given = base.given_layer(options)
    if given is None:
        return (options.layers, True) if options.layers else (default, False)
    if options.layers:
        raise UserError("--k and --n name one layer, and a model names others", "Give one of the two.")
    return (("", *given),), True


def _check_memory(device: str, M: int, layer: Layer, dtype: str) -> None:
    _, K, N = layer
    # the batch is drawn in float32, the oracle reads the weight in float64, and two results are alive while comparing
    needed = (M * K + K * N + 2 * M * N) * getattr(torch, dtype).itemsize + max(M * K * 12, K * N * 16)
    require_memory(device, needed, f"matmul of M={M} K={K} N={N} in {dtype}")


def _shared_cases(options: Options, layer: Layer, dtype: str, largest: int, *, first: bool) -> Iterator[Case]:
    """The shared cases of `nondet.probes.base`, and the sweep with other strides or other numbers."""
    deep = first or not options.one_of_all
    for layout in ("", "bias") if deep else ("",):
        yield _case(layer, dtype, "mixed", "history", rows=min(largest, 8), layout=layout)
    name, K, N = layer
    if first and _ANEW[0][-1] < N:  # small, and of one dtype: a kernel may also be compiled and proven again
        case = _case((name, min(K, 256), min(N, 128)), dtype, "order", "history", rows=min(largest, 8))
        title = case.name.replace(base.AXES["history"], "where the first call of a size is of one row, or of many")
        yield replace(case, name=title, data={**case.data, "anew": True})
    for kind in ("mixed", "positive"):
        yield _case(layer, dtype, kind, "neighbour_values", rows=min(largest, 64))
    yield _case(layer, dtype, "order", "alignment", rows=min(largest, 33))
    few = some(_FEW, min(largest, max(_FEW)), options)
    for layout in _LAYOUTS if deep else ():
        yield _case(layer, dtype, "mixed", "batch_size", few, layout=layout)
    also = options.inputs or ("bell", "integers")
    for kind in () if options.inputs else _OWN_NUMBERS:  # requested by name, they have their own sweep
        yield _case(layer, dtype, kind, "batch_size", some(_FEWEST, min(largest, max(_FEW)), options))
    if "bell" in also:  # a bias as large as what it is added to: so that it shows if dropped, shifted or rounded twice
        yield _case(layer, dtype, "bell", "batch_size", sweep(largest, options, dense=True), layout="bias")
    if "integers" in also and dtype in ("float32", "float64"):  # shorter dtypes round the product first: not exact
        yield _case(layer, dtype, "integers", "batch_size", few, layout="bias")


def _case(
    layer: Layer, dtype: str, kind: str, varied: str, values: Sequence[int] = (), *, rows: int = 0, layout: str = "",
    trees: int = 0,
) -> Case:  # fmt: skip
    name, K, N = layer
    what = {
        "batch_size": f"{_ROWS} rows in batches of M",
        "position": f"{_ROWS_PER_POSITION} rows at every place among {rows}",
        "run": f"{rows} rows, the same call again",
    }.get(varied) or f"rows among {rows}, {base.AXES[varied]}"
    shape = {"M": max(values) if varied == "batch_size" else rows, "N": N, "K": K}
    data = {"values": list(values), "layer": name, "layout": layout, "trees": trees}
    title = f"{what}{layout and ', ' + layout}, K={K} N={N}, {kind}"
    return Case(title, "linear", shape, dtype, varied, kind, data=data)


def _call(inputs: Any) -> base.Call:
    """A call with other rows before, between and after the compared ones."""
    tensors = [t for t in (inputs["x"], inputs["w"], inputs["bias"]) if t is not None]
    rows = torch.arange(len(tensors[0]), device=tensors[0].device)
    return base.Call.of(tensors, (rows % 5 == 2) | (len(rows) < 3))


def _anew(operator: Operator, call: base.Call, which: int) -> torch.Tensor:
    """The compared rows of products whose first call has one row, or many; the same if it is N that decides."""
    x, w = call.tensors
    step = 16 if 16 * _ANEW[0][-1] < len(w) else 1  # whole tiles are left out, where there are enough
    most = len(w) - _ANEW[0][-1] * step

    def after(rows: int, few: int) -> torch.Tensor:
        part = w[: len(w) - few * step].contiguous()
        operator(call.resized(rows).tensors[0], part)
        return operator(x, part).index_select(0, call.kept)[:, :most].contiguous()

    found = [[after(rows, few) for few in left_out] for rows, left_out in zip((1, base.LARGER), _ANEW, strict=True)]
    return found[which if all(map(base.steady, found)) else 0][0]


def _in_layout(product: Operator, layout: str, x: torch.Tensor) -> torch.Tensor:
    if layout != "3-D":
        return product(laid_out(x, {"x stored [K, M]": "columns", "strided rows": "strided"}.get(layout, "")))
    requests = max(d for d in (1, 2, 3, 4) if len(x) % d == 0)
    return product(x.view(requests, len(x) // requests, -1)).flatten(0, 1)
