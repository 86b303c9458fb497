"""Kaplan-Meier and the log-rank test against published figures, and against what they are by definition."""

from __future__ import annotations

import math
import random

import pytest

from nondet.core.statistics import confidence_sequence, kaplan_meier, log_rank

# Freireich's leukemia trial (Blood 21, 1963), the standard example: weeks of remission, and whether they ended.
DRUG = ([6, 6, 6, 6, 7, 9, 10, 10, 11, 13, 16, 17, 19, 20, 22, 23, 25, 32, 32, 34, 35],
        [True, True, True, False, True, False, True, False, False, True, True, False, False, False, True, True]
        + [False] * 5)  # fmt: skip
PLACEBO = ([1, 1, 2, 2, 3, 4, 4, 5, 5, 8, 8, 8, 8, 11, 11, 12, 12, 15, 17, 22, 23], [True] * 21)


def test_the_published_curve() -> None:
    """The product-limit estimates that textbooks print of the treated patients, and their standard errors."""
    steps = kaplan_meier(*DRUG)
    curve = {s.time: s.survival for s in steps}
    published = {6: 0.857, 7: 0.807, 10: 0.753, 13: 0.690, 16: 0.627, 22: 0.538, 23: 0.448}
    assert {t: round(curve[t], 3) for t in published} == published
    assert set(curve) == {0, *published}
    last = steps[-1]
    trials = last.survival * (1 - last.survival) / 0.1346**2  # by Greenwood's error, as printed
    assert (last.low, last.high) == pytest.approx(confidence_sequence(last.survival * trials, trials), abs=1e-3)


def test_the_published_log_rank() -> None:
    """Chi-square 16.79 between treated and untreated, 10.75 relapses fewer than expected; twins don't differ."""
    test = log_rank({0: (PLACEBO, DRUG)})
    assert test.statistic == pytest.approx(16.793, abs=1e-3)
    assert (test.observed, round(test.expected, 2)) == (21, 10.75)
    assert test.p == pytest.approx(4.17e-5, rel=1e-2)
    assert log_rank({0: (DRUG, DRUG)}).p == pytest.approx(1.0)
    assert log_rank({0: (PLACEBO, DRUG)}, effect=4.0).statistic == pytest.approx(16.793 / 4, abs=1e-3)


def test_without_censoring_it_is_the_share_left() -> None:
    """The estimate is then the empirical one, and the ends stay between 0 and 1."""
    rng = random.Random(2)  # noqa: S311 - a simulation
    times = [rng.randrange(1, 40) for _ in range(60)]
    steps = kaplan_meier(times, [True] * 60)
    assert {step.time for step in steps} >= set(times)
    for step in steps:
        assert step.survival == pytest.approx(sum(t > step.time for t in times) / 60)
        assert 0.0 <= step.low <= step.survival <= step.high <= 1.0
    last = kaplan_meier([1] * 12 + [2] * 36, [True] * 48, effect=12.0)[-1]
    assert (last.survival, last.low, last.high) == (0.0, 0.0, confidence_sequence(0, 3)[1])  # three rounds of four


def test_an_end_is_no_parting() -> None:
    """Texts that end unparted leave the curve where it is; counted as survivors they would lift it."""
    assert [s.survival for s in kaplan_meier([3, 5, 5], [False] * 3)] == [1.0]
    step = kaplan_meier([2, 4, 8, 8], [False, True, False, False])[-1]
    assert (step.at_risk, step.survival) == (3, pytest.approx(2 / 3))
    assert kaplan_meier([1] * 20, [False] * 20)[0].low == pytest.approx(0.05 ** (1 / 20))


def test_an_effect_widens() -> None:
    """Completions that share batches are worth fewer: the band must show it; without a second round there is none."""
    plain, wide = kaplan_meier(*DRUG)[3], kaplan_meier(*DRUG, effect=3.0)[3]
    assert wide.low < plain.low < plain.survival == wide.survival < plain.high < wide.high
    assert {(s.low, s.high) for s in kaplan_meier(*DRUG, effect=math.inf)} == {(0.0, 1.0)}
    assert log_rank({0: (PLACEBO, DRUG)}, math.inf).p == 1.0


def test_strata_are_compared_within() -> None:
    """Two prompts that part at different places, each alike under both systems: no difference between the systems."""
    early, late = ([2] * 10, [True] * 10), ([30] * 10, [True] * 10)
    mixed = log_rank({0: (early, early), 1: (late, late)})
    assert mixed.p == pytest.approx(1.0)
    assert log_rank({0: (early, late)}).p < 1e-4


@pytest.mark.parametrize("bad", [([], []), ([1], []), ([-1], [True])])
def test_what_is_no_sample_is_refused(bad: tuple[list[int], list[bool]]) -> None:
    """No curve over nothing."""
    with pytest.raises(ValueError, match="no sample"):
        kaplan_meier(*bad)
