"""Attention with fixed KV segments on CUDA: prefill, chunked prefill and decode of a position give equal bits.

The order of reduction, for one query of one head at position p (the number of keys before it):

  1. keys 0 ... p are cut into segments of SEGMENT keys, and each segment into tiles of `tile_keys` keys, both anchored
     at key 0 and so independent of how many queries, requests, cached tokens or chunks there are;
  2. within a segment, an online softmax over its tiles in order, in float32: scores by one dot over the head dim, the
     maximum in units of scores, probabilities exp2(fma(score, c, -maximum * c)) with c = scale * log2(e), their sums in
     eight partial sums by a tree of halves, then rounded to the input's dtype for one dot with the values;
  3. the segments' (m, l, acc) merged in order in float32, then acc / l, rounded once to the input's dtype.

Only the position and the head enter. Whether one program walks all segments, each has its own (split-KV decode) or some
share one, and how many rows a program holds decides speed alone. A fixed segment *size* rather than a number of splits
is what He & Thinking Machines Lab (2025, doi 10.64434/tml.20250910) propose; the merge is that of flash decoding. FMA
contraction is off (enable_fp_fusion=False): next to a merge it would depend on the kernel; every fused multiply-add is
in the source. That narrow mma.sync and wide wgmma tiles accumulate alike is the hardware's property: so each way to
launch is proven by bits at its first use on a machine (`cuda_proof`), against the one plan that can serve every call.
What is not proven, or can't be while a CUDA graph is captured, gives way to that plan.

Long prefills of half precision on Hopper go to `hopper_attention`, a faster member of the same class.

A value that is infinite or NaN at a key that a query may not see can still reach it (0 * inf), as in PyTorch's math.
"""

from __future__ import annotations

import torch

from nondet.kernels.attention import hopper as hopper_attention
from nondet.kernels.attention.cuda_launch import Call, launch, quickest
from nondet.kernels.attention.cuda_plan import SEGMENT, one_plan, tile_keys
from nondet.kernels.attention.cuda_proof import excluded, hopper_stands, stands
from nondet.kernels.triton_common import HALF, INTERPRETED, require

__all__ = ["MAX_HEAD_DIM", "SEGMENT", "attention", "attention_by_one_plan", "attention_varlen", "tile_keys"]

MAX_HEAD_DIM = 256
_DTYPES = (*HALF, torch.float32)
_HOPPER_ITEMS = 64  # blocks of 128 queries of a head from which the kernel that fills a whole GPU is the faster one


def _check(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    causal: bool,
    window: int | None,
    softcap: float | None,
    scale: float | None,
) -> None:
    if k.shape != v.shape or q.shape[-1] != k.shape[-1] or not 1 <= q.shape[-1] <= MAX_HEAD_DIM:
        raise ValueError(
            f"attention takes k and v of one shape and head dims of 1 to {MAX_HEAD_DIM}, "
            f"got {tuple(q.shape)}, {tuple(k.shape)}, {tuple(v.shape)}"
        )
    if k.shape[1] == 0 or q.shape[1] % k.shape[1]:
        raise ValueError(f"{q.shape[1]} query heads are no multiple of {k.shape[1]} KV heads")
    if window is not None and (window < 1 or not causal):
        raise ValueError(f"a window needs causal=True and at least 1 key, got causal={causal}, window={window}")
    if softcap is not None and not softcap > 0:
        raise ValueError(f"softcap must be above 0, got {softcap}")
    if scale is not None and not scale > 0:
        raise ValueError(f"scale must be above 0, got {scale}")
    require("attention", _DTYPES, q, k, v)


def _compute(call: Call, split: bool | None) -> None:
    """In the quickest way that is proven on this machine, else by the one plan; or in the way that is asked for.

    Raises:
        NotImplementedError: not even the one plan gives a row the same bits at every place.
    """
    way = quickest(call, split)
    if split is not None or INTERPRETED:  # NumPy's products there: nothing about the hardware could be learnt
        launch(call, way)
        return
    one = one_plan(call.q.shape[3], call.q.dtype)
    if torch.compiler.is_compiling():
        launch(call, one, why=", the one plan")
    elif stands(call, way):
        launch(call, way)
    elif excluded(call, one):
        raise NotImplementedError("attention's one plan gives a row other bits at another place on this machine")
    else:
        launch(call, one, why=", the one plan")


def _unit_last_stride(x: torch.Tensor) -> torch.Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()


def _as_dense(x: torch.Tensor) -> torch.Tensor:
    """Packed [T, H, D] as a view [1, H, T, D]."""
    return _unit_last_stride(x)[None].transpose(1, 2)


