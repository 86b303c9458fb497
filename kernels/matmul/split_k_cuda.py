"""One product with K cut up: the split-K that makes stock libraries batch-dependent, and the cut that does not.

A library splits K to keep a large GPU busy when M and N give too few tiles, and chooses the *number* of splits by the
shape; so M decides the order of reduction. `split_k` does that with the caller's number, and adds the parts in order or
by atomics in the order in which programs finish. `fixed_chunk` fixes the chunk's *size* instead: then the order is the
same for any number of workers (He & Thinking Machines Lab 2025, doi 10.64434/tml.20250910).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from nondet.core.launch import note
from nondet.kernels.matmul.triton_kernels import Tile, chain, tile_for, tile_offsets
from nondet.kernels.reference import CUT_DTYPES, check_cut
from nondet.kernels.triton_common import on_device, require

# Triton reads a kernel's annotations itself and allows only tl.constexpr.
# mypy: allow-untyped-defs, allow-incomplete-defs


@triton.jit(do_not_specialize=["M", "chunk", "chunks", "workers"])
def _chunks_kernel(
    a_ptr,
    b_ptr,
    partial_ptr,
    M,
    N,
    K,
    chunk,
    chunks,
    workers,
    stride_am,
    stride_ak,
    stride_bk,
    stride_bn,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    MODE: tl.constexpr,
):
    """Worker w sums chunks w, w + workers, ... of K, each from zero.

    MODE "store" keeps each chunk's sum, partial [chunks, M, N]; "atomic" adds them to partial [M, N] as they come;
    "serial" (one worker) adds them in chunk order in registers and stores partial [M, N] once.
    """
    offs_m, offs_n = tile_offsets(tl.program_id(0), M, N, BLOCK_M, BLOCK_N, 8)
    out = partial_ptr + offs_m.to(tl.int64)[:, None] * N + offs_n[None, :]
    inside = (offs_m[:, None] < M) & (offs_n[None, :] < N)
    total = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for c in range(tl.program_id(1), chunks, workers):
        lo = c * chunk
        hi = tl.minimum(lo + chunk, K)
        acc = chain(
            a_ptr,
            b_ptr,
            offs_m,
            offs_n,
            lo,
            hi,
            M,
            N,
            stride_am,
            stride_ak,
            stride_bk,
            stride_bn,
            BLOCK_M,
            BLOCK_N,
            BLOCK_K,
            False,
            tl.float32,
            "ieee",
        )
        if MODE == "store":
            tl.store(out + c * (M.to(tl.int64) * N), acc, mask=inside)
        elif MODE == "atomic":
            tl.atomic_add(out, acc, mask=inside, sem="relaxed")
        else:
            # An addition of its own: a running total passed through the MMA accumulator would be truncated there.
            total += acc
    if MODE == "serial":
        tl.store(out, total, mask=inside)


@triton.jit(do_not_specialize=["elements", "chunks"])
def _ordered_sum_kernel(partial_ptr, out_ptr, elements, chunks, BLOCK: tl.constexpr):
    offs = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = offs < elements
    total = tl.zeros((BLOCK,), dtype=tl.float32)
    for c in range(chunks):
        total += tl.load(partial_ptr + c * elements.to(tl.int64) + offs, mask=inside, other=0.0)
    tl.store(out_ptr + offs, total.to(out_ptr.dtype.element_ty), mask=inside)


def _launch_chunks(
    a: torch.Tensor, b: torch.Tensor, partial: torch.Tensor, cut: tuple[int, int], workers: int, tile: Tile, mode: str
) -> None:
    """`cut`: the size of a chunk, and how many there are."""
    (m, k), n = a.shape, b.shape[1]
    _chunks_kernel[(triton.cdiv(m, tile.block_m) * triton.cdiv(n, tile.block_n), workers)](
        *(a, b, partial, m, n, k, *cut, workers, *a.stride(), *b.stride()),
        BLOCK_M=tile.block_m,
        BLOCK_N=tile.block_n,
        BLOCK_K=tile.block_k,
        MODE=mode,
        num_warps=tile.warps,
        num_stages=tile.stages,
    )


def _sum_in_order(partial: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    _ordered_sum_kernel[(triton.cdiv(out.numel(), 1024),)](partial, out, out.numel(), partial.shape[0], BLOCK=1024)
    return out


def split_k(a: torch.Tensor, b: torch.Tensor, *, splits: int, ordered: bool) -> torch.Tensor:
    """a [M, K] times b [K, N] -> [M, N], with K cut into `splits` equal parts (the last may be shorter). Any strides.

    float16, bfloat16 or float32; each part is a chain in float32, the parts are added in float32, one rounding at the
    end; empty parts are left out. The bits depend on `splits`: splits=1 is the serial chain of `matmul.cuda.matmul`,
    and a library that picks the number by M is not batch-invariant. With ordered=False atomics add the parts in the
    order in which programs finish, so even the same call may give different bits.
    """
    check_cut("split_k", a, b, splits=splits)
    require("split_k", CUT_DTYPES, a, b)
    (m, k), n = a.shape, b.shape[1]
    out = torch.empty(m, n, device=a.device, dtype=a.dtype)
    if out.numel() == 0:
        return out
    chunk = max(1, triton.cdiv(k, splits))
    chunks = max(1, triton.cdiv(k, chunk))
    tile = tile_for(m, n, a.dtype)
    note(f"split_k[{tile}, {chunks} {'ordered' if ordered else 'atomic'}]")
    with on_device(a):
        if ordered:
            partial = torch.empty(chunks, m, n, device=a.device, dtype=torch.float32)
            _launch_chunks(a, b, partial, (chunk, chunks), chunks, tile, "store")
            return _sum_in_order(partial, out)
        partial = torch.zeros(m, n, device=a.device, dtype=torch.float32)
        _launch_chunks(a, b, partial, (chunk, chunks), chunks, tile, "atomic")
        return out.copy_(partial)


def fixed_chunk(a: torch.Tensor, b: torch.Tensor, *, workers: int, chunk: int = 512) -> torch.Tensor:
    """a [M, K] times b [K, N] -> [M, N], with K cut into chunks of fixed size, shared among `workers`. Any strides.

    float16, bfloat16 or float32. Each chunk of `chunk` elements of K (the last may be shorter) is a chain in float32
    from zero; the chunks are added in chunk order in float32; one rounding at the end. That order depends only on
    `chunk` and K: one worker adds the chunks in registers, several leave them in memory for an ordered sum, and the
    bits are the same, so M may choose the number of workers (programs that share a tile's chunks).
    """
    check_cut("fixed_chunk", a, b, workers=workers, chunk=chunk)
    require("fixed_chunk", CUT_DTYPES, a, b)
    (m, k), n = a.shape, b.shape[1]
    out = torch.empty(m, n, device=a.device, dtype=a.dtype)
    if out.numel() == 0:
        return out
    chunks = max(1, triton.cdiv(k, chunk))
    workers = min(workers, chunks)
    tile = tile_for(m, n, a.dtype)
    note(f"fixed_chunk[{tile}, {chunks} x {chunk} by {workers}]")
    with on_device(a):
        if workers == 1:
            total = torch.empty(m, n, device=a.device, dtype=torch.float32)
            _launch_chunks(a, b, total, (chunk, chunks), 1, tile, "serial")
            return out.copy_(total)
        partial = torch.empty(chunks, m, n, device=a.device, dtype=torch.float32)
        _launch_chunks(a, b, partial, (chunk, chunks), workers, tile, "store")
        return _sum_in_order(partial, out)
