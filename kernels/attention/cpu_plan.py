"""Where the rows of packed attention lie: query tiles and key blocks, as index tensors for `cpu_attention`.

Only positions are dealt with here, no numbers. A plan depends on the lengths alone: all layers of a model share it.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import numpy as np
import torch

from nondet.errors import UserError

__all__ = ["BLOCK", "Group", "Layout", "Request", "Step", "first_keys", "group_requests"]

BLOCK = 64  # keys; part of the numerics: another block is another order of reduction


class Request(NamedTuple):
    """One request: first rows of its queries, results and keys (head 0), and how many there are.

    Attributes:
        first: Position of the first key that is there; a sliding-window cache drops those before it.
    """

    q_row: int
    out_row: int
    q_len: int
    k_row: int
    k_len: int
    first: int = 0


class Layout(NamedTuple):
    """How many rows on the next token and the next head lie. Results are always laid out token by token."""

    heads: int
    kv_heads: int
    q_token: int
    q_head: int
    k_token: int
    k_head: int


class Step(NamedTuple):
    """One block of keys for each of the first `tiles` tiles.

    Attributes:
        k_index: [tiles * 64], rows of keys and values; where there is none its first or last key stands in, hidden.
        hidden: bool [tiles - first_hidden, height, 64]: keys a query must not see; None: it sees all.
        first_hidden: The tiles before it see all 64 keys.
    """

    tiles: int
    k_index: torch.Tensor
    hidden: torch.Tensor | None
    first_hidden: int


class Group(NamedTuple):
    """Tiles of one height.

    Attributes:
        q_index: [tiles * height], rows of queries; a tile's spare rows repeat its first.
        valid: Which of the tiles' rows are no spare ones; None: all.
        out_index: Where those go.
        steps: In the order of the keys.
    """

    height: int
    q_index: torch.Tensor
    valid: torch.Tensor | None
    out_index: torch.Tensor
    steps: list[Step]


def first_keys(positions: list[int], starts_q: list[int], starts_k: list[int]) -> list[int]:
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
    return found


def group_requests(
    requests: tuple[Request, ...], layout: Layout, heights: tuple[int, ...], causal: bool, window: int | None
) -> list[Group]:
    """Cut every request's queries into tiles, one head of keys each, and gather tiles of equal height."""
    return _group_requests(requests, layout, heights, causal, window)


@functools.lru_cache(maxsize=4)
def _group_requests(
    requests: tuple[Request, ...], layout: Layout, heights: tuple[int, ...], causal: bool, window: int | None
) -> list[Group]:
    shared = layout.heads // layout.kv_heads
    by_height: dict[int, list[Request]] = {}
    for request in requests:
        by_height.setdefault(_height(request.q_len * shared, heights), []).append(request)
    return [_group(height, members, layout, causal, window) for height, members in sorted(by_height.items())]


def _height(rows: int, heights: tuple[int, ...]) -> int:
    """The height that wastes the fewest rows, the tallest of those: fewer tiles gather fewer keys."""
    return min(heights, key=lambda h: (-(-rows // h) * h + 8 * (-(-rows // h)), -h))


def _group(height: int, members: list[Request], layout: Layout, causal: bool, window: int | None) -> Group:
    shared = layout.heads // layout.kv_heads
    table = np.array(members, dtype=np.int64)  # [requests, 6]
    count = -(-table[:, 2] * shared // height) * layout.kv_heads  # tiles of each request
    owner = np.repeat(np.arange(len(members)), count)  # tile -> request
    place = np.arange(owner.size) - np.repeat(np.cumsum(count) - count, count)
    head, number = place % layout.kv_heads, place // layout.kv_heads
    q_row, out_row, q_len, k_row, k_len, first = table[owner].T
    k_row, k_len = k_row - first * layout.k_token, k_len + first  # from position 0 on

    row = number[:, None] * height + np.arange(height)  # [tiles, height]: row of the request's (token, query head) rows
    real = row < (q_len * shared)[:, None]
    row = np.where(real, row, number[:, None] * height)
    token, query_head = row // shared, row % shared + (head * shared)[:, None]
    position = token + (k_len - q_len)[:, None] if causal else np.broadcast_to((k_len - 1)[:, None], token.shape)
    last = position.max(1)
    first_block = np.zeros_like(last) if window is None else np.maximum(position.min(1) - window + 1, 0) // BLOCK
    blocks = last // BLOCK + 1 - first_block

    order = np.argsort(-blocks, kind="stable")
    q_index = q_row[:, None] + token * layout.q_token + query_head * layout.q_head
    out_index = out_row[:, None] + token * layout.heads + query_head
    real = real[order]
    steps = []
    for j in range(int(blocks.max())):
        active = order[blocks[order] > j]
        key = (first_block[active] + j)[:, None] * BLOCK + np.arange(BLOCK)  # [tiles, 64]: positions
        at = np.clip(key, first[active][:, None], (k_len[active] - 1)[:, None])
        k_index = k_row[active][:, None] + at * layout.k_token + (head[active] * layout.k_head)[:, None]
        hidden = key[:, None, :] > position[active][:, :, None]
        hidden |= key[:, None, :] < first[active][:, None, None]
        if window is not None:
            hidden |= key[:, None, :] <= position[active][:, :, None] - window
        tiles_hiding = hidden.any((1, 2))
        first_hidden = int(tiles_hiding.argmax()) if tiles_hiding.any() else active.size
        steps.append(
            Step(
                active.size,
                torch.from_numpy(k_index.reshape(-1)),
                torch.from_numpy(hidden[first_hidden:]) if first_hidden < active.size else None,
                first_hidden,
            )
        )
    flat = real.reshape(-1)
    everything = bool(flat.all())
    return Group(
        height,
        torch.from_numpy(q_index[order].reshape(-1)),
        None if everything else torch.from_numpy(np.flatnonzero(flat)),
        torch.from_numpy(out_index[order].reshape(-1)[flat]),
        steps,
    )
