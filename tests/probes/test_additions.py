"""The float-sum probe reproduces the post's figure, and its exact sums do not depend on the order."""

from __future__ import annotations

import random
import sys

import pytest

from nondet.probes.additions import add_compensated, add_plainly
from nondet.probes.base import Options
from nondet.probes.runner import plan_jobs, run_jobs
from tests.probes.toys import measure, statuses


@pytest.fixture(scope="module")
def rows():
    """The default list, once."""
    return {(r.case, r.dtype): r for r in run_jobs(plan_jobs(["float-sum"], ["stock"], Options()), 0)}


def test_the_post_s_102_sums(rows):
    """102 distinct sums between the post's two bounds: to the last digit, on any Python. Plain additions give 258
    sums, and exact summation one, which must not be flagged."""
    row = rows["10,000 shuffles of 8 numbers, summed as Python 3.12 does", "float64"]
    assert (row.distinct, row.trials, sum(row.class_sizes)) == (102, 10_000, 10_000)
    assert row.extra["largest"] == -row.extra["smallest"] == 8.326672684688674e-17
    assert rows["10,000 shuffles of 8 numbers, added one by one", "float64"].distinct == 258
    assert rows["10,000 shuffles of 8 numbers, math.fsum", "float64"].status == "identical"


@pytest.mark.skipif(sys.version_info >= (3, 14), reason="it compensates integers, too")
def test_arithmetic_is_that_of_this_python():
    """The sums written out here are what the built-in `sum` of the running version does."""
    ours = add_plainly if sys.version_info < (3, 12) else add_compensated
    rng = random.Random(0)  # noqa: S311 - no secret
    for _ in range(2000):
        numbers = [rng.choice([1e-10, -1e-10, 1e-5, 0.01, -0.01, 1, -1, 3, 0.1, 1e16, -1e16]) for _ in range(9)]
        assert ours(numbers) == sum(numbers), numbers


def test_orders_are_flagged_and_exact_sums_are_not(rows):
    """In every dtype cancelling numbers show the order, and integers, whose sums are exact, do not: an order that lost
    a number would pass for rounding, but on integers each sum is fsum's."""
    for (case, dtype), row in rows.items():
        if "cancel" in case and f"accumulated in {dtype}" in case:
            assert row.status == "divergent", case
    assert {dtype for _, dtype in rows} == {"float64", "float32", "bfloat16", "float16"}
    exact = [row for (case, _), row in rows.items() if "integers" in case]
    assert {row.status for row in exact} == {"identical"}
    for row in exact:
        assert set(row.extra["sums"].values()) == {row.extra["fsum"]}
        assert len(row.extra["sums"]) == row.trials == 15


# The atomics probe calls additions in no fixed order divergent, and additions one after the other identical.


def test_any_order_is_flagged_and_one_order_is_not():
    """The same sources in another order at each call give many sums; in one order, one, as 200 calls show. Where 20
    differ, no more are made, unless the user named a number."""
    for operator in ("index_add", "scatter_add"):
        for toy, status, options, trials in (
            ("atomic", "divergent", {}, 20),
            ("atomic", "divergent", {"runs": 30}, 30),
            ("sound", "identical", {}, 200),
        ):
            rows = measure("atomics", f"{operator}={operator}_{toy}", m=256, n=4, dtypes=("float32",), **options)
            assert statuses(rows, operator=operator) == {status}
            assert [r.trials for r in rows.values() if r.operator == operator and r.varied == "run"] == [trials]


def test_an_order_that_follows_others_sources_is_flagged():
    """The rows asked about have the same sources in every batch: one order, until enough others come along."""
    rows = measure("atomics", "index_add=index_add_turns", m=256, n=16, dtypes=("float32",))
    found = {row.varied: row for row in rows.values() if row.operator == "index_add"}
    assert (found["run"].status, found["batch_size"].status) == ("identical", "divergent")
    assert found["batch_size"].labels == [0, 0, 0, 1]


# The split-k probe shows when the number of parts changes bits, when not, and a wrong answer as what it is.

SMALL = {"m": 2, "k": 512, "n": 8, "dtypes": ("float32",), "runs": 12}


def test_parts_and_atomics_are_flagged_and_exact_sums_are_not():
    """Ordered parts differ by their number but not from run to run; atomic ones from run to run as well. Ones and small
    integers have exact partial sums: any order gives the known answer, and the row says so. A kernel that loses a part
    is wrong where no rounding explains it, and `exact` is false."""
    rows = measure("split-k", "split_k", **SMALL)
    assert rows["K in 1 to 16 parts added in order, M=2 K=512 N=8, bell [float32]"].distinct > 1
    assert statuses(rows, varied="run") == {"divergent"}
    assert "wrong" not in statuses(rows)
    exact = {(r.status, r.extra["exact"]) for r in rows.values() if r.inputs in ("ones", "integers")}
    assert exact == {("identical", True)}
    wrong = [r for r in measure("split-k", "split_k_that_forgets", **SMALL).values() if r.inputs == "ones"]
    assert {(r.status, r.distinct > 1, r.extra["exact"]) for r in wrong} == {("wrong", True, False)}


def test_fixed_chunks_are_not_flagged_however_many_workers():
    """An implementation that takes `workers` gets 1 to 16 of them, in the same cases, and must not change a bit."""
    rows = measure("split-k", "fixed_chunk", **SMALL)
    assert statuses(rows) == {"identical"}
    assert rows["K in 1 to 16 parts added in order, M=2 K=512 N=8, bell [float32]"].values == [1, 2, 4, 8, 16]
