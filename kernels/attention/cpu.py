"""Batch-invariant attention on a CPU: prefill, chunks, decode, packed and padded give the same bits.

Numerics: operands are widened to float32 (exact), the query is scaled, and the keys are taken in blocks of 64 that are
anchored at the request's first key. A library GEMM gives the scores of each block; a query's largest score over all of
its blocks, which no order can change, is subtracted; and the blocks' sums of exponentials and weighted values are added
block by block, in order, in float32; within a block exponentials are added by NumPy's pairwise sum. One division and
one rounding to the dtype end it. The probabilities stay in float32, unlike in torch's own flash attention on a CPU.

Invariance: a query's result depends on itself, on the keys before it, however they came to be cached, and on the
process (instruction set, thread count). Why: keys that it may not see (beyond it, or before its window) have
probability 0 and add exact zeros; and the products run in batches of equal tiles, at tile heights and batch sizes
certified to give the same bits. Everything else is a maximum or elementwise; exponentials (and a soft cap's tanh) are
NumPy's, whose vector loops mask their last elements, where torch computes them by another formula. `prove` tests the
whole at first use, including the sums over 64 probabilities. An infinite or NaN key or value spoils its whole block,
for queries before it too.
"""

from __future__ import annotations

import functools
import itertools
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from importlib import import_module
from typing import Any, NamedTuple

import numpy as np
import torch

from nondet.core.certificates import certificates
from nondet.core.inputs import kept_order_revealing as order_revealing
from nondet.core.launch import note, proving
from nondet.core.proof import operands_key
from nondet.errors import UserError
from nondet.kernels import originals
from nondet.kernels.attention.masks import starts
from nondet.kernels.matmul.cpu_tiles import Case, NotInvariantError, Tiles, environment_key, proven
from nondet.kernels.matmul.cpu_tiles import prove as cpu_tiles_prove

BLOCK = 64  # keys; part of the numerics: another block is another order of reduction

_Numbers = np.ndarray[Any, np.dtype[np.float32]]
Product = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
_Index = np.ndarray[Any, np.dtype[np.int64]]


# The two products of attention on a CPU, in batches of tiles, at sizes certified to give the same bits.
# scores: [n, R, D] times [n, 64, D] transposed -> [n, R, 64]. values: [n, R, 64] times [n, 64, D] -> [n, R, D]. Both in
# float32, n tiles of R rows. The order along the summed axis is the library's; `nondet.kernels.matmul.cpu_tiles`
# certifies that a row has the same bits at every position in its tile, in tiles of every height in `heights_of`, and in
# batches of every size that is used. Where a library's batched product is not invariant, the batches shrink to single
# tiles.

_HEIGHTS = (4, 8, 16, 32, 64)
_BATCHES = (*range(1, 8), *range(8, 129, 8), 160, 192, 224, 256)
_SEEDS = (21, 22)


