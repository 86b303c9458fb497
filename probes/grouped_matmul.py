"""The products of a mixture of experts: one token at one expert while the other tokens or their routing change.

Tokens are sorted by expert, and each expert's rows are multiplied by its weight. Their number depends on the whole
batch. Where a library chooses tiles, or its way to add up K, by that number (as a loop of plain products does, with a
GEMV for a single row), a token's bits depend on the routing of other requests.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator
from functools import partial
from typing import Any, NamedTuple

import torch

from nondet.core.inputs import EXACT, generator, product_operands
from nondet.core.measure import Trial
from nondet.probes import base
from nondet.probes.base import Case, Operator, Options, Probe, kinds, some, sweep

Layer = tuple[str, int, int, int]  # name, experts, K, N

# The first gets the hard inputs, and the position and run cases.
_LAYERS: dict[str, tuple[Layer, ...]] = {
    "cuda": (("Qwen3-30B-A3B down_proj", 128, 768, 2048), ("Qwen3-30B-A3B gate_up_proj", 128, 2048, 1536)),
    "cpu": (("", 8, 512, 64), ("", 4, 768, 64)),
}
_LARGEST = {"cuda": 4096, "cpu": 256}  # rows, each a token at one of its experts
_POSITIONS = {"cuda": 200, "cpu": 50}  # rows of one expert that are equal in the position case
_RUNS = {"cuda": 50, "cpu": 10}
_HARD = ("wide", "cancel", "outlier")
_ROWS = 16  # rows that are tested at every batch size
_FEW = (1, 2, 5, 17, 64)  # batch sizes for inputs that reveal less of the order
_ROUTED = 4  # rows that are tested under every routing
_WHOLE_TILES = (127, 128, 129, 255, 256)  # rows of one expert
_BEYOND = "half of the others after the last expert's rows"
_TILE = 64
_SHARE = 80  # rows of one expert up to which every number is tested


class _Batch(NamedTuple):
    """One call: the rows of x by expert, the end of each expert's rows, the positions of the compared rows."""

    order: torch.Tensor
    offsets: torch.Tensor
    compared: torch.Tensor


Plan = tuple[int | str, list[_Batch]]


