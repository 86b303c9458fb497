"""Proof at first use of what class "ranks-tree" is computed by on CUDA: the chunks' sums here, and the tree over ranks.

The chunks' sums: the anchor takes chunk by chunk by one small tile, and adds the sums in plain torch along the tree. A
member is the fused kernel with a tile (`row_chunks_cuda`), proven at the first call that would take it, for any number
of rows that has this tile: rows are independent in the kernel, and the proof has rows in full tiles and in a cut one.
Each rank proves for itself; one whose tile is excluded takes the anchor, and the product keeps the bits of the class.

The tree over ranks: the anchor gathers everybody's sums and adds them in plain torch; `peers_one_shot` and
`peers_two_shot` are proven and agreed on by all ranks (`nondet.kernels.all_reduce.agreement`).
"""

from __future__ import annotations

import functools
from functools import partial

import torch
import torch.distributed as dist

from nondet.core.certificates import certificates
from nondet.core.compare import identical
from nondet.core.proof import Claim, product_inputs, prove
from nondet.kernels.all_reduce.agreement import agreed, together
from nondet.kernels.all_reduce.invariant import PROOF_KINDS, PROOF_SIZES, contributions
from nondet.kernels.all_reduce.members import gather_into
from nondet.kernels.all_reduce.orders import tree
from nondet.kernels.all_reduce.row_chunks_cuda import ChunkTile, chunk_products, tile_for

__all__ = ["ANCHOR_TILE", "REDUCES", "chunk_by_chunk", "chunk_sum", "gathered_tree", "reduce_stands", "tile_stands"]

ANCHOR_TILE = ChunkTile(16, 32, 64, 4, 3, 1)
REDUCES = ("peers_one_shot", "peers_two_shot")
_KINDS = ("order", "order-wide", "wide", "bell")


def chunk_sum(x: torch.Tensor, weight: torch.Tensor, chunks: int, out: torch.Tensor) -> torch.Tensor:
    """x [M, K] times weight [N, K] transposed -> out [M, N]: `chunks` chunks, added along their tree; see the module.

    Args:
        out: Contiguous, float32 or x's dtype.
    """
    tile = tile_for(x.shape[0], weight.shape[0], chunks, x.device)
    if tile_stands(x, weight, chunks, out.dtype, tile):
        return chunk_products(x, weight, chunks, out, tile)
    return chunk_by_chunk(x, weight, chunks, out)


def chunk_by_chunk(x: torch.Tensor, weight: torch.Tensor, chunks: int, out: torch.Tensor) -> torch.Tensor:
    """The anchor of `chunk_sum`: a launch a chunk, and the tree in plain torch."""
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
    """The member and the key of a certificate."""
    given, gives = (str(d).removeprefix("torch.") for d in (dtype, out))
    member = f"chunks/{tile.block_m}x{tile.block_n}x{tile.block_k}/{tile.warps}.{tile.stages}/{tile.splits}"
    return member, f"ranks-tree | {given}[*,{k}] {given}[{n},{k}] | {chunks} chunks | {gives}"


def tile_stands(x: torch.Tensor, weight: torch.Tensor, chunks: int, out: torch.dtype, tile: ChunkTile) -> bool:
    """Whether the fused kernel has the anchor's bits with this tile; proven now where nothing is known.

    While a CUDA graph is captured nothing can be proven: what is unknown then does not stand.
    """
    (_, k), n = x.shape, weight.shape[0]
    member, key = _names(tile, x.dtype, out, k, n, chunks)
    store = certificates(x.device.type)
    standing = store.standing(member, key)
    if standing is not None:
        return standing
    if x.is_cuda and torch.cuda.is_current_stream_capturing():
        return False

    def made(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
        return torch.empty(left.shape[0], right.shape[0], dtype=out, device=left.device)

    claim = Claim(member, key, lambda a, b: chunk_products(a, b, chunks, made(a, b), tile))
    rows = 2 * tile.block_m + 3
    with torch.no_grad():
        inputs = ((kind, o[:2]) for kind, o in product_inputs(rows, n, k, x.dtype, x.device, kinds=_KINDS))
        verdict = prove([claim], lambda a, b: chunk_by_chunk(a, b, chunks, made(a, b)), inputs, store)[0]
    return bool(verdict)


def gathered_tree(mine: torch.Tensor, out: torch.Tensor, group: dist.ProcessGroup) -> None:
    """The anchor of the tree over ranks: flat float32 sums of every rank, added in plain torch -> flat out."""
    world = dist.get_world_size(group)
    gathered = torch.empty(world * mine.numel(), dtype=torch.float32, device=mine.device)
    gather_into(gathered, mine, group)
    out.copy_(tree(gathered.view(world, -1).unbind(0)))


def reduce_stands(name: str, out: torch.dtype, device: torch.device, group: dist.ProcessGroup) -> bool:
    """Whether all ranks hold one of `REDUCES` proven, for results of dtype `out`. Called by all ranks."""
    key = f"ranks-tree {str(out).removeprefix('torch.')} W={dist.get_world_size(group)}"
    return agreed(name, key, device, group, partial(_prove_reduce, name, out, device, group))


def _prove_reduce(name: str, out: torch.dtype, device: torch.device, group: dist.ProcessGroup) -> tuple[bool, str]:
    from nondet.kernels.all_reduce import symmetric

    world, rank = dist.get_world_size(group), dist.get_rank(group)
    compared, apart = 0, ""
    for kind in PROOF_KINDS:
        for size in PROOF_SIZES[device.type]:
            space = symmetric.workspace(group, device, (size + 4096) * 4)
            if space is None:
                raise NotImplementedError("no symmetric memory of this size")
            mine = contributions(kind, world, size, torch.float32, device)[rank].contiguous()
            expected, got = (torch.empty(size, dtype=out, device=device) for _ in range(2))
            gathered_tree(mine, expected, group)
            with space.turn():
                space.flat(size, torch.float32).copy_(mine)
                getattr(symmetric, name)(size, torch.float32, got, "tree", space)
            if not apart and not identical(expected, got):
                apart = f"{kind}: {int((expected != got).sum())} of {size} elements differ"
            compared += size
    sizes = ", ".join(map(str, PROOF_SIZES[device.type]))
    evidence = f"{compared} elements equal on every rank, on {', '.join(PROOF_KINDS)}, {sizes} sums"
    return together(apart, evidence, device, group)
