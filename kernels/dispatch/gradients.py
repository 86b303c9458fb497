"""How the arguments of torch's backward operators map onto batch-invariant kernels, those of the forward.

torch's own formulas compute a gradient from a few operators that no forward has. A row's gradient (of a softmax, a
norm, a pointwise operator) is computed only from that row, by the forward's sums; sums over the batch are added in the
order of the tokens, without atomics. So a step that is run again has the same bits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from nondet.kernels.dispatch.replacements import SHORT, index_add_, root, sum
from nondet.kernels.dispatch.state import Kernels, Leave, require


def _elementwise(name: str) -> Callable[..., torch.Tensor]:
    operator = getattr(torch.ops.aten, name).default

    def replace(kernels: Kernels, gradient: torch.Tensor, x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        from nondet.kernels.pointwise.cpu import vectors_only

        require(gradient, x)
        if gradient.shape != x.shape:
            raise Leave("shapes that do not fit")
        return vectors_only(lambda *pieces: operator(*pieces, *args, **kwargs), gradient, x)

    return replace


silu_backward, gelu_backward = map(_elementwise, ("silu_backward", "gelu_backward"))
sigmoid_backward, tanh_backward = map(_elementwise, ("sigmoid_backward", "tanh_backward"))


def _normalizing(log: bool) -> Callable[..., torch.Tensor]:
    """p (g - sum of g p), or with `log` g - exp(y) (sum of g), in float32 and rounded once; sums as the forward's."""

    def replace(
        kernels: Kernels, gradient: torch.Tensor, output: torch.Tensor, dim: int, dtype: torch.dtype
    ) -> torch.Tensor:
        require(gradient)
        require(output)
        if output.dim() == 0 or not -output.dim() <= dim < output.dim():
            raise Leave("a scalar, or no such axis")
        g, y = (x.movedim(dim, -1).contiguous() for x in (gradient, output))
        if y.is_cuda:
            from nondet.kernels.gradients import cuda

            out = cuda.softmax_gradient(g, y, dtype, log=log)
        else:
            from nondet.kernels.pointwise.cpu import vectors_only

            g, y = g.float(), y.float()
            total = kernels.sum(g if log else g * y)[..., None]
            out = g - vectors_only(torch.exp, y) * total if log else (g - total) * y
        return out.to(dtype).movedim(-1, dim).contiguous()

    return replace


softmax_backward, log_softmax_backward = map(_normalizing, (False, True))


def layer_norm_backward(
    kernels: Kernels,
    gradient: torch.Tensor,
    x: torch.Tensor,
    normalized_shape: Sequence[int],
    mean: torch.Tensor,
    scale: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    wanted: Sequence[bool],
) -> tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]:
    """Of x [..., H] by two means over its own row; of weight and bias [H] by sums over all rows, in their order."""
    require(gradient, x)
    if len(normalized_shape) != 1 or tuple(x.shape[-1:]) != tuple(normalized_shape):
        raise Leave("over more than one axis")
    g = gradient.reshape(-1, x.shape[-1]).float()
    centred = (x.reshape(g.shape).float() - mean.reshape(-1, 1).float()) * scale.reshape(-1, 1).float()
    of_x = of_weight = of_bias = None
    if wanted[0]:
        weighted = g if weight is None else g * weight.float()
        inner = weighted - kernels.mean(weighted)[:, None] - centred * kernels.mean(weighted * centred)[:, None]
        of_x = (inner * scale.reshape(-1, 1).float()).to(x.dtype).view(x.shape)
    if wanted[1] and weight is not None:
        of_weight = sum(kernels, g * centred, [0]).to(weight.dtype)
    if wanted[2] and bias is not None:
        of_bias = sum(kernels, g, [0]).to(bias.dtype)
    return of_x, of_weight, of_bias


