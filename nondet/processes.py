"""Processes of our own: started without their parent's main module, ended with their parent, mourned in one line.

And what a process that is ours alone may do to itself.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from multiprocessing import connection
from typing import Any

__all__ = ["die_with_parent", "end_with_parent", "keep_freed_memory", "no_interrupts", "no_main", "obituary"]


# mallopt's M_TRIM_THRESHOLD, M_TOP_PAD and M_MMAP_THRESHOLD, the last at its maximum, in bytes
_MALLOC = ((-1, 2**30), (-2, 2**26), (-3, 2**25))


def keep_freed_memory() -> bool:
    """Let the C library keep what is freed for what is allocated next, where it is glibc.

    By default it gives every tensor beyond some size back to the system and has the next one's pages zeroed again: a
    sixth of the CPU time of `nondet probe all` on a CPU. Addresses are as aligned as before, and no bit depends on it.

    Returns:
        Whether it does.
    """
    try:
        library = ctypes.CDLL(None)
        return all(library.mallopt(parameter, value) == 1 for parameter, value in _MALLOC)
    except (OSError, AttributeError, TypeError):  # another C library, or another system
        return False


_PR_SET_PDEATHSIG = 1


@contextmanager
def no_main() -> Iterator[None]:
    """A spawned process imports its parent's main module again; ours need nothing of it, and a notebook has none."""
    main = sys.modules["__main__"]
    names = [name for name in ("__file__", "__spec__") if name in main.__dict__]
    kept: dict[str, Any] = {name: main.__dict__.pop(name) for name in names}
    main.__spec__ = None
    try:
        yield
    finally:
        vars(main).update(kept)


@contextmanager
def no_interrupts() -> Iterator[None]:
    """What is started inside never hears of Ctrl-C, which a terminal sends to all: its parent ends it."""
    if not hasattr(signal, "pthread_sigmask"):
        yield
        return
    from multiprocessing import resource_tracker

    resource_tracker.ensure_running()  # started here, it would let signals through again
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def end_with_parent(leave: Callable[[], object]) -> None:
    """Wait until the parent is gone, however it went, and call `leave`: the body of a thread of a spawned process."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        connection.wait([parent.sentinel])
        leave()


def die_with_parent(parent: int) -> None:
    """Have Linux kill this process, a fork of process number `parent`, as soon as that one is gone."""
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it was gone before
        os._exit(1)


def obituary(process: Any) -> str:
    """What became of a process that said nothing more: "was killed by SIGKILL", "ended with exit code 1"."""
    process.join(2.0)
    code = process.exitcode
    if code is not None and code < 0:
        try:
            return f"was killed by {signal.Signals(-code).name}"
        except ValueError:
            return f"was killed by signal {-code}"
    return f"ended with exit code {code}"
