"""Calling an original kernel whose tensor arguments may be plain numbers: `x * 0.5` reaches torch's kernel as a tensor.

Such a tensor is marked: it takes no part in the choice of the result's dtype. On the way into Python torch makes a
number of it again, and on the way back it takes none for a tensor. So the marked tensor is made anew here, by the one
way that Python has: it is what autograd saves of a product with a number, before it calls the kernel. (The kernel is
ours again, and has nothing to compute for once.)
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any

import torch

from nondet.kernels.dispatch.state import count, inside

__all__ = ["accepting_numbers"]

_NUMBERS = frozenset({bool, int, float, complex})


class _Making(threading.local):
    """Whether this thread is after the marked tensor alone."""

    active = False


_making = _Making()


def accepting_numbers(qualified: str, original: Any) -> Callable[..., Any]:
    """original.call_boxed for "aten::mul.Tensor", or any operator, also with numbers where its schema has tensors."""
    call: Callable[..., Any] = original.call_boxed
    places = _tensor_places(qualified)
    if len(places) < 2:  # of one tensor there is no number: nothing would say on which device
        return call

    def stock(keyset: Any, *args: Any, **kwargs: Any) -> Any:
        for value in args:
            if value.__class__ in _NUMBERS:
                if _making.active:
                    return args[0].detach().clone()
                return call(keyset, *_with_tensors(qualified, args, places), **kwargs)
        return call(keyset, *args, **kwargs)

    return stock


def _tensor_places(qualified: str) -> frozenset[int]:
    namespace, _, name = qualified.partition("::")
    packet, _, overload = name.partition(".")
    try:
        operator = getattr(getattr(getattr(torch.ops, namespace), packet), overload or "default")
    except (AttributeError, RuntimeError):
        return frozenset()
    arguments = operator._schema.arguments
    return frozenset(i for i, a in enumerate(arguments) if not a.kwarg_only and str(a.type) == "Tensor")


def _with_tensors(qualified: str, args: tuple[Any, ...], places: frozenset[int]) -> tuple[Any, ...]:
    marked = list(args)
    for place in places:
        if place < len(args) and args[place].__class__ in _NUMBERS:
            marked[place] = _marked(qualified, args[place], args)
    return tuple(marked)


def _marked(qualified: str, number: Any, args: tuple[Any, ...]) -> torch.Tensor:
    """The marked tensor of a number; where this torch gives none, a plain one of the dtype that the call ends in.

    The plain one is what torch makes of the number, except that a call with nothing but scalars may round it sooner:
    then, and where nobody has looked, the call is at risk.
    """
    marked = _made(number.__class__.__name__, repr(number))
    if marked is not None:
        return marked
    first = next(x for x in args if isinstance(x, torch.Tensor))
    count("at_risk", f"{qualified.removeprefix('aten::')} with a number: this torch does not say how it takes one")
    ends_in = torch.result_type(first, number)
    if (
        first.dim() and ends_in == first.dtype and ends_in.is_floating_point
    ):  # takes no part in the choice of the dtype, and is not rounded to it
        return torch.tensor(number, dtype=torch.float64)
    return torch.tensor(number, dtype=ends_in)


@functools.lru_cache(maxsize=4096)
def _made(kind: str, text: str) -> torch.Tensor | None:
    value = text == "True" if kind == "bool" else {"int": int, "float": float, "complex": complex}[kind](text)
    before, inside.active, _making.active = inside.active, True, True
    try:
        with torch.inference_mode(False), torch.enable_grad():
            one = torch.zeros((), dtype=torch.complex64 if kind == "complex" else torch.float32).requires_grad_()
            product: Any = one * value
            marked = _saved(product.grad_fn)
    finally:
        inside.active, _making.active = before, False
    return marked if isinstance(marked, torch.Tensor) else None


def _saved(node: Any) -> Any:
    """What autograd kept of the other factor, a name of its own that nobody promises (torch 2.13 has it)."""
    return getattr(node, "_saved_other", None)
