"""Cases times implementations into rows. A failed case is a row with its reason, and the next one runs."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import msgspec
import torch

from nondet.core.measure import Fingerprint, check_device_alive, failed, fingerprint, kept_warnings, measure, written_to
from nondet.core.records import Axis, Row
from nondet.core.registry import (
    LoadedImplementation,
    implementation_names,
    load_implementation,
    load_object,
    load_probe,
    operators,
)
from nondet.core.watch import Answers, Watch
from nondet.errors import UserError, WrongResultError
from nondet.probes.base import Case, Options, Probe
from nondet.probes.contract import checked

__all__ = ["Job", "plan_jobs", "run_jobs"]


class Job:
    """One case under one implementation.

    Attributes:
        note: What a reader should know of how the implementation came to be asked this.
        place: Among all jobs of the plan, from 0; None outside of one.
        loaded: The implementation, where it is at hand; None: it is loaded by its name.
    """

    def __init__(
        self,
        probe: Probe,
        case: Case,
        impl: str,
        device: str,
        note: str = "",
        loaded: LoadedImplementation | None = None,
    ) -> None:
        self.probe, self.case, self.impl, self.device, self.note = probe, case, impl, device, note
        self.loaded = loaded
        self.place: int | None = None

    @property
    def key(self) -> tuple[str, ...]:
        """As `Row.key`."""
        return self.head.key

    @property
    def head(self) -> Row:
        """The row, with everything but figures."""
        case = self.case
        return Row(
            probe=self.probe.name,
            case=case.name,
            operator=case.operator,
            shape=dict(case.shape),
            dtype=case.dtype,
            device=self.device,
            inputs=case.inputs,
            varied=case.varied,
            axis=case.axis or "",
            demonstration=case.demonstration,
            exact=case.exact,
            impl=self.impl,
            status="",
            place=msgspec.UNSET if self.place is None else self.place,
        )


def plan_jobs(probe_names: Iterable[str], impls: Iterable[str], options: Options) -> list[Job]:
    """Everything that will be measured, in order, before anything is.

    Raises:
        UserError: an unknown probe or implementation, or sizes that make no sense.
    """
    names = list(impls)
    jobs: list[Job] = []
    probed: dict[str, None] = {}
    for probe_name in probe_names:
        probe = load_probe(probe_name)
        cases = list(probe.cases(options))
        own = list(dict.fromkeys(c.operator for c in cases if c.impls is None and c.operator in operators()))
        probed.update(dict.fromkeys(own))
        for case in cases:
            if case.impls is not None:
                jobs.extend(Job(probe, case, impl, options.device) for impl in case.impls)
                continue
            for impl in _expand(names, case.operator, options.device, own):
                user = ":" in impl and "=" not in impl and len(own) > 1
                note = f"{own[0]}, the first operator of {probe_name}; others: --impl {own[-1]}={impl}" if user else ""
                jobs.append(Job(probe, case, impl, options.device, note))
    for name in names:
        operator, named, _ = name.partition("=")
        if named and operator not in probed:
            raise UserError(
                f"--impl {name!r}: no probe asked for has an operator {operator!r}",
                f"They have {', '.join(probed) or 'none that takes an implementation'}.",
            )
        if ":" in name and not any(job.impl == name for job in jobs):
            raise UserError(
                f"--impl {name!r}: no case asked for takes a function of yours", "Name its operator's probe."
            )
    if not jobs:
        raise UserError(
            f"nothing to measure: no case of these probes has --impl {','.join(names)} on {options.device}",
            "See `nondet list`.",
        )
    for place, job in enumerate(jobs):
        job.place = place
    return jobs


def _expand(names: list[str], operator: str, device: str, own: list[str]) -> list[str]:
    """The implementations of one operator that the names stand for.

    "stock" also stands for its named backends (stock-flash, ...), and names that only other operators have drop out. A
    user's function computes one operator: "linear=module:function" says which, and where it doesn't, it is the probe's
    first.

    Args:
        own: The operators of the probe, in the order of its cases.
    """
    if operator not in operators():
        return names
    known = implementation_names(operator, device)
    chosen: dict[str, None] = {}  # each once, in the order asked for: two rows of one key can't be resumed
    for name in names:
        if ":" in name:
            named = name.partition("=")[0] if "=" in name else own[0]
            if named == operator:
                load_implementation(operator, name, device)  # if it is no such thing: said now, not in every row
                chosen[name] = None
            continue
        if not any(o.implementation(name) for o in operators().values()):
            load_implementation(operator, name, device)  # if there is no such thing: said now
        if name in known:
            chosen[name] = None
        chosen.update((k, None) for k in known if k.startswith(f"{name}-"))
    return list(chosen)


def run_jobs(jobs: Iterable[Job], seed: int, done: set[tuple[str, ...]]) -> Iterator[Row]:
    """Measure every job whose key is not in `done`, and yield its row at once. Inputs are shared between neighbours."""
    prepared: _Prepared | None = None
    for job in jobs:
        if job.key in done:
            continue
        started = time.perf_counter()
        # torch says why a backend refuses in warnings, each once a process: kept for the row, and off the terminal
        with kept_warnings() as caught:
            try:
                if prepared is None or prepared.case is not job.case:
                    prepared = None  # free the old inputs first
                    prepared = _prepare(job, seed)
                row = _measure(job, prepared, started)
            except (Exception, SystemExit) as error:  # noqa: BLE001 - whatever a kernel raises becomes a row; the run goes on
                row = failed(job.head, error, started, caught)
                prepared = None  # it may have written to them
                check_device_alive(job.device, error)
        yield row


class _Prepared(NamedTuple):
    """What the implementations of one case share.

    Attributes:
        written: Sums of the inputs' bits, as they were made.
        reference: What the first variant ought to be, in float64.
        answers: The oracle, asked once for all; None: the case's operator has none.
    """

    case: Case
    inputs: Any
    written: Fingerprint
    reference: torch.Tensor | None
    answers: Answers | None


def _prepare(job: Job, seed: int) -> _Prepared:
    inputs = job.probe.prepare(job.case, job.device, seed)
    declaration = operators().get(job.case.operator)
    answers = None
    if declaration is not None and declaration.reference is not None:
        answers = Answers(declaration.name, load_object(declaration.reference))
    return _Prepared(job.case, inputs, fingerprint(inputs), job.probe.reference(job.case, inputs), answers)


def _measure(job: Job, prepared: _Prepared, started: float) -> Row:
    """One job: its implementation under its probe's variants.

    Raises:
        WrongResultError: the implementation wrote to its inputs, so that no figure of it means anything; or gave
            results of another shape or dtype.
    """
    case, head, inputs = job.case, job.head, prepared.inputs
    operator: Callable[..., torch.Tensor] = _no_operator
    watch = None
    declaration = operators().get(case.operator)
    registered = declaration is not None
    if declaration is not None:
        implementation = job.loaded or load_implementation(case.operator, job.impl, job.device)
        operator = checked(case.operator, implementation.call)
        if prepared.answers is not None:
            watch = Watch(operator, prepared.answers)
            operator = watch.call
        head = msgspec.structs.replace(head, claims_invariance=implementation.invariant)
    row = measure(
        head,
        list(job.probe.trials(case, inputs, operator)),
        watch=watch,
        replay=registered and head.axis != Axis.RUN,
        # what a probe computes by itself is thousands of elementwise launches, whose names explain nothing
        profile=registered,
        warm=job.device == "cuda" and bool(head.claims_invariance),
        reference=prepared.reference,
        extra=lambda results: job.probe.extra(case, inputs, results) | ({"judged_as": job.note} if job.note else {}),  # noqa: S610 - not Django's
        started=started,
    )
    changed = written_to(prepared.written, inputs)
    if changed:
        raise WrongResultError(f"it wrote to its input {', '.join(changed)}")
    return row


def _no_operator(*_: Any, **__: Any) -> torch.Tensor:
    raise AssertionError("this probe computes by itself")
