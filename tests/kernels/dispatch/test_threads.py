"""`batch_invariant()` while several threads compute and others enter and leave blocks; and what it leaves behind."""

from __future__ import annotations

import gc
import sys
import threading
import time
import types
from collections.abc import Callable
from contextlib import nullcontext, suppress
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from nondet.core.compare import identical
from nondet.kernels.dispatch import block, functions, state
from nondet.kernels.dispatch.block import Registration, batch_invariant
from nondet.kernels.dispatch.state import kernels_for
from nondet.kernels.matmul import cpu as cpu_matmul
from nondet.kernels.rows import cpu as cpu_rows
from tests.kernels.tiers import at_length

X = torch.rand((8, 64), generator=torch.Generator().manual_seed(1)) * 2 - 1
W = torch.rand((24, 64), generator=torch.Generator().manual_seed(2)) * 2 - 1


def together(works: list[Callable[[], None]], meanwhile: Callable[[], None]) -> tuple[list[int], list[Exception]]:
    """Run `works` on a thread each while `meanwhile` runs here; how often each ran, and what was raised."""
    stop, errors, counts = threading.Event(), list[Exception](), [0] * len(works)

    def run(place: int) -> None:
        try:
            with torch.inference_mode():
                while not stop.is_set():
                    works[place]()
                    counts[place] += 1
        except Exception as error:  # noqa: BLE001 - handed to the test, which raises it
            errors.append(error)

    threads = [threading.Thread(target=run, args=(place,)) for place in range(len(works))]
    for thread in threads:
        thread.start()
    try:
        meanwhile()
        limit = time.monotonic() + 20
        while min(counts) < 3 and not errors and time.monotonic() < limit:
            time.sleep(0.01)
    finally:
        stop.set()
        for thread in threads:
            thread.join(60)
    return counts, errors


def test_nested_blocks_come_and_go_while_threads_compute() -> None:
    """60 nested enters of other families against 4 computing threads: no crash, right bits, every call counted once."""
    softmax, rows = cpu_rows.softmax(X), cpu_rows.sum(X)

    def work() -> None:
        assert identical(torch.softmax(X, -1), softmax)
        assert identical(X.sum(-1), rows)

    def nest() -> None:
        for i in range(60):
            with batch_invariant(["matmul", "norm"] if i % 2 else ["pointwise"]) as inner:
                product = F.linear(X, W)
            assert inner.families <= {"matmul", "norm", "pointwise"}
            if i % 2:
                assert identical(product, cpu_matmul.linear(X, W))

    with torch.no_grad(), batch_invariant(["softmax", "reduction"]) as outer:
        counts, errors = together([work] * 4, nest)
    assert not errors, errors[0]
    assert outer.coverage().replaced["_softmax"] == outer.coverage().replaced["sum.dim_IntList"] == sum(counts) > 0
    assert outer.coverage().replaced["linear"] == 30  # the nested blocks' calls are the outer one's, too


def test_outermost_blocks_come_and_go_while_threads_compute() -> None:
    """A thread that computes outside of any block's promise gets stock bits or the kernels' bits, and never crashes."""
    with torch.no_grad():
        right = [torch.softmax(X, -1), cpu_rows.softmax(X)]

    def work() -> None:
        got = torch.softmax(X, -1)
        assert any(identical(got, bits) for bits in right)

    def come_and_go() -> None:
        for _ in range(6):
            with batch_invariant(["softmax"]):
                pass

    _, errors = together([work] * 2, come_and_go)
    assert not errors, errors[0]


STOCK = ("mm", "_softmax", "sum.dim_IntList", "linear", "cumsum", "silu")


def kernels() -> list[str]:
    return [torch._C._dispatch_dump_table(f"aten::{name}") for name in STOCK]


def stock() -> list[torch.Tensor]:
    with torch.no_grad():
        return [X @ X.T, torch.softmax(X, -1), X.sum(-1), F.linear(X, W), X.cumsum(0), F.silu(X)]


