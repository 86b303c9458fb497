"""`nondet gate --endpoint`: asked until it diverges or until that would have been seen, and never open on less."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from nondet.cli import main
from nondet.core.runfile import read_run
from nondet.endpoint.arms import parse_endpoint_load
from nondet.endpoint.collect import Watcher, loaded_each
from tests.endpoint.honest import serving

LOAD = ("--max-tokens", "6", "--load", "others=4,targets=3,prompt=4-8,tokens=4-8")


def gate(url: str, folder: Path, *more: str) -> int:
    return main(["gate", "--endpoint", url, *LOAD, "--out", str(folder / "g.jsonl"), "--force", "--json", *more])


def test_an_invariant_server_opens_it_as_soon_as_that_is_valid(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Three proven loads exclude seven in ten: no more are asked than that, and solo answers come before and after."""
    with serving("vllm", token_s=0.002) as server:
        code = gate(server.url, tmp_path, "--rate", "70%", "--junit", str(tmp_path / "g.xml"))
    told = json.loads(capsys.readouterr().out)
    assert (code, told["outcome"]) == (0, "open"), told
    [power] = told["power"]
    assert (power["compared"]["load"], power["needed"], power["enough"]) == (3, 3, True)
    assert power["compared"]["request"] <= 9
    run = read_run(tmp_path / "g.jsonl")
    assert [r.arm for r in run.rounds] == ["solo", *["loaded"] * 3, "solo"]
    assert run.header.plan["gate"] == {"rate": 0.7, "confidence": 0.95, "by": "load"}
    assert main(["gate", str(tmp_path / "g.jsonl"), "--rate", "70%"]) == 0  # the file says the same
    assert main(["gate", str(tmp_path / "g.jsonl")]) == 4  # and is no proof of a tenth


def test_a_server_that_depends_on_its_batch_shuts_it_at_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """One divergence is proof: the loads that were planned for a rate of 1% are never asked."""
    with serving("vllm", token_s=0.002, batch_noise=1e-6) as server:
        assert gate(server.url, tmp_path, "--rate", "1%") == 3
    assert json.loads(capsys.readouterr().out)["outcome"] == "shut"
    assert 1 <= sum(r.arm == "loaded" for r in read_run(tmp_path / "g.jsonl").rounds) <= 3


