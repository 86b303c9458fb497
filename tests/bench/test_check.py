"""`--check`: what regressed beyond noise is said, and nothing else is; another machine is not judged by its speed."""

from __future__ import annotations

import re
from pathlib import Path

import msgspec
import pytest

from nondet.bench.cells import plan_cases
from nondet.bench.summary import cells_of, check_runs, compare, is_stock
from nondet.core.operator import BenchSizes
from nondet.core.records import Cell, Row, Run, Status, Timed
from nondet.core.runfile import read_run
from tests.reports.factory import cell, row, run_of, timed

SIZES = (1, 8, 64, 512, 4096)


def run(slower: float = 1.0, only: int | None = None, scatter: float = 0.0, **fields: object) -> Run:
    """Five cells of stock at 10 us and ours at 10 us times `slower`, in all of them or in the one with that M."""

    def ours(m: int) -> Timed:
        us = 10.0 * (slower if only in (None, m) else 1.0)
        wild = [us * (1 + scatter * (-1) ** i) for i in range(11)] if scatter else None
        return timed("invariant", us, **({"samples_us": wild} if wild else {}))

    cells = [cell(m, timed("stock", 10.0), ours(m)) for m in SIZES]
    return run_of(cells=cells, **fields)


def elsewhere(other: Run, **fields: object) -> Run:
    environment = other.header.environment | (fields or {"gpu": "another"})
    return msgspec.structs.replace(other, header=msgspec.structs.replace(other.header, environment=environment))


@pytest.mark.parametrize("new", [run(), run(1.03), run(0.5), run(1.08, only=64), run(1.12, only=8, scatter=0.3)])
def test_what_is_no_regression(new: Run) -> None:
    """Equal, within the margins, faster, or no further than a noisy cell scatters."""
    assert check_runs(run(), new).regressions == ()


def test_one_slow_cell_is_named() -> None:
    """A fifth in one cell is one line with both ratios, whatever the others do."""
    (line,) = check_runs(run(), run(1.2, only=64)).regressions
    assert "M=64" in line
    assert "0.833 of stock, and it was 1.000" in line


def test_a_little_everywhere_is_a_regression_of_the_section() -> None:
    """Seven percent is within a cell's margin, and beyond that of five cells together."""
    (line,) = check_runs(run(), run(1.07)).regressions
    assert "5 cells" in line
    assert "0.935 of stock on average, and it was 1.000" in line


def test_a_faster_stock_is_a_regression_too() -> None:
    """The ratio is what is promised; a machine on which both are slow is none."""
    half = [cell(m, timed("stock", 20.0), timed("invariant", 20.0)) for m in SIZES]
    assert check_runs(run(), run_of(cells=half)).regressions == ()
    stock_alone = [cell(m, timed("stock", 5.0), timed("invariant", 10.0)) for m in SIZES]
    assert len(check_runs(run(), run_of(cells=stock_alone)).regressions) == 6


def test_sections_may_be_called_otherwise() -> None:
    """Kept runs call layers' products "matmul", and so do their cells: what is computed tells them apart."""
    renamed = [msgspec.structs.replace(c, section="linear") for c in run(1.2).cells]
    assert len(check_runs(run(), run_of(cells=renamed)).regressions) == 6


def test_another_machine_is_not_judged_by_its_speed() -> None:
    """Slow there says nothing of the code; several classes of bits do, wherever they are."""
    check = check_runs(run(), elsewhere(run(3.0)))
    assert check.regressions == ()
    assert any("another" in note for note in check.notes)
    kept, new = bits(Status.IDENTICAL, (0, 0)), bits(Status.DIVERGENT, (0, 1))
    parted = check_runs(run_of(kept), elsewhere(run_of(new)))
    assert "2 classes of bits, and it was one" in parted.regressions[0]
    assert check_runs(run_of(new), run_of(new)).regressions == ()
    assert check_runs(run_of(new), run_of(kept)).regressions == ()


def bits(status: str, labels: tuple[int, ...]) -> Row:
    return row(labels, probe="bench", case="linear K=8 N=8: row 0 of M rows", impl="invariant", status=status)


def test_what_fails_now_is_a_regression() -> None:
    """No time is worse than a bad one; what never had a time can't lose it."""
    nothing = Timed(impl="invariant", status=Status.ERROR, reason="RuntimeError: no tile")
    broken: list[Cell] = [cell(1, timed("stock", 10.0), nothing)]
    (line,) = check_runs(run(), run_of(cells=broken)).regressions
    assert "it was timed, and now: RuntimeError: no tile" in line
    assert check_runs(run_of(cells=broken), run_of(cells=broken)).regressions == ()


CPU = {"cpu": "one", "aten_cpu_capability": "AVX512", "num_threads": 1}


