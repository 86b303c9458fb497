"""The responsible call, repeated by itself: each replay changes one thing and reports its effect in one sentence.

Only the second arm's inputs, which include the concurrent requests, are varied; compared are the bits of one row.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass

from nondet.core.compare import ClassBook, error_against, identical
from nondet.core.measure import profile_variants
from nondet.core.records import Replay
from nondet.probes.reduction_order import MeasuredSum, NotASumError, of_attention, of_product, of_rows, trees_of
from nondet.trace.align import Pair, Roles
from nondet.trace.recorder import Event, StepRecord, changed_tensors, tensors_in

Change = Callable[[str, torch.Tensor], torch.Tensor] | None  # path, tensor -> the tensor that replaces it
Picked = Sequence[int] | None  # rows or keys of a call, in this order; None: all
Selection = list[tuple[int, list[int]]]  # (axis, indices along it)


def taken(tensor: torch.Tensor, selection: Selection) -> torch.Tensor:
    """The selected part of a tensor."""
    for axis, indices in selection:
        tensor = tensor.index_select(axis, torch.tensor(indices, device=tensor.device))
    return tensor


@dataclass(frozen=True)
class RecordedCall:
    """One arm's call of the responsible operator."""

    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    roles: dict[str, Roles]  # path of a tensor -> what its axes count, see `nondet.trace.align`
    axis: str  # "tokens" or "predicted": what this call's rows are; "" where its result belongs to no row
    row: int
    rows: int
    visible: range  # this request's keys among all keys
    keys: int  # all keys; 0 for a call that reads none

    @classmethod
    def of(cls, event: Event, pair: Pair, record: StepRecord) -> RecordedCall | None:
        """The call of one arm of the pair; None where it can't be made by itself."""
        if event.function is None:
            return None
        flat = {role for roles in pair.roles.values() for role in roles}
        axis = "tokens" if "tokens" in flat else "predicted" if "predicted" in flat else ""
        row, rows = record.row, record.sizes.tokens
        if axis == "predicted":
            row, rows = record.predicted, record.sizes.predicted
        keys = record.sizes.keys if "keys" in flat else 0
        return cls(event.function, event.args, event.kwargs, pair.roles, axis, row, rows, record.columns, keys)

    def run(
        self, rows: Picked = None, columns: Picked = None, change: Change = None, *, row: int | None = None
    ) -> torch.Tensor:
        """The call on a selection of rows and keys, with tensors changed first; this request's part of its result.
        `row`: index of this request's row in the selection; None: as recorded."""
        out = self.prepared(rows, columns, change)()
        out = out if isinstance(out, torch.Tensor) else next(x for x in out if isinstance(x, torch.Tensor))
        if len(self.roles.get("out", self.roles.get("out.0", ()))) != out.dim():
            return out
        return taken(out, self.result_selection(self.row if row is None else row, columns))

    def prepared(self, rows: Picked = None, columns: Picked = None, change: Change = None) -> Callable[[], Any]:
        """The same call with its tensors already selected, so that calling it runs only the operator."""
        args, kwargs = self.arguments(rows, columns, change)

        def call() -> Any:
            with torch.no_grad():
                return self.function(*args, **kwargs)

        return call

    def arguments(
        self, rows: Picked = None, columns: Picked = None, change: Change = None
    ) -> tuple[list[Any], dict[str, Any]]:
        """What a call on these rows and keys is given. Raises NotImplementedError: other numbers for a weight that is
        made of other tensors, as torchao's are."""

        def pick(path: str, tensor: torch.Tensor) -> torch.Tensor:
            given = tensor if change is None else change(path, tensor)
            if given is not tensor and is_traceable_wrapper_subclass(tensor):
                raise NotImplementedError(
                    f"a {type(tensor).__name__} stays as it is: a plain weight is another operator's"
                )
            wanted = [
                (axis, rows if role == self.axis else columns if role == "keys" else None)
                for axis, role in enumerate(self.roles.get(path, ()))
            ]
            return taken(given, [(axis, list(indices)) for axis, indices in wanted if indices is not None])

        *args, kwargs = changed_tensors((*self.args, self.kwargs), pick)
        return args, kwargs

    def result_selection(self, row: int, columns: Picked) -> Selection:
        """What belongs to this request in the result of a call on these keys (None: all), with its row at `row`."""
        found: Selection = []
        for axis, role in enumerate(self.roles.get("out", self.roles.get("out.0", ()))):
            if role and role == self.axis:
                found.append((axis, [row]))
            elif role == "keys":
                where = list(range(self.keys)) if columns is None else list(columns)
                found.append((axis, [where.index(c) for c in self.visible]))
        return found

    def tensors(self) -> dict[str, torch.Tensor]:
        """All tensors of the call by their path."""
        return dict(tensors_in((*self.args, self.kwargs)))

    def counts(self, path: str) -> int:
        """How many kinds of axes vary: 1 for numbers of rows or keys, 2 for a mask between them."""
        return len(set(self.roles.get(path, ())) - {""})

    @property
    def others(self) -> tuple[list[int], list[int]]:
        """The rows and the keys of the other requests."""
        return [i for i in range(self.rows) if i != self.row], [c for c in range(self.keys) if c not in self.visible]

    @property
    def own_first(self) -> list[int]:
        """The order of the rows with this request's and the first one exchanged."""
        order = list(range(self.rows))
        order[0], order[self.row] = order[self.row], order[0]
        return order


