"""The class "ranks-tree" on CUDA: K in chunks, each a chain, added along a tree; and the proof at first use."""

from __future__ import annotations

import functools
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from nondet.core.certificates import certificates
from nondet.core.proof import Claim, established, product_inputs, prove
from nondet.kernels.all_reduce.chain import agreed, gather_into, prove_on_messages
from nondet.kernels.all_reduce.orders import tree
from nondet.kernels.all_reduce.symmetric import reduce_peers
from nondet.kernels.matmul.triton_kernels import rows_fit, tile_at, tma_takes
from nondet.kernels.triton_common import multiprocessors, on_device

# Triton reads a kernel's annotations itself and allows only tl.constexpr.
# mypy: allow-untyped-defs, allow-incomplete-defs


class ChunkTile(NamedTuple):
    """How a product is spread over programs; no field changes a bit."""

    block_m: int
    block_n: int
    block_k: int
    warps: int
    stages: int
    splits: int  # programs along K, each with a subtree of chunks; a second launch adds their sums
    tma: bool = False  # operands come by the tensor memory accelerator


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
    TMA: tl.constexpr,
    CHUNKS: tl.constexpr,
):
    """CHUNKS chains, a loop over K each, so that matrix instructions stay in flight; sums are held in registers."""
    row, col = tile_at(tl.program_id(0), M, N, BLOCK_M, BLOCK_N, GROUP_M)
    rows, cols = row + tl.arange(0, BLOCK_M), col + tl.arange(0, BLOCK_N)
    split = tl.program_id(1)
    in_m = rows[:, None] < M
    in_n = cols[None, :] < N
    if not TMA:
        offs_k = tl.arange(0, BLOCK_K)
        a_rows = a_ptr + rows.to(tl.int64)[:, None] * stride_am + offs_k.to(tl.int64)[None, :] * stride_ak
        b_cols = b_ptr + offs_k.to(tl.int64)[:, None] * stride_bk + cols.to(tl.int64)[None, :] * stride_bn
    for chunk in tl.static_range(CHUNKS):
        acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
        for at in range(0, SIZE, BLOCK_K):
            k = (split * CHUNKS + chunk) * SIZE + at
            if TMA:
                a = a_ptr.load([row, k])
                b = b_ptr.load([col, k]).T
            elif EVEN:
                a = tl.load(a_rows + k.to(tl.int64) * stride_ak, mask=in_m, other=0.0)
                b = tl.load(b_cols + k.to(tl.int64) * stride_bk, mask=in_n, other=0.0)
            else:
                # Zeros beyond the end add nothing: the sum is exact where one side is zero.
                a = tl.load(a_rows + k.to(tl.int64) * stride_ak, mask=in_m & (offs_k[None, :] < SIZE - at), other=0.0)
                b = tl.load(b_cols + k.to(tl.int64) * stride_bk, mask=in_n & (offs_k[:, None] < SIZE - at), other=0.0)
            acc = tl.dot(a, b, acc, input_precision="ieee", out_dtype=tl.float32)
        if chunk % 2 == 0:  # its neighbour to come, then the pair's, then the four's
            one = acc
        else:
            acc = one + acc
            if chunk % 4 == 1:
                two = acc
            else:
                acc = two + acc
                if chunk % 8 == 3:
                    four = acc
                else:
                    acc = four + acc
    out = out_ptr + (split.to(tl.int64) * M + rows[:, None]) * N + cols[None, :]
    tl.store(out, acc.to(out_ptr.dtype.element_ty), mask=in_m & in_n)


_SUMS_MOST = 512 * 2**20  # bytes of a product's splits


def tile_for(m: int, n: int, chunks: int, device: torch.device) -> ChunkTile:
    """A tile by the shape: wide ones for many rows, splits of K where there are too few tiles for the GPU.

    From 65 rows on a chunk has a program of its own, as long as memory suffices: waiting sums take registers, and a
    loop over four chunks took twice the time (docs/evidence/h100-x2/tiles.jsonl).
    """
    if m > 64:
        splits, wide = chunks, triton.cdiv(m, 128) * triton.cdiv(n, 256) * chunks >= multiprocessors(device)
        while splits > 1 and splits * m * n * 4 > _SUMS_MOST:
            splits //= 2
        return (
            ChunkTile(128, 256, 64, 8, 3, splits)
            if wide and splits == chunks
            else ChunkTile(128, 128, 64, 8, 4, splits)
        )
    shape = (16, 64, 128, 4, 4) if m <= 16 else (64, 64, 128, 4, 3)
    tiles, splits = triton.cdiv(m, shape[0]) * triton.cdiv(n, shape[1]), 1
    while splits < chunks and 2 * splits * tiles <= 3 * multiprocessors(device):
        splits *= 2
    return ChunkTile(*shape, splits)


