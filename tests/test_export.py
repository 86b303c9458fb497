"""Figures to publish: the same file from the same run, text that stays text, and the machine underneath."""

from __future__ import annotations

import csv
import functools
import json
import os
from pathlib import Path
from statistics import median
from typing import Any
from xml.etree import ElementTree

import msgspec
import pandas as pd
import pytest

from nondet.commands.report import report
from nondet.core.records import Run
from nondet.core.runfile import read_run, write_run
from nondet.errors import UnknownNameError, UserError
from nondet.export.figures import FIGURES, draw, figures_of, save
from nondet.export.frames import KINDS, frame, kinds_of, only_kind
from tests.build import bench_run, h200_sweep, row, run_of, sampled, tiers

EVIDENCE = Path(__file__).resolve().parents[1] / "docs" / "evidence" / "h200"
SOURCE = {
    "class-map": "matmul-12288x4096.jsonl.gz",
    "map": "../cpu/probe-map.jsonl.gz",
    "mismatch": "../cpu/mismatch.jsonl.gz",
    "speed": "bench.jsonl.gz",
    "jigsaw": "bench.jsonl.gz",
    "survival": "sample.jsonl.gz",
    "training": "../cpu/rl.jsonl.gz",
    "tree": "sample.jsonl.gz",
}


@functools.cache
def kept(name: str) -> Run:
    return read_run(EVIDENCE / SOURCE[name])


@functools.cache
def drawn(name: str) -> Any:
    return draw(name, [kept(name)])


@pytest.mark.parametrize("name", tiers(["class-map", "training"], FIGURES))
def test_every_figure_is_drawn_from_a_kept_run(name: str, tmp_path: Path) -> None:
    run = kept(name)
    assert name in figures_of([run])
    pictures = []
    for figure in (drawn(name), draw(name, [run]))[: 1 + (name == "training")]:
        save(figure, tmp_path / "x.svg")
        pictures.append((tmp_path / "x.svg").read_text(encoding="utf-8"))
    assert pictures[0] == pictures[-1]
    assert run.header.environment["gpu" if run.header.environment["gpu"] else "cpu"] in pictures[0]
    assert "stock" in pictures[0].lower()


def test_figures_show_what_their_runs_hold() -> None:
    figure = drawn("class-map")
    names = [label.get_text() for label in figure.axes[0].get_yticklabels()]
    assert [n.split()[0] for n in names] == ["stock"] * 4 + ["invariant"]
    assert "splitKreduce" in names[0]
    said = [t.get_text() for t in drawn("tree").axes[0].texts]
    assert said[:2] == ["Stock kernels", "1,000 requests, 6 different answers"]
    assert said[-4:] == ["Batch-invariant kernels", "1,000 requests, 1 answer", "1,000", said[3]]
    assert sorted(int(text) for text in said[2:14:2]) == [7, 9, 26, 42, 328, 588]

    # a map of two dtypes: at K = 43 bfloat16 changes at M = 2, and invariant, in one line, never does
    narrow, _ = drawn("map").axes
    bars: dict[float, list[tuple[float, float]]] = {}
    for collection in narrow.collections:
        for path in collection.get_paths():
            (left, foot), (right, _) = path.get_extents().get_points()
            bars.setdefault(foot, []).append((round(left), round(right)))
    assert bars[42] == [(0, 198), (198, 1000)]  # log2(2) of log2(33)
    assert bars[64] == [(0, 1000)]
    with pytest.raises(UserError, match="no map of a product"):
        draw("map", [kept("class-map")])
    # a stock that was stopped early, beside an invariant kernel that was repeated to the end
    assert "class-map" in figures_of([run_of(row([0, 1, 2]), row([0] * 20, impl="invariant"))])


