"""Implementations with a known fault, and sound counterparts, as a user hands them in by --impl module:function.

A faulty one breaks exactly one invariance. A sound one computes each row by itself in float64, by a call that is the
same whatever surrounds the row. `measure` puts one under a probe.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Container
from typing import Any

import torch
import torch.nn.functional as F

from nondet.core.records import Row
from nondet.probes.base import Options
from nondet.probes.runner import plan_jobs, run_jobs
from tests.probes.toys_attention import *  # noqa: F403 - one name for all toys, as a user has for a module of kernels
from tests.probes.toys_linear import *  # noqa: F403 - the same
from tests.probes.toys_linear import _in_parts, forget

_ORDER = random.Random()  # noqa: S311 - unseeded on purpose: it plays the threads of a GPU


def measure(probe: str, toy: str, *, asked: Container[str] | None = None, **options: Any) -> dict[str, Row]:
    """The rows of one probe under one toy, by case name and dtype; `asked`: only what these words of `varied` ask."""
    forget()
    operator, _, function = toy.rpartition("=")
    jobs = plan_jobs(
        [probe], [f"{operator}={__name__}:{function}" if operator else f"{__name__}:{toy}"], Options(**options)
    )
    jobs = [job for job in jobs if asked is None or job.case.varied in asked]
    return {f"{row.case} [{row.dtype}]": row for row in run_jobs(jobs, options.get("seed", 0), set())}


def statuses(rows: dict[str, Row], **wanted: str) -> set[str]:
    """The statuses of the rows whose fields have these values."""
    chosen = [r for r in rows.values() if all(getattr(r, name) == value for name, value in wanted.items())]
    assert chosen, f"no row with {wanted}"
    return {r.status for r in chosen}


# ---- rows


def _row_sum(x: torch.Tensor) -> torch.Tensor:
    """Faulty: halves are added onto each other, but neighbours from 8 rows on."""
    x = F.pad(x.float(), (0, (1 << (x.shape[-1] - 1).bit_length()) - x.shape[-1]))
    while x.shape[-1] > 1:
        half = x.shape[-1] // 2
        x = x[:, :half] + x[:, half:] if len(x) < 8 else x[:, 0::2] + x[:, 1::2]
    return x[:, 0]


def sum_by_rows(x: torch.Tensor) -> torch.Tensor:
    """Faulty, see `_row_sum`."""
    return _row_sum(x).to(x.dtype)


def mean_by_rows(x: torch.Tensor) -> torch.Tensor:
    """Faulty, see `_row_sum`."""
    return (_row_sum(x) / x.shape[-1]).to(x.dtype)


def rms_norm_by_rows(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Faulty, see `_row_sum`."""
    scale = torch.rsqrt(_row_sum(x.float().square()) / x.shape[-1] + 1e-6)[:, None]
    return (x * scale * weight).to(x.dtype)


def softmax_by_rows(x: torch.Tensor) -> torch.Tensor:
    """Faulty, see `_row_sum`."""
    grown = torch.exp(x.double() - x.double().amax(-1, keepdim=True)).float()
    return (grown / _row_sum(grown)[:, None]).to(x.dtype)


def log_softmax_by_rows(x: torch.Tensor) -> torch.Tensor:
    """Faulty, see `_row_sum`."""
    shifted = x.double() - x.double().amax(-1, keepdim=True)
    return (shifted.float() - _row_sum(torch.exp(shifted).float()).double().log().float()[:, None]).to(x.dtype)


