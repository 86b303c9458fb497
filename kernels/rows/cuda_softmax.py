"""softmax, log_softmax, logsumexp and cross-entropy on CUDA, invariant over rows; and the order of class "lanes".

A row is cut into chunks (one, up to a width of 16384). With T the trees of class "lanes" (below), m_c the exact maximum
of chunk c and M that of the row:

    s_c = T over the chunk of exp(x - m_c)        S = T over chunks of s_c * exp(m_c - M)

    softmax = exp(x - M) * (1 / S)       log_softmax = (x - M) - log(S)
    logsumexp = log(S) + M               loss at target t = -((x[t] - M) - log(S))

where 0 replaces an infinite maximum as a subtrahend in s_c, S and logsumexp, so that a row of only -inf has S = 0. All
of this depends only on the width. exp is the hardware's (ex2.approx for float32, about 2 ULP of its argument; subnormal
results are 0), the same for every element.

The launch changes only speed: a row of one chunk is read once and held in registers. So are many wider rows in half
precision on Hopper, by warps that exchange the pairs (m_c, s_c) of their chunks. Other wide rows are read twice, the
second time from the cache. If all rows fit there, one launch makes the pairs, another merges each row's pairs and
writes the result. Otherwise one launch does both, with the second reading of a row some megabytes behind the first.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from nondet.core.launch import note
from nondet.kernels.triton_common import (
    HALF,
    INTERPRETED,
    Step,
    accumulator,
    again,
    capability,
    launch,
    multiprocessors,
    on_device,
    remember,
    require,
)

# The class "lanes" (`LANES` in operator.py says the order) is in the source, not in the compiler's layout: only the
# width decides. Step 1 adds up a chunk, step 2 the chunks' results.
# Every step adds exactly two numbers, and floating addition commutes. So no bit depends on the number of rows, the
# row's position, alignment or strides, the number of warps or of rows in a program, nor on whether the chunks of a row
# run in one program or in many. (`tl.sum` over a whole block would leave the order to the layout, which follows the
# alignment of the pointer.) Multiplications are not contracted into additions (enable_fp_fusion=False).
# Step 1 suits the hardware: a thread holds eight neighbours of every LANES, adds its own first, then with the threads
# of its warp, then over warps. A tree is also more accurate than a chain. Sums are kept in float32, in float64 for
# float64.

# Triton reads a kernel's annotations itself and allows only tl.constexpr.
# mypy: allow-untyped-defs, allow-incomplete-defs

DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
# the widest row that a program holds in registers: 64 elements a thread of 8 warps, in half precision
_ONE_CHUNK = 16384
_CHUNK = 4096  # of wider rows: short enough to spread one row of a vocabulary over many SMs
_MIN_LANES, _MAX_LANES = 256, 2048
_FILLED = 1024  # programs that fill a GPU several times over; beyond this, programs of more rows save instructions


@triton.jit
def add_tree(x, ROWS: tl.constexpr, SPAN: tl.constexpr, HALVES: tl.constexpr, LEVELS: tl.constexpr):
    """x [ROWS, SPAN] -> [ROWS, 1]: HALVES times by halves, then LEVELS times by neighbours; class "lanes", step 1."""
    for level in tl.static_range(HALVES):
        x = tl.sum(tl.reshape(x, (ROWS, 2, SPAN >> (level + 1))), axis=1)
    for level in tl.static_range(LEVELS):
        x = tl.sum(tl.reshape(x, (ROWS, SPAN >> (HALVES + level + 1), 2)), axis=2)
    return x


@triton.jit
def load_tile(
    x_ptr, first, start, end, stride_row, stride_col, M, ROWS: tl.constexpr, SPAN: tl.constexpr, OTHER: tl.constexpr
):
    """[ROWS, SPAN]: elements start ... of rows first ..., OTHER from `end` on; the last row again for rows beyond M."""
    rows = tl.minimum(first.to(tl.int64) + tl.arange(0, ROWS), M - 1)
    cols = start + tl.arange(0, SPAN)
    return tl.load(
        x_ptr + rows[:, None] * stride_row + cols[None, :] * stride_col, mask=cols[None, :] < end, other=OTHER
    )


@triton.jit
def store_tile(out_ptr, values, first, start, end, stride, M, ROWS: tl.constexpr, SPAN: tl.constexpr):
    """Write [ROWS, SPAN] at column `start` of rows first ... of a result with rows `stride` apart, rounded once."""
    rows = first.to(tl.int64) + tl.arange(0, ROWS)
    cols = start + tl.arange(0, SPAN)
    inside = (rows[:, None] < M) & (cols[None, :] < end)
    tl.store(out_ptr + rows[:, None] * stride + cols[None, :], values.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def merged_sum(parts_ptr, row, CHUNKS, MERGE: tl.constexpr, LEVELS: tl.constexpr):
    """Step 2 of the order for one row of parts [M, CHUNKS], MERGE being the power of two -> a scalar."""
    index = tl.arange(0, MERGE)
    parts = tl.load(parts_ptr + row.to(tl.int64) * CHUNKS + index, mask=index < CHUNKS, other=0.0)
    return tl.sum(add_tree(parts[None, :], 1, MERGE, 0, LEVELS))  # the sum of one number, which has any layout


@triton.jit(do_not_specialize=["M"])
def sum_parts_kernel(
    x_ptr,
    parts_ptr,
    M,
    WIDTH,
    stride_row,
    stride_col,
    CHUNKS,
    SQUARE: tl.constexpr,
    SPAN: tl.constexpr,
    HALVES: tl.constexpr,
    LEVELS: tl.constexpr,
    ACC: tl.constexpr,
):
    """Step 1 for one chunk of one row, of the squares if SQUARE: x [M, WIDTH] -> parts [M, CHUNKS]."""
    row = tl.program_id(0) // CHUNKS
    chunk = tl.program_id(0) % CHUNKS
    x = load_tile(x_ptr, row, chunk * SPAN, WIDTH, stride_row, stride_col, M, 1, SPAN, 0.0).to(ACC)
    if SQUARE:
        x = x * x
    store_tile(parts_ptr, add_tree(x, 1, SPAN, HALVES, LEVELS), row, chunk, CHUNKS, CHUNKS, M, 1, 1)


class Plan(NamedTuple):
    """How a width is computed. The first six are the order, and depend only on the width."""

    chunks: int  # of a row; 1 for a row that is held in registers
    span: int  # and `halves`, `levels`: the tree in a chunk
    halves: int
    levels: int
    merge: int  # and `merge_levels`: the tree over chunks
    merge_levels: int
    few: tuple[int, int]  # rows in a program and its warps, for few rows, and in `many` for many
    many: tuple[int, int]

    def rows_and_warps(self, m: int) -> tuple[int, int]:
        """For m rows; they change only speed."""
        return self.many if m >= _FILLED * self.many[0] else self.few

    def tree(self) -> dict[str, int]:
        """The constants of a kernel that adds up a chunk."""
        return {"SPAN": self.span, "HALVES": self.halves, "LEVELS": self.levels}

    def merging(self) -> dict[str, int]:
        """The constants of a kernel that adds up a row's chunks."""
        return {"MERGE": self.merge, "MERGE_LEVELS": self.merge_levels}

    def launch(
        self, kernel: Any, m: int, tensors: tuple[Any, ...], numbers: tuple[Any, ...], **constants: Any
    ) -> Callable[[int, Sequence[Any]], None] | None:
        """Launch a kernel over m rows of one chunk each; its last constants are ROWS, the tree's and, if given, ACC."""
        together, warps = self.rows_and_warps(m)
        accumulated = {"ACC": constants.pop("ACC")} if "ACC" in constants else {}
        with on_device(tensors[0]):
            return launch(
                kernel,
                (-(-m // together),),
                tensors,
                numbers,
                {**constants, "ROWS": together, **self.tree(), **accumulated},
                num_warps=warps,
                enable_fp_fusion=False,
            )


@functools.cache
def plan(width: int, item_bytes: int) -> Plan:
    """The plan of that width, for elements of `item_bytes` bytes.

    A warp reads 512 bytes at once. As many warps as read LANES at once add up what they hold without an exchange, until
    LANES are left; more would have to exchange all of it (measured on an H200: half the speed).
    """
    span = triton.next_power_of_2(max(width, 1)) if width <= _ONE_CHUNK else _CHUNK
    chunks = max(1, triton.cdiv(width, span))
    merge = triton.next_power_of_2(chunks)
    lanes = min(span, max(_MIN_LANES, min(span // 4, _MAX_LANES)))
    warps = max(1, min(16, lanes * item_bytes // 512))
    few, many = (max(1, _MIN_LANES // span), 1), (max(1, 2048 // span), 2)
    return Plan(
        chunks,
        span,
        (span // lanes).bit_length() - 1,
        lanes.bit_length() - 1,
        merge,
        merge.bit_length() - 1,
        few if span < _MIN_LANES else (1, warps),
        many if span < _MIN_LANES else (1, warps),
    )


def as_rows(x: torch.Tensor) -> torch.Tensor:
    """x [..., K] as [M, K]: a view where there is one; a copy also if a row spans 2^31 elements (32-bit columns)."""
    rows = x if x.ndim == 2 else x.reshape(x.shape[:-1].numel(), x.shape[-1])
    return rows if rows.shape[-1] * rows.stride(-1) < 2**31 else rows.contiguous()


def sum_parts(x: torch.Tensor, how: Plan, *, square: bool) -> torch.Tensor:
    """Launch step 1 over rows x [M, K] -> parts [M, chunks] in the accumulator's dtype."""
    m, width = x.shape
    wide = torch.float64 if x.dtype == torch.float64 else torch.float32
    parts = torch.empty((m, how.chunks), device=x.device, dtype=wide)
    sum_parts_kernel[(m * how.chunks,)](
        *(x, parts, m, width, *x.stride(), how.chunks),
        SQUARE=square,
        **how.tree(),
        ACC=accumulator(x.dtype),
        num_warps=how.few[1],
        enable_fp_fusion=False,
    )
    return parts


_ASSEMBLY = tl.constexpr(not INTERPRETED)
_LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def raised(x):
    """exp; in float32 without the three instructions per element that would keep subnormal results: they become 0."""
    if x.dtype == tl.float32 and _ASSEMBLY:
        out = tl.inline_asm_elementwise(
            "ex2.approx.ftz.f32 $0, $1;", "=f,f", [x * _LOG2_E], dtype=tl.float32, is_pure=True, pack=1
        )
    else:
        out = tl.exp(x)
    return out


@triton.jit
def reciprocal_root(x):
    """1 / sqrt(x) in float32, each rounded correctly, as torch's on CUDA; Triton's own flushes subnormal numbers."""
    if _ASSEMBLY:
        root = tl.inline_asm_elementwise("sqrt.rn.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1)
        out = tl.inline_asm_elementwise("rcp.rn.f32 $0, $1;", "=f,f", [root], dtype=tl.float32, is_pure=True, pack=1)
    else:
        out = 1.0 / tl.sqrt(x)
    return out


@triton.jit
def safe(top):
    """0 for an infinite maximum, whose difference from an equal number would be NaN."""
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
    top = tl.max(x, axis=1)[:, None]
    store_tile(tops_ptr, top, row, chunk, CHUNKS, CHUNKS, M, 1, 1)
    store_tile(sums_ptr, sum_exp(x, top, 1, SPAN, HALVES, LEVELS), row, chunk, CHUNKS, CHUNKS, M, 1, 1)


@triton.jit
def merged_pairs(tops, sums, MERGE: tl.constexpr, MERGE_LEVELS: tl.constexpr):
    """Pairs [MERGE], filled up with (-inf, 0) -> M and S, scalars, which have any layout."""
    top = tl.max(tops, axis=0)
    scaled = sums * raised(tops - safe(top))
    return top, tl.sum(add_tree(scaled[None, :], 1, MERGE, 0, MERGE_LEVELS))  # the sum of one number


@triton.jit
def _merge_row(tops_ptr, sums_ptr, row, CHUNKS, MERGE: tl.constexpr, MERGE_LEVELS: tl.constexpr):
    index = tl.arange(0, MERGE)
    at = row.to(tl.int64) * CHUNKS + index
    # past the L1 cache, which does not see other SMs' writes
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
    """x [M, WIDTH] -> the pairs of all chunks [M, CHUNKS], one per program."""
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
    """x and its pairs -> out [M, WIDTH], one chunk per program."""
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
    """Both in one launch, EACH chunks per program; the next chunk loads while one is computed.

    Programs alternate: an even one makes pairs, the odd one after it writes the same chunks of the row LAG before, once
    all pairs of that row are made, by programs with lower numbers. A program draws its number as it starts (made_ptr[M]
    counts them), so lower numbers have started in any order of starts. So every wait ends, and usually at once.
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
            tl.debug_barrier()  # all threads have written before this is signalled
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


# softmax and log_softmax of many wide rows in half precision, read once: the order of class "lanes", by single warps.
#
# A program is one warp and holds one chunk of a row (4096 columns, 64 words of two elements per thread) in registers.
# It makes the chunk's pair (m_c, s_c), publishes it for the row's other programs, waits for theirs, and writes its part
# of the result. So a row is read once, and nothing needs a barrier. The tree over a chunk is cut where a warp can
# follow it: a quarter of a chunk is LANES long, a quarter of that (128 words) is what a warp reads at once.
#
# No deadlock: a program draws its number as it starts, and numbers count the chunks row by row. So all programs of
# every row but the last that was begun have started. Those of the last one wait for numbers still to be drawn, and
# there are no more of them than a row has chunks: `takes` leaves several times as many slots on the GPU, so other
# programs can start.
# The pair is one 64-bit word, written and read at once, and 0 until then: s_c is 0 only where m_c is -inf.

# mypy: disable-error-code="misc, assignment"
# (a kernel's tuple of tiles grows in a loop that is unrolled; mypy takes it for empty)


_TILE = tl.constexpr(128)  # words: 16 bytes a thread of a warp
_QUARTER = tl.constexpr(4)  # tiles in a quarter of a chunk
_SPAN = 4096  # elements: what the two above come to
_LANES = 1024
_REGISTERS = 96  # per thread: 64 words held, and 21 warps to an SM; 104 and 80 were slower, 88 and 92 no faster
_FEWEST = 1024  # programs; fewer leave the GPU idle while they wait, and two launches of larger ones are faster
_PLACES = 4  # programs of one warp that surely fit on an SM; usually `_REGISTERS` limits them, to 21


@triton.jit
def _low(word, BF16: tl.constexpr):
    if BF16:
        out = (word << 16).to(tl.float32, bitcast=True)
    else:
        out = tl.inline_asm_elementwise(
            "{ .reg .b16 l, h; mov.b32 {l, h}, $1; cvt.f32.f16 $0, l; }", "=f,r", [word], tl.float32, True, 1
        )
    return out


@triton.jit
def _high(word, BF16: tl.constexpr):
    if BF16:
        out = (word & -65536).to(tl.float32, bitcast=True)
    else:
        out = tl.inline_asm_elementwise(
            "{ .reg .b16 l, h; mov.b32 {l, h}, $1; cvt.f32.f16 $0, h; }", "=f,r", [word], tl.float32, True, 1
        )
    return out


@triton.jit
def _word(low, high, BF16: tl.constexpr):
    if BF16:
        out = tl.inline_asm_elementwise("cvt.rn.bf16x2.f32 $0, $2, $1;", "=r,f,f", [low, high], tl.int32, True, 1)
    else:
        out = tl.inline_asm_elementwise("cvt.rn.f16x2.f32 $0, $2, $1;", "=r,f,f", [low, high], tl.int32, True, 1)
    return out


@triton.jit
def _larger_bf16(a, b):
    return tl.inline_asm_elementwise("max.bf16x2 $0, $1, $2;", "=r,r,r", [a, b], tl.int32, True, 1)


@triton.jit
def _larger_fp16(a, b):
    return tl.inline_asm_elementwise("max.f16x2 $0, $1, $2;", "=r,r,r", [a, b], tl.int32, True, 1)


@triton.jit
def _again(word):
    """The same word, unpacked again at its next use: the compiler would keep both float32 instead."""
    return tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [word], tl.int32, False, 1)


@triton.jit
def _lanes(a, b, c, d, top, BF16: tl.constexpr):
    """Tiles of the four quarters -> sums by halves, halves again, then neighbours once, [1, 128]."""
    low = (raised(_low(a, BF16) - top) + raised(_low(c, BF16) - top)) + (
        raised(_low(b, BF16) - top) + raised(_low(d, BF16) - top)
    )
    high = (raised(_high(a, BF16) - top) + raised(_high(c, BF16) - top)) + (
        raised(_high(b, BF16) - top) + raised(_high(d, BF16) - top)
    )
    return low + high


@triton.jit
def held_kernel(
    x_ptr,
    out_ptr,
    pairs_ptr,
    turn_ptr,
    WORDS,
    stride_row,
    CHUNKS,
    LOG: tl.constexpr,
    BF16: tl.constexpr,
    MERGE: tl.constexpr,
    MERGE_LEVELS: tl.constexpr,
):
    """x [M, WORDS] in words of two elements -> out, by M CHUNKS programs; pairs [M, CHUNKS] and turn start from 0."""
    NONE: tl.constexpr = -8323200 if BF16 else -67044352  # -inf twice
    TILES: tl.constexpr = 4 * _QUARTER
    ticket = tl.atomic_add(turn_ptr, 1, sem="relaxed")
    row = ticket // CHUNKS
    chunk = ticket % CHUNKS
    start = chunk * (TILES * _TILE)
    x_ptr += row.to(tl.int64) * stride_row  # once: the pointers of all tiles then follow from one
    out_ptr += row.to(tl.int64) * WORDS
    words = ()
    for i in tl.static_range(TILES):
        cols = (start + i * _TILE + tl.arange(0, _TILE))[None, :]
        words = words + (tl.load(x_ptr + cols, mask=cols < WORDS, other=NONE),)  # noqa: RUF005 - Triton does not support unpacking
    best = words[0]
    for i in tl.static_range(1, TILES):
        best = _larger_bf16(best, words[i]) if BF16 else _larger_fp16(best, words[i])
    best = (tl.reduce(best, 1, _larger_bf16) if BF16 else tl.reduce(best, 1, _larger_fp16))[:, None]
    top = tl.maximum(_low(best, BF16), _high(best, BF16))
    at = safe(top)
    lanes = ()
    for i in tl.static_range(_QUARTER):
        part = _lanes(words[i], words[i + _QUARTER], words[i + 2 * _QUARTER], words[i + 3 * _QUARTER], at, BF16)
        lanes = lanes + (part,)  # noqa: RUF005 - as above
    first = add_tree(lanes[0], 1, _TILE, 0, 7) + add_tree(lanes[1], 1, _TILE, 0, 7)
    second = add_tree(lanes[2], 1, _TILE, 0, 7) + add_tree(lanes[3], 1, _TILE, 0, 7)
    pair = tl.sum(top).to(tl.int32, bitcast=True).to(tl.int64) << 32
    pair |= tl.sum(first + second).to(tl.uint32, bitcast=True).to(tl.int64)
    pairs_ptr += row.to(tl.int64) * CHUNKS
    tl.atomic_xchg(pairs_ptr + chunk, pair, sem="relaxed")
    index = tl.arange(0, MERGE)
    pairs = tl.load(pairs_ptr + index, mask=index < CHUNKS, other=1, volatile=True)
    while tl.min((pairs != 0).to(tl.int32)) == 0:
        pairs = tl.load(pairs_ptr + index, mask=index < CHUNKS, other=1, volatile=True)
    tops = tl.where(index < CHUNKS, (pairs >> 32).to(tl.int32).to(tl.float32, bitcast=True), float("-inf"))
    sums = tl.where(index < CHUNKS, pairs.to(tl.int32).to(tl.float32, bitcast=True), 0.0)
    top, total = merged_pairs(tops, sums, MERGE, MERGE_LEVELS)
    for i in tl.static_range(TILES):
        word = _again(words[i])
        low, high = normalized(_low(word, BF16), top, total, LOG), normalized(_high(word, BF16), top, total, LOG)
        cols = (start + i * _TILE + tl.arange(0, _TILE))[None, :]
        tl.store(out_ptr + cols, _word(low, high, BF16), mask=cols < WORDS)


def takes(rows: torch.Tensor, how: Plan) -> bool:
    """Whether to use the kernel for rows [M, V]: many, in half precision and whole words, on a GPU with slots."""
    if INTERPRETED or rows.dtype not in HALF or torch.version.hip is not None:
        return False
    if how.span != _SPAN or how.halves != 2 or how.levels != _LANES.bit_length() - 1:
        return False
    words = rows.stride(1) == 1 and not rows.shape[1] % 2 and not rows.stride(0) % 2 and not rows.data_ptr() % 4
    places = _PLACES * multiprocessors(rows.device)
    fit = rows.shape[0] * how.chunks >= _FEWEST and how.chunks <= places
    return words and fit and rows.is_cuda and capability(rows.device) >= (9, 0)


def held(rows: torch.Tensor, out: torch.Tensor, how: Plan, *, log: bool) -> None:
    """Launch for rows [M, V] of several chunks that `takes` accepts; `out`, of their size and dtype, is contiguous."""
    m, width = rows.shape
    pairs = torch.zeros(m * how.chunks + 1, device=rows.device, dtype=torch.int64)
    held_kernel[(m * how.chunks,)](
        *(rows.view(torch.int32), out.view(-1, width).view(torch.int32), pairs, pairs[-1:].view(torch.int32)),
        *(width // 2, rows.stride(0) // 2, how.chunks),
        LOG=log,
        BF16=rows.dtype == torch.bfloat16,
        **how.merging(),
        num_warps=1,
        maxnreg=_REGISTERS,
        enable_fp_fusion=False,
    )


_CACHED_BYTES = 24 * 2**20  # read again from the L2 cache (50 to 60 MB on Hopper, half of it near) in a second launch
LAG_BYTES = 12 * 2**20  # between the two readings in one launch: more than all running programs hold at once
_EACH = 2  # chunks of a program in one launch: the second loads while the first is computed


@triton.jit(do_not_specialize=["M"])
def _softmax_kernel(
    x_ptr,
    out_ptr,
    M,
    WIDTH,
    stride_row,
    stride_col,
    LOG: tl.constexpr,
    ROWS: tl.constexpr,
    SPAN: tl.constexpr,
    HALVES: tl.constexpr,
    LEVELS: tl.constexpr,
    ACC: tl.constexpr,
):
    first = tl.program_id(0) * ROWS
    x = load_tile(x_ptr, first, 0, WIDTH, stride_row, stride_col, M, ROWS, SPAN, float("-inf")).to(ACC)
    top = tl.max(x, axis=1)[:, None]
    total = sum_exp(x, top, ROWS, SPAN, HALVES, LEVELS)
    store_tile(out_ptr, normalized(x, top, total, LOG), first, 0, WIDTH, WIDTH, M, ROWS, SPAN)


@triton.jit(do_not_specialize=["M", "IGNORE"])
def _one_each_kernel(
    x_ptr,
    target_ptr,
    out_ptr,
    M,
    WIDTH,
    stride_row,
    stride_col,
    IGNORE,
    LOSS: tl.constexpr,
    ROWS: tl.constexpr,
    SPAN: tl.constexpr,
    HALVES: tl.constexpr,
    LEVELS: tl.constexpr,
    ACC: tl.constexpr,
):
    first = tl.program_id(0) * ROWS
    rows = (first.to(tl.int64) + tl.arange(0, ROWS))[:, None]
    x = load_tile(x_ptr, first, 0, WIDTH, stride_row, stride_col, M, ROWS, SPAN, float("-inf")).to(ACC)
    top = tl.max(x, axis=1)[:, None]
    total = sum_exp(x, top, ROWS, SPAN, HALVES, LEVELS)
    out = one_each(x_ptr, target_ptr, rows, top, total, WIDTH, IGNORE, stride_row, stride_col, M, LOSS)
    store_tile(out_ptr, out, first, 0, 1, 1, M, ROWS, 1)


def _pairs(rows: torch.Tensor, how: Plan) -> tuple[torch.Tensor, torch.Tensor]:
    m, width = rows.shape
    tops, sums = _empty_pairs(rows, how)
    pairs_kernel[(m * how.chunks,)](
        *(rows, tops, sums, m, width, *rows.stride(), how.chunks),
        **how.tree(),
        ACC=accumulator(rows.dtype),
        num_warps=how.few[1],
        enable_fp_fusion=False,
    )
    return tops, sums


def _empty_pairs(rows: torch.Tensor, how: Plan) -> tuple[torch.Tensor, torch.Tensor]:
    wide = torch.float64 if rows.dtype == torch.float64 else torch.float32
    tops, sums = torch.empty((2, rows.shape[0], how.chunks), device=rows.device, dtype=wide)
    return tops, sums


def _wide(rows: torch.Tensor, out: torch.Tensor, how: Plan, *, log: bool, at_once: bool) -> None:
    m, width = rows.shape
    extra: dict[str, Any] = {"LOG": log, "ACC": accumulator(rows.dtype), "num_warps": how.few[1]}
    if at_once:
        lag = min(m, triton.cdiv(LAG_BYTES, width * rows.element_size()))
        made = torch.zeros(m + 1, device=rows.device, dtype=torch.int32)  # the last counts programs as they start
        turns_kernel[(2 * (m + lag) * triton.cdiv(how.chunks, _EACH),)](
            *(rows, out, *_empty_pairs(rows, how), made, m, width, *rows.stride(), how.chunks, lag),
            **how.tree(),
            **how.merging(),
            **extra,
            EACH=_EACH,
            enable_fp_fusion=False,
        )
        return
    results_kernel[(m * how.chunks,)](
        *(rows, out, *_pairs(rows, how), m, width, *rows.stride(), how.chunks),
        SPAN=how.span,
        **how.merging(),
        **extra,
        enable_fp_fusion=False,
    )


def softmax_by(name: str, x: torch.Tensor, *, log: bool, at_once: bool | None = None) -> torch.Tensor:
    """[..., V] -> the softmax, or its logarithm. `at_once`: wide rows in one launch, or in two; None: by their size."""
    made = again(name, x)
    if made is not None:
        return made[0]
    if x.ndim < 1:
        raise ValueError(f"{name} takes [..., V], got a scalar")
    require(name, DTYPES, x)
    out = torch.empty(x.shape, device=x.device, dtype=x.dtype)
    if not out.numel():
        return out
    rows = as_rows(x)
    m, width = rows.shape
    how = plan(width, x.element_size())
    if how.chunks > 1:
        with on_device(x):
            if at_once is None and takes(rows, how):
                note(f"{name}_rows[{how.chunks}x{how.span} held]")
                held(rows, out, how, log=log)
                return out
            if at_once is None:
                at_once = m * width * x.element_size() > _CACHED_BYTES
            note(f"{name}_rows[{how.chunks}x{how.span}{' at once' if at_once else ''}]")
            _wide(rows, out, how, log=log, at_once=at_once)
            return out
    label, numbers = f"{name}_rows[{how.span}]", (m, width, *rows.stride())
    note(label)
    launched = how.launch(_softmax_kernel, m, (rows, out), numbers, LOG=log, ACC=accumulator(x.dtype))
    if rows.data_ptr() == x.data_ptr():
        remember(name, (x,), (out,), label, Step(launched, (0, 1)))
    return out


def _one_each(name: str, x: torch.Tensor, target: torch.Tensor | None, ignore: int) -> torch.Tensor:
    require(name, DTYPES, x)
    out = torch.empty(x.shape[:-1], device=x.device, dtype=x.dtype)
    if not out.numel():
        return out
    rows = as_rows(x)
    m, width = rows.shape
    how = plan(width, x.element_size())
    place: tuple[Any, ...] = (m, width, *rows.stride())
    other = rows if target is None else target  # not read; any pointer will do
    if how.chunks > 1:
        with on_device(x):
            note(f"{name}_rows[{how.chunks}x{how.span}]")
            tops, sums = _pairs(rows, how)
            one_each_merge_kernel[(m,)](
                *(rows, other, tops, sums, out, *place, how.chunks, ignore),
                LOSS=target is not None,
                **how.merging(),
                num_warps=1,
                enable_fp_fusion=False,
            )
            return out
    note(f"{name}_rows[{how.span}]")
    tensors, numbers = (rows, other, out), (*place, ignore)
    how.launch(_one_each_kernel, m, tensors, numbers, LOSS=target is not None, ACC=accumulator(x.dtype))
    return out


def softmax(x: torch.Tensor) -> torch.Tensor:
    """Over the last axis of x [..., V] -> [..., V]: exp(x - max) over its sum, in the module's order."""
    return softmax_by("softmax", x, log=False)


def log_softmax(x: torch.Tensor) -> torch.Tensor:
    """Over the last axis of x [..., V] -> [..., V]: x - max - log(sum of exp(x - max)), in the module's order."""
    return softmax_by("log_softmax", x, log=True)


def logsumexp(x: torch.Tensor) -> torch.Tensor:
    """Over the last axis of x [..., V] -> [...]: max + log(sum of exp(x - max)); -inf for only -inf."""
    if x.ndim < 1:
        raise ValueError("logsumexp takes [..., V], got a scalar")
    if not x.shape[-1]:
        require("logsumexp", DTYPES, x)
        return torch.full(x.shape[:-1], -torch.inf, device=x.device, dtype=x.dtype)
    return _one_each("logsumexp", x, None, 0)


def cross_entropy(x: torch.Tensor, target: torch.Tensor, ignore_index: int = -100) -> torch.Tensor:
    """Losses of logits x [..., V] for targets [...] of integers -> [...] in x's dtype, not reduced.

    Bit for bit -log_softmax(x) at the target, without writing the rest of it. 0 where the target is `ignore_index`, and
    NaN where it is not a column otherwise: a kernel can't raise. ValueError: targets of another shape, device or kind;
    no columns.
    """
    if x.ndim < 1 or target.shape != x.shape[:-1] or target.device != x.device:
        raise ValueError(
            f"cross_entropy takes [..., V] and [...] on one device, got {tuple(x.shape)} and {tuple(target.shape)}"
        )
    if target.dtype not in (torch.int64, torch.int32):
        raise ValueError(f"cross_entropy takes targets in int64 or int32, got {target.dtype}")
    if not x.shape[-1]:
        raise ValueError("cross_entropy takes at least one column, got none")
    return _one_each("cross_entropy", x, target.contiguous(), ignore_index)
