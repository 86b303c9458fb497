"""What an engine session did, step by step: kept by the scheduler and a hook, read when the session is over.

The scheduler is transformers' own first-come-first-served one with a clock: a request may be scheduled only from its
arrival step. Arrivals are counted in engine steps, not in seconds, so that one plan means one sequence of batches.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch

__all__ = ["SessionLog", "run_lengths", "scheduler_class"]


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
        started, ended: Clock times of the first step's beginning and the last request's end.
    """

    arrivals: dict[str, int]
    clock: int = 0
    steps: int = 0
    entries: dict[str, list[tuple[int, int]]] = field(default_factory=dict)
    batch: dict[int, int] = field(default_factory=dict)
    rows: list[list[str]] = field(default_factory=list)
    top: list[tuple[torch.Tensor, torch.Tensor]] = field(default_factory=list)
    started: float = 0.0
    ended: float = 0.0

    def record_step(self, scheduled: Iterable[Any]) -> None:
        """Note the batch of the step that runs next (transformers' FutureRequestStates)."""
        if not self.steps:
            self.started = time.perf_counter()
        total = 0
        rows = []
        for future in scheduled:
            name = future.state.request_id
            self.entries.setdefault(name, []).append((self.clock, future.query_length))
            total += future.query_length
            if future.has_new_token:
                rows.append(name)
        self.batch[self.clock] = total
        self.rows.append(rows)
        self.steps += 1
        self.clock += 1

    def record_logits(self, _module: Any, _args: Any, kwargs: dict[str, Any], output: Any) -> None:
        """Forward hook: keep the two largest logits of each row. Reads only, so no bit of the model's changes."""
        logits = output.logits[0]
        wanted = kwargs["logits_indices"]
        if logits.shape[0] != wanted.shape[0]:
            logits = logits[wanted]  # a model without logits_to_keep gives a row for every query token
        # one row for each request of the batch; those past the requests that get a token are filler
        rows = logits[: len(self.rows[-1])].float()
        # maxima rather than topk: among equals topk may choose by the number of rows, and the tool would be part of
        # what it looks for
        first = rows.max(dim=-1, keepdim=True)
        second = rows.scatter(-1, first.indices, float("-inf")).max(dim=-1, keepdim=True)
        self.top.append((torch.cat([first.values, second.values], -1), torch.cat([first.indices, second.indices], -1)))

    def margins(self) -> dict[str, list[tuple[float, int, int]]]:
        """Request id -> (top-1 minus top-2 logit, their token ids) of each generated token."""
        found: dict[str, list[tuple[float, int, int]]] = {}
        if not self.top:
            return found
        names = [name for rows in self.rows[: len(self.top)] for name in rows]  # a step that crashed has no logits
        values = torch.cat([v for v, _ in self.top]).cpu()
        tokens = torch.cat([t for _, t in self.top]).cpu().tolist()
        gaps = (values[:, 0] - values[:, 1]).tolist()
        for name, gap, (first, second) in zip(names, gaps, tokens, strict=True):
            found.setdefault(name, []).append((gap, first, second))
        return found


def scheduler_class(log: SessionLog) -> type:
    """transformers' FIFO scheduler, holding requests back until their arrival step and noting every batch in `log`."""
    from transformers.generation.continuous_batching.scheduler import FIFOScheduler

    class ArrivalScheduler(FIFOScheduler):
        waiting_requests_order: deque[str]

        def schedule_batch(self, token_budget: int, cache_budget: int) -> Any:
            waiting = list(self.waiting_requests_order)
            if not self.active_requests and waiting:
                # nobody is being served: jump to the next arrival, an idle step would compute nothing
                log.clock = max(log.clock, min(log.arrivals[name] for name in waiting))
            held = [name for name in waiting if log.arrivals[name] > log.clock]
            self.waiting_requests_order = deque(name for name in waiting if log.arrivals[name] <= log.clock)
            scheduled = super().schedule_batch(token_budget, cache_budget)
            self.waiting_requests_order.extend(held)
            if scheduled[0]:  # None: the cache is full, and the engine asks again after making room
                log.record_step(scheduled[0])
            return scheduled

        def finish_request(self, request_id: str) -> None:
            log.ended = time.perf_counter()
            super().finish_request(request_id)

    return ArrivalScheduler


def run_lengths(entries: Iterable[tuple[int, int]]) -> list[list[int]]:
    """[(step, query tokens), ...] -> [[first_step, steps, query_tokens], ...] over neighbouring steps of equal size."""
    runs: list[list[int]] = []
    for step, tokens in entries:
        if runs and runs[-1][0] + runs[-1][1] == step and runs[-1][2] == tokens:
            runs[-1][1] += 1
        else:
            runs.append([step, 1, tokens])
    return runs
