"""Sums over ranks: one row of a message while the number of rows, its place, the run and the rank change.

The ranks are processes of the probe's own (`nondet.ranks.group`): gloo's on a CPU, so that every laptop has the
question; NCCL's on GPUs. A library chooses its algorithm, and cuts a message into pieces that start their sums at
different ranks, by the message's size, so that an element's order of additions can follow from the number of rows.
Of two ranks there is one order only: a + b has the bits of b + a. All-gather copies, and stands here for contrast.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from nondet.core.measure import Trial
from nondet.errors import UserError
from nondet.probes.base import Case, Options, dtypes, kinds, runs, size, sweep
from nondet.ranks.group import check_ranks
from nondet.ranks.operators import Message, reference

_RANKS = (2, 4)
_WIDTH = {"cpu": 512, "cuda": 4096}
_LARGEST = {"cpu": 256, "cuda": 8192}  # rows: 64 MiB of bfloat16 on CUDA
_PLACES = 8
_RUNS = {"cpu": 10, "cuda": 100}
_CPU_SWEEP = (1, 2, 3, 4, 5, 8, 16, 17, 32, 64, 100, 128)
# What NCCL can be held to; "full" asks about each
_PINNED = tuple((a, p) for a in ("Ring", "Tree") for p in ("LL", "LL128", "Simple"))
_Operator = Callable[[Message], torch.Tensor]


class AllReduce:
    """all_reduce, reduce_scatter and all_gather of [M, width] over the ranks."""

    name = "all-reduce"

    def cases(self, options: Options) -> Iterable[Case]:
        """For each number of ranks and dtype: both ends of the batch over M, places, runs, ranks; then the other two.

        Raises:
            UserError: ranks that can't be had, as `check_ranks` says.
        """
        gpus = torch.cuda.device_count() if options.device == "cuda" else 0
        if options.ranks is not None:
            check_ranks(options.ranks, options.device, gpus)
        width = size("--n", options.n, size("--k", options.k, _WIDTH[options.device]))
        largest = size("--m", options.m, _LARGEST[options.device])
        for world in dict.fromkeys(options.ranks or _RANKS):
            few = (
                f"{world} ranks need {world} GPUs; there are {gpus}"
                if options.device == "cuda" and world > gpus
                else ""
            )
            for dtype in dtypes(options, "all_reduce", ("bfloat16", "float32")):
                for case in self._of(world, dtype, width, largest, options):
                    yield replace(case, data={**case.data, "missing": few})

    def _of(self, world: int, dtype: str, width: int, largest: int, options: Options) -> Iterator[Case]:
        def case(operator: str, what: str, varied: str, rows: int, kind: str = "wide", **data: Any) -> Case:
            message = Message(
                world=world,
                device=options.device,
                operator=operator,
                impl="stock",
                dtype=dtype,
                rows=rows,
                width=width,
                kind=kind,
                names=options.device == "cuda",
                **{k: data.pop(k) for k in ("place", "environment", "registered") if k in data},
            )
            return Case(
                name=f"{operator}: {what}, ranks={world}, width={width}",
                operator=operator,
                shape={"ranks": world, "M": rows, "N": width},
                dtype=dtype,
                varied=varied,
                inputs=kind,
                data={"message": message, **data},
            )

        asked = kinds(options, ("wide",))
        steps = sweep(largest, options)
        if options.device == "cpu" and not options.full:
            steps = [m for m in _CPU_SWEEP if m < largest] + [largest]
        for kind in asked:
            suffix = "" if kind == "wide" else f", {kind}"
            yield case("all_reduce", f"first row over M{suffix}", "batch_size", largest, kind, values=steps)
            yield case("all_reduce", f"last row over M{suffix}", "batch_size", largest, kind, values=steps, place=-1)
        some = min(64, largest)
        yield case("all_reduce", "one row at places", "position", some, values=_places(some))
        repeats = runs(options, _RUNS[options.device])
        yield case("all_reduce", "the same call", "run", some, values=list(range(repeats)))
        yield case("all_reduce", "what each rank has", "rank", some, values=list(range(world)))
        yield case(
            "reduce_scatter",
            "first row over M",
            "batch_size",
            largest // world or 1,
            values=_to(steps, largest // world),
        )
        yield case(
            "all_gather", "first row over M", "batch_size", largest // world or 1, values=_to(steps, largest // world)
        )
        if options.device != "cuda":
            return
        yield case(
            "all_reduce",
            "registered buffer, first row over M",
            "batch_size",
            some,
            values=_to(steps, some),
            registered=True,
        )
        for algorithm, protocol in _PINNED if options.full else ():
            environment = (("NCCL_ALGO", algorithm), ("NCCL_PROTO", protocol))
            what = f"first row over M, {algorithm} {protocol}"
            yield case("all_reduce", what, "batch_size", largest, values=steps, environment=environment)

    def prepare(self, case: Case, device: str, seed: int) -> Message:
        """The message as it is at its largest; the ranks make their parts of it themselves.

        Raises:
            UserError: there are too few GPUs for a number of ranks that nobody asked for by name.
        """
        if case.data["missing"]:
            raise UserError(case.data["missing"])
        message: Message = replace(case.data["message"], seed=seed)
        return message

    def trials(self, case: Case, inputs: Message, operator: _Operator) -> Iterator[Trial]:
        """The row at every M, place, run or rank."""
        for value in case.data["values"]:
            message = inputs
            if case.varied == "batch_size":
                message = replace(inputs, rows=value)
            elif case.varied == "position":
                message = replace(inputs, place=value)
            elif case.varied == "rank":
                message = replace(inputs, answers=value)
            yield Trial(value, partial(operator, message))

    def reference(self, case: Case, inputs: Message) -> torch.Tensor | None:
        """The row in float64, added on the CPU's or the GPU's own draw of the ranks' numbers."""
        return reference(inputs).cpu()

    def extra(self, case: Case, inputs: Message, results: list[torch.Tensor]) -> dict[str, Any]:
        """What the ranks were, and the variables that were set for them."""
        backend = "nccl" if inputs.device == "cuda" else "gloo"
        return {"ranks": inputs.world, "backend": backend, "environment": dict(inputs.environment)}


def _places(rows: int) -> list[int]:
    return sorted({round(i * (rows - 1) / (_PLACES - 1)) for i in range(_PLACES)})


def _to(steps: list[int], largest: int) -> list[int]:
    return [m for m in steps if m < largest] + [largest]
