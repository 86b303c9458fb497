"""How large the batches were that completions took part in: from the schedules of all requests of a round."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt

from nondet.core.records import Completion, Run

__all__ = ["batch_sizes", "batch_totals"]


def batch_totals(run: Run, impl: str) -> dict[int, npt.NDArray[np.int64]]:
    """Round -> query tokens of the whole batch at each step: from the schedules of all requests."""
    everybody: dict[int, list[list[int]]] = defaultdict(list)
    for completion in run.completions:
        if completion.impl == impl:
            everybody[completion.round] += completion.schedule
    for record in run.rounds:
        if record.impl == impl:
            for schedule in record.background.values():
                everybody[record.round] += schedule
    return {number: _per_step(parts, [tokens for _, _, tokens in parts]) for number, parts in everybody.items()}


def batch_sizes(batches: Mapping[int, npt.NDArray[np.int64]], good: Sequence[Completion]) -> set[int]:
    """Sizes, in query tokens, of the steps that the completions took part in."""
    under_study: dict[int, list[list[int]]] = defaultdict(list)
    for completion in good:
        under_study[completion.round] += completion.schedule
    sizes: set[int] = set()
    for number, parts in under_study.items():
        taken = _per_step(parts, [1] * len(parts))
        sizes.update(np.unique(batches[number][: len(taken)][taken > 0]).tolist())
    return sizes


def _per_step(parts: Sequence[list[int]], amounts: Sequence[int]) -> npt.NDArray[np.int64]:
    """[steps] the amounts of the parts, [first step, steps, ...] each, summed at every step that they cover."""
    change = np.zeros(max((first + steps for first, steps, _ in parts), default=0) + 1, dtype=np.int64)
    for (first, steps, _), amount in zip(parts, amounts, strict=True):
        change[first] += amount
        change[first + steps] -= amount
    return np.cumsum(change)
