"""The order of a single sum: float addition is not associative, so one list of numbers has many sums.

He & Thinking Machines Lab (2025, doi 10.64434/tml.20250910) sum eight numbers in 10,000 shuffled orders and print 102
distinct results. That figure is reproduced here, with its causes: it is what the built-in `sum` of Python 3.12 and 3.13
gives, which compensates the rounding of floats but not of the integers 1 and -1 in the list (Neumaier's algorithm;
`builtin_sum` in CPython's bltinmodule.c). Plain additions, as in Python 3.11 and every loop, give 258, and math.fsum
gives 1. The arithmetic of each is written out below, so the result does not depend on the Python that runs it.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

import torch

from nondet.core.inputs import generator, make
from nondet.core.measure import Trial
from nondet.probes.base import Case, Operator, Options, Probe, dtypes, kinds, require_memory, size

_SHUFFLES = 10_000
_SEED = 42
_CHUNKS = (16, 64, 256)
_TENSOR_SHUFFLES = 8
_DEFAULT_LENGTH = 1024
# Exact in every dtype whatever the order: sums of -1, 0, 1 stay small integers. A difference here is a bug.
_EXACT = "integers"


def add_plainly(numbers: Iterable[float]) -> float:
    """Left to right, one rounding per addition: a loop, and Python's `sum` up to 3.11."""
    total = 0.0
    for x in numbers:
        total += x
    return total


def add_compensated(numbers: Iterable[float]) -> float:
    """As `sum` of Python 3.12 and 3.13: it compensates the rounding of a float, but not of an int."""
    total, correction, started = 0.0, 0.0, False
    for x in numbers:
        grown = total + x
        if started and isinstance(x, float):
            correction += (total - grown) + x if abs(total) >= abs(x) else (x - grown) + total
        # the integers before the first float, and that float, are added by another loop, which does not compensate
        started = started or isinstance(x, float)
        total = grown
    return total + correction if correction and math.isfinite(correction) else total


_PYTHON_SUMS: dict[str, Callable[[Iterable[float]], float]] = {
    "summed as Python 3.12 does": add_compensated,
    "added one by one": add_plainly,
    "math.fsum": math.fsum,
}


class FloatSum(Probe):
    """One list of numbers in many orders: 10,000 shuffles in Python, and the orders of real reductions."""

    name = "float-sum"

    def cases(self, options: Options) -> Iterable[Case]:
        """The three sums of the post's list, then one case for each dtype, accumulator and kind of input."""

        def case(name: str, length: int, dtype: str, kind: str, impl: str, **data: str) -> Case:
            about: Any = {"impls": (impl,), "demonstration": True, "data": data}
            return Case(name, "float_sum", {"N": length}, dtype, "order", kind, **about)

        for how in _PYTHON_SUMS:
            yield case(f"{_SHUFFLES:,} shuffles of 8 numbers, {how}", 8, "float64", "post", "python", how=how)
        length = size("--k", options.k, _DEFAULT_LENGTH)
        default = ("bell", "wide", "cancel") if options.device == "cpu" else ("bell",)
        for dtype in dtypes(options, "float-sum", ("float64", "float32", "bfloat16", "float16")):
            require_memory(options.device, length * 8 * 4 * (_TENSOR_SHUFFLES + 2), f"float-sum of K={length}")
            for accumulator in dict.fromkeys((dtype, "float32") if dtype != "float64" else (dtype,)):
                for kind in (*kinds(options, default), *(() if options.inputs else (_EXACT,))):
                    name = f"orders of {length} numbers, accumulated in {accumulator}, {kind}"
                    yield case(name, length, dtype, kind, "torch", accumulator=accumulator)

    def prepare(self, case: Case, device: str, seed: int) -> Any:
        """The numbers, drawn on the CPU: IEEE additions are the same everywhere, so every device gets the same list."""
        if "how" in case.data:
            return {}
        rng = generator(seed, "cpu")
        length = case.shape["N"]
        if case.inputs == _EXACT:
            x = torch.randint(-1, 2, (length,), generator=rng).to(case.torch_dtype)
        else:
            x = make(case.inputs, (length,), torch.float32, "cpu", rng)
            # the numbers are drawn in float32: a third of one is rounded in float64, too
            x = x.double() / 3.0 if case.dtype == "float64" else x.to(case.torch_dtype)
        orders = {"sequential": torch.arange(length), "reversed": torch.arange(length).flip(0)}
        orders |= {f"shuffle {i}": torch.randperm(length, generator=rng) for i in range(1, _TENSOR_SHUFFLES + 1)}
        return {"x": x.to(device), "orders": {name: order.to(device) for name, order in orders.items()}, "sums": {}}

    def trials(self, case: Case, inputs: Any, operator: Operator) -> Iterator[Trial]:
        """Every order."""
        if "how" in case.data:
            yield Trial("shuffle", partial(_shuffled_sums, _PYTHON_SUMS[case.data["how"]]), many=True)
            return
        chunks = [f"chunks of {c}" for c in _CHUNKS if c < case.shape["N"]]
        for order in (*inputs["orders"], "pairwise", *chunks, "torch.sum"):
            yield Trial(order, partial(_tensor_sum, case, inputs, order))

    def reference(self, case: Case, inputs: Any) -> torch.Tensor | None:
        """The exact sum, rounded once to float64; none for the post's list, whose sum is 0."""
        if "how" in case.data:
            return None
        return torch.tensor(math.fsum(inputs["x"].tolist()), dtype=torch.float64, device=inputs["x"].device)

    def extra(self, case: Case, inputs: Any, results: list[torch.Tensor]) -> dict[str, Any]:
        """The number of sums and their range; for tensors, each order's sum with math.fsum's."""
        sums = sorted(float(r) for r in results)
        said: dict[str, Any] = {"distinct_sums": len(set(sums)), "smallest": sums[0], "largest": sums[-1]}
        if "how" in case.data:
            return {**said, "shuffles": _SHUFFLES, "seed": _SEED}
        listed = inputs["x"].tolist()
        return {
            **said,
            "fsum": math.fsum(listed),
            "float64": add_plainly(listed),
            "sums": {order: float(x) for order, x in inputs["sums"].items()},
        }


