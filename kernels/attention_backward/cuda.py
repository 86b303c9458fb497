"""The gradient of attention in Triton: no atomics, each request by itself, in an order that its own lengths decide.

Order, of one request: queries and keys in tiles anchored at its first. `_queries_kernel` owns a tile of queries of one
head: it loops over the keys' tiles in order once for the maximum and the sum of exponentials, both kept, and once more
for the queries' gradient. `_keys_kernel` owns a tile of keys of one KV head: it loops over the query heads of the group
in order, and for each over the queries' tiles in order. Both add in float32 in registers; products of half precision
take their probabilities and score gradients rounded to the input's dtype, as FlashAttention does; one rounding ends it.

Invariance: only the request's own tokens enter, and each element of a gradient is written by one program. FMA
contraction is off.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl

from nondet.core.launch import note
from nondet.kernels.triton_common import on_device, require

_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
_LOG2_E = math.log2(math.e)
MAX_HEAD_DIM = 256

Gradients = tuple[torch.Tensor, torch.Tensor, torch.Tensor]

# Triton reads a kernel's annotations itself and allows only tl.constexpr.
# mypy: allow-untyped-defs, allow-incomplete-defs


@triton.jit
def _rows_of(pointer, first, tile, count, head, stride_t, stride_h, DIM, TILE: tl.constexpr, BLOCK_D: tl.constexpr):
    token = tile * TILE + tl.arange(0, TILE)
    column = tl.arange(0, BLOCK_D)
    place = (first + token).to(tl.int64)[:, None] * stride_t + head * stride_h + column[None, :]
    return tl.load(pointer + place, mask=(token[:, None] < count) & (column[None, :] < DIM), other=0.0)


@triton.jit
def _scores(
    q,
    k,
    query,
    key,
    queries,
    keys,
    scale,
    cap,
    window,
    CAUSAL: tl.constexpr,
    WINDOW: tl.constexpr,
    CAPPED: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """(scores in units of log2, hidden ones -inf; the soft cap's slope) of a tile [queries, keys]; `scale` has log2(e)
    in it.
    """
    s = tl.dot(q, tl.trans(k), input_precision=PRECISION)
    slope = tl.full(s.shape, 1.0, tl.float32)
    if CAPPED:
        bent = 1.0 - 2.0 / (tl.exp2(s * (2.0 * scale / cap)) + 1.0)
        slope = 1.0 - bent * bent
        s = bent * (cap * 1.4426950408889634)
    else:
        s = s * scale
    position = query + keys - queries
    seen = (key[None, :] < keys) & (query[:, None] < queries)
    if CAUSAL:
        seen = seen & (key[None, :] <= position[:, None])
    if WINDOW:
        seen = seen & (key[None, :] > position[:, None] - window)
    return tl.where(seen, s, float("-inf")), slope


@triton.jit
def _queries_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    out_ptr,
    g_ptr,
    dq_ptr,
    top_ptr,
    share_ptr,
    delta_ptr,
    cu_q_ptr,
    cu_k_ptr,
    scale,
    slope_scale,
    cap,
    window,
    stride_qt,
    stride_qh,
    stride_kt,
    stride_kh,
    stride_vt,
    stride_vh,
    stride_ot,
    stride_oh,
    stride_gt,
    stride_gh,
    heads,
    group,
    DIM,
    CAUSAL: tl.constexpr,
    WINDOW: tl.constexpr,
    CAPPED: tl.constexpr,
    PRECISION: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    tile, head, request = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    q0 = tl.load(cu_q_ptr + request)
    k0 = tl.load(cu_k_ptr + request)
    queries = tl.load(cu_q_ptr + request + 1) - q0
    keys = tl.load(cu_k_ptr + request + 1) - k0
    if tile * ROWS >= queries:
        return
    kv_head = head // group
    query = tile * ROWS + tl.arange(0, ROWS)
    q = _rows_of(q_ptr, q0, tile, queries, head, stride_qt, stride_qh, DIM, ROWS, BLOCK_D)
    g = _rows_of(g_ptr, q0, tile, queries, head, stride_gt, stride_gh, DIM, ROWS, BLOCK_D)
    o = _rows_of(out_ptr, q0, tile, queries, head, stride_ot, stride_oh, DIM, ROWS, BLOCK_D)
    delta = tl.sum(g.to(tl.float32) * o.to(tl.float32), 1)
    last = keys
    first_tile = 0
    if CAUSAL:
        last = tl.minimum(keys, tile * ROWS + ROWS + keys - queries)
    if WINDOW:
        first_tile = tl.maximum(tile * ROWS + keys - queries - window + 1, 0) // KEYS
    top = tl.full((ROWS,), float("-inf"), tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    for block in range(first_tile, tl.cdiv(last, KEYS)):
        key = block * KEYS + tl.arange(0, KEYS)
        k = _rows_of(k_ptr, k0, block, keys, kv_head, stride_kt, stride_kh, DIM, KEYS, BLOCK_D)
        s, _ = _scores(q, k, query, key, queries, keys, scale, cap, window, CAUSAL, WINDOW, CAPPED, PRECISION)
        new = tl.maximum(top, tl.max(s, 1))
        safe = tl.where(new == float("-inf"), 0.0, new)
        total = total * tl.exp2(top - safe) + tl.sum(tl.exp2(s - safe[:, None]), 1)
        top = new
    # a row that sees nothing (beyond the last query) has probability 0 everywhere
    top = tl.where(total > 0.0, top, float("inf"))
    share = 1.0 / tl.where(total > 0.0, total, 1.0)
    acc = tl.zeros((ROWS, BLOCK_D), tl.float32)
    for block in range(first_tile, tl.cdiv(last, KEYS)):
        key = block * KEYS + tl.arange(0, KEYS)
        k = _rows_of(k_ptr, k0, block, keys, kv_head, stride_kt, stride_kh, DIM, KEYS, BLOCK_D)
        v = _rows_of(v_ptr, k0, block, keys, kv_head, stride_vt, stride_vh, DIM, KEYS, BLOCK_D)
        s, slope = _scores(q, k, query, key, queries, keys, scale, cap, window, CAUSAL, WINDOW, CAPPED, PRECISION)
        p = tl.exp2(s - top[:, None]) * share[:, None]
        ds = p * (tl.dot(g, tl.trans(v), input_precision=PRECISION) - delta[:, None])
        if CAPPED:
            ds = ds * slope
        acc += tl.dot(ds.to(k.dtype), k, input_precision=PRECISION)
    column = tl.arange(0, BLOCK_D)
    row = (q0 + query).to(tl.int64) * heads + head
    there = query < queries
    tl.store(top_ptr + row, top, mask=there)
    tl.store(share_ptr + row, share, mask=there)
    tl.store(delta_ptr + row, delta, mask=there)
    place = row[:, None] * DIM + column[None, :]
    tl.store(
        dq_ptr + place, (acc * slope_scale).to(dq_ptr.dtype.element_ty), mask=there[:, None] & (column[None, :] < DIM)
    )


@triton.jit
def _keys_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    g_ptr,
    dk_ptr,
    dv_ptr,
    top_ptr,
    share_ptr,
    delta_ptr,
    cu_q_ptr,
    cu_k_ptr,
    scale,
    slope_scale,
    cap,
    window,
    stride_qt,
    stride_qh,
    stride_kt,
    stride_kh,
    stride_vt,
    stride_vh,
    stride_gt,
    stride_gh,
    heads,
    group,
    DIM,
    CAUSAL: tl.constexpr,
    WINDOW: tl.constexpr,
    CAPPED: tl.constexpr,
    PRECISION: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    block, kv_head, request = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    q0 = tl.load(cu_q_ptr + request)
    k0 = tl.load(cu_k_ptr + request)
    queries = tl.load(cu_q_ptr + request + 1) - q0
    keys = tl.load(cu_k_ptr + request + 1) - k0
    if block * KEYS >= keys:
        return
    key = block * KEYS + tl.arange(0, KEYS)
    k = _rows_of(k_ptr, k0, block, keys, kv_head, stride_kt, stride_kh, DIM, KEYS, BLOCK_D)
    v = _rows_of(v_ptr, k0, block, keys, kv_head, stride_vt, stride_vh, DIM, KEYS, BLOCK_D)
    of_k = tl.zeros((KEYS, BLOCK_D), tl.float32)
    of_v = tl.zeros((KEYS, BLOCK_D), tl.float32)
    first = 0
    end = queries
    if CAUSAL:  # the first query that sees the block's first key
        first = tl.maximum(block * KEYS - (keys - queries), 0) // ROWS
    if WINDOW:  # and the last one that sees its last
        end = tl.minimum(queries, tl.maximum(block * KEYS + KEYS - 1 - (keys - queries) + window, 0))
    for member in range(group):
        head = kv_head * group + member
        for tile in range(first, tl.cdiv(end, ROWS)):
            query = tile * ROWS + tl.arange(0, ROWS)
            there = query < queries
            row = (q0 + query).to(tl.int64) * heads + head
            top = tl.load(top_ptr + row, mask=there, other=float("inf"))
            share = tl.load(share_ptr + row, mask=there, other=0.0)
            delta = tl.load(delta_ptr + row, mask=there, other=0.0)
            q = _rows_of(q_ptr, q0, tile, queries, head, stride_qt, stride_qh, DIM, ROWS, BLOCK_D)
            g = _rows_of(g_ptr, q0, tile, queries, head, stride_gt, stride_gh, DIM, ROWS, BLOCK_D)
            s, slope = _scores(q, k, query, key, queries, keys, scale, cap, window, CAUSAL, WINDOW, CAPPED, PRECISION)
            p = tl.exp2(s - top[:, None]) * share[:, None]
            of_v += tl.dot(tl.trans(p.to(g.dtype)), g, input_precision=PRECISION)
            ds = p * (tl.dot(g, tl.trans(v), input_precision=PRECISION) - delta[:, None])
            if CAPPED:
                ds = ds * slope
            of_k += tl.dot(tl.trans(ds.to(q.dtype)), q, input_precision=PRECISION)
    column = tl.arange(0, BLOCK_D)
    place = ((k0 + key).to(tl.int64) * (heads // group) + kv_head)[:, None] * DIM + column[None, :]
    there = (key[:, None] < keys) & (column[None, :] < DIM)
    tl.store(dk_ptr + place, (of_k * slope_scale).to(dk_ptr.dtype.element_ty), mask=there)
    tl.store(dv_ptr + place, of_v.to(dv_ptr.dtype.element_ty), mask=there)


def attention_backward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    gradient: torch.Tensor,
    *,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    scale: float,
    causal: bool = True,
    window: int | None = None,
    softcap: float | None = None,
    max_seqlen_q: int,
    max_seqlen_k: int,
) -> Gradients:
    """As the CPU's `attention_backward`. NotImplementedError: no kernel for this device, dtype or head dim."""
    require("attention_backward", _DTYPES, q, k, v, out, gradient)
    tokens, heads, dim = q.shape
    if dim > MAX_HEAD_DIM:
        raise NotImplementedError(f"attention_backward has no kernel for head dim {dim}; it takes up to {MAX_HEAD_DIM}")
    q, k, v, out, gradient = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k, v, out, gradient))
    of_q = torch.zeros(q.shape, dtype=q.dtype, device=q.device)
    of_k, of_v = (torch.zeros(k.shape, dtype=k.dtype, device=k.device) for _ in range(2))
    requests = cu_seqlens_q.numel() - 1
    if not (tokens and k.shape[0] and requests):
        return of_q, of_k, of_v
    top, share, delta = (torch.empty((tokens, heads), dtype=torch.float32, device=q.device) for _ in range(3))
    block_d = max(16, triton.next_power_of_2(dim))
    small = q.dtype == torch.float32 or block_d > 128
    rows, keys = (32, 32) if small else (64, 64)
    group = heads // k.shape[1]
    cu_q, cu_k = (x.to(device=q.device, dtype=torch.int32) for x in (cu_seqlens_q, cu_seqlens_k))
    numbers = (scale * _LOG2_E, float(scale), float(softcap or 1.0), int(window or 0))
    modes = {"CAUSAL": causal, "WINDOW": window is not None, "CAPPED": softcap is not None, "PRECISION": "ieee"}
    modes |= {"ROWS": rows, "KEYS": keys, "BLOCK_D": block_d}
    modes |= {"num_warps": 4, "num_stages": 2, "enable_fp_fusion": False}
    note(f"attention_backward[{rows}x{keys}]")
    with on_device(q):
        _queries_kernel[(triton.cdiv(max_seqlen_q, rows), heads, requests)](
            *(q, k, v, out, gradient, of_q, top, share, delta, cu_q, cu_k),
            *numbers,
            *(step for x in (q, k, v, out, gradient) for step in x.stride()[:2]),
            *(heads, group, dim),
            **modes,
        )
        _keys_kernel[(triton.cdiv(max_seqlen_k, keys), k.shape[1], requests)](
            *(q, k, v, gradient, of_k, of_v, top, share, delta, cu_q, cu_k),
            *numbers,
            *(step for x in (q, k, v, gradient) for step in x.stride()[:2]),
            *(heads, group, dim),
            **modes,
        )
    return of_q, of_k, of_v
