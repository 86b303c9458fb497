"""Row-parallel products whose bits do not depend on the number of ranks: the class "ranks-tree".

y = x w^T, with K cut over the ranks of a group. K is cut into CHUNKS equal chunks for every number of ranks; a chunk's
sum is accumulated in float32, and the chunks' sums are added in float32 along one binary tree over all of K, then a
bias, then one rounding. With 1, 2, 4 or 8 ranks a rank holds a whole subtree, so the bits are those of one rank that
holds it all. A chunk's sum is a chain on CUDA, proven at first use (`nondet.kernels.all_reduce.tree_cuda`); on a CPU it
is the invariant float32 product of the chunk (`nondet.kernels.matmul.cpu`), whose order belongs to the chunk's shape.

The idea is that of TBIK (arXiv 2511.17826). It costs a float32 message, twice the bytes, and a product that can't be
one chain. Forward only.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from nondet.core.launch import note
from nondet.kernels.all_reduce.chain import gather_into
from nondet.kernels.all_reduce.orders import tree

CHUNKS = 8
_DTYPES = (torch.float16, torch.bfloat16, torch.float32)
_ONE_SHOT_BYTES = 2**20  # of float32 sums; above, each rank adds only its share
_PUSH_BYTES = 8 * 2**20  # of float32 sums of more than two ranks; `push` took longer at 16 MiB (docs/evidence/h200-x4)


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """x [..., K] times weight [N, K] transposed, plus bias -> [..., N], all of it on one rank; see `row_parallel`."""
    return row_parallel(x, weight, bias, None)


def row_parallel(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, group: dist.ProcessGroup | None
) -> torch.Tensor:
    """The whole product of a layer whose K is cut over the ranks of `group`, on every rank: [..., N] in x's dtype.

    It has the same bits on all ranks and for every number of ranks. `group`: None is one rank.

    Args:
        x: [..., K / ranks], this rank's part; float16, bfloat16 or float32.
        weight: [N, K / ranks], this rank's part, of x's dtype.
        bias: [N], the same on all ranks; added in float32, before the one rounding.

    Raises:
        NotImplementedError: the dtype; CHUNKS is not a multiple of the ranks; the chunks don't divide K.
        ValueError: shapes that do not fit.
    """
    world = 1 if group is None else dist.get_world_size(group)
    if weight.ndim != 2 or x.ndim < 1 or x.shape[-1] != weight.shape[1] or x.dtype != weight.dtype:
        raise ValueError(
            f"row_parallel takes [..., K] and [N, K] of one dtype, got {tuple(x.shape)} and {tuple(weight.shape)}"
        )
    if x.dtype not in _DTYPES:
        raise NotImplementedError(f"no class of {x.dtype} that is free of ranks")
    if world & (world - 1) or CHUNKS % world:
        raise NotImplementedError(f"{world} ranks do not divide the {CHUNKS} chunks of K")
    chunks = CHUNKS // world
    if x.shape[-1] == 0 or x.shape[-1] % chunks:
        raise NotImplementedError(f"K = {x.shape[-1] * world} is no multiple of {CHUNKS} chunks")
    rows = x.reshape(-1, x.shape[-1])
    note(f"row_parallel[{CHUNKS} chunks, {world} ranks]")
    if world == 1 and bias is None and x.device.type == "cuda":
        out = torch.empty(rows.shape[0], weight.shape[0], dtype=x.dtype, device=x.device)
        return local_sum(rows, weight, chunks, out).view(*x.shape[:-1], -1)
    dtype = x.dtype if bias is None else torch.float32
    total = torch.empty(rows.shape[0], weight.shape[0], dtype=dtype, device=x.device)
    if group is None or world == 1:
        total.copy_(local_sum(rows, weight, chunks))
    else:
        tree_reduce(rows, weight, chunks, total, group)
    if bias is not None:
        total = (total + bias.float()).to(x.dtype)
    return total.view(*x.shape[:-1], weight.shape[0])


def local_sum(x: torch.Tensor, weight: torch.Tensor, chunks: int, out: torch.Tensor | None = None) -> torch.Tensor:
    """The sum of this rank's chunks along their tree, float32 [M, N], or in `out`, rounded to its dtype."""
    if x.device.type == "cuda":
        from nondet.kernels.all_reduce.tree_cuda import chunk_sum

        if out is None:
            out = torch.empty(x.shape[0], weight.shape[0], dtype=torch.float32, device=x.device)
        return chunk_sum(x, weight, chunks, out)
    from nondet.kernels.matmul import cpu

    parts = [
        cpu.linear(left.float().contiguous(), right.float().contiguous())
        for left, right in zip(x.chunk(chunks, -1), weight.chunk(chunks, -1), strict=True)
    ]
    total = tree(parts)
    return total if out is None else out.copy_(total)


def tree_reduce(
    x: torch.Tensor, weight: torch.Tensor, chunks: int, out: torch.Tensor, group: dist.ProcessGroup
) -> None:
    """All ranks' chunks, added along the tree, into `out` [M, N] (float32 or x's dtype)."""
    count, world = out.numel(), dist.get_world_size(group)
    if count == 0:
        return
    if x.device.type != "cuda":
        gathered = torch.empty(world * count, dtype=torch.float32, device=x.device)
        gather_into(gathered, local_sum(x, weight, chunks).view(-1), group)
        out.view(-1).copy_(tree(gathered.view(world, count).unbind(0)))
        return
    from nondet.kernels.all_reduce import symmetric
    from nondet.kernels.all_reduce.tree_cuda import chunk_parts, gathered_tree, reduce_stands

    if symmetric.available(group, x.device):
        box = space = None
        pushed = world == 2 or count * 4 <= _PUSH_BYTES
        if pushed and reduce_stands("push", out.dtype, x.device, group):
            box = symmetric.mailbox(group, x.device, count, 4)
        if box is not None:
            parts = chunk_parts(x, weight, chunks)
            with box.turn():
                symmetric.push(parts, out.view(-1), "tree", box)
            return
        name = "peers_one_shot" if count * 4 <= _ONE_SHOT_BYTES else "peers_two_shot"
        if reduce_stands(name, out.dtype, x.device, group):
            space = symmetric.workspace(group, x.device, (count + 4096) * 4)
        if space is not None:
            with space.turn():
                local_sum(x, weight, chunks, space.flat(count, torch.float32).view_as(out))
                getattr(symmetric, name)(count, torch.float32, out.view(-1), "tree", space)
            return
    gathered_tree(local_sum(x, weight, chunks).view(-1), out.view(-1), group)
