"""From what a server sent to an answer: tokens, float32 logprobs, margins, and whether it contradicts itself."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from .document import float32_bytes
from .exchange import Answer, Ask
from .failures import malformed

__all__ = ["Alternative", "Parts", "answer_from"]

FINISHES = {
    "length": "length",
    "max_tokens": "length",
    "limit": "length",
    "stop": "eos",
    "eos": "eos",
    "eos_token": "eos",
    "word": "eos",
    "stop_sequence": "eos",
}


@dataclass(frozen=True)
class Alternative:
    """A token that could stand at one position: what it is known by, its logprob as sent, its id or -1."""

    key: Hashable
    logprob: Any
    id: int = -1


@dataclass
class Parts:
    """What the documents of one answer have said so far; a stream adds to it piece by piece.

    Attributes:
        text: Pieces of the completion.
        ids, bytes: Of the tokens; None where the server gives none.
        chosen: The token at each position, with its logprob; empty without logprobs.
        top: The alternatives at each position, in no order; empty without them.
        finish: As the server said it; "" until it did.
        prompt_tokens, cached_tokens, completion_tokens, fingerprint, model: As in `Answer`.
        notes: What was odd.
        ids_of_logprobs: Whether the ids came with the logprobs, and so leave out what those leave out.
        streamed: Whether it came as a stream.
        ended: Whether the server marked the end of the answer.
    """

    text: list[str] = field(default_factory=list)
    ids: list[int] | None = None
    bytes: list[bytes] | None = None
    chosen: list[Alternative] = field(default_factory=list)
    top: list[list[Alternative]] = field(default_factory=list)
    finish: str = ""
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    completion_tokens: int | None = None
    fingerprint: str = ""
    model: str = ""
    notes: list[str] = field(default_factory=list)
    ids_of_logprobs: bool = False
    streamed: bool = False
    ended: bool = False

    def note(self, what: str) -> None:
        """Remember an oddity, once."""
        if what not in self.notes:
            self.notes.append(what)


def answer_from(ask: Ask, parts: Parts) -> Answer:
    """The answer that the parts of a whole body make, without times and attempts.

    Raises:
        AttemptError: "malformed": lists that do not fit each other, a finish that nobody knows.
    """
    finish = FINISHES.get(parts.finish)
    if finish is None:
        raise malformed(f"it ended for the reason {parts.finish!r}" if parts.finish else "no reason why it ended")
    text = "".join(parts.text)
    whole = text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
    if "\ufffd" in whole and "\ufffd" not in text:
        parts.note("half a surrogate pair in the text (replaced)")
    _drop_holes(parts, whole)
    count = _count(parts)
    logprobs = float32_bytes([token.logprob for token in parts.chosen])
    margins, top, runner_up = _alternatives(parts, np.frombuffer(logprobs, "<f4").tolist())
    said = parts.completion_tokens
    if said is not None and count is not None and said != count:
        parts.note(f"usage says {said} tokens, the answer has {count}")
    if max(count or 0, said or 0) > ask.max_tokens:
        parts.note("more tokens than max_tokens")
    return Answer(
        ask=ask.id,
        text=whole,  # a stream may have cut a pair in two; half of one can't be written as UTF-8
        token_ids=tuple(parts.ids) if parts.ids is not None else None,
        token_bytes=tuple(parts.bytes) if parts.bytes is not None else None,
        logprobs=logprobs,
        margins=margins,
        chosen_is_top=top,
        runner_up=runner_up,
        finish=finish,
        prompt_tokens=parts.prompt_tokens,
        cached_tokens=parts.cached_tokens,
        completion_tokens=said,
        fingerprint=parts.fingerprint,
        model=parts.model,
        notes=tuple(parts.notes),
    )


def _drop_holes(parts: Parts, text: str) -> None:
    """Take no ids and no bytes where some may be missing: a llama.cpp lists no token that begins a character.

    What is known of some tokens would be compared as if it were all: a fork in the others would not be seen. The token
    that ends a text is no hole in a stream, which never has it, nor in the text, which may leave its name out.
    """
    if parts.ids_of_logprobs and parts.ids is not None:
        count, said = len(parts.ids), parts.completion_tokens
        ended = parts.streamed and FINISHES.get(parts.finish) == "eos"
        if said not in (count, count + ended):
            parts.note(f"{count} of {'unknown' if said is None else said} token ids (none taken)")
            parts.ids, parts.bytes, parts.chosen, parts.top = None, None, [], []
    if parts.ids is None and parts.bytes is not None and not b"".join(parts.bytes).startswith(text.encode()):
        parts.note("bytes of tokens that are not the text's (not taken)")
        parts.bytes = None


def _count(parts: Parts) -> int | None:
    """How many tokens there are, where the lists agree on it.

    Raises:
        AttemptError: "malformed": they don't, or ids and logprobs name different tokens.
    """
    some = parts.chosen or parts.top
    named = {
        "ids": parts.ids,
        "bytes": parts.bytes,
        "logprobs": parts.chosen if some else None,
        "alternatives": parts.top if parts.top else None,
    }
    counts = {name: len(values) for name, values in named.items() if values is not None}
    if len(set(counts.values())) > 1:
        raise malformed("lists of different lengths: " + ", ".join(f"{n} {name}" for name, n in counts.items()))
    if parts.ids is not None and any(
        token.id not in (-1, identity) for token, identity in zip(parts.chosen, parts.ids, strict=False)
    ):
        raise malformed("ids and logprobs that name different tokens")
    return next(iter(counts.values()), None)


def _alternatives(parts: Parts, chosen: list[float]) -> tuple[bytes, int | None, tuple[int, ...]]:
    """Margins (float32: top-1 minus top-2, rounded once), how often the chosen token is a top one, and runners-up.

    The chosen token counts among the alternatives whether or not the server listed it. Where some position has no
    other token, nothing is said of any.

    Args:
        parts: With as many alternatives as tokens, or none.
        chosen: The chosen tokens' logprobs.
    """
    listed = [other for others in parts.top for other in others]
    values = iter(np.frombuffer(float32_bytes([other.logprob for other in listed], "top_logprobs"), "<f4").tolist())
    margins, top, runner_up = [], 0, []
    for token, others, logprob in zip(parts.chosen, parts.top, chosen, strict=bool(parts.top)):
        row = {}
        for other in others:
            value = next(values)
            if other.key != token.key:
                row[other.key] = (value, other.id)
            elif value != logprob:
                parts.note("a token with two logprobs")
        if row:
            best, identity = max(row.values(), key=lambda pair: pair[0])
            second, first = sorted((logprob, *(value for value, _ in row.values())))[-2:]
            margins.append(first - second)
            top += logprob >= best
            runner_up.append(identity)
    if not margins or len(margins) < len(parts.chosen):
        return b"", None, ()
    return np.array(margins, "<f4").tobytes(), top, tuple(runner_up)
