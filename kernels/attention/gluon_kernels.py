"""The Gluon kernels of attention on Hopper, in a file of their own because a Triton may lack what they need."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language._core import builtin
from triton.experimental.gluon.language.nvidia.ampere import mma_v2
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

# The pieces of the prefill kernel, for one consumer: ROWS queries (64) by the keys of a tile, or by the head dim, in
# float32.

# Triton reads a kernel's annotations itself and allows only gl.constexpr.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators


@builtin
def reinterpret(smem, dtype, shape, layout, _semantic=None):
    """`smem` read as another dtype, shape and layout; Triton 3.7 made the method public."""
    method = getattr(smem, "reinterpret", None) or smem._reinterpret
    return method(dtype, shape, layout, _semantic=_semantic)


@gluon.constexpr_function
def total_layout(head_dim):
    """The layout of a consumer's total, [64, head_dim] float32: each thread's elements, 4 floats at a time.

    The first bits of an address name 4 of the thread's own elements, then the thread, then the rest of its elements: so
    128-bit accesses have no bank conflicts, and no thread reads what another wrote.
    """
    own = [[0, 1], [8, 0]]
    thread = [[0, 2], [0, 4], [1, 0], [2, 0], [4, 0], [16, 0], [32, 0]]
    rest = [[0, 1 << i] for i in range(3, head_dim.bit_length() - 1)]
    return gl.SharedLinearLayout(own + thread + rest, [], 1024)


@gluon.jit
def pin(x):
    """x, computed here and not earlier: the compiler would hoist what follows and run out of registers."""
    return gl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [x], dtype=x.dtype, is_pure=False, pack=1)


@gluon.jit
def fold_sum(x, COLS: gl.constexpr):
    """[M, N] -> [M, COLS]: halved by adding column j and column j + n / 2, again and again."""
    n: gl.constexpr = x.shape[1]
    if n > COLS:
        return fold_sum(gl.sum(gl.reshape(x, [x.shape[0], 2, n // 2]), axis=1), COLS)
    else:  # noqa: RET505 - what follows a return is compiled all the same
        return x


@gluon.jit
def fold_max(x, COLS: gl.constexpr):
    """As `fold_sum`; a maximum has no order, but a tree keeps more lanes busy than a chain."""
    n: gl.constexpr = x.shape[1]
    if n > COLS:
        return fold_max(gl.max(gl.reshape(x, [x.shape[0], 2, n // 2]), axis=1), COLS)
    else:  # noqa: RET505 - what follows a return is compiled all the same
        return x


@gluon.jit
def softmax_step(s, m, l8, qk_scale, ROW: gl.constexpr):
    """A tile's scores -> p (float32, unrounded), the new maximum and 8 partial sums, and the rescaling."""
    m_new = gl.maximum(m, gl.convert_layout(gl.max(fold_max(s, 8), axis=1), ROW))
    m_safe = gl.where(m_new == float("-inf"), 0.0, m_new)  # -inf - -inf is NaN
    neg = -(m_safe * qk_scale)
    alpha = gl.exp2((m - m_safe) * qk_scale)
    p = gl.exp2(gl.fma(s, gl.full_like(s, 0.0) + qk_scale, gl.full_like(s, 0.0) + neg[:, None]))
    part8 = fold_sum(p, 8)
    alpha8 = gl.convert_layout(alpha, gl.SliceLayout(1, part8.type.layout))
    l8 = gl.fma(l8, gl.full_like(part8, 0.0) + alpha8[:, None], part8)
    return p, m_new, l8, alpha


@gluon.jit
def merge_stats(m_all, l_all, m, l8, qk_scale, ROW: gl.constexpr):
    """A segment's maximum and sums into the total's -> those, and the factors of total and segment."""
    l = gl.convert_layout(gl.sum(fold_sum(l8, 2), axis=1), ROW)  # noqa: E741 - the literature's name
    m_new = gl.maximum(m_all, m)
    m_safe = gl.where(m_new == float("-inf"), 0.0, m_new)
    before = gl.exp2((m_all - m_safe) * qk_scale)
    now = gl.exp2((m - m_safe) * qk_scale)
    return m_new, gl.fma(l_all, before, l * now), before, now


