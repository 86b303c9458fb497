"""What the probes of row operators share: some rows, computed in batches of other sizes and at other places.

A kernel that gives each row to one thread block sums the row in an order of its own; one that shares few long rows
among many blocks, or packs many short rows into one, sums in an order that follows from the number of rows.

The order reaches a row's bits through a single number, its sum, and two orders often round to the same one: of rows of
1,024 ordinary numbers, halves added onto halves and neighbours added to neighbours gave the same float32 sum of squares
for 66 in 100, the same rsqrt of it for 86, and the same logarithm of a sum of exponentials for 95. So a case asks about
dozens of rows, where a matmul, with a sum in every column, needs but one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any, ClassVar

import torch

from nondet.inputs import generator, make
from nondet.kernels import reference
from nondet.probes.base import Case, Options, Trial
from nondet.probes.sizes import dtypes, element_bytes, kinds, require_memory, size, sweep

__all__ = ["RowProbe"]

Operator = Callable[..., torch.Tensor]

# The batch at most, in rows and in elements: 4096 rows of a vocabulary would be memory traffic and nothing else.
_LARGEST = {"cpu": 256, "cuda": 4096}
_ELEMENTS = {"cpu": 2**22, "cuda": 2**26}
_ROWS = {"cpu": 64, "cuda": 32}
_HARD = ("wide", "outlier")
_PLACES = 100
_ROWS_PER_PLACE = 16


class RowProbe:
    """An operator over the last axis of x [M, W].

    Attributes:
        operators: Keys of `nondet.registry.IMPLEMENTATIONS` that take x, or x and a weight [W] if `weighted`.
        axis: What the width is called in a row's shape.
        widths: Of real models, and an odd one. The first gets the hard inputs and the places.
        width_keys: Keys of `Options.config` that hold widths of this operator in a model.
        hard_scale: Factor on the hard inputs, for operators that would saturate.
    """

    name: str
    operators: ClassVar[tuple[str, ...]]
    axis: ClassVar[str] = "K"
    widths: ClassVar[tuple[int, ...]]
    width_keys: ClassVar[tuple[str, ...]]
    weighted: ClassVar[bool] = False
    hard_scale: ClassVar[float] = 1.0

    def cases(self, options: Options) -> Iterable[Case]:
        """For each operator, width and dtype a sweep over M; at the first width also hard inputs and places."""
        widths = self._widths(options)
        for operator in self.operators:
            for width in widths:
                fitting = max(32, _ELEMENTS[options.device] // width)
                largest = size("--m", options.m, min(_LARGEST[options.device], fitting))
                rows = max(16, min(_ROWS[options.device], 2**20 // width))
                for dtype in dtypes(options, operator, ("bfloat16", "float32")):
                    made = max(largest, rows) + (_PLACES * _ROWS_PER_PLACE if width == widths[0] else 0)
                    # drawn in float32; two results are alive while comparing; the rows are checked in float64
                    needed = made * width * (3 * element_bytes(dtype) + 12) + rows * width * 16
                    require_memory(options.device, needed, f"{operator} of M={largest} {self.axis}={width} in {dtype}")
                    asked = kinds(options, ("bell", *_HARD) if width == widths[0] else ("bell",))
                    places = [("position", "bell")] if width == widths[0] else []
                    for varied, kind in [("batch_size", kind) for kind in asked] + places:
                        what = f"{rows} rows in batches of M"
                        if varied == "position":
                            what = f"{_ROWS_PER_PLACE} rows at every place among {_PLACES}"
                        yield Case(
                            name=f"{operator}: {what}, {self.axis}={width}, {kind}",
                            operator=operator,
                            shape={"M": largest if varied == "batch_size" else _PLACES, self.axis: width},
                            dtype=dtype,
                            varied=varied,
                            inputs=kind,
                            data={
                                "values": sweep(largest, options),
                                "rows": rows if varied == "batch_size" else _ROWS_PER_PLACE,
                            },
                        )

    def _widths(self, options: Options) -> tuple[int, ...]:
        if options.k is not None or options.n is not None:
            return (size("--k", options.k, 0) or size("--n", options.n, 0),)
        return tuple(dict.fromkeys(options.config[k] for k in self.width_keys if k in options.config)) or self.widths

    def prepare(self, case: Case, device: str, seed: int) -> Any:
        """x of the rows asked about and of others to fill the largest batch; a weight [W] where there is one."""
        rng = generator(seed, device)
        rows, width = case.data["rows"], case.shape[self.axis]
        count = rows if case.varied == "position" else max(rows, case.shape["M"])
        x = make(case.inputs, (count, width), case.torch_dtype, device, rng)
        x *= self.hard_scale if case.inputs in _HARD else 1.0
        weight = make("bell", (width,), case.torch_dtype, device, rng)
        return {"x": x, "weights": (weight,) if self.weighted else ()}

    def trials(self, case: Case, inputs: Any, operator: Operator) -> Iterator[Trial]:
        """The rows in batches of M for every M; or at every place of one batch."""
        x, weights, rows = inputs["x"], inputs["weights"], case.data["rows"]
        if case.varied == "position":
            yield Trial(0, partial(_at_every_place, operator, x, weights, case.shape["M"]), many=True)
            return
        for M in case.data["values"]:
            yield Trial(M, partial(_in_batches, operator, x, weights, M, rows))

    def reference(self, case: Case, inputs: Any) -> torch.Tensor | None:
        """The rows in float64."""
        oracle: Operator = getattr(reference, case.operator)
        return oracle(inputs["x"][: case.data["rows"]], *inputs["weights"])

    def extra(self, case: Case, inputs: Any, results: list[torch.Tensor]) -> dict[str, Any]:
        """How many rows one result holds."""
        return {"rows": case.data["rows"]}


def _in_batches(
    operator: Operator, x: torch.Tensor, weights: tuple[torch.Tensor, ...], M: int, rows: int
) -> torch.Tensor:
    """The first `rows` rows, each in a batch of exactly M; the last batch begins early enough for that."""
    if rows <= M:
        return operator(x[:M], *weights)[:rows]
    parts = [operator(x[start : start + M], *weights) for start in range(0, rows - M + 1, M)]
    rest = rows % M
    if rest:
        parts.append(operator(x[rows - M : rows], *weights)[M - rest :])
    return torch.cat(parts)


def _at_every_place(
    operator: Operator, x: torch.Tensor, weights: tuple[torch.Tensor, ...], places: int
) -> torch.Tensor:
    """Every row of x [R, W] at every place of a batch: [places, R, ...], by R batches in which the rows take turns."""
    rows = len(x)
    place = torch.arange(places, device=x.device)
    turns = torch.stack([operator(x[(place + turn) % rows], *weights) for turn in range(rows)])
    row = torch.arange(rows, device=x.device)
    return turns[(row[None, :] - place[:, None]) % rows, place[:, None]]
