"""What a request may cost at most, whatever the server does."""

from __future__ import annotations

from dataclasses import dataclass

from .exchange import Ask

__all__ = ["Limits"]

_BYTES_PER_ALTERNATIVE = 2048  # a token id, its text, its bytes as a JSON list and a logprob take under 300


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Bounds of one attempt, and of how often there is another.

    Attributes:
        connect_s: Until the connection (with TLS) stands.
        first_byte_s: From then until the answer's header is whole. A full server lets a request wait in its queue.
        idle_s: Between two pieces of the body.
        total_s: For one attempt, all in all; what a slow drip ends at.
        page_s: The same for a page that says what the server is or counts.
        most_bytes: Of one answer, before anything is parsed; `bytes_for` is usually less.
        most_page_bytes: Of a page that says what the server is or counts.
        most_error_bytes: Read of the body of an error.
        attempts: Sent at most this often, whatever went wrong.
        first_wait_s, most_wait_s: The first and the longest wait between attempts, Retry-After included.
        patience_s: How long a server may refuse everything as full; from then on each request is sent once, until one
            is answered.
    """

    connect_s: float = 10.0
    first_byte_s: float = 300.0
    idle_s: float = 120.0
    total_s: float = 900.0
    page_s: float = 20.0
    most_bytes: int = 64 << 20
    most_page_bytes: int = 4 << 20
    most_error_bytes: int = 64 << 10
    attempts: int = 10
    first_wait_s: float = 0.5
    most_wait_s: float = 30.0
    patience_s: float = 300.0

    def bytes_for(self, ask: Ask) -> int:
        """The most bytes that an answer to this request may have: a generous share for each token it asked for."""
        echoed = 32 * len(ask.prompt)  # some servers send the prompt back, as text, escaped, and as ids
        tokens = ask.max_tokens * (ask.top_logprobs + 2) * _BYTES_PER_ALTERNATIVE
        return min(self.most_bytes, (1 << 20) + echoed + tokens)

    @staticmethod
    def events_for(ask: Ask) -> int:
        """The most events that a stream may have; some servers send none for a token, none sends many."""
        return 8 * ask.max_tokens + 256
