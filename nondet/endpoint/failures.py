"""How one attempt at a request fails, and what of it is tried again."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

__all__ = ["FULL", "RETRIED", "AttemptError", "malformed", "wait_before_retry"]


@dataclass(eq=False)
class AttemptError(Exception):
    """One attempt that gave no completion.

    Attributes:
        kind: A word for counting: "timeout", "http-429", "malformed", ... (the table of `wait_before_retry`).
        reason: One line for a reader; what a server sent is in it only redacted and made printable.
        retry_after_s: Seconds that the server asked to wait; None where it did not.
    """

    kind: str
    reason: str
    retry_after_s: float | None = None

    def __str__(self) -> str:
        return self.reason


def malformed(reason: str) -> AttemptError:
    """What a server sent can't be read as the answer it should be."""
    return AttemptError("malformed", reason)


FULL = ("http-429", "http-503", "http-529")
# Kind -> how often it is tried again at most (the client's `attempts` bounds all kinds together).
RETRIED = {
    "connect": 3,
    "reset": 3,
    "cut-off": 2,
    "http-408": 3,
    "http-425": 3,
    "http-429": 8,
    "http-500": 1,
    "http-502": 3,
    "http-503": 8,
    "http-504": 1,
    "http-529": 8,
}


def wait_before_retry(
    failure: AttemptError, times: int, request: str, *, first_s: float, most_s: float
) -> float | None:
    """Seconds to wait before a request is sent again, or None if it is not.

    A completion changes nothing on a server, so sending it twice is safe; every repetition is counted in
    `Answer.refusals`, because the first attempt may have been part of the load all the same.

    ==============================  ==========================================================================
    kind                            tried again
    ==============================  ==========================================================================
    connect                         3 times: nothing listened, or the name did not resolve
    reset                           3 times: closed before the answer's header was whole
    cut-off                         2 times: closed in the middle of the answer
    http-429, http-503, http-529    8 times: the server is full; its Retry-After is kept, up to `most_s`; never once a
                                    client was refused like this for longer than its limits' `patience_s`
    http-408, -425, -502            3 times
    http-500, http-504              once: the request itself may be what kills the server
    timeout                         never: the server may still be at work on it, and a second one adds load
    malformed, too-large, redirect,
    certificate, protocol, error,
    leaked-key, other http-4xx      never: what is wrong would be wrong again
    ==============================  ==========================================================================

    The wait doubles from `first_s` to `most_s`, times a factor between 0.5 and 1 that is drawn from the request's id
    (so that many refused requests do not come back at one moment, and a run can be repeated).

    Args:
        failure: What happened.
        times: How often this kind has already been tried again.
        request: The request's id.
        first_s: The first wait.
        most_s: The longest wait, of Retry-After as well.
    """
    if times >= RETRIED.get(failure.kind, 0):
        return None
    if failure.retry_after_s is not None:
        return min(failure.retry_after_s, most_s)
    draw = hashlib.sha256(f"{request}\0{failure.kind}\0{times}".encode("utf-8", "surrogatepass")).digest()
    return float(min(most_s, first_s * 2**times) * (0.5 + draw[0] / 512))
