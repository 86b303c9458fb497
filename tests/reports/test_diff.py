"""Two runs side by side: what moved is told, what can't be matched is told, and nothing else is called equal."""

from __future__ import annotations

import json
import re
from io import StringIO
from pathlib import Path

import msgspec
import pytest
from rich.console import Console

from nondet.cli import main
from nondet.core.records import AxisValue, Run, Status
from nondet.core.runfile import write_run
from nondet.diff import RunDiff
from nondet.errors import UnknownNameError
from nondet.reports import diff as diff_html
from tests.build import cell, failed, row, run_of, sampled, timed


def told(diff: RunDiff) -> str:
    console = Console(file=StringIO(), width=2000)
    diff_html.show(diff, ("a", "b"), {}, console, verbose=False, quiet=False)
    return console.file.getvalue()  # type: ignore[attr-defined] # a StringIO


def test_what_moved_what_appeared_and_what_went() -> None:
    before = run_of(
        row([0, 0], case="fixed"), row([0, 0], case="broken"), row([0, 1], case="cured"), row([0, 1, 1], case="border"),
        row([0, 0], case="gone"),
    )  # fmt: skip
    after = run_of(
        row([0, 0], case="fixed"), row([0, 1], case="broken"), row([0, 0], case="cured"), row([0, 0, 1], case="border"),
        row([0, 0], case="new"), row([0, 0], case="fixed", impl="mine:f"),
    )  # fmt: skip
    diff = RunDiff(before, after)
    moved = {change.name.split(", ")[1]: change for change in diff.changes}
    assert set(moved) == {"broken", "cured", "border"}
    assert (moved["broken"].worse, moved["broken"].better) == (True, False)
    assert "identical -> divergent" in moved["broken"].what
    assert moved["cured"].better
    assert "classes end at other values, first at batch size 2" in moved["border"].what
    [kind] = diff.kinds
    assert (kind.matched, kind.same, len(kind.only_a), len(kind.only_b)) == (4, 1, 1, 2)
    text = told(diff)
    assert text.splitlines()[-1] == (
        "1 record got worse in B; 1 record got better in B; 1 record changed otherwise; 1 record unchanged; "
        "not matched: 1 only in A, 2 only in B."
    )
    assert "A run file stores which sizes gave equal bits, not the bits themselves" in text


def test_environments_show_what_differs_alone() -> None:
    a, b = run_of(), run_of()
    b.header.environment.update(torch="2.12.0", cpu_isa=["amx_bf16", "avx2", "sve"], variables={})
    fields = {field["name"]: (field["a"], field["b"]) for field in RunDiff(a, b).environment}
    assert fields == {
        "torch": ("2.11.0+cu130", "2.12.0"),
        "cpu_isa": (["avx512f"], ["sve"]),
        "variables.CUBLAS_WORKSPACE_CONFIG": (":4096:8", None),
    }
    assert "No field of the environments differs." in told(RunDiff(a, a))
    diff = RunDiff(run_of(row([0, 0])), run_of(row([0, 0], device="cpu")))
    assert not diff.compared
    assert told(diff).splitlines()[-1].startswith("no record of A could be compared with one of B")


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> tuple[Run, Run]:
    """A run, and one of the same plan in which the completions that part are others."""
    folder = tmp_path_factory.mktemp("runs")

    def other(impl: str, number: int) -> tuple[list[tuple[int, int]], int]:
        return ([(9, 30)], 0) if impl == "stock" and number % 4 == 1 else ([], 0)

    return sampled(folder, n=20), sampled(folder, n=20, name="after.jsonl", variants=other)


def test_completions_are_compared_by_their_digests(runs: tuple[Run, Run]) -> None:
    stock, invariant = RunDiff(*runs).completions
    assert (stock.impl, stock.pairs, stock.same) == ("stock", 20, False)
    assert [bool(a) + 2 * bool(b) for a, b in stock.tokens.values()].count(3) == 1  # the unparted one
    assert 0 < stock.tokens_alike < 20
    assert stock.traces_alike < stock.tokens_alike
    assert (invariant.same, invariant.traces_alike) == (True, 20)
    text = told(RunDiff(*runs))
    assert "20 completions in each run: the same 1 answer and the same 1 trace in both" in text
    assert "of 20 requests with one name 20 have equal tokens, 20 with equal bits" in text
    first = next(c for c in runs[0].completions if c.impl == "invariant")
    ended = [msgspec.structs.replace(c, finish="eos") if c is first else c for c in runs[0].completions]
    diff = RunDiff(runs[0], msgspec.structs.replace(runs[0], completions=ended))
    assert [c.impl for c in diff.differing] == ["invariant"]
    assert "1 of them ended for another reason with all else equal" in told(diff)
    diff = RunDiff(*runs, impl="stock", against="invariant")
    [group] = diff.completions
    assert (group.impl, group.pairs) == ("stock", 20)
    assert any("compared with those of invariant" in note for note in diff.notes)
    with pytest.raises(UnknownNameError):
        RunDiff(*runs, impl="stok")