@pytest.mark.parametrize("name", tiers(["class-map"], ["speed", "tree"]))
def test_every_svg_is_xml(name: str, tmp_path: Path) -> None:
    """Whatever a run's names hold (tags, $, controls, half characters, U+FFFE), a parser takes the figure."""
    bad = "".join(map(chr, (0, 1, 0x1B, 0x7F, 0x85, 0xD800, 0xFFFE, 0xFFFF))) + "]]>&<script>$\\frac{$</script>"
    change, run = msgspec.structs.replace, read_run(EVIDENCE / SOURCE[name])
    run.header.environment["gpu"] = bad
    for i, r in enumerate(run.rows):
        sets = [[bad + k for k in names] for names in r.kernel_sets]
        run.rows[i] = change(r, impl=bad + r.impl, case=bad + r.case, varied=bad, kernel_sets=sets)
    run.cells[:] = [c for c in run.cells if c.section == run.cells[0].section]
    for i, c in enumerate(run.cells):
        shape = {bad + k: v for k, v in c.shape.items()}
        times = [change(t, impl=t.impl + bad if t.impl == "invariant" else t.impl) for t in c.timed]
        c = change(c, case=bad, section=bad, dtype=bad, shape=shape, timed=times)
        run.cells[i] = change(c, group=bad + c.group, axis=bad + c.axis)
    run.completions[:] = [change(c, impl=bad) for c in run.completions]
    save(draw(name, [run]), tmp_path / "x.svg")
    root = ElementTree.parse(tmp_path / "x.svg").getroot()  # noqa: S314 - drawn a line above
    assert "\ufffd\ufffd\ufffd]]>&<" in "".join(root.itertext())
    assert "<script>" not in (tmp_path / "x.svg").read_text(encoding="utf-8")


def test_an_export_goes_through_no_link_and_leaves_no_scrap(tmp_path_factory: pytest.TempPathFactory) -> None:
    for out in ["rows.csv", "map.svg"]:
        tmp_path = tmp_path_factory.mktemp("case")
        source, there = tmp_path / "run.jsonl", tmp_path / "precious"
        write_run(source, run_of(*h200_sweep()))
        there.write_text("kept")
        scratch = tmp_path / f".{out}.{os.getpid()}{Path(out).suffix}"
        scratch.symlink_to(there)
        report([source], [tmp_path / out])
        (tmp_path / f"link-{out}").symlink_to(there)
        with pytest.raises(UserError, match="is a symbolic link"):
            report([source], [tmp_path / f"link-{out}"], force=True)
        assert there.read_text() == "kept"
        assert {p.name for p in tmp_path.iterdir()} == {scratch.name, f"link-{out}", out, "precious", "run.jsonl"}


def test_no_cell_of_csv_is_a_formula(tmp_path: Path) -> None:
    """A spreadsheet runs what begins with = @ + - or a tab; numbers, and the other formats, stay as they are."""
    run = read_run(EVIDENCE / SOURCE["class-map"])
    names = ["=1+1", "+1", "-1+cmd|' /C calc'!A0", "@SUM(A1)", "\t=1", "\r=1", "\n=1", "\uff1d1", "a\r=1", "1-2"]
    run.rows[:] = [msgspec.structs.replace(run.rows[i % len(run.rows)], impl=name) for i, name in enumerate(names)]
    source = tmp_path / "run.jsonl"
    write_run(source, run)
    for out in ("rows.csv", "rows.json"):
        report([source], [tmp_path / out], records="rows")
    with (tmp_path / "rows.csv").open(newline="", encoding="utf-8") as stream:
        rows = list(csv.DictReader(stream))
    said = [name.replace("\r", "\n") for name in names]  # a bare \r would begin a row of its own
    assert [r["impl"] for r in rows] == [*(f"'{name}" for name in said[:8]), *said[8:]]
    assert {int(r["trials"]) for r in rows} == {r.trials for r in run.rows}
    assert [r["impl"] for r in json.loads((tmp_path / "rows.json").read_text(encoding="utf-8"))] == names


