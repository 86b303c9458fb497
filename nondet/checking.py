"""Any function under the questions that nondet asks: the records that its commands write, without a command.

`check_operator` puts a function in the place of a known operator and asks the operator's probe about it: hard inputs,
every place, other company, other moments, and the float64 oracle. `check` asks about any callable: its results for
batches of several sizes, row by row. What a result is compared by, when it is computed again and when it is wrong is
`nondet.core.measure`'s, as in every command.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Container, Mapping, Sequence
from datetime import UTC, datetime
from functools import partial
from typing import Any

import msgspec
import torch

from nondet.core.compare import error_against
from nondet.core.measure import Trial, check_device_alive, failed, kept_warnings, measure
from nondet.core.records import FORMAT, SCHEMA_VERSION, Header, Row, Run, Status, Value
from nondet.core.registry import OPERATOR_PROBES, PROBES, LoadedImplementation, check_signature, load_probe, operators
from nondet.errors import UnknownNameError, UserError, one_line
from nondet.subject import BadInputsError, Inputs, Select, Subject, checked_values

__all__ = ["OPERATOR_PROBES", "check", "check_operator", "name_of"]

# What is asked of an operator unless the caller says: one layer, and a sweep that takes a second or two on a CPU.
_SIZES: dict[str, dict[str, int]] = {"linear": {"m": 64, "k": 768, "n": 320}}
_ROWS = {"m": 64, "k": 1024}


def name_of(fn: Callable[..., Any]) -> str:
    """ "package.module:function", which `--impl` takes for a function at the top of a module; a class's name else."""
    inner = fn.func if isinstance(fn, partial) else fn
    named = inner if hasattr(inner, "__qualname__") else type(inner)
    return one_line(f"{named.__module__}:{named.__qualname__}", 200)


def probe_of(operator: str) -> str:
    """The probe that asks about an operator.

    Raises:
        UnknownNameError: no probe does.
    """
    probe = OPERATOR_PROBES.get(operator, operator.replace("_", "-"))
    if probe not in PROBES or operator not in operators():
        known = {name for name in operators() if OPERATOR_PROBES.get(name, name.replace("_", "-")) in PROBES}
        raise UnknownNameError("operator", operator, known)
    return probe


