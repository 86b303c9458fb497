"""Tests of any function: the records that nondet's commands write, without a command.

`check_operator` tests a function as an implementation of a known operator, with the operator's probe. `check` tests any
callable: its results for the same requests in batches of several sizes. A divergence only means something if the
requests were the same, so inputs are checked for that before results.
"""

from __future__ import annotations

import inspect
import math
import time
import warnings
from collections.abc import Callable, Container, Mapping, Sequence
from datetime import UTC, datetime
from functools import partial
from typing import Any

import msgspec
import torch

from nondet.core.launch import check_device_alive
from nondet.core.measure import Fingerprint, Trial, failed, fingerprint, kept_warnings, measure, written_to
from nondet.core.records import FORMAT, SCHEMA_VERSION, Header, Row, Run, Status, Value
from nondet.core.registry import OPERATOR_PROBES, PROBES, LoadedImplementation, check_signature, load_probe, operators
from nondet.errors import UnknownNameError, UserError, WrongResultError, one_line

Inputs = Any
_EACH_MOST = 256  # requests of the largest batch, spread over it, that are computed again without the others
# Of the results' elements those that differ where a sum over K of 256 to 4,096 is cut in two and added in float32:
# 0.8 to 1.5 in 10,000 of bfloat16 and 5 to 14 of float16, measured on ordinary numbers (float32: 62 of 100).
_SHARE = {"bfloat16": 1e-4, "float16": 1e-3}
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


