"""Bounds, intervals and shares, and how a rate is rounded: never to a stronger claim. See docs/statistics.md.

Two things are not rates. A deterministic sweep over sizes that somebody chose has no sampling frame: it has counts.
And completions that share a batch are not independent: whatever set one off, a full batch or a tile, sets off its
neighbours, so that a bound holds by round (the unit that is drawn) and by completion only if rounds don't matter.
"""

from __future__ import annotations

import math
from collections.abc import Sequence, Sized
from typing import NamedTuple

__all__ = [
    "CONFIDENCE",
    "Clustered",
    "clustered_interval",
    "confidence_sequence",
    "design_effect",
    "intraclass_correlation",
    "new_share",
    "one_sided_bound",
    "pair_disagreement",
    "percent",
    "percent_range",
    "rounds_compared",
    "trials_to_see",
    "wilson",
]

CONFIDENCE = 0.95
_Z = 1.959963984540054  # two-sided 95%


def wilson(k: float, n: float) -> tuple[float, float]:
    """Wilson's two-sided 95% interval for a rate seen k times in n independent trials; effective counts may be broken.

    Source: E. B. Wilson, Journal of the American Statistical Association 22 (1927), 209-212.
    """
    if n <= 0 or not 0 <= k <= n:
        raise ValueError(f"{k} of {n} is no rate")
    share, spread = k / n, _Z * _Z / n
    middle = (share + spread / 2) / (1 + spread)
    half = _Z * math.sqrt(share * (1 - share) / n + spread / (4 * n)) / (1 + spread)
    # at k = 0 and k = n the ends are exact; rounding must not push them inside
    return (0.0 if k == 0 else max(0.0, middle - half), 1.0 if k == n else min(1.0, middle + half))


def one_sided_bound(n: int) -> float:
    """The rate that n independent tries without a hit exclude at 95%: 1 - 0.05^(1/n).

    Valid whenever one stops while nothing was hit: a rate is excluded wrongly only if no hit came in the first n tries,
    n the fewest that exclude it, and that has a chance of at most 0.05.
    """
    if n <= 0:
        raise ValueError("no tries, no bound")
    return -math.expm1(math.log1p(-CONFIDENCE) / n)


def rounds_compared(n: int, rounds: Sized) -> int:
    """Comparisons by round: the first result is what others are held against; a fuller round compares within itself."""
    return len(rounds) if n > len(rounds) else len(rounds) - 1


def trials_to_see(rate: float, confidence: float = CONFIDENCE) -> int:
    """Independent tries that hit something of this rate at least once with this confidence: 299 for 1%, 29 for 10%.

    Raises:
        ValueError: a rate or confidence that is not between 0 and 1.
    """
    if not (0.0 < rate <= 1.0 and 0.0 < confidence < 1.0):
        raise ValueError(f"a rate of {rate} with {confidence} is nothing to look for")
    if rate == 1.0:
        return 1
    least = math.log1p(-confidence) / math.log1p(-rate)
    return math.ceil(least - 1e-9 * least)  # where a whole number of tries is enough, rounding must not ask for another


def confidence_sequence(k: float, n: float) -> tuple[float, float]:
    """A 95% interval for a rate that holds at every n at once, so that one may look, and stop, whenever one likes.

    All rates p under which the mixture of likelihoods over Beta(1/2, 1/2) is below 20 times the likelihood of p. That
    ratio is a martingale under p, which reaches 20 with a chance of at most 1/20 (Ville). Wider than Wilson's, which
    holds at an n that was fixed beforehand. Effective counts may be broken; then it holds as far as the effect does.

    Source: H. Robbins, Annals of Mathematical Statistics 41 (1970), 1397-1409; S. R. Howard, A. Ramdas, J. McAuliffe
    and J. Sekhon, Annals of Statistics 49 (2021), 1055-1080.

    Raises:
        ValueError: no rate.
    """
    if n <= 0 or not 0 <= k <= n:
        raise ValueError(f"{k} of {n} is no rate")
    misses = n - k
    mixture = math.lgamma(k + 0.5) + math.lgamma(misses + 0.5) - math.lgamma(n + 1.0) - math.log(math.pi)
    threshold = mixture + math.log1p(-CONFIDENCE)  # log likelihood of the least likely rate that is kept

    def kept(p: float) -> bool:
        likelihood = (k * math.log(p) if k else 0.0) + (misses * math.log1p(-p) if misses else 0.0)
        return likelihood > threshold

    def end(outside: float, inside: float) -> float:
        """The border between a rate that is left out and one that is kept, from its outer side."""
        for _ in range(200):
            middle = (outside + inside) / 2
            if middle in (outside, inside):
                break
            outside, inside = (outside, middle) if kept(middle) else (middle, inside)
        return outside

    share = k / n
    return (0.0 if k == 0 else end(0.0, share), 1.0 if misses == 0 else end(1.0, share))


