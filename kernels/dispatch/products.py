"""How the arguments of aten's products and of attention map onto batch-invariant kernels.

Each replacement takes the device's `Kernels` and the operator's own arguments. What torch adds in the same rounding
(`beta * input`, anything but a bias of one value a column) is added here after the product's rounding, elementwise: a
result may differ from stock by one rounding, and does not depend on the batch.
"""

from __future__ import annotations

import torch

from nondet.kernels.attention.masks import attend_packed, packing_of
from nondet.kernels.dispatch.kernels import Kernels, Leave, require
from nondet.kernels.dispatch.state import weights_first

__all__ = ["addmm", "addmv", "attention", "baddbmm", "bmm", "dot", "linear", "mm", "mv"]


_MISFIT = "shapes that do not fit"


def mm(kernels: Kernels, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """a [M, K] x b [K, N]."""
    require(a, b)
    _fit(a, b, 2)
    return kernels.mm(a, b)


def addmm(
    kernels: Kernels, bias: torch.Tensor, a: torch.Tensor, b: torch.Tensor, *, beta: float = 1, alpha: float = 1
) -> torch.Tensor:
    """a [M, K] x b [K, N] + bias; a bias [N] is added before the one rounding."""
    require(a, b, bias)
    _fit(a, b, 2)
    if beta == 1 and alpha == 1 and bias.dim() == 1 and bias.shape[0] == b.shape[1]:
        return kernels.mm(a, b, bias)
    return _plus(bias, kernels.mm(a, b), beta, alpha)


def bmm(kernels: Kernels, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """a [B, M, K] x b [B, K, N]."""
    require(a, b)
    _fit(a, b, 3)
    if weights_first.active and b.shape[2] == 1 and not a.is_cuda:
        from nondet.kernels.matmul import cpu

        return cpu.vectors_by_weights(a, b[:, :, 0])[:, :, None]
    return kernels.bmm(a, b)


def baddbmm(
    kernels: Kernels, bias: torch.Tensor, a: torch.Tensor, b: torch.Tensor, *, beta: float = 1, alpha: float = 1
) -> torch.Tensor:
    """a [B, M, K] x b [B, K, N] + bias, rounded twice."""
    require(a, b, bias)
    _fit(a, b, 3)
    return _plus(bias, kernels.bmm(a, b), beta, alpha)


def mv(kernels: Kernels, a: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """a [M, K] x x [K]."""
    require(a, x)
    if x.dim() != 1 or a.dim() != 2 or a.shape[1] != x.shape[0]:
        raise Leave(_MISFIT)  # torch's own error
    return kernels.mm(a, x[:, None])[:, 0]


def addmv(
    kernels: Kernels, bias: torch.Tensor, a: torch.Tensor, x: torch.Tensor, *, beta: float = 1, alpha: float = 1
) -> torch.Tensor:
    """a [M, K] x x [K] + bias, rounded twice."""
    require(a, x, bias)
    return _plus(bias, mv(kernels, a, x), beta, alpha)


def dot(kernels: Kernels, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """a [K] x b [K]."""
    require(a, b)
    if a.dim() != 1 or a.shape != b.shape:
        raise Leave("shapes that do not fit")  # torch's own error
    return kernels.mm(a[None], b[:, None])[0, 0]


def linear(kernels: Kernels, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """x [..., K], weight [N, K], bias [N]: the whole of it at once, sooner than what torch makes of it."""
    if bias is None:
        require(x, weight)
    else:
        require(x, weight, bias)
    if weight.dim() != 2 or x.dim() == 0 or (bias is not None and bias.shape != weight.shape[:1]):
        raise Leave("shapes that no layer has")
    if x.shape[-1] != weight.shape[1]:
        raise Leave(_MISFIT)  # torch's own error
    return kernels.linear(x, weight, bias)


def attention(
    kernels: Kernels,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    """As torch defines it: `is_causal` is aligned to the first key, and a mask says everything else."""
    require(q, k, v)
    if dropout_p:
        raise Leave("dropout")
    if q.dim() != 4 or k.shape != v.shape or (q.shape[0], q.shape[3]) != (k.shape[0], k.shape[3]):
        raise Leave("shapes that no decoder has")
    if q.shape[3] > kernels.max_head_dim:
        raise Leave(f"head dim {q.shape[3]}")
    if q.shape[1] != k.shape[1] and not (enable_gqa and q.shape[1] % k.shape[1] == 0):
        raise Leave("heads that don't match")
    q_len, k_len = q.shape[2], k.shape[2]
    if k_len == 0:
        raise Leave("no keys")
    if attn_mask is not None:
        broadcast = is_causal or attn_mask.shape[-1] != k_len  # one column that stands for all keys
        packings = None if broadcast else packing_of(attn_mask, q.shape[0], q_len)
        if packings is None:
            raise Leave("a mask of holes, a window or a bias")
        return attend_packed(kernels.attention_varlen, q, k, v, packings, scale)
    if is_causal:
        if q_len > k_len:
            raise Leave("more queries than keys")
        k, v = k[:, :, :q_len], v[:, :, :q_len]
    return kernels.attention(q, k, v, causal=is_causal or q_len == 1, scale=scale)


def _plus(bias: torch.Tensor, product: torch.Tensor, beta: float, alpha: float) -> torch.Tensor:
    if alpha != 1:
        product = product * alpha
    if beta == 0:  # torch's promise: NaN in the input is not looked at
        return product
    out = product + (bias if beta == 1 else bias * beta)
    if out.shape != product.shape:
        raise Leave(_MISFIT)  # torch's own error
    return out


def _fit(a: torch.Tensor, b: torch.Tensor, axes: int) -> None:
    """Leave what torch has an error for."""
    if a.dim() != axes or b.dim() != axes or a.shape[-1] != b.shape[-2] or a.shape[:-2] != b.shape[:-2]:
        raise Leave(_MISFIT)
