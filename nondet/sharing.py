"""A probe run shared out over worker processes on one device: each measures cases, and their rows come back here.

Most of a first run is one core's work: kernels are compiled, members of classes proven, libraries loaded. Every worker
plans the same jobs and is told which to measure, all implementations of a case at a time. A worker stays with one probe
and dtype as long as there is something left of it, since its cases share kernels; then it takes from what is largest.
Each has a CUDA context and a profiler of its own, and sees no kernel but its own.

What a row says does not depend on who measured it: workers must have the switches of this process, or it measures by
itself. A worker that dies is a row with its reason, and another takes its place. What ran out of memory beside others
is measured again alone. No worker outlives its parent, however that ends.
"""

from __future__ import annotations

import hashlib
import multiprocessing
import os
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from multiprocessing import connection
from types import TracebackType
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from nondet.errors import UserError
from nondet.processes import no_interrupts, no_main, obituary
from nondet.records import Row, Status

if TYPE_CHECKING:
    from nondet.probes.base import Options
    from nondet.runner import Job

__all__ = ["Order", "Ready", "SharedRun", "Stopped", "check_workers", "default_workers", "digest"]

# From measurements on an H200 with 16 cores: more workers than this wait for one another on the GPU.
_MOST = 8
_CORES_EACH = 2  # a worker compiles with one, and its device's driver has threads of its own
_MEMORY_EACH = 8 * 2**30  # bytes of the device: a context, and the operands and oracles of the largest case
_JOBS_EACH = 20  # below, starting a worker takes longer than what it would measure
_REQUESTS_MOST = 256
# Collectives start ranks of their own on all GPUs: a second group beside the first would wait for the same ones.
_BY_ONE = frozenset({"all-reduce"})


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


class _Unit(NamedTuple):
    """Jobs that are measured by one worker, one after the other: the implementations of one case."""

    group: tuple[str, ...]
    places: list[int]


class _Worker:
    """A process, its pipe, and what it was last given.

    Attributes:
        left: Places of jobs that were given to it and have no row yet.
        group: What it measures cases of; None: nothing yet.
    """

    def __init__(self, process: Any, pipe: Any) -> None:
        self.process, self.pipe = process, pipe
        self.left: deque[int] = deque()
        self.group: tuple[str, ...] | None = None
        self.ready = False


