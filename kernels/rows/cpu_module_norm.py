"""transformers' RMSNorm modules on a CPU in a few passes, with the bits of the operators that they stand for.

A module runs as six or seven operators (x to float32, squares, mean, + eps, rsqrt, product, rounding, weight), each of
which costs a small batch more to dispatch than to compute. The same arithmetic is done here, rounded at the same
places, as `nondet.kernels.rows.cuda_module_norm` has it. The sum is that of `nondet.kernels.rows.cpu`, at its certified
row counts. All else is one operation that IEEE 754 rounds correctly, element by element, so that it does not matter who
computes it: products are torch's, what there is one of in a row goes through NumPy.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from nondet.kernels import originals
from nondet.kernels.rows.cpu import sums_of

__all__ = ["module_norm"]

_DTYPES = frozenset({torch.float16, torch.bfloat16, torch.float32})
_ONE = np.float32(1.0)
_Rows = np.ndarray[Any, np.dtype[np.float32]]


def module_norm(
    x: torch.Tensor, weight: torch.Tensor, eps: float, *, round_first: bool, plus_one: bool
) -> torch.Tensor | None:
    """x [..., H], weight [H], one dtype -> [..., H] in it; None where it is not done here.

    Args:
        round_first: Round x * scale to the dtype before the weight is applied.
        plus_one: The weight is 1 + weight.
    """
    dtype = x.dtype
    if dtype not in _DTYPES or weight.dtype is not dtype or not x.numel() or eps <= 0:
        return None
    width = x.shape[-1]
    if weight.dim() != 1 or weight.shape[0] != width:
        return None
    wide = x.detach().float().contiguous()
    normed = torch.empty_like(wide)  # the squares at first
    rows, out = wide.numpy().reshape(-1, width), normed.numpy().reshape(-1, width)
    _normalize(rows, out, eps)
    if round_first:
        return originals.mul(normed.to(dtype), weight)
    factor = weight.float()
    return originals.mul(normed, factor.add(1.0) if plus_one else factor).to(dtype)


@np.errstate(all="ignore")  # of infinities and NaN nobody is told by torch either
def _normalize(rows: _Rows, out: _Rows, eps: float) -> None:
    """rows [M, K] / sqrt(mean(rows^2) + eps) into out, all in float32."""
    np.multiply(rows, rows, out=out)
    scale = sums_of(out)
    scale /= np.float32(rows.shape[1])
    scale += np.float32(eps)
    np.sqrt(scale, out=scale)
    np.divide(_ONE, scale, out=scale)
    np.multiply(rows, scale[:, None], out=out)
