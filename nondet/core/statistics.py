"""Bounds, intervals, shares and paired comparisons; how a rate is rounded. See docs/statistics.md.

Completions that share a batch are not independent: whatever changed one, a full batch or a tile, also changes its
neighbours. So a bound holds by round (the unit that is drawn), and by completion only if rounds don't matter. The
correlation within a round is not estimated, because a few rounds that happened to be alike would hide it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

CONFIDENCE = 0.95
_Z = 1.959963984540054  # two-sided 95%
_NODES_MOST = 1_000


def wilson(k: float, n: float) -> tuple[float, float]:
    """Wilson's (1927) two-sided 95% interval for a rate seen k times in n independent trials."""
    if n <= 0 or not 0 <= k <= n:
        raise ValueError(f"{k} of {n} is no rate")
    share, spread = k / n, _Z * _Z / n
    middle = (share + spread / 2) / (1 + spread)
    half = _Z * math.sqrt(share * (1 - share) / n + spread / (4 * n)) / (1 + spread)
    # at k = 0 and k = n the ends are exact; rounding must not push them inside
    return (0.0 if k == 0 else max(0.0, middle - half), 1.0 if k == n else min(1.0, middle + half))


def one_sided_bound(n: int) -> float:
    """The rate that n independent tries without a hit exclude at 95%: 1 - 0.05^(1/n). You can stop at any n without a
    hit: a rate is excluded wrongly only if no hit came in the first n tries, n the fewest that exclude it, and that has
    a probability of at most 0.05."""
    if n <= 0:
        raise ValueError("no tries, no bound")
    return -math.expm1(math.log1p(-CONFIDENCE) / n)


def trials_to_see(rate: float, confidence: float = CONFIDENCE) -> int:
    """Tries that hit something of this rate at least once with this confidence: 299 for 1%, 29 for 10%, at 95%."""
    if not (0.0 < rate <= 1.0 and 0.0 < confidence < 1.0):
        raise ValueError(f"a rate of {rate} with {confidence} is nothing to look for")
    if rate == 1.0:
        return 1
    least = math.log1p(-confidence) / math.log1p(-rate)
    return math.ceil(least - 1e-9 * least)  # where a whole number of tries is enough, rounding must not add another


def confidence_sequence(k: float, n: float) -> tuple[float, float]:
    """A 95% interval for a rate that holds at every n at once, so that you can look, and stop, at any time.

    All rates p under which the mixture of likelihoods over Beta(1/2, 1/2) is below 20 times the likelihood of p. That
    ratio is a martingale under p, which reaches 20 with a probability of at most 1/20 (Ville). Counts may be
    fractional: trials in rounds count as the trials over those of the largest round, and it holds whatever the
    correlation within a round (`round_interval` is narrower). Raises ValueError: k and n are not a rate.
    """
    if n <= 0 or not 0 <= k <= n:
        raise ValueError(f"{k} of {n} is no rate")
    misses = n - k
    mixture = math.lgamma(k + 0.5) + math.lgamma(misses + 0.5) - math.lgamma(n + 1.0) - math.log(math.pi)
    threshold = mixture + math.log1p(-CONFIDENCE)  # log likelihood of the least likely rate that is kept

    def kept(p: float) -> bool:
        likelihood = (k * math.log(p) if k else 0.0) + (misses * math.log1p(-p) if misses else 0.0)
        return likelihood > threshold

    return _ends(k / n, kept)


def _ends(kept_rate: float, kept: Callable[[float], bool]) -> tuple[float, float]:
    """The boundaries, from their outer sides, of the rates that are kept around this one; at 0 and 1 they are exact."""
    ends = []
    for outside in (0.0, 1.0):
        inside = kept_rate
        for _ in range(0 if outside == inside else 200):
            middle = (outside + inside) / 2
            if middle in (outside, inside) or abs(inside - outside) < 1e-10 * inside:
                break
            outside, inside = (outside, middle) if kept(middle) else (middle, inside)
        ends.append(outside)
    return ends[0], ends[1]