def test_nothing_stays_behind() -> None:
    """After the last leave every operator's kernel is torch's own again, whatever nested or raised."""
    before, bits = kernels(), stock()
    assert not any(block.__file__ in table for table in before)
    with batch_invariant(), batch_invariant(["matmul"]):
        assert all(block.__file__ in table for table in kernels())
    left = batch_invariant()
    with pytest.raises(ZeroDivisionError), left:
        state.guarded(lambda: 1 // 0)()  # a kernel that raises leaves its thread as it was
    assert not state.inside.active
    assert kernels() == before
    assert all(identical(got, was) for got, was in zip(stock(), bits, strict=True))
    assert state.current() == state.Active()
    assert not left.coverage().counts()


def test_a_thread_inside_of_a_kernel_when_the_block_ends_ends_in_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """What was taken away lives on for it, though another block has come and gone; its next call is stock's."""
    kernels = kernels_for("cpu")
    honest, began, go, got = kernels.softmax, threading.Event(), threading.Event(), []

    def waits(x: torch.Tensor) -> torch.Tensor:
        began.set()
        assert go.wait(30)
        return honest(x)

    def work() -> None:
        with torch.no_grad():
            got.extend([torch.softmax(X[:, :63], -1), torch.softmax(X[:, :63], -1)])

    monkeypatch.setitem(vars(kernels), "softmax", waits)
    thread = threading.Thread(target=work)
    with batch_invariant():
        thread.start()
        assert began.wait(30)
    with batch_invariant():
        pass
    gc.collect()
    go.set()
    thread.join(30)
    assert identical(got[0], honest(X[:, :63]))
    assert identical(got[1], torch.softmax(X[:, :63], -1))


@pytest.mark.parametrize("every", [3, *at_length(1)])
def test_an_interrupt_at_any_step_of_a_block_leaves_the_next_one_whole(every, monkeypatch) -> None:
    """Ctrl-C while functions are put there or taken away: the next block computes by its own."""
    mine = ("aten::mm", "aten::_softmax", "aten::linear")  # all of them are thousands of steps
    made = {place: function for place, function in block.decided().items() if place[0] in mine}
    monkeypatch.setattr(block, "_registration", Registration(lambda: made))
    codes = {f.__code__ for f in (block._enter_first, block._leave_last, Registration.put, Registration.take_away)}
    steps, at = 0, 0

    def trace(frame: types.FrameType, event: str, arg: object) -> Any:
        nonlocal steps
        steps += event == "line" and frame.f_code in codes
        if at and steps == at:
            raise KeyboardInterrupt
        return trace if frame.f_code in codes else None

    def interrupted() -> None:
        nonlocal steps
        steps, tracing = 0, sys.gettrace()
        sys.settrace(trace)
        try:
            with suppress(KeyboardInterrupt), batch_invariant():
                pass
        finally:
            sys.settrace(tracing)

    interrupted()
    most = steps
    assert most > 50  # a function is a few steps
    for at in range(1, most + 1, every):
        interrupted()
        with torch.no_grad(), batch_invariant() as entered:
            stock()
        assert entered.coverage().replaced == {"mm": 1, "_softmax": 1, "linear": 1}, at
        assert not any(block.__file__ in table for table in kernels()), at


def test_what_came_between_two_blocks_is_watched() -> None:
    """One operator went and one came between two blocks, of another name or the same: at risk, and counted once."""
    seen = []
    for name, factor in (("a", 2), ("b", 3), ("b", 5)):
        library = torch.library.Library("nondet_in_its_place", "DEF")
        try:
            library.define(f"{name}(Tensor x) -> Tensor")
            library.impl(name, lambda x, factor=factor: x * factor, "CPU")
            with torch.no_grad(), batch_invariant() as entered:
                assert identical(getattr(torch.ops.nondet_in_its_place, name)(X), X * factor)
                torch.softmax(X, -1)
            seen.append(entered.coverage().counts())
        finally:
            library._destroy()
    assert seen == [{f"at risk: nondet_in_its_place::{n} float32": 1, "replaced: _softmax": 1} for n in "abb"]


NORM = torch.rand((64, 1000), generator=torch.Generator().manual_seed(3)) * 2 - 1
PARTS = ["norm", "reduction", "pointwise"]  # the families of rms_norm and of what it is made of


def norm() -> torch.Tensor:
    with torch.no_grad():
        return F.rms_norm(NORM, (1000,), torch.ones(1000), 1e-6)


def test_a_norm_under_way_is_not_finished_by_a_nested_block(monkeypatch: pytest.MonkeyPatch) -> None:
    """A norm whose mean is torch's ends in torch's root, though another thread has put the block's there meanwhile."""
    stock, got = norm(), []
    half, entered = threading.Event(), threading.Event()

    def stop_at_the_mean(kind: str, what: str) -> None:
        if what.startswith("mean.dim") and not half.is_set():
            half.set()
            assert entered.wait(30)

    monkeypatch.setattr(functions, "count", stop_at_the_mean)
    with batch_invariant(["matmul"]):
        thread = threading.Thread(target=lambda: got.append(norm()))
        thread.start()
        assert half.wait(30)
        with batch_invariant(PARTS) as inner:
            entered.set()
            thread.join(30)
            assert not identical(norm(), stock)  # or this test could not tell
    assert identical(got[0], stock)
    assert inner.coverage().replaced == {"rms_norm": 1}


def fails(*args: Any, **kwargs: Any) -> None:
    raise MemoryError("here")


def stand_ins(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(block, "_STAND_INS", (block._STAND_INS[0], (fails, block._STAND_INS[1][1])))


def half_the_operators(patch: pytest.MonkeyPatch) -> None:
    left, key_of = iter(range(300, -1, -1)), block._parsed  # called for each operator that is put
    patch.setattr(block, "_parsed", lambda name: key_of(name) if next(left) else fails())


# the steps of an entry, each with whether a nested one takes it
STEPS: dict[str, tuple[Callable[[pytest.MonkeyPatch], None], bool]] = {
    "operators": (half_the_operators, False),
    "compiler": (lambda patch: patch.setattr(functions, "_forget_graphs", fails), False),
    "snapshot": (
        lambda patch: patch.setattr(block, "replace_now", lambda now: fails() if now.families else None),
        True,
    ),
    "stand-ins": (stand_ins, True),
}


@pytest.mark.parametrize("outer", [[], ["matmul"]])
def test_an_entry_that_fails_half_way_leaves_nothing(outer: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Whichever step of entering raises, kernels and snapshot are what they were, and a later block is whole."""
    own = norm()
    for where, (put, nests) in STEPS.items():
        if outer and not nests:
            continue
        with batch_invariant(outer) if outer else nullcontext():
            before, active = kernels(), state.current()
            with monkeypatch.context() as patch:
                patch.setattr(block, "_modules", {})  # stand-ins are looked after; undone before the outer block leaves
                put(patch)
                with pytest.raises(MemoryError, match="here"):
                    batch_invariant().__enter__()
            assert kernels() == before, where
            assert state.current() == active, where
        with batch_invariant() as again:
            norm()
        assert again.coverage().replaced == {"rms_norm": 1}, where
        assert identical(norm(), own), where
