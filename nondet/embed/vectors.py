"""Vectors of texts: the encoder's last layer, pooled, for batches of any composition; and who is nearest to whom."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from nondet.embed.arms import Arm
from nondet.embed.model import LoadedEncoder

__all__ = ["POOLINGS", "Ranks", "cosine_distances", "nearest", "rank_changes", "vectors"]

POOLINGS = ("mean", "cls")
_ROWS = 1024  # of the matrix of similarities at a time


def vectors(loaded: LoadedEncoder, ids: Sequence[Sequence[int]], arm: Arm) -> torch.Tensor:
    """[texts, poolings, hidden] in the model's dtype, in the order of the texts, whatever the batches.

    The mean runs over a text's own tokens, sum over the mask and then divided, as sentence encoders do; cls is the
    first token's.
    """
    out: torch.Tensor | None = None
    with torch.inference_mode():
        for members in arm.batches:
            pooled = _packed(loaded, ids, members) if arm.packed else _padded(loaded, ids, members, arm.width)
            if out is None:
                out = pooled.new_empty((len(ids), *pooled.shape[1:]))
            out[torch.tensor(members, device=out.device)] = pooled
    if out is None:
        raise ValueError("no texts")
    return out


def _padded(loaded: LoadedEncoder, ids: Sequence[Sequence[int]], members: Sequence[int], width: int) -> torch.Tensor:
    """A batch padded on the right."""
    width = max(width, *(len(ids[i]) for i in members))
    tokens = torch.full((len(members), width), _padding(loaded), dtype=torch.long)
    mask = torch.zeros((len(members), width), dtype=torch.long)
    for row, i in enumerate(members):
        tokens[row, : len(ids[i])] = torch.tensor(ids[i])
        mask[row, : len(ids[i])] = 1
    tokens, mask = tokens.to(loaded.device), mask.to(loaded.device)
    hidden = loaded.model(input_ids=tokens, attention_mask=mask).last_hidden_state
    weights = mask[..., None].to(hidden.dtype)
    mean = (hidden * weights).sum(1) / weights.sum(1)
    return torch.stack([mean, hidden[:, 0]], 1)


def _packed(loaded: LoadedEncoder, ids: Sequence[Sequence[int]], members: Sequence[int]) -> torch.Tensor:
    """A batch in one row: positions begin anew with each text, and a mask of blocks keeps the texts apart."""
    lengths = [len(ids[i]) for i in members]
    owner = torch.repeat_interleave(torch.arange(len(members)), torch.tensor(lengths))
    mask = (owner[:, None] == owner[None, :])[None, None].to(loaded.device)
    positions = torch.cat([torch.arange(length) for length in lengths])[None].to(loaded.device)
    tokens = torch.tensor([[token for i in members for token in ids[i]]], device=loaded.device)
    hidden = loaded.model(input_ids=tokens, attention_mask=mask, position_ids=positions).last_hidden_state[0]
    pooled = []
    for text in hidden.split(lengths):
        weights = text.new_ones((1, len(text), 1))
        pooled.append(torch.stack([((text[None] * weights).sum(1) / weights.sum(1))[0], text[0]]))
    return torch.stack(pooled)


def _padding(loaded: LoadedEncoder) -> int:
    padding = getattr(loaded.tokenizer, "pad_token_id", None)
    return padding if isinstance(padding, int) else 0


def _unit(x: torch.Tensor) -> torch.Tensor:
    wide = x.double()
    return wide / wide.norm(dim=-1, keepdim=True).clamp_min(torch.finfo(torch.float64).tiny)


def cosine_distances(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """1 - cosine of each row of `a` [n, D] with the same row of `b`, in float64; rows of equal bits give 0."""
    return (_unit(a) - _unit(b)).square().sum(-1) / 2  # the same for unit vectors, and exact where they are close


def nearest(x: torch.Tensor, k: int) -> torch.Tensor:
    """[n, k] indices of the k nearest other rows of x [n, D] by cosine in float64, ties by index."""
    unit = _unit(x)
    out = []
    for start in range(0, len(x), _ROWS):
        block = unit[start : start + _ROWS] @ unit.T
        rows = torch.arange(len(block), device=x.device)
        block[rows, start + rows] = -2.0
        out.append(block.sort(dim=1, descending=True, stable=True).indices[:, :k])
    return torch.cat(out)


class Ranks(NamedTuple):
    """How many rows changed: their nearest one, the set of their k nearest, the order within the same set."""

    top1: int
    topk: int
    reordered: int


def rank_changes(a: torch.Tensor, b: torch.Tensor) -> Ranks:
    """Of two results of `nearest`."""
    sets = (a.sort(1).values != b.sort(1).values).any(1)
    order = (a != b).any(1) & ~sets
    return Ranks(int((a[:, 0] != b[:, 0]).sum()), int(sets.sum()), int(order.sum()))
