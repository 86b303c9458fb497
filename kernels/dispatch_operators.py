"""Which aten operators `batch_invariant()` replaces, family by family, and how each one's arguments map onto a kernel.

A replacement takes the device's `Kernels` and the operator's own arguments. It computes, or raises `Leave` with the
reason why it does not: then the original kernel runs, and the coverage says so.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from nondet.kernels.attention_masks import attend_packed, packing_of

__all__ = ["AT_RISK", "COMPOSED", "FAMILIES", "OPERATORS", "Kernels", "Leave", "kernels_for"]

FAMILIES: dict[str, str] = {
    "matmul": "matrix products: linear, matmul, mm, addmm, bmm, mv",
    "attention": "scaled_dot_product_attention, and the paged attention of transformers' continuous batching",
    "norm": "mean over axes, which transformers' RMSNorm is made of; rms_norm and layer_norm",
    "softmax": "softmax and log_softmax",
    "reduction": "sum over axes",
    "pointwise": "on a CPU, operators like silu whose last elements take another formula; nothing on a GPU",
}

DTYPES = (torch.float16, torch.bfloat16, torch.float32)


class Leave(Exception):  # noqa: N818 - a decision, not an error
    """This call is left to the original kernel; the message is the reason, "" where the dtype says it all."""


@dataclass(frozen=True)
class Kernels:
    """The batch-invariant kernels of one device type; signatures as in `nondet.kernels.reference`."""

    mm: Callable[..., torch.Tensor]
    bmm: Callable[..., torch.Tensor]
    mean: Callable[..., torch.Tensor]
    sum: Callable[..., torch.Tensor]
    softmax: Callable[..., torch.Tensor]
    log_softmax: Callable[..., torch.Tensor]
    rms_norm: Callable[..., torch.Tensor]
    attention: Callable[..., torch.Tensor]
    attention_varlen: Callable[..., torch.Tensor]
    max_head_dim: int


@functools.cache
def kernels_for(device: str) -> Kernels:
    """The kernels of "cpu" or "cuda". Only the modules of that device are imported."""
    if device == "cpu":
        from nondet.kernels import cpu_attention, cpu_matmul, cpu_rows

        return Kernels(
            cpu_matmul.mm,
            cpu_matmul.bmm,
            cpu_rows.mean,
            cpu_rows.sum,
            cpu_rows.softmax,
            cpu_rows.log_softmax,
            cpu_rows.rms_norm,
            cpu_attention.attention,
            cpu_attention.attention_varlen,
            sys.maxsize,
        )
    from nondet.kernels import triton_attention, triton_matmul, triton_rows

    def mm(a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        return triton_matmul.matmul(a, b) if bias is None else triton_matmul.linear(a, b.t(), bias)

    return Kernels(
        mm,
        triton_matmul.matmul,
        triton_rows.mean,
        triton_rows.sum,
        triton_rows.softmax,
        triton_rows.log_softmax,
        triton_rows.rms_norm,
        triton_attention.attention,
        triton_attention.attention_varlen,
        256,
    )


def _require(*tensors: torch.Tensor) -> None:
    if any(x.dtype not in DTYPES or x.dtype != tensors[0].dtype for x in tensors):
        raise Leave


def _mm(kernels: Kernels, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    _require(a, b)
    return kernels.mm(a, b)


def _addmm(
    kernels: Kernels, bias: torch.Tensor, a: torch.Tensor, b: torch.Tensor, *, beta: float = 1, alpha: float = 1
) -> torch.Tensor:
    _require(a, b, bias)
    if beta != 1 or alpha != 1 or bias.shape != (b.shape[1],):
        raise Leave("not a product plus a bias")
    return kernels.mm(a, b, bias)


def _bmm(kernels: Kernels, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    _require(a, b)
    return kernels.bmm(a, b)


def _mv(kernels: Kernels, a: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    _require(a, x)
    return kernels.mm(a, x[:, None])[:, 0]


def _attention(
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
    _require(q, k, v)
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
        packings = None if is_causal else packing_of(attn_mask, q.shape[0], q_len)
        if packings is None:
            raise Leave("a mask of holes, a window or a bias")
        return attend_packed(kernels.attention_varlen, q, k, v, packings, scale)
    if is_causal:
        if q_len > k_len:
            raise Leave("more queries than keys")
        k, v = k[:, :, :q_len], v[:, :, :q_len]
    return kernels.attention(q, k, v, causal=is_causal or q_len == 1, scale=scale)


def _rows(
    x: torch.Tensor, dim: Sequence[int] | int | None, dtype: torch.dtype | None
) -> tuple[torch.Tensor, list[int]]:
    """x with the reduced axes moved to the end and made one, and which they were."""
    if dtype is not None:
        x = x.to(dtype)
    _require(x)
    axes = sorted({d % max(x.dim(), 1) for d in ([dim] if isinstance(dim, int) else dim or [])})
    if not axes or x.dim() == 0:
        raise Leave("over all elements")
    kept = [d for d in range(x.dim()) if d not in axes]
    if axes != list(range(len(kept), x.dim())):
        x = x.permute(*kept, *axes)
    return x.flatten(len(kept)), axes


def _reducing(name: str) -> Callable[..., torch.Tensor]:
    def replace(
        kernels: Kernels, x: torch.Tensor, dim: Any, keepdim: bool = False, *, dtype: torch.dtype | None = None
    ) -> torch.Tensor:
        rows, axes = _rows(x, dim, dtype)
        out: torch.Tensor = getattr(kernels, name)(rows)
        return out.reshape([1 if d in axes else n for d, n in enumerate(x.shape)]) if keepdim else out

    return replace


def _normalizing(name: str) -> Callable[..., torch.Tensor]:
    def replace(kernels: Kernels, x: torch.Tensor, dim: int, half_to_float: bool) -> torch.Tensor:
        _require(x)
        if x.dim() == 0:
            raise Leave("a scalar")
        x = x.float() if half_to_float else x
        kernel: Callable[[torch.Tensor], torch.Tensor] = getattr(kernels, name)
        if dim % x.dim() == x.dim() - 1:
            return kernel(x)
        return kernel(x.movedim(dim, -1)).movedim(-1, dim).contiguous()

    return replace


def _rms_norm(
    kernels: Kernels,
    x: torch.Tensor,
    normalized_shape: Sequence[int],
    weight: torch.Tensor | None = None,
    eps: float | None = None,
) -> torch.Tensor:
    _require(x)
    if len(normalized_shape) != 1 or eps is None or weight is None or weight.dtype != x.dtype:
        raise Leave("not over one axis with a weight and an eps")
    return kernels.rms_norm(x, weight, eps)


def _layer_norm(
    kernels: Kernels,
    x: torch.Tensor,
    normalized_shape: Sequence[int],
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    eps: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Two means in float32, then elementwise; also gives mean and 1 / deviation, as torch's own does."""
    _require(x)
    if len(normalized_shape) != 1:
        raise Leave("over more than one axis")
    wide = x.float()
    mean = kernels.mean(wide)[..., None]
    centred = wide - mean
    scale = 1.0 / torch.sqrt(kernels.mean(centred * centred)[..., None] + eps)
    out = centred * scale
    if weight is not None:
        out = out * weight.float()
    if bias is not None:
        out = out + bias.float()
    return out.to(x.dtype), mean, scale


