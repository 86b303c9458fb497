"""Cases times implementations into rows. A failed case is a row with its reason, and the next one runs."""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

from nondet.compare import ClassBook, error_against, identical
from nondet.errors import UserError
from nondet.kernel_names import profile_variants
from nondet.kernels.launch import listen
from nondet.probes.base import Case, Options, Probe, Trial
from nondet.probes.contract import WrongResultError, checked
from nondet.registry import IMPLEMENTATIONS, implementation_names, load_implementation, load_probe
from nondet.result import ErrorFigures, Row, Status

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
            f"nothing to measure: no case of these probes has --impl {','.join(asked)} on {options.device}",
            "See `nondet list`.",
        )
    return jobs


def _expand(asked: list[str], operator: str, device: str) -> list[str]:
    """The implementations of one operator that the names stand for.

    "stock" also stands for its named backends (stock-flash, ...), and names that only other operators have drop out.
    """
    if operator not in IMPLEMENTATIONS:
        return asked
    known = implementation_names(operator, device)
    chosen: dict[str, None] = {}  # each once, in the order asked for: two rows of one key can't be resumed
    for name in asked:
        if ":" in name or not any(name in table for table in IMPLEMENTATIONS.values()):
            load_implementation(operator, name, device)  # if there is no such thing: said now, not in every row
        if ":" in name or name in known:
            chosen[name] = None
        chosen.update((k, None) for k in known if k.startswith(f"{name}-"))
    return list(chosen)


def run_jobs(jobs: Iterable[Job], seed: int, done: set[tuple[str, ...]]) -> Iterator[Row]:
    """Measure every job whose key is not in `done`, and yield its row at once. Inputs are shared between neighbours."""
    prepared: tuple[Case, Any, torch.Tensor | None] | None = None
    for job in jobs:
        if job.key in done:
            continue
        started = time.perf_counter()
        said: list[warnings.WarningMessage] = []
        try:
            if prepared is None or prepared[0] is not job.case:
                prepared = None  # free the old inputs first
                inputs = job.probe.prepare(job.case, job.device, seed)
                prepared = (job.case, inputs, job.probe.reference(job.case, inputs))
            # torch says why a backend refuses in warnings, each once a process: kept for the row, and off the terminal
            with warnings.catch_warnings(record=True) as said:
                warnings.simplefilter("always")
                row = measure(job, prepared[1], prepared[2], started)
            yield row
        except Exception as error:  # noqa: BLE001 - whatever a kernel raises becomes a row; the run goes on
            yield _failed(job, error, started, [str(w.message) for w in said])
            if job.device == "cuda":
                _check_device_alive(error)


def measure(job: Job, inputs: Any, reference: torch.Tensor | None, started: float) -> Row:
    """Compute every variant of one job, sort the results into classes, and describe them."""
    case = job.case
    operator: Callable[..., torch.Tensor] = _no_operator
    registered = case.operator in IMPLEMENTATIONS
    if registered:
        operator = checked(case.operator, load_implementation(case.operator, job.impl, job.device).call)
    trials = list(job.probe.trials(case, inputs, operator))
    book = ClassBook()
    values: list[int | str] = []
    starts = [0]
    # what a probe computes by itself is thousands of elementwise launches, whose names explain nothing
    with listen() as noted, profile_variants(job.device if registered else "") as profile:
        for trial in trials:
            if registered and job.device == "cuda" and job.impl == "invariant":
                trial.compute()  # a first use may prove a member of its class, with kernels that are not the variant's
            with profile.variant(len(values)):
                result = trial.compute()
            values.extend(_add(book, trial, result))
            starts.append(len(values))
            del result
    if len(values) < 2:
        return _row(job, Status.SKIPPED, reason="fewer than two variants: nothing to compare", started=started)
    # a case that repeats one call asks just that already
    replays, replays_parted = _replay(trials, starts, book) if registered and case.varied != "run" else (0, 0)
    kernels = profile.kernels(len(values))
    sets = list(dict.fromkeys(map(tuple, kernels)))
    listed = len(values) <= _LISTED_VARIANTS
    ran = sorted(set(noted) | {k for names in sets for k in names})
    errors = [error_against(r, reference) for r in book.representatives] if reference is not None else []
    return _row(
        job,
        Status.IDENTICAL if len(book.representatives) == 1 and not replays_parted else Status.DIVERGENT,
        started=started,
        reason=_nonfinite_note(book.representatives[0]),
        ran=ran,
        values=values if listed else [],
        labels=book.labels if listed else [],
        class_sizes=book.sizes,
        kernel_sets=[list(names) for names in sets] if listed else [],
        kernels=[sets.index(tuple(names)) for names in kernels] if listed else [],
        trials=len(values),
        replays=replays,
        replays_parted=replays_parted,
        distinct=len(book.representatives),
        difference=book.widest_difference(),
        error=errors[0] if errors else None,
        worst_error=max(errors, key=_badness) if errors else None,
        extra=job.probe.extra(case, inputs, book.representatives),  # noqa: S610 - not Django's
    )


