"""Attention with fixed KV segments on CUDA: prefill, chunked prefill and decode of a position give equal bits.

The order of reduction, for one query of one head at position p (the number of keys before it):

  1. keys 0 ... p are cut into segments of SEGMENT keys, and each segment into tiles of BLOCK_N keys, both anchored at
     key 0 and so independent of how many queries, requests, cached tokens or chunks there are;
  2. within a segment, an online softmax over its tiles in order, in float32: scores by one dot over the head dim,
     probabilities rounded to the input's dtype, row sums by a dot with ones;
  3. the segments' (m, l, acc) merged in order in float32, then acc / l, rounded once to the input's dtype.

Only the position and the head enter. Whether one program walks all segments or each has its own (split-KV decode) and
how many rows a program holds decides speed alone. A fixed segment *size* rather than a number of splits is what He &
Thinking Machines Lab (2025, doi 10.64434/tml.20250910) propose; the merge is that of flash decoding. FMA contraction is
off (enable_fp_fusion=False): next to a merge it would depend on the kernel. That narrow mma.sync and wide wgmma tiles
accumulate alike is the hardware's property, proved on a machine by scripts/check_kernels_gpu.py.

A value that is infinite or NaN at a key that a query may not see can still reach it (0 * inf), as in PyTorch's math.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import triton

from nondet.kernels.launch import note
from nondet.kernels.triton_attention_kernels import merge_kernel, one_pass_kernel, split_kernel
from nondet.kernels.triton_common import HALF, on_device, require

__all__ = ["SEGMENT", "attention", "attention_varlen"]

SEGMENT = 512  # keys; part of the class
_DTYPES = (*HALF, torch.float32)
_MAX_HEAD_DIM = 256
_ENOUGH_PROGRAMS = 256  # about two for each multiprocessor of a large GPU
_MAX_PARTIAL_ELEMENTS = 2**28  # 1 GiB of float32 for the split kernel's partial results


class _Plan(NamedTuple):
    """How to launch: block_n is part of the class (fixed by dtype and head dim), the rest is speed."""

    block_m: int
    block_n: int
    block_d: int
    warps: int
    stages: int


def _plan(rows: int, head_dim: int, dtype: torch.dtype) -> _Plan:
    """For `rows` packed query rows of a KV head: the smallest block that holds them, up to the largest that fits."""
    block_d = max(16, triton.next_power_of_2(head_dim))
    if dtype == torch.float32:
        return _Plan(16 if rows <= 16 or block_d > 128 else 32, 32, block_d, 4, 1)
    if rows <= 32:
        return _Plan(16 if rows <= 16 else 32, 64, block_d, 4, 2 if block_d > 128 else 3)
    if block_d > 128:
        return _Plan(64, 64, block_d, 8, 2)
    if rows <= 64:
        return _Plan(64, 64, block_d, 4, 3)
    return _Plan(128, 64, block_d, 8, 3)


def _check(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool, window: int | None, heads_axis: int
) -> None:
    if k.shape != v.shape or q.shape[-1] != k.shape[-1] or not 1 <= q.shape[-1] <= _MAX_HEAD_DIM:
        raise ValueError(
            f"attention takes k and v of one shape and head dims of 1 to {_MAX_HEAD_DIM}, "
            f"got {tuple(q.shape)}, {tuple(k.shape)}, {tuple(v.shape)}"
        )
    if k.shape[heads_axis] == 0 or q.shape[heads_axis] % k.shape[heads_axis]:
        raise ValueError(f"{q.shape[heads_axis]} query heads are no multiple of {k.shape[heads_axis]} KV heads")
    if window is not None and (window < 1 or not causal):
        raise ValueError(f"a window needs causal=True and at least 1 key, got causal={causal}, window={window}")
    require("attention", _DTYPES, q, k, v)


def _launch(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    *,
    requests: int,
    tq: int,
    tk: int,
    cu_q: torch.Tensor | None,
    cu_k: torch.Tensor | None,
    scale: float | None,
    causal: bool,
    window: int | None,
    split: bool | None,
) -> None:
    """q, out [B, Hq, T, D] and k, v [B, Hkv, T, D]; packed (cu_q given): B = 1, and requests are ranges of T.

    tq and tk are the sizes of every request, or packed, the largest.
    """
    heads, heads_kv, head_dim = q.shape[1], k.shape[1], q.shape[3]
    group = heads // heads_kv
    plan = _plan(tq * group, head_dim, q.dtype)
    blocks = triton.cdiv(tq * group, plan.block_m)
    segments = triton.cdiv(tk, SEGMENT)
    rows = q.shape[0] * q.shape[2] * heads
    if split is None:
        # Equal bits either way, so this may depend on anything: split where a row of programs would leave SMs idle.
        busy = requests * heads_kv * blocks >= _ENOUGH_PROGRAMS and tq * group > 64
        split = segments > 1 and not busy and rows * segments * head_dim <= _MAX_PARTIAL_ELEMENTS
    packed = cu_q is not None

    def strides(x: torch.Tensor) -> tuple[int, int, int]:
        """(per start, per head, per token): a packed request starts at a token, a dense one at a batch entry."""
        return x.stride(2) if packed else x.stride(0), x.stride(1), x.stride(2)

    mask = {"VARLEN": packed, "CAUSAL": causal, "WINDOW": window is not None}
    tile = {"SEGMENT": SEGMENT, "BLOCK_D": plan.block_d, "HEAD_DIM": head_dim}
    block = {"GROUP": group, "BLOCK_M": plan.block_m, "BLOCK_N": plan.block_n}
    speed = {"num_warps": plan.warps, "num_stages": plan.stages, "enable_fp_fusion": False}
    qk_scale = (scale if scale is not None else 1.0 / math.sqrt(head_dim)) * math.log2(math.e)
    programs = requests * heads_kv * blocks
    window = window or 0
    with on_device(q):
        if not split:
            note(f"attention_one_pass[{plan.block_m}x{plan.block_n}]")
            one_pass_kernel[(programs,)](
                *(q, k, v, out, cu_q, cu_k, tq, tk, blocks, heads_kv, window, qk_scale),
                *strides(q),
                *strides(k),
                *strides(v),
                *strides(out),
                **mask,
                **tile,
                **block,
                **speed,
            )
            return
        note(f"attention_split[{plan.block_m}x{plan.block_n}, {segments} x {SEGMENT}]")
        stats = torch.empty(2, rows, segments, device=q.device, dtype=torch.float32)
        acc = torch.empty(rows, segments, head_dim, device=q.device, dtype=torch.float32)
        rows_per_start = 1 if packed else tq
        split_kernel[(programs, segments)](
            *(q, k, v, stats[0], stats[1], acc, cu_q, cu_k, tq, tk, blocks, heads_kv, window, segments, rows_per_start),
            qk_scale,
            *strides(q),
            *strides(k),
            *strides(v),
            **mask,
            **tile,
            **block,
            **speed,
        )
        merge_kernel[(requests * tq * heads,)](
            *(stats[0], stats[1], acc, out, cu_q, cu_k, tq, tk, heads, tq * heads, window, segments, rows_per_start),
            *strides(out),
            **mask,
            **tile,
            num_warps=1,
            enable_fp_fusion=False,
        )


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
    split: bool | None = None,
) -> torch.Tensor:
    """q [B, Hq, Tq, D] over k, v [B, Hkv, Tk, D] -> [B, Hq, Tq, D]; Hq a multiple of Hkv (GQA), D to 256, any strides.

    float16, bfloat16 or float32, one dtype for all; accumulated in float32 in the module's order; forward only. Causal
    is aligned to the end: query i stands at position Tk - Tq + i. A query that sees no key gives NaN. The bits of a
    query depend on its position, its head and the keys it sees: not on B, Tq, Tk beyond its position, strides, `split`.

    Args:
        scale: Of the scores; None for 1 / sqrt(D).
        window: See the last `window` keys only, one's own included (sliding-window attention); needs causal.
        split: True gives each segment a program of its own, False walks them in one; None chooses by speed.

    Raises:
        NotImplementedError: a device or dtype without a kernel.
        ValueError: shapes that do not fit, no keys at all, a window without causal.
    """
    if q.ndim != 4 or k.ndim != 4 or q.shape[0] != k.shape[0]:
        raise ValueError(f"attention takes [B, H, T, D], got {tuple(q.shape)}, {tuple(k.shape)}, {tuple(v.shape)}")
    _check(q, k, v, causal, window, 1)
    batch, heads, tq, head_dim = q.shape
    # Laid out as [B, T, H, D], the order in which models want it back.
    out = torch.empty(batch, tq, heads, head_dim, device=q.device, dtype=q.dtype).transpose(1, 2)
    if out.numel() == 0:
        return out
    if k.shape[2] == 0:
        raise ValueError("attention over no keys is undefined")
    _launch(
        _unit_last_stride(q),
        _unit_last_stride(k),
        _unit_last_stride(v),
        out,
        requests=batch,
        tq=tq,
        tk=k.shape[2],
        cu_q=None,
        cu_k=None,
        scale=scale,
        causal=causal,
        window=window,
        split=split,
    )
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
        max_seqlen_k: At least the largest number of keys of a request.
        scale: As in `attention`, and so are causal, window and split.

    Raises:
        NotImplementedError: a device or dtype without a kernel.
        ValueError: shapes or dtypes that do not fit, a window without causal.
    """
    if q.ndim != 3 or k.ndim != 3:
        raise ValueError(f"attention_varlen takes [T, H, D], got {tuple(q.shape)}, {tuple(k.shape)}, {tuple(v.shape)}")
    _check(q, k, v, causal, window, 1)
    for cu in (cu_seqlens_q, cu_seqlens_k):
        if cu.dtype != torch.int32 or cu.ndim != 1 or cu.shape != cu_seqlens_q.shape or cu.device != q.device:
            raise ValueError(
                f"cu_seqlens must be two int32 [requests + 1] on {q.device}, "
                f"got {cu.dtype} {tuple(cu.shape)} on {cu.device}"
            )
    out = torch.empty(q.shape, device=q.device, dtype=q.dtype)
    requests = cu_seqlens_q.shape[0] - 1
    if out.numel() == 0 or requests < 1 or max_seqlen_q < 1:
        return out
    _launch(
        _as_dense(q),
        _as_dense(k),
        _as_dense(v),
        _as_dense(out),
        requests=requests,
        tq=max_seqlen_q,
        tk=max_seqlen_k,
        cu_q=cu_seqlens_q.contiguous(),
        cu_k=cu_seqlens_k.contiguous(),
        scale=scale,
        causal=causal,
        window=window,
        split=split,
    )
    return out
