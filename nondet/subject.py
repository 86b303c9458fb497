"""A function and the inputs that somebody makes for it, as variants to measure: the same requests in other batches.

A divergence means something only if the requests were the same. So inputs are held to that before results are.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from nondet.core.measure import Fingerprint, fingerprint, written_to
from nondet.core.records import Value
from nondet.errors import UserError, WrongResultError

__all__ = ["BadInputsError", "Inputs", "Select", "Subject", "checked_values"]

Inputs = Any
Select = Callable[[Any, Value], torch.Tensor]


class BadInputsError(UserError):
    """make_inputs gave other requests, so that what `fn` gives may differ for that alone."""


def checked_values(over: Sequence[Value], *, sizes: bool) -> list[Value]:
    """What varies, as a list.

    Args:
        sizes: The values are batch sizes.

    Raises:
        UserError: a value that is none, or fewer than two (sizes: two that differ), which compare nothing.
    """
    values = list(over)
    for value in values:
        if isinstance(value, bool) or not isinstance(value, int | str):
            raise UserError(f"over holds {value!r}", "Give whole numbers or names.")
        if sizes and (isinstance(value, str) or value < 1):
            raise UserError(f"over holds {value!r}, which is no batch size", "Give sizes from 1, or a select=.")
    if len(values) < 2:
        raise UserError(f"over={values!r} compares nothing", "Give two or more values.")
    if sizes and len(set(values)) < 2:
        raise UserError(f"over={values!r} holds one size", "Give two or more.")
    return values


class Subject:
    """A function with its inputs, as variants to measure.

    Attributes:
        dtype: Of the compared results; "unknown" until there is one.
        shape: The largest batch, where values are sizes, and the axes of what is compared.
        device: Type of the device that the inputs are on.
    """

    def __init__(
        self, fn: Callable[..., Any], make: Callable[[Any], Inputs], values: Sequence[Value], select: Select | None
    ) -> None:
        self._fn, self._make, self._select = fn, make, select
        self.values = values
        self.kept = min(value for value in values if isinstance(value, int)) if select is None else 0
        self._prints: dict[Value, Fingerprint] = {}
        self._shapes: dict[str, tuple[Value, torch.Size]] = {}
        self._leading: dict[tuple[str, bool], Fingerprint] = {}
        self._first: tuple[torch.Size, torch.dtype] | None = None
        self._expected: torch.Size | None = None
        self.dtype, self.shape = "unknown", dict[str, int]()
        self.device = next((tensor.device.type for _, tensor in _tensors(self.inputs(values[0]))), "cpu")

    def inputs(self, value: Value) -> Inputs:
        """The inputs of a value, held to those of the values before it.

        Raises:
            UserError: they are other requests.
        """
        inputs = self._make(value)
        prints = fingerprint(inputs)
        before = self._prints.setdefault(value, prints)
        changed = sorted(name for name in before if name not in prints or _parted(before[name], prints[name]))
        if changed:
            raise BadInputsError(
                f"make_inputs({value!r}) gave other numbers when it was called again ({_argument(changed[0])})",
                "Draw them from a generator that is seeded in it.",
            )
        if self._select is None:
            for name, tensor in _tensors(inputs):
                self._same_requests(name, tensor, int(value))
        return inputs

    def _same_requests(self, name: str, tensor: torch.Tensor, value: int) -> None:
        first, shape = self._shapes.setdefault(name, (value, tensor.shape))
        batched = shape[:1] == (first,) and tensor.shape[:1] == (value,)
        if not batched and shape != tensor.shape:  # ragged, packed or padded: nothing is known of its layout
            return
        if (name, True) not in self._leading:  # the first tensor of this name, whichever of the two it will be
            self._leading[name, True], self._leading[name, False] = (
                fingerprint(tensor[: self.kept]),
                fingerprint(tensor),
            )
        prints = fingerprint(tensor[: self.kept] if batched else tensor)
        if _parted(self._leading[name, batched][""], prints[""]):
            part = f"its first {self.kept} rows" if batched else "it"
            raise BadInputsError(
                f"{_argument(name)} of make_inputs({value}) is not make_inputs({first})'s: {part} should be equal",
                "Put the same requests first in every batch, or say with select= what is compared.",
            )

    def asked_of(self, oracle: Callable[..., Any]) -> torch.Tensor:
        """What the oracle gives for the first value; results are held to its shape.

        Raises:
            UserError: it is not float64.
        """
        value = self.values[0]
        reference = self._kept(_called(oracle, self.inputs(value)), value)
        if reference.dtype != torch.float64:
            raise BadInputsError(f"the oracle gave {reference.dtype}", "Compute it in float64.")
        self._expected = reference.shape
        return reference

    def compute(self, value: Value) -> torch.Tensor:
        """What is compared of the result for one value.

        Raises:
            WrongResultError: it is empty, of another shape or dtype than before, or an input was written to.
        """
        inputs = self.inputs(value)
        result = self._kept(_called(self._fn, inputs), value)
        changed = written_to(self._prints[value], inputs)
        if changed:
            raise WrongResultError(f"it wrote to its input: {', '.join(_argument(name) for name in changed)}")
        if self._first is None:
            self._first = (result.shape, result.dtype)
            self.dtype = str(result.dtype).removeprefix("torch.")
            sizes = [v for v in self.values if isinstance(v, int)]
            largest = {"M": max(sizes)} if self._select is None else {}
            self.shape = largest | {f"axis {i}": size for i, size in enumerate(result.shape)}
        shape, dtype = self._first
        if (result.shape, result.dtype) != (shape, dtype):
            raise WrongResultError(
                f"it gave {tuple(result.shape)} {result.dtype} at {value!r}, and {tuple(shape)} {dtype} at "
                f"{self.values[0]!r}"
            )
        if self._expected is not None and result.shape != self._expected:
            raise WrongResultError(f"it gave the shape {tuple(result.shape)}, not {tuple(self._expected)}")
        return result

    def _kept(self, result: Any, value: Value) -> torch.Tensor:
        if self._select is not None:
            result = self._select(result, value)
        if isinstance(result, tuple | list) and len(result) == 1:
            result = result[0]
        if not isinstance(result, torch.Tensor):
            raise BadInputsError(
                f"the result is a {type(result).__name__}, not a tensor", "Say with select= what of it is compared."
            )
        if not result.numel():
            raise WrongResultError("it gave nothing: an empty result compares nothing")
        if self._select is not None:
            return result
        size = int(value)
        if not result.dim() or len(result) % size:
            raise WrongResultError(
                f"a result of the shape {tuple(result.shape)} has no row for each of {size} requests"
            )
        return result[: self.kept * (len(result) // size)]


def _called(fn: Callable[..., Any], inputs: Inputs) -> Any:
    if isinstance(inputs, Mapping):
        return fn(**inputs)
    return fn(*inputs) if isinstance(inputs, tuple | list) else fn(inputs)


def _tensors(inputs: Inputs, name: str = "") -> list[tuple[str, torch.Tensor]]:
    """Every tensor of nested inputs, by the names that `fingerprint` gives them."""
    if isinstance(inputs, torch.Tensor):
        return [(name, inputs)]
    parts: list[tuple[str, Any]] = []
    if isinstance(inputs, Mapping):
        parts = [(str(key), value) for key, value in inputs.items()]
    elif isinstance(inputs, tuple | list):
        parts = [(str(place), value) for place, value in enumerate(inputs)]
    return [pair for part, value in parts for pair in _tensors(value, f"{name}.{part}" if name else part)]


def _parted(a: tuple[torch.Tensor, ...], b: tuple[torch.Tensor, ...]) -> bool:
    return len(a) != len(b) or any(x.shape != y.shape or not torch.equal(x, y) for x, y in zip(a, b, strict=True))


def _argument(name: str) -> str:
    return f"argument {name}" if name else "the tensor"
