"""What servers do wrong: each behaviour has its kind of failure, in bounded time, and hurts no other request."""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace
from types import SimpleNamespace

import pytest

from nondet.endpoint.arms import Ask
from nondet.endpoint.client import HttpClient
from nondet.endpoint.http import Limits
from tests.endpoint.honest import Honest, awaited
from tests.endpoint.hostile import BEHAVIOURS, KINDS, ODD_COUNTS, PREFIX, Hostile

KEY = "sk-hostile-0123456789"
# What only time ends is met in haste; the rest is given more time than a busy machine takes for it.
PATIENT = Limits(total_s=40, attempts=4, first_wait_s=0.01, most_wait_s=0.05)
HASTY = Limits(first_byte_s=1, idle_s=1, total_s=1.5)
_HONEST = 40

# Attempts before the last: of the kind that ended it, or of another where the next one was answered.
AGAIN = {"busy-for-a-year": 3, "busy-for-ever": 3, "broken": 1, "reset": 3, "half-a-header": 3}
AGAIN |= dict.fromkeys(("half-closed", "reset-in-body", "stream-cut"), 2)
ONCE = {"reset-once": "reset", "busy-once": "http-429", "busy-until-a-date": "http-503"}
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


async def _meet() -> SimpleNamespace:
    """All at once, by one client: an answer for each behaviour, honest ones, who was requested elsewhere."""
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
        took, honest = time.monotonic() - begun, answers[len(asks) :]
        return SimpleNamespace(hostile=named, honest=honest, seconds=took, elsewhere=elsewhere.requests)


@pytest.fixture(scope="module")
def met() -> SimpleNamespace:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("NONDET_API_KEY", KEY)
        return asyncio.run(asyncio.wait_for(_meet(), 60))


def test_each_is_one_line(met: SimpleNamespace) -> None:
    for name, answer in met.hostile.items():
        assert answer.ask == name
        assert answer.kind == KINDS[name], (name, answer.reason)
        refusals = {ONCE[name]: 1} if name in ONCE else {KINDS[name]: AGAIN[name]} if name in AGAIN else {}
        assert dict(answer.refusals) == refusals, name
        assert answer.attempts == 1 + sum(answer.refusals.values()), name
        assert bool(answer.reason) == bool(answer.kind), name
        assert len(answer.reason) <= 300, name
        assert answer.reason.isprintable(), name
        assert KEY not in repr(answer), name
        limits = HASTY if KINDS[name] == "timeout" else PATIENT
        assert 0 < answer.sent <= answer.done < answer.sent + limits.total_s + 5, name
        assert answer.notes == ((NOTES[name],) if name in NOTES else ()), name
        assert not answer.ok or answer.text == "ab" or name == "usage-contradicts", name
    # a count that counts nothing is not taken; the completion and its other counts are
    answers = [met.hostile[name] for name in ODD_COUNTS]
    assert [a.prompt_tokens for a in answers] == [None, None, 1, 1, 1]
    assert [a.completion_tokens for a in answers] == [2, 2, None, None, 2]
    assert [a.cached_tokens for a in answers] == [None] * 5
    # requests in flight beside all of them end well, with one text, and the whole takes no longer than one does
    assert [answer.reason for answer in met.honest if not answer.ok] == []
    assert {(answer.text, answer.attempts) for answer in met.honest} == {(met.honest[0].text, 1)}
    assert met.seconds < PATIENT.total_s


@awaited
async def test_patience_with_a_full_server_ends() -> None:
    limits = replace(PATIENT, patience_s=0.0)
    async with Hostile() as server, HttpClient(server.url, protocol="openai", limits=limits) as client:
        for prompt, attempts in [("busy-for-ever", 2), ("busy-for-ever", 1), ("no-done", 1), ("busy-for-ever", 2)]:
            answer = await client.complete(Ask(id="a", prompt=PREFIX + prompt, max_tokens=4))
            assert (answer.kind, answer.attempts) == (KINDS[prompt], attempts)


def test_no_prompt_and_no_key_goes_elsewhere(met: SimpleNamespace) -> None:
    assert met.elsewhere == []
    assert "http://127.0.0.1:" in met.hostile["redirect-elsewhere"].reason
    assert met.hostile["echo-in-error"].reason == "HTTP 403: bad Bearer [key]"
    assert met.hostile["echo-in-fingerprint"].fingerprint == "Bearer [key]-1"
    assert met.hostile["echo-in-text"].text == ""
