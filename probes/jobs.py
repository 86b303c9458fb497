"""A probe run divided among worker processes on one device: started, given jobs, and ended."""

from __future__ import annotations

import ctypes
import functools
import hashlib
import importlib
import itertools
import math
import multiprocessing
import os
import sys
import threading
import warnings
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field
from multiprocessing import connection
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from nondet.core.processes import die_with_parent, end_with_parent, no_interrupts, no_main, nvml, obituary
from nondet.core.records import Row, Status
from nondet.core.registry import operators
from nondet.errors import MisfitError, reason_of

if TYPE_CHECKING:
    from nondet.probes.base import Options
    from nondet.probes.runner import Job

# From measurements on an H200 with 16 cores: 16 workers take 18.5 s where everything is compiled, 8 take 20.
_MOST = 16
_ON_CPU = 2  # most of a probe's work there is one core's
_MEMORY_EACH = 6 * 2**30  # bytes of the device: a context, and the operands and oracles of a large case
_JOBS_EACH = 20  # below, starting a worker takes longer than its measurements
_QUOTA = Path("/sys/fs/cgroup/cpu.max")


class Order(NamedTuple):
    """What a worker plans its jobs from, as this process did."""

    probes: list[str]
    impls: list[str]
    options: Options
    seed: int
    threads: int
    gpu: int | None

    @classmethod
    def of(cls, probes: Sequence[str], impls: Sequence[str], options: Options, seed: int) -> Order:
        """An order with this process's threads and current device."""
        import torch

        gpu = torch.cuda.current_device() if options.device == "cuda" else None
        return cls(list(probes), list(impls), options, seed, torch.get_num_threads(), gpu)


@dataclass(eq=False)
class Worker:
    """A process, its pipe, the positions of its jobs without a row (`left`), and the group of its cases."""

    process: Any
    pipe: Any
    left: deque[int] = field(default_factory=deque)
    group: tuple[str, ...] | None = None
    ready: bool = False  # it has planned as this process did, and has its settings

    def send(self, word: Any) -> None:
        """Send it an order or positions. If it has ended by now, the next look at its pipe reports that."""
        with suppress(OSError):
            self.pipe.send(word)


class Crew:
    """Workers, of which `count` are started before their jobs are known, because a context and a profiler take seconds;
    a context manager that ends all of them. Loading torch takes longer: four seconds in each of nine processes that do
    it at once. So where it is not loaded yet, this process loads it before it touches a device or computes anything,
    and forks the workers."""

    order: Order

    def __init__(self, count: int = 0, device: str = "auto") -> None:
        self._count, self._device = count, device
        self._started: list[Worker] = []
        self._spare: list[Worker] = []  # those that were not taken

    def __enter__(self) -> Crew:
        """Start them."""
        copied = self._count > 0 and _can_fork()
        if copied:
            load()
        try:
            for _ in range(self._count):
                self._spare.append(self._start(copied=copied))
        except BaseException:
            self.keep_only()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        """End what is left of them."""
        self.keep_only()

    def _start(self, *, copied: bool = False) -> Worker:
        """A process that loads what it needs, and waits for its order. `copied`: a fork of this one, after `load`."""
        context: Any = multiprocessing.get_context("fork" if copied else "spawn")
        ours, theirs = context.Pipe()
        args = (theirs, self._device, ours, os.getpid()) if copied else (theirs, self._device)
        # not a daemon: the probe of collectives starts ranks
        process = context.Process(target=serve, args=args, name="nondet-worker", daemon=False)
        with no_interrupts(), nullcontext() if copied else no_main(), warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # about NumPy's threads, which handle forks
            process.start()
        theirs.close()
        self._started.append(Worker(process, ours))
        return self._started[-1]

    def brief(self, order: Order) -> None:
        """Send all of them their order, and later ones at their start: they plan while their parent does."""
        self.order = order
        for worker in self._spare:
            worker.send(order)

    def take(self) -> Worker:
        """One of them, or else a new one."""
        if self._spare:
            return self._spare.pop()
        worker = self._start()
        worker.send(self.order)
        return worker

    def keep_only(self, workers: Sequence[Worker] = ()) -> None:
        """End all others, and wait until they are gone: a process needs a while to leave a GPU."""
        ended = [worker for worker in self._started if worker not in workers]
        for worker in ended:  # all at once; one that compiles or waits for the device does not react to anything less
            worker.process.kill()
        for worker in ended:
            worker.process.join(5.0)
            worker.pipe.close()
        self._started, self._spare = list(workers), []


