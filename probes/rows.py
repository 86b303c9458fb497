"""What the probes of row operators share: one row of a batch while the number of rows, or the row's place, changes.

A kernel that gives each row to one thread block sums the row in an order of its own; one that shares few long rows
among many blocks, or packs many short rows into one, sums in an order that follows from the number of rows.
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

# The batch at most, in rows and in elements: 4096 rows of a vocabulary would be memory traffic and nothing else.
_LARGEST = {"cpu": 256, "cuda": 4096}
_ELEMENTS = {"cpu": 2**22, "cuda": 2**26}
_HARD = ("wide", "outlier")


class RowProbe:
    """An operator over the last axis of x [M, W].

    Attributes:
        operators: Keys of `nondet.registry.IMPLEMENTATIONS` that take x, or x and a weight [W] if `weighted`.
        axis: What the width is called in a row's shape.
        widths: Of real models, and an odd one. The first gets the hard inputs and the places.
        width_keys: Keys of `Options.config` that hold widths of this operator in a model.
        hard_scale: Factor on the hard inputs, for operators that would saturate.
        draws: Different rows 0 that are put through every M. More than one where a row gives a single number, which two
            orders of summation can round to the same bits by chance.
    """

    name: str
    operators: ClassVar[tuple[str, ...]]
    axis: ClassVar[str] = "K"
    widths: ClassVar[tuple[int, ...]]
    width_keys: ClassVar[tuple[str, ...]]
    weighted: ClassVar[bool] = False
    hard_scale: ClassVar[float] = 1.0
    draws: ClassVar[int] = 1

    def cases(self, options: Options) -> Iterable[Case]:
        """For each operator, width and dtype a sweep over M; at the first width also hard inputs and places."""
        widths = self._widths(options)
        for operator in self.operators:
            for width in widths:
                largest = size(
                    "--m", options.m, min(_LARGEST[options.device], max(64, _ELEMENTS[options.device] // width))
                )
                for dtype in dtypes(options, operator, ("bfloat16", "float32")):
                    shape = {"M": largest, self.axis: width}
                    # drawn in float32, answered twice while comparing, and checked in float64 for one row
                    needed = (largest + self.draws) * width * (3 * element_bytes(dtype) + 12)
                    require_memory(options.device, needed, f"{operator} of M={largest} {self.axis}={width} in {dtype}")
                    first = width == widths[0]
                    for kind in kinds(options, ("bell", *_HARD) if first else ("bell",)):
                        yield Case(
                            name=f"{operator}: row 0 of M rows, {self.axis}={width}, {kind}",
                            operator=operator,
                            shape=shape,
                            dtype=dtype,
                            varied="batch_size",
                            inputs=kind,
                            data={"values": sweep(largest, options)},
                        )
                    if first:
                        yield Case(
                            name=f"{operator}: one row at every place among {largest}, {self.axis}={width}, bell",
                            operator=operator,
                            shape=shape,
                            dtype=dtype,
                            varied="position",
                        )

    def _widths(self, options: Options) -> tuple[int, ...]:
        if options.k is not None or options.n is not None:
            return (size("--k", options.k, 0) or size("--n", options.n, 0),)
        return tuple(dict.fromkeys(options.config[k] for k in self.width_keys if k in options.config)) or self.widths

    def prepare(self, case: Case, device: str, seed: int) -> Any:
        """x [M + draws - 1, W], and a weight [W] where the operator has one."""
        rng = generator(seed, device)
        M, width = case.shape["M"], case.shape[self.axis]
        if case.varied == "position":
            x = make(case.inputs, (1, width), case.torch_dtype, device, rng).expand(M, width).contiguous()
        else:
            x = make(case.inputs, (M + self.draws - 1, width), case.torch_dtype, device, rng)
            x *= self.hard_scale if case.inputs in _HARD else 1.0
        weight = make("bell", (width,), case.torch_dtype, device, rng)
        return {"x": x, "weights": (weight,) if self.weighted else ()}

    def trials(self, case: Case, inputs: Any, operator: Callable[..., torch.Tensor]) -> Iterator[Trial]:
        """Row 0 of M rows for every M; or every row of a batch of equal rows."""
        x, weights = inputs["x"], inputs["weights"]
        if case.varied == "position":
            yield Trial(0, lambda: operator(x, *weights), many=True)
            return
        for M in case.data["values"]:
            yield Trial(M, partial(self._rows_0, operator, x, weights, M))

    def _rows_0(
        self, operator: Callable[..., torch.Tensor], x: torch.Tensor, weights: tuple[torch.Tensor, ...], M: int
    ) -> torch.Tensor:
        return torch.cat([operator(x[d : d + M], *weights)[:1] for d in range(self.draws)])

    def reference(self, case: Case, inputs: Any) -> torch.Tensor | None:
        """The rows 0 in float64."""
        out: torch.Tensor = getattr(reference, case.operator)(inputs["x"][: self.draws], *inputs["weights"])
        return out[0] if case.varied == "position" else out

    def extra(self, case: Case, inputs: Any, results: list[torch.Tensor]) -> dict[str, Any]:
        """How many different rows 0 the result holds."""
        return {"draws": self.draws} if self.draws > 1 and case.varied != "position" else {}
