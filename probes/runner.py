"""Runs cases under implementations. A failed case is a row with its reason; shapes may come from a trace."""

from __future__ import annotations

import functools
import sys
import time
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from math import prod
from typing import Any, NamedTuple

import msgspec
import torch

from nondet.core import registry
from nondet.core.compare import identical
from nondet.core.inputs import ORDER
from nondet.core.measure import Fingerprint, fingerprint, measure, written_to
from nondet.core.records import Axis, Culprit, Judged, Row, Run, Status
from nondet.core.registry import LoadedImplementation, load_implementation, load_object, load_probe, operators
from nondet.core.watch import Answers, Watch
from nondet.errors import MisfitError, UserError, WrongResultError
from nondet.probes.base import Case, Classes, Operator, Options, Probe, checked, fitted, tried
from nondet.probes.pointwise import OPERATORS
from nondet.probes.rounding import judged_classes, orders_apart

# torch's name of an operator -> the probe that tests it.
_PROBES: dict[str, str] = {
    **dict.fromkeys(("linear", "matmul", "mm", "addmm"), "matmul"),
    "grouped_mm": "grouped-matmul",
    **dict.fromkeys(("scaled_dot_product_attention", "attention"), "attention"),
    **dict.fromkeys(("mean", "sum"), "reduction"),
    **{name: name.replace("_", "-") for name in ("softmax", "log_softmax", "logsumexp", "cumsum", "rms_norm")},
}


class Met(NamedTuple):
    """A culprit as a probe can test it."""

    probe: str
    shapes: tuple[tuple[int, int], ...]  # of the call in either arm: (rows, keys of attention), or (elements, 0)
    dtype: str
    own: int = 0  # keys that the row in question sees
    k: int | None = None  # `k`, `n`: sizes of the operator's axes
    n: int | None = None
    config: Mapping[str, int] = {}  # heads, where it has any
    operator: str = ""  # which of the probe's, where it tests several

    def options(self, options: Options) -> Options:
        """The options with these sizes; the user's own stay."""
        sizes: dict[str, Any] = {"k": self.k, "n": self.n, "config": self.config, "dtypes": (self.dtype,)}
        left = {name: size for name, size in sizes.items() if getattr(options, name) in (None, {})}
        return replace(options, met=self.shapes, own=self.own, operator=self.operator, **left)


def met_in(run: Run) -> Met:
    """The first responsible operator in the run's trace. Raises UserError: none is named, or no probe tests it."""
    culprit = next((c for c in run.culprits if c.call), None)
    if culprit is None:
        what = "its trace named no operator" if run.culprits or run.trace_verdicts else "it holds no trace"
        what = f"{run.source or 'the run'} names no operator that differs: {what}"
        raise UserError(what, "Give one of `nondet trace`.")
    name = culprit.call.removeprefix("Tensor.").removeprefix("_")
    met = _met(name, culprit, str(run.header.plan.get("dtype", "bfloat16")))
    if met is None:
        what = f"no probe tests `{culprit.call}` of {culprit.module} at the shapes of {run.source or 'the run'}"
        scaled = "`nondet probe scaled-matmul --k K --n N` tests torch._scaled_mm."
        raise UserError(what, scaled if "[Float8" in name else f"Probes test {', '.join([*_PROBES, *OPERATORS])}.")
    return met


def _met(name: str, culprit: Culprit, dtype: str) -> Met | None:
    """None: no probe tests the operator, or not at these shapes."""
    probe = "rms-norm" if name.endswith("RMSNorm") else "pointwise" if name in OPERATORS else _PROBES.get(name)
    arms = [{argument: shape for argument, shape in arm.items() if shape} for arm in culprit.shapes]
    if probe is None or len(arms) != 2:
        return None

    def of(*arguments: str) -> list[list[int]]:
        """The shape in either arm of the first of these arguments that it has."""
        return [next((arm[argument] for argument in arguments if argument in arm), []) for arm in arms]

    left, right = (of("1"), of("2")) if name == "addmm" else (of("0"), of("1"))
    if probe == "attention":
        left, right = (left, right) if right[0] else (of("query"), of("keys", "key"))
        if any(len(shape) != 4 for shape in (*left, *right)):
            return None
        heads = {"heads": left[0][1], "kv_heads": right[0][1], "head_dim": left[0][3]}
        seen = min(culprit.position + 1, *(keys[2] for keys in right))
        sizes = tuple((q[2], keys[2]) for q, keys in zip(left, right, strict=True))
        return Met(probe, sizes, dtype, seen, config=heads)
    if probe == "pointwise":
        counts = tuple((prod(shape), 0) for shape in left)
        return Met(probe, counts, dtype, k=max(counts)[0], operator=name)
    if any(len(shape) < 2 for shape in left):
        return None
    rows, k = tuple((prod(shape[:-1]), 0) for shape in left), left[0][-1]
    if probe == "grouped-matmul":
        if len(right[0]) != 3:
            return None
        experts, k, n = right[0]
        return Met(probe, rows, dtype, k=k, n=n, config={"experts": experts})
    if probe != "matmul":
        return Met(probe, rows, dtype, k=k)
    out = of("out")[0]
    return Met(probe, rows, dtype, k=k, n=out[-1]) if len(right[0]) == 2 and out else None


