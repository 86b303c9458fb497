"""A whole bench run: limits, then group by group the bits, then the cases. Records are yielded as they are made."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

import msgspec
import torch

from nondet.bench.cells import (
    COPY,
    BenchCase,
    Call,
    Failure,
    Key,
    Stopwatch,
    fault,
    groups_of,
    interleave,
    limit_names,
    measure_limit,
    peak_name,
    rotation,
    timed_of,
)
from nondet.bench.summary import is_stock
from nondet.bench.work import limit_us
from nondet.core.inputs import generator, make
from nondet.core.launch import check_device_alive, listen
from nondet.core.measure import Trial, kept_warnings, measure, reason_of
from nondet.core.measure import failed as failed_row
from nondet.core.records import Cell, Limit, Record, Row, Run, Status, Value
from nondet.core.registry import load_implementation, operators
from nondet.errors import UnknownNameError

# Whether the cases of one group give equal bits: row 0 with every number of rows, compared on the device. One row of
# the run file for each group and implementation, as a probe would write it, so that verdicts, class maps and `--fail-on
# divergent` work for a bench run, too. The kernels that the profiler names are in the cases' records as well.

Rows = tuple[torch.Tensor, ...]  # rows of inputs, or one row of each output, as views
Variant = tuple[Value, Callable[[], Rows]]


def _row_variants(group: Sequence[BenchCase], call: Call, device: str, rng: torch.Generator) -> Iterator[Variant]:
    """Row 0 of the first M rows of one input. A single row is always included, as the reference."""
    rows = sorted({1, *(case.shape["M"] for case in group)})
    if len(rows) == 1:
        rows.append(2)
    widest = group[0].resized(rows[-1])
    whole = widest.inputs(device, rng)

    def compute(inputs: Rows) -> Rows:
        out = call(*inputs)
        return tuple(x[:1] for x in (out if isinstance(out, tuple) else (out,)))

    for m in rows:
        yield m, partial(compute, widest.first_rows(whole, m))


def _query_variants(group: Sequence[BenchCase], call: Call, device: str, rng: torch.Generator) -> Iterator[Variant]:
    """The last query of request 0: decoded solo, decoded with others, and at the end of the group's prefill."""
    widest = max(group, key=lambda case: case.shape["B"])
    prefill = next((case for case in group if case.shape["Tq"] > 1), None)
    batches = sorted({1, *(case.shape["B"] for case in group if case.shape["Tq"] == 1)})
    if len(batches) == 1 and prefill is None:
        batches.append(2)
    largest = widest.resized(max(batches))
    s = largest.shape
    _, k, v = largest.inputs(device, rng)
    prompt = 1 if prefill is None else prefill.shape["Tq"]
    q = make("bell", (1, s["Hq"], prompt, s["D"]), widest.torch_dtype, device, rng)
    others = make("bell", (s["B"], s["Hq"], 1, s["D"]), widest.torch_dtype, device, rng)
    others[:1] = q[:, :, -1:]

    def decode(b: int) -> Rows:
        return (call(others[:b], k[:b], v[:b])[:1],)

    for b in batches:
        yield f"decode B={b}", partial(decode, b)
    if prefill is not None:
        yield "prefill", lambda: (call(q, k[:1], v[:1])[:, :, -1:],)


def _of_queries(group: Sequence[BenchCase]) -> bool:
    return "Tq" in group[0].shape


def bits_head(group: Sequence[BenchCase], impl: str, device: str) -> Row:
    """The row of a group under one implementation, with everything but figures."""
    first = group[0]
    title, varied = f"{first.section} {first.group}: row 0 of M rows", "batch_size"
    if _of_queries(group):
        title, varied = f"attention {first.group}: the last query, in company of other sizes", "query_chunk"
    return first.row(impl, device, "Tq", case=title, inputs="bell", varied=varied)


def bits_row(group: Sequence[BenchCase], impl: str, call: Call, device: str, seed: int) -> Row:
    """Compute all variants, those that need it twice, and describe their classes. Raises what the kernel raises."""
    started = time.perf_counter()
    variants = _query_variants if _of_queries(group) else _row_variants
    trials = [Trial(value, compute) for value, compute in variants(group, call, device, generator(seed, device))]

    def joined(rows: Rows) -> torch.Tensor:  # views are joined here, so that the copy is not among the profiled kernels
        return torch.cat([x.flatten() for x in rows])

    return measure(bits_head(group, impl, device), trials, join=joined, warm=True, started=started)


def kernels_at(row: Row | None, case: BenchCase) -> list[str]:
    """The kernels that the row names for the case; [] where nothing was profiled."""
    if row is None or not row.kernels:
        return []
    value: Value = case.shape["M"] if case.axis == "M" else f"decode B={case.shape['B']}"
    if case.shape.get("Tq", 1) > 1:
        value = "prefill"
    return row.kernel_sets[row.kernels[row.values.index(value)]] if value in row.values else []


def implementations_of(operator: str, names: Sequence[str], device: str) -> list[str]:
    """The implementations of one operator that the names select. "stock" includes its named backends, too (but slow
    ones): the best of them is what a user could have. Raises UnknownNameError: no implementation has that name."""
    here = [i for i in operators()[operator].implementations if i.target(device)]
    everywhere = dict.fromkeys(i.name for declaration in operators().values() for i in declaration.implementations)
    chosen: dict[str, None] = {}
    for name in names:
        if ":" in name:
            if "=" not in name or name.partition("=")[0] == operator:  # else it is another operator's
                load_implementation(operator, name, device)
                chosen[name] = None
        elif name in everywhere:
            backends = [i for i in here if i.stock and not i.slow] if name == "stock" else []
            chosen.update((i.name, None) for i in here if i.name == name or i in backends)
        else:
            raise UnknownNameError("implementation", name, list(everywhere))
    return list(chosen)


