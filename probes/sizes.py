"""What every probe asks of the user's options before it makes a tensor: sizes, dtypes, kinds of input, memory."""

from __future__ import annotations

import functools
import os
import random
import time
from collections.abc import Callable, Iterable
from pathlib import Path

import torch

from nondet.core.compare import float_dtypes
from nondet.core.inputs import KINDS
from nondet.core.processes import free_gpu_memory
from nondet.errors import UnknownNameError, UserError
from nondet.probes.base import Options

__all__ = [
    "COMPUTE_DTYPES",
    "SWEEP",
    "available_bytes",
    "drawn",
    "dtypes",
    "element_bytes",
    "kinds",
    "require_memory",
    "runs",
    "size",
    "some",
    "sweep",
]

# What torch's own operators compute in. The float8 and float4 formats are for storage: no operator here takes them.
COMPUTE_DTYPES = ("float64", "float32", "bfloat16", "float16")

# Powers of two and their neighbours, and what lies between: tiles, waves and heuristics change there.
SWEEP = (
    *(1, 2, 3, 4, 5, 6, 7, 8, 9, 12, 15, 16, 17, 24, 31, 32, 33, 40, 48, 63, 64, 65, 80, 96, 112, 127, 128, 129, 160),
    *(192, 224, 255, 256, 257, 320, 384, 448, 511, 512, 513, 640, 768, 1023, 1024, 1025, 1536, 2048, 3072, 4096),
)
_DENSE = 64  # a dense sweep holds every size up to here: a window of few sizes may lie anywhere
# Every size up to this one is tried in a full sweep on a CPU, where a product of 4096 rows takes a second or so.
_DENSE_ON_CPU = 512


def size(flag: str, value: int | None, default: int) -> int:
    """The size given with `flag`, or the default.

    Raises:
        UserError: it is not positive.
    """
    if value is None:
        return default
    if value < 1:
        raise UserError(f"{flag} {value} is not a size", "Give 1 or more.")
    return value


def runs(options: Options, default: int) -> int:
    """Repetitions of a run-to-run case.

    Raises:
        UserError: fewer than two, which compare with nothing.
    """
    if options.runs is None:
        return default
    if options.runs < 2:
        raise UserError(f"--runs {options.runs} compares nothing", "Give 2 or more.")
    return options.runs


def dtypes(options: Options, operator: str, default: tuple[str, ...]) -> tuple[str, ...]:
    """The dtypes asked for, each once, or the default ones.

    Raises:
        UnknownNameError: torch has no floating dtype of that name.
        UserError: torch has it, but the operator can't compute in it.
    """
    for name in options.dtypes or ():
        if name not in {str(d).removeprefix("torch.") for d in float_dtypes()}:
            raise UnknownNameError("dtype", name, COMPUTE_DTYPES)
        if name not in COMPUTE_DTYPES:
            raise UserError(f"{operator} does not compute in {name}", f"It does in {', '.join(COMPUTE_DTYPES)}.")
    return tuple(dict.fromkeys(options.dtypes or default))


def kinds(options: Options, default: Iterable[str]) -> tuple[str, ...]:
    """The kinds of input asked for, each once, or the default ones.

    Raises:
        UnknownNameError: there is no such kind.
    """
    for name in options.inputs or ():
        if name not in KINDS:
            raise UnknownNameError("kind of input", name, KINDS)
    return tuple(dict.fromkeys(options.inputs or default))


def drawn(largest: int, options: Options, count: int = 3, above: int = 1) -> set[int]:
    """Up to so many sizes between `above` and `largest` that no list holds: another seed asks about others."""
    unlisted = sorted(set(range(above + 1, largest)) - set(SWEEP))
    return set(random.Random(options.seed).sample(unlisted, min(count, len(unlisted))))  # noqa: S311 - sizes, nothing secret


def some(few: Iterable[int], largest: int, options: Options) -> list[int]:
    """Those of a short list that are below `largest`, `largest` itself, and a drawn one."""
    return sorted({x for x in few if x < largest} | {largest} | drawn(largest, options, 1))


def sweep(largest: int, options: Options, start: int = 1, *, dense: bool = False) -> list[int]:
    """Sizes from `start` to `largest`, both included: a few dozen, or all that are affordable if `options.full`.

    Some are drawn, and those that a trace met are among them, however large.

    Args:
        dense: Every size up to 64 is, too.
    """
    every = _DENSE if dense else 0
    chosen = {*SWEEP, *range(1, every + 1), *drawn(largest, options, above=max(every, 1))}
    if options.full:
        chosen |= set(range(1, (4096 if options.device == "cuda" else _DENSE_ON_CPU) + 1))
    return sorted({x for x in chosen if start <= x < largest} | {largest} | {rows for rows, _ in options.met if rows})


def element_bytes(dtype: str) -> int:
    """Bytes of one number."""
    found: torch.dtype = getattr(torch, dtype)
    return found.itemsize


def available_bytes(device: str) -> int | None:
    """Memory that can be had on the device type now; None where the system does not say.

    Raises:
        UserError: there is no such device.
    """
    if device == "cuda":
        if not torch.cuda.is_available():
            raise UserError("--device cuda: torch sees no CUDA device", "Use --device cpu.")
        cached = torch.cuda.memory_reserved() - torch.cuda.memory_allocated()
        return _free_on_gpu(torch.cuda.current_device(), int(time.monotonic())) + int(cached)
    limits = [_meminfo(), _cgroup_limit()]
    known = [x for x in limits if x is not None]
    return min(known) if known else None


@functools.lru_cache(maxsize=1)
def _free_on_gpu(index: int, second: int) -> int:
    """Free bytes, asked once a second: a plan asks for each of its cases, and a driver that is busy takes its time.

    A process that only plans has no context on the device, and is given none for this.
    """
    in_use: Callable[[int], bool] = getattr(torch._C, "_cuda_hasPrimaryContext", lambda _: True)
    if not in_use(index):
        free = free_gpu_memory(str(torch.cuda.get_device_properties(index).uuid))
        if free is not None:
            return free
    return int(torch.cuda.mem_get_info(index)[0])


def _meminfo() -> int | None:
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:  # not Linux
        names = os.sysconf_names if hasattr(os, "sysconf") else {}
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") if "SC_PHYS_PAGES" in names else None
    kib = {line.split(":")[0]: line.split()[1] for line in lines if len(line.split()) > 1}.get("MemAvailable")
    return int(kib) * 1024 if kib else None


def _cgroup_limit() -> int | None:
    """The container's limit: /proc/meminfo shows the host's memory."""
    try:
        text = Path("/sys/fs/cgroup/memory.max").read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None


def require_memory(device: str, needed: int, what: str) -> None:
    """Refuse sizes whose tensors can't exist here, before any is made.

    Args:
        needed: Bytes of everything that is alive at once.
        what: The sizes, as the user knows them.

    Raises:
        UserError: more than there is.
    """
    available = available_bytes(device)
    if available is not None and needed > available:
        raise UserError(
            f"{what} needs about {_human(needed)} of memory on {device}, and {_human(available)} are free",
            "Give smaller sizes.",
        )


def _human(count: int) -> str:
    for unit, factor in (("TiB", 2**40), ("GiB", 2**30), ("MiB", 2**20)):
        if count >= factor:
            return f"{count / factor:.3g} {unit}" if count < 1000 * factor else f"{count // factor:,} {unit}"
    return f"{count} bytes"
