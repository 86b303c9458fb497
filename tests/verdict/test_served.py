"""Verdicts on servers that a reviewer found wrong: made records, none of which may be called more than it shows."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace

from nondet.core.records import Completion, Round, Run, Served, ServerSeen, Traffic
from nondet.endpoint.arms import Answer, KnownBy, Tokens
from nondet.endpoint.client import HttpClient
from nondet.endpoint.collect import Watcher
from nondet.endpoint.formats import FORMATS, Parts
from nondet.endpoint.http import Times
from nondet.verdict.findings import Finding
from nondet.verdict.gate import judge
from nondet.verdict.served import chance_of, evidence, pooled_odds
from tests import build
from tests.build import header


def completion(
    number: int, arm: str, trace: str = "A", prompt: int = 0, *, cached: int = 0, status: str = "ok", **fields: Any
) -> Completion:
    good = status == "ok"
    served = Served(cached_tokens=cached, kind="" if good else "http-500")
    fields = {"impl": "server", "prompt": prompt, "arm": arm, "served": served, "tokens_digest": trace * good} | fields
    return build.completion(f"{arm} {number}", trace * good, **fields)


def ended(number: int, arm: str, targets: int, concurrent: int, impl: str = "server") -> Round:
    """A round; of a loaded one the streams overlapped, its neighbours' at least."""
    decoding, running = (0, 1.0) if arm == "solo" else (3, None)
    seen: dict[str, Any] = {"decoding_most": decoding, "running_most": running, "in_company": concurrent}
    figures: dict[str, Any] = {"targets": targets, "others": 0, "steps": 0, "tokens": 1, "seconds": 1.0}
    traffic = Traffic(pattern="x", concurrency=8, polls=3, **seen)
    return Round(impl=impl, round=number, arm=arm, traffic=traffic, **figures)


def made(completions: list[Completion], rounds: list[Round]) -> Run:
    plan = {"endpoint": {}, "arms": {"solo": 4, "loaded": 8}, "temperature": 0.0}
    plan["prompts"] = [{"text": f"p{i}", "tokens": 5} for i in range(30)]
    names = {"url": "u", "protocol": "p", "model": "m", "answered_as": "m", "fingerprint": "f", "known_by": "ids"}
    seen = ServerSeen(impl="server", number=0, listed=[], logprobs=True, **names)
    return Run(header=header("sample", plan), completions=completions, rounds=rounds, servers=[seen])


