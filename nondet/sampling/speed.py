"""The one speed of a sampled run, and the one ratio of two. Pure figures from the run file, no torch.

Tokens per second are the median over rounds: in some round kernels are compiled, shapes are proven at first use and
caches are filled, once and for good, and a sum over all rounds would charge that to whoever met it. Every
implementation plays the same rounds.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from nondet.result import Role, Round, Run, role_of

__all__ = ["DEFINITION", "NAME", "SpeedRatio", "median_rate", "speed_ratio", "speed_ratio_of"]

NAME = "speed ratio"
DEFINITION = (
    "speed ratio: invariant's tokens/s over those of the fastest stock, each the median over rounds of everybody's "
    "generated tokens over engine time; above 1 invariant is faster"
)


@dataclass(frozen=True)
class SpeedRatio:
    """Invariant against the fastest stock that ran.

    Attributes:
        baseline: Which stock: stock, stock-no-cudnn, ...
        stock, invariant: Tokens per second.
    """

    baseline: str
    stock: float
    invariant: float

    @property
    def ratio(self) -> float:
        """Invariant over stock; above 1 invariant is faster."""
        return self.invariant / self.stock


def median_rate(rounds: Iterable[Round]) -> float:
    """Generated tokens per second of everybody, the median over rounds that took time; 0.0 without one."""
    rates = [r.tokens / r.seconds for r in rounds if r.seconds > 0]
    return statistics.median(rates) if rates else 0.0


def speed_ratio(rates: Mapping[str, float]) -> SpeedRatio | None:
    """The ratio from each implementation's tokens per second; None unless invariant and a stock have one."""
    stock = {impl: rate for impl, rate in rates.items() if role_of(impl) in (Role.STOCK, Role.BACKEND) and rate > 0}
    invariant = next((rate for impl, rate in rates.items() if role_of(impl) == Role.INVARIANT and rate > 0), None)
    if not stock or invariant is None:
        return None
    baseline = max(stock, key=stock.__getitem__)
    return SpeedRatio(baseline, stock[baseline], invariant)


def speed_ratio_of(run: Run) -> SpeedRatio | None:
    """The ratio of a run's rounds."""
    impls = dict.fromkeys(r.impl for r in run.rounds)
    return speed_ratio({impl: median_rate(r for r in run.rounds if r.impl == impl) for impl in impls})
