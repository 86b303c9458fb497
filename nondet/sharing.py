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

from collections.abc import Callable, Iterator, Sequence
from multiprocessing import connection
from types import TracebackType
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from nondet.core.processes import obituary
from nondet.core.records import Row, Status
from nondet.crew import Crew, Order, Ready, Stopped, Worker, digest

if TYPE_CHECKING:
    from nondet.runner import Job

__all__ = ["SharedRun"]

# A job's tenths of a second on an H200 that has compiled nothing, one being the usual: what takes long begins first.
_WEIGHTS = {
    "all-reduce": 10, "atomics": 8, "attention": 8, "matmul": 4, "grouped-matmul": 4, "softmax": 3, "log-softmax": 3,
    "rms-norm": 2, "split-k": 2,
}  # fmt: skip
# What a group's kernels take to be compiled and proven, however few its cases are.
_FIRST_WEIGHTS = {"attention": 50}
# Collectives start ranks of their own on all GPUs: a second group beside the first would wait for the same ones.
_BY_ONE = frozenset({"all-reduce"})
# How rows say that memory ran out: torch's errors, cuBLAS's, Triton's, the host's.
_MEMORY = ("OutOfMemoryError", "out of memory", "ALLOC_FAILED", "MemoryError")


class _Unit(NamedTuple):
    """Jobs that are measured by one worker, one after the other: the implementations of one case."""

    group: tuple[str, ...]
    places: list[int]


class SharedRun:
    """The rows of a plan's jobs, measured by `count` processes. A context manager: it ends them.

    Args:
        jobs: As `plan_jobs` made them of `order`.
        done: Keys of rows that there are already.
        say: Takes a line for the user.
        crew: Workers that were started already.
    """

    def __init__(
        self,
        jobs: Sequence[Job],
        order: Order,
        done: set[tuple[str, ...]],
        count: int,
        say: Callable[[str], None] = lambda _: None,
        crew: Crew | None = None,
    ) -> None:
        from nondet.core.environment import deciding

        self._crew, self._own = crew or Crew(), crew is None
        self._jobs, self._order, self._say = jobs, order, say
        self._todo = [place for place, job in enumerate(jobs) if job.key not in done]
        self._units = _units(jobs, self._todo)
        self._count = max(1, min(count, len(self._units)))
        self._digest, self._deciding = digest(jobs), deciding()
        self._again: list[int] = []
        self._alone = ""
        self._workers: list[Worker] = []
        self._dismissed: list[Worker] = []

    def __enter__(self) -> SharedRun:
        """Start the workers, where there is more than one to start."""
        if self._count > 1:
            try:
                for _ in range(self._count):
                    self._start()
            except BaseException:
                self.close()
                raise
        self._crew.close()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """End what is left of them."""
        self.close()
        if self._own:
            self._crew.close()

    @property
    def pids(self) -> list[int]:
        """Process ids of the workers."""
        return [worker.process.pid for worker in self._workers]

    def close(self) -> None:
        """End the workers, now. Leaving a GPU takes a process a while: a crew waits for it at its own end."""
        for worker in self._workers:
            worker.process.kill()
        self._crew.outlive(self._workers + self._dismissed)
        self._workers, self._dismissed = [], []

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
        if rest or self._again:
            self._crew.close()  # what is measured alone has the device to itself
        self._units = []
        yield from run_jobs([self._jobs[place] for place in sorted(rest + self._again)], self._order.seed, set())

    def _heard(self, worker: Worker) -> Iterator[Row]:
        """What a worker said, or that it says nothing more."""
        try:
            word = worker.pipe.recv()
        except (EOFError, OSError):
            word = Stopped(f"the process that measured it {obituary(worker.process)}")
        if isinstance(word, Row):
            place = worker.left.popleft()
            if self._count > 1 and word.status == Status.ERROR and any(text in word.reason for text in _MEMORY):
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
        from nondet.core.environment import moved

        names = moved(self._deciding, word.deciding)
        if names:
            return f"workers would not have its settings ({', '.join(names)})"
        return "" if word.jobs == self._digest else "workers would plan other cases"

    def _mourn(self, worker: Worker, reason: str) -> Iterator[Row]:
        """A worker is gone: the job in its hands is a row with the reason, and its others are somebody else's."""
        self._end(worker)
        if not worker.ready:
            self._say(f"nondet: a worker did not start: {reason}.")
            return
        if worker.left:
            head = self._jobs[worker.left.popleft()].head
            beside = "; it ran beside other processes, --jobs 1 measures it alone" if self._count > 1 else ""
            yield msgspec.structs.replace(head, status=Status.ERROR, reason=reason + beside)
        if worker.left:
            self._units.insert(0, _Unit(worker.group or (), list(worker.left)))
            worker.left.clear()
        if self._units:
            self._start()

    def _end(self, worker: Worker) -> None:
        worker.end()
        self._workers.remove(worker)

    def _start(self) -> None:
        worker = self._crew.take()
        self._workers.append(worker)
        worker.brief(self._order)

    def _give(self, worker: Worker) -> None:
        """The next unit, if the worker is free and there is one."""
        if not worker.ready or worker.left:
            return
        if not self._units:  # leaving a GPU takes a process a while: the others measure meanwhile
            worker.process.kill()
            self._workers.remove(worker)
            self._dismissed.append(worker)
            return
        unit = self._units.pop(self._next(worker))
        worker.group = unit.group
        worker.left.extend(unit.places)
        try:
            worker.pipe.send(unit.places)
        except OSError:
            return  # it is gone: the next look at its pipe says so, and what became of it

    def _next(self, worker: Worker) -> int:
        """Of its own group while there is any; then of a group that is nobody's; then of the one with most left.

        Of another's group it takes the last: it is the one least like what the other compiles just now.
        """
        own = next((i for i, unit in enumerate(self._units) if unit.group == worker.group), None)
        if own is not None:
            return own
        held = {other.group for other in self._workers}
        sizes: dict[tuple[str, ...], int] = {}
        for unit in self._units:
            begun = sizes.setdefault(unit.group, _FIRST_WEIGHTS.get(unit.group[0], 0))
            sizes[unit.group] = begun + _WEIGHTS.get(unit.group[0], 1) * len(unit.places)
        group = max(sizes, key=lambda name: (name not in held, sizes[name]))
        places = [i for i, unit in enumerate(self._units) if unit.group == group]
        return places[-1] if group in held else places[0]


def _group(job: Job) -> tuple[str, ...]:
    """Whose cases share kernels: those of a probe and dtype; of attention, of one kind of heads, decoding or not."""
    name, shape = job.probe.name, job.case.shape
    if name in _BY_ONE:
        return (name,)
    kind: tuple[str, ...] = ()
    if name == "attention" and shape.get("Hkv"):
        kind = (f"{shape['D']}", f"{shape['Hq'] // shape['Hkv']}", "decode" if shape["Tq"] == 1 else "prefill")
    return (name, job.case.dtype, *kind)


def _units(jobs: Sequence[Job], places: Sequence[int]) -> list[_Unit]:
    units: list[_Unit] = []
    case: Any = None
    for place in places:
        job = jobs[place]
        group = _group(job)
        together = job.case is case or (job.probe.name in _BY_ONE and bool(units) and units[-1].group == group)
        if together:
            units[-1].places.append(place)
        else:
            units.append(_Unit(group, [place]))
        case = job.case
    return units
