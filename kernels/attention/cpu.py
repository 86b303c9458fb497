"""Batch-invariant attention on a CPU: prefill, chunks, decode, packed and padded give the same bits; and the class's
members.

Numerics: operands are widened to float32 (exact), the query is scaled, and the keys are taken in blocks of 64 that are
anchored at the request's first key. A library GEMM gives the scores of each block; a query's largest score over all of
its blocks, which no order can change, is subtracted; and the blocks' sums of exponentials and weighted values are added
block by block, in order, in float32; within a block exponentials are added by NumPy's pairwise sum. One division and
one rounding to the dtype end it. The probabilities stay in float32, unlike in torch's own flash attention on a CPU.

Invariance: what a query gives depends on itself and on the keys before it, however they came to be cached, and on the
process (instruction set, thread count). Why: keys beyond the query, in its own block or in those after it, have
probability 0 and add exact zeros; and the products run in batches of equal tiles, at tile heights and batch sizes
certified to give the same bits (`nondet.kernels.attention.cpu`). Everything else is a maximum or elementwise;
exponentials (and a soft cap's tanh) are NumPy's, whose vector loops mask their last elements where torch's go on one by
one by another formula. `cpu_attention_proof` holds the whole to account at first use, with the sums over 64
probabilities. A key or value that is infinite or NaN spoils its whole block, for queries before it too. Keys that a
window hides do as those beyond the query.
"""

from __future__ import annotations

import functools
import math
import sys
import threading
from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Any, NamedTuple

import numpy as np
import torch

from nondet.core.certificates import certificates
from nondet.core.inputs import order_revealing
from nondet.core.launch import note, proving
from nondet.core.proof import operands_key
from nondet.errors import UserError
from nondet.kernels import originals
from nondet.kernels.matmul.cpu_tiles import NotInvariantError, Tiles, environment_key, proven, shortcut
from nondet.kernels.matmul.cpu_tiles import prove as cpu_tiles_prove

# Where the rows of packed attention lie: query tiles and key blocks, as index tensors for `cpu_attention`.
#
# Only positions are dealt with here, no numbers. A plan depends on the lengths alone: all layers of a model share it.

BLOCK = 64  # keys; part of the numerics: another block is another order of reduction
STEP = 8  # more pairs than this are filled up to a multiple of it, so that few sizes need a certificate
# What a group of tiles costs whatever is in it, and a pair of a tile and a block beside its rows, in rows of a tile:
# as measured with a head dim of 64, where a group of 8 pairs takes 100 us and a pair more 2 us.
_GROUP, _PAIR = 1200, 24
_PLANS_KEPT = 8  # layers with and without a window, of a model and its draft


class Ask(NamedTuple):
    """What a plan depends on beside the lengths.

    Attributes:
        heads, kv_heads: Of queries, and of keys.
        heights: Rows that a tile of queries may have, ascending.
        pairs: Most pairs of a tile and a block that are worked on at a time, where a single tile has no more.
        causal: A query sees keys up to its own position, which is aligned to the end.
        window: How many of them; None: all.
    """

    heads: int
    kv_heads: int
    heights: tuple[int, ...]
    pairs: int
    causal: bool
    window: int | None


_Numbers = np.ndarray[Any, np.dtype[np.float32]]
_Index = np.ndarray[Any, np.dtype[np.int64]]
_Member = tuple[int, int, int, int, int]  # a request: first query, how many, first key, how many, its position


class Group(NamedTuple):
    """Tiles of one height, and the blocks of 64 keys that each of them has to do with: pairs, block by block.

    Attributes:
        height: Rows of a tile.
        tiles: How many.
        q_index: [pairs * height], rows of queries, pair by pair; a tile's spare rows repeat its first.
        valid: Which of the tiles' rows are no spare ones, in the order of the rows that they go to.
        out_index: Where those go, ascending; None: they are all rows that there are.
        spans: For each block in the order of the keys, (tiles that have one, first and last + 1 of their pairs). Tiles
            are sorted so that those that have one are the first ones. What fills up pairs is in no span.
        tile: [pairs], the tile of each pair; None where pairs and tiles are the same.
        k_index: [pairs * 64], rows of keys and values; where there is none its first or last key stands in, hidden.
        hidden: bool [pairs, height, 64]: keys that a query must not see; None: it sees all.
    """

    height: int
    tiles: int
    q_index: _Index
    valid: _Index
    out_index: torch.Tensor | None
    spans: tuple[tuple[int, int, int], ...]
    tile: _Index | None
    k_index: _Index
    hidden: np.ndarray[Any, np.dtype[np.bool_]] | None


class _Layout(NamedTuple):
    """How many rows on the next token and the next head lie. Results are always laid out token by token."""

    q_token: int
    q_head: int
    k_token: int
    k_head: int


