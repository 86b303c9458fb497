"""The gradient of attention on a CPU, request by request: no bit of one depends on another.

Order: each request's queries are taken in blocks of 128 with the keys that they see if it is causal (else all), filled
up with zeros to a multiple of 64, both anchored at its first. A block's scores, their gradients and its contributions
to the gradients of queries, keys and values are products in class "cpu-tiles" (`nondet.kernels.matmul.cpu`) in float32,
batched over KV heads; the query heads of a group are concatenated in the summed axis. A row's exponentials, and the sum
subtracted from its scores' gradients, are added by NumPy's pairwise sum over its keys. The blocks' contributions to
keys and values are added block by block, in order. One rounding to the dtype ends it.

Invariance: everything is computed from the request's own rows, at sizes that follow from its own lengths; products by
certified tiles, exponentials only by vectors (`nondet.kernels.pointwise.cpu`), the rest elementwise and correctly
rounded. Nothing is added by several threads.
"""

from __future__ import annotations

import torch

from nondet.kernels.attention.cpu import Way
from nondet.kernels.matmul.cpu import bmm
from nondet.kernels.pointwise.cpu import vectors_only
from nondet.kernels.rows.cpu import row_sums

BLOCK_QUERIES = 128  # whose scores are held at a time: longer sums are less exact, in MKL one chain, and slower
_KEYS = 64

Gradients = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


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
    max_seqlen_q: int = 0,
    max_seqlen_k: int = 0,
) -> Gradients:
    """Gradients of packed attention over q, k and v, in their shapes and dtype.

    Args:
        q, out, gradient: [Tq, Hq, D], requests in sequence; the forward's result (not used: the exponentials are
            computed again) and its gradient.
        k, v, scale, causal, window, softcap: As in `nondet.kernels.attention.cuda.attention_varlen`, and what says the
            requests. max_seqlen_q and max_seqlen_k are not used; the signature is that of the CUDA kernel.
    """
    parts = [torch.zeros_like(x) for x in (q, k, v)]
    starts_q, starts_k = cu_seqlens_q.tolist(), cu_seqlens_k.tolist()
    with torch.no_grad():
        for q0, q1, k0, k1 in zip(starts_q, starts_q[1:], starts_k, starts_k[1:], strict=False):
            if q0 == q1 or k0 == k1 or not gradient[q0:q1].any():  # padding, which no loss depends on
                continue
            mine = q[q0:q1], gradient[q0:q1], k[k0:k1], v[k0:k1]
            found = _request(*mine, Way(causal, window, softcap, scale), scale)
            for part, (a, b), of in zip(parts, ((q0, q1), (k0, k1), (k0, k1)), found, strict=True):
                part[a:b] = of
    return parts[0], parts[1], parts[2]


def _request(
    q: torch.Tensor, gradient: torch.Tensor, k: torch.Tensor, v: torch.Tensor, way: Way, scale: float
) -> Gradients:
    causal, window, softcap, _ = way
    heads, queries, group, dim = k.shape[1], q.shape[0], q.shape[1] // k.shape[1], q.shape[2]
    all_keys, all_values = (_by_head(x, heads, 1) for x in (k, v))  # [Hkv, S', D]
    of_keys, of_values = torch.zeros_like(all_keys), torch.zeros_like(all_values)
    of_queries = all_keys.new_empty((queries, q.shape[1], dim))
    for start in range(0, queries, BLOCK_QUERIES):
        rows = slice(start, min(start + BLOCK_QUERIES, queries))
        block, above = (_by_head(x[rows], heads, group) for x in (q, gradient))  # [Hkv, G * T', D]
        length = block.shape[1] // group
        last = start + length + k.shape[0] - queries if causal else k.shape[0]  # behind it no key is seen
        seen = slice(0, max(_KEYS, min(last + -last % _KEYS, all_keys.shape[1])))
        keys, values, place = all_keys[:, seen], all_values[:, seen], torch.arange(seen.stop)
        position = torch.arange(start, start + length) + k.shape[0] - queries
        hidden = (place >= k.shape[0]).expand(length, -1)
        if causal:
            hidden = hidden | (place > position[:, None])
        if window is not None:
            hidden = hidden | (place <= position[:, None] - window)
        hidden = hidden.clone()
        hidden[rows.stop - start :] = place > 0  # rows that fill up: their gradient is zero
        scores = bmm(block, keys.mT) * scale
        slope = None
        if softcap is not None:
            bent = vectors_only(torch.tanh, scores / softcap)
            scores, slope = bent * softcap, 1.0 - bent * bent
        scores = scores.view(heads, group, length, -1).masked_fill_(hidden, -torch.inf).view(scores.shape)
        weights = vectors_only(torch.exp, scores - scores.amax(-1, keepdim=True))
        weights = weights / _sums(weights)
        of_weights = bmm(above, values.mT)
        of_scores = weights * (of_weights - _sums(weights * of_weights))
        if slope is not None:
            of_scores = of_scores * slope
        of_scores = of_scores * scale
        of_values[:, seen] += bmm(weights.mT.contiguous(), above)
        of_keys[:, seen] += bmm(of_scores.mT.contiguous(), block)
        mine = bmm(of_scores, keys).view(heads, group, length, dim)[:, :, : rows.stop - start]
        of_queries[rows] = mine.permute(2, 0, 1, 3).reshape(-1, q.shape[1], dim)
    back = [x[:, : k.shape[0]].transpose(0, 1) for x in (of_keys, of_values)]
    return of_queries, back[0], back[1]


def _by_head(x: torch.Tensor, heads: int, group: int) -> torch.Tensor:
    tokens, _, dim = x.shape
    dtype = torch.float64 if x.dtype == torch.float64 else torch.float32
    padded = torch.zeros((heads, group, tokens + -tokens % _KEYS, dim), dtype=dtype)
    padded[:, :, :tokens] = x.view(tokens, heads, group, dim).permute(1, 2, 0, 3)
    return padded.view(heads, -1, dim)


def _sums(x: torch.Tensor) -> torch.Tensor:
    return row_sums(x.reshape(-1, x.shape[-1])).view(*x.shape[:-1], 1)
