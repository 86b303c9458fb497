"""Batch-invariant attention on a CPU: prefill, chunked prefill, decode, packed and padded batches give the same bits.

Numerics: operands are widened to float32 (exact), the query is scaled, and the keys are taken in blocks of 64 that are
anchored at the request's first key. A library GEMM gives the scores of each block; a query's largest score over all of
its blocks, which no order can change, is subtracted; and the blocks' sums of exponentials and weighted values are added
block by block, in order, in float32; within a block exponentials are added by NumPy's pairwise sum. One division and
one rounding to the dtype end it. The probabilities stay in float32, unlike in torch's own flash attention on a CPU.

Invariance: what a query gives depends on itself and on the keys before it, however they came to be cached, and on the
process (instruction set, thread count). Why: keys beyond the query, in its own block or in those after it, have
probability 0 and add exact zeros; and the products run in batches of equal tiles, at tile heights and batch sizes
certified to give the same bits (`nondet.kernels.attention.cpu_products`). Everything else is a maximum or elementwise;
exponentials (and a soft cap's tanh) are NumPy's, whose vector loops mask their last elements where torch's go on one by
one by another formula. `cpu_attention_proof` holds the whole to account at first use, with the sums over 64
probabilities. A key or value that is infinite or NaN spoils its whole block, for queries before it too. Keys that a
window hides do as those beyond the query.
"""

from __future__ import annotations

import math
import sys
from typing import Any, NamedTuple

import numpy as np
import torch

from nondet.core.certificates import certificates
from nondet.core.launch import note, proving
from nondet.core.proof import operands_key
from nondet.errors import UserError
from nondet.kernels.attention.cpu_plan import BLOCK, Ask, Group, first_keys, plan_batch, plan_packed
from nondet.kernels.attention.cpu_products import heights_of, products_of, scores, values
from nondet.kernels.attention.cpu_proof import prove
from nondet.kernels.matmul.cpu_tiles import NotInvariantError, environment_key

__all__ = ["MAX_HEAD_DIM", "attention", "attention_varlen"]

_CLASS = "cpu-blocks-one-maximum-pairwise-sums"  # in certificates: another order of reduction is another name
MAX_HEAD_DIM = sys.maxsize  # any

# Gathered keys that are worked on at a time, so that they stay in a cache; but not so few blocks that calls cost more.
_FLOATS, _LEAST_PAIRS = 2**20, 64
# Scores, and rows of them, up to which NumPy is faster than torch at what has the same bits by either.
_SMALL, _FEW_ROWS = 2**15, 64
_HIDDEN = np.float32(-np.inf)
_LOWEST, _ZERO = np.float32(torch.finfo(torch.float32).min), np.float32(0.0)


class _Places(NamedTuple):
    """Where packed keys lie in a cache: each key's token there; rows are tokens and heads."""

    tokens: np.ndarray[Any, np.dtype[np.int64]]
    kv_heads: int


_verified: dict[tuple[object, ...], NotInvariantError | None] = {}


def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    causal: bool = True,
    scale: float | None = None,
    window: int | None = None,
    softcap: float | None = None,
) -> torch.Tensor:
    """q [B, Hq, Tq, D] over k, v [B, Hkv, Tk, D] -> [B, Hq, Tq, D] in q's dtype; Hq is a multiple of Hkv (GQA).

    Causal is aligned to the end, as in `nondet.kernels.reference`. The result is laid out as [B, Tq, Hq, D].

    Args:
        causal: See keys up to one's own position.
        scale: Of the scores; 1 / sqrt(D) if None.
        window: A query sees that many keys, its own included; None: all before it.
        softcap: Scores s become softcap * tanh(s / softcap), as in Gemma 2; None: they stay.

    Raises:
        UserError: shapes or dtypes that do not fit, more queries than keys, or a gradient asked for.
        NotInvariantError: this machine has no certified way.
    """
    batch, heads, q_len, dim = q.shape
    kv_heads, k_len = k.shape[1], k.shape[2]
    if q.numel() == 0:
        return q.new_empty((batch, q_len, heads, dim)).transpose(1, 2)
    _check(q, k, v, heads, kv_heads, causal=causal, window=window, softcap=softcap)
    _prove_once(dim, softcap is not None)
    by_token = q.transpose(1, 2).is_contiguous()
    out = _attend(
        (q.transpose(1, 2) if by_token else q.contiguous()).reshape(-1, dim),
        k.contiguous().view(-1, dim),
        v.contiguous().view(-1, dim),
        plan_batch(batch, q_len, k_len, by_token, _ask(heads, kv_heads, dim, causal, window)),
        scale,
        softcap,
    )
    return out.view(batch, q_len, heads, dim).transpose(1, 2)


