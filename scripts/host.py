"""What a call costs the host, stock and inside of `batch_invariant()`, in one run, held against a kept one.

    python scripts/host.py [--device cpu] [--threads 1] [--dtype D] [--check KEPT [--slower FACTOR]] [--out RUN.jsonl]

Elsewhere kernels are timed, under CUDA graphs or with so much work that Python is little of it. A model run without
graphs pays for the host at every call. So here are calls of little work, one after the other: on a CPU the CPU time of
the one thread that makes them, on CUDA the clock's time of many calls and one wait. Entering and leaving the block is
off the clock, but in the cell "enter", where it is all there is. `nondet report` shows the run. Exit code 3 where a
ratio fell beyond noise.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from nondet.bench.cells import BenchCase, PerfCounter, interleave, timed_of
from nondet.bench.summary import cells_of, check_runs
from nondet.core.environment import collect
from nondet.core.inputs import generator, make
from nondet.core.launch import check_device_alive, listen
from nondet.core.measure import reason_of
from nondet.core.records import Cell
from nondet.core.runfile import open_run, read_run
from nondet.errors import UserError
from nondet.kernels.dispatch.block import batch_invariant

_CALLS, _ENTER = 200, "enter"

# name -> how it is called, and the axes of its operands
_OPERATORS: dict[str, tuple[Callable[..., Any], tuple[str, ...]]] = {
    "linear": (F.linear, ("M K", "N K")),
    "mm": (torch.mm, ("M K", "K N")),
    "softmax": (partial(torch.softmax, dim=-1), ("M K",)),
    "mean": (partial(torch.mean, dim=-1), ("M K",)),
    "layer-norm": (lambda x, w, b: F.layer_norm(x, w.shape, w, b), ("M K", "K", "K")),
    "rms-norm": (lambda x, w: F.rms_norm(x, w.shape, w, 1e-6), ("M K", "K")),
    "attention": (partial(F.scaled_dot_product_attention, enable_gqa=True), ("B Hq Tq D", "B Hkv Tk D", "B Hkv Tk D")),
}
# By device: numbers of rows, or requests, and the other sizes
_SIZES: dict[str, tuple[tuple[int, ...], dict[str, int]]] = {
    "cpu": ((1, 4), {"K": 64, "N": 64, "Hq": 4, "Hkv": 4, "Tq": 1, "Tk": 64, "D": 32}),
    "cuda": ((1, 256), {"K": 4096, "N": 4096, "Hq": 32, "Hkv": 8, "Tq": 1, "Tk": 1024, "D": 128}),
}


class HostClock(PerfCounter):
    """Calls one after the other in a block that is entered before the clock starts."""

    budget_us = 100_000.0

    def __init__(self, device: str) -> None:
        super().__init__()
        if device == "cpu":
            self.budget_us = 30_000.0  # each round of it enters a block, which takes as long as the calls
        self._clock = time.thread_time if device == "cpu" else time.perf_counter
        self.method = "thread_time" if device == "cpu" else "calls without a graph"
        self._wait = torch.cuda.synchronize if device == "cuda" else nullcontext

    def run(self, replay: Any) -> Any:
        """Seconds of the calls, and of waiting for the device once; `replay`: (block, how many, call)."""
        block, calls, call = replay
        with block():
            call()
            self._wait()
            before = self._clock()
            for _ in range(calls):
                call()
            self._wait()
            return self._clock() - before


def plan_host(device: str, dtypes: Sequence[str] | None) -> list[BenchCase]:
    """Every cell."""
    rows, fixed = _SIZES[device]
    cases = []
    for dtype in dtypes or (("bfloat16",) if device == "cuda" else ("float32",)):
        for name, (_, operands) in _OPERATORS.items():
            for count in rows:
                shape = {axis: fixed.get(axis, count) for axis in " ".join(operands).split()}
                cases.append(BenchCase(f"host, {name}", f"host {name}", name, next(iter(shape)), shape, dtype))
        cases.append(BenchCase(f"host, {_ENTER}", f"host {_ENTER}", _ENTER, "blocks", {"blocks": 1}, dtype))
    return cases


def _timed(case: BenchCase, device: str, seed: int) -> Cell:
    began, clock, failure = time.perf_counter(), HostClock(device), None
    blocks: dict[str, Callable[[], AbstractContextManager[Any]]] = {"stock": nullcontext, "invariant": batch_invariant}
    calls = _CALLS
    if case.group == _ENTER:
        blocks, calls = {"invariant": nullcontext}, 2
    samples: dict[str, list[float]] = {}
    ran: dict[str, list[str]] = {}
    try:
        call = _call(case, device, seed)
        for name, block in blocks.items():
            with listen() as notes:
                clock.run((block, 2, call))
            ran[name] = sorted(notes)
        replays: dict[str, Any] = {name: (block, calls, call) for name, block in blocks.items()}
        samples = interleave(replays, clock)
    except Exception as error:  # noqa: BLE001 - becomes the reason of the entries; the run goes on
        check_device_alive(device, error)
        failure = reason_of(error)
    each = {name: [us / calls for us in samples.get(name, [])] for name in blocks}
    timed = [timed_of(name, each[name], ran.get(name, []), failure=failure) for name in blocks]
    return case.cell(device, timed, began, method=clock.method, calls=calls)


def _call(case: BenchCase, device: str, seed: int) -> Callable[[], Any]:
    """The operator on inputs of its own, or a block that is entered and left."""
    if case.group == _ENTER:
        return _enter_and_leave
    operator, operands = _OPERATORS[case.group]
    rng = generator(seed, device)
    sizes = [tuple(case.shape[axis] for axis in axes.split()) for axes in operands]
    return partial(operator, *(make("bell", size, case.torch_dtype, device, rng) for size in sizes))


def _enter_and_leave() -> None:
    with batch_invariant():
        pass


def main(words: list[str]) -> int:
    """Time every cell into a run file, and hold it against a kept one."""
    parser = argparse.ArgumentParser(description="What a call costs the host.")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--dtype", action="append", choices=["bfloat16", "float16", "float32"])
    parser.add_argument("--check", type=Path)
    parser.add_argument("--slower", type=float)
    parser.add_argument("--out", type=Path, default=Path("runs") / f"host-{time.strftime('%Y%m%d-%H%M%S')}.jsonl")
    parser.add_argument("--force", action="store_true")
    given = parser.parse_args(words)
    torch.set_num_threads(given.threads)
    plan = {"operators": ["host"], "impls": ["stock", "invariant"], "device": given.device, "dtypes": given.dtype}
    try:
        kept = None if given.check is None else read_run(given.check)
        writer = open_run(given.out, command="bench", plan=plan, environment=collect(0), force=given.force)
        with torch.no_grad():
            for case in plan_host(given.device, given.dtype):
                writer.write(_timed(case, given.device, seed=0))
        writer.finish()
        writer.close()
        print(f"run file: {given.out}", file=sys.stderr)
        if kept is None:
            return 0
        new = read_run(given.out)
        if not cells_of(kept).keys() & cells_of(new).keys():
            raise UserError(f"--check {given.check}: it has none of the cells of this run", "Give one of this device.")
        found = check_runs(kept, new, given.slower)
    except UserError as error:
        print(f"host.py: {error}", file=sys.stderr)
        return 2
    for line in (*found.notes, *(f"regression: {line}" for line in found.regressions)):
        print(line, file=sys.stderr)
    return 3 if found.regressions else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
