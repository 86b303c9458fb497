"""Running a coroutine to its end, with Ctrl-C as its cancellation.

A KeyboardInterrupt that a signal's handler raises hits whatever runs at that moment, the event loop's own bookkeeping
too: a task whose wake-up is lost in there never ends, and cancelling it spins for ever (one of some 70 interrupted runs
did). So the interrupt is taken as a cancellation of the whole, and raised once everything has been cleaned up.
"""

from __future__ import annotations

import asyncio
import signal
import threading
from collections.abc import Coroutine
from types import FrameType
from typing import Any, TypeVar, cast

__all__ = ["run"]

T = TypeVar("T")


def run(main: Coroutine[Any, Any, T]) -> T:
    """As `asyncio.run`.

    Raises:
        KeyboardInterrupt: the handler of SIGINT that was in force raised one; all tasks have ended by then.
    """
    before = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(before):
        return asyncio.run(main)
    interrupted = False

    async def guarded() -> T:
        loop, task = asyncio.get_running_loop(), cast("asyncio.Task[Any]", asyncio.current_task())

        def stop(number: int, frame: FrameType | None) -> None:
            nonlocal interrupted
            try:
                before(number, frame)
            except KeyboardInterrupt:
                interrupted = True
                task.cancel()
                loop.call_soon_threadsafe(lambda: None)  # a loop that sleeps wakes up

        signal.signal(signal.SIGINT, stop)
        try:
            return await main
        finally:
            # what the handler before may have put in its own place for a second Ctrl-C stays
            if signal.getsignal(signal.SIGINT) is stop:
                signal.signal(signal.SIGINT, before)

    try:
        return asyncio.run(guarded())
    except asyncio.CancelledError:
        if interrupted:
            raise KeyboardInterrupt from None
        raise
