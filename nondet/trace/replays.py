"""The guilty call, made again alone: each replay changes one thing and says in one sentence what that showed.

Only the second arm's whole inputs are varied (the company is in them). "Its bits" are those of this request's row.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise

import torch

from nondet.core.compare import ClassBook, bits, identical
from nondet.core.measure import profile_variants
from nondet.core.records import Replay
from nondet.trace.calls import RecordedCall, operators_of
from nondet.trace.exact import exact

__all__ = ["kernels_of", "replays"]

_REPEATS = 50
_FAMILY_OF = {
    "linear": "matmul",
    "matmul": "matmul",
    "bmm": "matmul",
    "mm": "matmul",
    "addmm": "matmul",
    "baddbmm": "matmul",
    "scaled_dot_product_attention": "attention",
    "attention": "attention",
    "softmax": "softmax",
    "log_softmax": "softmax",
    "logsumexp": "softmax",
    "mean": "norm",
    "rms_norm": "norm",
    "layer_norm": "norm",
    "sum": "reduction",
    "silu": "pointwise",
    "gelu": "pointwise",
    "sigmoid": "pointwise",
    "rsqrt": "pointwise",
}


def replays(a: RecordedCall, b: RecordedCall, out_a: torch.Tensor, out_b: torch.Tensor, name: str) -> Iterator[Replay]:
    """Every replay of the call, as it is done.

    Args:
        a, b: The call of either arm.
        out_a, out_b: This request's part of the recorded results.
        name: What was called, as "scaled_dot_product_attention".
    """
    device = out_b.device.type
    again = _guarded("repeat", lambda: _repeat(b, out_b))
    yield again
    if again.status == "divergent":  # whatever else is changed, its bits change by themselves: nothing follows from it
        yield _guarded("substitution", lambda: _substitution(b, name))
        return
    if b.axis:
        others = b.rows > 1 or b.keys > len(b.visible)
        values = _guarded("values", lambda: _values(b, out_b)) if others else None
        yield _guarded("rows only", lambda: _rows_only(b, out_a, out_b, values))
        if values is not None:
            yield values
            yield _guarded("order", lambda: _order(b, out_b))
        yield _guarded("M", lambda: _sweep(b, "M", device))
        if b.keys:
            yield _guarded("keys", lambda: _sweep(b, "keys", device))
    else:
        yield _guarded("values", lambda: _values(b, out_b))
    yield _guarded("exact", lambda: exact(b, name))
    yield _guarded("substitution", lambda: _substitution(b, name))


def _guarded(name: str, replay: Callable[[], Replay]) -> Replay:
    """A replay that fails is a record, and ends nothing."""
    try:
        return replay()
    except (RuntimeError, ValueError, TypeError, IndexError, NotImplementedError, StopIteration) as error:
        lines = str(error).splitlines() or [type(error).__name__]
        return Replay(name=name, status="error", sentence=f"this replay failed: {lines[0][:200]}")


def kernels_of(call: RecordedCall, device: str) -> list[str]:
    """What ran: on CUDA the kernels that the profiler saw, on a CPU the aten operators that the call consists of."""
    prepared = call.prepared()
    try:
        if device != "cuda":
            return operators_of(prepared)
        prepared()
        with profile_variants(device) as profile, profile.variant(0):
            prepared()
        return profile.kernels(1)[0]
    except RuntimeError:  # no profiler, or one that saw nothing: then no name is given
        return []


def _all_others(call: RecordedCall) -> tuple[list[int], list[int]]:
    rows = [i for i in range(call.rows) if i != call.row]
    return rows, [c for c in range(call.keys) if c not in call.visible]


def _repeat(b: RecordedCall, out: torch.Tensor) -> Replay:
    book = ClassBook()
    reproduced = 0
    for _ in range(_REPEATS):
        result = b.run()
        book.add(result)
        reproduced += identical(result.reshape(out.shape), out)
    distinct = len(book.sizes)
    if distinct > 1:
        sentence = f"the same call {_REPEATS} times gives {distinct} results: a race or atomics, not the batch alone"
    elif reproduced:
        sentence = f"the same call {_REPEATS} times gives the bits of the run each time: no race"
    else:
        sentence = (
            f"the same call {_REPEATS} times gives one result, but not the run's: what it depends on is not all here"
        )
    return Replay(
        name="repeat", status="divergent" if distinct > 1 else "identical", trials=_REPEATS, distinct=distinct,
        equals_second=bool(reproduced), sentence=sentence,
    )  # fmt: skip


def _rows_only(b: RecordedCall, out_a: torch.Tensor, out_b: torch.Tensor, values: Replay | None) -> Replay:
    """This request's rows without the others: their number goes, and with it their values, of which `values` tells."""
    columns = list(b.visible) if b.keys else None
    result = b.run([b.row], columns, place=0)
    like_a, like_b = identical(result.reshape(out_a.shape), out_a), identical(result.reshape(out_b.shape), out_b)
    what = "this request's row" + (" and keys" if b.keys else "") + " alone"
    why = "the others' number or their values decide"
    if values is not None and values.status == "divergent":
        why = "the others' values went with their rows, and reach this row"
    elif values is not None and values.status == "identical":
        why = "the shape decides, as the others' values leave its bits"
    if like_b:
        sentence = (
            f"{what} give the second arm's bits: not the number of rows"
            + (" or keys" if b.keys else "")
            + " alone decides"
        )
    elif like_a:
        sentence = f"{what} out of the second arm's inputs give the first arm's bits: {why}"
    else:
        sentence = f"{what} give a third result: {why}, and the first arm's call was another one"
    return Replay(
        name="rows only", status="divergent" if not like_b else "identical", trials=1, distinct=1 if like_b else 2,
        equals_first=like_a, equals_second=like_b, sentence=sentence,
    )  # fmt: skip


