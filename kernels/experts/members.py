"""Anchors and members of the grouped product that are no function of a kernel module as they stand.

Every function has the operator's signature (`nondet.kernels.reference`) and raises NotImplementedError where it does
not apply; `nondet.core.registry` names them. CUDA, but for the last; forward only.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

__all__ = ["each_row_by_cpu_matmul", "grouped_anchor", "grouped_tiles"]

Call = Callable[..., torch.Tensor]


def grouped_anchor(x: torch.Tensor, weight: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
    """Each expert's rows by the anchor of class chain, one plain product after the other."""
    from nondet.kernels.matmul.members import chain_anchor_matmul

    out = x.new_zeros((x.shape[0], weight.shape[2]))
    start = 0
    for group, end in enumerate(offsets.tolist()):
        if start < end:
            out[start:end] = chain_anchor_matmul(x[start:end], weight[group])
        start = end
    return out


def grouped_tiles(dtype: str) -> dict[str, Call]:
    """Every tile of the grouped kernels, with pointers and, where operands allow it, with TMA."""
    from nondet.kernels.experts.cuda import grouped_chain, tiles

    found = tiles(getattr(torch, dtype))
    plain: dict[str, Call] = {tile.name: partial(grouped_chain, tile=tile, tma=False) for tile in found}
    return plain | {
        f"{tile.name} tma": partial(_grouped_tma, tile) for tile in found if dtype in ("bfloat16", "float16")
    }


def _grouped_tma(tile: Any, x: torch.Tensor, weight: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
    from nondet.kernels.experts.cuda import grouped_chain, takes_tma

    if not takes_tma(x, weight):
        raise NotImplementedError("TMA does not read this layout here")
    return grouped_chain(x, weight, offsets, tile=tile, tma=True)


def each_row_by_cpu_matmul(x: torch.Tensor, weight: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
    """Each row alone times its expert's weight, which lies on a 64-byte boundary, as the class asks."""
    from nondet.kernels.matmul.cpu import matmul

    aligned = [w if w.data_ptr() % 64 == 0 else w.clone() for w in weight]
    out = x.new_zeros((x.shape[0], weight.shape[2]))
    start = 0
    for group, end in enumerate(offsets.tolist()):
        for row in range(start, end):
            out[row : row + 1] = matmul(x[row : row + 1], aligned[group])
        start = end
    return out
