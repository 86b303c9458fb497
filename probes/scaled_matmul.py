"""FP8 products with scales, and the step that makes FP8 of activations: whether a row depends on the rest of the batch.

A library chooses tiles, splits of K, and after how many k a partial sum is promoted to float32, by the number of rows.
Where bits distinguish such orders, classes are named by them, from sums that are exact up to a promotion. And a scale
over a whole batch carries other requests' largest number into every row: batch-dependent by definition.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from typing import Any

import torch

from nondet.core.compare import identical
from nondet.core.inputs import EXACT, ORDER, generator, make
from nondet.core.measure import Trial
from nondet.core.registry import load_object
from nondet.kernels.scaled.cpu import in_order
from nondet.kernels.scaled.functions import BLOCK, FLOAT8, SCALES, operands
from nondet.probes import base
from nondet.probes.base import Case, Classes, Operator, Options, Probe, kinds, some, sweep
from nondet.probes.rounding import judged_classes

Layer = tuple[str, int, int]  # name, K, N

# The first gets all cases, the others a sweep for each kind of scales.
_LAYERS: dict[str, tuple[Layer, ...]] = {
    "cuda": (
        ("Qwen3-8B o_proj", 4096, 4096),
        ("Qwen3-8B down_proj", 12288, 4096),
        ("Qwen3-0.6B down_proj", 3072, 1024),
    ),
    "cpu": (("", 512, 64), ("", 1024, 32)),
}
# With one scale per operand oneDNN takes 150 ns for each product of two numbers, on a CPU that has no FP8.
_ONE_SCALE_ON_CPU: tuple[Layer, ...] = (("", 256, 4), ("", 1024, 2))
_LARGEST = {"cuda": 4096, "cpu": 128}
_POSITIONS = {"cuda": 200, "cpu": 40}
_RUNS = {"cuda": 50, "cpu": 10}
_ROWS = 16  # rows that are tested at every batch size
_FEW = (1, 2, 17, 64)
_EXPERTS = 8
_NAMES = {"tensor": "one scale each", "row": "a scale for each row", "block": "scales of 1x128 and 128x128"}
ANCHORS = {"cuda": "nondet.kernels.scaled.cuda:anchor"}  # of the class, whose sums have no exact model
_MEANING = "its scale follows the batch: batch-dependent by meaning, not by rounding"
_WORDS = {
    "batch_size": f"{_ROWS} rows in batches of M",
    "position": "4 rows at every position among {M}",
    "run": "{M} rows, the same call again",
}


class ScaledMatmul(Probe):
    """A block of rows in batches of M rows, at every position, with other rows, at experts; how rows are quantized."""

    name = "scaled-matmul"
    answers = EXACT

    def cases(self, options: Options) -> Iterable[Case]:
        """Products first, then experts' products, then the quantization step."""
        device, given = options.device, base.given_layer(options)
        layers = options.layers or _LAYERS[device][:: 2 if options.brief else 1] if given is None else (("", *given),)
        largest = base.largest_batch(options, 4096 if options.full else _LARGEST[device])
        names = options.dtypes or ()
        results = [d for d in ("float32", "bfloat16", "float16") if d in names] or ["float32", "bfloat16"]
        left = [d for d in ("float8_e4m3fn", "float8_e5m2") if d in names] or ["float8_e4m3fn", "float8_e5m2"]
        if names and not {*results, *left} & set(names):
            return  # no FP8 product has such a result
        for layer in layers:
            _, K, N = layer
            base.require_memory(device, (largest + N) * K * 24 + 4 * largest * N * 8, f"M={largest} K={K} N={N} in FP8")
            fewer = options.one_of_all and layer is not layers[0] and not names
            for dtype in left[:1] if fewer else left:
                for how in SCALES:
                    slow = layers is _LAYERS["cpu"] and how == "tensor"
                    shown = _ONE_SCALE_ON_CPU[layers.index(layer)] if slow else layer
                    first = layer is layers[0] and dtype == left[0]
                    swept = dtype == left[0] or options.full  # fewer sizes of the other format are tested
                    yield from _products(options, shown, (dtype, how, results), largest, first=first, swept=swept)
        layer, few = layers[0], some(_FEW, largest, options)
        form = left[0], "row", "bfloat16" if "bfloat16" in results else results[0]
        times, experts = range(options.runs or _RUNS[device]), "scaled_grouped_matmul"
        yield _case(layer, "order-wide", "batch_size", largest, sweep(largest, options), form, experts)  # answer: 0
        yield _case(layer, "mixed", "run", largest, times, form, experts)
        given_as = next((d for d in names if d in ("float16", "float32")), "bfloat16")
        for varied, rows in (("batch_size", largest), ("neighbour_values", largest), ("position", min(largest, 512))):
            yield _case(layer, "bell", varied, rows, few, (given_as, "", ""), "quantize")

    def prepare(self, case: Case, device: str, seed: int) -> Any:
        """a [M, K], b [K, N] and their scales; experts' b [E, K, N] and theirs; or x [M, K] to be quantized."""
        M, K, N = (case.shape.get(axis, 1) for axis in "MKN")
        rows = max(M, _ROWS)
        if case.operator == "quantize":
            return {"x": make(case.inputs, (rows, K), case.torch_dtype, device, generator(seed, device))}
        experts = case.shape.get("E", 1)
        dtypes = case.torch_dtype, FLOAT8[0]
        a, b, scale_a, scale_b = operands(case.inputs, case.data["how"], (rows, K, experts * N), dtypes, device, seed)
        if experts > 1:
            b, scale_b = b.mT.unflatten(0, (experts, N)).mT, scale_b[0].view(experts, N)
        return {"a": a, "b": b, "scale_a": scale_a, "scale_b": scale_b}

    def trials(self, case: Case, inputs: Any, operator: Operator) -> Iterator[Trial]:
        """A block of rows for every M; some rows at every position; or the whole call at other moments."""
        shaped, given = _shaped(case, operator), tuple(inputs.values())
        at = torch.arange(len(given[0]), device=given[0].device)
        call = base.Call.of(given)
        if len(given) > 2 and len(given[2]) > 1:  # the scales of the others are included
            call = call._replace(others=(call.others[0], None, call.others[0], None))
        rows = 4 if case.varied == "position" else _ROWS
        return base.batch_trials(case, partial(_rows, shaped, case, inputs), at, rows, call, shaped)

    def reference(self, case: Case, inputs: Any) -> torch.Tensor | None:
        """As for any operator; None for the quantization itself, since any scale is right."""
        return None if case.operator == "quantize" else super().reference(case, inputs)

    def findings(self, case: Case, inputs: Any, classes: Classes, operator: Operator) -> dict[str, Any]:
        """What the classes are: orders that are known by their bits; a scale that others decided."""
        first, *others = classes.results
        if not others:
            return {}
        if case.operator == "quantize":
            scales = slice(case.shape["K"], None)  # they come after the numbers of a row
            found = judged_classes(classes.results, torch.full_like(first, 1e-99, dtype=torch.float64), "leak")
            of_row = any(identical(r[:, scales], first[:, scales]) for r in others)
            return {} if of_row else {"note": _MEANING, "judged": found}
        if (case.operator, case.varied) != ("scaled_matmul", "batch_size") or case.inputs not in ORDER:
            return {}
        orders = [_order_of(result, case, inputs) for result in classes.results]
        known = [f"class {i}: {name or 'none of the orders tried'}" for i, name in enumerate(orders, 1)]
        return {"orders": orders} | ({"note": "; ".join(known)} if any(orders) else {})


