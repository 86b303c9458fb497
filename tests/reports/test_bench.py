"""Bench runs in reports: tables, sentences, plots; in every format, whatever the names are."""

from __future__ import annotations

from nondet.bench.summary import sections
from nondet.core.records import Run, Status
from nondet.reports import bench, html, markdown
from nondet.reports.content import problems
from nondet.reports.document import plain
from tests.build import cell, limits, run_of, timed
from tests.reports.test_html import check
from tests.reports.test_terminal import flat, printed


def cells_of(run: Run) -> list[list[str]]:
    return [[plain(text) for text in row] for row in bench.cell_table(sections(run)[0]).rows]


def bench_of(*cells: object) -> Run:
    return run_of(cells=list(cells), limits=limits())


def test_noise_is_said() -> None:
    noisy = [10.0, 12.0, 9.0, 11.0, 10.5, 9.5, 13.0]
    run = bench_of(cell(1, timed("stock", 10.5, samples_us=noisy), timed("invariant", 10.4, samples_us=noisy[::-1])))
    assert "1.00~" in printed(run)
    assert "within noise: the interval of the ratio holds 1" in printed(run)
    assert "(noise)" in markdown.render([run])
    assert "(noise)" in html.render([run])
    assert "noise" not in printed(bench_of(cell(1, timed("stock", 20.0), timed("invariant", 10.0))))


def test_a_cell_names_the_best_stock_and_the_kernels() -> None:
    """One best stock needs no name; what the profiler did not see is never called the same."""
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


def test_what_was_not_timed_is_a_problem() -> None:
    lost = timed("invariant", 0.0, status=Status.ERROR, reason="OutOfMemoryError: 3 GiB", samples_us=[])
    run = bench_of(cell(1, timed("stock", 8.0), lost))
    assert [(p.kind, p.name, p.reason) for p in problems(run)] == [
        ("failed", "matmul, invariant: M=1 K=4096 N=4096", "OutOfMemoryError: 3 GiB")
    ]
    for text in (flat(printed(run)), markdown.render([run]), html.render([run])):
        assert "OutOfMemoryError: 3 GiB" in text
    check(html.render([run]))
