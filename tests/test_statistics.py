"""Intervals and rounding: a report never states a stronger claim than its counts."""

from __future__ import annotations

import math
import random

import pytest

from nondet.statistics import (
    clustered_interval,
    confidence_sequence,
    intraclass_correlation,
    new_share,
    one_sided_bound,
    pair_disagreement,
    percent,
    percent_range,
    rounds_compared,
    trials_to_see,
    wilson,
)


@pytest.mark.parametrize(("k", "n"), [(0, 10), (1, 10), (8, 60), (500, 1000), (999, 1000), (10, 10)])
def test_wilson_ends_solve_its_equation(k: int, n: int) -> None:
    """Both ends satisfy (k/n - p)^2 = z^2 p (1 - p) / n, Wilson's definition, and enclose the share."""
    low, high = wilson(k, n)
    assert low <= k / n <= high
    for p in (low, high):
        assert (k / n - p) ** 2 == pytest.approx(1.959963984540054**2 * p * (1 - p) / n, abs=1e-12)


def test_wilson_against_published_figures() -> None:
    """10 of 20 gives 0.2993 to 0.7007, as in Brown, Cai and DasGupta's tables and every statistics package."""
    assert wilson(10, 20) == pytest.approx((0.299298, 0.700702), abs=1e-6)


@pytest.mark.parametrize(("k", "n"), [(1, 0), (-1, 5), (6, 5)])
def test_no_interval_of_nonsense(k: int, n: int) -> None:
    """Counts that are no rate are refused rather than turned into an interval."""
    with pytest.raises(ValueError, match="no rate"):
        wilson(k, n)


@pytest.mark.parametrize("n", [1, 2, 59, 999])
def test_the_bound_leaves_five_percent(n: int) -> None:
    """At the bound, n clean tries have a chance of exactly 5%."""
    assert (1 - one_sided_bound(n)) ** n == pytest.approx(0.05)
    with pytest.raises(ValueError, match="no bound"):
        one_sided_bound(0)


@pytest.mark.parametrize(
    ("share", "rounding", "text"),
    [
        (0.0, "near", "0%"),
        (1.0, "near", "100%"),
        (0.94, "near", "94.0%"),
        (0.99996, "near", ">99.9%"),
        (0.99996, "down", "99.9%"),
        (0.99996, "up", "100%"),
        (0.002996, "up", "0.30%"),
        (0.002991, "down", "0.29%"),
        (0.0000871, "up", "0.0088%"),
        (0.05, "up", "5.00%"),
        (0.3, "up", "30.0%"),
    ],
)
def test_rounding_never_strengthens(share: float, rounding: str, text: str) -> None:
    """Upper bounds round up, lower bounds down, and only an exact one is called 100%."""
    assert percent(share, rounding) == text


def test_a_range_is_rounded_outwards() -> None:
    """The stated interval contains the computed one."""
    assert percent_range(0.06914, 0.24162) == "6.91% to 24.2%"


def test_completions_that_share_a_batch_are_not_independent() -> None:
    """All hits in few groups widen the interval, and the same hits spread evenly do not."""
    together = clustered_interval([50, 50, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0], [50] * 20)
    apart = clustered_interval([5] * 20, [50] * 20)
    assert together.rho == pytest.approx(1.0)
    assert together.effect == pytest.approx(50.0)
    assert apart.rho == 0.0
    assert (apart.low, apart.high) == confidence_sequence(100, 1000)
    assert together.low < apart.low < apart.high < together.high
    assert (together.low, together.high) == pytest.approx(confidence_sequence(2, 20))  # twenty rounds, and no more


def test_the_anova_estimate_is_that_of_its_definition() -> None:
    """Mean squares between and within groups of unequal size, by hand."""
    hits, sizes = [3, 1, 0], [4, 6, 5]
    p = 4 / 15
    between = (4 * (0.75 - p) ** 2 + 6 * (1 / 6 - p) ** 2 + 5 * p**2) / 2
    within = (3 * 1 / 4 + 1 * 5 / 6 + 0) / 12
    size = (15 - (16 + 36 + 25) / 15) / 2
    expected = (between - within) / (between + (size - 1) * within)
    assert intraclass_correlation(hits, sizes) == pytest.approx(expected)
    assert intraclass_correlation([2], [9]) == 0.0  # one group says nothing of the scatter between groups
    assert intraclass_correlation([1, 0, 1], [1, 1, 1]) == 0.0
    for bad in (([1], [1, 2]), ([3], [2]), ([0], [0])):
        with pytest.raises(ValueError, match="no groups"):
            intraclass_correlation(*bad)


