"""Text Generation Inference's /generate: token ids and logprobs in `details`, one body (its streams are not asked for).

Its temperature must be above 0, so a greedy request leaves it out and says `do_sample: false`. The end-of-text token is
among the tokens, marked as special.
"""

from __future__ import annotations

from typing import Any

from ..document import count, item, list_of_ints, optional
from ..exchange import Ask
from ..failures import malformed
from ..reading import Alternative, Parts
from .base import raise_reported, text_prompt

__all__ = ["Generate"]


class Generate:
    """The native form of TGI."""

    path = "/generate"
    ids = True
    streams = False
    cuts = True

    def body(self, ask: Ask, model: str, stream: bool) -> dict[str, Any]:
        """The request's JSON; the server holds one model, whose name is not sent.

        Raises:
            AttemptError: "unsupported": token ids for a prompt.
        """
        parameters: dict[str, Any] = {"max_new_tokens": ask.max_tokens, "details": True, "do_sample": False}
        if ask.temperature:
            parameters |= {"temperature": ask.temperature, "do_sample": True}
            parameters |= {"top_k": ask.top_k} if ask.top_k else {}  # it takes neither 0 nor 1.0 for all
            parameters |= {"top_p": ask.top_p} if ask.top_p < 1.0 else {}
        if ask.top_logprobs:
            parameters["top_n_tokens"] = ask.top_logprobs
        if ask.seed is not None:
            parameters["seed"] = ask.seed
        extra = dict(ask.extra)
        parameters |= extra.pop("parameters", {})
        return {"inputs": text_prompt(ask), "parameters": parameters, **extra}

    def take(self, document: Any, parts: Parts, streamed: bool) -> None:
        """Add a body."""
        raise_reported(document)
        parts.text.append(item(document, "generated_text", str))
        details = item(document, "details", dict)
        parts.finish = item(details, "finish_reason", str)
        parts.completion_tokens = count(details, "generated_tokens", parts.note)
        parts.chosen = [_alternative(token) for token in item(details, "tokens", list)]
        parts.ids = [token.id for token in parts.chosen]
        for others in optional(details, "top_tokens", list) or []:
            if not isinstance(others, list):
                raise malformed("'top_tokens' has something that is no list")
            parts.top.append([_alternative(other) for other in others])


def _alternative(token: Any) -> Alternative:
    (identity,) = list_of_ints([item(token, "id", int)], "id")
    return Alternative(identity, token.get("logprob"), identity)
