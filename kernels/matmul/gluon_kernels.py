"""The Gluon kernel of class "chain" on Hopper for few rows, and its loop over K as PTX; some Tritons can't run it."""

from __future__ import annotations

import re
from functools import lru_cache

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

# The loop over the steps of a chain, as PTX, without gaps between stages.
# A step of a chain, one wgmma of 16 k, starts when the one before it ends. The matrix unit queues only a few of them,
# so what a warp does between two stages (test a barrier, release a slot, make descriptors) leaves the unit idle: as
# Gluon orders it, about 45 ns per stage on an H200, where a step takes 10.5. Here all of that is in the middle of a
# stage, between the two halves of its products.
# wgmma multiplies 64 rows. Where fewer rows of a piece are loaded, the others are whatever follows them in shared
# memory: rows do not mix, and those results are not written. Operands in registers (wgmma accepts `a` there) were
# tried: the step takes as long, and loading them leaves the unit idle at each stage.

_ROW_BYTES = 128  # of a piece: 64 k in half precision
_STEPS = 4  # of 16 k in a piece
_SWIZZLED_128 = 0x4000004000000000  # of a wgmma descriptor: 128-byte swizzle, 1024 bytes from 8 rows to the next 8
_INIT = re.compile(r"mbarrier\.init\.shared::cta\.b64 \[(%r\d+)\], (\d+);")


@lru_cache
def loop(rows: int, columns: int, pieces: int, stages: int, full: int, empty: int, dtype: str) -> tuple[str, str]:
    """The PTX and its constraints: $0 ... are a thread's accumulators as int32, the operand after them is the steps.

    Args:
        rows: Of a piece of a. Stages of pieces [rows, 64] begin at byte 0 of the shared memory.
        columns: Of a piece of b, no more than `rows`; stages of pieces [columns, 64] follow those of a.
        pieces: In a stage.
        full: Byte of the first of the barriers that signal a loaded stage, 8 bytes per stage.
        empty: Of those that each warp arrives at once it has finished a stage.
        dtype: As PTX has it: "bf16" or "f16".
    """
    sums = columns // 2
    a_piece, b_piece = rows * _ROW_BYTES, columns * _ROW_BYTES
    wgmma = f"wgmma.mma_async.sync.aligned.m64n{columns}k16.f32.{dtype}.{dtype}"
    acc = ",".join(f"acc{i}" for i in range(sums))

    def products(first: int, end: int) -> list[str]:
        lines = ["wgmma.fence.sync.aligned;"]
        for step in range(first, end):
            piece, part = divmod(step, _STEPS)
            lines.append(f"add.s64 a_at, left, {(piece * a_piece >> 4) + 2 * part};")
            lines.append(f"add.s64 b_at, right, {(piece * b_piece >> 4) + 2 * part};")
            lines.append(f"{wgmma} {{{acc}}}, a_at, b_at, 1, 1, 1, 0, 0;")
        return [*lines, "wgmma.commit_group.sync.aligned;"]

    def described(name: str, piece_bytes: int, start: int) -> list[str]:
        return [
            f"mad.lo.u32 at, stage, {pieces * piece_bytes}, base; add.u32 at, at, {start}; shr.u32 at, at, 4;",
            f"and.b32 at, at, 0x3fff; cvt.u64.u32 {name}, at; or.b64 {name}, {name}, {_SWIZZLED_128};",
        ]

    stage = [*described("left", a_piece, 0), *described("right", b_piece, stages * pieces * a_piece)]
    half = pieces * _STEPS // 2
    lines = [
        f"{{ .reg .b32 acc<{sums}>;",
        ".reg .b32 base, lane, at, i, steps, stage, phase, bar, done;",
        ".reg .b64 left, right, a_at, b_at; .reg .pred first, is, there;",
        "mov.u32 base, global_smem; mov.u32 lane, %tid.x; and.b32 lane, lane, 31; setp.eq.u32 first, lane, 0;",
        *(f"mov.b32 acc{i}, 0;" for i in range(sums)),
        f"mov.u32 steps, ${sums}; mov.u32 i, 0; mov.u32 stage, 0; mov.u32 phase, 0; mov.u32 done, base;",
        f"add.u32 bar, base, {full}; setp.ne.u32 there, 0, 0;",
        *stage,
        "next: @there bra come;",
        "again: mbarrier.try_wait.parity.shared::cta.b64 is, [bar], phase; @!is bra again;",
        "come:",
        *products(0, half),
        # While these run: the previous stage is done, so release its slot; and test whether the next one is loaded.
        "wgmma.wait_group.sync.aligned 1; setp.ne.u32 is, i, 0; and.pred is, is, first;",
        "@is mbarrier.arrive.shared::cta.b64 _, [done];",
        f"shl.b32 at, stage, 3; add.u32 at, at, base; add.u32 done, at, {empty};",
        "add.u32 i, i, 1; add.u32 stage, stage, 1;",
        f"setp.eq.u32 is, stage, {stages}; @is mov.u32 stage, 0; @is xor.b32 phase, phase, 1;",
        f"shl.b32 at, stage, 3; add.u32 at, at, base; add.u32 bar, at, {full};",
        "mbarrier.test_wait.parity.shared::cta.b64 there, [bar], phase;",
        *products(half, pieces * _STEPS),
        *stage,
        "setp.lt.u32 is, i, steps; @is bra next;",
        "wgmma.wait_group.sync.aligned 0;",
        *(f"mov.b32 ${i}, acc{i};" for i in range(sums)),
        "}",
    ]
    return "\n".join(lines), ",".join(["=r"] * sums + ["r"] * sums)


