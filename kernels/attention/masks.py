"""Attention masks as spans: which keys each row of a batch sees, in a form that packed attention can compute.

A left-padded batch hides the padding by a mask. Stock attention still reads the hidden keys, so the blocks in which it
reduces begin at the padding and not at the request's first key. Here the host reads a mask once, as spans of queries
and keys without the padding; a mask that is not a set of such spans is refused.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils.weak import WeakTensorKeyDictionary


class Span(NamedTuple):
    """Queries [q_start, q_end) of one batch row over its keys [k_start, k_end).

    Causal: the last query sees all of the keys, each one before it one fewer; with a window, only the last `window` of
    these. Otherwise every query sees all of them.
    """

    row: int
    q_start: int
    q_end: int
    k_start: int
    k_end: int
    causal: bool
    window: int | None = None


@dataclass
class Packing:
    """Index tensors that gather the spans of one kind into packed requests."""

    causal: bool
    q_index: torch.Tensor  # int64, tokens of the flattened [B * Tq] queries
    k_index: torch.Tensor  # int64, tokens of the flattened [B * Tk] keys
    cu_q: torch.Tensor  # int32 [spans + 1], where each span begins, as in `cu_k`
    cu_k: torch.Tensor
    max_q: int  # the longest, as `max_k`
    max_k: int
    window: int | None = None  # keys that a query sees at most, its own included


# A model passes the same mask to all of its layers, so it is read once: mask -> ((version, B, Tq, anchored), packings).
_read: WeakTensorKeyDictionary = WeakTensorKeyDictionary()


def packing_of(mask: torch.Tensor, batch: int, q_len: int, *, anchored: bool = True) -> list[Packing] | None:
    """The mask as packed requests; None if it is not a set of spans.

    Waits for the device once for every new mask. A write to an inference tensor can't be noticed, so one is read every
    time.

    Args:
        mask: bool, True where a query sees a key, or floating, 0 there and the dtype's lowest number or -inf elsewhere;
            [B or 1, 1, Tq or 1, Tk]. One query row applies to all `q_len` (Tq) queries.
        anchored: The first key that a span sees is its request's first. Otherwise a window may have hidden keys before
            it, and only the queries' positions show it: see `attend_packed`.
    """
    if mask.is_inference():
        return _pack(mask, batch, q_len, anchored)
    stamp = (mask._version, batch, q_len, anchored)
    known = _read.get(mask)
    if known is None or known[0] != stamp:
        known = _read[mask] = (stamp, _pack(mask, batch, q_len, anchored))
    packings: list[Packing] | None = known[1]
    return packings


def spans_of(visible: np.ndarray, q_len: int, anchored: bool = True) -> list[Span] | None:
    """Spans of a bool [B, Tq or 1, Tk] on the host; None where keys are hidden in a pattern that has none.

    Every query has to see keys without a hole, or none at all (padding). Consecutive queries form one span while their
    first key is the same and their last one increases with them (causal), or is constant (padding on the right). The
    next span begins at the same first key, or after all keys of the one before: packed requests. In a sliding window
    the first key increases with the last one, as soon as the window is full. A span that begins with a full window has
    lost its anchor, its request's first key: it is one only if not `anchored`. With as many keys as queries, a query
    that does not see the key at its own position is padding behind its request: a span of its own, which nothing
    continues.
    """
    batch, rows, k_len = visible.shape
    count = visible.sum(-1)
    first = visible.argmax(-1)
    last = first + count - 1
    keys = np.arange(k_len)
    if not (visible == ((keys >= first[..., None]) & (keys <= last[..., None]))).all():
        return None
    spans: list[Span] = []
    for b in range(batch):
        if rows != q_len:  # one row for all queries
            if count[b, 0]:
                spans.append(Span(b, 0, q_len, int(first[b, 0]), int(last[b, 0]) + 1, causal=False))
            continue
        open_span: Span | None = None
        for i, (start, end) in enumerate(zip(first[b].tolist(), (last[b] + 1).tolist(), strict=True)):
            if start == end:
                continue
            if rows == k_len and end <= i and open_span is not None and open_span.window is not None:
                spans.append(Span(b, i, i + 1, start, end, causal=False))
                continue
            extended = _extended(open_span, i, start, end, anchored)
            if extended is not None:
                spans[-1] = open_span = extended
                continue
            if open_span is not None and open_span.k_start != start < open_span.k_end:
                return None
            open_span = Span(b, i, i + 1, start, end, causal=True)
            spans.append(open_span)
    return spans


def _extended(span: Span | None, query: int, start: int, end: int, anchored: bool) -> Span | None:
    if span is None or query != span.q_end:
        return None
    if start != span.k_start:
        # A full window that slides. At least two queries must have begun at the anchor to show that it is one.
        window = span.k_end - span.k_start if span.window is None else span.window
        begun = span.q_end - span.q_start > 1 or not anchored
        slides = end == span.k_end + 1 and start == end - window and span.causal and begun
        return span._replace(q_end=query + 1, k_end=end, window=window) if slides else None
    alone = span.q_end - span.q_start == 1  # a span of one query is causal as well as not
    if end == span.k_end + 1 and (span.causal or alone) and span.window is None:
        return span._replace(q_end=query + 1, k_end=end, causal=True)
    if end == span.k_end and (alone or not span.causal):
        return span._replace(q_end=query + 1, causal=False)
    return None


def _pack(mask: torch.Tensor, batch: int, q_len: int, anchored: bool) -> list[Packing] | None:
    if mask.dim() != 4 or mask.shape[1] != 1 or mask.shape[0] not in (1, batch) or mask.shape[2] not in (1, q_len):
        return None
    if mask.dtype == torch.bool:
        visible = mask
    elif mask.dtype.is_floating_point:
        visible = mask == 0
        hidden = mask <= torch.finfo(mask.dtype).min / 2
        if not bool((visible | hidden).all()):
            return None
    else:
        return None
    k_len = mask.shape[-1]
    spans = spans_of(visible[:, 0].expand(batch, -1, -1).cpu().numpy(), q_len, anchored)
    if spans is None:
        return None
    kinds: dict[tuple[bool, int | None], list[Span]] = {}
    for span in spans:
        kinds.setdefault((span.causal, span.window), []).append(span)
    return [_packing(kind, q_len, k_len, mask.device) for kind in kinds.values()]


def _packing(spans: list[Span], q_len: int, k_len: int, device: torch.device) -> Packing:
    q_sizes = [s.q_end - s.q_start for s in spans]
    k_sizes = [s.k_end - s.k_start for s in spans]

    def tokens(ranges: list[range]) -> torch.Tensor:
        return torch.from_numpy(np.concatenate([np.asarray(r, dtype=np.int64) for r in ranges])).to(device)

    return Packing(
        causal=spans[0].causal,
        q_index=tokens([range(s.row * q_len + s.q_start, s.row * q_len + s.q_end) for s in spans]),
        k_index=tokens([range(s.row * k_len + s.k_start, s.row * k_len + s.k_end) for s in spans]),
        cu_q=starts(q_sizes, device),
        cu_k=starts(k_sizes, device),
        max_q=max(q_sizes),
        max_k=max(k_sizes),
        window=spans[0].window,
    )


@functools.lru_cache(maxsize=8)
def one_query_each(batch: int, k_len: int, device: torch.device) -> Packing:
    """A decode step without a mask: each row's one query over all of its keys. Nothing is read from the device."""
    begins = torch.arange(batch + 1, dtype=torch.int32, device=device)
    return Packing(
        causal=True,
        q_index=torch.arange(batch, device=device),
        k_index=torch.arange(batch * k_len, device=device),
        cu_q=begins,
        cu_k=begins * k_len,
        max_q=1,
        max_k=k_len,
    )


