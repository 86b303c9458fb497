"""One product with K cut up, on a CPU: shows the effect without a GPU.

A CPU library seldom splits K, so the split is made here, with float32 products of slices of K: `split_k` cuts K into a
*number* of parts, and its bits depend on that number; `fixed_chunk` cuts it into parts of a fixed *size*, and its bits
do not depend on the number of workers.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import torch

from nondet.core.launch import note
from nondet.kernels.matmul.cpu import mm
from nondet.kernels.reference import check_cut
from nondet.kernels.reference import matmul as reference  # noqa: F401 - of the declaration

_entropy = random.SystemRandom()


def split_k(a: torch.Tensor, b: torch.Tensor, *, splits: int, ordered: bool) -> torch.Tensor:
    """a [M, K] times b [K, N] -> [M, N], with K cut into `splits` equal parts (the last may be shorter). Any strides.

    As `nondet.kernels.matmul.split_k_cuda.split_k`; operands are widened to float32, and each part is a product of
    torch's own (`torch.mm`). With ordered=False the order is random for each call, from the system's entropy, which
    simulates atomic additions on a GPU, where programs finish in any order. No CPU library does so: differences between
    such runs come from this simulation.
    """
    check_cut("split_k", a, b, splits=splits)
    if a.shape[1] == 0 or a.shape[0] == 0 or b.shape[1] == 0:
        return a.new_zeros((a.shape[0], b.shape[1]))
    parts = [torch.mm(x, y) for x, y in _slices(a, b, -(-a.shape[1] // splits))]
    note(f"cpu_split_k[{len(parts)} {'ordered' if ordered else 'in an order drawn afresh, standing for atomics'}]")
    if not ordered:
        _entropy.shuffle(parts)
    return _added(parts).to(a.dtype)


def fixed_chunk(a: torch.Tensor, b: torch.Tensor, *, workers: int, chunk: int = 512) -> torch.Tensor:
    """a [M, K] times b [K, N] -> [M, N], with K cut into chunks of fixed size, shared among `workers`. Any strides.

    As `nondet.kernels.matmul.split_k_cuda.fixed_chunk`; operands are widened to float32, and each chunk is a
    batch-invariant product (`nondet.kernels.matmul.cpu`). `workers` are threads; 1 computes the chunks here.
    """
    check_cut("fixed_chunk", a, b, workers=workers, chunk=chunk)
    if a.shape[1] == 0 or a.shape[0] == 0 or b.shape[1] == 0:
        return a.new_zeros((a.shape[0], b.shape[1]))
    slices = _slices(a, b, chunk)
    workers = min(workers, len(slices))
    note(f"cpu_fixed_chunk[{len(slices)} x {chunk} by {workers}]")
    if workers == 1:
        parts = [mm(x, y) for x, y in slices]
    else:
        with ThreadPoolExecutor(workers) as pool:
            parts = list(pool.map(lambda pair: mm(*pair), slices))
    return _added(parts).to(a.dtype)


def _slices(a: torch.Tensor, b: torch.Tensor, size: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    return [
        (a[:, i : i + size].float().contiguous(), b[i : i + size].float().contiguous())
        for i in range(0, a.shape[1], size)
    ]


def _added(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    total = parts[0].clone()
    for part in parts[1:]:
        total += part
    return total
