"""Tests of any function: the records that nondet's commands write, without a command.

`check_operator` tests a function as an implementation of a known operator, with the operator's probe: hard inputs,
every position, other rows, other call orders, and the float64 oracle. `check` tests any callable: its results for
batches of several sizes, row by row. `nondet.core.measure` decides how a result is compared, when it is computed again
and when it is wrong, as in every command.
"""

from __future__ import annotations

import inspect
import sys
import warnings
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from functools import partial
from typing import Any, NamedTuple

import torch
from msgspec import UNSET, UnsetType
from msgspec.structs import replace
from torch.utils._pytree import tree_map_only

from nondet.core.environment import collect, inductor_switch
from nondet.core.measure import Fingerprint, Trial, fingerprint, measure, named_tensors, written_to
from nondet.core.records import FORMAT, SCHEMA_VERSION, Header, Judged, Row, Run, Status, Value
from nondet.core.registry import OPERATOR_PROBES, PROBES, LoadedImplementation, check_signature, load_probe, operators
from nondet.errors import UnknownNameError, UserError, WrongResultError, one_line
from nondet.probes.base import Options, tried
from nondet.probes.rounding import FINER, apart, judged, rounding_of, sums_of

# A function and the inputs that a user makes for it, as variants to measure: the same requests in other batches. A
# divergence only means something if the requests were the same, so inputs are checked for that before results.

Inputs = Any
Function = Callable[..., Any]
_SWITCH = (
    "it covers reductions in Triton code that Inductor generates, not libraries' products and attention, nor C++ code"
)
_NAN = "NaN"  # the name of the variant in which other requests hold it
_CHANGES: dict[str, Function] = {"zeros": torch.zeros_like, "large": lambda x: x * 30, _NAN: lambda x: x * torch.nan}
_PADDED_MOST = 16  # requests that are padded to the longest
_EACH_MOST = 256  # requests of the largest batch, spread over it, that are computed again without the others
# Of the results' elements those that differ where a sum over K of 256 to 4,096 is cut in two and added in float32:
# 0.8 to 1.5 in 10,000 of bfloat16 and 5 to 14 of float16, measured on ordinary numbers (float32: 62 of 100).
_SHARE = {"bfloat16": 1e-4, "float16": 1e-3}
_BEYOND = 4.0  # times what rounding may give: what varied there is a cause
_SEEN = 3.0  # if this many are expected, none occurs by chance in one of 20
Select = Callable[[Any, Value], torch.Tensor]


class BadInputsError(UserError):
    """make_inputs gave other requests, so `fn` may differ only because of them."""


def _check_values(values: Sequence[Value], *, sizes: bool) -> None:
    """Raise a `UserError` for an invalid value, or for a list that compares nothing. `sizes`: they are batch sizes."""
    for value in values:
        if isinstance(value, bool) or not isinstance(value, int | str):
            raise UserError(f"over holds {value!r}", "Give whole numbers or names.")
        if sizes and (isinstance(value, str) or value < 1):
            raise UserError(f"over holds {value!r}, which is no batch size", "Give sizes from 1, or a select=.")
    if len(set(values) if sizes else values) < 2:
        raise UserError(f"over={values!r} compares nothing", "Give two or more values.")


class _Batch(NamedTuple):
    """Requests of the largest batch by their index, in a batch of their own. `change`: of the values at `others`, which
    are positions in it; "strided" is of the whole batch."""

    requests: Sequence[int]
    change: str = ""
    others: Sequence[int] = ()


