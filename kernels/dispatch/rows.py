"""How the arguments of aten's reductions, norms and pointwise operators map onto batch-invariant kernels."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from nondet.kernels.dispatch.coverage import MOVED, over_batch, padded_in_front
from nondet.kernels.dispatch.kernels import Kernels, Leave, require
from nondet.kernels.dispatch.moe import SHORT, sum_middle
from nondet.kernels.dispatch.state import count

__all__ = [
    "layer_norm",
    "log_softmax",
    "logsumexp",
    "mean",
    "rms_norm",
    "softmax",
    "sum",
]


def _rows(
    x: torch.Tensor, dim: Sequence[int] | int | None, dtype: torch.dtype | None
) -> tuple[torch.Tensor, list[int]]:
    """x in the dtype, and the axes to reduce, ascending."""
    if dtype is not None:
        x = x.to(dtype)
    require(x)
    places, count_of = [dim] if isinstance(dim, int) else list(dim or []), max(x.dim(), 1)
    axes = sorted({d % count_of for d in places})
    if len(axes) < len(places) or any(not -count_of <= d < count_of for d in places):
        raise Leave("no such axis")  # torch's own error
    if not axes or x.dim() == 0:
        raise Leave("over all elements")
    return x, axes


def _last(x: torch.Tensor, axes: list[int]) -> torch.Tensor:
    """x with the reduced axes moved to the end and made one."""
    kept = [d for d in range(x.dim()) if d not in axes]
    if axes != list(range(len(kept), x.dim())):
        x = x.permute(*kept, *axes)
    return x.flatten(len(kept)) if len(axes) > 1 else x


def _with_axes(out: torch.Tensor, x: torch.Tensor, axes: list[int], keepdim: bool) -> torch.Tensor:
    return out.reshape([1 if d in axes else n for d, n in enumerate(x.shape)]) if keepdim else out


def reducing(name: str) -> Callable[..., torch.Tensor]:
    """sum or mean over axes."""
    middle = name == "sum"

    def replace(
        kernels: Kernels, x: torch.Tensor, dim: Any, keepdim: bool = False, *, dtype: torch.dtype | None = None
    ) -> torch.Tensor:
        x, axes = _rows(x, dim, dtype)
        _note_over_batch(name, x, axes)
        by_place = len(axes) == 1 and axes[0] < x.dim() - 1 and not (middle and x.is_cuda and x.shape[axes[0]] <= SHORT)
        if by_place and padded_in_front(x, axes[0]):  # one by one from the first place, zeros in front are nothing
            _note(name, x, MOVED)
        out = sum_middle(x, axes) if middle else None
        if out is None and not x.is_cuda and len(axes) == 1 and axes[0] < x.dim() - 1:
            from nondet.kernels.rows.cpu import sum_over_rows

            out = sum_over_rows(x, axes[0])
            out = out if middle else out / x.shape[axes[0]]
            out = out.to(x.dtype)
        if out is None:
            out = getattr(kernels, name)(_last(x, axes))
        return _with_axes(out, x, axes, keepdim)

    return replace


def logsumexp(kernels: Kernels, x: torch.Tensor, dim: Any, keepdim: bool = False) -> torch.Tensor:
    """By the device's own, which the registry calls invariant; a row of nothing but -inf gives -inf, as torch's."""
    x, axes = _rows(x, dim, None)
    _note_over_batch("logsumexp", x, axes)
    if x.is_cuda:
        from nondet.kernels.rows.cuda_softmax import logsumexp as kernel
    else:
        from nondet.kernels.rows.cpu import logsumexp as kernel
    return _with_axes(kernel(_last(x, axes)), x, axes, keepdim)


def _note(name: str, x: torch.Tensor, why: str) -> None:
    count("at_risk", f"{name} {str(x.dtype).removeprefix('torch.')}: {why}")


def _note_over_batch(name: str, x: torch.Tensor, axes: Sequence[int]) -> None:
    """Count a reduction that requests may enter together; the kernel's own invariance is of no help to them."""
    if why := over_batch(x, axes):
        _note(name, x, why)


