"""vLLM's own fields on the OpenAI forms: token ids, and a salt that keeps a request from cached prefixes.

`return_token_ids` puts `token_ids` into every choice (deltas in a stream), `return_tokens_as_token_ids` names the
tokens of `logprobs` "token_id:N", so that two ids with one text stay two alternatives. The counter of prefix cache hits
is in /metrics; `usage.prompt_tokens_details.cached_tokens` is there with --enable-prompt-tokens-details only, and
/reset_prefix_cache with VLLM_SERVER_DEV_MODE=1 only.
"""

from __future__ import annotations

import secrets
from typing import Any

from ..document import item, list_of_ints
from ..exchange import Ask
from ..reading import Parts
from .openai import Completions
from .openai_chat import Chat

__all__ = ["VllmChat", "VllmCompletions"]


class VllmCompletions(Completions):
    """/v1/completions of vLLM."""

    ids = True
    cuts = True

    def body(self, ask: Ask, model: str, stream: bool) -> dict[str, Any]:
        """The request's JSON."""
        return _own_fields(ask) | super().body(ask, model, stream)

    def take(self, document: Any, parts: Parts, streamed: bool) -> None:
        """Add a body or an event."""
        super().take(document, parts, streamed)
        _take_ids(document, parts)


class VllmChat(Chat):
    """/v1/chat/completions of vLLM. The bytes of its logprobs are those of decoded text, so ids take their place."""

    ids = True
    cuts = True

    def body(self, ask: Ask, model: str, stream: bool) -> dict[str, Any]:
        """The request's JSON."""
        return _own_fields(ask) | super().body(ask, model, stream)

    def take(self, document: Any, parts: Parts, streamed: bool) -> None:
        """Add a body or an event."""
        super().take(document, parts, streamed)
        parts.bytes = None
        _take_ids(document, parts)


def _own_fields(ask: Ask) -> dict[str, Any]:
    fields: dict[str, Any] = {"return_token_ids": True}
    if ask.top_logprobs:
        fields["return_tokens_as_token_ids"] = True
    if ask.temperature:
        fields["top_k"] = ask.top_k  # 0 keeps all
    if ask.ignore_eos:
        fields["ignore_eos"] = True
    if ask.cached is False:
        fields["cache_salt"] = secrets.token_hex(16)  # a prefix that no earlier request can have left behind
    return fields


def _take_ids(document: Any, parts: Parts) -> None:
    choices = item(document, "choices", list)
    if choices and choices[0].get("token_ids") is not None:  # old versions know no return_token_ids
        parts.ids = (parts.ids or []) + list(list_of_ints(item(choices[0], "token_ids", list), "token_ids"))
