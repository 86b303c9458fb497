"""The Gluon kernel behind `hopper_attention`: the order of `triton_attention` on Hopper's own instructions.

A program is three warp groups. One warp brings tiles of Q, K and V into shared memory (TMA) and two consumers of 4
warps compute 64 queries each: scores and values through wgmma, the softmax between them in registers. Programs stay for
many blocks of queries, so that one block's last steps hide the next one's first loads.

A consumer keeps two products in flight. In the step of tile j it starts the scores of tile j, then the values of tile
j - 1, and turns the scores into probabilities while the values run. What must not run beside them comes in between:
rescaling the segment's accumulator, and once a segment adding it to the total, which lives in shared memory, since
registers hold one accumulator only.

None of that enters the bits: every sum has the order that `triton_attention` states, by the same instructions or by
ones proved equal (wgmma of one tile shape against another's, on hard inputs in tests/kernels/attention/test_hopper.py).
"""

# Triton reads a kernel's annotations itself: only gl.constexpr may stand there.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from nondet.kernels.attention.hopper_parts import (
    as_matrix,
    fold_sum,
    item_of,
    mask_scores,
    merge_acc,
    merge_stats,
    pin,
    reinterpret,
    softmax_step,
    total_layout,
    work_of,
)

__all__ = ["prefill_kernel"]

# Triton 3.7 renamed these.
tma_load = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared
tma_store = getattr(tma, "async_store", None) or tma.async_copy_shared_to_global


