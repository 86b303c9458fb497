"""A recorded call made again, alone: with other rows, other values, another order, or another number of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from nondet.trace.align import Pair, Roles
from nondet.trace.events import StepRecord

__all__ = ["RecordedCall", "operators_of"]

Change = Callable[[str, torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class RecordedCall:
    """One arm's call of the guilty operator.

    Attributes:
        roles: Place of a tensor -> what its axes count, see `nondet.trace.align`.
        axis: "tokens" or "predicted": what this call's rows are; "" where its result belongs to no row.
        row: This request's row.
        rows: All rows.
        visible: This request's keys among all keys.
        keys: All keys; 0 for a call that reads none.
    """

    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    roles: dict[str, Roles]
    axis: str
    row: int
    rows: int
    visible: range
    keys: int

    @classmethod
    def of(cls, pair: Pair, record: StepRecord, *, second: bool) -> RecordedCall | None:
        """The call of the first or the second arm; None where it can't be made alone."""
        event = pair.b if second else pair.a
        if event.function is None:
            return None
        flat = {role for roles in pair.roles.values() for role in roles}
        axis = "tokens" if "tokens" in flat else "predicted" if "predicted" in flat else ""
        predicted = axis == "predicted"
        return cls(
            function=event.function,
            args=event.args,
            kwargs=event.kwargs,
            roles=pair.roles,
            axis=axis,
            row=record.predicted if predicted else record.row,
            rows=record.sizes.predicted if predicted else record.sizes.tokens,
            visible=record.columns,
            keys=record.sizes.keys if "keys" in flat else 0,
        )

    def run(
        self,
        rows: Sequence[int] | None = None,
        columns: Sequence[int] | None = None,
        change: Change | None = None,
        *,
        place: int | None = None,
    ) -> torch.Tensor:
        """The call on a selection of rows and keys, with tensors changed first; this request's part of its result.

        Args:
            rows: Which rows, in which order; None: all.
            columns: Which keys.
            change: change(place, tensor) of each tensor, before the selection.
            place: Where this request's row is in the selection; None: where it was.
        """
        out = self.prepared(rows, columns, change)()
        out = out if isinstance(out, torch.Tensor) else next(x for x in out if isinstance(x, torch.Tensor))
        return self.part(out, self.row if place is None else place, columns)

    def prepared(
        self,
        rows: Sequence[int] | None = None,
        columns: Sequence[int] | None = None,
        change: Change | None = None,
    ) -> Callable[[], Any]:
        """The same call, its tensors selected already: what runs when it is called is the operator alone."""

        def pick(path: str, tensor: torch.Tensor) -> torch.Tensor:
            tensor = tensor if change is None else change(path, tensor)
            for dim, role in enumerate(self.roles.get(path, ())):
                wanted = rows if role == self.axis else columns if role == "keys" else None
                if wanted is not None:
                    tensor = tensor.index_select(dim, torch.tensor(wanted, device=tensor.device))
            return tensor

        args, kwargs = _walk(self.args, pick, ""), _walk(self.kwargs, pick, str(len(self.args)))

        def call() -> Any:
            with torch.no_grad():
                return self.function(*args, **kwargs)

        return call

    def part(self, out: torch.Tensor, place: int, columns: Sequence[int] | None = None) -> torch.Tensor:
        """This request's row of a result, and of the keys those that it sees."""
        axes = self.roles.get("out", self.roles.get("out.0", ()))
        if len(axes) != out.dim():
            return out
        for dim, role in enumerate(axes):
            if role and role == self.axis:
                out = out.narrow(dim, place, 1)
            elif role == "keys":
                where = list(range(self.keys)) if columns is None else list(columns)
                index = torch.tensor([where.index(c) for c in self.visible], device=out.device)
                out = out.index_select(dim, index)
        return out

    def tensors(self) -> dict[str, torch.Tensor]:
        """All tensors of the call by their place."""
        found: dict[str, torch.Tensor] = {}

        def note(path: str, tensor: torch.Tensor) -> torch.Tensor:
            found[path] = tensor
            return tensor

        _walk(self.args, note, "")
        _walk(self.kwargs, note, str(len(self.args)))
        return found

    def carries_values(self, path: str, tensor: torch.Tensor) -> bool:
        """Whether a tensor holds numbers of rows or keys, and is no mask between the two."""
        roles = set(self.roles.get(path, ())) - {""}
        return tensor.dtype.is_floating_point and len(roles) == 1


def _walk(value: Any, change: Change, path: str) -> Any:
    if isinstance(value, torch.Tensor):
        return change(path, value)
    join = f"{path}." if path else ""
    if isinstance(value, tuple):
        return tuple(_walk(v, change, f"{join}{i}") for i, v in enumerate(value))
    if isinstance(value, list):
        return [_walk(v, change, f"{join}{i}") for i, v in enumerate(value)]
    if isinstance(value, dict):
        return {k: _walk(v, change, f"{join}{k}") for k, v in value.items()}
    return value


class _Operators(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.names: dict[str, None] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not any(tag in str(func) for tag in ("view", "expand", "transpose", "aten.t.", "slice", "detach", "alias")):
            self.names.setdefault(str(func).removesuffix(".default"))
        return func(*args, **(kwargs or {}))


def operators_of(call: Callable[[], Any]) -> list[str]:
    """The aten operators that the dispatcher took a call apart into, views left out, in the order of first use."""
    with _Operators() as seen:
        call()
    return list(seen.names)