def _values(b: RecordedCall, out: torch.Tensor) -> Replay:
    """Other rows' values replaced: zeros, uniform numbers, and large ones."""
    generator = torch.Generator().manual_seed(0)
    rows, columns = _all_others(b)

    def filled(fill: Callable[[torch.Size, torch.dtype], torch.Tensor]) -> Callable[[str, torch.Tensor], torch.Tensor]:
        def change(path: str, tensor: torch.Tensor) -> torch.Tensor:
            if not b.carries_values(path, tensor):
                return tensor
            tensor = tensor.clone()
            for dim, role in enumerate(b.roles[path]):
                others = rows if role == (b.axis or "tokens") else columns if role == "keys" else []
                if others:
                    index = torch.tensor(others, device=tensor.device)
                    shape = tensor.index_select(dim, index).shape
                    tensor.index_copy_(dim, index, fill(shape, tensor.dtype).to(tensor.device))
            return tensor

        return change

    fills = {
        "zeros": lambda shape, dtype: torch.zeros(shape, dtype=dtype),
        "random": lambda shape, dtype: (torch.rand(shape, generator=generator) * 2 - 1).to(dtype),
        "large": lambda shape, dtype: ((torch.rand(shape, generator=generator) * 2 - 1) * 30).to(dtype),
    }
    changed = [k for k, fill in fills.items() if not identical(b.run(change=filled(fill)).reshape(out.shape), out)]
    if changed:
        sentence = (
            f"other rows' values replaced ({', '.join(changed)}) change its bits: other people's data reach this row, "
            "a defect rather than rounding"
        )
    else:
        sentence = "other rows' values replaced by zeros, random and large numbers leave its bits: no leak was seen"
    return Replay(
        name="values", status="divergent" if changed else "identical", trials=len(fills), distinct=2 if changed else 1,
        values=list(fills), sentence=sentence,
    )  # fmt: skip


