"""Bench runs in reports: tables, sentences, plots; in every format, whatever the names are."""

from __future__ import annotations

import re

from nondet.bench.summary import sections
from nondet.core.operator import tile_borders
from nondet.core.records import Run, Status
from nondet.reports import bench, html, markdown
from nondet.reports.bench import bench_plots
from nondet.reports.content import build, problems
from nondet.reports.document import plain
from nondet.reports.plots import Plot, Points
from tests.build import bench_run, cell, limits, run_of, timed
from tests.reports.test_html import check
from tests.reports.test_terminal import flat, printed


def cells_of(run: Run) -> list[list[str]]:
    return [[plain(text) for text in row] for row in bench.cell_table(sections(run)[0]).rows]


def bench_of(*cells: object) -> Run:
    return run_of(cells=list(cells), limits=limits())


def test_the_headline_is_the_speed_and_the_bits() -> None:
    (section,) = build([bench_run()]).runs
    ours, rival = section.headline.split(". ")
    assert re.fullmatch(
        r"invariant, speedup over the best stock: matmul \d\.\d\d; one class of bits in 3 of 3 groups", ours
    )
    assert re.fullmatch(r"batch-invariant-ops, speedup over the best stock: matmul 0\.\d\d", rival)
    assert "33 cells" in section.facts
    assert build([bench_of(cell(1, timed("stock", 1.0)))]).runs[0].headline == "1 cell timed, with nothing beside stock"


def test_noise_is_said() -> None:
    noisy = [10.0, 12.0, 9.0, 11.0, 10.5, 9.5, 13.0]
    run = bench_of(cell(1, timed("stock", 10.5, samples_us=noisy), timed("invariant", 10.4, samples_us=noisy[::-1])))
    assert "1.00~" in printed(run)
    assert "within noise: the interval of the ratio holds 1" in printed(run)
    assert "(noise)" in markdown.render([run])
    assert "(noise)" in html.render([run])
    assert "noise" not in printed(bench_of(cell(1, timed("stock", 20.0), timed("invariant", 10.0))))


def test_a_cell_names_the_best_stock_and_the_kernels() -> None:
    """ "Best stock" says which it was; with one of them the name says nothing. A library that both sides call is named
    once; what the profiler did not see is never called the same."""
    ours = timed("invariant", 8.0)
    (line,) = cells_of(bench_of(cell(1, timed("stock", 20.0), timed("stock-cudnn", 10.0), ours)))
    assert line[:4] == ["M=1 K=4096 N=4096", "10.00 (stock-cudnn)", "8.00", "1.25"]
    assert cells_of(bench_of(cell(1, timed("stock", 20.0), ours)))[0][1] == "20.00"
    for stock, mine, said in (
        (["nvjet_a"], ["nvjet_a"], "nvjet_a; stock: the same"),
        (["nvjet_b"], ["nvjet_a"], "nvjet_a; stock: nvjet_b"),
        ([], ["nvjet_a"], "nvjet_a; stock: launcher"),
        ([], [], "launcher; stock: launcher"),
    ):
        both = [timed(i, 2.0, kernels=k, ran=["launcher"]) for i, k in (("stock", stock), ("mine:f", mine))]
        assert cells_of(bench_of(cell(1, *both)))[0][-1] == said


def curves(plot: Plot) -> dict[int | None, Points]:
    """The lines of a plot, by the number of their implementation."""
    return {mark.impl: mark.points for mark in plot.marks if mark.style == "curve"}


def test_the_plot_has_a_panel_for_each_weight_shape() -> None:
    (section,) = sections(bench_run(tile_borders(1, 4096)))
    plots = bench_plots(section)
    assert plots is not None
    assert [name for name, _ in plots.impls] == ["best stock", "invariant", "batch-invariant-ops"]
    assert [p.title for p in plots.panels] == ["K=4096 N=6144", "K=12288 N=4096", "K=8192 N=8192"]
    for panel in plots.panels:
        shares, ratios = panel.plots
        assert (list(curves(shares)), list(curves(ratios))) == ([0, 1, 2], [1, 2])
        limit = next(mark.points[0][1] for mark in shares.marks if mark.style == "limit")
        assert 0.9 < limit < 1
        for points in (*curves(shares).values(), *curves(ratios).values()):
            across, up = zip(*points, strict=True)
            assert list(across) == sorted(across)
            assert (across[0], across[-1]) == (0.0, 1.0)
            assert all(0 <= y <= 1 for y in up)
        assert max(y for points in curves(shares).values() for _, y in points) <= limit
        assert [t.text for t in panel.ticks] == ["1", "4", "16", "64", "256", "1,024", "4,096"]
    assert bench_plots(sections(bench_run((1, 8, 16)))[0]) is None, "three points are a table"


def test_what_was_not_timed_is_a_problem() -> None:
    lost = timed("invariant", 0.0, status=Status.ERROR, reason="OutOfMemoryError: 3 GiB", samples_us=[])
    run = bench_of(cell(1, timed("stock", 8.0), lost))
    assert [(p.kind, p.name, p.reason) for p in problems(run)] == [
        ("failed", "matmul, invariant: M=1 K=4096 N=4096", "OutOfMemoryError: 3 GiB")
    ]
    for text in (flat(printed(run)), markdown.render([run]), html.render([run])):
        assert "OutOfMemoryError: 3 GiB" in text
    check(html.render([run]))
