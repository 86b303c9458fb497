"""The pieces that every attention kernel is made of, so that they compute the same bits.

Names as in the literature on online softmax: m is a row's running maximum score, l its sum of exponentials, acc its
weighted sum of values. Scores stay as the dot gives them (after the soft cap, if there is one); qk_scale turns a
difference of scores into powers of two.

A program owns BLOCK_M rows. A row is one query of one head; the GROUP query heads that share a KV head are packed side
by side (row r is query r // GROUP, head r % GROUP of the group), so that a decode step loads each key once for them.
Requests are either the batch of a dense tensor or, with VARLEN, ranges of packed tokens; `bounds` hides which.

Every fused multiply-add is written out as tl.fma, because FMA contraction is off; every sum is written out as a tree,
because the order of tl.sum follows the layout, and the layout follows BLOCK_M and the number of warps.
"""

# Triton reads a kernel's annotations itself: only tl.constexpr may stand there.
# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

import triton
import triton.language as tl

__all__ = ["add_tile", "bounds", "key_range", "load_queries", "merge", "sum_of_eight"]


@triton.jit
def bounds(cu_q_ptr, cu_k_ptr, positions_ptr, request, tq, tk, VARLEN: tl.constexpr):
    """(first query, queries, first key, keys, first key's position) of a request; firsts in units of stride_*b.

    `keys` counts from position 0, also where the first ones were dropped: then the first key's position is not 0.
    """
    first = 0
    if VARLEN:
        q0 = tl.load(cu_q_ptr + request)
        k0 = tl.load(cu_k_ptr + request)
        nq = tl.load(cu_q_ptr + request + 1) - q0
        nk = tl.load(cu_k_ptr + request + 1) - k0
        if positions_ptr is not None:  # noqa: SIM102 - known at compile time, the next at run time
            if nq > 0:
                first = tl.maximum(tl.load(positions_ptr + q0).to(tl.int32) + nq - nk, 0)
    else:
        q0 = request
        k0 = request
        nq = tq
        nk = tk
    return q0.to(tl.int64), nq, k0.to(tl.int64), nk + first, first


