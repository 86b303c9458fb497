"""What is on right now: one immutable snapshot, replaced as a whole, that every registered function reads per call.

A call reads `now` once and goes by what it read, so a block that another thread enters or leaves meanwhile neither
tears a decision apart nor takes anything away that the call still uses.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from nondet.kernels.dispatch.coverage import Coverage

__all__ = [
    "Active",
    "Call",
    "count",
    "current",
    "emit",
    "floating",
    "guarded",
    "in_parts",
    "inside",
    "label",
    "looked_at",
    "replace_now",
    "weights_first",
]


@dataclass(frozen=True, slots=True)
class Call:
    """One call that reached a function of ours, see `nondet.kernels.dispatch.hooks.on_call`.

    Attributes:
        name: "aten::mm", "aten::sum.dim_IntList", ... with the namespace and the overload; "transformers::NAME" for a
            stand-in of transformers' own functions.
        args: As the operator got them. Not copies: an in-place operator has written them by now.
        kwargs: As the operator got them.
        out: What it gave: a tensor, a tuple of them, or another value.
        how: "replaced", "left", "certified", "at_risk", or "original" for what needs no count: exact operators,
            integers, and a product's own parts.
    """

    name: str
    args: tuple[Any, ...] = field(repr=False)
    kwargs: dict[str, Any] = field(repr=False)
    out: Any = field(repr=False)
    how: str = ""


@dataclass(frozen=True, slots=True)
class Active:
    """What the entered blocks ask for together, and who listens."""

    families: frozenset[str] = frozenset()
    coverages: tuple[Coverage, ...] = ()
    hooks: tuple[Callable[[Call], None], ...] = ()


class _Inside(threading.local):
    """Whether this thread is inside one of our kernels: its own torch calls go straight to the originals.

    And, inside an operator that torch composes of others, what was on when that one began: its parts go by that.
    """

    active = False
    began: Active | None = None


class _WeightsFirst(threading.local):
    """Whether in this thread a batched product with vectors has a weight for each of them, as transformers' experts."""

    active = False


inside = _Inside()
weights_first = _WeightsFirst()
_now = Active()


def current() -> Active:
    """The snapshot. Read it once a call."""
    return inside.began or _now


def in_parts(active: Active, composed: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """An operator that torch composes of others, each of which goes by what was on for the whole."""
    before, inside.began = inside.began, active
    try:
        return composed(*args, **kwargs)
    finally:
        inside.began = before


def looked_at() -> bool:
    """Whether hooks or something of torch's want to see, or change, the operators that a module is made of.

    A mode of this thread, autocast on a CPU (it chooses their dtypes), torch.func's transforms, a trace of torch.jit.
    """
    return bool(
        _now.hooks
        or torch._C._len_torch_function_stack()
        or torch._C._len_torch_dispatch_stack()
        or torch.is_autocast_enabled("cpu")
        or torch._C._functorch.peek_interpreter_stack() is not None
        or torch._C._get_tracing_state() is not None
    )


def replace_now(active: Active) -> None:
    """The one place that changes what is on."""
    global _now
    _now = active


def count(kind: str, what: str, times: int = 1) -> None:
    """Add one call, or several, to the coverage of every entered block, from any thread."""
    for coverage in current().coverages:
        coverage.add(kind, what, times)


def emit(name: str, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any, how: str) -> None:
    """Tell the hooks of a call. A hook's own torch calls go to the originals, and are not told."""
    hooks = _now.hooks
    if not hooks:
        return
    before, inside.active = inside.active, True
    try:
        for hook in hooks:
            hook(Call(name, args, kwargs, out, how))
    finally:
        inside.active = before


def guarded(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function` with its own torch calls going straight to the originals."""

    def run(*args: Any, **kwargs: Any) -> Any:
        before, inside.active = inside.active, True
        try:
            return function(*args, **kwargs)
        finally:
            inside.active = before

    return run


def floating(args: tuple[Any, ...], kwargs: dict[str, Any], out: Any = None) -> bool:
    """Whether a tensor of a call, also within lists, holds floating-point numbers, complex or quantized ones."""
    return any(_is_floating(x) for x in args) or any(_is_floating(x) for x in kwargs.values()) or _is_floating(out)


def _is_floating(x: Any) -> bool:
    if isinstance(x, torch.Tensor):
        return x.dtype.is_floating_point or x.dtype.is_complex or x.is_quantized
    return isinstance(x, (list, tuple)) and any(_is_floating(part) for part in x)


def label(name: str, args: tuple[Any, ...], reason: object = "") -> str:
    """As "mm float64" or "scaled_dot_product_attention bfloat16: dropout"."""
    tensors = (y for x in args for y in (x if isinstance(x, (list, tuple)) else (x,)) if isinstance(y, torch.Tensor))
    dtype = next((str(x.dtype).removeprefix("torch.") for x in tensors), "")
    return f"{name} {dtype}: {reason}" if str(reason) else f"{name} {dtype}"
