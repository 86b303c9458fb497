"""Exit codes hang on verdicts: a gate opens on what was compared and found good, and on nothing else."""

from __future__ import annotations

from pathlib import Path

import pytest

from nondet.core.records import Row, Run, Status
from nondet.testing.assertions import assert_no_fault
from nondet.verdict.gate import exit_code, judge
from tests.reports.factory import failed, row, run_of, sampled

WRONG = row([0, 0], status=Status.WRONG, reason="the result is float32, not bfloat16")


@pytest.mark.parametrize(
    ("rows", "code"),
    [
        ([row([0, 0])], 0),
        ([row([0, 1])], 3),
        ([row([0, 1], replays=0)], 3),
        ([WRONG], 3),
        ([row([0, 0]), WRONG], 3),
        ([row([0, 1], varied="split")], 0),
        ([row([0, 1], varied="split", claims_invariance=True)], 3),
        ([row([0, 1], varied="run", operator="split_k"), row([0, 0])], 0),
        ([row([0, 0]), failed()], 1),
        ([row([0, 1]), failed()], 3),
        ([failed(Status.SKIPPED, "no such kernel")], 1),
        ([row([0])], 1),
        ([], 1),
    ],
)
def test_the_code_follows_the_verdicts(rows: list[Row], code: int) -> None:
    """3 on divergence and on wrong results, 1 on no answer, with one line; 0 is for what was compared and agreed."""
    got, line = exit_code(run_of(*rows), "divergent")
    assert got == code
    assert bool(line) == (code == 1)
    assert "\n" not in line
    measured = not rows or any(r.measured for r in rows)
    assert exit_code(run_of(*rows), None)[0] == (0 if measured else 1)


def test_a_run_that_was_killed_is_no_pass() -> None:
    """What it did not come to may have diverged; what it did come to is a fault all the same."""
    assert exit_code(run_of(row([0, 0]), complete=False), "divergent") == (
        1,
        "--fail-on divergent can't be answered: the run did not come to its end.",
    )
    assert exit_code(run_of(row([0, 1]), complete=False), "divergent") == (3, "")
    assert exit_code(run_of(row([0, 0]), complete=False), None) == (0, "")
    with pytest.raises(AssertionError, match="did not come to its end"):
        assert_no_fault(run_of(row([0, 0]), complete=False))


def test_an_implementation_that_was_asked_for_and_never_ran_keeps_the_gate_shut() -> None:
    """Stock agreeing says nothing of mine:kernel; a backend that came along with stock may be missing."""
    skipped = {"status": Status.SKIPPED, "reason": "no kernel"}
    assert exit_code(run_of(row([0, 0]), failed(impl="mine:kernel", **skipped)), "divergent") == (
        1,
        "--fail-on divergent can't be answered: nothing was compared for mine:kernel.",
    )
    along = run_of(row([0, 0]), failed(impl="stock-cudnn", **skipped))
    assert exit_code(along, "divergent") == (0, "")
    along.header.plan["impls"] = ["stock", "stock-cudnn"]
    assert exit_code(along, "divergent")[0] == 1


def test_a_sampled_run_is_judged_by_its_completions(tmp_path: Path) -> None:
    """Parting traces are 3, equal ones 0; a single completion compares nothing, though its round was run twice."""
    run = sampled(tmp_path)
    assert exit_code(run, "divergent") == (3, "")
    clean = sampled(tmp_path, impls=("invariant",), name="clean.jsonl")
    assert exit_code(clean, "divergent") == (0, "")
    lone = sampled(tmp_path, impls=("invariant",), n=1, alone=True, name="lone.jsonl")
    assert exit_code(lone, "divergent") == (1, "--fail-on divergent can't be answered: nothing was compared.")


def test_the_evidence_that_is_kept_can_still_be_judged() -> None:
    """Run files from before schema 3 read, and their fields are filled in from the names they used."""
    from nondet.core.runfile import read_run

    folder = Path(__file__).parents[2] / "docs" / "evidence"
    findings = {}
    old = ("cpu/probes", "cpu/sample", "cpu/families", "h200/sample-no-cudnn")
    for name in (*old, "h200/probes", "h200/sample"):
        run: Run = read_run(folder / f"{name}.jsonl.gz")
        assert (run.header.schema < 3) == (name in old)
        findings[name] = {v.impl: [f.value for f in v.findings] for v in judge(run)}
        for r in run.rows:
            assert r.role
            assert r.axis
            assert r.claims_invariance == (r.impl == "invariant" or r.impl.startswith("invariant:"))
    assert findings["h200/sample"] == {"stock": ["batch-dependent"], "invariant": ["no divergence observed"]}
    assert findings["cpu/sample"] == findings["h200/sample"]
    stock = findings["h200/probes"]["stock"]  # atomics and cuDNN's decode attention; cuBLAS; rows at other addresses
    assert stock[:2] == ["run-to-run nondeterministic", "batch-dependent"]
    for name in ("cpu/probes", "h200/probes", "h200/sample-no-cudnn"):
        assert findings[name]["invariant"] == ["no divergence observed"]
