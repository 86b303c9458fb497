"""The Gluon kernels behind `hopper_decode`: the order of `cuda` for few rows, a group of tiles at a time.

A decode step is short of time, not of arithmetic, so what waits is what counts. Within a segment only two things form a
chain over the tiles: the maximum, which has no rounding and so may be taken of all tiles at once, and the accumulator.
So a program computes the scores of TILES tiles (a segment, or half of one), exchanges their maxima between its warps
once, turns all scores into probabilities, and only then walks the products with the values, one accumulator, in order.
Tiles of K and V come through one ring of slots in the order in which they are used, brought by a warp that does nothing
else (TMA): few instructions are left to the warps that compute, and those are what a step over few keys consists of.
"""

# Triton reads a kernel's annotations itself: only gl.constexpr may stand there.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma

from nondet.kernels.attention.hopper_decode_parts import (
    join_tiles,
    launch_dependents,
    merge_segment,
    probabilities,
    rescaling,
    side_by_side,
    split_tiles,
    spread_scales,
    tree_sums,
    wait_for_kernel_before,
)
from nondet.kernels.attention.hopper_parts import as_matrix, fold_sum

__all__ = ["decode_kernel"]

# Triton 3.7 renamed these.
tma_load = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared
all_threads = getattr(gl, "barrier", None) or gl.thread_barrier