def test_a_load_that_never_forms_is_no_try(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """No streams and no counters: nothing shows that requests ran together, so the gate has no answer."""
    with serving("openai", token_s=0.001) as server:
        code = gate(server.url, tmp_path, "--rate", "50%", "--no-stream")
    told = json.loads(capsys.readouterr().out)
    assert code in (1, 4), told
    assert told["power"][0]["compared"]["load"] == 0


def test_a_gate_that_was_stopped_goes_on(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """With --resume it counts the loads that it has, asks for no more than are missing, and for nothing at its end."""
    path = tmp_path / "g.jsonl"
    resumed = ["--out", str(path), "--rate", "70%", "--json", "--resume", *LOAD]
    with serving("vllm", token_s=0.002) as server:
        assert gate(server.url, tmp_path, "--rate", "70%") == 0
        whole = read_run(path)
        lines = path.read_bytes().splitlines(True)
        ended = [i for i, line in enumerate(lines) if b'"round"' in line[:20]]
        path.write_bytes(b"".join(lines[: ended[1] + 3]))  # one load, and two completions of the second
        kept = {c.request for c in read_run(path, allow_truncated=True).completions}
        before = len(server.requests)
        assert main(["gate", "--endpoint", server.url, *resumed]) == 0
        asked, after = len(server.requests) - before, read_run(path)
        assert [r.arm for r in after.rounds] == ["solo", *["loaded"] * 3, "solo"]
        assert {c.request: c.trace for c in after.completions} == {c.request: c.trace for c in whole.completions}
        assert kept
        assert asked < before
        before = len(server.requests)
        assert main(["gate", "--endpoint", server.url, *resumed]) == 0
        assert len(server.requests) == before
        assert main(["gate", "--endpoint", server.url, *resumed, "--confidence", "90%"]) == 2  # another gate
    capsys.readouterr()


def test_a_gate_that_had_seen_it_stays_shut(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What parted before the stop counts after it, and no further load is asked for."""
    path = tmp_path / "g.jsonl"
    with serving("vllm", token_s=0.002, batch_noise=1e-6) as server:
        assert gate(server.url, tmp_path, "--rate", "1%") == 3
        loads = sum(r.arm == "loaded" for r in read_run(path).rounds)
        lines = path.read_bytes().splitlines(True)
        last = max(i for i, line in enumerate(lines) if b'"arm":"loaded"' in line and b'"round"' in line[:20])
        path.write_bytes(b"".join(lines[: last + 1]))
        argv = ["gate", "--endpoint", server.url, "--out", str(path), "--rate", "1%", "--resume", *LOAD]
        assert main(argv) == 3
        assert sum(r.arm == "loaded" for r in read_run(path).rounds) == loads
    capsys.readouterr()


DRAWN = ("--temperature", "0.8", "--seeds", "2", "--top-p", "0.9", "--rate", "70%")


def test_seeds_at_a_temperature_open_it_or_shut_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Each seed is asked for and compared with itself alone; a load that changes its answer shuts the gate."""
    with serving("vllm", token_s=0.002) as server:
        assert gate(server.url, tmp_path, *DRAWN) == 0
        seeds = {body["seed"] for body in server.requests if body["temperature"] == 0.8}
    run = read_run(tmp_path / "g.jsonl")
    assert {0, 1} < seeds
    assert run.header.plan["sampling"] == {"temperature": 0.8, "top_k": 0, "top_p": 0.9, "seeds": 2}
    first, second = ({c.trace for c in run.completions if c.prompt == p} for p in (0, 1))
    assert len(first) == len(second) == 1
    assert first != second
    capsys.readouterr()
    with serving("vllm", token_s=0.002, batch_noise=0.02) as server:
        assert gate(server.url, tmp_path, *DRAWN) == 3
    assert json.loads(capsys.readouterr().out)["outcome"] == "shut"


def test_a_server_that_keeps_to_no_seed_has_no_answer(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Its draws part alone as well: refused before a load is asked for, and no answer on a run that was sampled."""
    path = tmp_path / "s.jsonl"
    with serving("vllm", token_s=0.001, seed_ignored=True) as server:
        assert gate(server.url, tmp_path, *DRAWN) == 2
        assert "keeps to no seed" in capsys.readouterr().err
        assert not list(tmp_path.iterdir())
        assert main(["sample", "--endpoint", server.url, *LOAD, *DRAWN[:4], "--n", "6", "--out", str(path)]) == 0
    assert main(["gate", str(path), "--json", "--junit", str(tmp_path / "g.xml")]) == 1
    told = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert told["outcome"] == "no answer"
    assert "nothing shows that it keeps to a seed" in told["reason"]
    assert "<failure" not in (tmp_path / "g.xml").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("argv", "word"),
    [
        (["gate", "run.jsonl", "--resume"], "--resume without --endpoint"),
        (["gate", "--endpoint", "http://127.0.0.1:1", "--resume"], "--resume without --out"),
        (["gate", "run.jsonl", "--endpoint", "http://127.0.0.1:1"], "a run file or a server"),
        (["gate", "run.jsonl", "--model", "m"], "--model without --endpoint"),
        (["gate", "run.jsonl", "--temperature", "1"], "--temperature without --endpoint"),
        (["gate", "--endpoint", "http://127.0.0.1:1", "--seeds", "2"], "need a temperature"),
        (["gate", "--endpoint", "http://127.0.0.1:1", "--rate", "0.001%"], "loads"),
        (["gate", "--endpoint", "http://127.0.0.1:1", "--max-tokens", "0"], "--max-tokens 0"),
        (["gate", "--endpoint", "http://127.0.0.1:1"], "127.0.0.1:1"),
    ],
)
def test_bad_input_is_one_line(
    argv: list[str], word: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Exit code 2, and no file is left."""
    monkeypatch.chdir(tmp_path)
    assert main(argv) == 2
    seen = capsys.readouterr()
    assert word in seen.err
    assert seen.err.count("\n") == 1
    assert not list(tmp_path.rglob("*.jsonl"))


def test_what_is_planned_has_loads_to_spare() -> None:
    """Not every load forms; a watcher without a divergence goes on."""
    load = parse_endpoint_load("targets=4,others=4")
    assert loaded_each(load, 1, 0.1, 0.95, "load") == 174
    assert loaded_each(load, 2, 0.1, 0.95, "request") == 23
    assert not Watcher(0.1, 0.95, "load").diverged