def _products(
    options: Options, layer: Layer, form: tuple[str, str, Sequence[str]], largest: int, *, first: bool, swept: bool
) -> Iterator[Case]:
    dtype, how, results = form
    few, device = some(_FEW, largest, options), options.device
    for out in results:
        about = dtype, how, out
        main = out == results[0]
        every = ("order-wide", "bell", "outlier", "integers") if first and main else ("order-wide",)
        for kind in kinds(options, every) if first or main else ():
            shows = swept and kind == "order-wide" and main
            values = sweep(largest, options, dense=first and main) if shows or options.inputs else few
            yield _case(layer, kind, "batch_size", largest, values, about)
        if first and main:
            yield _case(layer, "order-wide", "position", _POSITIONS[device], (), about)
            yield _case(layer, "mixed", "neighbour_values", min(largest, 64), (), about)
            yield _case(layer, "order-wide", "alignment", min(largest, 33), (), about)
            yield _case(layer, "mixed", "history", min(largest, 16), (), about)
            yield _case(layer, "mixed", "run", largest, range(options.runs or _RUNS[device]), about)


def _case(
    layer: Layer, kind: str, varied: str, M: int, values: Iterable[int], form: tuple[str, str, str],
    operator: str = "scaled_matmul",
) -> Case:  # fmt: skip
    """`form`: the operands' dtype, their kind of scales, and the result's dtype."""
    (name, K, N), (dtype, how, out), values = layer, form, list(values)
    what = _WORDS.get(varied, f"rows among {M}, {base.AXES.get(varied)}").format(M=M)
    shape = {"M": max(values) if varied == "batch_size" else M, "N": N, "K": K}
    if operator == "quantize":
        title, shape = f"quantization of {what}, K={K}, {kind}", {"M": shape["M"], "K": K}
    else:
        if operator == "scaled_grouped_matmul":
            what, shape["E"] = f"{what} at {_EXPERTS} experts", _EXPERTS
        title = f"{what}, {_NAMES[how]}, into {out}, K={K} N={N}, {kind}"
    data = {"values": values, "layer": name, "how": how, "out": out}
    return Case(title, operator, shape, dtype, varied, kind, data=data)


