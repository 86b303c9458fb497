"""What servers do wrong: each behaviour has its kind of failure, in bounded time, and hurts no other request or run."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from functools import partial
from pathlib import Path
from typing import NamedTuple

import pytest

from nondet.core.runfile import read_run
from nondet.endpoint.arms import Answer, Ask, EndpointLoad, Server
from nondet.endpoint.client import HttpClient
from nondet.endpoint.http import Limits
from nondet.errors import ServerStoppedError
from tests.endpoint.honest import Honest, Request, in_thread
from tests.endpoint.hostile import BEHAVIOURS, KINDS, ODD_COUNTS, PREFIX, Hostile, act
from tests.endpoint.memory import planned, sampled

KEY = "sk-hostile-0123456789"
# What only time ends is met in haste; the rest is given more time than a busy machine takes for it.
PATIENT = Limits(total_s=40, attempts=4, first_wait_s=0.01, most_wait_s=0.05)
HASTY = Limits(first_byte_s=1, idle_s=1, total_s=1.5)
_HONEST = 40

REFUSALS = {
    "reset-once": {"reset": 1},
    "busy-once": {"http-429": 1},
    "busy-until-a-date": {"http-503": 1},
    "busy-for-a-year": {"http-503": 3},
    "busy-for-ever": {"http-429": 3},
    "broken": {"http-500": 1},
    "reset": {"reset": 3},
    "half-a-header": {"reset": 3},
    "half-closed": {"cut-off": 2},
    "reset-in-body": {"cut-off": 2},
    "stream-cut": {"cut-off": 2},
}
NOTES = {
    "no-done": "a stream without [DONE]",
    "two-logprobs": "a token with two logprobs",
    "usage-contradicts": "usage reports 3 tokens, the answer has 2",
    "prompt-negative": "prompt_tokens of -5 (not taken)",
    "prompt-huge": f"prompt_tokens of {2**30} (not taken)",
    "completion-huge": f"completion_tokens of {2**53} (not taken)",
    "completion-endless": f"completion_tokens of {10**30} (not taken)",
    "cached-negative": "cached_tokens of -1 (not taken)",
}


class Met(NamedTuple):
    """What came of all at once, by one client: an answer for each behaviour, honest ones, who asked elsewhere."""

    hostile: dict[str, Answer]
    honest: list[Answer]
    seconds: float
    elsewhere: list[dict[str, object]]


async def _meet() -> Met:
    async with (
        Honest() as elsewhere,
        Hostile(elsewhere.url, token_s=0.002) as server,
        HttpClient(server.url, protocol="openai", limits=PATIENT) as patient,
        HttpClient(server.url, protocol="openai", limits=HASTY) as hasty,
    ):
        begun = time.monotonic()
        asks = [Ask(id=name, prompt=PREFIX + name, max_tokens=4) for name in BEHAVIOURS]
        honest = [Ask(id=f"honest {i}", prompt="Once upon a time", max_tokens=16) for i in range(_HONEST)]
        clients = [hasty if KINDS[ask.id] == "timeout" else patient for ask in asks] + [patient] * len(honest)
        asked = zip(clients, asks + honest, strict=True)
        answers = await asyncio.gather(*(client.complete(ask) for client, ask in asked))
        named = dict(zip(BEHAVIOURS, answers, strict=False))
        return Met(named, answers[len(asks) :], time.monotonic() - begun, elsewhere.requests)


@pytest.fixture(scope="module")
def met() -> Met:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("NONDET_API_KEY", KEY)
        return asyncio.run(asyncio.wait_for(_meet(), 60))


def test_each_is_one_line(met: Met) -> None:
    """The right kind, a reason on one printable line without the key, attempts by the rule, and an end in time."""
    for name, answer in met.hostile.items():
        assert answer.ask == name
        assert answer.kind == KINDS[name], (name, answer.reason)
        assert dict(answer.refusals) == REFUSALS.get(name, {}), name
        assert answer.attempts == 1 + sum(answer.refusals.values()), name
        assert bool(answer.reason) == bool(answer.kind), name
        assert len(answer.reason) <= 300, name
        assert answer.reason.isprintable(), name
        assert KEY not in repr(answer), name
        limits = HASTY if KINDS[name] == "timeout" else PATIENT
        assert 0 < answer.sent <= answer.done < answer.sent + limits.total_s + 5, name
        assert answer.notes == ((NOTES[name],) if name in NOTES else ()), name
        if answer.ok and name != "usage-contradicts":
            assert answer.text == "ab", name
    # a count that counts nothing is not taken; the completion and its other counts are
    answers = [met.hostile[name] for name in ODD_COUNTS]
    assert [a.prompt_tokens for a in answers] == [None, None, 1, 1, 1]
    assert [a.completion_tokens for a in answers] == [2, 2, None, None, 2]
    assert [a.cached_tokens for a in answers] == [None] * 5
    # requests in flight beside all of them end well, with one text, and the whole takes no longer than one does
    assert [answer.reason for answer in met.honest if not answer.ok] == []
    assert {(answer.text, answer.attempts) for answer in met.honest} == {(met.honest[0].text, 1)}
    assert met.seconds < PATIENT.total_s


def test_no_prompt_and_no_key_goes_elsewhere(met: Met) -> None:
    """A redirect is not followed; what a server sends back of the key is redacted, and refused in a completion."""
    assert met.elsewhere == []
    assert "http://127.0.0.1:" in met.hostile["redirect-elsewhere"].reason
    assert met.hostile["echo-in-error"].reason == "HTTP 403: bad Bearer [key]"
    assert met.hostile["echo-in-fingerprint"].fingerprint == "Bearer [key]-1"
    assert met.hostile["echo-in-text"].text == ""


# Whole runs: each completion is on disk once, each failure with its kind.

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
    requests = [request.id for round_ in plan.rounds for request in round_.requests if request.target]
    assert Counter(completion.request for completion in run.completions) == Counter(requests)
    traces: dict[str, set[str]] = {}
    for completion in run.completions:
        prompt, name = prompts[completion.prompt], prompts[completion.prompt].removeprefix(PREFIX)
        kind = completion.served and completion.served.kind
        if name == prompt:
            assert completion.status == "ok", completion.reason
            traces.setdefault(prompt, set()).add(completion.trace)
        elif KINDS[name]:
            assert (completion.status, kind) == ("error", KINDS[name]), (prompt, completion.reason)
        elif name in ODD_COUNTS:
            assert completion.served is not None
            assert completion.served.odd == [NOTES[name]]
    assert [len(some) for some in traces.values()] == [1, 1, 1]
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
