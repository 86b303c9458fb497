"""torch.distributed's reductions under `batch_invariant()`: the family "all-reduce".

Registered under c10d's own operators, which every form ends in: `torch.distributed.all_reduce`, the functional
collectives (_c10d_functional, so DTensor too, and what torch.compile makes of them), and a ProcessGroup's own method.
So a model under tensor parallelism is reached unmodified, for whatever process group it uses. Sums of floating point
are replaced, all-reduces by `nondet.kernels.all_reduce.invariant` and reduce-scatters by
`nondet.kernels.all_reduce.scatter`; maxima, minima and integers are exact in any order, and run as they are; gathers
copy; other reductions are counted as left or at risk. All ranks enter and leave their blocks at the same calls.

They are registered at the key BackendSelect, above the device's own, and hand over by a redispatch, which lets go of
the interpreter's lock; the other way to reach a kernel, `call_boxed`, holds it. A library's own threads hold a queue's
lock while they free the tensors of what has ended, for which they need the interpreter's: whoever enqueues with the
interpreter's lock held waits for them for ever, now and then (seen with gloo).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch

from nondet.kernels.all_reduce.declaration import ALL_REDUCES
from nondet.kernels.dispatch.state import count, current, emit, floating, inside, label

__all__ = ["functions"]


class _Form(NamedTuple):
    """One of c10d's operators whose sums are replaced.

    Attributes:
        name: What it is called in the coverage.
        group: Place of the process group among its arguments; the reduction is the next one.
        pairs: From its arguments the (result, message) pairs: one tensor twice for an all-reduce, which is in place.
        answers: Whether it gives its tensors back beside the work.
    """

    name: str
    group: int
    pairs: Callable[[tuple[Any, ...]], list[tuple[torch.Tensor, Any]]]
    answers: bool = True


_FORMS = {
    "allreduce_": _Form("all_reduce", 1, lambda args: [(x, x) for x in args[0]]),
    "allreduce_coalesced_": _Form("all_reduce", 1, lambda args: [(x, x) for x in args[0]], answers=False),
    "_reduce_scatter_base_": _Form("reduce_scatter", 2, lambda args: [(args[0], args[1])]),
    "reduce_scatter_": _Form("reduce_scatter", 2, lambda args: list(zip(args[0], args[1], strict=True))),
    "reduce_scatter_tensor_coalesced_": _Form(
        "reduce_scatter", 2, lambda args: list(zip(args[0], args[1], strict=True)), answers=False
    ),
}
# Reductions without a replacement: their order is the library's. Gathers and broadcasts copy.
_AT_RISK = ("reduce_",)
_KEY = "BackendSelect"
_EXACT = ("MAX", "MIN", "BAND", "BOR", "BXOR")


def functions(devices: tuple[str, ...]) -> dict[tuple[str, str], Callable[..., Any]]:
    """(operator, dispatch key) -> function; empty where torch was built without distributed."""
    if not torch.distributed.is_available():
        return {}
    types = frozenset(device.lower() for device in devices)
    made: dict[tuple[str, str], Callable[..., Any]] = {}
    for name, form in _FORMS.items():
        if hasattr(torch.ops.c10d, name):  # not each is in every torch
            made[f"c10d::{name}", _KEY] = _replacing(name, form, _stock(name), types)
    for name in _AT_RISK:
        if hasattr(torch.ops.c10d, name):
            made[f"c10d::{name}", _KEY] = _watching(name, _stock(name), types)
    return made


def _stock(name: str) -> Callable[..., Any]:
    """The device's own kernel, called with the interpreter's lock let go."""
    operator = getattr(torch.ops.c10d, name).default
    here = getattr(torch._C.DispatchKey, _KEY)

    def stock(keyset: Any, *args: Any, **kwargs: Any) -> Any:
        return operator.redispatch(keyset.remove(here), *args, **kwargs)

    return stock


def _replacing(name: str, form: _Form, stock: Callable[..., Any], devices: frozenset[str]) -> Callable[..., Any]:
    def run(keyset: Any, *args: Any, **kwargs: Any) -> Any:
        now = current()
        tensors = args[: form.group]
        if inside.active or (not now.coverages and not now.hooks) or not _on(tensors, devices):
            return stock(keyset, *args, **kwargs)
        reduction = _name_of(args[form.group + 1])
        how, reason = "original", ""
        if floating(tensors, {}) and reduction not in _EXACT:
            if ALL_REDUCES.name not in now.families:
                how = "at_risk"
            else:
                reason = _reduced(form, args, reduction)
                how = "left" if reason else "replaced"
        if how == "replaced":
            count(how, form.name)
            waited = any(x is False for x in args[form.group + 2 :])  # async_op; left out where it is True
            work = _finished(form.pairs(args)[0][0], waited)
            out: Any = (args[0], work) if form.answers else work
        else:
            if how != "original":
                count(how, label(form.name, tensors, reason))
            out = stock(keyset, *args, **kwargs)
        if now.hooks:
            emit(f"c10d::{name}", args, kwargs, out, how)
        return out

    return run


def _watching(name: str, stock: Callable[..., Any], devices: frozenset[str]) -> Callable[..., Any]:
    def run(keyset: Any, *args: Any, **kwargs: Any) -> Any:
        out = stock(keyset, *args, **kwargs)
        at_risk = not inside.active and floating(args, kwargs) and _on(args, devices)
        if at_risk and not any(_name_of(x) in _EXACT for x in args):
            count("at_risk", label(name, args))
            emit(f"c10d::{name}", args, kwargs, out, "at_risk")
        return out

    return run


def _on(args: tuple[Any, ...], devices: frozenset[str]) -> bool:
    """Whether the tensors of a call, also within lists, lie on a device that is looked after."""
    for x in args:
        if isinstance(x, torch.Tensor):
            return x.device.type in devices
        if isinstance(x, (list, tuple)) and x:
            return _on(tuple(x), devices)
    return False


def _name_of(operation: Any) -> str:
    """The reduction's name, "SUM", of c10d's boxed ReduceOp; "" for anything else."""
    if not isinstance(operation, torch.ScriptObject) or not hasattr(operation, "op"):
        return ""
    return _names().get(int(operation.op()), "")


@functools.cache
def _names() -> dict[int, str]:
    from torch.distributed import ReduceOp

    members: dict[str, Any] = dict(ReduceOp.RedOpType.__members__)
    return {int(value): name for name, value in members.items()}


def _reduced(form: _Form, args: tuple[Any, ...], reduction: str) -> str:
    """Sum over the group, or the reason why it has to stay as it is: looked for before anything is written."""
    from torch.distributed import ProcessGroup
    from torch.distributed.distributed_c10d import _resolve_process_group

    from nondet.kernels.all_reduce.invariant import all_reduce
    from nondet.kernels.all_reduce.scatter import reduce_scatter

    if reduction != "SUM":
        return f"a reduction by {reduction or 'another name'}"
    before, inside.active = inside.active, True
    try:
        group = _resolve_process_group(ProcessGroup.unbox(args[form.group]).group_name)
        pairs = form.pairs(args)
        if form.answers and len(pairs) != 1:
            return "several tensors at once"
        reason = next((text for text in map(partial(_misfit, group.size()), pairs) if text), "")
        with torch.no_grad():
            for out, x in () if reason else pairs:
                if out is x:
                    all_reduce(x, group)
                else:
                    reduce_scatter(out, x if isinstance(x, torch.Tensor) else torch.stack(list(x)), group)
    finally:
        inside.active = before
    return reason


def _misfit(world: int, pair: tuple[torch.Tensor, Any]) -> str:
    """Why a pair can't be summed by ours; "" where it can."""
    from nondet.kernels.all_reduce.invariant import DTYPES

    out, x = pair
    parts = [x] if isinstance(x, torch.Tensor) else list(x)
    if any(t.layout != torch.strided for t in (out, *parts)):
        return "a sparse tensor"
    if any(t.dtype not in DTYPES or t.dtype != out.dtype for t in (out, *parts)):
        return f"no sum in a fixed order of {parts[0].dtype}"
    if any(t.device != out.device for t in parts):
        return "tensors on several devices"
    if isinstance(x, torch.Tensor):
        return "" if out is x or x.numel() == world * out.numel() else "sizes that do not fit"
    return "" if len(parts) == world and all(t.shape == out.shape for t in parts) else "shares of several sizes"


def _finished(x: torch.Tensor, waited: bool) -> Any:
    """A boxed Work of something that the current stream has been given already: whoever waits comes after it.

    Of a future, which is C++ through and through: a Work written in Python loses its Python half as soon as it is
    boxed, and what is left of it waits for ever.

    Args:
        waited: The caller waits at once, on the stream that computed; then there is nothing to come after.
    """
    c10d: Any = torch._C._distributed_c10d  # its stubs lack what makes a work of a future
    if waited or (x.is_cuda and torch.cuda.is_current_stream_capturing()):
        return c10d.Work.boxed(c10d.FakeWork())
    done: torch.futures.Future[torch.Tensor] = torch.futures.Future(devices=[x.device] if x.is_cuda else None)
    done.set_result(x)
    return c10d.Work.boxed(c10d._create_work_from_future(done))