def default_workers(device: str, impls: Sequence[str], jobs: int) -> int:
    """How many processes measure a plan where nobody said: on a CPU one, which has all cores anyway.

    A user's function is measured here, where it may be what this process made of it.

    Args:
        jobs: That are to be measured.
    """
    if device != "cuda" or any(":" in impl for impl in impls):
        return 1
    import torch

    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    memory = torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory
    return max(1, min(_MOST, cores // _CORES_EACH, memory // _MEMORY_EACH, jobs // _JOBS_EACH))


def digest(jobs: Sequence[Job]) -> str:
    """Of the jobs' keys, in order: two processes that have the same mean the same jobs by a place."""
    return hashlib.sha256(repr([job.key for job in jobs]).encode("utf-8", "backslashreplace")).hexdigest()


class SharedRun:
    """The rows of a plan's jobs, measured by `count` processes. A context manager: it ends them.

    Args:
        jobs: As `plan_jobs` made them of `order`.
        done: Keys of rows that there are already.
        say: Takes a line for the user.
    """

    def __init__(
        self,
        jobs: Sequence[Job],
        order: Order,
        done: set[tuple[str, ...]],
        count: int,
        say: Callable[[str], None] = lambda _: None,
    ) -> None:
        from nondet.environment import deciding

        self._jobs, self._order, self._say = jobs, order, say
        self._todo = [place for place, job in enumerate(jobs) if job.key not in done]
        self._units = _units(jobs, self._todo)
        self._count = max(1, min(count, len(self._units)))
        self._digest, self._deciding = digest(jobs), deciding()
        self._again: list[int] = []
        self._alone = ""
        self._workers: list[_Worker] = []

    def __enter__(self) -> SharedRun:
        """Start the workers, where there is more than one to start."""
        if self._count > 1:
            try:
                for _ in range(self._count):
                    self._start()
            except BaseException:
                self.close()
                raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """End what is left of them."""
        self.close()

    @property
    def pids(self) -> list[int]:
        """Process ids of the workers."""
        return [worker.process.pid for worker in self._workers]

    def close(self) -> None:
        """End the workers, now."""
        for worker in self._workers:
            worker.process.kill()  # one that compiles or waits for the device hears nothing softer
        for worker in self._workers:
            worker.process.join(5.0)
            worker.pipe.close()
        self._workers = []

    def rows(self) -> Iterator[Row]:
        """Every row that was missing, as it is finished."""
        while self._workers and (self._units or any(worker.left for worker in self._workers)):
            waiting = {worker.pipe: worker for worker in self._workers}
            ready: list[Any] = connection.wait(list(waiting))
            for pipe in ready:
                yield from self._heard(waiting[pipe])
        self.close()
        from nondet.runner import run_jobs

        if self._alone:
            self._say(f"nondet: measured by one process: {self._alone}.")
        rest = [place for unit in self._units for place in unit.places]
        self._units = []
        yield from run_jobs([self._jobs[place] for place in sorted(rest + self._again)], self._order.seed, set())

    def _heard(self, worker: _Worker) -> Iterator[Row]:
        """What a worker said, or that it says nothing more."""
        try:
            word = worker.pipe.recv()
        except (EOFError, OSError):
            word = Stopped(f"the process that measured it {obituary(worker.process)}")
        if isinstance(word, Row):
            place = worker.left.popleft()
            if len(self._workers) > 1 and word.status == Status.ERROR and "OutOfMemoryError" in word.reason:
                self._again.append(place)  # the neighbours' memory may be what was missing
            else:
                yield word
            self._give(worker)
        elif isinstance(word, Ready):
            self._alone = self._alone or self._difference(word)
            worker.ready = not self._alone
            if self._alone:
                self._end(worker)
            self._give(worker)
        else:
            yield from self._mourn(worker, word.reason)

    def _difference(self, word: Ready) -> str:
        """Why the worker's rows would not be this process's; "" where nothing says so."""
        from nondet.environment import moved

        names = moved(self._deciding, word.deciding)
        if names:
            return f"workers would not have its settings ({', '.join(names)})"
        return "" if word.jobs == self._digest else "workers would plan other cases"

    def _mourn(self, worker: _Worker, reason: str) -> Iterator[Row]:
        """A worker is gone: the job in its hands is a row with the reason, and its others are somebody else's."""
        self._end(worker)
        if not worker.ready:
            self._say(f"nondet: a worker did not start: {reason}.")
            return
        if worker.left:
            head = self._jobs[worker.left.popleft()].head
            yield msgspec.structs.replace(head, status=Status.ERROR, reason=reason)
        if worker.left:
            self._units.insert(0, _Unit(worker.group or (), list(worker.left)))
            worker.left.clear()
        if self._units:
            self._start()

    def _end(self, worker: _Worker) -> None:
        worker.process.kill()
        worker.process.join(5.0)
        worker.pipe.close()
        self._workers.remove(worker)

    def _start(self) -> None:
        from nondet.worker import serve

        context = multiprocessing.get_context("spawn")
        ours, theirs = context.Pipe()
        # not a daemon: the probe of collectives starts ranks
        process = context.Process(target=serve, args=(theirs, self._order), name="nondet-worker", daemon=False)
        with no_interrupts(), no_main():
            process.start()
        theirs.close()
        self._workers.append(_Worker(process, ours))

    def _give(self, worker: _Worker) -> None:
        """The next unit, if the worker is free and there is one."""
        if not worker.ready or worker.left or not self._units:
            return
        unit = self._units.pop(self._next(worker))
        worker.group = unit.group
        worker.left.extend(unit.places)
        try:
            worker.pipe.send(unit.places)
        except OSError:
            return  # it is gone: the next look at its pipe says so, and what became of it

    def _next(self, worker: _Worker) -> int:
        """Of its own group while there is any; then of a group that is nobody's; then of the one with most left."""
        own = next((i for i, unit in enumerate(self._units) if unit.group == worker.group), None)
        if own is not None:
            return own
        held = {other.group for other in self._workers}
        sizes: dict[tuple[str, ...], int] = {}
        for unit in self._units:
            sizes[unit.group] = sizes.get(unit.group, 0) + len(unit.places)
        group = max(sizes, key=lambda name: (name not in held, sizes[name]))
        return next(i for i, unit in enumerate(self._units) if unit.group == group)


def check_workers(count: int | None) -> None:
    """Refuse a number that makes no sense.

    Raises:
        UserError: as said.
    """
    if count is not None and not 1 <= count <= _REQUESTS_MOST:
        raise UserError(f"--jobs {count} makes no sense", f"Give a number of processes from 1 to {_REQUESTS_MOST}.")


def _units(jobs: Sequence[Job], places: Sequence[int]) -> list[_Unit]:
    units: list[_Unit] = []
    case: Any = None
    for place in places:
        job = jobs[place]
        group = (job.probe.name,) if job.probe.name in _BY_ONE else (job.probe.name, job.case.dtype)
        together = job.case is case or (job.probe.name in _BY_ONE and bool(units) and units[-1].group == group)
        if together:
            units[-1].places.append(place)
        else:
            units.append(_Unit(group, [place]))
        case = job.case
    return units
