"""llama.cpp's /completion: token ids, probabilities with ids and bytes, and no reuse of cached prompts if asked.

`timings.cache_n` counts the prompt tokens that were reused; `tokens_cached`, in spite of its name, how many the slot
holds at the end. The server leaves a token without probability while the character that it begins is not finished, so
the two lists can differ in length: then there are no logprobs, and a note says so. A stream leaves such tokens out
altogether, ids too (and the end-of-text token, which every answer that ends by it has): then there are no ids either.
"""

from __future__ import annotations

from typing import Any

from ..document import count, item, list_of_ints, optional
from ..exchange import Ask
from ..failures import malformed
from ..reading import Alternative, Parts
from .base import raise_reported

__all__ = ["Completion"]


class Completion:
    """The native form of llama.cpp's server."""

    path = "/completion"
    ids = True
    streams = True
    cuts = True

    def body(self, ask: Ask, model: str, stream: bool) -> dict[str, Any]:
        """The request's JSON; the server holds one model, whose name is not sent."""
        body: dict[str, Any] = {
            "prompt": list(ask.prompt) if isinstance(ask.prompt, tuple) else ask.prompt,
            "n_predict": ask.max_tokens,
            "temperature": ask.temperature,
            "return_tokens": True,
        }
        if ask.temperature:  # its defaults keep 40 tokens, 95% of the mass, and none below 5% of the likeliest
            body |= {"top_k": ask.top_k, "top_p": ask.top_p, "min_p": 0.0}
        if ask.top_logprobs:
            body["n_probs"] = ask.top_logprobs
        if ask.seed is not None:
            body["seed"] = ask.seed
        if ask.ignore_eos:
            body["ignore_eos"] = True
        if ask.cached is not None:
            body["cache_prompt"] = ask.cached
        return {**body, **ask.extra, "stream": stream}

    def take(self, document: Any, parts: Parts, streamed: bool) -> None:
        """Add a body or an event; the last event of a stream repeats nothing."""
        raise_reported(document)
        parts.text.append(item(document, "content", str))
        parts.ids = (parts.ids or []) + list(list_of_ints(optional(document, "tokens", list) or [], "tokens"))
        for entry in optional(document, "completion_probabilities", list) or []:
            parts.chosen.append(_alternative(entry))
            parts.top.append([_alternative(other) for other in item(entry, "top_logprobs", list)])
        if streamed and not item(document, "stop", bool):
            return
        parts.finish = item(document, "stop_type", str)
        parts.ended = True
        parts.model = optional(document, "model", str) or parts.model
        parts.prompt_tokens = count(document, "tokens_evaluated", parts.note)
        parts.completion_tokens = count(document, "tokens_predicted", parts.note)
        timings = optional(document, "timings", dict)
        parts.cached_tokens = count(timings, "cache_n", parts.note) if timings is not None else None
        missing = (parts.completion_tokens or 0) - len(parts.ids)
        if streamed and missing > (parts.finish == "eos"):
            parts.note(f"the stream left out {missing} of {parts.completion_tokens} token ids (none taken)")
            parts.ids, parts.chosen, parts.top = None, [], []
        elif parts.chosen and len(parts.chosen) != len(parts.ids):
            parts.note(f"logprobs of {len(parts.chosen)} of {len(parts.ids)} tokens (dropped)")
            parts.chosen, parts.top = [], []


def _alternative(entry: Any) -> Alternative:
    identity = item(entry, "id", int)
    if "logprob" not in entry:
        raise malformed("a probability without 'logprob'")
    return Alternative(identity, entry["logprob"], *list_of_ints([identity], "id"))
