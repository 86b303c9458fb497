"""The functions that stand under aten's operators. Made once in a process, never changed: what is on they look up.

Each takes the dispatcher's key set and the operator's own arguments, and ends in a replacement or in the original.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch.autograd import forward_ad

from nondet.errors import UserError, one_line
from nondet.kernels.dispatch import compile as dispatch_compile
from nondet.kernels.dispatch.certified import proven
from nondet.kernels.dispatch.kernels import Kernels, Leave
from nondet.kernels.dispatch.numbers import accepting_numbers
from nondet.kernels.dispatch.operators import COMPOSED, EXEMPT
from nondet.kernels.dispatch.state import count, current, emit, floating, in_parts, inside, label

__all__ = ["certifying", "passing", "replacing", "watching"]

_PLAIN = (torch.Tensor, torch.nn.Parameter)


def replacing(
    name: str,
    family: str,
    kernels: Callable[[], Kernels],
    original: Any,
    replacement: Callable[..., Any],
    again: Callable[..., Any] | None = None,
) -> Callable[..., Any]:
    """Compute by `replacement` while `family` is on; else, or where it declines, run the original and count it.

    Args:
        again: A shorter way to what `replacement` gives, for plain tensors and without gradients; gives None where it
            has none.
    """
    composed = name in COMPOSED
    exempt = EXEMPT.get(name)
    told_by_parts = name == "linear"  # made of products, which say themselves what became of them
    qualified = f"aten::{name}"
    stock = original.call_boxed

    def run(keyset: Any, *args: Any, **kwargs: Any) -> Any:
        if inside.active:
            return stock(keyset, *args, **kwargs)
        now = current()
        if again is not None and family in now.families and not now.hooks and _plainly(args):
            out = again(*args, **kwargs)
            if out is not None:
                for coverage in now.coverages:
                    coverage.add("replaced", name)
                return out
        how = reason = ""
        ours: Exception | None = None
        empty, stands_for_others = _kinds(args)
        if empty or (exempt is not None and exempt(*args, **kwargs)):
            how = "original"
        elif composed and stands_for_others:
            return dispatch_compile.traced(name, original, keyset, args, kwargs)
        elif family not in now.families:
            how = "at_risk"
        elif composed and (reason := _differentiated(args)):
            how = "left"
        else:
            inside.active = True
            try:
                if torch.is_grad_enabled():
                    with torch.no_grad():  # a gradient, if any, is recorded by the caller, for the operator as a whole
                        out = replacement(kernels(), *args, **kwargs)
                else:
                    out = replacement(kernels(), *args, **kwargs)
            except (Leave, NotImplementedError) as error:  # the latter is a launcher's word for what it lacks
                how, reason = "left", str(error)
            except UserError:
                raise
            except (RuntimeError, ValueError, IndexError) as error:  # if the arguments are bad the original raises, too
                how, reason, ours = "left", f"{type(error).__name__} in our kernel: {_line(error)}", error
            else:
                for coverage in now.coverages:
                    coverage.add("replaced", name)
                inside.active = False
                if now.hooks:
                    emit(qualified, args, kwargs, out, "replaced")
                return out
            finally:
                inside.active = False
        out = in_parts(now, stock, keyset, *args, **kwargs) if composed else stock(keyset, *args, **kwargs)
        if ours is not None:
            _warn_of(qualified, ours)
        if how != "original":
            if (told_by_parts and ours is None) or not floating(args, kwargs, out):  # integers are exact
                how = "original"
            else:
                count(how, label(name, args, reason))
        if now.hooks:
            emit(qualified, args, kwargs, out, how)
        return out

    return run


def _line(error: Exception) -> str:
    return one_line(str(error), 200)


def _warn_of(qualified: str, error: Exception) -> None:
    """Once for each operator and error: stock took what our kernel failed at, so it is a fault of ours, or memory."""
    said = (qualified, type(error).__name__)
    if said not in _warned:
        _warned.add(said)
        warnings.warn(
            f"nondet: {qualified} was left to torch, since the batch-invariant kernel failed: "
            f"{type(error).__name__}: {_line(error)}",
            RuntimeWarning,
            stacklevel=3,
        )


_warned: set[tuple[str, str]] = set()


def _kinds(args: tuple[Any, ...]) -> tuple[bool, bool]:
    """Whether a tensor is empty: nothing to add up, torch's own shapes, constants and errors. And whether one stands
    for others: a compiler's tracing, or a quantized weight.
    """
    empty = stands_for_others = False
    for x in args:  # one loop, since this runs at every call
        if isinstance(x, torch.Tensor):
            empty = empty or not x.numel()
            stands_for_others = stands_for_others or type(x) not in _PLAIN
    return empty, stands_for_others


def _plainly(args: tuple[Any, ...]) -> bool:
    """Is nothing asked for but numbers: no gradient, no tensor that stands for others?"""
    if torch.is_grad_enabled() or forward_ad._current_level >= 0:
        return False
    return all(x is None or type(x) in _PLAIN for x in args)


def _differentiated(args: tuple[Any, ...]) -> str:
    """Why an operator made of others has to stay apart: the whole has no gradient, forward or backward.

    Attention then is torch's, and a norm is made of its replaced parts, which round in between: both may have other
    bits than without a gradient. So a trainer does not compute what a sampler did.
    """
    if forward_ad._current_level >= 0:
        which = "a forward gradient"
    elif torch.is_grad_enabled() and any(isinstance(x, torch.Tensor) and x.requires_grad for x in args):
        which = "a gradient"
    else:
        return ""
    return f"{which} is asked for, so its bits may not be those without one"


def watching(qualified: str, original: Any, matters: Callable[..., bool | str] | None = None) -> Callable[..., Any]:
    """Run the original, and count it as at risk where it computes floating point and `matters(*args, **kwargs)`.

    Args:
        matters: Whether it matters, or why it does; None: always.
    """
    name = qualified.removeprefix("aten::")
    stock = accepting_numbers(qualified, original)

    def run(keyset: Any, *args: Any, **kwargs: Any) -> Any:
        out = stock(keyset, *args, **kwargs)
        if inside.active:
            return out
        how = "original"
        why = matters is None or matters(*args, **kwargs)
        if why and floating(args, kwargs, out):
            how = "at_risk"
            count(how, label(name, args, "" if why is True else why))
        if current().hooks:
            emit(qualified, args, kwargs, out, how)
        return out

    return run


def certifying(name: str, original: Any) -> Callable[..., Any]:
    """Run the original, and say whether it is proven to give each row its own bits."""
    qualified = f"aten::{name}"
    stock = original.call_boxed

    def run(keyset: Any, *args: Any, **kwargs: Any) -> Any:
        if inside.active:
            return stock(keyset, *args, **kwargs)
        how = "original"
        if floating(args, kwargs, None):
            inside.active = True
            try:
                with torch.no_grad():
                    holds, reason = proven(name, args, kwargs)
            finally:
                inside.active = False
            how = "certified" if holds else "at_risk"
            count(how, label(name, args, reason))
        out = stock(keyset, *args, **kwargs)
        if current().hooks:
            emit(qualified, args, kwargs, out, how)
        return out

    return run


def passing(qualified: str, original: Any) -> Callable[..., Any]:
    """Run the original, which is exact, and tell the hooks."""
    stock = accepting_numbers(qualified, original)

    def run(keyset: Any, *args: Any, **kwargs: Any) -> Any:
        out = stock(keyset, *args, **kwargs)
        if not inside.active:
            emit(qualified, args, kwargs, out, "original")
        return out

    return run
