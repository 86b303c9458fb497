"""The Triton kernels behind `triton_attention`: one class of bits whether the segments run in one program or in many.

What a row is, and what m, l and acc are, is said in `triton_attention_parts`.
"""

# Triton reads a kernel's annotations itself: only tl.constexpr may stand there.
# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

import triton
import triton.language as tl

from nondet.kernels.triton_attention_parts import bounds, key_range, load_queries, merge, walk_segment

__all__ = ["merge_kernel", "one_pass_kernel", "split_kernel"]


@triton.jit(do_not_specialize=["tq", "tk", "blocks", "heads_kv", "window"])
def one_pass_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    out_ptr,
    cu_q_ptr,
    cu_k_ptr,
    tq,
    tk,
    blocks,
    heads_kv,
    window,
    qk_scale,
    stride_qb,
    stride_qh,
    stride_qt,
    stride_kb,
    stride_kh,
    stride_kt,
    stride_vb,
    stride_vh,
    stride_vt,
    stride_ob,
    stride_oh,
    stride_ot,
    VARLEN: tl.constexpr,
    CAUSAL: tl.constexpr,
    WINDOW: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    SEGMENT: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """All segments of a block of rows in one program, merged in order."""
    pid = tl.program_id(0)
    block = blocks - 1 - pid % blocks  # causal: the last blocks see the most keys, so they start first
    kv_head = pid // blocks % heads_kv
    q0, nq, k0, nk = bounds(cu_q_ptr, cu_k_ptr, pid // blocks // heads_kv, tq, tk, VARLEN)
    if block * BLOCK_M >= nq * GROUP:
        return
    q, query, head = load_queries(
        q_ptr + q0 * stride_qb, block, nq, kv_head, stride_qt, stride_qh, GROUP, HEAD_DIM, BLOCK_M, BLOCK_D
    )
    k_ptr += k0 * stride_kb + kv_head.to(tl.int64) * stride_kh
    v_ptr += k0 * stride_vb + kv_head.to(tl.int64) * stride_vh
    lo, hi = key_range(block, nq, nk, window, CAUSAL, WINDOW, GROUP, BLOCK_M, BLOCK_N)
    m_all = tl.full((BLOCK_M,), float("-inf"), dtype=tl.float32)
    l_all = tl.zeros((BLOCK_M,), dtype=tl.float32)
    acc_all = tl.zeros((BLOCK_M, BLOCK_D), dtype=tl.float32)
    for start in range(lo // SEGMENT * SEGMENT, hi, SEGMENT):
        m, l, acc = walk_segment(  # noqa: E741 - the literature's name
            q,
            k_ptr,
            v_ptr,
            stride_kt,
            stride_vt,
            tl.maximum(start, lo),
            tl.minimum(start + SEGMENT, hi),
            query + nk - nq,
            nk,
            qk_scale,
            window,
            CAUSAL,
            WINDOW,
            HEAD_DIM,
            BLOCK_M,
            BLOCK_N,
            BLOCK_D,
        )
        m_all, l_all, acc_all = merge(m_all, l_all, acc_all, m, l, acc)
    offs_d = tl.arange(0, BLOCK_D)
    out_ptr += q0 * stride_ob
    tl.store(
        out_ptr + query.to(tl.int64)[:, None] * stride_ot + head[:, None] * stride_oh + offs_d[None, :],
        (acc_all / l_all[:, None]).to(out_ptr.dtype.element_ty),
        mask=(query[:, None] < nq) & (offs_d[None, :] < HEAD_DIM),
    )


@triton.jit(do_not_specialize=["tq", "tk", "blocks", "heads_kv", "window", "segments", "rows_per_start"])
def split_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    m_ptr,
    l_ptr,
    acc_ptr,
    cu_q_ptr,
    cu_k_ptr,
    tq,
    tk,
    blocks,
    heads_kv,
    window,
    segments,
    rows_per_start,
    qk_scale,
    stride_qb,
    stride_qh,
    stride_qt,
    stride_kb,
    stride_kh,
    stride_kt,
    stride_vb,
    stride_vh,
    stride_vt,
    VARLEN: tl.constexpr,
    CAUSAL: tl.constexpr,
    WINDOW: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    SEGMENT: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """One segment of a block of rows, for merge_kernel.

    m and l [rows, segments] and acc [rows, segments, HEAD_DIM] are float32. Segments of which a row sees no key may be
    left unwritten: the merge does not read them.
    """
    pid = tl.program_id(0)
    segment = tl.program_id(1)
    block = pid % blocks
    kv_head = pid // blocks % heads_kv
    q0, nq, k0, nk = bounds(cu_q_ptr, cu_k_ptr, pid // blocks // heads_kv, tq, tk, VARLEN)
    if block * BLOCK_M >= nq * GROUP:
        return
    lo, hi = key_range(block, nq, nk, window, CAUSAL, WINDOW, GROUP, BLOCK_M, BLOCK_N)
    lo = tl.maximum(segment * SEGMENT, lo)
    hi = tl.minimum(segment * SEGMENT + SEGMENT, hi)
    if lo >= hi:
        return
    q, query, head = load_queries(
        q_ptr + q0 * stride_qb, block, nq, kv_head, stride_qt, stride_qh, GROUP, HEAD_DIM, BLOCK_M, BLOCK_D
    )
    m, l, acc = walk_segment(  # noqa: E741 - the literature's name
        q,
        k_ptr + k0 * stride_kb + kv_head.to(tl.int64) * stride_kh,
        v_ptr + k0 * stride_vb + kv_head.to(tl.int64) * stride_vh,
        stride_kt,
        stride_vt,
        lo,
        hi,
        query + nk - nq,
        nk,
        qk_scale,
        window,
        CAUSAL,
        WINDOW,
        HEAD_DIM,
        BLOCK_M,
        BLOCK_N,
        BLOCK_D,
    )
    row = (q0 * rows_per_start + query) * (heads_kv * GROUP) + head
    slot = row * segments + segment
    offs_d = tl.arange(0, BLOCK_D)
    tl.store(m_ptr + slot, m, mask=query < nq)
    tl.store(l_ptr + slot, l, mask=query < nq)
    inside = (query[:, None] < nq) & (offs_d[None, :] < HEAD_DIM)
    tl.store(acc_ptr + slot[:, None] * HEAD_DIM + offs_d[None, :], acc, mask=inside)


@triton.jit(do_not_specialize=["tq", "tk", "heads", "max_rows", "window", "segments", "rows_per_start"])
def merge_kernel(
    m_ptr,
    l_ptr,
    acc_ptr,
    out_ptr,
    cu_q_ptr,
    cu_k_ptr,
    tq,
    tk,
    heads,
    max_rows,
    window,
    segments,
    rows_per_start,
    stride_ob,
    stride_oh,
    stride_ot,
    VARLEN: tl.constexpr,
    CAUSAL: tl.constexpr,
    WINDOW: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    SEGMENT: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """One row: the segments that it sees, merged in order by the arithmetic of the one-pass kernel."""
    pid = tl.program_id(0)
    q0, nq, _, nk = bounds(cu_q_ptr, cu_k_ptr, pid // max_rows, tq, tk, VARLEN)
    query = pid % max_rows // heads
    head = pid % max_rows % heads
    if query >= nq:
        return
    first = 0
    seen = nk
    if CAUSAL:
        seen = tl.minimum(nk, query + 1 + nk - nq)
    if WINDOW:
        first = tl.maximum(query + nk - nq - window + 1, 0) // SEGMENT
    one = tl.arange(0, 1)
    offs_d = tl.arange(0, BLOCK_D)
    in_d = offs_d[None, :] < HEAD_DIM
    m_all = tl.full((1,), float("-inf"), dtype=tl.float32)
    l_all = tl.zeros((1,), dtype=tl.float32)
    acc_all = tl.zeros((1, BLOCK_D), dtype=tl.float32)
    base = ((q0 * rows_per_start + query) * heads + head) * segments + one
    for segment in range(first, tl.cdiv(seen, SEGMENT)):
        slot = base + segment
        m = tl.load(m_ptr + slot)
        l = tl.load(l_ptr + slot)  # noqa: E741 - the literature's name
        acc = tl.load(acc_ptr + slot[:, None] * HEAD_DIM + offs_d[None, :], mask=in_d, other=0.0)
        m_all, l_all, acc_all = merge(m_all, l_all, acc_all, m, l, acc)
    out = out_ptr + q0 * stride_ob + query.to(tl.int64) * stride_ot + head * stride_oh + offs_d[None, :]
    tl.store(out, (acc_all / l_all[:, None]).to(out_ptr.dtype.element_ty), mask=in_d)
