"""Which tile and kernel of grouped products may run: those proven by bits on this machine, at their first use.

The anchor is that of class chain (`nondet.kernels.matmul.cuda_triton`); proofs are kept (`nondet.core.certificates`).
"""

from __future__ import annotations

import functools

import torch

from nondet.core.certificates import certificates
from nondet.core.proof import Claim, operands_key, product_inputs
from nondet.core.proof import prove as prove_by_bits
from nondet.kernels.matmul.cuda_tiles import Tile, anchor
from nondet.kernels.matmul.cuda_triton import matmul_chain
from nondet.kernels.triton_common import INTERPRETED

__all__ = ["prove", "proven"]


def proven(x: torch.Tensor, weight: torch.Tensor, tile: Tile, tma: bool) -> tuple[Tile, bool]:
    """The tile and kernel if they are proven, now if need be; else the anchor's tile with pointers, if that is.

    Raises:
        NotImplementedError: neither is proven here, or nothing can be while a CUDA graph is captured.
    """
    if INTERPRETED:  # NumPy's products there: nothing about the hardware could be learnt
        return tile, tma
    capturing = x.is_cuda and torch.cuda.is_current_stream_capturing()
    for one, copied in ((tile, tma), (anchor(x.dtype), False)):
        holds = certificates().standing(*_named(x, weight, one, copied))
        if holds is None and not capturing:
            holds = prove(x, weight, one, copied)
        if holds:
            return one, copied
    raise NotImplementedError(
        "no grouped product is proven to be of class chain for this dtype, K, N and layout"
        + ("; run the product once before the capture" if capturing else " on this machine")
    )


def _named(x: torch.Tensor, weight: torch.Tensor, tile: Tile, tma: bool) -> tuple[str, str]:
    """(member, key) of the certificate: one expert's product at any number of rows; the kernels are told no more."""
    step = x.stride(0) if x.shape[0] > 1 else x.shape[1]
    rows, columns = weight.stride(1), weight.stride(2)
    return _written(x.dtype, x.shape[1], weight.shape[2], step, rows, columns, _alignment(x, weight), tile, tma)


@functools.lru_cache(maxsize=4096)
def _written(
    dtype: torch.dtype, k: int, n: int, step: int, rows: int, columns: int, alignment: int, tile: Tile, tma: bool
) -> tuple[str, str]:
    name = f"triton {tile.name}{' tma' if tma else ''}"
    key = (str(dtype).removeprefix("torch."), f"K={k} N={n}", f"x={step}", f"weight={rows},{columns}")
    return name, operands_key("grouped", key, (f"@{alignment}",))


def _alignment(x: torch.Tensor, weight: torch.Tensor) -> int:
    """16 where both operands start at such a multiple of bytes, which Triton compiles for; else 1."""
    return 1 if (x.data_ptr() | weight.data_ptr()) % 16 else 16


def prove(x: torch.Tensor, weight: torch.Tensor, tile: Tile, tma: bool) -> bool | None:
    """Compare a member with the anchor of class chain on hard inputs of x's and weight's K, N, strides and alignment.

    Three groups whose rows begin and end within tiles, of all rows of one product after the other. What is seen is
    recorded, as `nondet.core.proof.prove` says.
    """
    from nondet.kernels.experts.cuda import grouped_chain  # which asks here what it may launch

    rows, (depth, columns) = 140, weight.shape[1:]
    offsets = torch.tensor([rows, 2 * rows, 3 * rows], dtype=torch.int32, device=x.device)
    step = x.stride(0) if x.shape[0] > 1 else depth
    inner = weight.stride()[1:]
    outer = columns * inner[1] if inner[0] == 1 else 1 + (depth - 1) * inner[0] + (columns - 1) * inner[1]
    aligned = _alignment(x, weight) == 16

    def member(left: torch.Tensor, right: torch.Tensor, bias: None) -> torch.Tensor:
        packed = _laid(left.flatten(0, 1), (step, 1), aligned)
        return grouped_chain(packed, _laid(right.mT, (outer, *inner), aligned), offsets, tile, tma)

    def plain(left: torch.Tensor, right: torch.Tensor, bias: None) -> torch.Tensor:
        return matmul_chain(left, right.mT, tile=anchor(x.dtype)).flatten(0, 1)

    claim = Claim(*_named(x, weight, tile, tma), member)
    with torch.no_grad():
        inputs = product_inputs(rows, columns, depth, x.dtype, x.device, batch=3)
        return prove_by_bits([claim], plain, inputs, certificates())[0]


def _laid(x: torch.Tensor, strides: tuple[int, ...], aligned: bool) -> torch.Tensor:
    """x at other strides; not `aligned`, one element after a multiple of 16 bytes."""
    span = 1 + sum((size - 1) * step for size, step in zip(x.shape, strides, strict=True))
    offset = 0 if aligned else 1
    return x.new_empty(span + offset).as_strided(x.shape, strides, offset).copy_(x)