def planned_keys(cases: Sequence[BenchCase], impls: dict[str, list[str]], device: str) -> list[Key]:
    """Keys of every record of the run, for a progress bar and for resuming."""
    keys: list[Key] = [("limit", name, device) for name in limit_names([c.dtype for c in cases])]
    for group in groups_of(cases):
        keys += [bits_head(group, impl, device).key for impl in impls[group[0].operator]]
        keys += [case.key(device) for case in group]
    return keys


def collect(
    cases: Sequence[BenchCase],
    impls: dict[str, list[str]],
    device: str,
    seed: int,
    stopwatch: Stopwatch,
    earlier: Run | None = None,
) -> Iterator[Record]:
    """Measure what `earlier` does not have, and yield each record at once; `impls`: operator -> implementations."""
    done = {record.key for record in earlier.records()} if earlier else set()
    limits = {limit.name: limit for limit in (earlier.limits if earlier else [])}
    rows = {row.key: row for row in (earlier.rows if earlier else [])}
    for name in limit_names([c.dtype for c in cases]):
        if name not in limits:
            with suppress(NotImplementedError):  # of FP8, on a machine without: stock's own rows say so
                limits[name] = measure_limit(name, device, seed, stopwatch)
                yield limits[name]
            _free(device)
    for group in groups_of(cases):
        calls = {name: _loaded(group[0].operator, name, device) for name in impls[group[0].operator]}
        for impl, call in calls.items():
            key = bits_head(group, impl, device).key
            if key not in done:
                rows[key] = _bits(group, impl, call, device, seed)
                yield rows[key]
                _free(device)
        for case in group:
            if case.key(device) not in done:
                profiled = {impl: kernels_at(rows.get(bits_head(group, impl, device).key), case) for impl in calls}
                yield _cell(case, calls, profiled, limits, device, seed, stopwatch)
                _free(device)


def _loaded(operator: str, name: str, device: str) -> Call | Failure:
    try:
        return load_implementation(operator, name, device).call
    except Exception as error:  # noqa: BLE001 - an import may raise anything; it becomes the reason of rows
        return reason_of(error)


def _bits(group: Sequence[BenchCase], impl: str, call: Call | Failure, device: str, seed: int) -> Row:
    head, started = bits_head(group, impl, device), time.perf_counter()
    if isinstance(call, tuple):
        return msgspec.structs.replace(head, status=call[0], reason=call[1])
    with kept_warnings() as caught:
        try:
            return bits_row(group, impl, call, device, seed)
        except Exception as error:  # noqa: BLE001 - whatever a kernel raises becomes a row
            check_device_alive(device, error)
            return failed_row(head, error, started, caught)


def _cell(
    case: BenchCase,
    loaded: Mapping[str, Call | Failure],
    profiled: dict[str, list[str]],
    limits: dict[str, Limit],
    device: str,
    seed: int,
    stopwatch: Stopwatch,
) -> Cell:
    started = time.perf_counter()
    copy, peak = limits.get(COPY), limits.get(peak_name(case.dtype))
    limit, limited_by = limit_us(case.work, copy.rate if copy else None, peak.rate if peak else None)
    turns = rotation(case.work.bytes, limit, stopwatch.cache_bytes, stopwatch.replay_us)
    calls = {name: call for name, call in loaded.items() if not isinstance(call, tuple)}
    failures = {name: call for name, call in loaded.items() if isinstance(call, tuple)}
    replays: dict[str, Callable[[], Any]] = {}
    noted: dict[str, list[str]] = {}
    samples: dict[str, list[float]] = {}
    try:
        rng = generator(seed, device)
        sets = [case.inputs(device, rng) for _ in range(turns.sets)]
        expected = _expected(calls, sets[0], device)
        for name, call in calls.items():
            with kept_warnings() as caught, listen() as notes:
                try:
                    believed = expected is None or is_stock(name)  # its backends, too
                    wrong = None if believed else fault(call(*sets[0]), expected)
                    if wrong is not None:
                        failures[name] = Status.ERROR, wrong
                        continue
                    replays[name] = stopwatch.record(call, sets, turns.calls)
                except Exception as error:  # noqa: BLE001 - the reason of this implementation's entry
                    check_device_alive(device, error)
                    failures[name] = reason_of(error, caught)
            noted[name] = sorted(notes)
        expected = None
        samples = interleave(replays, stopwatch)
    except Exception as error:  # noqa: BLE001 - such as inputs that do not fit: the case has no figures
        check_device_alive(device, error)
        failures = dict.fromkeys(loaded, reason_of(error)) | failures
        samples = {}
    timed = []
    for name in loaded:
        each = [us / turns.calls for us in samples.get(name, [])]
        failure = None if each else failures.get(name, (Status.ERROR, "it was not timed"))
        timed.append(timed_of(name, each, noted.get(name, []), failure=failure, kernels=profiled[name]))
    return case.cell(
        device,
        timed,
        started,
        bytes=case.work.bytes,
        flops=case.work.flops,
        limit_us=limit,
        limited_by=limited_by,
        method=stopwatch.method,
        sets=turns.sets,
        calls=turns.calls,
        cold=turns.cold,
    )


def _expected(calls: Mapping[str, Call], inputs: tuple[Any, ...], device: str) -> Any:
    baseline = next((call for name, call in calls.items() if is_stock(name)), None)
    if baseline is None:
        return None
    try:
        return baseline(*inputs)
    except Exception as error:  # noqa: BLE001 - reported where stock is timed
        check_device_alive(device, error)
        return None


def _free(device: str) -> None:
    """Give memory back between cases: the next one's buffers are of other sizes, and graphs keep pools of their own."""
    if device == "cuda":
        torch.cuda.empty_cache()
