"""What an answer's tokens are known by, as the integers that traces hold: ids, else bytes, else characters.

Ids are the server's own. A server that gives the bytes of each token, and no ids, has an id made for each of them from
the bytes alone, so that two runs agree on it. A server that gives text alone is compared character by character: code
points are the ids. Which of the three a run uses is said in its `ServerSeen`, and holds for all of its completions.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass

from nondet.core.traces import PIECE_MOST, Trace, trace_digest
from nondet.endpoint.exchange import Answer, KnownBy
from nondet.errors import shortened

__all__ = ["Tokens", "clean"]

_MOST = 2**31 - 1


def clean(text: str) -> str:
    """The text without lone surrogates, which JSON may hold and UTF-8 may not."""
    return text.encode("utf-8", "replace").decode("utf-8")


@dataclass
class Tokens:
    """Turns answers into traces, and remembers what each id reads as.

    Attributes:
        known_by: What every completion of the run is compared by.
        pieces: Id -> its text, of those whose text the server gives.
        with_logprobs: Whether the server's first answers had logprobs, so that one without them is no other trace
            but an answer that can't be compared.
    """

    known_by: KnownBy
    pieces: dict[int, str]
    with_logprobs: bool = False

    @classmethod
    def of(cls, known_by: KnownBy, pieces: Mapping[int, str] | None = None) -> Tokens:
        """Begin, or go on with the pieces that a side file holds."""
        return cls(known_by, dict(pieces or {}))

    def piece(self, token: int) -> str:
        """The text of one token; its id in brackets where the server gives no text of it."""
        if self.known_by == KnownBy.TEXT:
            return clean(chr(token)) if token <= 0x10FFFF else ""
        return self.pieces.get(token, f"⟨{token}⟩")

    def trace(self, answer: Answer) -> Trace | str:
        """The trace of a completion, or why it has none: it lacks what the others of the run are compared by."""
        if self.known_by == KnownBy.IDS:
            if answer.token_ids is None:
                return "it has no token ids, and others of this run do"
            ids = list(answer.token_ids)
            self._remember(ids, answer.token_bytes)
        elif self.known_by == KnownBy.BYTES:
            if answer.token_bytes is None:
                return "it has no bytes of its tokens, and others of this run do"
            ids = [self._made(data) for data in answer.token_bytes]
        else:
            ids = [ord(character) for character in answer.text]
        if any(not 0 <= i <= _MOST for i in ids):
            return f"a token id that is not from 0 to {_MOST}"
        # figures of tokens belong to no character of a text
        per_token = self.known_by != KnownBy.TEXT
        logprobs = answer.logprobs if per_token and len(answer.logprobs) == 4 * len(ids) else b""
        if per_token and self.with_logprobs and ids and not logprobs:
            return "it has no logprobs, and others of this run do"
        margins = answer.margins if per_token and len(answer.margins) == 4 * len(ids) else b""
        runner_up = list(answer.runner_up) if self.known_by == KnownBy.IDS else []
        if len(runner_up) != len(ids) or any(not 0 <= i <= _MOST for i in runner_up):
            runner_up = []
        return Trace(
            digest=trace_digest(ids, logprobs),
            token_ids=ids,
            logprobs=logprobs,
            margins=margins,
            runner_up=runner_up,
            text=clean(answer.text),
        )

    def _remember(self, ids: list[int], data: tuple[bytes, ...] | None) -> None:
        if data is not None and len(data) == len(ids):
            for token, piece in zip(ids, data, strict=True):
                if token not in self.pieces:
                    self.pieces[token] = piece.decode("utf-8", "backslashreplace")

    def _made(self, data: bytes) -> int:
        """An id from the bytes alone; where two of a run would share one, the next that is free."""
        text = shortened(data.decode("utf-8", "backslashreplace"), PIECE_MOST)  # as a resumed run reads it back
        token = int.from_bytes(hashlib.sha256(data).digest()[:4], "little") & _MOST
        while self.pieces.setdefault(token, text) != text:
            token = (token + 1) & _MOST
        return token