@triton.jit
def key_range(
    block,
    nq,
    nk,
    first,
    window,
    CAUSAL: tl.constexpr,
    WINDOW: tl.constexpr,
    GROUP,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """(lo, full, hi): some row of the block may see keys lo <= n < hi, and without a window every row those to `full`.

    lo and full are multiples of BLOCK_N, and full is at least lo: tiles are anchored at key 0.
    """
    lo = 0
    hi = nk
    full = nk
    top = block * BLOCK_M // GROUP  # the block's first query
    if CAUSAL:
        last = tl.minimum((block * BLOCK_M + BLOCK_M - 1) // GROUP, nq - 1)
        hi = tl.minimum(nk, last + 1 + nk - nq)
        full = tl.minimum(full, tl.maximum(top + 1 + nk - nq, 0))
    if WINDOW:
        lo = tl.maximum(top + nk - nq - window + 1, first) // BLOCK_N * BLOCK_N
    return lo, tl.maximum(full // BLOCK_N * BLOCK_N, lo), hi


@triton.jit
def load_queries(
    q_ptr, block, nq, kv_head, stride_qt, stride_qh, GROUP, HEAD_DIM, BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr
):
    """q [BLOCK_M, BLOCK_D] with zeros beyond the last query and beyond the head dim, and each row's query and head."""
    rows = block * BLOCK_M + tl.arange(0, BLOCK_M)
    query = rows // GROUP
    head = kv_head * GROUP + rows % GROUP
    offs_d = tl.arange(0, BLOCK_D)
    q = tl.load(
        q_ptr + query.to(tl.int64)[:, None] * stride_qt + head.to(tl.int64)[:, None] * stride_qh + offs_d[None, :],
        mask=(query[:, None] < nq) & (offs_d[None, :] < HEAD_DIM),
        other=0.0,
    )
    return q, query, head


@triton.jit
def _fold(x, ROWS: tl.constexpr, HALF: tl.constexpr):
    """[ROWS, 2 * HALF] -> [ROWS, HALF]: column j and column j + HALF added."""
    left, right = tl.split(tl.permute(tl.reshape(x, (ROWS, 2, HALF)), (0, 2, 1)))
    return left + right


@triton.jit
def _eight_sums(p, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """[ROWS, COLUMNS] -> [ROWS, 8]: sum c is that of the columns j = c mod 8, a tree of halves.

    Eight, because a thread of the matrix units holds columns 8 apart: the tree needs no other thread where one warp has
    a whole row.
    """
    tl.static_assert((COLUMNS == 32) or (COLUMNS == 64) or (COLUMNS == 128))
    if COLUMNS == 128:
        p = _fold(p, ROWS, 64)
    if COLUMNS >= 64:
        p = _fold(p, ROWS, 32)
    return _fold(_fold(p, ROWS, 16), ROWS, 8)


@triton.jit
def sum_of_eight(l8, ROWS: tl.constexpr):
    """[ROWS, 8] -> [ROWS], a tree of halves."""
    return tl.reshape(_fold(_fold(_fold(l8, ROWS, 4), ROWS, 2), ROWS, 1), (ROWS,))


@triton.jit
def add_tile(
    m,
    l8,
    acc,
    q,
    k_ptr,
    v_ptr,
    index_ptr,
    stride_kt,
    stride_vt,
    n,
    position,
    nk,
    first,
    window,
    qk_scale,
    cap_in,
    cap_out,
    MASKED: tl.constexpr,
    DROPPED: tl.constexpr,
    CAUSAL: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """One tile of keys n <= j < n + BLOCK_N added to the segment's (m [rows], l8 [rows, 8], acc [rows, BLOCK_D]).

    k_ptr and v_ptr point at position 0 (index_ptr, if any, at its entry). Keys before `first` (DROPPED) and from nk on
    (MASKED) are not there: zeros stand in, of probability 0.
    """
    cols = n + tl.arange(0, BLOCK_N)
    offs_d = tl.arange(0, BLOCK_D)
    there = cols < nk
    if DROPPED:
        there = there & (cols >= first)
    if index_ptr is not None:  # noqa: SIM108 - only the branch that is taken can be compiled
        tokens = tl.load(index_ptr + cols, mask=there, other=0).to(tl.int64)
    else:
        tokens = cols.to(tl.int64)
    k_ptrs = k_ptr + tokens[None, :] * stride_kt + offs_d[:, None]
    v_ptrs = v_ptr + tokens[:, None] * stride_vt + offs_d[None, :]
    if HEAD_DIM != BLOCK_D:
        k = tl.load(k_ptrs, mask=there[None, :] & (offs_d[:, None] < HEAD_DIM), other=0.0)
        v = tl.load(v_ptrs, mask=there[:, None] & (offs_d[None, :] < HEAD_DIM), other=0.0)
    elif MASKED:
        k = tl.load(k_ptrs, mask=there[None, :], other=0.0)
        v = tl.load(v_ptrs, mask=there[:, None], other=0.0)
    else:
        k = tl.load(k_ptrs)
        v = tl.load(v_ptrs)
    scores = tl.dot(q, k, input_precision="ieee")
    if SOFTCAP:
        # cap_out * tanh(scores * cap): 1 - 2 / (e^2x + 1), whose absolute error is that of a float32 near 1
        scores = cap_out * (1.0 - 2.0 / (tl.exp2(scores * cap_in) + 1.0))
    if MASKED:
        visible = cols[None, :] < nk
        if CAUSAL:
            visible = visible & (cols[None, :] <= position[:, None])
        if WINDOW:
            visible = visible & (cols[None, :] > position[:, None] - window)
        scores = tl.where(visible, scores, float("-inf"))
    m_new = tl.maximum(m, tl.max(scores, 1))
    # A row that has seen no key yet has m = -inf; subtracting 0 instead keeps its exponentials 0 and not NaN.
    m_safe = tl.where(m_new == float("-inf"), 0.0, m_new)
    shift = -(m_safe * qk_scale)
    p = tl.exp2(tl.fma(scores, tl.zeros_like(scores) + qk_scale, tl.zeros_like(scores) + shift[:, None]))
    alpha = tl.exp2((m - m_safe) * qk_scale)
    part8 = _eight_sums(p, BLOCK_M, BLOCK_N)
    l8 = tl.fma(l8, tl.zeros_like(l8) + alpha[:, None], part8)
    acc = tl.dot(p.to(v.dtype), v, acc * alpha[:, None], input_precision="ieee")
    return m_new, l8, acc


@triton.jit
def merge(m_all, l_all, acc_all, m, l, acc, qk_scale):  # noqa: E741 - the literature's name
    """Add one segment to the segments before it. One in which a row saw no key leaves the row as it is, bit for bit."""
    m_new = tl.maximum(m_all, m)
    m_safe = tl.where(m_new == float("-inf"), 0.0, m_new)
    before = tl.exp2((m_all - m_safe) * qk_scale)
    now = tl.exp2((m - m_safe) * qk_scale)
    empty = (m == float("-inf")) & (l == 0.0)  # l is NaN, not 0, where a score was NaN: that must get through
    l_all = tl.where(empty, l_all, tl.fma(l_all, before, l * now))
    spread = tl.zeros_like(acc)
    acc_all = tl.where(empty[:, None], acc_all, tl.fma(acc_all, spread + before[:, None], acc * now[:, None]))
    return m_new, l_all, acc_all