def simple(*, concurrent: int = 4, trace: str = "A", prompt: int = 0, loads: int = 30, **fields: Any) -> Run:
    """Four answers alone, and `loads` loads of four, of which so many ran beside others."""
    solo = [completion(i, "solo", round=i, **fields | {"status": "ok"}) for i in range(4)]
    loaded = [completion(i, "loaded", trace, prompt, round=10 + i // 4, **fields) for i in range(4 * loads)]
    rounds = [ended(i, "solo", 1, 0) for i in range(4)] + [ended(10 + i, "loaded", 4, concurrent) for i in range(loads)]
    return made(solo + loaded, rounds)


def test_noise_at_many_prompts_is_not_blamed_on_the_load() -> None:
    """Every answer is odd with a chance of a tenth: prompts whose solo answers agree by luck prove nothing together."""
    rng = np.random.default_rng(1)
    completions, rounds = [], []
    for number in range(30 * 9):
        arm, targets, concurrent = ("solo", 1, 0) if number % 9 < 4 else ("loaded", 4, 4)
        for i in range(targets):
            trace = "B" if rng.random() < 0.1 else "A"
            completions.append(completion(10 * number + i, arm, trace, number // 9, round=number))
        rounds.append(ended(number, arm, targets, concurrent))
    found = [set(v.findings) for v in judge(made(completions, rounds))]
    assert len(found) == 30
    assert Finding.BATCH not in set.union(*found)
    assert Finding.UNATTRIBUTED in set.union(*found)


def test_a_watcher_waits_for_every_prompt_and_server() -> None:
    """The power that one prompt's loads or one server's reach is not that of the other."""
    watcher = Watcher(0.7, 0.95, "load", prompts=2)
    first, second = ([completion(4 * p + i, "loaded", prompt=p, round=p) for i in range(4)] for p in (0, 1))
    assert not any(watcher.enough(ended(number, "loaded", 4, 4), first) for number in range(5))
    assert not watcher.enough(ended(5, "loaded", 4, 0), second)
    assert watcher.enough(ended(6, "loaded", 4, 4), second)
    assert not watcher.diverged
    watcher = Watcher(0.7, 0.95, "load")
    for impl in ("server", "server-2"):
        answers = [completion(i, "loaded", round=0, impl=impl) for i in range(4)]
        assert [watcher.enough(ended(n, "loaded", 4, 4, impl), answers) for n in range(3)] == [False, False, True]
    assert (watcher.loads, watcher.diverged) == (6, False)


def test_a_role_is_no_first_token() -> None:
    """Servers send one as soon as a request is let in; two such streams overlap while one of them only waits."""

    async def first() -> list[bool]:
        client = HttpClient("http://127.0.0.1:1", model="m", protocol="openai-chat", stream=True)
        client._format = FORMATS["openai-chat"]
        parts, times, seen = Parts(streamed=True), Times(), []
        for delta in ('{"role":"assistant","content":""}', '{"content":"a"}'):
            event = f'{{"choices":[{{"index":0,"delta":{delta},"finish_reason":null}}]}}'
            client._take_event(event.encode(), parts, times)
            seen.append(times.first is not None)
        return seen

    assert asyncio.run(first()) == [False, True]


def test_lost_logprobs_are_incomparable() -> None:
    """An answer without them, where others have them, is not another trace."""
    answer = Answer(ask="a", text="ab", token_ids=(1, 2), token_bytes=(b"a", b"b"), finish="length")
    empty = Answer(ask="a", text="", token_ids=(), token_bytes=(), finish="eos")
    for known_by in [KnownBy.IDS, KnownBy.BYTES]:
        assert not isinstance(Tokens(known_by).trace(answer), str)
        tokens = Tokens(known_by)
        tokens.with_logprobs = True
        assert tokens.trace(answer) == "it has no logprobs, and others of this run do"
        assert not isinstance(tokens.trace(empty), str)


def changed(run: Run, change: Callable[[Completion], dict[str, Any]]) -> Run:
    return replace(run, completions=[replace(c, **change(c)) for c in run.completions])


def traffic(run: Run, arm: str, **fields: Any) -> Run:
    rounds = [replace(r, traffic=replace(r.traffic, **fields)) if r.arm == arm and r.traffic else r for r in run.rounds]
    return replace(run, rounds=rounds, complete=True)


def test_chances_multiply_over_prompts_whose_base_agrees_with_itself() -> None:
    """And over none where one base does not: the others would be chosen by their luck."""
    completions = [completion(i, "solo", prompt=p, round=10 * p + i) for p in (0, 1) for i in range(3)]
    completions += [completion(i, "loaded", "B", p, round=10 * p + 5) for p in (0, 1) for i in range(3)]
    known = evidence(made(completions, []))
    one = chance_of(known["server", 0]["loaded"], known["server", 0]["solo"])
    assert one == pytest.approx(1 / 20)
    assert pooled_odds(known, "server") == {"loaded": pytest.approx(one**2)}
    assert pooled_odds(known, "server-2") == {}
    completions[0] = completion(0, "solo", "C", round=0)
    assert pooled_odds(evidence(made(completions, [])), "server") == {}


def test_a_counter_that_stood_still_says_it_of_every_answer() -> None:
    for arm, hits, fits in [("cold", 0.0, True), ("cold", 3.0, False), ("warm", 3.0, True)]:
        completions = [completion(i, arm, round=i, served=Served()) for i in range(2)]
        run = made(completions, [ended(i, arm, 1, 0) for i in range(2)])
        seen = evidence(traffic(run, arm, counters={"x_cache_hits": hits / 2}))["server", 0][arm]
        assert seen.proof == fits
        assert {n: answers.total() for n, answers in seen.by_cache.items()} == {(None if hits else 0): 2}
