"""What operators over the last axis share on CUDA: the class "lanes", an order of additions, and plans of launches.

The order is in the source, not in the compiler's layout. The width alone decides on three powers of two:

  CHUNK   a row is cut into chunks of CHUNK elements, from element 0; a row of at most 16384 is one chunk
  SPAN    the chunk's length, filled up with zeros to a power of two
  LANES   a quarter of SPAN, but at least 256 and at most 2048; SPAN if that is less

and a row is added up as follows.

  1. In a chunk: element j is added to element j + n/2, for n = SPAN, SPAN/2, ... until LANES are left; then element
     2j to element 2j + 1, again and again, until one is left.
  2. Over chunks: the chunks' results, filled up to a power of two, 2j to 2j + 1 until one is left.

Every step adds exactly two numbers, and floating addition commutes. So neither the number of rows, nor the row's place,
alignment or strides, nor the number of warps or of rows in a program can change a bit, nor whether the chunks of a row
run in one program or in many: these decide who adds, never what is added to what. (`tl.sum` over a whole block would
leave the order to the layout, which follows the alignment of the pointer.) Maxima are exact in any order.
Multiplications are not contracted into additions (enable_fp_fusion=False), which leaves the rounding to the source too.

Step 1 is written for the hardware: a thread holds eight neighbours of every LANES, adds its own first, then with the
threads of its warp, then over warps. Being a tree, it also errs less than a chain does.

Sums are kept in float32, in float64 for float64.
"""

# Triton reads a kernel's annotations itself: only tl.constexpr may stand there.
# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from nondet.kernels.triton_common import accumulator

__all__ = ["DTYPES", "Plan", "add_tree", "as_rows", "load_tile", "merged_sum", "plan", "store_tile"]

DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_ONE_CHUNK = (
    16384  # the widest row that a program holds in registers: 64 elements a thread of 8 warps, in half precision
)
_CHUNK = 4096  # of wider rows: short enough to spread one row of a vocabulary over many SMs
_MIN_LANES, _MAX_LANES = 256, 2048
_FILLED = 1024  # programs that fill a GPU several times over; beyond this, programs of more rows save instructions


@triton.jit
def add_tree(x, ROWS: tl.constexpr, SPAN: tl.constexpr, HALVES: tl.constexpr, LEVELS: tl.constexpr):
    """x [ROWS, SPAN] -> [ROWS, 1]: HALVES times by halves, then LEVELS times by neighbours; see the module."""
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
    return tl.sum(
        add_tree(parts[None, :], 1, MERGE, 0, LEVELS)
    )  # the sum of one number, which any layout takes as it is


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
    """How a width is computed. The first six are the order, and follow from the width alone.

    Attributes:
        chunks: Of a row; 1 for a row that is held in registers.
        span, halves, levels: The tree in a chunk.
        merge, merge_levels: The tree over chunks.
        few, many: Rows in a program and its warps, for few rows and for many.
    """

    chunks: int
    span: int
    halves: int
    levels: int
    merge: int
    merge_levels: int
    few: tuple[int, int]
    many: tuple[int, int]

    def rows_and_warps(self, m: int) -> tuple[int, int]:
        """For m rows; a matter of speed alone."""
        return self.many if m >= _FILLED * self.many[0] else self.few

    def tree(self) -> dict[str, int]:
        """The constants of a kernel that adds up a chunk."""
        return {"SPAN": self.span, "HALVES": self.halves, "LEVELS": self.levels}

    def merging(self) -> dict[str, int]:
        """The constants of a kernel that adds up a row's chunks."""
        return {"MERGE": self.merge, "MERGE_LEVELS": self.merge_levels}


@functools.cache
def plan(width: int, item_bytes: int) -> Plan:
    """The plan of that width, for elements of so many bytes.

    A warp reads 512 bytes at once. So many warps as read LANES at once add up what they hold without a word to each
    other, until LANES are left; more would have to exchange all of it (measured on an H200: half the speed).
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
    """x [..., K] as [M, K]: a view where there is one, a copy where there is none.

    A copy as well where a row reaches over 2^31 elements: columns are counted in 32 bits, which is quicker.
    """
    rows = x if x.ndim == 2 else x.reshape(x.shape[:-1].numel(), x.shape[-1])
    return rows if rows.shape[-1] * rows.stride(-1) < 2**31 else rows.contiguous()


def sum_parts(x: torch.Tensor, how: Plan, *, square: bool) -> torch.Tensor:
    """Launch step 1 over rows x [M, K] -> parts [M, chunks] in the accumulator's dtype."""
    m, width = x.shape
    parts = torch.empty(
        (m, how.chunks), device=x.device, dtype=torch.float64 if x.dtype == torch.float64 else torch.float32
    )
    sum_parts_kernel[(m * how.chunks,)](
        x,
        parts,
        m,
        width,
        *x.stride(),
        how.chunks,
        SQUARE=square,
        **how.tree(),
        ACC=accumulator(x.dtype),
        num_warps=how.few[1],
        enable_fp_fusion=False,
    )
    return parts
