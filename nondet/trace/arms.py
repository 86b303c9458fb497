"""The two arms of a trace, their sessions, and the least place where their records differ."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from nondet.errors import EngineStoppedError
from nondet.sampling.plan import Engine, Load, Outcome, Request, Session, Watcher
from nondet.trace.coarse import CoarseCapture, Owner

__all__ = ["Arm", "Site", "least_site", "same_records"]


@dataclass
class Arm:
    """One way to run the request under study.

    Attributes:
        name: "alone", or "in company", or the round and request of a recorded run.
        request: Its id among `requests`.
        forced: Tokens that everybody is fed, once they are known.
    """

    name: str
    request: str
    requests: Sequence[Request]
    load: Load
    seed: int = 0
    forced: dict[str, list[int]] = field(default_factory=dict)

    @property
    def prompt(self) -> tuple[int, ...]:
        """Token ids of the request's prompt."""
        return next(r.prompt for r in self.requests if r.id == self.request)

    def run(self, engine: Engine, watcher: Watcher | None = None) -> Session:
        """A session of this arm.

        Raises:
            EngineStoppedError: the engine died, or the request failed in it.
        """
        session = engine.run(self.requests, self.load, seed=self.seed, forced=self.forced, watcher=watcher)
        if session.fatal:
            raise EngineStoppedError(f"arm {self.name}: {session.fatal}")
        outcome = self.outcome(session)
        if outcome.finish == "error":
            raise EngineStoppedError(f"arm {self.name}: {outcome.request.id} failed: {outcome.reason}")
        return session

    def outcome(self, session: Session) -> Outcome:
        """What became of the request under study."""
        return next(o for o in session.outcomes if o.request.id == self.request)


@dataclass(frozen=True)
class Site:
    """The least place where the arms' records differ.

    Attributes:
        owners: Whose row it is in either arm: the request's own, or that of whoever wrote the keys that it read.
        record: What differs first there: "input", "3.k", "3.out", "logits".
    """

    owners: tuple[str, str]
    position: int
    record: str

    @property
    def region(self) -> str:
        """Where the fine pass has to look: "embedding", "head" or the number of a layer."""
        return {"input": "embedding", "logits": "head"}.get(self.record, self.record.partition(".")[0])


def same_records(a: CoarseCapture, b: CoarseCapture) -> Owner | None:
    """The first (request, position) whose records differ between two sessions of one arm; None where none does."""
    for owner in sorted(a.rows.keys() | b.rows.keys(), key=lambda o: (o[1], o[0])):
        one, two = a.rows.get(owner), b.rows.get(owner)
        if one is None or two is None or not np.array_equal(one, two) or a.logits.get(owner) != b.logits.get(owner):
            return owner
    return None


def least_site(a: CoarseCapture, b: CoarseCapture, requests: tuple[str, str], last: int | None = None) -> Site | None:
    """The least position where a record of the arms differs, and there the record that is computed first.

    A position's records are its own, and those of everybody who wrote keys and values that the request read there:
    after a prefix hit the donor's are all there is, and an engine that finds two equal pages keeps one of them. Where a
    donor's record differs, the donor's own history is searched first.

    Args:
        last: The last position to look at.
    """
    first, second = requests
    ends = [pos for capture, name in ((a, first), (b, second)) for request, pos in capture.rows if request == name]
    for position in range(min(max(ends, default=-1), 2**62 if last is None else last) + 1):
        mine, theirs = _records(a, first, position), _records(b, second, position)
        if not mine or not theirs:
            continue
        owner_a = mine[0]
        for owner_b in theirs:
            record = _first_unequal(a, b, owner_a, owner_b, foreign=owner_b[0] != second)
            if record is None:
                continue
            if owner_b[0] != second:
                earlier = least_site(a, b, (owner_a[0], owner_b[0]), position)
                if earlier is not None:
                    return earlier
            return Site((owner_a[0], owner_b[0]), position, record)
        one, two = a.logits.get((first, position)), b.logits.get((second, position))
        if one is not None and two is not None and one != two:
            return Site(requests, position, "logits")
    return None


def _records(capture: CoarseCapture, request: str, position: int) -> list[Owner]:
    """Whose rows stand for this position: its own first."""
    own: Iterable[Owner] = [(request, position)] if (request, position) in capture.rows else []
    others: Mapping[int, set[Owner]] = capture.foreign.get(request, {})
    return [*own, *sorted(o for o in others.get(position, ()) if o in capture.rows)]


def _first_unequal(a: CoarseCapture, b: CoarseCapture, one: Owner, two: Owner, *, foreign: bool) -> str | None:
    differs = a.rows[one] != b.rows[two]
    names = [name for name, apart in zip(a.names, differs, strict=True) if apart]
    if foreign and not any(name.endswith((".k", ".v")) for name in names):
        return None  # of somebody else's row this request only ever saw keys and values
    return names[0] if names else None
