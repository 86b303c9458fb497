"""The float-sum probe reproduces the post's figure, and its exact sums do not depend on the order."""

from __future__ import annotations

import random
import sys

import pytest

from nondet.errors import UserError
from nondet.probes.base import Options
from nondet.probes.float_sum import FloatSum, add_all_compensated, add_floats_compensated, add_plainly
from nondet.probes.runner import plan_jobs, run_jobs


@pytest.fixture(scope="module")
def rows():
    """The default list, once."""
    return {(r.case, r.dtype): r for r in run_jobs(plan_jobs(["float-sum"], ["stock"], Options()), 0, set())}


def test_the_post_s_102_sums(rows):
    """102 distinct sums between the post's two bounds: to the last digit, on any Python."""
    row = rows["10,000 shuffles of 8 numbers, summed as Python 3.12 does", "float64"]
    assert row.distinct == 102
    assert row.trials == sum(row.class_sizes) == 10_000
    assert row.extra["smallest"] == -8.326672684688674e-17
    assert row.extra["largest"] == 8.326672684688674e-17


def test_plain_additions_give_more_and_fsum_one(rows):
    """What the 102 depends on: plain additions give 258 sums, and exact summation one, which must not be flagged."""
    assert rows["10,000 shuffles of 8 numbers, added one by one", "float64"].distinct == 258
    assert rows["10,000 shuffles of 8 numbers, math.fsum", "float64"].status == "identical"


def test_arithmetic_is_that_of_this_python():
    """The sums written out here are what the built-in `sum` of the running version does."""
    if sys.version_info < (3, 12):
        ours = add_plainly
    else:
        ours = add_floats_compensated if sys.version_info < (3, 14) else add_all_compensated
    rng = random.Random(0)  # noqa: S311 - no secret
    for _ in range(2000):
        numbers = [rng.choice([1e-10, -1e-10, 1e-5, 0.01, -0.01, 1, -1, 3, 0.1, 1e16, -1e16]) for _ in range(9)]
        assert ours(numbers) == sum(numbers), numbers


def test_orders_are_flagged_and_exact_sums_are_not(rows):
    """In every dtype cancelling numbers show the order, and integers, whose sums are exact, do not."""
    for (case, dtype), row in rows.items():
        if "cancel" in case and f"accumulated in {dtype}" in case:
            assert row.status == "divergent", case
        if "integers" in case:
            assert row.status == "identical", case
    assert {dtype for _, dtype in rows} == {"float64", "float32", "bfloat16", "float16"}


def test_every_order_adds_all_the_numbers(rows):
    """An order that lost a number would pass for rounding: on integers each sum is fsum's."""
    exact = [row for (case, _), row in rows.items() if "integers" in case]
    assert exact
    for row in exact:
        assert set(row.extra["sums"].values()) == {row.extra["fsum"]}
        assert len(row.extra["sums"]) == row.trials == 15


def test_bad_input_is_refused():
    """A list of no numbers, or of more than there is room for."""
    for k in (0, 10**13):
        with pytest.raises(UserError):
            list(FloatSum().cases(Options(k=k)))
