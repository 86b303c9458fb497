"""The client against servers that keep their word."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import numpy as np
import pytest

from nondet.endpoint.arms import Answer, Ask, KnownBy
from nondet.endpoint.client import connect
from tests.endpoint.honest import Honest
from tests.endpoint.model import Context, step, tokenize
from tests.endpoint.wire import awaited


async def answers(dialect: str, *asks: Ask, **client: Any) -> list[Answer]:
    async with Honest(dialect) as server, connect(server.url, **client) as connection:
        return list(await asyncio.gather(*(connection.complete(ask) for ask in asks)))


def expected(prompt: str, tokens: int) -> tuple[tuple[int, ...], np.ndarray, np.ndarray]:
    """Ids, float32 logprobs and float32 margins that the hash model gives, without any server."""
    context = Context(tokenize(prompt))
    steps = [step(context, temperature=0, draw=(), eos=False, alternatives=2) for _ in range(tokens)]
    tops = np.array([[value for _, value in s.top] for s in steps], "<f4")
    return tuple(s.id for s in steps), np.array([s.logprob for s in steps], "<f4"), tops[:, 0] - tops[:, 1]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("dialect", "protocol", "known_by"),
    [
        ("openai", "openai", KnownBy.TEXT),
        ("vllm", "vllm", KnownBy.IDS),
        ("sglang", "sglang", KnownBy.IDS),
        ("llama.cpp", "llama.cpp", KnownBy.IDS),
    ],
)
@awaited
async def test_what_a_server_sends_is_what_comes_out(
    dialect: str, protocol: str, known_by: KnownBy, stream: bool
) -> None:
    """Ids, the bits of the logprobs and of the margins are the model's, streamed or not, in every dialect."""
    prompt = "Once upon a time"
    (answer,) = await answers(dialect, Ask(id="a", prompt=prompt, max_tokens=12), stream=stream)
    ids, logprobs, margins = expected(prompt, 12)
    assert answer.ok, answer.reason
    assert answer.known_by is known_by
    assert answer.text == "".join(map(chr, ids))
    assert answer.token_ids == (ids if known_by is KnownBy.IDS else None)
    assert answer.logprobs == logprobs.tobytes()
    assert answer.margins == margins.astype("<f4").tobytes()
    assert answer.chosen_is_top == 12
    assert (answer.prompt_tokens, answer.completion_tokens, answer.finish) == (16, 12, "length")
    assert answer.sent < answer.done
    assert (answer.first is not None) == stream
    assert not answer.notes


@pytest.mark.parametrize("dialect", ["vllm", "sglang", "llama.cpp"])
@awaited
async def test_half_a_pair_in_a_prompt_is_no_error_of_ours(dialect: str) -> None:
    """Half a surrogate pair is JSON, if no UTF-8."""
    (half,) = await answers(dialect, Ask(id="a", prompt="half \ud83d", max_tokens=8))
    assert half.ok, half.reason


@awaited
async def test_a_thousand_tokens_are_read_in_good_time() -> None:
    """Long answers with many alternatives stay within their bounds, and parsing them does not hold others up."""
    large = Ask(id="a", prompt="Once upon a time", max_tokens=1000, top_logprobs=20)
    begun = time.perf_counter()
    (answer,) = await answers("vllm", large, stream=True)
    assert answer.ok, answer.reason
    assert len(answer.runner_up) == 1000
    assert time.perf_counter() - begun < 30