def on_cpu(other: Run, **fields: object) -> Run:
    """The same cells on a CPU."""
    cells = [msgspec.structs.replace(c, device="cpu", method="process_time") for c in other.cells]
    return elsewhere(msgspec.structs.replace(other, cells=cells), **(CPU | fields))


def interrupted(other: Run, most: float, least: float) -> Run:
    """Ours with all replays but one so many times slower, and that one less so."""

    def slowed(t: Timed) -> Timed:
        samples = [us * most for us in t.samples_us[1:]] + [t.samples_us[0] * least]
        return msgspec.structs.replace(t, samples_us=samples, median_us=t.median_us * most)

    cells = [
        msgspec.structs.replace(c, timed=[slowed(t) if t.impl == "invariant" else t for t in c.timed])
        for c in other.cells
    ]
    return msgspec.structs.replace(other, cells=cells)


def test_a_coarse_check_sees_a_factor_and_no_less() -> None:
    """Ten times slower in one cell is named; three times everywhere is none; neither is what one replay contradicts."""
    kept = on_cpu(run())
    (line,) = check_runs(kept, on_cpu(run(10.0, only=64)), 4.0).regressions
    assert "M=64" in line
    assert "0.100 of stock, and it was 1.000" in line
    assert check_runs(kept, on_cpu(run(3.0)), 4.0).regressions == ()
    assert check_runs(kept, on_cpu(interrupted(run(), 10.0, 3.0)), 4.0).regressions == ()
    assert len(check_runs(kept, on_cpu(interrupted(run(), 10.0, 6.0)), 4.0).regressions) == 5


@pytest.mark.parametrize(
    ("there", "judged"),
    [
        ({"cpu": "another"}, True),
        ({"aten_cpu_capability": "AVX2"}, False),
        ({"num_threads": 2}, False),
        ({"cpu": "another", "aten_cpu_capability": "DEFAULT"}, False),
    ],
)
def test_a_coarse_check_is_held_where_vector_instructions_are_the_same(there: dict[str, object], judged: bool) -> None:
    """Another CPU of the same kind excuses no factor of ten; other instructions or threads may, and that is said."""
    check = check_runs(on_cpu(run()), on_cpu(run(10.0), **there), 4.0)
    assert bool(check.regressions) == judged
    assert any("speed is not judged" in note for note in check.notes) != judged
    plain = check_runs(on_cpu(run(), aten_cpu_capability="DEFAULT"), on_cpu(run(10.0), **there | {"cpu": "x"}), 4.0)
    assert plain.regressions == ()


def test_two_clocks_are_not_compared() -> None:
    """CPU time leaves out what the clock on the wall counts: a cell by the one is no cell by the other."""
    wall = msgspec.structs.replace(on_cpu(run()), cells=[msgspec.structs.replace(c, device="cpu") for c in run().cells])
    check = check_runs(wall, on_cpu(run(10.0)), 4.0)
    assert check.regressions == ()
    assert "0 of 5 cells are in both runs" in check.notes[0]


ROOT = Path(__file__).parents[2]


def ci_command() -> list[str]:
    """The words of CI's check of speed."""
    script = (ROOT / "scripts" / "test.sh").read_text(encoding="utf-8").replace("\\\n", " ")
    (line,) = re.findall(r'^"\$bin/nondet" (bench .+)$', script, re.MULTILINE)
    return line.split()


def test_the_check_of_ci_has_its_kept_run() -> None:
    """Every cell that CI times is in the run that it is held against, and any of them ten times slower shuts it."""
    words = ci_command()
    options = {name: words[i + 1] for i, name in enumerate(words) if name in ("--k", "--n", "--check", "--slower")}
    kept = read_run(ROOT / options["--check"])
    rows = tuple(int(words[i + 1]) for i, name in enumerate(words) if name == "--m")
    sizes = BenchSizes(m=rows, k=int(options["--k"]), n=int(options["--n"]), jigsaw=False)
    cases = plan_cases(words[1 : words.index("--device")], sizes, "cpu", None)
    assert {c.name for c in cases} == {c.case for c in kept.cells}
    assert len(cells_of(kept)) == len(cases) == 9
    assert {c.method for c in kept.cells} == {"process_time"}
    assert check_runs(kept, kept, float(options["--slower"])).regressions == ()
    for place in kept.cells:
        assert any(c.ratio is not None and not is_stock(c.timed.impl) for c in compare(place))
        slow = [
            msgspec.structs.replace(t, samples_us=[10 * us for us in t.samples_us], median_us=10 * t.median_us)
            if not is_stock(t.impl) else t
            for t in place.timed
        ]  # fmt: skip
        slowed = [msgspec.structs.replace(c, timed=slow) if c is place else c for c in kept.cells]
        found = check_runs(kept, msgspec.structs.replace(kept, cells=slowed), float(options["--slower"])).regressions
        assert len(found) == 1
        assert place.case in found[0]