def attend_packed(
    attention_varlen: Callable[..., torch.Tensor],
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    packings: list[Packing],
    scale: float | None,
    positions: torch.Tensor | None = None,
    **more: Any,
) -> torch.Tensor:
    """q [B, Hq, Tq, D] over k, v [B, Hkv, Tk, D] -> [B, Hq, Tq, D]; queries that see no key give zeros.

    `positions` [B * Tq]: each query's position in its request, for packings that are not `anchored`. `more`: further
    arguments of the kernel; a window given here replaces the mask's, which may not have filled.
    """
    batch, heads, q_len, dim = q.shape
    q_tokens, k_tokens, v_tokens = (x.transpose(1, 2).reshape(-1, x.shape[1], dim) for x in (q, k, v))
    out = q.new_zeros((batch * q_len, heads, dim))
    for packing in packings:
        part = attention_varlen(
            q_tokens.index_select(0, packing.q_index),
            k_tokens.index_select(0, packing.k_index),
            v_tokens.index_select(0, packing.k_index),
            cu_seqlens_q=packing.cu_q,
            cu_seqlens_k=packing.cu_k,
            max_seqlen_q=packing.max_q,
            max_seqlen_k=packing.max_k,
            scale=scale,
            causal=packing.causal,
            **({} if packing.window is None else {"window": packing.window}) | more,
            **({} if positions is None else {"positions": positions.index_select(0, packing.q_index)}),
        )
        out.index_copy_(0, packing.q_index, part)
    return out.view(batch, q_len, heads, dim).transpose(1, 2)


def starts(lengths: list[int], device: torch.device) -> torch.Tensor:
    """Where each request begins, and the end: int32 [requests + 1]."""
    return torch.tensor([0, *lengths]).cumsum(0).to(device=device, dtype=torch.int32)
