"""Matrix products of one numerics class, "chain", on CUDA: batch-invariant for every tile.

The order of reduction is the class: every element of the result is one chain over K, walked from 0 to K - 1 in one
accumulator, rounded once at the end. It depends neither on M, nor on the row's place, nor on the tile, so the tile is
chosen by the shape, and only by speed. That narrow mma.sync tiles and wide wgmma tiles give equal bits is a property of
the hardware, not of the source: scripts/check_kernels_gpu.py proves it on the machine at hand. Measured on an H200
(sm_90) with Triton 3.6, bfloat16 and float16 accumulate alike in both instructions and for BLOCK_K from 16 to 128;
BLOCK_K is fixed all the same, because other chips cut K inside an instruction differently.

float32 goes through fused multiply-adds, one k after the other (input_precision="ieee"; never TF32), and float64
through the float64 matrix instructions. Both gave equal bits for all tiles tried there, 46 and 18 of them.
"""

# Triton reads a kernel's annotations itself: only tl.constexpr may stand there.
# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from nondet.kernels.launch import note
from nondet.kernels.triton_common import accumulator, on_device, require

__all__ = ["Tile", "chain", "linear", "matmul", "matmul_chain", "tile_for", "tiles"]

_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


class Tile(NamedTuple):
    """What a launch may choose, and the bits stay; block_k, the one size along K, is a single number for each dtype."""

    block_m: int
    block_n: int
    block_k: int
    warps: int
    stages: int

    def __str__(self) -> str:
        return f"{self.block_m}x{self.block_n}x{self.block_k}"


_HALF_TILES = (
    Tile(16, 32, 64, 4, 6),
    Tile(16, 64, 64, 4, 5),
    Tile(32, 32, 64, 4, 5),
    Tile(32, 64, 64, 4, 5),
    Tile(64, 32, 64, 4, 5),
    Tile(64, 64, 64, 4, 4),
    Tile(64, 128, 64, 4, 4),
    Tile(128, 128, 64, 8, 4),
    Tile(128, 256, 64, 8, 3),
)
_FLOAT_TILES = (Tile(16, 64, 32, 4, 3), Tile(64, 64, 32, 4, 3))
_DOUBLE_TILES = (Tile(16, 32, 32, 4, 2),)


def tiles(dtype: torch.dtype) -> tuple[Tile, ...]:
    """Every tile that may be launched for the dtype: the members of the class."""
    if dtype == torch.float64:
        return _DOUBLE_TILES
    return _FLOAT_TILES if dtype == torch.float32 else _HALF_TILES


def tile_for(m: int, n: int, dtype: torch.dtype) -> Tile:
    """The tile for an [m, K] x [K, n] product: few wasted rows, and programs enough to fill a large GPU."""
    if dtype == torch.float64:
        return _DOUBLE_TILES[0]
    if dtype == torch.float32:
        return _FLOAT_TILES[0 if m <= 16 else 1]
    wide = n > 8192
    if m <= 16:
        return _HALF_TILES[1 if wide else 0]
    if m <= 32:
        return _HALF_TILES[3 if wide else 2]
    if m <= 64:
        return _HALF_TILES[6 if wide else 4]
    for tile in (_HALF_TILES[8], _HALF_TILES[7]):
        if triton.cdiv(m, tile.block_m) * triton.cdiv(n, tile.block_n) >= 128:
            return tile
    return _HALF_TILES[5]


@triton.jit
def chain(
    a_ptr,
    b_ptr,
    offs_m,
    offs_n,
    k_lo,
    k_hi,
    M,
    N,
    stride_am,
    stride_ak,
    stride_bk,
    stride_bn,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    EVEN_K: tl.constexpr,
    ACC: tl.constexpr,
):
    """The sum over k_lo <= k < k_hi, in order, from zero, in one accumulator: ACC [BLOCK_M, BLOCK_N]."""
    offs_k = tl.arange(0, BLOCK_K)
    rows = offs_m.to(tl.int64)  # an operand may hold more than 2^31 elements
    cols = offs_n.to(tl.int64)
    ks = (k_lo + offs_k).to(tl.int64)
    a_ptrs = a_ptr + rows[:, None] * stride_am + ks[None, :] * stride_ak
    b_ptrs = b_ptr + ks[:, None] * stride_bk + cols[None, :] * stride_bn
    in_m = offs_m[:, None] < M
    in_n = offs_n[None, :] < N
    acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=ACC)
    for k in range(k_lo, k_hi, BLOCK_K):
        if EVEN_K:
            a = tl.load(a_ptrs, mask=in_m, other=0.0)
            b = tl.load(b_ptrs, mask=in_n, other=0.0)
        else:
            # Zeros beyond the end add nothing: the sum is exact where one side is zero.
            a = tl.load(a_ptrs, mask=in_m & (offs_k[None, :] < k_hi - k), other=0.0)
            b = tl.load(b_ptrs, mask=in_n & (offs_k[:, None] < k_hi - k), other=0.0)
        acc = tl.dot(a, b, acc, input_precision="ieee", out_dtype=ACC)
        a_ptrs += BLOCK_K * stride_ak
        b_ptrs += BLOCK_K * stride_bk
    return acc