def planned(run: Run, **plan: object) -> Run:
    return msgspec.structs.replace(run, header=msgspec.structs.replace(run.header, plan=run.header.plan | plan))


def test_answers_to_other_questions_are_not_compared(runs: tuple[Run, Run]) -> None:
    """Equal digests there would be chance, and other ones no finding: the reason is told in their place."""
    a, b = runs
    for change, reason in [
        ({"max_tokens": 9}, "another max tokens"),
        ({"temperature": 0.7}, "another temperature"),
        ({"prompts": [{"text": "Something else", "tokens": 4}]}, "only A has completions"),
        ({"model": {"name": "m", "weights": "sha256:1"}}, "models have other names"),
    ]:
        diff = RunDiff(a, planned(b, **change))
        assert all(reason in c.reason or "only B" in c.reason for c in diff.completions)
        assert diff.differing == []
        assert "can't be compared" in told(diff).splitlines()[-1]


def test_the_command(runs: tuple[Run, Run], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a, b = (run.source for run in runs)
    page = tmp_path / "d.md"
    assert main(["diff", a, b, "--out", str(page), "--json", "--fail-on", "moved"]) == 3
    data = json.loads(capsys.readouterr().out)
    assert data["completions"][1]["first_divergence"] == {"token": None, "logprob": None}
    assert page.read_text().startswith("# ")
    assert main(["diff", a, a, "--fail-on", "moved"]) == 0
    assert "the most common ones are identical" in " ".join(capsys.readouterr().out.split())
    assert main(["diff", a, b, "--against", "stock"]) == 2
    assert main(["diff", a, b, "--out", "x.pdf"]) == 2
    assert main(["diff", a, b, "--out", str(tmp_path / "d.html"), "--quiet"]) == 0
    html = (tmp_path / "d.html").read_text()
    assert "Changed: " in html
    for line in page.read_text().splitlines()[2:3]:  # the same sentence heads both
        assert line.rstrip(".") in html
    capsys.readouterr()
    assert main(["diff", a, "missing.jsonl"]) == 2
    Path(b).with_name("after.traces.jsonl").rename(tmp_path / "elsewhere")
    capsys.readouterr()
    assert main(["diff", a, b]) == 0
    seen = capsys.readouterr()
    assert "where completions differ is not shown" in seen.err
    assert "1 trace in both" in seen.out


def test_hostile_names_stay_text(tmp_path: Path) -> None:
    name = "<script>\x1b[2J|x`"
    diff = RunDiff(run_of(row([0, 0], case=name)), run_of(row([0, 1], case=name)))
    assert "\x1b" not in told(diff)
    page = diff_html.render(diff, (f"{name} first", f"{name} second"), {})
    for text in (diff_html.markdown(diff, (name, name), {}), page):
        assert "<script>" not in text
        assert "\x1b" not in text
    assert re.search(r'<p class="env">A: &lt;script&gt;\S+ first</p>\n<p class="env">B: \S+ second', page)
    assert '<div class="layout plain">' in page, "as wide as a page: it has no contents"


def test_varied_runs_are_held_against_each_other() -> None:
    value = AxisValue(impl="stock", axis="chunk", value="16", arm="chunk=16", held=True, proven=True, proof="x")
    a, b = run_of(), run_of()
    for run, proven in ((a, True), (b, False)):
        run.axis_values.append(msgspec.structs.replace(value, proven=proven))
    diff = RunDiff(a, b)
    assert [(c.worse, c.better) for c in diff.changes] == [(True, False)]
    assert not diff.held
    assert [(c.worse, c.better) for c in RunDiff(b, a).changes] == [(False, True)]
    assert "axis_values" in diff_html.render(diff, ("a", "b"), {})


def moved(a: Run, b: Run, folder: Path) -> int:
    paths = []
    for name, run in (("a", a), ("b", b)):
        write_run(folder / f"{name}.jsonl", run, force=True)
        paths.append(str(folder / f"{name}.jsonl"))
    return main(["diff", *paths, "--fail-on", "moved", "--quiet"])


def test_failed_ones_are_no_pass(runs: tuple[Run, Run], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = runs[0]
    lost = [
        msgspec.structs.replace(c, status="error", finish="error", trace="", tokens_digest="", reason="HTTP 500")
        for c in run.completions
    ]
    all_failed = msgspec.structs.replace(run, completions=lost)
    one_failed = msgspec.structs.replace(run, completions=[*run.completions[:-1], lost[-1]])
    kinds = ("completions", "rounds", "rows")
    stock = {kind: [r for r in getattr(run, kind) if r.impl == "stock"] for kind in kinds}
    one_impl = msgspec.structs.replace(run, **stock)
    assert moved(run, run, tmp_path) == 0
    assert moved(run, all_failed, tmp_path) == 3
    assert moved(run, one_failed, tmp_path) == 3
    assert moved(one_failed, one_failed, tmp_path) == 0
    assert "more completions failed in B in 1 group" in told(RunDiff(run, one_failed)).splitlines()[-1]
    capsys.readouterr()
    assert moved(planned(run, max_tokens=64), planned(run, max_tokens=65), tmp_path) == 1
    assert "2 of 2 groups of completions could not be compared" in capsys.readouterr().err
    assert moved(run, one_impl, tmp_path) == 1
    assert "1 of 2 groups of completions could not be compared" in capsys.readouterr().err
    assert moved(all_failed, all_failed, tmp_path) == 1


def test_a_row_that_is_measured_no_longer_is_worse(tmp_path: Path) -> None:
    """Skipping a case is no way to pass it, and cases that neither run measured compare nothing."""
    same, parts, skipped, broken = row([0, 0]), row([0, 1]), failed(Status.SKIPPED), failed(Status.ERROR)
    for before, after, code in [
        (same, same, 0), (same, skipped, 3), (parts, skipped, 3), (same, broken, 3), (skipped, same, 1),
        (broken, broken, 1), (broken, skipped, 1),
    ]:  # fmt: skip
        after = msgspec.structs.replace(after, **{name: getattr(before, name) for name in ("case", "inputs", "shape")})
        assert before.key == after.key
        assert moved(run_of(before), run_of(after), tmp_path) == code
        assert not any(change.better for change in RunDiff(run_of(before), run_of(after)).changes)


def test_a_comparison_says_that_the_divergence_went(tmp_path: Path) -> None:
    before = sampled(tmp_path, impls=("stock",))
    quiet = sampled(tmp_path, impls=("stock",), variants=lambda *_: ((), 0), name="after.jsonl")
    pairs = ((before, quiet), (quiet, before), (before, before))
    said, back, same = (diff_html.headline(RunDiff(a, b)) for a, b in pairs)
    assert said.startswith("stock: batch-dependent in A, no divergence observed in B; ")
    assert back.startswith("stock: no divergence observed in A, batch-dependent in B; ")
    assert "in A, " not in same


def test_rows_and_cells_say_what_moved_in_them() -> None:
    a = run_of(row([0, 0], ran=["gemm_64"]))
    after = msgspec.structs.replace(a.rows[0], ran=["gemm_128"])
    after = msgspec.structs.replace(after, worst_error=msgspec.structs.replace(after.worst_error, relative_norm=0.5))
    [change] = RunDiff(a, run_of(after)).changes
    assert change.what[0] == "other kernels ran: gemm_64 -> gemm_128"
    assert "some bits are others" in change.what[1]
    assert not change.worse
    names = [f"module:kernel_{i}" for i in (7, 3, 11, 0, 5, 9, 1, 8, 2, 10, 4, 6)]
    before, noisy, slow = (run_of(cells=[cell(1, *(timed(n, us) for n in names))]) for us in (10.0, 10.01, 20.0))
    assert RunDiff(before, noisy).changes == []
    diff = RunDiff(before, slow)
    [change] = diff.changes
    assert [what.rpartition(": ")[0] for what in change.what] == names
    assert "(2.00 times)" in change.what[0]
    assert diff.worse == 0