def scores(q: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """[n, R, D] times [n, 64, D] transposed -> [n, R, 64]."""
    return originals.call("bmm", q, keys.mT)


def values(weights: torch.Tensor, block: torch.Tensor) -> torch.Tensor:
    """[n, R, 64] times [n, 64, D] -> [n, R, D]."""
    return originals.call("bmm", weights, block)


def heights_of(dim: int) -> tuple[int, ...]:
    """Tile heights R of one numerics class, ascending. Raises NotInvariantError: there is none."""
    by_scores, by_values = _prove_heights(scores, dim, BLOCK), _prove_heights(values, BLOCK, dim)
    found = tuple(sorted(set(by_scores.sizes) & set(by_values.sizes)))
    if not found:
        raise NotInvariantError(f"cpu_attention with head dim {dim}: no tile height suits both of its products here")
    return found


def products_of(height: int, dim: int) -> tuple[Tiles, Tiles]:
    """Certified batch sizes of `scores` and `values`."""
    return _batches(scores, height, dim, BLOCK), _batches(values, height, BLOCK, dim)


def _prove_heights(product: Product, depth: int, width: int) -> Tiles:
    def case(seed: int) -> Case:
        right = _right(product, 1, depth, width, seed)
        rows = order_revealing(max(_HEIGHTS), depth, torch.float32, seed, negate=True)
        return (lambda x: product(x[None], right)[0]), (rows,)

    what = f"cpu_attention {product.__name__} [{depth} x {width}]"
    key = ("attention heights", product.__name__, depth, width, *environment_key())
    return proven(what, key, lambda: cpu_tiles_prove(what, [case(seed) for seed in _SEEDS], _HEIGHTS))


def _batches(product: Product, height: int, depth: int, width: int) -> Tiles:
    what = f"cpu_attention {product.__name__} {height} x {depth} x {width}"

    def make() -> Tiles:
        most = max(_BATCHES)
        cases: list[Case] = []
        for seed in _SEEDS:
            left = order_revealing(most * height, depth, torch.float32, seed, negate=True).view(most, height, depth)
            cases.append((product, (left, _right(product, most, depth, width, seed))))
        return cpu_tiles_prove(what, cases, _BATCHES, bases=(1,))

    return proven(what, ("attention batches", product.__name__, height, depth, width, *environment_key()), make)


def _right(product: Product, batch: int, depth: int, width: int, seed: int) -> torch.Tensor:
    x = order_revealing(batch * width, depth, torch.float32, seed, negate=False).view(batch, width, depth)
    return x if product is scores else x.mT.contiguous()


def prove(varlen: Callable[..., torch.Tensor], dim: int, capped: bool) -> None:
    """Test varlen(q, k, v, cu_seqlens_q, cu_seqlens_k, way) at its promise, the exponential, tanh and sums included.

    NotInvariantError: a query has other bits in a decode step, a chunk or a batch than in its prefill.
    """
    rng = torch.Generator().manual_seed(23)
    length, heads = 3 * BLOCK - 7, 6
    q, k, v = (4.0 * torch.rand(length, h, dim, generator=rng, dtype=torch.float32) - 2.0 for h in (heads, 2, 2))

    def packed(pieces: Sequence[tuple[int, int]]) -> list[torch.Tensor]:
        sizes = [end - start for start, end in pieces]
        cu_q = torch.tensor([0, *sizes]).cumsum(0)
        cu_k = torch.tensor([0, *(end for _, end in pieces)]).cumsum(0)
        out = varlen(
            torch.cat([q[a:b] for a, b in pieces]),
            torch.cat([k[:b] for _, b in pieces]),
            torch.cat([v[:b] for _, b in pieces]),
            cu_q,
            cu_k,
            Way(True, None, 1.5 if capped else None, None),
        )
        return list(out.split(sizes))

    prefill = packed([(0, length)])[0]
    last = length - 1
    mixes = (
        [(last, length)],
        [(5, 6)],
        [(BLOCK, BLOCK + 1), (0, 3), (last, length), (60, 70)],
        [(0, BLOCK), (9, length)],
    )
    for pieces in mixes:
        for (start, end), got in zip(pieces, packed(pieces), strict=True):
            if not torch.equal(got, prefill[start:end]):
                raise NotInvariantError(
                    f"cpu_attention with head dim {dim}: queries {start}..{end} have other bits in the batch {pieces} "
                    "than in a prefill here"
                )


_CLASS = "cpu-blocks-one-maximum-pairwise-sums"  # in certificates: another order of reduction is another name
MAX_HEAD_DIM = sys.maxsize  # any

_FLOATS = 2**20  # of keys processed at a time, so that they stay in a cache
_HIDDEN = np.float32(-np.inf)
_LOWEST, _ZERO = np.float32(torch.finfo(torch.float32).min), np.float32(0.0)
VERIFIED: dict[tuple[object, ...], NotInvariantError | None] = {}


def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    causal: bool = True,
    scale: float | None = None,
    window: int | None = None,
    softcap: float | None = None,
) -> torch.Tensor:
    """q [B, Hq, Tq, D] over k, v [B, Hkv, Tk, D] -> [B, Hq, Tq, D] in q's dtype; Hq is a multiple of Hkv (GQA).

    Causal is aligned to the end, as in `nondet.kernels.reference`. The result is laid out as [B, Tq, Hq, D]. Arguments
    are those of `nondet.kernels.attention.cuda.attention`. UserError: shapes or dtypes that do not fit, too many
    queries for the keys, or a gradient is needed. NotInvariantError: this machine has no certified way.
    """
    (batch, heads, q_len, dim), keys = q.shape, k.shape[2]
    if q.numel() == 0:
        return q.new_empty((batch, q_len, heads, dim)).transpose(1, 2)
    way = Way(causal, window, softcap, scale)
    _check(q, k, v, way)
    _prove_once(dim, softcap is not None)
    requests = tuple(_Request(b * q_len, q_len, b * keys, keys, 0) for b in range(batch))
    q, k, v = (x.transpose(1, 2).flatten(0, 1) for x in (q, k, v))
    out = _attend(q, k, v, requests, way)
    return out.view(batch, q_len, heads, dim).transpose(1, 2)