def _replay(trials: list[Trial], starts: list[int], book: ClassBook) -> tuple[int, int]:
    """Compute the first and the last variant again: (how many, how many came out otherwise than the first time).

    Without this a kernel that is nondeterministic from run to run would be taken for one that depends on the batch.

    Args:
        starts: Where the results of each trial begin in the book's labels, and the number of labels.
    """
    parted = 0
    ends = {0, len(trials) - 1}
    for i in ends:
        labels = book.labels[starts[i] : starts[i + 1]]
        before = torch.stack([book.representatives[label] for label in labels])
        again = trials[i].compute()
        parted += not identical(again if trials[i].many else again[None], before)
    return len(ends), parted


def _badness(error: ErrorFigures) -> float:
    return math.inf if error.relative_norm is None else error.relative_norm


def _add(book: ClassBook, trial: Trial, result: torch.Tensor) -> list[int | str]:
    """Label what one trial computed, and name its results on the axis `varied`."""
    if not trial.many:
        book.add(result)
        return [trial.value]
    book.add_many(result)
    return [trial.value + i if isinstance(trial.value, int) else trial.value for i in range(result.shape[0])]


def _nonfinite_note(result: torch.Tensor) -> str:
    """NaN equals NaN, so a kernel that gives nothing else is called identical: a reader should know."""
    if not (result.dtype.is_floating_point and result.element_size() > 1):
        return ""
    lost = int((~torch.isfinite(result)).sum())
    return f"{lost} of {result.numel()} elements of the first variant are NaN or infinite" if lost else ""


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


def _failed(job: Job, error: Exception, started: float, warned: list[str]) -> Row:
    said = (str(error).strip() or type(error).__name__).splitlines()[0][:500]
    if "No available kernel" in said:
        # "... not used because:" is a heading, and "has been runtime disabled" is our own asking for one backend alone
        told = [w.partition(" (Triggered")[0] for w in warned if "because:" not in w and "runtime disabled" not in w]
        return _row(job, Status.SKIPPED, started=started, reason=" ".join([said, *dict.fromkeys(told)])[:500])
    if isinstance(error, (NotImplementedError, UserError)):
        return _row(job, Status.SKIPPED, started=started, reason=said)
    if isinstance(error, WrongResultError):
        return _row(job, Status.WRONG, started=started, reason=said)
    return _row(job, Status.ERROR, started=started, reason=f"{type(error).__name__}: {said}")


def _check_device_alive(error: Exception) -> None:
    """A sticky CUDA error poisons every later call: better to stop than to write rows that all fail."""
    try:
        torch.cuda.synchronize()
    except Exception as sticky:
        raise RuntimeError(f"the CUDA context is lost after: {error}") from sticky