def attention_varlen(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    scale: float | None = None,
    causal: bool = True,
    window: int | None = None,
    softcap: float | None = None,
    positions: torch.Tensor | None = None,
    split: bool | None = None,
    key_index: torch.Tensor | None = None,
) -> torch.Tensor:
    """Packed requests: q [Tq_total, Hq, D] over k, v [Tk_total, Hkv, D] -> [Tq_total, Hq, D] in q's dtype.

    Each request has the bits that `attention` gives it alone.

    Args:
        cu_seqlens_q: int [requests + 1]: where each request's queries start; the last entry is where all end.
        cu_seqlens_k: int [requests + 1]: the same for keys and values.
        max_seqlen_q: Longest query; only GPU kernels need it.
        max_seqlen_k: Most keys of a request; only GPU kernels need it.
        scale: Of the scores; 1 / sqrt(D) if None.
        causal: Aligned to the end of each request.
        window: A query sees that many keys, its own included; None: all before it. Needs causal.
        softcap: As in `attention`.
        positions: Integers [Tq_total], each query's position in its request, where a sliding-window cache dropped the
            first keys: those that are left end at the last query's position, and blocks stay anchored at position 0.
            None: a request's first key stands at position 0.
        split: Only GPU kernels have more than one way.
        key_index: int64 [Tk_total]: k and v are a whole cache [tokens, Hkv, D], and these the places of the packed
            keys in it. None: k and v are the packed keys.

    Returns:
        Zeros for queries that belong to no request (those from cu_seqlens_q[-1] on).

    Raises:
        UserError: as `attention`.
        NotInvariantError: this machine has no certified way.
    """
    del max_seqlen_q, max_seqlen_k, split
    _check(q, k, v, q.shape[1], k.shape[1], causal=causal, window=window, softcap=softcap)
    if positions is not None and (window is None or positions.ndim != 1 or positions.shape[0] < q.shape[0]):
        raise UserError("positions [Tq] go with a window: without one, no key may be missing")
    _prove_once(q.shape[2], softcap is not None)
    return _varlen(
        *(q, k, v, cu_seqlens_q, cu_seqlens_k),
        scale=scale,
        causal=causal,
        window=window,
        softcap=softcap,
        positions=positions,
        key_index=key_index,
    )


def _varlen(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    *,
    scale: float | None = None,
    causal: bool = True,
    window: int | None = None,
    softcap: float | None = None,
    positions: torch.Tensor | None = None,
    key_index: torch.Tensor | None = None,
) -> torch.Tensor:
    heads, kv_heads, dim = q.shape[1], k.shape[1], q.shape[2]
    starts_q, starts_k = cu_seqlens_q.tolist(), cu_seqlens_k.tolist()
    first: tuple[int, ...] = ()
    if positions is not None:
        first = first_keys(positions.tolist(), starts_q, starts_k)
    if q.numel() == 0:
        return q.new_zeros(q.shape)
    out = _attend(
        q.reshape(-1, dim),
        k.reshape(-1, dim),
        v.reshape(-1, dim),
        plan_packed(q.shape[0], tuple(starts_q), tuple(starts_k), first, _ask(heads, kv_heads, dim, causal, window)),
        scale,
        softcap,
        None if key_index is None else _Places(key_index.numpy(), kv_heads),
    )
    return out.view(q.shape)