def rms_norm_backward(
    kernels: Kernels,
    gradient: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    wanted: Sequence[bool] = (True, True),
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Of x [..., H] by two means over its own row, in float32; of weight [H] by sums over all rows, in their order."""
    rows, above = (t.reshape(-1, x.shape[-1]).contiguous() for t in (x, gradient))
    fused = None
    if x.is_cuda:
        from nondet.kernels.gradients import cuda

        fused = cuda.rms_norm_gradient(above, rows, weight.contiguous(), eps)
    if fused is None:
        wide, weighted = rows.float(), above.float() * weight.float()
        scale = 1.0 / root(kernels.mean(wide * wide) + eps)
        normed = wide * scale[:, None]
        of_x = ((weighted - normed * kernels.mean(weighted * normed)[:, None]) * scale[:, None]).to(x.dtype)
    else:
        of_x, scale = fused
    of_weight = None
    if wanted[1]:
        if x.is_cuda and len(rows) > SHORT:
            of_weight = cuda.sum_over_rows(rows, weight.dtype, above, scale)
        else:
            of_weight = sum(kernels, above.float() * (rows.float() * scale[:, None]), [0]).to(weight.dtype)
    return of_x.view(x.shape), of_weight


def embedding_backward(
    kernels: Kernels, gradient: torch.Tensor, indices: torch.Tensor, rows: int, padding: int, by_frequency: bool
) -> torch.Tensor:
    """[rows, H] of the gradient [..., H]: a row's terms are added in the order of the tokens, in float32."""
    require(gradient)
    if by_frequency:
        raise Leave("scaled by frequency")
    width = gradient.shape[-1]
    out = gradient.new_zeros((rows, width))
    index_add_(kernels, out, 0, indices.reshape(-1), gradient.reshape(-1, width))
    if padding >= 0:
        out[padding] = 0
    return out


def index_put(
    kernels: Kernels,
    target: torch.Tensor,
    indices: Sequence[torch.Tensor | None],
    values: torch.Tensor,
    accumulate: bool = False,
    unsafe: bool = False,
) -> torch.Tensor:
    """values added to the target where indices point, in place; equal indices in the order of the indices."""
    require(target, values)
    given = [i for i, index in enumerate(indices) if index is not None]
    if not given or given != list(range(given[0], given[-1] + 1)):
        raise Leave("indices of axes that are not next to each other")
    places = [index for index in indices if index is not None]
    if any(index.dtype not in (torch.int64, torch.int32) for index in places):
        raise Leave("a mask in the place of indices")
    first, many = given[0], len(given)
    shape = torch.broadcast_tensors(*places)[0].shape  # broadcast_shapes would import sympy
    flat = torch.zeros((), dtype=torch.int64, device=target.device)
    for index, axis in zip(places, given, strict=True):
        size = target.shape[axis]
        flat = flat * size + torch.where(index < 0, index + size, index).long()
    rows = target.movedim(given, list(range(many)))
    rest = rows.shape[many:]
    added = values.expand(*target.shape[:first], *shape, *target.shape[first + many :])
    added = added.movedim(list(range(first, first + len(shape))), list(range(len(shape))))
    count = rows.shape[:many].numel()
    sums = rows.reshape(count, rest.numel())
    index_add_(kernels, sums, 0, flat.expand(shape).reshape(-1), added.reshape(-1, rest.numel()))
    if sums.data_ptr() != target.data_ptr() or not target.is_contiguous():
        rows.copy_(sums.view(rows.shape))
    return target


def nll_loss(
    kernels: Kernels, x: torch.Tensor, target: torch.Tensor, weight: torch.Tensor | None, reduction: int, ignored: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """(loss, sum of weights) of x [N, C]: the targets' elements, weighted, and added up as one row of N."""
    require(x)
    if x.dim() != 2 or target.shape != x.shape[:1]:
        raise Leave("not a matrix of classes")
    kept = target != ignored
    at = target.masked_fill(~kept, 0)[:, None]
    share = kept.float() if weight is None else weight.float()[at[:, 0]] * kept
    losses = torch.where(kept, -x.gather(1, at)[:, 0].float() * share, 0.0)
    if reduction == 0:
        return losses.to(x.dtype), x.new_zeros(())
    total = kernels.sum(share[None])[0]
    loss = kernels.sum(losses[None])[0]
    return (loss / total if reduction == 1 else loss).to(x.dtype), total.to(x.dtype)