def _tile(x: torch.Tensor, weight: torch.Tensor, chunks: int) -> ChunkTile:
    tile = tile_for(x.shape[0], weight.shape[0], chunks, x.device)
    even = tile.block_m > 64 and x.shape[1] // chunks % tile.block_k == 0
    return tile._replace(tma=even and rows_fit(weight) and tma_takes(x[None], weight.T[None]))


def chunk_products(
    x: torch.Tensor, weight: torch.Tensor, chunks: int, out: torch.Tensor, tile: ChunkTile | None = None
) -> torch.Tensor:
    """x [M, K] times weight [N, K] transposed, over `chunks` (1, 2, 4 or 8, a divisor of K) equal chunks of K -> out
    [M, N].

    float16, bfloat16 or float32 of one dtype; any strides. `out` is contiguous, float32 (the sum as it is) or x's dtype
    (rounded once). `tile`: None chooses one; the bits are the same.
    """
    m, n = x.shape[0], weight.shape[0]
    if out.numel() == 0:
        return out
    tile = tile or _tile(x, weight, chunks)
    if tile.splits == 1:
        _launch(x, weight, chunks, out, tile)
    else:
        parts = torch.empty(tile.splits, m, n, dtype=torch.float32, device=x.device)
        _launch(x, weight, chunks, parts, tile)
        reduce_peers(list(parts.view(tile.splits, -1).unbind(0)), out.view(-1), "tree")
    return out


