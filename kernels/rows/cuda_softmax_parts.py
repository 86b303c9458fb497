"""Parts of `nondet.kernels.rows.cuda_softmax`: its formulas, and the kernels for rows of several chunks."""

# Triton reads a kernel's annotations itself: only tl.constexpr may stand there.
# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

import triton
import triton.language as tl

from nondet.kernels.rows.cuda_parts import add_tree, load_tile, store_tile
from nondet.kernels.triton_common import INTERPRETED

__all__ = [
    "merged_pairs",
    "normalized",
    "one_each",
    "one_each_merge_kernel",
    "pairs_kernel",
    "raised",
    "results_kernel",
    "safe",
    "sum_exp",
    "turns_kernel",
]

_ASSEMBLY = tl.constexpr(not INTERPRETED)
_LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def raised(x):
    """exp; in float32 without the three instructions an element that would save subnormal results: they become 0."""
    if x.dtype == tl.float32 and _ASSEMBLY:
        out = tl.inline_asm_elementwise(
            "ex2.approx.ftz.f32 $0, $1;", "=f,f", [x * _LOG2_E], dtype=tl.float32, is_pure=True, pack=1
        )
    else:
        out = tl.exp(x)
    return out


@triton.jit
def safe(top):
    """0 for an infinite maximum, which as a subtrahend would make NaN of what equals it."""
    return tl.where(tl.abs(top) == float("inf"), 0.0, top)


@triton.jit
def sum_exp(x, top, ROWS: tl.constexpr, SPAN: tl.constexpr, HALVES: tl.constexpr, LEVELS: tl.constexpr):
    """s_c: x [ROWS, SPAN], -inf beyond its end, and its maxima [ROWS, 1] -> sums of exp(x - top) [ROWS, 1]."""
    return add_tree(raised(x - safe(top)), ROWS, SPAN, HALVES, LEVELS)


@triton.jit
def normalized(x, top, total, LOG: tl.constexpr):
    """softmax or log_softmax of x. A row whose maximum is infinite is NaN throughout, as in PyTorch."""
    total = tl.where(tl.abs(top) == float("inf"), float("nan"), total)
    return x - top - tl.log(total) if LOG else raised(x - top) * (1.0 / total)


@triton.jit
def one_each(x_ptr, target_ptr, rows, top, total, WIDTH, IGNORE, stride_row, stride_col, M, LOSS: tl.constexpr):
    """logsumexp of `rows` [ROWS, 1], or their losses: 0 where the target is IGNORE, NaN where it is no column."""
    if LOSS:
        target = tl.load(target_ptr + rows, mask=rows < M, other=0).to(tl.int64)
        valid = (target >= 0) & (target < WIDTH)
        at = tl.load(x_ptr + rows * stride_row + target * stride_col, mask=valid & (rows < M), other=0.0)
        loss = -normalized(at.to(top.dtype), top, total, True)
        out = tl.where(target == IGNORE, 0.0, tl.where(valid, loss, float("nan")))
    else:
        out = tl.log(total) + safe(top)
    return out


@triton.jit
def _write_pair(
    x, tops_ptr, sums_ptr, row, chunk, CHUNKS, M, SPAN: tl.constexpr, HALVES: tl.constexpr, LEVELS: tl.constexpr
):
    """x [1, SPAN], chunk `chunk` of `row` -> (m_c, s_c) in tops, sums [M, CHUNKS]."""
    top = tl.max(x, axis=1)[:, None]
    store_tile(tops_ptr, top, row, chunk, CHUNKS, CHUNKS, M, 1, 1)
    store_tile(sums_ptr, sum_exp(x, top, 1, SPAN, HALVES, LEVELS), row, chunk, CHUNKS, CHUNKS, M, 1, 1)


@triton.jit
def merged_pairs(tops, sums, MERGE: tl.constexpr, MERGE_LEVELS: tl.constexpr):
    """Pairs [MERGE], filled up with (-inf, 0) -> M and S, scalars, which any layout takes as they are."""
    top = tl.max(tops, axis=0)
    scaled = sums * raised(tops - safe(top))
    return top, tl.sum(add_tree(scaled[None, :], 1, MERGE, 0, MERGE_LEVELS))  # the sum of one number


@triton.jit
def _merge_row(tops_ptr, sums_ptr, row, CHUNKS, MERGE: tl.constexpr, MERGE_LEVELS: tl.constexpr):
    """The pairs of a row -> its M and S."""
    index = tl.arange(0, MERGE)
    at = row.to(tl.int64) * CHUNKS + index
    # past the L1 cache, which knows nothing of another SM's writing
    tops = tl.load(tops_ptr + at, mask=index < CHUNKS, other=float("-inf"), cache_modifier=".cg")
    sums = tl.load(sums_ptr + at, mask=index < CHUNKS, other=0.0, cache_modifier=".cg")
    return merged_pairs(tops, sums, MERGE, MERGE_LEVELS)


@triton.jit(do_not_specialize=["M"])
def pairs_kernel(
    x_ptr,
    tops_ptr,
    sums_ptr,
    M,
    WIDTH,
    stride_row,
    stride_col,
    CHUNKS,
    SPAN: tl.constexpr,
    HALVES: tl.constexpr,
    LEVELS: tl.constexpr,
    ACC: tl.constexpr,
):
    """x [M, WIDTH] -> the pairs of all chunks [M, CHUNKS], one a program."""
    row = tl.program_id(0) // CHUNKS
    chunk = tl.program_id(0) % CHUNKS
    x = load_tile(x_ptr, row, chunk * SPAN, WIDTH, stride_row, stride_col, M, 1, SPAN, float("-inf")).to(ACC)
    _write_pair(x, tops_ptr, sums_ptr, row, chunk, CHUNKS, M, SPAN, HALVES, LEVELS)


