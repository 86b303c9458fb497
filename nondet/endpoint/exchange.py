"""What goes to a server and what comes back, whatever its protocol. Plain data: no HTTP, no torch.

A server may lie or fail in many ways, so an answer says how it was understood: what its tokens are known by (ids, else
bytes, else text), whether it gave logprobs, what it cost in attempts and time, and why it failed where it did.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Protocol

__all__ = ["Answer", "Ask", "Client", "KnownBy"]


class KnownBy(StrEnum):
    """What two completions can be compared by, the surest first."""

    IDS = "ids"
    BYTES = "bytes"
    TEXT = "text"


@dataclass(frozen=True, kw_only=True)
class Ask:
    """One request.

    Attributes:
        id: Unique within a run; never sent to the server.
        prompt: Text, or token ids where the server takes them. A chat endpoint gets it as one user message.
        max_tokens: Tokens to generate.
        temperature: 0.0 is greedy.
        seed: Of the server's sampler; None sends none.
        top_k, top_p: What is kept at a temperature above 0: 0 and 1.0 are all. Not every format can say top_k.
        top_logprobs: Alternatives asked for at each position; 0 asks for no logprobs at all.
        ignore_eos: Whether the answer goes on behind an end-of-text token, where the server can do that.
        cached: False asks the server not to reuse a cached prefix, where it can be asked; None says nothing.
        extra: Further fields of the body, as the user gave them; `nondet.endpoint.extra.check_extra` says which may be.
    """

    id: str
    prompt: str | tuple[int, ...]
    max_tokens: int
    temperature: float = 0.0
    seed: int | None = None
    top_k: int = 0
    top_p: float = 1.0
    top_logprobs: int = 2
    ignore_eos: bool = False
    cached: bool | None = None
    extra: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Answer:
    """What came of one request. Never an exception: a failure is an answer with a reason.

    Attributes:
        ask: The id of the request.
        text: The completion, as sent; "" if it failed.
        token_ids: One for each generated token; None where the server gives no ids.
        token_bytes: UTF-8 bytes of each token; None where the server gives none.
        logprobs: Little-endian float32, one for each token, each the float32 nearest to the decimal that was sent (not
            to its float64); empty where the server gives none.
        margins: Little-endian float32, top-1 minus top-2 logprob of each position; empty where it can't be had.
        chosen_is_top: Positions at which the chosen token has the largest logprob, ties included; None if unknown.
        runner_up: For each position the better of the other alternatives: its id, or -1 where the server gives none.
        finish: "length", "eos" (the server's "stop"), or "error".
        prompt_tokens, cached_tokens: As the server counts them; None where it does not.
        completion_tokens: As the server counts them, which need not be what it sent; None where it does not.
        fingerprint, model: What the server said of itself, as sent; "" where it said nothing.
        sent, first, done: Seconds on one monotonic clock: first byte sent, first token received (None if not streamed),
            last byte received. Two requests overlap where these intervals do.
        attempts: How often it was sent; 1 if nothing went wrong.
        refusals: What went wrong at the attempts before the last one: kind -> times ("http-429", "reset", ...).
        reason: One line, empty unless the request failed.
        kind: The kind of failure ("timeout", "malformed", "http-500", ...), empty unless it failed.
        notes: What was odd about an answer that was taken all the same, a line each: usage that counts other than the
            tokens there are, more tokens than asked for, a stream without its end mark.
    """

    ask: str
    text: str = ""
    token_ids: tuple[int, ...] | None = None
    token_bytes: tuple[bytes, ...] | None = None
    logprobs: bytes = b""
    margins: bytes = b""
    chosen_is_top: int | None = None
    runner_up: tuple[int, ...] = ()
    finish: str = "length"
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    completion_tokens: int | None = None
    fingerprint: str = ""
    model: str = ""
    sent: float = 0.0
    first: float | None = None
    done: float = 0.0
    attempts: int = 1
    refusals: Mapping[str, int] = field(default_factory=dict)
    reason: str = ""
    kind: str = ""
    notes: tuple[str, ...] = ()

    @property
    def ok(self) -> bool:
        """Whether there is a completion."""
        return not self.kind

    @property
    def known_by(self) -> KnownBy:
        """What this completion can be compared by."""
        if self.token_ids is not None:
            return KnownBy.IDS
        return KnownBy.BYTES if self.token_bytes is not None else KnownBy.TEXT


class Client(Protocol):
    """A connection to one server, in one protocol; used inside of one asyncio event loop."""

    async def complete(self, ask: Ask) -> Answer:
        """Send one request and wait for its end, retrying by rule. Only cancellation is raised."""

    async def models(self) -> list[str]:
        """The names that the server lists; empty where it lists none."""

    async def metrics(self) -> dict[str, float]:
        """The server's own counters (requests running or waiting, prefix hits), by name; empty if it has none."""

    async def flush(self) -> bool:
        """Empty the server's prefix cache; False where it can't be asked to."""
