"""Matrix products of class "chain" by Triton: the tiles, the anchor that defines the bits, and operands by TMA.

Functions raise NotImplementedError for a device or dtype without a kernel, and ValueError for shapes that do not fit.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from nondet.core.launch import note
from nondet.kernels.triton_common import HALF, INTERPRETED, accumulator, capability, on_device, require


class Tile(NamedTuple):
    """What a launch may choose without changing a bit."""

    block_m: int
    block_n: int
    block_k: int
    warps: int
    stages: int

    def __str__(self) -> str:
        return f"{self.block_m}x{self.block_n}x{self.block_k}"

    @property
    def name(self) -> str:
        """All of it, as "16x32x128w4s5": w for warps, s for stages."""
        return f"{self}w{self.warps}s{self.stages}"


def tile_named(name: str) -> Tile:
    """The tile with that `Tile.name`. Raises ValueError: not a name of a tile."""
    match = re.fullmatch(r"(\d+)x(\d+)x(\d+)w(\d+)s(\d+)", name)
    if match is None:
        raise ValueError(f"{name!r} names no tile; one is called like 16x32x128w4s5")
    return Tile(*map(int, match.groups()))


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
    """Tiles for any shape of the dtype, a few of the class's many members: for measuring and proving."""
    if dtype == torch.float64:
        return _DOUBLE_TILES
    return _FLOAT_TILES if dtype == torch.float32 else _HALF_TILES


def anchor(dtype: torch.dtype) -> Tile:
    """The tile whose bits define the class: every other member is compared with it."""
    if dtype == torch.float64:
        return _DOUBLE_TILES[0]
    return _FLOAT_TILES[1] if dtype == torch.float32 else _HALF_TILES[5]