def test_export_writes_tables_and_figures_and_overwrites_nothing(tmp_path: Path) -> None:
    source = tmp_path / "run.jsonl"
    write_run(source, run_of(*h200_sweep()))
    for out in ("rows.csv", "rows.json", "map.png"):
        report([source], [tmp_path / out])
    rows = len(read_run(source).rows)
    assert len(pd.read_csv(tmp_path / "rows.csv")) == len(pd.read_json(tmp_path / "rows.json")) == rows > 1
    assert (tmp_path / "map.png").read_bytes().startswith(b"\x89PNG")
    kept = EVIDENCE / "sample.jsonl.gz"
    for run, out, said in [(source, "rows.csv", "exists"), (source, "r.xlsx", "suffix"), (kept, "s.png", "--figure")]:
        with pytest.raises(UserError, match=said):
            report([run], [tmp_path / out])
    with pytest.raises(UnknownNameError):
        draw("globe", [])
    assert sorted(p.name for p in tmp_path.iterdir()) == ["map.png", "rows.csv", "rows.json", "run.jsonl"]


def test_the_arms_of_a_server_are_not_drawn_as_one_sample(tmp_path: Path) -> None:
    run = sampled(tmp_path, n=8, impls=["stock"])
    assert figures_of([run]) == ["survival", "tree"]
    served = read_run(Path(run.source))
    served.header.plan["endpoint"] = {}
    assert figures_of([served]) == []
    for name in ("survival", "tree"):
        with pytest.raises(UserError, match="these runs hold no completions of one load"):
            draw(name, [served])
    assert len(draw("survival", [served, run]).axes[0].lines) == 1


def test_rows_and_classes_hold_what_the_run_holds() -> None:
    run = kept("class-map")
    table = frame([run], "rows")
    assert list(table["case"]) == [r.case for r in run.rows]
    assert list(table["distinct"]) == [r.distinct for r in run.rows]
    for line, kept_row in zip(table.itertuples(), run.rows, strict=True):
        difference = kept_row.difference
        assert pd.isna(line.max_ulp) if difference is None else line.max_ulp == difference.max_ulp
    assert set(table["gpu"]) == {"NVIDIA H200"}
    row = next(r for r in run.rows if r.distinct == 4)
    table = frame([run], "classes")
    mine = table[(table["case"] == row.case) & (table["impl"] == row.impl)]
    assert mine["label"].value_counts().sort_index().tolist() == row.class_sizes
    assert mine["kernels"].str.contains("splitK").any()
    assert kinds_of([run]) == ["rows", "classes"]
    assert only_kind([run]) == "rows"
    for kind, (columns, _) in KINDS.items():  # an empty frame still has the columns that code asks for
        assert set(columns) <= set(frame([run], kind).columns)


def test_cells_have_the_ratio_of_the_reports() -> None:
    bench = bench_run()
    table = frame([bench], "cells")
    cell = bench.cells[0]
    stock = min((t for t in cell.timed if t.impl.startswith("stock")), key=lambda t: t.median_us)
    ours = next(t for t in cell.timed if t.impl == "invariant")
    pairs = [theirs / mine for theirs, mine in zip(stock.samples_us, ours.samples_us, strict=True)]
    line = table[(table["case"] == cell.case) & (table["section"] == cell.section) & (table["impl"] == "invariant")]
    assert line["stock_over_impl"].iloc[0] == pytest.approx(median(pairs), rel=1e-12)
    both = frame([kept("class-map"), bench], "rows")  # each line names its run, so a join is possible
    assert both["run"].nunique() == 2
    assert len(both) == len(kept("class-map").rows) + len(bench.rows)
    with pytest.raises(UserError, match="--records"):  # nobody guesses which table of a mixture was meant
        only_kind([kept("class-map"), bench])
    with pytest.raises(UnknownNameError, match="rows"):
        frame([bench], "row")


def test_arms_and_seeds_are_columns() -> None:
    folder = EVIDENCE.parent
    made = frame([read_run(folder / "servers" / "llamacpp" / "sample.jsonl.gz")], "completions")
    assert set(made["arm"]) == {"solo", "cold", "warm", "chunked", "loaded"}
    assert (made["answer_s"] >= made["first_token_s"]).all()
    assert made["cached_tokens"].notna().all()
    axes = read_run(folder / "cpu-xeon" / "axes.jsonl.gz")
    values = frame([axes], "axis-values")
    assert set(values["arm"]) - {""} == set(frame([axes], "completions")["arm"]) == set(frame([axes], "rounds")["arm"])
