"""Limits: bytes and operations of each operator, counted by hand."""

from __future__ import annotations

import math

import pytest

from nondet.bench.cells import PerfCounter, arguments, bench_names, limit_names, measure_limit, peak_name, plan_cases
from nondet.bench.work import Work, limit_us, work_of
from nondet.core.inputs import generator
from nondet.core.operator import BenchSizes

ATTENTION = {"B": 2, "Tq": 3, "Tk": 5, "Hq": 4, "Hkv": 2, "D": 8}


@pytest.mark.parametrize(
    ("operator", "shape", "dtype", "bytes_", "flops"),
    [
        ("linear", {"M": 2, "K": 3, "N": 5}, "bfloat16", 2 * (6 + 15 + 10), 2 * 2 * 3 * 5),
        ("matmul", {"M": 2, "K": 3, "N": 5}, "float32", 4 * (6 + 15 + 10), 2 * 2 * 3 * 5),
        # two of four experts have a row
        ("grouped_matmul", {"M": 2, "K": 3, "N": 5, "E": 4}, "float16", 2 * (6 + 2 * 15 + 10), 2 * 2 * 3 * 5),
        # three queries at positions 2, 3, 4 see 3 + 4 + 5 keys
        ("attention", ATTENTION, "bfloat16", 2 * (2 * 2 * 4 * 3 * 8 + 2 * 2 * 2 * 5 * 8), 4 * 2 * 4 * 8 * 12),
        ("attention", {**ATTENTION, "Tq": 1}, "bfloat16", 2 * (2 * 2 * 4 * 8 + 2 * 2 * 2 * 5 * 8), 4 * 2 * 4 * 8 * 5),
        (
            "attention",
            {**ATTENTION, "Tq": 5},
            "bfloat16",
            2 * (2 * 2 * 4 * 5 * 8 + 2 * 2 * 2 * 5 * 8),
            4 * 2 * 4 * 8 * 15,
        ),
        ("rms_norm", {"M": 3, "H": 7}, "bfloat16", 2 * (42 + 7), 0),
        ("rms_norm_residual", {"M": 3, "H": 7}, "bfloat16", 2 * (84 + 7), 0),
        ("softmax", {"M": 3, "V": 7}, "float32", 4 * 42, 0),
        ("log_softmax", {"M": 3, "V": 7}, "float32", 4 * 42, 0),
        ("mean", {"M": 3, "K": 7}, "float32", 4 * 24, 0),
        ("logsumexp", {"M": 3, "V": 7}, "float32", 4 * 24, 0),
    ],
)
def test_counts(operator: str, shape: dict[str, int], dtype: str, bytes_: int, flops: int) -> None:
    """Each input read once, the output written once, and no operation on a key that is not seen."""
    assert work_of(operator, shape, dtype) == Work(bytes_, flops)


def test_what_is_not_timed_has_no_count() -> None:
    """A mistake of ours is named where it is made."""
    with pytest.raises(ValueError, match="scatter_add is not timed"):
        work_of("scatter_add", {}, "float32")


def test_every_operator_is_counted() -> None:
    """An operator that can be asked for has a count: none fails in the middle of a run."""
    for device in ("cpu", "cuda"):
        cases = plan_cases(["all"], BenchSizes(), device, None)
        assert {case.operator for case in cases} >= {"linear", "softmax", "attention", "grouped_matmul"}
        assert all(case.work.bytes > 0 for case in cases)


def test_bytes_are_those_of_the_inputs() -> None:
    """The count is that of the tensors that are made, for operators that read all of them."""
    counted = {"linear", "matmul", "rms_norm", "softmax", "attention"}
    cases = plan_cases(list(bench_names()), BenchSizes(m=(4,), k=16, n=8), "cpu", ("float16",))
    assert {case.operator for case in cases} >= counted
    for case in cases:
        if case.operator in counted:
            inputs = arguments(case, "cpu", generator(0, "cpu"))
            read = sum(x.numel() * x.element_size() for x in inputs)
            product = case.operator in ("linear", "matmul")
            written = case.shape["M"] * case.shape["N"] * 2 if product else inputs[0].nbytes
            assert case.work.bytes == read + written, case


def test_the_longer_of_both_limits_holds() -> None:
    """Bytes over bandwidth against operations over the peak, in microseconds; none where a rate is missing."""
    assert limit_us(Work(4_000_000, 0), 4e12, None) == (pytest.approx(1.0), "memory")
    assert limit_us(Work(4_000_000, 8_000_000_000), 4e12, 8e14) == (pytest.approx(10.0), "arithmetic")
    assert limit_us(Work(4_000_000, 8_000_000), 4e12, 8e14) == (pytest.approx(1.0), "memory")
    assert limit_us(Work(1, 1), 4e12, None)[0] is None
    assert limit_us(Work(1, 0), None, 8e14)[0] is None


def test_limits_are_measured() -> None:
    """Rates follow from the work and the fastest replay; a copy counts what is read and what is written."""
    watch = PerfCounter()
    watch.budget_us = 1.0
    copy, peak = (measure_limit(name, "cpu", 0, watch) for name in limit_names(["float32", "float32"]))
    assert (copy.name, copy.work, copy.unit) == ("copy", 2**28, "B/s")
    assert (peak.name, peak.work, peak.unit) == (peak_name("float32"), 2 * 1024**3, "FLOP/s")
    assert len(copy.samples_us) == 7
    for limit in (copy, peak):
        assert math.isclose(limit.rate, limit.work / min(limit.samples_us) * 1e6, rel_tol=1e-3)
