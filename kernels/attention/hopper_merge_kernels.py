"""The Gluon kernel that merges the segments of a row: the order of `cuda_kernels.merge_kernel`, bit for bit.

The merge computes the factors of all segments at once, a segment a lane, for the running maximum is exact. What is left
of it as a chain is one fused multiply-add a segment, with all of its operands in registers before it starts.
"""

# Triton reads a kernel's annotations itself: only gl.constexpr may stand there.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from nondet.kernels.attention.hopper_decode_parts import launch_dependents, wait_for_kernel_before

__all__ = ["merge_all_kernel"]


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
    else:  # noqa: RET505 - what stands after a return is compiled all the same
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
    """32 columns of one row, by one warp: the segments that the row sees, merged in order, CHUNK of them at a time.

    It reads up to CHUNK segments more than there are: part must have room for them behind its end.
    """
    COLUMNS: gl.constexpr = 32
    LANES: gl.constexpr = gl.BlockedLayout([CHUNK // 32 if CHUNK > 32 else 1], [32], [1], [0])  # a segment a lane
    TILE: gl.constexpr = gl.BlockedLayout([CHUNK, 1], [1, 32], [1, 1], [1, 0])  # a column a lane, all segments
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
        # A segment that adds nothing: x * 1 + -0 is x, whatever x is. Its sums may be NaN, so they are left out.
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