@gluon.jit
def producer(
    k_desc, v_desc, ring, ready, empty, batch, kv_head, first_tile, groups,
    TILES: gl.constexpr, SLOTS: gl.constexpr, BLOCK_N: gl.constexpr,
):  # fmt: skip
    """Load TILES tiles of K, then those of V, group after group, as far ahead as there are slots."""
    for group in range(groups):
        for j in gl.static_range(2 * TILES):
            item = group * (2 * TILES) + j
            barrier = ready.index(item % SLOTS)
            key = (first_tile + group * TILES + j % TILES) * BLOCK_N
            mbarrier.wait(empty.index(item % SLOTS), (item // SLOTS & 1) ^ 1)
            if j < TILES:
                mbarrier.expect(barrier, k_desc.block_type.nbytes)
                tma_load(k_desc, [batch, kv_head, key, 0], barrier, ring.index(item % SLOTS))
            else:
                mbarrier.expect(barrier, v_desc.block_type.nbytes)
                tma_load(v_desc, [batch, kv_head, key, 0], barrier, ring.index(item % SLOTS))


@gluon.jit
def consumer(
    q_ptr, out_ptr, part_ptr, ring, p_smem, ready, empty, sizes, strides, place, qk_scale,
    SPLIT: gl.constexpr, TILES: gl.constexpr, SLOTS: gl.constexpr, CAUSAL: gl.constexpr,
    GROUP: gl.constexpr, HEAD_DIM: gl.constexpr, SEGMENT: gl.constexpr, BLOCK_N: gl.constexpr, WARPS: gl.constexpr,
):  # fmt: skip
    """Compute 16 rows; see the module for the order of steps."""
    tq, tk, heads_kv, segments, slots = sizes
    stride_qb, stride_qh, stride_qt, stride_ob, stride_oh, stride_ot = strides
    batch, kv_head, first_row, first_tile, last_tile, full, groups = place
    ROWS: gl.constexpr = 16
    PER: gl.constexpr = SEGMENT // BLOCK_N // TILES  # groups of a segment
    MMA: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [1, WARPS], [16, 8])
    A: gl.constexpr = gl.DotOperandLayout(0, MMA, 2)
    B: gl.constexpr = gl.DotOperandLayout(1, MMA, 2)
    ROW: gl.constexpr = gl.SliceLayout(1, MMA)
    COL: gl.constexpr = gl.SliceLayout(0, MMA)
    Q: gl.constexpr = gl.BlockedLayout([1, 8], [256 // HEAD_DIM, HEAD_DIM // 8], [WARPS, 1], [1, 0])
    # Sums: a row and a column of 8 to a thread, which holds what is left of that column's tree in all tiles of a group.
    FOLDED: gl.constexpr = 8 * WARPS  # columns of which one warp holds whole halves
    TREE: gl.constexpr = (
        gl.BlockedLayout([1, WARPS, 1, 2, 2], [4, 1, 8, 1, 1], [4, 1, 1, WARPS // 4, 1], [4, 3, 1, 2, 0])
        if TILES == 4
        else gl.BlockedLayout([1, WARPS, 1, 2], [4, 1, 8, 1], [4, 1, 1, WARPS // 4], [3, 1, 2, 0])
    )

    dtype: gl.constexpr = ring.dtype
    rows = first_row + gl.arange(0, ROWS, layout=gl.SliceLayout(1, Q))
    offs_q = gl.arange(0, HEAD_DIM, layout=gl.SliceLayout(0, Q))
    q_ptr += batch.to(gl.int64) * stride_qb
    q_ptrs = q_ptr + gl.expand_dims((rows // GROUP).to(gl.int64) * stride_qt, 1) + gl.expand_dims(offs_q, 0)
    q_ptrs += gl.expand_dims((kv_head * GROUP + rows % GROUP).to(gl.int64) * stride_qh, 1)
    q = gl.convert_layout(gl.load(q_ptrs, mask=gl.expand_dims(rows // GROUP < tq, 1), other=0.0), A)

    row = first_row + gl.arange(0, ROWS, layout=ROW)
    query = row // GROUP
    head = kv_head * GROUP + row % GROUP
    rows_in = query < tq
    col = gl.arange(0, BLOCK_N, layout=COL)
    limit = tk - 1 + gl.full_like(query, 0)  # the last key that a row sees
    if CAUSAL:
        limit = gl.minimum(limit, query + tk - tq)
    offs_o = gl.arange(0, HEAD_DIM, layout=COL)
    slot = ((batch.to(gl.int64) * tq + query) * (heads_kv * GROUP) + head) * segments

    no_max = gl.full([ROWS], float("-inf"), gl.float32, ROW)
    no_acc = gl.full([ROWS, HEAD_DIM], 0.0, gl.float32, MMA)
    no_score = gl.full([ROWS, BLOCK_N], 0.0, gl.float32, MMA)
    no_part = fold_sum(no_score, FOLDED)
    no_sum, _, _, _ = tree_sums(no_part, no_part, no_part, no_part, WARPS, TILES, TREE)
    m = no_max
    l8 = no_sum
    acc = no_acc
    m_all = no_max
    l_all = gl.full([ROWS], 0.0, gl.float32, ROW)
    acc_all = no_acc
    for group in range(groups):
        tile = first_tile + group * TILES
        item = group * (2 * TILES)
        for j in gl.static_range(TILES):
            mbarrier.wait(ready.index((item + j) % SLOTS), (item + j) // SLOTS & 1)
            k = as_matrix(ring.index((item + j) % SLOTS)).permute([1, 0]).load(B)
            s = mma_v2(q, k, no_score)
            if j == 0:
                s0 = s
            elif j == 1:
                s1 = s
            elif j == 2:
                s2 = s
            else:
                s3 = s
            all_threads()  # all warps have read the slot
            mbarrier.arrive(empty.index((item + j) % SLOTS), count=1)
        if TILES == 2:
            s2 = s0
            s3 = s1
        if (tile + TILES) * BLOCK_N > full:
            seen = gl.expand_dims(limit - tile * BLOCK_N, 1)
            s0 = gl.where(gl.expand_dims(col, 0) <= seen, s0, float("-inf"))
            s1 = gl.where(gl.expand_dims(col + BLOCK_N, 0) <= seen, s1, float("-inf"))
            if TILES == 4:
                s2 = gl.where(gl.expand_dims(col + 2 * BLOCK_N, 0) <= seen, s2, float("-inf"))
                s3 = gl.where(gl.expand_dims(col + 3 * BLOCK_N, 0) <= seen, s3, float("-inf"))
        m0, m1, m2, m3 = split_tiles(gl.max(join_tiles(s0, s1, s2, s3, TILES), axis=1), TILES)
        m0 = gl.maximum(m, gl.convert_layout(m0, ROW))
        m1 = gl.maximum(m0, gl.convert_layout(m1, ROW))
        a0 = rescaling(m, m0, qk_scale)
        a1 = rescaling(m0, m1, qk_scale)
        m = m1
        p0 = probabilities(s0, m0, qk_scale)
        p1 = probabilities(s1, m1, qk_scale)
        a2 = a0
        a3 = a1
        p2 = p0
        p3 = p1
        if TILES == 4:
            m2 = gl.maximum(m1, gl.convert_layout(m2, ROW))
            m3 = gl.maximum(m2, gl.convert_layout(m3, ROW))
            a2 = rescaling(m1, m2, qk_scale)
            a3 = rescaling(m2, m3, qk_scale)
            m = m3
            p2 = probabilities(s2, m2, qk_scale)
            p3 = probabilities(s3, m3, qk_scale)
        p_smem.store(side_by_side(p0.to(dtype), p1.to(dtype), p2.to(dtype), p3.to(dtype), TILES))
        # A tile that is not there adds nothing. All that is left to do beside the values is done before they are in.
        f2 = fold_sum(p2, FOLDED)
        f3 = fold_sum(p3, FOLDED)
        e0, e1, e2, e3 = tree_sums(fold_sum(p0, FOLDED), fold_sum(p1, FOLDED), f2, f3, WARPS, TILES, TREE)
        x0, x1, x2, x3 = spread_scales(a0, a1, a2, a3, TILES, TREE)
        l8 = gl.fma(l8, x0, e0)
        l8 = gl.where(tile + 1 < last_tile, gl.fma(l8, x1, e1), l8)
        if TILES == 4:
            l8 = gl.where(tile + 2 < last_tile, gl.fma(l8, x2, e2), l8)
            l8 = gl.where(tile + 3 < last_tile, gl.fma(l8, x3, e3), l8)
        l = gl.convert_layout(gl.reshape(fold_sum(l8, 1), [ROWS]), ROW)  # noqa: E741 - the literature's name
        for j in gl.static_range(TILES):
            alpha = (a0, a1, a2, a3)[j]
            mbarrier.wait(ready.index((item + TILES + j) % SLOTS), (item + TILES + j) // SLOTS & 1)
            v = as_matrix(ring.index((item + TILES + j) % SLOTS)).load(B)
            added = mma_v2(p_smem.slice(j * BLOCK_N, BLOCK_N, dim=1).load(A), v, acc * gl.expand_dims(alpha, 1))
            acc = gl.where(tile + j < last_tile, added, acc)
            all_threads()
            mbarrier.arrive(empty.index((item + TILES + j) % SLOTS), count=1)
        if (group % PER == PER - 1) | (group == groups - 1):
            if SPLIT:
                at = slot + (first_tile + group * TILES) // (TILES * PER)
                gl.store(part_ptr + slots.to(gl.int64) * HEAD_DIM + at, m, mask=rows_in)
                gl.store(part_ptr + slots.to(gl.int64) * (HEAD_DIM + 1) + at, l, mask=rows_in)
                inside = gl.expand_dims(rows_in, 1)
                gl.store(part_ptr + gl.expand_dims(at, 1) * HEAD_DIM + gl.expand_dims(offs_o, 0), acc, mask=inside)
            else:
                m_all, l_all, acc_all = merge_segment(m_all, l_all, acc_all, m, l, acc, qk_scale, ROW)
            m = no_max
            l8 = no_sum
            acc = no_acc
    if not SPLIT:
        at = gl.expand_dims(query.to(gl.int64) * stride_ot + head.to(gl.int64) * stride_oh, 1)
        gl.store(
            out_ptr + batch.to(gl.int64) * stride_ob + at + gl.expand_dims(offs_o, 0),
            (acc_all / gl.expand_dims(l_all, 1)).to(out_ptr.dtype.element_ty),
            mask=gl.expand_dims(rows_in, 1),
        )


@gluon.jit(do_not_specialize=["tq", "tk", "blocks", "heads_kv", "span", "segments", "slots"])
def decode_kernel(
    q_ptr, k_desc, v_desc, out_ptr, part_ptr, tq, tk, blocks, heads_kv, span, segments, slots, qk_scale,
    stride_qb, stride_qh, stride_qt, stride_ob, stride_oh, stride_ot,
    SPLIT: gl.constexpr, TILES: gl.constexpr, SLOTS: gl.constexpr, EARLY: gl.constexpr, CAUSAL: gl.constexpr,
    GROUP: gl.constexpr, HEAD_DIM: gl.constexpr, SEGMENT: gl.constexpr, BLOCK_N: gl.constexpr, WARPS: gl.constexpr,
):  # fmt: skip
    """16 rows of a KV head of a request: over all segments or (SPLIT) over `span` segments, left apart for the merge.

    k_desc and v_desc are of boxes of BLOCK_N keys.
    """
    launch_dependents()
    ROWS: gl.constexpr = 16
    pid = gl.program_id(0)
    first_row = (blocks - 1 - pid % blocks) * ROWS  # causal: the last blocks see the most keys, so they start first
    kv_head = pid // blocks % heads_kv
    batch = pid // blocks // heads_kv
    lo = 0
    hi = tk
    full = tk  # keys that every row sees
    if CAUSAL:
        hi = gl.minimum(tk, gl.minimum((first_row + ROWS - 1) // GROUP, tq - 1) + 1 + tk - tq)
        full = first_row // GROUP + 1 + tk - tq
    if SPLIT:
        lo = gl.program_id(1) * (span * SEGMENT)
        hi = gl.minimum(hi, lo + span * SEGMENT)
    first_tile = lo // BLOCK_N
    last_tile = (hi + BLOCK_N - 1) // BLOCK_N
    groups = (last_tile - first_tile + TILES - 1) // TILES

    ring = gl.allocate_shared_memory(k_desc.dtype, [SLOTS, 1, 1, BLOCK_N, HEAD_DIM], k_desc.layout)
    rows_of_keys: gl.constexpr = gl.SwizzledSharedLayout(8, 1, 8, [1, 0])
    p_smem = gl.allocate_shared_memory(k_desc.dtype, [ROWS, TILES * BLOCK_N], rows_of_keys)
    ready = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], mbarrier.MBarrierLayout())
    for j in gl.static_range(SLOTS):
        mbarrier.init(ready.index(j), count=1)
        mbarrier.init(empty.index(j), count=1)
    fence_async_shared()
    if EARLY:
        wait_for_kernel_before()  # before anything is read, and before any return
    if SPLIT:  # noqa: SIM102 - known at compile time, the next at run time
        if lo >= hi:
            return  # the merge knows; in one pass, a row that sees no key becomes NaN
    sizes = (tq, tk, heads_kv, segments, slots)
    strides = (stride_qb, stride_qh, stride_qt, stride_ob, stride_oh, stride_ot)
    place = (batch, kv_head, first_row, first_tile, last_tile, full, groups)
    gl.warp_specialize(
        [
            (consumer, (q_ptr, out_ptr, part_ptr, ring, p_smem, ready, empty, sizes, strides, place,
                        qk_scale, SPLIT, TILES, SLOTS, CAUSAL, GROUP, HEAD_DIM, SEGMENT, BLOCK_N, WARPS)),
            (producer, (k_desc, v_desc, ring, ready, empty, batch, kv_head, first_tile, groups, TILES, SLOTS,
                        BLOCK_N)),
        ],
        [1],
        [24],
    )  # fmt: skip
