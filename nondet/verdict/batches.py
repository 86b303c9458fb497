"""Whether the batch really changed under sampled completions: without that, "batch-dependent" is no verdict.

From the schedules of all requests of a round follows the size of every batch. A completion's *batches* are its own
query tokens and the whole batch's, step by step from its first.
"""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from nondet.core.records import Completion, Run

__all__ = ["BatchEvidence", "batch_evidence", "evidence_of", "padded", "round_totals"]

Steps = npt.NDArray[np.int64]


@dataclass(frozen=True)
class BatchEvidence:
    """What the schedules say about the completions of one prompt under one implementation.

    Attributes:
        known: Completions whose batches are on record; the others' round was cut short, or no schedule was kept.
        different: Different sequences of batches among them.
        alone: Completions that had every batch to themselves, and computed every key themselves: pages of a shared
            prefix hold bits of the batch that computed them.
        alone_parted: Whether two of these, with equal batches, have different traces: the same shapes and
            the same data gave other bits, so this is run-to-run nondeterminism and nothing else.
        padded: Whether steps ran as CUDA graphs, so that products met a few sizes alone, and not those on record.
    """

    known: int
    different: int
    alone: int
    alone_parted: bool
    padded: bool = False

    @property
    def varied(self) -> bool:
        """Whether at least two completions met different batches."""
        return self.different > 1

    @property
    def constant(self) -> bool:
        """Whether every completion ran alone, in equal batches: the batch is out of the question."""
        return self.known > 0 and self.different == 1 and self.alone == self.known


def batch_evidence(run: Run, impl: str, prompt: int) -> BatchEvidence:
    """Compare the batches of the completions of `prompt` under `impl`. Failed completions count as company only."""
    mine = [c for c in run.completions if c.impl == impl and c.prompt == prompt]
    return evidence_of(mine, round_totals(run, impl), run.header.plan["prompts"][prompt]["tokens"], padded(run))


def padded(run: Run) -> bool:
    """As `BatchEvidence.padded`."""
    load = run.header.plan.get("load")
    return isinstance(load, dict) and bool(load.get("graphs"))


def evidence_of(
    completions: Sequence[Completion], totals: Mapping[int, Steps], prompt_tokens: int, padded: bool = False
) -> BatchEvidence:
    """The same of these completions of one prompt, under one implementation.

    Args:
        padded: As the run's, see `padded`.
        totals: As `round_totals` gives them, for that implementation.
    """
    patterns: set[str] = set()
    traces_alone: dict[str, set[str]] = defaultdict(set)
    known = alone = 0
    for completion in completions:
        if completion.status != "ok":
            continue
        total = totals.get(completion.round)
        if total is None or not completion.schedule:
            continue
        known += 1
        own, whole = _batches(completion, total)
        pattern = hashlib.sha256(own.tobytes() + b"|" + whole.tobytes()).hexdigest()
        patterns.add(pattern)
        # the last token is never fed back; fewer than the rest means that pages were shared
        shared_nothing = int(own.sum()) == prompt_tokens + completion.n_tokens - 1
        if shared_nothing and np.array_equal(own, whole):
            alone += 1
            traces_alone[pattern].add(completion.trace)
    parted = any(len(traces) > 1 for traces in traces_alone.values())
    return BatchEvidence(known, len(patterns), alone, parted, padded)


def round_totals(run: Run, impl: str) -> dict[int, Steps]:
    """Round -> query tokens of the whole batch at each step; only of rounds that came to their end."""
    schedules: dict[int, list[list[int]]] = defaultdict(list)
    for record in run.rounds:
        if record.impl == impl:
            schedules[record.round] = [part for schedule in record.background.values() for part in schedule]
    for completion in run.completions:
        if completion.impl == impl and completion.round in schedules:
            schedules[completion.round].extend(completion.schedule)
    totals = {}
    for number, parts in schedules.items():
        change = np.zeros(max((first + steps for first, steps, _ in parts), default=0) + 1, dtype=np.int64)
        for first, steps, tokens in parts:
            change[first] += tokens
            change[first + steps] -= tokens
        totals[number] = np.cumsum(change)
    return totals


def _batches(completion: Completion, total: Steps) -> tuple[Steps, Steps]:
    """The completion's own query tokens and the whole batch's, at each of its steps."""
    own = np.concatenate([np.full(steps, tokens, dtype=np.int64) for _, steps, tokens in completion.schedule])
    whole = np.concatenate([total[first : first + steps] for first, steps, _ in completion.schedule])
    return own, whole