def workers_ahead(names: Sequence[str], device: str, impls: Sequence[str], count: int | None) -> int:
    """How many workers are certain to be useful, before torch is loaded. `count`: of the command line, or None."""
    there = any(os.path.exists(path) for path in ("/dev/nvidiactl", "/dev/dxg"))
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES", "0") in ("", "-1")
    on_cpu = device == "cpu" or not there or hidden
    if "all" not in names or any(":" in impl for impl in impls) or not (_can_fork() if on_cpu else _takes_several()):
        return 0
    most = min(_ON_CPU if on_cpu else _MOST, _cores()) if count is None else count
    return most if most > 1 else 0


def _can_fork() -> bool:
    """Forking is safe on Linux while this process has one thread and has not used torch."""
    return sys.platform == "linux" and "torch" not in sys.modules and threading.active_count() == 1


@functools.cache
def _takes_several() -> bool:
    """Whether every GPU takes several processes at a time, by its driver: a cluster's may be set to take one."""
    count, handle, mode = ctypes.c_uint(), ctypes.c_void_p(), ctypes.c_uint()
    with nvml() as driver, suppress(AttributeError):
        if driver is None:
            return True  # it is not known
        driver.nvmlDeviceGetCount_v2(ctypes.byref(count))
        for place in range(count.value):
            driver.nvmlDeviceGetHandleByIndex_v2(ctypes.c_uint(place), ctypes.byref(handle))
            if driver.nvmlDeviceGetComputeMode(handle, ctypes.byref(mode)) == 0 and mode.value != 0:
                return False
    return True


def _cores() -> int:
    """Cores that this process may use: a container may have a small share of a large machine."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    try:
        quota, _, period = _QUOTA.read_text(encoding="ascii").strip().partition(" ")
        return max(1, min(cores, int(quota) // int(period)))
    except (OSError, ValueError, ZeroDivisionError):  # no control groups, an older kind of them, or "max": no limit
        return cores


def default_workers(device: str, impls: Sequence[str], jobs: int, ahead: int = 0) -> int:
    """The default number of processes for so many jobs. A user's function is measured in this process, because it may
    depend on its state. `ahead`: workers that were started already: on a CPU there are no others."""
    if any(":" in impl for impl in impls) or (device == "cuda" and not _takes_several()):
        return 1
    most = ahead
    if device == "cuda":
        import torch

        memory = torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory
        most = min(_MOST, _cores(), memory // _MEMORY_EACH)
    return max(1, min(most, jobs // _JOBS_EACH))


def settings(jobs: Sequence[Job]) -> dict[str, Any]:
    """What decides bits in this process, and a digest of its plan, by whose positions jobs are named."""
    from nondet.core.environment import deciding

    keys = repr([job.key for job in jobs]).encode("utf-8", "backslashreplace")
    return deciding() | {"planned cases": hashlib.sha256(keys).hexdigest()}


def serve(pipe: Any, device: str, parents: Any = None, parent: int = 0) -> None:
    """The loop of a worker, which its parent ends. A fork of process `parent` has the pipe's other end, too."""
    if parents is not None:
        die_with_parent(parent)
        parents.close()
    threading.Thread(target=end_with_parent, args=(lambda: os._exit(1),), daemon=True).start()
    try:
        _measure(pipe, device)
    except (EOFError, BrokenPipeError):
        os._exit(0)
    except BaseException as error:  # noqa: BLE001 - any error, such as a lost context, is sent to the parent
        pipe.send(error if isinstance(error, MisfitError) else reason_of(error))
        os._exit(1)


def load() -> None:
    """Load what a worker needs, and touch no device."""
    for name in ("torch", "nondet.core.environment", "nondet.core.measure", "nondet.probes.runner"):
        importlib.import_module(name)
    operators()


def _load_kernels() -> None:
    """Load what the first kernels of a GPU wait for, while this process waits for the device."""
    importlib.import_module("nondet.core.launch").ready_compiler()
    targets = {one.target("cuda") for operator in operators().values() for one in operator.implementations}
    for target in filter(None, targets):
        with suppress(Exception):  # it is reported where it is measured
            importlib.import_module(target.partition(":")[0])