@gluon.jit
def merge_acc(total, acc, before, now, first, ACC: gl.constexpr):
    """fma(total, before, acc * now) with the total in shared memory, which is 0 before the first segment."""
    before = before[:, None] + gl.full_like(acc, 0.0)
    scaled = acc * now[:, None]
    if first:  # noqa: SIM108 - a branch, because a ternary would compute both
        merged = gl.fma(gl.full_like(acc, 0.0), before, scaled)
    else:
        merged = gl.fma(total.load(ACC), before, scaled)
    return merged


@gluon.jit
def mask_scores(s, first_key, position, tk, CAUSAL: gl.constexpr, ROW: gl.constexpr, COL: gl.constexpr):
    """-inf where row i, at `position` + i, does not see a key, and beyond the last key."""
    key = pin(gl.arange(0, s.shape[1], layout=COL))
    if CAUSAL:
        limit = gl.minimum(position + gl.arange(0, s.shape[0], layout=ROW), tk - 1) - first_key
        s = gl.where(key[None, :] <= limit[:, None], s, float("-inf"))
    else:
        s = gl.where(key[None, :] < tk - first_key, s, float("-inf"))
    return s


@gluon.jit
def item_of(turn):
    """The work item of this program in its turn: forwards, then backwards, and so on; items are sorted by work."""
    programs = gl.num_programs(0)
    program = gl.program_id(0)
    return turn * programs + gl.where(turn % 2 == 0, program, programs - 1 - program)


@gluon.jit
def work_of(item, blocks, heads_all, tq, tk, CAUSAL: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr):
    """Item -> batch * heads + head, its first query, how many tiles its rows see, and how many of them all rows see.

    Blocks of queries count down, because in causal attention the last sees the most keys; heads change fastest, so that
    heads of one KV head run concurrently and share its tiles in L2.
    """
    block = blocks - 1 - item // heads_all
    first_query = block * BLOCK_M
    if CAUSAL:
        tiles = (gl.minimum(first_query + BLOCK_M, tq) + tk - tq + BLOCK_N - 1) // BLOCK_N
        full = (first_query + tk - tq + 1) // BLOCK_N
    else:
        tiles = (tk + BLOCK_N - 1) // BLOCK_N
        full = tk // BLOCK_N
    return item % heads_all, first_query, tiles, full


@gluon.jit
def as_matrix(smem):
    """[1, 1, rows, cols] of a TMA box -> [rows, cols]."""
    return smem.reshape([smem.shape[-2], smem.shape[-1]])


# The Gluon kernel behind `hopper.prefill`: the order of `attention.cuda` on Hopper's own instructions.
# A program is three warp groups. One warp loads tiles of Q, K and V into shared memory (TMA) and two consumers of 4
# warps compute 64 queries each: scores and values through wgmma, the softmax between them in registers. Programs
# process many blocks of queries, so that one block's last steps hide the next one's first loads.
# A consumer keeps two products in flight. In the step of tile j it starts the scores of tile j, then the values of tile
# j - 1, and turns the scores into probabilities while the values run. Between them comes what must not overlap:
# rescaling the segment's accumulator, and once per segment adding it to the total, which is in shared memory, because
# registers hold only one accumulator.
# The bits do not depend on this: every sum has the order that `attention.cuda` states, by the same instructions or by
# ones proved equal (wgmma of different tile shapes, on hard inputs in tests/kernels/attention/test_cuda.py).


# Triton 3.7 renamed these.
tma_load = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared
tma_store = getattr(tma, "async_store", None) or tma.async_copy_shared_to_global


