"""Logprobs as chat endpoints send them: a list of objects, one a token, with its text, its bytes, its alternatives.

llama.cpp sends this form on /v1/completions too, and each object with the token's id.
"""

from __future__ import annotations

from typing import Any

from ..document import item, list_of_ints, optional
from ..failures import malformed
from ..reading import Alternative, Parts

__all__ = ["named_id", "take_content"]

_AS_ID = "token_id:"  # how vLLM writes a token with return_tokens_as_token_ids


def take_content(content: list[Any], parts: Parts) -> None:
    """Add tokens. Bytes count only as long as every token has some; ids are taken where the server sends them here.

    Raises:
        AttemptError: "malformed".
    """
    for token in content:
        key, raw, identity = _known(token)
        if not parts.chosen:
            parts.bytes = []
        parts.chosen.append(Alternative(key, token.get("logprob"), identity))
        if parts.bytes is not None and raw is not None and len(parts.bytes) + 1 == len(parts.chosen):
            parts.bytes.append(raw)
        else:
            parts.bytes = None
        if token.get("id") is not None:
            parts.ids = [*(parts.ids or []), identity]
            parts.ids_of_logprobs = True
        top = []
        for other in optional(token, "top_logprobs", list) or []:
            other_key, _, other_identity = _known(other)
            if other.get("logprob") is not None:
                top.append(Alternative(other_key, other["logprob"], other_identity))
        parts.top.append(top)


def named_id(token: str) -> int:
    """The id in vLLM's "token_id:N", or -1."""
    digits = token.removeprefix(_AS_ID)
    return int(digits) if digits != token and digits.isascii() and digits.isdigit() and len(digits) < 10 else -1


def _known(token: Any) -> tuple[int | str | tuple[int, ...], bytes | None, int]:
    """What a token is told from others by (its id, else its bytes, else its text), its bytes, its id or -1."""
    text, values = item(token, "token", str), optional(token, "bytes", list)
    identity = optional(token, "id", int)
    if identity is not None:
        (identity,) = list_of_ints([identity], "id")
    numbers = list_of_ints(values, "bytes") if values is not None else ()
    if any(number > 255 for number in numbers):
        raise malformed("'bytes' has a number above 255")
    key = identity if identity is not None else (numbers or text)
    return key, bytes(numbers) if values is not None else None, identity if identity is not None else named_id(text)
