"""Bytes and floating-point operations of one call: the least that any implementation needs.

The counts are those of the operators' declarations (`nondet.core.operator.Bench.work`). Operations are the
multiplications and additions of products; exponentials and the sums of row operators are left out (flops = 0), since
there memory is the limit on every machine this runs on.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from nondet.core.operator import Bench, Operator
from nondet.core.registry import operators

FP8 = "float8_e4m3fn"  # only for operators whose declaration has it
ITEM_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4, "float64": 8}

# Cases over several ranks, which `nondet.bench.ranks` times: the name on the command line -> its implementations.
RANK_OPERATORS: dict[str, tuple[str, ...]] = {
    "all-reduce": ("stock", "invariant"),
    "row-parallel": ("stock", "invariant", "rank-free"),
}


@dataclass(frozen=True)
class Work:
    """What one call must move and compute."""

    bytes: int
    flops: int


def timed_operators() -> dict[str, Operator]:
    """The operators that are timed, by their names on the command line."""
    return {name.replace("_", "-"): operator for name, operator in operators().items() if operator.bench is not None}


def bench_of(operator: str) -> Bench:
    """The timed part of a declared operator. Raises ValueError: its work is not declared."""
    bench = operators()[operator].bench
    if bench is None:
        raise ValueError(f"{operator} is not timed: its bytes and operations are not known")
    return bench


def work_of(operator: str, shape: Mapping[str, int], dtype: str) -> Work:
    """The work of one call of a declared operator at `shape`; as `bench_of`."""
    elements, flops = bench_of(operator).work(shape)
    return Work(elements * ITEM_BYTES.get(dtype, 1), flops)


def limit_us(work: Work, copy_rate: float | None, peak_rate: float | None) -> tuple[float | None, str]:
    """The shortest time that the machine allows, and what sets it: "memory" or "arithmetic".

    Args:
        copy_rate: Bytes per second, read and written together.
        peak_rate: Operations per second of a large product in this dtype.

    Returns:
        (None, ...) where a rate that is needed was not measured.
    """
    if copy_rate is None or (peak_rate is None and work.flops):
        return None, "memory"
    memory = work.bytes / copy_rate * 1e6
    arithmetic = work.flops / peak_rate * 1e6 if peak_rate is not None else 0.0
    return (arithmetic, "arithmetic") if arithmetic > memory else (memory, "memory")
