"""The fake server keeps its word, and breaks it in the one way it is told to: what other tests stand on."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Coroutine
from typing import Any

import pytest

from nondet.endpoint.arms import Answer, Ask
from nondet.endpoint.client import connect
from tests.endpoint.honest import Honest, honest

PROMPTS = ("Once upon a time", "The cat sat on the", "In the beginning was the", "It was a dark and stormy")


def run(work: Coroutine[Any, Any, Any]) -> Any:
    return asyncio.run(asyncio.wait_for(work, 60))


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


def ask_both(
    dialect: str = "vllm", wanted: list[Ask] | None = None, **options: Any
) -> tuple[list[Answer], list[Answer]]:
    async def work() -> tuple[list[Answer], list[Answer]]:
        async with honest(dialect, **options) as server:
            return await solo_and_loaded(server, asks() if wanted is None else wanted)

    pair: tuple[list[Answer], list[Answer]] = run(work())
    return pair


def tokens(answers: list[Answer]) -> set[Any]:
    return {(answer.ask[0], answer.token_ids) for answer in answers}


def traces(answers: list[Answer]) -> set[Any]:
    return {(answer.ask[0], answer.logprobs) for answer in answers}


def test_an_honest_server_gives_one_answer_under_any_load() -> None:
    """Tokens and logprobs, alone and among others, with and without a cache hit; requests did overlap."""

    async def work() -> tuple[list[Answer], list[Answer], int]:
        async with honest("vllm") as server:
            return (*await solo_and_loaded(server, asks()), server.most_running)

    solo, loaded, most = run(work())
    assert len(tokens(solo)) == len(traces(solo)) == len(PROMPTS)
    assert (tokens(solo), traces(solo)) == (tokens(loaded), traces(loaded))
    assert most > 8
    assert all(answer.chosen_is_top == 12 for answer in solo)


def test_batch_noise_flips_tokens_or_logprobs_alone() -> None:
    """Large noise changes completions under load, a factor their traces only; alone nothing changes."""
    truth = tokens(ask_both()[0])
    solo, loaded = ask_both(batch_noise=0.02)
    assert tokens(solo) == truth != tokens(loaded)
    assert len(tokens(loaded)) > len(PROMPTS)
    solo, loaded = ask_both(batch_scale=1e-6)
    assert tokens(solo) == tokens(loaded) == truth
    assert len(traces(solo)) == len(PROMPTS) < len(traces(loaded))


@pytest.mark.parametrize("dialect", ["vllm", "sglang", "llama.cpp"])
def test_a_cache_hit_changes_answers_if_it_cheats_so(dialect: str) -> None:
    """The first answer is cold, the second has hits; asked not to use the cache, or flushed, it is cold again."""

    async def work() -> None:
        async with honest(dialect, cache_noise=0.02) as server, connect(server.url) as client:
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

    run(work())


def test_greedy_that_samples_is_seen() -> None:
    """At temperature 0 the chosen token is not always the top one, and texts vary."""
    solo, _ = ask_both(greedy_samples=True)
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
def test_seeds_are_kept_or_not(dialect: str, cheat: dict[str, bool], seed: int | None, varies: bool) -> None:
    """At T > 0 a seed gives one text and none gives many, unless it cheats."""
    solo, loaded = ask_both(dialect, asks(temperature=1.0, seed=seed), **cheat)
    texts = {(answer.ask[0], answer.text) for answer in solo + loaded}
    assert (len(texts) > len(PROMPTS)) == varies


def test_other_cheats_do_what_they_say() -> None:
    """More tokens than asked for, logprobs of another distribution, no ids, no logprobs, a change at restart."""
    honest_ones, _ = ask_both()
    more, _ = ask_both(max_tokens_ignored=True)
    assert {len(answer.token_ids or ()) for answer in more} == {24}
    assert more[0].notes == ("more tokens than max_tokens",)
    flat, _ = ask_both(other_logprobs=True)
    assert tokens(flat) == tokens(honest_ones)
    assert not traces(flat) & traces(honest_ones)
    without, _ = ask_both(no_ids=True, no_logprobs=True)
    assert (without[0].token_ids, without[0].logprobs, without[0].chosen_is_top) == (None, b"", None)
    assert without[0].text == honest_ones[0].text

    async def restarted() -> list[Answer]:
        async with honest("vllm", restart_changes=True) as server, connect(server.url) as client:
            before = await client.complete(asks()[0])
            server.restart()
            return [before, await client.complete(asks()[0])]

    before, after = run(restarted())
    assert before.text != after.text
    assert before.fingerprint != after.fingerprint


def test_texts_may_end() -> None:
    """With `eos` some texts end early and say so; where the server is told to go on, none does."""
    ended, _ = ask_both("vllm", asks(max_tokens=200)[::5], eos=True)
    assert {answer.finish for answer in ended} >= {"eos"}
    assert all(len(answer.token_ids or ()) < 200 for answer in ended if answer.finish == "eos")
    on, _ = ask_both("vllm", asks(max_tokens=200, ignore_eos=True)[::5], eos=True)
    assert {answer.finish for answer in on} == {"length"}


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
def test_counters_show_what_runs(dialect: str, path: str, running: str | None, cheats: dict[str, bool]) -> None:
    """The server's own count of running requests rises and falls with the load, whatever page it is on."""

    async def work() -> None:
        async with honest(dialect, token_s=0.01, **cheats) as server, connect(server.url + path) as client:
            work = [asyncio.create_task(client.complete(ask)) for ask in asks()[:6]]
            while server.running < 6:
                await asyncio.sleep(0.001)
            during = await client.metrics()
            await asyncio.gather(*work)
            after = await client.metrics()
            assert (during.get(running or ""), after.get(running or "")) == ((6, 0) if running else (None, None))

    run(work())


def test_it_can_be_started_by_hand() -> None:
    """As `python -m tests.endpoint.honest`, which prints where it listens."""
    command = [sys.executable, "-m", "tests.endpoint.honest", "--dialect", "sglang", "--cheat", "batch_noise=0.01"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            url = process.stdout.readline().strip()

            async def work() -> Answer:
                async with connect(url) as client:
                    return await client.complete(Ask(id="a", prompt="x", max_tokens=3))

            assert run(work()).ok
        finally:
            process.kill()
