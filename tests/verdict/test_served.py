"""Verdicts on servers that a reviewer found wrong: made records, none of which may be called more than it shows."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
import pytest

from nondet.core.records import Completion, ContractAnswer, Round, Run, Served, ServerSeen, Traffic
from nondet.endpoint.arms import Answer, KnownBy, Tokens
from nondet.endpoint.client import HttpClient
from nondet.endpoint.collect import Watcher
from nondet.endpoint.formats import FORMATS, Parts
from nondet.endpoint.http import Times
from nondet.verdict.findings import Finding
from nondet.verdict.gate import exit_code, judge
from nondet.verdict.served import chance_of, evidence, pooled_odds, proven_tries, subjects
from nondet.verdict.wording import words
from tests import build
from tests.build import beside, header


def completion(
    number: int, arm: str, trace: str = "A", prompt: int = 0, *, cached: int = 0, status: str = "ok", **fields: Any
) -> Completion:
    good = status == "ok"
    served = Served(cached_tokens=cached, kind="" if good else "http-500")
    fields = {"impl": "server", "prompt": prompt, "arm": arm, "served": served, "tokens_digest": trace * good} | fields
    return build.completion(f"{arm} {number}", trace * good, **fields)


def ended(number: int, arm: str, targets: int, concurrent: int, impl: str = "server") -> Round:
    """A round; of a loaded one the streams overlapped, its neighbours' at least."""
    solo = arm == "solo"
    seen = {"decoding_most": 0 if solo else 3, "running_most": 1 if solo else None, "in_company": concurrent}
    traffic = Traffic(pattern="x", concurrency=8, polls=3, **seen)  # type: ignore[arg-type] # of several types
    figures: dict[str, Any] = {"targets": targets, "others": 0, "steps": 0, "tokens": 1, "seconds": 1.0}
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
    """Every answer is odd with a chance of a tenth whatever runs: prompts whose solo answers agree by luck prove
    nothing together."""
    rng = np.random.default_rng(1)
    completions, rounds = [], []
    for _ in range(30):
        prompt = len(rounds) // 9
        for load in range(9):
            number, arm = len(rounds), "solo" if load < 4 else "loaded"
            for i in range(1 if arm == "solo" else 4):
                trace = "B" if rng.random() < 0.1 else "A"
                completions.append(completion(10 * number + i, arm, trace, prompt, round=number))
            rounds.append(ended(number, arm, 1 if arm == "solo" else 4, 0 if arm == "solo" else 4))
    verdicts = judge(made(completions, rounds))
    assert len(verdicts) == 30
    assert not [v for v in verdicts if Finding.BATCH in v.findings]
    assert [v for v in verdicts if Finding.UNATTRIBUTED in v.findings]


def test_neighbours_alone_prove_no_load() -> None:
    """They streamed together, and no request under study is known to have been among them. With one that was it is
    clean, and one that parts is named."""
    assert judge(simple())[0].finding == Finding.CLEAN
    assert exit_code(simple(), "divergent")[0] == 0
    assert judge(simple(trace="B"))[0].finding == Finding.BATCH
    run = simple(concurrent=0)
    assert judge(run)[0].finding == Finding.UNPROVEN
    assert "none of the compared requests is known to have been among them" in " ".join(judge(run)[0].notes)
    loaded = evidence(run)["server", 0]["loaded"]
    assert (loaded.proof, loaded.concurrent, loaded.rounds) == (False, 0, 0)
    assert judge(simple(concurrent=0, trace="B"))[0].finding == Finding.UNATTRIBUTED
    assert evidence(simple(concurrent=1))["server", 0]["loaded"].concurrent == 30


def test_a_watcher_waits_for_every_prompt_and_server() -> None:
    """The power is reached by one prompt's loads; the other has met none yet. Loads of the first server are no proof of
    the second."""
    watcher = Watcher(0.7, 0.95, "load", prompts=2)
    for number in range(5):
        answers = [completion(4 * number + i, "loaded", round=number) for i in range(4)]
        assert not watcher.enough(ended(number, "loaded", 4, 4), answers)
    answers = [completion(20 + i, "loaded", prompt=1, round=5) for i in range(4)]
    assert not watcher.enough(ended(5, "loaded", 4, 0), answers)
    assert watcher.enough(ended(6, "loaded", 4, 4), answers)
    assert not watcher.diverged
    watcher = Watcher(0.7, 0.95, "load")
    for impl in ("server", "server-2"):
        answers = [completion(i, "loaded", round=0, impl=impl) for i in range(4)]
        assert [watcher.enough(ended(n, "loaded", 4, 4, impl), answers) for n in range(3)] == [False, False, True]
    assert (watcher.loads, watcher.diverged) == (6, False)


