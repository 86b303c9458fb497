"""What is concluded from cells: ratios, intervals, noise, means, the worst, the limit, the bits."""

import itertools
import json
import math
import re
from pathlib import Path

import msgspec
import pytest

from nondet.bench import cells
from nondet.bench.cells import plan_cases
from nondet.bench.summary import Comparison, best_stock, check_runs, compare, failures, is_stock, sections
from nondet.cli import main
from nondet.core.operator import Sizes
from nondet.core.records import Cell, Run, Status, Timed
from nondet.core.runfile import read_run
from tests.build import Command, bench_run, cell, failed, row, run_of, timed


def of(found: Cell, impl: str) -> Comparison:
    return next(c for c in compare(found) if c.timed.impl == impl)


def test_the_best_stock_of_a_cell_is_the_baseline() -> None:
    found = cell(1, timed("stock", 20.0), timed("stock-cudnn", 10.0), timed("invariant", 8.0), timed("stocking", 1.0))
    assert getattr(best_stock(found), "impl", "") == "stock-cudnn"
    assert of(found, "invariant").ratio == pytest.approx(1.25)
    assert of(found, "stock").ratio == pytest.approx(0.5)
    # no stock, or no time: no ratio, no interval, and it is in no mean
    lost = timed("invariant", 0.0, status=Status.ERROR, reason="out of memory", samples_us=[])
    for found in (cell(1, timed("invariant", 8.0)), cell(1, timed("stock", 8.0), lost)):
        c = of(found, "invariant")
        assert (c.ratio, c.within_noise, c.draws.size) == (None, False, 0)
    assert [s.summaries for s in sections(run_of(cells=[cell(1, timed("stock", 8.0), lost)]))] == [()]
    cold = cell(1, timed("stock", 16.0))
    assert cold.limit_us is not None
    assert of(cold, "stock").share == pytest.approx(cold.limit_us / 16.0)
    assert of(cell(1, timed("stock", 16.0), cold=False), "stock").share is None
    assert of(cell(1, timed("stock", 16.0), limit_us=None), "stock").share is None
    warm_product = cell(8192, timed("stock", 900.0), cold=False)
    assert warm_product.limited_by == "arithmetic"
    assert of(warm_product, "stock").share is not None


def test_replays_are_compared_in_pairs_and_an_interval_covers_the_noise() -> None:
    """A machine that slows down half-way slows both; one median fell before a step of the clock, one behind it."""
    drift = [1.0 + 0.1 * i for i in range(11)]
    both = [timed(name, 2 * us, samples_us=[us * d for d in drift]) for name, us in (("stock", 10.0), ("mine", 7.5))]
    low, high = of(cell(1, *both), "mine").interval
    assert high - low < 1e-9
    before, after = 1118.0, 1258.0
    stock, mine = [after, after, before, after, before], [after, before, before, after, before]
    c = of(cell(1, timed("stock", after, samples_us=stock), timed("mine", before, samples_us=mine)), "mine")
    assert (c.ratio, c.interval[0]) == (1.0, 1.0)
    c = of(cell(1, timed("stock", 10.0), timed("invariant", 8.0)), "invariant")
    low, high = c.interval
    assert 1.23 < low <= 1.25 <= high < 1.27
    assert not c.within_noise
    steady = timed("stock", 10.0, samples_us=[10.0] * 9), timed("invariant", 8.0, samples_us=[8.0] * 9)
    assert of(cell(1, *steady), "invariant").interval == (1.25, 1.25)
    noisy = [10.0, 12.0, 9.0, 11.0, 10.5, 9.5, 13.0]  # two that scatter around each other, whatever their medians are
    scattered = timed("stock", 10.5, samples_us=noisy), timed("invariant", 10.4, samples_us=noisy[::-1])
    assert of(cell(1, *scattered), "invariant").within_noise


def test_a_section_has_means_the_worst_and_the_slow() -> None:
    cells = [cell(m, timed("stock", 10.0), timed("invariant", us)) for m, us in ((1, 5.0), (8, 20.0), (16, 10.0))]
    (section,) = sections(run_of(cells=cells))
    (summary,) = section.summaries
    assert summary.mean == pytest.approx(1.0)
    assert summary.interval[0] <= 1.0 <= summary.interval[1]
    assert summary.worst.cell.shape["M"] == 8
    assert (summary.slow, summary.failed) == (1, 0)
    assert math.prod(c.ratio or 0 for c in summary.compared) == pytest.approx(1.0)
    lost = {"status": Status.SKIPPED, "samples_us": [], "median_us": 0.0}
    cells = [cell(m, timed("stock", 1.0), timed("vllm", 0.0, reason="no kernel", **lost)) for m in (1, 2, 3)]
    cells.append(cell(4, timed("vllm", 0.0, reason="no memory", **lost)))
    assert failures(sections(run_of(cells=cells))) == [
        ("skipped", "matmul, vllm: 3 cells, M=1 K=4096 N=4096 first", "no kernel"),
        ("skipped", "matmul, vllm: M=4 K=4096 N=4096", "no memory"),
    ]


