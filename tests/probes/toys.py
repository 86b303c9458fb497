"""Implementations with a known fault, and sound counterparts, as a user hands them in by --impl module:function.

A faulty one breaks exactly one invariance. A sound one computes each row by itself in float64, by a call that is the
same whatever surrounds the row. `measure` puts one under a probe.
"""

from __future__ import annotations

import functools
import itertools
import random
from collections.abc import Callable, Container, Sequence
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F

from nondet.core.records import Row
from nondet.probes import base
from nondet.probes.base import Options
from nondet.probes.runner import plan_jobs, run_jobs


def attention_sound(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, causal: bool = True, scale: Any = None
) -> Any:
    """Sound: each query by itself in float64, over the keys that it sees."""
    groups = q.shape[1] // k.shape[1]
    out = q.new_empty((*q.shape[:-1], v.shape[-1]))
    for b in range(q.shape[0]):
        keys, values = (t[b].double().repeat_interleave(groups, 0) for t in (k, v))
        for i in range(q.shape[2]):
            seen = k.shape[2] - q.shape[2] + i + 1 if causal else k.shape[2]
            scores = (keys[:, :seen] @ q[b, :, i].double()[..., None])[..., 0] * (scale or q.shape[-1] ** -0.5)
            out[b, :, i] = (torch.softmax(scores, -1)[:, None] @ values[:, :seen])[:, 0].to(q.dtype)
    return out


def _blocks(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, edges: list[int], seen: int, scale: float | None
) -> torch.Tensor:
    """One query [H, D] over keys in blocks, merged in order in float32."""
    top = torch.full((q.shape[0], 1), -torch.inf)
    mass, total = torch.zeros(q.shape[0], 1), torch.zeros(q.shape[0], v.shape[-1])
    for start, edge in itertools.pairwise(edges):
        stop = min(edge, seen)
        if stop <= start:
            continue
        scores = (k[:, start:stop].float() @ q.float()[..., None])[..., 0] * (scale or q.shape[-1] ** -0.5)
        higher = torch.maximum(top, scores.amax(-1, keepdim=True))
        weights = torch.exp(scores - higher)
        keep = torch.exp(top - higher)
        mass = mass * keep + weights.sum(-1, keepdim=True)
        total = total * keep + (weights[:, None] @ v[:, start:stop].float())[:, 0]
        top = higher
    return (total / mass).to(q.dtype)


def _attention_in_blocks(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, width: int, **form: Any) -> torch.Tensor:
    """Blocks of so many keys; of those in the cache, and of the new ones, where `apart` says so."""
    scale, causal, total = form.get("scale"), form.get("causal", True), k.shape[2]
    groups, cached = q.shape[1] // k.shape[1], total - q.shape[2]
    starts = [0, cached] if form.get("apart") else [0]
    edges = [edge for a, b in itertools.pairwise([*starts, total]) for edge in range(a, b, width)]
    keys, values = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
    ends = [cached + i + 1 if causal else total for i in range(q.shape[2])]
    out = q.new_empty((*q.shape[:-1], v.shape[-1]))
    for b in range(q.shape[0]):
        for i, end in enumerate(ends):
            out[b, :, i] = _blocks(q[b, :, i], keys[b], values[b], [*edges, total], end, scale)
    return out


def attention_cache_apart(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **form: Any) -> torch.Tensor:
    """Faulty as the post has it: cached keys in blocks of 32, then the new ones in blocks of 32 of their own."""
    return _attention_in_blocks(q, k, v, 32, apart=True, **form)


def attention_anchored(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **form: Any) -> torch.Tensor:
    """Sound: blocks of 32 counted from the first key, wherever the cache ends."""
    return _attention_in_blocks(q, k, v, 32, **form)