def _shaped(case: Case, operator: Operator) -> Operator:
    """The operator with the result's dtype; a quantizer's numbers and scales concatenated, as one tensor of float32."""
    if case.operator == "quantize":

        def run(x: torch.Tensor) -> torch.Tensor:
            q, scale = operator(x)
            scale = scale.reshape(1, 1) if scale.numel() == 1 else scale.flatten(1)
            return torch.cat([q.float(), scale.float().expand(len(x), -1)], 1)

        return run
    return lambda *tensors: operator(*tensors, getattr(torch, case.data["out"]))


def _rows(call: Operator, case: Case, inputs: Any, at: torch.Tensor) -> torch.Tensor:
    if case.operator == "quantize":
        return call(inputs["x"][at])
    a, b, scale_a, scale_b = inputs.values()
    if case.operator == "scaled_matmul":
        return call(base.raw(a)[at].view(a.dtype), b, scale_a if len(scale_a) == 1 else scale_a[at], scale_b)
    expert = at % _EXPERTS
    order = torch.sort(expert, stable=True).indices
    offsets = (expert[:, None] <= torch.arange(_EXPERTS, device=at.device)).sum(0, dtype=torch.int32)
    out = call(base.raw(a)[at[order]].view(a.dtype), b, scale_a[at[order], 0], scale_b, offsets)
    return torch.empty_like(out).index_copy_(0, order, out)


def _orders(K: int, blocked: bool) -> Iterator[tuple[str, dict[str, Any]]]:
    """Orders that are distinguished: after how many exact k a sum goes to float32, and in how many parts K is."""
    yield f"promoted to float32 every {BLOCK} k", {}
    sums = {BLOCK, 16, 32, 64, *(() if blocked else (256, 512))}
    for interval in sorted(sums - {BLOCK}):
        yield f"promoted to float32 every {interval} k", {"interval": interval}
    if not blocked:
        yield "one sum over K, rounded once", {"interval": 0}
    stretches, parts = -(-K // BLOCK), set()
    for splits in (2, 3, 4, 8, 16):
        each = -(-stretches // splits)
        if 1 < each < stretches and each not in parts:
            if each < stretches - 1:  # a single one that is left over is added as in the chain
                yield f"K in {splits} parts, promoted every {BLOCK} k", {"splits": splits}
            if not blocked and -(-K // splits) not in sums:
                yield f"K in {splits} parts, each one sum", {"interval": -(-K // splits)}
        parts.add(each)


def _order_of(result: torch.Tensor, case: Case, inputs: Any) -> str:
    """The orders whose exact bits these rows have; "" for none."""
    a, b, scale_a, scale_b = inputs.values()
    given = a[:_ROWS], b, scale_a[:_ROWS], scale_b, result.dtype  # one scale stays one
    orders = _orders(case.shape["K"], case.data["how"] == "block")
    named = [name for name, order in orders if identical(in_order(*given, **order), result)]
    anchor = ANCHORS.get(a.device.type)
    if not named and anchor is not None and identical(load_object(anchor)(*given), result):
        named.append(f"promoted to float32 every {BLOCK} k, within these as the matrix unit adds")
    return " or ".join(named)
