"""`nondet diagnose` on the command line: bad input is one line before anything is measured; the gate's codes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from nondet.cli import main
from nondet.core.records import Diagnosis, TraceVerdict
from nondet.verdict.gate import exit_code
from tests.reports.factory import failed, row, run_of


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["--n", "1"], "--n 1 makes no sense"),
        (["--load", "none"], "every request would run solo"),
        (["--load", "graphs=on"], "can't be diagnosed"),
        (["--load", "others=0,targets=1"], "every request would run solo"),
        (["--prompt", " "], "the prompt is empty"),
        (["--out", "x.txt"], "not a .jsonl file"),
        (["/no/such/model"], "there is no model folder"),
        (["--fail-on", "anything"], "unknown --fail-on"),
    ],
)
def test_bad_input_is_one_line(
    arguments: list[str],
    reason: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Exit 2, what and what to try, and no run file is left behind."""
    monkeypatch.chdir(tmp_path)
    assert main(["diagnose", *arguments]) == 2
    error = capsys.readouterr().err
    assert reason in error
    assert len(error.strip().splitlines()) == 1
    assert not list(tmp_path.rglob("*.jsonl"))


@pytest.mark.parametrize(
    ("finding", "code"),
    [("batch-dependent", 3), ("a defect", 3), ("unknown", 1), ("divergent", 3), ("no divergence observed", 0)],
)
def test_the_gate_opens_on_a_clean_verdict_alone(finding: str, code: int) -> None:
    """3 where something is wrong, 1 and why where the question has no answer; without --fail-on always 0."""
    run = run_of(diagnoses=[Diagnosis(finding=finding, whether="As said.")])
    assert exit_code(run, None) == (0, "")
    got, line = exit_code(run, "divergent")
    assert (got, bool(line)) == (code, code == 1)


@pytest.mark.parametrize(
    "concluded",
    [
        {"diagnoses": [Diagnosis(finding="no divergence observed", whether="None.")]},
        {"trace_verdicts": [TraceVerdict(finding="no divergence observed", culprits=[], families=None, sentences=[])]},
    ],
)
def test_a_diagnosis_of_half_a_run_opens_no_gate(concluded: dict[str, Any]) -> None:
    """Cut short, or with a case that failed, a clean diagnosis or trace is no pass; the whole one is."""
    whole = run_of(row([0, 0]), **concluded)
    assert exit_code(whole, "divergent") == (0, "")
    short, line = exit_code(run_of(row([0, 0]), complete=False, **concluded), "divergent")
    assert (short, line) == (1, "--fail-on divergent can't be answered: the run did not come to its end.")
    holed, line = exit_code(run_of(row([0, 0]), failed(), **concluded), "divergent")
    assert (holed, line) == (1, "--fail-on divergent can't be answered: 1 case failed.")