def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    causal: bool = True,
    scale: float | None = None,
    window: int | None = None,
    softcap: float | None = None,
    split: bool | None = None,
) -> torch.Tensor:
    """q [B, Hq, Tq, D] over k, v [B, Hkv, Tk, D] -> [B, Hq, Tq, D]; Hq a multiple of Hkv (GQA), D to 256, any strides.

    float16, bfloat16 or float32, one dtype for all; accumulated in float32 in the module's order; forward only. Causal
    is aligned to the end: query i stands at position Tk - Tq + i. A query that sees no key gives NaN. The bits of a
    query depend on its position, its head and the keys it sees: not on B, Tq, Tk beyond its position, strides, `split`.

    Args:
        scale: Of the scores, above 0; None for 1 / sqrt(D).
        window: See the last `window` keys only, one's own included (sliding-window attention); needs causal.
        softcap: Scores s become softcap * tanh(s / softcap), as in Gemma 2; part of the class where it is given.
        split: True gives each segment a program of its own, False walks them in one, both in the Triton kernels and
            whatever is proven; None chooses by speed among what is, and sends large half-precision prefills on Hopper
            to `hopper_attention`.

    Raises:
        NotImplementedError: a device or dtype without a kernel.
        ValueError: shapes that do not fit, no keys at all, a window without causal, a scale that is not above 0.
    """
    if q.ndim != 4 or k.ndim != 4 or q.shape[0] != k.shape[0]:
        raise ValueError(f"attention takes [B, H, T, D], got {tuple(q.shape)}, {tuple(k.shape)}, {tuple(v.shape)}")
    _check(q, k, v, causal, window, softcap, scale)
    batch, heads, tq, head_dim = q.shape
    if k.shape[2] == 0 and q.numel():
        raise ValueError("attention over no keys is undefined")
    if (
        split is None
        and tq > 64
        and batch * heads * -(-tq // 128) >= _HOPPER_ITEMS
        and hopper_attention.supports(q, k, v, causal, window, softcap) is None
        and hopper_stands(q, k, causal)
    ):
        return hopper_attention.prefill(q, k, v, causal=causal, scale=scale)
    # Laid out as [B, T, H, D], the order in which models want it back.
    out = torch.empty(batch, tq, heads, head_dim, device=q.device, dtype=q.dtype).transpose(1, 2)
    if out.numel() == 0:
        return out
    operands = (_unit_last_stride(q), _unit_last_stride(k), _unit_last_stride(v), out)
    _compute(Call(*operands, batch, tq, k.shape[2], scale, causal, window, softcap), split)
    return out


def attention_by_one_plan(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, causal: bool = True, scale: float | None = None
) -> torch.Tensor:
    """`attention` by the plan that the class's bits are those of, whatever the sizes; as slow as that may be."""
    _check(q, k, v, causal, None, None, scale)
    out = torch.empty_like(q.transpose(1, 2), memory_format=torch.contiguous_format).transpose(1, 2)
    if out.numel():
        operands = (_unit_last_stride(q), _unit_last_stride(k), _unit_last_stride(v), out)
        call = Call(*operands, q.shape[0], q.shape[2], k.shape[2], scale, causal, None, None)
        launch(call, one_plan(q.shape[3], q.dtype))
    return out


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
    key_index: torch.Tensor | None = None,
    split: bool | None = None,
) -> torch.Tensor:
    """A packed ragged batch in one launch: q [Tq, Hq, D] over k, v [Tk, Hkv, D] -> [Tq, Hq, D].

    Request i owns queries cu_seqlens_q[i] ... cu_seqlens_q[i + 1] and the keys between the same entries of
    cu_seqlens_k, and sees no others; causal is aligned to the end of each. Its bits are those of `attention` on the
    request alone. Requests of no queries are allowed, and so are tokens beyond the last entry: their output is left
    unwritten. Nothing is read back by the host, so a launch can be captured in a CUDA graph and replayed with other
    lengths, as long as max_seqlen_q and max_seqlen_k bound them.

    Args:
        cu_seqlens_q: int32 [requests + 1] on q's device.
        cu_seqlens_k: int32 [requests + 1] on q's device.
        max_seqlen_q: At least the largest number of queries of a request; queries beyond it would not be computed.
        max_seqlen_k: At least the largest number of keys of a request; with `positions` and split=True, at least the
            largest position plus 1.
        scale: As in `attention`, and so are causal, window, softcap and split.
        positions: Integers [Tq], each query's position in its request, where a sliding-window cache has dropped the
            first keys: the keys that are left end at the last query's position, and segments stay anchored at position
            0. None: a request's first key stands at position 0.
        key_index: Integers [keys of all requests], for a paged cache: k and v are the cache, [tokens, Hkv, D], and the
            key that cu_seqlens_k counts as number i is its token key_index[i]. Nothing is gathered first.

    Raises:
        NotImplementedError: a device or dtype without a kernel.
        ValueError: shapes or dtypes that do not fit, a window without causal.
    """
    if q.ndim != 3 or k.ndim != 3:
        raise ValueError(f"attention_varlen takes [T, H, D], got {tuple(q.shape)}, {tuple(k.shape)}, {tuple(v.shape)}")
    _check(q, k, v, causal, window, softcap, scale)
    for cu in (cu_seqlens_q, cu_seqlens_k):
        if cu.dtype != torch.int32 or cu.ndim != 1 or cu.shape != cu_seqlens_q.shape or cu.device != q.device:
            raise ValueError(
                f"cu_seqlens must be two int32 [requests + 1] on {q.device}, "
                f"got {cu.dtype} {tuple(cu.shape)} on {cu.device}"
            )
    if positions is not None and (
        window is None or positions.ndim != 1 or positions.shape[0] < q.shape[0] or positions.device != q.device
    ):
        raise ValueError("positions [Tq] on q's device go with a window: without one, no key may be missing")
    if key_index is not None and (
        key_index.ndim != 1 or key_index.dtype not in (torch.int32, torch.int64) or key_index.device != q.device
    ):
        raise ValueError(f"key_index must be int32 or int64 [keys] on {q.device}, got {key_index.dtype}")
    out = torch.empty(q.shape, device=q.device, dtype=q.dtype)
    requests = cu_seqlens_q.shape[0] - 1
    if out.numel() == 0 or requests < 1 or max_seqlen_q < 1:
        return out
    call = Call(
        *(_as_dense(q), _as_dense(k), _as_dense(v), _as_dense(out), requests, max_seqlen_q, max_seqlen_k),
        scale=scale,
        causal=causal,
        window=window,
        softcap=softcap,
        cu_q=cu_seqlens_q.contiguous(),
        cu_k=cu_seqlens_k.contiguous(),
        positions=positions,
        key_index=None if key_index is None else key_index.contiguous(),
    )
    _compute(call, split)
    return out
