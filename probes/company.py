"""Questions that are the same for every operator: what the others hold, where operands lie, what was called before.

A request's bits may depend on its company without any size changing: a scale taken over other people's rows, a NaN that
leaks from a neighbour's, memory that nobody initialized. And the same call may give other bits at another moment: the
first of a process, after an autotuner changed its mind, while its result's buffer is used again, or when a cache did
not notice that the inputs were written to.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import NamedTuple

import torch

from nondet.core.measure import Trial

__all__ = ["AXES", "Call", "at_every_place", "describe", "in_batches", "in_slices", "trials"]

Operator = Callable[..., torch.Tensor]

# What `Case.varied` is called for the questions asked here, and what a case of it is about.
AXES = {
    "neighbour_values": "while other rows hold other values",
    "alignment": "at other addresses",
    "history": "first, later, after other calls, held, written in place",
}
_OTHER_CALLS = 256  # autotuners change their mind after a few calls, or some hundreds
_DIRTY = 16  # blocks of a result's size that held NaN when the allocator got them back
_SHIFTS = (0, 1, 3, 8)  # elements past an aligned address


class Call(NamedTuple):
    """One call of an operator, and whose rows of it are asked about.

    Attributes:
        tensors: As the operator takes them.
        others: For each tensor the indices along its first axis that belong to others; None: it has none of theirs.
        kept: Indices along the first axis of the result that are compared.
    """

    tensors: tuple[torch.Tensor, ...]
    others: tuple[torch.Tensor | None, ...]
    kept: torch.Tensor

    def ask(self, operator: Operator) -> torch.Tensor:
        """The rows asked about."""
        return operator(*self.tensors).index_select(0, self.kept)

    def replaced(self, tensors: Iterable[torch.Tensor]) -> Call:
        """The same question of other tensors."""
        return self._replace(tensors=tuple(tensors))


def describe(varied: str) -> str:
    """What a case is about, for its name."""
    return AXES[varied]


def trials(varied: str, call: Call, operator: Operator) -> Iterator[Trial]:
    """The variants of one of `AXES`."""
    return {"neighbour_values": _neighbours, "alignment": _alignments, "history": _moments}[varied](call, operator)


def _neighbours(call: Call, operator: Operator) -> Iterator[Trial]:
    fills: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
        "as drawn": torch.clone,
        "zeros": torch.zeros_like,
        "huge": lambda x: x * _huge(x.dtype),
        "one outlier": _with_outlier,
        "NaN": lambda x: torch.full_like(x, torch.nan),
        "infinite": lambda x: torch.full_like(x, torch.inf),
        "in another order": lambda x: x.flip(0),
        "copies of one row": lambda x: x[:1].expand_as(x),
    }
    for name, fill in fills.items():
        yield Trial(name, partial(_with_neighbours, call, operator, fill))
    yield Trial("copies of the asked rows", partial(_with_neighbours, call, operator, None))


def _huge(dtype: torch.dtype) -> float:
    """A factor that leaves products of ordinary numbers finite: a size that other rows may have."""
    return 64.0 if dtype == torch.float16 else 2.0**20


def _with_outlier(x: torch.Tensor) -> torch.Tensor:
    out = x.clone()
    out.view(-1)[x.numel() // 2] = 60000.0
    return out


def _with_neighbours(
    call: Call, operator: Operator, fill: Callable[[torch.Tensor], torch.Tensor] | None
) -> torch.Tensor:
    """The asked rows beside others that are filled anew; without `fill` each of them is one of the asked rows again."""
    filled = []
    for tensor, others in zip(call.tensors, call.others, strict=True):
        if others is not None and len(others) and tensor.is_floating_point():
            twins = call.kept[torch.arange(len(others), device=others.device) % len(call.kept)]
            theirs = tensor.index_select(0, twins if fill is None else others)
            tensor = tensor.index_copy(0, others, theirs if fill is None else fill(theirs))
        filled.append(tensor)
    return call.replaced(filled).ask(operator)


def _alignments(call: Call, operator: Operator) -> Iterator[Trial]:
    for shift in _SHIFTS:
        yield Trial(f"{shift} elements past" if shift else "aligned", partial(_shifted, call, operator, shift))


def _shifted(call: Call, operator: Operator, shift: int) -> torch.Tensor:
    return call.replaced(_at_address(x, shift) if x.is_floating_point() else x for x in call.tensors).ask(operator)


def _at_address(x: torch.Tensor, shift: int) -> torch.Tensor:
    """The same numbers and strides, starting so many elements past an aligned address."""
    extent = 1 + sum((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True))
    boundary = 64 // x.element_size()
    storage = x.new_zeros(extent + 2 * boundary + shift)
    start = (-storage.data_ptr() // x.element_size()) % boundary + shift
    return storage.as_strided(x.shape, x.stride(), start).copy_(x)


def _moments(call: Call, operator: Operator) -> Iterator[Trial]:
    """The same call at other moments; what is called between has the same shapes and other values."""
    other = call.replaced(-x.flip(0) if x.is_floating_point() else x for x in call.tensors)

    def held() -> torch.Tensor:
        mine = operator(*call.tensors)
        operator(*other.tensors)
        return mine.index_select(0, call.kept)

    def after_many() -> torch.Tensor:
        for _ in range(_OTHER_CALLS):
            operator(*other.tensors)
        return call.ask(operator)

    def over_nan() -> torch.Tensor:
        shaped = operator(*other.tensors)
        dirty = [torch.full_like(shaped, torch.nan) for _ in range(_DIRTY)]
        del dirty  # the allocator hands the same memory out again
        return call.ask(operator)

    yield Trial("first", partial(call.ask, operator))
    yield Trial("second", partial(call.ask, operator))
    yield Trial("after a call with other values", lambda: (operator(*other.tensors), call.ask(operator))[1])
    yield Trial("held while another call runs", held)
    for place, tensor in enumerate(call.tensors):
        if tensor.is_floating_point():
            yield Trial(f"argument {place} written in place", partial(_rewritten, call, other, operator, place))
    yield Trial("into memory that held NaN", over_nan)
    yield Trial(f"after {_OTHER_CALLS} other calls", after_many)


def _rewritten(call: Call, other: Call, operator: Operator, place: int) -> torch.Tensor:
    """One argument's storage held other values in the call before: a cache must notice."""
    buffer = other.tensors[place].clone(memory_format=torch.preserve_format)
    tensors = [buffer if i == place else x for i, x in enumerate(call.tensors)]
    operator(*tensors)
    buffer.copy_(call.tensors[place])
    return call.replaced(tensors).ask(operator)