def round_interval(hits: Sequence[int], sizes: Sequence[int], confidence: float = CONFIDENCE) -> tuple[float, float]:
    """An interval for the rate of trials in rounds, which holds after every round, whatever the correlation in them.

    Only rounds are drawn: trials of one round may depend on each other in any way, and no estimate of that is needed.
    With x a round's share and q drawn from Beta(1/2, 1/2), x q / p + (1 - x) (1 - q) / (1 - p) has the mean 1 under the
    rate p; the product over rounds, averaged over q, is a martingale, which reaches 20 with a probability of at most
    1/20 (Ville; 20 is 1 / (1 - confidence)). The interval holds the rates for which it stays below. Where each round is
    all or nothing this is `confidence_sequence` over rounds; where rounds scatter less it is narrower, as far as unseen
    rounds of another kind, which so few rounds could have missed, permit. Raises ValueError: no rounds, more hits than
    trials, an empty round, or lists of two lengths.
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

    low, high = _ends(float(shares @ counts) / len(sizes), kept)
    share = sum(hits) / sum(sizes)  # of all trials: where rounds differ in size it may lie outside
    return min(low, share), max(high, share)


def percent(share: float, rounding: str = "near") -> str:
    """A share in percent to about three digits; "up" and "down" are for bounds. Only exact ones are shown as 100%."""
    value = 100.0 * share
    if value <= 0.0 or value >= 100.0:
        return "0%" if value <= 0.0 else "100%"
    digits = 1 if value >= 10.0 else max(2, 1 - math.floor(math.log10(value)))
    if digits > 12:  # not a line of zeros; half a unit of its last digit keeps it a bound
        return f"{value * {'near': 1.0, 'up': 1.005, 'down': 0.995}[rounding]:.2e}%"
    scale = 10.0**digits
    # 1e-9 keeps figures that are round already from changing by their own binary representation
    exact = value * scale
    scaled = {"near": round(exact), "up": math.ceil(exact - 1e-9), "down": math.floor(exact + 1e-9)}[rounding]
    whole = round(100 * scale)
    if scaled >= whole:
        return "100%" if rounding == "up" else f">{(whole - 1) / scale:.{digits}f}%"
    return f"{scaled / scale:.{digits}f}%"


def median_interval(values: Sequence[float]) -> tuple[float, float] | None:
    """Between two order statistics, whatever the values' distribution; None of too few values for an interval. Of n
    independent values as many as Binomial(n, 1/2) lie below the median: it misses (k-th least, k-th largest) with a
    probability of twice P(X < k). At 95% that takes 6 values."""
    n, below, k = len(values), 0, 0
    while below + math.comb(n, k) <= (1.0 - CONFIDENCE) / 2 * 2**n and k < n:
        below += math.comb(n, k)
        k += 1
    ordered = sorted(values)
    return (ordered[k - 1], ordered[n - k]) if k else None


def percent_range(low: float, high: float) -> str:
    """An interval in percent, rounded outwards."""
    return f"{percent(low, 'down')} to {percent(high, 'up')}"


def mcnemar(only_first: int, only_second: int) -> float:
    """Two-sided exact p of McNemar's test: of the prompts that diverged under one system only, how one-sided they are.

    Prompts are the unit: they are drawn one by one, completions of one prompt are not. Under the null, a prompt that
    diverges in one system only does so in either with equal probability.
    """
    total = only_first + only_second
    tail = sum(math.comb(total, hits) for hits in range(min(only_first, only_second) + 1))
    return float(min(1.0, 2 * tail / 2**total))


def k3(reference: npt.NDArray[np.float32], other: npt.NDArray[np.float32]) -> float:
    """Mean of r - 1 - log r over tokens, r = exp(other - reference): Schulman's k3, in nats. Both are [T] float32
    logprobs of the same tokens.

    Where the tokens were drawn from the reference it estimates KL(reference || other), without bias, and no term is
    negative. Of greedy tokens it is only a distance between two traces. Raises ValueError: two lengths, or no tokens.
    """
    if reference.shape != other.shape or not reference.size:
        raise ValueError(f"{reference.size} and {other.size} logprobs are not of the same tokens")
    log_ratio = other.astype(np.float64) - reference.astype(np.float64)
    return float(np.mean(np.expm1(log_ratio) - log_ratio))
