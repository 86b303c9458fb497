"""How each kind of server words its answers: written from their sources, apart from the client's parsers.

A dialect is a function: steps and what else the answer tells -> documents. Without `stream` there is one; with it there
is one for each step (SGLang: one for all of them) and what follows the last.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tests.endpoint.model import EOS, Step, text_of

MODEL = "hash-1"


@dataclass(frozen=True)
class Told:
    """What an answer tells besides its tokens."""

    body: dict[str, Any]
    prompt: tuple[int, ...]
    cached: int
    finish: str
    weights: str


def _usage(steps: list[Step], told: Told) -> dict[str, Any]:
    return {
        "prompt_tokens": len(told.prompt),
        "completion_tokens": len(steps),
        "total_tokens": len(told.prompt) + len(steps),
        "prompt_tokens_details": {"cached_tokens": told.cached},
    }


def _named(token: int, as_id: bool) -> str:
    return f"token_id:{token}" if as_id else text_of([token]) or "</s>"


def openai_completion(steps: list[Step], told: Told, own: bool) -> dict[str, Any]:
    """/v1/completions: a body, or with the fields of one event."""
    as_id = own and bool(told.body.get("return_tokens_as_token_ids"))
    choice: dict[str, Any] = {"index": 0, "text": text_of([s.id for s in steps]), "logprobs": None}
    if told.body.get("logprobs"):
        choice["logprobs"] = {
            "tokens": [_named(s.id, as_id) for s in steps],
            "token_logprobs": [s.logprob for s in steps],
            "top_logprobs": [{_named(token, as_id): value for token, value in s.top} for s in steps],
            "text_offset": list(range(len(steps))),
        }
    if own and told.body.get("return_token_ids"):
        choice |= {"token_ids": [s.id for s in steps], "prompt_token_ids": list(told.prompt)}
    return {"object": "text_completion", "model": MODEL, "choices": [choice]}


def openai_chat(steps: list[Step], told: Told, own: bool, key: str) -> dict[str, Any]:
    """/v1/chat/completions, the message under `key`: "message" or "delta"."""
    as_id = own and bool(told.body.get("return_tokens_as_token_ids"))

    def entry(token: int, value: float) -> dict[str, Any]:
        name = _named(token, as_id)
        return {"token": name, "logprob": value, "bytes": list(name.encode())}

    message = {"role": "assistant", "content": text_of([s.id for s in steps])}
    choice: dict[str, Any] = {"index": 0, key: message, "logprobs": None}
    if told.body.get("logprobs"):
        choice["logprobs"] = {
            "content": [{**entry(s.id, s.logprob), "top_logprobs": [entry(*pair) for pair in s.top]} for s in steps]
        }
    if own and told.body.get("return_token_ids"):
        choice["token_ids"] = [s.id for s in steps]
    return {"object": "chat.completion", "model": MODEL, "choices": [choice]}


def _openai(steps: list[Step], told: Told, stream: bool, chat: bool, own: bool) -> list[dict[str, Any]]:
    def word(some: list[Step], finish: str | None) -> dict[str, Any]:
        key = "delta" if stream else "message"
        document = openai_chat(some, told, own, key) if chat else openai_completion(some, told, own)
        document["choices"][0]["finish_reason"] = finish
        return document

    end = {"usage": _usage(steps, told), "system_fingerprint": f"hash-{told.weights}"}
    if not stream:
        return [{**word(steps, told.finish), **end}]
    documents = [word([step], None) for step in steps[:-1]] + [word(steps[-1:], told.finish or None)]
    return [*documents, {"model": MODEL, "choices": [], **end}]


def openai(steps: list[Step], told: Told, stream: bool, chat: bool) -> list[dict[str, Any]]:
    """A server that has OpenAI's fields and no others."""
    return _openai(steps, told, stream, chat, own=False)


def vllm(steps: list[Step], told: Told, stream: bool, chat: bool) -> list[dict[str, Any]]:
    """vLLM: OpenAI's forms with token ids; cached tokens as with --enable-prompt-tokens-details."""
    return _openai(steps, told, stream, chat, own=True)


def transformers(steps: list[Step], told: Told, stream: bool, chat: bool) -> list[dict[str, Any]]:
    """Transformers serve: text, usage in the last event, an empty fingerprint."""
    told.body.pop("logprobs", None)
    documents = _openai(steps, told, stream, chat, own=False)
    if stream:
        usage = documents.pop()["usage"]
        documents[-1]["usage"] = usage
    for document in documents:
        document["system_fingerprint"] = ""
    return documents


def sglang(steps: list[Step], told: Told, stream: bool, chat: bool) -> list[dict[str, Any]]:
    """SGLang's /generate: every event holds the whole answer so far; asked event by event here."""

    def document(some: list[Step]) -> dict[str, Any]:
        finish = {"type": "stop", "matched": EOS} if told.finish == "stop" else {"type": "length", "length": len(steps)}
        meta: dict[str, Any] = {
            "id": "0",
            "finish_reason": finish if told.finish else None,
            "prompt_tokens": len(told.prompt),
            "completion_tokens": len(some),
            "cached_tokens": told.cached,
            "weight_version": told.weights or "default",
        }
        if told.body.get("return_logprob"):
            meta["output_token_logprobs"] = [[s.logprob, s.id, None] for s in some]
            meta["output_top_logprobs"] = [[[value, token, None] for token, value in s.top] for s in some]
        return {"text": text_of([s.id for s in some]), "output_ids": [s.id for s in some], "meta_info": meta}

    return [document(steps)]


def llama_cpp(steps: list[Step], told: Told, stream: bool, chat: bool) -> list[dict[str, Any]]:
    """llama.cpp's /completion: an event for each token, and a last one without any."""

    def entry(token: int, value: float) -> dict[str, Any]:
        return {"id": token, "token": text_of([token]), "bytes": list(text_of([token]).encode()), "logprob": value}

    def document(some: list[Step]) -> dict[str, Any]:
        ids = [s.id for s in some]
        said: dict[str, Any] = {"index": 0, "content": text_of(ids), "tokens": ids, "stop": False, "id_slot": 0}
        if told.body.get("n_probs"):
            said["completion_probabilities"] = [
                {**entry(s.id, s.logprob), "top_logprobs": [entry(*pair) for pair in s.top]} for s in some
            ]
        return said

    end = {
        "stop": True,
        "stop_type": "eos" if told.finish == "stop" else "limit",
        "model": MODEL,
        "tokens_predicted": len(steps),
        "tokens_evaluated": len(told.prompt),
        "tokens_cached": len(told.prompt) + len(steps),
        "timings": {"cache_n": told.cached, "prompt_n": len(told.prompt) - told.cached, "predicted_n": len(steps)},
    }
    if not stream:
        return [{**document(steps), **end}]
    return [*(document([s]) for s in steps), {**document([]), **end}]


Dialect = Callable[[list[Step], Told, bool, bool], list[dict[str, Any]]]
DIALECTS: dict[str, Dialect] = {
    "openai": openai,
    "vllm": vllm,
    "sglang": sglang,
    "llama.cpp": llama_cpp,
    "transformers": transformers,
}
