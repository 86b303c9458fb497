"""torch.distributed's reductions under `batch_invariant()`: the family "all-reduce".

Registered under c10d's own operators, which every form ends in: `torch.distributed.all_reduce`, the functional
collectives (_c10d_functional, so DTensor too, and what torch.compile makes of them), and a ProcessGroup's own method.
So a model under tensor parallelism is reached unmodified, for whatever process group it uses. Sums of floating point
are replaced (`nondet.kernels.all_reduce.invariant`); maxima, minima and integers are exact in any order, and run as
they are; other reductions are counted as left or at risk. All ranks enter and leave their blocks at the same calls.

They are registered at the key BackendSelect, above the device's own, and hand over by a redispatch, which lets go of
the interpreter's lock; the other way to reach a kernel, `call_boxed`, holds it. A library's own threads hold a queue's
lock while they free the tensors of what has ended, for which they need the interpreter's: whoever enqueues with the
interpreter's lock held waits for them for ever, now and then (seen with gloo).
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch

from nondet.kernels.all_reduce.declaration import ALL_REDUCES
from nondet.kernels.dispatch.state import count, current, emit, floating, inside, label

__all__ = ["functions"]

# Reductions without a replacement: their order is the library's. Gathers and broadcasts copy.
_AT_RISK = (
    "_reduce_scatter_base_",
    "allreduce_coalesced_",
    "reduce_",
    "reduce_scatter_",
    "reduce_scatter_tensor_coalesced_",
)
_KEY = "BackendSelect"
_EXACT = ("MAX", "MIN", "BAND", "BOR", "BXOR")


def functions(devices: tuple[str, ...]) -> dict[tuple[str, str], Callable[..., Any]]:
    """(operator, dispatch key) -> function; empty where torch was built without distributed."""
    if not torch.distributed.is_available():
        return {}
    types = frozenset(device.lower() for device in devices)
    made = {("c10d::allreduce_", _KEY): _replacing(_stock("allreduce_"), types)}
    for name in _AT_RISK:
        if hasattr(torch.ops.c10d, name):  # not each is in every torch
            made[f"c10d::{name}", _KEY] = _watching(name, _stock(name), types)
    return made


def _stock(name: str) -> Callable[..., Any]:
    """The device's own kernel, called with the interpreter's lock let go."""
    operator = getattr(torch.ops.c10d, name).default
    here = getattr(torch._C.DispatchKey, _KEY)

    def stock(keyset: Any, *args: Any, **kwargs: Any) -> Any:
        return operator.redispatch(keyset.remove(here), *args, **kwargs)

    return stock


def _replacing(stock: Callable[..., Any], devices: frozenset[str]) -> Callable[..., Any]:
    def run(keyset: Any, tensors: list[torch.Tensor], group: Any, operation: Any, *args: Any, **kwargs: Any) -> Any:
        now = current()
        idle = inside.active or (not now.coverages and not now.hooks)
        if idle or not _on((tensors,), devices):
            return stock(keyset, tensors, group, operation, *args, **kwargs)
        reduction = _name_of(operation)
        how, reason = "original", ""
        if floating((tensors,), {}) and reduction not in _EXACT:
            if ALL_REDUCES.name not in now.families:
                how = "at_risk"
            else:
                reason = _reduced(tensors, group, reduction)
                how = "left" if reason else "replaced"
        if how == "replaced":
            count(how, "all_reduce")
            out: Any = (tensors, _finished(tensors[0]))
        else:
            if how != "original":
                count(how, label("all_reduce", (tensors,), reason))
            out = stock(keyset, tensors, group, operation, *args, **kwargs)
        if now.hooks:
            emit("c10d::allreduce_", (tensors, group, operation, *args), kwargs, out, how)
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
    from torch.distributed import ReduceOp

    if not isinstance(operation, torch.ScriptObject) or not hasattr(operation, "op"):
        return ""
    kind = operation.op()
    members: dict[str, Any] = dict(ReduceOp.RedOpType.__members__)
    return next((name for name, value in members.items() if int(value) == int(kind)), "")


def _reduced(tensors: list[torch.Tensor], boxed: Any, reduction: str) -> str:
    """Sum the one tensor over the group, in place; or the reason why it has to stay as it is."""
    from torch.distributed import ProcessGroup
    from torch.distributed.distributed_c10d import _resolve_process_group

    from nondet.kernels.all_reduce.invariant import all_reduce

    if reduction != "SUM":
        return f"a reduction by {reduction or 'another name'}"
    if len(tensors) != 1 or tensors[0].layout != torch.strided:
        return "several tensors at once, or a sparse one"
    before, inside.active = inside.active, True
    try:
        group = _resolve_process_group(ProcessGroup.unbox(boxed).group_name)
        with torch.no_grad():
            all_reduce(tensors[0], group)
    except NotImplementedError as reason:
        return str(reason)
    finally:
        inside.active = before
    return ""


def _finished(x: torch.Tensor) -> Any:
    """A boxed Work of something that the current stream has been given already."""
    from torch._C._distributed_c10d import FakeWork, Work

    if not x.is_cuda or torch.cuda.is_current_stream_capturing():
        return Work.boxed(FakeWork())

    class Queued(Work):
        """Waiting makes the stream that waits come after the one that computed."""

        def __init__(self) -> None:
            super().__init__()
            self.event = torch.cuda.Event()
            self.event.record()

        def wait(self, timeout: timedelta = timedelta(0)) -> bool:
            self.event.wait()
            return True

    return Work.boxed(Queued())