@dataclass
class Job:
    """One case under one implementation."""

    probe: Probe
    case: Case
    impl: str
    device: str
    note: str = ""  # how the implementation came to be judged as this operator, for the reader
    loaded: LoadedImplementation | None = None  # the implementation, if it is at hand; None: it is loaded by its name
    place: int | None = None  # position among all jobs of the plan, from 0; None outside of one
    first: bool = False  # a user's function is called in it first: whether it takes the operator's operands shows there

    @property
    def key(self) -> tuple[str, ...]:
        """The `Row.key` of its row."""
        return self.head.key

    @property
    def head(self) -> Row:
        """The row, with everything but figures."""
        case, place = self.case, msgspec.UNSET if self.place is None else self.place
        same = ("operator", "dtype", "inputs", "varied", "exact", "demonstration")
        fields: dict[str, Any] = {name: getattr(case, name) for name in same}
        fields |= {"probe": self.probe.name, "case": case.name, "shape": dict(case.shape), "axis": case.axis or ""}
        return Row(device=self.device, impl=self.impl, status="", place=place, **fields)


def plan_jobs(probe_names: Iterable[str], impls: Iterable[str], options: Options) -> list[Job]:
    """All jobs, in order. Raises UserError: an unknown probe or implementation, or sizes that make no sense."""
    names, jobs, probed, called = list(impls), list[Job](), set[str](), set[str]()
    for probe_name in probe_names:
        probe = load_probe(probe_name)
        cases = list(probe.cases(options))
        own = list(dict.fromkeys(c.operator for c in cases if c.impls is None and c.operator in operators()))
        probed.update(own)
        for case in cases:
            for impl in case.impls or _expand(names, case.operator, options.device, own):
                user = ":" in impl and "=" not in impl and len(own) > 1
                note = f"{own[0]}, the first operator of {probe_name}; others: --impl {own[-1]}={impl}" if user else ""
                first = ":" in impl and impl not in called
                called.add(impl)
                jobs.append(Job(probe, case, impl, options.device, note, place=len(jobs), first=first))
    for name in names:
        operator, named, _ = name.partition("=")
        if named and operator not in probed:
            hint = f"They have {', '.join(sorted(probed)) or 'none that takes an implementation'}."
            raise UserError(f"--impl {name!r}: no probe asked for has an operator {operator!r}", hint)
        if ":" in name and name not in called:
            what = f"--impl {name!r}: no case asked for takes a function of yours"
            raise UserError(what, "Name its operator's probe.")
    if not jobs:
        what = f"nothing to measure: no case of these probes has --impl {','.join(names)} on {options.device}"
        raise UserError(what, "See `nondet probe --help-all`.")
    return jobs


def _expand(names: list[str], operator: str, device: str, own: list[str]) -> list[str]:
    """The implementations of one operator that the names select: "stock" includes its named backends (stock-flash,
    ...), and names that only other operators have drop out. A user's function computes one operator:
    "linear=module:function" names it, else it is the first of `own`, the probe's, in the order of its cases."""
    if operator not in operators():
        return names
    known = registry.implementation_names(operator, device)
    chosen: dict[str, None] = {}  # each once, in the given order: two rows of one key can't be resumed
    for name in names:
        if ":" in name:
            named = name.partition("=")[0] if "=" in name else own[0]
            if named == operator:
                load_implementation(operator, name, device)  # raises now if it can't be loaded, not in every row
                chosen[name] = None
            continue
        if not any(o.implementation(name) for o in operators().values()):
            load_implementation(operator, name, device)  # raises now if there is none
        if name in known:
            chosen[name] = None
        chosen.update((k, None) for k in known if k.startswith(f"{name}-"))
    return list(chosen)


