"""Bounds, intervals and shares, and how a rate is rounded: never to a stronger claim. See docs/statistics.md.

Two things are not rates. A deterministic sweep over sizes that somebody chose has no sampling frame: it has counts.
And completions that share a batch are not independent: whatever set one off, a full batch or a tile, sets off its
neighbours, so that a bound holds by round (the unit that is drawn) and by completion only if rounds don't matter.
How alike the completions of a round are is not estimated: a few rounds that happened to be alike would hide it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np

__all__ = [
    "CONFIDENCE",
    "confidence_sequence",
    "new_share",
    "one_sided_bound",
    "pair_disagreement",
    "percent",
    "percent_range",
    "round_interval",
    "trials_to_see",
    "wilson",
]

CONFIDENCE = 0.95
_Z = 1.959963984540054  # two-sided 95%
_NODES_MOST = 1_000


def wilson(k: float, n: float) -> tuple[float, float]:
    """Wilson's two-sided 95% interval for a rate seen k times in n independent trials; counts may be broken.

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
    holds at an n that was fixed beforehand. Counts may be broken: trials in rounds count as the trials over those of
    the largest round, and it holds however alike those of one round are (`round_interval` is narrower).

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

    share = k / n
    return (0.0 if k == 0 else _end(0.0, share, kept), 1.0 if misses == 0 else _end(1.0, share, kept))


def _end(outside: float, inside: float, kept: Callable[[float], bool]) -> float:
    """The border between a rate that is left out and one that is kept, from its outer side."""
    for _ in range(200):
        middle = (outside + inside) / 2
        if middle in (outside, inside) or abs(inside - outside) < 1e-10 * inside:
            break
        outside, inside = (outside, middle) if kept(middle) else (middle, inside)
    return outside


def round_interval(hits: Sequence[int], sizes: Sequence[int], confidence: float = CONFIDENCE) -> tuple[float, float]:
    """An interval for a rate whose trials came in rounds, that holds after every round, however alike those are.

    The round alone is what is drawn: trials of one may depend on each other in any way, so that no estimate of how much
    is asked for. With x a round's share and q drawn from Beta(1/2, 1/2), x q / p + (1 - x) (1 - q) / (1 - p) has the
    mean 1 under the rate p; the product over rounds, averaged over q, is a martingale, which reaches 20 with a chance
    of at most 1/20 (Ville; 20 is 1 / (1 - confidence)). Kept are the rates that it spares. Of rounds that are all or
    nothing this is `confidence_sequence` over rounds; of rounds that scatter less it is narrower, as far as rounds of
    another kind, which so few would have missed, permit.

    Source: I. Waudby-Smith and A. Ramdas, Journal of the Royal Statistical Society B 86 (2024), 1-27.

    Args:
        hits: Hits in each round.
        sizes: Trials in each round, each 1 or more.
        confidence: Of the interval over all looks together.

    Raises:
        ValueError: no rounds, more hits than trials, an empty round, or lists of two lengths.
    """
    if not sizes or len(hits) != len(sizes) or any(not 0 <= k <= n or n < 1 for k, n in zip(hits, sizes, strict=True)):
        raise ValueError(f"{list(hits)} of {list(sizes)} are no rounds")
    shares, counts = np.unique(np.array(hits) / np.array(sizes), return_counts=True)
    # as many nodes as integrate a polynomial in q exactly; any other mixture over q is a martingale all the same
    nodes = min(len(sizes) // 2 + 1, _NODES_MOST)
    q = np.sin((np.arange(nodes) + 0.5) * (math.pi / 2 / nodes)) ** 2

    def kept(p: float) -> bool:
        logs = counts @ np.log(np.outer(shares, q / p) + np.outer(1.0 - shares, (1.0 - q) / (1.0 - p)))
        return bool(np.logaddexp.reduce(logs) - math.log(nodes) < -math.log1p(-confidence))

    mean = float(shares @ counts) / len(sizes)
    low = 0.0 if mean == 0.0 else _end(0.0, mean, kept)
    high = 1.0 if mean == 1.0 else _end(1.0, mean, kept)
    share = sum(hits) / sum(sizes)  # of all trials: where rounds differ in size it may lie outside
    return min(low, share), max(high, share)


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
