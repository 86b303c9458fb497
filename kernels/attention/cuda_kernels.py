"""The Triton kernels behind `triton_attention`: one class of bits whether the segments run in one program or in many.

What a row is, and what m, l and acc are, is said in `triton_attention_parts`.
"""

# Triton reads a kernel's annotations itself: only tl.constexpr may stand there.
# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

import triton
import triton.language as tl

from nondet.kernels.attention.cuda_parts import (
    add_tile,
    bounds,
    key_range,
    load_queries,
    merge,
    sum_of_eight,
)

__all__ = ["attend_kernel", "merge_kernel"]


@triton.jit
def _store_part(part_ptr, slots, slot, rows_in, m, l8, acc, HEAD_DIM, BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr):
    """A segment's (m, l, acc) of the rows: acc [slots, HEAD_DIM] first, then m [slots] and l [slots]."""
    offs_d = tl.arange(0, BLOCK_D)
    tl.store(part_ptr + slots.to(tl.int64) * HEAD_DIM + slot, m, mask=rows_in)
    tl.store(part_ptr + slots.to(tl.int64) * (HEAD_DIM + 1) + slot, sum_of_eight(l8, BLOCK_M), mask=rows_in)
    inside = rows_in[:, None] & (offs_d[None, :] < HEAD_DIM)
    tl.store(part_ptr + slot[:, None] * HEAD_DIM + offs_d[None, :], acc, mask=inside)


