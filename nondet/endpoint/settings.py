"""Whom an endpoint run asks, and what all of its requests have in common."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from typing import Any

from nondet.endpoint.exchange import Ask, Client
from nondet.endpoint.plan import Planned
from nondet.sampling.plan import Sampling

__all__ = ["Server", "Settings"]


@dataclass(frozen=True)
class Server:
    """One server to ask.

    Attributes:
        impl: What its completions are filed under: "server", "server-2".
        connect: Makes its client.
        url, model: What the user named.
    """

    impl: str
    connect: Callable[[], AbstractAsyncContextManager[Client]]
    url: str
    model: str


@dataclass(frozen=True)
class Settings:
    """What every request has in common.

    Attributes:
        prompts: The prompts under study; where tokens are drawn one for each prompt and seed.
        seeds: Of each of them, where tokens are drawn; else empty.
        extra: Fields of every body, as the user gave them.
    """

    prompts: Sequence[str]
    max_tokens: int
    temperature: float = 0.0
    seeds: Sequence[int] = ()
    top_k: int = 0
    top_p: float = 1.0
    top_logprobs: int = 2
    ignore_eos: bool = False
    extra: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def drawn(cls, prompts: Sequence[str], max_tokens: int, samplings: Sequence[Sampling]) -> Settings:
        """Each prompt under each seed.

        Args:
            samplings: How tokens are drawn, one for each seed; empty for greedy requests.
        """
        if not samplings:
            return cls(prompts, max_tokens)
        how = samplings[0]
        return cls(
            prompts=[text for text in prompts for _ in samplings],
            max_tokens=max_tokens,
            temperature=how.temperature,
            seeds=[s.seed for _ in prompts for s in samplings],
            top_k=how.top_k,
            top_p=how.top_p,
        )

    def ask(self, **fields: Any) -> Ask:
        """A request with these settings, unless others are given."""
        common = {"top_logprobs": self.top_logprobs, "extra": self.extra}
        return Ask(**{**common, **fields})

    def of(self, planned: Planned, arm: str) -> Ask:
        """What a planned request is to the server."""
        return self.ask(
            id=planned.id,
            prompt=self.prompts[planned.prompt] if planned.prompt >= 0 else planned.text,
            max_tokens=planned.max_tokens,
            temperature=self.temperature,
            seed=self._seed(planned),
            top_k=self.top_k,
            top_p=self.top_p,
            ignore_eos=self.ignore_eos,
            cached=False if arm == "cold" and planned.target else None,
        )

    def _seed(self, planned: Planned) -> int | None:
        """The subject's own; of a background request one that its name gives, so that equal plans ask for the same."""
        if not self.seeds:
            return None
        return self.seeds[planned.prompt] if planned.prompt >= 0 else zlib.crc32(planned.id.encode()) >> 1
