"""The state of `batch_invariant()`: one immutable snapshot, counts of what happened, and the kernels of a device.

A call reads `now` once and uses that snapshot, so a block that another thread enters or leaves meanwhile can't make it
inconsistent.
"""

from __future__ import annotations

import functools
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from nondet.core.registry import declared, load_object

# attribute of `Coverage` -> its name in reports and run files
KINDS: dict[str, str] = {
    "replaced": "replaced",
    "certified": "certified stock",
    "left": "left stock",
    "at_risk": "at risk",
}

# Operators that may add up over the batch in a backward pass, and the words for such a sum. Other gradients belong to
# one row or request, as the forward does.
_SUMMING = {
    "mm", "mm.out", "addmm", "bmm", "_grouped_mm", "sum.dim_IntList", "sum.IntList_out", "index_add_",
    "_index_put_impl_", "rms_norm_backward", "native_layer_norm_backward", "embedding_dense_backward",
}  # fmt: skip
_SUMMED = "; what gradients sum over the batch repeats, and follows micro-batches"

_lock = threading.Lock()  # of all counts: `counter[what] += 1` is three steps, between which threads may change


@dataclass
class Coverage:
    """Calls while a context was entered, by operator."""

    # computed by an invariant kernel, or by a library's own that is proven here to have the class's bits
    replaced: Counter[str] = field(default_factory=Counter)
    # stock, because stock was proven on this machine to give each row its solo bits, at this shape and dtype
    # (`nondet.kernels.dispatch.functions`)
    certified: Counter[str] = field(default_factory=Counter)
    # of a family that is on, but left to the stock kernel, with the reason where there is one
    left: Counter[str] = field(default_factory=Counter)
    # stock, because no invariant kernel exists or the operator's family is off. Or by any kernel, where the call itself
    # depends on the batch, for the reason given.
    at_risk: Counter[str] = field(default_factory=Counter)
    # of `replaced`, calls in a backward pass that may be a sum over the batch, as a weight's gradient is
    summed: Counter[str] = field(default_factory=Counter)

    def add(self, kind: str, what: str, times: int = 1) -> None:
        """Count one call, or several; safe from any thread."""
        counter: Counter[str] = getattr(self, kind)
        with _lock:
            counter[what] += times
            if kind == "replaced" and what in _SUMMING and torch._C._current_graph_task_id() != -1:
                self.summed[what] += times

    def lines(self) -> list[str]:
        """One line for each operator, the most frequent first; and one more if all of them were replaced."""
        with _lock:
            lines = [
                f"{label}: {name} ({n} calls{_SUMMED * (kind == 'replaced' and name in self.summed)})"
                for kind, label in KINDS.items()
                for name, n in getattr(self, kind).most_common()
            ]
        clean = self.replaced and not self.left and not self.at_risk
        return [*lines, "nothing was left stock, and nothing is at risk"] if clean else lines

    def counts(self) -> Counter[str]:
        """All of it in one counter, for a run file: "replaced: mm" -> calls."""
        with _lock:
            return Counter(
                {f"{label}: {name}": n for kind, label in KINDS.items() for name, n in getattr(self, kind).items()}
            )


WHOLE, _FIRST = "over the whole tensor, the batch's axis included", "over the first axis, which may be the batch's"
MOVED = "over places that padding in front moves"


def over_batch(x: torch.Tensor, dim: Sequence[int] | int | None = None) -> str:
    """Words for a reduction over axes `dim` (none: all) that may mix requests, whatever kernel computes it; "" for none
    and in a backward pass.
    """
    if x.dim() < 2 or isinstance(x, torch.nn.Parameter) or torch._C._current_graph_task_id() != -1:
        return ""
    axes = {d % x.dim() for d in ((dim,) if isinstance(dim, int) else dim or range(x.dim()))}
    if len(axes) == x.dim():
        return WHOLE if x.numel() > x.shape[-1] else ""
    return _FIRST if 0 in axes and x.shape[0] > 1 else ""


