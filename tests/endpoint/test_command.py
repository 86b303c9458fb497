"""`nondet sample --endpoint` as a person types it: over HTTP, against the honest fake; what is wrong is one line."""

from __future__ import annotations

import asyncio
import base64
import json
import os
import signal
from pathlib import Path

import pytest

from nondet.cli import main
from nondet.core.runfile import read_run, write_run
from nondet.endpoint.traffic import run as run_traffic
from nondet.services.run import interruptible
from nondet.verdict.findings import Finding
from nondet.verdict.gate import judge
from tests.build import Command, run_of
from tests.endpoint.honest import Honest, Request, in_thread, json_response, serving

PROMPT = ("--prompt", "For example, the")
SMALL = ("--n", "6", "--max-tokens", "6", "--load", "others=3,targets=3,prompt=4-8,tokens=4-8", *PROMPT)


def test_an_honest_server_end_to_end(run: Command, tmp_path: Path) -> None:
    (tmp_path / "p.txt").write_text("For example, the\nanother prompt of a set\n")
    argv = ("--n", "3", *SMALL[2:-2], "--prompts", "p.txt", "--out", "a.jsonl", "--report", "a.html")
    with serving("vllm", token_s=0.001) as server:
        code, out, err = run("sample", "--endpoint", server.url, *argv, "--fail-on", "divergent")
    assert code == 0, err
    assert err.startswith("Plan: 32 requests to compare (first 2, solo 6, cold 6, warm 6, chunked 6, loaded 6) and ")
    assert "no divergence observed" in out
    made = read_run(tmp_path / "a.jsonl")
    assert {c.arm for c in made.completions} == {"first", "solo", "cold", "warm", "chunked", "loaded"}
    assert made.servers[0].known_by == "ids"
    assert [v.prompt for v in judge(made)] == [0, 1]  # what somebody chose is asked alone, and its keys are said
    assert all(any("attention over more keys was not tested" in note for note in v.notes) for v in judge(made))
    code, again, _ = run("report", "a.jsonl")
    assert code == 0
    assert again.splitlines()[-1] == out.splitlines()[-1]
    code, _, err = run("trace", "--run", "a.jsonl", "--request", made.completions[0].request)
    assert (code, "a.jsonl is a run of a server, which can't be traced. Name a model's run" in err) == (2, True)
    run("report", "a.jsonl", "--out", "b.html")
    assert (tmp_path / "a.html").read_text() == (tmp_path / "b.html").read_text()


NOWHERE = "--endpoint http://127.0.0.1:1"
WRONG: list[tuple[str, list[str]]] = [
    ("sample --endpoint {url} --seeds 2", ["--temperature"]),
    ("sample --endpoint {url} --protocol openai --temperature 1 --top-k 5", ["--top-k", "openai"]),
    ("sample --endpoint ftp://host", ["not the URL of a server", "http"]),
    ("sample --endpoint http://me:secret-password@127.0.0.1:1", ["password"]),
    ("sample --endpoint {url} --model hash-2", ["has no model 'hash-2'. Did you mean hash-1?"]),
    ("sample --endpoint {url} --protocol vlm", ["unknown protocol 'vlm'. Did you mean vllm"]),
    ("sample --endpoint {url} --impl invariant", ["--endpoint", "--impl"]),
    ("sample --endpoint {url} --threads 2", ["--endpoint", "--threads"]),
    ("sample --endpoint {url} --arms solo,warmed", ["'warmed'", "warm"]),
    ("sample --endpoint {url} --arms solo=0", ["solo=0"]),
    ("sample --endpoint {url} --arms solo,solo", ["twice"]),
    ("sample --endpoint {url} --load none", ["--arms solo"]),
    ("sample --endpoint {url} --load budget=64", ["budget"]),
    ("sample --endpoint {url} --load others=" + "9" * 5000, ["makes no sense"]),
    ("sample --endpoint {url} --concurrency 0", ["--concurrency"]),
    ("sample --endpoint {url} --rate 0", ["--rate"]),
    ("sample --endpoint {url} --max-tokens 0", ["--max-tokens 0"]),
    ("sample --endpoint {url} --key-env NOT_SET_ANYWHERE", ["--key-env"]),
    ("sample --endpoint {url} --compare-model x", ["--compare-endpoint"]),
    ("sample --endpoint {url} --compare-endpoint http://127.0.0.1:1", ["127.0.0.1:1"]),
    (f"sample {NOWHERE} --out kept.jsonl --force", ["127.0.0.1:1"]),
    ("sample --arms solo", ["--arms", "--endpoint"]),
    ("sample --rate 2", ["--rate", "--endpoint"]),
    ("gate kept.jsonl --resume", ["--resume without --endpoint"]),
    (f"gate {NOWHERE} --resume", ["--resume without --out"]),
    (f"gate kept.jsonl {NOWHERE}", ["a run file or a server"]),
    ("gate kept.jsonl --model m", ["--model without --endpoint"]),
    ("gate kept.jsonl --temperature 1", ["--temperature without --endpoint"]),
    (f"gate {NOWHERE} --seeds 2", ["need a temperature"]),
    (f"gate {NOWHERE} --rate 0.001%", ["loads"]),
    (f"gate {NOWHERE} --max-tokens 0", ["--max-tokens 0"]),
    (f"gate {NOWHERE}", ["127.0.0.1:1"]),
]


