"""Demonstrations of what the order of additions does: of one list of numbers, of a product cut along K, by atomics.

Float addition is not associative, so one list of numbers has many sums. He & Thinking Machines Lab (2025, doi
10.64434/tml.20250910) sum eight numbers in 10,000 shuffled orders and print 102 distinct results. The built-in `sum` of
Python 3.12 and 3.13 gives that figure: it compensates the rounding of floats but not of the integers 1 and -1 in the
list (Neumaier's algorithm; `builtin_sum` in CPython's bltinmodule.c). Plain additions give 258, and math.fsum gives 1.
The arithmetic of each is written out below, so the result does not depend on the Python that runs it.

A library cuts K into parts to fill the device when M and N give it too few tiles. The number of parts decides where the
sum is cut, and so the bits, unless every partial sum is exact. Parts added in order give equal bits every time; parts
added by atomics may not. Chunks of fixed size give equal bits however many workers share the chunks.

On a GPU the stock kernels of index_add and scatter_add add with atomics, in the order in which threads arrive. The
backward pass of an embedding and of some attention kernels does, too. On a CPU they add one after the other.
"""

from __future__ import annotations

import functools
import inspect
import math
import random
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

import torch

from nondet.core.inputs import generator, make, product_operands
from nondet.core.measure import Trial
from nondet.probes.base import Case, Classes, Operator, Options, Probe, dtypes, kinds, require_memory, weight_scale

# ---- one list of numbers

_SHUFFLES = 10_000
_SEED = 42
_CHUNKS = (16, 64, 256)
_TENSOR_SHUFFLES = 8
_DEFAULT_LENGTH = 1024
# Exact in every dtype whatever the order: sums of -1, 0, 1 stay small integers. A difference here is a bug.
_EXACT = "integers"


def add_plainly(numbers: Iterable[float]) -> float:
    """Left to right, one rounding per addition: a loop, and Python's `sum` up to 3.11."""
    return functools.reduce(lambda total, x: total + x, numbers, 0.0)


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
            shape = {"N": length}
            return Case(name, "float_sum", shape, dtype, "order", kind, (impl,), demonstration=True, data=data)

        for how in _PYTHON_SUMS:
            yield case(f"{_SHUFFLES:,} shuffles of 8 numbers, {how}", 8, "float64", "post", "python", how=how)
        length = options.k or _DEFAULT_LENGTH
        require_memory(options.device, length * 8 * 4 * (_TENSOR_SHUFFLES + 2), f"float-sum of K={length}")
        default = ("bell", "wide", "cancel", _EXACT) if options.device == "cpu" else ("bell", _EXACT)
        for dtype in dtypes(options, "float-sum", ("float64", "float32", "bfloat16", "float16")):
            for accumulator in dict.fromkeys((dtype, "float32") if dtype != "float64" else (dtype,)):
                for kind in kinds(options, default):
                    name = f"orders of {length} numbers, accumulated in {accumulator}, {kind}"
                    yield case(name, length, dtype, kind, "torch", accumulator=accumulator)

    def prepare(self, case: Case, device: str, seed: int) -> Any:
        """The numbers, drawn on the CPU so that every device gets the same list, and their sum in each order."""
        if "how" in case.data:
            return {}
        rng, length = generator(seed, "cpu"), case.shape["N"]
        if case.inputs == _EXACT:
            x = torch.randint(-1, 2, (length,), generator=rng)
        else:  # the numbers are drawn in float32: a third of one is rounded in float64, too
            x = make(case.inputs, (length,), torch.float32, "cpu", rng)
            x = x.double() / 3.0 if case.dtype == "float64" else x
        x = x.to(case.torch_dtype)
        orders = {"sequential": torch.arange(length), "reversed": torch.arange(length).flip(0)}
        orders |= {f"shuffle {i}": torch.randperm(length, generator=rng) for i in range(1, _TENSOR_SHUFFLES + 1)}
        side_by_side = torch.stack([x[order] for order in orders.values()])
        x, accumulator = x.to(device), getattr(torch, case.data["accumulator"])
        sums = dict(zip(orders, _one_by_one(side_by_side.to(device, accumulator)), strict=True))
        sums["pairwise"] = _pairwise(x.to(accumulator))
        for width in _CHUNKS:
            if width < length:
                rows = torch.nn.functional.pad(x.to(accumulator), (0, -length % width)).reshape(-1, width)
                sums[f"chunks of {width}"] = _one_by_one(_one_by_one(rows)[None, :])[0]
        sums["torch.sum"] = x.to(accumulator).sum()
        return {"x": x, "sums": {order: total.to(x.dtype) for order, total in sums.items()}}

    def trials(self, case: Case, inputs: Any, operator: Operator) -> Iterator[Trial]:
        """Every order."""
        if "how" in case.data:
            yield Trial("shuffle", partial(_shuffled_sums, _PYTHON_SUMS[case.data["how"]]), many=True)
        for order in inputs.get("sums", ()):
            yield Trial(order, partial(inputs["sums"].get, order))

    def reference(self, case: Case, inputs: Any) -> torch.Tensor | None:
        """The exact sum, rounded once to float64; none for the post's list, whose sum is 0."""
        return inputs["x"].new_tensor(math.fsum(inputs["x"].tolist()), dtype=torch.float64) if inputs else None

    def findings(self, case: Case, inputs: Any, classes: Classes, operator: Operator) -> dict[str, Any]:
        """The number of sums and their range; for tensors, each order's sum with math.fsum's."""
        sums = sorted(map(float, classes.results))
        said: dict[str, Any] = {"distinct_sums": len(set(sums)), "smallest": sums[0], "largest": sums[-1]}
        if "how" in case.data:
            return said | {"shuffles": _SHUFFLES, "seed": _SEED}
        numbers, by_order = inputs["x"].tolist(), {order: float(x) for order, x in inputs["sums"].items()}
        return said | {"fsum": math.fsum(numbers), "float64": add_plainly(numbers), "sums": by_order}


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


