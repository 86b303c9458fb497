"""What the machine can do at most, measured in the run itself: copy bandwidth, and the peak of a large product.

Datasheet figures are never used: clocks, memory and drivers differ, and a ratio to a promise says little.
"""

from __future__ import annotations

import torch

from nondet.bench.timing import Stopwatch, interleave, quartiles
from nondet.inputs import generator, make
from nondet.result import Limit

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


def measure_limit(name: str, device: str, seed: int, stopwatch: Stopwatch) -> Limit:
    """Measure one of `limit_names`.

    copy: one tensor onto another, far larger than the cache; bytes read and written both count.
    peak: torch.mm of two square matrices of ordinary numbers (zeros would run at higher clocks).
    """
    rng = generator(seed, device)
    if name == COPY:
        source = make("bell", (_COPY_BYTES[device] // 4,), torch.float32, device, rng)
        targets = [torch.empty_like(source) for _ in range(2)]
        sets = [(target, source) for target in targets]
        what, unit, work = f"copy_ of {source.nbytes / 2**20:.0f} MiB", "B/s", 2 * source.nbytes
        replay = stopwatch.record(torch.Tensor.copy_, sets, 2)
    else:
        size = _PRODUCT[device]
        dtype: torch.dtype = getattr(torch, name.removeprefix(peak_name("")))
        sets = [tuple(make("bell", (size, size), dtype, device, rng) for _ in range(2)) for _ in range(2)]  # type: ignore[misc] # always two
        what, unit, work = f"torch.mm, {size} cubed", "FLOP/s", 2 * size**3
        replay = stopwatch.record(torch.mm, sets, 2)
    samples = [us / 2 for us in interleave({name: replay}, stopwatch)[name]]
    return Limit(
        name=name,
        what=what,
        unit=unit,
        device=device,
        rate=work / quartiles(samples)[1] * 1e6,
        work=work,
        method=stopwatch.method,
        samples_us=[round(us, 4) for us in samples],
    )
