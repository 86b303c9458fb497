"""Intervals and rounding: a report never states a stronger claim than its counts."""

from __future__ import annotations

import itertools
import math

import numpy as np
import numpy.typing as npt
import pytest

from nondet.core import statistics
from nondet.core.statistics import confidence_sequence, one_sided_bound, round_interval, wilson


def test_wilson_ends_solve_its_equation() -> None:
    """By Wilson's definition (k/n - p)^2 = z^2 p (1 - p) / n; 10 of 20 as in Brown, Cai and DasGupta's tables."""
    for k, n in [(0, 10), (1, 10), (8, 60), (500, 1000), (999, 1000), (10, 10)]:
        low, high = wilson(k, n)
        assert low <= k / n <= high
        for p in (low, high):
            assert (k / n - p) ** 2 == pytest.approx(1.959963984540054**2 * p * (1 - p) / n, abs=1e-12)
    assert wilson(10, 20) == pytest.approx((0.299298, 0.700702), abs=1e-6)
    for k, n in [(1, 0), (-1, 5), (6, 5)]:
        with pytest.raises(ValueError, match="no rate"):
            wilson(k, n)


def test_the_bound_leaves_five_percent() -> None:
    """At it n clean tries have a chance of 5%; that some bound excludes a rate wrongly has no larger one."""
    for n in [1, 2, 59, 999]:
        assert (1 - one_sided_bound(n)) ** n == pytest.approx(0.05)
    for p in (0.002, 0.01, 0.2, 0.7):
        wrong = next(n for n in range(1, 10_000) if one_sided_bound(n) < p)
        assert (1 - p) ** wrong <= 0.05
    with pytest.raises(ValueError, match="no bound"):
        one_sided_bound(0)


def test_rounding_never_strengthens() -> None:
    for share, rounding, text in [
        (0.0, "near", "0%"), (1.0, "near", "100%"), (0.94, "near", "94.0%"), (0.99996, "near", ">99.9%"),
        (0.99996, "down", "99.9%"), (0.99996, "up", "100%"), (0.002996, "up", "0.30%"), (0.002991, "down", "0.29%"),
        (0.0000871, "up", "0.0088%"), (0.05, "up", "5.00%"), (0.3, "up", "30.0%"),
    ]:  # fmt: skip
        assert statistics.percent(share, rounding) == text
    assert statistics.percent_range(0.06914, 0.24162) == "6.91% to 24.2%"


def _evidence(shares: npt.NDArray[np.float64], p: float) -> npt.NDArray[np.float64]:
    """[runs, rounds] shares of hits -> after each round the martingale of `round_interval` at p, by its definition."""
    steps = shares.shape[1] // 2 + 1  # of Chebyshev and Gauss: exact for a polynomial of degree 2 steps - 1
    q = np.sin((np.arange(steps) + 0.5) * np.pi / 2 / steps) ** 2
    factors = shares[..., None] * (q / p) + (1 - shares[..., None]) * ((1 - q) / (1 - p))
    return np.exp(np.cumsum(np.log(factors), axis=1)).mean(axis=2)


def _rounds(p: float, rho: float, runs: int, rounds: int, size: int) -> npt.NDArray[np.int64]:
    """[runs, rounds] hits of beta-binomial rounds; rho 1: a round is all or nothing."""
    rng = np.random.default_rng([rounds, size, round(100 * p), round(100 * rho)])
    if 0 < rho < 1:
        rates = rng.beta(p * (1 - rho) / rho, (1 - p) * (1 - rho) / rho, (runs, rounds))
        return rng.binomial(size, rates)
    return rng.binomial(size, p, (runs, rounds)) if rho == 0 else size * rng.binomial(1, p, (runs, rounds))


def test_the_interval_by_round_holds_at_every_look() -> None:
    """At most 5 in 100 runs ever exclude the rate; by Wilson's interval, looked at after every trial, more do."""
    for rho in [0.0, 0.1, 0.5, 0.9, 1.0]:
        for rounds, size in [(2, 64), (5, 12), (25, 40), (50, 1), (50, 16)]:
            runs = 500
            looks = np.arange(1, rounds + 1)
            bound = np.array([one_sided_bound(n) for n in looks])
            for p in (0.03, 0.5, 0.9):
                hits = _rounds(p, rho, runs, rounds, size)
                none = (np.cumsum(hits, axis=1) == 0) & (bound < p)
                every = (np.cumsum(hits, axis=1) == size * looks) & (1 - bound > p)
                for missed in (_evidence(hits / size, p) >= 20, none, every):
                    assert missed.any(axis=1).mean() <= 0.05 + 3 * math.sqrt(0.05 * 0.95 / runs), (p, rounds, size, rho)
                if size == 1 and p == 0.5:
                    ends = [[wilson(k, n) for k in range(n + 1)] for n in looks]
                    seen = np.cumsum(hits, axis=1)
                    wrong = [any(not ends[i][k][0] <= p <= ends[i][k][1] for i, k in enumerate(run)) for run in seen]
                    assert np.mean(wrong) > 0.15


def test_the_ends_of_the_interval_are_where_its_martingale_excludes() -> None:
    """So the simulation is one of the interval; more confidence widens it; the share of all trials is in it."""
    for hits, sizes in [
        ([1, 0, 1, 0, 0], [1] * 5),
        ([23] * 12 + [24] * 13, [40] * 25),
        ([0, 3, 1], [4, 9, 2]),
        ([1], [64]),
        ([7, 9], [9, 9]),
    ]:
        for confidence in [0.95, 0.975]:
            low, high = round_interval(hits, sizes, confidence)
            shares = np.array([hits]) / np.array([sizes])
            for end in (low, high):
                assert _evidence(shares, end)[0, -1] == pytest.approx(1 / (1 - confidence), rel=1e-6)
            wide = round_interval(hits, sizes, 0.99)
            assert wide[0] < low < sum(hits) / sum(sizes) < high < wide[1]