def attention_tile_by_longest(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Faulty: blocks of 32 keys, and of 48 once the longest query of the batch has 64 tokens."""
    return _attention_in_blocks(q, k, v, 48 if q.shape[2] >= 64 else 32)


def _tile_by_longest_of_all(requests: list[tuple[torch.Tensor, ...]]) -> list[torch.Tensor]:
    width = 48 if max(q.shape[1] for q, _, _ in requests) >= 64 else 32
    return [_attention_in_blocks(q[None], k[None], v[None], width)[0] for q, k, v in requests]


def attention_ragged_tile(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Faulty in ragged batches alone: the tile follows from the longest query among all requests."""
    return attention_anchored(q, k, v)


attention_ragged_tile.ragged = _tile_by_longest_of_all  # type: ignore[attr-defined] # as the kernels' launchers have it


def attention_later_requests(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Faulty: from three requests on all but the first take other blocks."""
    widths = [32, *([32] if len(q) < 3 else [k.shape[2] // 2]) * (len(q) - 1)]
    each = zip(q.split(1), k.split(1), v.split(1), widths, strict=True)
    return torch.cat([_attention_in_blocks(*one) for one in each])


def attention_shared_maximum(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Faulty: keys are rounded to 8 bits by one scale, which is the largest of all requests."""
    scale = k.float().abs().amax() / 127.0
    return attention_sound(q, (torch.round(k.float() / scale) * scale).to(k.dtype), v)


STATE: dict[Any, Any] = {}


def count() -> int:
    STATE["calls"] = STATE.get("calls", 0) + 1
    return int(STATE["calls"])


def forget() -> None:
    """Every toy is as in a fresh process."""
    STATE.clear()


# ---- linear

Bias = torch.Tensor | None


def _plus(out: torch.Tensor, bias: Bias) -> torch.Tensor:
    return out if bias is None else (out.double() + bias.double()).to(out.dtype)


def in_parts(x: torch.Tensor, w: torch.Tensor, parts: int) -> torch.Tensor:
    """Row by row in float32, K in so many parts."""
    total = torch.zeros(x.shape[0], w.shape[0])
    for a, b in zip(x.float().chunk(parts, 1), w.float().chunk(parts, 1), strict=True):
        for i in range(len(a)):  # row by row: no library's own choice by M may come in
            total[i] += (b * a[i]).sum(1)  # and no GEMV, whose order follows from the address on some CPUs
    return total.to(x.dtype)


def of_rows(product: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> Callable[..., torch.Tensor]:
    """A linear layer of a product of rows [M, K] with w [N, K]: any leading axes, and a bias at the end."""

    def linear(x: torch.Tensor, w: torch.Tensor, bias: Bias = None) -> torch.Tensor:
        return _plus(product(x.reshape(-1, x.shape[-1]), w).reshape(*x.shape[:-1], -1), bias)

    linear.__name__, linear.__qualname__ = product.__name__, product.__qualname__
    linear.__module__, linear.__doc__ = product.__module__, product.__doc__
    return linear


def of_parts(parts: Callable[..., int]) -> Callable[..., torch.Tensor]:
    """A linear layer whose K is cut in as many parts as the function of its rows and weight says."""

    return of_rows(functools.wraps(parts)(lambda rows, w: in_parts(rows, w, parts(rows, w))))


@of_rows
def linear_sound(rows: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """Sound: each row by itself in float64."""
    wide = w.double()
    return torch.stack([(wide * row).sum(1).to(rows.dtype) for row in rows.double()])


def linear_without_bias(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """Sound, and of layers without a bias alone."""
    return linear_sound(x, w)


# Sound: each row by itself in float32, K in four parts whatever the batch.
linear_in_order = of_parts(lambda *_: 4)


@of_parts
def linear_splits_by_m(rows: torch.Tensor, _: torch.Tensor) -> int:
    """Faulty: splits K in four from 16 rows on."""
    return 4 if len(rows) >= 16 else 1


@of_rows
def linear_tail_rows(rows: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """Faulty: the rows after the last whole tile of 8 take another order; row 0 never does, but alone."""
    body = max(1, len(rows) // 8 * 8)
    return torch.cat([in_parts(rows[:body], w, 1), in_parts(rows[body:], w, 4)])


# Faulty: another split at each call.
linear_unsteady = of_parts(lambda *_: 1 + count() % 3)


@of_rows
def linear_shared_scale(rows: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """Faulty: activations are rounded to 8 bits by one scale, which is the largest of all rows."""
    scale = rows.float().abs().amax() / 127.0
    return linear_sound((torch.round(rows.float() / scale) * scale).to(rows.dtype), w)


# Faulty: operands at an unaligned address take another order.
linear_by_address = of_parts(lambda rows, _: 4 if rows.data_ptr() % 16 else 1)


def linear_remembers_weights(x: torch.Tensor, w: torch.Tensor, bias: Bias = None) -> torch.Tensor:
    """Faulty: weights are packed once for each address, and never again when they are written to."""
    packed = STATE.setdefault(("packed", w.data_ptr(), w.shape, w.dtype), (w, w.clone()))[1]
    return linear_sound(x, packed, bias)


# Sound: how K is split follows from N, whatever the batch.
linear_by_width = of_parts(lambda _, w: 1 + len(w) % 3)


def changed(product: Callable[..., torch.Tensor], change: Callable[[torch.Tensor], Any]) -> Callable[..., torch.Tensor]:
    """A linear layer whose result something is done to."""

    def linear(x: torch.Tensor, w: torch.Tensor, bias: Bias = None) -> torch.Tensor:
        out: torch.Tensor = change(product(x, w, bias))
        return out

    return linear


def linear_wide_result(x: torch.Tensor, w: torch.Tensor, bias: Bias = None) -> torch.Tensor:
    """Wrong: float32, whatever it was given."""
    return linear_sound(x.float(), w.float(), None if bias is None else bias.float())


# Wrong: at most 24 rows come back; zeros; the sign is turned; NaN, which equals NaN.
linear_fewer_rows = changed(linear_sound, lambda out: out[:24])
linear_zeros = changed(linear_sound, torch.zeros_like)
linear_flipped = changed(linear_sound, torch.neg)
linear_nan = changed(linear_sound, lambda out: torch.full_like(out, torch.nan))
# Faulty: every result of a shape is the same memory.
linear_one_buffer = changed(
    linear_sound, lambda out: STATE.setdefault(("buffer", out.shape, out.dtype), out.clone()).copy_(out)
)


@of_rows
def linear_lost_tail(rows: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """Wrong: what K has beyond a multiple of 24 is left out."""
    kept = rows.shape[-1] // 24 * 24
    return linear_sound(rows[:, :kept], w[:, :kept])


def linear_writes(x: torch.Tensor, w: torch.Tensor, bias: Bias = None) -> torch.Tensor:
    """Wrong: right the first time, and the weight is scaled for whoever comes next."""
    out = linear_sound(x, w, bias)
    w.mul_(2.0)
    return out


# ---- noise that is rare


def _off_every(time: int) -> Any:
    """Faulty: every so many calls one is a few ULP off, by the same amount, so that there are two classes."""

    def linear(x: torch.Tensor, w: torch.Tensor, bias: Bias = None) -> torch.Tensor:
        rare.calls += 1
        return linear_sound(x, w, bias) * (1 if rare.calls % time else 1 + 2.0**-21)

    rare: Any = linear
    rare.calls = 0
    return linear


linear_every_fifth, linear_rarely = _off_every(5), _off_every(97)


def linear_exits(x: torch.Tensor, w: torch.Tensor, bias: Bias = None) -> torch.Tensor:
    """Broken: ends the process, with success."""
    raise SystemExit(0)


_ORDER = random.Random()  # noqa: S311 - unseeded on purpose: it plays the threads of a GPU


def measure(
    probe: str, toy: str, *, asked: Container[str] | None = None, between: int = 8, **options: Any
) -> dict[str, Row]:
    """The rows of one probe under one toy, or under a sentence of the grammar of faults, by case name and dtype.

    Args:
        asked: Only what these words of `varied` ask.
        between: Other calls before the last variant of a history, fewer than a user's.
    """
    forget()
    jobs = plan_jobs([probe], [target(toy)], Options(**options))
    jobs = [job for job in jobs if asked is None or job.case.varied in asked]
    with mock.patch.object(base, "OTHER_CALLS", between):
        return {f"{row.case} [{row.dtype}]": row for row in run_jobs(jobs, options.get("seed", 0))}


def target(toy: str, module: str = __name__) -> str:
    """What --impl takes: of "function", "operator=function", or a sentence of `tests.faults.grammar`."""
    operator, equals, function = toy.rpartition("=")
    if function.count("__") == 3:
        return f"{function.partition('__')[0]}=tests.faults.grammar:{function}"
    return f"{operator}{equals}{module}:{function}"


def statuses(rows: dict[str, Row], **wanted: str) -> set[str]:
    """The statuses of the rows whose fields have these values."""
    chosen = [r for r in rows.values() if all(getattr(r, name) == value for name, value in wanted.items())]
    assert chosen, f"no row with {wanted}"
    return {r.status for r in chosen}


def sum_sound(x: torch.Tensor) -> torch.Tensor:
    """Sound: each row by itself."""
    return torch.stack([row.double().sum() for row in x]).to(x.dtype)


def rms_norm_sound(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Sound: each row by itself."""
    rows = [row * torch.rsqrt(row.square().mean() + 1e-6) * weight.double() for row in x.double()]
    return torch.stack(rows).to(x.dtype)


# ---- split-K


def split_k(a: torch.Tensor, b: torch.Tensor, *, splits: int, ordered: bool) -> torch.Tensor:
    """Faulty, as split-K is: the bits follow from the number of parts, and unordered from chance."""
    width = -(-a.shape[1] // splits)
    parts = [x.float() @ w.float() for x, w in zip(a.split(width, 1), b.split(width), strict=True)]
    if not ordered:
        _ORDER.shuffle(parts)
    return functools.reduce(torch.add, parts).to(a.dtype)


def split_k_that_forgets(a: torch.Tensor, b: torch.Tensor, *, splits: int, ordered: bool) -> torch.Tensor:
    """Wrong, not only another order: from 8 parts on the last one is left out."""
    kept = a.shape[1] if splits < 8 else a.shape[1] * (splits - 1) // splits
    return split_k(a[:, :kept], b[:kept], splits=splits, ordered=True)


def fixed_chunk(a: torch.Tensor, b: torch.Tensor, *, workers: int, chunk: int = 64) -> torch.Tensor:
    """Sound: the workers share chunks of one size, which are added in order, each result in its own place."""
    pairs = list(zip(a.float().split(chunk, 1), b.float().split(chunk), strict=True))
    chunks: dict[int, torch.Tensor] = {}
    for worker in range(workers):
        chunks |= {i: pairs[i][0] @ pairs[i][1] for i in range(worker, len(pairs), workers)}
    return functools.reduce(torch.add, (chunks[i] for i in range(len(pairs)))).to(a.dtype)


# ---- grouped_matmul


def _grouped(x: torch.Tensor, weight: torch.Tensor, offsets: torch.Tensor, parts: Any) -> torch.Tensor:
    """K in parts(rows of the expert, the row's place in the batch) parts, row by row."""
    out = torch.zeros(x.shape[0], weight.shape[2], dtype=x.dtype)
    for expert, (start, end) in enumerate(itertools.pairwise([0, *offsets.tolist()])):
        for row in range(start, end):
            out[row] = in_parts(x[row : row + 1], weight[expert].mT, parts(end - start, row))[0]
    return out


def grouped_sound(x: torch.Tensor, weight: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
    """Sound: each row by itself in float64; of rows that have experts, all of them."""
    experts = torch.searchsorted(offsets, torch.arange(len(x)), right=True).tolist()
    return torch.stack([(row.double() @ weight[e].double()).to(x.dtype) for row, e in zip(x, experts, strict=True)])


def grouped_leaves_later_rows(x: torch.Tensor, weight: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
    """Faulty: another order where there are rows after the last expert's; what they hold is chance, as torch's."""
    out = _grouped(x, weight, offsets, lambda *_: 1 if offsets[-1] == len(x) else 4)
    out[int(offsets[-1]) :] = _ORDER.random() * 1e30
    return out


# ---- atomics


def adds(method: str, order: Callable[[int], Sequence[int]]) -> Callable[..., torch.Tensor]:
    """index_add or scatter_add, whose sources come in this order."""

    def add(target: torch.Tensor, index: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
        at = list(order(len(index)))
        out: torch.Tensor = getattr(target, method)(0, index[at], source[at])
        return out

    return add


index_add_atomic, scatter_add_atomic = (
    adds(method, lambda n: _ORDER.sample(range(n), n)) for method in ("index_add", "scatter_add")
)
index_add_sound, scatter_add_sound = (adds(method, range) for method in ("index_add", "scatter_add"))
index_add_turns = adds("index_add", lambda n: range(n)[:: 1 if n < 200 else -1])  # from 200 sources on backwards


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


# ---- FP8 products: sums of so many k are exact, and added in float32 in order


def _no_blocks(scale_a: Any) -> None:
    if scale_a.dim() == 2 and scale_a.shape[1] > 1:
        raise NotImplementedError("no scales in blocks")


def _promoted(form: Callable[[int], tuple[int, int]]) -> Callable[..., torch.Tensor]:
    """Of so many rows: promoted every so many k, in so many parts of K: written anew, not by the kernel under test."""

    def product(a: Any, b: Any, scale_a: Any, scale_b: Any, dtype: Any) -> torch.Tensor:
        _no_blocks(scale_a)
        interval, splits = form(len(a))
        whole = torch.zeros(a.shape[0], b.shape[1])
        for part in torch.arange(a.shape[1]).chunk(splits):
            total = torch.zeros_like(whole)
            for ks in part.split(interval):
                total += (a[:, ks].double() @ b[ks].double()).float()
            whole += total
        return (whole * (scale_a * scale_b)).to(dtype)

    return product


fp8_sound = _promoted(lambda _: (128, 1))
fp8_promotes_sooner = _promoted(lambda rows: (64 if rows >= 48 else 128, 1))  # faulty
fp8_splits = _promoted(lambda rows: (128, 2 if rows >= 64 else 1))  # faulty: K in two parts from 64 rows on


def fp8_coarse(a: Any, b: Any, scale_a: Any, scale_b: Any, dtype: Any) -> torch.Tensor:
    """Sums of 128 k are cut to 13 bits, as a matrix unit does; from 48 rows on those of 64."""
    _no_blocks(scale_a)
    total = torch.zeros(a.shape[0], b.shape[1])
    for ks in torch.arange(a.shape[1]).split(64 if len(a) >= 48 else 128):
        m, e = torch.frexp(a[:, ks].double() @ b[ks].double())
        total += torch.ldexp((m * 2**13).trunc(), e - 13).float()
    return (total * (scale_a * scale_b)).to(dtype)


def fp8_rescales(a: Any, b: Any, scale_a: Any, scale_b: Any, dtype: Any) -> torch.Tensor:
    """Faulty: the rows' scales become one for the whole batch before the product."""
    _no_blocks(scale_a)
    wide = a.float() * scale_a
    one = wide.nan_to_num(0.0).abs().amax() / 448
    return fp8_sound((wide / one).to(a.dtype), b, one, scale_b, dtype)


def quantize_by_batch(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Faulty by meaning: one scale for the whole batch."""
    scale = x.float().abs().amax() / 448
    return (x.float() / scale).to(torch.float8_e4m3fn), scale


def quantize_by_row(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Sound: a scale for each row."""
    scale = x.float().abs().amax(1, keepdim=True).clamp(min=1e-9) / 448
    return (x.float() / scale).clamp(-448, 448).to(torch.float8_e4m3fn), scale


def quantize_takes_a_neighbour_s(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Faulty: from 40 rows on the thirteenth has the scale of the fourteenth."""
    q, scale = quantize_by_row(x)
    if len(x) >= 40:
        scale[12] = scale[13]
        q[12:13] = (x[12:13].float() / scale[12]).clamp(-448, 448).to(q.dtype)
    return q, scale


def quantize_dithers(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Faulty by rounding: each row has its own scale, and in batches of an even number of rows is cut, not rounded."""
    q, scale = quantize_by_row(x)
    return (q.float() * (0.9 if len(x) % 2 == 0 else 1.0)).to(q.dtype), scale
