"""A server in memory: a `Client` whose answers follow from the prompt, and lie or depend on the load as told to."""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import numpy as np

from nondet.endpoint.arms import Answer, Ask

_WORDS = [f" w{i}" for i in range(50)]


def draw(*parts: object) -> int:
    """A number that follows from the parts."""
    return int.from_bytes(hashlib.sha256(repr(parts).encode()).digest()[:6], "little")


@dataclass
class Faults:
    """What the server does beside answering honestly.

    Attributes:
        batch: "bits" moves logprobs where others run, "tokens" flips tokens there too.
        cache: Logprobs depend on what was cached.
        noisy: Every `noisy`th answer has other bits, whatever runs.
        known: What tokens come as: "ids", "bytes" or "text".
        serial: One request at a time.
        fails: Every `fails`th request fails with a 500.
        dies_after: Requests after which nothing is answered any more.
    """

    batch: str = ""
    cache: bool = False
    noisy: int = 0
    known: str = "ids"
    logprobs: bool = True
    streams: bool = True
    metrics: bool = True
    cached: bool = True
    flushes: bool = True
    serial: bool = False
    greedy: bool = True
    seeded: bool = True
    varies: bool = True
    fails: int = 0
    dies_after: int = 0
    fingerprint: str = "fake-1"
    models: tuple[str, ...] = ("tiny",)
    step_s: float = 0.0004


@dataclass
class MemoryClient:
    """See `Faults`."""

    faults: Faults = field(default_factory=Faults)
    url: str = "http://memory"
    protocol: str = "memory"
    model: str = "tiny"
    running: int = 0
    asked: int = 0
    seen: set[str] = field(default_factory=set)
    ids: Counter[str] = field(default_factory=Counter)
    gate: asyncio.Semaphore | None = None

    async def complete(self, ask: Ask) -> Answer:
        """As `nondet.endpoint.arms.Client`."""
        f = self.faults
        self.asked += 1
        self.ids[ask.id] += 1
        number = self.asked
        sent = time.monotonic()
        if f.dies_after and number > f.dies_after:
            return self._failed(ask, sent, "connect", "connection refused")
        if f.fails and number % f.fails == 0:
            return self._failed(ask, sent, "http-500", "500 internal\x1b[31m error")
        self.gate = self.gate or asyncio.Semaphore(1 if f.serial else 10_000)
        async with self.gate:
            return await self._answer(ask, number, sent)

    async def _answer(self, ask: Ask, number: int, sent: float) -> Answer:
        f = self.faults
        self.running += 1
        try:
            await asyncio.sleep(f.step_s)
            first = time.monotonic()
            most = self.running
            prompt = str(ask.prompt)
            cached = 16 if prompt in self.seen and ask.cached is not False else 0
            self.seen.add(prompt)
            for _ in range(4):
                await asyncio.sleep(f.step_s * ask.max_tokens / 16)
                most = max(most, self.running)
            done = time.monotonic()
        finally:
            self.running -= 1
        beside = most > 1 and bool(f.batch)
        state = (beside, cached if f.cache else 0, bool(f.noisy) and number % f.noisy == 0)
        tokens: list[int] = []
        for i in range(ask.max_tokens):
            salt: object = 0
            if ask.temperature and f.varies:
                salt = (ask.seed, i) if ask.seed is not None and f.seeded else (number, i)
            if beside and f.batch == "tokens" and i >= 5:
                salt = "other"
            tokens.append(draw("token", prompt, tokens[-4:], salt) % len(_WORDS))
        scale = np.array([-0.25 - draw(prompt, i, t) % 100 / 50 for i, t in enumerate(tokens)], dtype=np.float32)
        if any(state):
            scale[len(tokens) // 2 :] += np.float32(2**-18)
        margins = np.full(len(tokens), 1.5, dtype=np.float32) / np.float32(ask.temperature or 1.0)
        pieces = tuple(_WORDS[t].encode() for t in tokens)
        given = f.logprobs and ask.top_logprobs > 0
        return Answer(
            ask=ask.id,
            text="".join(_WORDS[t] for t in tokens),
            token_ids=tuple(tokens) if f.known == "ids" else None,
            token_bytes=pieces if f.known in ("ids", "bytes") else None,
            logprobs=scale.tobytes() if given else b"",
            margins=margins.tobytes() if given else b"",
            chosen_is_top=(len(tokens) if f.greedy else len(tokens) - 1) if given else None,
            prompt_tokens=len(prompt) // 4,
            cached_tokens=cached if f.cached else None,
            completion_tokens=len(tokens),
            fingerprint=f.fingerprint,
            model="tiny",
            sent=sent,
            first=first if f.streams else None,
            done=done,
        )

    def _failed(self, ask: Ask, sent: float, kind: str, reason: str) -> Answer:
        return Answer(ask=ask.id, finish="error", sent=sent, done=time.monotonic(), kind=kind, reason=reason)

    async def models(self) -> list[str]:
        """As `nondet.endpoint.arms.Client`."""
        return list(self.faults.models)

    async def metrics(self) -> dict[str, float]:
        """As `nondet.endpoint.arms.Client`."""
        if not self.faults.metrics:
            return {}
        running = min(self.running, 1) if self.faults.serial else self.running
        return {"fake:num_requests_running": running, "fake:num_requests_waiting": self.running - running}

    async def flush(self) -> bool:
        """As `nondet.endpoint.arms.Client`."""
        if self.faults.flushes:
            self.seen.clear()
        return self.faults.flushes

    @asynccontextmanager
    async def connected(self) -> AsyncIterator[MemoryClient]:
        """As a real client is entered."""
        self.gate = None
        yield self
