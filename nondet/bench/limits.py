"""What the machine can do at most, measured in the run itself: copy bandwidth, and the peak of a large product.

Datasheet figures are never used: clocks, memory and drivers differ, and a ratio to a promise says little.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from nondet.bench.timing import Stopwatch, interleave
from nondet.core.inputs import generator, make
from nondet.core.records import Limit

__all__ = ["COPY", "limit_names", "measure_limit", "peak_name"]

COPY = "copy"
# Large enough to fill the machine, small enough to take a few milliseconds.
_COPY_BYTES = {"cuda": 2**30, "cpu": 2**27}
_PRODUCT = {"cuda": 8192, "cpu": 1024}


def peak_name(dtype: str) -> str:
    """The limit that products of the dtype are held against."""
    return f"peak {dtype}"


def limit_names(dtypes: list[str]) -> list[str]:
    """The limits that a run needs."""
    return [COPY, *(peak_name(dtype) for dtype in dict.fromkeys(dtypes))]


def _negate(target: torch.Tensor, source: torch.Tensor) -> None:
    torch.neg(source, out=target)


def measure_limit(name: str, device: str, seed: int, stopwatch: Stopwatch) -> Limit:
    """Measure one of `limit_names`.

    copy: one tensor onto another, far larger than the cache, by the library's own copy and by a kernel that reads and
    writes once (torch.neg); bytes read and written both count. On an H200 the library's copy reached 2.8 TB/s where
    kernels reach more than 4, so the faster one is the limit.
    peak: torch.mm of two square matrices of ordinary numbers (zeros would run at higher clocks).

    A limit is the most that was seen, so the fastest replay counts: under power limits the median of a large product
    differed by 12% from one process to the next on an H200, its fastest replay by less than 1%.
    """
    rng = generator(seed, device)
    calls: dict[str, Callable[..., Any]]
    if name == COPY:
        source = make("bell", (_COPY_BYTES[device] // 4,), torch.float32, device, rng)
        sets = [(torch.empty_like(source), source) for _ in range(2)]
        size = f"of {source.nbytes / 2**20:.0f} MiB"
        unit, work = "B/s", 2 * source.nbytes
        calls = {f"copy_ {size}": torch.Tensor.copy_, f"torch.neg {size}": _negate}
    else:
        edge = _PRODUCT[device]
        dtype: torch.dtype = getattr(torch, name.removeprefix(peak_name("")))
        sets = [tuple(make("bell", (edge, edge), dtype, device, rng) for _ in range(2)) for _ in range(2)]  # type: ignore[misc] # always two
        unit, work = "FLOP/s", 2 * edge**3
        calls = {f"torch.mm, {edge} cubed": torch.mm}
    timed = interleave({what: stopwatch.record(call, sets, 2) for what, call in calls.items()}, stopwatch)
    what = min(timed, key=lambda name: min(timed[name]))
    samples = [us / 2 for us in timed[what]]
    return Limit(
        name=name,
        what=what,
        unit=unit,
        device=device,
        rate=work / min(samples) * 1e6,
        work=work,
        method=stopwatch.method,
        samples_us=[round(us, 4) for us in samples],
    )
