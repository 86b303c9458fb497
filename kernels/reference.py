"""The float64 oracles, and the only definition of each operator's signature.

Axes: B batch, H heads, T tokens, D head dim, M/N/K of a GEMM. Every implementation of an operator takes the same
arguments, in any floating dtype, and returns the dtype of its first argument; the oracles return float64.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """x [..., K] times weight [N, K] transposed, plus bias [N] -> [..., N]."""
    out = x.double() @ weight.double().T
    return out if bias is None else out + bias.double()


def matmul(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """a [M, K] times b [K, N] -> [M, N]; or batched, a [B, M, K] times b [B, K, N] -> [B, M, N]. Any strides."""
    return a.double() @ b.double()


def grouped_matmul(x: torch.Tensor, weight: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
    """Rows offsets[g - 1] ... offsets[g] - 1 of x [R, K] times weight[g] of [G, K, N] -> [R, N]; later rows: zeros."""
    return by_expert(torch.mm, x.double(), weight.double(), offsets)


def by_expert(
    product: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
    x: torch.Tensor,
    weight: torch.Tensor,
    offsets: torch.Tensor,
) -> torch.Tensor:
    """`grouped_matmul` by one product(rows, weight) for each expert that has rows."""
    out = x.new_zeros((x.shape[0], weight.shape[2]))
    start = 0
    for expert, end in enumerate(offsets.tolist()):
        if start < end:
            out[start:end] = product(x[start:end], weight[expert])
        start = end
    return out


def dequantized(x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """x [R, C] of float8 times its scales, one number or [r, c] with r of R, 1, or R / 128 rounded up; float64."""
    wide = scale.double()
    for axis in (0, 1) if wide.dim() == 2 else ():
        if wide.shape[axis] not in (1, x.shape[axis]):
            wide = wide.repeat_interleave(128, axis).narrow(axis, 0, x.shape[axis])
    return x.double() * wide


def scaled_matmul(
    a: torch.Tensor, b: torch.Tensor, scale_a: torch.Tensor, scale_b: torch.Tensor, dtype: torch.dtype
) -> torch.Tensor:
    """a [M, K] times b [K, N], both float8, each times its float32 scales (`dequantized`) -> [M, N] of the dtype.

    The scales as `torch._scaled_mm` takes them: per tensor [1] and [1], per row [M, 1] and [1, N], in blocks
    [M, K / 128] (1x128) and [K / 128, N / 128] (128x128).
    """
    return dequantized(a, scale_a) @ dequantized(b, scale_b)


def scaled_grouped_matmul(
    x: torch.Tensor,
    weight: torch.Tensor,
    scale_x: torch.Tensor,
    scale_weight: torch.Tensor,
    offsets: torch.Tensor,
    dtype: torch.dtype,
) -> torch.Tensor:
    """`grouped_matmul` of float8 x [R, K] with scales [R], weight [G, K, N] with scales [G, N] -> [R, N]."""
    wide = weight.double() * scale_weight.double()[:, None, :]
    return grouped_matmul(x.double() * scale_x.double()[:, None], wide, offsets)


def quantize(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """(float8 [M, K], float32 scales [], [M, 1] or [M, s]) of x [M, K]. Any scale is right: nothing to compare."""
    return ()


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float = 1e-6) -> torch.Tensor:
    """x [..., H] * rsqrt(mean(x^2) + eps) * weight [H] -> [..., H]; the mean runs over the last axis."""
    x = x.double()
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * weight.double()


def rms_norm_residual(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float = 1e-6
) -> tuple[torch.Tensor, torch.Tensor]:
    """(`rms_norm` of x + residual, x + residual), for x and residual [..., H].

    The sum is rounded to x's dtype before it is normalized, as by two operators in sequence. Implementations do the
    same, so this rounding does not count as their error.
    """
    added = x + residual
    return rms_norm(added, weight, eps), added.double()


def softmax(x: torch.Tensor) -> torch.Tensor:
    """Over the last axis of x [..., V]."""
    return torch.softmax(x.double(), -1)


def log_softmax(x: torch.Tensor) -> torch.Tensor:
    """Over the last axis of x [..., V]."""
    return torch.log_softmax(x.double(), -1)


def logsumexp(x: torch.Tensor) -> torch.Tensor:
    """Over the last axis of x [..., V] -> [...]."""
    return torch.logsumexp(x.double(), -1)


def cross_entropy(x: torch.Tensor, target: torch.Tensor, ignore_index: int = -100) -> torch.Tensor:
    """-log_softmax of logits x [..., V] at the targets [...] -> [...]; 0 where the target is `ignore_index`."""
    ignored = target == ignore_index
    at = target.long().masked_fill(ignored, 0)[..., None]
    return -log_softmax(x).gather(-1, at)[..., 0].masked_fill(ignored, 0.0)


def sum(x: torch.Tensor) -> torch.Tensor:
    """Over the last axis of x [..., K] -> [...]."""
    return x.double().sum(-1)


def cumsum(x: torch.Tensor) -> torch.Tensor:
    """Over the last axis of x [..., V], each element the sum of those up to it."""
    return x.double().cumsum(-1)


def mean(x: torch.Tensor) -> torch.Tensor:
    """Over the last axis of x [..., K] -> [...]."""
    return x.double().mean(-1)


def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    causal: bool = True,
    scale: float | None = None,
    mask: torch.Tensor | None = None,
) -> torch.Tensor:
    """q [B, Hq, Tq, D] over k, v [B, Hkv, Tk, D] -> [B, Hq, Tq, D]; Hq is a multiple of Hkv (GQA).

    Causal is aligned to the end: query i has position Tk - Tq + i and sees the keys up to its own position. So Tq = Tk
    is a prefill, Tq = 1 a decode step, anything between a chunk of a prefill. A `mask` that is added to the scores
    replaces `causal`.
    """
    groups = q.shape[1] // k.shape[1]
    # repeat_interleave gives the same, but takes milliseconds on a CPU
    keys, values = (x.double().unsqueeze(2).expand(-1, -1, groups, -1, -1).flatten(1, 2) for x in (k, v))
    scores = (q.double() @ keys.mT) * (scale if scale is not None else 1.0 / math.sqrt(q.shape[-1]))
    if mask is not None:
        scores = scores + mask.double()
    elif causal:
        position = torch.arange(q.shape[2], device=q.device) + (k.shape[2] - q.shape[2])
        hidden = torch.arange(k.shape[2], device=q.device)[None, :] > position[:, None]
        scores = scores.masked_fill(hidden, -math.inf)
    return torch.softmax(scores, -1) @ values


def index_add(target: torch.Tensor, index: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
    """target [R, C] with source [n, C] added to its rows index [n]; a new tensor."""
    return target.double().index_add(0, index, source.double())


def scatter_add(target: torch.Tensor, index: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
    """target [R] with source [n] added at index [n]; a new tensor."""
    return target.double().scatter_add(0, index, source.double())


def topk(x: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The k largest of each row of x [..., W], largest first: values and indices [..., k]; ties by rising index."""
    values, indices = torch.sort(x.double(), dim=-1, descending=True, stable=True)
    return values[..., :k], indices[..., :k]


