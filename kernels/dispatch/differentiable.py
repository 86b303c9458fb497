"""What a trainer needs: attention and norms with the bits of a forward without gradients, and a gradient.

torch composes both of other operators where a gradient is needed, and so gives them different bits from a sampler's.
Under `batch_invariant(training=True)` the sampler's own kernel runs instead, by the same choice, and a backward of ours
without atomics (`nondet.kernels.attention_backward`).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from nondet.core.launch import note
from nondet.errors import UserError
from nondet.kernels.dispatch.state import Kernels, Leave, count, current, guarded, kernels_for
from nondet.kernels.reference import autograd


def has_gradient(name: str, x: torch.Tensor, *others: Any) -> bool:
    """Whether a composed operator has a gradient here: attention and rms_norm, and linear where torch adds a bias after
    the product's rounding, because it can't see x as a matrix.
    """
    bias = others[1] if len(others) > 1 else None
    return name != "linear" or (bias is not None and x.dim() != 2 and not (x.dim() > 2 and x.is_contiguous()))


def needs_gradient(*tensors: Any) -> bool:
    """Whether a gradient of one of them is needed."""
    return torch.is_grad_enabled() and any(isinstance(x, torch.Tensor) and x.requires_grad for x in tensors)


class Differentiable:
    """A device's kernels, those of attention and rms_norm with a gradient; the forward's bits are the kernels'."""

    def __init__(self, kernels: Kernels) -> None:
        self._kernels = kernels

    def __getattr__(self, name: str) -> Any:
        return getattr(self._kernels, name)

    def attention(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, scale: float | None = None, **more: Any
    ) -> torch.Tensor:
        """The kernel for a batch [B, H, T, D], or for packed requests from a cache that has dropped no key."""
        if "key_index" in more:
            raise Leave("keys in a paged cache, which has no gradient")
        out: torch.Tensor = _Attention.apply(q, k, v, q.shape[-1] ** -0.5 if scale is None else scale, more)
        return out

    attention_varlen = attention

    def linear(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        """The kernel, with the bias added before the one rounding."""
        out: torch.Tensor = _Linear.apply(x, weight, bias)
        return out

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """The kernel, over the last axis."""
        out: torch.Tensor = _RMSNorm.apply(x, weight, eps)
        return out


def with_gradient(kernels: Kernels, *tensors: Any) -> Kernels | Differentiable | None:
    """The kernels for a call on the tensors; None where a gradient is needed outside a block for training."""
    if not needs_gradient(*tensors):
        return kernels
    return Differentiable(kernels) if current().training else None


class _NoSecond(torch.autograd.Function):
    """The gradient, unchanged; a derivative of it is refused."""

    @staticmethod
    def forward(ctx: Any, gradient: torch.Tensor, *of: torch.Tensor) -> torch.Tensor:
        return gradient.detach()

    @staticmethod
    def backward(ctx: Any, *unused: torch.Tensor) -> Any:
        raise UserError(
            "a second derivative through a kernel of nondet, which has the first alone",
            "Compute what needs it (a gradient penalty, a Hessian) outside of the block.",
        )


def once(backward: Callable[..., Any]) -> Callable[..., Any]:
    """backward(ctx, gradient, *saved tensors) as a Function's, without a second derivative.

    torch's `once_differentiable` refuses that only in `Tensor.backward`: torch.autograd.grad with given inputs never
    reaches its error, and the Function's contribution would be missing without a warning.
    """

    def run(ctx: Any, gradient: torch.Tensor) -> Any:
        saved = ctx.saved_tensors  # once: a checkpoint gives them only once
        with torch.no_grad():
            found = backward(ctx, gradient, *saved)
        if torch.is_grad_enabled():  # create_graph=True
            found = tuple(x if x is None else _NoSecond.apply(x, gradient, *saved) for x in found)
        return found

    return run


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, more: dict[str, Any]) -> Any:
        kernels = kernels_for(q.device.type)
        given = {name: value for name, value in more.items() if value is not None}
        out = (kernels.attention if q.dim() == 4 else kernels.attention_varlen)(q, k, v, scale=scale, **given)
        ctx.save_for_backward(q, k, v, out)
        ctx.scale, ctx.more = scale, more
        return out

    @staticmethod
    @once
    def backward(
        ctx: Any, gradient: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor
    ) -> Any:
        more = {name: value for name, value in ctx.more.items() if name != "positions"}  # the keys' indices suffice
        whole = q.dim() == 4
        if whole:
            batch, queries = q.shape[0], q.shape[2]
            keys = k.shape[2]
            steps = torch.arange(batch + 1, dtype=torch.int32, device=q.device)
            more |= {"cu_seqlens_q": steps * queries, "cu_seqlens_k": steps * keys}
            more |= {"max_seqlen_q": queries, "max_seqlen_k": keys}
        tensors = (q, k, v, out, gradient)
        packed = [x.transpose(1, 2).reshape(-1, x.shape[1], x.shape[3]) if whole else x for x in tensors]
        of = guarded(kernels_for(q.device.type).attention_backward)(*packed, scale=ctx.scale, **more)
        count("replaced", "attention_backward")
        if whole:
            of = [x.view(batch, -1, x.shape[1], x.shape[2]).transpose(1, 2).contiguous() for x in of]
        return (*of, None, None)


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, eps: float) -> Any:
        ctx.save_for_backward(x, weight)
        ctx.eps = eps
        return kernels_for(x.device.type).rms_norm(x, weight, eps)

    @staticmethod
    @once
    def backward(ctx: Any, gradient: torch.Tensor, x: torch.Tensor, weight: torch.Tensor) -> Any:
        from nondet.kernels.dispatch.gradients import rms_norm_backward

        of = guarded(rms_norm_backward)(kernels_for(x.device.type), gradient, x, weight, ctx.eps, ctx.needs_input_grad)
        count("replaced", "rms_norm_backward")
        return (*of, None)


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> Any:
        ctx.save_for_backward(x, weight)
        return kernels_for(x.device.type).linear(x, weight, bias)

    @staticmethod
    @once
    def backward(ctx: Any, gradient: torch.Tensor, x: torch.Tensor, weight: torch.Tensor) -> Any:
        rows = gradient.reshape(-1, weight.shape[0])
        of_weight = torch.mm(rows.t(), x.reshape(-1, weight.shape[1])) if ctx.needs_input_grad[1] else None
        return torch.mm(rows, weight).view(x.shape), of_weight, rows.sum(0) if ctx.needs_input_grad[2] else None


