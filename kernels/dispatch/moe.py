"""Which aten operators `batch_invariant()` replaces for mixtures of experts.

transformers computes experts in one of three ways, and generation changes from one to another between prefill and
decoding. What each is made of, besides the softmax, products and sums that other families replace:

- "grouped_mm": tokens sorted by expert, aten::_grouped_mm, or products into slices of one tensor (mm with out=), and a
  sum over each token's experts in the order of their rank.
- "batched_mm": a weight gathered for each token and expert, and one batched product with vectors. transformers'
  own is told apart from other batched products (`nondet.kernels.dispatch.transformers.experts`), and computes a vector
  as a row of the grouped product would be, so that the two ways agree bit for bit. (Not where torch.compile traced it.)
- "eager": expert by expert, added onto the tokens by index_add_, in the order of the experts' numbers: an order that
  the token's own choice of experts decides. Rounded after each addition, so its bits are not those of the other two.

All of them choose experts by topk, whose ties torch leaves open.
"""

from __future__ import annotations

import torch

from nondet.kernels.dispatch.kernels import DTYPES, Kernels, Leave, require
from nondet.kernels.experts import topk as ordered_topk

__all__ = ["SHORT", "grouped_mm", "index_add", "index_add_", "scatter_add", "sum_middle", "topk"]

SHORT = 64  # additions that one program makes one after the other


def _device_topk(x: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    if x.is_cuda:
        from nondet.kernels.experts import cuda_routing as triton_routing

        return triton_routing.topk(x, k)
    return ordered_topk.topk(x, k)


def _device_index_add(target: torch.Tensor, index: torch.Tensor, source: torch.Tensor, alpha: float) -> None:
    if target.is_cuda:
        from nondet.kernels.experts import cuda_routing as triton_routing

        triton_routing.index_add_(target, index, source, alpha)
        return
    from nondet.kernels.experts import cpu as cpu_grouped_matmul

    cpu_grouped_matmul.index_add_(target, index, source, alpha)


def grouped_mm(
    kernels: Kernels,
    x: torch.Tensor,
    weight: torch.Tensor,
    offs: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """x [R, K], weight [E, K, N], offs [E] -> [R, N]; without offs a batched product."""
    require(x, weight)
    if bias is not None or (out_dtype is not None and out_dtype != x.dtype):
        raise Leave("a bias, or another dtype for the result")
    if x.dim() == 3 and weight.dim() == 3 and offs is None:
        return kernels.bmm(x, weight)
    if x.dim() != 2 or weight.dim() != 3 or offs is None:
        raise Leave("groups along K or N, as gradients have them")
    if x.is_cuda:
        from nondet.kernels.experts import cuda as grouped_matmul

        return grouped_matmul.grouped_matmul(x, weight, offs)
    from nondet.kernels.experts import cpu as cpu_grouped_matmul

    return cpu_grouped_matmul.grouped_matmul(x, weight, offs)


def topk(
    kernels: Kernels,
    x: torch.Tensor,
    k: int,
    dim: int = -1,
    largest: bool = True,
    sorted: bool = True,  # the result always is
) -> tuple[torch.Tensor, torch.Tensor]:
    """Values and indices along an axis, ties by rising index; the largest first."""
    require(x)
    if x.dim() == 0 or not 0 <= k <= x.shape[dim]:
        raise Leave("a scalar, or more than there are")  # torch's own errors
    if not largest:
        values, indices = torch.sort(x, dim=dim, stable=True)
        return values.narrow(dim, 0, k).contiguous(), indices.narrow(dim, 0, k).contiguous()
    if dim % x.dim() == x.dim() - 1:
        return _device_topk(x, k)
    values, indices = _device_topk(x.movedim(dim, -1), k)
    return values.movedim(-1, dim).contiguous(), indices.movedim(-1, dim).contiguous()


def index_add_(
    kernels: Kernels,
    target: torch.Tensor,
    dim: int,
    index: torch.Tensor,
    source: torch.Tensor,
    *,
    alpha: float = 1,
) -> torch.Tensor:
    """alpha times source added to the target's slices at index, in place and in the order of index."""
    require(target, source)
    if target.dim() == 0 or source.dim() != target.dim():
        raise Leave("a scalar")
    rows, added = target.movedim(dim, 0), source.movedim(dim, 0)
    if added.shape != (index.numel(), *rows.shape[1:]):
        raise Leave("shapes that do not fit")  # torch's own errors
    width = rows.shape[1:].numel()
    flat = rows.reshape(rows.shape[0], width)
    _device_index_add(flat, index.reshape(-1), added.reshape(index.numel(), width), alpha)
    if flat.data_ptr() != target.data_ptr():  # no view of it could be had
        rows.copy_(flat.view(rows.shape))
    return target


def index_add(
    kernels: Kernels,
    target: torch.Tensor,
    dim: int,
    index: torch.Tensor,
    source: torch.Tensor,
    *,
    alpha: float = 1,
) -> torch.Tensor:
    """`index_add_` into a copy."""
    return index_add_(kernels, target.clone(memory_format=torch.contiguous_format), dim, index, source, alpha=alpha)


def scatter_add(
    kernels: Kernels, target: torch.Tensor, dim: int, index: torch.Tensor, source: torch.Tensor
) -> torch.Tensor:
    """source added to the target along an axis at index: each element's sum in the order of its places along the axis.

    Every element of the target is a row of the one-dimensional operator that the registry has.
    """
    if target.dtype != source.dtype or target.dtype not in (*DTYPES, torch.float64):
        raise Leave
    if target.is_cuda and torch.cuda.is_current_stream_capturing():
        raise Leave("its indices can't be looked at while a CUDA graph is captured")
    axes = target.dim()
    if axes == 0 or index.dim() != axes or source.dim() != axes or not -axes <= dim < axes:
        raise Leave("a scalar, or shapes that do not fit")
    dim %= axes
    fits = all(
        n <= s and (d == dim or n <= t)
        for d, (n, s, t) in enumerate(zip(index.shape, source.shape, target.shape, strict=True))
    )
    if index.dtype not in (torch.int64, torch.int32) or not fits:
        raise Leave("shapes that do not fit")  # torch's own errors
    if int(index.min()) < 0 or int(index.max()) >= target.shape[dim]:
        raise Leave("an index out of range")  # torch's own error
    places = torch.zeros((), dtype=torch.int64, device=target.device)
    for d, size in enumerate(target.shape):
        at = index.long() if d == dim else torch.arange(index.shape[d], device=target.device)
        places = places * size + (at if d == dim else at.view(-1, *(1,) * (axes - 1 - d)))
    values = source[tuple(slice(n) for n in index.shape)]
    return kernels.scatter_add(target.reshape(-1), places.reshape(-1), values.reshape(-1)).view(target.shape)


def sum_middle(x: torch.Tensor, axes: list[int]) -> torch.Tensor | None:
    """The sum over one short axis that is not the last, without moving it; None where there is no kernel for that.

    Which axis is summed, and its length, decide: not how many rows there are beside it.
    """
    if len(axes) != 1 or axes[0] == x.dim() - 1 or not x.is_cuda or x.shape[axes[0]] > SHORT:
        return None
    from nondet.kernels.experts import cuda_routing as triton_routing

    (axis,) = axes
    before, after = x.shape[:axis].numel(), x.shape[axis + 1 :].numel()
    out = triton_routing.sum_middle(x.reshape(before, x.shape[axis], after))
    return out.view(*x.shape[:axis], *x.shape[axis + 1 :])
