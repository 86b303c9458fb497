"""The client against servers that keep their word."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Coroutine
from typing import Any

import numpy as np
import pytest

from nondet.endpoint.arms import Answer, Ask, KnownBy
from nondet.endpoint.client import connect
from tests.endpoint.honest import honest
from tests.endpoint.model import Context, step, tokenize


def run(work: Coroutine[Any, Any, Any]) -> Any:
    return asyncio.run(asyncio.wait_for(work, 60))


async def answers(dialect: str, asks: list[Ask], options: dict[str, Any], **client: Any) -> list[Answer]:
    async with honest(dialect, **options) as server, connect(server.url, **client) as connection:
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
def test_what_a_server_sends_is_what_comes_out(dialect: str, protocol: str, known_by: KnownBy, stream: bool) -> None:
    """Ids, the bits of the logprobs and of the margins are the model's, streamed or not, in every dialect."""
    prompt = "Once upon a time"
    (answer,) = run(answers(dialect, [Ask(id="a", prompt=prompt, max_tokens=12)], {}, stream=stream))
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


@pytest.mark.parametrize(
    ("prompt", "extra", "said"),
    [
        ("x", {"n": 2}, "the field 'n' can't be set"),
        ("x", {"stream": True}, "the field 'stream' can't be set"),
        ("x", {"sampling_params": {"n": 2}}, "the field 'n' can't be set"),
        ("x", {"sampling_params": 3}, "is no object"),
        ("x", {"top_p": float("nan")}, "JSON can't hold"),
        ("x", {"top_p": object()}, "JSON can't hold"),
    ],
)
def test_fields_that_change_the_question_are_not_sent(prompt: str, extra: dict[str, Any], said: str) -> None:
    """A request for two completions, or for another form of answer, fails here and in one line."""
    (answer,) = run(answers("vllm", [Ask(id="a", prompt=prompt, max_tokens=2, extra=extra)], {}))
    assert answer.kind == "unsupported"
    assert said in answer.reason
    assert answer.attempts == 1


@pytest.mark.parametrize("dialect", ["vllm", "sglang", "llama.cpp"])
def test_prompts_are_texts_or_ids(dialect: str) -> None:
    """Ids where the server takes them give what the text gives; half a surrogate pair is no error of the client's."""
    texts = (tokenize("Once upon"), "Once upon", "half \ud83d")
    ids, text, half = run(answers(dialect, [Ask(id="a", prompt=prompt, max_tokens=8) for prompt in texts], {}))
    assert text.token_ids is not None
    assert ids.token_ids == text.token_ids
    assert half.ok, half.reason
    (refused,) = run(answers("transformers", [Ask(id="a", prompt=(1, 2), max_tokens=2)], {}))
    assert (refused.kind, refused.reason) == ("unsupported", "this protocol takes no token ids for a prompt")


def test_a_thousand_tokens_are_read_in_good_time() -> None:
    """Long answers with many alternatives stay within their bounds, and parsing them does not hold others up."""
    large = Ask(id="a", prompt="Once upon a time", max_tokens=1000, top_logprobs=20)
    begun = time.perf_counter()
    (answer,) = run(answers("vllm", [large], {}, stream=True))
    assert answer.ok, answer.reason
    assert len(answer.runner_up) == 1000
    assert time.perf_counter() - begun < 30
