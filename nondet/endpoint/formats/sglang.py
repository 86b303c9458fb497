"""SGLang's /generate: token ids, logprobs as [logprob, id, text], and how many prompt tokens the cache gave.

A stream sends the whole answer so far with every event, or what is new where the server runs with
--incremental-streaming-output; `completion_tokens` counts the whole so far in both, which tells them apart. The seed is
kept with --enable-deterministic-inference only. `extra_key` keeps a request in a part of the prefix cache of its own.
"""

from __future__ import annotations

import secrets
from typing import Any

from ..document import count, item, list_of_ints, optional
from ..exchange import Ask
from ..failures import AttemptError, malformed
from ..reading import Alternative, Parts
from .base import raise_reported

__all__ = ["Generate"]


class Generate:
    """The native form of SGLang."""

    path = "/generate"
    ids = True
    streams = True
    cuts = True

    def body(self, ask: Ask, model: str, stream: bool) -> dict[str, Any]:
        """The request's JSON; the server holds one model, whose name is not sent."""
        sampling: dict[str, Any] = {"max_new_tokens": ask.max_tokens, "temperature": ask.temperature}
        if ask.temperature:
            sampling |= {"top_k": ask.top_k or -1, "top_p": ask.top_p}
        if ask.ignore_eos:
            sampling["ignore_eos"] = True
        if ask.seed is not None:
            sampling["sampling_seed"] = ask.seed
        extra = dict(ask.extra)
        sampling |= extra.pop("sampling_params", {})
        body: dict[str, Any] = {"sampling_params": sampling}
        body |= {"input_ids": list(ask.prompt)} if isinstance(ask.prompt, tuple) else {"text": ask.prompt}
        if ask.top_logprobs:
            body |= {"return_logprob": True, "top_logprobs_num": ask.top_logprobs, "logprob_start_len": -1}
        if ask.cached is False:
            body["extra_key"] = secrets.token_hex(16)
        return {**body, **extra, "stream": stream}

    def take(self, document: Any, parts: Parts, streamed: bool) -> None:
        """Add a body or an event."""
        raise_reported(document)
        meta = item(document, "meta_info", dict)
        ids = list(list_of_ints(item(document, "output_ids", list), "output_ids"))
        completion = count(meta, "completion_tokens", parts.note)
        if parts.ids and (completion is None or completion != len(ids)):
            parts.ids += ids  # an incremental stream
        else:
            parts.ids, parts.text, parts.chosen, parts.top = ids, [], [], []
        parts.text.append(item(document, "text", str))
        parts.completion_tokens = completion
        parts.prompt_tokens = count(meta, "prompt_tokens", parts.note)
        parts.cached_tokens = count(meta, "cached_tokens", parts.note)
        parts.fingerprint = optional(meta, "weight_version", str) or ""
        finish = optional(meta, "finish_reason", dict)
        if finish is not None:
            parts.finish = item(finish, "type", str)
            if parts.finish == "abort":
                raise AttemptError(
                    "error", f"the server aborted it: {optional(finish, 'message', str) or 'no reason given'}"
                )
        tokens = optional(meta, "output_token_logprobs", list) or []
        tops = optional(meta, "output_top_logprobs", list) or []
        parts.chosen += [_alternative(token) for token in tokens]
        for top in tops:
            if not isinstance(top, list):
                raise malformed("'output_top_logprobs' has something that is no list")
            parts.top.append([_alternative(other) for other in top])


def _alternative(entry: Any) -> Alternative:
    if not isinstance(entry, list) or len(entry) < 2:
        raise malformed("a logprob that is not [logprob, id, text]")
    (identity,) = list_of_ints([entry[1]], "output_token_logprobs")
    return Alternative(identity, entry[0], identity)
