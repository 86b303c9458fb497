"""Decode attention on Hopper GPUs: the order of `cuda` for few rows, by the kernels of `hopper_decode_kernels`.

Another member of the same class: the same tiles and segments anchored at key 0, the same online softmax, sums and
merge. What differs is what waits for what, so that a step over few keys is not a chain of tiles; see the kernels. Each
way to launch them is held to the one plan by `cuda_proof` before its results are used.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import triton

from nondet.kernels.attention.cuda_plan import Way
from nondet.kernels.attention.hopper import descriptor, layout_fault
from nondet.kernels.triton_common import HALF, INTERPRETED, capability

try:  # Gluon is experimental: a Triton that lacks what the kernels need must not take the other kernels with it
    from nondet.kernels.attention.hopper_decode_kernels import decode_kernel
    from nondet.kernels.attention.hopper_merge_kernels import merge_all_kernel

    _NO_KERNEL = None
except (ImportError, AttributeError) as error:  # pragma: no cover - depends on the Triton that is installed
    _NO_KERNEL = f"Triton {triton.__version__} has no Gluon for it ({error})"

__all__ = ["HEAD_DIMS", "MERGE_CHUNK", "MERGE_COLUMNS", "available", "call_fault", "decode", "merge"]

HEAD_DIMS = (64, 128)
MERGE_CHUNK = 64  # segments merged at a time, at most: one register of a thread for each
MERGE_COLUMNS = 32  # of a row that one program merges
_LAUNCH_REGISTERS = 128  # of a thread: two programs of 4 warps fit, or one of 8 and a merge; see `hopper`


@functools.cache
def available(device: torch.device) -> str | None:
    """Why the kernels can't run there, or None if they can."""
    if _NO_KERNEL is not None:
        return _NO_KERNEL
    if INTERPRETED or device.type != "cuda" or torch.version.hip is not None:
        return f"it needs an NVIDIA GPU of compute capability 9.0, got {device.type}"
    if capability(device) != (9, 0):
        major, minor = capability(device)
        return f"it needs compute capability 9.0, got {major}.{minor}"
    return None


def call_fault(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> str | None:
    """Why `decode` can't take q over k, v [B, H, T, D] on any GPU, or None if it can."""
    if q.dtype not in HALF:
        return f"it takes float16 and bfloat16, got {str(q.dtype).removeprefix('torch.')}"
    if q.shape[3] not in HEAD_DIMS:
        return f"it takes head dims of 64 and 128, got {q.shape[3]}"
    return layout_fault("k", k) or layout_fault("v", v)


def decode(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    part: torch.Tensor | None,
    qk_scale: float,
    way: Way,
    *,
    causal: bool,
    segment: int,
) -> None:
    """Launch `decode_kernel`: q, out [B, Hq, Tq, D] over dense k, v [B, Hkv, Tk, D]; `part` is `cuda_launch`'s.

    Positions are aligned to the end. The plan's stages are the slots of the ring, and its warps those of a program.
    """
    batch, heads, tq, head_dim = q.shape
    heads_kv, tk = k.shape[1], k.shape[2]
    plan = way.plan
    group = heads // heads_kv
    blocks = -(-tq * group // plan.block_m)
    segments = -(-tk // segment)
    decode_kernel[(batch * heads_kv * blocks, -(-segments // way.span) if way.span else 1)](
        *(q, descriptor(k, plan.block_n), descriptor(v, plan.block_n), out, part, tq, tk),
        *(blocks, heads_kv, way.span, segments, batch * tq * heads * segments, qk_scale, *q.stride()[:3]),
        *out.stride()[:3],
        SPLIT=way.span > 0,
        TILES=way.tiles,
        SLOTS=plan.stages,
        EARLY=way.early,
        CAUSAL=causal,
        GROUP=group,
        HEAD_DIM=head_dim,
        SEGMENT=segment,
        BLOCK_N=plan.block_n,
        WARPS=plan.warps,
        num_warps=plan.warps,
        maxnreg=_LAUNCH_REGISTERS,
        enable_fp_fusion=False,
        **({"launch_pdl": True} if way.early else {}),
    )


def merge(rows: int, segments: int, arguments: tuple[Any, ...], *, head_dim: int, pdl: bool, **constants: Any) -> None:
    """Launch `merge_all_kernel` over rows of `segments` segments at most."""
    merge_all_kernel[(rows, head_dim // MERGE_COLUMNS)](
        *arguments,
        CHUNK=min(MERGE_CHUNK, max(2, triton.next_power_of_2(segments))),
        HEAD_DIM=head_dim,
        num_warps=1,
        enable_fp_fusion=False,
        **constants,
        **({"launch_pdl": True} if pdl else {}),
    )