def test_bad_input_is_one_clear_line(run: Command, tmp_path: Path) -> None:
    kept = tmp_path / "kept.jsonl"
    write_run(kept, run_of())
    before = kept.read_bytes()
    with serving("vllm", token_s=0.001) as server:
        for typed, said in WRONG:
            code, out, err = run(*typed.format(url=server.url).split())
            assert (code, out, err.count("\n")) == (2, "", 1), err
            assert [words for words in said if words not in err] == []
            assert "secret" not in err
    assert [*tmp_path.rglob("*.jsonl")] == [kept]
    assert kept.read_bytes() == before


class Gateway(Honest):
    """Takes nothing but what comes under its token, and talks about it in every seventh answer and all refusals."""

    place = "tok/Zz9-Yy8_Xx7/Ww6Vv5Uu4"

    async def _answer(self, request: Request, writer: asyncio.StreamWriter) -> bool:
        path = request.path.removeprefix(f"/{self.place}")
        if path == request.path or (request.method == "POST" and len(self.requests) % 7 == 6):
            self.requests.append({"temperature": 0.0})
            told = base64.b64encode(request.path.encode()).decode() if len(self.requests) % 2 else request.path
            writer.write(json_response({"detail": f"no luck at {told}"}, 404))
            return True
        return await super()._answer(Request(request.method, path, request.headers, request.body), writer)