@gluon.jit
def producer(
    q_desc, k_desc, v_desc, q_smem, k_smem, v_smem, bars, tq, tk, heads_all, heads, blocks, items,
    GROUP: gl.constexpr, CAUSAL: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Load Q once per item, then K and V tile by tile, as far ahead as there are stages."""
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
    """Compute one half of every item's queries; the comment above `producer` has the order of steps."""
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
            mbarrier.wait(q_full, turn & 1)
            stage = n % STAGES
            mbarrier.wait(k_full.index(stage), (n // STAGES) & 1)
            s = warpgroup_mma(q, as_matrix(k_smem.index(stage)).permute([1, 0]), no_score, use_acc=False, is_async=True)
            s = warpgroup_mma_wait(0, [s])
            mbarrier.arrive(k_empty.index(stage), count=1)
            if full == 0:
                s = mask_scores(s, 0, position, tk, CAUSAL, ROW, COL)
            p32, m, l8, alpha = softmax_step(s, no_max, no_sum, qk_scale, ROW)
            tma.store_wait(0)  # the previous item has left shared memory, which the total uses next
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
                mbarrier.wait(v_full.index(stage), phase)  # here, because a wait keeps the softmax above the next one
                acc, p = warpgroup_mma_wait(0, [acc_run, p])
                mbarrier.arrive(v_empty.index(v_stage), count=1)
                if first:
                    m_all, l_all, before_row, now_row = merge_stats(m_all, l_all, m_before, l8_before, qk_scale, ROW)
                    before = gl.convert_layout(before_row, ACC_ROW)
                    now = gl.convert_layout(now_row, ACC_ROW)
                p = gl.convert_layout(p32.to(dtype), PROB, assert_trivial=True)
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


# The pieces of the decode kernels, on TILES (2 or 4) tiles of 16 rows at once, in float32. Of 2 tiles the last two of
# four names repeat the first two.


@builtin
def launch_dependents(_semantic=None):
    """Let the next kernel start."""
    instruction = "griddepcontrol.launch_dependents; // $0"
    gl.inline_asm_elementwise(instruction, "=r", [], dtype=gl.int32, is_pure=False, pack=1, _semantic=_semantic)


@builtin
def wait_for_kernel_before(_semantic=None):
    """Wait until everything that the previous kernel has written is visible."""
    instruction = "griddepcontrol.wait; // $0"
    gl.inline_asm_elementwise(instruction, "=r", [], dtype=gl.int32, is_pure=False, pack=1, _semantic=_semantic)


@gluon.jit
def join_tiles(x0, x1, x2, x3, TILES: gl.constexpr):
    """TILES tensors of one shape -> one with axes [..., 2] (of 2) or [..., 2, 2] (of 4)."""
    return gl.join(gl.join(x0, x1), gl.join(x2, x3)) if TILES == 4 else gl.join(x0, x1)


@gluon.jit
def side_by_side(x0, x1, x2, x3, TILES: gl.constexpr):
    """TILES tensors [M, N] -> [M, TILES * N]."""
    x = join_tiles(x0, x1, x2, x3, TILES)
    x = gl.permute(x, [0, 3, 2, 1]) if TILES == 4 else gl.permute(x, [0, 2, 1])
    return gl.reshape(x, [x0.shape[0], TILES * x0.shape[1]])


@gluon.jit
def split_tiles(x, TILES: gl.constexpr):
    """The inverse of `join_tiles`; of 2 tiles, the last two results repeat the first two."""
    if TILES == 4:
        x01, x23 = gl.split(x)
        x0, x1 = gl.split(x01)
        x2, x3 = gl.split(x23)
    else:
        x0, x1 = gl.split(x)
        x2 = x0
        x3 = x1
    return x0, x1, x2, x3


@gluon.jit
def fold_groups(x):
    """[M, G, 8, ...] -> [M, 8, ...], a tree of halves over G; as `fold`, but for the axes behind."""
    n: gl.constexpr = x.shape[1]
    if n > 1:
        rest: gl.constexpr = x.shape[2:]
        return fold_groups(gl.sum(gl.reshape(x, [x.shape[0], 2, n // 2] + rest), axis=1))  # noqa: RUF005 - the compiler does not support unpacking
    else:  # noqa: RET505 - as above
        return gl.reshape(x, [x.shape[0]] + x.shape[2:])  # noqa: RUF005 - the compiler does not support unpacking


@gluon.jit
def tree_sums(f0, f1, f2, f3, WARPS: gl.constexpr, TILES: gl.constexpr, TREE: gl.constexpr):
    """Of TILES tiles whose columns are folded to 8 * WARPS: the eight sums per row of each, [ROWS, 8]."""
    joined = join_tiles(f0, f1, f2, f3, TILES)
    tree = gl.convert_layout(gl.reshape(joined, [f0.shape[0], WARPS, 8] + joined.shape[2:]), TREE)  # noqa: RUF005 - the compiler does not support unpacking
    return split_tiles(gl.convert_layout(fold_groups(tree), gl.SliceLayout(1, TREE)), TILES)


@gluon.jit
def spread_scales(a0, a1, a2, a3, TILES: gl.constexpr, TREE: gl.constexpr):
    """A factor per row of TILES tiles -> each as [ROWS, 8], in the layout of `tree_sums`' results."""
    joined = gl.convert_layout(join_tiles(a0, a1, a2, a3, TILES), gl.SliceLayout(1, gl.SliceLayout(1, TREE)))
    zero = gl.full([a0.shape[0], 8] + joined.shape[1:], 0.0, gl.float32, gl.SliceLayout(1, TREE))  # noqa: RUF005 - the compiler does not support unpacking
    return split_tiles(zero + gl.expand_dims(joined, 1), TILES)


@gluon.jit
def probabilities(s, m, qk_scale):
    """exp2(fma(score, scale, -maximum * scale)) of a tile, with the maximum up to this tile."""
    m_safe = gl.where(m == float("-inf"), 0.0, m)  # -inf - -inf is NaN
    shift = -(m_safe * qk_scale)
    return gl.exp2(gl.fma(s, gl.full_like(s, 0.0) + qk_scale, gl.full_like(s, 0.0) + gl.expand_dims(shift, 1)))


@gluon.jit
def rescaling(m_before, m, qk_scale):
    """What the sums before a tile are multiplied by."""
    m_safe = gl.where(m == float("-inf"), 0.0, m)
    return gl.exp2((m_before - m_safe) * qk_scale)


@gluon.jit
def merge_segment(m_all, l_all, acc_all, m, l, acc, qk_scale, ROW: gl.constexpr):  # noqa: E741 - the literature's name
    """`triton_kernels.merge`: (m, l, acc) of a segment into that of the segments before it."""
    m_new = gl.maximum(m_all, m)
    m_safe = gl.where(m_new == float("-inf"), 0.0, m_new)
    before = gl.exp2((m_all - m_safe) * qk_scale)
    now = gl.exp2((m - m_safe) * qk_scale)
    empty = (m == float("-inf")) & (l == 0.0)
    l_all = gl.where(empty, l_all, gl.fma(l_all, before, l * now))
    zero = gl.full_like(acc, 0.0)
    merged = gl.fma(acc_all, zero + gl.expand_dims(before, 1), acc * gl.expand_dims(now, 1))
    return m_new, l_all, gl.where(gl.expand_dims(empty, 1), acc_all, merged)


# The Gluon kernel that merges the segments of a row: the order of `triton_kernels.merge_kernel`, bit for bit.
# It computes the factors of all segments at once, one segment per lane, because the running maximum is exact. The rest
# is a chain of one fused multiply-add per segment, with all of its operands in registers before it starts.


@gluon.jit
def request_of(cu_q_ptr, cu_k_ptr, request, tq, tk, VARLEN: gl.constexpr):
    """(first query, queries, first key, keys) of a request; firsts in units of stride_*b."""
    if VARLEN:
        q0 = gl.load(cu_q_ptr + request)
        k0 = gl.load(cu_k_ptr + request)
        nq = gl.load(cu_q_ptr + request + 1) - q0
        nk = gl.load(cu_k_ptr + request + 1) - k0
    else:
        q0 = request
        k0 = request
        nq = tq
        nk = tk
    return q0.to(gl.int64), nq, k0.to(gl.int64), nk


@gluon.jit
def _larger(a, b):
    return gl.maximum(a, b)


@gluon.jit
def chain(total, factor, added):
    """fma(total, factor, added), row after row of factor and added [S, COLUMNS]; S a power of two."""
    n: gl.constexpr = added.shape[0]
    columns: gl.constexpr = added.shape[1]
    if n > 1:
        first, second = gl.split(gl.permute(gl.reshape(added, [2, n // 2, columns]), [1, 2, 0]))
        first_factor, second_factor = gl.split(gl.permute(gl.reshape(factor, [2, n // 2, columns]), [1, 2, 0]))
        return chain(chain(total, first_factor, first), second_factor, second)
    else:  # noqa: RET505 - what follows a return is compiled all the same
        layout: gl.constexpr = total.type.layout
        factor = gl.convert_layout(gl.reshape(factor, [columns]), layout)
        return gl.fma(total, factor, gl.convert_layout(gl.reshape(added, [columns]), layout))


@gluon.jit(
    do_not_specialize=["tq", "tk", "heads", "max_rows", "segments", "rows_per_start", "slots"],
    do_not_specialize_on_alignment=["cu_q_ptr", "cu_k_ptr"],
)
def merge_all_kernel(
    part_ptr, out_ptr, cu_q_ptr, cu_k_ptr, tq, tk, heads, max_rows, segments, rows_per_start, slots, qk_scale,
    stride_ob, stride_oh, stride_ot,
    CHUNK: gl.constexpr, VARLEN: gl.constexpr, CAUSAL: gl.constexpr, HEAD_DIM: gl.constexpr, SEGMENT: gl.constexpr,
):  # fmt: skip
    """32 columns of one row, by one warp: its segments merged in order; reads up to CHUNK segments behind the last."""
    COLUMNS: gl.constexpr = 32
    LANES: gl.constexpr = gl.BlockedLayout([CHUNK // 32 if CHUNK > 32 else 1], [32], [1], [0])  # one segment per lane
    TILE: gl.constexpr = gl.BlockedLayout([CHUNK, 1], [1, 32], [1, 1], [1, 0])  # one column per lane, all segments
    SEG: gl.constexpr = gl.SliceLayout(1, TILE)
    COL: gl.constexpr = gl.SliceLayout(0, TILE)
    pid = gl.program_id(0)
    q0, nq, _, nk = request_of(cu_q_ptr, cu_k_ptr, pid // max_rows, tq, tk, VARLEN)
    query = pid % max_rows // heads
    head = pid % max_rows % heads
    launch_dependents()
    wait_for_kernel_before()  # before any return: a kernel that follows may start once these programs are gone
    if query >= nq:
        return
    seen = nk
    if CAUSAL:
        seen = gl.minimum(nk, query + 1 + nk - nq)
    end = (seen + SEGMENT - 1) // SEGMENT
    base = ((q0 * rows_per_start + query) * heads + head) * segments
    m_ptr = part_ptr + slots.to(gl.int64) * HEAD_DIM + base
    l_ptr = part_ptr + slots.to(gl.int64) * (HEAD_DIM + 1) + base
    offs_d = gl.program_id(1) * COLUMNS + gl.arange(0, COLUMNS, layout=COL)
    part_ptr += base * HEAD_DIM
    total = gl.full([COLUMNS], 0.0, gl.float32, COL)
    l_all = gl.full([COLUMNS], 0.0, gl.float32, COL)
    m_all = float("-inf")
    for start in range(0, end, CHUNK):
        # What is read beyond the end, or before the start, is not used: a mask would keep loads from running ahead.
        at = gl.arange(0, CHUNK, layout=SEG)
        acc = gl.load(part_ptr + start * HEAD_DIM + gl.expand_dims(at, 1) * HEAD_DIM + gl.expand_dims(offs_d, 0))
        lane = start + gl.arange(0, CHUNK, layout=LANES)
        m = gl.load(m_ptr + lane)
        l = gl.load(l_ptr + lane)  # noqa: E741 - the literature's name
        before_m = gl.load(m_ptr + lane - 1)
        before_m = gl.maximum(gl.where(lane == start, float("-inf"), before_m), m_all)
        m_before = gl.associative_scan(before_m, 0, _larger)
        m_new = gl.maximum(m_before, m)
        m_safe = gl.where(m_new == float("-inf"), 0.0, m_new)
        before = gl.exp2((m_before - m_safe) * qk_scale)
        now = gl.exp2((m - m_safe) * qk_scale)
        # A segment that adds nothing: x * 1 + -0 is x for every x. Its sums may be NaN, so they are left out.
        skip = ((m == float("-inf")) & (l == 0.0)) | (lane >= end)
        before = gl.where(skip, 1.0, before)
        added = gl.where(skip, -0.0, l * now)
        now = gl.where(skip, -1.0, now)
        m_all = gl.max(m_new, axis=0)
        spread = gl.full([CHUNK, COLUMNS], 0.0, gl.float32, TILE)
        factor = spread + gl.expand_dims(gl.convert_layout(before, SEG), 1)
        now = spread + gl.expand_dims(gl.convert_layout(now, SEG), 1)
        l_all = chain(l_all, factor, gl.expand_dims(gl.convert_layout(added, SEG), 1) - spread)
        total = chain(total, factor, gl.where(now < 0.0, -0.0, acc * now))
    out_ptr += q0 * stride_ob + query.to(gl.int64) * stride_ot + head.to(gl.int64) * stride_oh
    gl.store(out_ptr + offs_d, (total / l_all).to(out_ptr.dtype.element_ty))


# The Gluon kernels behind `hopper.decode_kernel`: the order of `cuda` for few rows, a group of tiles at a time.
# A decode step is limited by latency. Within a segment only two things form a chain over the tiles: the maximum, which
# is exact and so may be taken of all tiles at once, and the accumulator. So a program computes the scores of TILES
# tiles (a segment, or half of one), exchanges their maxima between its warps once, turns all scores into probabilities,
# and only then adds the products with the values to one accumulator, in order. A warp that does nothing else loads
# tiles of K and V (TMA) through one ring of slots in the order of their use, so the computing warps execute few
# instructions.


# Triton 3.7 renamed these.

all_threads = getattr(gl, "barrier", None) or gl.thread_barrier


@gluon.jit
def decode_producer(
    k_desc, v_desc, index_ptr, ring, ready, empty, batch, kv_head, first_tile, groups, keys,
    TILES: gl.constexpr, SLOTS: gl.constexpr, BLOCK_N: gl.constexpr, PAGE: gl.constexpr,
):  # fmt: skip
    """Load TILES tiles of K, then of V, as far ahead as there are slots; behind the last page zeros are read."""
    if PAGE == 0:
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
    else:
        PAGES: gl.constexpr = BLOCK_N // PAGE
        for item in range(groups * (2 * TILES)):
            j = item % (2 * TILES)
            key = (first_tile + item // (2 * TILES) * TILES + j % TILES) * BLOCK_N
            places = ()
            for i in gl.static_range(PAGES):
                place = gl.load(index_ptr + gl.minimum(key + i * PAGE, keys - 1))
                places = places + (place,)  # type: ignore[assignment]  # noqa: RUF005 - a tuple grows while Gluon traces
            barrier = ready.index(item % SLOTS)
            slot = ring.index(item % SLOTS)
            mbarrier.wait(empty.index(item % SLOTS), (item // SLOTS & 1) ^ 1)
            mbarrier.expect(barrier, k_desc.block_type.nbytes * PAGES)
            for i in gl.static_range(PAGES):
                place = gl.where(key + i * PAGE < keys, places[i], 1 << 30)
                part = slot.slice(i * PAGE, PAGE, dim=2)
                if j < TILES:
                    tma_load(k_desc, [0, kv_head, place, 0], barrier, part)
                else:
                    tma_load(v_desc, [0, kv_head, place, 0], barrier, part)


@gluon.jit
def decode_consumer(
    q_ptr, out_ptr, part_ptr, ring, p_smem, ready, empty, sizes, strides, place, qk_scale,
    SPLIT: gl.constexpr, TILES: gl.constexpr, SLOTS: gl.constexpr, CAUSAL: gl.constexpr,
    GROUP: gl.constexpr, HEAD_DIM: gl.constexpr, SEGMENT: gl.constexpr, BLOCK_N: gl.constexpr, PAGE: gl.constexpr,
    WARPS: gl.constexpr,
):  # fmt: skip
    """Compute 16 rows; the comment above `decode_producer` has the order of steps."""
    tq, tk, q0, rows_per_start, heads_kv, segments, slots = sizes
    stride_qb, stride_qh, stride_qt, stride_ob, stride_oh, stride_ot = strides
    kv_head, first_row, first_tile, last_tile, full, groups = place
    ROWS: gl.constexpr = 16
    PER: gl.constexpr = SEGMENT // BLOCK_N // TILES  # groups of a segment
    MMA: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [1, WARPS], [16, 8])
    A: gl.constexpr = gl.DotOperandLayout(0, MMA, 2)
    B: gl.constexpr = gl.DotOperandLayout(1, MMA, 2)
    ROW: gl.constexpr = gl.SliceLayout(1, MMA)
    COL: gl.constexpr = gl.SliceLayout(0, MMA)
    Q: gl.constexpr = gl.BlockedLayout([1, 8], [256 // HEAD_DIM, HEAD_DIM // 8], [WARPS, 1], [1, 0])
    # Sums: a thread has a row and a column of 8, and holds the rest of that column's tree in all tiles of a group.
    FOLDED: gl.constexpr = 8 * WARPS  # columns of which one warp holds whole halves
    TREE: gl.constexpr = (
        gl.BlockedLayout([1, WARPS, 1, 2, 2], [4, 1, 8, 1, 1], [4, 1, 1, WARPS // 4, 1], [4, 3, 1, 2, 0])
        if TILES == 4
        else gl.BlockedLayout([1, WARPS, 1, 2], [4, 1, 8, 1], [4, 1, 1, WARPS // 4], [3, 1, 2, 0])
    )

    dtype: gl.constexpr = ring.dtype
    rows = first_row + gl.arange(0, ROWS, layout=gl.SliceLayout(1, Q))
    offs_q = gl.arange(0, HEAD_DIM, layout=gl.SliceLayout(0, Q))
    q_ptr += q0 * stride_qb
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
    slot = ((q0 * rows_per_start + query) * (heads_kv * GROUP) + head) * segments

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
        # A missing tile adds nothing. All other work that the values do not need is done before they arrive.
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
            if PAGE > 0:  # noqa: SIM102 - known at compile time, the next at run time
                if (tile + j + 1) * BLOCK_N > tk:  # a last page holds old numbers, NaN perhaps
                    left = tk - (tile + j) * BLOCK_N
                    v = gl.where(gl.expand_dims(gl.arange(0, BLOCK_N, layout=gl.SliceLayout(1, B)) < left, 1), v, 0.0)
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
            out_ptr + q0 * stride_ob + at + gl.expand_dims(offs_o, 0),
            (acc_all / gl.expand_dims(l_all, 1)).to(out_ptr.dtype.element_ty),
            mask=gl.expand_dims(rows_in, 1),
        )


@gluon.jit(
    do_not_specialize=["tq", "tk", "blocks", "heads_kv", "span", "segments", "rows_per_start", "slots"],
    do_not_specialize_on_alignment=["cu_q_ptr", "cu_k_ptr", "index_ptr"],
)
def decode_kernel(
    q_ptr, k_desc, v_desc, out_ptr, part_ptr, cu_q_ptr, cu_k_ptr, index_ptr,
    tq, tk, blocks, heads_kv, span, segments, rows_per_start, slots, qk_scale,
    stride_qb, stride_qh, stride_qt, stride_ob, stride_oh, stride_ot,
    SPLIT: gl.constexpr, TILES: gl.constexpr, SLOTS: gl.constexpr, EARLY: gl.constexpr, VARLEN: gl.constexpr,
    CAUSAL: gl.constexpr, GROUP: gl.constexpr, HEAD_DIM: gl.constexpr, SEGMENT: gl.constexpr, BLOCK_N: gl.constexpr,
    PAGE: gl.constexpr, WARPS: gl.constexpr,
):  # fmt: skip
    """16 rows of a KV head of a request: over all segments or (SPLIT) over `span` segments, kept separate for the
    merge.

    k_desc and v_desc are of boxes of BLOCK_N keys; or (PAGE) of as many as lie together, key i of all at index_ptr[i].
    """
    launch_dependents()
    ROWS: gl.constexpr = 16
    pid = gl.program_id(0)
    first_row = (blocks - 1 - pid % blocks) * ROWS  # causal: the last blocks see the most keys, so they start first
    kv_head = pid // blocks % heads_kv
    batch = pid // blocks // heads_kv
    if EARLY and VARLEN:
        wait_for_kernel_before()  # which may have written where requests begin
    q0, nq, k0, nk = request_of(cu_q_ptr, cu_k_ptr, batch, tq, tk, VARLEN)
    if PAGE > 0:
        index_ptr += k0
    lo = 0
    hi = nk
    full = nk  # keys that every row sees
    if CAUSAL:
        hi = gl.minimum(nk, gl.minimum((first_row + ROWS - 1) // GROUP, nq - 1) + 1 + nk - nq)
        full = first_row // GROUP + 1 + nk - nq
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
    if EARLY and not VARLEN:
        wait_for_kernel_before()  # before anything is read, and before any return
    if SPLIT:  # noqa: SIM102 - known at compile time, the next at run time
        if lo >= hi:
            return  # the merge handles these; in one pass, a row that sees no key becomes NaN
    sizes = (nq, nk, q0, rows_per_start, heads_kv, segments, slots)
    strides = (stride_qb, stride_qh, stride_qt, stride_ob, stride_oh, stride_ot)
    place = (kv_head, first_row, first_tile, last_tile, full, groups)
    gl.warp_specialize(
        [
            (decode_consumer, (q_ptr, out_ptr, part_ptr, ring, p_smem, ready, empty, sizes, strides, place,
                        qk_scale, SPLIT, TILES, SLOTS, CAUSAL, GROUP, HEAD_DIM, SEGMENT, BLOCK_N, PAGE, WARPS)),
            (decode_producer, (k_desc, v_desc, index_ptr, ring, ready, empty, batch, kv_head, first_tile, groups, nk,
                        TILES, SLOTS, BLOCK_N, PAGE)),
        ],
        [1],
        [24],
    )  # fmt: skip
