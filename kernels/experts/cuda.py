"""The products of a mixture of experts on CUDA: many groups of rows, each with a weight of its own, in one launch.

The order of reduction is that of class "chain" (`nondet.kernels.matmul.cuda_triton`): every element is one chain over
K, from 0 to K - 1, in one accumulator, rounded once. So a row has the bits of the plain product of that row with its
expert's weight, whatever other rows come along, however they are spread over the experts, and wherever the row lies in
the sorted batch and in its tile. The tile is chosen by the number of rows for each expert, and only by speed.

Which tile belongs to which expert is worked out on the device, by each program for itself, from the offsets: nothing is
read back to the host, so that a launch can be captured in a CUDA graph and replayed with other offsets.

Two kernels, one order: with TMA (tensor descriptors) for float16 and bfloat16 whose rows are aligned, on GPUs that have
it; with pointers for everything else. Both walk K in steps of the tile's one block_k, and both read zeros beyond K.

That tiles and kernels agree is the hardware's property. So each is proven by bits at its first use on a machine,
against the anchor of class chain (`nondet.kernels.experts.cuda_proof`), and the proof is kept
(`nondet.core.certificates`); one that fails is not used.
"""

# Triton reads a kernel's annotations itself: only tl.constexpr may stand there.
# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from nondet.core.launch import note
from nondet.core.proof import distinct
from nondet.kernels.experts.cuda_proof import proven
from nondet.kernels.matmul import cuda_tiles as chain_tiles
from nondet.kernels.matmul.cuda_tiles import Tile
from nondet.kernels.matmul.cuda_triton import chain
from nondet.kernels.triton_common import HALF, INTERPRETED, accumulator, capability, on_device, require

__all__ = ["grouped_chain", "grouped_matmul", "takes_tma", "tile_for", "tiles"]

_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_HALF_TILES = (
    Tile(16, 64, 64, 4, 6),
    Tile(16, 128, 64, 4, 5),
    Tile(32, 128, 64, 4, 4),
    Tile(64, 128, 64, 4, 4),
    Tile(64, 256, 64, 8, 4),
    Tile(128, 128, 64, 8, 4),
    Tile(128, 256, 64, 8, 4),
)


def tiles(dtype: torch.dtype) -> tuple[Tile, ...]:
    """Every tile that may be launched for the dtype: the members of the class."""
    return _HALF_TILES if dtype in HALF else chain_tiles.tiles(dtype)


def tile_for(rows: int, groups: int, n: int, dtype: torch.dtype) -> Tile:
    """The tile for `rows` rows over `groups` weights with n columns: by the mean number of rows of a weight.

    The limits are those of an H200 in bfloat16 (64 experts, 8 a token, K x N of 2048 x 1536 and 768 x 2048).
    """
    known = tiles(dtype)
    mean = rows / groups
    if dtype not in HALF:
        return known[0] if mean <= 16 else known[-1]
    if mean <= 8:
        return known[0] if n < 2048 else known[1]
    if mean <= 24:
        return known[2]
    if mean <= 96:
        return known[3]
    return known[5] if n <= 128 else known[6]


