"""index_add and scatter_add in an order that the index alone decides, on any device.

Stock torch adds with atomics on a GPU, in whatever order threads arrive. Here the contributions to a row are sorted by
their place in `index` (a stable sort). `index_add` into a matrix of half or float32 adds them one after the other onto
the row, by the very function that `batch_invariant()` runs. Every other call adds in pairs: first with second, third
with fourth, and so on, then pairs of those sums, and the total to the row last. The order depends on the contributions
to that row, and on nothing else: not on the run, not on other rows.
"""

from __future__ import annotations

import torch

from nondet.core.launch import note

__all__ = ["index_add", "scatter_add"]


def index_add(target: torch.Tensor, index: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
    """target [R, C] with source [n, C] added to its rows index [n]; a new tensor.

    Accumulated in float32 (float64 and integers in their own dtype), rounded once to target's dtype. Deterministic from
    run to run; a row depends on its own contributions and their order in `index`.

    Raises:
        IndexError: an index outside of target.
    """
    if target.dtype in (torch.float32, torch.float16, torch.bfloat16) and target.dim() == 2:
        # what `batch_invariant()` runs: a row's additions one after the other, in the order of the index
        out = target.clone(memory_format=torch.contiguous_format)
        if target.is_cuda:
            from nondet.kernels.experts import cuda_routing

            cuda_routing.index_add_(out, index, source, 1.0)
        else:
            from nondet.kernels.experts import cpu

            cpu.index_add_(out, index, source)
        return out
    note("ordered_scatter[index_add]")
    return _add(target, index, source)


def scatter_add(target: torch.Tensor, index: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
    """target [R] with source [n] added at index [n]; a new tensor. As `index_add`.

    Raises:
        IndexError: an index outside of target.
    """
    note("ordered_scatter[scatter_add]")
    return _add(target, index, source)


def _add(target: torch.Tensor, index: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
    """Sums in pairs, level by level, in place of where each stood: nothing is made smaller, so a device is waited for
    once (how many levels there are, and whether the index fits) and not at every level.
    """
    if index.numel() == 0:
        return target.clone()
    accumulator = target.dtype
    if accumulator.is_floating_point and accumulator.itemsize < 4:
        accumulator = torch.float32
    row, order = torch.sort(index, stable=True)
    place = torch.arange(row.numel(), device=row.device)
    first = torch.cat([row.new_ones(1, dtype=torch.bool), row[1:] != row[:-1]])
    rank = place - torch.cummax(torch.where(first, place, 0), 0).values  # place among the sums of its row
    least, largest, most = torch.stack([row[0], row[-1], rank.max()]).tolist()
    if least < 0 or largest >= target.shape[0]:
        raise IndexError(f"index runs from {least} to {largest}, target has {target.shape[0]} rows")
    sums = source.index_select(0, order).to(accumulator)
    step = 1  # from a sum to its neighbour: 1, 2, 4, ... while any row has one
    while step <= most:
        # the neighbour belongs to the same row, and the sum is the left one of its pair
        paired = (row[step:] == row[:-step]) & (rank[:-step] % (2 * step) == 0)
        paired = paired.view(-1, *(1,) * (sums.dim() - 1))
        sums = torch.cat([torch.where(paired, sums[:-step] + sums[step:], sums[:-step]), sums[-step:]])
        step *= 2
    # each row's sum stands at its first place; every other place goes to a row that is cut off
    out = torch.cat([target.to(accumulator), target.new_zeros(1, *target.shape[1:], dtype=accumulator)])
    where = torch.where(first, row.long(), target.shape[0])
    out = out.index_copy(0, where, out.index_select(0, row) + sums)
    return out[:-1].to(target.dtype, copy=True)
