"""Records of `nondet sample`: completions and the rounds that they were made in. Plain typed data, no torch."""

from __future__ import annotations

from typing import Self

import msgspec

from nondet.records import Record, Role, role_of
from nondet.records_served import Served, Traffic

__all__ = ["Completion", "Round"]


class Completion(Record, frozen=True, tag="completion", kw_only=True):
    """One completion of the request under study.

    Attributes:
        impl: Implementation asked for: stock, invariant, invariant:attention, ...
        request: Identifier, unique within the implementation.
        round: Number of the round (one engine session) that it belongs to.
        prompt: Index of the prompt in the header's plan.
        tokens_digest: SHA-256 (first 16 hex digits) of the token ids: equal digests are equal completions.
        trace: SHA-256 (first 16 hex digits) of token ids and logprob bits; the side file holds the trace under it.
        n_tokens: Tokens generated.
        finish: "length", "eos" or "error".
        arrival_step: The engine step from which the request was allowed to be scheduled.
        schedule: Run-length list of [first_step, steps, query_tokens]: the engine steps in which the request took part.
            Over all requests of a round this gives the exact batch of each step.
        nonfinite: Tokens whose logprob is NaN or infinite: the model computed no number there, whatever the token.
        batch_min: Smallest and
        batch_max: largest number of query tokens in a step that this request took part in.
        arm: Of a server: solo, loaded, cold, warm or chunked; of an axis that is varied "base", "chunk=16", ...; empty
            elsewhere.
        served: How a server answered it; None elsewhere.
    """

    impl: str
    request: str
    round: int
    prompt: int
    tokens_digest: str
    trace: str
    n_tokens: int
    finish: str
    arrival_step: int
    schedule: list[list[int]]
    batch_min: int
    batch_max: int
    nonfinite: int = 0
    status: str = "ok"
    reason: str = ""
    arm: str = ""
    served: Served | None = None

    @property
    def key(self) -> tuple[str, ...]:
        """As `Record.key`."""
        return ("completion", self.impl, self.request)

    def refused(self, why: str) -> Self:
        """As `Record.refused`."""
        return type(self)(
            impl=self.impl, request=self.request, round=self.round, prompt=self.prompt, tokens_digest="", trace="",
            n_tokens=0, finish="error", arrival_step=0, schedule=[], batch_min=0, batch_max=0, status="error",
            reason=why, arm=self.arm, served=self.served and Served(kind="unrecordable"),
        )  # fmt: skip

    @property
    def role(self) -> Role:
        """What the implementation is to a reader."""
        return role_of(self.impl)


class Round(Record, frozen=True, tag="round", kw_only=True):
    """One engine session: a slice of the load plan, run from an empty engine, and the unit of resuming.

    Attributes:
        targets: Completions of the request under study.
        others: Requests that ran alongside.
        steps: Engine steps.
        tokens: Tokens generated for everybody.
        seconds: Wall time of the steps. Left out are the model's loading, the warm-up and `first_use_seconds`.
        background: Schedules of the requests alongside: request id -> run-length schedule.
        ran: What the launchers and the dispatcher say ran, with counts.
        arm: As a completion's.
        traffic: Of a server: what the round was meant to be, and what shows that it was; None elsewhere.
        figures: Of an axis that is varied: what the engine's steps show, see `nondet.sampling.figures`.
        first_use_seconds: Within the steps, of compiling kernels and proving members of classes: a machine's first run
            has them, and no later one.
    """

    impl: str
    round: int
    targets: int
    others: int
    steps: int
    tokens: int
    seconds: float
    background: dict[str, list[list[int]]] = msgspec.field(default_factory=dict)
    ran: dict[str, int] = msgspec.field(default_factory=dict)
    arm: str = ""
    traffic: Traffic | None = None
    figures: dict[str, int] = msgspec.field(default_factory=dict)
    first_use_seconds: float = 0.0

    @property
    def key(self) -> tuple[str, ...]:
        """As `Record.key`."""
        return ("round", self.impl, str(self.round))

    @property
    def role(self) -> Role:
        """What the implementation is to a reader."""
        return role_of(self.impl)
