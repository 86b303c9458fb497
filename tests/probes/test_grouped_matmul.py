"""The grouped-matmul probe calls what depends on the other tokens divergent, and nothing else."""

from __future__ import annotations

import torch

from nondet.probes.base import Options
from nondet.probes.grouped_matmul import GroupedMatmul
from tests.probes.toys import measure, statuses

SMALL = {"m": 32, "k": 96, "n": 8, "dtypes": ("float32",), "runs": 4}


def test_choice_by_an_expert_s_rows_is_flagged():
    """An expert with a single row takes another order: sweep and routing show it, neither place nor run does."""
    rows = measure("grouped-matmul", "grouped_matmul__order__any__share_1_1", **SMALL)
    assert statuses(rows, varied="batch_size", inputs="order") == {"divergent"}
    first, *others = [r for r in rows.values() if r.varied == "routing"]
    assert {r.status for r in (first, *others) if "alone" in r.values} == {"divergent"}
    assert {r.status for r in others if "alone" not in r.values} == {"identical"}  # from four rows on
    assert statuses(rows, inputs="integers") == statuses(rows, varied="history") == {"identical"}
    assert statuses(rows, varied="position") == statuses(rows, varied="run") == {"identical"}
    row = next(r for r in rows.values() if r.varied == "routing")
    named = dict(zip(row.values, row.labels, strict=True))
    assert named["alone"] == 0
    assert named["others at the same expert"] == named["others at the same expert, they come last"] == 1


def test_rows_after_the_last_expert_s_are_nobody_s():
    """What a kernel leaves there is no difference between two calls, and not wrong; that they are there may matter."""
    rows = measure("grouped-matmul", "grouped_leaves_later_rows", **SMALL, asked={"routing"}).values()
    named = [r for r in rows if "half of the others after the last expert's rows" in r.values]
    assert {(r.status, r.distinct, r.replays_parted) for r in named} == {("divergent", 2, 0)}


def test_sound_kernel_is_not_flagged():
    """Rows computed by themselves are identical in every case and kind of input, and exact to a rounding."""
    kinds = ("bell", "wide", "cancel", "outlier", "order", "integers")
    rows = measure("grouped-matmul", "grouped_sound", **(SMALL | {"inputs": kinds})).values()
    assert {(r.status, r.wrong, r.reason) for r in rows} == {("identical", False, "")}  # no input overflowed
    assert {r.inputs for r in rows} == {*kinds, "mixed", "positive"}
    varied = {"batch_size", "routing", "position", "run", "history", "neighbour_values"}
    assert {r.varied for r in rows} == varied
    assert all(r.error.max_ulp <= 1 for r in rows if r.inputs not in ("order", "cancel", "mixed"))


def test_plans_are_what_they_are_called():
    """Asked rows are at the same experts in every plan, each row is there once, and the names tell where others are."""
    probe = GroupedMatmul()
    cases = list(probe.cases(Options(**SMALL)))
    assert {case.varied for case in cases} >= {"batch_size", "routing", "position"}
    rows_there = {"alone": 1, "others at the same expert": 32, "others at other experts": 4}
    for case in cases:
        inputs = probe.prepare(case, "cpu", 0)
        answers = []
        for value, batches in inputs["plans"]:
            answers.append([])
            for order, offsets, asked in batches:
                ends = [0, *offsets.tolist()]
                assert len(ends) == 9
                assert len(order) == len(set(order.tolist()))
                assert (ends[-1] < len(order)) == ("after the last expert" in str(value))
                experts = torch.searchsorted(offsets, asked.int(), right=True).tolist()
                answers[-1] += list(zip(order[asked].tolist(), experts, strict=True))
                assert case.varied != "batch_size" or len(order) == value
                if case.varied == "routing":
                    home = case.data["home"]
                    assert {e for _, e in answers[-1]} == {home}
                    assert rows_there.get(str(value)) in (None, ends[home + 1] - ends[home])
                    assert "come last" not in str(value) or sorted(asked.tolist()) == [28, 29, 30, 31]
        assert all(answer == answers[0] for answer in answers)
        if case.varied == "batch_size":
            assert [row for row, _ in answers[0]] == list(range(16))
            assert {0, 7} <= {expert for _, expert in answers[0]}
        if case.varied == "position":
            assert torch.equal(inputs["x"], inputs["x"][:1].expand(32, -1))


def test_experts_and_sizes():
    """The first, the middle, the last expert, and one drawn from the seed; --m is the largest of the sweep, and one of
    --k and --n stands for both."""
    cases = [(seed, c) for seed in range(8) for c in GroupedMatmul().cases(Options(seed=seed)) if c.varied == "routing"]
    homes = {frozenset(c.data["home"] for of, c in cases if of == seed) for seed in range(8)}
    assert all({0, 3} <= home for home in homes)
    assert len(homes) > 1
    cases = list(GroupedMatmul().cases(Options(m=10, k=64)))
    assert {(c.shape["M"], c.shape["K"], c.shape["N"]) for c in cases} == {(10, 64, 64)}
    assert next(c for c in cases if c.varied == "batch_size").data["values"] == [1, 2, 3, 4, 5, 6, 7, 8, 9, 10]