def _one_by_one(rows: torch.Tensor) -> torch.Tensor:
    """Sum of each row of [R, N], column after column, rounding to the rows' dtype at every addition. Returns [R]."""
    return functools.reduce(torch.add, rows.unbind(1), torch.zeros_like(rows[:, 0]))


def _pairwise(x: torch.Tensor) -> torch.Tensor:
    """Neighbours are added, then neighbouring sums, and so on; an odd one out waits for the next round."""
    while len(x) > 1:
        even = len(x) // 2 * 2
        x = torch.cat([x[0:even:2] + x[1:even:2], x[even:]])
    return x[0]


# ---- a product with K in parts

_SPLITS = (1, 2, 4, 8, 16)
_RUN_SPLITS = (4, 16)
_SIZES = {"cpu": (8, 2048, 128), "cuda": (16, 12288, 1024)}  # M, K, N
_RUNS = {"cpu": 20, "cuda": 50}
# Inputs whose every partial sum is exact in float32, so that all orders must agree: a difference here is a bug.
_EXACT_PRODUCTS = ("ones", "integers")


class SplitK(Probe):
    """1 to 16 parts, added in order and by atomics; an implementation that takes `workers` gets as many workers."""

    name = "split-k"
    answers = _EXACT_PRODUCTS

    def cases(self, options: Options) -> Iterable[Case]:
        """For each dtype and input the parts in order; by atomics they are compared with serial, and run to run."""
        given = options.m, options.k, options.n
        M, K, N = (size or default for size, default in zip(given, _SIZES[options.device], strict=True))
        where = f"M={M} K={K} N={N}"

        def case(name: str, varied: str, dtype: str, kind: str = "bell", **data: Any) -> Case:
            title, sizes = f"{name}, {where}, {kind}", {"M": M, "N": N, "K": K}
            return Case(title, "split_k", sizes, dtype, varied, kind, demonstration=True, data=data)

        for dtype in dtypes(options, "split-k", ("float32", "bfloat16")):
            # partial sums are kept in float32, one product per part
            needed = (M * K + K * N) * (getattr(torch, dtype).itemsize + 12) + M * N * 4 * (max(_SPLITS) + 4)
            require_memory(options.device, needed, f"split-k of {where} in {dtype}")
            for kind in kinds(options, ("bell", "wide", "cancel", *_EXACT_PRODUCTS)):
                yield case("K in 1 to 16 parts added in order", "split", dtype, kind, ordered=True)
            yield case("K in 2 to 16 parts added by atomics, against serial", "split", dtype, ordered=False)
            for splits in _SPLITS if options.full else _RUN_SPLITS:
                name = f"K in {splits} parts added by atomics, the same call again"
                yield case(name, "run", dtype, splits=splits, runs=options.runs or _RUNS[options.device])

    def prepare(self, case: Case, device: str, seed: int) -> Any:
        """a [M, K] and b [K, N]."""
        (M, K, N), dtype = (case.shape[axis] for axis in "MKN"), case.torch_dtype
        if case.inputs == "ones":
            return [torch.ones(size, dtype=dtype, device=device) for size in ((M, K), (K, N))]
        a, b = product_operands(case.inputs, (M, K), (N, K), dtype, device, seed, weight_kind="bell")
        return a, (b * weight_scale(K)).T.contiguous()

    def trials(self, case: Case, inputs: Any, operator: Operator) -> Iterator[Trial]:
        """Serial first, then every number of parts; or one number again and again."""
        product = partial(in_parts, operator, *inputs)
        for run in range(case.data.get("runs", 0)):
            yield Trial(run, partial(product, case.data["splits"], ordered=False))
        for splits in _SPLITS if "ordered" in case.data else ():
            yield Trial(splits, partial(product, splits, splits == 1 or case.data["ordered"]))


