"""Class "chain" with operands brought in by the tensor memory accelerator: the Triton member for many rows on Hopper.

The order of reduction is that of `nondet.kernels.matmul.cuda_triton`: one chain over K in one float32 accumulator, the
bias added there, one rounding. Only the way into shared memory differs: one thread asks for a whole tile instead of
every thread for its part. On an H200 this is 1.25 to 1.5 times as fast as the other kernel from 512 rows on (128x128x64
tiles, 4 warps) and has 0.6 to 1.0 of cuBLASLt's speed there; it is what carries large products where cuBLASLt is
excluded, and the fastest of all at a few small ones (1024 x 1024, 32 to 256 rows).
"""

# Triton reads a kernel's annotations itself: only tl.constexpr may stand there.
# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

from collections.abc import Callable

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from nondet.kernels.matmul.cuda_tiles import Tile
from nondet.kernels.matmul.cuda_triton import tile_at
from nondet.kernels.triton_common import HALF, INTERPRETED, capability

__all__ = ["TMA_TILES", "bind_tma", "rows_fit", "tma_takes"]

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
    """Rows that the accelerator can read: contiguous, 16-byte-aligned, and so far apart."""
    return x.stride(1) == 1 and x.stride(0) >= x.shape[1] and (x.stride(0) * x.element_size()) % 16 == 0


def tma_takes(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Can the kernel multiply a [1, M, K] and b [1, K, N]: half precision, both with fit rows (b's may be columns)."""
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
    """A launcher for products of these very shapes, strides and dtypes that `tma_takes`; see the module.

    It writes a [1, M, K] x b [1, K, N] (+ bias [N]) to out [1, M, N]; accumulation is in float32.
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
