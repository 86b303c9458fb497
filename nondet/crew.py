"""Worker processes of a shared probe run: how many, how they are started and ended, and what is said to them."""

from __future__ import annotations

import ctypes
import functools
import hashlib
import multiprocessing
import os
import sys
import threading
import warnings
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, NamedTuple

from nondet.core.processes import no_interrupts, no_main
from nondet.errors import UserError

if TYPE_CHECKING:
    from nondet.probes.base import Options
    from nondet.runner import Job

__all__ = [
    "Crew",
    "Order",
    "Ready",
    "Stopped",
    "Worker",
    "check_workers",
    "default_workers",
    "digest",
    "workers_ahead",
]

# From measurements on an H200 with 16 cores: more workers than this wait for one another on the GPU, unless they mostly
# compile, as on a machine that has proven nothing. A worker's driver has threads of its own.
_MOST, _CORES_EACH = 8, 2
_MOST_COLD, _CORES_EACH_COLD = 12, 4 / 3
_MEMORY_EACH = 8 * 2**30  # bytes of the device: a context, and the operands and oracles of the largest case
_JOBS_EACH = 20  # below, starting a worker takes longer than what it would measure
_COUNT_MOST = 256
_QUOTA = Path("/sys/fs/cgroup/cpu.max")


class Order(NamedTuple):
    """What a worker plans its jobs from, as this process has planned its own."""

    probes: list[str]
    impls: list[str]
    options: Options
    seed: int
    threads: int
    gpu: int | None

    @classmethod
    def of(cls, probes: Sequence[str], impls: Sequence[str], options: Options, seed: int) -> Order:
        """With this process's threads and current device."""
        import torch

        gpu = torch.cuda.current_device() if options.device == "cuda" else None
        return cls(list(probes), list(impls), options, seed, torch.get_num_threads(), gpu)


class Ready(NamedTuple):
    """A worker's first word: its jobs, and whatever decides bits in it."""

    jobs: str
    deciding: dict[str, Any]


class Stopped(NamedTuple):
    """A worker's last word: it can measure nothing more, and why."""

    reason: str


class Worker:
    """A process, its pipe, and what it was last given.

    Attributes:
        left: Places of jobs that were given to it and have no row yet.
        group: What it measures cases of; None: nothing yet.
    """

    def __init__(self, process: Any, pipe: Any) -> None:
        self.process, self.pipe = process, pipe
        self.left: deque[int] = deque()
        self.group: tuple[str, ...] | None = None
        self.ready = self.briefed = False

    def brief(self, order: Order) -> None:
        """Send it its order, once. If it is gone by now, the next look at its pipe says so, and what became of it."""
        if not self.briefed:
            self.briefed = True
            with suppress(OSError):
                self.pipe.send(order)

    @classmethod
    def started(cls) -> Worker:
        """A process that loads what it needs, and waits for its order."""
        from nondet.worker import serve

        context = multiprocessing.get_context("spawn")
        ours, theirs = context.Pipe()
        # not a daemon: the probe of collectives starts ranks
        process = context.Process(target=serve, args=(theirs,), name="nondet-worker", daemon=False)
        with no_interrupts(), no_main():
            process.start()
        theirs.close()
        return cls(process, ours)

    @classmethod
    def forked(cls) -> Worker:
        """As `started`, by copying this process, which has loaded what a worker needs and used none of it yet."""
        from nondet.worker import serve_forked

        context = multiprocessing.get_context("fork")
        ours, theirs = context.Pipe()
        process = context.Process(target=serve_forked, args=(theirs, ours, os.getpid()), name="nondet-worker")
        with no_interrupts(), warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # of NumPy's threads, which know of forks
            process.start()
        theirs.close()
        return cls(process, ours)

    def end(self) -> None:
        """Now: one that compiles or waits for the device hears nothing softer."""
        self.process.kill()
        self.process.join(5.0)
        self.pipe.close()


