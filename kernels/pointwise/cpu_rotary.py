"""transformers' rotary embedding on a CPU: stock's operators, called straight, with stock's bits.

Products and sums are correctly rounded by IEEE 754, element by element, so stock is batch-invariant as it is; what
costs are the functions of ours that watch them (`nondet.kernels.originals`).
"""

from __future__ import annotations

import torch

from nondet.kernels import originals

__all__ = ["rotary", "rotated"]

_DTYPES = frozenset({torch.float16, torch.bfloat16, torch.float32})


def rotary(
    q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor] | None:
    """q [B, Hq, T, D], k [B, Hk, T, D], cos and sin [B or 1, T, D], one dtype; None where it is not done here."""
    if q.dtype not in _DTYPES or not (q.dtype is k.dtype is cos.dtype is sin.dtype) or cos.dim() != 3:
        return None
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    return _rotated(q, cos, sin), _rotated(k, cos, sin)


def rotated(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor | None:
    """`rotary` of x [B, T, H, D], token by token; None where it is not done here."""
    if x.dtype not in _DTYPES or not (x.dtype is cos.dtype is sin.dtype) or cos.dim() != 3:
        return None
    return _rotated(x, cos.unsqueeze(2), sin.unsqueeze(2))


def _rotated(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    half = x.shape[-1] // 2
    turned = torch.cat((-x[..., half:], x[..., :half]), dim=-1)
    return originals.add(originals.mul(x, cos), originals.mul(turned, sin))
