"""A fake server in a thread of its own, for tests whose commands run in this process or another."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from tests.endpoint.honest import Cheats, Honest, honest

__all__ = ["Cheats", "serving"]


@contextmanager
def serving(dialect: str = "vllm", **options: object) -> Iterator[Honest]:
    """The server while the block runs; its requests are answered meanwhile."""
    loop = asyncio.new_event_loop()
    server = honest(dialect, **options)
    started, over = threading.Event(), asyncio.Event()

    async def serve() -> None:
        async with server:
            started.set()
            await over.wait()

    thread = threading.Thread(target=loop.run_until_complete, args=(serve(),), daemon=True)
    thread.start()
    assert started.wait(10)
    try:
        yield server
    finally:
        loop.call_soon_threadsafe(over.set)
        thread.join(10)
        loop.close()
