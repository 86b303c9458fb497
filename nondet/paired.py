"""Two systems on the same prompts, or two traces of the same tokens: comparisons of pairs. Pure figures."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

__all__ = ["k3", "mcnemar", "paired_permutation", "superiority"]

Values = Sequence[float] | npt.NDArray[np.floating[Any]]
_EXACT_MOST = 14  # 2^14 sign patterns are enumerated; beyond that they are drawn
_DRAWS = 9_999


def mcnemar(only_first: int, only_second: int) -> float:
    """Two-sided exact p of McNemar's test: of the prompts on which the two systems disagree, how one-sided they are.

    Prompts are the unit: they are drawn one by one, completions of one prompt are not. Under the null each prompt that
    sets one off alone is as likely to set off the first as the second.

    Source: Q. McNemar, Psychometrika 12 (1947), 153-157, with the exact binomial.

    Args:
        only_first, only_second: Prompts that parted under the first system alone, and under the second alone.

    Raises:
        ValueError: a negative count.
    """
    if min(only_first, only_second) < 0:
        raise ValueError(f"{only_first} and {only_second} are no counts")
    total, least = only_first + only_second, min(only_first, only_second)
    ways = tail = 1
    for i in range(least):
        ways = ways * (total - i) // (i + 1)
        tail += ways
    return min(1.0, 2 * tail / 2**total)


def paired_permutation(first: Sequence[float], second: Sequence[float]) -> float:
    """Two-sided p of the sign-flip test on the sum of differences: whether two systems differ over the same prompts.

    All sign patterns of the prompts that differ, if they are 14 or fewer; else 9,999 drawn from a fixed seed, with the
    observed one counted in, so that p is never 0.

    Source: R. A. Fisher, The Design of Experiments (1935), section 21; B. Phipson and G. K. Smyth, Statistical
    Applications in Genetics and Molecular Biology 9 (2010), for the drawn form.

    Raises:
        ValueError: samples of two lengths.
    """
    if len(first) != len(second):
        raise ValueError(f"{len(first)} and {len(second)} make no pairs")
    differences = [a - b for a, b in zip(first, second, strict=True) if a != b]
    if not differences:
        return 1.0
    least = abs(math.fsum(differences)) * (1 - 1e-12)  # patterns that tie but for rounding count as equal
    if len(differences) <= _EXACT_MOST:
        hits = 0
        for pattern in range(2 ** len(differences)):
            signed = (d if pattern >> i & 1 else -d for i, d in enumerate(differences))
            hits += abs(math.fsum(signed)) >= least
        return hits / 2 ** len(differences)
    rng = random.Random(f"nondet permutation {len(differences)}")  # noqa: S311 - a test statistic, not a secret
    hits = 0
    for _ in range(_DRAWS):
        bits = rng.getrandbits(len(differences))
        hits += abs(sum(d if bits >> i & 1 else -d for i, d in enumerate(differences))) >= least
    return (1 + hits) / (1 + _DRAWS)


def superiority(small: Values, large: Values) -> float:
    """The chance that one of `large` exceeds one of `small`, ties counted half: 1.0 where they are apart, 0.5 if alike.

    Source: H. B. Mann and D. R. Whitney, Annals of Mathematical Statistics 18 (1947), 50-60: U over its maximum.

    Raises:
        ValueError: an empty sample.
    """
    if not len(small) or not len(large):
        raise ValueError("an empty sample exceeds nothing")
    # the smaller sample is looked up in the larger one, sorted: of ten million margins a handful are at forks
    values = np.sort(np.asarray(large))
    sought = np.sort(np.asarray(small, dtype=values.dtype))  # in order, neighbours are looked up in the same place
    below = int(np.searchsorted(values, sought, "left").sum() + np.searchsorted(values, sought, "right").sum())
    pairs = 2 * len(sought) * len(values)
    return (pairs - below) / pairs


def k3(reference: npt.NDArray[np.float32], other: npt.NDArray[np.float32]) -> float:
    """Mean of r - 1 - log r over tokens, r = exp(other - reference): Schulman's k3, in nats.

    Where the tokens were drawn from the reference it estimates KL(reference || other), without bias, and no term is
    negative. Of greedy tokens it estimates nothing: there it is a distance between two traces, and no more.

    Source: J. Schulman, Approximating KL Divergence (2020), http://joschu.net/blog/kl-approx.html.

    Args:
        reference, other: [T] float32 logprobs of the same tokens.

    Raises:
        ValueError: two lengths, or no tokens.
    """
    if reference.shape != other.shape or not reference.size:
        raise ValueError(f"{reference.size} and {other.size} logprobs are not of the same tokens")
    log_ratio = other.astype(np.float64) - reference.astype(np.float64)
    return float(np.mean(np.expm1(log_ratio) - log_ratio))
