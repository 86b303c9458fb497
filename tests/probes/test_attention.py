"""The attention probe calls an output that follows from its company divergent, and nothing else."""

from __future__ import annotations

import pytest

from nondet.probes.attention import Attention
from nondet.probes.base import Options
from nondet.probes.runner import plan_jobs, run_jobs
from tests.build import tiers
from tests.probes.toys import measure, statuses

SMALL = {"config": {"heads": 4, "kv_heads": 2, "head_dim": 8}, "dtypes": ("float32",)}


@pytest.mark.nightly
def test_cache_reduced_apart_is_flagged():
    """The post's case: 80 cached and 48 new keys in blocks of 32 of their own; 0, 32 and 64 cached end on a block.
    Prefill against decode says which positions differ: none under 32 keys, where one block holds them all."""
    asked = {"cache", "batch_size", "neighbour_values", "query_chunk"}
    rows = measure("attention", "attention_cache_apart", asked=asked, **SMALL)
    row = next(r for r in rows.values() if r.varied == "cache")
    assert (row.values, row.labels) == ([0, 32, 64, 72, 80], [0, 0, 0, 1, 2])
    assert statuses(rows, varied="batch_size") == statuses(rows, varied="neighbour_values") == {"identical"}
    found = next(r.extra for r in rows.values() if "against decode of" in r.case and r.inputs == "bell")
    assert (1 in found["positions"], bool(found["positions_differing"])) == (True, True)
    assert 1 not in found["positions_differing"]


def test_splits_that_follow_from_the_batch_are_flagged():
    """A fixed number of splits, chosen by the batch size: the decode sweep shows where it changes."""
    rows = measure("attention", "attention__order__any__from_4", asked={"batch_size"}, **SMALL)
    row = next(r for r in rows.values() if r.varied == "batch_size" and r.inputs == "order")
    assert row.labels == [int(batch >= 4) for batch in row.values]


@pytest.mark.parametrize(("dtype", "most"), tiers([("float32", 1e-6)], [("bfloat16", 4e-3)]))
def test_sound_attention_is_not_flagged(dtype, most):
    """Queries computed by themselves are identical in every case, and the oracle is of the very same queries."""
    rows = measure("attention", "attention_sound", **(SMALL | {"dtypes": (dtype,)})).values()
    assert {(r.status, r.wrong) for r in rows} == {("identical", False)}
    assert all(r.error.relative_norm < most for r in rows if r.inputs != "order")


def test_what_hidden_keys_hold_is_no_business_of_an_earlier_query():
    """NaN there reaches torch's two products through the mask that is added, and no kernel that leaves keys out."""
    jobs = [j for j in plan_jobs(["attention"], ["stock"], Options(**SMALL)) if j.case.varied == "hidden_keys"]
    said = {row.impl: row.status for row in run_jobs(jobs, 0)}
    assert said == {"stock": "identical", "stock-flash": "identical", "stock-math": "wrong"}


def test_lengths_and_heads_are_drawn_from_the_seed():
    """Other caches for another seed, the same for the same; heads are drawn unless a model names them, and then both
    grouped and ungrouped ones are asked about."""

    def lengths(seed: int, **options: object) -> set[tuple[int, ...]]:
        cases = Attention().cases(Options(seed=seed, dtypes=("float32",), **options))
        return {tuple(c.shape.values()) for c in cases if "drawn" in c.name}

    assert lengths(1) == lengths(1) != lengths(2)
    assert len({shape[1] for shape in lengths(3)}) == 2
    assert {shape[1] for shape in lengths(3, config=SMALL["config"])} == {4}
    assert {(c.shape["Hq"], c.shape["Hkv"]) for c in Attention().cases(Options(**SMALL))} == {(4, 2), (4, 4)}
