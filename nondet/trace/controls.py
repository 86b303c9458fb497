"""What a captured session is held against, the same session without capture; and records of a trace that stopped."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from nondet.result import Control
from nondet.sampling.errors import reason_of
from nondet.sampling.protocol import Session

__all__ = ["Until", "failed", "other_logits", "resumed", "step_seconds"]


class Until:
    """Looks on without capture until the request has gone past a position; to the end where there is none."""

    def __init__(self, request: str, last: int | None) -> None:
        self.request, self.last, self.done = request, last, False

    @contextmanager
    def attached(self, model: Any, log: Any) -> Iterator[None]:
        """A hook that reads the schedule alone."""

        def look(*_: Any) -> None:
            if self.last is not None:
                mine = [span for span in log.pack if span.request == self.request]
                self.done = self.done or any(span.first + span.rows > self.last for span in mine)

        handle = model.register_forward_hook(look)
        try:
            yield
        finally:
            handle.remove()


def other_logits(one: Session, two: Session) -> str:
    """The first request whose two largest logits differ in bits at a token that both sessions computed; "" if none."""
    for name, tops in one.tops.items():
        others = two.tops.get(name, [])
        if any(x != y and not (x != x and y != y) for x, y in zip(tops, others, strict=False)):
            return name
    return ""


def step_seconds(session: Session) -> float:
    """Wall time of one step of a session, on average."""
    return session.seconds / max(1, session.steps - 1)


def failed(error: BaseException) -> Control:
    """The record of a trace that died."""
    return Control(name="died", passed=False, sentence=f"the trace ended: {reason_of(error)}")


def resumed() -> Control:
    """The record that what stands before it is of a process that was stopped, the record of its death with it."""
    return Control(name="resumed", passed=None, sentence="the trace was stopped, and gone on with from its records")
