"""When completions part, with those that end unparted as what they are: censored, not survivors. Pure figures."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from nondet.statistics import confidence_sequence

__all__ = ["LogRank", "SurvivalStep", "kaplan_meier", "log_rank"]

_TIMES = tuple[Sequence[int], Sequence[bool]]


class SurvivalStep(NamedTuple):
    """The estimate from one time on, up to the next step.

    Attributes:
        time: Where something parted; the first step is at 0, where nothing has.
        at_risk: Those that had come as far unparted.
        events: Those that parted there.
        survival: Estimated share that is unparted after it.
        low, high: Pointwise 95% interval of it.
    """

    time: int
    at_risk: int
    events: int
    survival: float
    low: float
    high: float


def kaplan_meier(times: Sequence[int], parted: Sequence[bool], effect: float = 1.0) -> list[SurvivalStep]:
    """The share that is unparted, over time, by the product-limit estimate.

    Pointwise intervals are those of so many independent trials as would have Greenwood's variance, over the effect;
    where nothing parted the upper end is 1 and the lower that of 0 of n, 0.05^(effect/n). Times at which one parts and
    one ends: the parting is first.

    Source: E. L. Kaplan and P. Meier, Journal of the American Statistical Association 53 (1958), 457-481; S. J. Cutler
    and F. Ederer, Journal of Chronic Diseases 8 (1958), 699-712, for the trials.

    Args:
        times: For each, the tokens after which it parted or ended.
        parted: Whether it parted; else its text ended there, unparted (censored).
        effect: Completions that are worth one independent trial, 1 or more; infinite: the intervals are 0 to 1.

    Raises:
        ValueError: lists of two lengths, none at all, or a negative time.
    """
    if len(times) != len(parted) or not times or min(times) < 0:
        raise ValueError(f"{len(times)} times and {len(parted)} ends are no sample")
    events, leaving = _counts(times, parted)
    at_risk, survival, variance = len(times), 1.0, 0.0
    steps = [SurvivalStep(0, at_risk, 0, 1.0, 0.05 ** (effect / at_risk), 1.0)]
    for time in sorted(leaving):
        hits = events.get(time, 0)
        if hits:
            survival *= 1.0 - hits / at_risk
            variance += hits / (at_risk * (at_risk - hits)) if at_risk > hits else math.inf
            # without censoring these are all n; where all that were left parted, those that were left
            trials = (1.0 - survival) / (survival * variance) if survival > 0.0 else at_risk
            steps.append(SurvivalStep(time, at_risk, hits, survival, *_interval(survival, trials / effect)))
        at_risk -= leaving[time]
    return steps


def _interval(survival: float, trials: float) -> tuple[float, float]:
    return confidence_sequence(survival * trials, trials) if trials > 0.0 else (0.0, 1.0)


class LogRank(NamedTuple):
    """Two samples compared over all times.

    Attributes:
        observed, expected: Partings of the first sample, and what they would be if both parted at one rate.
        statistic: Chi-square with one degree of freedom, after division by the effect.
        p: Chance of one as large if both part alike; 1.0 where nothing could be compared.
    """

    observed: int
    expected: float
    statistic: float
    p: float


def log_rank(strata: Mapping[int, tuple[_TIMES, _TIMES]], effect: float = 1.0) -> LogRank:
    """The log-rank test, stratified: each prompt is compared with itself, and the differences are summed.

    Source: N. Mantel, Cancer Chemotherapy Reports 50 (1966), 163-170. The division by the effect is a first-order
    correction for completions that come in rounds.

    Args:
        strata: Prompt -> (times, parted) of the first and of the second sample.
        effect: Completions that are worth one independent trial, 1 or more.
    """
    observed, expected, variance = 0, 0.0, 0.0
    for one, other in strata.values():
        hits, leaving = _counts(*one)
        hits_other, leaving_other = _counts(*other)
        at_risk, at_risk_other = len(one[0]), len(other[0])
        for time in sorted(leaving.keys() | leaving_other.keys()):
            d, n = hits.get(time, 0) + hits_other.get(time, 0), at_risk + at_risk_other
            if d:
                observed += hits.get(time, 0)
                expected += d * at_risk / n
                if n > 1:
                    variance += d * (at_risk / n) * (at_risk_other / n) * (n - d) / (n - 1)
            at_risk -= leaving.get(time, 0)
            at_risk_other -= leaving_other.get(time, 0)
    if variance <= 0.0:
        return LogRank(observed, expected, 0.0, 1.0)
    statistic = (observed - expected) ** 2 / variance / effect
    return LogRank(observed, expected, statistic, math.erfc(math.sqrt(statistic / 2)))


def _counts(times: Sequence[int], parted: Sequence[bool]) -> tuple[dict[int, int], dict[int, int]]:
    """(time -> partings, time -> all that leave)."""
    events: dict[int, int] = {}
    leaving: dict[int, int] = {}
    for time, hit in zip(times, parted, strict=True):
        leaving[time] = leaving.get(time, 0) + 1
        if hit:
            events[time] = events.get(time, 0) + 1
    return events, leaving
