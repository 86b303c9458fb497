"""The grouped-matmul probe calls what depends on the other tokens divergent, and nothing else."""

from __future__ import annotations

import itertools

import pytest
import torch

from nondet.errors import UserError
from nondet.probes.base import Options
from nondet.probes.grouped_matmul import GroupedMatmul
from tests.probes.toys import measure, statuses

SMALL = {"m": 32, "k": 96, "n": 8, "dtypes": ("float32",), "runs": 4}


def test_choice_by_an_expert_s_rows_is_flagged():
    """An expert with a single row takes another order: sweep and routing show it, neither place nor run does."""
    rows = measure("grouped-matmul", "grouped_by_rows", **SMALL)
    assert statuses(rows, varied="batch_size") == statuses(rows, varied="routing") == {"divergent"}
    assert statuses(rows, varied="position") == statuses(rows, varied="run") == {"identical"}
    row = next(r for r in rows.values() if r.varied == "routing")
    named = dict(zip(row.values, row.labels, strict=True))
    assert named["alone"] == named["others at other experts"] == named["others at the next expert"] == 0
    assert named["others at the same expert"] == named["others at the same expert, it comes last"] == 1


def test_choice_by_the_place_is_flagged():
    """A kernel that cuts K by the row's place in the sorted batch is told by the position case."""
    rows = measure("grouped-matmul", "grouped_by_place", **SMALL)
    row = next(r for r in rows.values() if r.varied == "position")
    assert row.status == "divergent"
    assert len(row.values) == 32
    assert statuses(rows, varied="run") == {"identical"}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_sound_kernel_is_not_flagged(dtype):
    """Rows computed by themselves are identical in every case and kind of input, and exact to a rounding."""
    kinds = ("bell", "wide", "cancel", "outlier")
    rows = measure("grouped-matmul", "grouped_sound", **(SMALL | {"dtypes": (dtype,), "inputs": kinds}))
    assert statuses(rows) == {"identical"}
    assert {r.inputs for r in rows.values()} == set(kinds)
    assert {r.varied for r in rows.values()} == {"batch_size", "routing", "position", "run"}
    assert all(r.error.max_ulp <= 1 for r in rows.values())
    assert all(r.reason == "" for r in rows.values()), "an input overflowed the dtype"


def test_plans_are_what_they_are_called():
    """Row 0 is at its own expert in every plan, every row is there once, and the names tell where the others are."""
    probe = GroupedMatmul()
    for case in probe.cases(Options(**SMALL)):
        inputs = probe.prepare(case, "cpu", 0)
        home = inputs["home"]
        for value, order, offsets, place in inputs["plans"]:
            ends = [0, *offsets.tolist()]
            assert ends[-1] == len(order)
            assert sorted(order.tolist()) == list(range(len(order)))
            assert order[place] == 0
            assert ends[home] <= place < ends[home + 1]
            here = ends[home + 1] - ends[home]
            if value == "alone":
                assert len(order) == 1
            elif isinstance(value, str) and "other experts" in value:
                assert here == 1
            elif isinstance(value, str) and "at the same expert" in value and "half" not in value:
                assert here == 32
                assert place == (31 if "last" in value else 0)
            elif value == "others spread over all experts":
                assert all(b >= a for a, b in itertools.pairwise(ends))
                assert 1 < here < 32
        if case.varied == "position":
            assert torch.equal(inputs["x"], inputs["x"][:1].expand(32, -1))


def test_sizes_from_the_command_line():
    """--m is the largest of the sweep, and one of --k and --n stands for both."""
    cases = list(GroupedMatmul().cases(Options(m=10, k=64)))
    assert {(c.shape["K"], c.shape["N"]) for c in cases} == {(64, 64)}
    assert cases[0].data["values"] == [1, 2, 3, 4, 5, 6, 7, 8, 9, 10]
    assert all(c.shape["M"] == 10 for c in cases)


@pytest.mark.parametrize(
    ("options", "said"),
    [({"k": 0}, "--k 0"), ({"m": 10**12}, "M=1000000000000"), ({"dtypes": ("float8_e4m3fn",)}, "float8_e4m3fn")],
)
def test_bad_input_is_refused_before_anything_is_allocated(options, said):
    """Sizes and dtypes that make no sense are named in one line, with what to try."""
    with pytest.raises(UserError) as caught:
        list(GroupedMatmul().cases(Options(**options)))
    assert said in str(caught.value)
