"""The products of a mixture-of-experts layer on a CPU, and the sum of what they give.

Products go expert by expert through `nondet.kernels.matmul.cpu`, whose row counts are certified: a row has the bits of
the plain product of that row with its expert's weight. Weights that don't start on a 64-byte boundary are copied, so
that all experts of one layer share one order along K, wherever each lies in memory.
"""

from __future__ import annotations

import itertools

import torch

from nondet.core.launch import note
from nondet.kernels.matmul import cpu as cpu_matmul

__all__ = ["grouped_matmul", "index_add_"]

_ALIGNMENT = 64


def grouped_matmul(x: torch.Tensor, weight: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
    """Rows offsets[g - 1] ... offsets[g] - 1 of x [R, K] times weight[g] of [G, K, N] -> [R, N]. Any strides.

    Numerics and invariance as `nondet.kernels.matmul.cpu`. Rows after the last offset belong to no weight: zeros.

    Raises:
        ValueError: shapes that do not fit, or offsets that do not ascend within R.
        UserError: a gradient is asked for, or a dtype that is not floating.
        NotInvariantError: this machine has no certified way.
    """
    if x.ndim != 2 or weight.ndim != 3 or x.shape[1] != weight.shape[1] or offsets.shape != weight.shape[:1]:
        raise ValueError(
            f"grouped_matmul takes [R, K], [G, K, N] and [G], got {tuple(x.shape)}, {tuple(weight.shape)} and "
            f"{tuple(offsets.shape)}"
        )
    ends = [0, *offsets.tolist()]
    if any(end < start for start, end in itertools.pairwise(ends)) or ends[-1] > x.shape[0]:
        raise ValueError(f"grouped_matmul takes offsets that ascend from 0 to at most {x.shape[0]}, got {ends[1:]}")
    out = x.new_zeros((x.shape[0], weight.shape[2]))
    for g, (start, end) in enumerate(itertools.pairwise(ends)):
        if start < end:
            out[start:end] = cpu_matmul.matmul(x[start:end], _aligned(weight[g]))
    return out


def _aligned(weight: torch.Tensor) -> torch.Tensor:
    """weight [K, N] itself, or a copy of the same strides on a boundary."""
    return weight if weight.data_ptr() % _ALIGNMENT == 0 else weight.clone()


def index_add_(target: torch.Tensor, index: torch.Tensor, source: torch.Tensor, alpha: float = 1.0) -> torch.Tensor:
    """target [R, C], in place, with alpha times source [n, C] added to its rows index [n].

    A row's additions follow the order of `index`, onto the row's own number, in float32; rounded once. So a row depends
    on what is added to it, in that order, and on nothing else. All rows' first additions are made at once, then all
    second ones: as many rounds as one row has additions.

    Raises:
        IndexError: an index outside of target.
    """
    if index.numel() == 0:
        return target
    if int(index.min()) < 0 or int(index.max()) >= target.shape[0]:
        raise IndexError(f"index runs from {int(index.min())} to {int(index.max())}, target has {target.shape[0]} rows")
    note("routing_index_add")
    row, order = torch.sort(index.long(), stable=True)
    rows, counts = torch.unique_consecutive(row, return_counts=True)
    firsts = torch.cumsum(counts, 0) - counts
    wide = torch.promote_types(target.dtype, torch.float32)
    totals = target[rows].to(wide)
    for rank in range(int(counts.max())):
        going = torch.nonzero(counts > rank).flatten()
        totals[going] += source[order[firsts[going] + rank]].to(wide) * alpha
    target[rows] = totals.to(target.dtype)
    return target