def attention_varlen(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    scale: float | None = None,
    causal: bool = True,
    window: int | None = None,
    softcap: float | None = None,
    positions: torch.Tensor | None = None,
    split: bool | None = None,
    key_index: torch.Tensor | None = None,
) -> torch.Tensor:
    """Packed requests: q [Tq_total, Hq, D] over k, v [Tk_total, Hkv, D] -> [Tq_total, Hq, D] in q's dtype.

    Each request has the bits that `attention` gives it solo. Arguments as in
    `nondet.kernels.attention.cuda.attention_varlen`, of which max_seqlen_q, max_seqlen_k and split are not used here;
    errors as `attention`. Returns zeros for queries that belong to no request (those from cu_seqlens_q[-1] on).
    """
    del max_seqlen_q, max_seqlen_k, split
    way = Way(causal, window, softcap, scale)
    _check(q, k, v, way)
    if positions is not None and (window is None or positions.ndim != 1 or positions.shape[0] < q.shape[0]):
        raise UserError("positions [Tq] go with a window: without one, no key may be missing")
    _prove_once(q.shape[2], softcap is not None)
    return _varlen(q, k, v, cu_seqlens_q, cu_seqlens_k, way, positions, key_index)


def _varlen(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    way: Way,
    positions: torch.Tensor | None = None,
    key_index: torch.Tensor | None = None,
) -> torch.Tensor:
    starts_q, starts_k = cu_seqlens_q.tolist(), cu_seqlens_k.tolist()
    ends = [] if positions is None else positions.tolist()
    requests = []
    for q0, q1, k0, k1 in zip(starts_q, starts_q[1:], starts_k, starts_k[1:], strict=False):
        if q1 == q0:
            continue
        first = ends[q1 - 1] + 1 - (k1 - k0) if ends else 0
        if first < 0:
            raise UserError(
                f"{k1 - k0} keys up to position {ends[q1 - 1]}",
                "The keys of a request end at its last query, and the first one stands at position 0.",
            )
        requests.append(_Request(q0, q1 - q0, k0, k1 - k0, first))
    if key_index is not None:
        k, v = k.index_select(0, key_index), v.index_select(0, key_index)
    return _attend(q, k, v, tuple(requests), way)


def _check(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, way: Way) -> None:
    causal, window, softcap, _ = way
    if window is not None and (window < 1 or not causal):
        raise UserError(f"a window needs causal=True and at least 1 key, got causal={causal}, window={window}")
    if softcap is not None and not softcap > 0:
        raise UserError(f"softcap must be above 0, got {softcap}")
    if not q.dtype.is_floating_point or q.dtype.itemsize > 4 or not (q.dtype is k.dtype is v.dtype):
        raise UserError(f"cpu_attention has no {q.dtype} with {k.dtype}, {v.dtype}", "Use one dtype of up to 32 bits.")
    if q.shape[1] % k.shape[1] or v.shape[1:] != k.shape[1:] or k.shape[-1] != q.shape[-1]:
        raise UserError(
            f"cpu_attention can't take q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}",
            "The query heads must be a multiple of the key heads, and all head dims equal.",
        )
    if torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad):
        raise UserError("cpu_attention computes no gradients", "Call it under torch.no_grad().")


class _Request(NamedTuple):
    q_start: int
    q_len: int
    k_start: int
    k_len: int
    first: int


class Way(NamedTuple):
    """See `attention`."""

    causal: bool
    window: int | None
    softcap: float | None
    scale: float | None


def _attend(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, requests: tuple[_Request, ...], way: Way
) -> torch.Tensor:
    """q [Tq, Hq, D] over k, v [Tk, Hkv, D] -> [Tq, Hq, D] in q's dtype; zeros where no request is."""
    out = torch.zeros(q.shape, dtype=torch.float32)
    rows = out.view(-1, q.shape[2])
    for layout in _planned(requests, *q.shape[1:], k.shape[1], way, environment_key()):
        result = computed(_taken(q, layout.queries), _taken(k, layout.keys), _taken(v, layout.keys), layout, way)
        rows.index_copy_(0, torch.from_numpy(layout.queries).view(-1), result.view(-1, q.shape[2]))
    return out.to(q.dtype)


class _Tile(NamedTuple):
    """Rows of one request and the blocks of keys that some of them see. A head of keys has rows: its queries, token by
    token.
    """

    request: _Request
    start: int
    first_block: int
    blocks: int


