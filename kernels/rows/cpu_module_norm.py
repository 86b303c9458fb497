"""transformers' RMSNorm modules on a CPU in a few passes, with the bits of the operators that they stand for.

A module runs as six or seven operators (x to float32, squares, mean, + eps, rsqrt, product, rounding, weight), each of
which costs a small batch more to dispatch than to compute. The same arithmetic is done here, rounded at the same
places, as `nondet.kernels.rows.cuda_module_norm` has it. The sum is that of `nondet.kernels.rows.cpu`, at its certified
row counts. All else is one operation that IEEE 754 rounds correctly, element by element, so that it does not matter who
computes it: small batches go through NumPy, which has no dispatcher, large ones through torch and its threads.
"""

from __future__ import annotations

import numpy as np
import torch

from nondet.kernels.rows.cpu import row_sums, square_roots

__all__ = ["module_norm"]

_DTYPES = (torch.float16, torch.bfloat16, torch.float32)
_SMALL = 32768  # elements up to which torch does not share a loop among its threads (at::internal::GRAIN_SIZE)


def module_norm(
    x: torch.Tensor, weight: torch.Tensor, eps: float, *, round_first: bool, plus_one: bool
) -> torch.Tensor | None:
    """x [..., H], weight [H], one dtype -> [..., H] in it; None where it is not done here.

    Args:
        round_first: Round x * scale to the dtype before the weight is applied.
        plus_one: The weight is 1 + weight.
    """
    width = x.shape[-1]
    if x.dtype not in _DTYPES or weight.dtype != x.dtype or weight.shape != (width,) or not x.numel():
        return None
    rows = x.float().reshape(-1, width)
    if rows.numel() <= _SMALL:
        with np.errstate(all="ignore"):  # torch says nothing of infinities either
            normed = _scaled_small(rows, eps)
    else:
        scale = 1.0 / square_roots(row_sums(rows * rows).div_(width).add_(eps))
        normed = rows * scale[:, None]
    if round_first:
        out = normed.to(x.dtype) * weight
    else:
        wide = weight.float()
        out = normed.mul_(wide.add(1.0) if plus_one else wide).to(x.dtype)
    return out.view(x.shape)


def _scaled_small(rows: torch.Tensor, eps: float) -> torch.Tensor:
    """rows [M, H] / sqrt(mean(rows^2) + eps), as reciprocal and product."""
    numbers, squares = rows.numpy(), torch.empty_like(rows)  # torch's own memory is aligned
    np.multiply(numbers, numbers, out=squares.numpy())
    scale = row_sums(squares).numpy()
    scale /= np.float32(numbers.shape[1])
    scale += np.float32(eps)
    np.sqrt(scale, out=scale)
    np.divide(np.float32(1.0), scale, out=scale)
    return torch.from_numpy(numbers * scale[:, None])
