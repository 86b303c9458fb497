"""A whole bench run: limits, then group by group the bits, then the cells. Records come out as they are made."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol, TypeVar

import msgspec
import torch

from nondet.bench.bits import bits_head, bits_key, bits_row, kernels_at
from nondet.bench.cases import BenchCase, arguments
from nondet.bench.limits import COPY, limit_names, measure_limit, peak_name
from nondet.bench.rivals import RIVALS, rival_call
from nondet.bench.sanity import fault
from nondet.bench.summary import is_stock
from nondet.bench.timing import Stopwatch, interleave, quartiles, rotation
from nondet.bench.work import limit_us
from nondet.core.inputs import generator
from nondet.core.launch import listen
from nondet.core.measure import check_device_alive, kept_warnings, reason_of
from nondet.core.records import Cell, Limit, Record, Row, Run, Status, Timed
from nondet.core.registry import load_implementation, operators
from nondet.errors import UnknownNameError, UserError

__all__ = ["collect", "groups_of", "implementations_of", "planned_keys"]

Call = Callable[..., Any]
Failure = tuple[str, str]  # status and reason; an exception would keep the tensors of its frames alive


def implementations_of(operator: str, names: Sequence[str], device: str, installed: Sequence[str]) -> list[str]:
    """The implementations of one operator that the names stand for.

    "stock" stands for its named backends, too (but slow ones): the best of them is what a user could have.
    A rival drops out where it has no such operator.

    Raises:
        UnknownNameError: no implementation and no rival has that name.
        UserError: a rival that is not installed.
    """
    here = [i for i in operators()[operator].implementations if i.target(device)]
    everywhere = dict.fromkeys(i.name for declaration in operators().values() for i in declaration.implementations)
    chosen: dict[str, None] = {}
    for name in names:
        if ":" in name:
            if "=" not in name or name.partition("=")[0] == operator:  # else it is another operator's
                load_implementation(operator, name, device)
                chosen[name] = None
        elif name in RIVALS:
            if name not in installed:
                package = RIVALS[name].package
                raise UserError(f"--impl {name}: {package} is not installed", "Install it, or leave it out.")
            if operator in RIVALS[name].operators and device == "cuda":
                chosen[name] = None
        elif name in everywhere:
            backends = [i for i in here if i.stock and not i.slow] if name == "stock" else []
            chosen.update((i.name, None) for i in here if i.name == name or i in backends)
        else:
            raise UnknownNameError("implementation", name, [*everywhere, *RIVALS])
    return list(chosen)


class _Grouped(Protocol):
    """What a cell of any kind is grouped by."""

    @property
    def operator(self) -> str: ...
    @property
    def group(self) -> str: ...
    @property
    def dtype(self) -> str: ...


_Cell = TypeVar("_Cell", bound=_Grouped)


def groups_of(cases: Sequence[_Cell]) -> list[list[_Cell]]:
    """Cells that ask for equal bits, together, in the order of their first: one weight shape, width, KV, or ranks."""
    groups: dict[tuple[str, str, str], list[_Cell]] = {}
    for case in cases:
        groups.setdefault((case.operator, case.group, case.dtype), []).append(case)
    return list(groups.values())


def planned_keys(cases: Sequence[BenchCase], impls: dict[str, list[str]], device: str) -> list[tuple[str, ...]]:
    """Keys of every record of the run, for a progress bar and for resuming."""
    keys: list[tuple[str, ...]] = [("limit", name, device) for name in limit_names([c.dtype for c in cases])]
    for group in groups_of(cases):
        keys += [bits_key(group, device, impl) for impl in impls[group[0].operator]]
        keys += [_cell_key(case, device) for case in group]
    return keys


def _cell_key(case: BenchCase, device: str) -> tuple[str, ...]:
    return ("cell", case.section, case.name, case.dtype, device)


def collect(
    cases: Sequence[BenchCase],
    impls: dict[str, list[str]],
    device: str,
    seed: int,
    stopwatch: Stopwatch,
    earlier: Run | None = None,
) -> Iterator[Record]:
    """Measure whatever `earlier` has not, and yield each record at once.

    Args:
        impls: Operator -> implementations.
        earlier: What a run that is resumed has already.
    """
    done = {record.key for record in earlier.records()} if earlier else set()
    limits = {limit.name: limit for limit in (earlier.limits if earlier else [])}
    rows = {row.key: row for row in (earlier.rows if earlier else [])}
    for name in limit_names([c.dtype for c in cases]):
        if name not in limits:
            limits[name] = measure_limit(name, device, seed, stopwatch)
            yield limits[name]
            _free(device)
    for group in groups_of(cases):
        names = impls[group[0].operator]
        calls, failed = _load(group[0].operator, names, device)
        for impl in names:
            key = bits_key(group, device, impl)
            if key not in done:
                rows[key] = _bits(group, impl, calls, failed, device, seed)
                yield rows[key]
                _free(device)
        for case in group:
            if _cell_key(case, device) not in done:
                profiled = {impl: kernels_at(rows.get(bits_key(group, device, impl)), case) for impl in names}
                yield _cell(case, names, calls, failed, profiled, limits, device, seed, stopwatch)
                _free(device)


def _load(operator: str, names: Sequence[str], device: str) -> tuple[dict[str, Call], dict[str, Failure]]:
    """What can be called, and why the rest can't."""
    calls: dict[str, Call] = {}
    failed: dict[str, Failure] = {}
    for name in names:
        try:
            calls[name] = (
                rival_call(name, operator) if name in RIVALS else load_implementation(operator, name, device).call
            )
        except Exception as error:  # noqa: BLE001 - a rival's import may raise anything; it becomes the reason of rows
            failed[name] = reason_of(error)
    return calls, failed


