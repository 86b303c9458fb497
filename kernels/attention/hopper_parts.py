"""Pieces of the Hopper prefill kernel: its arithmetic, one step of the class's order each, and its list of work.

Shapes are those of one consumer: ROWS queries (64) by the keys of a tile, or by the head dim. Everything is float32.
"""

# Triton reads a kernel's annotations itself: only gl.constexpr may stand there.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language._core import builtin

__all__ = [
    "as_matrix",
    "fold_sum",
    "item_of",
    "mask_scores",
    "merge_acc",
    "merge_stats",
    "pin",
    "reinterpret",
    "softmax_step",
    "total_layout",
    "work_of",
]


@builtin
def reinterpret(smem, dtype, shape, layout, _semantic=None):
    """`smem` read as another dtype, shape and layout; Triton 3.7 made the method public."""
    method = getattr(smem, "reinterpret", None) or smem._reinterpret
    return method(dtype, shape, layout, _semantic=_semantic)


@gluon.constexpr_function
def total_layout(head_dim):
    """Where [64, head_dim] float32 of a consumer's total lies: what one thread holds is together, 4 floats at a time.

    The first bits of an address name 4 of the thread's own elements, then the thread, then the rest of its elements:
    so 128-bit accesses without bank conflicts, and no thread reads what another wrote.
    """
    own = [[0, 1], [8, 0]]
    thread = [[0, 2], [0, 4], [1, 0], [2, 0], [4, 0], [16, 0], [32, 0]]
    rest = [[0, 1 << i] for i in range(3, head_dim.bit_length() - 1)]
    return gl.SharedLinearLayout(own + thread + rest, [], 1024)


@gluon.jit
def pin(x):
    """x, computed here and nowhere earlier: the compiler would hoist what follows and run out of registers."""
    return gl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [x], dtype=x.dtype, is_pure=False, pack=1)


@gluon.jit
def fold_sum(x, COLS: gl.constexpr):
    """[M, N] -> [M, COLS]: halved by adding column j and column j + n / 2, again and again."""
    n: gl.constexpr = x.shape[1]
    if n > COLS:
        return fold_sum(gl.sum(gl.reshape(x, [x.shape[0], 2, n // 2]), axis=1), COLS)
    else:  # noqa: RET505 - what stands after a return is compiled all the same
        return x


@gluon.jit
def fold_max(x, COLS: gl.constexpr):
    """As `fold_sum`; a maximum has no order, but a tree keeps more lanes busy than a chain."""
    n: gl.constexpr = x.shape[1]
    if n > COLS:
        return fold_max(gl.max(gl.reshape(x, [x.shape[0], 2, n // 2]), axis=1), COLS)
    else:  # noqa: RET505 - what stands after a return is compiled all the same
        return x


@gluon.jit
def softmax_step(s, m, l8, qk_scale, ROW: gl.constexpr):
    """A tile's scores -> p (float32, unrounded), the maximum and the 8 partial sums with it, and the rescaling."""
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
    """A segment's maximum and sums into the total's -> those, and what total and segment are to be scaled by."""
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
    if first:  # noqa: SIM108 - a branch is wanted: a ternary would compute both
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
    """The work item of this program in its turn: programs take items forwards, then backwards, and so on.

    Items are sorted by work, so whoever takes the largest of one turn takes the smallest of the next.
    """
    programs = gl.num_programs(0)
    program = gl.program_id(0)
    return turn * programs + gl.where(turn % 2 == 0, program, programs - 1 - program)


@gluon.jit
def work_of(item, blocks, heads_all, tq, tk, CAUSAL: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr):
    """Item -> batch * heads + head, its first query, how many tiles its rows see, and how many of them all rows see.

    Blocks of queries count down, since causal the last sees the most keys; heads fastest, so that heads of one KV head
    run side by side and share its tiles in L2.
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
