"""One launch of attention, in whatever way: the Triton kernels of `cuda_kernels`, with the arguments they take."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch

from nondet.core.launch import note
from nondet.kernels.attention import cuda_plan, hopper_decode
from nondet.kernels.attention.cuda_kernels import attend_kernel, merge_kernel
from nondet.kernels.attention.cuda_plan import Form, Way, has_pdl, plan_for
from nondet.kernels.triton_common import INTERPRETED, on_device

__all__ = ["Call", "form_of", "launch", "quickest"]

_MAX_PARTIAL_ELEMENTS = 2**28  # 1 GiB of float32 for the segments' results
_LOG2_E = math.log2(math.e)


class Call(NamedTuple):
    """Operands and sizes of one call: q, out [B, Hq, T, D] and k, v [B, Hkv, T, D], last stride 1.

    Packed (cu_q given): B = 1, and requests are ranges of T.

    Attributes:
        tq, tk: Sizes of every request, or packed, the largest; tk counts from position 0.
    """

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    out: torch.Tensor
    requests: int
    tq: int
    tk: int
    scale: float | None
    causal: bool
    window: int | None
    softcap: float | None
    cu_q: torch.Tensor | None = None
    cu_k: torch.Tensor | None = None
    positions: torch.Tensor | None = None
    key_index: torch.Tensor | None = None


def form_of(call: Call) -> Form:
    """What of the call the kernels are compiled for."""
    axis = 2 if call.cu_q is not None else 0
    operands = (call.q, call.k, call.v, call.out)
    return Form(
        dtype=call.q.dtype,
        head_dim=call.q.shape[3],
        group=call.q.shape[1] // call.k.shape[1],
        causal=call.causal,
        window=call.window is not None,
        softcap=call.softcap is not None,
        packed=call.cu_q is not None,
        positions=None if call.positions is None else call.positions.dtype,
        paged=None if call.key_index is None else call.key_index.dtype,
        steps=tuple(tuple(x.stride(i) % 16 == 0 for i in (axis, 1, 2)) for x in operands),
        aligned=tuple(x.data_ptr() % 16 == 0 for x in (call.q, call.k, call.v)),
    )


def quickest(call: Call, split: bool | None = None) -> Way:
    """The way that should take the least time, of all, or of those that split (True) or do not (False)."""
    heads, heads_kv, head_dim = call.q.shape[1], call.k.shape[1], call.q.shape[3]
    group = heads // heads_kv
    plan = plan_for(min(call.tq * group, 128), head_dim, call.q.dtype)
    segments = -(-call.tk // cuda_plan.SEGMENT)
    programs = call.requests * heads_kv * -(-call.tq * group // plan.block_m)
    slots = call.q.shape[0] * call.q.shape[2] * heads * segments
    fits = slots * (head_dim + 2) <= _MAX_PARTIAL_ELEMENTS
    few = split is None and plan.block_m == cuda_plan.FEW_ROWS and _has_few_row_kernels(call)
    if few and call.cu_q is None and hopper_decode.call_fault(call.q, call.k, call.v) is None:
        return cuda_plan.few_rows(programs, segments if fits else 1, head_dim, call.q.device)
    if split is None:
        span = cuda_plan.span_for(programs, segments, cuda_plan.SEGMENT // plan.block_n, call.q.device)
        if not fits or call.positions is not None:
            span = 0  # with positions, the host does not know how many segments there are
    else:
        span = 1 if split else 0
    pdl = span > 0 and not INTERPRETED and torch.version.hip is None and has_pdl(call.q.device)
    lanes = few and span > 0 and head_dim % hopper_decode.MERGE_COLUMNS == 0
    return Way(plan if call.window is None else plan._replace(peel=False), span, pdl, lanes=lanes)


def _has_few_row_kernels(call: Call) -> bool:
    """Is the call one without window and soft cap, on a GPU that has the kernels of `hopper_decode`?"""
    if torch.compiler.is_compiling():
        return False  # they can't be traced, nor need they: the one plan runs there
    return call.window is None and call.softcap is None and hopper_decode.available(call.q.device) is None


def launch(call: Call, way: Way, why: str = "") -> None:
    """Compute call.out in this way.

    Args:
        why: Said in the note, where another way would have been quicker.
    """
    q, k, v, out = call.q, call.k, call.v, call.out
    plan, span = way.plan, way.span
    heads, heads_kv, head_dim = q.shape[1], k.shape[1], q.shape[3]
    group = heads // heads_kv
    segment = cuda_plan.SEGMENT
    blocks = -(-call.tq * group // plan.block_m)
    segments = -(-call.tk // segment)
    programs = call.requests * heads_kv * blocks
    slots = q.shape[0] * q.shape[2] * heads * segments
    packed = call.cu_q is not None
    scale = 1.0 / math.sqrt(head_dim) if call.scale is None else call.scale
    qk_scale = scale * _LOG2_E if call.softcap is None else _LOG2_E
    caps = (0.0, 0.0) if call.softcap is None else (2.0 * _LOG2_E * scale / call.softcap, call.softcap)
    window = call.window or 0
    axis = 2 if packed else 0  # a packed request starts at a token, a dense one at a batch entry
    part = None
    if span:
        spare = hopper_decode.MERGE_CHUNK * head_dim if way.lanes else 0
        part = torch.empty(slots * (head_dim + 2) + spare, device=q.device, dtype=torch.float32)
    mask = {"VARLEN": packed, "CAUSAL": call.causal, "WINDOW": window > 0}
    block = f"{plan.block_m}x{plan.block_n}"
    name = ("attention_decode_split" if span else "attention_decode") if way.tiles else None
    name = name or ("attention_split" if span else "attention_one_pass")
    note(f"{name}[{block}, {span} of {segments} x {segment}]" if span else f"{name}[{block}{why}]")
    rows_per_start = 1 if packed else call.tq
    pointers = (call.cu_q, call.cu_k, call.positions)
    strides = tuple(x.stride(i) for x in (q, k, v, out) for i in (axis, 1, 2))
    dims = {"HEAD_DIM": head_dim, "SEGMENT": segment}
    grid = (programs, -(-segments // span) if span else 1)
    with on_device(q):
        if way.tiles:
            hopper_decode.decode(q, k, v, out, part, qk_scale, way, causal=call.causal, segment=segment)
        else:
            attend_kernel[grid](
                *(q, k, v, out, part, *pointers, call.key_index, call.tq, call.tk, blocks, heads_kv, window),
                *(segments, rows_per_start, slots, qk_scale, *caps, *strides),
                SPAN=span,
                PEEL=plan.peel,
                PDL=way.pdl,
                SOFTCAP=call.softcap is not None,
                GROUP=group,
                BLOCK_M=plan.block_m,
                BLOCK_N=plan.block_n,
                BLOCK_D=plan.block_d,
                num_warps=plan.warps,
                num_stages=plan.stages,
                enable_fp_fusion=False,
                **mask,
                **dims,
            )
        if not span:
            return
        rows = call.requests * call.tq * heads
        if way.lanes:
            hopper_decode.merge(
                rows,
                segments,
                (
                    *(part, out, call.cu_q, call.cu_k, call.tq, call.tk, heads, call.tq * heads, segments),
                    *(rows_per_start, slots, qk_scale, *strides[9:]),
                ),
                head_dim=head_dim,
                pdl=way.pdl,
                VARLEN=packed,
                CAUSAL=call.causal,
                SEGMENT=segment,
            )
            return
        merge_kernel[(rows,)](
            *(part, out, *pointers, call.tq, call.tk, heads, call.tq * heads, window, segments, rows_per_start, slots),
            qk_scale,
            *strides[9:],
            UNROLL=8,
            PDL=way.pdl,
            BLOCK_D=plan.block_d,
            num_warps=1,
            enable_fp_fusion=False,
            **mask,
            **dims,
            **({"launch_pdl": True} if way.pdl else {}),
        )
