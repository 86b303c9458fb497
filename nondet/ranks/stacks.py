"""Where a silent rank is: its Python stacks, written by the rank when asked, even while it holds the interpreter."""

from __future__ import annotations

import contextlib
import faulthandler
import os
import re
import signal
import tempfile
import time
from pathlib import Path

__all__ = ["forget_stacks", "listen_for_stacks", "where"]

_FRAME = re.compile(r'^  File "(.*)", line (\d+) in (.+)$')
_FRAMES = 5  # innermost ones that are told
_WAIT_S = 1.0
# threads that only wait for others: the one that watches the parent, and whoever polls a queue
_WAITING = ("threading.py", "queue.py", "connection.py", "selectors.py")


def _path(pid: int) -> Path:
    return Path(tempfile.gettempdir()) / f"nondet-stacks-{pid}.txt"


def listen_for_stacks() -> None:
    """In a rank: write all threads' stacks to a file of its own whenever the signal comes. Nothing where there is none.

    By faulthandler, whose handler runs below the interpreter: a rank that waits in a library answers, too.
    """
    if not hasattr(signal, "SIGUSR1"):
        return
    descriptor = os.open(_path(os.getpid()), os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    faulthandler.register(signal.SIGUSR1, file=descriptor, all_threads=True)


def forget_stacks(pid: int) -> None:
    """Remove what a rank wrote."""
    _path(pid).unlink(missing_ok=True)


def where(pid: int) -> str:
    """As "all_reduce (members.py:80) < play (ranks_session.py:100)", innermost first; "" where it can't be told."""
    if not hasattr(signal, "SIGUSR1"):
        return ""
    path = _path(pid)
    if not path.exists():  # without the handler the signal would end the rank
        return ""
    with contextlib.suppress(OSError):
        os.kill(pid, signal.SIGUSR1)
    until, text = time.monotonic() + _WAIT_S, ""
    while time.monotonic() < until:
        time.sleep(0.05)
        text, before = path.read_text(encoding="utf-8", errors="replace"), text
        if text and text == before:
            break
    return _busiest(text)


def _busiest(text: str) -> str:
    """The innermost frames of the thread that waits for no other one; the main one's where all do."""
    threads = [[m for line in part.splitlines() if (m := _FRAME.match(line))] for part in text.split("\n\n")]
    threads = [frames for frames in threads if frames]
    busy = [frames for frames in threads if os.path.basename(frames[0][1]) not in _WAITING]
    chosen = (busy or threads[-1:] or [[]])[0]
    return " < ".join(f"{m[3]} ({os.path.basename(m[1])}:{m[2]})" for m in chosen[:_FRAMES])