@triton.jit
def tile_offsets(pid, M, N, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, GROUP_M: tl.constexpr):
    """Rows and columns of a tile. Tiles go down GROUP_M rows before they go right, so that L2 serves both operands."""
    tiles_m = tl.cdiv(M, BLOCK_M)
    in_group = GROUP_M * tl.cdiv(N, BLOCK_N)
    first_m = pid // in_group * GROUP_M
    group_m = tl.minimum(tiles_m - first_m, GROUP_M)
    pid_m = first_m + (pid % in_group) % group_m
    pid_n = (pid % in_group) // group_m
    return pid_m * BLOCK_M + tl.arange(0, BLOCK_M), pid_n * BLOCK_N + tl.arange(0, BLOCK_N)


@triton.jit(do_not_specialize=["M"])
def _matmul_chain_kernel(
    a_ptr,
    b_ptr,
    bias_ptr,
    out_ptr,
    M,
    N,
    K,
    stride_ab,
    stride_am,
    stride_ak,
    stride_bb,
    stride_bk,
    stride_bn,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr,
    EVEN_K: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    ACC: tl.constexpr,
):
    pid = tl.program_id(0)
    per_product = tl.cdiv(M, BLOCK_M) * tl.cdiv(N, BLOCK_N)
    batch = (pid // per_product).to(tl.int64)
    offs_m, offs_n = tile_offsets(pid % per_product, M, N, BLOCK_M, BLOCK_N, GROUP_M)
    acc = chain(
        a_ptr + batch * stride_ab,
        b_ptr + batch * stride_bb,
        offs_m,
        offs_n,
        0,
        K,
        M,
        N,
        stride_am,
        stride_ak,
        stride_bk,
        stride_bn,
        BLOCK_M,
        BLOCK_N,
        BLOCK_K,
        EVEN_K,
        ACC,
    )
    if HAS_BIAS:
        acc += tl.load(bias_ptr + offs_n, mask=offs_n < N, other=0.0).to(ACC)[None, :]
    out = out_ptr + (batch * M + offs_m[:, None]) * N + offs_n[None, :]
    tl.store(out, acc.to(out_ptr.dtype.element_ty), mask=(offs_m[:, None] < M) & (offs_n[None, :] < N))


def matmul_chain(
    a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None = None, tile: Tile | None = None
) -> torch.Tensor:
    """a [B, M, K] times b [B, K, N], plus bias [N] -> [B, M, N], each element one chain over K.

    Accumulates in float32 (float64 for float64); the bias is added there; one rounding at the end.

    Args:
        tile: One of `tiles(dtype)`, to ask for; None chooses by M and N. The bits are the same.
    """
    (batch, m, k), n = a.shape, b.shape[2]
    out = torch.empty(batch, m, n, device=a.device, dtype=a.dtype)
    if out.numel() == 0:
        return out
    tile = tile or tile_for(m, n, a.dtype)
    # A stride of 0 keeps the alignment of the operands visible to the compiler, whatever M is.
    batch_strides = (a.stride(0), b.stride(0)) if batch > 1 else (0, 0)
    note(f"matmul_chain[{tile}]")
    with on_device(a):
        _matmul_chain_kernel[(batch * triton.cdiv(m, tile.block_m) * triton.cdiv(n, tile.block_n),)](
            a,
            b,
            bias,
            out,
            m,
            n,
            k,
            batch_strides[0],
            *a.stride()[1:],
            batch_strides[1],
            *b.stride()[1:],
            BLOCK_M=tile.block_m,
            BLOCK_N=tile.block_n,
            BLOCK_K=tile.block_k,
            GROUP_M=8,
            EVEN_K=k % tile.block_k == 0,
            HAS_BIAS=bias is not None,
            ACC=accumulator(a.dtype),
            num_warps=tile.warps,
            num_stages=tile.stages,
        )
    return out


def matmul(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """a [M, K] times b [K, N] -> [M, N], or batched, a [B, M, K] times b [B, K, N] -> [B, M, N]. Any strides.

    float16, bfloat16 and float32 (accumulated in float32) or float64 (in float64); both operands of one dtype. The
    order is a chain over K in one accumulator, rounded once, so the result is batch- and position-invariant (see the
    module). Forward only.

    Raises:
        NotImplementedError: a device or dtype without a kernel.
        ValueError: shapes that do not fit.
    """
    if a.ndim != b.ndim or a.ndim not in (2, 3) or a.shape[-1] != b.shape[-2] or a.shape[:-2] != b.shape[:-2]:
        raise ValueError(
            f"matmul takes [M, K] x [K, N] or [B, M, K] x [B, K, N], got {tuple(a.shape)} x {tuple(b.shape)}"
        )
    require("matmul", _DTYPES, a, b)
    if a.ndim == 2:
        return matmul_chain(a[None], b[None])[0]
    return matmul_chain(a, b)


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """x [..., K] times weight [N, K] transposed, plus bias [N] -> [..., N].

    Dtypes, order and invariance as `matmul`; the bias is added in the accumulator, before the one rounding.

    Raises:
        NotImplementedError: a device or dtype without a kernel.
        ValueError: shapes that do not fit.
    """
    if weight.ndim != 2 or x.ndim < 1 or x.shape[-1] != weight.shape[1]:
        raise ValueError(f"linear takes [..., K] and [N, K], got {tuple(x.shape)} and {tuple(weight.shape)}")
    if bias is not None:
        if bias.shape != weight.shape[:1]:
            raise ValueError(f"linear takes a bias [{weight.shape[0]}], got {tuple(bias.shape)}")
        require("linear", _DTYPES, x, bias)
        bias = bias.contiguous()
    require("linear", _DTYPES, x, weight)
    rows = x.reshape(x.shape[:-1].numel(), x.shape[-1])
    return matmul_chain(rows[None], weight.T[None], bias)[0].view(*x.shape[:-1], weight.shape[0])
