"""The Gluon kernel behind `nondet.kernels.matmul.hopper`: few rows, a long K, wgmma fed by a warp of its own.

One element's chain over K is serial: nothing can start a step before the one before it has ended. So at few rows and
columns the time of a product is K / 16 times what a step of the matrix unit takes, plus whatever stands between steps.
Here nothing stands between them. One warp keeps shared memory full (TMA); four warps queue the wgmma of one stage while
those of the stage before still run, and wait for no result before the end of K.

wgmma takes 64 rows. Of fewer rows of `a` only ROWS are brought in, 2 KB instead of 8 for 64 k. The others are whatever
lies behind them in shared memory, the next pieces where they overlap (OVERLAP): rows do not mix, and those of the
result are not written.
"""

# Triton reads a kernel's annotations itself: only gl.constexpr may stand there.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language._core import builtin
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

__all__ = ["rows_kernel"]

# Triton 3.7 renamed it.
_tma_load = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared


@builtin
def _with_shape(smem, shape, _semantic=None):
    """`smem` read in that shape, shorter or with what lies behind it; Triton 3.7 made the method public."""
    method = getattr(smem, "reinterpret", None) or smem._reinterpret
    return method(smem.dtype, shape, smem.layout, _semantic=_semantic)


@gluon.jit
def _load(
    a_desc, b_desc, a_smem, b_smem, full, empty, row, col, steps, ROWS: gl.constexpr, PIECES: gl.constexpr,
    STAGES: gl.constexpr,
):  # fmt: skip
    """Bring in ROWS rows of a and BLOCK_N columns of b, in pieces of 64 k, as far ahead as there are stages."""
    BYTES: gl.constexpr = (a_desc.block_type.nbytes + b_desc.block_type.nbytes) * PIECES
    for i in range(steps):
        stage = i % STAGES
        mbarrier.wait(empty.index(stage), ((i // STAGES) & 1) ^ 1)
        bar = full.index(stage)
        mbarrier.expect(bar, BYTES)
        for p in gl.static_range(PIECES):
            k = (i * PIECES + p) * 64
            _tma_load(b_desc, [col, k], bar, b_smem.index(stage * PIECES + p))
            _tma_load(a_desc, [row, k], bar, _with_shape(a_smem.index(stage * PIECES + p), [ROWS, 64]))


@gluon.jit
def _multiply(
    a_smem, b_smem, full, empty, bias_ptr, out_ptr, row, col, M, N, steps, HAS_BIAS: gl.constexpr,
    ROWS: gl.constexpr, BLOCK_N: gl.constexpr, PIECES: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """One chain over K in one accumulator; the bias there; one rounding."""
    ACC: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    acc = gl.zeros([64, BLOCK_N], gl.float32, ACC)
    for i in range(steps):
        stage = i % STAGES
        mbarrier.wait(full.index(stage), (i // STAGES) & 1)
        for p in gl.static_range(PIECES):
            a = _with_shape(a_smem.index(stage * PIECES + p), [64, 64])
            b = b_smem.index(stage * PIECES + p).permute([1, 0])
            acc = warpgroup_mma(a, b, acc, is_async=True)
        acc = warpgroup_mma_wait(PIECES, [acc])  # all but this stage's
        if i > 0:
            mbarrier.arrive(empty.index((i - 1) % STAGES), count=1)
    acc = warpgroup_mma_wait(0, [acc])
    here = gl.arange(0, 64, layout=gl.SliceLayout(1, ACC))
    rows = row + here
    cols = col + gl.arange(0, BLOCK_N, layout=gl.SliceLayout(0, ACC))
    if HAS_BIAS:
        acc += gl.load(bias_ptr + cols, mask=cols < N, other=0.0).to(gl.float32)[None, :]
    inside = ((here < ROWS) & (rows < M))[:, None] & (cols[None, :] < N)
    gl.store(out_ptr + rows.to(gl.int64)[:, None] * N + cols[None, :], acc.to(out_ptr.dtype.element_ty), mask=inside)


@gluon.jit(do_not_specialize=["M"])
def rows_kernel(
    a_desc, b_desc, bias_ptr, out_ptr, M, N, K, HAS_BIAS: gl.constexpr, ROWS: gl.constexpr, BLOCK_N: gl.constexpr,
    PIECES: gl.constexpr, STAGES: gl.constexpr, OVERLAP: gl.constexpr,
):  # fmt: skip
    """a [M, K] and b [N, K] as descriptors of boxes of ROWS and BLOCK_N rows and 64 k -> out [M, N]."""
    tiles_m = (M + ROWS - 1) // ROWS
    row = gl.program_id(0) % tiles_m * ROWS
    col = gl.program_id(0) // tiles_m * BLOCK_N
    steps = (K + 64 * PIECES - 1) // (64 * PIECES)
    BEHIND: gl.constexpr = 64 // ROWS - 1 if OVERLAP else 0  # so that the last piece can be read as 64 rows
    APART: gl.constexpr = ROWS if OVERLAP else 64
    a_smem = gl.allocate_shared_memory(a_desc.dtype, [STAGES * PIECES + BEHIND, APART, 64], a_desc.layout)
    b_smem = gl.allocate_shared_memory(b_desc.dtype, [STAGES * PIECES, BLOCK_N, 64], b_desc.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=1)
    fence_async_shared()
    gl.warp_specialize(
        [
            (_multiply, (a_smem, b_smem, full, empty, bias_ptr, out_ptr, row, col, M, N, steps, HAS_BIAS, ROWS,
                         BLOCK_N, PIECES, STAGES)),
            (_load, (a_desc, b_desc, a_smem, b_smem, full, empty, row, col, steps, ROWS, PIECES, STAGES)),
        ],
        [1],
        [24],
    )  # fmt: skip
