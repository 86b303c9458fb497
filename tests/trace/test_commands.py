"""`nondet trace`, with --replay and without, as typed: what they write, and every wrong input as one line."""

from __future__ import annotations

import html
import json
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from nondet.cli import main
from nondet.core.runfile import read_run
from nondet.trace.search import Search
from tests.build import Command

LOAD = "others=2,targets=3,spread=4,prompt=4-12,tokens=2-4,budget=12,page=4"
COMMON = ["--dtype", "float32", "--prompt", "The following exceptions", "--max-tokens", "4", "--load", LOAD, "--device",
          "cpu", "--threads", "1"]  # fmt: skip


@pytest.fixture(scope="module")
def sampled(tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One round of a float32 model, in a run file with its tape."""
    out = tmp_path_factory.mktemp("sampled") / "sample.jsonl"
    assert main(["sample", "--model", str(tiny_folder), "--n", "3", "--impl", "stock", *COMMON, "--out", str(out)]) == 0
    return out


def trace(folder: Path, *more: str) -> int:
    return main(["trace", "--model", str(folder), *COMMON, *more])


@pytest.mark.slow
def test_a_trace_leaves_records_reports_and_a_script_and_goes_on_where_it_was_stopped(
    tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"a model's own")
    for name in ("json", "torch", "pathlib"):  # lying beside the script, they are not what it imports
        (tmp_path / f"{name}.py").write_text("raise SystemExit('a file of the folder was executed')\n")
    reports = [str(x) for name in ("r.md", "r.html") for x in ("--report", tmp_path / name)]
    whole, script = tmp_path / "trace.jsonl", tmp_path / "model.py"
    written = ("--out", str(whole), "--repro", str(script))
    assert trace(tiny_folder, *written, "--fail-on", "divergent", *reports) == 3
    run = read_run(whole)
    assert run.complete
    verdict = run.trace_verdicts[0]
    assert verdict.finding == "batch-dependent"
    assert verdict.repro.startswith(f"python -P {script}: run by itself, it shows the difference")
    assert float(verdict.repro.rpartition("by at most ")[2]) < 1e-3  # of one row, not of two
    begin, torch, _ = script.read_text(encoding="utf-8").partition("import torch\n")
    assert torch
    (tmp_path / "begin.py").write_text(f"{begin}import json\nprint(json.__file__)", encoding="utf-8")
    done = subprocess.run([sys.executable, "begin.py"], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (done.stderr, done.stdout.strip()) == ("", json.__file__)
    assert (tmp_path / "model.safetensors").read_bytes() == b"a model's own"
    trees = [r.sentence for culprit in run.culprits for r in culprit.replays if r.name == "tree"]
    for report in ("r.md", "r.html"):
        text = html.unescape((tmp_path / report).read_text(encoding="utf-8"))
        assert "Differing operator 1" in text
        assert all(tree.split("; ")[0][:60] in text for tree in trees)
    assert script.with_suffix(".inputs.pt").is_file()

    out, lines = tmp_path / "again.jsonl", whole.read_bytes().splitlines(keepends=True)
    culprits, tried = ([i for i, line in enumerate(lines) if kind in line[:24]] for kind in (b'"culprit', b'"substitu'))
    for last in (culprits[-1], tried[0]):
        out.write_bytes(b"".join(lines[: last + 1]) + lines[last + 1][:20])
        with monkeypatch.context() as patch:
            if last >= culprits[-1]:
                patch.setattr("nondet.trace.search.first_responsible", None)  # called, it would raise
            assert trace(tiny_folder, "--out", str(out), "--resume") == 0
        again = read_run(out)
        assert again.complete
        keys = [record.key for record in again.records()]
        assert sorted(keys) == sorted([*(r.key for r in run.records()), ("control", "resumed")])
        assert again.trace_verdicts[0].sentences == verdict.sentences
        assert again.trace_verdicts[0].families == verdict.families
    assert trace(tiny_folder, "--out", str(out), "--resume") == 0  # of a whole one nothing is left to do
    assert [record.key for record in read_run(out).records()] == keys


def test_a_script_overwrites_nothing_unasked(run: Command, tmp_path: Path) -> None:
    for name in ("model.py", "model.inputs.pt"):
        for link in (False, True):
            taken = tmp_path / name
            taken.symlink_to("nowhere") if link else taken.write_text("kept")
            code, _, err = run("trace", "--repro", "model.py", *(["--force"] if link else []))
            assert code == 2
            assert f"{name} {'is a symbolic link' if link else 'exists'}" in err
            assert [p.name for p in tmp_path.iterdir()] == [name]
            taken.unlink()


def test_recorded_completions_are_played_and_traced(
    sampled: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "replay.jsonl"
    capsys.readouterr()
    three = [word for number in range(3) for word in ("--request", f"t00000{number}")]
    assert main(["trace", "--replay", "--run", str(sampled), *three, "--solo", "--out", str(out)]) == 0
    assert [r.same for r in read_run(out).replayed if r.how == "as recorded"] == [True] * 3
    said = capsys.readouterr().err.splitlines()
    same = "4 tokens and logprobs, bit-identical to the record; every step as recorded"
    assert [line for line in said if same in line] == [f"t000000: {same}", f"2 more: {same}"]
    out = tmp_path / "trace.jsonl"
    monkeypatch.setattr(Search, "_until_fixed", lambda search, _: search._end("unknown"))
    assert main(["trace", "--run", str(sampled), "--out", str(out)]) == 0  # of itself one whose trace is rare
    assert main(["trace", "--run", str(sampled), "--request", "t000001", "--out", str(out), "--force"]) == 0
    control = next(c for c in read_run(out).controls if c.name.startswith("record of"))
    assert control.passed
    assert control.sentence.endswith(": repeated, it is bit-identical to the record")


def test_what_a_run_lacks_is_one_line(
    sampled: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)

    def said(*arguments: str) -> str:
        assert main(["trace", "--replay", "--run", *arguments]) == 2
        return capsys.readouterr().err

    assert "no request 't999999'" in said(str(sampled), "--request", "t999999")
    assert "is not the model of" in said(str(sampled), "--request", "t000000", "--model", "random:qwen3-1x128")
    lines, copy = sampled.read_bytes().splitlines(keepends=True), tmp_path / "copy.jsonl"
    copy.with_name("copy.traces.jsonl").write_bytes(sampled.with_name("sample.traces.jsonl").read_bytes())
    kept = [line for line in lines if b'"type":"tape"' not in line[:14]]
    end = msgspec.json.decode(kept[-1])
    kept[-1] = msgspec.json.encode({**end, "records": end["records"] - 1}) + b"\n"
    broken = [line.replace(b'"prompt":1,', b'"prompt":9,') for line in lines]
    for text, wanted in ((kept, "has no tape"), (broken, "is not whole")):
        copy.write_bytes(b"".join(text))
        assert wanted in said(str(copy), "--request", "t000000")