def _ask(heads: int, kv_heads: int, dim: int, causal: bool, window: int | None) -> Ask:
    return Ask(heads, kv_heads, heights_of(dim), max(_LEAST_PAIRS, _FLOATS // (BLOCK * dim)), causal, window)


def _check(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    heads: int,
    kv_heads: int,
    *,
    causal: bool,
    window: int | None,
    softcap: float | None,
) -> None:
    if window is not None and (window < 1 or not causal):
        raise UserError(f"a window needs causal=True and at least 1 key, got causal={causal}, window={window}")
    if softcap is not None and not softcap > 0:
        raise UserError(f"softcap must be above 0, got {softcap}")
    if not q.dtype.is_floating_point or q.dtype.itemsize > 4 or not (q.dtype is k.dtype is v.dtype):
        raise UserError(f"cpu_attention has no {q.dtype} with {k.dtype}, {v.dtype}", "Use one dtype of up to 32 bits.")
    if heads % kv_heads or v.shape[1:] != k.shape[1:] or k.shape[-1] != q.shape[-1]:
        raise UserError(
            f"cpu_attention can't take q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}",
            "The query heads must be a multiple of the key heads, and all head dims equal.",
        )
    if torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad):
        raise UserError("cpu_attention computes no gradients", "Call it under torch.no_grad().")


def _attend(
    q_rows: torch.Tensor,
    k_rows: torch.Tensor,
    v_rows: torch.Tensor,
    groups: tuple[Group, ...],
    scale: float | None,
    softcap: float | None,
    places: _Places | None = None,
) -> torch.Tensor:
    """[.., D] in the dtype, a row for each of q_rows, token by token; zeros where the plan has no query."""
    dim, dtype = q_rows.shape[1], q_rows.dtype
    factor = scale if scale is not None else 1.0 / math.sqrt(dim)
    out: torch.Tensor | None = None
    for group in groups:
        note(f"cpu_attention[{group.height}x{BLOCK}]")
        index = group.k_index if places is None else _placed(group.k_index, places)
        result = _merge_blocks(q_rows, k_rows, v_rows, index, group, factor, softcap)
        result = result.view(-1, dim).index_select(0, group.valid).to(dtype)
        if group.out_index is None:
            return result
        if out is None:
            out = torch.zeros_like(q_rows)
        out.index_copy_(0, group.out_index, result)
    return torch.zeros_like(q_rows) if out is None else out


def _placed(index: torch.Tensor, places: _Places) -> torch.Tensor:
    """Rows of the packed keys as rows of the cache that they lie in."""
    token, head = np.divmod(index.numpy(), places.kv_heads)
    at = places.tokens.take(token)
    at *= places.kv_heads
    at += head
    return torch.from_numpy(at)


@np.errstate(all="ignore")  # of infinities and NaN nobody is told by torch either
def _merge_blocks(
    q_rows: torch.Tensor,
    k_rows: torch.Tensor,
    v_rows: torch.Tensor,
    k_index: torch.Tensor,
    group: Group,
    scale: float,
    softcap: float | None,
) -> torch.Tensor:
    """[pairs, height, D] in float32, of which the first `group.tiles` are the tiles' results.

    What is elementwise goes through NumPy: the same roundings, and no dispatcher before each of thirty small steps.
    """
    height, tiles, dim = group.height, group.tiles, q_rows.shape[1]
    by_scores, by_values = products_of(height, dim)
    q = q_rows.index_select(0, group.q_index).float().view(-1, height, dim)
    numbers = q.numpy()
    np.multiply(numbers, np.float32(scale), out=numbers)
    pairs = numbers.shape[0]
    weights = q.new_empty((pairs, height, BLOCK))
    by_scores.apply((q, k_rows.index_select(0, k_index).float().view(pairs, BLOCK, dim)), weights, scores)
    p = weights.numpy()
    if softcap is not None:
        p /= np.float32(softcap)
        np.tanh(p, out=p)
        p *= np.float32(softcap)
    if group.hidden is not None:
        if p.size <= _SMALL:
            np.putmask(p, group.hidden, _HIDDEN)
        else:
            weights.masked_fill_(torch.from_numpy(group.hidden), -math.inf)
    best = np.maximum.reduce(p, axis=-1) if pairs * height <= _FEW_ROWS else weights.amax(-1).numpy()
    top = np.maximum(best[:tiles], _LOWEST)
    for count, start, stop in group.spans[1:]:
        np.maximum(top[:count], best[start:stop], out=top[:count])
    p -= (top if group.tile is None else top.take(group.tile, 0))[:, :, None]
    np.exp(p, out=p)
    total = np.add.reduce(p, axis=-1)
    parts = torch.empty_like(q)
    by_values.apply((weights, v_rows.index_select(0, k_index).float().view(pairs, BLOCK, dim)), parts, values)
    mixed = parts.numpy()
    first, sums = mixed[:tiles], total[:tiles]
    first += _ZERO  # a sum from zero on, whichever block is the first: -0.0 becomes 0.0
    for count, start, stop in group.spans[1:]:
        sums[:count] += total[start:stop]
        first[:count] += mixed[start:stop]
    first /= sums[:, :, None]
    return parts


def _prove_once(dim: int, capped: bool) -> None:
    key = (dim, capped, *environment_key())
    if key not in _verified:
        kept = certificates("cpu")
        written = operands_key(
            "cpu-blocks-one-maximum-pairwise-sums",
            (),
            (f"D={dim}", *(["softcap"] if capped else []), *map(str, key[2:])),
        )
        failure = None
        if kept.standing("attention", written) is not True:
            try:
                with torch.no_grad(), proving():
                    prove(_varlen, dim, capped)
                kept.record("attention", written, True, "prefill, chunks, decode and batches have equal bits")
            except NotInvariantError as error:
                failure = error
        _verified[key] = failure
    failure = _verified[key]
    if failure is not None:
        raise failure
