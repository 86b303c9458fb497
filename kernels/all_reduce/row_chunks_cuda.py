"""Products whose bits do not follow the number of ranks, on CUDA: K in chunks, each a chain, added along a tree.

K is cut into equal chunks. Each chunk's sum is one chain from zero in float32 (as class "chain" has it, over the
chunk), and chunks are added in float32 along the binary tree of `nondet.kernels.all_reduce.orders`. A program computes
1, 2, 4 or 8 neighbouring chunks, a whole subtree, so that cutting K over programs or over ranks changes no bit.
"""

# Triton reads a kernel's annotations itself: only tl.constexpr may stand there.
# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from nondet.kernels.all_reduce.peers_cuda import reduce_peers
from nondet.kernels.matmul.cuda_triton import chain, tile_offsets
from nondet.kernels.triton_common import multiprocessors, on_device

__all__ = ["ChunkTile", "chunk_products", "tile_for"]


class ChunkTile(NamedTuple):
    """How a product is spread over programs; no field of it touches a bit.

    Attributes:
        splits: Programs along K, each with a subtree of chunks; their sums meet in a second launch.
    """

    block_m: int
    block_n: int
    block_k: int
    warps: int
    stages: int
    splits: int


@triton.jit
def _one(a, b, rows, cols, at, SIZE, M, N, sam, sak, sbk, sbn, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, EVEN: tl.constexpr):  # fmt: skip  # noqa: E501
    return chain(
        a, b, rows, cols, at * SIZE, at * SIZE + SIZE, M, N, sam, sak, sbk, sbn, BM, BN, BK, EVEN, tl.float32, "ieee"
    )  # fmt: skip


@triton.jit
def _two(a, b, rows, cols, at, SIZE, M, N, sam, sak, sbk, sbn, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, EVEN: tl.constexpr):  # fmt: skip  # noqa: E501
    left = _one(a, b, rows, cols, at, SIZE, M, N, sam, sak, sbk, sbn, BM, BN, BK, EVEN)
    return left + _one(a, b, rows, cols, at + 1, SIZE, M, N, sam, sak, sbk, sbn, BM, BN, BK, EVEN)


@triton.jit
def _four(a, b, rows, cols, at, SIZE, M, N, sam, sak, sbk, sbn, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, EVEN: tl.constexpr):  # fmt: skip  # noqa: E501
    left = _two(a, b, rows, cols, at, SIZE, M, N, sam, sak, sbk, sbn, BM, BN, BK, EVEN)
    return left + _two(a, b, rows, cols, at + 2, SIZE, M, N, sam, sak, sbk, sbn, BM, BN, BK, EVEN)


@triton.jit
def _eight(a, b, rows, cols, at, SIZE, M, N, sam, sak, sbk, sbn, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, EVEN: tl.constexpr):  # fmt: skip  # noqa: E501
    left = _four(a, b, rows, cols, at, SIZE, M, N, sam, sak, sbk, sbn, BM, BN, BK, EVEN)
    return left + _four(a, b, rows, cols, at + 4, SIZE, M, N, sam, sak, sbk, sbn, BM, BN, BK, EVEN)


@triton.jit(do_not_specialize=["M"])
def _chunk_products_kernel(
    a_ptr,
    b_ptr,
    out_ptr,
    M,
    N,
    SIZE,
    stride_am,
    stride_ak,
    stride_bk,
    stride_bn,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr,
    EVEN: tl.constexpr,
    CHUNKS: tl.constexpr,
):
    rows, cols = tile_offsets(tl.program_id(0), M, N, BLOCK_M, BLOCK_N, GROUP_M)
    split = tl.program_id(1)
    at = split * CHUNKS
    if CHUNKS == 8:
        total = _eight(a_ptr, b_ptr, rows, cols, at, SIZE, M, N, stride_am, stride_ak, stride_bk, stride_bn, BLOCK_M, BLOCK_N, BLOCK_K, EVEN)  # fmt: skip  # noqa: E501
    elif CHUNKS == 4:
        total = _four(a_ptr, b_ptr, rows, cols, at, SIZE, M, N, stride_am, stride_ak, stride_bk, stride_bn, BLOCK_M, BLOCK_N, BLOCK_K, EVEN)  # fmt: skip  # noqa: E501
    elif CHUNKS == 2:
        total = _two(a_ptr, b_ptr, rows, cols, at, SIZE, M, N, stride_am, stride_ak, stride_bk, stride_bn, BLOCK_M, BLOCK_N, BLOCK_K, EVEN)  # fmt: skip  # noqa: E501
    else:
        total = _one(a_ptr, b_ptr, rows, cols, at, SIZE, M, N, stride_am, stride_ak, stride_bk, stride_bn, BLOCK_M, BLOCK_N, BLOCK_K, EVEN)  # fmt: skip  # noqa: E501
    out = out_ptr + (split.to(tl.int64) * M + rows[:, None]) * N + cols[None, :]
    tl.store(out, total.to(out_ptr.dtype.element_ty), mask=(rows[:, None] < M) & (cols[None, :] < N))


def tile_for(m: int, n: int, chunks: int, device: torch.device) -> ChunkTile:
    """A tile by the shape: wide ones where there are rows, splits of K where there are too few tiles for the GPU.

    A program of many rows takes two chunks at most: with the sums of four or eight in its registers, on an H200, it was
    1.5 to 3 times slower than several that meet in memory.
    """
    if m <= 16:
        shape = (16, 64, 128, 4, 4)
    elif m <= 64:
        shape = (64, 64, 128, 4, 3)
    else:
        shape = (128, 128, 64, 8, 4)
    tiles = triton.cdiv(m, shape[0]) * triton.cdiv(n, shape[1])
    splits = max(1, chunks // 2) if m > 64 else 1
    while splits < chunks and 2 * splits * tiles <= 3 * multiprocessors(device):
        splits *= 2
    return ChunkTile(*shape, splits)


def chunk_products(
    x: torch.Tensor, weight: torch.Tensor, chunks: int, out: torch.Tensor, tile: ChunkTile | None = None
) -> torch.Tensor:
    """x [M, K] times weight [N, K] transposed, over `chunks` equal chunks of K -> out [M, N].

    Args:
        x, weight: float16, bfloat16 or float32 of one dtype; any strides.
        chunks: 1, 2, 4 or 8, which divides K.
        out: Contiguous, float32 (the sum as it is) or x's dtype (rounded once).
        tile: None chooses one; the bits are the same.
    """
    (m, k), n = x.shape, weight.shape[0]
    if out.numel() == 0:
        return out
    tile = tile or tile_for(m, n, chunks, x.device)
    size = k // chunks
    target = out if tile.splits == 1 else torch.empty(tile.splits, m, n, dtype=torch.float32, device=x.device)
    grid = (triton.cdiv(m, tile.block_m) * triton.cdiv(n, tile.block_n), tile.splits)
    with on_device(x):
        _chunk_products_kernel[grid](
            x,
            weight,
            target,
            m,
            n,
            size,
            *x.stride(),
            weight.stride(1),
            weight.stride(0),
            tile.block_m,
            tile.block_n,
            tile.block_k,
            8,
            size % tile.block_k == 0,
            chunks // tile.splits,
            num_warps=tile.warps,
            num_stages=tile.stages,
        )
        if tile.splits > 1:
            reduce_peers(list(target.view(tile.splits, -1).unbind(0)), out.view(-1), "tree")
    return out