def test_sections_keep_dtypes_apart_and_their_own_bits() -> None:
    run = bench_run()
    (section,) = sections(run)
    assert [(b.impl, b.one_class, b.groups) for b in section.bits] == [("stock", 0, 3), ("invariant", 3, 3)]
    run.cells.append(cell(1, timed("stock", 1.0), dtype="float16"))
    assert [(s.dtype, len(s.rows)) for s in sections(run)] == [("bfloat16", 6), ("float16", 0)]
    other = run_of(
        row([0, 0], probe="bench", case="matmul K=9 N=9: row 0 of M rows", group="K=9 N=9"),
        failed(probe="bench", case="matmul K=4096 N=4096: row 0", group="K=4096 N=4096", impl="invariant"),
        cells=[cell(1, timed("stock", 1.0), timed("invariant", 1.0))],
    )
    (section,) = sections(other)
    assert [(b.impl, b.one_class, b.groups, b.failed) for b in section.bits] == [("invariant", 0, 0, 1)]


SIZES = (1, 8, 64, 512, 4096)


def five(slower: float = 1.0, only: int | None = None, scatter: float = 0.0) -> Run:
    """Five cells of stock at 10 us and ours at 10 us times `slower`, in all of them or in the one with that M."""

    cells = []
    for m in SIZES:
        us = 10.0 * (slower if only in (None, m) else 1.0)
        wild = {"samples_us": [us * (1 + scatter * (-1) ** i) for i in range(11)]} if scatter else {}
        cells.append(cell(m, timed("stock", 10.0), timed("invariant", us, **wild)))
    return run_of(cells=cells)


def elsewhere(other: Run, **fields: object) -> Run:
    environment = other.header.environment | (fields or {"gpu": "another"})
    return msgspec.structs.replace(other, header=msgspec.structs.replace(other.header, environment=environment))


def test_a_regression_is_named_and_nothing_else_is() -> None:
    """A faster stock is one, too, for the ratio is what is promised; a machine on which both are slow is none."""
    for new in [five(), five(1.03), five(0.5), five(1.08, only=64), five(1.12, only=8, scatter=0.3)]:
        assert check_runs(five(), new).regressions == ()
    (line,) = check_runs(five(), five(1.2, only=64)).regressions
    assert "M=64" in line
    assert "0.833 of stock, and it was 1.000" in line
    (line,) = check_runs(five(), five(1.07)).regressions
    assert "5 cells" in line
    assert "0.935 of stock on average, and it was 1.000" in line
    half = [cell(m, timed("stock", 20.0), timed("invariant", 20.0)) for m in SIZES]
    assert check_runs(five(), run_of(cells=half)).regressions == ()
    stock_alone = [cell(m, timed("stock", 5.0), timed("invariant", 10.0)) for m in SIZES]
    assert len(check_runs(five(), run_of(cells=stock_alone)).regressions) == 6
    # kept runs call layers' products "matmul", and so do their cells: what is computed tells them apart
    renamed = [msgspec.structs.replace(c, section="linear") for c in five(1.2).cells]
    assert len(check_runs(five(), run_of(cells=renamed)).regressions) == 6
    nothing = Timed(impl="invariant", status=Status.ERROR, reason="RuntimeError: no tile")
    broken = run_of(cells=[cell(1, timed("stock", 10.0), nothing)])
    (line,) = check_runs(five(), broken).regressions
    assert "it was timed, and now: RuntimeError: no tile" in line
    assert check_runs(broken, broken).regressions == ()


def test_another_machine_is_not_judged_by_its_speed() -> None:
    """Slow there says nothing of the code; several classes of bits do, wherever they are."""
    check = check_runs(five(), elsewhere(five(3.0)))
    assert check.regressions == ()
    assert any("another" in note for note in check.notes)
    kept, new = (
        run_of(row(labels, probe="bench", case="linear K=8 N=8: row 0 of M rows", impl="invariant"))
        for labels in ((0, 0), (0, 1))
    )
    assert "2 classes of bits, and it was one" in check_runs(kept, elsewhere(new)).regressions[0]
    assert check_runs(new, new).regressions == check_runs(new, kept).regressions == ()


CPU = {"cpu": "one", "aten_cpu_capability": "AVX512", "num_threads": 1}


def on_cpu(other: Run, **fields: object) -> Run:
    cells = [msgspec.structs.replace(c, device="cpu", method="process_time") for c in other.cells]
    return elsewhere(msgspec.structs.replace(other, cells=cells), **(CPU | fields))


def slowed(c: Cell, most: float, least: float) -> Cell:
    """All replays but one so many times slower, and that one less so, in all but stock."""

    def slow(t: Timed) -> Timed:
        samples = [us * most for us in t.samples_us[1:]] + [t.samples_us[0] * least]
        return msgspec.structs.replace(t, samples_us=samples, median_us=t.median_us * most)

    return msgspec.structs.replace(c, timed=[t if is_stock(t.impl) else slow(t) for t in c.timed])


