"""What really ran: kernels that launchers note, and first uses. Process-wide, as an engine has a thread of its own."""

from __future__ import annotations

import math
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import torch

_listeners: list[Counter[str]] = []


def note(what: str, times: int = 1) -> None:
    """Note what is being launched, e.g. "matmul_chain[16x64x128]"."""
    for counter in _listeners:
        counter[what] += times


@contextmanager
def listen() -> Iterator[Counter[str]]:
    """Count the notes made inside the block, on whichever thread."""
    counter: Counter[str] = Counter()
    _listeners.append(counter)
    try:
        yield counter
    finally:
        _listeners[:] = [c for c in _listeners if c is not counter]


# First uses: the seconds in which a kernel is compiled or a member of a class is proven, once for a machine. Timings
# leave these seconds out. Process-wide, as notes of launches are.


@dataclass(eq=False)  # compared by identity
class FirstUses:
    """What was proven and compiled while the block listened."""

    proofs: int = 0  # stretches of proving, including the compilation in them
    compiled: int = 0  # kernels that Triton compiled, also in proofs; not those from its cache on disk
    stretches: list[tuple[float, float]] = field(default_factory=list)  # (begin, end) by perf_counter, none nested
    on_change: Callable[[FirstUses], None] | None = None

    def within(self, begin: float, end: float) -> float:
        """Seconds of the stretches that lie between the two times."""
        total, upto = 0.0, begin
        for a, b in sorted(self.stretches):  # those of two threads may overlap
            a, b = max(a, upto), min(b, end)
            if b > a:
                total, upto = total + b - a, b
        return total

    @property
    def seconds(self) -> float:
        """Of all stretches."""
        return self.within(-math.inf, math.inf)


_listeners_first_use: list[FirstUses] = []
_lock = threading.Lock()  # of the list, and of what its members count
_proving = ContextVar("proving", default=False)  # in this thread


@contextmanager
def first_uses(on_change: Callable[[FirstUses], None] | None = None) -> Iterator[FirstUses]:
    """Listen to all threads' first uses inside the block; `on_change` is called after each, on its own thread."""
    uses = FirstUses(on_change=on_change)
    with _lock:
        _listeners_first_use.append(uses)
    try:
        yield uses
    finally:
        with _lock:
            _listeners_first_use.remove(uses)


@contextmanager
def proving() -> Iterator[None]:
    """Prove something inside. A GPU's earlier work is waited for first: its time is not part of the proof."""
    if _proving.get() or not _listeners_first_use:
        yield
        return
    wait_for_device()
    begin = time.perf_counter()
    before = _proving.set(True)
    try:
        yield
    finally:
        _proving.reset(before)
        wait_for_device()
        _report((begin, time.perf_counter()), proofs=1)


def listen_to_triton() -> None:
    """Add a listener to Triton's compilations, next to existing ones. Older versions of Triton report nothing."""
    import triton

    compilation: Any = getattr(getattr(triton, "knobs", None), "compilation", None)
    if compilation is None or not hasattr(compilation, "listener"):
        return
    other = compilation.listener

    def compiled(**event: Any) -> None:
        if other is not None:
            other(**event)
        if not event.get("cache_hit") and _listeners_first_use:
            end = time.perf_counter()
            begin = end - event["times"].total * 1e-6
            _report(None if _proving.get() else (begin, end), compiled=1)

    compilation.listener = compiled


def _report(stretch: tuple[float, float] | None, *, proofs: int = 0, compiled: int = 0) -> None:
    with _lock:
        listening = list(_listeners_first_use)
        for uses in listening:
            uses.proofs += proofs
            uses.compiled += compiled
            if stretch is not None:
                uses.stretches.append(stretch)
    for uses in listening:  # without the lock: they may prove, listen, or wait
        if uses.on_change is not None:
            uses.on_change(uses)


def wait_for_device() -> None:
    """Wait until a GPU that this process uses has done what was launched; not while a graph is captured."""
    if torch.cuda.is_available() and torch.cuda.is_initialized() and not torch.cuda.is_current_stream_capturing():
        torch.cuda.synchronize()


class DeviceLostError(RuntimeError):
    """A sticky CUDA error: every later call would fail, and a proof would be void."""


def ready_compiler() -> None:
    """What the first kernel of a process waits for otherwise: Triton reads its own files for the key of its cache, and
    builds its link to the driver."""
    import triton

    with suppress(Exception):  # what fails here, fails again where it is reported
        from triton.runtime.cache import triton_key

        triton_key()
        _ = triton.runtime.driver.active.utils


def check_device_alive(device: str, error: BaseException) -> None:
    """Raise `DeviceLostError` after an error that took the CUDA context with it."""
    if device != "cuda":
        return
    try:
        torch.cuda.synchronize()
    except Exception as sticky:
        raise DeviceLostError(f"the CUDA context is lost after: {error}") from sticky
