"""Under which conditions the process samples: threads, and the garbage collector."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

import torch

__all__ = ["cheap_collections", "pinned"]


@contextmanager
def pinned(threads: int | None) -> Iterator[None]:
    """Pin the CPU threads: the thread count changes GEMM bits. The engine's own thread inherits what is set here."""
    before = torch.get_num_threads()
    if threads is not None:
        torch.set_num_threads(threads)
    try:
        yield
    finally:
        torch.set_num_threads(before)


# Python itself sets some hundreds of objects apart; whoever freezes a process with torch in it has many more.
_SOMEBODY_FROZE = 10_000
_sessions: int | None = None  # blocks within the outermost one; None outside of it


@contextmanager
def cheap_collections() -> Iterator[None]:
    """The engine collects garbage twice a session, over all of torch and transformers: a third of a second each time.

    What is alive now is set apart from the collector for as long as the run takes. So is, once, what the first block
    within it has imported and kept; garbage is collected before, so that none is kept for good.
    """
    global _sessions
    if _sessions is None and gc.get_freeze_count() > _SOMEBODY_FROZE:  # thawing theirs is not ours to do
        yield
        return
    if _sessions is not None:
        _sessions += 1
        if _sessions == 2:
            gc.collect()
            gc.freeze()
        yield
        return
    _sessions = 0
    gc.freeze()
    try:
        yield
    finally:
        _sessions = None
        gc.unfreeze()