def first_keys(positions: list[int], starts_q: list[int], starts_k: list[int]) -> tuple[int, ...]:
    """The position of each request's first key that is there; the last one stands at its last query's.

    Raises:
        UserError: there are more keys than positions.
    """
    found = []
    for q0, q1, k0, k1 in zip(starts_q, starts_q[1:], starts_k, starts_k[1:], strict=False):
        first = positions[q1 - 1] + 1 - (k1 - k0) if q1 > q0 else 0
        if first < 0:
            raise UserError(
                f"{k1 - k0} keys up to position {positions[q1 - 1]}",
                "The keys of a request end at its last query, and the first one stands at position 0.",
            )
        found.append(first)
    return tuple(found)


@functools.lru_cache(maxsize=_PLANS_KEPT)
def plan_packed(
    tokens: int, starts_q: tuple[int, ...], starts_k: tuple[int, ...], first: tuple[int, ...], ask: Ask
) -> tuple[Group, ...]:
    """Of packed requests, q [Tq_total, Hq, D] and k [Tk_total, Hkv, D] as rows [.., D].

    Args:
        tokens: Tq_total.
        starts_q: Where each request's queries start, and where the last ones end.
        starts_k: The same of keys.
        first: Position of each request's first key that is there; () where it is 0.

    Raises:
        UserError: a request without keys, or, where it is causal, with more queries than keys.
    """
    table = [
        (
            starts_q[i],
            starts_q[i + 1] - starts_q[i],
            starts_k[i],
            starts_k[i + 1] - starts_k[i],
            first[i] if first else 0,
        )
        for i in range(len(starts_q) - 1)
        if starts_q[i + 1] > starts_q[i]
    ]
    return _planned(table, _Layout(q_token=ask.heads, q_head=1, k_token=ask.kv_heads, k_head=1), ask, tokens)


@functools.lru_cache(maxsize=_PLANS_KEPT)
def plan_batch(batch: int, q_len: int, k_len: int, by_token: bool, ask: Ask) -> tuple[Group, ...]:
    """Of a batch, k [B, Hkv, Tk, D] as rows, and q likewise, or token by token [B, Tq, Hq, D].

    Raises:
        UserError: as `plan_packed`.
    """
    table = [(b * q_len, q_len, b * k_len, k_len, 0) for b in range(batch)]
    layout = _Layout(ask.heads if by_token else 1, 1 if by_token else q_len, k_token=1, k_head=k_len)
    return _planned(table, layout, ask, batch * q_len)