def rms_norm_by_place(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Faulty: odd rows are normalized with another epsilon."""
    epsilon = 1e-6 * (1 + torch.arange(len(x)) % 2)[:, None] * 1000
    return (x * torch.rsqrt(x.double().square().mean(-1, keepdim=True) + epsilon) * weight).to(x.dtype)


def _each(x: torch.Tensor, function: Any) -> torch.Tensor:
    return torch.stack([function(row.double()).to(x.dtype) for row in x])


def sum_sound(x: torch.Tensor) -> torch.Tensor:
    """Sound: each row by itself."""
    return _each(x, torch.sum)


def mean_sound(x: torch.Tensor) -> torch.Tensor:
    """Sound: each row by itself."""
    return _each(x, torch.mean)


def rms_norm_sound(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Sound: each row by itself."""
    return _each(x, lambda row: row * torch.rsqrt(row.square().mean() + 1e-6) * weight.double())


def softmax_sound(x: torch.Tensor) -> torch.Tensor:
    """Sound: each row by itself."""
    return _each(x, lambda row: torch.softmax(row, -1))


def log_softmax_sound(x: torch.Tensor) -> torch.Tensor:
    """Sound: each row by itself."""
    return _each(x, lambda row: torch.log_softmax(row, -1))


# ---- split-K


def _parts(a: torch.Tensor, b: torch.Tensor, cuts: list[int]) -> list[torch.Tensor]:
    edges = zip([0, *cuts], [*cuts, a.shape[1]], strict=True)
    return [a[:, i:j].float() @ b[i:j].float() for i, j in edges]


def split_k(a: torch.Tensor, b: torch.Tensor, *, splits: int, ordered: bool) -> torch.Tensor:
    """Faulty, as split-K is: the bits follow from the number of parts, and unordered from chance."""
    width = -(-a.shape[1] // splits)
    parts = _parts(a, b, list(range(width, a.shape[1], width)))
    if not ordered:
        _ORDER.shuffle(parts)
    total = parts[0]
    for part in parts[1:]:
        total = total + part
    return total.to(a.dtype)


def split_k_that_forgets(a: torch.Tensor, b: torch.Tensor, *, splits: int, ordered: bool) -> torch.Tensor:
    """Wrong, not only another order: from 8 parts on the last one is left out."""
    kept = a.shape[1] if splits < 8 else a.shape[1] * (splits - 1) // splits
    return split_k(a[:, :kept], b[:kept], splits=splits, ordered=True)


def fixed_chunk(a: torch.Tensor, b: torch.Tensor, *, workers: int, chunk: int = 64) -> torch.Tensor:
    """Sound: the workers share chunks of one size, which are added in order, each result in its own place."""
    chunks: list[torch.Tensor | None] = [None] * -(-a.shape[1] // chunk)
    for worker in range(workers):
        for i in range(worker, len(chunks), workers):
            chunks[i] = a[:, i * chunk : (i + 1) * chunk].float() @ b[i * chunk : (i + 1) * chunk].float()
    total = torch.zeros(a.shape[0], b.shape[1])
    for part in chunks:
        assert part is not None
        total = total + part
    return total.to(a.dtype)


# ---- grouped_matmul


def _grouped(x: torch.Tensor, weight: torch.Tensor, offsets: torch.Tensor, parts: Any) -> torch.Tensor:
    """K in parts(rows of the expert, the row's place in the batch) parts, row by row."""
    out = torch.zeros(x.shape[0], weight.shape[2], dtype=x.dtype)
    for expert, (start, end) in enumerate(itertools.pairwise([0, *offsets.tolist()])):
        for row in range(start, end):
            out[row] = _in_parts(x[row : row + 1], weight[expert].mT, parts(end - start, row))[0]
    return out


def grouped_by_rows(x: torch.Tensor, weight: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
    """Faulty: an expert with a single row takes another order, as a GEMV does."""
    return _grouped(x, weight, offsets, lambda rows, place: 1 if rows == 1 else 4)


def grouped_by_place(x: torch.Tensor, weight: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
    """Faulty: where K is cut follows from the row's place in the sorted batch."""
    return _grouped(x, weight, offsets, lambda rows, place: 1 + place % 3)


def grouped_sound(x: torch.Tensor, weight: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
    """Sound: each row by itself in float64."""
    experts = torch.searchsorted(offsets, torch.arange(len(x)), right=True).tolist()
    return torch.stack([(row.double() @ weight[e].double()).to(x.dtype) for row, e in zip(x, experts, strict=True)])


# ---- atomics


def index_add_atomic(target: torch.Tensor, index: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
    """Faulty: the sources come in any order."""
    order = list(range(len(index)))
    _ORDER.shuffle(order)
    return target.index_add(0, index[order], source[order])


def scatter_add_atomic(target: torch.Tensor, index: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
    """Faulty: the sources come in any order."""
    order = list(range(len(index)))
    _ORDER.shuffle(order)
    return target.scatter_add(0, index[order], source[order])


def index_add_sound(target: torch.Tensor, index: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
    """Sound: one after the other."""
    return target.index_add(0, index, source)


def scatter_add_sound(target: torch.Tensor, index: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
    """Sound: one after the other."""
    return target.scatter_add(0, index, source)


# ---- pointwise


def exp_with_a_tail(x: torch.Tensor) -> torch.Tensor:
    """Faulty: vectors of 16 through one exponential, the rest through another that is an ULP off."""
    body = len(x) // 16 * 16
    return torch.cat([F.silu(x[:body].double()).to(x.dtype), torch.nextafter(F.silu(x[body:]), x[body:] + 1)])


def failing(*_: Any, **__: Any) -> torch.Tensor:
    """Raises, as a broken kernel does."""
    raise RuntimeError("the kernel failed\nwith a long story")


def not_here(*_: Any, **__: Any) -> torch.Tensor:
    """Says that it is not for this device or dtype."""
    raise NotImplementedError("no kernel for float32")