def _note_hidden(name: str, x: torch.Tensor) -> None:
    """Count a softmax over attention scores some of which are hidden: padding moves the sums' order along the row.

    Attention that is written out in a model (mpt, bloom, gptj, codegen, gpt_neo, xglm, openai-gpt, ...) hides scores by
    a great negative number and takes the softmax over all keys, those of the padding too. Each row is computed by
    itself, and yet its bits depend on where its keys lie, and on how many are hidden. Hidden is what lies so far below
    another score that its exponential is 0: models subtract as little as 1e4. On a GPU nobody looks, which would wait
    for it: there every softmax of three axes or more is counted.
    """
    if x.dim() < 2:
        return
    if (x.dim() > 2) if x.is_cuda else not _within(x):
        _note(name, x, "over scores of which some are hidden")


_SPREAD = 80.0  # exp(-80) is a normal float32, of which no bit is lost
_HIDDEN = -1e30


def _within(x: torch.Tensor) -> bool:
    """Are all numbers so close together that none vanishes? Of a matrix (logits): is none cut off by a mask?

    NaN and infinities are not within anything.
    """
    if not x.numel():
        return True
    if x.dim() == 2:
        plain = x.dtype == torch.float32 and x.is_contiguous()
        lowest = float(np.minimum.reduce(x.detach().numpy(), axis=None) if plain else x.amin())
        return lowest > (-3e4 if x.dtype == torch.float16 else _HIDDEN)
    low, high = torch.aminmax(x)
    return bool(high.float() - low.float() <= _SPREAD)


def normalizing(name: str) -> Callable[..., torch.Tensor]:
    """softmax or log_softmax over an axis."""

    def replace(kernels: Kernels, x: torch.Tensor, dim: int, half_to_float: bool) -> torch.Tensor:
        require(x)
        _note_hidden(name, x)
        if x.dim() == 0 or not -x.dim() <= dim < x.dim():
            raise Leave("a scalar, or no such axis")
        _note_over_batch(name, x, (dim,))
        x = x.float() if half_to_float else x
        kernel: Callable[[torch.Tensor], torch.Tensor] = getattr(kernels, name)
        if dim % x.dim() == x.dim() - 1:
            return kernel(x)
        return kernel(x.movedim(dim, -1)).movedim(-1, dim).contiguous()

    return replace


def rms_norm(
    kernels: Kernels,
    x: torch.Tensor,
    normalized_shape: Sequence[int],
    weight: torch.Tensor | None = None,
    eps: float | None = None,
) -> torch.Tensor:
    """Over the last axis, rounded once."""
    require(x)
    if len(normalized_shape) != 1 or eps is None or weight is None or weight.dtype != x.dtype:
        raise Leave("not over one axis with a weight and an eps")
    if not tuple(x.shape[-1:]) == tuple(weight.shape) == tuple(normalized_shape):
        raise Leave("shapes that do not fit")  # torch's own error
    return kernels.rms_norm(x, weight, eps)


def layer_norm(
    kernels: Kernels,
    x: torch.Tensor,
    normalized_shape: Sequence[int],
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    eps: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Two means in float32, then elementwise; also gives mean and 1 / deviation, as torch's own does."""
    require(x)
    if len(normalized_shape) != 1:
        raise Leave("over more than one axis")
    width = tuple(normalized_shape)
    if tuple(x.shape[-1:]) != width or any(tuple(p.shape) != width for p in (weight, bias) if p is not None):
        raise Leave("shapes that do not fit")  # torch's own error
    wide = x.float()
    mean = kernels.mean(wide)[..., None]
    centred = wide - mean
    scale = 1.0 / _root(kernels.mean(centred * centred)[..., None] + eps)
    out = centred * scale
    if weight is not None:
        out = out * weight.float()
    if bias is not None:
        out = out + bias.float()
    saved = mean.dtype  # what torch's own backward takes: on a CPU the parameters' dtype, or else the input's
    if not x.is_cuda:
        saved = x.dtype if weight is None else weight.dtype
    return out.to(x.dtype).contiguous(), mean.to(saved), scale.to(saved)  # contiguous, whatever x is, as torch's own


def _root(x: torch.Tensor) -> torch.Tensor:
    """Correctly rounded, as a GPU's is; torch's on a CPU may be MKL's."""
    if x.is_cuda:
        return torch.sqrt(x)
    from nondet.kernels.rows.cpu import square_roots

    return square_roots(x)


mean, sum = reducing("mean"), reducing("sum")
softmax, log_softmax = normalizing("softmax"), normalizing("log_softmax")
