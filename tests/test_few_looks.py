"""Results and repeats that a GPU is asked about together get the answers of asking one by one."""

from __future__ import annotations

import math
import random
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch

from nondet.core import compare, processes
from nondet.core.compare import (
    ClassBook,
    _unseen_agreement,
    agreement,
    difference,
    error_against,
    errors_against,
    float_dtypes,
    identical,
    looked_at,
)
from nondet.core.watch import Answers, Watch
from nondet.kernels import reference
from nondet.kernels.experts import cpu

DTYPES = [*float_dtypes(), torch.int64, torch.bool, torch.complex64]
NAN = torch.tensor([0x7FC00000, 0x7FC00001, -0x400000], dtype=torch.int32).view(torch.float32)  # three patterns


def _pool(dtype: torch.dtype) -> torch.Tensor:
    values = torch.tensor([[1.0, 2.0, 0.0], [1.0, 4.0, 0.0], [2.0, 2.0, 0.0], [1.0, 2.0, 1.0]])
    return values.to(dtype) if "float4" not in str(dtype) else values.to(torch.uint8).view(dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_agreement_is_identity(dtype: torch.dtype) -> None:
    """Both ways to ask give what `identical` gives, of every pair."""
    pool = list(_pool(dtype))
    pairs = [(a, b.clone()) for a in pool for b in pool]
    expected = [identical(a, b) for a, b in pairs]
    assert sum(expected) >= len(pool)
    assert False in expected
    for ask in (agreement, _unseen_agreement):
        assert looked_at([ask(a, b) for a, b in pairs]) == expected
        with pytest.raises(ValueError, match="not comparable"):
            ask(pool[0], pool[0][:1])


def test_agreement_of_nan_and_zeros() -> None:
    """NaN equals NaN whatever its payload, and no number; zeros of two signs are two."""
    numbers = [*NAN, torch.tensor(0.0), torch.tensor(-0.0), torch.tensor(math.inf)]
    for a in numbers:
        for b in numbers:
            assert bool(_unseen_agreement(a, b)) is identical(a, b)
    assert looked_at([]) == []


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_results_that_wait_get_the_labels_of_one_by_one(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """In whatever order classes come, with buffers that are written to afterwards."""
    pool = list(_pool(dtype))
    monkeypatch.setattr(compare, "_is_slow_to_ask", lambda _: True)
    for order in ([0] * 9, [0, 0, 1, 1, 0, 2, 3, 2, 0], [0, 1, 2, 3], [3], [1, 0, 0, 0, 0, 0, 0, 0, 2]):
        one_by_one, waiting = ClassBook(), ClassBook()
        for place in order * 2:
            one_by_one.add(pool[place])
        for place in order:
            buffer = pool[place].clone()
            waiting.add_later(buffer)
            buffer.view(torch.uint8).fill_(7)
        assert not waiting.labels
        waiting.settle()
        for place in order:
            waiting.add_later(pool[place])
        waiting.settle()
        assert waiting.labels == one_by_one.labels
        assert waiting.sizes == one_by_one.sizes
        pairs = zip(waiting.representatives, one_by_one.representatives, strict=True)
        assert all(identical(a, b) for a, b in pairs)
        assert waiting.add(pool[order[0]]) == 0


@pytest.mark.parametrize("seed", range(3))
def test_whatever_is_added_while_others_wait_comes_after_them(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """One, or many at once, in a drawn order: the labels of one by one, and none is out of its place."""
    monkeypatch.setattr(compare, "_is_slow_to_ask", lambda _: True)
    rng = random.Random(seed)  # noqa: S311 - an order
    pool = list(_pool(torch.float32))
    for many in (False, True):
        one_by_one, mixed = ClassBook(), ClassBook()
        for _ in range(12):
            waiting, drawn = rng.choices(pool, k=rng.randrange(1, 4)), rng.choices(pool, k=2)
            for result in waiting:
                mixed.add_later(result)
            labels = mixed.add_many(torch.stack(drawn)) if many else [mixed.add(result) for result in drawn]
            expected = [one_by_one.add(result) for result in (*waiting, *drawn)]
            assert labels == expected[-2:]
            assert mixed.labels == one_by_one.labels


def test_waiting_results_are_settled_by_their_size_and_refused_by_their_shape(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is kept is bounded; scalars and NaN are compared like everything; another shape is no other class."""
    monkeypatch.setattr(compare, "_is_slow_to_ask", lambda _: True)
    monkeypatch.setattr(compare, "_KEPT_BYTES", 10)
    book = ClassBook()
    for x in (NAN[0], torch.tensor(1.0), NAN[1]):
        book.add_later(x)
    assert book.labels == [0, 1, 0]
    book.add_later(torch.tensor(1.0))
    with pytest.raises(ValueError, match="not comparable"):
        book.add_later(torch.ones(2))
    monkeypatch.setitem(compare._MATRIX, "cpu", 0)  # too much to compare each with each
    for x in (NAN[2], torch.tensor(2.0)):
        book.add_later(x)
    book.settle()
    assert book.labels == [0, 1, 0, 1, 0, 2]


def test_a_watch_tells_of_each_repeat_once_and_of_the_worst_fault() -> None:
    """A call that gives other bits the second time is seen in its own variant, and a wrong one at the end."""
    calls = 0

    def linear(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        nonlocal calls
        calls += 1
        return x @ weight.T + (2.0**-22 if calls == 4 else 0.0) + (1.0 if calls > 4 else 0.0)

    watch = Watch(linear, Answers("linear", reference.linear))
    watch.checking = True
    repeats = []
    for _ in range(3):
        watch.next_variant()
        watch.call(torch.ones(2, 3), torch.ones(4, 3))
        repeats.append(looked_at(watch.repeated()))
    assert repeats == [[True], [False], [True]]
    assert watch.repeated() == []
    assert "8 of 8 elements are off" in watch.fault
    assert watch.accuracy is not None
    assert (watch.accuracy.calls, watch.accuracy.elements) == (3, 24)


def test_errors_and_differences_of_several_are_those_of_each() -> None:
    """One look for all of them, with NaN, infinities and other numbers among them; the widest as of each."""
    rng = torch.Generator().manual_seed(3)
    reference = torch.randn(4, 5, generator=rng, dtype=torch.float64)
    outs = [reference.float() * (1 + scale) for scale in (0.0, 1e-3, 1e-6)]
    outs += [outs[0].clone().index_fill_(0, torch.tensor([1]), value) for value in (math.nan, math.inf)]
    errors, more = errors_against(outs, reference, torch.tensor(7), torch.tensor(True))
    assert errors == [error_against(out, reference) for out in outs]
    assert more == [7, 1]
    assert errors_against([torch.ones(0)], torch.ones(0, dtype=torch.float64), torch.tensor(3)) == (
        [error_against(torch.ones(0), torch.ones(0, dtype=torch.float64))],
        [3],
    )
    assert errors_against([], None) == ([], [])
    for chosen in (outs, outs[:3], outs[:2], outs[:1]):
        book = ClassBook()
        book.add_each(chosen)
        apart = [msgspec.structs.replace(difference(chosen[0], x), label=i) for i, x in enumerate(chosen)]
        assert book.widest_difference() == max(
            apart[1:] or [difference(chosen[0], chosen[0])], key=lambda d: (d.nonfinite, d.max_ulp, d.mismatched)
        )


def _tree(values: list[torch.Tensor]) -> torch.Tensor:
    while len(values) > 1:
        values = [values[i] + values[i + 1] if i + 1 < len(values) else values[i] for i in range(0, len(values), 2)]
    return values[0]


@pytest.mark.parametrize("count", [1, 2, 3, 7, 64, 65, 200])
def test_scatter_add_is_the_tree_that_it_says(count: int) -> None:
    """Pairs of neighbours, pairs of those sums, the row last: of every number of contributions."""
    rng = torch.Generator().manual_seed(count)
    source = torch.randn(count, generator=rng) * 10.0 ** torch.randint(-3, 4, (count,), generator=rng)
    index = torch.randint(0, 3, (count,), generator=rng)
    target = torch.randn(5, generator=rng)
    got = cpu.scatter_add(target, index, source)
    for row in range(5):
        mine = list(source[index == row])
        assert identical(got[row], target[row] + _tree(mine) if mine else target[row])


@pytest.mark.parametrize(("status", "expected"), [(0, 5 * 2**30), (2, None)])
def test_free_memory_is_asked_of_the_driver(monkeypatch: pytest.MonkeyPatch, status: int, expected: int | None) -> None:
    """By the GPU's UUID, in bytes; None where the library knows no such GPU, or there is none."""
    names = []

    def by_uuid(name: bytes, handle: Any) -> int:
        names.append(name)
        return status

    def memory(_: Any, at: Any) -> int:
        at._obj.free = 5 * 2**30
        return 0

    library = SimpleNamespace(
        nvmlInit_v2=lambda: 0, nvmlShutdown=lambda: 0, nvmlDeviceGetHandleByUUID=by_uuid, nvmlDeviceGetMemoryInfo=memory
    )
    monkeypatch.setattr("ctypes.CDLL", lambda _: library)
    assert processes.free_gpu_memory("12ab") == expected
    assert names == [b"GPU-12ab"]
    monkeypatch.setattr("ctypes.CDLL", lambda _: SimpleNamespace())
    assert processes.free_gpu_memory("12ab") is None


def test_a_context_is_begun_with_the_first_device_or_not_at_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """The primary context of device 0, where the driver starts; nothing is raised where there is none."""
    calls: list[str] = []

    def told(name: str, status: int = 0) -> Any:
        return lambda *_: calls.append(name) or status

    library = SimpleNamespace(
        cuInit=told("init"), cuDeviceGet=told("get"), cuDevicePrimaryCtxRetain=told("retain"),
    )  # fmt: skip
    monkeypatch.setattr("ctypes.CDLL", lambda _: library)
    processes.begin_context().join()
    assert calls == ["init", "get", "retain"]
    library.cuInit = told("no", 100)
    processes.begin_context().join()
    assert calls[3:] == ["no"]
    monkeypatch.setattr("ctypes.CDLL", lambda _: SimpleNamespace())
    processes.begin_context().join()