class GroupedMatmul(Probe):
    """Rows at their experts: among M rows, under other routings, with other rows, at every position, and run to run."""

    name = "grouped-matmul"
    answers = EXACT

    def cases(self, options: Options) -> Iterable[Case]:
        """For each layer a sweep over M and one over routings; for the first all other cases, too."""
        default, given = _LAYERS[options.device][: 1 if options.one_of_all else None], base.given_layer(options)
        largest = base.largest_batch(options, 4096 if options.full else _LARGEST[options.device])
        layers = default if given is None else (("", options.config.get("experts", default[0][1]), *given),)
        shortened = layers is default and not (options.m or options.inputs or options.full)
        for layer in layers:
            for dtype in base.dtypes(options, "grouped_matmul", ("bfloat16", "float32")[: 1 if options.brief else 2]):
                case, first, (_, E, K, N) = partial(_case, layer, dtype), layer is layers[0], layer
                # weights and batch are drawn in float32; a sorted copy of the batch and two results are alive at once
                item, rows = getattr(torch, dtype).itemsize, max(largest, _ROWS)
                needed = E * K * N * (item + 8) + rows * K * (2 * item + 8) + 2 * rows * N * 8
                base.require_memory(options.device, needed, f"grouped_matmul of M={rows} E={E} K={K} N={N} in {dtype}")
                if first:
                    yield case("mixed", "history", min(largest, 16))
                for kind in kinds(options, ("bell", "order", *(_HARD if first else ()), "integers")):
                    few = kind == "integers" or (shortened and (kind != "order" or not first))
                    sizes = some(_FEW, largest, options) if few else sweep(largest, options)
                    yield case(kind, "batch_size", largest, values=sizes)
                drawn = random.Random(options.seed).randrange(E)  # noqa: S311 - an expert, not a secret
                for home in dict.fromkeys((0, E // 2, E - 1, drawn)):
                    yield case("order", "routing", max(largest, _ROUTED), home=home)
                if not first:
                    continue
                counts = [n for n in sweep(min(largest, _SHARE), options, dense=True) if n >= _ROUTED]
                counts += [n for n in _WHOLE_TILES if n <= largest]
                yield case("order", "routing", largest, home=drawn, values=counts or [largest])
                for kind in ("mixed", "positive"):
                    yield case(kind, "neighbour_values", min(largest, 64))
                yield case("order", "position", largest, places=min(largest, _POSITIONS[options.device]), home=drawn)
                yield case("mixed", "run", largest, values=list(range(options.runs or _RUNS[options.device])))

    def prepare(self, case: Case, device: str, seed: int) -> Any:
        """x [M, K]; weight [E, K, N] as the transpose of a module's [E, N, K]; the variants' calls, planned."""
        M, E, K, N = (case.shape[axis] for axis in "MEKN")
        rows = max(M, _ROWS) if case.varied == "batch_size" else M
        x, w = product_operands(case.inputs, (rows, K), (E * N, K), case.torch_dtype, device, seed, weight_kind="bell")
        w = w.view(E, N, K).mul_(base.weight_scale(K))
        spread = torch.randint(0, E, (rows,), generator=generator(seed, "cpu"))
        home, every = case.data.get("home", 0), torch.arange(rows)
        here = torch.full_like(spread, home)
        values, places = case.data.get("values", []), case.data.get("places", rows)
        if case.varied == "batch_size":
            spread[: min(rows, 2)] = torch.tensor([0, E - 1])[:rows]  # the first and the last expert
            plans: list[Plan] = [(size, list(_batches(size, spread, E))) for size in values]
        elif case.varied == "routing" and values:
            plans = [(n, [_batch(here, every[:n], min(n, _ROUTED), E)]) for n in values]
        elif case.varied == "routing":
            plans = list(_routings(spread, home, E))
        else:
            if case.varied == "position":
                spread[:places], x[:places] = home, x[0]
            plans = [(0, [_batch(spread, every, places, E)])]
            if case.varied == "run":  # a whole tile at one expert, and no rows at the others
                plans[0][1].append(_batch(here, every[:_TILE], min(rows, _TILE), E))
        moved = partial(torch.Tensor.to, device=device, non_blocking=True)
        there = [(value, [_Batch(*map(moved, batch)) for batch in batches]) for value, batches in plans]
        return {"x": x, "weight": w.mT, "plans": there}

    def trials(self, case: Case, inputs: Any, operator: Operator) -> Iterator[Trial]:
        """The compared rows in every plan; or the rows that equal the first; or the whole product at other moments."""
        if case.varied in base.AXES:
            _, (batch,) = inputs["plans"][0]  # the others share their experts
            call = base.Call.of((inputs["x"][batch.order], inputs["weight"], batch.offsets))
            yield from base.shared_trials(case.varied, call, operator)
            return
        plans = inputs["plans"]
        if case.varied == "run":
            plans = [(run, plans[0][1]) for run in case.data["values"]]
        for value, batches in plans:
            # an implementation may not serve rows without an expert
            instead = plans[0][1] if str(value).startswith(_BEYOND) else []
            yield Trial(value, partial(_compared, inputs, operator, batches, instead), many=case.varied == "position")


def _batch(
    at: torch.Tensor, rows: torch.Tensor, compared: int, experts: int, skip: int = 0, last: bool = False
) -> _Batch:
    """A call of the rows, sorted by expert; those from `skip` to `compared` of its first rows are compared. `at`: the
    expert of each row of x; `experts` itself: it comes after the last expert's rows. `last`: the compared rows come
    last among their experts' rows, not first."""
    arranged = rows.flip(0) if last else rows
    order = arranged[torch.sort(at[arranged], stable=True).indices]
    offsets = torch.cumsum(torch.bincount(at[rows], minlength=experts)[:experts], 0).int()
    index = torch.empty(int(rows.max()) + 1, dtype=torch.int64)
    index[order] = torch.arange(len(order))
    return _Batch(order, offsets, index[rows[skip:compared]])


def _batches(M: int, spread: torch.Tensor, experts: int) -> Iterator[_Batch]:
    """The first `_ROWS` rows in calls of exactly M rows; the last one begins early enough, and has the rest."""
    for start in range(0, _ROWS, M):
        first = max(0, min(start, _ROWS - M))
        yield _batch(spread, torch.arange(first, first + M), min(M, _ROWS), experts, skip=start - first)


def _routings(spread: torch.Tensor, home: int, experts: int) -> Iterator[Plan]:
    """Names and calls; the compared rows are at their own expert in all of them."""
    mine = torch.arange(len(spread)) < _ROUTED
    every = torch.arange(len(spread))
    here = torch.full_like(spread, home)
    elsewhere = torch.where(spread == home, (home + 1) % experts, spread)
    even = torch.arange(len(spread)) % 2 == 0
    half, beyond = torch.where(even, here, elsewhere), torch.where(even, experts, spread)
    yield "alone", [_batch(here, every[i : i + 1], 1, experts) for i in range(_ROUTED)]
    for name, at, last in (
        ("others spread over all experts", spread, False),
        ("others at other experts", elsewhere, False),
        ("others at the same expert", here, False),
        ("others at the same expert, they come last", here, True),
        (_BEYOND, beyond, False),
        (f"{_BEYOND}, again", beyond, False),
        ("half of the others at the same expert", half, False),
        ("others at the next expert", torch.full_like(spread, (home + 1) % experts), False),
    ):
        yield name, [_batch(torch.where(mine, here, at), every, _ROUTED, experts, last=last)]


def _compared(inputs: Any, operator: Operator, batches: list[_Batch], instead: list[_Batch]) -> torch.Tensor:
    """The compared rows of these calls, or where they raise, of others, if there are any."""
    x, weight = inputs["x"], inputs["weight"]
    try:
        parts = [operator(x[b.order], weight, b.offsets).index_select(0, b.compared) for b in batches]
    except Exception:
        if not instead:
            raise
        return _compared(inputs, operator, instead, [])
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _case(layer: Layer, dtype: str, kind: str, varied: str, M: int, **data: Any) -> Case:
    name, E, K, N = layer
    about = "rows" if varied == "routing" and "values" in data else varied
    what = {
        "batch_size": f"{_ROWS} rows in batches of M rows at {E} experts",
        "routing": f"{_ROUTED} of {M} rows at expert {data.get('home')} while others go to other experts, of {E}",
        "rows": f"{_ROUTED} rows among n at expert {data.get('home')} and no others, of {E}",
        "position": f"one row at every place of expert {data.get('home')}, among {M} at {E}",
        "run": f"{M} rows at {E} experts, then {min(M, _TILE)} at one, the same calls again",
    }.get(about) or f"rows among {M} at {E} experts, {base.AXES[varied]}"
    shape = {"M": M, "E": E, "N": N, "K": K}
    title = f"{what}, K={K} N={N}, {kind}"
    return Case(title, "grouped_matmul", shape, dtype, varied, kind, data={"layer": name, **data})
