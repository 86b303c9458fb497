"""The split-k probe shows when the number of parts changes bits, when not, and a wrong answer as what it is."""

from __future__ import annotations

import pytest

from nondet.errors import UserError
from nondet.probes.base import Options
from nondet.probes.split_k import SplitK
from tests.probes.toys import measure, statuses

SMALL = {"m": 2, "k": 512, "n": 8, "dtypes": ("float32",), "runs": 12}


def test_parts_and_atomics_are_flagged():
    """Ordered parts differ by their number but not from run to run; atomic ones from run to run as well."""
    rows = measure("split-k", "split_k", **SMALL)
    assert rows["K in 1 to 16 parts added in order, M=2 K=512 N=8, bell [float32]"].distinct > 1
    assert statuses(rows, varied="run") == {"divergent"}


def test_exact_sums_are_not_flagged():
    """Ones and small integers have exact partial sums: any order gives the known answer, and the row says so."""
    rows = measure("split-k", "split_k", **SMALL)
    for kind in ("ones", "integers"):
        assert statuses(rows, inputs=kind) == {"identical"}
        assert all(r.extra["exact"] for r in rows.values() if r.inputs == kind)


def test_wrong_answer_is_told_from_rounding():
    """A kernel that loses a part is wrong where no rounding explains it, and `exact` is false; its control is not."""
    rows = measure("split-k", "split_k_that_forgets", **SMALL)
    assert statuses(rows, inputs="ones") == {"wrong"}
    assert all(r.distinct > 1 for r in rows.values() if r.inputs == "ones")
    assert "wrong" not in statuses(measure("split-k", "split_k", **SMALL))
    assert not any(r.extra["exact"] for r in rows.values() if r.inputs == "ones")


def test_fixed_chunks_are_not_flagged_however_many_workers():
    """An implementation that takes `workers` gets 1 to 16 of them, in the same cases, and must not change a bit."""
    rows = measure("split-k", "fixed_chunk", **SMALL)
    assert statuses(rows) == {"identical"}
    assert rows["K in 1 to 16 parts added in order, M=2 K=512 N=8, bell [float32]"].values == [1, 2, 4, 8, 16]


@pytest.mark.parametrize("options", [{"k": 0}, {"n": 10**11}, {"dtypes": ("int8",)}, {"runs": 0}])
def test_bad_input_is_refused(options):
    """Sizes, dtypes and runs that make no sense stop before anything is made."""
    with pytest.raises(UserError):
        list(SplitK().cases(Options(**options)))
