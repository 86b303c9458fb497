"""What real servers sent (recorded, shortened), and what is made of it. The servers: tests/servers."""

from __future__ import annotations

import json
from typing import Any

import numpy as np

from nondet.endpoint.arms import Answer, Ask, KnownBy
from nondet.endpoint.formats import FORMATS, Parts, answer_from
from nondet.endpoint.http import parse

ASK = Ask(id="a", prompt="For example, the", max_tokens=3)


def answer(protocol: str, *documents: dict[str, Any], streamed: bool = False) -> Answer:
    parts = Parts()
    for document in documents:
        FORMATS[protocol].take(parse(json.dumps(document).encode()), parts, streamed)
    return answer_from(ASK, parts)


def entry(token: int, text: str, logprob: float, *top: dict[str, Any]) -> dict[str, Any]:
    return {"id": token, "token": text, "bytes": list(text.encode()), "logprob": logprob, "top_logprobs": list(top)}


CONSTRUCTOR = entry(1751, " constructor", -2.9094841480255127)
FUNCTION = entry(471, " function", -3.0309998989105225)
CREATES = entry(2889, " creates", -1.886509656906128)
RETURNS = entry(757, " returns", -2.4855220317840576)


def test_llama_cpp_sends_the_logprobs_of_chats_on_the_completions_of_openai() -> None:
    """llama.cpp's /v1/completions has logprobs.content, with ids: they are read, not refused as malformed."""
    content = [
        {**CONSTRUCTOR, "top_logprobs": [CONSTRUCTOR, FUNCTION]},
        {**CREATES, "top_logprobs": [CREATES, RETURNS]},
    ]
    choice = {"text": " constructor creates", "index": 0, "logprobs": {"content": content}, "finish_reason": "length"}
    usage = {
        "completion_tokens": 2,
        "prompt_tokens": 4,
        "total_tokens": 6,
        "prompt_tokens_details": {"cached_tokens": 3},
    }
    said = answer("openai", {"choices": [choice], "system_fingerprint": "b0-unknown", "usage": usage})
    assert (said.known_by, said.token_ids, said.runner_up) == (KnownBy.IDS, (1751, 2889), (471, 757))
    assert said.logprobs == np.array([-2.9094841480255127, -1.886509656906128], "<f4").tobytes()
    assert (said.chosen_is_top, said.cached_tokens, said.notes) == (2, 3, ())


def test_a_chat_of_vllm_streams_ids_beside_logprobs_that_have_none() -> None:
    """vLLM's ids come outside of the logprobs, piece by piece: the logprobs, which hold none, take none away."""
    said = answer(
        "vllm-chat",
        *(
            {
                "choices": [
                    {
                        "index": 0,
                        "delta": {"content": text},
                        "logprobs": {"content": [{"token": f"token_id:{token}", "logprob": -1.0, "bytes": [120]}]},
                        "finish_reason": finish,
                        "token_ids": [token],
                    }
                ]
            }
            for token, text, finish in ((1751, " constructor", None), (2889, " creates", "length"))
        ),
        streamed=True,
    )
    assert (said.known_by, said.token_ids, said.token_bytes) == (KnownBy.IDS, (1751, 2889), None)


def test_a_stream_of_llama_cpp_that_left_tokens_out_has_no_ids() -> None:
    """It sends nothing for a token that begins a character: ids with holes would compare what is not there."""
    last = {"content": "", "tokens": [], "stop": True, "stop_type": "limit", "tokens_predicted": 3}
    pieces = [{"content": text, "tokens": [token], "stop": False} for token, text in ((110, "é"), (183, "x"))]
    holed = answer("llama.cpp", *pieces, last, streamed=True)
    assert (holed.known_by, holed.text) == (KnownBy.TEXT, "éx")
    assert holed.notes == ("the stream left out 1 of 3 token ids (none taken)",)
    whole = answer("llama.cpp", *pieces, {**last, "tokens_predicted": 2}, streamed=True)
    assert (whole.known_by, whole.token_ids, whole.notes) == (KnownBy.IDS, (110, 183), ())
    # the end of a text is a token, which the stream does not send
    ended = answer("llama.cpp", *pieces, {**last, "stop_type": "eos"}, streamed=True)
    assert (ended.known_by, ended.token_ids) == (KnownBy.IDS, (110, 183))


def test_transformers_streams_text_and_ends_without_a_mark() -> None:
    """transformers serve: no ids, no logprobs, and a last piece that is nothing but the reason for the end."""
    pieces = [
        {"choices": [{"index": 0, "text": text}], "model": "/m@main", "object": "text_completion"}
        for text in (" constructor", " creates", " a")
    ]
    usage = {"completion_tokens": 3, "prompt_tokens": 4, "total_tokens": 7}
    end = {"choices": [{"finish_reason": "length", "index": 0, "text": ""}], "usage": usage}
    said = answer("transformers", *pieces, end, streamed=True)
    assert (said.known_by, said.text, said.finish) == (KnownBy.TEXT, " constructor creates a", "length")
    assert (said.completion_tokens, said.logprobs, said.margins) == (3, b"", b"")
