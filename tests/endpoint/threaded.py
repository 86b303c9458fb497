"""A fake server in a thread of its own, for tests whose commands run in this process or another."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from tests.endpoint.honest import Cheats, Honest, honest
from tests.endpoint.wire import in_thread

__all__ = ["Cheats", "serving"]


@contextmanager
def serving(dialect: str = "vllm", **options: object) -> Iterator[Honest]:
    """The server while the block runs; its requests are answered meanwhile."""
    with in_thread(honest(dialect, **options)) as server:
        yield server
