"""What the fine pass keeps of one step: the calls in one region of the model, with their tensors, in the order of time.

A region is one layer, or what comes before the first ("embedding") or after the last ("head"). A call is a function of
torch as the model's Python calls it (`linear`, `scaled_dot_product_attention`, `Tensor.mul`), an update of the paged
cache, one call of transformers' attention function, or a module as a whole.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

__all__ = ["Event", "EventKey", "Sizes", "Slot", "StepRecord", "tensors_in"]


class EventKey(NamedTuple):
    """Who called what, for which time in this call of the module."""

    module: str
    call: str
    occurrence: int


class Sizes(NamedTuple):
    """What a step's tensors can be as long as.

    Attributes:
        tokens: Rows of the step.
        keys: Keys that the region's attention reads, of everybody; 0 where the region has none.
        predicted: Rows of the logits.
    """

    tokens: int
    keys: int
    predicted: int


@dataclass
class Slot:
    """One tensor of a call.

    Attributes:
        path: Where it stands among the arguments: "0", "attn_mask", "1.0"; "out" and "out.1" for results.
        weight: Whether it is a parameter of the model or a view of one: equal in both arms, as the weights are.
        value: A copy of it as it was at the call (inputs) or after it (results); None in a step whose shapes alone are
            wanted, for weights, and past the memory limit.
    """

    path: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    weight: bool
    value: torch.Tensor | None = None


@dataclass
class Event:
    """One call.

    Attributes:
        constants: Arguments that are no tensors, by place.
        function, args, kwargs: What was called, for replays: tensors are the copies, weights the weights themselves.
            None where the call can't be made alone.
    """

    key: EventKey
    inputs: list[Slot]
    outputs: list[Slot]
    constants: dict[str, Any] = field(default_factory=dict)
    function: Callable[..., Any] | None = None
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict)


@dataclass
class StepRecord:
    """The region's calls in one step.

    Attributes:
        row: The row of the position under study; -1 in a step of which only shapes are wanted.
        columns: Where this request's visible keys are among all keys, in order of position.
        predicted: Its row among the logits' rows, or -1.
        limited: Whether copies were left out for lack of memory.
    """

    sizes: Sizes
    row: int
    columns: range
    predicted: int
    events: list[Event] = field(default_factory=list)
    limited: bool = False


def tensors_in(value: Any, path: str = "") -> list[tuple[str, torch.Tensor]]:
    """The tensors in nested arguments or results, each with where it stands."""
    if isinstance(value, torch.Tensor):
        return [(path, value)]
    if isinstance(value, list | tuple):
        items: list[tuple[Any, Any]] = list(enumerate(value))
    elif isinstance(value, dict):
        items = list(value.items())
    else:
        return []
    return [pair for key, item in items for pair in tensors_in(item, f"{path}.{key}" if path else str(key))]
