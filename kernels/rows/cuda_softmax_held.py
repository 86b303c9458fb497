"""softmax and log_softmax of many wide rows in half precision, read once: the order of class "lanes", by single warps.

A program is one warp and holds one chunk of a row (4096 columns, 64 words of two elements a thread) in registers. It
makes the chunk's pair (m_c, s_c), puts it where the row's other programs find it, waits for theirs, and writes its part
of the result. So a row is read once, and nothing needs a barrier. The tree over a chunk is the one that
`nondet.kernels.rows.cuda_parts` states, cut where a warp can follow it: a quarter of a chunk is LANES long, a quarter
of that (128 words) is what a warp reads at once.

Who waits for whom: a program draws its number as it starts, and numbers count the chunks row by row. All programs of
every row but the last that was begun have started, so they wait for nothing that has yet to start. Those of the last
one wait for numbers still to be drawn, and hold no more places than a row has chunks: `takes` leaves several times as
many on the GPU, so somebody always comes to draw them.

The pair is one 64-bit word, written and read at once, and 0 until then: s_c is 0 only where m_c is -inf.
"""

# Triton reads a kernel's annotations itself: only tl.constexpr may stand there.
# mypy: allow-untyped-defs, allow-incomplete-defs
# mypy: disable-error-code="misc, assignment"
# (a kernel's tuple of tiles grows in a loop that is unrolled; mypy takes it for empty)

from __future__ import annotations

import torch
import triton
import triton.language as tl

from nondet.kernels.rows.cuda_parts import Plan, add_tree
from nondet.kernels.rows.cuda_softmax_parts import merged_pairs, normalized, raised, safe
from nondet.kernels.triton_common import HALF, INTERPRETED, capability, multiprocessors

__all__ = ["held", "takes"]

_TILE = tl.constexpr(128)  # words: 16 bytes a thread of a warp
_QUARTER = tl.constexpr(4)  # tiles in a quarter of a chunk
_SPAN = 4096  # elements: what the two above come to
_LANES = 1024
_REGISTERS = 96  # a thread: 64 words held, and 21 warps to an SM; 104 and 80 were slower, 88 and 92 no faster
_FEWEST = 1024  # programs; fewer leave the GPU idle while they wait, and two launches of larger ones are faster
_PLACES = 4  # programs of one warp that surely fit on an SM; as a rule it is `_REGISTERS` that limits them, to 21


@triton.jit
def _low(word, BF16: tl.constexpr):
    """The element of the lower address, in float32."""
    if BF16:
        out = (word << 16).to(tl.float32, bitcast=True)
    else:
        out = tl.inline_asm_elementwise(
            "{ .reg .b16 l, h; mov.b32 {l, h}, $1; cvt.f32.f16 $0, l; }", "=f,r", [word], tl.float32, True, 1
        )
    return out


@triton.jit
def _high(word, BF16: tl.constexpr):
    """The other element, in float32."""
    if BF16:
        out = (word & -65536).to(tl.float32, bitcast=True)
    else:
        out = tl.inline_asm_elementwise(
            "{ .reg .b16 l, h; mov.b32 {l, h}, $1; cvt.f32.f16 $0, h; }", "=f,r", [word], tl.float32, True, 1
        )
    return out


@triton.jit
def _word(low, high, BF16: tl.constexpr):
    """Two float32, rounded, as one word."""
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
    """The same word, unpacked again where it is used again: the compiler would keep both float32 instead."""
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
        words = words + (tl.load(x_ptr + cols, mask=cols < WORDS, other=NONE),)  # noqa: RUF005 - Triton takes no star
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
    """Should the kernel do rows [M, V] of that plan: many, in half precision and whole words, on a GPU with room."""
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
    room = torch.zeros(m * how.chunks + 1, device=rows.device, dtype=torch.int64)
    held_kernel[(m * how.chunks,)](
        *(rows.view(torch.int32), out.view(-1, width).view(torch.int32), room, room[-1:].view(torch.int32)),
        *(width // 2, rows.stride(0) // 2, how.chunks),
        LOG=log,
        BF16=rows.dtype == torch.bfloat16,
        **how.merging(),
        num_warps=1,
        maxnreg=_REGISTERS,
        enable_fp_fusion=False,
    )