def in_parts(operator: Operator, a: torch.Tensor, b: torch.Tensor, splits: int, ordered: bool = True) -> torch.Tensor:
    """The product with K in this many parts, or by as many workers; of an oracle, which has no parts, as a whole."""
    takes = inspect.signature(operator).parameters
    if "workers" in takes:
        return operator(a, b, workers=splits)
    return operator(a, b, splits=splits, ordered=ordered) if "splits" in takes else operator(a, b)


# ---- many sources added onto few rows

_ROWS = 16
_COLUMNS = 64
_SOURCES = {"cpu": 512, "cuda": 8192}  # index_add takes about 15 us per source on a CPU
_CALLS = 200
_ENOUGH = 20  # calls where some of them differ
_MINE = 4  # rows that are compared in batches: a quarter of the sources are theirs
_SHARES = (0, 1, 8, 64)  # 64ths of the others' sources that are added in the same call


class Atomics(Probe):
    """Many sources added onto few rows, so that every row gets dozens or hundreds of additions."""

    name = "atomics"

    def cases(self, options: Options) -> Iterable[Case]:
        """Both operators, run to run; --m is the number of sources, --n the columns of index_add."""
        sources, columns = options.m or _SOURCES[options.device], options.n or _COLUMNS
        again = {"runs": options.runs or _CALLS, "enough": _ENOUGH if options.runs is None else 0}
        for operator in ("index_add", "scatter_add"):
            shape = {"R": _ROWS, "n": sources} | ({"C": columns} if operator == "index_add" else {})
            for dtype in dtypes(options, operator, ("float32", "bfloat16")):
                needed = sources * shape.get("C", 1) * (3 * getattr(torch, dtype).itemsize + 16)
                require_memory(options.device, needed, f"{operator} of {shape} in {dtype}")
                for kind in kinds(options, ("bell",)):
                    title = f"{operator}: {sources} additions to {_ROWS} rows, the same call again, {kind}"
                    yield Case(title, operator, shape, dtype, "run", kind, data=again)
                    title = f"{operator}: additions to {_MINE} of {_ROWS} rows, among up to {sources} in all, {kind}"
                    yield Case(title, operator, shape, dtype, "batch_size", kind)

    def prepare(self, case: Case, device: str, seed: int) -> Any:
        """target [R, C], index [n], source [n, C]; for scatter_add target [R] and source [n]."""
        rng = generator(seed, device)
        columns = (case.shape["C"],) if "C" in case.shape else ()
        source = make(case.inputs, (case.shape["n"], *columns), case.torch_dtype, device, rng)
        index = torch.randint(0, case.shape["R"], (case.shape["n"],), generator=rng, device=device)
        return make("bell", (case.shape["R"], *columns), case.torch_dtype, device, rng), index, source

    def trials(self, case: Case, inputs: Any, operator: Operator) -> Iterator[Trial]:
        """The same call repeated; or the first rows', with and without others' sources."""
        for run in range(case.data.get("runs", 0)):
            yield Trial(run, partial(operator, *inputs))
        for share in _SHARES if case.varied == "batch_size" else ():
            yield Trial(share * case.shape["n"] // 64, partial(_among, operator, inputs, share))


def _among(operator: Operator, inputs: Any, share: int) -> torch.Tensor:
    """The first rows with all of their sources, and this many 64ths of the other rows' sources."""
    target, index, source = inputs
    come = (index < _MINE) | (torch.arange(len(index), device=index.device) * 64 < share * len(index))
    at = torch.nonzero(come)[:, 0]
    return operator(target, index[at], source[at])[:_MINE]
