"""The atomics probe calls additions in no fixed order divergent, and additions one after the other identical."""

from __future__ import annotations

import pytest

from nondet.errors import UserError
from nondet.probes.atomics import Atomics
from nondet.probes.base import Options
from tests.probes.toys import measure, statuses


@pytest.mark.parametrize("operator", ["index_add", "scatter_add"])
def test_any_order_is_flagged_and_one_order_is_not(operator):
    """The same sources in another order at each call give many sums; in one order, one."""
    for toy, status in ((f"{operator}_atomic", "divergent"), (f"{operator}_sound", "identical")):
        rows = measure("atomics", f"{operator}={toy}", m=256, n=4, dtypes=("float32",))
        assert statuses(rows, operator=operator) == {status}
    assert all(row.trials == 20 for row in rows.values() if row.operator == operator)


@pytest.mark.parametrize("options", [{"m": 0}, {"n": 10**13}, {"dtypes": ("float8_e5m2",)}])
def test_bad_input_is_refused(options):
    """Sizes and dtypes that make no sense stop before anything is made."""
    with pytest.raises(UserError):
        list(Atomics().cases(Options(**options)))
