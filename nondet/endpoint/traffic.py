"""Runs one round against a server: when each request is sent, what shows that the load was there, and Ctrl-C.

HTTP is left to a `Client`. Everything happens in one asyncio loop, so the callbacks need no locks.
"""

from __future__ import annotations

import asyncio
import math
import signal
import statistics
import threading
import time
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from nondet.core.records import Served, Traffic
from nondet.endpoint.arms import Answer, ArmRound, Ask, Client, Planned
from nondet.errors import one_line

T = TypeVar("T")


def run(main: Coroutine[Any, Any, T]) -> T:
    """As `asyncio.run`, which makes Ctrl-C a cancellation of the whole where the signal has Python's own handler.

    Another handler's KeyboardInterrupt would hit whatever runs at that moment, the event loop's own bookkeeping too,
    and a task that loses its wake-up never ends. The handler that was there is called once all has been cleaned up.
    """
    before = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(before):
        return asyncio.run(main)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        return asyncio.run(main)
    except KeyboardInterrupt:
        signal.signal(signal.SIGINT, before)
        before(signal.SIGINT, None)
        raise
    finally:
        if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            signal.signal(signal.SIGINT, before)


# Between two polls of the server's counters: shorter at the beginning, for short rounds.
_POLL_FIRST_SECONDS, _POLL_SECONDS = 0.005, 0.2
# How many requests run or wait now, by the names of vLLM, SGLang and llama.cpp.
_RUNNING = (":num_requests_running", ":num_running_reqs", ":requests_processing")
_WAITING = (":num_requests_waiting", ":num_queue_reqs", ":requests_deferred")
# Counters whose change a round's record keeps: cache hits, requests that ended, preemptions.
_COUNTED = (
    *("prefix_cache_hits", "prefix_cache_queries", "cache_hits", "cached_tokens"),  # cache_hit_rate is a gauge
    *("request_success", "num_requests_total", "preempt"),
)
_RETRACTED = "num_retracted_reqs"  # SGLang's preemptions: a gauge, whose maximum is kept

OnAnswer = Callable[[Planned, Answer, Served], None]


@dataclass
class Played:
    """What is known of a round while it runs, and after."""

    began: float
    seconds: float = 0.0
    tokens: int = 0  # of all requests, as the server counts them, else as it sent them
    polls: int = 0
    polled: list[tuple[float, float, float | None]] = field(default_factory=list)  # (when, running, waiting or None)
    streams: list[tuple[float, float, bool]] = field(default_factory=list)  # (first token, last byte, target)
    # (sent, last byte) of targets that did not stream
    unstreamed: list[tuple[float, float]] = field(default_factory=list)
    before: dict[str, float] = field(default_factory=dict)
    after: dict[str, float] = field(default_factory=dict)
    others_failed: Counter[str] = field(default_factory=Counter)
    fingerprints: Counter[str] = field(default_factory=Counter)
    odd: set[str] = field(default_factory=set)
    retracted: dict[str, float] = field(default_factory=dict)

    def traffic(self, round_: ArmRound, parts: int) -> Traffic:
        """What goes into the round's record."""
        running = [value for _, value, _ in self.polled]
        return Traffic(
            pattern=round_.pattern, concurrency=round_.concurrency, rate=round_.rate, parts=parts, polls=self.polls,
            running_most=max(running, default=None), running_median=statistics.median(running) if running else None,
            waiting_most=max((w for _, _, w in self.polled if w is not None), default=None),
            decoding_most=_most_at_once([(first, done) for first, done, _ in self.streams]),
            in_company=self._concurrent(), counters=counters(self.before, self.after) | self.retracted,
            others_failed=dict(self.others_failed), fingerprints=dict(self.fingerprints), odd=sorted(self.odd)[:100],
        )  # fmt: skip

    def _concurrent(self) -> int:
        """Targets with concurrent requests: another stream of ours, or as the server reported while they ran."""
        ran = [(first, done, target) for first, done, target in self.streams if done > first]
        overlapping = _overlapping([(first, done) for first, done, _ in ran])
        # a request that streams runs; any other may be waiting, unless nothing waits
        sure = [when for when, running, waiting in self.polled if running >= 2]
        known = [when for when, running, waiting in self.polled if running >= 2 and waiting == 0]
        count = sum(
            target and (other or any(first <= when <= done for when in sure))
            for (first, done, target), other in zip(ran, overlapping, strict=True)
        )
        return count + sum(any(sent <= when <= done for when in known) for sent, done in self.unstreamed)


def counters(before: dict[str, float], after: dict[str, float]) -> dict[str, float]:
    """Changes of the counters of caches, and of requests that were not ours."""
    names = [name for name in before if name in after and any(word in name for word in _COUNTED)]
    changes = {name: after[name] - before[name] for name in names}
    return {name: by for name, by in changes.items() if math.isfinite(by)}


