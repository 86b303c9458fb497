"""The products of a mixture-of-experts layer on a CPU, and index_add and scatter_add in order on any device.

Products go expert by expert through `nondet.kernels.matmul.cpu`, whose row counts are certified: a row has the bits of
the plain product of that row with its expert's weight. Weights that don't start on a 64-byte boundary are copied, so
that all experts of one layer share one order along K at any address.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import partial

import torch

from nondet.core.launch import note
from nondet.kernels.experts.topk import check_shapes
from nondet.kernels.matmul import cpu as cpu_matmul
from nondet.kernels.reference import by_expert

_ALIGNMENT = 64


def grouped_matmul(x: torch.Tensor, weight: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
    """Rows offsets[g - 1] ... offsets[g] - 1 of x [R, K] times weight[g] of [G, K, N] -> [R, N]. Any strides.

    Numerics, invariance and errors as `nondet.kernels.matmul.cpu`; ValueError: shapes that do not fit, or offsets that
    do not ascend within R. Rows after the last offset belong to no weight: zeros.
    """
    check_shapes(x, weight, offsets)
    ends = [0, *offsets.tolist()]
    if any(end < start for start, end in itertools.pairwise(ends)) or ends[-1] > x.shape[0]:
        raise ValueError(f"grouped_matmul takes offsets that ascend from 0 to at most {x.shape[0]}, got {ends[1:]}")
    return by_expert(lambda rows, one: cpu_matmul.matmul(rows, _aligned(one)), x, weight, offsets)


def _aligned(weight: torch.Tensor) -> torch.Tensor:
    return weight if weight.data_ptr() % _ALIGNMENT == 0 else weight.clone()


def index_add_(target: torch.Tensor, index: torch.Tensor, source: torch.Tensor, alpha: float = 1.0) -> torch.Tensor:
    """target [R, C], in place, with alpha times source [n, C] added to its rows index [n].

    A row's additions follow the order of `index`, onto the row's own number, in float32; rounded once. All rows' first
    additions are made at once, then all second ones. IndexError: an index outside of target.
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


# index_add and scatter_add in an order that only the index decides, on any device.
# Stock torch adds with atomics on a GPU, in the order in which threads arrive. Here the contributions to a row are
# sorted by their position in `index` (a stable sort). `index_add` into a matrix of half or float32 adds them in
# sequence onto the row, by the function that `batch_invariant()` runs. Every other call adds in pairs: first with
# second, third with fourth, and so on, then pairs of those sums, and the total to the row last. The order depends only
# on the contributions to that row, not on the run or on other rows.


def index_add(target: torch.Tensor, index: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
    """target [R, C] with source [n, C] added to its rows index [n]; a new tensor.

    Accumulated in float32 (float64 and integers in their own dtype), rounded once to target's dtype. A row depends on
    its own contributions and their order in `index`; every run has the same bits. Raises IndexError: an index outside
    of target.
    """
    if target.dtype in (torch.float32, torch.float16, torch.bfloat16) and target.dim() == 2:
        # what `batch_invariant()` runs: a row's additions in sequence, in the order of the index
        out = target.clone(memory_format=torch.contiguous_format)
        if target.is_cuda:
            from nondet.kernels.experts import cuda

            cuda.index_add_(out, index, source, 1.0)
        else:
            index_add_(out, index, source)
        return out
    note("ordered_scatter[index_add]")
    return _add(target, index, source)


def scatter_add(target: torch.Tensor, index: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
    """target [R] with source [n] added at index [n]; a new tensor. Order and errors as `index_add`."""
    note("ordered_scatter[scatter_add]")
    return _add(target, index, source)


def _add(target: torch.Tensor, index: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
    """Sums in pairs, level by level and in place, so the host waits for the device only once and not at every level."""
    if index.numel() == 0:
        return target.clone()
    accumulator = target.dtype
    if accumulator.is_floating_point and accumulator.itemsize < 4:
        accumulator = torch.float32
    row, order = torch.sort(index, stable=True)
    place = torch.arange(row.numel(), device=row.device)
    first = torch.cat([row.new_ones(1, dtype=torch.bool), row[1:] != row[:-1]])
    rank = place - torch.cummax(torch.where(first, place, 0), 0).values  # index among the sums of its row
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
    # each row's sum is at its first index; every other index goes to a row that is cut off
    out = torch.cat([target.to(accumulator), target.new_zeros(1, *target.shape[1:], dtype=accumulator)])
    where = torch.where(first, row.long(), target.shape[0])
    out = out.index_copy(0, where, out.index_select(0, row) + sums)
    return out[:-1].to(target.dtype, copy=True)


# Anchors and members of the grouped product, with the operator's signature (`nondet.kernels.reference`). They raise
# NotImplementedError where they do not apply; `nondet.core.registry` names them. CUDA, except the last; forward only.

Call = Callable[..., torch.Tensor]


def grouped_anchor(x: torch.Tensor, weight: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
    """Each expert's rows by the anchor of class chain, one plain product after another."""
    from nondet.kernels.matmul.cuda import chain_anchor_matmul

    return by_expert(chain_anchor_matmul, x, weight, offsets)


def grouped_tiles(dtype: str) -> dict[str, Call]:
    """Every tile of the grouped kernels, with pointers and, where operands allow it, with TMA."""
    from nondet.kernels.experts.cuda import grouped_chain, tiles

    found = tiles(getattr(torch, dtype))
    copied = found if dtype in ("bfloat16", "float16") else ()
    plain: dict[str, Call] = {tile.name: partial(grouped_chain, tile=tile, tma=False) for tile in found}
    return plain | {f"{tile.name} tma": partial(grouped_chain, tile=tile, tma=True) for tile in copied}


def each_row_by_cpu_matmul(x: torch.Tensor, weight: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
    """Each row by itself times its expert's weight, on a 64-byte boundary, as the class requires."""

    def product(rows: torch.Tensor, one: torch.Tensor) -> torch.Tensor:
        aligned = _aligned(one)
        return torch.cat([cpu_matmul.matmul(row, aligned) for row in rows.split(1)])

    return by_expert(product, x, weight, offsets)
