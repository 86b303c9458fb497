"""Sums over ranks: one row of a message while the number of rows, its position, the run and the rank change.

The ranks are processes of the probe's own: gloo's on a CPU, NCCL's on GPUs. A library picks its algorithm by the
message's size, and cuts a message into pieces that start their sums at different ranks, so that an element's order of
additions can depend on the number of rows. Two ranks have only one order. All-gather copies: it is there for contrast.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from nondet.core.measure import Trial
from nondet.errors import UserError
from nondet.probes.base import Case, Classes, Operator, Options, Probe, dtypes, kinds, sweep
from nondet.ranks.group import check_ranks
from nondet.ranks.operators import Message, reference

_RANKS = (2, 4)
_WIDTH = {"cpu": 512, "cuda": 4096}
_LARGEST = {"cpu": 256, "cuda": 8192}  # rows: 64 MiB of bfloat16 on CUDA
_PLACES = 8
_RUNS = {"cpu": 10, "cuda": 100}
_CPU_SWEEP = (1, 2, 3, 4, 5, 8, 16, 17, 32, 64, 100, 128)
# What NCCL can be set to; "full" tests each
_PINNED = tuple((a, p) for a in ("Ring", "Tree") for p in ("LL", "LL128", "Simple"))


class AllReduce(Probe):
    """all_reduce, reduce_scatter and all_gather of [M, width] over the ranks."""

    name = "all-reduce"

    def cases(self, options: Options) -> Iterable[Case]:
        """Per number of ranks and dtype: first and last row over M, positions, runs, ranks; then other operators."""
        cuda = options.device == "cuda"
        gpus = torch.cuda.device_count() if cuda else 0
        if options.ranks is not None:
            check_ranks(options.ranks, options.device, gpus)
        width = options.n or options.k or _WIDTH[options.device]
        largest = options.m or _LARGEST[options.device]
        for world in dict.fromkeys(options.ranks or _RANKS):
            missing = f"{world} ranks need {world} GPUs; there are {gpus}" if cuda and world > gpus else ""
            for dtype in dtypes(options, "all_reduce", ("bfloat16", "float32")):
                yield from self._of(world, dtype, width, largest, options, missing)

    def _of(self, world: int, dtype: str, width: int, largest: int, options: Options, missing: str) -> Iterator[Case]:
        def case(
            what: str, varied: str, rows: int, values: Iterable[int], kind: str = "wide", operator: str = "all_reduce",
            **more: Any,
        ) -> Case:  # fmt: skip
            message = Message(
                world=world, device=options.device, operator=operator, impl="stock", dtype=dtype, rows=rows,
                width=width, kind=kind, names=options.device == "cuda", **more,
            )  # fmt: skip
            title, shape = f"{operator}: {what}, ranks={world}, width={width}", {"ranks": world, "M": rows, "N": width}
            data = {"message": message, "values": list(values), "missing": missing}
            return Case(title, operator, shape, dtype, varied, kind, data=data)

        short = options.device == "cpu" and not options.full
        steps = _to(_CPU_SWEEP, largest) if short else sweep(largest, options)
        for kind in kinds(options, ("wide",)):
            for place, which in enumerate(("first", "last")):
                title = f"{which} row over M" + (f", {kind}" if kind != "wide" else "")
                yield case(title, "batch_size", largest, steps, kind, place=-place)
        some = min(64, largest)
        places = {round(i * (some - 1) / (_PLACES - 1)) for i in range(_PLACES)}
        yield case("one row at places", "position", some, sorted(places))
        yield case("the same call", "run", some, range(options.runs or _RUNS[options.device]))
        yield case("what each rank has", "rank", some, range(world))
        share, cuda = largest // world, options.device == "cuda"
        for operator in ("reduce_scatter", "all_gather"):
            yield case("first row over M", "batch_size", share or 1, _to(steps, share), operator=operator)
        if cuda:
            yield case("registered buffer, first row over M", "batch_size", some, _to(steps, some), registered=True)
        for algorithm, protocol in _PINNED if cuda and options.full else ():
            environment, title = (("NCCL_ALGO", algorithm), ("NCCL_PROTO", protocol)), f"{algorithm} {protocol}"
            yield case(f"first row over M, {title}", "batch_size", largest, steps, environment=environment)

    def prepare(self, case: Case, device: str, seed: int) -> Message:
        """The message; the ranks make their parts of it. Raises UserError: too few GPUs for the default ranks."""
        if case.data["missing"]:
            raise UserError(case.data["missing"])
        message: Message = replace(case.data["message"], seed=seed)
        return message

    def trials(self, case: Case, inputs: Message, operator: Operator) -> Iterator[Trial]:
        """The row at every M, position, run or rank."""
        changed = {"batch_size": "rows", "position": "place", "rank": "answers"}.get(case.varied)
        for value in case.data["values"]:
            message = replace(inputs, **{changed: value}) if changed else inputs
            yield Trial(value, partial(operator, message))

    def reference(self, case: Case, inputs: Message) -> torch.Tensor | None:
        """The row in float64, added from the ranks' numbers as drawn on the CPU or the GPU."""
        return reference(inputs).cpu()

    def findings(self, case: Case, inputs: Message, classes: Classes, operator: Operator) -> dict[str, Any]:
        """The ranks, and the variables that were set for them."""
        backend = "nccl" if inputs.device == "cuda" else "gloo"
        return {"ranks": inputs.world, "backend": backend, "environment": dict(inputs.environment)}


def _to(steps: Iterable[int], largest: int) -> list[int]:
    return [m for m in steps if m < largest] + [largest]