def served_of(answer: Answer, began: float, in_flight: int) -> Served:
    """The part of an answer that a completion keeps, with times from the round's beginning."""
    sent = max(0.0, answer.sent - began)
    done = max(sent, answer.done - began)
    first = None if answer.first is None else round(min(max(sent, answer.first - began), done), 6)
    same = ("attempts", "kind", "prompt_tokens", "cached_tokens", "completion_tokens")
    return Served(
        sent=round(sent, 6), first=first, done=round(done, 6), refusals=dict(answer.refusals), in_flight=in_flight,
        odd=[one_line(note, 200) for note in answer.notes[:8]], **{name: getattr(answer, name) for name in same},
    )  # fmt: skip


async def play(
    client: Client,
    round_: ArmRound,
    requests: Sequence[Planned],
    request_of: Callable[[Planned], Ask],
    on_answer: OnAnswer,
    *,
    solo_seconds: float = 0.0,
) -> Played:
    """Run these requests of the round; `solo_seconds` is a solo answer's time, for timing a long neighbour."""
    played = Played(began=time.monotonic())
    played.before = await client.metrics()
    played.began = time.monotonic()
    played.odd |= _odd(played.before)
    under_way: dict[str, int] = {}
    gate = asyncio.Semaphore(round_.concurrency)

    async def send(planned: Planned) -> None:
        try:
            if planned.target and round_.arm == "cold":
                await client.flush()
            for key in under_way:
                under_way[key] = max(under_way[key], len(under_way) + 1)
            under_way[planned.id] = len(under_way) + 1
            answer = await client.complete(request_of(planned))
            served = served_of(answer, played.began, under_way.pop(planned.id))
            _note(played, planned, answer)
            on_answer(planned, answer, served)
        finally:
            under_way.pop(planned.id, None)
            gate.release()

    watch = asyncio.create_task(_poll(client, played)) if reports_running(played.before) else None
    try:
        async with asyncio.TaskGroup() as group:
            for index, planned in enumerate(requests):
                wait = planned.wait * solo_seconds if round_.arm == "chunked" else planned.wait
                delay = played.began + wait - time.monotonic()
                if delay > 0:
                    await asyncio.sleep(delay)
                await gate.acquire()
                group.create_task(send(planned))
                if round_.ramp and index < len(requests) // 2:
                    # the first ones get a small batch, the last ones a full one
                    await asyncio.sleep(min(0.05, 2 * solo_seconds / max(1, len(requests))))
    finally:
        played.seconds = time.monotonic() - played.began
        if watch is not None:
            watch.cancel()
            await asyncio.gather(watch, return_exceptions=True)
    played.after = await client.metrics()
    return played


def _note(played: Played, planned: Planned, answer: Answer) -> None:
    if answer.ok:
        sent = len(answer.token_ids or answer.token_bytes or ())
        played.tokens += sent if answer.completion_tokens is None else answer.completion_tokens
        if answer.first is not None:
            played.streams.append((answer.first, answer.done, planned.target))
        elif planned.target:
            played.unstreamed.append((answer.sent, answer.done))
        if planned.target:
            played.fingerprints[answer.fingerprint] += 1
    elif not planned.target:
        played.others_failed[answer.kind] += 1


async def _poll(client: Client, played: Played) -> None:
    wait = _POLL_FIRST_SECONDS
    while True:
        values = await client.metrics()
        played.polls += 1
        for name in (name for name in values if name.endswith(_RETRACTED)):
            played.retracted[name] = max(values[name], played.retracted.get(name, 0.0))
        running = _sum(values, _RUNNING)
        played.odd |= _odd(values)
        if running is not None:
            played.polled.append((time.monotonic(), running, _sum(values, _WAITING)))
        await asyncio.sleep(wait)
        wait = min(2 * wait, _POLL_SECONDS)


def reports_running(values: dict[str, float]) -> bool:
    """Whether the counters show how many requests run now."""
    return _sum(values, _RUNNING) is not None


def _odd(values: dict[str, float]) -> set[str]:
    """Names of the counters of running or waiting requests whose values are not a number of requests."""
    return {n for n, value in values.items() if n.endswith(_RUNNING + _WAITING) and not 0 <= value < math.inf}


def _sum(values: dict[str, float], names: tuple[str, ...]) -> float | None:
    hits = [value for name, value in values.items() if name.endswith(names)]
    total = sum(hits)
    return total if hits and min(hits) >= 0 and math.isfinite(total) else None


def _most_at_once(spans: Sequence[tuple[float, float]]) -> int:
    """The most intervals that hold one moment in common; ends that touch don't overlap."""
    real = [(start, end) for start, end in spans if end > start]
    starts, ends = sorted(start for start, _ in real), sorted(end for _, end in real)
    return max((bisect_right(starts, start) - bisect_right(ends, start) for start in starts), default=0)


def _overlapping(spans: Sequence[tuple[float, float]]) -> list[bool]:
    """For each interval, none of them empty, whether another one shares more than an end with it."""
    starts, ends = sorted(start for start, _ in spans), sorted(end for _, end in spans)
    # those that begin before its end, except those that end before its beginning; it is one of them itself
    return [bisect_left(starts, end) - bisect_right(ends, start) > 1 for start, end in spans]
