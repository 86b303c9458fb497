"""The products of a mixture of experts: one token at one expert while the other tokens change, or where they go does.

Tokens are sorted by expert, and each expert's rows are multiplied by its weight. How many rows an expert gets follows
from the whole batch. Where a library chooses tiles, or its way to add up K, by that number (as a loop of plain products
does, with a GEMV for an expert with a single row), a token's bits depend on what other requests are routed to.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from nondet.inputs import generator, make
from nondet.kernels import reference
from nondet.probes.base import Case, Options, Trial
from nondet.probes.sizes import dtypes, element_bytes, kinds, require_memory, runs, size, sweep

__all__ = ["GroupedMatmul"]

Layer = tuple[str, int, int, int]


@dataclass(frozen=True)
class _Defaults:
    """The default list of one device type.

    Attributes:
        layers: (name, experts, K, N). The first gets the hard inputs, and the position and run cases.
        largest: Rows, each a token at one of its experts.
        places: Rows of one expert that are equal in the position case.
    """

    layers: tuple[Layer, ...]
    dtypes: tuple[str, ...]
    largest: int
    places: int
    runs: int


_DEFAULTS = {
    "cuda": _Defaults(
        layers=(
            ("Qwen3-30B-A3B down_proj", 128, 768, 2048),
            ("Qwen3-30B-A3B gate_up_proj", 128, 2048, 1536),
        ),
        dtypes=("bfloat16", "float32"),
        largest=4096,
        places=200,
        runs=50,
    ),
    "cpu": _Defaults(
        layers=(("", 8, 512, 256), ("", 4, 768, 128)),
        dtypes=("bfloat16", "float32"),
        largest=256,
        places=50,
        runs=10,
    ),
}
_HARD = ("wide", "cancel", "outlier")


class GroupedMatmul:
    """Row 0 at its expert: among M rows, under other routings, at every place of its expert's rows, and run to run."""

    name = "grouped-matmul"

    def cases(self, options: Options) -> Iterable[Case]:
        """For each layer a sweep over M and one over routings; for the first also hard inputs, places and runs."""
        default = _DEFAULTS[options.device]
        largest = size("--m", options.m, default.largest)
        layers = default.layers
        if options.k is not None or options.n is not None:
            K = size("--k", options.k, options.n or 0)
            layers = (("", default.layers[0][1], K, size("--n", options.n, K)),)
        for layer in layers:
            for dtype in dtypes(options, "grouped_matmul", default.dtypes):
                _check_memory(options.device, largest, layer, dtype)
                for kind in kinds(options, ("bell", *_HARD) if layer is layers[0] else ("bell",)):
                    yield _case(layer, dtype, kind, "batch_size", largest, values=sweep(largest, options))
                yield _case(layer, dtype, "bell", "routing", largest)
                if layer is layers[0]:
                    places = min(largest, default.places)
                    yield _case(layer, dtype, "bell", "position", largest, places=places)
                    yield _case(layer, dtype, "bell", "run", largest, values=list(range(runs(options, default.runs))))

    def prepare(self, case: Case, device: str, seed: int) -> Any:
        """x [M, K]; weight [E, K, N] as the transpose of a module's [E, N, K]; the variants' calls, planned.

        A plan is (value, rows of x in their order, offsets, place of row 0 among them).
        """
        M, E, K, N = (case.shape[axis] for axis in "MEKN")
        rng = generator(seed, device)
        x = make(case.inputs, (M, K), case.torch_dtype, device, rng)
        # weights of variance about 1/K, as in a trained layer; a power of two keeps every digit of what was drawn
        w = make("bell", (E, N, K), case.torch_dtype, device, rng).mul_(2.0 ** -round(math.log2(K) / 2))
        if case.inputs == "cancel":
            w[..., 1 : K // 2 * 2 : 2] = w[..., 0 : K // 2 * 2 : 2]  # the pairs of x cancel in the products, too
        home = E // 2
        spread = torch.randint(0, E, (M,), generator=generator(seed, "cpu"))
        if case.varied == "batch_size":
            plans = [_plan(M_, spread[:M_], home, E, device) for M_ in case.data["values"]]
        elif case.varied == "routing":
            plans = [_plan(name, at, home, E, device, last) for name, at, last in _routings(spread, home, E)]
        elif case.varied == "position":
            spread[: case.data["places"]] = home
            x[: case.data["places"]] = x[0]
            plans = [_plan(0, spread, home, E, device)]
        else:
            plans = [_plan("all", spread, home, E, device)]
        return {"x": x, "weight": w.mT, "home": home, "plans": plans}

    def trials(self, case: Case, inputs: Any, operator: Callable[..., torch.Tensor]) -> Iterator[Trial]:
        """Row 0 in every plan; or the rows that equal it; or the whole product again and again."""
        if case.varied == "run":
            for run in case.data["values"]:
                yield Trial(run, partial(_product, inputs, inputs["plans"][0], operator))
            return
        rows = case.data.get("places", 1)
        for plan in inputs["plans"]:
            yield Trial(plan[0], partial(_product, inputs, plan, operator, rows), many=case.varied == "position")

    def reference(self, case: Case, inputs: Any) -> torch.Tensor | None:
        """Row 0 times its expert's weight in float64; every row where the whole product is compared."""
        x, weight = inputs["x"], inputs["weight"]
        if case.varied == "run":
            _, order, offsets, _ = inputs["plans"][0]
            return reference.grouped_matmul(x[order], weight, offsets)
        out = x[:1].double() @ weight[inputs["home"]].double()
        return out[0] if case.varied == "position" else out

    def extra(self, case: Case, inputs: Any, results: list[torch.Tensor]) -> dict[str, Any]:
        """The layer's name, where it has one."""
        return {"layer": case.data["layer"]} if case.data["layer"] else {}


def _plan(
    value: int | str, at: torch.Tensor, home: int, experts: int, device: str, last: bool = False
) -> tuple[int | str, torch.Tensor, torch.Tensor, int]:
    """The first len(at) rows of x sorted by expert, row 0 at `home`: first among its rows there, or last."""
    at = at.clone()
    at[0] = home
    places = torch.cat([torch.arange(1, len(at)), torch.zeros(1, dtype=torch.int64)]) if last else torch.arange(len(at))
    order = places[torch.sort(at[places], stable=True).indices]
    offsets = torch.cumsum(torch.bincount(at, minlength=experts), 0).int()
    return value, order.to(device), offsets.to(device), int(torch.nonzero(order == 0))


def _routings(spread: torch.Tensor, home: int, experts: int) -> Iterator[tuple[str, torch.Tensor, bool]]:
    """Names, an expert for each row, and whether row 0 comes last at its own."""
    here = torch.full_like(spread, home)
    elsewhere = torch.where(spread == home, (home + 1) % experts, spread)
    half = torch.where(torch.arange(len(spread)) % 2 == 0, here, elsewhere)
    yield "alone", spread[:1], False
    yield "others spread over all experts", spread, False
    yield "others at other experts", elsewhere, False
    yield "others at the same expert", here, False
    yield "others at the same expert, it comes last", here, True
    yield "half of the others at the same expert", half, False
    yield "others at the next expert", torch.full_like(spread, (home + 1) % experts), False


def _product(inputs: Any, plan: Any, operator: Callable[..., torch.Tensor], rows: int | None = None) -> torch.Tensor:
    _, order, offsets, place = plan
    out = operator(inputs["x"][order], inputs["weight"], offsets)
    return out if rows is None else out[place : place + rows]


def _check_memory(device: str, M: int, layer: Layer, dtype: str) -> None:
    _, E, K, N = layer
    # weights and batch are drawn in float32; a sorted copy of the batch and two results are alive while comparing
    needed = E * K * N * (element_bytes(dtype) + 8) + M * K * (2 * element_bytes(dtype) + 8) + 2 * M * N * 8
    require_memory(device, needed, f"grouped_matmul of M={M} E={E} K={K} N={N} in {dtype}")


def _case(layer: Layer, dtype: str, kind: str, varied: str, M: int, **data: Any) -> Case:
    name, E, K, N = layer
    what = {
        "batch_size": f"row 0 of M rows at {E} experts",
        "routing": f"row 0 of {M} rows while others go to other experts, of {E}",
        "position": f"one row at every place of its expert, among {M} at {E}",
        "run": f"{M} rows at {E} experts, the same call again",
    }[varied]
    return Case(
        name=f"{what}, K={K} N={N}, {kind}",
        operator="grouped_matmul",
        shape={"M": M, "E": E, "N": N, "K": K},
        dtype=dtype,
        varied=varied,
        inputs=kind,
        data={"layer": name, **data},
    )
