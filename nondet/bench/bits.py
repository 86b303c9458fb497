"""Whether the cells of one group give equal bits: row 0 beside every number of rows, compared on the device.

One row of the run file for each group and implementation, as a probe would write it, so that verdicts, class maps and
`--fail-on divergent` hold for a bench run, too. The kernels that the profiler names go to the cells as well.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch

from nondet.bench.cases import BenchCase, arguments, first_rows
from nondet.core.inputs import generator, make
from nondet.core.measure import Trial, measure
from nondet.core.records import Row, Value

__all__ = ["bits_head", "bits_key", "bits_row", "kernels_at", "variants_of"]

Rows = tuple[torch.Tensor, ...]  # rows of inputs, or one row of each output, as views
Variant = tuple[Value, Callable[[], Rows]]


def bits_key(group: Sequence[BenchCase], device: str, impl: str) -> tuple[str, ...]:
    """The key of the row, as `Row.key`."""
    return bits_head(group, impl, device).key


def _title(group: Sequence[BenchCase]) -> str:
    first = group[0]
    if first.company == "queries":
        return f"attention {first.group}: the last query, in company of other sizes"
    return f"{first.section} {first.group}: row 0 of M rows"


def variants_of(group: Sequence[BenchCase], call: Callable[..., Any], device: str, seed: int) -> Iterator[Variant]:
    """The variants: named computations of row 0, each with company of another size, on the same inputs."""
    rng = generator(seed, device)
    if group[0].company == "queries":
        return _query_variants(group, call, device, rng)
    return _row_variants(group, call, device, rng)


def _row_variants(
    group: Sequence[BenchCase], call: Callable[..., Any], device: str, rng: torch.Generator
) -> Iterator[Variant]:
    """Row 0 of the first M rows of one input. A single row is always among them: there is nothing to compare else."""
    rows = sorted({1, *(case.shape["M"] for case in group)})
    if len(rows) == 1:
        rows.append(2)
    widest = group[0].resized(rows[-1])
    whole = arguments(widest, device, rng)

    def compute(inputs: Rows) -> Rows:
        out = call(*inputs)
        return tuple(x[:1] for x in (out if isinstance(out, tuple) else (out,)))

    for m in rows:
        yield m, partial(compute, first_rows(widest, whole, m))


def _query_variants(
    group: Sequence[BenchCase], call: Callable[..., Any], device: str, rng: torch.Generator
) -> Iterator[Variant]:
    """The last query of request 0: decoded alone, decoded beside others, and at the end of the group's prefill."""
    widest = max(group, key=lambda case: case.shape["B"])
    prefill = next((case for case in group if case.shape["Tq"] > 1), None)
    batches = sorted({1, *(case.shape["B"] for case in group if case.shape["Tq"] == 1)})
    if len(batches) == 1 and prefill is None:
        batches.append(2)
    largest = widest.resized(max(batches))
    s = largest.shape
    _, k, v = arguments(largest, device, rng)
    prompt = 1 if prefill is None else prefill.shape["Tq"]
    q = make("bell", (1, s["Hq"], prompt, s["D"]), widest.torch_dtype, device, rng)
    company = make("bell", (s["B"], s["Hq"], 1, s["D"]), widest.torch_dtype, device, rng)
    company[:1] = q[:, :, -1:]

    def decode(b: int) -> Rows:
        return (call(company[:b], k[:b], v[:b])[:1],)

    for b in batches:
        yield f"decode B={b}", partial(decode, b)
    if prefill is not None:
        yield "prefill", lambda: (call(q, k[:1], v[:1])[:, :, -1:],)


def _joined(rows: Rows) -> torch.Tensor:
    """Every output's row, side by side."""
    return torch.cat([x.flatten() for x in rows])


def bits_head(group: Sequence[BenchCase], impl: str, device: str) -> Row:
    """The row of a group under one implementation, with everything but figures."""
    first = group[0]
    return Row(
        probe="bench",
        case=_title(group),
        operator=first.operator,
        shape={key: size for key, size in first.shape.items() if key not in (first.axis, "Tq")},
        dtype=first.dtype,
        device=device,
        inputs="bell",
        varied="query_chunk" if first.company == "queries" else "batch_size",
        impl=impl,
        status="",
        group=first.group,
    )


def bits_row(group: Sequence[BenchCase], impl: str, call: Callable[..., Any], device: str, seed: int) -> Row:
    """Compute all variants, those that need it twice, and describe their classes. Raises what the kernel raises."""
    started = time.perf_counter()
    trials = [Trial(value, compute) for value, compute in variants_of(group, call, device, seed)]
    # rows come as views: what joins them must not be among the kernels
    return measure(bits_head(group, impl, device), trials, join=_joined, warm=True, started=started)


def kernels_at(row: Row | None, case: BenchCase) -> list[str]:
    """The kernels that the row names for the cell; [] where nothing was profiled."""
    if row is None or not row.kernels:
        return []
    value: Value = case.shape["M"] if case.axis == "M" else f"decode B={case.shape['B']}"
    if case.shape.get("Tq", 1) > 1:
        value = "prefill"
    return row.kernel_sets[row.kernels[row.values.index(value)]] if value in row.values else []