def autograd(
    forward: Callable[..., torch.Tensor], gradient: torch.Tensor, *tensors: torch.Tensor
) -> tuple[torch.Tensor, ...]:
    """The gradients of forward(*tensors) over each tensor, from the gradient of its result."""
    with torch.enable_grad():
        leaves = [x.detach().requires_grad_() for x in tensors]
        return torch.autograd.grad(forward(*leaves), leaves, gradient)


def _over_rows(forward: Callable[..., torch.Tensor]) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
    def run(x: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
        """Of x [M, W], from the gradient [M, W] of the operator's result."""
        return autograd(forward, gradient.double(), x.double())[0]

    return run


softmax_gradient, log_softmax_gradient = map(_over_rows, (softmax, log_softmax))
silu_gradient = _over_rows(torch.nn.functional.silu)


def rms_norm_gradient(x: torch.Tensor, gradient: torch.Tensor, weight: torch.Tensor, eps: float = 1e-6) -> torch.Tensor:
    """Over x [M, H], from the gradient [M, H]; weight [H] gets no gradient, because its own depends on the batch."""
    return autograd(lambda t: rms_norm(t, weight, eps), gradient.double(), x.double())[0]


def attention_gradient(q: torch.Tensor, gradient: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Of causal attention: q and gradient [M, Hq, T, D], k and v [M, Hkv, T, D] -> of q, k, v [M, Hq + 2 Hkv, T, D]."""
    return torch.cat(autograd(attention, gradient.double(), q.double(), k.double(), v.double()), 1)


CUT_DTYPES = (torch.float16, torch.bfloat16, torch.float32)


def check_cut(operator: str, a: torch.Tensor, b: torch.Tensor, **sizes: int) -> None:
    """Of a product whose K is cut up: raise ValueError for shapes that do not fit and sizes below 1, and
    NotImplementedError for other dtypes than its kernels take.
    """
    if a.ndim != 2 or b.ndim != 2 or a.shape[1] != b.shape[0]:
        raise ValueError(f"{operator} takes [M, K] x [K, N], got {tuple(a.shape)} x {tuple(b.shape)}")
    for name, size in sizes.items():
        if size < 1:
            raise ValueError(f"{operator} needs {name} of at least 1, got {size}")
    if a.dtype not in CUT_DTYPES or b.dtype != a.dtype:
        raise NotImplementedError(f"{operator} takes float16, bfloat16 or float32, got {a.dtype} and {b.dtype}")
