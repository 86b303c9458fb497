"""Where the rows of packed attention lie: query tiles and key blocks, as index tensors for `cpu_attention`.

Only positions are dealt with here, no numbers. A plan depends on the lengths alone: all layers of a model share it.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import numpy as np
import torch

from nondet.errors import UserError

__all__ = ["BLOCK", "STEP", "Ask", "Group", "first_keys", "plan_batch", "plan_packed"]

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
    q_index: torch.Tensor
    valid: torch.Tensor
    out_index: torch.Tensor | None
    spans: tuple[tuple[int, int, int], ...]
    tile: np.ndarray[Any, np.dtype[np.int64]] | None
    k_index: torch.Tensor
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


def _groups(height: int, members: list[_Member], layout: _Layout, ask: Ask, rows: int) -> list[Group]:
    """Groups of one height; `rows` is how many rows of results there are, of all heights and of no request."""
    shared = ask.heads // ask.kv_heads
    requests = np.array(members, dtype=np.int64)  # [requests, 5]
    count = -(-requests[:, 1] * shared // height) * ask.kv_heads  # tiles of each request
    owner = np.repeat(np.arange(len(members)), count)  # tile -> request
    place = np.arange(owner.size) - np.repeat(np.cumsum(count) - count, count)
    head, number = place % ask.kv_heads, place // ask.kv_heads
    q_start, q_len, k_start, k_len, first = requests[owner].T
    k_row = (k_start - first) * ask.kv_heads + head * layout.k_head  # of position 0
    k_len = k_len + first  # from position 0 on

    row = number[:, None] * height + np.arange(height)  # [tiles, height]: row of the request's (token, query head) rows
    real = row < (q_len * shared)[:, None]
    row = np.where(real, row, number[:, None] * height)
    token, query_head = row // shared, row % shared + (head * shared)[:, None]
    last_key = (k_len - 1)[:, None]
    position = token + (k_len - q_len)[:, None] if ask.causal else np.broadcast_to(last_key, token.shape)
    window = ask.window
    first_block = np.zeros_like(k_len) if window is None else np.maximum(position.min(1) - window + 1, 0) // BLOCK
    blocks = position.max(1) // BLOCK + 1 - first_block

    q_index = (q_start * ask.heads)[:, None] + token * layout.q_token + query_head * layout.q_head
    out_index = (q_start * ask.heads)[:, None] + token * ask.heads + query_head
    order = np.argsort(-blocks, kind="stable")
    groups, start, dropped = [], 0, bool(first.any())
    for stop in _cuts(blocks[order], ask.pairs):
        mine = order[start:stop]
        start = stop
        counts, flat = blocks[mine], np.flatnonzero(real[mine])
        active = (counts[:, None] > np.arange(counts[0])).T  # [blocks, tiles]
        block, tile = np.nonzero(active)  # of each pair, block by block
        ends = np.cumsum(active.sum(1)).tolist()
        if tile.size > STEP and tile.size % STEP:
            fill = np.minimum(np.arange(tile.size + -tile.size % STEP), tile.size - 1)  # the last pair again
            block, tile = block[fill], tile[fill]
        at = mine[tile]
        key = (first_block[at] + block)[:, None] * BLOCK + np.arange(BLOCK)  # [pairs, 64]: positions
        there = np.clip(key, first[at][:, None], last_key[at])
        hidden = _hidden(key.astype(np.int32), position[at].astype(np.int32), first[at] if dropped else None, window)
        out = out_index[mine].reshape(-1)[flat]
        by_row = np.argsort(out)
        everything = out.size == rows and len(mine) == len(order)
        groups.append(
            Group(
                height,
                len(mine),
                torch.from_numpy(q_index[at].reshape(-1)),
                torch.from_numpy(flat[by_row]),
                None if everything else torch.from_numpy(out[by_row]),
                tuple((b - a, a, b) for a, b in zip([0, *ends], ends, strict=False)),
                tile if tile.size > len(mine) else None,
                torch.from_numpy((k_row[at][:, None] + there * layout.k_token).reshape(-1)),
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