def test_a_coarse_check_sees_a_factor_and_no_less() -> None:
    """Ten times slower in one cell is named; three times everywhere is none; neither is what one replay contradicts."""
    kept = on_cpu(five())
    (line,) = check_runs(kept, on_cpu(five(10.0, only=64)), 4.0).regressions
    assert "M=64" in line
    assert "0.100 of stock, and it was 1.000" in line
    assert check_runs(kept, on_cpu(five(3.0)), 4.0).regressions == ()
    for least, regressions in ((3.0, 0), (6.0, 5)):
        interrupted = run_of(cells=[slowed(c, 10.0, least) for c in five().cells])
        assert len(check_runs(kept, on_cpu(interrupted), 4.0).regressions) == regressions
    for there, judged in [
        ({"cpu": "another"}, True),
        ({"aten_cpu_capability": "AVX2"}, False),
        ({"num_threads": 2}, False),
        ({"cpu": "another", "aten_cpu_capability": "DEFAULT"}, False),
    ]:
        check = check_runs(on_cpu(five()), on_cpu(five(10.0), **there), 4.0)
        assert bool(check.regressions) == judged
        assert any("speed is not judged" in note for note in check.notes) != judged
        plain = check_runs(
            on_cpu(five(), aten_cpu_capability="DEFAULT"), on_cpu(five(10.0), **there | {"cpu": "x"}), 4.0
        )
        assert plain.regressions == ()
    # CPU time leaves out what the clock on the wall counts: a cell by the one is no cell by the other
    wall = msgspec.structs.replace(
        on_cpu(five()), cells=[msgspec.structs.replace(c, device="cpu") for c in five().cells]
    )
    check = check_runs(wall, on_cpu(five(10.0)), 4.0)
    assert check.regressions == ()
    assert "0 of 5 cells are in both runs" in check.notes[0]


ROOT = Path(__file__).parents[2]


def test_the_checks_of_ci_have_their_kept_runs() -> None:
    script = (ROOT / "scripts" / "test.sh").read_text(encoding="utf-8").replace("\\\n", " ")
    commands = re.findall(r'^"\$bin/(?:nondet" bench|python" scripts/host.py) (.+)$', script, re.MULTILINE)
    kernels, host = (line.split() for line in commands)  # of kernels, and of what a call costs the host
    for words, operators in ((kernels, kernels[: kernels.index("--device")]), (host, ["host"])):
        options = {name: words[i + 1] for i, name in enumerate(words) if name in ("--k", "--n", "--check", "--slower")}
        kept, slower = read_run(ROOT / options["--check"]), float(options["--slower"])
        assert kept.header.plan["operators"] == operators
        assert check_runs(kept, kept, slower).regressions == ()
        compared = [place for place in kept.cells if len([c for c in compare(place) if c.ratio is not None]) > 1]
        assert len(compared) == (9 if words is kernels else 14)
        for place in compared[:: 1 if words is kernels else 5]:
            cells = [slowed(c, 10.0, 10.0) if c is place else c for c in kept.cells]
            found = check_runs(kept, msgspec.structs.replace(kept, cells=cells), slower).regressions
            assert len(found) == 1
            assert place.case in found[0]
        if words is kernels:
            rows = tuple(int(words[i + 1]) for i, name in enumerate(words) if name == "--m")
            sizes = Sizes(m=rows, k=int(options["--k"]), n=int(options["--n"]), jigsaw=False)
            assert {c.name for c in plan_cases(operators, sizes, "cpu", None)} == {c.case for c in kept.cells}
            assert {c.method for c in kept.cells} == {"process_time"}


SMALL = ("bench", "linear", "--device", "cpu", "--m", "1", "--m", "8", "--k", "64", "--n", "32")


@pytest.fixture
def run(run: Command, monkeypatch: pytest.MonkeyPatch) -> Command:
    monkeypatch.setattr("nondet.bench.cells.PerfCounter.budget_us", 1.0)
    monkeypatch.setattr("nondet.bench.cells.PerfCounter.replay_us", 1.0)
    monkeypatch.setattr("nondet.bench.cells.COPY_BYTES", {"cpu": 2**20})
    monkeypatch.setattr("nondet.bench.cells.PRODUCT_SIZES", {"cpu": 64})
    return run


def test_a_run_with_reports_and_a_resumed_one_that_measures_the_rest_alone(run: Command) -> None:
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
    for place in run.cells:
        for one in place.timed:
            assert one.kernels, (place.case, one)
            assert 0.5 < one.median_us < 10_000
            assert not (place.cold and place.limit_us) or one.median_us > 0.8 * place.limit_us
    assert {r.distinct for r in run.rows if r.impl == "invariant"} == {1}