@triton.jit(
    do_not_specialize=["tq", "tk", "blocks", "heads_kv", "window", "segments", "rows_per_start", "slots"],
    do_not_specialize_on_alignment=["cu_q_ptr", "cu_k_ptr", "positions_ptr", "index_ptr"],
)
def attend_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    out_ptr,
    part_ptr,
    cu_q_ptr,
    cu_k_ptr,
    positions_ptr,
    index_ptr,
    tq,
    tk,
    blocks,
    heads_kv,
    window,
    segments,
    rows_per_start,
    slots,
    qk_scale,
    cap_in,
    cap_out,
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
    SPAN: tl.constexpr,
    PEEL: tl.constexpr,
    PDL: tl.constexpr,
    VARLEN: tl.constexpr,
    CAUSAL: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    SEGMENT: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """A block of rows: over all segments, merged in order (SPAN 0), or over SPAN segments, left apart for merge_kernel.

    The tiles of all segments run in one loop, so that loads do not pause at a segment's border. Segments of which a
    block sees no key are left unwritten: the merge does not read what a row can't see.
    """
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    pid = tl.program_id(0)
    block = blocks - 1 - pid % blocks  # causal: the last blocks see the most keys, so they start first
    kv_head = pid // blocks % heads_kv
    q0, nq, k0, nk, first = bounds(cu_q_ptr, cu_k_ptr, positions_ptr, pid // blocks // heads_kv, tq, tk, VARLEN)
    if block * BLOCK_M >= nq * GROUP:
        return
    lo, full, hi = key_range(block, nq, nk, first, window, CAUSAL, WINDOW, GROUP, BLOCK_M, BLOCK_N)
    if SPAN:
        lo = tl.maximum(lo, tl.program_id(1) * (SPAN * SEGMENT))
        hi = tl.minimum(hi, (tl.program_id(1) + 1) * (SPAN * SEGMENT))
        if lo >= hi:
            return
        full = tl.maximum(tl.minimum(full, hi // BLOCK_N * BLOCK_N), lo)
    q, query, head = load_queries(
        q_ptr + q0 * stride_qb, block, nq, kv_head, stride_qt, stride_qh, GROUP, HEAD_DIM, BLOCK_M, BLOCK_D
    )
    k_ptr += kv_head.to(tl.int64) * stride_kh
    v_ptr += kv_head.to(tl.int64) * stride_vh
    if index_ptr is not None:
        index_ptr += k0 - first
    else:
        k_ptr += k0 * stride_kb - first.to(tl.int64) * stride_kt if positions_ptr is not None else k0 * stride_kb
        v_ptr += k0 * stride_vb - first.to(tl.int64) * stride_vt if positions_ptr is not None else k0 * stride_vb
    position = query + nk - nq
    rows_in = query < nq
    slot = ((q0 * rows_per_start + query) * (heads_kv * GROUP) + head) * segments

    m = tl.full((BLOCK_M,), float("-inf"), dtype=tl.float32)
    l8 = tl.zeros((BLOCK_M, 8), dtype=tl.float32)
    acc = tl.zeros((BLOCK_M, BLOCK_D), dtype=tl.float32)
    m_all = tl.full((BLOCK_M,), float("-inf"), dtype=tl.float32)
    l_all = tl.zeros((BLOCK_M,), dtype=tl.float32)
    acc_all = tl.zeros((BLOCK_M, BLOCK_D), dtype=tl.float32)
    if not PEEL:
        full = lo
    for masked in tl.static_range(1 - PEEL, 2):  # tiles that every row sees whole, then the others
        begin = full if masked else lo
        end = hi if masked else full
        for n in range(begin, end, BLOCK_N):
            if SPAN != 1:  # noqa: SIM102 - a constexpr takes the branch out at compile time, `and` would not
                if (n % SEGMENT == 0) & (n > lo):
                    if SPAN:
                        at = slot + n // SEGMENT - 1
                        _store_part(part_ptr, slots, at, rows_in, m, l8, acc, HEAD_DIM, BLOCK_M, BLOCK_D)
                    else:
                        m_all, l_all, acc_all = merge(
                            m_all, l_all, acc_all, m, sum_of_eight(l8, BLOCK_M), acc, qk_scale
                        )
                    m = tl.full((BLOCK_M,), float("-inf"), dtype=tl.float32)
                    l8 = tl.zeros((BLOCK_M, 8), dtype=tl.float32)
                    acc = tl.zeros((BLOCK_M, BLOCK_D), dtype=tl.float32)
            m, l8, acc = add_tile(
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
                masked,
                positions_ptr is not None,
                CAUSAL,
                WINDOW,
                SOFTCAP,
                HEAD_DIM,
                BLOCK_M,
                BLOCK_N,
                BLOCK_D,
            )
    if SPAN:
        at = slot + (hi - 1) // SEGMENT
        _store_part(part_ptr, slots, at, rows_in, m, l8, acc, HEAD_DIM, BLOCK_M, BLOCK_D)
        return
    m_all, l_all, acc_all = merge(m_all, l_all, acc_all, m, sum_of_eight(l8, BLOCK_M), acc, qk_scale)
    offs_d = tl.arange(0, BLOCK_D)
    out_ptr += q0 * stride_ob
    tl.store(
        out_ptr + query.to(tl.int64)[:, None] * stride_ot + head.to(tl.int64)[:, None] * stride_oh + offs_d[None, :],
        (acc_all / l_all[:, None]).to(out_ptr.dtype.element_ty),
        mask=rows_in[:, None] & (offs_d[None, :] < HEAD_DIM),
    )


@triton.jit(
    do_not_specialize=["tq", "tk", "heads", "max_rows", "window", "segments", "rows_per_start", "slots"],
    do_not_specialize_on_alignment=["cu_q_ptr", "cu_k_ptr", "positions_ptr"],
)
def merge_kernel(
    part_ptr,
    out_ptr,
    cu_q_ptr,
    cu_k_ptr,
    positions_ptr,
    tq,
    tk,
    heads,
    max_rows,
    window,
    segments,
    rows_per_start,
    slots,
    qk_scale,
    stride_ob,
    stride_oh,
    stride_ot,
    UNROLL: tl.constexpr,
    PDL: tl.constexpr,
    VARLEN: tl.constexpr,
    CAUSAL: tl.constexpr,
    WINDOW: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    SEGMENT: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """One row: the segments that it sees, merged in order by the arithmetic of attend_kernel."""
    pid = tl.program_id(0)
    q0, nq, _, nk, first = bounds(cu_q_ptr, cu_k_ptr, positions_ptr, pid // max_rows, tq, tk, VARLEN)
    query = pid % max_rows // heads
    head = pid % max_rows % heads
    if PDL:
        # Before any return: a kernel that follows may start once these programs are gone.
        tl.extra.cuda.gdc_wait()
    if query >= nq:
        return
    begin = 0
    seen = nk
    if CAUSAL:
        seen = tl.minimum(nk, query + 1 + nk - nq)
    if WINDOW:
        begin = tl.maximum(query + nk - nq - window + 1, first) // SEGMENT
    offs_d = tl.arange(0, BLOCK_D)
    in_d = offs_d[None, :] < HEAD_DIM
    one = tl.arange(0, 1)
    m_all = tl.full((1,), float("-inf"), dtype=tl.float32)
    l_all = tl.zeros((1,), dtype=tl.float32)
    acc_all = tl.zeros((1, BLOCK_D), dtype=tl.float32)
    base = ((q0 * rows_per_start + query) * heads + head) * segments + one
    end = tl.cdiv(seen, SEGMENT)
    for start in range(begin, end, UNROLL):
        for i in tl.static_range(UNROLL):  # side by side, so that their loads are
            slot = base + (start + i)
            there = one + (start + i) < end
            m = tl.load(part_ptr + slots.to(tl.int64) * HEAD_DIM + slot, mask=there, other=float("-inf"))
            l = tl.load(part_ptr + slots.to(tl.int64) * (HEAD_DIM + 1) + slot, mask=there, other=0.0)  # noqa: E741 - as above
            acc = tl.load(part_ptr + slot[:, None] * HEAD_DIM + offs_d[None, :], mask=there[:, None] & in_d, other=0.0)
            m_all, l_all, acc_all = merge(m_all, l_all, acc_all, m, l, acc, qk_scale)
    out = out_ptr + q0 * stride_ob + query.to(tl.int64) * stride_ot + head.to(tl.int64) * stride_oh + offs_d[None, :]
    tl.store(out, (acc_all / l_all[:, None]).to(out_ptr.dtype.element_ty), mask=in_d)
