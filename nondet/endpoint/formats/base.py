"""What a format must be able to do, and the little that several share."""

from __future__ import annotations

from typing import Any, Protocol

from ..document import count, item, optional
from ..exchange import Ask
from ..failures import AttemptError, malformed
from ..reading import Parts

__all__ = ["Format", "only_choice", "raise_reported", "take_usage", "text_prompt"]


class Format(Protocol):
    """One form of requests and answers.

    Attributes:
        path: Of the requests, behind the server's prefix.
        ids: Whether answers have token ids.
        streams: Whether answers can be asked for as a stream of events.
        cuts: Whether a request can say top_k.
    """

    path: str
    ids: bool
    streams: bool
    cuts: bool

    def body(self, ask: Ask, model: str, stream: bool) -> dict[str, Any]:
        """The request's JSON. Temperature and limits are always said: a server's own defaults are nobody's business."""

    def take(self, document: Any, parts: Parts, streamed: bool) -> None:
        """Add what one document (the body, or one event of a stream) says.

        Raises:
            AttemptError: "malformed", or "error" where the server reports one inside of an answer.
        """


def raise_reported(document: Any) -> None:
    """An error that a server reports with status 200 or in a stream.

    Raises:
        AttemptError: "error"; its reason is not yet redacted, which the client does.
    """
    if not isinstance(document, dict):
        return
    said = document if document.get("object") == "error" else document.get("error")  # an older vLLM's form
    if said is None or said is False:
        return
    message = said.get("message") if isinstance(said, dict) else said
    raise AttemptError("error", f"the server reports: {message if isinstance(message, str) else 'an error'}")


def only_choice(document: Any, streamed: bool) -> dict[str, Any] | None:
    """The one element of "choices"; None where an event of a stream has none (usage only).

    Raises:
        AttemptError: "malformed": none, several, or one that is not the first.
    """
    raise_reported(document)
    choices = item(document, "choices", list)
    if not choices and streamed:
        return None
    if len(choices) != 1:
        raise malformed(f"{len(choices)} choices where one was asked for")
    index = optional(choices[0], "index", int)
    if index not in (None, 0):
        raise malformed("a second choice, which nobody asked for")
    choice: dict[str, Any] = choices[0]
    return choice


def take_usage(document: Any, parts: Parts) -> None:
    """What an OpenAI-compatible server says of itself and of its counts.

    Raises:
        AttemptError: "malformed": a value of another type.
    """
    parts.fingerprint = optional(document, "system_fingerprint", str) or parts.fingerprint
    parts.model = optional(document, "model", str) or parts.model
    usage = optional(document, "usage", dict)
    if usage is None:
        return
    prompt, completion = (count(usage, key, parts.note) for key in ("prompt_tokens", "completion_tokens"))
    parts.prompt_tokens = prompt if prompt is not None else parts.prompt_tokens
    parts.completion_tokens = completion if completion is not None else parts.completion_tokens
    details = optional(usage, "prompt_tokens_details", dict)
    cached = count(details, "cached_tokens", parts.note) if details is not None else None
    parts.cached_tokens = cached if cached is not None else parts.cached_tokens


def text_prompt(ask: Ask) -> str:
    """The prompt, for servers that take nothing but text.

    Raises:
        AttemptError: "unsupported".
    """
    if isinstance(ask.prompt, tuple):
        raise AttemptError("unsupported", "this protocol takes no token ids for a prompt")
    return ask.prompt