def padded_in_front(x: torch.Tensor, axis: int) -> bool:
    """Whether some entries of x's first axis, but not all, begin along `axis` with padding.

    Padding is zeros, or one repeated number: chunked scans of state-space layers hide a short request's first positions
    so. The sum then begins elsewhere in its order than solo. Zeros in between are a choice of experts, not padding. On
    a GPU True without reading, which would wait for the device.
    """
    if x.dim() < 3 or axis == 0 or x.shape[0] < 2 or x.shape[axis] < 3 or not x.numel():
        return False
    if x.is_cuda:
        return True
    first, second = x.select(axis, 0), x.select(axis, 1)
    alike = ((first == 0) | (first == second)).reshape(*x.shape[:axis], -1).all(-1)
    if not (alike.any(0) & ~alike.all(0)).any():
        return False
    there = (x != 0).reshape(*x.shape[: axis + 1], -1).any(-1)
    starts = there[..., 0] + (there[..., 1:] & ~there[..., :-1]).sum(-1)
    return bool((alike & there.any(-1)).any() and (starts <= 1).all())


@dataclass(frozen=True, slots=True)
class Active:
    """What the entered blocks request together."""

    families: frozenset[str] = frozenset()
    coverages: tuple[Coverage, ...] = ()
    training: bool = False
    # what was decided for a call, by all of it that decides that: see `functions.replacing` and `functions.proven`
    decisions: dict[tuple[object, ...], Any] = field(default_factory=dict, compare=False, repr=False)


class _Inside(threading.local):
    """Where this thread is.

    Attributes:
        active: Inside one of our kernels.
        began: The snapshot that a composed operator's parts use.
        weights_first: In transformers' experts, where a batched product with vectors has a weight for each vector.
    """

    active = False
    began: Active | None = None
    weights_first = False


inside = _Inside()
_now = Active()


def current() -> Active:
    """The snapshot. Read it once per call."""
    return inside.began or _now


def in_parts(active: Active, composed: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """An operator that torch composes of others, whose parts all use the snapshot of the whole."""
    before, inside.began = inside.began, active
    try:
        return composed(*args, **kwargs)
    finally:
        inside.began = before


def replace_now(active: Active) -> None:
    """The only function that changes what is on."""
    global _now
    _now = active


def count(kind: str, what: str, times: int = 1) -> None:
    """Add one call, or several, to the coverage of every entered block, from any thread."""
    for coverage in current().coverages:
        coverage.add(kind, what, times)


def guarded(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function` whose own torch calls go to the originals."""

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


def operator_of(name: str, namespace: str = "aten") -> Any:
    """torch's operator called "add.Tensor", or "mm"; None where torch has none."""
    packet, _, overload = name.partition(".")
    try:
        return getattr(getattr(getattr(torch.ops, namespace), packet), overload or "default")
    except (AttributeError, RuntimeError):
        return None


def label(name: str, args: tuple[Any, ...], reason: object = "") -> str:
    """As "mm float64" or "scaled_dot_product_attention bfloat16: dropout"."""
    tensors = (y for x in args for y in (x if isinstance(x, (list, tuple)) else (x,)) if isinstance(y, torch.Tensor))
    dtype = next((str(x.dtype).removeprefix("torch.") for x in tensors), "")
    return f"{name} {dtype}: {reason}" if str(reason) else f"{name} {dtype}"


DTYPES = (torch.float16, torch.bfloat16, torch.float32)


class Leave(Exception):  # noqa: N818 - a decision, not an error
    """This call is left to the original kernel; the message is the reason, "" where the dtype is the reason."""


class Kernels:
    """The batch-invariant kernels of one device type, by the names of declared operators and of their entries.

    Each is imported at its first use. AttributeError: no declaration has the name; `Leave`: no such kernel here.
    """

    def __init__(self, device: str) -> None:
        self.device = device
        self._targets: dict[str, str | None] = {}
        for operator in declared().values():
            chosen = operator.invariant_on(device)
            self._targets[operator.name] = chosen.target(device) if chosen else None
            entries = chosen.entries if chosen else {}
            self._targets |= {name: targets.get(device) for name, targets in entries.items()}

    def __getattr__(self, name: str) -> Any:
        if name not in self._targets:
            raise AttributeError(f"no declared operator or entry is called {name!r}")
        target = self._targets[name]
        if target is None:
            raise Leave(f"no {name} on {self.device}")
        self.__dict__[name] = load_object(target)
        return self.__dict__[name]


@functools.cache
def kernels_for(device: str) -> Kernels:
    """The kernels of "cpu" or "cuda"."""
    return Kernels(device)


def require(*tensors: torch.Tensor) -> None:
    """Raise `Leave` unless the tensors have one floating dtype that the kernels support."""
    dtype = tensors[0].dtype
    if dtype not in DTYPES:
        raise Leave
    for x in tensors[1:]:
        if x.dtype != dtype:
            raise Leave
