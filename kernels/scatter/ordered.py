"""index_add and scatter_add in an order that the index alone decides, on any device.

Stock torch adds with atomics on a GPU, in whatever order threads arrive. Here the contributions to a row are sorted by
their place in `index` (a stable sort). `index_add` into a matrix of half or float32 adds them one after the other onto
the row, by the very function that `batch_invariant()` runs. Every other call adds in pairs: first with second, third
with fourth, and so on, then pairs of those sums, and the total to the row last. The order depends on the contributions
to that row, and on nothing else: not on the run, not on other rows.
"""

from __future__ import annotations

import torch

from nondet.kernels.launch import note

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
    if index.numel() == 0:
        return target.clone()
    if int(index.min()) < 0 or int(index.max()) >= target.shape[0]:
        raise IndexError(f"index runs from {int(index.min())} to {int(index.max())}, target has {target.shape[0]} rows")
    accumulator = target.dtype
    if accumulator.is_floating_point and accumulator.itemsize < 4:
        accumulator = torch.float32
    row, order = torch.sort(index, stable=True)
    sums = source.index_select(0, order).to(accumulator)
    while True:
        place = torch.arange(row.numel(), device=row.device)
        first = torch.cat([row.new_ones(1, dtype=torch.bool), row[1:] != row[:-1]])
        rank = place - torch.cummax(torch.where(first, place, 0), 0).values  # place among the sums of its row
        even = rank % 2 == 0
        partner = torch.cat([~first[1:], first.new_zeros(1)])  # the next sum belongs to the same row
        left = torch.nonzero(even).flatten()
        if left.numel() == row.numel():
            break
        paired = partner[left].view(-1, *(1,) * (sums.dim() - 1))
        right = (left + 1).clamp_max(row.numel() - 1)
        sums = torch.where(paired, sums[left] + sums[right], sums[left])
        row = row[left]
    out = target.to(accumulator, copy=True)
    out[row] = out[row] + sums  # each row once: nothing collides
    return out.to(target.dtype)