class _Layout(NamedTuple):
    """T tiles of one height R that are computed at once, as P pairs of a tile and a block of keys.

    First all tiles with their first block, then those that have a second with it, and so on; tiles with more blocks go
    first.
    """

    queries: _Index  # [T, Hkv, R], rows of q [.., D]; a tile's last row is repeated until it is full
    keys: _Index  # [P, Hkv, 64], rows of k [.., D], where a token beyond the last is the last, hidden
    # [P, 1, R, 64], whether a row may not see a key: it is beyond the row, or before its window
    hidden: np.ndarray[Any, np.dtype[np.bool_]]
    tile: _Index  # [P], the pair's tile
    # of each further block (first pair, number of pairs); they belong to as many of the first tiles
    later: tuple[tuple[int, int], ...]


@functools.lru_cache(maxsize=4)  # all layers of a step ask for the same, those with a window for another
def _planned(
    requests: tuple[_Request, ...], heads: int, dim: int, kv_heads: int, way: Way, environment: tuple[object, ...]
) -> tuple[_Layout, ...]:
    """Layouts under the settings of now."""
    heights, shared = heights_of(dim), heads // kv_heads
    by_height: dict[int, list[_Tile]] = {}
    for request in requests:
        if way.causal and request.k_len < request.q_len:
            raise UserError(
                f"{request.q_len} queries but {request.k_len} keys", "Causal attention ends with a query's own key."
            )
        if request.k_len == 0:
            raise UserError("a request without keys", "Attention over nothing is not defined.")
        height = _height(request.q_len * shared, heights)
        by_height.setdefault(height, []).extend(_tiles_of(request, shared, height, way))
    layouts = []
    most = _FLOATS // (BLOCK * kv_heads * dim)
    for height, tiles in by_height.items():
        tiles.sort(key=lambda tile: -tile.blocks)
        while tiles:
            ends = itertools.accumulate(tile.blocks for tile in tiles)
            count = max(1, sum(end <= most for end in ends))
            layouts.append(_laid_out(tiles[:count], kv_heads, shared, height, way))
            del tiles[:count]
    return tuple(layouts)


