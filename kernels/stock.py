"""torch's own operators, called as models call them: what a user gets by default. No invariance is promised.

Shapes and arguments are those of `nondet.kernels.reference`; results have the dtype of the first argument. torch
chooses the device kernel (by shape, dtype, device, build and flags); each launcher notes the operator.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from nondet.core.launch import note
from nondet.kernels.reference import autograd, by_expert


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """x [..., K] times weight [N, K] transposed, plus bias [N] -> [..., N]: F.linear."""
    note("torch.linear")
    return F.linear(x, weight, bias)


def matmul(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """a [M, K] times b [K, N], torch.mm; or a [B, M, K] times b [B, K, N], torch.bmm. Any strides."""
    if a.dim() == 2:
        note("torch.mm")
        return torch.mm(a, b)
    note("torch.bmm")
    return torch.bmm(a, b)


def grouped_matmul(x: torch.Tensor, weight: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
    """x [R, K], weight [G, K, N], offsets [G] int32 -> [R, N]: torch._grouped_mm, or one torch.mm per expert."""
    strides = [s for t in (x, weight) for s in t.stride() if s > 1]
    if x.dtype != torch.float64 and not any(s * x.element_size() % 16 for s in strides):
        note("torch._grouped_mm")
        return torch._grouped_mm(x, weight, offs=offsets)
    note("torch.mm for each expert")
    return by_expert(torch.mm, x, weight, offsets)


def scaled_matmul(
    a: torch.Tensor, b: torch.Tensor, scale_a: torch.Tensor, scale_b: torch.Tensor, dtype: torch.dtype
) -> torch.Tensor:
    """float8 a [M, K] by b [K, N] with their scales -> [M, N]: torch._scaled_mm, or NotImplementedError where it has
    none.
    """
    note("torch._scaled_mm")

    def call(step: int) -> torch.Tensor:
        left, right = block_scales(scale_a, scale_b, step) if step else (scale_a, scale_b)
        return torch._scaled_mm(a, b, left, right, out_dtype=dtype)

    blocks = scale_a.dim() == 2 and scale_a.shape[1] > 1
    with suppress(NotImplementedError):
        return or_refused(partial(call, 4 if blocks else 0), "torch._scaled_mm", a)
    # torch 2.11 accepts only the scales' own step, but the library then reads other scales: `block_scales`
    return or_refused(partial(call, 1 if blocks else 0), "torch._scaled_mm", a)


def block_scales(scale_a: torch.Tensor, scale_b: torch.Tensor, step: int = 4) -> tuple[torch.Tensor, torch.Tensor]:
    """[M, s] and [s, N / 128] as cuBLASLt reads them: the first axis is contiguous, and b's has `step` floats per
    column.

    torch 2.11 refuses any step but s, and with a step that is not a multiple of 4 the library reads other scales.
    """
    stretches, columns = scale_b.shape
    apart = stretches + -stretches % step
    right = scale_b.new_zeros(columns, apart)[:, :stretches].copy_(scale_b.mT).mT if apart > stretches else scale_b
    if apart == stretches and scale_b.stride(0) != 1:
        right = scale_b.mT.contiguous().mT
    return scale_a.mT.contiguous().mT, right


# How torch reports that it has no such product, as opposed to a failure.
_REFUSED = re.compile(
    "nvalid scaling|upport|xpected|only|require|must be|should be|Could not run|NOT_SUPPORTED|create a primitive", re.I
)


def or_refused(call: Callable[[], torch.Tensor], name: str, x: torch.Tensor) -> torch.Tensor:
    """The call's result; NotImplementedError in one line where torch reports that it has no such product."""
    try:
        return call()
    except torch.cuda.OutOfMemoryError:
        raise
    except (RuntimeError, ValueError, NotImplementedError) as error:
        if not _REFUSED.search(str(error)):
            raise
        why = str(error).strip().splitlines()[0].partition(". ")[0][:160].removesuffix(".")
        raise NotImplementedError(f"{name} refuses this on {x.device.type}: {why}") from error


def scaled_grouped_matmul(
    x: torch.Tensor,
    weight: torch.Tensor,
    scale_x: torch.Tensor,
    scale_weight: torch.Tensor,
    offsets: torch.Tensor,
    dtype: torch.dtype,
) -> torch.Tensor:
    """float8 x [R, K], weight [G, K, N], scales [R] and [G, N] -> [R, N]: torch._scaled_grouped_mm, or
    NotImplementedError.
    """
    note("torch._scaled_grouped_mm")
    return or_refused(
        lambda: torch._scaled_grouped_mm(x, weight, scale_x, scale_weight, offs=offsets, out_dtype=dtype),
        *("torch._scaled_grouped_mm", x),
    )


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float = 1e-6) -> torch.Tensor:
    """x [..., H], weight [H]: F.rms_norm, one call. transformers' models do not use it: see `rms_norm_hf`."""
    note("torch.rms_norm")
    return F.rms_norm(x, (x.shape[-1],), weight, eps)


def rms_norm_hf(x: torch.Tensor, weight: torch.Tensor, eps: float = 1e-6) -> torch.Tensor:
    """x [..., H], weight [H], as the models of transformers compute it: pow, mean, rsqrt and two products.

    Computed in float32 and rounded to x's dtype before the product with the weight, so it is rounded twice.
    """
    note("torch.pow+mean+rsqrt+mul")
    wide = x.to(torch.float32)
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return weight * wide.to(x.dtype)


