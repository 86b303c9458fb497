"""Pointwise operators: one element in the vector body of a loop, and in its scalar tail.

They seem batch-invariant, since no element reads another. But where a loop over n elements computes the rest after its
vectors differently (another polynomial, another rounding to bfloat16), an element's bits depend on its position and n.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F

from nondet.core.inputs import generator, make
from nondet.core.measure import Trial
from nondet.probes.base import Case, Operator, Options, Probe, dtypes, kinds, require_memory

OPERATORS: dict[str, Operator] = {"exp": torch.exp, "log": torch.log, "sin": torch.sin, "cos": torch.cos}
OPERATORS |= {"tanh": torch.tanh, "sigmoid": torch.sigmoid}
OPERATORS |= {"silu": F.silu, "gelu": F.gelu, "gelu_tanh": partial(F.gelu, approximate="tanh")}
OPERATORS |= {"rsqrt": torch.rsqrt, "square": torch.square}  # a square has one rounding by IEEE 754, in a vector or not
_POSITIVE = ("log", "rsqrt")
# Lengths of a piece: 7 is all tail; the others leave a tail after bodies of 4, 8, 16, 32 or 64 elements.
_PIECES = (7, 17, 31, 65, 100, 1000)
_ELEMENTS = 1024


class Pointwise(Probe):
    """Every element of one vector, computed at once and in pieces of other lengths."""

    name = "pointwise"

    def cases(self, options: Options) -> Iterable[Case]:
        """Every operator, or the one that a trace saw; --k is the number of elements."""
        count = options.k or _ELEMENTS
        pieces = sorted({*_PIECES, *(elements for elements, _ in options.met if elements < count)})
        for op in [options.operator] if options.operator else OPERATORS:
            for dtype in dtypes(options, "pointwise", ("float32", "bfloat16")):
                require_memory(options.device, 64 * count, f"pointwise of K={count}")
                for kind in kinds(options, ("bell",)):
                    title = f"{op} of {count} elements at once and in pieces, {kind}"
                    yield Case(title, op, {"n": count}, dtype, "length", kind, ("stock",), data={"pieces": pieces})

    def prepare(self, case: Case, device: str, seed: int) -> Any:
        """x [n]; positive where the operator needs it."""
        x = make(case.inputs, (case.shape["n"],), case.torch_dtype, device, generator(seed, device))
        return x.abs() + 2.0**-10 if case.operator in _POSITIVE else x

    def trials(self, case: Case, inputs: Any, operator: Operator) -> Iterator[Trial]:
        """All at once, then cut into pieces."""
        op, n = OPERATORS[case.operator], case.shape["n"]
        yield Trial(n, partial(op, inputs))
        for length in (size for size in reversed(case.data["pieces"]) if size < n):
            yield Trial(length, partial(lambda size: torch.cat([op(piece) for piece in inputs.split(size)]), length))

    def reference(self, case: Case, inputs: Any) -> torch.Tensor | None:
        """The function in float64."""
        return OPERATORS[case.operator](inputs.double())
