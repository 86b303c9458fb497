"""Run files as pandas data frames: nothing lost, nothing filled in, columns that carry their units."""

from __future__ import annotations

from pathlib import Path

import pandas as pd
import pytest

from nondet.core.runfile import read_run
from nondet.errors import UnknownNameError, UserError
from nondet.export.frames import KINDS, frame, kinds_of, only_kind

EVIDENCE = Path(__file__).resolve().parents[2] / "docs" / "evidence" / "h200"


@pytest.fixture(scope="module")
def matmul():
    """One layer's sweep over every M, measured on an H200."""
    return read_run(EVIDENCE / "matmul-12288x4096.jsonl.gz")


@pytest.fixture(scope="module")
def bench():
    """The timed cells of the H200."""
    return read_run(EVIDENCE / "bench.jsonl.gz")


def test_rows_hold_what_the_run_holds(matmul) -> None:
    """One line a row, in order, with its figures; what a row lacks stays NA."""
    table = frame([matmul], "rows")
    assert list(table["case"]) == [row.case for row in matmul.rows]
    assert list(table["distinct"]) == [row.distinct for row in matmul.rows]
    for line, row in zip(table.itertuples(), matmul.rows, strict=True):
        if row.difference is None:
            assert pd.isna(line.max_ulp)
        else:
            assert line.max_ulp == row.difference.max_ulp
    assert set(table["gpu"]) == {"NVIDIA H200"}


def test_classes_give_back_the_labels(matmul) -> None:
    """A line for every value tried: grouping by label gives the class sizes again."""
    table = frame([matmul], "classes")
    row = next(r for r in matmul.rows if r.distinct == 4)
    mine = table[(table["case"] == row.case) & (table["impl"] == row.impl)]
    assert mine["label"].value_counts().sort_index().tolist() == row.class_sizes
    assert mine["kernels"].str.contains("splitK").any()


def test_cells_have_the_ratio_of_the_reports(bench) -> None:
    """Best stock is 1 by definition, and invariant's ratio is that of the medians."""
    table = frame([bench], "cells")
    cell = bench.cells[0]
    stock = min(t.median_us for t in cell.timed if t.impl.startswith("stock"))
    ours = next(t.median_us for t in cell.timed if t.impl == "invariant")
    line = table[(table["case"] == cell.case) & (table["section"] == cell.section) & (table["impl"] == "invariant")]
    assert line["stock_over_impl"].iloc[0] == pytest.approx(stock / ours, rel=1e-12)


def test_frames_of_several_runs_stand_together(matmul, bench) -> None:
    """Each line names its run, so a join is possible."""
    table = frame([matmul, bench], "rows")
    assert table["run"].nunique() == 2
    assert len(table) == len(matmul.rows) + len(bench.rows)


def test_every_kind_has_its_columns_even_when_empty(matmul) -> None:
    """An empty frame still has the columns that code asks for."""
    assert kinds_of([matmul]) == ["rows", "classes"]
    assert only_kind([matmul]) == "rows"
    for kind, (columns, _) in KINDS.items():
        assert set(columns) <= set(frame([matmul], kind).columns)


def test_an_unknown_kind_and_a_mixture_are_one_line(matmul, bench) -> None:
    """Nobody guesses which table was meant."""
    with pytest.raises(UnknownNameError, match="rows"):
        frame([matmul], "row")
    with pytest.raises(UserError, match="--records"):
        only_kind([matmul, bench])


def test_arms_and_seeds_are_columns() -> None:
    """A server's arms and an axis's values tell completions apart; times are of answers that came."""
    kept = EVIDENCE.parent
    made = frame([read_run(kept / "servers" / "llamacpp" / "sample.jsonl.gz")], "completions")
    assert set(made["arm"]) == {"solo", "cold", "warm", "chunked", "loaded"}
    assert (made["answer_s"] >= made["first_token_s"]).all()
    assert made["cached_tokens"].notna().all()
    axes = read_run(kept / "cpu-xeon" / "axes.jsonl.gz")
    values = frame([axes], "axis-values")
    assert set(values["arm"]) - {""} == set(frame([axes], "completions")["arm"]) == set(frame([axes], "rounds")["arm"])
