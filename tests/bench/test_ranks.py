"""Cells over ranks, on two processes: times of the slowest rank, bits of row 0 beside every number of rows."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from nondet.bench import ranks
from nondet.cli import main
from nondet.core.runfile import read_run
from nondet.ranks.group import RankError, RankGroup

SMALL = ("--device", "cpu", "--m", "1", "--m", "16", "--n", "64", "--k", "64")


def _run(*argv: str) -> int:
    return main(["bench", *argv, "--quiet"])


def test_sums_and_layers_over_two_ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every cell has times of all its implementations, and what claims one class of bits has one."""
    monkeypatch.chdir(tmp_path)
    assert _run("all-reduce", "row-parallel", *SMALL, "--out", "r.jsonl", "--report", "r.md") == 0
    run = read_run(tmp_path / "r.jsonl")
    assert run.complete
    assert [(c.operator, c.shape["M"], c.shape["ranks"]) for c in run.cells] == [
        ("all_reduce", 1, 2), ("all_reduce", 16, 2), ("row_parallel", 1, 2), ("row_parallel", 16, 2)
    ]  # fmt: skip
    for cell in run.cells:
        wanted = {"stock", "invariant"} | ({"rank-free"} if cell.operator == "row_parallel" else set())
        assert {t.impl for t in cell.timed} == wanted
        assert all(t.status == "timed" and len(t.samples_us) == 15 for t in cell.timed)
    assert [c.bus_bytes for c in run.cells] == [64 * 2, 16 * 64 * 2, 0, 0], "2 (W - 1) / W of a bfloat16 message"
    assert {(r.operator, r.impl): r.distinct for r in run.rows if r.impl != "stock"} == {
        ("all_reduce", "invariant"): 1, ("row_parallel", "invariant"): 1, ("row_parallel", "rank-free"): 1
    }  # fmt: skip
    assert "B/s)" in (tmp_path / "r.md").read_text(encoding="utf-8")


def test_a_resumed_run_measures_what_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run killed before its last row is completed, and its cells stay as they are."""
    monkeypatch.chdir(tmp_path)
    assert _run("all-reduce", *SMALL[:-2], "--out", "r.jsonl") == 0
    lines = Path("r.jsonl").read_bytes().splitlines(keepends=True)
    assert [json.loads(line)["type"] for line in lines] == ["header", "cell", "cell", "row", "row", "end"]
    Path("r.jsonl").write_bytes(b"".join(lines[:4]))
    assert _run("all-reduce", *SMALL[:-2], "--out", "r.jsonl", "--resume") == 0
    again = Path("r.jsonl").read_bytes().splitlines(keepends=True)
    assert again[:4] == lines[:4]
    assert [json.loads(line)["type"] for line in again[4:]] == ["row", "end"]


def test_a_rank_that_dies_is_an_error_in_its_cells(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The run goes on to its end, with the reason in each entry."""
    monkeypatch.chdir(tmp_path)

    def dies(self: RankGroup, *_: object, **__: object) -> list[object]:
        raise RankError("rank 1 of 2 was killed by SIGKILL (in a test)")

    monkeypatch.setattr(RankGroup, "ask", dies)
    _run("all-reduce", *SMALL[:-2], "--out", "r.jsonl")
    run = read_run(tmp_path / "r.jsonl")
    assert {t.reason for c in run.cells for t in c.timed} == {"rank 1 of 2 was killed by SIGKILL (in a test)"}
    assert {r.status for r in run.rows} == {"error"}


def test_ranks_without_anything_over_ranks_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    """One line, before anything starts; and ranks that make no group."""
    assert main(["bench", "linear", "--ranks", "2"]) == 2
    assert "--ranks 2 is for all-reduce and row-parallel" in capsys.readouterr().err
    assert main(["bench", "all-reduce", "--device", "cpu", "--ranks", "1"]) == 2
    assert "no group of ranks" in capsys.readouterr().err


def test_ranks_agree_where_every_comparison_does(monkeypatch: pytest.MonkeyPatch) -> None:
    """Row 0 is compared as bits are everywhere: any NaN is a NaN, and -0 is not 0."""

    def row(*words: int) -> str:
        given = torch.tensor([words], dtype=torch.int32).view(torch.float32)
        monkeypatch.setattr(ranks, "_prepare", lambda *_: (lambda x: given, [(given,)]))
        (case,) = ranks.plan_ranks(["row-parallel"], [2], "cpu", ["float32"], m=[1], n=2, k=2)
        return ranks.time_cell(case, ["stock"], "cpu", 0)["stock"].row

    monkeypatch.setattr(ranks, "_together", lambda device: None)
    assert row(0x7FC00000, 1) == row(0x7FC00001, 1)
    assert row(0, 1) != row(-(2**31), 1)
