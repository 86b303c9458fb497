"""The Python interface: what a run file says, without the command line."""

from __future__ import annotations

import gzip
import inspect
from pathlib import Path

import pytest
import torch

import nondet
from nondet.errors import UnknownNameError, UserError
from nondet.services.probe import ProbeRequest
from nondet.services.sample import SampleRequest

EVIDENCE = Path(__file__).resolve().parents[1] / "docs" / "evidence" / "h200"


def test_a_loaded_run_says_what_its_report_says() -> None:
    run = nondet.load(EVIDENCE / "sample.jsonl.gz")
    assert (run.command, run.complete, run.environment["gpu"]) == ("sample", True, "NVIDIA H200")
    assert "stock: 6 distinct completions of 1,000" in run.verdict()
    assert run.verdict() in repr(run) or repr(run).endswith("…>")
    assert run.frame("completions").groupby("impl")["trace"].nunique().to_dict() == {"stock": 968, "invariant": 1}
    assert run.figure("tree").axes
    with pytest.raises(UserError, match="no run file at"):  # the same words as on the command line
        nondet.load("nowhere.jsonl")


def test_a_notebook_shows_escaped_text(tmp_path: Path) -> None:
    text = gzip.decompress((EVIDENCE / "matmul-12288x4096.jsonl.gz").read_bytes()).decode()
    path = tmp_path / "<b>run.jsonl"
    path.write_text(text.replace('"impl":"stock"', '"impl":"<script>alert(1)</script>"'), encoding="utf-8")
    shown = nondet.load(path)._repr_html_()
    assert "<script>" not in shown
    assert "&lt;script&gt;" in shown
    assert "<b>run" not in shown


def test_a_block_says_what_it_covers() -> None:
    block = nondet.batch_invariant(["matmul", "norm"])
    assert repr(block).startswith("<batch_invariant: not entered; matmul, norm on CPU")
    assert "no longer depend on the others in its batch" in (nondet.batch_invariant.__doc__ or "")
    with block:
        torch.nn.functional.linear(torch.ones(3, 8), torch.ones(4, 8))
        assert repr(block).startswith("<batch_invariant: open; matmul, norm on CPU")
        clean = "nothing was left stock, and nothing is at risk"
        assert block.coverage().lines() == ["replaced: linear (1 calls)", clean]
        torch.softmax(torch.ones(3, 8), -1)
        assert clean not in block.coverage().lines()
    assert repr(block).startswith("<batch_invariant: closed; ")
    assert repr(block).endswith("; calls: 1 replaced, 0 certified stock, 0 left stock, 1 at risk>")
    with pytest.raises(UnknownNameError, match="matmul"):
        nondet.batch_invariant(["matmull"])


def test_a_probe_from_python_is_the_command_s_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = nondet.probe("float-sum", device="cpu", out=tmp_path / "sums.jsonl")
    assert capsys.readouterr() == ("", "")
    assert (run.complete, run.path) == (True, tmp_path / "sums.jsonl")
    assert run.records == nondet.load(tmp_path / "sums.jsonl").records
    assert set(run.frame("rows")["probe"]) == {"float-sum"}
    with pytest.raises(UserError, match="exists"):
        nondet.probe("float-sum", out=tmp_path / "sums.jsonl")
    again = nondet.probe("float-sum", device="cpu", seed=3)
    assert again.path.exists()
    assert again.records.header.plan["seed"] == 3
    for call, known in ((nondet.probe, "runs"), (nondet.sample, "trust_remote_code")):
        with pytest.raises(UserError, match="unknown option") as refused:
            call(**{known[:-1]: 3})
        assert known in str(refused.value)


def test_options_in_python_are_those_of_the_command() -> None:
    for call, request_type in [(nondet.probe, ProbeRequest), (nondet.sample, SampleRequest)]:
        theirs = {name: p.default for name, p in inspect.signature(request_type).parameters.items() if name != "given"}
        ours = {name: p.default for name, p in inspect.signature(call).parameters.items()}
        assert {**ours, "names": None} == {**theirs, "names": None}
        assert all(f"\n    {name}: " in (call.__doc__ or "") for name in theirs if name != "names")
    with pytest.raises(UserError, match="no prompt file at nowhere"):
        nondet.sample(1, prompt_file="nowhere")
    for option in ({"impl": "invariant"}, {"device": "cpu"}, {"threads": 2}):  # a server decides them: not left unread
        with pytest.raises(UserError, match=f"--endpoint and --{next(iter(option))} exclude each other"):
            nondet.sample(endpoint="http://127.0.0.1:1", **option)


def test_any_function_is_checked(tmp_path: Path) -> None:
    rows, sizes = torch.randn(64, 32), [1, 2, 3, 64]

    def by_size(x: torch.Tensor) -> torch.Tensor:
        return x * (1 + x.shape[0] % 2)

    run = nondet.check(by_size, lambda size: rows[:size], over=sizes, name="mine", out=tmp_path / "mine.jsonl")
    assert "mine: not rounding: up to 0.5 of the scale" in repr(run)
    assert run.frame("classes")["label"].tolist()[:6] == [0, 1, 0, 1, 0, 1]
    run = nondet.check_operator(lambda x: x.sum(-1), "mean", m=4, k=64, inputs="bell", varied=("batch_size",))
    assert "wrong" in run.verdict()
    with pytest.raises(UserError, match=r"make_inputs takes \(\)"):
        nondet.check(lambda a: a, lambda: rows, over=[1, 2])
