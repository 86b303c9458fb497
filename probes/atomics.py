"""index_add and scatter_add: the same call repeated.

On a GPU the stock kernels add with atomics, in the order in which threads arrive. An LLM's forward pass has none of
them; the backward pass of an embedding and of some attention kernels does. On a CPU they add one after the other.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import partial
from typing import Any

import torch

from nondet.core.inputs import generator, make
from nondet.core.measure import Trial
from nondet.probes.base import Case, Operator, Options, Probe, dtypes, element_bytes, kinds, require_memory, runs, size

_ROWS = 16
_COLUMNS = 64
_SOURCES = {"cpu": 512, "cuda": 8192}  # index_add takes about 15 us per source on a CPU
_RUNS = 200
_ENOUGH = 20  # runs where some of them differ
_MINE = 4  # rows that are compared in batches: a quarter of the sources are theirs
_SHARES = (0, 1, 8, 64)  # 64ths of the others' sources that are added in the same call


class Atomics(Probe):
    """Many sources added onto few rows, so that every row gets dozens or hundreds of additions."""

    name = "atomics"

    def cases(self, options: Options) -> Iterable[Case]:
        """Both operators, run to run; --m is the number of sources, --n the columns of index_add."""
        sources, columns = size("--m", options.m, _SOURCES[options.device]), size("--n", options.n, _COLUMNS)
        for operator in ("index_add", "scatter_add"):
            shape = {"R": _ROWS, "n": sources} | ({"C": columns} if operator == "index_add" else {})
            for dtype in dtypes(options, operator, ("float32", "bfloat16")):
                needed = sources * shape.get("C", 1) * (3 * element_bytes(dtype) + 16)
                require_memory(options.device, needed, f"{operator} of {shape} in {dtype}")
                again = {"runs": runs(options, _RUNS), "enough": _ENOUGH if options.runs is None else 0}
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
        if case.varied == "batch_size":
            for share in _SHARES:
                yield Trial(share * case.shape["n"] // 64, partial(_among, operator, inputs, share))
            return
        for run in range(case.data["runs"]):
            yield Trial(run, partial(operator, *inputs))


def _among(operator: Operator, inputs: Any, share: int) -> torch.Tensor:
    """The first rows with all of their sources, and this many 64ths of the other rows' sources."""
    target, index, source = inputs
    come = (index < _MINE) | (torch.arange(len(index), device=index.device) * 64 < share * len(index))
    at = torch.nonzero(come)[:, 0]
    return operator(target, index[at], source[at])[:_MINE]