def likely_barriers(held: int, stages: int) -> tuple[int, int]:
    """(full, empty) behind `held` bytes of operands, where Triton 3.6 puts them; `barriers_of` finds the real ones."""
    passed = 112  # bytes for the loading warp; the larger of this and a stage's barriers comes first
    full = held + (passed if 8 * stages < passed else 0)
    return full, (full + 8 * stages + 15) // 16 * 16


def barriers_of(ptx: str, warps: int) -> tuple[int, int]:
    """Where a compiled kernel has its first full and first empty barrier; RuntimeError: the text does not show it."""
    inits = _INIT.findall(ptx)[:2]
    if [count for _, count in inits] != ["1", str(warps)]:
        raise RuntimeError(f"the barriers of this kernel were not recognised: {inits}")
    places = [re.search(rf"add\.s32 \t{re.escape(name)}, %r\d+, (\d+);", ptx) for name, _ in inits]
    if None in places:
        raise RuntimeError(f"the addresses of this kernel's barriers were not recognised: {inits}")
    full, empty = (int(place[1]) for place in places if place is not None)
    return full, empty


# The Gluon kernel behind `nondet.kernels.matmul.hopper`: few rows, a long K, wgmma fed by a warp of its own.
# One element's chain over K is serial: no step can start before the one before it has ended. So at few rows and columns
# a product takes K / 16 steps of the matrix unit, plus the gaps between them. Here there are no gaps: one warp keeps
# shared memory full (TMA), and four warps queue the wgmma of one stage while those of the stage before still run, and
# wait for no result before the end of K.
# If the next kernel on the stream is started early (EARLY), it sets up its barriers on free multiprocessors meanwhile:
# 0.8 us less from one such product to the next, on an H200, and less next to other kernels.

# Triton reads a kernel's annotations itself and allows only gl.constexpr.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators


_tma_load = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared


@gluon.jit
def _load(
    a_desc, b_desc, a_smem, b_smem, full, empty, row, col, steps, PIECES: gl.constexpr, STAGES: gl.constexpr,
    EARLY: gl.constexpr,
):  # fmt: skip
    """EARLY: the kernel may start before the previous one has ended (PDL), and accesses no memory before that."""
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
    """One chain over K in one accumulator; the bias there; one rounding. LOOP addresses shared memory itself."""
    if EARLY:
        gdc_launch_dependents()
    ACC: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    given = gl.full([64, BLOCK_N], 0, gl.int32, ACC) + steps
    words = gl.inline_asm_elementwise(LOOP, OPERANDS, [given], gl.int32, is_pure=False, pack=BLOCK_N // 2)
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
