"""Figures of how far a sampler's and a trainer's logprobs of the same tokens differ. No torch.

d is the trainer's logprob minus the sampler's, in float64; a ratio is exp(d). K1 (the mean of d) is not reported: where
the two sides differ by rounding it is smaller than its own standard error, and its sign varies.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from nondet.core.statistics import CONFIDENCE

Logprobs = npt.NDArray[np.float32]
Floats = npt.NDArray[np.float64]

CLOSE = (0.99, 1.01)
_FAINT = 1e-3  # of K3, and in all: K3 is exponential, so a few tokens that are far off could outweigh the rest
ABOVE = 1.5  # times rounding: what is above it has another cause
_RESAMPLES, _SEQUENCES_LEAST = 2000, 5
_DRAWN = 2**22  # numbers of resamples in memory
_TAILS = (0.5, 0.9, 0.99, 0.999)  # quantiles of |d|
PROBABILITIES = (0.0, 0.01, 0.1, 0.5, 0.9, 1.0)  # ends of the bins by the sampler's probability


class Bin(NamedTuple):
    """Tokens from `low` to below `high`, by position, probability or step; the last bin includes its end."""

    low: float
    high: float
    tokens: int
    k3: float
    mean_abs: float


@dataclass(frozen=True)
class Figures:
    """The logprobs of n tokens in m sequences: [n] float32, finite; the lengths of the sequences add up to n."""

    sampler: Logprobs
    trainer: Logprobs
    lengths: Sequence[int]

    def __post_init__(self) -> None:
        """Raises ValueError: lengths that disagree, no tokens, or a logprob that is not finite."""
        n = len(self.sampler)
        if not n or len(self.trainer) != n or sum(self.lengths) != n or min(self.lengths) < 1:
            raise ValueError(f"{n} and {len(self.trainer)} logprobs are not of {sum(self.lengths)} tokens")
        if not (np.isfinite(self.sampler).all() and np.isfinite(self.trainer).all()):
            raise ValueError("a logprob is NaN or infinite")

    @property
    def tokens(self) -> int:
        """n, the number of tokens."""
        return len(self.sampler)

    @cached_property
    def distance(self) -> Floats:
        """[n] float64, d."""
        return self.trainer.astype(np.float64) - self.sampler.astype(np.float64)

    @cached_property
    def terms(self) -> Floats:
        """[n] float64, ratio - 1 - d of each token: none is negative, and their mean is K3."""
        return np.maximum(np.expm1(self.distance) - self.distance, 0.0)

    @cached_property
    def differ(self) -> int:
        """Tokens whose two logprobs are not the same 32 bits."""
        return int(np.count_nonzero(self.sampler.view(np.uint32) != self.trainer.view(np.uint32)))

    @cached_property
    def k3(self) -> float:
        """Schulman's K3 in nats a token, an estimate of KL(sampler || trainer); see `nondet.core.statistics.k3`."""
        return float(self.terms.mean())

    @cached_property
    def k3_interval(self) -> tuple[float, float] | None:
        """K3's 95% interval; see `interval_by_sequence`."""
        return interval_by_sequence(np.add.reduceat(self.terms, np.cumsum([0, *self.lengths])[:-1]), self.lengths)

    @cached_property
    def ratios(self) -> tuple[float, float]:
        """The smallest and the largest ratio."""
        least, most = float(self.distance.min()), float(self.distance.max())
        return math.exp(least), math.exp(min(most, 700.0))

    @cached_property
    def outside(self) -> int:
        """Tokens whose ratio is not within 0.99 to 1.01."""
        low, high = map(math.log, CLOSE)
        return int(np.count_nonzero((self.distance < low) | (self.distance > high)))

    @cached_property
    def mult_prob_error(self) -> float:
        """Mean of exp |d|, as NeMo RL has it (token_mult_prob_error); 1 where nothing differs."""
        return float(np.exp(np.minimum(np.abs(self.distance), 700.0)).mean())

    @cached_property
    def tails(self) -> dict[float, float]:
        """Quantile -> |d|: the middle, and the values that 10%, 1% and 0.1% of tokens exceed."""
        return dict(zip(_TAILS, map(float, np.quantile(np.abs(self.distance), _TAILS)), strict=True))

    @cached_property
    def positions(self) -> list[Bin]:
        """By position in the sequence: 0 to 1, to 2, to 4, ... doubling."""
        ends = [0.0, *(2.0**i for i in range(max(self.lengths).bit_length() + 1))]
        return self.bins(np.concatenate([np.arange(n) for n in self.lengths]).astype(np.float64), ends)

    @cached_property
    def probabilities(self) -> list[Bin]:
        """By the sampler's probability of the token."""
        return self.bins(np.exp(self.sampler.astype(np.float64)), PROBABILITIES)

    def bins(self, by: Floats, ends: Sequence[float]) -> list[Bin]:
        """Tokens by numbers [n], in bins between ends, without empty bins; what is beyond is in the first or last."""
        chosen, found = np.clip(np.searchsorted(ends, by, side="right") - 1, 0, len(ends) - 2), []
        for i in np.unique(chosen).tolist():
            mine = chosen == i
            k3, mean = float(self.terms[mine].mean()), float(np.abs(self.distance[mine]).mean())
            found.append(Bin(ends[i], ends[i + 1], int(mine.sum()), k3, mean))
        return found


def interval_by_sequence(sums: Floats, lengths: Sequence[int]) -> tuple[float, float] | None:
    """The 95% interval of a mean over tokens: those of one sequence are not independent. None below five sequences.

    `sums` are those of each sequence's terms. Percentiles of 2,000 resamples of whole sequences with replacement, each
    sum of terms over its own number of tokens; drawn with seed 0, so that a file has one interval.
    """
    if len(lengths) < _SEQUENCES_LEAST:
        return None
    rng, each, means = np.random.default_rng(0), np.full(len(sums), 1 / len(sums)), list[Floats]()
    at_once = max(1, min(_RESAMPLES, _DRAWN // len(sums)))  # resamples in memory
    for first in range(0, _RESAMPLES, at_once):
        drawn = rng.multinomial(len(sums), each, size=min(at_once, _RESAMPLES - first))
        means.append((drawn @ sums) / (drawn @ np.asarray(lengths)))
    tail = (1 - CONFIDENCE) / 2
    low, high = np.quantile(np.concatenate(means), (tail, 1 - tail))
    return float(low), float(high)


def margin(tokens: int) -> float:
    """Multiples of rounding that a side may be away by: more for few tokens, whose K3 one or two decide."""
    return ABOVE * (1 + 8 / math.sqrt(tokens))


def explains(k3: float, left: float, floor: float) -> bool:
    """Whether what leaves `left` of K3 is the cause of it: the rest may be rounding, and nine tenths of what can't be
    are gone, and half of all. Or 99% are gone, and the rest may be the rounding of a forward that the cause makes less
    exact; or 99.9%, where a fitted value is coarser than float32."""
    rounding = ABOVE * floor
    gone = left <= rounding and k3 - left >= max(0.5 * k3, 0.9 * (k3 - rounding))
    return k3 > rounding and (gone or left <= min(0.01 * k3, 4 * floor) or left <= min(_FAINT * k3, _FAINT))


def coarse(values: Logprobs) -> str:
    """The narrower format that holds all of these values; "" where there is none. By chance one in 2^16 does."""
    with np.errstate(over="ignore"):
        narrow = {"bfloat16": (values.view(np.uint32) & 0xFFFF) == 0, "float16": values.astype(np.float16) == values}
    return next((name for name, same in narrow.items() if len(values) >= 8 and same.all()), "")
