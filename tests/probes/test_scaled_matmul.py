"""The scaled-matmul probe names planted orders and a scale of the whole batch, and flags nothing that is sound."""

from __future__ import annotations

import pytest

from nondet.core.records import Row
from nondet.probes.base import Options
from nondet.probes.runner import plan_jobs, run_jobs
from nondet.probes.scaled_matmul import ANCHORS, ScaledMatmul
from tests.build import tiers
from tests.probes.toys import measure

SMALL = {"m": 80, "k": 512, "n": 24, "dtypes": ("float8_e4m3fn", "float32"), "runs": 3}
EVERY_128 = "promoted to float32 every 128 k"


def orders(toy: str, scales: str, seed: int = 0) -> Row:
    rows = measure("scaled-matmul", toy, asked=("batch_size",), seed=seed, **SMALL).values()
    (row,) = [r for r in rows if (r.inputs, r.operator) == ("order-wide", "scaled_matmul") and scales in r.case]
    return row


@pytest.mark.parametrize("seed", tiers((0,), (1, 2)))
def test_a_planted_order_is_named_and_its_border_is_found(seed):
    """Two classes, each by the name of its order, apart at the number of rows at which the fault sets in."""
    for toy, border, name, scales in (
        ("fp8_promotes_sooner", 48, "promoted to float32 every 64 k", "one scale each"),
        ("fp8_splits", 64, "K in 2 parts, promoted every 128 k", "a scale for each row"),
    ):
        row = orders(toy, scales, seed)
        assert (row.status, row.extra["orders"]) == ("divergent", [EVERY_128, name])
        assert row.reason == f"class 1: {EVERY_128}; class 2: {name}"
        assert border in row.values
        assert row.labels == [int(value >= border) for value in row.values]


def test_sums_that_are_not_exact_are_named_by_the_class_that_has_them(monkeypatch):
    """On a GPU that is chain-fp8's anchor; where a device has none, and of another promotion, there is no name."""
    assert orders("fp8_coarse", "a scale for each row").extra["orders"] == ["", ""]
    monkeypatch.setitem(ANCHORS, "cpu", "tests.probes.toys:fp8_coarse")
    row = orders("fp8_coarse", "a scale for each row")
    assert row.extra["orders"] == [f"{EVERY_128}, within these as the matrix unit adds", ""]
    assert "class 2: none of the orders tried" in row.reason


def test_sound_products_are_not_flagged():
    """Sums of 128 k in order are one class in every case but those of scales in blocks, which the toy can't do."""
    done = [r for k, r in measure("scaled-matmul", "fp8_sound", **SMALL).items() if "128x128" not in k]
    assert {r.status for r in done} == {"identical"}
    assert {r.varied for r in done} >= {"batch_size", "position", "run", "history", "alignment", "neighbour_values"}
    assert all(r.extra["exact"] for r in done if r.inputs == "integers")


@pytest.mark.parametrize("seed", tiers((0,), (1, 2)))
def test_a_scale_of_the_whole_batch_is_named_by_its_meaning(seed):
    """One scale for a batch is batch-dependent by meaning; scales of rows are not flagged; rounding is no scale."""
    wanted = {"by_batch": ("divergent", True), "by_row": ("identical", False), "dithers": ("divergent", False)}
    for toy, right in wanted.items():
        rows = measure("scaled-matmul", f"quantize=quantize_{toy}", asked=("batch_size",), seed=seed, **SMALL)
        assert [(r.status, "by meaning" in r.reason) for r in rows.values() if r.operator == "quantize"] == [right]


def test_a_scale_of_one_neighbour_is_found_by_its_place():
    """Rows that are compared over M stand at a batch's ends; a fault of one place between them is found by place."""
    rows = measure("scaled-matmul", "quantize=quantize_takes_a_neighbour_s", **SMALL)
    found = {r.varied: r.status for r in rows.values() if r.operator == "quantize"}
    assert found == {"batch_size": "identical", "neighbour_values": "identical", "position": "divergent"}


@pytest.mark.nightly
def test_torch_s_own_form_runs_or_says_in_one_line_why_not():
    """Scales in blocks and experts' products have no CPU form in torch: skipped, with the reason; quantizers run."""
    options = Options(m=8, k=256, n=32, runs=2)
    rows = list(run_jobs(plan_jobs(["scaled-matmul"], ["stock", "invariant"], options), 0))
    quantized = [r for r in rows if r.operator == "quantize"]
    skipped = [r for r in rows if r.status == "skipped"]
    assert {(r.impl, "refuses this on cpu" in r.reason, "one scale each" in r.case) for r in skipped} == {
        ("stock", True, False)
    }
    assert {r.case for r in skipped} >= {r.case for r in rows if "128x128" in r.case or "experts" in r.case}
    assert not any(r.status in ("error", "wrong") for r in rows)
    ours = {(r.operator, r.status) for r in rows if r.impl == "invariant"}
    assert ours == {(name, "identical") for name in ("scaled_matmul", "scaled_grouped_matmul", "quantize")}
    by_tensor = {r.varied: r for r in quantized if r.impl == "stock"}
    assert by_tensor.pop("position").status == "identical"  # the same rows, and so the same largest number
    assert by_tensor
    assert all("by meaning" in r.reason for r in by_tensor.values())
    assert {r.status for r in quantized if r.impl == "stock-block"} == {"identical"}


def test_what_is_asked_follows_the_dtypes_given():
    """A result's dtype or an operand's may be named; of a dtype that FP8 products do not give nothing is asked."""
    bfloat16, e5m2, float64 = (
        [c for c in ScaledMatmul().cases(Options(dtypes=(dtype,))) if c.operator == "scaled_matmul"]
        for dtype in ("bfloat16", "float8_e5m2", "float64")
    )
    assert {c.data["out"] for c in bfloat16} == {"bfloat16"}
    assert ({c.dtype for c in e5m2}, float64) == ({"float8_e5m2"}, [])