def check_operator(
    fn: Callable[..., Any],
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
    """Ask the operator's probe about `fn`, as `nondet probe --impl` would: a run with a row for each question.

    Args:
        fn: Takes what the operator takes (`nondet.kernels.reference`), tensors on `device`.
        operator: linear, attention, rms_norm, softmax, ...
        m: Largest M of the sweep.
        k, n: Sizes of the operator's axes.
        config: Sizes of a model, for attention: heads, kv_heads, head_dim.
        inputs: Kinds of input (`nondet.core.inputs.KINDS`); None: those of the probe, the hard ones among them.
        varied: What is asked: batch_size, position, run, neighbour_values, ...; None: everything.
        full: The long sweep.

    Raises:
        UserError: an unknown operator, or sizes that make no sense for it; none of its cases was chosen; `fn` takes
            other arguments than the operator.
    """
    from nondet.probes.base import Options
    from nondet.runner import Job, run_jobs

    probe = load_probe(probe_of(operator))
    default = _SIZES.get(operator) or (_ROWS if operators()[operator].probe is not None else {})
    if not full and m is None and k is None and n is None:
        m, k, n = default.get("m"), default.get("k"), default.get("n")
    options = Options(
        device=device,
        dtypes=tuple(dtypes),
        m=m,
        k=k,
        n=n,
        config=dict(config or {}),
        inputs=tuple(inputs) if inputs is not None else None,
        seed=seed,
        full=full,
    )
    name = name_of(fn)
    check_signature(fn, operator, name)
    loaded = LoadedImplementation(operator, name, fn)
    jobs = [
        Job(probe, case, name, device, loaded=loaded)
        for case in probe.cases(options)
        if case.operator == operator and case.impls is None and (varied is None or case.varied in varied)
    ]
    if not jobs:
        raise UserError(f"no question about {operator} was chosen", "Give other `varied`, inputs or sizes.")
    rows = list(run_jobs(jobs, seed, set()))
    plan = {
        "operator": operator,
        "impls": [name],
        "device": device,
        "dtypes": list(dtypes),
        "sizes": {"m": m, "k": k, "n": n, "config": dict(config or {})},
        "inputs": list(inputs) if inputs is not None else None,
        "full": full,
        "seed": seed,
    }
    return _run(rows, plan, seed)


def check(
    fn: Callable[..., Any],
    make_inputs: Callable[[Any], Inputs],
    over: Sequence[Value],
    *,
    varied: str = "batch_size",
    select: Select | None = None,
    oracle: Callable[..., Any] | None = None,
    allowed: float | None = None,
    name: str = "",
) -> Run:
    """Compare what `fn` gives for the same requests in batches of other sizes: a run of one row.

    For each value of `over`, `make_inputs(value)` gives the inputs: a tensor, a tuple for `fn(*inputs)`, or a mapping
    for `fn(**inputs)`. It is called more than once for a value, and must give the same bits each time.

    Without `select` the values are batch sizes. Then the leading requests, as many as the smallest batch has, must be
    the same in every batch, and their part of the result, along its first axis, is what is compared. **Only they are:**
    a kernel that treats the last rows of a batch otherwise shows in `check_operator`, or with a `select` and a
    `make_inputs` that put the request there. Inputs are held to it: tensors of one shape in all batches must be equal,
    and tensors whose first axis is the batch must begin with the same rows.

    Args:
        over: Two or more batch sizes, or with `select` any numbers or names.
        varied: What `over` holds, for the row: batch_size, position, neighbour_values, run, ...
        select: select(result, value) is the tensor to compare. Inputs are then not compared with each other.
        oracle: Takes the inputs of the first value and gives what `fn` ought to, in float64.
        allowed: The largest ||result - oracle|| / ||oracle|| that is right. None: NaN and infinity alone are wrong.
            Without an oracle they are where a result holds nothing else.
        name: What the function is called in the row.

    Raises:
        UserError: fewer than two values, or inputs that are not the same requests.
    """
    started = time.perf_counter()
    values = checked_values(over, sizes=select is None)
    label = name or name_of(fn)
    subject = Subject(fn, make_inputs, values, select)
    head = Row(
        probe="check",
        case=one_line(f"the same requests over {varied} {values[0]} ... {values[-1]}, {len(values)} values", 400),
        operator=label,
        shape={},
        dtype="unknown",
        device="cpu",
        inputs="given",
        varied=varied,
        impl=label,
        exact=False,
        status="",
    )
    with kept_warnings() as caught:
        try:
            row = _measured(head, subject, oracle, allowed, started)
        except BadInputsError:
            raise
        except (Exception, SystemExit) as error:  # noqa: BLE001 - whatever a kernel raises becomes a row, as in the runner
            row = failed(head, error, started, caught)
            check_device_alive(subject.device, error)
    row = msgspec.structs.replace(row, dtype=subject.dtype, device=subject.device, shape=subject.shape)
    plan = {"impls": [label], "varied": varied, "over": list(values), "allowed": allowed}
    return _run([row], plan, None)


def _measured(
    head: Row, subject: Subject, oracle: Callable[..., Any] | None, allowed: float | None, started: float
) -> Row:
    reference = subject.asked_of(oracle) if oracle is not None else None
    worst: list[float] = []

    sizes: list[int] = []

    def extra(results: list[torch.Tensor]) -> dict[str, Any]:
        sizes.append(results[0].numel())
        if reference is not None and allowed is not None:
            errors = [error_against(result, reference).relative_norm for result in results]
            worst.extend(error for error in errors if error is not None)
        return {"rows": subject.kept} if subject.kept else {}

    row = measure(
        msgspec.structs.replace(head, device=subject.device),
        [Trial(value, partial(subject.compute, value)) for value in subject.values],
        warm=subject.device == "cuda",  # a first call may compile or tune, with kernels that are not the result's
        reference=reference,
        extra=extra,
        started=started,
    )
    if row.status != Status.WRONG and worst and max(worst) > float(allowed or 0.0):
        reason = f"off by {max(worst):.3g} of the oracle's norm, where {allowed:g} is allowed"
        row = msgspec.structs.replace(row, status=Status.WRONG, reason=reason)
    if reference is None and row.status == Status.IDENTICAL and [row.nonfinite] == sizes:
        reason = f"all {row.nonfinite} elements are NaN or infinite, which agrees with itself"
        row = msgspec.structs.replace(row, status=Status.WRONG, reason=reason)
    return row


def _run(rows: list[Row], plan: dict[str, Any], seed: int | None) -> Run:
    """The records as a run that a command would have written."""
    from nondet.core.environment import collect

    header = Header(
        format=FORMAT,
        schema=SCHEMA_VERSION,
        command="check",
        plan=plan,
        environment=collect(seed),
        started=datetime.now(UTC).isoformat(timespec="seconds"),
    )
    return Run(header=header, rows=rows)