def _shuffled_sums(add: Callable[[Iterable[float]], float]) -> torch.Tensor:
    """The post's loop: `random.seed(42)`, then shuffle in place and add, 10,000 times. float64 [10000]."""
    numbers: list[float] = [1e-10, 1e-5, 1e-2, 1]
    numbers += [-x for x in numbers]
    rng = random.Random(_SEED)  # noqa: S311 - the post's own sequence
    sums = []
    for _ in range(_SHUFFLES):
        rng.shuffle(numbers)
        sums.append(add(numbers))
    return torch.tensor(sums, dtype=torch.float64)


def _tensor_sum(case: Case, inputs: Any, order: str) -> torch.Tensor:
    """One order's sum, as a scalar of the case's dtype; the sequential orders are computed together, once."""
    sums: dict[str, torch.Tensor] = inputs["sums"]
    if order not in sums:
        accumulator: torch.dtype = getattr(torch, case.data["accumulator"])
        x = inputs["x"].to(accumulator)
        if order in inputs["orders"]:
            side_by_side = _one_by_one(torch.stack([x[o] for o in inputs["orders"].values()]))
            sums.update(zip(inputs["orders"], side_by_side.to(case.torch_dtype), strict=True))
        elif order == "pairwise":
            sums[order] = _pairwise(x).to(case.torch_dtype)
        elif order == "torch.sum":
            sums[order] = x.sum().to(case.torch_dtype)
        else:
            width = int(order.removeprefix("chunks of "))
            rows = torch.nn.functional.pad(x, (0, -len(x) % width)).reshape(-1, width)
            sums[order] = _one_by_one(_one_by_one(rows)[None, :])[0].to(case.torch_dtype)
    return sums[order]


def _one_by_one(rows: torch.Tensor) -> torch.Tensor:
    """Sum of each row of [R, N], column after column, rounding to the rows' dtype at every addition. Returns [R]."""
    total = torch.zeros_like(rows[:, 0])
    for column in rows.unbind(1):
        total = total + column
    return total


def _pairwise(x: torch.Tensor) -> torch.Tensor:
    """Neighbours are added, then neighbouring sums, and so on; an odd one out waits for the next round."""
    while len(x) > 1:
        even = len(x) // 2 * 2
        x = torch.cat([x[0:even:2] + x[1:even:2], x[even:]])
    return x[0]
