"""Matrix products of one numerics class, "chain", on CUDA: batch-invariant for every tile.

The order of reduction is the class: every element of the result is one chain over K, walked from 0 to K - 1 in one
accumulator, rounded once at the end. It depends neither on M, nor on the row's place, nor on the tile, so the tile may
be chosen by the shape, and only by speed. That narrow mma.sync tiles and wide wgmma tiles give equal bits is a property
of the hardware, not of the source. Measured on an H200 (sm_90) with Triton 3.6, bfloat16 and float16 accumulate alike
in both instructions and for BLOCK_K from 16 to 256; another chip may cut K inside an instruction differently, so
`nondet.kernels.matmul.cuda` proves each tile against `anchor` on the machine at hand before it uses it.

float32 goes through fused multiply-adds, one k after the other (input_precision="ieee"), and float64 through the
float64 matrix instructions. float32 operands rounded to TF32 (`tf32=True`) are a class of their own, "chain-tf32".
"""

# Triton reads a kernel's annotations itself: only tl.constexpr may stand there.
# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl

from nondet.core.launch import note
from nondet.kernels.matmul.cuda_tiles import Tile, anchor, tile_for, tile_named, tiles
from nondet.kernels.triton_common import accumulator, on_device, require

__all__ = [
    "Tile",
    "anchor",
    "bind_chain",
    "chain",
    "linear",
    "linear_operands",
    "matmul",
    "matmul_chain",
    "matmul_operands",
    "tile_at",
    "tile_for",
    "tile_named",
    "tile_offsets",
    "tiles",
]

_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


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
    PRECISION: tl.constexpr = "ieee",
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
    step = tl.full((), BLOCK_K, tl.int64)  # times a stride, beyond 2^31 as well
    acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=ACC)
    for k in range(k_lo, k_hi, BLOCK_K):
        if EVEN_K:
            a = tl.load(a_ptrs, mask=in_m, other=0.0)
            b = tl.load(b_ptrs, mask=in_n, other=0.0)
        else:
            # Zeros beyond the end add nothing: the sum is exact where one side is zero.
            a = tl.load(a_ptrs, mask=in_m & (offs_k[None, :] < k_hi - k), other=0.0)
            b = tl.load(b_ptrs, mask=in_n & (offs_k[:, None] < k_hi - k), other=0.0)
        acc = tl.dot(a, b, acc, input_precision=PRECISION, out_dtype=ACC)
        a_ptrs += step * stride_ak
        b_ptrs += step * stride_bk
    return acc


@triton.jit
def tile_at(pid, M, N, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, GROUP_M: tl.constexpr):
    """A tile's first row and column: down GROUP_M tiles before it goes right, so that L2 serves both operands."""
    tiles_m = tl.cdiv(M, BLOCK_M)
    in_group = GROUP_M * tl.cdiv(N, BLOCK_N)
    first_m = pid // in_group * GROUP_M
    group_m = tl.minimum(tiles_m - first_m, GROUP_M)
    pid_m = first_m + (pid % in_group) % group_m
    pid_n = (pid % in_group) // group_m
    return pid_m * BLOCK_M, pid_n * BLOCK_N


@triton.jit
def tile_offsets(pid, M, N, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, GROUP_M: tl.constexpr):
    """Rows and columns of a tile, in the order of `tile_at`."""
    row, col = tile_at(pid, M, N, BLOCK_M, BLOCK_N, GROUP_M)
    return row + tl.arange(0, BLOCK_M), col + tl.arange(0, BLOCK_N)


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
    PRECISION: tl.constexpr,
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
        PRECISION,
    )
    if HAS_BIAS:
        acc += tl.load(bias_ptr + offs_n, mask=offs_n < N, other=0.0).to(ACC)[None, :]
    out = out_ptr + (batch * M + offs_m[:, None]) * N + offs_n[None, :]
    tl.store(out, acc.to(out_ptr.dtype.element_ty), mask=(offs_m[:, None] < M) & (offs_n[None, :] < N))