class _Subject:
    """A function with its inputs, as variants to measure."""

    def __init__(
        self, fn: Callable[..., Any], make: Callable[[Any], Inputs], values: Sequence[Value], select: Select | None
    ) -> None:
        self._fn, self._make, self._select, self.values = fn, make, select, values
        sizes = [value for value in values if isinstance(value, int)] if select is None else [0]
        self.kept, self.largest = min(sizes), max(sizes)
        self._prints: dict[Value, Fingerprint] = {}
        # name of an input -> the first size and shape, and prints of the whole (False) and of the kept rows (True)
        self._firsts: dict[str, tuple[Value, torch.Size, dict[bool, tuple[torch.Tensor, ...]]]] = {}
        self._gave = ""  # shape and dtype of the first result
        self._expected: torch.Size | None = None
        self._sizes: dict[tuple[int, ...], int] = {}  # shape of a whole result -> its number of requests
        # of the compared results; the shape also has the largest batch, where values are sizes
        self.dtype, self.shape = "unknown", dict[str, int]()
        self.device = next((tensor.device.type for _, tensor in _tensors(self.inputs(values[0]))), "cpu")

    def inputs(self, value: Value) -> Inputs:
        """The inputs of a value, compared with those of the values before it."""
        inputs = self._make(value)
        prints = fingerprint(inputs)
        before = self._prints.setdefault(value, prints)
        if changed := sorted(name for name in before if _differ(before[name], prints.get(name, ()))):
            what = f"make_inputs({value!r}) gave other numbers when it was called again ({_argument(changed[0])})"
            raise BadInputsError(what, "Draw them from a generator that is seeded in it.")
        if self._select is None:
            for name, tensor in _tensors(inputs):
                self._check_same_requests(name, tensor, int(value))
        return inputs

    def _check_same_requests(self, name: str, tensor: torch.Tensor, value: int) -> None:
        rows = tensor[: self.kept] if tensor.dim() else tensor
        prints = {True: fingerprint(rows)[""], False: fingerprint(tensor)[""]}
        first, shape, leading = self._firsts.setdefault(name, (value, tensor.shape, prints))
        batched = shape[:1] == (first,) and tensor.shape[:1] == (value,)
        # of another shape it is ragged, packed or padded: its layout is unknown
        if (batched or shape == tensor.shape) and _differ(leading[batched], prints[batched]):
            part = f"its first {self.kept} rows" if batched else "it"
            raise BadInputsError(
                f"{_argument(name)} of make_inputs({value}) is not make_inputs({first})'s: {part} should be equal",
                "Put the same requests first in every batch, or choose with select= what is compared.",
            )

    def expected_of(self, oracle: Callable[..., Any]) -> torch.Tensor:
        """The oracle's result for the first value, in float64; results must have its shape."""
        value = self.values[0]
        reference = self._compared(_called(oracle, self.inputs(value)), value)
        if reference.dtype != torch.float64:
            raise BadInputsError(f"the oracle gave {reference.dtype}", "Compute it in float64.")
        self._expected = reference.shape
        return reference

    def compute(self, value: Value) -> torch.Tensor:
        """The compared part of the result for one value. Raises WrongResultError: it is empty, of another shape or
        dtype than before, or an input was written to."""
        inputs = self.inputs(value)
        result = self._compared(_called(self._fn, inputs), value)
        if changed := written_to(self._prints[value], inputs):
            raise WrongResultError(f"it wrote to its input: {', '.join(map(_argument, changed))}")
        gave = f"{tuple(result.shape)} {result.dtype}"
        if not self._gave:
            self._gave, self.dtype = gave, str(result.dtype).removeprefix("torch.")
            largest = {"M": self.largest} if self._select is None else {}
            self.shape = largest | {f"axis {i}": size for i, size in enumerate(result.shape)}
        if gave != self._gave:
            raise WrongResultError(f"it gave {gave} at {value!r}, and {self._gave} at {self.values[0]!r}")
        if self._expected is not None and result.shape != self._expected:
            raise WrongResultError(f"it gave the shape {tuple(result.shape)}, not {tuple(self._expected)}")
        return result

    def each(self) -> tuple[int, list[Trial]]:
        """How many requests of the largest batch are computed in the smallest as well, at most `_EACH_MOST` windows of
        them, and the two variants. Raises ValueError: they can't be cut out of its inputs, and why."""
        kept, largest = self.kept, self.largest
        self._cut(self.inputs(kept), self.inputs(largest), 0)
        starts = [min(start, largest - kept) for start in range(0, largest, kept)]
        many = min(len(starts), _EACH_MOST)
        starts = [starts[i * (len(starts) - 1) // (many - 1)] for i in range(many)]  # the first and the last among them

        def separate() -> torch.Tensor:
            small, large = self.inputs(kept), self.inputs(largest)
            cut = (self._cut(small, large, start) for start in starts)
            return torch.cat([self._compared(_called(self._fn, inputs), kept) for inputs in cut])

        def together() -> torch.Tensor:
            result = self._compared(_called(self._fn, self.inputs(largest)), largest, whole=True)
            rows = len(result) // largest
            return torch.cat([result[start * rows : (start + kept) * rows] for start in starts])

        return min(largest, many * kept), [Trial(kept, separate), Trial(largest, together)]

    def _cut(self, small: Any, large: Any, start: int) -> Any:
        """The part of the inputs of those requests: rows of tensors as long as the batch, and shared values."""
        if isinstance(small, torch.Tensor) and isinstance(large, torch.Tensor):
            if small.shape == large.shape:
                return large
            if (small.shape[:1], large.shape[:1]) == ((self.kept,), (self.largest,)):
                return large[start : start + self.kept].clone()  # a copy, at an aligned address
            raise ValueError("a tensor among the inputs has another layout in each batch")
        if isinstance(small, Mapping) and isinstance(large, Mapping) and small.keys() == large.keys():
            return {key: self._cut(small[key], large[key], start) for key in large}
        if isinstance(small, tuple | list) and type(small) is type(large) and len(small) == len(large):
            parts = [self._cut(x, y, start) for x, y in zip(small, large, strict=True)]
            return parts if isinstance(large, list) else tuple(parts)
        if small is large or (isinstance(large, str | int | float) and type(small) is type(large) and small == large):
            return large
        raise ValueError("an input that is no tensor is another in each batch")

    def _compared(self, result: Any, value: Value, *, whole: bool = False) -> torch.Tensor:
        """What is compared of a result; `whole`: that of every request."""
        if self._select is not None:
            result = self._select(result, value)
        if isinstance(result, tuple | list) and len(result) == 1:
            result = result[0]
        if not isinstance(result, torch.Tensor):
            what = f"the result is a {type(result).__name__}, not a tensor"
            raise BadInputsError(what, "Choose with select= what of it is compared.")
        if not result.numel():
            raise WrongResultError("it gave nothing: an empty result compares nothing")
        if self._select is not None:
            return result
        size, shape = int(value), tuple(result.shape)
        if self._sizes.setdefault(shape, size) != size:
            what = f"the result has the same shape {shape} for {self._sizes[shape]} and for {size} requests"
            raise BadInputsError(what, "Choose with select= what is compared: all of it by lambda result, _: result.")
        if not result.dim() or len(result) % size:
            raise WrongResultError(f"a result of the shape {shape} has no row for each of {size} requests")
        return result if whole else result[: self.kept * (len(result) // size)]


def _arguments(inputs: Inputs) -> tuple[tuple[Any, ...], Mapping[str, Any]]:
    """Positional and keyword arguments of a call with these inputs."""
    if isinstance(inputs, Mapping):
        return (), inputs
    return (tuple(inputs) if isinstance(inputs, tuple | list) else (inputs,)), {}


def _called(fn: Callable[..., Any], inputs: Inputs) -> Any:
    arguments, keywords = _arguments(inputs)
    return fn(*arguments, **keywords)


def _tensors(inputs: Inputs, name: str = "") -> list[tuple[str, torch.Tensor]]:
    """All tensors of nested inputs, under the names of `fingerprint`."""
    if isinstance(inputs, torch.Tensor):
        return [(name, inputs)]
    if not isinstance(inputs, Mapping | tuple | list):
        return []
    parts = inputs.items() if isinstance(inputs, Mapping) else enumerate(inputs)
    return [pair for part, value in parts for pair in _tensors(value, f"{name}.{part}" if name else str(part))]


def _differ(a: tuple[torch.Tensor, ...], b: tuple[torch.Tensor, ...]) -> bool:
    return len(a) != len(b) or any(x.shape != y.shape or not torch.equal(x, y) for x, y in zip(a, b, strict=True))


def _argument(name: str) -> str:
    return f"argument {name}" if name else "the tensor"


# Default sizes for an operator: one layer, and a sweep that takes a second or two on a CPU.
_SIZES: dict[str, dict[str, int]] = {"linear": {"m": 64, "k": 768, "n": 320}}
_ROWS = {"m": 64, "k": 1024}


def name_of(fn: Callable[..., Any]) -> str:
    """ "package.module:function", which `--impl` takes for a function at the top of a module; a class's name else."""
    inner = fn.func if isinstance(fn, partial) else fn
    named = inner if hasattr(inner, "__qualname__") else type(inner)
    return one_line(f"{named.__module__}:{named.__qualname__}", 200)


def _probe_of(operator: str) -> str:
    probes = {name: OPERATOR_PROBES.get(name, name.replace("_", "-")) for name in operators()}
    known = {name: probe for name, probe in probes.items() if probe in PROBES}
    if operator not in known:
        raise UnknownNameError("operator", operator, known)
    return known[operator]


def check_operator(
    fn: Callable[..., Any], operator: str = "linear", *, m: int | None = None, k: int | None = None,
    n: int | None = None, config: Mapping[str, int] | None = None, dtypes: Sequence[str] = ("float32",),
    device: str = "cpu", inputs: Sequence[str] | None = None, varied: Container[str] | None = None,
    full: bool = False, seed: int = 0,
) -> Run:  # fmt: skip
    """Test `fn` with the operator's probe, as `nondet probe --impl` does: a run with a row for each case.

    Args:
        m: Largest M of the sweep; `k`, `n`: sizes of the operator's axes; `config`: of a model, for attention.
        varied: What to test: batch_size, position, run, neighbour_values, ...; None: everything.

    The other arguments are those of `nondet.check_operator`. Raises UserError: an unknown operator, or sizes that it
    can't have; no case was chosen; `fn` does not take the operator's arguments, or at its first call not these shapes.
    """
    from nondet.probes.base import Options
    from nondet.probes.runner import Job, run_jobs

    probe = load_probe(_probe_of(operator))
    sizes: dict[str, Any] = {"m": m, "k": k, "n": n}
    if not full and not any(size is not None for size in sizes.values()):
        sizes |= _SIZES.get(operator) or (_ROWS if operators()[operator].probe is not None else {})
    chosen = None if inputs is None else tuple(inputs)
    options = Options(device, tuple(dtypes), **sizes, config=dict(config or {}), inputs=chosen, seed=seed, full=full)
    name = name_of(fn)
    check_signature(fn, operator, name)
    loaded = LoadedImplementation(operator, name, fn)
    cases = [
        case
        for case in probe.cases(options)
        if case.operator == operator and case.impls is None and (varied is None or case.varied in varied)
    ]
    jobs = [Job(probe, case, name, device, loaded=loaded, first=case is cases[0]) for case in cases]
    if not jobs:
        raise UserError(f"no question about {operator} was chosen", "Give other `varied`, inputs or sizes.")
    plan = {"operator": operator, "impls": [name], "device": device, "dtypes": list(dtypes), "full": full, "seed": seed}
    plan |= {"sizes": sizes | {"config": options.config}, "inputs": None if inputs is None else list(inputs)}
    return _run(list(run_jobs(jobs, seed, must_fit=True)), plan, seed)


def check(
    fn: Callable[..., Any], make_inputs: Callable[[Any], Inputs], over: Sequence[Value], *, varied: str = "batch_size",
    select: Select | None = None, oracle: Callable[..., Any] | None = None, allowed: float | None = None,
    name: str = "",
) -> Run:  # fmt: skip
    """Compare the results of `fn` for the same requests in batches of other sizes: a run of one or two rows.

    `make_inputs(value)` is called more than once for a value of `over`, and must return the same bits each time.

    Without `select` the values are batch sizes. Then the leading requests, as many as the smallest batch has, must be
    the same in every batch, and their part of the result, along its first axis, is compared. A second row compares
    every request of the largest batch with itself in the smallest (solo, where that is 1), so that position and
    neighbours vary too: its inputs are the rows of tensors as long as the batch. Where inputs can't be cut this way,
    the first row has the reason, and only the leading requests are compared. Inputs are checked: tensors of one shape
    in all batches must be equal, and tensors whose first axis is the batch must begin with the same rows. With `select`
    inputs are not compared with each other. Without an oracle a result is wrong if it holds only NaN and infinity.

    If a narrow dtype has too few elements for a sum cut in two to show in them, there is a warning and a note in the
    row. The arguments, and what is raised, are those of `nondet.check`.
    """
    started = time.perf_counter()
    values = list(over)
    _check_values(values, sizes=select is None)
    label = name or name_of(fn)
    _check_call(make_inputs, values[0], "make_inputs", "a value of over")
    _check_call(fn, make_inputs(values[0]), "fn", "what make_inputs gives")
    subject = _Subject(fn, make_inputs, values, select)
    case = f"the same requests over {varied} {values[0]} ... {values[-1]}, {len(values)} values"
    head = Row(
        probe="check", case=one_line(case, 400), operator=label, shape={}, dtype="unknown", device=subject.device,
        inputs="given", varied=varied, impl=label, exact=False, status="",
    )  # fmt: skip
    row = _tried(head, started, lambda: _measured(head, subject, oracle, allowed, started))
    rows, note = _each(head, subject, row)
    compared = max((r.difference.compared for r in (row, *rows) if r.difference is not None), default=0)
    few = _too_few(subject.dtype, compared) if {r.status for r in (row, *rows)} == {Status.IDENTICAL} else ""
    if said := row.reason if row.status == Status.ERROR else few:  # the verdict only says that nothing was compared
        warnings.warn(f"{label}: {said}", stacklevel=2)
    extra = {"rows": subject.kept} if compared and subject.kept else {}
    extra |= {"elements": compared} if compared else {}
    row = msgspec.structs.replace(row, reason="; ".join(filter(None, (row.reason, note, few))), extra=extra)
    known = {"dtype": subject.dtype, "shape": subject.shape}
    plan = {"impls": [label], "varied": varied, "over": list(values), "allowed": allowed}
    return _run([msgspec.structs.replace(one, **known) for one in (row, *rows)], plan, None)


def _tried(head: Row, started: float, measured: Callable[[], Row]) -> Row:
    """The row, or one that says why it could not be measured."""
    with kept_warnings() as caught:
        try:
            return measured()
        except BadInputsError:
            raise
        except (Exception, SystemExit) as error:  # noqa: BLE001 - whatever a kernel raises becomes a row, as in the runner
            check_device_alive(head.device, error)
            return failed(head, error, started, caught)


def _too_few(dtype: str, compared: int) -> str:
    """Why this many equal elements show little; "" where there are enough."""
    share = _SHARE.get(dtype, math.inf)
    if not compared or compared * share >= _SEEN:
        return ""
    about = f"about one in {1 / share:,.0f} differs, so that it takes {_SEEN / share:,.0f} to see it"
    return f"only {compared:,} elements of {dtype} were compared: where a sum is cut in two, {about}"


def _each(head: Row, subject: _Subject, first: Row) -> tuple[list[Row], str]:
    """Every request of the largest batch, in that batch and in the smallest, as one row; or none, and a note why."""
    if first.status not in (Status.IDENTICAL, Status.DIVERGENT) or not subject.kept:
        return [], ""
    started, small, large = time.perf_counter(), subject.kept, subject.largest
    try:
        many, trials = subject.each()
    except ValueError as error:
        return [], f"only the first {small} of each batch were compared: {error}"
    head = msgspec.structs.replace(head, case=f"{many} of {large} requests, each in batches of {small} and {large}")
    return [_tried(head, started, lambda: measure(head, trials, warm=head.device == "cuda", started=started))], ""


def _check_call(function: Callable[..., Any], inputs: Inputs, name: str, given: str) -> None:
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
        hint = "Give make_inputs(size) -> a tensor, a tuple for fn(*inputs), or a mapping for fn(**inputs)."
        raise UserError(what, hint) from None


def _measured(
    head: Row, subject: _Subject, oracle: Callable[..., Any] | None, allowed: float | None, started: float
) -> Row:
    reference = subject.expected_of(oracle) if oracle is not None else None
    # a first call may compile or tune, with kernels that are not the result's
    trials, warm = [Trial(value, partial(subject.compute, value)) for value in subject.values], head.device == "cuda"
    row = measure(head, trials, warm=warm, reference=reference, started=started)
    size, worst, reason = row.difference.compared if row.difference else 0, row.worst_error, ""
    if worst is not None and allowed is not None and (off := worst.relative_norm or 0.0) > allowed:
        reason = f"off by {off:.3g} of the oracle's norm, where {allowed:g} is allowed"
    elif reference is None and row.status == Status.IDENTICAL and row.nonfinite == size:
        reason = f"all {size} elements are NaN or infinite, which agrees with itself"
    if not reason or row.status == Status.WRONG:
        return row
    return msgspec.structs.replace(row, status=Status.WRONG, reason=reason)


def _run(rows: list[Row], plan: dict[str, Any], seed: int | None) -> Run:
    from nondet.core.environment import collect

    header = Header(
        format=FORMAT, schema=SCHEMA_VERSION, command="check", plan=plan, environment=collect(seed),
        started=datetime.now(UTC).isoformat(timespec="seconds"),
    )  # fmt: skip
    return Run(header=header, rows=rows)
