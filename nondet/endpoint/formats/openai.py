"""/v1/completions as OpenAI defined it: text in, text out, logprobs by token text."""

from __future__ import annotations

from typing import Any

from ..document import item, optional
from ..exchange import Ask
from ..failures import malformed
from ..reading import Alternative, Parts
from .base import only_choice, take_usage
from .content import named_id, take_content

__all__ = ["Completions"]


class Completions:
    """The form that nearly every server has; what only some understand is left out of the request."""

    path = "/v1/completions"
    ids = False
    streams = True
    cuts = False

    def body(self, ask: Ask, model: str, stream: bool) -> dict[str, Any]:
        """The request's JSON."""
        body: dict[str, Any] = {
            "model": model,
            "prompt": list(ask.prompt) if isinstance(ask.prompt, tuple) else ask.prompt,
            "max_tokens": ask.max_tokens,
            "temperature": ask.temperature,
        }
        if ask.temperature:  # a server may take defaults from the model's own configuration
            body["top_p"] = ask.top_p
        if ask.top_logprobs:
            body["logprobs"] = ask.top_logprobs
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
        parts.text.append(item(choice, "text", str))
        parts.finish = optional(choice, "finish_reason", str) or parts.finish
        logprobs = optional(choice, "logprobs", dict)
        if logprobs is None:
            return
        if isinstance(logprobs.get("content"), list):  # llama.cpp's server: the form of chats here too
            take_content(logprobs["content"], parts)
        else:
            _take_logprobs(logprobs, parts)


def _take_logprobs(logprobs: dict[str, Any], parts: Parts) -> None:
    """`tokens`, `token_logprobs` and `top_logprobs`: three lists of one length, the last one of objects by token.

    Raises:
        AttemptError: "malformed".
    """
    tokens, values = item(logprobs, "tokens", list), item(logprobs, "token_logprobs", list)
    tops = optional(logprobs, "top_logprobs", list)
    if len(tokens) != len(values) or (tops is not None and len(tops) != len(tokens)):
        raise malformed("logprobs of different lengths")
    for index, (token, value) in enumerate(zip(tokens, values, strict=True)):
        if not isinstance(token, str):
            raise malformed("a token of logprobs that is no text")
        parts.chosen.append(Alternative(token, value, named_id(token)))
        if tops is not None:
            top = tops[index] if tops[index] is not None else {}
            if not isinstance(top, dict):
                raise malformed("'top_logprobs' has something that is no object")
            # A value of null is a token that can't occur.
            parts.top.append(
                [Alternative(name, logprob, named_id(name)) for name, logprob in top.items() if logprob is not None]
            )
