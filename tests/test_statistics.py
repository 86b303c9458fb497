"""Intervals and rounding: a report never states a stronger claim than its counts."""

from __future__ import annotations

import pytest

from nondet.statistics import one_sided_bound, percent, percent_range, wilson


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
