"""What is concluded from cells: ratios, intervals, noise, means, the worst, the limit, the bits."""

from __future__ import annotations

import math

import pytest

from nondet.bench.summary import Comparison, best_stock, compare, failures, sections
from nondet.core.records import Cell, Status
from tests.reports.factory import bench_run, cell, failed, row, run_of, timed


def of(found: Cell, impl: str) -> Comparison:
    return next(c for c in compare(found) if c.timed.impl == impl)


def test_the_best_stock_of_a_cell_is_the_baseline() -> None:
    """The fastest backend of that very cell, not the default one, and never somebody else's kernel."""
    found = cell(1, timed("stock", 20.0), timed("stock-cudnn", 10.0), timed("invariant", 8.0), timed("stocking", 1.0))
    baseline = best_stock(found)
    assert baseline is not None
    assert baseline.impl == "stock-cudnn"
    assert of(found, "invariant").ratio == pytest.approx(1.25)
    assert of(found, "stock").ratio == pytest.approx(0.5)


def test_an_interval_covers_the_noise_and_nothing_more() -> None:
    """Samples within one percent give an interval within one percent; steady ones, of no width at all."""
    c = of(cell(1, timed("stock", 10.0), timed("invariant", 8.0)), "invariant")
    low, high = c.interval
    assert 1.23 < low <= 1.25 <= high < 1.27
    assert not c.within_noise
    steady = timed("stock", 10.0, samples_us=[10.0] * 9), timed("invariant", 8.0, samples_us=[8.0] * 9)
    assert of(cell(1, *steady), "invariant").interval == (1.25, 1.25)


def test_a_ratio_within_noise_is_called_that() -> None:
    """Two that scatter around each other are not told apart, whatever their medians say."""
    noisy = [10.0, 12.0, 9.0, 11.0, 10.5, 9.5, 13.0]
    c = of(
        cell(1, timed("stock", 10.5, samples_us=noisy), timed("invariant", 10.4, samples_us=noisy[::-1])), "invariant"
    )
    assert c.within_noise
    assert not of(cell(1, timed("stock", 10.5), timed("invariant", 9.0)), "invariant").within_noise


def test_replays_are_compared_in_pairs() -> None:
    """A machine that slows down half-way slows both: the ratio stays, and its interval stays narrow."""
    drift = [1.0 + 0.1 * i for i in range(11)]
    both = (
        timed("stock", 20.0, samples_us=[10 * d for d in drift]),
        timed("mine", 15.0, samples_us=[7.5 * d for d in drift]),
    )
    low, high = of(cell(1, *both), "mine").interval
    assert high - low < 1e-9


def test_no_ratio_without_both_sides() -> None:
    """No stock, or no time: no ratio, no interval, no place in a mean."""
    lost = timed("invariant", 0.0, status=Status.ERROR, reason="out of memory", samples_us=[])
    for found in (cell(1, timed("invariant", 8.0)), cell(1, timed("stock", 8.0), lost)):
        c = of(found, "invariant")
        assert (c.ratio, c.within_noise, c.draws.size) == (None, False, 0)
    (section,) = sections(run_of(cells=[cell(1, timed("stock", 8.0), lost)]))
    assert section.summaries == ()


def test_the_limit_is_a_share_where_it_holds() -> None:
    """Limit over time; a cell whose buffers stay in the cache is not held against memory's bandwidth."""
    cold = cell(1, timed("stock", 16.0))
    assert cold.limit_us is not None
    assert of(cold, "stock").share == pytest.approx(cold.limit_us / 16.0)
    assert of(cell(1, timed("stock", 16.0), cold=False), "stock").share is None
    assert of(cell(1, timed("stock", 16.0), limit_us=None), "stock").share is None
    warm_product = cell(8192, timed("stock", 900.0), cold=False)
    assert warm_product.limited_by == "arithmetic"
    assert of(warm_product, "stock").share is not None


def test_a_section_has_means_the_worst_and_the_slow() -> None:
    """Geometric mean, its interval around it, the worst cell, and the count below 0.9."""
    cells = [cell(m, timed("stock", 10.0), timed("invariant", us)) for m, us in ((1, 5.0), (8, 20.0), (16, 10.0))]
    (section,) = sections(run_of(cells=cells))
    (summary,) = section.summaries
    assert summary.mean == pytest.approx(1.0)
    assert summary.interval[0] <= 1.0 <= summary.interval[1]
    assert summary.worst.cell.shape["M"] == 8
    assert (summary.slow, summary.failed) == (1, 0)
    assert math.prod(c.ratio or 0 for c in summary.compared) == pytest.approx(1.0)


def test_sections_keep_dtypes_apart_and_their_own_bits() -> None:
    """One table for each section and dtype; the bits of a weight shape that was not timed in it are not its own."""
    run = bench_run()
    (section,) = sections(run)
    assert [(b.impl, b.one_class, b.groups) for b in section.bits] == [("stock", 0, 3), ("invariant", 3, 3)]
    run.cells.append(cell(1, timed("stock", 1.0), dtype="float16"))
    assert [(s.name, s.dtype, len(s.rows)) for s in sections(run)] == [
        ("matmul", "bfloat16", 6),
        ("matmul", "float16", 0),
    ]
    other = run_of(
        row([0, 0], probe="bench", case="matmul K=9 N=9: row 0 of M rows"),
        failed(probe="bench", case="matmul K=4096 N=4096: row 0 of M rows", impl="invariant"),
        cells=[cell(1, timed("stock", 1.0), timed("invariant", 1.0))],
    )
    (section,) = sections(other)
    assert [(b.impl, b.one_class, b.groups, b.failed) for b in section.bits] == [("invariant", 0, 0, 1)]


def test_failures_of_many_cells_are_one_line() -> None:
    """The same reason in eleven cells is said once, with the first of them; another reason apart."""
    lost = {"status": Status.SKIPPED, "samples_us": [], "median_us": 0.0}
    cells = [cell(m, timed("stock", 1.0), timed("vllm", 0.0, reason="no kernel", **lost)) for m in (1, 2, 3)]
    cells.append(cell(4, timed("vllm", 0.0, reason="no memory", **lost)))
    assert failures(sections(run_of(cells=cells))) == [
        ("skipped", "matmul, vllm: 3 cells, M=1 K=4096 N=4096 first", "no kernel"),
        ("skipped", "matmul, vllm: M=4 K=4096 N=4096", "no memory"),
    ]
