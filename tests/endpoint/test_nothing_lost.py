"""A whole run against a server that does everything wrong: each completion on disk once, each failure with its kind."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from nondet.endpoint.client import connect
from nondet.endpoint.collect import collect
from nondet.endpoint.header import describe
from nondet.endpoint.load import EndpointLoad
from nondet.endpoint.plan import build_arms
from nondet.endpoint.settings import Server, Settings
from nondet.runfile import open_run, read_run
from nondet.traces import check_traces, read_traces
from tests.endpoint.honest import honest
from tests.endpoint.hostile import BEHAVIOURS, PREFIX, Hostile
from tests.endpoint.test_hostile import KEY, KINDS, PATIENT
from tests.endpoint.wire import in_thread

HONEST = ("Once upon a time", "The cat sat on the", "In the beginning")
LOAD = EndpointLoad(concurrency=len(BEHAVIOURS), targets=200, others=4, prompt=(4, 8), tokens=(4, 8))
ENVIRONMENT: dict[str, Any] = {"torch": "0", "variables": {}}


def test_hostile_behaviours_lose_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each behaviour that needs no waiting, honest requests in between: those are there, alike, and nothing twice."""
    monkeypatch.setenv("NONDET_API_KEY", KEY)
    meets = [name for name in BEHAVIOURS if KINDS[name] != "timeout"]
    prompts = [prompt for name in meets for prompt in (HONEST[len(name) % 3], PREFIX + name)]
    plan = build_arms(
        {"loaded": 1}, LOAD, prompts=len(prompts), max_tokens=8, seed=1, texts=["the quick brown fox " * 9]
    )
    settings = Settings(prompts=prompts, max_tokens=8)
    path = tmp_path / "run.jsonl"
    with in_thread(Hostile()) as server:
        servers = [
            Server("server", lambda: connect(server.url, protocol="openai", limits=PATIENT), server.url, "hash-1")
        ]
        writer = open_run(
            path, command="sample", plan=describe(servers, plan, settings, LOAD, seed=1), environment=ENVIRONMENT
        )
        try:
            collect(servers, plan, settings, writer)
            writer.finish()
        finally:
            writer.close()
    run = read_run(path)
    check_traces(run, read_traces(path)[0])
    assert Counter(completion.request for completion in run.completions) == Counter(
        request.id for round_ in plan.rounds for request in round_.requests if request.target
    )
    traces: dict[str, set[str]] = {}
    for completion in run.completions:
        prompt = prompts[completion.prompt]
        if not prompt.startswith(PREFIX):
            assert completion.status == "ok", completion.reason
            traces.setdefault(prompt, set()).add(completion.trace)
            continue
        kind = KINDS[prompt.removeprefix(PREFIX)]
        assert completion.served is not None
        assert (completion.served.kind == kind) or not kind, (prompt, completion.reason)
        assert completion.status == ("error" if kind else completion.status)
    assert {len(some) for some in traces.values()} == {1}
    assert len(traces) == 3
    assert all(KEY.encode() not in file.read_bytes() for file in tmp_path.iterdir())


def test_what_the_server_is_is_on_record(tmp_path: Path) -> None:
    """The software by its pages and the protocol that was chosen for it."""
    path = tmp_path / "run.jsonl"
    plan = build_arms({"solo": 2}, LOAD, prompts=1, max_tokens=4, seed=1, texts=())
    settings = Settings(prompts=["Once upon a time"], max_tokens=4)
    with in_thread(honest("llama.cpp")) as fake:
        servers = [Server("server", lambda: connect(fake.url), fake.url, "")]
        writer = open_run(
            path, command="sample", plan=describe(servers, plan, settings, LOAD, seed=1), environment=ENVIRONMENT
        )
        collect(servers, plan, settings, writer)
        writer.finish()
        writer.close()
    (seen,) = read_run(path).servers
    assert (seen.software, seen.protocol, seen.model) == ("llama.cpp b0-hash", "llama.cpp", "hash-1")
