"""FP8 products of class "chain-fp8" by Triton, and their proof.

Every program walks K from 0 on in steps of 128, whatever its tile: a step's products are added up by the matrix unit
in an accumulator that starts from zero, and the step's sum goes to a float32 total on the CUDA cores. So the order
depends neither on M, nor on the row's place, nor on the tile, as far as the matrix instructions of two tiles agree. On
Hopper they keep few bits of such sums, and mma.sync and wgmma need not agree: that is the hardware's affair, and each
tile is proven by bits against `anchor` at its first use on a machine (`nondet.core.certificates`). What is not proven
is not used; where the anchor's own tile is all there is, it serves.

On an H100 its bits did not follow the batch at two layers' sizes (docs/evidence/h100); elsewhere nothing is claimed
beyond what the proof at first use finds.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from functools import partial

import torch
import triton
import triton.language as tl

from nondet.core.certificates import certificates
from nondet.core.launch import note
from nondet.core.proof import PRODUCT_INPUTS, Claim, operands_key
from nondet.core.proof import prove as prove_by_bits
from nondet.kernels.matmul.triton_kernels import Tile, tile_offsets
from nondet.kernels.scaled import cpu
from nondet.kernels.scaled.functions import BLOCK, Operands, checked, laid_out, operands
from nondet.kernels.triton_common import INTERPRETED, on_device

# Triton reads a kernel's annotations itself: only tl.constexpr may stand there.
# mypy: allow-untyped-defs, allow-incomplete-defs

# block_k is the promotion interval: part of the class, the same for all.
TILES = (
    Tile(16, 64, BLOCK, 4, 4),
    Tile(32, 64, BLOCK, 4, 4),
    Tile(64, 64, BLOCK, 4, 4),
    Tile(64, 128, BLOCK, 4, 4),
    Tile(128, 128, BLOCK, 8, 3),
)
ANCHOR = TILES[2]
_ROWS_PROVEN = 140  # more than one tile's, and none's multiple


@triton.jit(do_not_specialize=["M"])
def _scaled_kernel(
    a_ptr,
    b_ptr,
    left_ptr,
    right_ptr,
    bias_ptr,
    out_ptr,
    M,
    N,
    K,
    stride_am,
    stride_ak,
    stride_bk,
    stride_bn,
    stride_lm,
    stride_ls,
    stride_rs,
    stride_rn,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCKED: tl.constexpr,
    BIAS: tl.constexpr,
):
    offs_m, offs_n = tile_offsets(tl.program_id(0), M, N, BLOCK_M, BLOCK_N, 8)
    offs_k = tl.arange(0, BLOCK_K)
    rows, cols = offs_m.to(tl.int64), offs_n.to(tl.int64)
    in_m, in_n = offs_m < M, offs_n < N
    total = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for k in range(0, K, BLOCK_K):
        ks = (k + offs_k).to(tl.int64)
        # zeros beyond the end add nothing
        a = tl.load(
            a_ptr + rows[:, None] * stride_am + ks[None, :] * stride_ak,
            mask=in_m[:, None] & (ks[None, :] < K),
            other=0.0,
        )
        b = tl.load(
            b_ptr + ks[:, None] * stride_bk + cols[None, :] * stride_bn,
            mask=in_n[None, :] & (ks[:, None] < K),
            other=0.0,
        )
        # a limit of its own keeps Triton from adding onto the total in the matrix unit, and from cutting the step
        part = tl.dot(a, b, out_dtype=tl.float32, max_num_imprecise_acc=BLOCK_K)
        if BLOCKED:
            left = tl.load(left_ptr + rows * stride_lm + (k // BLOCK_K) * stride_ls, mask=in_m, other=0.0)
            right = tl.load(right_ptr + (k // BLOCK_K) * stride_rs + cols * stride_rn, mask=in_n, other=0.0)
            part = part * (left[:, None] * right[None, :])
        total = total + part
    if not BLOCKED:
        left = tl.load(left_ptr + rows * stride_lm, mask=in_m, other=0.0)
        right = tl.load(right_ptr + cols * stride_rn, mask=in_n, other=0.0)
        total = total * (left[:, None] * right[None, :])
    if BIAS:
        total = total + tl.load(bias_ptr + cols, mask=in_n, other=0.0).to(tl.float32)[None, :]
    out = out_ptr + rows[:, None] * N + cols[None, :]
    tl.store(out, total.to(out_ptr.dtype.element_ty), mask=in_m[:, None] & in_n[None, :])


def tile_for(m: int) -> Tile:
    """The tile for m rows: few that hold no row."""
    return next((tile for tile in TILES[:3] if m <= tile.block_m), TILES[3] if m <= 256 else TILES[4])


def scaled_matmul(
    a: torch.Tensor,
    b: torch.Tensor,
    scale_a: torch.Tensor,
    scale_b: torch.Tensor,
    dtype: torch.dtype,
    bias: torch.Tensor | None = None,
    *,
    tile: Tile | None = None,
) -> torch.Tensor:
    """a [M, K] times b [K, N], float8_e4m3fn or float8_e5m2, with float32 scales -> [M, N] of the dtype. Any strides.

    Scales per tensor, per row, or in blocks; see `nondet.kernels.reference`. Order and invariance: top of this file. A
    bias [N] is added in float32 before the one rounding. Forward only.

    Args:
        tile: One of `TILES`, unproven; None chooses by M among those proven here.

    Raises:
        ValueError: shapes that do not fit.
        NotImplementedError: a device or dtype without a kernel, or no tile that is proven here.
    """
    blocked = checked(a, b, scale_a, scale_b, dtype)
    if not (a.is_cuda or INTERPRETED):
        raise NotImplementedError(f"scaled_matmul has no Triton kernel for device {a.device}; it runs on CUDA")
    if INTERPRETED and dtype == torch.bfloat16:
        raise NotImplementedError("scaled_matmul: Triton's interpreter computes bfloat16 wrongly; use float32")
    (M, K), N = a.shape, b.shape[1]
    out = torch.empty(M, N, device=a.device, dtype=dtype)
    if out.numel() == 0:
        return out
    if tile is None:
        tile = _proven(a, b, blocked, dtype, tile_for(M))
    left, right = laid_out(scale_a, scale_b, (M, K, N))
    note(f"scaled_matmul[{tile}{' blocks' if blocked else ''}]")
    with on_device(a):
        _scaled_kernel[(triton.cdiv(M, tile.block_m) * triton.cdiv(N, tile.block_n),)](
            *(a, b, left, right, out if bias is None else bias.contiguous(), out, M, N, K),
            *(*a.stride(), *b.stride(), *left.stride(), *right.stride()),
            BLOCK_M=tile.block_m,
            BLOCK_N=tile.block_n,
            BLOCK_K=BLOCK,
            BLOCKED=blocked,
            BIAS=bias is not None,
            num_warps=tile.warps,
            num_stages=tile.stages,
            enable_fp_fusion=False,
        )
    return out


# Expert by expert, by the proven kernel. No launch of its own, so that it is a matter of bits and not yet of speed.
scaled_grouped_matmul = partial(cpu.scaled_grouped_matmul, product=scaled_matmul)


def anchor(
    a: torch.Tensor, b: torch.Tensor, scale_a: torch.Tensor, scale_b: torch.Tensor, dtype: torch.dtype
) -> torch.Tensor:
    """The bits of the class: those of one tile."""
    return scaled_matmul(a, b, scale_a, scale_b, dtype, tile=ANCHOR)


def tile_members(dtype: str) -> dict[str, Callable[..., torch.Tensor]]:
    """Every tile, by name."""
    return {tile.name: partial(scaled_matmul, tile=tile) for tile in TILES}


def _proven(a: torch.Tensor, b: torch.Tensor, blocked: bool, dtype: torch.dtype, tile: Tile) -> Tile:
    """The tile if it is proven, now if need be; else the anchor's, if that gives the same bits again.

    Raises:
        NotImplementedError: neither is proven here, or nothing can be while a CUDA graph is captured.
    """
    if INTERPRETED:  # NumPy's products there: nothing about the hardware could be learnt
        return tile
    key = _written(a.dtype, b.dtype, dtype, *b.shape, a.stride(1), *b.stride(), blocked, _aligned(a, b))
    for one in dict.fromkeys((tile, ANCHOR)):
        member = f"triton {one.name}"
        holds = certificates().standing(member, key)
        if holds is None and not torch.cuda.is_current_stream_capturing():
            holds = _prove(a, b, blocked, dtype, Claim(member, key, partial(_run, one, dtype)))
        if holds:
            return one
    raise NotImplementedError("no FP8 product is proven to be of class chain-fp8 here, for these dtypes, K, N, layout")


@functools.lru_cache(maxsize=4096)
def _written(*facts: object) -> str:
    left, right, out, k, n, step, rows, columns, blocked, aligned = facts
    words = (str(left), str(right), f"into {out}", f"K={k} N={n}", f"a={step}", f"b={rows},{columns}")
    return operands_key("chain-fp8", (w.replace("torch.", "") for w in words), (f"blocks={blocked}", f"@{aligned}"))


def _aligned(a: torch.Tensor, b: torch.Tensor) -> int:
    """16 where both operands and their rows start at such a multiple of bytes, which Triton compiles for; else 1."""
    return 1 if (a.data_ptr() | b.data_ptr() | max(a.stride()) | max(b.stride())) % 16 else 16


def _run(tile: Tile, dtype: torch.dtype, *given: torch.Tensor) -> torch.Tensor:
    a, b, scale_a, scale_b = given
    whole = scaled_matmul(a, b, scale_a, scale_b, dtype, tile=tile)
    few = [scaled_matmul(a[:m], b, scale_a[:m], scale_b, dtype, tile=tile) for m in (1, 3)]
    return torch.cat([whole, *few])


def _prove(a: torch.Tensor, b: torch.Tensor, blocked: bool, dtype: torch.dtype, claim: Claim) -> bool | None:
    """Compare a tile with the anchor on hard inputs of b's sizes and layout: many rows, and the first ones alone."""

    def inputs() -> Iterator[tuple[str, Operands]]:
        sizes = (_ROWS_PROVEN, *b.shape)
        for kind in PRODUCT_INPUTS:
            left, right, *scales = operands(kind, "block" if blocked else "row", sizes, (a.dtype, b.dtype), a.device, 0)
            shift = 0 if _aligned(a, b) == 16 else 1
            yield kind, (_laid(left, a, shift), _laid(right, b, shift), scales[0], scales[1])

    def plain(*given: torch.Tensor) -> torch.Tensor:
        left, right, scale_a, scale_b = given
        whole = anchor(left, right, scale_a, scale_b, dtype)
        return torch.cat([whole, whole[:1], whole[:3]])

    with torch.no_grad():
        return prove_by_bits([claim], plain, inputs(), certificates())[0]


def _laid(x: torch.Tensor, like: torch.Tensor, shift: int) -> torch.Tensor:
    """x by rows or by columns as `like` is, so many bytes past an aligned address."""
    by_rows = like.stride(1) <= like.stride(0)
    flat = (x if by_rows else x.mT).contiguous()
    moved = torch.empty(flat.numel() + shift, dtype=torch.uint8, device=x.device)[shift:].view(flat.shape)
    laid = moved.copy_(flat.view(torch.uint8)).view(x.dtype)
    return laid if by_rows else laid.mT
