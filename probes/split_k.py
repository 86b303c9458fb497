"""One product with K cut into parts: what a library does to fill the device when M and N give it too few tiles.

The number of parts sets where the sum over K is broken, and so the bits, unless every partial sum is exact. Added in
order the parts give equal bits every time; added by atomics they may not. A cut into chunks of fixed size gives equal
bits however many workers share the chunks.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

from nondet.core.compare import identical
from nondet.core.inputs import generator, make
from nondet.core.measure import Trial
from nondet.probes.base import Case, Options, dtypes, element_bytes, kinds, require_memory, runs, size

_SPLITS = (1, 2, 4, 8, 16)
_RUN_SPLITS = (4, 16)
_SIZES = {"cpu": (8, 4096, 256), "cuda": (16, 12288, 1024)}  # M, K, N
_RUNS = {"cpu": 20, "cuda": 50}
# Inputs whose every partial sum is exact in float32, so that all orders must agree: a difference here is a bug.
_EXACT = {
    "ones": "all ones: the answer is K",
    "integers": "integers from -8 to 8: no partial sum needs more than 24 bits",
}


class SplitK:
    """1 to 16 parts, added in order and by atomics; an implementation that takes `workers` gets as many of them."""

    name = "split-k"

    def cases(self, options: Options) -> Iterable[Case]:
        """For each dtype and input the parts in order; by atomics they are held against serial, and run to run."""
        default = _SIZES[options.device]
        M, K, N = (
            size(f, v, d)
            for f, v, d in zip(("--m", "--k", "--n"), (options.m, options.k, options.n), default, strict=True)
        )
        where = f"M={M} K={K} N={N}"
        for dtype in dtypes(options, "split-k", ("float32", "bfloat16")):
            # partial sums are kept in float32, one product a part
            needed = (M * K + K * N) * (element_bytes(dtype) + 12) + M * N * 4 * (max(_SPLITS) + 4)
            require_memory(options.device, needed, f"split-k of {where} in {dtype}")

            sizes = {"M": M, "N": N, "K": K}

            def case(
                name: str, varied: str, kind: str, dtype: str = dtype, sizes: dict[str, int] = sizes, **data: Any
            ) -> Case:
                title = f"{name}, {where}, {kind}"
                return Case(title, "split_k", sizes, dtype, varied, kind, demonstration=True, data=data)

            for kind in (*kinds(options, ("bell", "wide", "cancel")), *(() if options.inputs else _EXACT)):
                yield case("K in 1 to 16 parts added in order", "split", kind, ordered=True)
            yield case("K in 2 to 16 parts added by atomics, against serial", "split", "bell", ordered=False)
            for splits in _SPLITS if options.full else _RUN_SPLITS:
                name = f"K in {splits} parts added by atomics, the same call again"
                yield case(name, "run", "bell", splits=splits, runs=runs(options, _RUNS[options.device]))

    def prepare(self, case: Case, device: str, seed: int) -> Any:
        """a [M, K] and b [K, N]."""
        M, K, N = (case.shape[axis] for axis in "MKN")
        rng = generator(seed, device)
        dtype = case.torch_dtype
        if case.inputs == "ones":
            return torch.ones(M, K, dtype=dtype, device=device), torch.ones(K, N, dtype=dtype, device=device)
        if case.inputs == "integers":
            a, b = (torch.randint(-8, 9, s, generator=rng, device=device).to(dtype) for s in ((M, K), (K, N)))
            return a, b
        a = make(case.inputs, (M, K), dtype, device, rng)
        b = make("bell", (K, N), dtype, device, rng) * 2.0 ** -round(math.log2(K) / 2)
        if case.inputs == "cancel":
            b[1 : K // 2 * 2 : 2] = b[0 : K // 2 * 2 : 2]  # so that the pairs of a cancel in the products, too
        return a, b

    def trials(self, case: Case, inputs: Any, operator: Callable[..., torch.Tensor]) -> Iterator[Trial]:
        """Serial first, then every number of parts; or one number again and again."""
        a, b = inputs

        def product(splits: int, ordered: bool) -> Callable[[], torch.Tensor]:
            if "workers" in inspect.signature(operator).parameters:
                return lambda: operator(a, b, workers=splits)
            return lambda: operator(a, b, splits=splits, ordered=ordered)

        if case.varied == "run":
            for run in range(case.data["runs"]):
                yield Trial(run, product(case.data["splits"], ordered=False))
            return
        yield Trial(1, product(1, ordered=True))
        for splits in _SPLITS[1:]:
            yield Trial(splits, product(splits, case.data["ordered"]))

    def reference(self, case: Case, inputs: Any) -> torch.Tensor | None:
        """The product in float64."""
        return _exact(*inputs)

    def extra(self, case: Case, inputs: Any, results: list[torch.Tensor]) -> dict[str, Any]:
        """Where the inputs are exact: whether every class is the known answer, which tells a bug from rounding."""
        if case.inputs not in _EXACT:
            return {}
        known = _exact(*inputs)
        exact = all(identical(r, known.to(r.dtype)) for r in results)
        return {"exact": exact, "inputs": _EXACT[case.inputs]}


def _exact(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return a.double() @ b.double()
