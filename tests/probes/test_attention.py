"""The attention probe calls an output that follows from its company divergent, and nothing else."""

from __future__ import annotations

import pytest

from nondet.errors import UserError
from nondet.probes import attention
from nondet.probes.attention import Attention
from nondet.probes.base import Options
from nondet.probes.runner import plan_jobs, run_jobs
from tests.probes.toys import measure, statuses

SMALL = {"config": {"heads": 4, "kv_heads": 2, "head_dim": 8}, "dtypes": ("float32",)}


@pytest.mark.nightly
def test_cache_reduced_apart_is_flagged():
    """The post's case: 80 cached and 48 new keys in blocks of 32 of their own; 0, 32 and 64 cached end on a block."""
    rows = measure("attention", "attention_cache_apart", asked={"cache", "batch_size", "neighbour_values"}, **SMALL)
    row = next(r for r in rows.values() if r.varied == "cache")
    assert row.values == [0, 32, 64, 72, 80]
    assert row.labels == [0, 0, 0, 1, 2]
    for varied in ("batch_size", "neighbour_values"):
        assert statuses(rows, varied=varied) == {"identical"}


@pytest.mark.nightly
def test_blocks_counted_from_the_first_key_are_not_flagged():
    """The same blocks, anchored at position 0: prefill, chunks, decode and a cache of any length agree."""
    asked = {"cache", "query_chunk", "prompt_length", "batch_size", "neighbour_values"}
    assert statuses(measure("attention", "attention_anchored", asked=asked, **SMALL)) == {"identical"}


def test_splits_that_follow_from_the_batch_are_flagged():
    """A fixed number of splits, chosen by the batch size: the decode sweep shows where it changes."""
    rows = measure("attention", "attention_splits_by_batch", asked={"batch_size"}, **SMALL)
    row = next(r for r in rows.values() if r.varied == "batch_size" and r.inputs == "order")
    assert row.labels == [int(batch >= 4) for batch in row.values]


@pytest.mark.parametrize("dtype", ["float32", pytest.param("bfloat16", marks=pytest.mark.nightly)])
def test_sound_attention_is_not_flagged(dtype):
    """Queries computed by themselves are identical in every case, and the oracle is of the very same queries."""
    rows = measure("attention", "attention_sound", **(SMALL | {"dtypes": (dtype,)}))
    assert statuses(rows) == {"identical"}
    assert not any(r.wrong for r in rows.values())
    ordinary = [r for r in rows.values() if r.inputs != "order"]
    assert all(r.error.relative_norm < {"float32": 1e-6, "bfloat16": 4e-3}[dtype] for r in ordinary)


@pytest.mark.nightly
def test_a_tile_that_a_long_request_changes_is_flagged(monkeypatch):
    """A decode row in another tile once a query of 64 joins, in a dense batch and in a ragged one."""
    monkeypatch.setattr(attention, "_JOINED", (1, 16, 63, 64, 65))  # of more, a toy in Python takes a minute
    for toy in ("attention_tile_by_longest", "attention_ragged_tile"):
        row = next(r for r in measure("attention", toy, asked={"neighbour_length"}, **SMALL).values())
        assert row.status == "divergent"
        grown = [v for v, label in zip(row.values, row.labels, strict=True) if label]
        assert grown[0] == (64 if toy == "attention_tile_by_longest" else "ragged, 64 queries join")


def test_requests_after_the_first_are_compared():
    """A kernel that cuts the keys of every request but the first otherwise where there are three or more."""
    rows = measure("attention", "attention_later_requests", asked={"batch_size"}, **SMALL)
    assert "divergent" in statuses(rows, inputs="order")


def test_other_requests_values_are_no_business_of_mine():
    """Keys rounded by one scale of all requests: a neighbour's huge key takes my digits, so many that it is wrong."""
    rows = measure("attention", "attention_shared_maximum", asked={"neighbour_values"}, **SMALL)
    assert all(row.parted and row.status == "wrong" for row in rows.values())


def test_what_hidden_keys_hold_is_no_business_of_an_earlier_query():
    """NaN there reaches torch's two products through the mask that is added, and no kernel that leaves keys out."""
    rows = run_jobs(
        [j for j in plan_jobs(["attention"], ["stock"], Options(**SMALL)) if j.case.varied == "hidden_keys"], 0, set()
    )
    assert {row.impl: row.status for row in rows} == {
        "stock": "identical",
        "stock-flash": "identical",
        "stock-math": "wrong",
    }


@pytest.mark.nightly
def test_differing_positions_are_named():
    """Prefill against decode says which positions differ: none under 32 keys, where one block holds them all."""
    rows = measure("attention", "attention_cache_apart", asked={"query_chunk"}, **SMALL)
    told = next(r.extra for r in rows.values() if "against decode of" in r.case and r.inputs == "bell")
    assert 1 in told["positions"]
    assert told["positions_differing"]
    assert 1 not in told["positions_differing"]


def test_stock_stands_for_its_backends():
    """`--impl stock` also asks each named backend that the device type has."""
    impls = {job.impl for job in plan_jobs(["attention"], ["stock"], Options(**SMALL))}
    assert impls == {"stock", "stock-flash", "stock-math"}


def test_key_heads_for_each_query_head_are_asked_about_too():
    """Grouped and ungrouped heads are both asked about, unless the model has none to group."""
    shapes = {(c.shape["Hq"], c.shape["Hkv"]) for c in Attention().cases(Options(**SMALL))}
    assert shapes == {(4, 2), (4, 4)}


def test_lengths_and_heads_are_drawn_from_the_seed():
    """Other caches for another seed, the same for the same; heads are drawn unless a model names them."""

    def lengths(seed: int, **options: object) -> set[tuple[int, ...]]:
        cases = Attention().cases(Options(seed=seed, dtypes=("float32",), **options))
        return {tuple(c.shape.values()) for c in cases if "drawn" in c.name}

    assert lengths(1) == lengths(1) != lengths(2)
    assert len({shape[1] for shape in lengths(3)}) == 2
    assert {shape[1] for shape in lengths(3, config=SMALL["config"])} == {4}


def test_absurd_heads_are_refused():
    """A model whose keys and values can't be held is named before anything is made."""
    config = {"heads": 10**7, "kv_heads": 10**7, "head_dim": 128}
    with pytest.raises(UserError, match="Hq=10000000"):
        list(Attention().cases(Options(config=config)))