def test_a_role_is_no_first_token() -> None:
    """Servers send one as soon as a request is let in; two such streams overlap while one of them only waits."""

    async def first() -> list[float | None]:
        client = HttpClient("http://127.0.0.1:1", model="m", protocol="openai-chat", stream=True)
        client._format = FORMATS["openai-chat"]
        parts, times, seen = Parts(streamed=True), Times(), []
        for delta in ('{"role":"assistant","content":""}', '{"content":"a"}'):
            event = f'{{"choices":[{{"index":0,"delta":{delta},"finish_reason":null}}]}}'
            client._take_event(event.encode(), parts, times)
            seen.append(times.first)
        return seen

    role, text = asyncio.run(first())
    assert role is None
    assert text is not None


def test_lost_logprobs_are_incomparable() -> None:
    """An answer without them, where others have them, is not another trace."""
    for known_by in [KnownBy.IDS, KnownBy.BYTES]:
        answer = Answer(ask="a", text="ab", token_ids=(1, 2), token_bytes=(b"a", b"b"), finish="length")
        assert not isinstance(Tokens(known_by).trace(answer), str)
        tokens = Tokens(known_by)
        tokens.with_logprobs = True
        assert tokens.trace(answer) == "it has no logprobs, and others of this run do"
        empty = Answer(ask="a", text="", token_ids=(), token_bytes=(), finish="eos")
        assert not isinstance(tokens.trace(empty), str)


def changed(run: Run, change: Callable[[Completion], dict[str, Any]]) -> Run:
    """With these fields of its completions set otherwise."""
    return msgspec.structs.replace(run, completions=[msgspec.structs.replace(c, **change(c)) for c in run.completions])


def traffic(run: Run, arm: str, **fields: Any) -> Run:
    """With these fields in the traffic of an arm's rounds."""
    rounds = []
    for r in run.rounds:
        seen = msgspec.structs.replace(r.traffic, **fields) if r.arm == arm and r.traffic else r.traffic
        rounds.append(msgspec.structs.replace(r, traffic=seen))
    return msgspec.structs.replace(run, rounds=rounds, complete=True)


def test_each_server_has_its_own_verdict() -> None:
    """NaN, bits that part under load, failures, a broken contract: nothing of one server's is the other's."""
    clean, answer = simple(), ContractAnswer(impl="server", question="greedy", answer="no", evidence="seen")
    for run, finding in [
        (changed(simple(), lambda _: {"nonfinite": 1}), Finding.WRONG),
        (simple(trace="B"), Finding.BATCH),
        (simple(concurrent=0), Finding.UNPROVEN),
        (msgspec.structs.replace(simple(), contract=[answer]), Finding.CLEAN),
    ]:
        assert judge(run)[0].finding == finding
        for both in ((run, clean), (clean, run)):
            alone = [judge(one)[0] for one in both]
            verdicts = judge(beside(*both, "server-2"))
            assert [(v.findings, v.text) for v in verdicts] == [(v.findings, v.text) for v in alone]
            last = "Solo answers compared with those of server: 4 identical."
            assert [v.notes for v in verdicts] == [alone[0].notes, (*alone[1].notes, last)]


def test_each_server_is_credited_with_its_own_loads() -> None:
    """Those of another server in the same file would overstate the power of a gate."""
    small, large = simple(loads=3), simple(loads=30)
    assert (proven_tries(small, "server"), proven_tries(large, "server")) == ((12, 3), (120, 30))
    both = beside(small, large, "server-2")
    assert (proven_tries(both, "server"), proven_tries(both, "server-2")) == ((12, 3), (120, 30))
    alone = msgspec.structs.replace(large, completions=[c for c in large.completions if c.arm == "loaded"])
    assert proven_tries(alone, "server") == (119, 29)  # the first of each is what the others are held against