@triton.jit(do_not_specialize=["M"])
def results_kernel(
    x_ptr,
    out_ptr,
    tops_ptr,
    sums_ptr,
    M,
    WIDTH,
    stride_row,
    stride_col,
    CHUNKS,
    LOG: tl.constexpr,
    SPAN: tl.constexpr,
    MERGE: tl.constexpr,
    MERGE_LEVELS: tl.constexpr,
    ACC: tl.constexpr,
):
    """x and its pairs -> out [M, WIDTH], one chunk a program."""
    row = tl.program_id(0) // CHUNKS
    start = tl.program_id(0) % CHUNKS * SPAN
    x = load_tile(x_ptr, row, start, WIDTH, stride_row, stride_col, M, 1, SPAN, float("-inf")).to(ACC)
    top, total = _merge_row(tops_ptr, sums_ptr, row, CHUNKS, MERGE, MERGE_LEVELS)
    store_tile(out_ptr, normalized(x, top, total, LOG), row, start, WIDTH, WIDTH, M, 1, SPAN)


@triton.jit(do_not_specialize=["M", "LAG"])
def turns_kernel(
    x_ptr,
    out_ptr,
    tops_ptr,
    sums_ptr,
    made_ptr,
    M,
    WIDTH,
    stride_row,
    stride_col,
    CHUNKS,
    LAG,
    LOG: tl.constexpr,
    EACH: tl.constexpr,
    SPAN: tl.constexpr,
    HALVES: tl.constexpr,
    LEVELS: tl.constexpr,
    MERGE: tl.constexpr,
    MERGE_LEVELS: tl.constexpr,
    ACC: tl.constexpr,
):
    """Both in one launch, EACH chunks a program, the next chunk on its way while one is computed.

    Programs take turns: an even one makes pairs, the odd one after it writes the same chunks of the row LAG before,
    once all pairs of that row are made. These are the work of lower numbers, which wait for nothing. A program draws
    its number as it starts (made_ptr[M] counts them), so lower numbers have started, in whatever order the GPU starts
    programs. So every wait ends, and as a rule it is over before it begins.
    """
    ticket = tl.atomic_add(made_ptr + M, 1, sem="relaxed")
    turn = ticket // 2
    blocks = tl.cdiv(CHUNKS, EACH)
    row = turn // blocks
    chunk = turn % blocks * EACH
    NONE: tl.constexpr = float("-inf")
    if ticket % 2 == 0:
        if row < M:
            x = load_tile(x_ptr, row, chunk * SPAN, WIDTH, stride_row, stride_col, M, 1, SPAN, NONE)
            for i in tl.static_range(EACH):
                if i + 1 < EACH:
                    start = (chunk + i + 1) * SPAN
                    ahead = load_tile(x_ptr, row, start, WIDTH, stride_row, stride_col, M, 1, SPAN, NONE)
                _write_pair(x.to(ACC), tops_ptr, sums_ptr, row, chunk + i, CHUNKS, M, SPAN, HALVES, LEVELS)
                if i + 1 < EACH:
                    x = ahead
            tl.debug_barrier()  # all of them are written, by whichever threads, before it is said
            tl.atomic_add(made_ptr + row, 1, sem="release")
    else:
        row -= LAG
        if row >= 0:
            x = load_tile(x_ptr, row, chunk * SPAN, WIDTH, stride_row, stride_col, M, 1, SPAN, NONE)
            made = tl.atomic_add(made_ptr + row, 0, sem="acquire")
            while made < blocks:
                made = tl.atomic_add(made_ptr + row, 0, sem="acquire")
            top, total = _merge_row(tops_ptr, sums_ptr, row, CHUNKS, MERGE, MERGE_LEVELS)
            for i in tl.static_range(EACH):
                start = (chunk + i) * SPAN
                if i + 1 < EACH:
                    ahead = load_tile(x_ptr, row, start + SPAN, WIDTH, stride_row, stride_col, M, 1, SPAN, NONE)
                store_tile(out_ptr, normalized(x.to(ACC), top, total, LOG), row, start, WIDTH, WIDTH, M, 1, SPAN)
                if i + 1 < EACH:
                    x = ahead


@triton.jit(do_not_specialize=["M", "IGNORE"])
def one_each_merge_kernel(
    x_ptr,
    target_ptr,
    tops_ptr,
    sums_ptr,
    out_ptr,
    M,
    WIDTH,
    stride_row,
    stride_col,
    CHUNKS,
    IGNORE,
    LOSS: tl.constexpr,
    MERGE: tl.constexpr,
    MERGE_LEVELS: tl.constexpr,
):
    """The pairs of a row -> its logsumexp or its loss."""
    row = tl.program_id(0)
    rows = (row.to(tl.int64) + tl.arange(0, 1))[:, None]
    top, total = _merge_row(tops_ptr, sums_ptr, row, CHUNKS, MERGE, MERGE_LEVELS)
    tops = tl.full((1, 1), top, top.dtype)
    totals = tl.full((1, 1), total, total.dtype)
    out = one_each(x_ptr, target_ptr, rows, tops, totals, WIDTH, IGNORE, stride_row, stride_col, M, LOSS)
    store_tile(out_ptr, out, row, 0, 1, 1, M, 1, 1)
