"""Figures of a sampler and a trainer, against what they are by definition and by simulation."""

from __future__ import annotations

import math
import tracemalloc

import numpy as np
import pytest

from nondet.core.statistics import k3
from nondet.mismatch import figures
from nondet.mismatch.figures import Figures


def made(seed: int = 0, sequences: int = 40, length: int = 64, sd: float = 0.01) -> Figures:
    rng = np.random.default_rng(seed)
    sampler = -rng.exponential(1.5, sequences * length).astype(np.float32)
    trainer = (sampler + rng.normal(0.0, sd, len(sampler))).astype(np.float32)
    return Figures(sampler, trainer, [length] * sequences)


def test_equal_bits_leave_nothing_but_a_bound_and_one_bit_counts() -> None:
    sampler = made().sampler
    same = Figures(sampler, sampler.copy(), [len(sampler)])
    assert (same.differ, same.k3, same.outside, same.ratios, same.mult_prob_error) == (0, 0.0, 0, (1.0, 1.0), 1.0)
    sampler = np.array([-1.0, 0.0, -2.0], dtype=np.float32)
    other = np.array([np.nextafter(np.float32(-1), np.float32(0)), -0.0, -2.0], dtype=np.float32)
    assert Figures(sampler, other, [3]).differ == 2  # a sign of zero is a bit


def test_figures_are_those_of_their_definitions() -> None:
    """Bins hold every token once, one of probability 1 in the last, and add up to K3."""
    found = made(length=50)
    d = found.trainer.astype(np.float64) - found.sampler.astype(np.float64)
    assert found.k3 == pytest.approx(k3(found.sampler, found.trainer), rel=1e-12)
    assert found.mult_prob_error == pytest.approx(np.exp(np.abs(d)).mean(), rel=1e-12)
    assert found.ratios == pytest.approx((np.exp(d.min()), np.exp(d.max())))
    assert found.outside == sum((r < 0.99) or (r > 1.01) for r in np.exp(d))
    assert found.tails[0.5] == pytest.approx(np.median(np.abs(d)))
    for bins in (found.positions, found.probabilities):
        assert sum(b.tokens for b in bins) == found.tokens
        assert sum(b.tokens * b.k3 for b in bins) / found.tokens == pytest.approx(found.k3, rel=1e-12)
    certain = Figures(np.zeros(3, dtype=np.float32), np.zeros(3, dtype=np.float32), [3])
    assert [(b.low, b.tokens) for b in certain.probabilities] == [(0.9, 3)]


def test_the_interval_goes_by_sequence_and_covers() -> None:
    """Sequences that are off by an amount of their own: tokens are not independent, and 95% must hold all the same."""
    rng = np.random.default_rng(7)
    hit, trials, m, n = 0, 60, 40, 30
    truth = float(np.exp(2 * -4.0 + 2 * 0.25) / 2)  # E d^2 / 2
    for _ in range(trials):
        scale = np.exp(rng.normal(-4.0, 0.5, m))
        sampler = np.full(m * n, -1.0, dtype=np.float32)
        d = np.repeat(scale, n) * np.tile([1.0, -1.0], m * n // 2)
        low, high = Figures(sampler, (sampler + d).astype(np.float32), [n] * m).k3_interval or (0.0, 0.0)
        hit += low <= truth <= high
    assert 0.8 < hit / trials <= 1.0  # skewed sums of 40 sequences: percentiles fall a little short of 95%
    assert made(sequences=4).k3_interval is None


def test_what_is_no_pair_is_refused() -> None:
    for n, m, lengths in [(0, 0, []), (1, 2, [1]), (1, 1, [2]), (2, 2, [2, 0])]:
        with pytest.raises(ValueError, match="logprobs are not of"):
            Figures(np.zeros(n, np.float32), np.zeros(m, np.float32), lengths)
    with pytest.raises(ValueError, match="a logprob is NaN"):
        Figures(np.array([math.nan], np.float32), np.zeros(1, np.float32), [1])


def test_an_interval_takes_no_memory_by_the_rollout(monkeypatch: pytest.MonkeyPatch) -> None:
    """In blocks it is what it is at once, and no array is larger than a block; 100,000 rollouts took 3.7 GB."""
    sums, lengths = np.random.default_rng(2).random(1000), [8] * 1000
    monkeypatch.setattr(figures, "_DRAWN", 2000 * 1000)
    whole = figures.interval_by_sequence(sums, lengths)
    monkeypatch.setattr(figures, "_DRAWN", 7000)
    tracemalloc.start()
    assert figures.interval_by_sequence(sums, lengths) == pytest.approx(whole, rel=1e-12)
    most = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert most < 1_000_000
