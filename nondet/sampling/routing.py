"""Which of several replicas serves a request: three routers, which count what they sent somewhere as cached there."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

from nondet.core.traces import shared_length
from nondet.sampling.orders import client_of
from nondet.sampling.plan import Request

# A replica is passed over in spite of its prefixes once it has more than twice the least load, plus four prompts.
_OVERLOAD, _SLACK = 2.0, 4
_QUANTUM_ROUTING = 128  # tokens of credit that a client gets on each replica at a time


class _Replicas:
    def __init__(self, count: int) -> None:
        self.count = count
        # of each replica: distinct prompts, whose prefixes it holds
        self.prompts: list[list[tuple[int, ...]]] = [[] for _ in range(count)]
        self.load = [0] * count  # tokens: of prompts those without a cached prefix, and of completions
        self.credit: Counter[tuple[str, int]] = Counter()  # (client, replica) -> tokens left

    def matches(self, request: Request) -> list[int]:
        """Tokens of the prompt that each replica has a prefix of."""
        return [max((shared_length(request.prompt, p) for p in seen), default=0) for seen in self.prompts]

    def send(self, request: Request, replica: int) -> None:
        """Record the request, and the tokens that it costs there."""
        cost = len(request.prompt) - self.matches(request)[replica] + request.max_new_tokens
        self.load[replica] += cost
        self.credit[client_of(request), replica] -= cost
        if request.prompt not in self.prompts[replica]:
            self.prompts[replica].append(request.prompt)


def _round_robin(index: int, request: Request, replicas: _Replicas) -> int:
    return index % replicas.count


def _prefix_and_load(index: int, request: Request, replicas: _Replicas) -> int:
    """E2 of Preble (Srivatsa et al., 2024): exploit a long prefix, else explore where it is cheapest. Where more of the
    prompt is cached than has to be computed, the replica with the longest prefix is taken, unless it is overloaded;
    otherwise the one whose load and missing tokens are least."""
    matches = replicas.matches(request)
    best = max(range(replicas.count), key=lambda i: (matches[i], -replicas.load[i], -i))
    overloaded = replicas.load[best] > _OVERLOAD * min(replicas.load) + _SLACK * len(request.prompt)
    if matches[best] > len(request.prompt) - matches[best] and not overloaded:
        return best
    return min(range(replicas.count), key=lambda i: (replicas.load[i] + len(request.prompt) - matches[i], i))


def _deficit_prefix(index: int, request: Request, replicas: _Replicas) -> int:
    """Deficit longest prefix match (Cao et al., 2025, for several workers): the longest prefix among the replicas on
    which the client has credit; without any credit it gets a quantum on each."""
    client, matches = client_of(request), replicas.matches(request)
    while not (able := [i for i in range(replicas.count) if replicas.credit[client, i] > 0]):
        for i in range(replicas.count):
            replicas.credit[client, i] += _QUANTUM_ROUTING
    return max(able, key=lambda i: (matches[i], replicas.credit[client, i], -i))


# name -> (number of the request, the request, what was sent where) -> its replica
POLICIES: dict[str, Callable[[int, Request, _Replicas], int]] = {
    "round-robin": _round_robin,
    "prefix-load": _prefix_and_load,
    "deficit-prefix": _deficit_prefix,
}


def route(policy: str, requests: Sequence[Request], count: int) -> list[int]:
    """The replica, of `count`, of each request, in the order in which they arrive; `policy` is a key of `POLICIES`."""
    replicas = _Replicas(count)
    chosen = []
    for index, request in enumerate(requests):
        replica = POLICIES[policy](index, request, replicas)
        replicas.send(request, replica)
        chosen.append(replica)
    return chosen
