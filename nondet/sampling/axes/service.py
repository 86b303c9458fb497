"""Axes about who is served when: scheduler, preemption, routing over replicas."""

from __future__ import annotations

from dataclasses import replace
from math import ceil

from nondet.errors import UserError, suggestion
from nondet.sampling.axes.base import Axis, Conditions, Proof, Seen, Subject, number
from nondet.sampling.orders import ORDERS
from nondet.sampling.routing import POLICIES

__all__ = ["PREEMPTION", "ROUTING", "SCHEDULER"]

_REPLICAS = 3


def _scheduler(subject: Subject, value: str) -> Conditions:
    if value not in ORDERS:
        raise UserError(f"--vary: scheduler={value} is unknown", suggestion(value, ORDERS))
    return replace(subject.base, setting=replace(subject.base.setting, order=value))


def _scheduler_proof(value: str, seen: Seen, base: Seen) -> Proof:
    other, rounds = seen.get("reordered", 0), seen.get("rounds", 0)
    return Proof(other > 0, f"requests were admitted in another order than at the base in {other} of {rounds} rounds")


SCHEDULER = Axis(
    name="scheduler",
    changes="who is admitted first: as they came, the shortest, the longest prefix match, deficit round robin",
    why="another order makes other batches, and other prefixes are cached when a request comes",
    value=lambda s: s.base.setting.order,
    values=lambda s: [name for name in ORDERS if name != s.base.setting.order],
    apply=_scheduler,
    proof=_scheduler_proof,
)


def _preemption(subject: Subject, value: str) -> Conditions:
    if value == "ample":
        return replace(subject.base, setting=replace(subject.base.setting, pages=None))
    room = number("preemption", value, 1, 10_000)
    page = subject.base.load.page
    largest = max((ceil((len(r.prompt) + r.max_new_tokens) / page) + 1 for r in subject.requests), default=1)
    return replace(subject.base, setting=replace(subject.base.setting, pages=room * largest + 4))


def _preemption_proof(value: str, seen: Seen, base: Seen) -> Proof:
    times, targets = seen.get("preempted", 0), seen.get("preempted_targets", 0)
    text = (
        f"{times} times a request lost its cache, {targets} times one under study; "
        f"{seen.get('recomputed', 0)} positions were computed again"
    )
    return Proof(times == 0 if value == "ample" else targets > 0 and seen.get("recomputed", 0) > 0, text)


PREEMPTION = Axis(
    name="preemption",
    changes="the cache's size: room for so many of the largest requests, so that others are evicted and recomputed",
    why="what was generated one token at a time is computed again in one prefill",
    value=lambda s: "ample" if s.base.setting.pages is None else str(s.base.setting.pages),
    values=lambda s: ("2", "1"),
    apply=_preemption,
    proof=_preemption_proof,
)


def _routing(subject: Subject, value: str) -> Conditions:
    if value == "single":
        return replace(subject.base, replicas=1, routing="")
    if value not in POLICIES:
        raise UserError(f"--vary: routing={value} is unknown", suggestion(value, ["single", *POLICIES]))
    return replace(subject.base, replicas=_REPLICAS, routing=value)


def _routing_proof(value: str, seen: Seen, base: Seen) -> Proof:
    used, elsewhere = seen.get("replicas_most", 0), seen.get("rerouted", 0)
    text = f"{used} replicas served completions, {seen.get('cached', 0)} positions came from their caches"
    if value == "single":
        return Proof(used <= 1, text)
    if value == "round-robin":
        return Proof(used > 1, text)
    return Proof(elsewhere > 0, f"{text}; {elsewhere} requests went elsewhere than in turn")


ROUTING = Axis(
    name="routing",
    changes=f"which of {_REPLICAS} replicas serves a request: in turn, by prefix and load, by prefix and deficit",
    why="each replica has its own batches and its own cache of prefixes",
    value=lambda s: s.base.routing or "single",
    values=lambda s: list(POLICIES),
    apply=_routing,
    proof=_routing_proof,
)
