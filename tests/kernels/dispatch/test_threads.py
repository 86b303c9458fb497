"""`batch_invariant()` while several threads compute and others enter and leave blocks; and what it leaves behind."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F

from nondet.compare import identical
from nondet.kernels.dispatch import state
from nondet.kernels.dispatch.block import batch_invariant
from nondet.kernels.matmul import cpu as cpu_matmul
from nondet.kernels.rows import cpu as cpu_rows

X = torch.rand((8, 64), generator=torch.Generator().manual_seed(1)) * 2 - 1
W = torch.rand((24, 64), generator=torch.Generator().manual_seed(2)) * 2 - 1


def until_stopped(work: Callable[[], None], errors: list[Exception], counts: list[int]) -> Callable[[], None]:
    """A thread's body: `work` again and again, its errors kept."""
    place = len(counts)
    counts.append(0)

    def run() -> None:
        try:
            with torch.inference_mode():
                while not _stop.is_set():
                    work()
                    counts[place] += 1
        except Exception as error:  # noqa: BLE001 - handed to the test, which raises it
            errors.append(error)

    return run


_stop = threading.Event()


def together(works: list[Callable[[], None]], meanwhile: Callable[[], None]) -> tuple[list[int], list[Exception]]:
    """Run `works` on a thread each while `meanwhile` runs here; how often each ran, and what was raised."""
    _stop.clear()
    errors: list[Exception] = []
    counts: list[int] = []
    threads = [threading.Thread(target=until_stopped(work, errors, counts)) for work in works]
    for thread in threads:
        thread.start()
    try:
        meanwhile()
        limit = time.monotonic() + 20
        while min(counts) < 3 and not errors and time.monotonic() < limit:
            time.sleep(0.01)
    finally:
        _stop.set()
        for thread in threads:
            thread.join(60)
    return counts, errors


def test_nested_blocks_come_and_go_while_threads_compute() -> None:
    """200 nested enters of other families against 4 computing threads: no crash, right bits, every call counted.

    (Registering anew at each enter, and destroying what was there, ended in a segmentation fault within a few.)
    """
    softmax, rows = cpu_rows.softmax(X), cpu_rows.sum(X)

    def work() -> None:
        assert identical(torch.softmax(X, -1), softmax)
        assert identical(X.sum(-1), rows)

    def nest() -> None:
        for i in range(200):
            with batch_invariant(["matmul", "norm"] if i % 2 else ["pointwise"]) as inner:
                product = F.linear(X, W)
            assert inner.families <= {"matmul", "norm", "pointwise"}
            if i % 2:
                assert identical(product, cpu_matmul.linear(X, W))

    with torch.no_grad(), batch_invariant(["softmax", "reduction"]) as block:
        counts, errors = together([work] * 4, nest)
    assert not errors, errors[0]
    assert block.coverage().replaced["_softmax"] == block.coverage().replaced["sum.dim_IntList"] >= sum(counts) > 0
    assert block.coverage().replaced["linear"] == 100  # the nested blocks' calls are the outer one's, too


def test_families_switch_for_the_calls_that_begin_later() -> None:
    """What is on for a thread's call is what some block asks for when the call begins: on, off again, on again."""
    stock = torch.softmax(X.double(), -1)  # float64 is left to stock: reasons are looked up per call, too
    with torch.no_grad(), batch_invariant(["matmul"]) as outer:
        torch.softmax(X, -1)
        with batch_invariant(["softmax"]) as inner:
            torch.softmax(X, -1)
            assert identical(torch.softmax(X.double(), -1), stock)
        torch.softmax(X, -1)
    assert outer.coverage().at_risk == {"_softmax float32": 2}
    assert outer.coverage().replaced == inner.coverage().replaced == {"_softmax": 1}
    assert inner.coverage().left == {"_softmax float64": 1}


def test_no_count_is_lost() -> None:
    """Four threads that count at once end with the sum of their counts."""
    coverage = state.Coverage()

    def work() -> None:
        for _ in range(20000):
            coverage.add("replaced", "mm")

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert coverage.replaced == {"mm": 80000}


def test_outermost_blocks_come_and_go_while_threads_compute() -> None:
    """A thread that computes outside of any block's promise gets stock bits or the kernels' bits, and never crashes."""
    with torch.no_grad():
        right = [torch.softmax(X, -1), cpu_rows.softmax(X)]

    def work() -> None:
        got = torch.softmax(X, -1)
        assert any(identical(got, bits) for bits in right)

    def come_and_go() -> None:
        for _ in range(12):
            with batch_invariant(["softmax"]):
                pass

    _, errors = together([work] * 2, come_and_go)
    assert not errors, errors[0]


def test_nested_enter_and_leave_is_cheap() -> None:
    """A nested block costs microseconds: far below a millisecond even on a busy machine, where one took 4 before."""
    with batch_invariant():
        times = []
        for _ in range(50):
            began = time.perf_counter()
            with batch_invariant(["matmul"]):
                pass
            times.append(time.perf_counter() - began)
    assert min(times) < 2e-4


def test_nothing_stays_behind() -> None:
    """After the last leave every operator's kernel is torch's own again, whatever nested and whatever was raised."""

    def kernels() -> list[str]:
        names = ("mm", "_softmax", "sum.dim_IntList", "linear", "cumsum", "scatter_add", "silu", "add.Tensor")
        return [torch._C._dispatch_dump_table(f"aten::{name}") for name in names]

    before = kernels()
    with batch_invariant(), batch_invariant(["matmul"]):
        assert kernels() != before
    block = batch_invariant()
    with pytest.raises(ZeroDivisionError), block:
        raise ZeroDivisionError
    assert kernels() == before
    assert state.current() == state.Active()


def test_a_kernel_that_raises_leaves_its_thread_as_it_was() -> None:
    """A guard inside another keeps the outer one's word, also when it is left by an exception."""

    def fails() -> None:
        raise ZeroDivisionError

    def outer() -> bool:
        with pytest.raises(ZeroDivisionError):
            state.guarded(fails)()
        return state.inside.active

    assert state.guarded(outer)()
    assert not state.inside.active
