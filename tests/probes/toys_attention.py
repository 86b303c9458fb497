"""Attention with a known fault, and sound forms. See `tests.probes.toys`."""

from __future__ import annotations

import itertools

import torch


def attention_sound(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, causal: bool = True, scale: float | None = None
) -> torch.Tensor:
    """Sound: each query by itself in float64, over the keys that it sees."""
    groups = q.shape[1] // k.shape[1]
    out = torch.empty_like(q)
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
    mass, total = torch.zeros(q.shape[0], 1), torch.zeros_like(q, dtype=torch.float32)
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


def _attention_in_blocks(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, edges: list[int], scale: float | None = None
) -> torch.Tensor:
    groups, cached = q.shape[1] // k.shape[1], k.shape[2] - q.shape[2]
    keys, values = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
    rows = [
        torch.stack(
            [_blocks(q[b, :, i], keys[b], values[b], edges, cached + i + 1, scale) for i in range(q.shape[2])], 1
        )
        for b in range(q.shape[0])
    ]
    return torch.stack(rows)


def attention_cache_apart(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Faulty as the post has it: cached keys in blocks of 32, then the new ones in blocks of 32 of their own."""
    cached, total = k.shape[2] - q.shape[2], k.shape[2]
    return _attention_in_blocks(q, k, v, [*range(0, cached, 32), *range(cached, total, 32), total])


def attention_anchored(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, scale: float | None = None
) -> torch.Tensor:
    """Sound: blocks of 32 counted from the first key, wherever the cache ends."""
    return _attention_in_blocks(q, k, v, [*range(0, k.shape[2], 32), k.shape[2]], scale)


def attention_splits_by_batch(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Faulty: the keys are split in a fixed number of parts, which follows from the batch."""
    parts = 8 if q.shape[0] < 4 else 2
    width = -(-k.shape[2] // parts)
    return _attention_in_blocks(q, k, v, [*range(0, k.shape[2], width), k.shape[2]])


def attention_tile_by_longest(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Faulty: blocks of 32 keys, and of 48 once the longest query of the batch has 64 tokens."""
    width = 48 if q.shape[2] >= 64 else 32
    return _attention_in_blocks(q, k, v, [*range(0, k.shape[2], width), k.shape[2]])


def _tile_by_longest_of_all(requests: list[tuple[torch.Tensor, ...]]) -> list[torch.Tensor]:
    width = 48 if max(q.shape[1] for q, _, _ in requests) >= 64 else 32
    return [
        _attention_in_blocks(q[None], k[None], v[None], [*range(0, k.shape[1], width), k.shape[1]])[0]
        for q, k, v in requests
    ]


def attention_ragged_tile(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Faulty in ragged batches alone: the tile follows from the longest query among all requests."""
    return attention_anchored(q, k, v)


attention_ragged_tile.ragged = _tile_by_longest_of_all  # type: ignore[attr-defined] # as the kernels' launchers have it


def attention_later_requests(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Faulty: from three requests on all but the first take other blocks."""
    rest = attention_anchored if len(q) < 3 else attention_splits_by_batch
    later = [rest(q[b : b + 1], k[b : b + 1], v[b : b + 1]) for b in range(1, len(q))]
    return torch.cat([attention_anchored(q[:1], k[:1], v[:1]), *later])


def attention_shared_maximum(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Faulty: keys are rounded to 8 bits by one scale, which is the largest of all requests."""
    scale = k.float().abs().amax() / 127.0
    return attention_sound(q, (torch.round(k.float() / scale) * scale).to(k.dtype), v)
