"""The Python interface: what a run file says, without the command line."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import nondet
from nondet.errors import UserError

EVIDENCE = Path(__file__).resolve().parents[1] / "docs" / "evidence" / "h200"


def test_a_loaded_run_says_what_its_report_says() -> None:
    """Verdict, frame and figure of a kept sample."""
    run = nondet.load(EVIDENCE / "sample.jsonl")
    assert run.command == "sample"
    assert run.complete
    assert run.environment["gpu"] == "NVIDIA H200"
    assert "stock: 6 distinct completions of 1,000" in run.verdict()
    assert run.verdict() in repr(run) or repr(run).endswith("…>")
    assert run.frame("completions").groupby("impl")["trace"].nunique().to_dict() == {"stock": 968, "invariant": 1}
    assert run.figure("tree").axes


def test_a_notebook_shows_escaped_text(tmp_path: Path) -> None:
    """What a file calls its implementations reaches no markup."""
    text = (EVIDENCE / "matmul-12288x4096.jsonl").read_text(encoding="utf-8")
    path = tmp_path / "<b>run.jsonl"
    path.write_text(text.replace('"impl":"stock"', '"impl":"<script>alert(1)</script>"'), encoding="utf-8")
    shown = nondet.load(path)._repr_html_()
    assert "<script>" not in shown
    assert "&lt;script&gt;" in shown
    assert "<b>run" not in shown


def test_a_missing_run_is_one_line() -> None:
    """The same words as on the command line."""
    with pytest.raises(UserError, match="no run file at"):
        nondet.load("nowhere.jsonl")


def test_import_nondet_loads_nothing_heavy() -> None:
    """`import nondet; nondet.load` costs neither torch nor pandas."""
    code = (
        "import sys, nondet\nnondet.load\n"
        "sys.exit(str({'torch', 'pandas', 'matplotlib', 'transformers'} & set(sys.modules) or ''))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stderr == "\n" or done.stderr == "", done.stderr