def _measure(pipe: Any, device: str) -> None:
    load()
    import torch

    from nondet.core.measure import profile_variants
    from nondet.probes.runner import plan_jobs, run_jobs

    if device != "cpu" and torch.cuda.is_available():  # a context and a profiler, while the parent still plans
        compiler = threading.Thread(target=_load_kernels)
        compiler.start()
        with profile_variants("cuda"):
            pass
        compiler.join()
    order: Order = pipe.recv()
    torch.set_num_threads(order.threads)
    if order.gpu is not None:
        torch.cuda.set_device(order.gpu)
    jobs = plan_jobs(order.probes, order.impls, order.options)
    pipe.send(settings(jobs))
    while True:
        for row in run_jobs([jobs[place] for place in pipe.recv()], order.seed, must_fit=True):
            pipe.send(row)


# Each worker measures cases, and their rows come back to this process. Most of a first run is one core's work: kernels
# are compiled, members of classes proven, libraries loaded. Every worker plans the same jobs and learns which to
# measure, all implementations of a case at a time. A worker stays with one probe and dtype while any of it is left,
# since its cases share kernels; then it takes from the largest group. Each has a CUDA context and a profiler of its
# own, and sees no kernel but its own. A row does not depend on the process that measured it: workers must have the
# settings of this process, or it measures by itself. If a worker dies, its job becomes a row with the reason, and
# another replaces it. A job that ran out of memory beside others is repeated solo. No worker outlives its parent.

# A job's tenths of a second on an H200 that has compiled nothing, 1 being typical: long jobs begin first.
_WEIGHTS = {
    "attention_backward": 30, "all-reduce": 10, "attention": 12, "matmul": 5, "backward": 5, "scaled-matmul": 4,
    "grouped-matmul": 4, "atomics": 3, "softmax": 2, "log-softmax": 2, "split-k": 2,
}  # fmt: skip
# The time in which a group's kernels are compiled and proven, however few its cases are.
_FIRST_WEIGHTS = {"attention": 50}
_LONGER = 4  # times longer: an order of additions is found, a library plans each chunk, kernels that no other case has
# Collectives start ranks of their own on all GPUs, so a second group would wait for the first.
_BY_ONE = frozenset({"all-reduce"})
# How rows report that memory ran out: torch's errors, cuBLAS's, Triton's, the host's.
_MEMORY = ("OutOfMemoryError", "out of memory", "ALLOC_FAILED", "MemoryError")


class _Unit(NamedTuple):
    """Jobs that are measured by one worker, one after the other: the implementations of one case."""

    group: tuple[str, ...]
    places: list[int]
    weight: int