def in_batches(operator: Operator, x: torch.Tensor, rows: int, M: int) -> torch.Tensor:
    """The first `rows` rows of x, each computed in a batch of exactly M rows.

    A larger batch holds one half of them at its head and the other at its tail, where the last tile may be partly
    filled, with the rows after them in between. Smaller batches cut them; the last one begins early enough.
    All pieces are contiguous, so that on a GPU they are joined by copies and no kernel runs but the operator's.

    Args:
        operator: Of a batch [M, ...]; its result's first axis is the batch's.
        x: [rows or more, ...], contiguous, with at least M rows.
    """
    if rows <= M:
        head = rows - rows // 2
        batch = x.new_empty((M, *x.shape[1:]))
        _join(batch, [x[:head], x[rows : rows + M - rows], x[head:rows]])
        out = operator(batch)
        return _join(out.new_empty((rows, *out.shape[1:])), [out[:head], out[M - rows + head :]])
    return in_slices(lambda start, stop: operator(x[start:stop]), rows, M)


def in_slices(compute: Callable[[int, int], torch.Tensor], rows: int, M: int) -> torch.Tensor:
    """Rows 0 ... rows - 1 in batches of exactly M of them; the last batch begins early enough.

    Args:
        compute: compute(start, stop) gives the results of these rows, computed as one batch.
    """
    parts = [compute(start, start + M) for start in range(0, rows - M + 1, M)]
    rest = rows % M
    if rest:
        parts.append(compute(rows - M, rows)[M - rest :])
    return _join(parts[0].new_empty((rows, *parts[0].shape[1:])), parts)


def _join(target: torch.Tensor, parts: list[torch.Tensor]) -> torch.Tensor:
    start = 0
    for part in parts:
        target[start : start + len(part)].copy_(part)
        start += len(part)
    return target


def at_every_place(operator: Operator, x: torch.Tensor, places: int) -> torch.Tensor:
    """Every row of x [R, ...] at every place of a batch, by R batches in which they take turns: [places, R, ...]."""
    rows = len(x)
    place = torch.arange(places, device=x.device)
    turns = torch.stack([operator(x[(place + turn) % rows]) for turn in range(rows)])
    row = torch.arange(rows, device=x.device)
    return turns[(row[None, :] - place[:, None]) % rows, place[:, None]]
