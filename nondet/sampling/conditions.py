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


@contextmanager
def cheap_collections() -> Iterator[None]:
    """The engine collects garbage twice a session, over all of torch and transformers: a third of a second each time.

    What is alive now is set apart from the collector for as long as the run takes.
    """
    if gc.get_freeze_count():  # somebody does this already, and thawing theirs is not ours to do
        yield
        return
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
