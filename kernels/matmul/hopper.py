"""Class "chain" on Hopper for few rows: the member whose chain over K never waits.

The order of reduction is that of `nondet.kernels.matmul.triton_kernels`: one chain over K in one float32 accumulator,
the bias added there, one rounding. Only how operands are loaded differs; see `nondet.kernels.matmul.gluon_kernels`.
Tiles are named as all are, 32x16x256w4s8: 32 rows loaded at a time, 16 columns, 256 k to a stage, 8 stages.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch
import triton

from nondet.kernels.matmul.triton_kernels import Tile, rows_fit, tma_takes
from nondet.kernels.triton_common import INTERPRETED, box_at, capability

try:  # Gluon is experimental: a Triton that lacks what the kernel needs must not disable the other kernels
    from triton.experimental.gluon.language import NVMMASharedLayout
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    from nondet.kernels.matmul.gluon_kernels import barriers_of, likely_barriers, rows_kernel
    from nondet.kernels.matmul.gluon_kernels import loop as hopper_loop

    _NO_KERNEL = False
except (ImportError, AttributeError):  # pragma: no cover - depends on the Triton that is installed
    _NO_KERNEL = True

_PIECE = 64  # k: 128 bytes, as far as a swizzled row of shared memory reaches
_SHARED_BYTES = 227 * 1024
_WARPS = 4  # that multiply

# From the smallest load per program: fewer bytes per step, as long as the GPU can run every program at once
HOPPER_TILES = (
    Tile(8, 8, 256, 4, 14),
    Tile(16, 8, 256, 4, 14),
    Tile(16, 16, 512, 4, 6),
    Tile(32, 16, 256, 4, 8),
    Tile(32, 32, 256, 4, 6),
    Tile(64, 32, 128, 4, 9),
)
_PTX_NAMES = {torch.bfloat16: "bf16", torch.float16: "f16"}
_PLACES = 128  # programs at once, one per SM
_MOST_COLUMNS, _LEAST_K = 2048, 2048
_LONG_K = 12288  # from here on the tile of 64 rows is worth it
_EARLY_MOST_K = 4096  # programs of 32 columns that start early over a longer K cost 5% instead


@lru_cache
def _box_layout() -> Any:
    """Swizzled by 128 bytes, which wgmma reads without bank conflicts."""
    return NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)


def _held_bytes(tile: Tile) -> int:
    return tile.stages * (tile.block_m + tile.block_n) * tile.block_k * 2


def tile_fits(tile: Tile) -> bool:
    """No more columns than rows, because Triton puts the larger operand first, and `loop` expects `a` there."""
    shapes = tile.block_m in (8, 16, 32, 64) and tile.block_n in (8, 16, 32, 64) and tile.block_k % _PIECE == 0
    held = _held_bytes(tile) + 16 * tile.stages + 256 <= _SHARED_BYTES  # barriers, and the loading warp's arguments
    return shapes and tile.block_n <= tile.block_m and tile.warps == _WARPS and held


def hopper_tile(m: int, n: int, k: int) -> Tile | None:
    """The tile for [m, k] x [k, n] where this member was the fastest on an H200, or None: few columns over a long K.

    There cuBLASLt's programs are few, and each waits for its chain. From 4096 columns on they fill the GPU; at 256 rows
    of 1024 columns a program's loads take longer than the chain, which cuBLASLt's waits still exceed where K is long.
    """
    if n > _MOST_COLUMNS or k < _LEAST_K:
        return None
    tiles = HOPPER_TILES if k >= _LONG_K else HOPPER_TILES[:-1]
    return next((t for t in tiles if triton.cdiv(m, t.block_m) * triton.cdiv(n, t.block_n) <= _PLACES), None)


def hopper_takes(a: torch.Tensor, b: torch.Tensor, tile: Tile) -> bool:
    """Whether the kernel can multiply a [1, M, K] and b [1, K, N]: as `tma_takes`, b by columns, on Hopper."""
    if _NO_KERNEL or INTERPRETED or not a.is_cuda or torch.version.hip is not None:
        return False
    return tile_fits(tile) and capability(a.device) == (9, 0) and tma_takes(a, b) and rows_fit(b[0].T)


def bind_hopper(
    a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None, tile: Tile
) -> Callable[[torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor], None]:
    """A launcher of a [1, M, K] x b [1, K, N] (+ bias [N]) -> out [1, M, N] for exactly these shapes, strides and
    dtypes.
    """
    (_, m, k), n = a.shape, b.shape[2]
    a_strides, b_strides = [a.stride(1), 1], [b.stride(2), 1]
    grid = (triton.cdiv(m, tile.block_m) * triton.cdiv(n, tile.block_n), 1, 1)

    boxes = [
        TensorDescriptor(a, [m, k], a_strides, [tile.block_m, _PIECE], _box_layout()),
        TensorDescriptor(b, [n, k], b_strides, [tile.block_n, _PIECE], _box_layout()),
    ]
    for box in boxes:
        box.base = None  # a plan lives long, and must not keep operands alive
    pieces = tile.block_k // _PIECE
    early = tile.block_n < 32 or k <= _EARLY_MOST_K
    options = {"num_warps": tile.warps, "launch_pdl": early}

    def constants(full: int, empty: int) -> tuple[Any, ...]:
        loop = hopper_loop(tile.block_m, tile.block_n, pieces, tile.stages, full, empty, _PTX_NAMES[a.dtype])
        return (bias is not None, tile.block_m, tile.block_n, pieces, tile.stages, early, *loop)

    settled: tuple[Any, ...] = ()
    kernel: Any = None

    def launch(a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor) -> None:
        nonlocal kernel, settled
        operands = (box_at(boxes[0], a), box_at(boxes[1], b), bias, out, m, n, k)
        if kernel is not None:  # as `bind_chain`: Triton's own lookup takes longer than the rest
            kernel[grid](*operands, *settled)
            return
        likely = likely_barriers(_held_bytes(tile), tile.stages)
        settled = _settled(operands, constants, likely, grid, options)
        kernel = rows_kernel[grid](*operands, *settled, **options)

    return launch


def _settled(
    operands: tuple[Any, ...],
    constants: Callable[[int, int], tuple[Any, ...]],
    barriers: tuple[int, int],
    grid: tuple[int, ...],
    options: dict[str, Any],
) -> tuple[Any, ...]:
    """The kernel's constants, found by compiling it: a loop with the wrong `barriers` would wait for ever."""
    for _ in range(3):
        chosen = constants(*barriers)
        built = rows_kernel.warmup(*operands, *chosen, grid=grid, **options)
        there = barriers_of(built.asm["ptx"], _WARPS)
        if there == barriers:
            return chosen
        barriers = there
    raise RuntimeError("the barriers of this kernel lie elsewhere each time it is compiled")
