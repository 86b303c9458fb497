"""The Gluon kernel behind `nondet.kernels.matmul.hopper`: few rows, a long K, wgmma fed by a warp of its own.

One element's chain over K is serial: nothing can start a step before the one before it has ended. So at few rows and
columns the time of a product is K / 16 times what a step of the matrix unit takes, plus whatever stands between steps.
Here nothing stands between them. One warp keeps shared memory full (TMA); four warps queue the wgmma of one stage while
those of the stage before still run, and wait for no result before the end of K: `nondet.kernels.matmul.hopper_asm`,
which also says how less than wgmma's 64 rows are brought in.

Where the next kernel on the stream is started early (EARLY), it sets up its barriers on free multiprocessors meanwhile:
0.8 us less from one such product to the next, on an H200. Behind or before other kernels there is less to gain.
"""

# Triton reads a kernel's annotations itself: only gl.constexpr may stand there.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

__all__ = ["rows_kernel"]

# Triton 3.7 renamed it.
_tma_load = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared


@gluon.jit
def _load(
    a_desc, b_desc, a_smem, b_smem, full, empty, row, col, steps, PIECES: gl.constexpr, STAGES: gl.constexpr,
    EARLY: gl.constexpr,
):  # fmt: skip
    """Bring in rows of a and columns of b, in pieces of 64 k, as far ahead as there are stages.

    EARLY: the kernel may have been started before the one ahead of it ended (PDL). Nothing of memory is read before
    that has, and nothing written: what is written follows from what is read here.
    """
    if EARLY:
        gdc_wait()
    BYTES: gl.constexpr = (a_desc.block_type.nbytes + b_desc.block_type.nbytes) * PIECES
    for i in range(steps):
        stage = i % STAGES
        mbarrier.wait(empty.index(stage), ((i // STAGES) & 1) ^ 1)
        bar = full.index(stage)
        mbarrier.expect(bar, BYTES)
        for p in gl.static_range(PIECES):
            k = (i * PIECES + p) * 64
            _tma_load(b_desc, [col, k], bar, b_smem.index(stage * PIECES + p))
            _tma_load(a_desc, [row, k], bar, a_smem.index(stage * PIECES + p))


@gluon.jit
def _multiply(
    a_smem, b_smem, full, empty, bias_ptr, out_ptr, row, col, M, N, steps, HAS_BIAS: gl.constexpr,
    ROWS: gl.constexpr, BLOCK_N: gl.constexpr, EARLY: gl.constexpr, LOOP: gl.constexpr, OPERANDS: gl.constexpr,
):  # fmt: skip
    """One chain over K in one accumulator; the bias there; one rounding. LOOP finds shared memory by itself."""
    if EARLY:
        gdc_launch_dependents()
    ACC: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    told = gl.full([64, BLOCK_N], 0, gl.int32, ACC) + steps
    words = gl.inline_asm_elementwise(LOOP, OPERANDS, [told], gl.int32, is_pure=False, pack=BLOCK_N // 2)
    acc = words.to(gl.float32, bitcast=True)
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
    PIECES: gl.constexpr, STAGES: gl.constexpr, EARLY: gl.constexpr, LOOP: gl.constexpr, OPERANDS: gl.constexpr,
):  # fmt: skip
    """a [M, K] and b [N, K] as descriptors of boxes of ROWS and BLOCK_N rows and 64 k -> out [M, N]."""
    tiles_m = (M + ROWS - 1) // ROWS
    row = gl.program_id(0) % tiles_m * ROWS
    col = gl.program_id(0) // tiles_m * BLOCK_N
    steps = (K + 64 * PIECES - 1) // (64 * PIECES)
    a_smem = gl.allocate_shared_memory(a_desc.dtype, [STAGES * PIECES, ROWS, 64], a_desc.layout)
    b_smem = gl.allocate_shared_memory(b_desc.dtype, [STAGES * PIECES, BLOCK_N, 64], b_desc.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=4)  # one lane of each warp that multiplies
    fence_async_shared()
    gl.warp_specialize(
        [
            (_multiply, (a_smem, b_smem, full, empty, bias_ptr, out_ptr, row, col, M, N, steps, HAS_BIAS, ROWS,
                         BLOCK_N, EARLY, LOOP, OPERANDS)),
            (_load, (a_desc, b_desc, a_smem, b_smem, full, empty, row, col, steps, PIECES, STAGES, EARLY)),
        ],
        [1],
        [24],
    )  # fmt: skip