def rms_norm_residual(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float = 1e-6
) -> tuple[torch.Tensor, torch.Tensor]:
    """(`rms_norm` of x + residual, x + residual): an addition and F.rms_norm, because torch has no call for both."""
    note("torch.add+rms_norm")
    added = x + residual
    return F.rms_norm(added, (x.shape[-1],), weight, eps), added


def _over_last_axis(call: Any) -> Callable[[torch.Tensor], torch.Tensor]:
    def run(x: torch.Tensor) -> torch.Tensor:
        note(f"torch.{call.__name__}")
        out: torch.Tensor = call(x, -1)
        return out

    return run


softmax, log_softmax, cumsum = map(_over_last_axis, (torch.softmax, torch.log_softmax, torch.cumsum))
logsumexp, sum, mean = map(_over_last_axis, (torch.logsumexp, torch.sum, torch.mean))


def cross_entropy(x: torch.Tensor, target: torch.Tensor, ignore_index: int = -100) -> torch.Tensor:
    """Logits x [..., V] for targets [...] -> losses [...]: F.cross_entropy without a reduction."""
    note("torch.cross_entropy")
    rows = x.reshape(-1, x.shape[-1])
    losses = F.cross_entropy(rows, target.reshape(-1).long(), ignore_index=ignore_index, reduction="none")
    return losses.view(target.shape)


def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    causal: bool = True,
    scale: float | None = None,
    mask: torch.Tensor | None = None,
) -> torch.Tensor:
    """F.scaled_dot_product_attention, with the backend that torch picks.

    q [B, Hq, Tq, D] over k, v [B, Hkv, Tk, D]. Causal is aligned to the end, and is requested as models do: by
    `is_causal` where Tq = Tk, by nothing where Tq = 1, and otherwise (a chunk of a prefill) by an explicit bool mask,
    because `is_causal` is aligned to the beginning. GQA uses `enable_gqa`. A `mask` [1, 1, Tq, Tk] that is added to the
    scores, as engines that pack requests pass one, replaces all that.
    """
    note("torch.scaled_dot_product_attention")
    return _attend(q, k, v, causal and mask is None, scale, mask)


def _attend_by(backend: SDPBackend, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **how: Any) -> torch.Tensor:
    """`attention` by only one of torch's backends; RuntimeError: it can't take the inputs."""
    groups = q.shape[1] // k.shape[1]
    if groups > 1 and backend is SDPBackend.EFFICIENT_ATTENTION:  # it has no GQA: repeated, as transformers does
        k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
    note(f"torch.scaled_dot_product_attention[{backend.name.lower()}]")
    with sdpa_kernel(backend):
        return _attend(q, k, v, how.get("causal", True), how.get("scale"))


attention_flash = partial(_attend_by, SDPBackend.FLASH_ATTENTION)  # on a CPU another kernel than on a GPU
attention_efficient = partial(_attend_by, SDPBackend.EFFICIENT_ATTENTION)
attention_cudnn = partial(_attend_by, SDPBackend.CUDNN_ATTENTION)
attention_math = partial(_attend_by, SDPBackend.MATH)  # two products and a softmax


def _attend(q: Any, k: Any, v: Any, causal: bool, scale: float | None, mask: Any = None) -> torch.Tensor:
    q_len, k_len = q.shape[2], k.shape[2]
    if causal and 1 < q_len != k_len:
        position = torch.arange(q_len, device=q.device) + (k_len - q_len)
        mask = torch.arange(k_len, device=q.device)[None, :] <= position[:, None]
    return F.scaled_dot_product_attention(
        q,
        k,
        v,
        attn_mask=mask,
        is_causal=causal and 1 < q_len == k_len,
        scale=scale,
        enable_gqa=q.shape[1] != k.shape[1],
    )


def index_add(target: torch.Tensor, index: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
    """target [R, C] with source [n, C] added to its rows index [n]; a new tensor: torch.index_add."""
    note("torch.index_add")
    return torch.index_add(target, 0, index, source)


def scatter_add(target: torch.Tensor, index: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
    """target [R] with source [n] added at index [n]; a new tensor: torch.scatter_add."""
    note("torch.scatter_add")
    return torch.scatter_add(target, 0, index, source)


def topk(x: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The k largest of each row of x [..., W]: values and indices [..., k]: torch.topk, which leaves ties open."""
    note("torch.topk")
    values, indices = torch.topk(x, k, dim=-1)
    return values, indices


def _after(forward: Any, name: str) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
    def run(x: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
        note(f"torch.{forward.__name__}+{name}")
        out: torch.Tensor = getattr(torch.ops.aten, name)(gradient, forward(x, -1), -1, x.dtype)
        return out

    return run


softmax_gradient = _after(torch.softmax, "_softmax_backward_data")
log_softmax_gradient = _after(torch.log_softmax, "_log_softmax_backward_data")


def silu_gradient(x: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
    """torch's silu_backward, which needs nothing from the forward."""
    note("torch.silu_backward")
    return torch.ops.aten.silu_backward(gradient, x)


def rms_norm_gradient(x: torch.Tensor, gradient: torch.Tensor, weight: torch.Tensor, eps: float = 1e-6) -> torch.Tensor:
    """F.rms_norm under autograd, which also computes the weight's gradient."""
    return autograd(lambda t, w: rms_norm(t, w, eps), gradient, x, weight)[0]


def attention_gradient(q: torch.Tensor, gradient: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """F.scaled_dot_product_attention under autograd, by the backend that torch picks."""
    return torch.cat(autograd(attention, gradient, q, k, v), 1)
