"""Attention over fixed KV segments on Hopper GPUs: the prefill of `triton_attention`, bit for bit, by a faster kernel.

The order of reduction is the one that `triton_attention` states, so this is another member of its class, not another
class: keys in segments of SEGMENT and tiles of BLOCK_N anchored at key 0, the same online softmax in float32, the same
halving of row sums, segments merged in order. Who computes which rows, how tiles come in, which program takes which
block and in what sequence is speed, and enters no sum; nor does a row's neighbour (64 rows to a product, but a row of a
product has its own chain). Why it is faster: warps that load apart from warps that compute, two products in flight, and
programs that stay (see `hopper_attention_kernels`). The schedule follows FlashAttention-3 (Shah et al. 2024,
arXiv 2407.08608); the total that a segment is merged into, which that kernel lacks, is kept in shared memory.

tests/kernels/attention/test_hopper.py holds the bits against the Triton kernels and the errors against float64.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Any

import torch
import triton

from nondet.core.launch import note
from nondet.kernels.triton_common import capability, multiprocessors

try:  # Gluon is experimental: a Triton that lacks what the kernel needs must not take the other kernels with it
    from triton.experimental.gluon.language import NVMMASharedLayout
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    from nondet.kernels.attention.hopper_kernels import prefill_kernel

    _NO_KERNEL = None
except (ImportError, AttributeError) as error:  # pragma: no cover - depends on the Triton that is installed
    _NO_KERNEL = f"Triton {triton.__version__} has no Gluon for it ({error})"

__all__ = ["BLOCK_N", "SEGMENT", "descriptor", "layout_fault", "prefill", "supports"]

SEGMENT = 512  # keys; part of the class
BLOCK_N = 128  # keys; part of the class
_BLOCK_M = 128  # queries, 64 for each consumer
_STAGES = {64: 4, 128: 2}  # by head dim: tiles of K and of V under way, as many as fit beside Q and the total
_LAUNCH_REGISTERS = 168  # of each of 384 threads; consumers then take what the loading warp gives up
_CONSUMER_REGISTERS = 240


@lru_cache
def _box_layout() -> Any:
    """How a box of tokens lies in shared memory: swizzled by 128 bytes, which wgmma reads without bank conflicts."""
    return NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=4)


def layout_fault(name: str, x: torch.Tensor) -> str | None:
    """Why the copy engine cannot read x [B, H, T, D] as it lies: it wants rows of D together and 16-byte steps."""
    steps, size = x.stride(), x.element_size()
    if steps[3] != 1:
        return f"{name}'s last stride is {steps[3]}, not 1"
    if x.data_ptr() % 16:
        return f"{name} does not start at a multiple of 16 bytes"
    for count, step in zip(x.shape[:3], steps, strict=False):
        if count > 1 and (step < 1 or step * size % 16):
            return f"{name} has strides {steps}, which are no multiples of 16 bytes"
    return None


def _call_fault(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool, window: int | None, softcap: float | None
) -> str | None:
    """What of a call the kernel cannot do on any GPU."""
    if q.dtype not in (torch.float16, torch.bfloat16):
        return f"it takes float16 and bfloat16, got {str(q.dtype).removeprefix('torch.')}"
    if q.shape[3] not in _STAGES:
        return f"it takes head dims of 64 and 128, got {q.shape[3]}"
    if window is not None:
        return "it has no sliding window"
    if softcap is not None:
        return "it has no soft cap"
    if causal and q.shape[2] > k.shape[2]:
        return f"causal, it needs at least as many keys as queries, got {k.shape[2]} and {q.shape[2]}"
    return layout_fault("q", q) or layout_fault("k", k) or layout_fault("v", v)


def supports(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool, window: int | None, softcap: float | None
) -> str | None:
    """Why `prefill` cannot take q [B, Hq, Tq, D] over k, v [B, Hkv, Tk, D], or None if it can; launches nothing.

    It assumes what the Triton launcher checks for any kernel: one device and dtype, k and v of one shape, heads that
    divide, at least one query and one key.
    """
    if _NO_KERNEL is not None:
        return _NO_KERNEL
    if torch.compiler.is_compiling():
        return "torch.compile cannot trace it"  # nor need it: the Triton kernels, which it can, give the same bits
    if q.device.type != "cuda" or torch.version.hip is not None:
        return f"it needs an NVIDIA GPU of compute capability 9.0, got {q.device.type}"
    if capability(q.device) != (9, 0):
        major, minor = capability(q.device)
        return f"it needs compute capability 9.0, got {major}.{minor}"
    return _call_fault(q, k, v, causal, window, softcap)


def descriptor(x: torch.Tensor, rows: int) -> Any:
    """Boxes of `rows` tokens of one head of x [B, H, T, D]; tokens beyond T read as zeros and are not written."""
    shape = list(x.shape)
    steps = x.stride()
    # A stride over one element is never taken, but it is checked.
    strides = [steps[i] if shape[i] > 1 else shape[3] for i in range(3)]
    return TensorDescriptor(x, shape, [*strides, 1], [1, 1, rows, shape[3]], _box_layout())


def prefill(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, causal: bool, scale: float | None) -> torch.Tensor:
    """q [B, Hq, Tq, D] over k, v [B, Hkv, Tk, D] -> [B, Hq, Tq, D], a view of contiguous [B, Tq, Hq, D].

    float16 or bfloat16, D of 64 or 128, accumulated in float32 in the order of `triton_attention`; forward only. Causal
    is aligned to the end: query i stands at position Tk - Tq + i, so chunks of a prefill work. The bits of a query
    depend on its position, its head and the keys it sees. Can be captured in a CUDA graph.

    A value that is infinite or NaN at a key that a query may not see can still reach it (0 * inf) if the key is in a
    tile that the query's block reads; what lies beyond the last key is read as zeros.

    Args:
        causal: A query sees the keys up to its own position; otherwise all.
        scale: Of the scores, above 0; None for 1 / sqrt(D).

    Raises:
        NotImplementedError: `supports` says no.
        ValueError: a scale that is not above 0.
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
    note(f"attention_hopper[{_BLOCK_M}x{BLOCK_N}]")
    with torch.cuda.device(q.device):
        prefill_kernel[(min(items, multiprocessors(q.device)),)](
            *(descriptor(q, _BLOCK_M // 2), descriptor(k, BLOCK_N), descriptor(v, BLOCK_N)),
            *(descriptor(out, _BLOCK_M // 2), tq, k.shape[2], batch * heads, heads, blocks, items),
            scale * math.log2(math.e),
            GROUP=heads // k.shape[1],
            CAUSAL=causal,
            BLOCK_M=_BLOCK_M,
            BLOCK_N=BLOCK_N,
            HEAD_DIM=head_dim,
            SEGMENT=SEGMENT,
            STAGES=_STAGES[head_dim],
            REGISTERS=_CONSUMER_REGISTERS,
            num_warps=4,
            maxnreg=_LAUNCH_REGISTERS,
            enable_fp_fusion=False,
        )
    return out
