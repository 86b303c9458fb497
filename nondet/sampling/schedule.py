"""What an engine session did, step by step: kept by the scheduler and a hook, read when the session is over.

The scheduler is transformers' own first-come-first-served one with a clock: a request may be scheduled only from its
arrival step. Arrivals are counted in engine steps, not in seconds, so that one plan means one sequence of batches.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from nondet.core.launch import FirstUses
from nondet.sampling.orders import Fifo, Order
from nondet.sampling.protocol import Pace
from nondet.sampling.served import KeptKeys
from nondet.sampling.setting import PLAIN, Setting
from nondet.sampling.tops import TopRing, two_largest

if TYPE_CHECKING:
    from nondet.sampling.speculation import Speculation

__all__ = ["SessionLog", "Span", "page_of", "run_lengths", "scheduler_class"]


class Span(NamedTuple):
    """The rows of one request in one step: positions first ... first+rows-1, in this order.

    Attributes:
        new: Whether its last row predicts a token; False in the middle of a chunked prefill.
    """

    request: str
    first: int
    rows: int
    new: bool


@dataclass
class SessionLog:
    """The steps of one session.

    Attributes:
        arrivals: Request id -> arrival step.
        clock: The current engine step. It jumps over steps in which nobody has arrived.
        steps: Steps that ran.
        entries: Request id -> [step, query tokens] of each step that it took part in.
        batch: Step -> query tokens of the whole batch.
        rows: For each step, the requests that get a token, in the order of the logits' rows.
        top: For each step, the two largest logits and their token ids: float32 and int64 [rows, 2], on the device.
        packs: Step -> who is in it, in the order of the rows: what ran, where, at which positions.
        forced: Request id -> tokens that it is fed instead of those that it chose.
        cut: Says whether nothing more is to be scheduled.
        page: Tokens in a page of the cache, as the engine itself has it.
        threads: CPU threads of the engine's own thread.
        admitted: Requests in the order of their first steps; one that was preempted comes again.
        preempted: Requests that lost their cache, once for each time.
        started, ended: Clock times of the first step's beginning and the last request's end.
        first_uses: What was proven and compiled meanwhile: no part of any step's time.
        marks: Clock times of all steps' beginnings.
        captures: Numbers of the steps in which a CUDA graph was captured, from 0.
        ring: Where CUDA graphs keep the two largest logits; None without graphs.
        kept: Which layers kept keys in the engine's cache in the first step; not seen under CUDA graphs.
        graphs: Whether steps are CUDA graphs: a step in which one is captured runs the model more than once, and a
            replayed one no Python.
    """

    arrivals: dict[str, int]
    clock: int = 0
    steps: int = 0
    entries: dict[str, list[tuple[int, int]]] = field(default_factory=dict)
    batch: dict[int, int] = field(default_factory=dict)
    rows: list[list[str]] = field(default_factory=list)
    top: list[tuple[torch.Tensor, torch.Tensor]] = field(default_factory=list)
    packs: dict[int, tuple[Span, ...]] = field(default_factory=dict)
    forced: Mapping[str, Sequence[int]] = field(default_factory=dict)
    cut: Callable[[], bool] = lambda: False
    page: int = 0
    threads: int = 0
    admitted: list[str] = field(default_factory=list)
    preempted: list[str] = field(default_factory=list)
    started: float = 0.0
    ended: float = 0.0
    first_uses: FirstUses = field(default_factory=FirstUses)
    marks: list[float] = field(default_factory=list)
    captures: set[int] = field(default_factory=set)
    ring: TopRing | None = None
    kept: KeptKeys = field(default_factory=KeptKeys)
    graphs: bool = False

    @property
    def pack(self) -> tuple[Span, ...]:
        """Who is in the step that runs now."""
        return self.packs[self.clock - 1]

    def record_step(self, scheduled: Iterable[Any]) -> None:
        """Note the batch of the step that runs next (transformers' FutureRequestStates)."""
        self.marks.append(time.perf_counter())
        if not self.steps:
            self.started = self.marks[0]
        total = 0
        rows = []
        pack = []
        for future in scheduled:
            name = future.state.request_id
            pack.append(Span(name, future.state.position_offset, future.query_length, future.has_new_token))
            self.entries.setdefault(name, []).append((self.clock, future.query_length))
            total += future.query_length
            if future.has_new_token:
                rows.append(name)
        self.batch[self.clock] = total
        self.rows.append(rows)
        self.packs[self.clock] = tuple(pack)
        self.steps += 1
        self.clock += 1
        self.ended = time.perf_counter()

    def force(self, states: Iterable[Any]) -> None:
        """Put the forced token in the place of the chosen one, before it is fed (transformers' RequestStates)."""
        for state in states:
            tokens = self.forced.get(state.request_id)
            done = len(state.generated_tokens)
            if tokens is not None and 0 < done <= len(tokens):
                state.generated_tokens[-1] = tokens[done - 1]
                state.tokens_to_process = [tokens[done - 1]]

    def record_logits(self, _module: Any, _args: Any, kwargs: dict[str, Any], output: Any) -> None:
        """Forward hook: keep the two largest logits of each row. Reads only, so no bit of the model's changes."""
        logits = output.logits[0]
        wanted = kwargs["logits_indices"]
        if logits.shape[0] != wanted.shape[0]:
            logits = logits[wanted]  # a model without logits_to_keep gives a row for every query token
        # one row for each request of the batch; those past the requests that get a token are filler
        self.keep_tops(logits[: len(self.rows[-1])])

    def keep_tops(self, logits: torch.Tensor) -> None:
        """Keep the two largest of each row of the step, [rows, vocabulary], in the order of `rows`."""
        self.top.append(two_largest(logits))

    def note_capture(self, *_: Any) -> None:
        """Forward hook: the model's Python runs in this step, so what it launches is captured into a graph."""
        self.captures.add(self.steps - 1)

    def drain(self) -> None:
        """Take what the graphs have kept since the last time; between steps."""
        if self.ring is not None:
            self.top += self.ring.read([len(names) for names in self.rows])

    def tops(self) -> dict[str, list[tuple[float, float, int, int]]]:
        """Request id -> (top-1 and top-2 logit, their token ids) of each generated token."""
        found: dict[str, list[tuple[float, float, int, int]]] = {}
        if not self.top:
            return found
        names = [name for rows in self.rows[: len(self.top)] for name in rows]  # a step that crashed has no logits
        values = torch.cat([v for v, _ in self.top]).cpu().tolist()
        tokens = torch.cat([t for _, t in self.top]).cpu().tolist()
        for name, (best, next_best), (first, second) in zip(names, values, tokens, strict=True):
            found.setdefault(name, []).append((best, next_best, first, second))
        return found

    def pace(self) -> list[Pace]:
        """Each step's time and tokens. The last one is over when its last request is."""
        ends = [*self.marks[1:], max(self.ended, self.marks[-1])] if self.marks else []
        spans = zip(self.marks, ends, self.rows, strict=True)
        return [
            Pace(self.spent(mark, end), len(names), i in self.captures) for i, (mark, end, names) in enumerate(spans)
        ]

    def spent(self, begin: float, end: float) -> float:
        """Seconds between two clock times, without those of first uses."""
        return max(0.0, end - begin - self.first_uses.within(begin, end))

    def margins(self) -> dict[str, list[tuple[float, int, int]]]:
        """Request id -> (top-1 minus top-2 logit, their token ids) of each generated token."""
        return {
            name: [(best - next_best, first, second) for best, next_best, first, second in tops]
            for name, tops in self.tops().items()
        }


def scheduler_class(
    log: SessionLog, setting: Setting = PLAIN, order: Order | None = None, speculation: Speculation | None = None
) -> type:
    """transformers' FIFO scheduler, holding requests back until their arrival step and noting every batch in `log`.

    Args:
        setting: Whose chunk size is kept to.
        order: Who is offered to the engine first; None: as they came.
        speculation: Adds drafts to what the requests that decode bring to a step.
    """
    from transformers.generation.continuous_batching.scheduler import FIFOScheduler

    arranged = order or Fifo({})

    class ArrivalScheduler(FIFOScheduler):
        waiting_requests_order: deque[str]

        def schedule_batch(self, token_budget: int, cache_budget: int) -> Any:
            if log.cut():
                return [], False, 0, 0  # nothing to do, until the session is stopped
            log.page, log.threads = page_of(self.cache), torch.get_num_threads()
            if log.steps:
                log.kept.check()
            elif not log.graphs:
                log.kept.watch(self.cache)
            log.force(self.active_requests.values())
            if log.ring is not None and log.ring.full(log.steps):
                log.drain()
            if speculation is not None:
                speculation.propose(self.active_requests.values(), self.cache)
            waiting = list(self.waiting_requests_order)
            if not self.active_requests and waiting:
                # nobody is being served: jump to the next arrival, an idle step would compute nothing
                log.clock = max(log.clock, min(log.arrivals[name] for name in waiting))
            held = [name for name in waiting if log.arrivals[name] > log.clock]
            self.waiting_requests_order = deque(
                arranged.arrange([name for name in waiting if log.arrivals[name] <= log.clock])
            )
            scheduled = super().schedule_batch(token_budget, cache_budget)
            self.waiting_requests_order.extend(held)
            if scheduled[0]:  # None: the cache is full, and the engine asks again after making room
                for name in (f.state.request_id for f in scheduled[0]):
                    if name in waiting:
                        log.admitted.append(name)
                        arranged.admitted(name)
                if speculation is not None:
                    speculation.scheduled(scheduled[0])
                log.record_step(scheduled[0])
            return scheduled

        def _schedule_request(self, state: Any, request_tokens: list[int], token_budget: int, *more: Any) -> None:
            if speculation is not None and speculation.cut(state, token_budget):
                return  # it decodes: what it brings is settled
            if setting.chunk is not None and state.status.name != "DECODING":
                token_budget = min(token_budget, setting.chunk)
            super()._schedule_request(state, request_tokens, token_budget, *more)

        def add_waiting_request(self, state: Any) -> None:
            if state.request_id in log.entries:  # it has run before: its cache was given up
                log.preempted.append(state.request_id)
            super().add_waiting_request(state)

        def finish_request(self, request_id: str) -> None:
            log.ended = time.perf_counter()
            super().finish_request(request_id)

    return ArrivalScheduler


def page_of(cache: Any) -> int:
    """Tokens in a page of the engine's cache, by what the cache itself says (5.17 calls it a block)."""
    if hasattr(cache, "block_size"):
        return int(cache.block_size)
    return int(next(iter(cache.cache_allocators.values())).tokens_per_page)


def run_lengths(entries: Iterable[tuple[int, int]]) -> list[list[int]]:
    """[(step, query tokens), ...] -> [[first_step, steps, query_tokens], ...] over neighbouring steps of equal size."""
    runs: list[list[int]] = []
    for step, tokens in entries:
        if runs and runs[-1][0] + runs[-1][1] == step and runs[-1][2] == tokens:
            runs[-1][1] += 1
        else:
            runs.append([step, 1, tokens])
    return runs
