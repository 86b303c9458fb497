"""Attention on Hopper GPUs: prefill and decode in the order of the Triton kernels, bit for bit, by faster kernels.

The order of reduction is the one that `attention.cuda` states, so this is another member of its class: keys in
segments of SEGMENT and tiles of BLOCK_N anchored at key 0, the same online softmax in float32, the same halving of row
sums, segments merged in order. Which program computes which rows and when changes only speed; nor does a row's
neighbour enter (each row of a product has its own chain). It is faster because separate warps load, two products are in
flight, and programs process many blocks. The schedule follows FlashAttention-3 (Shah et al.
2024, arXiv 2407.08608); the total that a segment is merged into, which that kernel lacks, is kept in shared memory.
"""

from __future__ import annotations

import functools
import math
from functools import lru_cache
from typing import Any

import torch
import triton

from nondet.core.launch import note
from nondet.kernels import triton_common as common
from nondet.kernels.triton_common import HALF, INTERPRETED, box_at, capability, launch, multiprocessors

try:  # Gluon is experimental: a Triton that lacks what the kernel needs must not disable the other kernels
    from triton.experimental.gluon.language import NVMMASharedLayout
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    from nondet.kernels.attention.gluon_kernels import decode_kernel as decode_kernel
    from nondet.kernels.attention.gluon_kernels import merge_all_kernel, prefill_kernel

    NO_KERNEL = None
except (ImportError, AttributeError) as error:  # pragma: no cover - depends on the Triton that is installed
    NO_KERNEL = f"Triton {triton.__version__} has no Gluon for it ({error})"


SEGMENT = 512  # keys; part of the class
BLOCK_N = 128  # keys; part of the class
_BLOCK_M = 128  # queries, 64 for each consumer
_STAGES = {64: 4, 128: 2}  # by head dim: tiles of K and of V in flight, as many as fit next to Q and the total
_LAUNCH_REGISTERS = 168  # of each of 384 threads; consumers then take what the loading warp releases
_CONSUMER_REGISTERS = 240


@lru_cache
def _box_layout() -> Any:
    """Swizzled by 128 bytes, which wgmma reads without bank conflicts."""
    return NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=4)


def layout_fault(name: str, x: torch.Tensor) -> str | None:
    """Why the copy engine can't read x [B, H, T, D] in place: it needs contiguous rows of D and 16-byte steps."""
    steps, size = x.stride(), x.element_size()
    if steps[3] != 1:
        return f"{name}'s last stride is {steps[3]}, not 1"
    if x.data_ptr() % 16:
        return f"{name} does not start at a multiple of 16 bytes"
    for count, step in zip(x.shape[:3], steps, strict=False):
        if count > 1 and (step < 1 or step * size % 16):
            return f"{name} has strides {steps}, which are no multiples of 16 bytes"
    return None


def supports(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool, window: int | None, softcap: float | None
) -> str | None:
    """Why `prefill` cannot take q [B, Hq, Tq, D] over k, v [B, Hkv, Tk, D], or None if it can; launches nothing.

    It assumes what the Triton launcher checks for any kernel: one device and dtype, k and v of one shape, heads that
    divide, at least one query and one key.
    """
    if torch.compiler.is_compiling():
        return "torch.compile cannot trace it"  # the Triton kernels, which it can trace, give the same bits
    if window is not None or softcap is not None:
        return "it has no sliding window and no soft cap"
    if causal and q.shape[2] > k.shape[2]:
        return f"causal, it needs at least as many keys as queries, got {k.shape[2]} and {q.shape[2]}"
    return available(q.device) or call_fault(q, k, v) or layout_fault("q", q)


def descriptor(x: torch.Tensor, rows: int) -> Any:
    """Boxes of `rows` tokens of one head of x [B, H, T, D]; tokens beyond T read as zeros and are not written."""
    if x.data_ptr() % 16:
        return _boxes(x, rows)  # which refuses it
    return box_at(pattern(x, rows), x)


def pattern(x: torch.Tensor, rows: int) -> Any:
    """The same boxes for any memory that is aligned to 16 bytes and has x's shape and strides."""
    key = (x.shape, x.stride(), x.dtype, rows)
    kept = _descriptors.get(key)
    if kept is None:
        if len(_descriptors) >= _DESCRIPTORS_KEPT:
            _descriptors.clear()
        kept = _descriptors[key] = _boxes(x, rows)
        kept.base = None  # a pattern holds no memory
    return kept


_DESCRIPTORS_KEPT = 1024
_descriptors: dict[tuple[Any, ...], Any] = {}


def _boxes(x: torch.Tensor, rows: int) -> Any:
    shape = list(x.shape)
    steps = x.stride()
    # The stride over a single element is not used, but it is checked.
    strides = [steps[i] if shape[i] > 1 else shape[3] for i in range(3)]
    return TensorDescriptor(x, shape, [*strides, 1], [1, 1, rows, shape[3]], _box_layout())


