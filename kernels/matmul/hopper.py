"""Class "chain" on Hopper for few rows: the member whose chain over K is never kept waiting.

The order of reduction is that of `nondet.kernels.matmul.cuda_triton`: one chain over K in one float32 accumulator, the
bias added there, one rounding. Only who brings the operands in, and when, differs; see
`nondet.kernels.matmul.hopper_kernels`. A tile is called as all are, 32x16x256w4s8: 32 rows brought in at a time, 16
columns, 256 k to a stage, 8 stages.

On an H200, K = 14336 and N = 1024 at 16 rows: 14.5 us where cuBLASLt without split-K takes 22 and cuBLAS, which splits
K, 12.6 to 13.5; at K = 4096 6.4 us, and 8.2, and 7.2 to 8.0.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch
import triton

from nondet.kernels.matmul.cuda_tiles import Tile
from nondet.kernels.matmul.cuda_tma import rows_fit, tma_takes
from nondet.kernels.triton_common import INTERPRETED, capability

try:  # Gluon is experimental: a Triton that lacks what the kernel needs must not take the other kernels with it
    from triton.experimental.gluon.language import NVMMASharedLayout
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    from nondet.kernels.matmul.hopper_kernels import rows_kernel

    _NO_KERNEL = False
except (ImportError, AttributeError):  # pragma: no cover - depends on the Triton that is installed
    _NO_KERNEL = True

__all__ = ["HOPPER_TILES", "bind_hopper", "hopper_takes", "hopper_tile"]

_PIECE = 64  # k: 128 bytes, as far as a swizzled row of shared memory reaches
_SHARED_BYTES = 227 * 1024
# Triton 3.7 and later read no piece of shared memory beyond its end, so there each has room for wgmma's 64 rows.
OVERLAP = tuple(map(int, triton.__version__.split(".")[:2])) < (3, 7)

# From the least that a program brings in: fewer bytes a step, as long as there is a place on the GPU for every program
HOPPER_TILES = (
    (Tile(16, 16, 512, 4, 6), Tile(32, 16, 256, 4, 8), Tile(32, 32, 256, 4, 6))
    if OVERLAP
    else (Tile(16, 16, 256, 4, 5), Tile(32, 16, 256, 4, 5), Tile(32, 32, 256, 4, 4))
)
_PLACES = 128  # programs at once, one to an SM
_MOST_COLUMNS, _LEAST_K = 2048, 2048


@lru_cache
def _box_layout() -> Any:
    """How a box lies in shared memory: swizzled by 128 bytes, which wgmma reads without bank conflicts."""
    return NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)


def _tile_fits(tile: Tile) -> bool:
    """A tile that the kernel has: its warps, whole pieces, a part of wgmma's 64 rows, room in shared memory."""
    apart, behind = (tile.block_m, 64 - tile.block_m) if OVERLAP else (64, 0)
    held = tile.stages * (apart + tile.block_n) * tile.block_k * 2 + behind * _PIECE * 2
    shapes = tile.block_m in (16, 32, 64) and tile.block_n in (8, 16, 32, 64, 128) and tile.block_k % _PIECE == 0
    return shapes and tile.warps == 4 and held + 16 * tile.stages <= _SHARED_BYTES


def hopper_tile(m: int, n: int, k: int) -> Tile | None:
    """The tile for [m, k] x [k, n] where this member was the fastest on an H200, or None: few columns over a long K.

    There cuBLASLt's programs are few, and each waits for its chain. From 4096 columns on they fill the GPU; at 256 rows
    of 1024 columns, what a program has to bring in takes longer than the chain.
    """
    if n > _MOST_COLUMNS or k < _LEAST_K:
        return None
    fit = (t for t in HOPPER_TILES if triton.cdiv(m, t.block_m) * triton.cdiv(n, t.block_n) <= _PLACES)
    return next(fit, None)


def hopper_takes(a: torch.Tensor, b: torch.Tensor, tile: Tile) -> bool:
    """Can the kernel multiply a [1, M, K] and b [1, K, N]: as `tma_takes`, b by columns, on compute capability 9.0."""
    if _NO_KERNEL or INTERPRETED or not a.is_cuda or torch.version.hip is not None:
        return False
    return _tile_fits(tile) and capability(a.device) == (9, 0) and tma_takes(a, b) and rows_fit(b[0].T)


def bind_hopper(
    a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None, tile: Tile
) -> Callable[[torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor], None]:
    """A launcher for products of these very shapes, strides and dtypes that `hopper_takes`; see the module.

    It writes a [1, M, K] x b [1, K, N] (+ bias [N]) to out [1, M, N]; accumulation is in float32.
    """
    (_, m, k), n = a.shape, b.shape[2]
    a_strides, b_strides = [a.stride(1), 1], [b.stride(2), 1]
    grid = (triton.cdiv(m, tile.block_m) * triton.cdiv(n, tile.block_n), 1, 1)

    boxes = [
        TensorDescriptor(a, [m, k], a_strides, [tile.block_m, _PIECE], _box_layout()),
        TensorDescriptor(b, [n, k], b_strides, [tile.block_n, _PIECE], _box_layout()),
    ]
    for box in boxes:
        box.base = None  # a plan lives long, and must not keep anybody's operands
    constants = (bias is not None, tile.block_m, tile.block_n, tile.block_k // _PIECE, tile.stages, OVERLAP)
    kernel: Any = None

    def launch(a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor) -> None:
        nonlocal kernel
        left, right = (copy.copy(box) for box in boxes)  # of its own for each launch: other threads launch too
        left.base, right.base = a, b
        if kernel is not None:  # as `bind_chain`: Triton's own way to find the kernel again takes longer than the rest
            kernel[grid](left, right, bias, out, m, n, k, *constants)
            return
        kernel = rows_kernel[grid](left, right, bias, out, m, n, k, *constants, num_warps=tile.warps)

    return launch
