"""Records of servers asked over HTTP: what they said of themselves, what they keep, and what a load really was."""

from __future__ import annotations

import msgspec

from nondet.records import Record

__all__ = ["ContractAnswer", "Served", "ServerSeen", "Traffic"]


class Served(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How a server answered one request.

    Attributes:
        sent, first, done: Seconds from the beginning of its round (of the part of it in which it was asked): first byte
            sent, first token received (None if not streamed), last byte received.
        attempts: How often it was sent.
        refusals: What went wrong at the attempts before the last: kind -> times.
        kind: The kind of failure; empty unless it failed.
        prompt_tokens, cached_tokens, completion_tokens: As the server counts them; None where it does not.
        in_flight: The most requests of ours that were under way at once while this one was, itself included.
        text: SHA-256 (first 16 hex digits) of the completion's text, which two servers have in common where they know
            tokens by different things; empty of failures, and in older files.
        odd: What was odd about the answer, a count that was not taken say; a phrase each.
    """

    sent: float = 0.0
    first: float | None = None
    done: float = 0.0
    attempts: int = 1
    refusals: dict[str, int] = {}
    kind: str = ""
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    completion_tokens: int | None = None
    in_flight: int = 1
    text: str = ""
    odd: list[str] = []


class Traffic(msgspec.Struct, frozen=True, kw_only=True):
    """What a round was meant to be, and what shows that it was.

    Attributes:
        pattern: How it arrived and what rode along, in words.
        concurrency: Requests that were let under way at once.
        rate: Requests a second that were let go; 0.0: no limit.
        polls: How often the server's own counters were read while the round ran.
        running_most, running_median: Requests that the server said it was running; None where it does not say.
        waiting_most: The most that it said were waiting; None where it does not say.
        decoding_most: The most answers that streamed at the same time; 0 where none did.
        in_company: Targets that streamed while another answer of ours did, or during a poll that said that two or more
            were running. A round that went on after a stop counts those of its last part.
        parts: Sessions that it took; more than 1 where it was stopped and gone on with.
        counters: How far the server's own counters moved over the round: name -> by how much.
        others_failed: Requests alongside that failed: kind -> times.
        fingerprints: What the server called itself in the answers to targets -> times; "" where it said nothing.
        odd: Names of the server's own counters that said at times what is no number of requests: those were not taken.
    """

    pattern: str
    concurrency: int
    rate: float = 0.0
    polls: int = 0
    running_most: float | None = None
    running_median: float | None = None
    waiting_most: float | None = None
    decoding_most: int = 0
    in_company: int = 0
    parts: int = 1
    counters: dict[str, float] = {}
    others_failed: dict[str, int] = {}
    fingerprints: dict[str, int] = {}
    odd: list[str] = []


class ServerSeen(Record, frozen=True, tag="server", kw_only=True):
    """What a server said of itself when a run began, or went on.

    Attributes:
        impl: What its completions are filed under: "server", or "server-2" for one beside it.
        number: 0 when the run began, then one more each time that it went on.
        url: Its address, without what could be a secret.
        protocol: How it was spoken to.
        model: The name that was asked for, and
        answered_as: the one that its answers gave.
        listed: The names that it lists.
        fingerprint: What it calls itself; "" where it says nothing.
        known_by: What completions are compared by: "ids", "bytes" or "text".
        logprobs: Whether its answers have logprobs.
        software: What it seems to be by its pages, with its version; "" where nobody can say.
    """

    impl: str
    number: int
    url: str
    protocol: str
    model: str
    answered_as: str
    listed: list[str]
    fingerprint: str
    known_by: str
    logprobs: bool
    software: str = ""

    @property
    def key(self) -> tuple[str, ...]:
        """As `Record.key`."""
        return ("server", self.impl, str(self.number))


class ContractAnswer(Record, frozen=True, tag="contract", kw_only=True):
    """One question of the contract: whether the server does what a comparison of its answers takes for granted.

    Attributes:
        question: Its name; `nondet.endpoint.contract.QUESTIONS` has its words.
        answer: "yes", "no" or "unknown".
        evidence: What was seen, in a phrase.
    """

    impl: str
    question: str
    answer: str
    evidence: str

    @property
    def key(self) -> tuple[str, ...]:
        """As `Record.key`."""
        return ("contract", self.impl, self.question)