def _planned(table: list[_Member], layout: _Layout, ask: Ask, tokens: int) -> tuple[Group, ...]:
    """Cut every request's queries into tiles, one head of keys each, and gather tiles of equal height.

    Args:
        table: Of each request: first query, how many, first key, how many, position of the first key.
    """
    by_height: dict[int, list[_Member]] = {}
    for member in table:
        _, q_len, _, k_len, _ = member
        if ask.causal and k_len < q_len:
            raise UserError(f"{q_len} queries but {k_len} keys", "Causal attention ends with a query's own key.")
        if k_len == 0:
            raise UserError("a request without keys", "Attention over nothing is not defined.")
        by_height.setdefault(_height(q_len * (ask.heads // ask.kv_heads), ask.heights), []).append(member)
    if len(by_height) > 1:
        by_height = _gathered(by_height, ask)
    rows = tokens * ask.heads
    return tuple(g for height, found in sorted(by_height.items()) for g in _groups(height, found, layout, ask, rows))


@functools.lru_cache(maxsize=4096)
def _height(rows: int, heights: tuple[int, ...]) -> int:
    """The height that wastes the fewest rows, the tallest of those: fewer tiles gather fewer keys."""
    return min(heights, key=lambda h: (-(-rows // h) * h + 8 * (-(-rows // h)), -h))


def _gathered(by_height: dict[int, list[_Member]], ask: Ask) -> dict[int, list[_Member]]:
    """Everybody in tiles of one height, where the tiles that it wastes cost less than another group."""

    def work(height: int, members: list[_Member]) -> int:
        pairs = 0
        for _, q_len, _, k_len, _ in members:
            tiles = -(-q_len * (ask.heads // ask.kv_heads) // height) * ask.kv_heads
            pairs += tiles * -(-k_len // BLOCK)
        return pairs * (_PAIR + height) + _GROUP

    everybody = [member for members in by_height.values() for member in members]
    apart = sum(work(height, members) for height, members in by_height.items())
    best = min(ask.heights, key=lambda height: work(height, everybody))
    return {best: everybody} if work(best, everybody) < apart else by_height


@functools.lru_cache(maxsize=_PLANS_KEPT)
def _queries(
    height: int, members: tuple[tuple[int, int], ...], layout: _Layout, heads: int, kv_heads: int
) -> tuple[np.ndarray[Any, Any], ...]:
    """What tiles over requests' (first query, how many) are, whatever their keys: the same in each step of a decode.

    Returns:
        [tiles], each one's request and head of keys; [tiles, height], the token of each row in its request, whether it
        is no spare one, and its places among the queries and the results.
    """
    shared = heads // kv_heads
    requests = np.array(members, dtype=np.int64)
    count = -(-requests[:, 1] * shared // height) * kv_heads  # tiles of each request
    owner = np.arange(len(members)).repeat(count)
    place = np.arange(owner.size) - (count.cumsum() - count).repeat(count)
    head, number = place % kv_heads, place // kv_heads
    q_start, q_len = requests[owner].T
    row = number[:, None] * height + np.arange(height)  # row of the request's (token, query head) rows
    real = row < (q_len * shared)[:, None]
    row = np.where(real, row, number[:, None] * height)
    token, query_head = row // shared, row % shared + (head * shared)[:, None]
    q_index = (q_start * heads)[:, None] + token * layout.q_token + query_head * layout.q_head
    return owner, head, token, real, q_index, (q_start * heads)[:, None] + token * heads + query_head


def _groups(height: int, members: list[_Member], layout: _Layout, ask: Ask, rows: int) -> list[Group]:
    """Groups of one height; `rows` is how many rows of results there are, of all heights and of no request."""
    owner, head, token, real, q_index, out_index = _queries(
        height, tuple((start, count) for start, count, *_ in members), layout, ask.heads, ask.kv_heads
    )
    _, q_len, k_start, k_len, first = np.array(members, dtype=np.int64)[owner].T
    k_row = (k_start - first) * ask.kv_heads + head * layout.k_head  # of position 0
    k_len = k_len + first  # from position 0 on
    last_key = (k_len - 1)[:, None]
    position = token + (k_len - q_len)[:, None] if ask.causal else np.broadcast_to(last_key, token.shape)
    window = ask.window
    first_block = np.zeros_like(k_len) if window is None else np.maximum(position.min(1) - window + 1, 0) // BLOCK
    blocks = position.max(1) // BLOCK + 1 - first_block
    order = (-blocks).argsort(kind="stable")
    groups, start, dropped = [], 0, bool(first.any())
    for stop in _cuts(blocks[order], ask.pairs):
        mine = order[start:stop]
        start = stop
        counts, flat = blocks[mine], real[mine].reshape(-1).nonzero()[0]
        active = (counts[:, None] > np.arange(counts[0])).T  # [blocks, tiles]
        block, tile = active.nonzero()  # of each pair, block by block
        ends = active.sum(1).cumsum().tolist()
        if tile.size > STEP and tile.size % STEP:
            fill = np.minimum(np.arange(tile.size + -tile.size % STEP), tile.size - 1)  # the last pair again
            block, tile = block[fill], tile[fill]
        at = mine[tile]
        key = (first_block[at] + block)[:, None] * BLOCK + np.arange(BLOCK)  # [pairs, 64]: positions
        there = np.minimum(np.maximum(key, first[at][:, None]), last_key[at])
        hidden = _hidden(key.astype(np.int32), position[at].astype(np.int32), first[at] if dropped else None, window)
        out = out_index[mine].reshape(-1)[flat]
        by_row = out.argsort()
        everything = out.size == rows and len(mine) == len(order)
        groups.append(
            Group(
                height,
                len(mine),
                q_index[at].reshape(-1),
                flat[by_row],
                None if everything else torch.from_numpy(out[by_row]),
                tuple((b - a, a, b) for a, b in zip([0, *ends], ends, strict=False)),
                tile if tile.size > len(mine) else None,
                (k_row[at][:, None] + there * layout.k_token).reshape(-1),
                hidden,
            )
        )
    return groups


def _hidden(
    key: np.ndarray[Any, np.dtype[np.int32]],
    position: np.ndarray[Any, np.dtype[np.int32]],
    first: np.ndarray[Any, np.dtype[np.int64]] | None,
    window: int | None,
) -> np.ndarray[Any, np.dtype[np.bool_]] | None:
    """bool [pairs, height, 64] from key [pairs, 64], position [pairs, height] and first [pairs]; None: nothing is."""
    hidden = key[:, None, :] > position[:, :, None]
    if first is not None:
        hidden |= key[:, None, :] < first[:, None, None]
    if window is not None:
        hidden |= key[:, None, :] <= position[:, :, None] - window
    return hidden if hidden.any() else None


def _cuts(blocks: np.ndarray[Any, np.dtype[np.int64]], most: int) -> list[int]:
    """Where to cut tiles of so many blocks, that each piece has at most `most` pairs, or is one tile."""
    cuts, held = [], 0
    for tile, more in enumerate(blocks.tolist()):
        if held and held + more > most:
            cuts.append(tile)
            held = 0
        held += more
    return [*cuts, len(blocks)]


# The two products of attention on a CPU, in batches of tiles, at sizes certified to give one and the same bits.
#
# scores: [n, R, D] times [n, 64, D] transposed -> [n, R, 64]. values: [n, R, 64] times [n, 64, D] -> [n, R, D]. Both
# in float32, n tiles of R rows. The order along the summed axis is the library's; `nondet.kernels.matmul.cpu_tiles`
# certifies that a row has the same bits at every place in its tile, in tiles of every height in `heights_of`, and in
# batches of every size that is used. Where a library's batched product is not invariant, the batches shrink to single
# tiles.

_HEIGHTS = (4, 8, 16, 32, 64)
_BATCHES = (*range(1, STEP), *range(STEP, 129, STEP), 160, 192, 224, 256)
_SEEDS = (21, 22)
_heights: dict[tuple[object, ...], tuple[int, ...]] = shortcut()
_products: dict[tuple[object, ...], tuple[Tiles, Tiles]] = shortcut()


def scores(q: torch.Tensor, keys: torch.Tensor, out: torch.Tensor) -> None:
    """[n, R, D] times [n, 64, D] transposed, into out [n, R, 64]."""
    originals.call("bmm.out", q, keys.mT, out=out)


def values(weights: torch.Tensor, block: torch.Tensor, out: torch.Tensor) -> None:
    """[n, R, 64] times [n, 64, D], into out [n, R, D]."""
    originals.call("bmm.out", weights, block, out=out)


def heights_of(dim: int) -> tuple[int, ...]:
    """Tile heights R of one numerics class, ascending.

    Raises:
        NotInvariantError: there is none.
    """
    key = (dim, *environment_key())
    found = _heights.get(key)
    if found is None:
        by_scores, by_values = _prove_heights(scores, dim, BLOCK), _prove_heights(values, BLOCK, dim)
        found = tuple(sorted(set(by_scores.sizes) & set(by_values.sizes)))
        if not found:
            raise NotInvariantError(
                f"cpu_attention with head dim {dim}: no tile height suits both of its products here"
            )
        _heights[key] = found
    return found


def products_of(height: int, dim: int) -> tuple[Tiles, Tiles]:
    """Certified batch sizes of `scores` and `values`."""
    key = (height, dim, *environment_key())
    found = _products.get(key)
    if found is None:
        found = _products[key] = (_batches(scores, height, dim, BLOCK), _batches(values, height, BLOCK, dim))
    return found


def _prove_heights(product: Callable[..., None], depth: int, width: int) -> Tiles:
    def case(seed: int) -> tuple[Callable[..., object], tuple[torch.Tensor]]:
        right = _right(product, 1, depth, width, seed)
        rows = order_revealing(max(_HEIGHTS), depth, torch.float32, seed, negate=True)
        return (lambda x, out: product(x[None], right, out[None])), (rows,)

    what = f"cpu_attention {product.__name__} [{depth} x {width}]"
    return proven(
        what,
        ("attention heights", product.__name__, depth, width, *environment_key()),
        lambda: cpu_tiles_prove(
            what,
            [case(seed) for seed in _SEEDS],
            lambda rows: torch.empty(rows, width, dtype=torch.float32),
            _HEIGHTS,
        ),
    )


def _batches(product: Callable[..., None], height: int, depth: int, width: int) -> Tiles:
    what = f"cpu_attention {product.__name__} {height} x {depth} x {width}"

    def make() -> Tiles:
        most = max(_BATCHES)
        cases: list[tuple[Callable[..., object], Sequence[torch.Tensor]]] = []
        for seed in _SEEDS:
            left = order_revealing(most * height, depth, torch.float32, seed, negate=True).view(most, height, depth)
            cases.append((product, (left, _right(product, most, depth, width, seed))))
        return cpu_tiles_prove(
            what,
            cases,
            lambda tiles: torch.empty(tiles, height, width, dtype=torch.float32),
            _BATCHES,
            bases=(1,),
        )

    return proven(what, ("attention batches", product.__name__, height, depth, width, *environment_key()), make)


def _right(product: Callable[..., None], batch: int, depth: int, width: int, seed: int) -> torch.Tensor:
    """The right operand as the product takes it: keys [batch, 64, D] or values [batch, 64, D]."""
    x = order_revealing(batch * width, depth, torch.float32, seed, negate=False).view(batch, width, depth)
    return x if product is scores else x.mT.contiguous()


def prove(varlen: Callable[..., torch.Tensor], dim: int, capped: bool) -> None:
    """Hold the whole to its promise, the exponential, a soft cap's tanh and the sums with it.

    Args:
        varlen: varlen(q, k, v, cu_seqlens_q, cu_seqlens_k, softcap=...), packed attention without checks.
        dim: Head dim.
        capped: With a soft cap.

    Raises:
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
            softcap=1.5 if capped else None,
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

# Gathered keys that are worked on at a time, so that they stay in a cache; but not so few blocks that calls cost more.
_FLOATS, _LEAST_PAIRS = 2**20, 64
# Scores, and rows of them, up to which NumPy is faster than torch at what has the same bits by either.
_SMALL, _FEW_ROWS = 2**15, 64
_ROOM, _ROOMS_KEPT = 2**18, 16  # floats of a small group's largest step, and how many sizes a thread keeps
_HIDDEN = np.float32(-np.inf)
_LOWEST, _ZERO = np.float32(torch.finfo(torch.float32).min), np.float32(0.0)


class _Places(NamedTuple):
    """Where packed keys lie in a cache: each key's token there; rows are tokens and heads."""

    tokens: _Index
    kv_heads: int


_verified: dict[tuple[object, ...], NotInvariantError | None] = {}
_ASKED_KEPT = 256
_asked: dict[tuple[object, ...], tuple[bool, Ask]] = shortcut()


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

    Causal is aligned to the end, as in `nondet.kernels.reference`. The result is laid out as [B, Tq, Hq, D].

    Args:
        causal: See keys up to one's own position.
        scale: Of the scores; 1 / sqrt(D) if None.
        window: A query sees that many keys, its own included; None: all before it.
        softcap: Scores s become softcap * tanh(s / softcap), as in Gemma 2; None: they stay.

    Raises:
        UserError: shapes or dtypes that do not fit, more queries than keys, or a gradient asked for.
        NotInvariantError: this machine has no certified way.
    """
    batch, heads, q_len, dim = q.shape
    kv_heads = k.shape[1]
    if q.numel() == 0:
        return q.new_empty((batch, q_len, heads, dim)).transpose(1, 2)
    _check(q, k, v, heads, kv_heads, causal=causal, window=window, softcap=softcap)
    _prove_once(dim, softcap is not None)
    by_token, ask = q_len > 1 and q.transpose(1, 2).is_contiguous(), _ask(heads, kv_heads, dim, causal, window)
    out = _batched(q, k, v, by_token, ask, scale, softcap)
    if window is None and softcap is None and k.shape == v.shape and k.shape[0] == batch:
        if len(_asked) >= _ASKED_KEPT:
            _asked.clear()
        _asked[_asked_by(q, k, v, causal)] = by_token, ask
    return out


def attention_again(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool, scale: float | None
) -> torch.Tensor | None:
    """`attention` without a window or a cap, where one of these shapes, strides, dtypes and settings was before."""
    known = _asked.get(_asked_by(q, k, v, causal))
    return None if known is None else _batched(q, k, v, *known, scale, None)


def _asked_by(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool) -> tuple[object, ...]:
    return q.shape, q.stride(), k.shape, v.shape, q.dtype, k.dtype, v.dtype, causal, *environment_key()


def _batched(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    by_token: bool,
    ask: Ask,
    scale: float | None,
    softcap: float | None,
) -> torch.Tensor:
    """`attention` without its checks; `by_token`: q lies in memory as [B, Tq, Hq, D]."""
    batch, heads, q_len, dim = q.shape
    out = _attend(
        q.transpose(1, 2) if by_token else q.contiguous(),
        k.contiguous(),
        v.contiguous(),
        plan_batch(batch, q_len, k.shape[2], by_token, ask),
        scale,
        softcap,
    )
    return out.view(batch, heads, 1, dim) if q_len == 1 else out.view(batch, q_len, heads, dim).transpose(1, 2)


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

    Each request has the bits that `attention` gives it alone.

    Args:
        cu_seqlens_q: int [requests + 1]: where each request's queries start; the last entry is where all end.
        cu_seqlens_k: int [requests + 1]: the same for keys and values.
        max_seqlen_q: Longest query; only GPU kernels need it.
        max_seqlen_k: Most keys of a request; only GPU kernels need it.
        scale: Of the scores; 1 / sqrt(D) if None.
        causal: Aligned to the end of each request.
        window: A query sees that many keys, its own included; None: all before it. Needs causal.
        softcap: As in `attention`.
        positions: Integers [Tq_total], each query's position in its request, where a sliding-window cache dropped the
            first keys: those that are left end at the last query's position, and blocks stay anchored at position 0.
            None: a request's first key stands at position 0.
        split: Only GPU kernels have more than one way.
        key_index: int64 [Tk_total]: k and v are a whole cache [tokens, Hkv, D], and these the places of the packed
            keys in it. None: k and v are the packed keys.

    Returns:
        Zeros for queries that belong to no request (those from cu_seqlens_q[-1] on).

    Raises:
        UserError: as `attention`.
        NotInvariantError: this machine has no certified way.
    """
    del max_seqlen_q, max_seqlen_k, split
    _check(q, k, v, q.shape[1], k.shape[1], causal=causal, window=window, softcap=softcap)
    if positions is not None and (window is None or positions.ndim != 1 or positions.shape[0] < q.shape[0]):
        raise UserError("positions [Tq] go with a window: without one, no key may be missing")
    _prove_once(q.shape[2], softcap is not None)
    return _varlen(
        *(q, k, v, cu_seqlens_q, cu_seqlens_k),
        scale=scale,
        causal=causal,
        window=window,
        softcap=softcap,
        positions=positions,
        key_index=key_index,
    )


def _varlen(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    *,
    scale: float | None = None,
    causal: bool = True,
    window: int | None = None,
    softcap: float | None = None,
    positions: torch.Tensor | None = None,
    key_index: torch.Tensor | None = None,
) -> torch.Tensor:
    heads, kv_heads, dim = q.shape[1], k.shape[1], q.shape[2]
    starts_q, starts_k = cu_seqlens_q.tolist(), cu_seqlens_k.tolist()
    first: tuple[int, ...] = ()
    if positions is not None:
        first = first_keys(positions.tolist(), starts_q, starts_k)
    if q.numel() == 0:
        return q.new_zeros(q.shape)
    out = _attend(
        q.contiguous(),
        k.contiguous(),
        v.contiguous(),
        plan_packed(q.shape[0], tuple(starts_q), tuple(starts_k), first, _ask(heads, kv_heads, dim, causal, window)),
        scale,
        softcap,
        None if key_index is None else _Places(key_index.numpy(), kv_heads),
    )
    return out.view(q.shape)


def _ask(heads: int, kv_heads: int, dim: int, causal: bool, window: int | None) -> Ask:
    return Ask(heads, kv_heads, heights_of(dim), max(_LEAST_PAIRS, _FLOATS // (BLOCK * dim)), causal, window)


def _check(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    heads: int,
    kv_heads: int,
    *,
    causal: bool,
    window: int | None,
    softcap: float | None,
) -> None:
    if window is not None and (window < 1 or not causal):
        raise UserError(f"a window needs causal=True and at least 1 key, got causal={causal}, window={window}")
    if softcap is not None and not softcap > 0:
        raise UserError(f"softcap must be above 0, got {softcap}")
    if not q.dtype.is_floating_point or q.dtype.itemsize > 4 or not (q.dtype is k.dtype is v.dtype):
        raise UserError(f"cpu_attention has no {q.dtype} with {k.dtype}, {v.dtype}", "Use one dtype of up to 32 bits.")
    if heads % kv_heads or v.shape[1:] != k.shape[1:] or k.shape[-1] != q.shape[-1]:
        raise UserError(
            f"cpu_attention can't take q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}",
            "The query heads must be a multiple of the key heads, and all head dims equal.",
        )
    if torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad):
        raise UserError("cpu_attention computes no gradients", "Call it under torch.no_grad().")


def _attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    groups: tuple[Group, ...],
    scale: float | None,
    softcap: float | None,
    places: _Places | None = None,
) -> torch.Tensor:
    """[.., D] in the dtype, a row for each of q [..., D], token by token; zeros where the plan has no query.

    All three contiguous.
    """
    dim, dtype = q.shape[-1], q.dtype
    factor = scale if scale is not None else 1.0 / math.sqrt(dim)
    out: torch.Tensor | None = None
    for group in groups:
        note(f"cpu_attention[{group.height}x{BLOCK}]")
        index = group.k_index if places is None else _placed(group.k_index, places)
        room = _merge_blocks(q, k, v, index, group, factor, softcap)
        result = torch.empty((group.valid.size, dim), dtype=torch.float32)
        if room.kept:
            room.mixed.reshape(-1, dim).take(group.valid, 0, out=result.numpy(), mode="clip")
        else:
            torch.index_select(room.parts.view(-1, dim), 0, torch.from_numpy(group.valid), out=result)
        if dtype is not torch.float32:
            result = result.to(dtype)
        if group.out_index is None:
            return result
        if out is None:
            out = torch.zeros((q.numel() // dim, dim), dtype=dtype)
        out.index_copy_(0, group.out_index, result)
    return torch.zeros((q.numel() // dim, dim), dtype=dtype) if out is None else out


def _placed(index: _Index, places: _Places) -> _Index:
    """Rows of the packed keys as rows of the cache that they lie in; most layers of a step ask the same."""
    asked = places.kv_heads, places.tokens.tobytes()
    known, before, at = _rooms.placed
    if known is index and before == asked:
        return at
    token, head = np.divmod(index, places.kv_heads)
    at = places.tokens.take(token)
    at *= places.kv_heads
    at += head
    _rooms.placed = index, asked, at
    return at


class _Room(NamedTuple):
    """Memory for a group's steps, float32, and the same as NumPy sees it.

    Attributes:
        products: Those of `products_of`; the room is another one's where they are others.
        kept: A small group's, which the thread's next one of this size writes anew, and one call is certified to take.
        q, keys, turned: [pairs, height, D], [pairs, 64, D] of keys and then of values, and transposed.
        weights, parts: [pairs, height, 64], [pairs, height, D].
        taken, keys_taken: As `q` and `keys`, in the dtype that they come in.
        q_rows: `q` as [pairs * height, D].
        q_in, keys_in: `taken` and `keys_taken` as [.., D]; see `_numbers`.
        p, mixed: As `weights` and `parts`.
    """

    products: tuple[Tiles, Tiles]
    kept: bool
    q: torch.Tensor
    keys: torch.Tensor
    turned: torch.Tensor
    weights: torch.Tensor
    parts: torch.Tensor
    taken: torch.Tensor
    keys_taken: torch.Tensor
    q_rows: _Numbers
    q_in: np.ndarray[Any, Any]
    keys_in: np.ndarray[Any, Any]
    p: _Numbers
    mixed: _Numbers


class _Rooms(threading.local):
    """A thread's own, by (pairs, height, D, dtype), and the keys that were placed last."""

    def __init__(self) -> None:
        self.kept: dict[tuple[object, ...], _Room] = {}
        self.placed: tuple[Any, object, Any] = None, None, None


_rooms = _Rooms()


def _room(pairs: int, height: int, dim: int, dtype: torch.dtype) -> _Room:
    products = products_of(height, dim)
    found = _rooms.kept.get((pairs, height, dim, dtype))
    if found is not None and found.products is products:
        return found
    small = pairs * max(BLOCK * dim, height * BLOCK, height * dim) <= _ROOM
    keep = small and all(tiles.plan(pairs).whole for tiles in products)
    with torch.inference_mode(False):  # what is made under it can't be written outside
        sizes = (height, dim), (BLOCK, dim), (height, BLOCK), (height, dim)
        q, keys, weights, parts = (torch.empty(pairs, *size, dtype=torch.float32) for size in sizes)
        taken, keys_taken = (t if dtype is torch.float32 else torch.empty_like(t, dtype=dtype) for t in (q, keys))
    q_rows, q_in, keys_in = (_numbers(t).reshape(-1, dim) for t in (q, taken, keys_taken))
    rows = q_rows, q_in, keys_in, weights.numpy(), parts.numpy()
    made = _Room(products, keep, q, keys, keys.mT, weights, parts, taken, keys_taken, *rows)
    if keep:
        if len(_rooms.kept) >= _ROOMS_KEPT:
            _rooms.kept.clear()
        _rooms.kept[pairs, height, dim, dtype] = made
    return made


def _numbers(x: torch.Tensor) -> np.ndarray[Any, Any]:
    """x's memory, what is narrower than 32 bits as integers: NumPy has no bfloat16 and no floats of 8 bits."""
    x = x.detach() if x.requires_grad else x
    return (x if x.dtype is torch.float32 else x.view(torch.int16 if x.itemsize == 2 else torch.int8)).numpy()


def _gather(
    x: torch.Tensor, index: _Index, into: torch.Tensor, taken: torch.Tensor, array: np.ndarray[Any, Any] | None
) -> None:
    """Rows of x [..., D] at `index` into `into`, float32; by way of `taken`, in memory `array`, where NumPy does it."""
    dim = x.shape[-1]
    if array is not None:
        _numbers(x).reshape(-1, dim).take(index, 0, out=array, mode="clip")
        if taken is not into:
            into.copy_(taken)
    elif x.dtype is torch.float32:
        torch.index_select(x.view(-1, dim), 0, torch.from_numpy(index), out=into.view(-1, dim))
    else:
        into.view(-1, dim).copy_(x.view(-1, dim).index_select(0, torch.from_numpy(index)))


@np.errstate(all="ignore")  # of infinities and NaN nobody is told by torch either
def _merge_blocks(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    k_index: _Index,
    group: Group,
    scale: float,
    softcap: float | None,
) -> _Room:
    """Its `parts` [pairs, height, D], of which the first `group.tiles` are the tiles' results.

    What is elementwise goes through NumPy: the same roundings, and no dispatcher before each of thirty small steps.
    """
    height, tiles = group.height, group.tiles
    pairs = group.q_index.size // height
    room = _room(pairs, height, q.shape[-1], q.dtype)
    kept, p = room.kept, room.p
    _gather(q, group.q_index, room.q, room.taken, room.q_in if kept else None)
    np.multiply(room.q_rows, np.float32(scale), out=room.q_rows)
    _gather(k, k_index, room.keys, room.keys_taken, room.keys_in if kept else None)
    if kept:
        scores(room.q, room.keys, room.weights)
    else:
        room.products[0].apply((room.q, room.keys), room.weights, scores)
    if softcap is not None:
        p /= np.float32(softcap)
        np.tanh(p, out=p)
        p *= np.float32(softcap)
    if group.hidden is not None:
        if p.size <= _SMALL:
            np.putmask(p, group.hidden, _HIDDEN)
        else:
            room.weights.masked_fill_(torch.from_numpy(group.hidden), -math.inf)
    best = np.maximum.reduce(p, axis=-1) if pairs * height <= _FEW_ROWS else room.weights.amax(-1).numpy()
    top = np.maximum(best[:tiles], _LOWEST)
    for count, start, stop in group.spans[1:]:
        np.maximum(top[:count], best[start:stop], out=top[:count])
    p -= (top if group.tile is None else top.take(group.tile, 0))[:, :, None]
    np.exp(p, out=p)
    total = np.add.reduce(p, axis=-1)
    _gather(v, k_index, room.keys, room.keys_taken, room.keys_in if kept else None)
    if kept:
        values(room.weights, room.keys, room.parts)
    else:
        room.products[1].apply((room.weights, room.keys), room.parts, values)
    first, sums = room.mixed[:tiles], total[:tiles]
    first += _ZERO  # a sum from zero on, whichever block is the first: -0.0 becomes 0.0
    for count, start, stop in group.spans[1:]:
        sums[:count] += total[start:stop]
        first[:count] += room.mixed[start:stop]
    first /= sums[:, :, None]
    return room


def _prove_once(dim: int, capped: bool) -> None:
    key = (dim, capped, *environment_key())
    if key not in _verified:
        kept = certificates("cpu")
        written = operands_key(
            _CLASS,
            (),
            (f"D={dim}", *(["softcap"] if capped else []), *map(str, key[2:])),
        )
        failure = None
        if kept.standing("attention", written) is not True:
            try:
                with torch.no_grad(), proving():
                    prove(_varlen, dim, capped)
                kept.record("attention", written, True, "prefill, chunks, decode and batches have equal bits")
            except NotInvariantError as error:
                failure = error
        _verified[key] = failure
    failure = _verified[key]
    if failure is not None:
        raise failure


# Anchors and members of attention that are no function of a kernel module as they stand.
#
# Every function has the operator's signature (`nondet.kernels.reference`) and raises NotImplementedError where it does
# not apply; `nondet.core.registry` names them. CUDA, but for `blocks_varlen`; forward only.


def segments_anchor(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, causal: bool = True, scale: float | None = None
) -> torch.Tensor:
    """The one plan that can serve every call: a program walks a query's segments in order."""
    from nondet.kernels.attention.cuda import attention_by_one_plan

    return attention_by_one_plan(q, k, v, causal=causal, scale=scale)


def segments_hopper(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, causal: bool = True, scale: float | None = None
) -> torch.Tensor:
    """The warp-specialized prefill kernel, also where it is the slower way."""
    from nondet.kernels.attention.hopper import prefill, supports

    reason = supports(q, k, v, causal, None, None)
    if reason is not None:
        raise NotImplementedError(reason)
    return prefill(q, k, v, causal=causal, scale=scale)


def segments_split(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, causal: bool = True, scale: float | None = None
) -> torch.Tensor:
    """A program for each segment, merged afterwards: split-KV, also where it is the slower way."""
    from nondet.kernels.attention.cuda import attention

    return attention(q, k, v, causal=causal, scale=scale, split=True)


class _Varlen:
    """An `attention_varlen` as `attention`, and for requests of unequal lengths at once."""

    def __init__(self, target: str) -> None:
        self.target = target

    def __call__(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, causal: bool = True, scale: float | None = None
    ) -> torch.Tensor:
        requests = [(q[b], k[b], v[b]) for b in range(q.shape[0])]
        return torch.stack(self.ragged(requests, causal=causal, scale=scale))

    def ragged(
        self,
        requests: Sequence[tuple[torch.Tensor, torch.Tensor, torch.Tensor]],
        *,
        causal: bool = True,
        scale: float | None = None,
    ) -> list[torch.Tensor]:
        """Each request's q [Hq, Tq, D] over k, v [Hkv, Tk, D] -> [Hq, Tq, D], all in one call."""
        lengths = [(q.shape[1], k.shape[1]) for q, k, _ in requests]
        packed = [torch.cat([one[i].transpose(0, 1) for one in requests]).contiguous() for i in range(3)]
        module, _, name = self.target.partition(":")
        out: torch.Tensor = getattr(import_module(module), name)(
            *packed,
            cu_seqlens_q=_starts([tq for tq, _ in lengths], packed[0].device),
            cu_seqlens_k=_starts([tk for _, tk in lengths], packed[0].device),
            max_seqlen_q=max(tq for tq, _ in lengths),
            max_seqlen_k=max(tk for _, tk in lengths),
            causal=causal,
            scale=scale,
        )
        return [part.transpose(0, 1) for part in out.split([tq for tq, _ in lengths])]


def _starts(lengths: list[int], device: torch.device) -> torch.Tensor:
    ends = torch.tensor([0, *lengths]).cumsum(0)
    return ends.to(device=device, dtype=torch.int32)


segments_varlen = _Varlen("nondet.kernels.attention.cuda:attention_varlen")
blocks_varlen = _Varlen("nondet.kernels.attention.cpu:attention_varlen")
