"""Bytes and floating-point operations of one call: what no implementation can do without.

Bytes: each input read once, each output written once, nothing kept between calls. Operations: multiplications and
additions of the products; exponentials and the sums of row operators are left out (flops = 0), since there memory is
the limit on every machine this runs on. A masked score is not counted: no key that a query may not see is work.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

__all__ = ["ITEM_BYTES", "Work", "limit_us", "work_of"]

ITEM_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4, "float64": 8}


@dataclass(frozen=True)
class Work:
    """What one call must move and compute."""

    bytes: int
    flops: int


def work_of(operator: str, shape: Mapping[str, int], dtype: str) -> Work:
    """The work of one call of `operator` (a name of `nondet.registry.IMPLEMENTATIONS`) at `shape`.

    Raises:
        KeyError: an operator that is not counted here.
    """
    elements, flops = _COUNTS[operator](shape)
    return Work(elements * ITEM_BYTES[dtype], flops)


def limit_us(work: Work, copy_rate: float | None, peak_rate: float | None) -> tuple[float | None, str]:
    """The shortest time that the machine allows, and what sets it: "memory" or "arithmetic".

    Args:
        copy_rate: Bytes a second, read and written together.
        peak_rate: Operations a second of a large product in this dtype.

    Returns:
        (None, ...) where a rate that is needed was not measured.
    """
    if copy_rate is None or (peak_rate is None and work.flops):
        return None, "memory"
    memory = work.bytes / copy_rate * 1e6
    arithmetic = work.flops / peak_rate * 1e6 if peak_rate is not None else 0.0
    return (arithmetic, "arithmetic") if arithmetic > memory else (memory, "memory")


def _linear(s: Mapping[str, int]) -> tuple[int, int]:
    return s["M"] * s["K"] + s["N"] * s["K"] + s["M"] * s["N"], 2 * s["M"] * s["N"] * s["K"]


def _grouped(s: Mapping[str, int]) -> tuple[int, int]:
    """Every expert's weight is read once if it has a row: M rows spread evenly reach min(E, M) of them."""
    used = min(s["E"], s["M"])
    return s["M"] * s["K"] + used * s["N"] * s["K"] + s["M"] * s["N"], 2 * s["M"] * s["N"] * s["K"]


def _attention(s: Mapping[str, int]) -> tuple[int, int]:
    """Query i of Tq stands at position Tk - Tq + i and sees the keys up to its own position; two products of D."""
    queries, keys = s["Tq"], s["Tk"]
    pairs = queries * (keys - queries) + queries * (queries + 1) // 2
    elements = 2 * s["B"] * s["Hq"] * queries * s["D"] + 2 * s["B"] * s["Hkv"] * keys * s["D"]
    return elements, 4 * s["B"] * s["Hq"] * s["D"] * pairs


_COUNTS = {
    "linear": _linear,
    "grouped_matmul": _grouped,
    "attention": _attention,
    "rms_norm": lambda s: (2 * s["M"] * s["H"] + s["H"], 0),
    # reads x and the residual, writes their sum and its norm
    "rms_norm_residual": lambda s: (4 * s["M"] * s["H"] + s["H"], 0),
    "softmax": lambda s: (2 * s["M"] * s["V"], 0),
    "log_softmax": lambda s: (2 * s["M"] * s["V"], 0),
    "mean": lambda s: (s["M"] * s["K"] + s["M"], 0),
    "logsumexp": lambda s: (s["M"] * s["V"] + s["M"], 0),
}
