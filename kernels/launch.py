"""What really ran: launchers note the kernel and tile they chose, and whoever measures listens.

Noting costs a list append while somebody listens, and nothing otherwise. It is process-wide on purpose: an engine runs
the model on a thread of its own.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["listen", "note"]

_listeners: list[Counter[str]] = []


def note(what: str, times: int = 1) -> None:
    """Say what is being launched, e.g. "matmul_chain[16x64x128]"."""
    for counter in _listeners:
        counter[what] += times


@contextmanager
def listen() -> Iterator[Counter[str]]:
    """Count the notes made inside the block, whichever thread makes them."""
    counter: Counter[str] = Counter()
    _listeners.append(counter)
    try:
        yield counter
    finally:
        _listeners[:] = [c for c in _listeners if c is not counter]