class SharedRun:
    """The rows of a plan's jobs without those `done`, measured by `count` workers of a briefed crew."""

    def __init__(
        self, crew: Crew, jobs: Sequence[Job], done: set[tuple[str, ...]], count: int, say: Callable[[str], None]
    ) -> None:
        self._crew, self._jobs, self._say = crew, jobs, say
        self._units = _units(jobs, [place for place, job in enumerate(jobs) if job.key not in done])
        self._settings = settings(jobs)
        self._again: list[int] = []
        self._alone = ""
        count = min(count, len(self._units))
        self._workers = [crew.take() for _ in range(count if count > 1 else 0)]
        crew.keep_only(self._workers)

    def rows(self) -> Iterator[Row]:
        """Every missing row, as it is finished."""
        while self._workers and (self._units or any(worker.left for worker in self._workers)):
            waiting = {worker.pipe: worker for worker in self._workers}
            ready: list[Any] = connection.wait(list(waiting))
            for pipe in ready:
                yield from self._heard(waiting[pipe])
        while self._workers:
            self._dismiss(self._workers[-1])
        from nondet.probes.runner import run_jobs

        if self._alone:
            self._say(f"nondet: measured by one process: {self._alone}.")
        places = sorted([place for unit in self._units for place in unit.places] + self._again)
        if places:
            self._crew.keep_only()  # the remaining jobs then have the device to themselves
        yield from run_jobs([self._jobs[place] for place in places], self._crew.order.seed, must_fit=True)

    def _heard(self, worker: Worker) -> Iterator[Row]:
        """The rows of a worker's message, or of its end."""
        try:
            word = worker.pipe.recv()
        except (EOFError, OSError):
            word = f"the process that measured it {obituary(worker.process)}"
        if isinstance(word, Row):
            place = worker.left.popleft()
            if word.status == Status.ERROR and any(text in word.reason for text in _MEMORY):
                self._again.append(place)  # other workers may have had the memory
            else:
                yield word
            self._give(worker)
        elif isinstance(word, MisfitError):
            raise word
        elif isinstance(word, dict):
            from nondet.core.environment import moved

            if names := moved(self._settings, word):
                self._alone = f"workers would not have its settings ({', '.join(names)})"
                self._dismiss(worker)
            else:
                worker.ready = True
                self._give(worker)
        else:
            yield from self._mourn(worker, word)  # its last message: why it can measure nothing more

    def _mourn(self, worker: Worker, reason: str) -> Iterator[Row]:
        """A worker has ended: its current job is a row with the reason, and its others go to another worker."""
        self._dismiss(worker)
        if not worker.ready:
            self._say(f"nondet: a worker did not start: {reason}.")
            return
        if worker.left:
            head = self._jobs[worker.left.popleft()].head
            reason += "; it ran beside other processes: --jobs 1 runs only one"
            yield msgspec.structs.replace(head, status=Status.ERROR, reason=reason)
        if worker.left:
            self._units.insert(0, _Unit(worker.group or (), list(worker.left), 0))
            worker.left.clear()
        if self._units:
            self._workers.append(self._crew.take())

    def _dismiss(self, worker: Worker) -> None:
        """End it without waiting: the others measure while it leaves the device."""
        worker.process.kill()
        self._workers.remove(worker)

    def _give(self, worker: Worker) -> None:
        if worker.left:
            return
        if not self._units:
            self._dismiss(worker)
            return
        unit = self._units.pop(self._next(worker))
        worker.group = unit.group
        worker.left.extend(unit.places)
        worker.send(unit.places)

    def _next(self, worker: Worker) -> int:
        """The next case: first ones, then of this worker's group, then of an unclaimed group, then of the largest: its
        longest, since nothing long should begin at the end."""
        held = {other.group for other in self._workers}
        weights: Counter[tuple[str, ...]] = Counter()
        for unit in self._units:
            weights[unit.group] += unit.weight

        def rank(place: int) -> tuple[bool, bool, bool, int, int]:
            group, places, _ = self._units[place]
            weight = weights[group] + _FIRST_WEIGHTS.get(group[0], 0)
            first = any(self._jobs[place].first for place in places)
            return first, group == worker.group, group not in held, weight, -place

        return max(range(len(self._units)), key=rank)


def _group(job: Job) -> tuple[str, ...]:
    """Cases of a group share kernels: those of a probe and dtype; in attention, of one kind of heads, decoding or not;
    of the gradients, attention's."""
    name, shape = job.probe.name, job.case.shape
    if name in _BY_ONE:
        return (name,)
    if job.case.operator == "attention_backward":
        return (job.case.operator, job.case.dtype)
    kind: tuple[str, ...] = ()
    if name == "attention" and shape.get("Hkv"):
        kind = (f"{shape['D']}", f"{shape['Hq'] // shape['Hkv']}", "decode" if shape["Tq"] == 1 else "prefill")
    return (name, job.case.dtype, *kind)


def _units(jobs: Sequence[Job], places: Sequence[int]) -> list[_Unit]:
    """Consecutive jobs of one case, the longest first; for probes that only one worker runs, all of a group."""

    def of(place: int) -> tuple[tuple[str, ...], int]:
        job = jobs[place]
        return _group(job), 0 if job.probe.name in _BY_ONE else id(job.case)

    units = []
    for (group, _), neighbours in itertools.groupby(places, of):
        own = list(neighbours)
        case = jobs[own[0]].case
        long = case.inputs.startswith("order") or (case.varied == "query_chunk" and "values" in case.data)
        long = long or "causal" in case.data or bool(case.data.get("layout"))  # kernels that no other case has
        each = _WEIGHTS.get(group[0], 1) * (_LONGER if long else 1)
        units.append(_Unit(group, own, len(own) * each))
    return sorted(units, key=lambda u: (-u.weight, -math.prod(jobs[u.places[0]].case.shape.values())))
