"""A server in memory, whose answers follow from the prompt, and lie or depend on the load as told to; runs of it."""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, closing
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from nondet.core.records import Run
from nondet.core.runfile import open_run, read_run
from nondet.core.traces import check_traces, read_traces
from nondet.endpoint.arms import Answer, ArmPlan, Ask, EndpointLoad, Server, Settings, build_arms, describe
from nondet.endpoint.collect import collect

_WORDS, _STEP_S = [f" w{i}" for i in range(50)], 0.0004


def draw(*parts: object) -> int:
    return int.from_bytes(hashlib.sha256(repr(parts).encode()).digest()[:6], "little")


@dataclass(kw_only=True)
class MemoryClient:
    """As `nondet.endpoint.arms.Client`; the first fields are what it does beside answering honestly."""

    batch: str = ""  # "bits" moves logprobs where others run, "tokens" flips tokens there too
    cache: bool = False  # logprobs depend on what was cached
    noisy: int = 0  # every so many-th answer has other bits, whatever runs
    known: str = "ids"  # what tokens come as: "ids", "bytes" or "text"
    logprobs: bool = True
    streams: bool = True
    counters: bool = True
    cached: bool = True
    serial: bool = False  # one request at a time
    greedy: bool = True
    seeded: bool = True
    varies: bool = True
    fails: int = 0  # every so many-th request fails with a 500
    dies_after: int = 0  # requests after which nothing is answered any more
    fingerprint: str = "fake-1"
    listed: Sequence[str] = ("tiny",)
    change: Callable[[Ask, int, Answer], Answer] = lambda ask, number, answer: answer  # the number-th answer
    url: str = "http://memory"
    protocol: str = "memory"
    model: str = "tiny"
    server: str = ""
    context: int | None = None
    running: int = 0
    asked: int = 0
    seen: set[str] = field(default_factory=set)
    ids: Counter[str] = field(default_factory=Counter)
    gate: asyncio.Semaphore | None = None

    async def complete(self, ask: Ask) -> Answer:
        self.asked += 1
        self.ids[ask.id] += 1
        sent, number = time.monotonic(), self.asked
        if self.dies_after and number > self.dies_after:
            return Answer(ask=ask.id, finish="error", sent=sent, done=sent, kind="connect", reason="connection refused")
        if self.fails and number % self.fails == 0:
            return Answer(ask=ask.id, finish="error", sent=sent, done=sent, kind="http-500", reason="500 no\x1b[31m")
        self.gate = self.gate or asyncio.Semaphore(1 if self.serial else 10_000)
        async with self.gate:
            return self.change(ask, number, await self._answer(ask, number, sent))

    async def _answer(self, ask: Ask, number: int, sent: float) -> Answer:
        most = 0
        self.running += 1
        try:
            await asyncio.sleep(_STEP_S)
            first = time.monotonic()
            cached = 16 if ask.prompt in self.seen and ask.cached is not False else 0
            self.seen.add(ask.prompt)
            for _ in range(4):
                most = max(most, self.running)
                await asyncio.sleep(_STEP_S * ask.max_tokens / 16)
            done, most = time.monotonic(), max(most, self.running)
        finally:
            self.running -= 1
        beside = most > 1 and self.batch
        tokens: list[int] = []
        for i in range(ask.max_tokens):
            salt: object = 0
            if ask.temperature and self.varies:
                salt = (ask.seed, i) if ask.seed is not None and self.seeded else (number, i)
            if beside and self.batch == "tokens" and i >= 5:
                salt = "other"
            tokens.append(draw("token", ask.prompt, tokens[-4:], salt) % len(_WORDS))
        logprobs = np.array([-0.25 - draw(ask.prompt, i, t) % 100 / 50 for i, t in enumerate(tokens)], np.float32)
        if beside or (self.cache and cached) or (self.noisy and number % self.noisy == 0):
            logprobs[len(tokens) // 2 :] += np.float32(2**-18)
        margins = np.full(len(tokens), 1.5, dtype=np.float32) / np.float32(ask.temperature or 1.0)
        answer = Answer(
            ask=ask.id, text="".join(_WORDS[t] for t in tokens), cached_tokens=cached if self.cached else None,
            prompt_tokens=len(ask.prompt) // 4, completion_tokens=len(tokens), fingerprint=self.fingerprint,
            token_ids=tuple(tokens) if self.known == "ids" else None, sent=sent, done=done,
            token_bytes=tuple(_WORDS[t].encode() for t in tokens) if self.known in ("ids", "bytes") else None,
            first=first if self.streams else None, model="tiny",
        )  # fmt: skip
        if not self.logprobs or not ask.top_logprobs:
            return answer
        top = len(tokens) if self.greedy else len(tokens) - 1
        return replace(answer, logprobs=logprobs.tobytes(), margins=margins.tobytes(), chosen_is_top=top)

    async def metrics(self) -> dict[str, float]:
        if not self.counters:
            return {}
        running = min(self.running, 1) if self.serial else self.running
        return {"fake:num_requests_running": running, "fake:num_requests_waiting": self.running - running}

    async def flush(self) -> bool:
        self.seen.clear()
        return True

    @asynccontextmanager
    async def connected(self) -> AsyncIterator[MemoryClient]:
        self.gate = None
        yield self


LOAD = EndpointLoad(concurrency=12, targets=6, others=8, prompt=(4, 32), tokens=(4, 24))
ARMS = {"solo": 10, "cold": 6, "warm": 6, "chunked": 3, "loaded": 18}
ENVIRONMENT: dict[str, Any] = {"torch": "0", "variables": {}}


def planned(
    arms: dict[str, int] | None = None, prompts: int = 1, load: EndpointLoad = LOAD, max_tokens: int = 16
) -> ArmPlan:
    texts = ["the quick brown fox " * 40]
    return build_arms(arms or ARMS, load, prompts=prompts, max_tokens=max_tokens, seed=1, texts=texts)


def sampled(
    path: Path, *servers: MemoryClient | Server, plan: ArmPlan | None = None, prompts: Sequence[str] | int = 1,
    resume: bool = False,
) -> Run:  # fmt: skip
    if isinstance(prompts, int):
        prompts = [f"prompt number {i}, of some length" for i in range(prompts)]
    plan = plan or planned(prompts=len(prompts))
    settings = Settings(prompts, max_tokens=16)
    asked = [
        s if isinstance(s, Server) else Server(name, s.connected, s.url, "tiny")
        for name, s in zip(("server", "server-2"), servers, strict=False)
    ]
    header = describe(asked, plan, settings, LOAD, seed=1)
    writer = open_run(path, command="sample", plan=header, environment=ENVIRONMENT, resume=resume)
    with closing(writer):
        collect(asked, plan, settings, writer)
        writer.finish()
    run = read_run(path)
    check_traces(run, read_traces(path)[0])
    return run
