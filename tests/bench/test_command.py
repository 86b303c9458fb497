"""`nondet bench` on a CPU: a run, its forms of output, resuming, and one clear line for what is wrong."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import pytest

from nondet.bench import cells
from nondet.cli import main
from nondet.core.runfile import read_run
from tests.build import Command

SMALL = ("bench", "linear", "--device", "cpu", "--m", "1", "--m", "8", "--k", "64", "--n", "32")


@pytest.fixture
def run(run: Command, monkeypatch: pytest.MonkeyPatch) -> Command:
    monkeypatch.setattr("nondet.bench.cells.PerfCounter.budget_us", 1.0)
    monkeypatch.setattr("nondet.bench.cells.PerfCounter.replay_us", 1.0)
    monkeypatch.setattr("nondet.bench.cells.COPY_BYTES", {"cpu": 2**20})
    monkeypatch.setattr("nondet.bench.cells.PRODUCT_SIZES", {"cpu": 64})
    return run


def test_a_run_with_reports(run: Command) -> None:
    code, out, err = run(*SMALL, "--out", "r.jsonl", "--report", "r.html", "--report", "r.md")
    assert code == 0, err
    assert "speedup over the best stock: linear" in " ".join(out.split())
    finished = read_run(Path("r.jsonl"))
    assert finished.complete
    assert [c.case for c in finished.cells] == ["M=1 K=64 N=32", "M=8 K=64 N=32"]
    assert finished.header.environment["num_threads"] >= 1
    assert "M=8 K=64 N=32" in Path("r.html").read_text(encoding="utf-8")
    assert "| M=8 K=64 N=32 |" in Path("r.md").read_text(encoding="utf-8")
    _, out, _ = run(*SMALL, "--out", "j.jsonl", "--json")
    types = [json.loads(line)["type"] for line in out.splitlines()]
    assert types == ["header", "limit", "limit", "row", "row", "cell", "cell", "end"]


def test_resuming_measures_the_rest_alone(run: Command) -> None:
    run(*SMALL, "--out", "r.jsonl")
    lines = Path("r.jsonl").read_bytes().splitlines(keepends=True)
    Path("r.jsonl").write_bytes(b"".join(lines[:6]) + lines[6][:20])  # killed within the second cell
    code, _, err = run(*SMALL, "--out", "r.jsonl", "--resume")
    assert code == 0, err
    assert Path("r.jsonl").read_bytes().splitlines(keepends=True)[:6] == lines[:6]
    assert [c.shape["M"] for c in read_run(Path("r.jsonl")).cells] == [1, 8]
    code, _, err = run(*SMALL[:-2], "--n", "16", "--out", "r.jsonl", "--resume")
    assert (code, "other options (sizes)" in err) == (2, True)


def test_a_users_kernel_is_timed_and_gated(run: Command) -> None:
    Path("bench_mine.py").write_text(
        "def linear(x, weight):\n"
        "    half = x.shape[-1] // 2\n"
        "    if x.shape[0] > 1:\n"
        "        return x[:, :half] @ weight[:, :half].T + x[:, half:] @ weight[:, half:].T\n"
        "    return x @ weight.T\n"
    )
    impls = ("--impl", "stock", "--impl", "bench_mine:linear")
    code, out, _ = run(*SMALL, *impls, "--out", "r.jsonl", "--fail-on", "divergent", "-v")
    assert code == 3
    assert "one class 0 of 1 weight shape" in " ".join(out.split())


def test_a_kept_run_is_a_gate(run: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    ticks = itertools.count()  # a clock that no neighbour of this process moves: each replay takes a millisecond
    monkeypatch.setattr(cells, "CLOCKS", dict.fromkeys(("wall", "cpu"), lambda: next(ticks) * 1e-3))
    for factor, expected, coarse in [(0.01, 3, ("--clock", "cpu", "--slower", "4")), (0.01, 3, ()), (100.0, 0, ())]:
        assert run(*SMALL, *coarse[:2], "--out", "kept.jsonl", "--force")[0] == 0
        records = [json.loads(line) for line in Path("kept.jsonl").read_text(encoding="utf-8").splitlines()]
        for entry in (t for r in records if r["type"] == "cell" for t in r["timed"] if t["impl"] == "invariant"):
            entry["samples_us"] = [us * factor for us in entry["samples_us"]]
            entry.update({name: entry[name] * factor for name in ("median_us", "low_us", "high_us")})
        Path("kept.jsonl").write_text("".join(json.dumps(r) + "\n" for r in records), encoding="utf-8")
        code, _, err = run(*SMALL, *coarse, "--out", "new.jsonl", "--force", "--check", "kept.jsonl")
        assert code == expected, err
        assert "2 of 2 cells are in both runs" in err
        assert ("regression: linear M=8 K=64 N=32 float32, invariant" in err) == (expected == 3)


def test_a_kept_run_of_other_sizes_is_one_line(run: Command) -> None:
    """Said before anything is measured: a gate that compares nothing would always be open."""
    assert run(*SMALL, "--out", "kept.jsonl")[0] == 0
    code, _, err = run("bench", "mean", "--device", "cpu", "--check", "kept.jsonl", "--out", "new.jsonl")
    assert (code, "none of the cells" in err, Path("new.jsonl").exists()) == (2, True, False)
    assert run(*SMALL, "--check", "missing.jsonl", "--out", "new.jsonl")[0] == 2
    code, _, err = run(*SMALL, "--clock", "cpu", "--check", "kept.jsonl", "--out", "new.jsonl")
    assert (code, "none of the cells" in err, "process_time" in err) == (2, True, True)


@pytest.mark.gpu
def test_a_gpu_is_timed_by_graphs(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    argv = ["bench", "linear", "rms-norm", "--m", "1", "--m", "64", "--k", "4096", "--n", "4096", "--out"]
    assert main([*argv, str(tmp_path / "r.jsonl")]) == 0, capsys.readouterr().err
    run = read_run(tmp_path / "r.jsonl")
    assert {(c.section, c.method) for c in run.cells} == {("linear", "cuda graph"), ("rms_norm", "cuda graph")}
    for cell in run.cells:
        for timed in cell.timed:
            assert timed.kernels, (cell.case, timed)
            assert 0.5 < timed.median_us < 10_000
            assert not (cell.cold and cell.limit_us) or timed.median_us > 0.8 * cell.limit_us
    assert {r.distinct for r in run.rows if r.impl == "invariant"} == {1}