def tile_for(m: int, n: int, dtype: torch.dtype) -> Tile:
    """A reasonable tile for an [m, K] x [K, n] product: few wasted rows, and enough programs to fill a large GPU."""
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
        if -(-m // tile.block_m) * -(-n // tile.block_n) >= 128:
            return tile
    return _HALF_TILES[5]


# Class "chain": every element of the result is one chain over K, from 0 to K - 1 in one accumulator, rounded once at
# the end. It depends neither on M, nor on the row's position, nor on the tile, so the shape may choose the tile, which
# changes only speed. That narrow mma.sync tiles and wide wgmma tiles give equal bits is a property of the hardware.
# Measured on an H200 (sm_90) with Triton 3.6, bfloat16 and float16 accumulate alike in both instructions and for
# BLOCK_K from 16 to 256; another chip may cut K inside an instruction differently, so `nondet.kernels.matmul.cuda`
# proves each tile against `anchor` on the machine before it uses it.
# float32 uses fused multiply-adds, one k after another (input_precision="ieee"), and float64 the float64 matrix
# instructions. float32 operands rounded to TF32 (`tf32=True`) are a class of their own, "chain-tf32".

# Triton reads a kernel's annotations itself and allows only tl.constexpr.
# mypy: allow-untyped-defs, allow-incomplete-defs


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
    return acc + 0.0  # where all products underflow, one kind of member leaves -0, another +0: then it is +0 in all


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
    """A launcher for products of exactly these shapes, strides, dtypes and (16-byte) alignment; see `matmul_chain`.

    The first call compiles the kernel as Triton would, later ones only pass its arguments, because Triton's own lookup
    takes several times as long as the rest of a launch.
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
        )  # the interpreter gives None, and so comes here each time

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
    columns the result is empty; with K = 0 it is the bias, or zeros. `tile`: None takes `tile_for`; the bits are the
    same. `tf32`: round float32 operands to TF32, the class "chain-tf32". `out`: contiguous [B, M, N], or None.
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
    """a and b of `matmul` as [B, M, K] and [B, K, N], refused where the kernels can't take them."""
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


# Class "chain" with operands loaded by the tensor memory accelerator: the Triton member for many rows on Hopper.
# One thread requests a whole tile instead of every thread its part; the order of reduction is the same. On an H200 this
# is 1.25 to 1.5 times as fast as the other kernel from 512 rows on (128x128x64 tiles, 4 warps) and has 0.6 to 1.0 of
# cuBLASLt's speed; it computes large products where cuBLASLt is excluded, and is the fastest of all at a few small ones
# (1024 x 1024, 32 to 256 rows).


TMA_TILES = (Tile(64, 32, 128, 4, 5), Tile(64, 64, 128, 4, 4), Tile(128, 128, 64, 4, 4), Tile(128, 256, 64, 8, 4))


@triton.jit(do_not_specialize=["M"])
def _matmul_chain_tma_kernel(
    a_desc,
    b_desc,
    bias_ptr,
    out_ptr,
    M,
    N,
    K,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr,
    B_ROWS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
):
    """a [M, K] by rows; b [K, N] by rows (B_ROWS) or as [N, K] by rows. Descriptors give zeros outside of both."""
    row, col = tile_at(tl.program_id(0), M, N, BLOCK_M, BLOCK_N, GROUP_M)
    acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for k in range(0, K, BLOCK_K):
        a = a_desc.load([row, k])
        b = b_desc.load([k, col]) if B_ROWS else b_desc.load([col, k]).T
        acc = tl.dot(a, b, acc)
    offs_m = row + tl.arange(0, BLOCK_M)
    offs_n = col + tl.arange(0, BLOCK_N)
    if HAS_BIAS:
        acc += tl.load(bias_ptr + offs_n, mask=offs_n < N, other=0.0).to(tl.float32)[None, :]
    out = out_ptr + offs_m.to(tl.int64)[:, None] * N + offs_n[None, :]
    tl.store(out, acc.to(out_ptr.dtype.element_ty), mask=(offs_m[:, None] < M) & (offs_n[None, :] < N))


def rows_fit(x: torch.Tensor) -> bool:
    """Whether the accelerator can read the rows: contiguous, 16-byte-aligned, at 16-byte distances."""
    return x.stride(1) == 1 and x.stride(0) >= x.shape[1] and (x.stride(0) * x.element_size()) % 16 == 0


def tma_takes(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether the kernel can multiply a [1, M, K] and b [1, K, N]: half precision, readable rows or columns of b."""
    if a.shape[0] != 1 or a.dtype not in HALF or 0 in (*a.shape, *b.shape):
        return False
    if not INTERPRETED and capability(a.device) < (9, 0):
        return False
    if (a.data_ptr() | b.data_ptr()) % 16:
        return False
    return rows_fit(a[0]) and (rows_fit(b[0]) or rows_fit(b[0].T))


def bind_tma(
    a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None, tile: Tile
) -> Callable[[torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor], None]:
    """A launcher of a [1, M, K] x b [1, K, N] (+ bias [N]) -> out [1, M, N] for exactly these shapes, strides and
    dtypes.
    """
    (_, m, k), n = a.shape, b.shape[2]
    b_rows = rows_fit(b[0])
    a_strides = [a.stride(1), 1]
    b_shape, b_strides = ([k, n], [b.stride(1), 1]) if b_rows else ([n, k], [b.stride(2), 1])
    b_block = [tile.block_k, tile.block_n] if b_rows else [tile.block_n, tile.block_k]
    grid = (triton.cdiv(m, tile.block_m) * triton.cdiv(n, tile.block_n), 1, 1)

    def launch(a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor) -> None:
        _matmul_chain_tma_kernel[grid](
            TensorDescriptor(a, [m, k], a_strides, [tile.block_m, tile.block_k]),
            TensorDescriptor(b, b_shape, b_strides, b_block),
            bias,
            out,
            m,
            n,
            k,
            BLOCK_M=tile.block_m,
            BLOCK_N=tile.block_n,
            BLOCK_K=tile.block_k,
            GROUP_M=8,
            B_ROWS=b_rows,
            HAS_BIAS=bias is not None,
            num_warps=tile.warps,
            num_stages=tile.stages,
        )

    return launch
