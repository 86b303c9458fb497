"""A whole run against a server that does everything wrong: each completion on disk once, each failure with its kind."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from nondet.core.runfile import open_run, read_run
from nondet.core.traces import check_traces, read_traces
from nondet.endpoint.arms import EndpointLoad, Server, Settings, build_arms, describe
from nondet.endpoint.client import connect
from nondet.endpoint.collect import collect
from nondet.endpoint.http import Limits
from nondet.errors import ServerStoppedError
from tests.endpoint.honest import Honest, honest
from tests.endpoint.hostile import BEHAVIOURS, ODD_COUNTS, PREFIX, Hostile
from tests.endpoint.test_hostile import KEY, KINDS, NOTES, PATIENT
from tests.endpoint.wire import Request, in_thread

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
        if prompt.removeprefix(PREFIX) in ODD_COUNTS:
            assert completion.served.odd == [NOTES[prompt.removeprefix(PREFIX)]]
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


class Tired(Honest):
    """Answers so many completions, then says for ever that it is full."""

    left = 40

    async def _answer(self, request: Request, writer: asyncio.StreamWriter) -> bool:
        if request.method == "POST" and len(self.requests) >= self.left:
            self.refused += 1
            if self.refused == 15:  # an error is an answer, and still no completion
                return await BEHAVIOURS["broken"](self, request, writer)  # type: ignore[arg-type] # it asks nothing
            return await BEHAVIOURS["busy-for-ever"](self, request, writer)  # type: ignore[arg-type] # it asks nothing
        return await super()._answer(request, writer)

    refused = 0


@pytest.mark.parametrize("arms", [{"solo": 60}, {"solo": 6, "loaded": 60}], ids=["one at a time", "many at once"])
def test_a_server_that_is_full_for_ever_holds_no_run(tmp_path: Path, arms: dict[str, int]) -> None:
    """After its patience each request is sent once, and two dozen in a row stop the run: it goes on where it was."""
    path = tmp_path / "run.jsonl"
    load = EndpointLoad(concurrency=8, targets=30, others=2, prompt=(4, 8), tokens=(4, 8))
    plan = build_arms(arms, load, prompts=1, max_tokens=4, seed=1, texts=["the quick brown fox " * 9])
    settings = Settings(prompts=["Once upon a time"], max_tokens=4)
    limits = Limits(first_wait_s=0.05, most_wait_s=0.1, patience_s=0.2)

    def sample(url: str, resume: bool) -> None:
        servers = [Server("server", lambda: connect(url, protocol="openai", limits=limits), "http://there", "hash-1")]
        header = describe(servers, plan, settings, load, seed=1)
        writer = open_run(path, command="sample", plan=header, environment=ENVIRONMENT, resume=resume)
        try:
            collect(servers, plan, settings, writer)
            writer.finish()
        finally:
            writer.close()

    with in_thread(Tired()) as server:
        begun = time.monotonic()
        with pytest.raises(ServerStoppedError, match=r"stopped answering: .* the last: HTTP 429: slow down"):
            sample(server.url, False)
        assert time.monotonic() - begun < 10
        assert server.refused < 90
        kept = read_run(path, allow_truncated=True).completions
        assert len(kept) > 10
        assert {c.served.kind for c in kept if c.served} <= {"", "http-500"}
        server.left = 10**6
        sample(server.url, True)
    run = read_run(path)
    assert run.complete
    statuses = Counter(c.status for c in run.completions)
    assert statuses.total() == sum(arms.values())
    assert statuses["error"] <= 1