def prefill(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    causal: bool = True,
    scale: float | None = None,
    what: object = None,
) -> torch.Tensor:
    """q [B, Hq, Tq, D] over k, v [B, Hkv, Tk, D] -> [B, Hq, Tq, D], a view of contiguous [B, Tq, Hq, D].

    float16 or bfloat16, D of 64 or 128, accumulated in float32 in the order of `attention.cuda`; forward only. Causal
    is aligned to the end: query i has position Tk - Tq + i, so chunks of a prefill work. The bits of a query depend on
    its position, its head and the keys it sees. Can be captured in a CUDA graph. What lies beyond the last key is read
    as zeros, but an infinite or NaN value at a hidden key can reach a query (0 * inf) if its block reads that tile.
    `scale`: of the scores, above 0, or None for 1 / sqrt(D); `what`: the key of the cached launch. Raises
    NotImplementedError where `supports` gives a reason.
    """
    fault = supports(q, k, v, causal, None, None)
    if fault is not None:
        raise NotImplementedError(f"the Hopper prefill kernel does not take this: {fault}")
    scale = 1.0 / math.sqrt(q.shape[3]) if scale is None else scale
    if not scale > 0:
        raise ValueError(f"scale must be above 0, got {scale}")
    batch, heads, tq, head_dim = q.shape
    out = torch.empty(batch, tq, heads, head_dim, device=q.device, dtype=q.dtype).transpose(1, 2)
    blocks = triton.cdiv(tq, _BLOCK_M)
    items = blocks * batch * heads
    label = f"attention_hopper[{_BLOCK_M}x{BLOCK_N}]"
    note(label)
    boxed = [(q, _BLOCK_M // 2), (k, BLOCK_N), (v, BLOCK_N), (out, _BLOCK_M // 2)]
    how = {"GROUP": heads // k.shape[1], "CAUSAL": causal, "BLOCK_M": _BLOCK_M, "BLOCK_N": BLOCK_N}
    how |= {"HEAD_DIM": head_dim, "SEGMENT": SEGMENT, "STAGES": _STAGES[head_dim], "REGISTERS": _CONSUMER_REGISTERS}
    with common.on_device(q):
        launched = launch(
            prefill_kernel,
            (min(items, multiprocessors(q.device)),),
            (*(descriptor(x, rows) for x, rows in boxed),),
            (tq, k.shape[2], batch * heads, heads, blocks, items, scale * math.log2(math.e)),
            how,
            num_warps=4,
            maxnreg=_LAUNCH_REGISTERS,
            enable_fp_fusion=False,
        )
    if what is not None:
        boxes = (*((i, i, pattern(x, rows)) for i, (x, rows) in enumerate(boxed)),)
        common.remember(what, (q, k, v), (out.transpose(1, 2),), label, common.Step(launched, (0, 1, 2, 3), boxes))
    return out


# Decode for few rows, by the kernels of `gluon_kernels`: another member of the same class, with the same tiles,
# segments, online softmax, sums and merge as `cuda`. Only the dependencies differ, so that a step over few keys is not
# a chain of tiles. `cuda.stands` compares each way to launch them with the one plan before its results are used.

PAGES = (16, 32, 64, 128)  # of a paged cache, each a box of the copy engine
_CHUNKS = (4, 8, 16, 32, 64)  # segments merged at a time: one register of a thread for each
MERGE_CHUNK = _CHUNKS[-1]
MERGE_COLUMNS = 32  # of a row that one program merges
DECODE_REGISTERS = 128  # of a thread: two programs of 4 warps fit, or one of 8 and a merge


@functools.cache
def available(device: torch.device) -> str | None:
    """Why the kernels can't run there, or None if they can."""
    if NO_KERNEL is not None:
        return NO_KERNEL
    if INTERPRETED or device.type != "cuda" or torch.version.hip is not None:
        return f"it needs an NVIDIA GPU of compute capability 9.0, got {device.type}"
    if capability(device) != (9, 0):
        major, minor = capability(device)
        return f"it needs compute capability 9.0, got {major}.{minor}"
    return None


def call_fault(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> str | None:
    """Why no kernel of this module takes q over k, v [B, H, T, D] on any GPU, or None if one does."""
    if q.dtype not in HALF:
        return f"it takes float16 and bfloat16, got {str(q.dtype).removeprefix('torch.')}"
    if q.shape[3] not in _STAGES:
        return f"it takes head dims of 64 and 128, got {q.shape[3]}"
    return layout_fault("k", k) or layout_fault("v", v)


def merge(rows: int, segments: int, tensors: tuple[Any, ...], numbers: tuple[Any, ...], pdl: bool, **how: Any) -> Any:
    """Launch `merge_all_kernel` over rows of at most `segments` segments; `how`: VARLEN, CAUSAL, HEAD_DIM, SEGMENT."""
    chunk = min(MERGE_CHUNK, max(_CHUNKS[0], triton.next_power_of_2(segments)))
    return launch(
        merge_all_kernel,
        (rows, how["HEAD_DIM"] // MERGE_COLUMNS),
        tensors,
        numbers,
        {"CHUNK": chunk, **how},
        num_warps=1,
        enable_fp_fusion=False,
        **({"launch_pdl": True} if pdl else {}),
    )


def compile_merges(dtype: torch.dtype, head_dim: int, segments: int, device: torch.device) -> None:
    """Compile the merges of packed causal requests of up to `segments` segments, by one launch on zeros per kernel."""
    out = torch.zeros(1, 2, head_dim, dtype=dtype, device=device)
    starts = torch.arange(2, dtype=torch.int32, device=device)
    for chunk in (n for n in _CHUNKS if n == _CHUNKS[0] or n < 2 * segments):
        part = torch.zeros(2 * chunk * (head_dim + 2) + MERGE_CHUNK * head_dim, dtype=torch.float32, device=device)
        numbers = (1, 1, 2, 2, chunk, 1, 2 * chunk, 1.0, *(out.stride(i) for i in (0, 1, 0)))
        how = {"VARLEN": True, "CAUSAL": True, "HEAD_DIM": head_dim, "SEGMENT": SEGMENT}
        merge(2, chunk, (part, out, starts, starts), numbers, pdl=True, **how)
