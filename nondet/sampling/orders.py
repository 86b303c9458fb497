"""Who is admitted first: the scheduling policies, as orders over the requests that wait.

The engine serves those who decode before those who prefill, and admits waiting requests in the order given here while
there is room in the step. Only the order of admission is a policy's; the rest of a step is the engine's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from nondet.sampling.plan import Request

__all__ = ["ORDERS", "ByPrefix", "DeficitRoundRobin", "Fifo", "Order", "ShortestFirst", "client_of", "shared_prefix"]

# Tokens that a client may take before the others' turn comes: about one prompt of the default loads.
_QUANTUM = 64
_CLIENTS = 3  # the requests under study are one client's; the company is that of two others, in turn


def client_of(request: Request) -> str:
    """Whose request it is: "targets" for those under study, "others 0" and "others 1" for the company."""
    if request.target:
        return "targets"
    return f"others {sum(map(ord, request.id)) % (_CLIENTS - 1)}"


def shared_prefix(a: Sequence[int], b: Sequence[int]) -> int:
    """How many tokens two texts begin with alike."""
    for i, (x, y) in enumerate(zip(a, b, strict=False)):
        if x != y:
            return i
    return min(len(a), len(b))


@dataclass
class Order:
    """Arranges those who wait, and hears who was admitted."""

    requests: dict[str, Request]

    def arrange(self, waiting: Sequence[str]) -> list[str]:
        """The ids in the order in which they are offered to the engine."""
        return list(waiting)

    def admitted(self, name: str) -> None:
        """Told once for each request that gets its first step, and once more for each that comes back."""


@dataclass
class Fifo(Order):
    """First come, first served."""


@dataclass
class ShortestFirst(Order):
    """The request with the fewest tokens, prompt and completion together, goes first; ties as they came."""

    def arrange(self, waiting: Sequence[str]) -> list[str]:
        """See `Order.arrange`."""
        return sorted(waiting, key=lambda n: len(self.requests[n].prompt) + self.requests[n].max_new_tokens)


@dataclass
class ByPrefix(Order):
    """The request whose prompt shares the longest prefix with a prompt admitted before goes first, as in SGLang.

    What was admitted stands for what is cached: pages that were given up since are counted as if they were there.
    """

    seen: list[tuple[int, ...]] = field(default_factory=list)
    known: dict[str, tuple[int, int]] = field(default_factory=dict)  # request -> prompts looked at, longest match

    def arrange(self, waiting: Sequence[str]) -> list[str]:
        """See `Order.arrange`."""
        return sorted(waiting, key=lambda name: -self._match(name))

    def admitted(self, name: str) -> None:
        """See `Order.admitted`."""
        if self.requests[name].prompt not in self.seen:
            self.seen.append(self.requests[name].prompt)

    def _match(self, name: str) -> int:
        looked, best = self.known.get(name, (0, 0))
        prompt = self.requests[name].prompt
        best = max([best, *(shared_prefix(prompt, other) for other in self.seen[looked:])])
        self.known[name] = (len(self.seen), best)
        return best


@dataclass
class DeficitRoundRobin(Order):
    """Each client in its turn, for as many tokens as it has credit; credit comes a quantum at a time.

    After Shreedhar & Varghese (1995): a request costs its prompt's tokens, a client without credit is passed over, and
    when no waiting client has any, all get a quantum.
    """

    credit: dict[str, int] = field(default_factory=dict)

    def arrange(self, waiting: Sequence[str]) -> list[str]:
        """See `Order.arrange`."""
        queues: dict[str, list[str]] = {}
        for name in waiting:
            queues.setdefault(client_of(self.requests[name]), []).append(name)
        credit = {client: self.credit.get(client, 0) for client in queues}
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
        """See `Order.admitted`."""
        client = client_of(self.requests[name])
        left = self.credit.get(client, 0)
        while left <= 0:
            left += _QUANTUM
        self.credit[client] = left - len(self.requests[name].prompt)


# name -> its class, made with the requests of a session by id
ORDERS: dict[str, Callable[[dict[str, Request]], Order]] = {
    "fifo": Fifo,
    "shortest": ShortestFirst,
    "prefix": ByPrefix,
    "deficit": DeficitRoundRobin,
}
