"""The Triton kernels of attention, their common pieces, and how they are launched: one class of bits."""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from nondet.kernels.triton_common import capability, multiprocessors

# The pieces that all attention kernels share, so that they compute the same bits.
# Names as in the literature on online softmax: m is a row's running maximum score, l its sum of exponentials, acc its
# weighted sum of values. Scores are as the dot gives them (after the soft cap, if there is one); qk_scale turns a
# difference of scores into powers of two.
# A program owns BLOCK_M rows. A row is one query of one head; the GROUP query heads that share a KV head are
# interleaved (row r is query r // GROUP, head r % GROUP of the group), so that a decode step loads each key once for
# them. Requests are either the batch of a dense tensor or, with VARLEN, ranges of packed tokens; `bounds` hides which.
# Every fused multiply-add is written out as tl.fma, because FMA contraction is off; every sum is written out as a tree,
# because the order of tl.sum follows the layout, and the layout follows BLOCK_M and the number of warps.

# Triton reads a kernel's annotations itself and allows only tl.constexpr.
# mypy: allow-untyped-defs, allow-incomplete-defs


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
    left, right = tl.split(tl.permute(tl.reshape(x, (ROWS, 2, HALF)), (0, 2, 1)))
    return left + right


@triton.jit
def _eight_sums(p, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """[ROWS, COLUMNS] -> [ROWS, 8]: sum c is that of the columns j = c mod 8, a tree of halves.

    Eight, because a thread of the matrix units holds columns 8 apart: if one warp has a whole row, the tree stays
    within a thread.
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
    (MASKED) are replaced by zeros, of probability 0.
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
    """Add one segment to those before it. A row that saw no key in it keeps its bits."""
    m_new = tl.maximum(m_all, m)
    m_safe = tl.where(m_new == float("-inf"), 0.0, m_new)
    before = tl.exp2((m_all - m_safe) * qk_scale)
    now = tl.exp2((m - m_safe) * qk_scale)
    empty = (m == float("-inf")) & (l == 0.0)  # l is NaN, not 0, where a score was NaN: that must get through
    l_all = tl.where(empty, l_all, tl.fma(l_all, before, l * now))
    spread = tl.zeros_like(acc)
    acc_all = tl.where(empty[:, None], acc_all, tl.fma(acc_all, spread + before[:, None], acc * now[:, None]))
    return m_new, l_all, acc_all


@triton.jit
def _store_part(part_ptr, slots, slot, rows_in, m, l8, acc, HEAD_DIM, BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr):
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
    """A block of rows: over all segments, merged in order (SPAN 0), or over SPAN segments, kept separate for
    merge_kernel.

    The tiles of all segments run in one loop, so that loads do not pause between segments. Segments of which a block
    sees no key are left unwritten: the merge does not read what a row can't see.
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
        # Before any return: the next kernel may start once these programs have ended.
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
        for i in tl.static_range(UNROLL):  # unrolled, so that their loads overlap
            slot = base + (start + i)
            there = one + (start + i) < end
            m = tl.load(part_ptr + slots.to(tl.int64) * HEAD_DIM + slot, mask=there, other=float("-inf"))
            l = tl.load(part_ptr + slots.to(tl.int64) * (HEAD_DIM + 1) + slot, mask=there, other=0.0)  # noqa: E741 - as above
            acc = tl.load(part_ptr + slot[:, None] * HEAD_DIM + offs_d[None, :], mask=there[:, None] & in_d, other=0.0)
            m_all, l_all, acc_all = merge(m_all, l_all, acc_all, m, l, acc, qk_scale)
    out = out_ptr + q0 * stride_ob + query.to(tl.int64) * stride_ot + head.to(tl.int64) * stride_oh + offs_d[None, :]
    tl.store(out, (acc_all / l_all[:, None]).to(out_ptr.dtype.element_ty), mask=in_d)


SEGMENT = 512  # keys; part of the class

FEW_ROWS = 16  # of a block of `hopper.decode_kernel`, the smallest there is

_START_TILES, _MERGE_TILES = 1, 1  # the cost of a start and of a merge, in the time of a tile of 128 keys


class Plan(NamedTuple):
    """How to launch. block_n is part of the class; `peel`: tiles that every row sees whole run in an unmasked loop."""

    block_m: int
    block_n: int
    block_d: int
    warps: int
    stages: int
    peel: bool


class Way(NamedTuple):
    """How a call is computed. All proven ways have the class's bits."""

    plan: Plan
    span: int  # segments of one program: 0 for all of them, merged there; else this many, and a second launch merges
    pdl: bool  # the second launch starts before the first has ended
    # how many `hopper.decode_kernel` takes at a time, the plan's stages being the slots of its ring; 0: `attend_kernel`
    tiles: int = 0
    lanes: bool = (
        False  # the second launch is that of `hopper.decode_kernel`, whose lanes compute the factors of all segments
    )
    # the first launch starts before the kernel before it has ended, and waits; only `hopper.decode_kernel`
    early: bool = False

    @property
    def name(self) -> str:
        """All of it, for certificates: "triton 16x128w4s3 span=2 pdl", "gluon 16x128w4s3 tiles=2 span=0 early"."""
        plan = self.plan
        name = f"{plan.block_m}x{plan.block_n}w{plan.warps}s{plan.stages}"
        name = f"gluon {name} tiles={self.tiles}" if self.tiles else f"triton {name}"
        name += f" span={self.span}"
        flags = {"peel": plan.peel, "pdl": self.pdl, "lanes": self.lanes, "early": self.early}
        return " ".join([name, *(flag for flag, is_set in flags.items() if is_set)])


class Form(NamedTuple):
    """What the kernels are compiled for besides the way. It leaves out lengths, batch and scale."""

    dtype: torch.dtype
    head_dim: int
    group: int  # query heads that share a KV head
    causal: bool
    window: bool
    softcap: bool
    packed: bool  # requests are ranges of tokens
    positions: torch.dtype | None  # the dtype of positions, where a cache has dropped keys
    paged: torch.dtype | None  # the dtype of a paged cache's index
    # for q, k, v and the result: which of the steps to the next request (packed: token), head and token are multiples
    # of 16 elements
    steps: tuple[tuple[bool, ...], ...]
    aligned: tuple[bool, ...]  # which of q, k and v start at a multiple of 16 bytes
    page: int = 0  # how many of its keys are known to lie together, or 0

    def words(self) -> tuple[str, ...]:
        """For the key of a certificate."""

        def name(dtype: torch.dtype | None) -> str:
            return str(dtype).removeprefix("torch.")

        flags = ("causal", "window", "softcap", "packed")
        return (
            f"{name(self.dtype)} D={self.head_dim} group={self.group}",
            *(flag for flag in flags if getattr(self, flag)),
            *(f"positions={name(x)}" for x in (self.positions,) if x is not None),
            *(f"paged={name(x)}" for x in (self.paged,) if x is not None),
            *(f"page={x}" for x in (self.page,) if x),
            "16|" + ",".join("".join("y" if step else "n" for step in steps) for steps in self.steps),
            "@" + ",".join("16" if x else "1" for x in self.aligned),
        )


def one_plan(head_dim: int, dtype: torch.dtype) -> Way:
    """The way that supports every call and defines the class's bits: the smallest block, one program for all keys."""
    return Way(plan_for(1, head_dim, dtype), 0, False)


def tile_keys(head_dim: int, dtype: torch.dtype) -> int:
    """Keys of a tile, part of the class: the maximum is updated, and the sums are rescaled, once per tile."""
    if dtype == torch.float32:
        return 32
    return 128 if head_dim <= 128 else 64


@functools.cache
def plan_for(rows: int, head_dim: int, dtype: torch.dtype) -> Plan:
    """For `rows` packed query rows of a KV head, 128 for any larger number: the smallest block that holds them."""
    block_d = max(16, triton.next_power_of_2(head_dim))
    block_n = tile_keys(head_dim, dtype)
    if dtype == torch.float32:
        return Plan(16 if rows <= 16 or block_d > 128 else 32, block_n, block_d, 4, 1, False)
    if rows <= 16:
        return Plan(16, block_n, block_d, 4, 3, False)
    if rows <= 32:
        return Plan(32, block_n, block_d, 4, 2, False)
    if block_d > 128:
        return Plan(64, block_n, block_d, 8, 2, True)
    if rows <= 64:
        return Plan(64, block_n, block_d, 8, 2, True)
    return Plan(128, block_n, block_d, 8, 2, True)


@functools.cache
def span_for(programs: int, segments: int, tiles: int, device: torch.device) -> int:
    """Segments of one program: 0 for all of them, merged there; else this many, and a second launch merges.

    The bits are equal, so this may depend on anything. A multiprocessor runs about one program at full speed; time is
    counted in tiles of keys: those of a program, a start for each wave of programs, and the second launch. `tiles`: of
    a segment.
    """
    sms = multiprocessors(device)
    best, best_cost = 0, float(-(-programs // sms) * (segments * tiles + _START_TILES))
    for splits in range(2, segments + 1):
        span = -(-segments // splits)
        cost = -(-programs * -(-segments // span) // sms) * (span * tiles + _START_TILES) + _MERGE_TILES + segments / 16
        if cost < best_cost:
            best, best_cost = span, cost
        if programs * splits > 4 * sms:
            break
    return best


_ALONE, _PAIR = Plan(FEW_ROWS, 128, 128, 4, 6, False), Plan(FEW_ROWS, 128, 128, 4, 3, False)


@functools.cache
def few_rows(programs: int, segments: int, head_dim: int, device: torch.device) -> Way:
    """For blocks of FEW_ROWS rows on Hopper, by the kernels of `hopper.decode_kernel`.

    If multiprocessors have one program each, it takes a segment at a time and all of the memory; with more programs,
    two share a multiprocessor, and one loads while the other computes.
    """
    span = span_for(programs, segments, SEGMENT // 128, device)
    alone = programs * (-(-segments // span) if span else 1) <= multiprocessors(device)
    plan, tiles = (_ALONE, 4) if alone else (_PAIR, 2)
    return Way(plan._replace(block_d=head_dim), span, span > 0, tiles=tiles, lanes=span > 0, early=True)


@functools.cache
def has_pdl(device: torch.device) -> bool:
    """Whether a kernel can start before the one it waits for has ended (Hopper's programmatic dependent launch)."""
    return device.type == "cuda" and capability(device)[0] >= 9