def test_two_at_a_time_are_a_load_and_one_is_none() -> None:
    """At the limit, by streams and by what the server says it runs."""
    for decoding, running, loads in [(2, None, 30), (1, None, 0), (0, 2.0, 30), (0, 1.0, 0)]:
        run = traffic(simple(), "loaded", decoding_most=decoding, running_most=running)
        loaded = evidence(run)["server", 0]["loaded"]
        assert (loaded.rounds, loaded.proof, proven_tries(run, "server")[1]) == (loads, loads > 0, loads)
        assert judge(run)[0].finding == (Finding.CLEAN if loads else Finding.UNPROVEN)


def test_a_cache_is_named_where_what_it_gives_is_one_answer() -> None:
    """An arm that does not agree with itself may have parted by the run."""
    for warm, finding in [("BBBBBB", Finding.CACHE), ("BBBBBC", Finding.UNATTRIBUTED)]:
        completions = [completion(i, "cold", round=i) for i in range(6)]
        completions += [completion(i, "warm", trace, round=6 + i, cached=5) for i, trace in enumerate(warm)]
        [comparison] = subjects(made(completions, []))[0].comparisons
        assert (comparison.arm, comparison.base, comparison.finding) == ("warm", "cold", finding)
        assert comparison.why == (() if finding == Finding.CACHE else ("Warm does not agree with itself.",))


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


def test_a_cache_is_proven_by_every_answer() -> None:
    """Cold where none had a token cached, warm where all had one; where answers do not say, by a counter of its: one
    that stood still says it of every answer."""
    for arm, cached, proven, said in [
        ("cold", (0, 0), True, "the server had 0 prompt tokens cached"),
        ("cold", (0, 1), False, "the server had 0-1 prompt tokens cached"),
        ("warm", (5, 5), True, "the server had 5 prompt tokens cached"),
        ("warm", (1, 5), True, "the server had 1-5 prompt tokens cached"),
        ("warm", (0, 5), False, "the server had 0-5 prompt tokens cached"),
    ]:
        run = made([completion(i, arm, round=i, cached=n) for i, n in enumerate(cached)], [])
        seen = evidence(run)["server", 0][arm]
        assert (seen.proof, words(seen.shown)) == (proven, said)
    for arm, hits, proven in [("cold", 0.0, True), ("cold", 3.0, False), ("warm", 3.0, True)]:
        completions = [completion(i, arm, round=i, served=Served()) for i in range(2)]
        run = made(completions, [ended(i, arm, 1, 0) for i in range(2)])
        seen = evidence(traffic(run, arm, counters={"vllm:prefix_cache_hits_total": hits / 2}))["server", 0][arm]
        assert seen.proof == proven
        assert {n: answers.total() for n, answers in seen.by_cache.items()} == {(None if hits else 0): 2}


def cold_and_cached(alone: tuple[str, str], loaded: str) -> Run:
    """Six answers without and 16 with a cached prefix alone, and 40 of each under load, with these traces."""
    solo = [completion(i, "solo", alone[1], round=i, cached=16) for i in range(10)]
    cold = [completion(i, "cold", alone[0], round=10 + i) for i in range(6)]
    warm = [completion(i, "warm", alone[1], round=20 + i, cached=16) for i in range(6)]
    traces = [(cached, loaded[i % len(loaded)] if cached else alone[0]) for cached in (0, 16) for i in range(40)]
    under = [completion(i, "loaded", t, round=30 + i % 20, cached=c) for i, (c, t) in enumerate(traces)]
    rounds = [ended(number, "solo", 1, 0) for number in (*range(10), *range(10, 16), *range(20, 26))]
    rounds = [msgspec.structs.replace(r, arm={0: "solo", 1: "cold", 2: "warm"}[r.round // 10]) for r in rounds]
    return made([*solo, *cold, *warm, *under], [*rounds, *(ended(30 + i, "loaded", 4, 4) for i in range(20))])


def test_an_answer_under_load_is_held_against_those_that_found_as_much_cached() -> None:
    """Cached ones that give the bits of a cold prefix under load depend on the load, though cold ones gave these bits
    alone; where only the cache decides, or chance, no load is blamed."""
    assert judge(cold_and_cached(("A", "A"), "A"))[0].finding == Finding.CLEAN
    assert judge(cold_and_cached(("A", "B"), "A"))[0].findings == (Finding.BATCH, Finding.CACHE)
    assert judge(cold_and_cached(("A", "B"), "B"))[0].findings == (Finding.CACHE,)
    assert judge(cold_and_cached(("A", "B"), "B" * 39 + "C"))[0].findings == (Finding.CACHE, Finding.UNATTRIBUTED)