def bind_chain(
    a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None, tile: Tile, *, tf32: bool = False
) -> Callable[[torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor], None]:
    """A launcher for products of these very shapes, strides, dtypes and (16-byte) alignment; see `matmul_chain`.

    The first call compiles the kernel as Triton would, later ones hand it its arguments and nothing else: Triton's own
    way to find the kernel again takes several times as long as the rest of a launch.
    """
    (batch, m, k), n = a.shape, b.shape[2]
    grid = (batch * triton.cdiv(m, tile.block_m) * triton.cdiv(n, tile.block_n), 1, 1)
    # A stride of 0 keeps the alignment of the operands visible to the compiler, whatever M is.
    batch_strides = (a.stride(0), b.stride(0)) if batch > 1 else (0, 0)
    sizes = (m, n, k, batch_strides[0], *a.stride()[1:], batch_strides[1], *b.stride()[1:])
    even_k, has_bias = k % tile.block_k == 0, bias is not None
    precision = "tf32" if tf32 else "ieee"
    constants = (tile.block_m, tile.block_n, tile.block_k, 8, even_k, has_bias, accumulator(a.dtype), precision)
    kernel: Any = None

    def launch(a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor) -> None:
        nonlocal kernel
        if kernel is not None:
            kernel[grid](a, b, bias, out, *sizes, *constants)
            return
        kernel = _matmul_chain_kernel[grid](
            a, b, bias, out, *sizes, *constants, num_warps=tile.warps, num_stages=tile.stages
        )  # the interpreter gives None, and so takes this way each time

    return launch


def matmul_chain(
    a: torch.Tensor,
    b: torch.Tensor,
    bias: torch.Tensor | None = None,
    tile: Tile | None = None,
    *,
    tf32: bool = False,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """a [B, M, K] times b [B, K, N], plus bias [N] -> [B, M, N], each element one chain over K.

    Accumulates in float32 (float64 for float64); the bias is added there; one rounding at the end. Without rows or
    columns the result is empty; with K = 0 it is the bias, or zeros.

    Args:
        tile: A member of the class to ask for; None takes `tile_for`. The bits are the same.
        tf32: Round float32 operands to TF32: the class "chain-tf32".
        out: Where to put the result, contiguous [B, M, N]; None makes it.
    """
    (batch, m, _), n = a.shape, b.shape[2]
    if out is None:
        out = torch.empty(batch, m, n, device=a.device, dtype=a.dtype)
    if out.numel() == 0:
        return out
    tile = tile or tile_for(m, n, a.dtype)
    note(f"matmul_chain[{tile}]")
    with on_device(a):
        bind_chain(a, b, bias, tile, tf32=tf32)(a, b, bias, out)
    return out


def matmul_operands(a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """a and b of `matmul` as [B, M, K] and [B, K, N], refused where the kernels can't take them; see `matmul`."""
    if a.ndim != b.ndim or a.ndim not in (2, 3) or a.shape[-1] != b.shape[-2] or a.shape[:-2] != b.shape[:-2]:
        raise ValueError(
            f"matmul takes [M, K] x [K, N] or [B, M, K] x [B, K, N], got {tuple(a.shape)} x {tuple(b.shape)}"
        )
    require("matmul", _DTYPES, a, b)
    return (a[None], b[None]) if a.ndim == 2 else (a, b)


def linear_operands(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """x, weight and bias of `linear` as [1, M, K], [1, K, N] and [N], refused where the kernels can't take them."""
    if weight.ndim != 2 or x.ndim < 1 or x.shape[-1] != weight.shape[1]:
        raise ValueError(f"linear takes [..., K] and [N, K], got {tuple(x.shape)} and {tuple(weight.shape)}")
    if bias is not None:
        if bias.shape != weight.shape[:1]:
            raise ValueError(f"linear takes a bias [{weight.shape[0]}], got {tuple(bias.shape)}")
        require("linear", _DTYPES, x, bias)
        bias = bias.contiguous()
    require("linear", _DTYPES, x, weight)
    return x.reshape(1, x.shape[:-1].numel(), x.shape[-1]), weight.T[None], bias


def matmul(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """a [M, K] times b [K, N] -> [M, N], or batched, a [B, M, K] times b [B, K, N] -> [B, M, N]. Any strides.

    float16, bfloat16 and float32 (accumulated in float32) or float64 (in float64); both operands of one dtype. The
    order is a chain over K in one accumulator, rounded once, so the result is batch- and position-invariant (see the
    module). Forward only.

    Raises:
        NotImplementedError: a device or dtype without a kernel.
        ValueError: shapes that do not fit.
    """
    out = matmul_chain(*matmul_operands(a, b))
    return out[0] if a.ndim == 2 else out


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """x [..., K] times weight [N, K] transposed, plus bias [N] -> [..., N].

    Dtypes, order and invariance as `matmul`; the bias is added in the accumulator, before the one rounding.

    Raises:
        NotImplementedError: a device or dtype without a kernel.
        ValueError: shapes that do not fit.
    """
    return matmul_chain(*linear_operands(x, weight, bias))[0].view(*x.shape[:-1], weight.shape[0])