class Clustered(NamedTuple):
    """An anytime-valid interval of a rate whose trials came in groups.

    Attributes:
        rho: Estimated intraclass correlation, 0 where groups scatter no more than independent trials do.
        effect: The design effect: the n trials are worth n / effect independent ones.
    """

    low: float
    high: float
    rho: float
    effect: float


def intraclass_correlation(hits: Sequence[int], sizes: Sequence[int]) -> float:
    """How alike the trials of one group are, 0 to 1: the one-way ANOVA estimate for hits of groups of unequal size.

    Source: M. S. Ridout, C. G. B. Demetrio and D. Firth, Biometrics 55 (1999), 137-148, the ANOVA estimator. A negative
    estimate is called 0. A single group says nothing of the scatter between groups: 0 as well.

    Args:
        hits: Hits in each group.
        sizes: Trials in each group, each 1 or more.

    Raises:
        ValueError: more hits than trials, an empty group, or lists of two lengths.
    """
    if len(hits) != len(sizes) or any(not 0 <= k <= n or n < 1 for k, n in zip(hits, sizes, strict=True)):
        raise ValueError(f"{list(hits)} of {list(sizes)} are no groups")
    groups, total = len(sizes), sum(sizes)
    if groups < 2 or total == groups:
        return 0.0
    mean = sum(hits) / total
    between = sum(n * (k / n - mean) ** 2 for k, n in zip(hits, sizes, strict=True)) / (groups - 1)
    within = sum(k * (n - k) / n for k, n in zip(hits, sizes, strict=True)) / (total - groups)
    size = (total - sum(n * n for n in sizes) / total) / (groups - 1)
    spread = between + (size - 1) * within
    return min(1.0, max(0.0, (between - within) / spread)) if spread > 0 else 0.0


def design_effect(hits: Sequence[int], sizes: Sequence[int]) -> tuple[float, float]:
    """(rho, 1 + (m - 1) rho): n trials in groups are worth n over the effect. Never below 1.

    m is the size-weighted mean size, so that large groups count for what they are.

    Source: L. Kish, Survey Sampling (1965).
    """
    rho = intraclass_correlation(hits, sizes)
    return rho, max(1.0, 1.0 + (sum(n * n for n in sizes) / sum(sizes) - 1.0) * rho)


def clustered_interval(hits: Sequence[int], sizes: Sequence[int]) -> Clustered:
    """The confidence sequence with the trials shrunk by the design effect.

    A single group gives the interval of independent trials, with nothing known of the scatter between groups.
    """
    rho, effect = design_effect(hits, sizes)
    low, high = confidence_sequence(sum(hits) / effect, sum(sizes) / effect)
    return Clustered(low, high, rho, effect)


def pair_disagreement(counts: Sequence[int]) -> float:
    """The share of pairs that differ, 1 - sum n_k (n_k - 1) / (N (N - 1)): unlike "distinct of N" it is free of N.

    Args:
        counts: How often each distinct result was seen; two or more in all.
    """
    total = sum(counts)
    if total < 2:
        raise ValueError(f"{total} results make no pair")
    return 1.0 - sum(n * (n - 1) for n in counts) / (total * (total - 1))


def new_share(counts: Sequence[int]) -> float:
    """Good's estimate of the chance that the next result is none of those seen: those seen once, over all.

    Source: I. J. Good, Biometrika 40 (1953), 237-264.
    """
    total = sum(counts)
    if total < 1:
        raise ValueError("no results")
    return sum(n == 1 for n in counts) / total


def percent(share: float, rounding: str = "near") -> str:
    """A share in percent to about three digits.

    Args:
        rounding: "near", "up" (upper bounds) or "down" (lower bounds). Only exact ones are shown as 100%.
    """
    value = 100.0 * share
    if value <= 0.0 or value >= 100.0:
        return "0%" if value <= 0.0 else "100%"
    digits = 1 if value >= 10.0 else max(2, 1 - math.floor(math.log10(value)))
    scale = 10.0**digits
    # 1e-9 keeps figures that are round already from being moved by their own binary representation
    scaled = {
        "near": round(value * scale),
        "up": math.ceil(value * scale - 1e-9),
        "down": math.floor(value * scale + 1e-9),
    }[rounding]
    whole = round(100 * scale)
    if scaled >= whole and rounding != "up":
        return f">{(whole - 1) / scale:.{digits}f}%"
    if scaled >= whole:
        return "100%"
    return f"{scaled / scale:.{digits}f}%"


def percent_range(low: float, high: float) -> str:
    """An interval in percent, rounded outwards."""
    return f"{percent(low, 'down')} to {percent(high, 'up')}"
