"""In which order an engine admits waiting requests, and how much of each it takes into a step.

The engine serves decodes before prefills, and admits waiting requests in the order given here while there is room in
the step. `Order` is all that the engine's loop knows of this, of chunks, and of drafts (`nondet.sampling.speculation`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from nondet.core.traces import shared_length
from nondet.sampling.plan import Request

_QUANTUM = 64  # tokens of a client's turn: about one prompt of the default loads


def client_of(request: Request) -> str:
    """ "targets" for requests under study, "others 0" and "others 1" for the concurrent ones."""
    return "targets" if request.target else f"others {sum(map(ord, request.id)) % 2}"


@dataclass
class Order:
    """An order of waiting requests: here first come, first served."""

    requests: dict[str, Request]
    chunk: int | None = None  # most prompt tokens of one request in one step

    def arrange(self, waiting: Sequence[str]) -> list[str]:
        """The ids in the order in which they are offered to the engine."""
        return list(waiting)

    def admitted(self, name: str) -> None:
        """Called once for each request that gets its first step, and again when it returns after preemption."""

    def before(self, states: Iterable[Any], cache: Any) -> None:
        """Called before a step is scheduled, with the running requests (transformers' RequestStates)."""

    def allowed(self, state: Any, budget: int) -> int | None:
        """Tokens of the budget that the request may have in this step; None where its tokens are settled."""
        return budget if self.chunk is None or state.status.name == "DECODING" else min(budget, self.chunk)

    def scheduled(self, futures: Iterable[Any]) -> None:
        """Called with the requests of the step (transformers' FutureRequestStates)."""

    def hooks(self) -> tuple[list[Callable[..., Any]], list[Callable[..., Any]]]:
        """Hooks of the model: before its forward, and after it in place of the one that records logits."""
        return [], []


class _ShortestFirst(Order):
    """The request with the fewest tokens, prompt and completion together, goes first; ties by arrival."""

    def arrange(self, waiting: Sequence[str]) -> list[str]:
        return sorted(waiting, key=lambda n: len(self.requests[n].prompt) + self.requests[n].max_new_tokens)


@dataclass
class _ByPrefix(Order):
    """The request whose prompt shares the longest prefix with a prompt admitted before goes first, as in SGLang. Every
    admitted prompt counts as cached, even if its pages were freed since."""

    seen: list[tuple[int, ...]] = field(default_factory=list)

    def arrange(self, waiting: Sequence[str]) -> list[str]:
        def cached(name: str) -> int:
            return max((shared_length(self.requests[name].prompt, other) for other in self.seen), default=0)

        return sorted(waiting, key=cached, reverse=True)

    def admitted(self, name: str) -> None:
        if self.requests[name].prompt not in self.seen:
            self.seen.append(self.requests[name].prompt)


@dataclass
class _DeficitRoundRobin(Order):
    """Each client in its turn, for as many tokens as it has credit; credit comes a quantum at a time. After Shreedhar &
    Varghese (1995): a request costs its prompt's tokens; when no waiting client has any credit, all get a quantum."""

    credit: Counter[str] = field(default_factory=Counter)

    def arrange(self, waiting: Sequence[str]) -> list[str]:
        queues: dict[str, list[str]] = {}
        for name in waiting:
            queues.setdefault(client_of(self.requests[name]), []).append(name)
        credit = {client: self.credit[client] for client in queues}
        ordered: list[str] = []
        while any(queues.values()):
            for client in sorted(queues):
                while queues[client] and credit[client] > 0:
                    name = queues[client].pop(0)
                    credit[client] -= len(self.requests[name].prompt)
                    ordered.append(name)
            for client, queue in queues.items():
                credit[client] += _QUANTUM if queue else 0
        return ordered

    def admitted(self, name: str) -> None:
        client = client_of(self.requests[name])
        while self.credit[client] <= 0:
            self.credit[client] += _QUANTUM
        self.credit[client] -= len(self.requests[name].prompt)


# name -> its class, made with the requests of a session by id
ORDERS: dict[str, type[Order]] = {
    "fifo": Order,
    "shortest": _ShortestFirst,
    "prefix": _ByPrefix,
    "deficit": _DeficitRoundRobin,
}
