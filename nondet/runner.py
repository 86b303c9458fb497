"""Cases times implementations into rows. A failed case is a row with its reason, and the next one runs."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

from nondet.compare import ClassBook, difference, error_against
from nondet.errors import UserError
from nondet.kernel_names import profile_variants
from nondet.kernels.launch import listen
from nondet.probes.base import Case, Options, Probe, Trial
from nondet.registry import IMPLEMENTATIONS, implementation_names, load_implementation, load_probe
from nondet.result import Row, Status

__all__ = ["Job", "measure", "plan_jobs", "run_jobs"]

# Above this many variants only the class sizes are kept: a list of 10,000 labels tells a reader nothing.
_LISTED_VARIANTS = 4096


class Job:
    """One case under one implementation."""

    def __init__(self, probe: Probe, case: Case, impl: str, device: str) -> None:
        self.probe, self.case, self.impl, self.device = probe, case, impl, device

    @property
    def key(self) -> tuple[str, ...]:
        """As `Row.key`."""
        return ("row", self.probe.name, self.case.name, self.case.dtype, self.device, self.impl)


def plan_jobs(probe_names: Iterable[str], impls: Iterable[str], options: Options) -> list[Job]:
    """Everything that will be measured, in order, before anything is.

    Raises:
        UserError: an unknown probe or implementation, or sizes that make no sense.
    """
    asked = list(impls)
    jobs: list[Job] = []
    for probe_name in probe_names:
        probe = load_probe(probe_name)
        for case in probe.cases(options):
            for impl in case.impls if case.impls is not None else _expand(asked, case.operator, options.device):
                jobs.append(Job(probe, case, impl, options.device))
    if not jobs:
        raise UserError(
            f"nothing to measure: none of the probes asked for has a case for --impl {','.join(asked)} on {options.device}",
            "See `nondet list`.",
        )
    return jobs


def _expand(asked: list[str], operator: str, device: str) -> list[str]:
    """ "stock" also stands for its named backends (stock-flash, ...), and implementations of other operators drop out."""
    if operator not in IMPLEMENTATIONS:
        return asked
    known = implementation_names(operator, device)
    chosen: list[str] = []
    for name in asked:
        backends = [k for k in known if k.startswith(f"{name}-")]
        if ":" in name or name in known:
            chosen.append(name)
        elif not any(name in table for table in IMPLEMENTATIONS.values()):
            load_implementation(operator, name, device)  # raises, with a suggestion
        chosen.extend(b for b in backends if b not in chosen)
    return chosen


def run_jobs(jobs: Iterable[Job], seed: int, done: set[tuple[str, ...]]) -> Iterator[Row]:
    """Measure every job whose key is not in `done`, and yield its row at once. Inputs are shared between neighbours."""
    prepared: tuple[Case, Any, torch.Tensor | None] | None = None
    for job in jobs:
        if job.key in done:
            continue
        started = time.perf_counter()
        try:
            if prepared is None or prepared[0] is not job.case:
                prepared = None  # free the old inputs first
                inputs = job.probe.prepare(job.case, job.device, seed)
                prepared = (job.case, inputs, job.probe.reference(job.case, inputs))
            yield measure(job, prepared[1], prepared[2], started)
        except KeyboardInterrupt:
            raise
        except Exception as error:  # noqa: BLE001 - whatever a kernel raises becomes a row; the run goes on
            yield _failed(job, error, started)
            if job.device == "cuda":
                _check_device_alive(error)


def measure(job: Job, inputs: Any, reference: torch.Tensor | None, started: float) -> Row:
    """Compute every variant of one job, sort the results into classes, and describe them."""
    case = job.case
    operator = load_implementation(case.operator, job.impl, job.device).call if case.operator in IMPLEMENTATIONS else _no_operator
    trials = list(job.probe.trials(case, inputs, operator))
    if not trials:
        return _row(job, Status.SKIPPED, reason="no variant applies here", started=started)
    book = ClassBook()
    values: list[int | str] = []
    with listen() as noted, profile_variants(job.device) as profile:
        for trial in trials:
            with profile.variant(len(values)):
                result = trial.compute()
            for _ in range(_add(book, trial, result)):
                values.append(trial.value)
            del result
    kernels = profile.kernels(len(values))
    listed = len(values) <= _LISTED_VARIANTS
    ran = sorted(set(noted) | {k for names in kernels for k in names})
    errors = [error_against(r, reference) for r in book.representatives] if reference is not None else []
    return _row(
        job,
        Status.IDENTICAL if len(book.representatives) == 1 else Status.DIVERGENT,
        started=started,
        ran=ran,
        values=values if listed else [],
        labels=book.labels if listed else [],
        class_sizes=book.sizes,
        kernels=kernels if listed else [],
        trials=len(values),
        distinct=len(book.representatives),
        difference=book.widest_difference() if len(book.representatives) <= 256 else _against_first(book),
        error=errors[0] if errors else None,
        worst_error=max(errors, key=lambda e: math.inf if e.relative_norm is None else e.relative_norm) if errors else None,
        extra=job.probe.extra(case, inputs, book.representatives),
    )


def _against_first(book: ClassBook) -> Any:
    stacked = torch.stack(book.representatives)
    return difference(stacked[:1].expand_as(stacked), stacked)


def _add(book: ClassBook, trial: Trial, result: torch.Tensor) -> int:
    if trial.many:
        book.add_many(result)
        return int(result.shape[0])
    book.add(result)
    return 1


def _no_operator(*_: Any, **__: Any) -> torch.Tensor:
    raise AssertionError("this probe computes by itself")


def _row(job: Job, status: str, *, started: float, reason: str = "", **figures: Any) -> Row:
    case = job.case
    return Row(
        probe=job.probe.name,
        case=case.name,
        operator=case.operator,
        shape=dict(case.shape),
        dtype=case.dtype,
        device=job.device,
        inputs=case.inputs,
        varied=case.varied,
        impl=job.impl,
        status=status,
        reason=reason,
        seconds=time.perf_counter() - started,
        **figures,
    )


def _failed(job: Job, error: Exception, started: float) -> Row:
    reason = f"{type(error).__name__}: {error}".strip().splitlines()[0][:500]
    unavailable = isinstance(error, (NotImplementedError, UserError)) or "No available kernel" in str(error)
    return _row(job, Status.SKIPPED if unavailable else Status.ERROR, started=started, reason=reason)


def _check_device_alive(error: Exception) -> None:
    """A sticky CUDA error poisons every later call: better to stop than to write rows that all fail."""
    probe: Callable[[], None] = torch.cuda.synchronize
    try:
        probe()
    except Exception as sticky:
        raise RuntimeError(f"the CUDA context is lost after: {error}") from sticky
