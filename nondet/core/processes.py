"""Processes of our own: started without their parent's main module, ended with it; GPU memory without torch."""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import re
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from multiprocessing import connection
from pathlib import Path
from typing import Any


@contextmanager
def nvml() -> Iterator[ctypes.CDLL | None]:
    """The NVIDIA driver's management library for a while; None if it is missing or fails."""
    library = None
    with suppress(OSError, AttributeError):
        found = ctypes.CDLL("nvml.dll" if sys.platform == "win32" else "libnvidia-ml.so.1")
        library = found if found.nvmlInit_v2() == 0 else None
    try:
        yield library
    finally:
        if library is not None:
            library.nvmlShutdown()


def free_gpu_memory(uuid: str) -> int | None:
    """Free bytes of the GPU with torch's UUID; None where the library doesn't report it, as for a part of a GPU."""
    handle, memory = ctypes.c_void_p(), (ctypes.c_ulonglong * 3)()  # nvmlMemory_t: total, free, used, in bytes
    with nvml() as driver, suppress(AttributeError, UnicodeEncodeError):
        name = f"GPU-{uuid.removeprefix('GPU-')}".encode("ascii")
        if driver is None or driver.nvmlDeviceGetHandleByUUID(name, ctypes.byref(handle)) != 0:
            return None
        if driver.nvmlDeviceGetMemoryInfo(handle, ctypes.byref(memory)) == 0:
            return int(memory[1])
    return None


def free_memory() -> int:
    """Bytes of main memory that are available without swapping, in the container that this runs in."""
    import psutil  # type: ignore[import-untyped] # it ships no type information

    free = int(psutil.virtual_memory().available)  # of the host
    try:
        group = Path("/sys/fs/cgroup")
        limit, used = ((group / name).read_text(encoding="ascii").strip() for name in ("memory.max", "memory.current"))
        if limit == "max":
            return free
        cache = re.search(r"^inactive_file (\d+)$", (group / "memory.stat").read_text(encoding="ascii"), re.MULTILINE)
        return max(0, min(free, int(limit) - int(used) + (int(cache[1]) if cache else 0)))
    except (OSError, ValueError):  # not in a container, or in one of an older kind
        return free


_PR_SET_PDEATHSIG = 1


@contextmanager
def no_main() -> Iterator[None]:
    """Keep spawned processes from importing their parent's main module: they don't need it, and a notebook has none."""
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
    """Processes started inside ignore Ctrl-C, which a terminal sends to all: their parent ends them."""
    if hasattr(signal, "pthread_sigmask"):
        from multiprocessing import resource_tracker

        resource_tracker.ensure_running()  # started inside, it would let signals through again
    with interrupts_later():
        yield


@contextmanager
def interrupts_later() -> Iterator[None]:
    """Delay Ctrl-C to the end of the block: a thread interrupted while it starts can neither be joined nor left."""
    if not hasattr(signal, "pthread_sigmask"):
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def end_with_parent(leave: Callable[[], object]) -> None:
    """Wait until the parent has ended, in whatever way, and call `leave`: the body of a thread of a spawned process."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        connection.wait([parent.sentinel])
        leave()


def die_with_parent(parent: int) -> None:
    """Have Linux kill this process, a fork of process number `parent`, as soon as that one has ended."""
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it had ended before
        os._exit(1)


def obituary(process: Any) -> str:
    """How a process ended that sent nothing more: "was killed by SIGKILL", "ended with exit code 1"."""
    process.join(2.0)
    code = process.exitcode
    if code is None or code >= 0:
        return f"ended with exit code {code}"
    names = {number.value: number.name for number in signal.Signals}
    return f"was killed by {names.get(-code, f'signal {-code}')}"
