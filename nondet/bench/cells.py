"""Benchmark cases and their inputs, the stopwatch, the machine's limits, and whether an implementation computes at
all."""

from __future__ import annotations

import math
import re
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch

from nondet.bench.work import FP8, ITEM_BYTES, Work, bench_of, timed_operators, work_of
from nondet.core.inputs import generator, make
from nondet.core.operands import drawn, rows_of
from nondet.core.operator import Sizes, tile_borders
from nondet.core.records import Cell, Limit, Row, Status, Timed
from nondet.core.registry import load_implementation, operators
from nondet.errors import UnknownNameError, UserError

# Timing. A *replay* makes `calls` calls that walk over `sets` sets of buffers. On CUDA it is one replay of a graph, so
# that no launch from the host is in the figure; the outputs of one rotation are kept until the next, so that they
# rotate, too. Replay i of every implementation follows replay i of the others: whatever the machine does over time
# (clocks, heat, neighbours) affects all of them alike, and ratios are taken within a run.

Call = Callable[..., Any]
Replay = Callable[[], Any]
Failure = tuple[str, str]  # status and reason; an exception would keep the tensors of its frames alive

# Programs rarely know the size of a CPU's last cache: most have less than this per core complex.
_CPU_CACHE_BYTES = 32 * 2**20
# Sets together exceed the cache by this factor, so that a second read always misses it.
_CACHE_FACTOR = 3
_SETS_MOST = 64
_CALLS_MOST = 256
# Launching a graph takes some microseconds: at this length that is about one percent of a replay.
_REPLAY_US = 500.0
# No kernel is shorter than about this, however few bytes it moves.
_SHORTEST_US = 2.0


class Rotation(NamedTuple):
    """The number of buffer sets, the calls per replay, and whether no call can find its inputs in the cache."""

    sets: int
    calls: int
    cold: bool


