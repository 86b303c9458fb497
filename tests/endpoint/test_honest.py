"""The fake server keeps its word, and breaks it in the one way it is told to: what other tests stand on."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from nondet.endpoint.arms import Answer, Ask
from nondet.endpoint.client import connect
from tests.endpoint.honest import Honest
from tests.endpoint.wire import awaited

PROMPTS = ("Once upon a time", "The cat sat on the", "In the beginning was the", "It was a dark and stormy")


def asks(**fields: Any) -> list[Ask]:
    """Each prompt five times."""
    fields = {"max_tokens": 12, **fields}
    return [Ask(id=f"{p}.{i}", prompt=prompt, **fields) for p, prompt in enumerate(PROMPTS) for i in range(5)]


async def solo_and_loaded(server: Honest, wanted: list[Ask]) -> tuple[list[Answer], list[Answer]]:
    """The same requests one after the other and all at once."""
    async with connect(server.url) as client:
        solo = [await client.complete(ask) for ask in wanted]
        loaded = list(await asyncio.gather(*(client.complete(ask) for ask in wanted)))
    assert all(answer.ok for answer in solo + loaded)
    return solo, loaded


async def ask_both(
    dialect: str = "vllm", wanted: list[Ask] | None = None, **options: Any
) -> tuple[list[Answer], list[Answer]]:
    async with Honest(dialect, **options) as server:
        return await solo_and_loaded(server, wanted or asks())


def tokens(answers: list[Answer]) -> set[Any]:
    return {(answer.ask[0], answer.token_ids) for answer in answers}


def traces(answers: list[Answer]) -> set[Any]:
    return {(answer.ask[0], answer.logprobs) for answer in answers}


@awaited
async def test_an_honest_server_gives_one_answer_under_any_load() -> None:
    """Tokens and logprobs, alone and among others, with and without a cache hit; requests did overlap."""

    async with Honest("vllm") as server:
        solo, loaded = await solo_and_loaded(server, asks())
    assert len(tokens(solo)) == len(traces(solo)) == len(PROMPTS)
    assert (tokens(solo), traces(solo)) == (tokens(loaded), traces(loaded))
    assert server.most_running > 8
    assert all(answer.chosen_is_top == 12 for answer in solo)


@awaited
async def test_batch_noise_flips_tokens_or_logprobs_alone() -> None:
    """Large noise changes completions under load, a factor their traces only; alone nothing changes."""
    truth = tokens((await ask_both())[0])
    solo, loaded = await ask_both(batch_noise=0.02)
    assert tokens(solo) == truth != tokens(loaded)
    assert len(tokens(loaded)) > len(PROMPTS)
    solo, loaded = await ask_both(batch_scale=1e-6)
    assert tokens(solo) == tokens(loaded) == truth
    assert len(traces(solo)) == len(PROMPTS) < len(traces(loaded))


@pytest.mark.parametrize("dialect", ["vllm", "sglang", "llama.cpp"])
@awaited
async def test_a_cache_hit_changes_answers_if_it_cheats_so(dialect: str) -> None:
    """The first answer is cold, the second has hits; asked not to use the cache, or flushed, it is cold again."""
    async with Honest(dialect, cache_noise=0.02) as server, connect(server.url) as client:
        for prompt in PROMPTS:
            cold, warm, salted = [
                await client.complete(Ask(id="a", prompt=prompt * 8, max_tokens=48, cached=cached))
                for cached in (None, None, False)
            ]
            assert (cold.cached_tokens, salted.cached_tokens) == (0, 0)
            assert warm.cached_tokens == (len(prompt) * 8 - 1) // 4 * 4
            assert salted.token_ids == cold.token_ids
            assert warm.logprobs != cold.logprobs
        flushed = await client.flush()
        assert flushed == (dialect != "llama.cpp")
        if flushed:
            assert (await client.complete(Ask(id="a", prompt=PROMPTS[0] * 8, max_tokens=4))).cached_tokens == 0


@awaited
async def test_greedy_that_samples_is_seen() -> None:
    """At temperature 0 the chosen token is not always the top one, and texts vary."""
    solo, _ = await ask_both(greedy_samples=True)
    assert len(tokens(solo)) > len(PROMPTS)
    assert any(answer.chosen_is_top is not None and answer.chosen_is_top < 12 for answer in solo)


@pytest.mark.parametrize(
    ("dialect", "cheat", "seed", "varies"),
    [
        ("openai", {}, 7, False),
        ("llama.cpp", {}, 7, False),
        ("sglang", {}, 7, False),
        ("sglang", {}, None, True),
        ("vllm", {"seed_ignored": True}, 7, True),
        ("vllm", {"never_varies": True}, None, False),
    ],
)
@awaited
async def test_seeds_are_kept_or_not(dialect: str, cheat: dict[str, bool], seed: int | None, varies: bool) -> None:
    """At T > 0 a seed gives one text and none gives many, unless it cheats."""
    solo, loaded = await ask_both(dialect, asks(temperature=1.0, seed=seed), **cheat)
    texts = {(answer.ask[0], answer.text) for answer in solo + loaded}
    assert (len(texts) > len(PROMPTS)) == varies


@awaited
async def test_other_cheats_do_what_they_say() -> None:
    """More tokens than asked for, logprobs of another distribution, no ids, no logprobs, a change at restart."""
    honest_ones, _ = await ask_both()
    more, _ = await ask_both(max_tokens_ignored=True)
    assert {len(answer.token_ids or ()) for answer in more} == {24}
    assert more[0].notes == ("more tokens than max_tokens",)
    flat, _ = await ask_both(other_logprobs=True)
    assert tokens(flat) == tokens(honest_ones)
    assert not traces(flat) & traces(honest_ones)
    without, _ = await ask_both(no_ids=True, no_logprobs=True)
    assert (without[0].token_ids, without[0].logprobs, without[0].chosen_is_top) == (None, b"", None)
    assert without[0].text == honest_ones[0].text

    async with Honest("vllm", restart_changes=True) as server, connect(server.url) as client:
        before = await client.complete(asks()[0])
        server.restart()
        after = await client.complete(asks()[0])
    assert before.text != after.text
    assert before.fingerprint != after.fingerprint


@awaited
async def test_texts_may_end() -> None:
    """With `eos` some texts end early and say so."""
    ended, _ = await ask_both("vllm", asks(max_tokens=200)[::5], eos=True)
    assert {answer.finish for answer in ended} >= {"eos"}
    assert all(len(answer.token_ids or ()) < 200 for answer in ended if answer.finish == "eos")


@pytest.mark.parametrize(
    ("dialect", "path", "running", "cheats"),
    [
        ("vllm", "", "vllm:num_requests_running", {}),
        ("vllm", "/v1/chat/completions", "vllm:num_requests_running", {}),
        ("sglang", "", "sglang:num_running_reqs", {}),
        ("llama.cpp", "", "llamacpp:requests_processing", {}),
        ("llama.cpp", "", "llamacpp:requests_processing", {"no_metrics": True}),
        ("openai", "", None, {}),
    ],
)
@awaited
async def test_counters_show_what_runs(dialect: str, path: str, running: str | None, cheats: Any) -> None:
    """The server's own count of running requests rises and falls with the load, whatever page it is on."""
    async with Honest(dialect, token_s=0.01, **cheats) as server, connect(server.url + path) as client:
        work = [asyncio.create_task(client.complete(ask)) for ask in asks()[:6]]
        while server.running < 6:
            await asyncio.sleep(0.001)
        during = await client.metrics()
        await asyncio.gather(*work)
        after = await client.metrics()
        assert (during.get(running or ""), after.get(running or "")) == ((6, 0) if running else (None, None))