def test_the_interval_of_dependent_completions_covers_as_it_says() -> None:
    """Rounds with a rate of their own (beta, rho 0.1): Wilson's own misses far more than 5 in 100."""
    rng = random.Random(7)  # noqa: S311 - a simulation
    rho, p, rounds, size = 0.1, 0.3, 40, 50
    a, b = p * (1 - rho) / rho, (1 - p) * (1 - rho) / rho
    plain = clustered = 0
    for _ in range(300):
        hits = [sum(rng.random() < q for _ in range(size)) for q in (rng.betavariate(a, b) for _ in range(rounds))]
        low, high = wilson(sum(hits), rounds * size)
        plain += low <= p <= high
        wide = clustered_interval(hits, [size] * rounds)
        clustered += wide.low <= p <= wide.high
    assert plain < 0.75 * 300
    assert clustered > 0.9 * 300


def test_pairs_and_new_ones() -> None:
    """Two of three pairs differ; one of three was seen once; shares don't grow with N."""
    assert pair_disagreement([2, 1]) == pytest.approx(2 / 3)
    assert pair_disagreement([5]) == 0.0
    assert pair_disagreement([1, 1, 1]) == 1.0
    assert new_share([2, 1]) == pytest.approx(1 / 3)
    assert new_share([7]) == 0.0
    with pytest.raises(ValueError, match="no pair"):
        pair_disagreement([1])
    with pytest.raises(ValueError, match="no results"):
        new_share([])


def test_trials_to_see_are_the_published_ones() -> None:
    """29 comparisons see a rate of 10% once with 95%, 299 see 1%, 2,995 see 0.1%: and one fewer does not."""
    assert [trials_to_see(rate) for rate in (0.1, 0.01, 0.001)] == [29, 299, 2995]
    for rate in (0.5, 0.05, 0.0123, 1.0):
        n = trials_to_see(rate)
        assert 1 - (1 - rate) ** n >= 0.95 * (1 - 1e-9)
        assert n == 1 or 1 - (1 - rate) ** (n - 1) < 0.95
    assert trials_to_see(1 - 0.05 ** (1 / 60)) == 60
    with pytest.raises(ValueError, match="nothing to look for"):
        trials_to_see(0.0)


@pytest.mark.parametrize(("k", "n"), [(0, 10), (1, 10), (7, 250), (60, 60), (2.5, 12.5), (6, 1000)])
def test_the_confidence_sequence_holds_the_rates_that_its_martingale_spares(k: float, n: float) -> None:
    """The ends are where the mixture over Beta(1/2, 1/2), integrated numerically, is 20 times the likelihood."""

    def martingale(p: float) -> float:
        # by substitution p = sin^2 t the prior is uniform over t
        steps = 4_000
        total = sum(
            math.sin(t) ** (2 * k) * math.cos(t) ** (2 * (n - k))
            for t in ((i + 0.5) * math.pi / 2 / steps for i in range(steps))
        )
        return total / steps / (p**k * (1 - p) ** (n - k))

    low, high = confidence_sequence(k, n)
    assert low <= k / n <= high
    for end in (low, high):
        if 0.0 < end < 1.0:
            assert martingale(end) == pytest.approx(20.0, rel=1e-3)
    wlow, whigh = wilson(k, n)
    assert low <= wlow + 1e-9
    assert high >= whigh - 1e-9 or k == 0


def test_looking_is_free_with_the_confidence_sequence_and_not_with_wilsons() -> None:
    """Whoever looks after every trial and stops at the first look that excludes the truth: 5 in 100 at most."""
    rng = random.Random(11)  # noqa: S311 - a simulation
    p, runs, trials = 0.3, 200, 400
    tables: dict[tuple[int, int], tuple[bool, bool]] = {}
    missed = [0, 0]
    for _ in range(runs):
        k, out = 0, [False, False]
        for n in range(1, trials + 1):
            k += rng.random() < p
            if n % 4 == 0:  # a look
                if (k, n) not in tables:
                    ends = confidence_sequence(k, n), wilson(k, n)
                    tables[k, n] = (not ends[0][0] <= p <= ends[0][1], not ends[1][0] <= p <= ends[1][1])
                out = [a or b for a, b in zip(out, tables[k, n], strict=True)]
        missed = [m + o for m, o in zip(missed, out, strict=True)]
    assert missed[0] <= 0.05 * runs
    assert missed[1] > 0.15 * runs


def test_a_bound_while_nothing_diverged_may_stop_anywhere() -> None:
    """For every rate the chance that some bound excluded it wrongly before its first hit, summed exactly."""
    for p in (0.002, 0.01, 0.2, 0.7):
        wrong = next(n for n in range(1, 10_000) if one_sided_bound(n) < p)
        assert (1 - p) ** wrong <= 0.05


def test_comparisons_by_round() -> None:
    """A round of two compares within itself; rounds of one each have the first as their reference."""
    assert (rounds_compared(40, [0]), rounds_compared(5, [0] * 5), rounds_compared(6, [0] * 5)) == (1, 4, 5)