# Gradients as operators, for `nondet certify` and `nondet bench`: what autograd calls under the block. A row's sums are
# in the forward's order, the rest is elementwise, and nothing is computed from another row or another request.


def _of_softmax(name: str, x: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
    """p (g - sum of g p), or g - exp(y) (sum of g), of x [M, V]; p and y are the forward's, as autograd keeps them."""
    from nondet.kernels.dispatch import gradients

    kernels = kernels_for(x.device.type)
    output = getattr(kernels, name)(x)
    result: torch.Tensor = guarded(getattr(gradients, f"{name}_backward"))(kernels, gradient, output, -1, x.dtype)
    return result


softmax_gradient, log_softmax_gradient = partial(_of_softmax, "softmax"), partial(_of_softmax, "log_softmax")


def silu_gradient(x: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
    """torch's silu_backward of x [M, W], on a CPU only by the body of its vector loop."""
    from nondet.kernels.dispatch.gradients import silu_backward

    note("silu_backward[vectors]")
    return guarded(silu_backward)(kernels_for(x.device.type), gradient, x)


def rms_norm_gradient(x: torch.Tensor, gradient: torch.Tensor, weight: torch.Tensor, eps: float = 1e-6) -> torch.Tensor:
    """By two means over its own row of x [M, H]; the weight's is not returned, because it depends on the batch."""
    kernels = Differentiable(kernels_for(x.device.type))
    return autograd(lambda t, w: kernels.rms_norm(t, w, eps), gradient, x, weight)[0]


def attention_gradient(q: torch.Tensor, gradient: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """As the reference's [M, Hq + 2 Hkv, T, D]: the sampler's own kernel, and a backward without atomics."""
    return torch.cat(autograd(Differentiable(kernels_for(q.device.type)).attention, gradient, q, k, v), 1)
