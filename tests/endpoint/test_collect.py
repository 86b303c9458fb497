"""A whole run against a server that does everything wrong: each completion on disk once, each failure with its kind."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from functools import partial
from pathlib import Path

import pytest

from nondet.core.runfile import read_run
from nondet.endpoint.arms import EndpointLoad, Server
from nondet.endpoint.client import HttpClient
from nondet.endpoint.http import Limits
from nondet.errors import ServerStoppedError
from tests.endpoint.honest import Honest, Request, in_thread
from tests.endpoint.hostile import BEHAVIOURS, KINDS, ODD_COUNTS, PREFIX, Hostile, act
from tests.endpoint.memory import planned, sampled
from tests.endpoint.test_hostile import KEY, NOTES, PATIENT

HONEST = ("Once upon a time", "The cat sat on the", "In the beginning")


def asked(url: str, limits: Limits) -> Server:
    return Server("server", partial(HttpClient, url, protocol="openai", limits=limits), "http://there", "hash-1")


def test_hostile_behaviours_lose_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A behaviour of each kind, honest requests in between: those are there, alike, and nothing twice."""
    monkeypatch.setenv("NONDET_API_KEY", KEY)
    first = {kind: name for name, kind in KINDS.items() if kind not in ("", "timeout")}
    meets = [*first.values(), *ODD_COUNTS, "reset-once", "busy-once", "no-done", "echo-in-fingerprint", "too-long"]
    prompts = [prompt for name in meets for prompt in (HONEST[len(name) % 3], PREFIX + name)]
    load = EndpointLoad(concurrency=len(BEHAVIOURS), targets=200, others=4, prompt=(4, 8), tokens=(4, 8))
    plan = planned({"loaded": 1}, len(prompts), load, max_tokens=8)
    with in_thread(Hostile()) as server:
        run = sampled(tmp_path / "run.jsonl", asked(server.url, PATIENT), plan=plan, prompts=prompts)
    assert Counter(completion.request for completion in run.completions) == Counter(
        request.id for round_ in plan.rounds for request in round_.requests if request.target
    )
    traces: dict[str, set[str]] = {}
    for completion in run.completions:
        prompt = prompts[completion.prompt]
        name = prompt.removeprefix(PREFIX)
        if name == prompt:
            assert completion.status == "ok", completion.reason
            traces.setdefault(prompt, set()).add(completion.trace)
            continue
        assert completion.served is not None
        assert (completion.served.kind == KINDS[name]) or not KINDS[name], (prompt, completion.reason)
        assert completion.status == ("error" if KINDS[name] else completion.status)
        if name in ODD_COUNTS:
            assert completion.served.odd == [NOTES[name]]
    assert {len(some) for some in traces.values()} == {1}
    assert len(traces) == 3
    assert all(KEY.encode() not in file.read_bytes() for file in tmp_path.iterdir())


class Tired(Honest):
    """Answers so many completions, then says for ever that it is full."""

    left = 40
    refused = 0

    async def _answer(self, request: Request, writer: asyncio.StreamWriter) -> bool:
        if request.method == "POST" and len(self.requests) >= self.left:
            self.refused += request.json()["max_tokens"] > 1  # an error is an answer, but to whether it is alive
            actions = BEHAVIOURS["broken" if self.refused == 15 else "busy-for-ever"].actions
            return await act(actions, writer)  # type: ignore[arg-type] # they ask nothing
        return await super()._answer(request, writer)


def test_a_server_that_is_full_for_ever_holds_no_run(tmp_path: Path) -> None:
    """After its patience each request is sent once, and two dozen in a row stop the run: it goes on where it was."""
    path = tmp_path / "run.jsonl"
    load = EndpointLoad(concurrency=8, targets=30, others=2, prompt=(4, 8), tokens=(4, 8))
    plan = planned({"solo": 6, "loaded": 60}, load=load, max_tokens=4)
    with in_thread(Tired()) as server:
        there = asked(server.url, Limits(first_wait_s=0.05, most_wait_s=0.1, patience_s=0.2))
        begun = time.monotonic()
        with pytest.raises(ServerStoppedError, match=r"stopped answering: .* the last: HTTP 429: slow down"):
            sampled(path, there, plan=plan)
        assert time.monotonic() - begun < 10
        assert server.refused < 90
        kept = read_run(path, allow_truncated=True).completions
        assert len(kept) > 10
        assert {c.served.kind for c in kept if c.served} <= {"", "http-500"}
        server.left = 10**6
        run = sampled(path, there, plan=plan, resume=True)
    assert run.complete
    statuses = Counter(c.status for c in run.completions)
    assert statuses.total() == 66
    assert statuses["error"] <= 1
