"""`on_call`: which calls a hook sees, what it is told of them, and that it changes nothing."""

from __future__ import annotations

import threading
from collections import Counter

import pytest
import torch
import torch.nn.functional as F

from nondet.core.compare import identical
from nondet.kernels.dispatch.block import batch_invariant, on_call
from nondet.kernels.dispatch.state import KINDS, Call

X = torch.rand((8, 64), generator=torch.Generator().manual_seed(1)) * 2 - 1
W = torch.rand((24, 64), generator=torch.Generator().manual_seed(2)) * 2 - 1


def test_each_way_is_told_with_its_arguments_and_result() -> None:
    """Replaced, left, certified, at risk and original, each with the very tensors of the call."""
    calls: list[Call] = []
    with torch.no_grad(), batch_invariant() as block, on_call(calls.append):
        linear = F.linear(X, W)
        torch.softmax(X.double(), -1)
        X.cumsum(-1)
        torch.atan2(X, X)
        torch.arange(6).view(2, 3).sum(-1)
    how = {call.name: call.how for call in calls}
    assert how["aten::linear"] == "replaced"
    assert how["aten::_softmax"] == "left"
    assert how["aten::cumsum"] in ("certified", "at_risk")
    assert how["aten::atan2"] == "at_risk"
    assert how["aten::sum.dim_IntList"] == "original"  # integers
    first = next(call for call in calls if call.name == "aten::linear")
    assert first.args[0].data_ptr() == X.data_ptr()
    assert identical(first.out, linear)
    # what a hook is told and what the coverage counts are the same calls
    told = Counter(call.how for call in calls if call.how != "original")
    groups = {kind: sum(getattr(block.coverage(), kind).values()) for kind in KINDS}
    assert told == {kind: n for kind, n in groups.items() if n}


def test_a_hook_needs_no_block_and_changes_no_bits() -> None:
    """Without a block everything is stock, bit for bit, and told as such; afterwards nothing is told."""
    calls: list[Call] = []
    with torch.no_grad():
        stock = X @ W.t()
        with on_call(calls.append):
            got = X @ W.t()
        X @ W.t()
    assert identical(got, stock)
    assert [(call.name, call.how) for call in calls] == [("aten::mm", "at_risk")]


def test_exact_operators_are_told_on_request() -> None:
    """With `exact` views, copies and arithmetic are told, too, in order; without it they cost nothing and are not."""
    for exact in (False, True):
        names: list[str] = []
        with torch.no_grad(), on_call(lambda call, names=names: names.append(call.name), exact=exact):
            torch.maximum(X, X.flip(0))
        told = [name for name in names if name in ("aten::flip", "aten::maximum")]  # flip is made of some more
        assert told == (["aten::flip", "aten::maximum"] if exact else [])
        assert exact == bool(names)


def test_every_thread_is_told_and_a_hooks_own_calls_are_not() -> None:
    """A thread of an engine's own is seen; what the hook computes is stock and does not call the hook again."""
    threads: list[str] = []
    sums: list[torch.Tensor] = []

    def hook(call: Call) -> None:
        threads.append(threading.current_thread().name)
        sums.append(call.out.sum(-1))

    with torch.no_grad(), batch_invariant(["matmul"]) as block, on_call(hook):
        worker = threading.Thread(target=lambda: torch.mm(X, W.t()), name="engine")
        worker.start()
        worker.join()
    assert threads == ["engine"]
    assert not block.coverage().at_risk
    assert sums[0].shape == (8,)


def test_a_hook_that_raises_is_heard_and_removed() -> None:
    """Its error comes out of the call, and the next call is undisturbed."""

    def hook(call: Call) -> None:
        raise ZeroDivisionError(call.name)

    with torch.no_grad(), batch_invariant(["matmul"]):
        with pytest.raises(ZeroDivisionError, match="aten::mm"), on_call(hook):
            torch.mm(X, W.t())
        torch.mm(X, W.t())
