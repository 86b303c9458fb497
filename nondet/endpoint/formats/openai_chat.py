"""/v1/chat/completions as OpenAI defined it: the prompt is one user message, tokens have bytes."""

from __future__ import annotations

from typing import Any

from ..document import item, list_of_ints, optional
from ..exchange import Ask
from ..failures import AttemptError, malformed
from ..reading import Alternative, Parts
from .base import only_choice, take_usage
from .openai import named_id

__all__ = ["Chat"]


class Chat:
    """What every chat server has; what only some understand is left out of the request."""

    path = "/v1/chat/completions"
    ids = False
    flush: tuple[str, str] | None = None
    metrics: str | None = None

    def body(self, ask: Ask, model: str, stream: bool) -> dict[str, Any]:
        """The request's JSON.

        Raises:
            AttemptError: "unsupported": token ids for a prompt.
        """
        body: dict[str, Any] = {
            "model": model,
            "messages": [{"role": "user", "content": text_prompt(ask)}],
            "temperature": ask.temperature,
        }
        if "max_completion_tokens" not in ask.extra:  # OpenAI's newer models take this name only, others the old one
            body["max_tokens"] = ask.max_tokens
        if ask.top_logprobs:
            body |= {"logprobs": True, "top_logprobs": ask.top_logprobs}
        if ask.seed is not None:
            body["seed"] = ask.seed
        if stream:
            body["stream_options"] = {"include_usage": True}
        return {**body, **ask.extra, "stream": stream}

    def take(self, document: Any, parts: Parts, streamed: bool) -> None:
        """Add a body or an event."""
        choice = only_choice(document, streamed)
        take_usage(document, parts)
        if choice is None:
            return
        message = item(choice, "delta" if streamed else "message", dict)
        thought = optional(message, "reasoning_content", str) or optional(message, "reasoning", str)
        if thought:
            parts.note("the text holds the reasoning as well")
            parts.text.append(thought)
        parts.text.append(optional(message, "content", str) or "")
        parts.finish = optional(choice, "finish_reason", str) or parts.finish
        logprobs = optional(choice, "logprobs", dict)
        content = optional(logprobs, "content", list) if logprobs is not None else None
        for token in content or []:
            self._take_token(token, parts)

    def _take_token(self, token: Any, parts: Parts) -> None:
        """One element of logprobs.content; its bytes count only as long as every token has some."""
        key, raw = _key(token)
        if not parts.chosen:
            parts.bytes = []
        parts.chosen.append(Alternative(key, token.get("logprob"), named_id(item(token, "token", str))))
        if parts.bytes is not None and raw is not None and len(parts.bytes) + 1 == len(parts.chosen):
            parts.bytes.append(raw)
        else:
            parts.bytes = None
        top = []
        for other in optional(token, "top_logprobs", list) or []:
            other_key, _ = _key(other)
            if other.get("logprob") is not None:
                top.append(Alternative(other_key, other["logprob"], named_id(item(other, "token", str))))
        parts.top.append(top)


def text_prompt(ask: Ask) -> str:
    """The prompt, for servers that take nothing but text.

    Raises:
        AttemptError: "unsupported".
    """
    if isinstance(ask.prompt, tuple):
        raise AttemptError("unsupported", "this protocol takes no token ids for a prompt")
    return ask.prompt


def _key(token: Any) -> tuple[str | tuple[int, ...], bytes | None]:
    """What a token is told from others by, and its bytes, if it has any."""
    text, values = item(token, "token", str), optional(token, "bytes", list)
    if values is None:
        return text, None
    numbers = list_of_ints(values, "bytes")
    if any(number > 255 for number in numbers):
        raise malformed("'bytes' has a number above 255")
    return (numbers or text), bytes(numbers)