# parts of names of operators that compute nothing: views, and allocations
_NO_KERNELS = ("view", "expand", "transpose", "aten.t.", "slice", "detach", "alias", "empty")


class _Operators(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.names: dict[str, None] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not any(tag in str(func) for tag in _NO_KERNELS):
            self.names.setdefault(str(func).removesuffix(".default"))
        return func(*args, **(kwargs or {}))


def operators_of(call: Callable[[], Any]) -> list[str]:
    """The aten operators into which the dispatcher decomposed a call, without views, in the order of first use."""
    with _Operators() as seen:
        call()
    return list(seen.names)


# A wrong sum or rounding? The responsible call on numbers with a known exact result, compared with float64.
#
# On ones every partial sum is a whole number. On small integers results may cancel, so that a distance in ULP means
# nothing: there the error is compared with the sum of the terms' magnitudes, which is the same call on absolute values.
# An attention gets equal scores (queries of zero), so that its result is the mean of the values.
#
# The oracle is the call itself in float64, which torch computes by other kernels: it reveals a fault of one kernel, but
# not one that the float64 code shares.

_QUERY = "0"  # its position among attention's arguments
_MOST_ULP = 2
# Roundings to the result's own format that a library may make on the way (split sums kept in it), each half an ULP of
# the terms' magnitudes: a term or a slice that is lost, doubled or of the wrong sign costs far more on these inputs.
_ROUNDINGS = 4


def exact(b: RecordedCall, name: str) -> Replay:
    """Ones, then small integers."""
    attention = name == "scaled_dot_product_attention"
    double = replace(b, kwargs={k: torch.float64 if isinstance(v, torch.dtype) else v for k, v in b.kwargs.items()})

    def on(call: RecordedCall, draw: Callable[[torch.Size, torch.Generator], torch.Tensor]) -> torch.Tensor:
        """The call, in its own format or in float64, on drawn numbers; masks stay."""
        generator = torch.Generator().manual_seed(1)

        def small(path: str, tensor: torch.Tensor) -> torch.Tensor:
            if not tensor.dtype.is_floating_point:
                return tensor
            dtype = torch.float64 if call is double else tensor.dtype
            if b.counts(path) > 1:
                return tensor.to(dtype)
            if attention and path == _QUERY:
                return torch.zeros_like(tensor, dtype=dtype)
            return draw(tensor.shape, generator).to(tensor.device, dtype)

        return call.run(change=small)

    def ones(shape: torch.Size, _: torch.Generator) -> torch.Tensor:
        return torch.ones(shape)

    def whole(shape: torch.Size, generator: torch.Generator) -> torch.Tensor:
        return torch.randint(-2, 3, shape, generator=generator)

    ulp = error_against(on(b, ones), on(double, ones)).max_ulp
    result, reference = on(b, whole), on(double, whole)
    scale = on(double, lambda *given: whole(*given).abs()).abs()
    bound = _ROUNDINGS * torch.finfo(result.dtype).eps * torch.maximum(scale, reference.abs())
    within = bool(((result.double() - reference).abs() <= bound).all())  # NaN is within nothing
    if ulp <= _MOST_ULP and within:
        sentence = f"on ones it is within {ulp} ULP of float64, on small integers within the roundings of its format: "
        return _replay("exact", False, f"{sentence}what differs is rounding", trials=2, distinct=1)
    where = f"{ulp} ULP from float64 on ones" if ulp > _MOST_ULP else "beyond rounding on small integers"
    return _replay("exact", True, f"it is {where}: a wrong result, a bug rather than rounding", trials=2, distinct=1)


_REPEATS = 50
_CALLS = {
    "matmul": ("linear", "matmul", "bmm", "mm", "addmm", "baddbmm"),
    "attention": ("scaled_dot_product_attention", "attention"),
    "softmax": ("softmax", "log_softmax", "logsumexp"),
    "norm": ("mean", "rms_norm", "layer_norm"),
    "reduction": ("sum",),
    "pointwise": ("silu", "gelu", "sigmoid", "rsqrt"),
}
_FAMILY_OF = {call: family for family, calls in _CALLS.items() for call in calls}


def replays(
    a: RecordedCall, b: RecordedCall, out_a: torch.Tensor, out_b: torch.Tensor, name: str, *, sweeps: bool = True
) -> Iterator[Replay]:
    """Every replay of the call of that name, as it is done; `out_a` and `out_b` are this request's part of the recorded
    results. Without `sweeps` it is not repeated at other numbers of rows and keys, for each of which libraries plan
    again, nor under each family that might fix it, for which kernels are compiled; the family that its name suggests is
    tried in the whole run in any case."""
    again = guarded("repeat", _repeat, b, out_b)
    yield again
    # its bits change by themselves, or depend on something that was not captured: no other replay is then conclusive
    if again.status == "divergent" or not again.equals_second:
        yield guarded("substitution", _substitution, b, name)
        return
    values = None
    if not b.axis or b.rows > 1 or b.keys > len(b.visible):
        values = guarded("values", _values, b, out_b)
    if b.axis:
        yield guarded("rows only", _rows_only, b, out_a, out_b, values)
    if values is not None:
        yield values
    if b.axis and values is not None:
        yield guarded("order", _order, b, out_b)
    for axis in ("M", "keys") if b.axis and sweeps else ():
        if axis == "M" or b.keys:
            yield guarded(axis, _sweep, b, axis, out_b.device.type)
    yield guarded("exact", exact, b, name)
    if b.axis and (sum_of := _SUMS.get(name.removeprefix("_"))) is not None:
        yield guarded("tree", _trees, a, b, sum_of, name)
    if sweeps or name not in _FAMILY_OF:
        yield guarded("substitution", _substitution, b, name)


def _replay(name: str, divergent: bool, sentence: str, **found: Any) -> Replay:
    return Replay(name=name, status="divergent" if divergent else "identical", sentence=sentence, **found)


def guarded(name: str, replay: Callable[..., Replay], *given: Any) -> Replay:
    """Turn a replay that fails into a record."""
    try:
        return replay(*given)
    except (RuntimeError, ValueError, TypeError, IndexError, NotImplementedError, StopIteration) as error:
        lines = str(error).splitlines() or [type(error).__name__]
        return Replay(name=name, status="error", sentence=f"this replay failed: {lines[0][:200]}")


def kernels_of(call: RecordedCall, device: str) -> list[str]:
    """What ran: on CUDA the kernels that the profiler saw, on a CPU the aten operators of the call."""
    prepared = call.prepared()
    try:
        if device != "cuda":
            return operators_of(prepared)
        prepared()
        with profile_variants(device) as profile, profile.variant(0):
            prepared()
        return profile.kernels(1)[0]
    except RuntimeError:  # without a profiler, or without results, no name is given
        return []


def _repeat(b: RecordedCall, out: torch.Tensor) -> Replay:
    results = [b.run().reshape(out.shape) for _ in range(_REPEATS)]
    book = ClassBook()
    for result in results:
        book.add(result[None])
    distinct, reproduced = len(book.representatives), any(identical(result, out) for result in results)
    if distinct > 1:
        what = f"{distinct} results: a race or atomics, not only the batch"
    elif reproduced:
        what = "the recorded bits each time: no race"
    else:
        what = "one result, but not the recorded one: something that it depends on was not captured"
    sentence = f"the same call {_REPEATS} times gives {what}"
    found = {"trials": _REPEATS, "distinct": distinct, "equals_second": reproduced}
    return _replay("repeat", distinct > 1, sentence, **found)


def _rows_only(b: RecordedCall, out_a: torch.Tensor, out_b: torch.Tensor, values: Replay | None) -> Replay:
    """This request's rows without the others: their number changes, and their values (which `values` tests)."""
    result = b.run([b.row], list(b.visible) if b.keys else None, row=0)
    equals_a, equals_b = (identical(result.reshape(out.shape), out) for out in (out_a, out_b))
    why = {
        "divergent": "the values of other rows reach this row",
        "identical": "the shape decides, as the values of other rows do not change its bits",
    }.get(values.status if values is not None else "", "the number of the others or their values decide")
    keys = bool(b.keys)
    if equals_b:
        rest = f" give the second arm's bits: more than the number of rows{' or keys' * keys} decides"
    elif equals_a:
        rest = f", taken from the second arm's inputs, give the first arm's bits: {why}"
    else:
        rest = f" give a third result: {why}, and the first arm made another call"
    sentence = f"only this request's row{' and keys' * keys}{rest}"
    found = {"trials": 1, "distinct": 1 if equals_b else 2, "equals_first": equals_a, "equals_second": equals_b}
    return _replay("rows only", not equals_b, sentence, **found)


def _values(b: RecordedCall, out: torch.Tensor) -> Replay:
    """Other rows' values replaced: zeros, uniform numbers, and large ones."""
    generator = torch.Generator().manual_seed(0)
    rows, columns = b.others

    def result(scale: float) -> torch.Tensor:
        def change(path: str, tensor: torch.Tensor) -> torch.Tensor:
            if not tensor.dtype.is_floating_point or b.counts(path) != 1:
                return tensor
            tensor = tensor.clone()
            for dim, role in enumerate(b.roles[path]):
                others = rows if role == (b.axis or "tokens") else columns if role == "keys" else []
                if others:
                    index = torch.tensor(others, device=tensor.device)
                    drawn = torch.rand(tensor.index_select(dim, index).shape, generator=generator) * 2 - 1
                    tensor.index_copy_(dim, index, (drawn * scale).to(tensor))
            return tensor

        return b.run(change=change).reshape(out.shape)

    scales = {"zeros": 0.0, "random": 1.0, "large": 30.0}
    changed = [kind for kind, scale in scales.items() if not identical(result(scale), out)]
    effect = "by zeros, random and large numbers does not change its bits: no leak was seen"
    if changed:
        leak = "data of other requests reach this row, a defect rather than rounding"
        effect = f"({', '.join(changed)}) changes its bits: {leak}"
    sentence = f"replacing the values of other rows {effect}"
    found = {"trials": len(scales), "distinct": 2 if changed else 1, "values": list(scales)}
    return _replay("values", bool(changed), sentence, **found)


def _order(b: RecordedCall, out: torch.Tensor) -> Replay:
    """Other rows and keys in another order, then this row at other positions."""
    rows, columns = b.others
    turned, keys = list(range(b.rows)), list(range(b.keys))
    for row, other in zip(rows, rows[1:] + rows[:1], strict=True):
        turned[row] = other
    for column, other in zip(columns, columns[::-1], strict=True):
        keys[column] = other
    permuted = not identical(b.run(turned, keys if b.keys else None).reshape(out.shape), out)
    positions = []  # at which its bits are others
    for row in sorted({0, b.rows // 2, b.rows - 1} - {b.row}):
        order = list(range(b.rows))
        order[row], order[b.row] = order[b.row], order[row]
        if not identical(b.run(order, row=row).reshape(out.shape), out):
            positions.append(row)
    changed = "change its bits" if permuted else "do not change its bits"
    where = f"position {', '.join(map(str, positions))} of" if positions else "other positions among"
    bits = "different bits: it depends on its position" if positions else "the same bits"
    sentence = f"other rows in another order {changed}; at {where} {b.rows} rows it has {bits}"
    if b.rows == 1:
        sentence = f"the keys of others in another order {changed}"
    differs = bool(permuted or positions)
    found = {"trials": 1 + min(3, b.rows), "distinct": 2 if differs else 1, "values": positions}
    return _replay("order", differs, sentence, **found)


def _sizes(most: int) -> list[int]:
    """Every size up to 16, then in steps of about an eighth, and `most` itself."""
    sizes, size = [], 1
    while size < most:
        sizes.append(size)
        size += 1 if size < 16 else max(1, size // 8)
    return [*sizes, most]


def _sweep(b: RecordedCall, axis: str, device: str) -> Replay:
    """This request's row in calls of other sizes: M rows (its own first), or its keys among others."""
    rows, columns = b.others
    own = list(b.visible)
    if axis == "M":
        sizes = _sizes(max(2 * b.rows, 64))
    else:
        sizes = [len(own) + extra for extra in [0, *_sizes(max(1, len(columns)))] if extra <= len(columns)]

    def selection(size: int) -> tuple[list[int], list[int] | None]:
        if axis == "M":
            return [b.row] + [(rows or [b.row])[i % max(1, len(rows))] for i in range(size - 1)], None
        return [b.row], own + columns[: size - len(own)]

    results = {size: b.run(*selection(size), row=0).clone() for size in sizes}
    kernels: dict[int, list[str]] = {}
    if device == "cuda":  # again, with only the operator between the marks
        prepared = [b.prepared(*selection(size)) for size in sizes]
        with profile_variants(device) as profile:
            for index, call in enumerate(prepared):
                with profile.variant(index):
                    call()
        kernels = dict(zip(sizes, profile.kernels(len(sizes)), strict=True))
    for low, high in pairwise(sizes):  # the exact boundaries: halving where neighbours differ
        while high - low > 1 and not identical(results[low], results[high]):
            middle = (low + high) // 2
            results[middle] = b.run(*selection(middle), row=0).clone()
            low, high = (middle, high) if identical(results[middle], results[low]) else (low, middle)
    book = ClassBook()
    values = sorted(results)
    for size in values:
        book.add(results[size][None])
    distinct = len(book.representatives)
    boundaries = [v for u, v, x, y in zip(values, values[1:], book.labels, book.labels[1:], strict=False) if x != y]
    what = "rows" if axis == "M" else "keys in the call (its own, then other requests', masked)"
    shown = ", ".join(map(str, boundaries[:6])) + (" ..." if len(boundaries) > 6 else "")
    classes = "one class of bits" if distinct == 1 else f"{distinct} classes of bits, with boundaries at {shown}"
    sentence = f"{values[0]} to {values[-1]} {what}: {classes}"
    if kernels:
        count = len({tuple(k) for k in kernels.values()})
        sentence += f"; {count} different set{'s' if count > 1 else ''} of kernels"
    ran = [kernels.get(v, []) for v in values] if kernels else []
    found = {"trials": len(values), "distinct": distinct, "values": values, "labels": book.labels, "kernels": ran}
    return _replay(axis, distinct > 1, sentence, **found)


# In which order do the arms add? The call of either arm, at its own sizes, is tested for the reduction tree of this
# request's row (`nondet.probes.reduction_order`): its other operands hold masks, its shapes, strides and settings stay.

_MOST_WEIGHTS = 2**26  # elements of a weight whose trees are tested: it is held four times, twice in float32


def _product(call: RecordedCall, name: str) -> MeasuredSum:
    """The row of a product with a weight, over the weight's columns; NotImplementedError if it is none, or too
    large."""
    tensors = call.tensors()
    own = [path for path in tensors if call.axis in call.roles.get(path, ())]
    shared = [path for path, x in tensors.items() if path not in own and x.is_floating_point() and x.dim() == 2]
    if not len(own) == len(shared) == 1 or tensors[own[0]].numel() != call.rows * tensors[own[0]].shape[-1]:
        raise NotImplementedError("its operands are not rows and one weight")
    x, weight, turned = tensors[own[0]], tensors[shared[0]], name != "linear"
    (N, K) = weight.shape[::-1] if turned else weight.shape
    if weight.numel() > _MOST_WEIGHTS:
        raise NotImplementedError(f"masks for a weight of {N:,} x {K:,} would take too much memory")

    def linear(rows: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        def change(path: str, tensor: torch.Tensor) -> torch.Tensor:
            if path == own[0]:
                return rows[call.own_first].reshape(tensor.shape)
            if path == shared[0]:
                w_ = w.T if turned else w
                return torch.empty_strided(tensor.shape, tensor.stride(), dtype=w.dtype, device=w.device).copy_(w_)
            return torch.zeros_like(tensor) if tensor.is_floating_point() else tensor

        out: torch.Tensor = call.prepared(change=change)()
        return out.reshape(call.rows, N)[call.own_first]

    return of_product(linear, call.rows, K, N, x.dtype, x.device.type)


def _row_sum(call: RecordedCall, name: str) -> MeasuredSum:
    """The row's sum or mean over the last axis. Raises NotImplementedError: it is another sum."""
    ((path, x),) = [(p, t) for p, t in call.tensors().items() if call.axis in call.roles.get(p, ())]
    K = x.shape[-1]

    def summed(rows: torch.Tensor) -> torch.Tensor:
        given = rows[call.own_first]
        out: torch.Tensor = call.prepared(change=lambda p, t: given.reshape(t.shape) if p == path else t)()
        if x.numel() != call.rows * K or out.numel() != call.rows:
            raise NotImplementedError("it does not give one number a row")
        return out.reshape(call.rows)[call.own_first]

    finishes = ("divided by K", "times 1/K") if name.endswith("mean") else ("",)
    return of_rows(summed, call.rows, K, x.dtype, x.device.type, finishes)


def _values_of(call: RecordedCall, name: str) -> MeasuredSum:
    """The values of attention, added for this request's row with equal scores, over the keys that it sees."""
    _, _, v = (call.tensors()[path] for path in "012")
    D = v.shape[-1]

    def out(seen: Sequence[int], values: torch.Tensor) -> torch.Tensor:
        """[1, 1, 1, D], of values [keys, D]."""

        def change(path: str, tensor: torch.Tensor) -> torch.Tensor:
            if path not in ("0", "2"):
                return tensor
            new = torch.zeros_like(tensor)
            if path == "2":
                new[..., torch.tensor(seen, device=new.device), :] = values.to(new)
            return new

        return call.run(change=change).reshape(-1, D)[None, None, :1]

    own, seen = list(call.visible), []
    for start in range(0, len(own), D):  # each key by itself, because a weight of 0 drops it
        some = own[start : start + D]
        shown = out(some, torch.eye(len(some), D))[0, 0, 0]
        seen += [key for key, weight in zip(some, shown.tolist(), strict=False) if weight]
    return of_attention(lambda q, k, v: out(seen, v[0, 0]), 1, len(seen), v.dtype, v.device.type, D)


_SUMS: dict[str, Callable[[RecordedCall, str], MeasuredSum]] = {
    **dict.fromkeys(("linear", "mm", "matmul", "addmm"), _product),
    **dict.fromkeys(("sum", "mean"), _row_sum),
    "scaled_dot_product_attention": _values_of,
}


def _trees(a: RecordedCall, b: RecordedCall, sum_of: Callable[[RecordedCall, str], MeasuredSum], name: str) -> Replay:
    """The trees of both arms in words, and how they differ."""
    try:
        sums = [sum_of(call, name) for call in (a, b)]
    except (NotImplementedError, NotASumError) as error:
        return Replay(name="tree", status="error", sentence=f"the reduction tree is not known: {error}")
    found = trees_of(sums, [a.rows, b.rows])["reduction_trees"]
    trees, sizes = found["classes"], [f"M = {c.rows:,}" + (f", {c.keys:,} keys" if c.keys else "") for c in (a, b)]
    described = [t["words"] + ("" if t["proven"] else f" (unproven: {t['failed_on']})") for t in trees]
    each = "; ".join(map("{}: {}".format, sizes, described))
    what = "the values, under equal scores, " if sum_of is _values_of else "the sum "
    one, two = (tree.get("digest") for tree in trees)
    if one is None or two is None:
        return Replay(name="tree", status="error", sentence=f"the order of {what}is not known: {each}", values=[*sizes])
    proven = all(tree["proven"] for tree in trees)
    proof = "; each proven by the bits of {:,} and {:,} sums".format(*(t["checked"] for t in trees)) if proven else ""
    between = found["between"][0].partition(": ")[2]
    if one != two:
        sentence = f"the order of {what}differs in the arms: {each}; {between}{proof or '; not both proven'}"
    else:
        between = between.removeprefix("the same reduction tree").replace(", and other bits: ", "; what differs is ")
        seen = "both arms add" if proven else "both arms seem to add"
        sentence = f"{seen} {what}in the same order{between}{proof}"
        sentence += "; the scores' own sums and the exponentials were not tested" * (sum_of is _values_of)
    return _replay("tree", one != two, sentence, trials=2, distinct=1 + (one != two), values=[*sizes])


def families_for(name: str) -> Sequence[str]:
    """Families of `batch_invariant()` to try for a call: the one that its name suggests first."""
    from nondet.kernels.dispatch.operators import FAMILIES

    short = name.removeprefix("Tensor.").removeprefix("_")
    first = [_FAMILY_OF[short]] if short in _FAMILY_OF else ["fp8"] if "[Float8" in short else []
    return [*first, *(f for f in FAMILIES if f not in first)]


def _substitution(b: RecordedCall, name: str) -> Replay:
    """The invariant implementation of each family in turn: this row by itself, compared with it in the whole call."""
    from nondet.kernels.dispatch.block import batch_invariant

    columns = list(b.visible) if b.keys else None
    for family in families_for(name):
        with batch_invariant([family]) as invariance:
            whole = b.run()
            solo = b.run([b.row], columns, row=0) if b.axis else b.run()
            replaced = sum(invariance.coverage().replaced.values())
        if replaced and b.axis and identical(whole, solo):
            sentence = f"with the invariant implementation of {family} the row has the same bits solo and in the call"
            return _replay("substitution", False, sentence, trials=2, distinct=1, values=[family])
    sentence = "no family of batch_invariant() takes this call and gives the row the same bits solo and in the call"
    with batch_invariant() as invariance:
        b.run()
    if risks := sorted(what for what in invariance.coverage().at_risk if ": " in what):  # those that name a reason
        sentence += f"; at risk under all of them: {'; '.join(risks)}"
    return _replay("substitution", True, sentence, trials=2, distinct=2)
