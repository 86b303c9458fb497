"""Hashes of rows, on the device, that do not depend on the batch.

The hash of a row is the sum over its elements of w_i * x_i mod 2^64, where x_i are the bits of the elements as integers
and w_i fixed odd numbers. Integer sums are exact in any order, so neither the batch nor the device can change a hash;
the weights see an exchange of two elements, which an XOR would not. Two rows of equal bits have equal hashes. Rows that
differ in one element never collide, since an odd factor is invertible; others collide about once in 2^64, which is why
the guilty call is confirmed on full bits.
"""

from __future__ import annotations

import functools
import hashlib
import random
from typing import Any

import torch

from nondet.compare import bits

__all__ = ["row_hashes", "weights_digest"]


@functools.cache
def _weights(width: int, device: torch.device) -> torch.Tensor:
    """[width] int64, odd, the same in every process."""
    rng = random.Random(f"nondet row hash {width}")  # noqa: S311 - a hash of floats, not a secret
    return torch.tensor([rng.getrandbits(64) - 2**63 | 1 for _ in range(width)], dtype=torch.int64, device=device)


def row_hashes(x: torch.Tensor) -> torch.Tensor:
    """[rows, ...] of any dtype -> [rows] int64: the hash of each row's bits, every NaN being one pattern."""
    pattern = bits(x).reshape(x.shape[0], -1)
    if pattern.shape[1] == 0:
        return torch.zeros(x.shape[0], dtype=torch.int64, device=x.device)
    return (pattern.to(torch.int64) * _weights(pattern.shape[1], pattern.device)).sum(-1)


def weights_digest(model: Any) -> str:
    """16 hex digits over the names, shapes and bits of all parameters and buffers, hashed where they lie."""
    sha = hashlib.sha256()
    for name, tensor in sorted([*model.named_parameters(), *model.named_buffers()], key=lambda pair: pair[0]):
        sha.update(f"{name}{tensor.dtype}{tuple(tensor.shape)}".encode())
        rows = tensor.detach().reshape(tensor.shape[0] if tensor.dim() > 1 else 1, -1)
        for piece in rows.split(max(1, 2**24 // max(1, rows.shape[1]))):  # 64-bit integers of a piece at a time
            sha.update(row_hashes(piece).cpu().numpy().tobytes())
    return sha.hexdigest()[:16]
