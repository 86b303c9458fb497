"""The attention probe calls an output that follows from its company divergent, and nothing else."""

from __future__ import annotations

import pytest

from nondet.errors import UserError
from nondet.probes.attention import Attention
from nondet.probes.base import Options
from nondet.runner import plan_jobs
from tests.probes.toys import measure, statuses

SMALL = {"config": {"heads": 4, "kv_heads": 2, "head_dim": 8}, "dtypes": ("float32",)}


def test_cache_reduced_apart_is_flagged():
    """The post's case: 80 cached and 48 new keys in blocks of 32 of their own; 0, 32 and 64 cached end on a block."""
    rows = measure("attention", "attention_cache_apart", **SMALL)
    row = next(r for r in rows.values() if r.varied == "cache")
    assert row.values == [0, 32, 64, 80]
    assert row.labels == [0, 0, 0, 1]
    assert statuses(rows, varied="query_chunk") == {"divergent"}
    assert statuses(rows, varied="batch_size") == {"identical"}


def test_blocks_counted_from_the_first_key_are_not_flagged():
    """The same blocks, anchored at position 0: prefill, chunks, decode and a cache of any length agree."""
    assert statuses(measure("attention", "attention_anchored", **SMALL)) == {"identical"}


def test_splits_that_follow_from_the_batch_are_flagged():
    """A fixed number of splits, chosen by the batch size: the decode sweep shows where it changes."""
    rows = measure("attention", "attention_splits_by_batch", **SMALL)
    row = next(r for r in rows.values() if r.varied == "batch_size" and r.inputs == "bell")
    assert row.labels == [int(batch >= 4) for batch in row.values]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_sound_attention_is_not_flagged(dtype):
    """Queries computed by themselves are identical in every case, and the oracle is of the very same queries."""
    rows = measure("attention", "attention_sound", **(SMALL | {"dtypes": (dtype,)}))
    assert statuses(rows) == {"identical"}
    assert all(r.error.relative_norm < {"float32": 1e-6, "bfloat16": 4e-3}[dtype] for r in rows.values())


def test_differing_positions_are_named():
    """Prefill against decode says which positions differ: none under 32 keys, where one block holds them all."""
    rows = measure("attention", "attention_cache_apart", **SMALL)
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


def test_absurd_heads_are_refused():
    """A model whose keys and values can't be held is named before anything is made."""
    config = {"heads": 10**7, "kv_heads": 10**7, "head_dim": 128}
    with pytest.raises(UserError, match="Hq=10000000"):
        list(Attention().cases(Options(config=config)))
