"""What a captured session is held against, the same session without capture; and records of a trace that stopped."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from nondet.core.records import Control
from nondet.errors import reason_of
from nondet.sampling.plan import Session

__all__ = ["Until", "failed", "logits_at_fault", "other_logits", "resumed", "step_seconds"]


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
        if any(_bits(x) != _bits(y) for x, y in zip(tops, others, strict=False)):
            return name
    return ""


def logits_at_fault(bare: Session, captured: Session) -> str:
    """Why the logits of a session are nothing to trace, without capture and with it; "" where they are."""
    for name, tops in bare.tops.items():
        if not all(math.isfinite(top[0]) for top in tops):
            return f"logits of {name} are NaN or infinite: the model is wrong before any batch is"
    changed = other_logits(bare, captured)
    return f"the logits of {changed} change when it is captured: nothing else is reported" if changed else ""


def _bits(top: tuple[float, float, int, int]) -> tuple[str | int, ...]:
    """Two largest logits and their tokens, so that NaN equals NaN and -0.0 is not 0.0."""
    return top[0].hex(), top[1].hex(), *top[2:]


def step_seconds(session: Session) -> float:
    """Wall time of one step of a session, on average."""
    return session.seconds / max(1, session.steps - 1)


def failed(error: BaseException) -> Control:
    """The record of a trace that died."""
    return Control(name="died", passed=False, sentence=f"the trace ended: {reason_of(error)}")


def resumed() -> Control:
    """The record that what stands before it is of a process that was stopped, the record of its death with it."""
    return Control(name="resumed", passed=None, sentence="the trace was stopped, and gone on with from its records")