@gluon.jit
def producer(
    q_desc, k_desc, v_desc, q_smem, k_smem, v_smem, bars, tq, tk, heads_all, heads, blocks, items,
    GROUP: gl.constexpr, CAUSAL: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Load Q once an item, then K and V tile by tile, as far ahead as there are stages."""
    q_full, q_empty, k_full, k_empty, v_full, v_empty = bars
    n = 0  # tiles so far, over all items: stage n % STAGES, and its barriers flip every STAGES tiles
    for turn in range((items + gl.num_programs(0) - 1) // gl.num_programs(0)):
        item = item_of(turn)
        if item < items:
            batch_head, first_query, tiles, _ = work_of(item, blocks, heads_all, tq, tk, CAUSAL, BLOCK_M, BLOCK_N)
            batch = batch_head // heads
            head = batch_head % heads
            mbarrier.wait(q_empty, (turn & 1) ^ 1)
            mbarrier.expect(q_full, q_desc.block_type.nbytes * 2)
            tma_load(q_desc, [batch, head, first_query, 0], q_full, q_smem.index(0))
            tma_load(q_desc, [batch, head, first_query + BLOCK_M // 2, 0], q_full, q_smem.index(1))
            for j in range(tiles):
                stage = n % STAGES
                phase = (n // STAGES) & 1
                mbarrier.wait(k_empty.index(stage), phase ^ 1)
                mbarrier.expect(k_full.index(stage), k_desc.block_type.nbytes)
                tma_load(k_desc, [batch, head // GROUP, j * BLOCK_N, 0], k_full.index(stage), k_smem.index(stage))
                mbarrier.wait(v_empty.index(stage), phase ^ 1)
                mbarrier.expect(v_full.index(stage), v_desc.block_type.nbytes)
                tma_load(v_desc, [batch, head // GROUP, j * BLOCK_N, 0], v_full.index(stage), v_smem.index(stage))
                n += 1


@gluon.jit
def consumer(
    out_desc, q_smem, k_smem, v_smem, totals, bars, tq, tk, heads_all, heads, blocks, items, qk_scale,
    HALF: gl.constexpr, CAUSAL: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, HEAD_DIM: gl.constexpr,
    SEGMENT: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Compute one half of every item's queries; see the module for the order of steps."""
    q_full, q_empty, k_full, k_empty, v_full, v_empty = bars
    ROWS: gl.constexpr = BLOCK_M // 2
    PER: gl.constexpr = SEGMENT // BLOCK_N
    SCORE: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    ACC: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HEAD_DIM, 16])
    PROB: gl.constexpr = gl.DotOperandLayout(0, ACC, 2)
    ROW: gl.constexpr = gl.SliceLayout(1, SCORE)
    ACC_ROW: gl.constexpr = gl.SliceLayout(1, ACC)
    COL: gl.constexpr = gl.SliceLayout(0, SCORE)
    dtype: gl.constexpr = q_smem.dtype
    no_score = gl.zeros([ROWS, BLOCK_N], gl.float32, SCORE)
    no_max = gl.full([ROWS], float("-inf"), gl.float32, ROW)
    no_sum = fold_sum(no_score, 8)
    total = totals.index(HALF)
    staged = reinterpret(total, dtype, [1, 1, ROWS, HEAD_DIM], out_desc.layout)  # the output, when the total is done
    q = as_matrix(q_smem.index(HALF))
    n = 0
    for turn in range((items + gl.num_programs(0) - 1) // gl.num_programs(0)):
        item = item_of(turn)
        if item < items:
            batch_head, first_query, tiles, full = work_of(item, blocks, heads_all, tq, tk, CAUSAL, BLOCK_M, BLOCK_N)
            first_query += HALF * ROWS
            position = first_query + tk - tq
            m_all = no_max
            l_all = gl.full([ROWS], 0.0, gl.float32, ROW)
            before = gl.full([ROWS], 0.0, gl.float32, ACC_ROW)
            now = gl.full([ROWS], 0.0, gl.float32, ACC_ROW)
            # Tile 0 alone.
            mbarrier.wait(q_full, turn & 1)
            stage = n % STAGES
            mbarrier.wait(k_full.index(stage), (n // STAGES) & 1)
            s = warpgroup_mma(q, as_matrix(k_smem.index(stage)).permute([1, 0]), no_score, use_acc=False, is_async=True)
            s = warpgroup_mma_wait(0, [s])
            mbarrier.arrive(k_empty.index(stage), count=1)
            if full == 0:
                s = mask_scores(s, 0, position, tk, CAUSAL, ROW, COL)
            p32, m, l8, alpha = softmax_step(s, no_max, no_sum, qk_scale, ROW)
            tma.store_wait(0)  # the item before has left shared memory, where the total goes next
            mbarrier.wait(v_full.index(stage), (n // STAGES) & 1)
            p = gl.convert_layout(p32.to(dtype), PROB, assert_trivial=True)
            acc = gl.zeros([ROWS, HEAD_DIM], gl.float32, ACC)
            for j in range(1, tiles):
                v_stage = n % STAGES
                n += 1
                stage = n % STAGES
                phase = (n // STAGES) & 1
                mbarrier.wait(k_full.index(stage), phase)
                s = warpgroup_mma(
                    q, as_matrix(k_smem.index(stage)).permute([1, 0]), no_score, use_acc=False, is_async=True
                )
                if (j > 1) & (j % PER == 1):  # tile j - 1 began a segment: acc is the one before it, all added
                    total.store(merge_acc(total, acc, before, now, j == PER + 1, ACC))
                    acc = gl.zeros([ROWS, HEAD_DIM], gl.float32, ACC)
                acc = acc * gl.convert_layout(pin(alpha), ACC_ROW)[:, None]
                acc_run = warpgroup_mma(p, as_matrix(v_smem.index(v_stage)), acc, is_async=True)
                s = warpgroup_mma_wait(1, [s])
                mbarrier.arrive(k_empty.index(stage), count=1)
                if j >= full:
                    s = mask_scores(s, j * BLOCK_N, position, tk, CAUSAL, ROW, COL)
                first = j % PER == 0
                m_before = m
                l8_before = l8
                p32, m, l8, alpha = softmax_step(
                    s, gl.where(first, float("-inf"), m_before), gl.where(first, 0.0, l8_before), qk_scale, ROW
                )
                mbarrier.wait(v_full.index(stage), phase)  # here, for a wait keeps the softmax above the next one
                acc, p = warpgroup_mma_wait(0, [acc_run, p])
                mbarrier.arrive(v_empty.index(v_stage), count=1)
                if first:
                    m_all, l_all, before_row, now_row = merge_stats(m_all, l_all, m_before, l8_before, qk_scale, ROW)
                    before = gl.convert_layout(before_row, ACC_ROW)
                    now = gl.convert_layout(now_row, ACC_ROW)
                p = gl.convert_layout(p32.to(dtype), PROB, assert_trivial=True)
            # The values of the last tile, and the last segment.
            mbarrier.arrive(q_empty, count=1)
            if (tiles > 1) & (tiles % PER == 1):
                total.store(merge_acc(total, acc, before, now, tiles == PER + 1, ACC))
                acc = gl.zeros([ROWS, HEAD_DIM], gl.float32, ACC)
            acc = acc * gl.convert_layout(alpha, ACC_ROW)[:, None]
            stage = n % STAGES
            n += 1
            acc_run = warpgroup_mma(p, as_matrix(v_smem.index(stage)), acc, is_async=True)
            m_all, l_all, before_row, now_row = merge_stats(m_all, l_all, m, l8, qk_scale, ROW)
            acc, p = warpgroup_mma_wait(0, [acc_run, p])
            mbarrier.arrive(v_empty.index(stage), count=1)
            before = gl.convert_layout(before_row, ACC_ROW)
            now = gl.convert_layout(now_row, ACC_ROW)
            acc = merge_acc(total, acc, before, now, tiles <= PER, ACC)
            out = (acc / gl.convert_layout(l_all, ACC_ROW)[:, None]).to(dtype)
            staged.store(gl.reshape(out, [1, 1, ROWS, HEAD_DIM]))
            fence_async_shared()
            tma_store(out_desc, [batch_head // heads, batch_head % heads, first_query, 0], staged)
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["tq", "tk", "heads_all", "heads", "blocks", "items"])
def prefill_kernel(
    q_desc, k_desc, v_desc, out_desc, tq, tk, heads_all, heads, blocks, items, qk_scale,
    GROUP: gl.constexpr, CAUSAL: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, HEAD_DIM: gl.constexpr,
    SEGMENT: gl.constexpr, STAGES: gl.constexpr, REGISTERS: gl.constexpr,
):  # fmt: skip
    """q, out [B, heads, tq, HEAD_DIM] and k, v [B, heads / GROUP, tk, HEAD_DIM] as descriptors of boxes of 64 and
    BLOCK_N rows; heads_all is B * heads, blocks the blocks of BLOCK_M queries, items their product.
    """
    dtype: gl.constexpr = q_desc.dtype
    q_smem = gl.allocate_shared_memory(dtype, [2, 1, 1, BLOCK_M // 2, HEAD_DIM], q_desc.layout)
    k_smem = gl.allocate_shared_memory(dtype, [STAGES, 1, 1, BLOCK_N, HEAD_DIM], k_desc.layout)
    v_smem = gl.allocate_shared_memory(dtype, [STAGES, 1, 1, BLOCK_N, HEAD_DIM], v_desc.layout)
    totals = gl.allocate_shared_memory(gl.float32, [2, BLOCK_M // 2, HEAD_DIM], total_layout(HEAD_DIM))
    q_full = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    q_empty = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    k_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    k_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    mbarrier.init(q_full, count=1)
    mbarrier.init(q_empty, count=2)  # both consumers
    for i in gl.static_range(STAGES):
        mbarrier.init(k_full.index(i), count=1)
        mbarrier.init(v_full.index(i), count=1)
        mbarrier.init(k_empty.index(i), count=2)
        mbarrier.init(v_empty.index(i), count=2)
    fence_async_shared()
    bars = (q_full, q_empty, k_full, k_empty, v_full, v_empty)
    gl.warp_specialize(
        [
            (consumer, (out_desc, q_smem, k_smem, v_smem, totals, bars, tq, tk, heads_all, heads, blocks, items,
                        qk_scale, 0, CAUSAL, BLOCK_M, BLOCK_N, HEAD_DIM, SEGMENT, STAGES)),
            (consumer, (out_desc, q_smem, k_smem, v_smem, totals, bars, tq, tk, heads_all, heads, blocks, items,
                        qk_scale, 1, CAUSAL, BLOCK_M, BLOCK_N, HEAD_DIM, SEGMENT, STAGES)),
            (producer, (q_desc, k_desc, v_desc, q_smem, k_smem, v_smem, bars, tq, tk, heads_all, heads, blocks, items,
                        GROUP, CAUSAL, BLOCK_M, BLOCK_N, STAGES)),
        ],
        [4, 1],
        [REGISTERS, 24],
    )  # fmt: skip