def test_no_key_and_no_token_is_left_anywhere(run: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    key = "sk-abcdefghij0123456789"
    monkeypatch.setenv("NONDET_API_KEY", key)
    with in_thread(Gateway("vllm", token_s=0.001, key=key)) as server:
        url = f"{server.url}/{server.place}/v1"
        argv = ("sample", "--endpoint", url, *SMALL, "--out", "a.jsonl", "--report", "a.html", "--report", "a.md")
        monkeypatch.setattr("sys.argv", ["nondet", *argv, f"--compare-endpoint={url}"])
        code, out, err = run(*argv)
        wrong = run("sample", "--endpoint", f"{url[:-6]}{url[-3:]}", *SMALL, "--out", "b.jsonl")
        port = server.url.rpartition(":")[2]
    assert code == 0, err
    assert wrong[0] == 2
    made = read_run(tmp_path / "a.jsonl")
    assert made.servers[0].url == made.header.plan["endpoint"]["servers"][0]["url"]
    assert made.servers[0].url.startswith(f"http://127.0.0.1:{port}/(path ")
    reasons = {c.reason for c in made.completions if c.reason}
    assert {"HTTP 404: no luck at [path]/v1/completions"} < reasons
    texts = [path.read_text() for path in tmp_path.iterdir()] + [out, err, *wrong[1:]]
    assert any("127.0.0.1" in text for text in texts[:3])
    for part in (key, *server.place.split("/")[1:], base64.b64encode(b"Zz9-Yy8_Xx7").decode()[:12]):
        assert not [text for text in texts if part in text]


LOAD = ("--max-tokens", "6", "--load", "others=4,targets=3,prompt=4-8,tokens=4-8", *PROMPT)
ROUNDS = ["first", "solo", "cold", "warm", *["loaded"] * 3, "solo", "first"]


def gate(url: str, folder: Path, *more: str) -> int:
    return main(["gate", "--endpoint", url, *LOAD, "--out", str(folder / "g.jsonl"), "--force", "--json", *more])


def test_an_invariant_server_opens_it_or_goes_on(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "g.jsonl"
    resumed = ["gate", "--out", str(path), "--rate", "70%", "--json", "--resume", *LOAD]
    with serving("vllm", token_s=0.001) as server:
        code = gate(server.url, tmp_path, "--rate", "70%", "--junit", str(tmp_path / "g.xml"))
        told = json.loads(capsys.readouterr().out)
        assert (code, told["outcome"]) == (0, "open"), told
        [power] = told["power"]
        assert (power["compared"]["load"], power["needed"], power["enough"]) == (3, 3, True)
        assert power["compared"]["request"] <= 9
        whole, lines = read_run(path), path.read_bytes().splitlines(True)
        assert [r.arm for r in whole.rounds] == ROUNDS
        assert whole.header.plan["gate"] == {"rate": 0.7, "confidence": 0.95, "by": "load"}
        assert main(["gate", str(path), "--rate", "70%"]) == 0  # the file says the same
        assert main(["gate", str(path)]) == 4  # and is no proof of a tenth
        ended = [i for i, line in enumerate(lines) if b'"round"' in line[:20]]
        path.write_bytes(b"".join(lines[: ended[4] + 3]))  # one load, and two completions of the second
        assert read_run(path, allow_truncated=True).completions
        before = len(server.requests)
        assert main([*resumed, "--endpoint", server.url]) == 0
        asked, after = len(server.requests) - before, read_run(path)
        assert [r.arm for r in after.rounds] == ROUNDS
        assert {c.request: c.trace for c in after.completions} == {c.request: c.trace for c in whole.completions}
        assert asked < before
        before = len(server.requests)
        assert main([*resumed, "--endpoint", server.url]) == 0
        assert len(server.requests) == before
        assert main([*resumed, "--endpoint", server.url, "--confidence", "90%"]) == 2  # another gate
    capsys.readouterr()


DRAWN = ("--temperature", "0.8", "--seeds", "2", "--top-p", "0.9", "--top-k", "20", "--rate", "90%")


def test_seeds_at_a_temperature_open_it_or_shut_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with serving("vllm", token_s=0.001) as server:
        assert gate(server.url, tmp_path, *DRAWN) == 0
        sent = [body for body in server.requests if body["temperature"] == 0.8]
    run = read_run(tmp_path / "g.jsonl")
    assert {0, 1} < {body["seed"] for body in sent}
    assert {(body["top_k"], body["top_p"]) for body in sent} == {(20, 0.9)}
    assert run.header.plan["sampling"] == {"temperature": 0.8, "top_k": 20, "top_p": 0.9, "seeds": 2}
    first, second = ({c.trace for c in run.completions if c.prompt == p} for p in (0, 1))
    assert len(first) == len(second) == 1
    assert first != second
    capsys.readouterr()
    with serving("vllm", token_s=0.001, batch_noise=0.02) as server:
        assert gate(server.url, tmp_path, *DRAWN) == 3
    assert json.loads(capsys.readouterr().out)["outcome"] == "shut"
    # one divergence is proof: the other loads of such a rate are not asked for
    assert 1 <= sum(r.arm == "loaded" for r in read_run(tmp_path / "g.jsonl").rounds) <= 3


def test_a_server_that_keeps_to_no_seed_has_no_answer(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Its draws part alone as well: refused before a load is asked for, and no answer on a run that was sampled."""
    path = tmp_path / "s.jsonl"
    with serving("vllm", token_s=0.001, seed_ignored=True) as server:
        assert gate(server.url, tmp_path, *DRAWN) == 2
        assert "one seed, two answers" in capsys.readouterr().err
        assert not list(tmp_path.iterdir())
        few = ("--n", "3", "--arms", "solo=2,loaded", "--out", str(path))
        assert main(["sample", "--endpoint", server.url, *LOAD, *DRAWN[:4], *few]) == 0
    assert main(["gate", str(path), "--json", "--junit", str(tmp_path / "g.xml")]) == 1
    told = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert told["outcome"] == "no answer"
    assert "nothing shows that it respects a seed" in told["reason"]
    [verdict, _] = judge(read_run(path))
    assert verdict.finding == Finding.UNATTRIBUTED  # a server that ignores seeds has no load to blame
    assert "<failure" not in (tmp_path / "g.xml").read_text(encoding="utf-8")


def test_an_interrupt_waits_for_an_await_and_cleans_up() -> None:
    seen: list[str] = []

    async def beside() -> None:
        try:
            await asyncio.sleep(60)
        finally:
            await asyncio.sleep(0)
            seen.append("cleaned up")

    async def main() -> None:
        async with asyncio.TaskGroup() as group:
            group.create_task(beside())
            await asyncio.sleep(0)
            os.kill(os.getpid(), signal.SIGINT)
            seen.append("went on")
            await asyncio.sleep(60)

    before = signal.getsignal(signal.SIGINT)
    try:
        with pytest.raises(KeyboardInterrupt), interruptible():
            run_traffic(main())
        assert seen == ["went on", "cleaned up"]
        assert getattr(signal.getsignal(signal.SIGINT), "__name__", "") == "end_now"  # a second one ends the process
    finally:
        signal.signal(signal.SIGINT, before)
    assert run_traffic(asyncio.sleep(0, 3)) == 3
    with pytest.raises(TimeoutError):
        run_traffic(asyncio.wait_for(asyncio.sleep(60), 0.001))
    assert signal.getsignal(signal.SIGINT) is before