class _Subject:
    """A function with its inputs, as variants to measure."""

    def __init__(
        self, fn: Function, make: Function, values: Sequence[Value], select: Select | None, axis: int | None
    ) -> None:
        self._fn, self._make, self._select, self._axis, self._layout = fn, make, select, axis or 0, axis is not None
        self.values = values
        sizes = [value for value in values if isinstance(value, int)] if select is None else [0]
        self.kept, self.largest = min(sizes), max(sizes)
        self._prints: dict[Value, Fingerprint] = {}
        # name of an input -> the first size and shape, and prints of the whole (False) and of the kept rows (True)
        self._firsts: dict[str, tuple[Value, torch.Size, dict[bool, tuple[torch.Tensor, ...]]]] = {}
        self._result: tuple[torch.Size, torch.dtype] | None = None
        self._expected: torch.Size | None = None
        self._sizes: dict[tuple[int, ...], int] = {}  # shape of a whole result -> its number of requests
        self._floats, self._lengths = False, list[int]()  # of the largest batch's inputs: see `_cut`
        self._draws = False  # whether a result holds ids, as a sampler's does
        self._wide = False  # whether floats among the inputs are given as float64
        # of the compared results; the shape also has the largest batch, where values are sizes
        self.dtype, self.shape, self.narrow = "unknown", dict[str, int](), torch.float64
        self.device = next((tensor.device.type for _, tensor in named_tensors(self.inputs(values[0]))), "cpu")

    def inputs(self, value: Value) -> Inputs:
        """The inputs of a value, compared with those of the values before it."""
        inputs = self._make(value)
        prints = fingerprint(inputs)
        before = self._prints.setdefault(value, prints)
        changed = sorted(name for name in before if name not in prints or _differ(before[name], prints[name]))
        if changed:
            what = f"make_inputs({value!r}) gave other numbers when it was called again ({_argument(changed[0])})"
            raise BadInputsError(what, "Draw them from a generator that is seeded in it.")
        if self._select is None:
            for name, tensor in named_tensors(inputs):
                self._check_same_requests(name, tensor, int(value))
        if self._wide:
            return tree_map_only(torch.Tensor, lambda x: x.double() if x.dtype.is_floating_point else x, inputs)
        return inputs

    def _check_same_requests(self, name: str, tensor: torch.Tensor, value: int) -> None:
        axis = self._axis
        rows = tensor.narrow(axis, 0, min(self.kept, tensor.shape[axis])) if tensor.dim() > axis else tensor
        prints = {True: fingerprint(rows)[""], False: fingerprint(tensor)[""]}
        first, shape, leading = self._firsts.setdefault(name, (value, tensor.shape, prints))
        batched = shape[axis : axis + 1] == (first,) and tensor.shape[axis : axis + 1] == (value,)
        # of another shape it is ragged, packed or padded: its layout is unknown
        if (batched or shape == tensor.shape) and _differ(leading[batched], prints[batched]):
            part = f"its first {self.kept} rows" if batched else "it"
            what = f"{_argument(name)} of make_inputs({value}) is not make_inputs({first})'s: {part} should be equal"
            how = "Put the same requests first in every batch, or choose with select= what is compared."
            raise BadInputsError(what, how)

    def expected_of(self, reference: Function) -> torch.Tensor:
        """The reference's result for the first value, in float64; results must have its shape."""
        value = self.values[0]
        result = self._compared(_called(reference, self.inputs(value)), value)
        if result.dtype != torch.float64:
            raise BadInputsError(f"the reference gave {result.dtype}", "Compute it in float64.")
        self._expected = result.shape
        return result

    def compute(self, value: Value) -> torch.Tensor:
        """The compared part of the result for one value. Raises WrongResultError: it is empty, of another shape or
        dtype than before, or an input was written to."""
        inputs = self.inputs(value)
        result = self._compared(_called(self._fn, inputs), value)
        if changed := written_to(self._prints[value], inputs):
            raise WrongResultError(f"it wrote to its input: {', '.join(map(_argument, changed))}")
        if self._result is None:
            self._result = (result.shape, result.dtype)
            self.dtype = str(result.dtype).removeprefix("torch.")
            largest = {"M": self.largest} if self._select is None else {}
            self.shape = largest | {f"axis {i}": size for i, size in enumerate(result.shape)}
        shape, dtype = self._result
        if (result.shape, result.dtype) != (shape, dtype):
            what = f"it gave {tuple(result.shape)} {result.dtype} at {value!r}, and {tuple(shape)} {dtype} at "
            what += repr(self.values[0])
            if self._lengths:
                raise BadInputsError(what, "Return a list with a tensor for each request, without its padding.")
            raise WrongResultError(what)
        if self._expected is not None and result.shape != self._expected:
            raise WrongResultError(f"it gave the shape {tuple(result.shape)}, not {tuple(self._expected)}")
        return result

    def scatter(self) -> float | None:
        """How far results of the largest batch, or of the last value, may differ by rounding."""
        value = self.values[-1] if self._select is not None else self.largest
        return rounding_of(
            lambda given: self._compared(_called(self._fn, given), value, whole=True), self.inputs(value), self.narrow
        )

    def in_float64(self, varied: str) -> tuple[float, float] | None:
        """How far the variants of a case are apart where inputs are float64, and by rounding there; None where the
        function takes or gives no float64. What is no rounding stays as large."""
        self._wide = True
        try:
            trials = next(trials for of, _, trials in self.cases() if of == varied)
            results = [trial.compute() for trial in trials if trial.value != _NAN]
            bound = self.scatter() if self.narrow == torch.float64 else None
        except Exception:  # noqa: BLE001 - its weights may have another format
            return None
        finally:
            self._wide = False
        classes = apart(results, [*range(len(results))])
        return None if bound is None else (max(x["far"] for x in classes.values()), bound)

    def same_sums(self) -> bool | None:
        """Whether the function adds in the same shapes whatever the values of other requests are; None if unseen."""
        small, large = self.inputs(self.kept), self.inputs(self.largest)
        batches = [batch for kind, both in self._beside().items() if kind != _NAN for batch in both]
        sums = [sums_of(partial(_called, self._fn, self._cut(small, large, batch))) for batch in batches]
        return all(other == sums[0] for other in sums) if all(sums) else None

    def cases(self) -> Iterator[tuple[str, str, list[Trial]]]:
        """(what varies, name, variants) of every request of the largest batch. Raises ValueError: they can't be cut out
        of its inputs, and why."""
        kept, largest, everyone = self.kept, self.largest, [*range(self.largest)]
        starts = [min(start, largest - kept) for start in range(0, largest, kept)]
        many = min(len(starts), _EACH_MOST)
        starts = [starts[i * (len(starts) - 1) // (many - 1)] for i in range(many)]  # the first and the last among them
        windows = [_Batch(range(start, start + kept)) for start in starts]
        at = {request: (i, place) for i, window in enumerate(windows) for place, request in enumerate(window.requests)}
        joint = [(0, request) for request in at]
        each = [self._trial(kept, windows, [*at.values()]), self._trial(largest, [_Batch(everyone)], joint)]
        title = f"{len(at)} of {largest} requests, each in batches of {kept} and {largest}"
        yield "batch_size", title, each
        whole = [(0, request) for request in everyone]
        given = self._trial("as given", [_Batch(everyone)], whole)
        turned = self._trial("reversed", [_Batch(everyone[::-1])], whole[::-1])
        yield "position", f"{largest} requests of a batch in another order", [given, turned]
        # each half with the values of the other half changed; what the function refuses is left out
        wanted = [(batch, request) for batch, half in enumerate((everyone[::2], everyone[1::2])) for request in half]
        beside, *changed = [self._trial(kind, batches, wanted) for kind, batches in self._beside().items()]
        trials = [beside, *filter(_runs, changed)]
        yield "neighbour_values", f"{largest} requests beside other values", trials
        if len(set(self._lengths)) > 1:
            longest = max(everyone, key=self._lengths.__getitem__)
            short = [request for request in everyone if self._lengths[request] < self._lengths[longest]][:_PADDED_MOST]
            ways = {"equal lengths": lambda request: [request] * 3, "a longer one": lambda r: [r, longest, longest]}
            lengths = [
                self._trial(name, [_Batch(index(r)) for r in short], [(batch, 0) for batch in range(len(short))])
                for name, index in ways.items()
            ]
            yield "neighbour_length", f"{len(short)} requests beside copies and beside longer ones", lengths
        if self._layout and _runs(strided := self._trial("strided", [_Batch(everyone, "strided")], whole)):
            yield "layout", f"{largest} requests in wider rows of memory", [given, strided]

    def _beside(self) -> dict[str, list[_Batch]]:
        """How the values of each half change -> the batch for the even requests, and that for the odd ones. On a GPU a
        draw from zeros or NaN ends the process, so functions that give ids get neither."""
        everyone = range(self.largest)
        made = {"as given": [_Batch(everyone)] * 2, "others": list[_Batch]()}
        for others in (everyone[1::2], everyone[::2]):
            # where lengths matter they stay in the batch, at other positions
            now = [*others[1:], others[0]] if self._lengths else [others[-1]] * len(others)
            instead = dict(zip(others, now, strict=True))
            made["others"].append(_Batch([instead.get(request, request) for request in everyone]))
        kinds = ["reversed"] * bool(self._lengths)
        if self._floats:
            kinds += ["large"] if self.device == "cuda" and self._draws else _CHANGES
        return made | {k: [_Batch(everyone, k, others) for others in (everyone[1::2], everyone[::2])] for k in kinds}

    def _trial(self, name: Value, batches: Sequence[_Batch], wanted: Sequence[tuple[int, int]]) -> Trial:
        """The results of the requests at these (batch, position)."""

        def compute() -> torch.Tensor:
            small, large = self.inputs(self.kept), self.inputs(self.largest)
            results = [_called(self._fn, self._cut(small, large, batch)) for batch in batches]
            of = [self._requests(result, len(batch.requests)) for result, batch in zip(results, batches, strict=True)]
            return _joined([of[batch][place] for batch, place in wanted])

        return Trial(name, compute)

    def prepare(self) -> str:
        """Why requests can't be cut out of the largest batch; "" where they can."""
        if self._select is not None:
            return "select= was given"
        try:
            self._cut(self.inputs(self.kept), self.inputs(self.largest), _Batch([0]))
        except ValueError as error:
            return str(error)
        return ""

    def _cut(self, small: Any, large: Any, batch: _Batch) -> Any:
        """The inputs of those requests: rows of tensors as long as the batch, items of lists, and shared values."""
        if isinstance(small, torch.Tensor) and isinstance(large, torch.Tensor):
            if small.shape == large.shape:
                return large
            axis, sizes = self._axis, [*large.shape]
            if large.dim() > axis and sizes[axis] == self.largest:
                sizes[axis] = self.kept
            if [*small.shape] != sizes:
                raise ValueError("a tensor among the inputs has another layout in each batch")
            self._floats |= large.dtype.is_floating_point and large.element_size() > 1
            index = torch.tensor([*batch.requests], device=large.device)
            return _changed(large.index_select(axis, index), axis, batch)  # a copy, at an aligned address
        if isinstance(small, Mapping) and isinstance(large, Mapping) and small.keys() == large.keys():
            return {key: self._cut(small[key], large[key], batch) for key in large}
        if isinstance(small, tuple | list) and type(small) is type(large):
            if len(small) == len(large):
                parts = [self._cut(x, y, batch) for x, y in zip(small, large, strict=True)]
                return parts if isinstance(large, list) else tuple(parts)
            if (len(small), len(large)) == (self.kept, self.largest):
                return self._items(small, large, batch)
        if type(small) is int and type(large) is int and (small, large) == (self.kept, self.largest):
            return len(batch.requests)
        if small is large or (isinstance(large, str | int | float) and type(small) is type(large) and small == large):
            return large
        raise ValueError("an input that is no tensor is another in each batch")

    def _items(self, small: Any, large: Any, batch: _Batch) -> Any:
        """Of a list with an item for each request."""
        if any(_plain(x) and _plain(y) and x != y for x, y in zip(small, large, strict=False)):
            what = f"the first {self.kept} items of a list among the inputs should be equal in every batch"
            raise BadInputsError(what, "Put the same requests first in every batch.")
        if all(isinstance(x, str | list | tuple | torch.Tensor) for x in large):
            self._lengths = [len(x) for x in large]
        turned = set(batch.others) if batch.change == "reversed" else ()
        items = [_reversed(large[r]) if place in turned else large[r] for place, r in enumerate(batch.requests)]
        return items if isinstance(large, list) else tuple(items)

    def _requests(self, result: Any, size: int) -> list[torch.Tensor]:
        """The result of each request: rows along the batch's axis, or items of a list. Of several tensors, those of
        each request in one row, and what all share in each."""
        if isinstance(result, Mapping):
            result = tuple(result.values())
        if isinstance(result, tuple | list) and len(result) == 1:
            result = result[0]
        if isinstance(result, list) and len(result) == size and all(isinstance(x, torch.Tensor) for x in result):
            self.narrow = result[0].dtype
            return result
        parts = [*result] if isinstance(result, tuple) else [result]
        _check_tensors(parts)
        self._draws = any(x.dtype in (torch.int32, torch.int64) for x in parts)
        floats = [x.dtype for x in parts if x.dtype.is_floating_point]
        self.narrow = min(floats or [parts[0].dtype], key=lambda dtype: dtype.itemsize)
        parts = [x.movedim(self._axis, 0) if x.dim() > self._axis else x for x in parts]
        if len(parts) > 1:
            rows = [x.reshape(size, -1) if _has_rows(x, size) else x.reshape(1, -1).expand(size, -1) for x in parts]
            same = len({x.dtype for x in rows}) == 1
            parts = [torch.cat(rows if same else [x.double() for x in rows], 1)]
        whole = parts[0]
        if not _has_rows(whole, size):
            raise WrongResultError(f"a result of the shape {tuple(whole.shape)} has no row for each of {size} requests")
        return [*whole.split(len(whole) // size)]

    def _compared(self, result: Any, value: Value, *, whole: bool = False) -> torch.Tensor:
        """What is compared of a result; `whole`: that of every request."""
        if self._select is None:
            size, shape = int(value), tuple(getattr(result, "shape", ()))
            if isinstance(result, torch.Tensor) and result.numel() and self._sizes.setdefault(shape, size) != size:
                what = f"the result has the same shape {shape} for {self._sizes[shape]} and for {size} requests"
                how = "Choose with select= what is compared: all of it by lambda result, _: result. For a gradient use "
                raise BadInputsError(what, f"{how}nondet.check_gradient.")
            return _joined(self._requests(result, size)[: None if whole else self.kept])
        result = self._select(result, value)
        _check_tensors([result])
        self.narrow = result.dtype
        return result


def _check_tensors(results: Sequence[Any]) -> None:
    """Refuse results that can't be compared."""
    if other := [type(x).__name__ for x in results if not isinstance(x, torch.Tensor)]:
        what = f"the result is a {other[0]}, not a tensor"
        raise BadInputsError(what, "Choose with select= what of it is compared.")
    if not results or not all(x.numel() for x in results):
        raise WrongResultError("it gave nothing: an empty result compares nothing")


def _has_rows(x: torch.Tensor, size: int) -> bool:
    return x.dim() > 0 and len(x) % size == 0


def _joined(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """The results of several requests as one tensor; flat where their shapes differ."""
    same = len({x.shape[1:] for x in parts}) == 1 and parts[0].dim() > 0
    return torch.cat([*parts] if same else [x.flatten() for x in parts])


def _reversed(x: Any) -> Any:
    return x.flip(0) if isinstance(x, torch.Tensor) else x[::-1] if isinstance(x, list | tuple) else x


def _plain(x: Any) -> bool:
    """Whether it can be compared with ==."""
    return isinstance(x, str | int | float) or (isinstance(x, list | tuple) and all(map(_plain, x)))


def _changed(x: torch.Tensor, axis: int, batch: _Batch) -> torch.Tensor:
    """Rows with the change of a batch; whole numbers stay: as masks, positions and ids they have a meaning."""
    if batch.change == "strided":
        return x.new_zeros((*x.shape[:-1], x.shape[-1] + 8))[..., 8:].copy_(x)
    change = _CHANGES.get(batch.change)
    if change is None or not (batch.others and x.dtype.is_floating_point and x.element_size() > 1):
        return x
    others = torch.tensor([*batch.others], device=x.device)
    return x.index_copy(axis, others, change(x.index_select(axis, others)))


def _runs(trial: Trial) -> bool:
    """Whether a function takes such inputs at all."""
    try:
        trial.compute()
    except BadInputsError:
        raise
    except Exception:  # noqa: BLE001 - a function may refuse NaN, or memory that is not contiguous
        return False
    return True


def _arguments(inputs: Inputs) -> tuple[tuple[Any, ...], Mapping[str, Any]]:
    """Positional and keyword arguments of a call with these inputs."""
    if isinstance(inputs, Mapping):
        return (), inputs
    return (tuple(inputs) if isinstance(inputs, tuple | list) else (inputs,)), {}


def _called(fn: Function, inputs: Inputs) -> Any:
    arguments, keywords = _arguments(inputs)
    return fn(*arguments, **keywords)


def _differ(a: tuple[torch.Tensor, ...], b: tuple[torch.Tensor, ...]) -> bool:
    return len(a) != len(b) or any(x.shape != y.shape or not torch.equal(x, y) for x, y in zip(a, b, strict=True))


def _argument(name: str) -> str:
    return f"argument {name}" if name else "the tensor"


# Default sizes for an operator: one layer, and a sweep that takes a second or two on a CPU.
_SIZES: dict[str, dict[str, int]] = {"linear": {"m": 64, "k": 768, "n": 320}}
_ROWS = {"m": 64, "k": 1024}


def name_of(fn: Function) -> str:
    """ "package.module:function", which `--impl` takes for a function at the top of a module; a class's name else."""
    inner = fn.func if isinstance(fn, partial) else fn
    named = inner if hasattr(inner, "__qualname__") else type(inner)
    return one_line(f"{named.__module__}:{named.__qualname__}", 200)


def check_operator(
    fn: Function,
    operator: str = "linear",
    *,
    m: int | None = None,
    k: int | None = None,
    n: int | None = None,
    config: Mapping[str, int] | None = None,
    dtypes: Sequence[str] = ("float32",),
    device: str = "cpu",
    inputs: Sequence[str] | None = None,
    varied: Container[str] | None = None,
    full: bool = False,
    seed: int = 0,
) -> Run:
    """Test `fn` with the operator's probe, as `nondet probe --impl` does: a run with a row for each case. Arguments and
    errors are those of `nondet.check_operator`; m: the largest M of the sweep; k, n: sizes of the operator's axes.
    UserError, too, if no case was chosen, or `fn` does not take these shapes at its first call."""
    from nondet.probes.runner import Job, run_jobs

    known = {o: probe for o in operators() if (probe := OPERATOR_PROBES.get(o, o.replace("_", "-"))) in PROBES}
    if operator not in known:
        raise UnknownNameError("operator", operator, known)
    probe = load_probe(known[operator])
    sizes: dict[str, Any] = {"m": m, "k": k, "n": n}
    if not full and not any(size is not None for size in sizes.values()):
        sizes |= _SIZES.get(operator) or (_ROWS if operators()[operator].probe is not None else {})
    chosen = None if inputs is None else tuple(inputs)
    options = Options(device, tuple(dtypes), **sizes, config=dict(config or {}), inputs=chosen, seed=seed, full=full)
    name = name_of(fn)
    check_signature(fn, operator, name)
    loaded = LoadedImplementation(operator, name, fn)
    every = (case for case in probe.cases(options) if case.operator == operator and case.impls is None)
    cases = [case for case in every if varied is None or case.varied in varied]
    jobs = [Job(probe, case, name, device, loaded=loaded, first=case is cases[0]) for case in cases]
    if not jobs:
        raise UserError(f"no question about {operator} was chosen", "Give other `varied`, inputs or sizes.")
    plan = {"operator": operator, "impls": [name], "device": device, "dtypes": list(dtypes), "full": full, "seed": seed}
    plan |= {"sizes": sizes | {"config": options.config}, "inputs": None if inputs is None else list(inputs)}
    return run_of(list(run_jobs(jobs, seed, must_fit=True)), plan, seed)


def check(
    fn: Function,
    make_inputs: Callable[[Any], Inputs],
    over: Sequence[Value],
    *,
    varied: str = "batch_size",
    select: Select | None = None,
    axis: int | None = None,
    reference: Function | None = None,
    error: float | None = None,
    name: str = "",
) -> Run:
    """Compare the results of `fn` for the same requests in other batches: a run with a row for each thing that varied.
    Arguments and errors are those of `nondet.check`.

    `make_inputs` is called more than once for a value, and must return the same bits each time. Without `select` the
    values are batch sizes. Then inputs are checked: tensors of one shape in all batches must be equal, and tensors as
    long as the batch must begin with the same rows. After the leading requests over all sizes, every request of the
    largest batch is compared: with itself in the smallest (solo, where that is 1), in another order, beside other
    values, and, where inputs are lists of unequal lengths, beside copies of itself and beside longer ones. Its inputs
    are rows of tensors as long as the batch, and items of lists. Where they can't be cut this way, the first row has
    the reason, and only the leading requests are compared.

    Where bits differ the first row has whether that is rounding (`nondet.probes.rounding`). If a narrow dtype has too
    few elements for a sum cut in two to show in them, there is a warning and a note in the row.
    """
    values = list(over)
    _check_values(values, sizes=select is None)
    _check_call(make_inputs, values[0], "make_inputs", "a value of over")
    _check_call(fn, make_inputs(values[0]), "fn", "what make_inputs gives")
    subject = _Subject(fn, make_inputs, values, select, axis)
    case = f"the same requests over {varied} {values[0]} ... {values[-1]}, {len(values)} values"
    head = head_of(name or name_of(fn), case, varied, subject.device)
    graphs = _graphs()
    rows = _rows(head, subject, reference, error)
    # the verdict only says that nothing was compared, or that it was little
    if rows[0].status == Status.ERROR or "needed" in rows[0].extra:
        warnings.warn(f"{head.impl}: {rows[0].reason}", stacklevel=2)
    if hasattr(fn, "_torchdynamo_orig_callable") or _graphs() > graphs:
        rows = _compiled(rows, lambda head: _rows(head, subject, reference, error))
    plan = {"impls": [head.impl], "varied": varied, "over": list(values), "error": error}
    return run_of(rows, plan, None)


def _rows(head: Row, subject: _Subject, reference: Function | None, error: float | None) -> list[Row]:
    """A row for each thing that varied, with the finding in the first."""
    whole = subject.prepare()
    row = tried(head, lambda: _measured(head, subject, reference, error), raised=BadInputsError)
    rows, note = list[Row](), ""
    if row.status in (Status.IDENTICAL, Status.DIVERGENT) and subject.kept:
        note = f"only the first {subject.kept} of each batch were compared: {whole}" if whole else ""
        for varied, case, trials in () if whole else subject.cases():
            one = replace(head, case=case, varied=varied, axis="")
            rows.append(tried(one, partial(compare, one, trials), raised=BadInputsError))
    compared = max((r.difference.compared for r in (row, *rows) if r.difference is not None), default=0)
    few = _too_few(subject.dtype, compared) if {r.status for r in (row, *rows)} == {Status.IDENTICAL} else ""
    figures = {"rows": subject.kept, "elements": compared} if compared else {}
    if few:
        figures["needed"] = round(_SEEN / _SHARE[subject.dtype])
    first = replace(
        row,
        reason="; ".join(filter(None, (row.reason, note, few))),
        extra=row.extra | {name: figure for name, figure in figures.items() if figure},
        judged=_judged([row, *rows], subject, error if reference is None else None, whole),
    )
    known = {"dtype": subject.dtype, "shape": subject.shape}
    return [replace(one, **known) for one in (first, *rows)]


def _graphs() -> int:
    """How many graphs torch.compile has made in this process."""
    dynamo = sys.modules.get("torch._dynamo.utils")
    return int(dynamo.counters["stats"]["unique_graphs"]) if dynamo is not None else 0


def _compiled(rows: list[Row], again: Callable[[Row], list[Row]]) -> list[Row]:
    """The rows of a function that torch.compile compiled, with what its own switch is worth: where bits differ and it
    is off, all is compiled and measured again with it."""
    first, switch = rows[0], inductor_switch()
    if switch is None:
        return rows
    note = f"Inductor's batch_invariant is {'on' if switch else 'off'}: {_SWITCH}"
    rows[0] = replace(first, reason="; ".join(filter(None, (first.reason, note))))
    if switch or not any(row.differs for row in rows):
        return rows
    import torch._dynamo as dynamo
    from torch._inductor import config

    head = replace(first, impl="stock-inductor-invariant", role="", status="", judged=UNSET, extra={}, reason="")
    try:
        dynamo.reset()  # what is compiled does not follow the switch
        with config.patch(batch_invariant=True):
            return rows + again(head)
    finally:
        dynamo.reset()


def _too_few(dtype: str, compared: int) -> str:
    """Why this many equal elements show little; "" where there are enough."""
    share = _SHARE.get(dtype)
    if share is None or not compared or compared * share >= _SEEN:
        return ""
    cut = f"where a sum is cut in two, about one in {1 / share:,.0f} differs"
    few = f"only {compared:,} elements of {dtype} were compared"
    return f"{few}: {cut}, so that it takes {_SEEN / share:,.0f} to see it"


def head_of(label: str, case: str, varied: str, device: str, dtype: str = "unknown", **shape: int) -> Row:
    """The row of a user's function, with everything but figures."""
    return Row(
        probe="check", case=one_line(case, 400), operator=label, shape=shape, dtype=dtype, device=device,
        inputs="given", varied=varied, impl=label, exact=False, status="",
    )  # fmt: skip


def compare(head: Row, trials: Sequence[Trial], reference: torch.Tensor | None = None) -> Row:
    """The row of these variants, with how far its classes are apart."""
    # a first call may compile or tune, with kernels that are not the result's
    return measure(
        head, trials, warm=head.device == "cuda", reference=reference, extra=lambda *given: {"apart": apart(*given)}
    )


def _judged(rows: Sequence[Row], subject: _Subject, own: float | None, whole: str) -> Judged | UnsetType:
    """Whether what differs is rounding, and what looks so; unset where nothing does, or calls do not repeat. `own`: the
    caller's bound."""
    if any(row.replays_parted or row.wrong for row in rows) or not any(row.distinct > 1 for row in rows):
        return UNSET
    classes = {row.varied if i else "": row.extra["apart"] for i, row in enumerate(rows) if row.distinct > 1}
    far = {varied: max(x["far"] for x in of.values()) for varied, of in classes.items()}
    bound, dtype = own if own is not None else subject.scatter(), subject.narrow
    decide = partial(judged, bound=bound, dtype=dtype, own=own is not None)
    values = classes.get("neighbour_values", {})
    if [*values] == [_NAN]:
        return decide(values[_NAN]["far"], look="nan", certain=True)
    if numbers := [x for name, x in values.items() if name != _NAN]:
        look, same = "leak-factor" if any(x["factor"] for x in numbers) else "leak", subject.same_sums()
        found = decide(max(x["far"] for x in numbers), look=look, certain=bool(same))
        # sums may follow others' values, as those of experts do; in a short format a fault can be as small
        if found.kind == "open" or (found.kind == "rounding" and (same is None or dtype.itemsize < 4) and own is None):
            found = _decided(found, subject, "neighbour_values")
        if found.kind != "rounding":
            return found
    beyond = {varied for varied, x in far.items() if bound is not None and x > _BEYOND * bound}
    looks = {
        "varied": rows[0].varied != "batch_size",
        "shapes": whole.startswith("a tensor"),
        "padding": "neighbour_length" in beyond,
        "position": "position" in beyond,
        "factor": all(x["factor"] for x in classes.get("batch_size", classes.get("", {"": {"factor": 0.0}})).values()),
    }
    look = next((name for name, holds in looks.items() if holds), "number")
    found = decide(max(far.values()), look=look)
    return _decided(found, subject, max(far, key=far.__getitem__) or "batch_size") if found.kind == "open" else found


def _decided(found: Judged, subject: _Subject, varied: str) -> Judged:
    """The finding after the same in float64, where that is possible; for others' values it is open without."""
    wide = subject.in_float64(varied)
    # a function that rounds to its own format whatever it is given shows nothing there
    if wide is None or found.bound is None or wide[1] > found.bound / FINER:
        return replace(found, kind="open")
    return judged(*wide, torch.float64, found.look)


def _check_call(function: Function, inputs: Inputs, name: str, given: str) -> None:
    """Refuse a function that can't be called with these inputs, before each call of it fails."""
    arguments, keywords = _arguments(inputs)
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # a builtin without a signature
        return
    try:
        signature.bind(*arguments, **keywords)
    except TypeError as error:
        count = f"the keywords {', '.join(map(str, keywords))}" if keywords else f"{len(arguments)} positional"
        what = f"{name} takes ({', '.join(signature.parameters)}), and {given} is {count}: {error}"
        how = "Give make_inputs(size) -> a tensor, a tuple for fn(*inputs), or a mapping for fn(**inputs)."
        raise UserError(what, how) from None


def _measured(head: Row, subject: _Subject, reference: Function | None, error: float | None) -> Row:
    expected = subject.expected_of(reference) if reference is not None else None
    trials = [Trial(value, partial(subject.compute, value)) for value in subject.values]
    row = compare(head, trials, expected)
    size, worst, reason = row.difference.compared if row.difference else 0, row.worst_error, ""
    if worst is not None and error is not None and (off := worst.relative_norm or 0.0) > error:
        reason = f"off by {off:.3g} of the reference's norm, where {error:g} is allowed"
    elif expected is None and row.status == Status.IDENTICAL and row.nonfinite == size:
        reason = f"all {size} elements are NaN or infinite, which agrees with itself"
    if not reason or row.status == Status.WRONG:
        return row
    return replace(row, status=Status.WRONG, reason=reason)


def run_of(rows: list[Row], plan: dict[str, Any], seed: int | None) -> Run:
    """A run of these rows."""
    header = Header(
        format=FORMAT, schema=SCHEMA_VERSION, command="check", plan=plan, environment=collect(seed),
        started=datetime.now(UTC).isoformat(timespec="seconds"),
    )  # fmt: skip
    return Run(header=header, rows=rows)