class Crew:
    """Workers that are started before anybody knows what they will measure: a context and a profiler take seconds.

    Loading torch takes longer, four seconds of each of nine processes that do it at once. So where nobody has loaded it
    yet this process does, before it touches a device or computes anything, and workers are its copies.

    A context manager: it ends those that nobody took.
    """

    def __init__(self, count: int = 0) -> None:
        self._count = count
        self._workers: list[Worker] = []
        self._leaving: list[Worker] = []

    def __enter__(self) -> Crew:
        """Start them."""
        start = Worker.started
        if self._count and _may_be_copied():
            from nondet.worker import load

            load()
            start = Worker.forked
        try:
            for _ in range(self._count):
                self._workers.append(start())
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """End what is left of them."""
        self.close()

    def take(self) -> Worker:
        """One of them, or where there is none a new one; whoever takes it ends it."""
        return self._workers.pop() if self._workers else Worker.started()

    def brief(self, order: Order) -> None:
        """Send all of them their order: they plan while their parent still does."""
        for worker in self._workers:
            worker.brief(order)

    def outlive(self, workers: Sequence[Worker]) -> None:
        """Take back workers that were told to end: they are waited for with the crew."""
        self._leaving += workers

    def close(self) -> None:
        """End them, and wait until they are gone."""
        for worker in self._workers:
            worker.process.kill()  # all at once; then each is waited for
        for worker in self._workers + self._leaving:
            worker.end()
        self._workers, self._leaving = [], []


def _may_be_copied() -> bool:
    """Is this a process that can be forked: on Linux, of one thread, and nothing of torch in use?"""
    return sys.platform == "linux" and "torch" not in sys.modules and threading.active_count() == 1


def workers_ahead(names: Sequence[str], device: str, impls: Sequence[str], count: int | None) -> int:
    """How many workers are sure to be of use, as far as can be told before torch is loaded: of "all" on a GPU.

    Args:
        count: As asked for; None: the default.
    """
    there = any(os.path.exists(path) for path in ("/dev/nvidiactl", "/dev/dxg"))
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES", "0") in ("", "-1")
    if device == "cpu" or "all" not in names or any(":" in impl for impl in impls) or not there or hidden:
        return 0
    if not _takes_several():
        return 0
    most = _most() if count is None else count
    return most if most > 1 else 0


def _most() -> int:
    """Workers that the cores feed: more where there are no certificates of a GPU yet."""
    from nondet.core.certificates import cache_folder

    folder = cache_folder()
    cold = folder is None or not any(folder.glob("*nvidia*"))
    return min(_MOST_COLD, int(_cores() / _CORES_EACH_COLD)) if cold else min(_MOST, _cores() // _CORES_EACH)


@functools.cache
def _takes_several() -> bool:
    """Whether every GPU takes several processes at a time, as its driver says: a cluster's may be set to take one."""
    try:
        nvml = ctypes.CDLL("libnvidia-ml.so.1")
        if nvml.nvmlInit_v2() != 0:
            return True
        try:
            count, handle, mode = ctypes.c_uint(), ctypes.c_void_p(), ctypes.c_uint()
            nvml.nvmlDeviceGetCount_v2(ctypes.byref(count))
            for place in range(count.value):
                nvml.nvmlDeviceGetHandleByIndex_v2(ctypes.c_uint(place), ctypes.byref(handle))
                if nvml.nvmlDeviceGetComputeMode(handle, ctypes.byref(mode)) == 0 and mode.value != 0:
                    return False
        finally:
            nvml.nvmlShutdown()
    except (OSError, AttributeError):
        pass  # nobody tells
    return True


def _cores() -> int:
    """That this process may use: a container's share of a large machine may be a few."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    try:
        quota, _, period = _QUOTA.read_text(encoding="ascii").strip().partition(" ")
        return max(1, min(cores, int(quota) // int(period)))
    except (OSError, ValueError, ZeroDivisionError):  # no control groups, an older kind of them, or "max": no limit
        return cores


def default_workers(device: str, impls: Sequence[str], jobs: int) -> int:
    """How many processes measure a plan where nobody said: on a CPU one, which has all cores anyway.

    A user's function is measured here, where it may be what this process made of it.

    Args:
        jobs: That are to be measured.
    """
    if device != "cuda" or any(":" in impl for impl in impls) or not _takes_several():
        return 1
    import torch

    memory = torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory
    return max(1, min(_most(), memory // _MEMORY_EACH, jobs // _JOBS_EACH))


def digest(jobs: Sequence[Job]) -> str:
    """Of the jobs' keys, in order: two processes that have the same mean the same jobs by a place."""
    return hashlib.sha256(repr([job.key for job in jobs]).encode("utf-8", "backslashreplace")).hexdigest()


def check_workers(count: int | None) -> None:
    """Refuse a number that makes no sense.

    Raises:
        UserError: as said.
    """
    if count is not None and not 1 <= count <= _COUNT_MOST:
        raise UserError(f"--jobs {count} makes no sense", f"Give a number of processes from 1 to {_COUNT_MOST}.")