def _bits(
    group: Sequence[BenchCase],
    impl: str,
    calls: dict[str, Call],
    failed: dict[str, Failure],
    device: str,
    seed: int,
) -> Row:
    started = time.perf_counter()
    failure = failed.get(impl)
    if failure is None:
        with kept_warnings() as caught:
            try:
                return bits_row(group, impl, calls[impl], device, seed)
            except Exception as error:  # noqa: BLE001 - whatever a kernel raises becomes a row; the run goes on
                check_device_alive(device, error)
                failure = reason_of(error, caught)
    status, reason = failure
    head = bits_head(group, impl, device)
    return msgspec.structs.replace(head, status=status, reason=reason, seconds=time.perf_counter() - started)


def _cell(
    case: BenchCase,
    names: Sequence[str],
    calls: dict[str, Call],
    failed: dict[str, Failure],
    profiled: dict[str, list[str]],
    limits: dict[str, Limit],
    device: str,
    seed: int,
    stopwatch: Stopwatch,
) -> Cell:
    """Time one cell under every implementation. What fails is an entry with its reason beside the others."""
    started = time.perf_counter()
    copy, peak = limits.get(COPY), limits.get(peak_name(case.dtype))
    limit, limited_by = limit_us(case.work, copy.rate if copy else None, peak.rate if peak else None)
    turns = rotation(case.work.bytes, limit, stopwatch.cache_bytes, stopwatch.replay_us)
    replays: dict[str, Callable[[], Any]] = {}
    failures = dict(failed)
    noted: dict[str, list[str]] = {}
    samples: dict[str, list[float]] = {}
    try:
        rng = generator(seed, device)
        sets = [arguments(case, device, rng) for _ in range(turns.sets)]
        expected = _expected(names, calls, sets[0], device)
        for name in names:
            if name in failures:
                continue
            with kept_warnings() as caught, listen() as notes:
                try:
                    wrong = _wrong(name, calls[name], sets[0], expected)
                    if wrong is not None:
                        failures[name] = Status.ERROR, wrong
                        continue
                    replays[name] = stopwatch.record(calls[name], sets, turns.calls)
                except Exception as error:  # noqa: BLE001 - becomes the reason of this implementation's entry
                    check_device_alive(device, error)
                    failures[name] = reason_of(error, caught)
            noted[name] = sorted(notes)
        expected = None
        samples = interleave(replays, stopwatch)
    except Exception as error:  # noqa: BLE001 - inputs that do not fit, say: the cell has no figures, the run goes on
        check_device_alive(device, error)
        failures = dict.fromkeys(names, reason_of(error)) | failures
        samples = {}
    timed = [_timed(n, samples.get(n), turns.calls, noted.get(n, []), profiled[n], failures.get(n)) for n in names]
    return Cell(
        section=case.section,
        operator=case.operator,
        case=case.name,
        group=case.group,
        axis=case.axis,
        shape=dict(case.shape),
        dtype=case.dtype,
        device=device,
        bytes=case.work.bytes,
        flops=case.work.flops,
        limit_us=limit,
        limited_by=limited_by,
        method=stopwatch.method,
        sets=turns.sets,
        calls=turns.calls,
        cold=turns.cold,
        timed=timed,
        seconds=time.perf_counter() - started,
    )


def _expected(names: Sequence[str], calls: dict[str, Call], inputs: tuple[Any, ...], device: str) -> Any:
    """Stock's result on one set of inputs, to hold others against; None where stock does not run."""
    baseline = next((name for name in names if is_stock(name) and name in calls), None)
    if baseline is None:
        return None
    try:
        return calls[baseline](*inputs)
    except Exception as error:  # noqa: BLE001 - said where stock is timed
        check_device_alive(device, error)
        return None


def _wrong(name: str, call: Call, inputs: tuple[Any, ...], expected: Any) -> str | None:
    """Why it must not be timed. Backends of stock are believed; rivals return what their libraries' users expect."""
    if expected is None or name in RIVALS or is_stock(name):
        return None
    return fault(call(*inputs), expected)


def _timed(
    impl: str, runs: list[float] | None, calls: int, ran: list[str], kernels: list[str], failure: Failure | None
) -> Timed:
    if runs is None:
        status, reason = failure or (Status.ERROR, "it was not timed")
        return Timed(impl=impl, status=status, reason=reason, ran=ran)
    samples = [us / calls for us in runs]
    low, median, high = quartiles(samples)
    return Timed(
        impl=impl,
        status=Status.TIMED,
        samples_us=[round(us, 4) for us in samples],
        median_us=round(median, 4),
        low_us=round(low, 4),
        high_us=round(high, 4),
        ran=ran,
        kernels=kernels,
    )


def _free(device: str) -> None:
    """Give memory back between cells: the next one's buffers are of other sizes, and graphs keep pools of their own."""
    if device == "cuda":
        torch.cuda.empty_cache()
