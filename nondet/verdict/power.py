"""What a run without a divergence would have seen: its power, by request and by load.

Tries are independent where they are drawn so. Loads are; the requests of one load share its batches, so a figure by
request holds only if requests were independent, and says so. Stopping early is free while nothing diverged: a rate p is
excluded wrongly only if nothing was hit in the first n tries, n the fewest that exclude it, which has a chance of at
most 1 - confidence. A sweep over chosen sizes is no sample, and has no power of this kind.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from nondet.core.records import Run
from nondet.core.statistics import trials_to_see
from nondet.verdict.axes import is_varied
from nondet.verdict.batches import batch_evidence
from nondet.verdict.samples import sample_counts
from nondet.verdict.served_arms import is_endpoint, proven_tries

__all__ = ["BY", "Power", "power_of"]

BY = ("load", "request")


@dataclass(frozen=True)
class Power:
    """What was tried under one implementation, held against what was asked.

    Attributes:
        requests: Comparisons of one request with the others; loads: of one load with the others.
        rate, confidence: A rate that ought to have been seen, and how surely; both between 0 and 1.
        by: What the rate is of, "load" or "request".
    """

    impl: str
    requests: int
    loads: int
    rate: float
    confidence: float
    by: str

    def tries(self, by: str) -> int:
        """Tries by one unit."""
        return self.loads if by == "load" else self.requests

    def seen(self, by: str) -> float:
        """The chance that a divergence of the rate asked about would have been seen: 1 - (1 - p)^n."""
        return -math.expm1(self.tries(by) * math.log1p(-self.rate))

    def bound(self, by: str) -> float:
        """The rate that is excluded with the confidence asked for, 1 - (1 - c)^(1/n); 1.0 where nothing was tried."""
        tries = self.tries(by)
        return -math.expm1(math.log1p(-self.confidence) / tries) if tries else 1.0

    @property
    def needed(self) -> int:
        """Tries by the unit asked for that would be enough."""
        return trials_to_see(self.rate, self.confidence)

    @property
    def enough(self) -> bool:
        """Whether what was tried is enough."""
        return self.tries(self.by) >= self.needed


def power_of(run: Run, impl: str, *, rate: float, confidence: float, by: str) -> Power | None:
    """What the completions under `impl` would have seen; None where there are none: a sweep has counts and no rate.

    Several prompts are one sample of requests: a divergence of any of them is one. The first completion of a prompt is
    what the others are held against, and so is its load. Completions that are not known to have met different batches
    are no try at all; of a server, those that are not known to have run beside others.
    """
    prompts = sorted({c.prompt for c in run.completions if c.impl == impl})
    if not prompts or is_varied(run):
        return None
    if is_endpoint(run):
        return Power(impl, *proven_tries(run, impl), rate, confidence, by)
    requests = 0
    loads: set[int] = set()
    for prompt in prompts:
        counts = sample_counts(run, impl, prompt)
        if not counts.n or not batch_evidence(run, impl, prompt).varied:
            continue  # equal batches, or none on record: agreement says nothing of batches
        requests += counts.n - 1
        loads |= counts.traces.keys() - {min(counts.traces)}
    return Power(impl, requests, len(loads), rate, confidence, by)