def _launch(x: torch.Tensor, weight: torch.Tensor, chunks: int, target: torch.Tensor, tile: ChunkTile) -> None:
    (m, k), n = x.shape, weight.shape[0]
    size = k // chunks
    grid = (triton.cdiv(m, tile.block_m) * triton.cdiv(n, tile.block_n), tile.splits)
    operands: tuple[Any, Any] = x, weight
    if tile.tma:
        blocks = (tile.block_m, tile.block_k), (tile.block_n, tile.block_k)
        operands = tuple(
            TensorDescriptor(t, [*t.shape], [t.stride(0), 1], [*block])
            for t, block in zip((x, weight), blocks, strict=True)
        )
    with on_device(x):
        _chunk_products_kernel[grid](
            *(*operands, target, m, n, size, *x.stride(), weight.stride(1), weight.stride(0)),
            *(tile.block_m, tile.block_n, tile.block_k, 8, size % tile.block_k == 0, tile.tma, chunks // tile.splits),
            num_warps=tile.warps,
            num_stages=tile.stages,
        )


# Proof at first use of class "ranks-tree" on CUDA.
# The chunks' sums: the anchor takes chunk by chunk with one small tile, and adds the sums in plain torch along the
# tree. A member is the fused kernel with a tile (`chunk_products`). Its proof holds for any number of rows with this
# tile, because rows are independent in the kernel, and the proof has rows in full tiles and in a cut one. Each rank
# proves for itself; one whose tile is excluded takes the anchor, and the product keeps the bits of the class.
# The tree over ranks: the anchor gathers all ranks' sums and adds them in plain torch; all ranks prove and agree on
# `push`, `peers_one_shot` and `peers_two_shot` (`nondet.kernels.all_reduce.chain`).

ANCHOR_TILE = ChunkTile(16, 32, 64, 4, 3, 1)
_SPLITS = (1, 2, 4)  # of one rank of several, for `push` to add first
_KINDS = ("order", "order-wide", "wide", "bell")


def chunk_sum(x: torch.Tensor, weight: torch.Tensor, chunks: int, out: torch.Tensor) -> torch.Tensor:
    """x [M, K] times weight [N, K] transposed -> contiguous `out` [M, N] in float32 or x's dtype: chunks along their
    tree.
    """
    tile = _tile(x, weight, chunks)
    if tile_stands(x, weight, chunks, out.dtype, tile):
        return chunk_products(x, weight, chunks, out, tile)
    return chunk_by_chunk(x, weight, chunks, out)


def chunk_parts(x: torch.Tensor, weight: torch.Tensor, chunks: int) -> torch.Tensor:
    """float32 [splits, M, N], whose sum along a tree is that of `chunk_sum`, for a caller that adds further."""
    tile = _tile(x, weight, chunks)
    parts = torch.empty(tile.splits, x.shape[0], weight.shape[0], dtype=torch.float32, device=x.device)
    if tile_stands(x, weight, chunks, torch.float32, tile):
        _launch(x, weight, chunks, parts, tile)
        return parts
    chunk_by_chunk(x, weight, chunks, parts[0])
    return parts[:1]


def chunk_by_chunk(x: torch.Tensor, weight: torch.Tensor, chunks: int, out: torch.Tensor) -> torch.Tensor:
    """The anchor of `chunk_sum`: a launch per chunk, and the tree in plain torch."""
    size = x.shape[1] // chunks

    def total(first: int, count: int) -> torch.Tensor:
        if count > 1:
            return total(first, count // 2) + total(first + count // 2, count // 2)
        part = torch.empty(x.shape[0], weight.shape[0], dtype=torch.float32, device=x.device)
        at = slice(first * size, (first + 1) * size)
        return chunk_products(x[:, at], weight[:, at], 1, part, ANCHOR_TILE)

    return out.copy_(total(0, chunks))


@functools.cache
def _names(tile: ChunkTile, dtype: torch.dtype, out: torch.dtype, k: int, n: int, chunks: int) -> tuple[str, str]:
    given, gives = (str(d).removeprefix("torch.") for d in (dtype, out))
    member = f"chunks/{tile.block_m}x{tile.block_n}x{tile.block_k}/{tile.warps}.{tile.stages}/{tile.splits}"
    return member + "/tma" * tile.tma, f"ranks-tree | {given}[*,{k}] {given}[{n},{k}] | {chunks} chunks | {gives}"


def tile_stands(x: torch.Tensor, weight: torch.Tensor, chunks: int, out: torch.dtype, tile: ChunkTile) -> bool:
    """Whether the fused kernel has the anchor's bits with this tile; proven now if unknown, except during a capture."""
    (_, k), n = x.shape, weight.shape[0]
    member, key = _names(tile, x.dtype, out, k, n, chunks)
    store = certificates(x.device.type)

    def made(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
        return torch.empty(left.shape[0], right.shape[0], dtype=out, device=left.device)

    claim = Claim(member, key, lambda a, b: chunk_products(a, b, chunks, made(a, b), tile))

    def prove_now() -> bool | None:
        drawn = product_inputs((2 * tile.block_m + 3, n, k), x.dtype, x.device, kinds=_KINDS)
        inputs = ((kind, operands[:2]) for kind, operands in drawn)
        return prove([claim], lambda a, b: chunk_by_chunk(a, b, chunks, made(a, b)), inputs, store)[0]

    return bool(established(member, key, store, prove_now))


def gathered_tree(mine: torch.Tensor, out: torch.Tensor, group: dist.ProcessGroup) -> None:
    """The anchor of the tree over ranks: flat float32 sums of every rank, added in plain torch -> flat out."""
    world = dist.get_world_size(group)
    gathered = torch.empty(world * mine.numel(), dtype=torch.float32, device=mine.device)
    gather_into(gathered, mine, group)
    out.copy_(tree(gathered.view(world, -1).unbind(0)))


def reduce_stands(name: str, out: torch.dtype, device: torch.device, group: dist.ProcessGroup) -> bool:
    """Whether all ranks hold the reduction `name` proven, for results of dtype `out`. Called by all ranks."""
    key = f"ranks-tree {str(out).removeprefix('torch.')} W={dist.get_world_size(group)}"
    return agreed(name, key, device, group, partial(_prove_reduce, name, out, device, group))


def _prove_reduce(name: str, out: torch.dtype, device: torch.device, group: dist.ProcessGroup) -> tuple[bool, str]:
    from nondet.kernels.all_reduce import symmetric

    def pushed(mine: torch.Tensor, size: int) -> tuple[torch.Tensor, torch.Tensor]:
        box = symmetric.mailbox(group, device, size, 4)
        if box is None:
            raise NotImplementedError("no symmetric memory of this size")
        expected, got = (torch.empty(len(_SPLITS), size, dtype=out, device=device) for _ in range(2))
        for i, splits in enumerate(_SPLITS):
            parts = mine.view(-1, size)[:splits]
            gathered_tree(tree(parts.unbind(0)), expected[i], group)
            with box.turn():
                symmetric.push(parts, got[i], "tree", box)
        return expected, got

    def both(mine: torch.Tensor, size: int) -> tuple[torch.Tensor, torch.Tensor]:
        space = symmetric.workspace(group, device, (size + 4096) * 4)
        if space is None:
            raise NotImplementedError("no symmetric memory of this size")
        expected, got = (torch.empty(size, dtype=out, device=device) for _ in range(2))
        gathered_tree(mine, expected, group)
        with space.turn():
            space.flat(size, torch.float32).copy_(mine)
            getattr(symmetric, name)(size, torch.float32, got, "tree", space)
        return expected, got

    if name == "push":
        what = f"{{}} sums of {', '.join(map(str, _SPLITS))} parts"
        more = symmetric.counts_in_pieces(4, dist.get_world_size(group), narrowed=out.itemsize < 4)
        return prove_on_messages(pushed, what, torch.float32, device, group, max(_SPLITS), more)
    return prove_on_messages(both, "{} sums", torch.float32, device, group)
