"""A product of a batch with a weight: one row of it while the batch size, the row's place, or nothing at all changes.

GEMM libraries choose tiles, and whether to split K, by the sizes: where the choice changes the order of the sum over
K, the bits of a row depend on how many rows ride along. The sweep maps M onto classes of equal bits. Stream-K goes
further: its split of K follows from a tile's place in the grid, so that the same row at another place may differ (He
& Thinking Machines Lab 2025, doi 10.64434/tml.20250910).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from nondet.errors import UserError
from nondet.inputs import generator, make
from nondet.probes.base import Case, Options, Trial
from nondet.probes.sizes import dtypes, element_bytes, kinds, require_memory, runs, size, sweep

__all__ = ["Matmul"]

Layer = tuple[str, int, int]


@dataclass(frozen=True)
class _Defaults:
    """The default list of one device type.

    Attributes:
        layers: (name, K, N). The first gets the hard inputs, every dtype, and the position and run cases.
        dtypes: Of the first layer.
        layer_dtypes: Of the others.
    """

    layers: tuple[Layer, ...]
    dtypes: tuple[str, ...]
    layer_dtypes: tuple[str, ...]
    largest: int
    places: tuple[int, ...]
    runs: int


_DEFAULTS = {
    "cuda": _Defaults(
        layers=(
            ("Qwen3-0.6B down_proj", 3072, 1024),
            ("Qwen3-8B down_proj", 12288, 4096),
            ("Qwen3-8B o_proj", 4096, 4096),
            ("Qwen3-8B qkv_proj", 4096, 6144),
        ),
        dtypes=("bfloat16", "float32"),
        layer_dtypes=("bfloat16",),
        largest=4096,
        places=(64, 1000),
        runs=100,
    ),
    # Small enough for two cores; (1000, 4096) is a multiple of no tile along K.
    "cpu": _Defaults(
        layers=(
            ("Qwen3-0.6B o_proj", 2048, 1024),
            ("Qwen3-0.6B gate_proj up_proj", 1024, 3072),
            ("", 1000, 4096),
            ("", 768, 2048),
        ),
        dtypes=("bfloat16", "float32"),
        layer_dtypes=("bfloat16", "float32"),
        largest=256,
        places=(17, 100),
        runs=20,
    ),
}
_HARD = ("wide", "cancel", "outlier")
_LINSPACE = (2048, 4096, 4096)


class Matmul:
    """Row 0 of M rows, the same row at every place, run to run, and the post's linspace case."""

    name = "matmul"

    def cases(self, options: Options) -> Iterable[Case]:
        """For each layer a sweep over M; for the first one also hard inputs, places and runs."""
        default = _DEFAULTS[options.device]
        layers, chosen = _layers(options, default.layers)
        largest = size("--m", options.m, default.largest)
        for layer in layers:
            asked = dtypes(options, "matmul", default.dtypes if layer is layers[0] else default.layer_dtypes)
            for dtype in asked:
                _check_memory(options.device, largest, layer, dtype)
                hard = layer is layers[0] and dtype == asked[0]
                for kind in kinds(options, ("bell", *_HARD) if hard else ("bell",)):
                    yield _case(layer, dtype, kind, "batch_size", sweep(largest, options))
                if layer is not layers[0]:
                    continue
                for places in (largest,) if options.m else default.places:
                    yield _case(layer, dtype, "bell", "position", [places])
                yield _case(
                    layer, dtype, "bell", "run", list(range(runs(options, default.runs))), rows=min(largest, 64)
                )
        if not chosen and (options.dtypes is None or "float32" in options.dtypes) and options.inputs is None:
            M, K, N = _LINSPACE
            yield Case(
                name=f"linspace of the post, mm(a[:1], b) against mm(a, b)[:1], M={M} K={K} N={N}",
                operator="matmul",
                shape={"M": M, "N": N, "K": K},
                dtype="float32",
                varied="batch_size",
                inputs="linspace",
                data={"values": [1, M]},
            )

    def prepare(self, case: Case, device: str, seed: int) -> Any:
        """x [M, K] and w [N, K] of the case's dtype; a [M, K] and b [K, N] of the linspace case."""
        M, K, N = (case.shape[axis] for axis in "MKN")
        if case.inputs == "linspace":
            a = torch.linspace(-1000, 1000, M * K, device=device).reshape(M, K)
            return {"x": a, "w": torch.linspace(-1000, 1000, K * N, device=device).reshape(K, N)}
        rng = generator(seed, device)
        x = make(case.inputs, (M, K), case.torch_dtype, device, rng)
        if case.varied == "position":
            x = x[:1].expand(M, K).contiguous()
        # weights of variance about 1/K, as in a trained layer; a power of two keeps every digit of what was drawn
        w = make("bell", (N, K), case.torch_dtype, device, rng) * 2.0 ** -round(math.log2(K) / 2)
        if case.inputs == "cancel":
            w[:, 1 : K // 2 * 2 : 2] = w[:, 0 : K // 2 * 2 : 2]  # so that the pairs of x cancel in the products, too
        return {"x": x, "w": w}

    def trials(self, case: Case, inputs: Any, operator: Callable[..., torch.Tensor]) -> Iterator[Trial]:
        """Row 0 for every M; or every row of a batch of equal rows; or the whole product again and again."""
        x, w = inputs["x"], inputs["w"]
        if case.varied == "position":
            yield Trial(0, lambda: operator(x, w), many=True)
        elif case.varied == "run":
            for run in case.data["values"]:
                yield Trial(run, lambda: operator(x, w))
        else:
            for M in case.data["values"]:
                yield Trial(M, partial(_row_0, case, operator, x[:M], w))

    def reference(self, case: Case, inputs: Any) -> torch.Tensor | None:
        """Row 0, or every row where the whole product is compared, in float64."""
        x, w = inputs["x"], inputs["w"]
        rows = x if case.varied == "run" else x[:1]
        out = rows.double() @ (w if case.inputs == "linspace" else w.T).double()
        return out[0] if case.varied == "position" else out

    def extra(self, case: Case, inputs: Any, results: list[torch.Tensor]) -> dict[str, Any]:
        """The layer's name, where it has one."""
        return {"layer": case.data["layer"]} if case.data.get("layer") else {}


def _layers(options: Options, default: tuple[Layer, ...]) -> tuple[tuple[Layer, ...], bool]:
    """The layers to ask about, and whether the user chose them."""
    if options.k is None and options.n is None:
        return (options.layers, True) if options.layers else (default, False)
    if options.layers:
        raise UserError("--k and --n name one layer, and a model names others", "Give one of the two.")
    K = size("--k", options.k, options.n or 0)
    return (("", K, size("--n", options.n, K)),), True


def _check_memory(device: str, M: int, layer: Layer, dtype: str) -> None:
    _, K, N = layer
    # the batch is drawn in float32, the oracle reads the weight in float64, and two results are alive while comparing
    needed = (M * K + K * N + 2 * M * N) * element_bytes(dtype) + max(M * K * 12, K * N * 16)
    require_memory(device, needed, f"matmul of M={M} K={K} N={N} in {dtype}")


def _case(layer: Layer, dtype: str, kind: str, varied: str, values: list[int], rows: int | None = None) -> Case:
    name, K, N = layer
    M = rows if rows is not None else max(values)
    what = {
        "batch_size": "row 0 of M rows",
        "position": f"one row at every place among {M}",
        "run": f"{M} rows, the same call again",
    }[varied]
    return Case(
        name=f"{what}, K={K} N={N}, {kind}",
        operator="linear",
        shape={"M": M, "N": N, "K": K},
        dtype=dtype,
        varied=varied,
        inputs=kind,
        data={"values": values, "layer": name},
    )


def _row_0(case: Case, operator: Callable[..., torch.Tensor], x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    if case.inputs != "linspace":
        return operator(x, w)[:1]
    # the post's figure was taken without TF32, which is torch's default: not a setting to leave to chance here
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        return operator(x, w)[:1]
    finally:
        torch.set_float32_matmul_precision(before)