def rotation(set_bytes: int, limit_us: float | None, cache_bytes: int, replay_us: float = _REPLAY_US) -> Rotation:
    """The rotation for a case whose inputs and output take `set_bytes`. It does not depend on the implementation, so
    that all of a case are timed alike."""
    sets = min(max(math.ceil(_CACHE_FACTOR * cache_bytes / max(1, set_bytes)), 2), _SETS_MOST)
    shortest = max(limit_us or 0.0, _SHORTEST_US)
    passes = max(1, min(math.ceil(replay_us / (sets * shortest)), _CALLS_MOST // sets))
    return Rotation(sets, sets * passes, sets * set_bytes >= _CACHE_FACTOR * cache_bytes)


# A stopwatch takes replays of these calls over sets of arguments in turn, and reads all times at once in microseconds.
# Every call is made once before, so that nothing compiles in a replay.


class CudaGraphs:
    """CUDA graphs, timed by events that the device itself records."""

    method = "cuda graph"
    budget_us = 80_000.0
    replay_us = _REPLAY_US

    def __init__(self) -> None:
        properties = torch.cuda.get_device_properties(torch.cuda.current_device())
        self.cache_bytes = int(properties.L2_cache_size)

    def record(self, call: Call, sets: Sequence[tuple[Any, ...]], calls: int) -> Replay:
        """Capture the calls. Raises what a call that can't be captured raises."""
        for arguments in sets[:2]:  # compiles, tunes, proves; a second time for what only happens on the second call
            call(*arguments)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        outputs: list[Any] = [None] * len(sets)
        with torch.cuda.graph(graph):
            for i in range(calls):
                outputs[i % len(sets)] = call(*sets[i % len(sets)])
        outputs.clear()  # their memory belongs to the graph, and stays with it
        graph.replay()
        torch.cuda.synchronize()
        return graph.replay

    def run(self, replay: Replay) -> Any:
        """Enqueue without waiting: the device works through the queue, with no gap for the host."""
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        replay()
        end.record()
        return start, end

    def read(self, runs: Sequence[Any]) -> list[float]:
        """Wait for the last, then read all."""
        torch.cuda.synchronize()
        return [start.elapsed_time(end) * 1e3 for start, end in runs]


# CPU clocks. `cpu` is the time of this process, all threads together: other processes and waiting are not in it. On a
# loaded machine a replay that outlasts a time slice is interrupted and a shorter one is not, so that in wall-clock time
# the slower of two implementations looks slower than it is, even in its fastest replay.
CLOCKS = {"wall": time.perf_counter, "cpu": time.process_time}


class PerfCounter:
    """A Python clock around the calls, for a CPU, where operators return when they are done."""

    cache_bytes = _CPU_CACHE_BYTES
    budget_us = 60_000.0
    replay_us = 2_000.0

    def __init__(self, clock: str = "wall") -> None:
        self._clock = CLOCKS[clock]
        self.method = self._clock.__name__

    def record(self, call: Call, sets: Sequence[tuple[Any, ...]], calls: int) -> Replay:
        """A loop; the first calls are made here."""
        for arguments in sets[:2]:
            call(*arguments)

        def replay() -> None:
            outputs: list[Any] = [None] * len(sets)
            for i in range(calls):
                outputs[i % len(sets)] = call(*sets[i % len(sets)])

        return replay

    def run(self, replay: Replay) -> Any:
        """The duration of one replay in seconds."""
        before = self._clock()
        replay()
        return self._clock() - before

    def read(self, runs: Sequence[Any]) -> list[float]:
        """The times in microseconds."""
        return [seconds * 1e6 for seconds in runs]


Stopwatch = CudaGraphs | PerfCounter


def stopwatch_for(device: str, clock: str = "wall") -> Stopwatch:
    """The way to time on the device type: in wall-clock time, or on a CPU in "cpu" time."""
    return CudaGraphs() if device == "cuda" else PerfCounter(clock)


def interleave(
    replays: Mapping[str, Replay],
    stopwatch: Stopwatch,
    *,
    least: int = 7,
    most: int = 41,
    before: Callable[[], None] = lambda: None,
) -> dict[str, list[float]]:
    """Microseconds of each replay, by implementation: round after round, each implementation once per round.

    The order shifts by one each round, so that none always follows the same other one. A first round, which decides how
    many follow within the stopwatch's budget, is not in the figures. `before`: called before each replay, not timed.
    """

    def run(name: str) -> Any:
        before()
        return stopwatch.run(replays[name])

    names = list(replays)
    if not names:
        return {}
    first = stopwatch.read([run(name) for name in names])
    rounds = min(max(math.ceil(stopwatch.budget_us * len(names) / max(sum(first), 1e-3)), least), most)
    runs: dict[str, list[Any]] = {name: [] for name in names}
    for number in range(rounds):
        first_name = number % len(names)
        for name in (*names[first_name:], *names[:first_name]):
            runs[name].append(run(name))
    return {name: stopwatch.read(own) for name, own in runs.items()}


def timed_of(
    impl: str,
    samples_us: Sequence[float],
    ran: list[str],
    *,
    failure: Failure | None = None,
    kernels: Sequence[str] = (),
) -> Timed:
    """One implementation's entry in a case: its figures, or why there are none. `samples_us` are per call."""
    if failure is not None:
        return Timed(impl=impl, status=failure[0], reason=failure[1], ran=ran)
    low, median, high = (round(float(us), 4) for us in np.percentile(samples_us, (25, 50, 75)))
    return Timed(
        impl=impl,
        status=Status.TIMED,
        samples_us=[round(us, 4) for us in samples_us],
        median_us=median,
        low_us=low,
        high_us=high,
        ran=ran,
        kernels=list(kernels),
    )


# The limits are measured in the run itself: copy bandwidth, and the peak of a large product. Datasheet figures are not
# used, because clocks, memory and drivers differ.

COPY = "copy"
# Large enough to fill the machine, small enough to take a few milliseconds.
COPY_BYTES = {"cuda": 2**30, "cpu": 2**27}
PRODUCT_SIZES = {"cuda": 8192, "cpu": 1024}


def peak_name(dtype: str) -> str:
    """The limit that products of the dtype are compared with."""
    return f"peak {dtype}"


def limit_names(dtypes: list[str]) -> list[str]:
    """The limits that a run needs."""
    return [COPY, *(peak_name(dtype) for dtype in dict.fromkeys(dtypes))]


def _negate(target: torch.Tensor, source: torch.Tensor) -> None:
    torch.neg(source, out=target)


def measure_limit(name: str, device: str, seed: int, stopwatch: Stopwatch) -> Limit:
    """Measure one of `limit_names`.

    copy: one tensor onto another, far larger than the cache, by the library's own copy and by a kernel that reads and
    writes once (torch.neg); bytes read and written both count. On an H200 the library's copy reached 2.8 TB/s where
    kernels reach more than 4, so the faster one is the limit. peak: torch.mm of two square matrices of ordinary numbers
    (zeros would run at higher clocks); for float8 torch._scaled_mm with one scale each into bfloat16, a
    `NotImplementedError` where torch has none.

    A limit is the fastest replay: under power limits the median of a large product differed by 12% from one process to
    the next on an H200, its fastest replay by less than 1%.
    """
    rng = generator(seed, device)
    calls: dict[str, Callable[..., Any]]
    sets: list[tuple[torch.Tensor, ...]]
    if name == COPY:
        source = make("bell", (COPY_BYTES[device] // 4,), torch.float32, device, rng)
        sets = [(torch.empty_like(source), source) for _ in range(2)]
        size = f"of {source.nbytes / 2**20:.0f} MiB"
        unit, work = "B/s", 2 * source.nbytes
        calls = {f"copy_ {size}": torch.Tensor.copy_, f"torch.neg {size}": _negate}
    else:
        edge = PRODUCT_SIZES[device]
        dtype: torch.dtype = getattr(torch, name.removeprefix(peak_name("")))
        sets = [tuple(make("bell", (edge, edge), dtype, device, rng) for _ in range(2)) for _ in range(2)]
        unit, work = "FLOP/s", 2 * edge**3
        calls = {f"torch.mm, {edge} cubed": torch.mm}
        if dtype.itemsize == 1:
            one = torch.ones(1, 1, device=device)
            sets = [(a, b.t(), one, one) for a, b in sets]
            stock = load_implementation("scaled_matmul", "stock", device).call
            calls = {f"torch._scaled_mm, {edge} cubed": partial(stock, dtype=torch.bfloat16)}
    timed = interleave({what: stopwatch.record(call, sets, 2) for what, call in calls.items()}, stopwatch)
    what = min(timed, key=lambda name: min(timed[name]))
    samples = [us / 2 for us in timed[what]]
    return Limit(
        name=name,
        what=what,
        unit=unit,
        device=device,
        rate=work / min(samples) * 1e6,
        work=work,
        method=stopwatch.method,
        samples_us=[round(us, 4) for us in samples],
    )


# The benchmark cases, by section, and their inputs; both follow from the operators' declarations. A section is one
# table of the report; a group holds the cases that must have equal bits (one weight shape, one width). The defaults for
# CUDA are the shapes of an 8B model and of serving loads; those for a CPU finish within a minute.

# The largest size, and the largest number of sizes, that are not taken for a typing error.
MOST, MOST_SIZES = 2**24, 10_000


@dataclass(frozen=True)
class BenchCase:
    """One case, without an implementation. Attributes as in `nondet.core.records.Cell`."""

    section: str
    operator: str
    group: str
    axis: str
    shape: Mapping[str, int]
    dtype: str

    @property
    def name(self) -> str:
        """As `Cell.case`."""
        return sizes_text(self.shape)

    def key(self, device: str) -> tuple[str, ...]:
        """As `Cell.key`."""
        return ("cell", self.section, self.name, self.dtype, device)

    def cell(self, device: str, timed: list[Timed], began: float, **figures: Any) -> Cell:
        """The record: its entries, and what else was measured. `began` is of `time.perf_counter`."""
        about = {name: getattr(self, name) for name in ("section", "operator", "group", "axis", "dtype")}
        about |= {"case": self.name, "shape": dict(self.shape), "device": device}
        unknown = {"bytes": 0, "flops": 0, "limit_us": None, "limited_by": "", "sets": 1, "cold": False}
        return Cell(timed=timed, seconds=time.perf_counter() - began, **about | unknown | figures)

    def row(self, impl: str, device: str, *without: str, **about: Any) -> Row:
        """The row on the bits of the case's group, with everything but figures; its sizes `without` what varies."""
        return Row(
            probe="bench",
            operator=self.operator,
            shape={key: size for key, size in self.shape.items() if key not in (self.axis, *without)},
            dtype=self.dtype,
            device=device,
            impl=impl,
            status="",
            group=self.group,
            **about,
        )

    @property
    def torch_dtype(self) -> torch.dtype:
        """The dtype as torch has it."""
        return getattr(torch, self.dtype)

    @property
    def work(self) -> Work:
        """What one call must move and compute."""
        return work_of(self.operator, self.shape, self.dtype)

    def resized(self, size: int) -> BenchCase:
        """The same with another size on the axis."""
        return replace(self, shape={**self.shape, self.axis: size})

    def inputs(self, device: str, rng: torch.Generator) -> tuple[Any, ...]:
        """One set of fresh inputs, in the order of the operator's signature (`nondet.kernels.reference`)."""
        return drawn(operators()[self.operator], self.shape, self.torch_dtype, device, rng)

    def first_rows(self, inputs: tuple[Any, ...], m: int) -> tuple[Any, ...]:
        """The same inputs with the first m rows of the batch only; weights are unchanged."""
        return rows_of(operators()[self.operator], self.shape, inputs, 0, m)


def groups_of(cases: Sequence[BenchCase]) -> list[list[BenchCase]]:
    """Cases that must have equal bits, together, in order of their first: one weight, width, KV, ranks, or model."""
    groups: dict[tuple[str, str, str], list[BenchCase]] = {}
    for case in cases:
        groups.setdefault((case.operator, case.group, case.dtype), []).append(case)
    return list(groups.values())


Key = tuple[str, ...]


def sizes_text(shape: Mapping[str, int]) -> str:
    """ "M=16 K=64"."""
    return " ".join(f"{key}={size}" for key, size in shape.items())


def bench_names() -> dict[str, str]:
    """Names on the command line -> operators that are timed; aliases come after the operators' own names."""
    timed = timed_operators()
    names = {name: operator.name for name, operator in timed.items()}
    return names | {alias: operator.name for operator in timed.values() for alias in bench_of(operator.name).aliases}


def plan_cases(names: Iterable[str], sizes: Sizes, device: str, dtypes: tuple[str, ...] | None) -> list[BenchCase]:
    """Every case, in the order of the run; a `UserError` of an operator, dtype or size that can't be timed."""
    wanted, known = list(names), bench_names()
    for name in wanted:
        if name != "all" and name not in known:
            raise UnknownNameError("operator", name, [*known, "all"])
    chosen = list(dict.fromkeys(known.values() if "all" in wanted else (known[name] for name in wanted)))
    for dtype in dtypes or ():
        if dtype not in (known_dtypes := (*ITEM_BYTES, FP8)):
            raise UnknownNameError("dtype", dtype, known_dtypes)
    for option, size in (("k", sizes.k), ("n", sizes.n)):
        if size is not None and not 1 <= size <= MOST:
            raise UserError(f"--{option} {size} makes no sense", f"Give a size from 1 to {MOST:,}.")
    options = {option for name in chosen for option in bench_of(name).options}
    if sizes.n is not None and "n" not in options:
        what = f"--n {sizes.n} is for products, and does not apply to {', '.join(wanted)}"
        raise UserError(what, "Give --k: the width of a row operator, the KV length of attention.")
    if sizes.jigsaw and "jigsaw" not in options:
        raise UserError(f"--jigsaw is about linear and matmul, and {', '.join(wanted)} was asked for", "Leave it out.")
    cases = []
    for dtype in dtypes or ("bfloat16" if device == "cuda" else "float32", FP8):
        for operator in (operators()[name] for name in chosen):
            bench, axis = bench_of(operator.name), operator.operands[0].axes[0]
            if bench.fp8 != (dtype == FP8):
                continue
            for cell in bench.cells(sizes, device):
                group = sizes_text({key: cell.shape[key] for key in bench.group})
                cases.append(BenchCase(cell.section, operator.name, group, axis, cell.shape, dtype))
    if not cases:
        given, only = ", ".join(dtypes or ()), f"FP8 products take {FP8}, others do not."
        raise UserError(f"--dtype {given}: {', '.join(wanted)} is not timed in it", only)
    return cases


_SIZES = re.compile(r"(\d+)(?:-(\d+)(?::(\d+))?)?")


def parse_sizes(option: str, given: Iterable[str]) -> tuple[int, ...] | None:
    """ "16", "1-4096" (around tile borders) or "1-4096:64" (in steps), several of them, as rising sizes. Raises
    UserError: not a size, one too large, or a range that is empty or of too many."""
    sizes: set[int] = set()
    for text in given:
        match = _SIZES.fullmatch(text)
        if match is None or (match[2] is None and not int(match[1])):
            raise UserError(f"--{option} {text!r} is no size", "Give 16, 1-4096 (around tile borders) or 1-4096:64.")
        first, last, step = int(match[1]), int(match[2] or match[1]), int(match[3] or 0)
        if not 1 <= first <= last or (match[3] and not step):
            raise UserError(f"--{option} {text} is an empty range", "Give FIRST-LAST or FIRST-LAST:STEP.")
        if last > MOST:
            raise UserError(f"--{option} {text} makes no sense", f"Give sizes up to {MOST:,}.")
        one = match[2] is None
        between = range(first, last + 1, step or 1) if step or one else tile_borders(first, last)
        if len(between) > MOST_SIZES:
            raise UserError(f"--{option} {text} is {len(between):,} sizes", "Give larger steps.")
        sizes |= set(between)
    return tuple(sorted(sizes)) or None


# Rounding differs between orders by a few units in the last place. This only checks for the same operator, because
# `nondet probe` compares accuracy with float64: so the bound is loose, and a wrong result is far outside of it.
_ROUNDINGS = 8
_LEAST = 1e-3


def fault(out: Any, expected: Any) -> str | None:
    """Why `out` is not the result that stock's `expected` is, or None: shapes, dtypes and, loosely, values. Both are a
    tensor or a tuple of tensors on one device; only one number per tensor is copied to the host."""
    got, wanted = _tensors(out), _tensors(expected)
    if got is None or wanted is None or [(x.shape, x.dtype) for x in got] != [(x.shape, x.dtype) for x in wanted]:
        return f"it returned {_described(out)}, where stock returns {_described(expected)}"
    for result, reference in zip(got, wanted, strict=True):
        if not result.dtype.is_floating_point or not result.numel():
            continue
        scale = torch.linalg.vector_norm(reference, dtype=torch.float32)
        apart = float(torch.linalg.vector_norm(result.float() - reference.float()) / scale.clamp_min(1e-30))
        bound = max(_LEAST, _ROUNDINGS * torch.finfo(result.dtype).eps)
        if not apart <= bound:  # NaN is not
            return f"its result is not stock's: relative difference {apart:.3g}, and roundings explain {bound:.2g}"
    return None


def _tensors(x: Any) -> tuple[torch.Tensor, ...] | None:
    outputs = x if isinstance(x, tuple | list) else (x,)
    return tuple(outputs) if outputs and all(isinstance(output, torch.Tensor) for output in outputs) else None


def _described(x: Any) -> str:
    tensors = _tensors(x)
    if tensors is None:
        return type(x).__name__
    return ", ".join(f"{str(t.dtype).removeprefix('torch.')} {list(t.shape)}" for t in tensors)