def test_rounds_are_what_an_interval_rests_on() -> None:
    """Rounds are trials where they are all or nothing; where all are alike it is narrower, never too narrow."""
    assert round_interval([50, 50] + [0] * 18, [50] * 20) == pytest.approx(confidence_sequence(2, 20))
    low, high = round_interval([5] * 20, [50] * 20)
    assert confidence_sequence(2, 20)[0] < low < high < confidence_sequence(2, 20)[1]
    assert high > 0.1 + 0.9 * one_sided_bound(20) > confidence_sequence(100, 1000)[1]  # rounds that are all hits
    assert round_interval([0, 0], [3, 4]) == (0.0, pytest.approx(confidence_sequence(0, 2)[1]))
    assert round_interval([3, 4], [3, 4]) == (pytest.approx(confidence_sequence(2, 2)[0]), 1.0)
    low, high = round_interval([0] * 30 + [1000], [1] * 30 + [1000])
    assert (low, high) == (pytest.approx(confidence_sequence(1, 31)[0]), 1000 / 1030)
    assert round_interval([1] * 2_500 + [0] * 2_500, [1] * 5_000) == pytest.approx(confidence_sequence(2500, 5000))
    rng = np.random.default_rng(3)
    for rounds in (1, 4, 9, 30):  # broken counts say less, never more
        hits = rng.binomial(16, rng.beta(1, 2, rounds))
        low, high = confidence_sequence(hits.sum() / 16, rounds)
        narrow = round_interval(list(hits), [16] * rounds)
        assert low <= narrow[0] * (1 + 1e-9)
        assert narrow[1] <= high * (1 + 1e-9)
    for bad in (([1], [1, 2]), ([3], [2]), ([0], [0]), ([], []), ([-1], [2])):
        with pytest.raises(ValueError, match="no rounds"):
            round_interval(*bad)


def test_medians() -> None:
    for n, places in [(5, None), (6, (1, 6)), (8, (1, 8)), (9, (2, 8)), (25, (8, 18)), (100, (40, 61))]:
        assert statistics.median_interval([float(value) for value in range(n, 0, -1)]) == places


def test_trials_to_see_are_the_published_ones() -> None:
    assert [statistics.trials_to_see(rate) for rate in (0.1, 0.01, 0.001)] == [29, 299, 2995]
    for rate in (0.5, 0.05, 0.0123, 1.0):
        n = statistics.trials_to_see(rate)
        assert 1 - (1 - rate) ** n >= 0.95 * (1 - 1e-9)
        assert n == 1 or 1 - (1 - rate) ** (n - 1) < 0.95
    assert statistics.trials_to_see(1 - 0.05 ** (1 / 60)) == 60
    with pytest.raises(ValueError, match="nothing to look for"):
        statistics.trials_to_see(0.0)


def test_the_confidence_sequence_holds_the_rates_that_its_martingale_spares() -> None:
    """The ends are where the mixture over Beta(1/2, 1/2) is 20 times the likelihood; Wilson's interval is inside."""
    t = (np.arange(4_000) + 0.5) * math.pi / 2 / 4_000  # by substitution p = sin^2 t the prior is uniform over t
    for k, n in [(0, 10), (1, 10), (7, 250), (60, 60), (2.5, 12.5), (6, 1000)]:
        mixture = np.mean(np.sin(t) ** (2 * k) * np.cos(t) ** (2 * (n - k)))
        low, high = confidence_sequence(k, n)
        assert low <= k / n <= high
        for p in (low, high):
            if 0.0 < p < 1.0:
                assert mixture / (p**k * (1 - p) ** (n - k)) == pytest.approx(20.0, rel=1e-3)
        assert low <= wilson(k, n)[0] + 1e-9
        assert high >= wilson(k, n)[1] - 1e-9 or k == 0


def test_mcnemar_counts_coin_tosses() -> None:
    for b, c in itertools.product(range(7), repeat=2):
        total = b + c
        tosses = list(itertools.product((0, 1), repeat=total))
        tail = sum(abs(2 * sum(t) - total) >= abs(b - c) for t in tosses) / len(tosses)
        assert statistics.mcnemar(b, c) == pytest.approx(tail)
    assert statistics.mcnemar(8, 1) == pytest.approx(0.0390625)
    assert statistics.mcnemar(0, 0) == 1.0
    assert 0.0 < statistics.mcnemar(900, 1100) < 1e-4


def test_k3_estimates_the_divergence_it_is_named_for() -> None:
    p, q = np.array([0.5, 0.3, 0.2]), np.array([0.45, 0.3, 0.25])
    exact = float((p * np.log(p / q)).sum())
    drawn = np.random.default_rng(0).choice(3, size=400_000, p=p)
    estimate = statistics.k3(np.log(p)[drawn].astype("<f4"), np.log(q)[drawn].astype("<f4"))
    assert estimate == pytest.approx(exact, rel=0.02)
    same = np.log(p).astype("<f4")
    assert statistics.k3(same, same) == 0.0
    assert statistics.k3(same, np.nextafter(same, np.float32(0))) >= 0.0
    with pytest.raises(ValueError, match="same tokens"):
        statistics.k3(same, same[:2])