@triton.jit
def _place(offsets_ptr, R, N, GROUPS, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_G: tl.constexpr):
    """This program's expert, its tile's first row and column, and where the expert's rows end.

    Tiles are dealt out expert by expert. The rows after the last offset count as one more expert, GROUPS, whose result
    is zero; BLOCK_G, a power of two above GROUPS, stands for no tile at all, and then there are no rows either.
    """
    tiles_n = tl.cdiv(N, BLOCK_N)
    pid = tl.program_id(0)
    groups = tl.arange(0, BLOCK_G)
    # Offsets beyond R, or that go down, would be an error of the caller's: nothing outside of the tensors is touched.
    ends = tl.minimum(tl.load(offsets_ptr + groups, mask=groups < GROUPS, other=R), R)
    starts = tl.load(offsets_ptr + groups - 1, mask=(groups > 0) & (groups <= GROUPS), other=0)
    starts = tl.where(groups <= GROUPS, tl.maximum(starts, 0), R)
    counts = tl.cdiv(tl.maximum(ends - starts, 0), BLOCK_M)
    upto = tl.cumsum(counts, axis=0)
    group = tl.sum((upto <= pid // tiles_n).to(tl.int32), axis=0)
    mine = groups == group
    start = tl.sum(tl.where(mine, starts, 0), axis=0)
    end = tl.sum(tl.where(mine, ends, 0), axis=0)
    tiles_m = tl.sum(tl.where(mine, counts, 0), axis=0)
    within = pid - tl.sum(tl.where(mine, upto - counts, 0), axis=0) * tiles_n
    # Within an expert, tiles go down a few rows before they go right, so that L2 serves both operands.
    first_m = within // (8 * tiles_n) * 8
    high = tl.maximum(tl.minimum(tiles_m - first_m, 8), 1)
    pid_m = first_m + (within % (8 * tiles_n)) % high
    pid_n = (within % (8 * tiles_n)) // high
    return group, start + pid_m * BLOCK_M, pid_n * BLOCK_N, end


@triton.jit(do_not_specialize=["R"])
def _grouped_pointer_kernel(
    x_ptr,
    weight_ptr,
    out_ptr,
    offsets_ptr,
    R,
    N,
    K,
    GROUPS,
    stride_xr,
    stride_xk,
    stride_wg,
    stride_wk,
    stride_wn,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_G: tl.constexpr,
    EVEN_K: tl.constexpr,
    ACC: tl.constexpr,
):
    group, row, col, end = _place(offsets_ptr, R, N, GROUPS, BLOCK_M, BLOCK_N, BLOCK_G)
    offs_m = row + tl.arange(0, BLOCK_M)
    offs_n = col + tl.arange(0, BLOCK_N)
    acc = chain(
        x_ptr,
        weight_ptr + group.to(tl.int64) * stride_wg,
        offs_m,
        offs_n,
        0,
        tl.where(group < GROUPS, K, 0),
        end,
        N,
        stride_xr,
        stride_xk,
        stride_wk,
        stride_wn,
        BLOCK_M,
        BLOCK_N,
        BLOCK_K,
        EVEN_K,
        ACC,
        "ieee",
    )
    out = out_ptr + offs_m.to(tl.int64)[:, None] * N + offs_n[None, :]
    tl.store(out, acc.to(out_ptr.dtype.element_ty), mask=(offs_m[:, None] < end) & (offs_n[None, :] < N))


@triton.jit(do_not_specialize=["R"])
def _grouped_tma_kernel(
    x_desc,
    weight_desc,
    out_ptr,
    offsets_ptr,
    R,
    N,
    K,
    GROUPS,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_G: tl.constexpr,
):
    """x_desc [R, K] in blocks [BLOCK_M, BLOCK_K]; weight_desc [GROUPS * N, K], a row for each column of the result.

    A block may reach into the next expert's rows, of x and of the weights: those sums are computed and not stored.
    """
    group, row, col, end = _place(offsets_ptr, R, N, GROUPS, BLOCK_M, BLOCK_N, BLOCK_G)
    acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for k in range(0, tl.where(group < GROUPS, K, 0), BLOCK_K):
        x = x_desc.load([row, k])
        weight = weight_desc.load([group * N + col, k])
        acc = tl.dot(x, weight.T, acc, out_dtype=tl.float32)
    offs_m = row + tl.arange(0, BLOCK_M)
    offs_n = col + tl.arange(0, BLOCK_N)
    out = out_ptr + offs_m.to(tl.int64)[:, None] * N + offs_n[None, :]
    tl.store(out, acc.to(out_ptr.dtype.element_ty), mask=(offs_m[:, None] < end) & (offs_n[None, :] < N))


def takes_tma(x: torch.Tensor, weight: torch.Tensor) -> bool:
    """Whether tensor descriptors can read x [R, K] and weight [G, K, N]: it depends on layouts, not on R or offsets."""
    if x.dtype not in HALF or x.shape[0] == 0:
        return False
    if not INTERPRETED and capability(x.device) < (9, 0):
        return False
    groups, depth, columns = weight.shape
    flat = weight.stride(1) == 1 and (groups == 1 or weight.stride(0) == columns * weight.stride(2))
    aligned = weight.stride(2) % 8 == 0 and x.stride(0) % 8 == 0  # TMA counts strides in 16 bytes
    return (
        flat
        and aligned
        and weight.stride(2) >= depth
        and x.stride(1) == 1
        and x.stride(0) >= depth
        and x.data_ptr() % 16 == 0
        and weight.data_ptr() % 16 == 0
        and groups * columns < 2**31
    )


def grouped_chain(
    x: torch.Tensor, weight: torch.Tensor, offsets: torch.Tensor, tile: Tile | None = None, tma: bool | None = None
) -> torch.Tensor:
    """`grouped_matmul` without its checks.

    Args:
        tile: One of `tiles(dtype)`, to ask for; None chooses by rows, weights and columns, among those proven here.
        tma: Which of the two kernels; None chooses by layout.
    """
    (rows, depth), (groups, _, columns) = x.shape, weight.shape
    out = torch.empty(rows, columns, device=x.device, dtype=x.dtype)
    if out.numel() == 0:
        return out
    if groups == 0:
        return out.zero_()
    if x.stride(1) != 1 or (rows > 1 and x.stride(0) < depth):
        x = x.contiguous()
    if not distinct(weight[0]):
        weight = weight.contiguous()
    tma = takes_tma(x, weight) if tma is None else tma
    if tile is None:
        tile, tma = proven(x, weight, tile_for(rows, groups, columns, x.dtype), tma)
    # As many tiles of rows as there can be: every group may leave one unfilled, and so may the rows after the last.
    most = (rows + (tile.block_m - 1) * min(groups + 1, rows)) // tile.block_m
    grid = (most * triton.cdiv(columns, tile.block_n),)
    common: dict[str, Any] = {
        "BLOCK_M": tile.block_m,
        "BLOCK_N": tile.block_n,
        "BLOCK_K": tile.block_k,
        "BLOCK_G": triton.next_power_of_2(groups + 1),
        "num_warps": tile.warps,
        "num_stages": tile.stages,
    }
    note(f"grouped_matmul[{tile}{' tma' if tma else ''}]")
    with on_device(x):
        if tma:
            x_desc = TensorDescriptor(x, [rows, depth], [x.stride(0), 1], [tile.block_m, tile.block_k])
            stride = weight.stride(2)
            weight_desc = TensorDescriptor(weight, [groups * columns, depth], [stride, 1], [tile.block_n, tile.block_k])
            _grouped_tma_kernel[grid](x_desc, weight_desc, out, offsets, rows, columns, depth, groups, **common)
        else:
            _grouped_pointer_kernel[grid](
                x,
                weight,
                out,
                offsets,
                rows,
                columns,
                depth,
                groups,
                *x.stride(),
                *weight.stride(),
                EVEN_K=depth % tile.block_k == 0,
                ACC=accumulator(x.dtype),
                **common,
            )
    return out


def grouped_matmul(x: torch.Tensor, weight: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
    """Rows offsets[g - 1] ... offsets[g] - 1 of x [R, K] times weight[g] of [G, K, N] -> [R, N]. Any strides.

    float16, bfloat16 and float32 (accumulated in float32, in IEEE arithmetic) or float64 (in float64). The order is a
    chain over K in one accumulator, rounded once: the bits of a row are those of
    `nondet.kernels.matmul.cuda_triton.matmul(row, weight[g])`, so they depend on the row and its weight alone. Rows
    after the last offset belong to no weight and give zeros. Offsets are read on the device only: they have to ascend,
    and what goes beyond R is cut. Forward only.

    Raises:
        NotImplementedError: a device or dtype without a kernel, or none that is proven here (see `cuda_proof`).
        ValueError: shapes that do not fit.
    """
    if x.ndim != 2 or weight.ndim != 3 or x.shape[1] != weight.shape[1] or offsets.shape != weight.shape[:1]:
        raise ValueError(
            f"grouped_matmul takes [R, K], [G, K, N] and [G], got {tuple(x.shape)}, {tuple(weight.shape)} and "
            f"{tuple(offsets.shape)}"
        )
    if offsets.dtype not in (torch.int32, torch.int64) or offsets.device != x.device:
        raise ValueError(f"grouped_matmul takes int32 or int64 offsets on {x.device}, got {offsets.dtype}")
    require("grouped_matmul", _DTYPES, x, weight)
    return grouped_chain(x, weight, offsets.to(torch.int32).contiguous())