def run_jobs(
    jobs: Iterable[Job], seed: int, done: Container[tuple[str, ...]] = (), *, must_fit: bool = False
) -> Iterator[Row]:
    """Measure every job whose key is not in `done`, and yield its row at once. Inputs are shared between neighbours.
    `must_fit`: raise MisfitError if a user's function takes other operands than its operator, at its first case."""
    prepared: _Prepared | None = None
    untried = set[str]()

    def measured(job: Job) -> Row:
        nonlocal prepared
        started, given, prepared = time.perf_counter(), prepared, None  # a kernel that fails may have written to them
        if given is None or given.case is not job.case:
            given = None  # free the old inputs first
            given = _prepare(job, seed)
        row = _measure(job, given, started, untried=job.impl in untried)
        prepared = given
        return row

    for job in jobs:
        if job.key in done:
            continue
        if must_fit and job.first:
            untried.add(job.impl)
        row = tried(job.head, partial(measured, job), raised=MisfitError, may_refuse="may_refuse" in job.case.data)
        if row.status != Status.SKIPPED:
            untried.discard(job.impl)
        yield row


class _Prepared(NamedTuple):
    """What one case's implementations share; `written` sums the inputs' bits, `answers` is the oracle or None."""

    case: Case
    inputs: Any
    written: Fingerprint
    reference: torch.Tensor | None
    answers: Answers | None
    apart: Callable[[torch.dtype, torch.dtype], torch.Tensor]  # see `orders_apart`


def _prepare(job: Job, seed: int) -> _Prepared:
    inputs = job.probe.prepare(job.case, job.device, seed)
    declaration = operators().get(job.case.operator)
    oracle = declaration.reference if declaration is not None else None
    answers = Answers(job.case.operator, load_object(oracle)) if oracle is not None else None
    reference: Any = partial(job.probe.reference, job.case)
    apart = functools.cache(partial(orders_apart, reference, inputs))  # of most cases no class is compared
    return _Prepared(job.case, inputs, fingerprint(inputs), reference(inputs), answers, apart)


def _findings(job: Job, prepared: _Prepared, operator: Operator, *classes: Any) -> dict[str, Any]:
    """The layer's name, and the probe's findings; whether every class is the known answer, if there is one."""
    case, answer = job.case, prepared.reference
    named = {"layer": case.data.get("layer"), "judged_as": job.note}
    said = {name: text for name, text in named.items() if text}
    said |= job.probe.findings(case, prepared.inputs, Classes(*classes), operator)
    if answer is not None and case.inputs in job.probe.answers and case.exact is not False:
        said["exact"] = all(r.shape == answer.shape and identical(r, answer.to(r.dtype)) for r in classes[0])
    if answer is not None and len(classes[0]) > 1 and not case.demonstration:
        # no size of a sum changes with others' values; where the right result is zero, a lost one looks like rounding
        look = "values" if case.varied in ("neighbour_values", "hidden_keys") or case.inputs in ORDER else ""
        dtype = classes[0][0].dtype
        kept = dtype if case.varied == "micro_batch" or dtype == torch.float64 else torch.float32
        said["judged"] = judged_classes(classes[0], prepared.apart(dtype, kept), look)
    return said


def _measure(job: Job, prepared: _Prepared, started: float, *, untried: bool) -> Row:
    case, head, inputs, watch = job.case, job.head, prepared.inputs, None
    registered = case.operator in operators()
    with job.probe.own(case, job.impl) as operator:
        if registered:
            implementation = job.loaded or load_implementation(case.operator, job.impl, job.device)
            operator = checked(case.operator, implementation.call)
            if prepared.answers is not None:
                if untried:
                    operator = fitted(case.operator, operator, job.impl if job.loaded else f"--impl {job.impl!r}")
                watch = Watch(operator, prepared.answers)
                operator = watch.call
            head = msgspec.structs.replace(head, claims_invariance=implementation.invariant)
        row = measure(
            head,
            list(job.probe.trials(case, inputs, operator)),
            watch=watch,
            join=partial(job.probe.join, case),
            replay=registered and head.axis != Axis.RUN,
            # a probe's own computation is thousands of elementwise launches, whose names explain nothing
            profile=registered,
            warm=job.device == "cuda" and bool(head.claims_invariance),
            enough=case.data.get("enough", 0),
            reference=prepared.reference,
            extra=partial(_findings, job, prepared, operator),
            started=started,
        )
    if changed := written_to(prepared.written, inputs):
        raise WrongResultError(f"it wrote to its input {', '.join(changed)}")
    judged, error = row.extra.pop("judged", msgspec.UNSET), row.worst_error
    if row.wrong and error is not None:  # by more than any order of its sums explains
        far = sys.float_info.max if error.relative_norm is None else error.relative_norm
        judged = Judged(kind="bug", far=far, bound=None, dtype=row.dtype)
    return msgspec.structs.replace(row, judged=judged)
