"""The pieces that every attention kernel is made of, so that they compute the same bits.

Names as in the literature on online softmax: m is a row's running maximum score, l its sum of exponentials, acc its
weighted sum of values; scores are kept in units of log2, so that exponentials are exp2.

A program owns BLOCK_M rows. A row is one query of one head; the GROUP query heads that share a KV head are packed side
by side (row r is query r // GROUP, head r % GROUP of the group), so that a decode step loads each key once for them.
Requests are either the batch of a dense tensor or, with VARLEN, ranges of packed tokens; `bounds` hides which.
"""

# Triton reads a kernel's annotations itself: only tl.constexpr may stand there.
# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

import triton
import triton.language as tl

__all__ = ["bounds", "key_range", "load_queries", "merge", "walk_segment"]


@triton.jit
def bounds(cu_q_ptr, cu_k_ptr, request, tq, tk, VARLEN: tl.constexpr):
    """(first query, number of queries, first key, number of keys) of a request, firsts in units of stride_*b."""
    if VARLEN:
        q0 = tl.load(cu_q_ptr + request)
        k0 = tl.load(cu_k_ptr + request)
        nq = tl.load(cu_q_ptr + request + 1) - q0
        nk = tl.load(cu_k_ptr + request + 1) - k0
    else:
        q0 = request
        k0 = request
        nq = tq
        nk = tk
    return q0.to(tl.int64), nq, k0.to(tl.int64), nk


@triton.jit
def key_range(
    block,
    nq,
    nk,
    window,
    CAUSAL: tl.constexpr,
    WINDOW: tl.constexpr,
    GROUP,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Keys [lo, hi) that some row of the block may see; lo is a multiple of BLOCK_N: tiles are anchored at key 0."""
    lo = 0
    hi = nk
    if CAUSAL:
        last = tl.minimum((block * BLOCK_M + BLOCK_M - 1) // GROUP, nq - 1)
        hi = tl.minimum(nk, last + 1 + nk - nq)
    if WINDOW:
        lo = tl.maximum(block * BLOCK_M // GROUP + nk - nq - window + 1, 0) // BLOCK_N * BLOCK_N
    return lo, hi


@triton.jit
def load_queries(
    q_ptr, block, nq, kv_head, stride_qt, stride_qh, GROUP, HEAD_DIM, BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr
):
    """q [BLOCK_M, BLOCK_D] with zeros beyond the last query and beyond the head dim, and each row's query index."""
    rows = block * BLOCK_M + tl.arange(0, BLOCK_M)
    query = rows // GROUP
    head = kv_head * GROUP + rows % GROUP
    offs_d = tl.arange(0, BLOCK_D)
    q = tl.load(
        q_ptr + query.to(tl.int64)[:, None] * stride_qt + head[:, None] * stride_qh + offs_d[None, :],
        mask=(query[:, None] < nq) & (offs_d[None, :] < HEAD_DIM),
        other=0.0,
    )
    return q, query, head


@triton.jit
def walk_segment(
    q,
    k_ptr,
    v_ptr,
    stride_kt,
    stride_vt,
    lo,
    hi,
    position,
    nk,
    qk_scale,
    window,
    CAUSAL: tl.constexpr,
    WINDOW: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """(m, l, acc) of the rows over the keys lo <= n < hi of one segment, tile by tile from the segment's first key."""
    m = tl.full((BLOCK_M,), float("-inf"), dtype=tl.float32)
    l = tl.zeros((BLOCK_M,), dtype=tl.float32)  # noqa: E741 - the literature's name
    acc = tl.zeros((BLOCK_M, BLOCK_D), dtype=tl.float32)
    offs_n = tl.arange(0, BLOCK_N)
    offs_d = tl.arange(0, BLOCK_D)
    ones = tl.full((BLOCK_N, 16), 1.0, dtype=q.dtype)
    keys = (lo + offs_n).to(tl.int64)
    k_ptrs = k_ptr + keys[None, :] * stride_kt + offs_d[:, None]
    v_ptrs = v_ptr + keys[:, None] * stride_vt + offs_d[None, :]
    for n in range(lo, hi, BLOCK_N):
        cols = n + offs_n
        k = tl.load(k_ptrs, mask=(cols[None, :] < nk) & (offs_d[:, None] < HEAD_DIM), other=0.0)
        scores = tl.dot(q, k, input_precision="ieee") * qk_scale
        visible = cols[None, :] < nk
        if CAUSAL:
            visible = visible & (cols[None, :] <= position[:, None])
        if WINDOW:
            visible = visible & (cols[None, :] > position[:, None] - window)
        scores = tl.where(visible, scores, float("-inf"))
        m_new = tl.maximum(m, tl.max(scores, 1))
        # A row that has seen no key yet has m = -inf; subtracting 0 instead keeps its exponentials 0 and not NaN.
        m_safe = tl.where(m_new == float("-inf"), 0.0, m_new)
        p = tl.exp2(scores - m_safe[:, None]).to(q.dtype)
        alpha = tl.exp2(m - m_safe)
        v = tl.load(v_ptrs, mask=(cols[:, None] < nk) & (offs_d[None, :] < HEAD_DIM), other=0.0)
        # Row sums by a product with ones: tl.sum would add in an order that follows the layout, which follows BLOCK_M.
        # The 16 columns are equal, so their maximum is any of them.
        l = l * alpha + tl.max(tl.dot(p, ones, input_precision="ieee"), 1)  # noqa: E741 - the literature's name
        acc = tl.dot(p, v, acc * alpha[:, None], input_precision="ieee")
        m = m_new
        k_ptrs += BLOCK_N * stride_kt
        v_ptrs += BLOCK_N * stride_vt
    return m, l, acc


@triton.jit
def merge(m_all, l_all, acc_all, m, l, acc):  # noqa: E741 - the literature's name
    """Add one segment to the segments before it. One in which a row saw no key leaves the row as it is, bit for bit."""
    m_new = tl.maximum(m_all, m)
    m_safe = tl.where(m_new == float("-inf"), 0.0, m_new)
    before = tl.exp2(m_all - m_safe)
    now = tl.exp2(m - m_safe)
    empty = (m == float("-inf")) & (l == 0.0)  # l is NaN, not 0, where a score was NaN: that must get through
    l_all = tl.where(empty, l_all, l_all * before + l * now)
    acc_all = tl.where(empty[:, None], acc_all, acc_all * before[:, None] + acc * now[:, None])
    return m_new, l_all, acc_all