def _height(rows: int, heights: tuple[int, ...]) -> int:
    return min(heights, key=lambda height: -(-rows // height) * (height + 8))


def _tiles_of(request: _Request, shared: int, height: int, way: Way) -> Iterator[_Tile]:
    """A request's tiles; `shared`: query heads of a head of keys."""
    end, rows = request.first + request.k_len, request.q_len * shared
    position = end - request.q_len  # of the first query, if causal
    for start in range(0, rows, height):
        seen_to = position + (min(start + height, rows) - 1) // shared if way.causal else end - 1
        seen_from = request.first
        if way.window is not None:
            seen_from = max(seen_from, position + start // shared - way.window + 1)
        yield _Tile(request, start, seen_from // BLOCK, seen_to // BLOCK - seen_from // BLOCK + 1)


def _laid_out(tiles: Sequence[_Tile], kv_heads: int, shared: int, height: int, way: Way) -> _Layout:
    counts = [sum(tile.blocks > block for tile in tiles) for block in range(tiles[0].blocks)]
    tile = np.concatenate([np.arange(count) for count in counts])
    blocks = np.concatenate([[t.first_block + i for t in tiles[:count]] for i, count in enumerate(counts)])
    q_start, q_len, k_start, k_len, first, start = np.array([(*t.request, t.start) for t in tiles], dtype=np.int64).T
    end = (first + k_len - 1)[:, None]
    row = np.minimum(start[:, None] + np.arange(height), (q_len * shared - 1)[:, None])
    seen_to = end - q_len[:, None] + 1 + row // shared if way.causal else end + 0 * row
    of_heads = np.arange(kv_heads)[:, None]
    queries = ((q_start[:, None] + row // shared) * kv_heads * shared + row % shared)[:, None] + of_heads * shared
    positions = blocks[:, None] * BLOCK + np.arange(BLOCK)
    begin = first[tile, None]
    tokens = k_start[tile, None] + np.clip(positions, begin, end[tile]) - begin
    hidden = positions[:, None] > seen_to[tile, :, None]
    if way.window is not None:
        hidden |= positions[:, None] < np.maximum(first[:, None], seen_to - way.window + 1)[tile, :, None]
    later = tuple(zip(itertools.accumulate(counts[:-1]), counts[1:], strict=True))
    return _Layout(queries, tokens[:, None] * kv_heads + of_heads, hidden[:, None], tile, later)


def _taken(x: torch.Tensor, rows: _Index) -> torch.Tensor:
    """Rows of x [.., D] in float32, a copy."""
    given = (x.detach() if x.requires_grad else x).contiguous().view(-1, x.shape[-1])
    taken = given.index_select(0, torch.from_numpy(rows).view(-1)).float()
    return taken.view(*rows.shape, x.shape[-1])


@np.errstate(all="ignore")  # torch does not report infinities or NaN either
def computed(q: torch.Tensor, keys: torch.Tensor, values_: torch.Tensor, layout: _Layout, way: Way) -> torch.Tensor:
    """q [T, Hkv, R, D] over keys and values [P, Hkv, 64, D] in float32 -> [T, Hkv, R, D]. q is overwritten.

    Elementwise steps use NumPy: its vector loops mask their last elements, and its sums are pairwise.
    """
    (tiles, heads, height, dim), pairs = q.shape, len(keys)
    note(f"cpu_attention[{height}x{BLOCK}]")
    by_scores, by_values = products_of(height, dim)
    scaled = q.numpy()
    scaled *= way.scale if way.scale is not None else 1.0 / math.sqrt(dim)
    rows = q.index_select(0, torch.from_numpy(layout.tile)).flatten(0, 1)
    weights = by_scores.apply((rows, keys.flatten(0, 1)), scores)
    p: _Numbers = weights.numpy().reshape(pairs, heads, height, BLOCK)
    if way.softcap is not None:
        p /= np.float32(way.softcap)
        np.tanh(p, out=p)
        p *= np.float32(way.softcap)
    np.copyto(p, _HIDDEN, where=layout.hidden)
    tops = weights.amax(-1).numpy().reshape(pairs, heads, height)  # NumPy's is ten times slower
    top = np.maximum(tops[:tiles], _LOWEST)
    for start, count in layout.later:
        np.maximum(top[:count], tops[start : start + count], out=top[:count])
    p -= top[layout.tile][..., None]
    np.exp(p, out=p)
    totals = np.add.reduce(p, axis=-1)
    parts = by_values.apply((weights, values_.flatten(0, 1)), values)
    mixed: _Numbers = parts.numpy().reshape(pairs, heads, height, dim)
    out, total = mixed[:tiles] + _ZERO, totals[:tiles]  # from zero on: -0.0 becomes 0.0
    for start, count in layout.later:
        out[:count] += mixed[start : start + count]
        total[:count] += totals[start : start + count]
    out /= total[..., None]
    return torch.from_numpy(out)


def _prove_once(dim: int, capped: bool) -> None:
    key = (dim, capped, *environment_key())
    if key not in VERIFIED:
        kept = certificates("cpu")
        written = operands_key(_CLASS, (), (f"D={dim}", *(["softcap"] if capped else []), *map(str, key[2:])))
        failure = None
        if kept.standing("attention", written) is not True:
            try:
                with torch.no_grad(), proving():
                    prove(_varlen, dim, capped)
                kept.record("attention", written, True, "prefill, chunks, decode and batches have equal bits")
            except NotInvariantError as error:
                failure = error
        VERIFIED[key] = failure
    failure = VERIFIED[key]
    if failure is not None:
        raise failure


class _Varlen:
    """Packed attention with the operator's signature (`nondet.kernels.reference`), for `nondet.core.registry`."""

    def __init__(self, target: str) -> None:
        self.target = target

    def __call__(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **how: Any) -> torch.Tensor:
        return torch.stack(self.ragged(list(zip(q, k, v, strict=True)), **how))

    def ragged(
        self, requests: Sequence[tuple[torch.Tensor, ...]], *, causal: bool = True, scale: float | None = None
    ) -> list[torch.Tensor]:
        queries, keys, _ = ([x.shape[1] for x in one] for one in zip(*requests, strict=True))
        packed = [torch.cat([x.transpose(0, 1) for x in one]).contiguous() for one in zip(*requests, strict=True)]
        module, _, name = self.target.partition(":")
        out: torch.Tensor = getattr(import_module(module), name)(
            *packed,
            cu_seqlens_q=starts(queries, packed[0].device),
            cu_seqlens_k=starts(keys, packed[0].device),
            max_seqlen_q=max(queries),
            max_seqlen_k=max(keys),
            causal=causal,
            scale=scale,
        )
        return [part.transpose(0, 1) for part in out.split(queries)]


segments_varlen = _Varlen("nondet.kernels.attention.cuda:attention_varlen")
blocks_varlen = _Varlen("nondet.kernels.attention.cpu:attention_varlen")
