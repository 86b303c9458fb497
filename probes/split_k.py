"""One product with K cut into parts, as a library does to fill the device when M and N give it too few tiles.

The number of parts decides where the sum over K is cut, and so the bits, unless every partial sum is exact. Parts added
in order give equal bits every time; parts added by atomics may not. Chunks of fixed size give equal bits however many
workers share the chunks.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator
from functools import partial
from typing import Any

import torch

from nondet.core.inputs import generator, make
from nondet.core.measure import Trial
from nondet.probes import base
from nondet.probes.base import Case, Operator, Options, Probe, dtypes, kinds

_SPLITS = (1, 2, 4, 8, 16)
_RUN_SPLITS = (4, 16)
_SIZES = {"cpu": (8, 2048, 128), "cuda": (16, 12288, 1024)}  # M, K, N
_RUNS = {"cpu": 20, "cuda": 50}
# Inputs whose every partial sum is exact in float32, so that all orders must agree: a difference here is a bug.
_EXACT = ("ones", "integers")


class SplitK(Probe):
    """1 to 16 parts, added in order and by atomics; an implementation that takes `workers` gets as many workers."""

    name = "split-k"
    answers = _EXACT

    def cases(self, options: Options) -> Iterable[Case]:
        """For each dtype and input the parts in order; by atomics they are compared with serial, and run to run."""
        given = (("--m", options.m), ("--k", options.k), ("--n", options.n))
        M, K, N = (base.size(*flag, default) for flag, default in zip(given, _SIZES[options.device], strict=True))
        where = f"M={M} K={K} N={N}"

        def case(name: str, varied: str, dtype: str, kind: str = "bell", **data: Any) -> Case:
            title, sizes = f"{name}, {where}, {kind}", {"M": M, "N": N, "K": K}
            return Case(title, "split_k", sizes, dtype, varied, kind, demonstration=True, data=data)

        for dtype in dtypes(options, "split-k", ("float32", "bfloat16")):
            # partial sums are kept in float32, one product per part
            needed = (M * K + K * N) * (base.element_bytes(dtype) + 12) + M * N * 4 * (max(_SPLITS) + 4)
            base.require_memory(options.device, needed, f"split-k of {where} in {dtype}")
            for kind in (*kinds(options, ("bell", "wide", "cancel")), *(() if options.inputs else _EXACT)):
                yield case("K in 1 to 16 parts added in order", "split", dtype, kind, ordered=True)
            yield case("K in 2 to 16 parts added by atomics, against serial", "split", dtype, ordered=False)
            for splits in _SPLITS if options.full else _RUN_SPLITS:
                name = f"K in {splits} parts added by atomics, the same call again"
                yield case(name, "run", dtype, splits=splits, runs=base.runs(options, _RUNS[options.device]))

    def prepare(self, case: Case, device: str, seed: int) -> Any:
        """a [M, K] and b [K, N]."""
        M, K, N = (case.shape[axis] for axis in "MKN")
        rng = generator(seed, device)
        dtype = case.torch_dtype
        if case.inputs == "ones":
            return torch.ones(M, K, dtype=dtype, device=device), torch.ones(K, N, dtype=dtype, device=device)
        a = make(case.inputs, (M, K), dtype, device, rng)
        if case.inputs == "integers":
            return a, make(case.inputs, (K, N), dtype, device, rng)
        b = make("bell", (K, N), dtype, device, rng) * base.weight_scale(K)
        if case.inputs == "cancel":
            b[1 : K // 2 * 2 : 2] = b[0 : K // 2 * 2 : 2]  # so that the pairs of a cancel in the products, too
        return a, b

    def trials(self, case: Case, inputs: Any, operator: Operator) -> Iterator[Trial]:
        """Serial first, then every number of parts; or one number again and again."""
        product = partial(in_parts, operator, *inputs)
        if case.varied == "run":
            for run in range(case.data["runs"]):
                yield Trial(run, partial(product, case.data["splits"], ordered=False))
            return
        yield Trial(1, partial(product, 1))
        for splits in _SPLITS[1:]:
            yield Trial(splits, partial(product, splits, case.data["ordered"]))


def in_parts(operator: Operator, a: torch.Tensor, b: torch.Tensor, splits: int, ordered: bool = True) -> torch.Tensor:
    """The product with K in this many parts, or by as many workers; of an oracle, which has no parts, as a whole."""
    takes = inspect.signature(operator).parameters
    if "workers" in takes:
        return operator(a, b, workers=splits)
    return operator(a, b, splits=splits, ordered=ordered) if "splits" in takes else operator(a, b)