def _elementwise(name: str) -> Callable[..., torch.Tensor]:
    operator = getattr(torch.ops.aten, name)

    def replace(kernels: Kernels, x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        from nondet.kernels.cpu_pointwise import vectors_only

        if not x.dtype.is_floating_point:
            raise Leave
        return vectors_only(lambda piece: operator(piece, *args, **kwargs), x)

    return replace


def _rsqrt(kernels: Kernels, x: torch.Tensor) -> torch.Tensor:
    """Two operations that IEEE 754 rounds correctly, so that no formula is left to choose; in float32, rounded last."""
    _require(x)
    return (1.0 / torch.sqrt(x.float())).to(x.dtype)


# family -> operator -> replacement
OPERATORS: dict[str, dict[str, Callable[..., Any]]] = {
    "matmul": {"mm": _mm, "addmm": _addmm, "bmm": _bmm, "mv": _mv},
    "attention": {"scaled_dot_product_attention": _attention},
    "norm": {"mean.dim": _reducing("mean"), "rms_norm": _rms_norm, "native_layer_norm": _layer_norm},
    "softmax": {"_softmax": _normalizing("softmax"), "_log_softmax": _normalizing("log_softmax")},
    "reduction": {"sum.dim_IntList": _reducing("sum")},
    # those of torch 2.11 and 2.13 that were seen to differ between vector body and scalar rest, with AVX2 and AVX-512
    "pointwise": {
        "rsqrt": _rsqrt,
        **{name: _elementwise(name) for name in ("silu", "sigmoid", "gelu", "mish", "softplus", "elu", "exp2")},
    },
}

# Operators that torch composes of others: a replacement of the whole has no gradient, so it is for inference alone.
COMPOSED = frozenset({"scaled_dot_product_attention", "rms_norm"})

# Operators that reduce over an axis or add in no fixed order, and have no invariant kernel here. They run as they are,
# and the coverage counts them. Not seen at all: the out= forms of these and of the operators above, and kernels outside
# of aten (FlashAttention's own library, custom operators).
AT_RISK: tuple[str, ...] = (
    "addbmm",
    "addmv",
    "baddbmm",
    "convolution",
    "cumprod",
    "cumsum",
    "dot",
    "index_add",
    "index_add_",
    "linalg_vector_norm",
    "logcumsumexp",
    "logsumexp",
    "native_batch_norm",
    "native_group_norm",
    "prod.dim_int",
    "scatter_add",
    "scatter_add_",
    "scatter_reduce.two",
    "std.correction",
    "var.correction",
    "var_mean.correction",
)
