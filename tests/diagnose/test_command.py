"""`nondet diagnose` on the command line: bad input is one line before anything is measured; the gate's codes."""

from __future__ import annotations

from pathlib import Path

import pytest
import typer

from nondet.cli import main
from nondet.commands.output import Terminal
from nondet.core.records import Diagnosis
from nondet.core.runfile import open_run


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["--n", "1"], "--n 1 makes no sense"),
        (["--load", "none"], "every request would run alone"),
        (["--load", "graphs=on"], "can't be diagnosed"),
        (["--load", "others=0,targets=1"], "every request would run alone"),
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
def test_the_gate_opens_on_a_clean_verdict_alone(finding: str, code: int, tmp_path: Path) -> None:
    """3 where something is wrong, 1 where the question has no answer; without --fail-on always 0."""
    path = tmp_path / "run.jsonl"
    writer = open_run(path, command="diagnose", plan={}, environment={})
    writer.write(Diagnosis(finding=finding, whether="As said."))
    writer.finish()
    Terminal().present(path)
    if code == 0:
        Terminal(fail_on="divergent").present(path)
        return
    with pytest.raises(typer.Exit) as ended:
        Terminal(fail_on="divergent").present(path)
    assert ended.value.exit_code == code
