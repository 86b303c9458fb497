"""/v1/chat/completions as OpenAI defined it: the prompt is one user message, tokens have bytes."""

from __future__ import annotations

from typing import Any

from ..document import item, optional
from ..exchange import Ask
from ..reading import Parts
from .base import only_choice, take_usage, text_prompt
from .content import take_content

__all__ = ["Chat"]


class Chat:
    """What every chat server has; what only some understand is left out of the request."""

    path = "/v1/chat/completions"
    ids = False
    streams = True
    cuts = False

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
        if ask.temperature:
            body["top_p"] = ask.top_p
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
        take_content(content or [], parts)
