"""What every implementation of an operator owes whoever calls it: the result's dtype and its whole shape.

A probe compares parts of results. A kernel that gives 1,000 rows for 1,200, or float32 for bfloat16, would have equal
bits in every part that is looked at; so whatever a probe calls is called through `checked`.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch

from nondet.errors import WrongResultError

__all__ = ["checked", "expected_shape", "require_arguments"]

Operator = Callable[..., Any]


def _linear(x: torch.Tensor, weight: torch.Tensor, *_: Any) -> tuple[int, ...]:
    return (*x.shape[:-1], weight.shape[0])


def _matmul(a: torch.Tensor, b: torch.Tensor, *_: Any) -> tuple[int, ...]:
    return (*a.shape[:-1], b.shape[-1])


def _grouped(x: torch.Tensor, weight: torch.Tensor, *_: Any) -> tuple[int, ...]:
    return (x.shape[0], weight.shape[2])


def _same(x: torch.Tensor, *_: Any) -> tuple[int, ...]:
    return tuple(x.shape)


def _reduced(x: torch.Tensor, *_: Any) -> tuple[int, ...]:
    return tuple(x.shape[:-1])


# By the signatures in nondet/kernels/reference.py. What is not listed is not checked.
_SHAPES: dict[str, Callable[..., tuple[int, ...]]] = {
    "linear": _linear,
    "matmul": _matmul,
    "split_k": _matmul,
    "grouped_matmul": _grouped,
    "attention": _same,
    "rms_norm": _same,
    "softmax": _same,
    "log_softmax": _same,
    "cumsum": _same,
    "sum": _reduced,
    "mean": _reduced,
    "logsumexp": _reduced,
    "index_add": _same,
    "scatter_add": _same,
}


def expected_shape(operator: str, arguments: tuple[Any, ...]) -> tuple[int, ...] | None:
    """The shape of an operator's result for these arguments; None where it is not written down here."""
    shape = _SHAPES.get(operator)
    return None if shape is None else shape(*arguments)


def require_arguments(call: Operator, *arguments: Any, **keywords: Any) -> None:
    """Refuse a user's function that leaves out an argument which the operator may be given.

    Raises:
        NotImplementedError: it can't be called so. The case is then skipped, and is in no figure.
    """
    try:
        inspect.signature(call).bind(*arguments, **keywords)
    except ValueError:  # a builtin does not tell its arguments
        return
    except TypeError as error:
        raise NotImplementedError(f"the case is not for it: {error}") from None


def checked(operator: str, call: Operator) -> Operator:
    """`call`, with every result held to the operator's shape and to the dtype of the first argument.

    Attributes and signature of `call` stay visible. No data is read: it costs microseconds a call.
    """

    @functools.wraps(call)
    def run(*arguments: Any, **keywords: Any) -> Any:
        out = call(*arguments, **keywords)
        shape = expected_shape(operator, arguments)
        if shape is None:
            return out
        if not isinstance(out, torch.Tensor):
            raise WrongResultError(f"{operator} gave a {type(out).__name__}, not a tensor")
        if tuple(out.shape) != shape:
            raise WrongResultError(f"{operator} gave the shape {tuple(out.shape)}, not {shape}")
        if out.dtype != arguments[0].dtype:
            raise WrongResultError(f"{operator} gave {out.dtype} for {arguments[0].dtype}")
        if out.device != arguments[0].device:
            raise WrongResultError(f"{operator} gave a result on {out.device} for inputs on {arguments[0].device}")
        return out

    return run