def _order(b: RecordedCall, out: torch.Tensor) -> Replay:
    """Other rows and keys in another order, then this row at other places."""
    rows, columns = _all_others(b)
    turned = list(range(b.rows))
    for place, other in zip(rows, rows[1:] + rows[:1], strict=True):
        turned[place] = other
    keys = list(range(b.keys)) if b.keys else None
    if keys is not None:
        for place, other in zip(columns, columns[::-1], strict=True):
            keys[place] = other
    permuted = not identical(b.run(turned, keys).reshape(out.shape), out)
    moved = []
    for place in sorted({0, b.rows // 2, b.rows - 1} - {b.row}):
        order = list(range(b.rows))
        order[place], order[b.row] = order[b.row], order[place]
        if not identical(b.run(order, place=place).reshape(out.shape), out):
            moved.append(place)
    parts = [
        "other rows in another order " + ("change its bits" if permuted else "leave its bits"),
        f"at {'place ' + ', '.join(map(str, moved)) + ' of' if moved else 'other places among'} {b.rows} rows it has "
        + ("other bits: it depends on its position" if moved else "the same bits"),
    ]
    if b.rows == 1:
        parts = ["the keys of others in another order " + ("change its bits" if permuted else "leave its bits")]
    return Replay(
        name="order", status="divergent" if permuted or moved else "identical", trials=1 + min(3, b.rows),
        distinct=2 if permuted or moved else 1, values=list(moved), sentence="; ".join(parts),
    )  # fmt: skip


def _sizes(most: int) -> list[int]:
    """Every size up to 16, then in steps of about an eighth, and `most` itself."""
    sizes, size = [], 1
    while size < most:
        sizes.append(size)
        size += 1 if size < 16 else max(1, size // 8)
    return [*sizes, most]


def _sweep(b: RecordedCall, axis: str, device: str) -> Replay:
    """This request's row in calls of other sizes: M rows (its own first), or its keys among others."""
    rows, columns = _all_others(b)
    own = list(b.visible)
    if axis == "M":
        sizes = _sizes(max(2 * b.rows, 64))

        def selection(size: int) -> tuple[list[int], list[int] | None]:
            picked = [b.row] + [(rows or [b.row])[i % max(1, len(rows))] for i in range(size - 1)]
            return picked, None
    else:
        sizes = [len(own) + extra for extra in [0, *_sizes(max(1, len(columns)))] if extra <= len(columns)]

        def selection(size: int) -> tuple[list[int], list[int] | None]:
            return [b.row], own + columns[: size - len(own)]

    results: dict[int, torch.Tensor] = {}

    def run(size: int) -> torch.Tensor:
        return b.run(*selection(size), place=0).clone()

    for size in sizes:
        results[size] = run(size)
    names: list[list[str]] = []
    if device == "cuda":  # again, with the operator alone between the marks
        prepared = [b.prepared(*selection(size)) for size in sizes]
        with profile_variants(device) as profile:
            for index, call in enumerate(prepared):
                with profile.variant(index):
                    call()
        names = profile.kernels(len(sizes))
    kernels = dict(zip(sizes, names, strict=True)) if names else {}
    for low, high in pairwise(sizes):  # the borders exactly: halving where neighbours differ
        while high - low > 1 and not torch.equal(bits(results[low]), bits(results[high])):
            middle = (low + high) // 2
            results[middle] = run(middle)
            same_low = torch.equal(bits(results[middle]), bits(results[low]))
            low, high = (middle, high) if same_low else (low, middle)
    book = ClassBook()
    values = sorted(results)
    for size in values:
        book.add(results[size])
    distinct = len(book.sizes)
    borders = [v for u, v, x, y in zip(values, values[1:], book.labels, book.labels[1:], strict=False) if x != y]
    what = "rows" if axis == "M" else "keys in the call (its own, then other requests', masked)"
    if distinct == 1:
        sentence = f"{values[0]} to {values[-1]} {what}: one class of bits"
    else:
        shown = ", ".join(map(str, borders[:6])) + (" ..." if len(borders) > 6 else "")
        sentence = f"{values[0]} to {values[-1]} {what}: {distinct} classes of bits, with borders at {shown}"
    if kernels:
        count = len({tuple(k) for k in kernels.values()})
        sentence += f"; {count} different set{'s' if count > 1 else ''} of kernels"
    return Replay(
        name=axis, status="divergent" if distinct > 1 else "identical", trials=len(values), distinct=distinct,
        values=list(values), labels=book.labels, kernels=[kernels.get(v, []) for v in values] if kernels else [],
        sentence=sentence,
    )  # fmt: skip


def families_for(name: str) -> Sequence[str]:
    """Families of `batch_invariant()` to try for a call: the one that its name points to first."""
    from nondet.kernels.dispatch.operators import FAMILIES

    short = name.removeprefix("Tensor.").removeprefix("_")
    first = [_FAMILY_OF[short]] if short in _FAMILY_OF else []
    return [*first, *(f for f in FAMILIES if f not in first)]


def _substitution(b: RecordedCall, name: str) -> Replay:
    """The invariant implementation of each family in turn: this row alone against this row in the whole call."""
    from nondet.kernels.dispatch.block import batch_invariant

    columns = list(b.visible) if b.keys else None
    for family in families_for(name):
        with batch_invariant([family]) as invariance:
            whole = b.run()
            alone = b.run([b.row], columns, place=0) if b.axis else b.run()
            replaced = sum(invariance.coverage().replaced.values())
        if replaced and b.axis and identical(whole, alone):
            sentence = f"with the invariant implementation of {family} the row has the same bits alone and in the call"
            return Replay(
                name="substitution", status="identical", trials=2, distinct=1, values=[family], sentence=sentence
            )
    sentence = "no family of batch_invariant() takes this call and gives the row alone and in the call the same bits"
    return Replay(name="substitution", status="divergent", trials=2, distinct=2, sentence=sentence)
