"""`transformers serve`: text only. It refuses fields that it does not know, and ignores logprobs and n."""

from __future__ import annotations

import dataclasses
from typing import Any

from ..exchange import Ask
from .base import text_prompt
from .openai import Completions
from .openai_chat import Chat

__all__ = ["TransformersChat", "TransformersCompletions"]


class TransformersCompletions(Completions):
    """/v1/completions of transformers serve; its streams end without [DONE]."""

    def body(self, ask: Ask, model: str, stream: bool) -> dict[str, Any]:
        """The request's JSON, without logprobs, which it would ignore.

        Raises:
            AttemptError: "unsupported": token ids for a prompt.
        """
        return super().body(dataclasses.replace(ask, prompt=text_prompt(ask), top_logprobs=0), model, stream)


class TransformersChat(Chat):
    """/v1/chat/completions of transformers serve."""

    def body(self, ask: Ask, model: str, stream: bool) -> dict[str, Any]:
        """The request's JSON, without logprobs, which it would ignore."""
        return super().body(dataclasses.replace(ask, top_logprobs=0), model, stream)
