"""An engine that stays up, for timing: the same requests are served wave after wave, each from idle to idle.

Its CUDA graphs are captured in the first wave and replayed in all that follow. Several stand beside each other on one
model, and one of them is busy at a time; the implementation that is on during an engine's first wave is in its graphs.
Nothing is watched: no hook runs, no margin is kept. Pages are not shared, so a wave finds nothing of the one before.

Between waves the engine's thread is held (see `Gate`): idle, it looks for requests ten times a second else, and over
ranks talks to the others' threads each time. So a wave begins with all of its requests in the queue, which the engine
takes at once, and ends with nothing under way: no thread computes while another engine is busy, nor while the
implementation changes.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from types import TracebackType
from typing import Any

import numpy as np

from nondet.core.launch import first_uses
from nondet.core.traces import trace_digest
from nondet.errors import UserError, reason_of
from nondet.sampling.engine import engine_of, set_wake_event
from nondet.sampling.plan import Load, Request
from nondet.sampling.schedule import SessionLog

__all__ = ["Gate", "StandingEngine", "Wave"]

_POLL_S = 0.5


@dataclass(frozen=True)
class Wave:
    """What one wave was.

    Attributes:
        seconds: From its first step's beginning to its last request's end, first uses left out.
        steps, tokens: Engine steps, and tokens generated in them.
        digests: The trace of each request, in the plan's order.
        packs: Who was in each step, at which positions: equal in waves of equal batches.
        captured: CUDA graphs captured in it.
        first_use_seconds: What was proven or compiled in it.
    """

    seconds: float
    steps: int
    tokens: int
    digests: tuple[str, ...]
    packs: tuple[tuple[tuple[int, int, int], ...], ...] = field(repr=False)
    captured: int
    first_use_seconds: float


class Gate:
    """Stands in the place of the event that the engine's idle thread waits for, and holds it until it is let on."""

    def __init__(self) -> None:
        self._let_on, self._holds = threading.Event(), threading.Event()
        self.filling = False  # what is added meanwhile wakes nobody

    def set(self) -> None:
        """Let the thread on: from outside, or by the engine when there is something to do."""
        if not self.filling:
            self._let_on.set()

    def wait(self, timeout: float | None = None) -> bool:
        """The engine's thread comes here when it is idle, whatever time limit it has in mind."""
        self._holds.set()
        self._let_on.wait()
        self._holds.clear()
        self._let_on.clear()
        return True

    def clear(self) -> None:
        """`wait` has done so: what was set since is not to be lost."""

    def holds(self, timeout: float) -> bool:
        """Whether the thread is held by now, or within so many seconds."""
        return self._holds.wait(timeout)


class StandingEngine:
    """An engine over these requests. Use it in a `with` statement, and waves of several one after the other.

    Args:
        model: A causal LM of transformers, on its device.
        requests: Of each wave; all come at once.
        load: Without sharing.
    """

    def __init__(self, model: Any, requests: Sequence[Request], load: Load) -> None:
        self.requests = list(requests)
        self._model, self._load = model, load
        self._log = SessionLog({})
        self._gate = Gate()
        self._waves = 0
        self._context: Any = None
        self._manager: Any = None
        self.attention = ""  # as the engine has set it, from the first wave on

    def __enter__(self) -> StandingEngine:
        self._context = engine_of(self._model, self.requests, self._load, self._log, watched=False)
        self._manager = self._context.__enter__()
        set_wake_event(self._manager, self._gate)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._context.__exit__(kind, error, trace)

    def wave(self) -> Wave:
        """Serve every request once more.

        Raises:
            UserError: the engine died, or did not serve a request to its end.
        """
        log, manager = self._log, self._manager
        own = [replace(r, id=f"w{self._waves}-{r.id}") for r in self.requests]
        self._waves += 1
        begun, graphs = log.steps, self._graphs()
        with first_uses() as uses:
            self._gate.filling = True  # all of them are waiting before any is served: equal waves are equal batches
            try:
                for request in own:
                    log.arrivals[request.id] = 0
                    manager.add_request(
                        list(request.prompt), request_id=request.id, max_new_tokens=request.max_new_tokens
                    )
            finally:
                self._gate.filling = False
            if manager.is_running():
                self._gate.set()
            else:
                manager.start()
                self.attention = str(self._model.config._attn_implementation).removeprefix("paged|")
            results = self._collected(len(own))
            self._settle()
        first = log.marks[begun]
        lost = uses.within(first, log.ended)
        return Wave(
            seconds=log.ended - first - lost,
            steps=log.steps - begun,
            tokens=sum(len(names) for names in log.rows[begun:]),
            digests=tuple(_digest(results[r.id], r) for r in own),
            packs=self._packs(begun, own),
            captured=self._graphs() - graphs,
            first_use_seconds=lost,
        )

    def _collected(self, count: int) -> dict[str, Any]:
        results: dict[str, Any] = {}
        while len(results) < count:
            result = self._manager.get_result(timeout=_POLL_S)
            if result is not None and result.is_finished():
                results[result.request_id] = result
            elif result is None:
                self._check_alive()
        return results

    def _settle(self) -> None:
        """Wait until the engine's thread has nothing under way."""
        while not self._gate.holds(_POLL_S):
            self._check_alive()

    def _check_alive(self) -> None:
        if not self._manager.is_running():
            error = self._manager.background_thread_status.fatal_error
            raise UserError(f"the engine stopped in step {self._log.steps}: {reason_of(error)}", "Use less load.")

    def _graphs(self) -> int:
        """CUDA graphs that the engine holds."""
        processor = getattr(self._manager, "batch_processor", None)
        graphs = getattr(getattr(processor, "inputs_and_outputs", None), "graphs", None)
        return len(getattr(graphs, "_storage", ()))

    def _packs(self, begun: int, own: Sequence[Request]) -> tuple[tuple[tuple[int, int, int], ...], ...]:
        """The steps since, requests by their place in the plan."""
        place = {r.id: i for i, r in enumerate(own)}
        steps = sorted(self._log.packs)[begun:]
        return tuple(tuple((place[s.request], s.first, s.rows) for s in self._log.packs[step]) for step in steps)


def _digest(result: Any, request: Request) -> str:
    """The digest of a request's trace.

    Raises:
        UserError: it has none.
    """
    if result.error is not None:
        raise UserError(f"{request.id}: {reason_of(result.error)}", "Use less load.")
    tokens = list(result.generated_tokens)
    if len(tokens) != request.max_new_tokens or len(result.logprobs) != len(tokens):
        raise UserError(f"{request.id} ended after {len(tokens)} of {request.max_new_tokens} tokens", "Use less load.")
    return trace_digest(tokens, np.asarray(result.logprobs, dtype="<f4").tobytes(), None)
