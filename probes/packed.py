"""One query and its keys among those of other requests in one call, as an engine that packs requests makes it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch

from nondet.core.measure import Trial

__all__ = ["DRAWS", "IMPLS", "trials"]

# The only implementation that is called with a mask: ours keep the requests of a pack apart.
IMPLS = ("stock",)
# Calls of each size, each on numbers of its own: a trace met one, in which one element of hundreds may differ.
DRAWS = 32


def trials(
    operator: Callable[..., torch.Tensor],
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    own: int,
    met: Sequence[tuple[int, int]],
) -> Iterator[Trial]:
    """The last query and the last `own` keys, alone and among as many rows and keys of others as were met.

    Its keys are the first of the call, in its middle, and the last: vectors and tails are reached by where they stand.

    Args:
        operator: Stock attention, which takes an additive `mask`.
        q: [B, Hq, Tq, D], k, v: [B, Hkv, Tk, D]: of the largest sizes met, for B calls of one packed row each.
    """
    yield Trial(f"alone, {own} keys", partial(_row, operator, q, k, v, own, 1, own, 0))
    for rows, keys in dict.fromkeys(met):
        for start in sorted({0, (keys - own) // 2, keys - own}) if keys > own else ():
            value = f"{rows} rows, {keys} keys, its own from key {start}"
            yield Trial(value, partial(_row, operator, q, k, v, own, rows, keys, start))


def _row(
    operator: Callable[..., torch.Tensor],
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    own: int,
    rows: int,
    keys: int,
    start: int,
) -> torch.Tensor:
    """The rows' results [B, Hq, 1, D]. Other rows see the other keys."""
    mask = torch.full((1, 1, rows, keys), torch.finfo(q.dtype).min, dtype=q.dtype, device=q.device)
    mask[..., -1, start : start + own] = 0.0
    mask[..., :-1, :] = 0.0
    mask[..., :-1, start : start + own] = torch.finfo(q.dtype).min
    first, others = k.shape[2] - own, keys - own
    places = [*range(start), *range(first, first + own), *range(start, others)]  # others' keys around its own
    # transformers repeats keys and values for each query head where there is a mask
    k, v = (x[:, :, places].repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    q = q[:, :, q.shape[2] - rows :]
    calls = (operator(q[i : i + 1], k[i : i + 1], v[i : i + 1], mask=mask) for i in range(len(q)))
    return torch.cat([out[:, :, -1:] for out in calls])
