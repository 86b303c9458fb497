"""Ctrl-C in an endpoint run: a cancellation of the whole, never an exception inside of the event loop."""

from __future__ import annotations

import asyncio
import os
import signal

import pytest

from nondet.endpoint.traffic import run
from nondet.services.run import interruptible


def test_an_interrupt_waits_for_an_await_and_cleans_up() -> None:
    """What runs at that moment goes on to its next await; tasks end, then the interrupt is raised."""
    seen: list[str] = []

    async def beside() -> None:
        try:
            await asyncio.sleep(60)
        finally:
            await asyncio.sleep(0)
            seen.append("cleaned up")

    async def main() -> None:
        async with asyncio.TaskGroup() as group:
            group.create_task(beside())
            await asyncio.sleep(0)
            os.kill(os.getpid(), signal.SIGINT)
            seen.append("went on")
            await asyncio.sleep(60)

    before = signal.getsignal(signal.SIGINT)
    try:
        with pytest.raises(KeyboardInterrupt), interruptible():
            run(main())
        assert seen == ["went on", "cleaned up"]
        assert getattr(signal.getsignal(signal.SIGINT), "__name__", "") == "end_now"  # a second one ends the process
    finally:
        signal.signal(signal.SIGINT, before)


def test_without_an_interrupt_it_is_asyncio_run() -> None:
    """A result, an error and a cancellation of its own come out as they are; the handler is put back."""
    before = signal.getsignal(signal.SIGINT)

    async def give(value: object) -> object:
        if isinstance(value, BaseException):
            raise value
        return value

    assert run(give(3)) == 3
    with pytest.raises(OSError, match="full"):
        run(give(OSError("full")))
    with pytest.raises(asyncio.CancelledError):
        run(give(asyncio.CancelledError()))
    assert signal.getsignal(signal.SIGINT) is before
