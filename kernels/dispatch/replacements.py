"""How the arguments of aten's operators map onto batch-invariant kernels."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch

from nondet.kernels.all_reduce.operator import ALL_REDUCES
from nondet.kernels.attention.masks import attend_packed, packing_of
from nondet.kernels.dispatch.state import (
    DTYPES,
    MOVED,
    Kernels,
    Leave,
    count,
    current,
    floating,
    inside,
    label,
    operator_of,
    over_batch,
    padded_in_front,
    require,
)
from nondet.kernels.pointwise.operator import NAMES

# Products and attention. What torch adds in the same rounding (anything but a bias of one value per column) is added
# here after the product's rounding, elementwise: a result may differ from stock by one rounding.

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
    if inside.weights_first and b.shape[2] == 1 and not a.is_cuda:
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
        raise Leave(_MISFIT)  # torch's own error
    return kernels.mm(a[None], b[:, None])[0, 0]


def linear(kernels: Kernels, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """x [..., K], weight [N, K], bias [N]: all of it at once, faster than torch's composition."""
    if bias is None:
        require(x, weight)
    else:
        require(x, weight, bias)
    if weight.dim() != 2 or x.dim() == 0 or (bias is not None and bias.shape != weight.shape[:1]):
        raise Leave("shapes that no layer has")
    if x.shape[-1] != weight.shape[1]:
        raise Leave(_MISFIT)  # torch's own error
    return kernels.linear(x, weight, bias)


def scaled_mm(
    kernels: Kernels,
    a: torch.Tensor,
    b: torch.Tensor,
    scale_a: torch.Tensor,
    scale_b: torch.Tensor,
    bias: torch.Tensor | None = None,
    scale_result: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    use_fast_accum: bool = False,  # the class has an accumulation of its own
) -> torch.Tensor:
    """float8 a [M, K] x b [K, N] with float32 scales -> [M, N] of out_dtype."""
    if scale_result is not None or out_dtype not in DTYPES:
        raise Leave("a result in FP8")
    if bias is not None and (bias.dim() != 1 or bias.shape[0] != b.shape[-1]):
        raise Leave(_MISFIT)  # torch's own error
    try:
        return kernels.scaled_matmul(a, b, scale_a, scale_b, out_dtype, bias)
    except ValueError:
        raise Leave("scales of another form") from None


_BY_TENSOR, _BY_ROW, _BY_1X128, _BY_128X128 = 0, 1, 4, 5  # of torch.nn.functional.ScalingType


def scaled_mm_v2(
    kernels: Kernels,
    a: torch.Tensor,
    b: torch.Tensor,
    scale_a: list[torch.Tensor],
    recipe_a: list[int],
    swizzle_a: list[int],
    scale_b: list[torch.Tensor],
    recipe_b: list[int],
    swizzle_b: list[int],
    bias: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    contraction_dim: Sequence[int] = (),
    use_fast_accum: bool = False,  # as above
) -> torch.Tensor:
    """`torch.nn.functional.scaled_mm`: as `scaled_mm`, scales by tensor, row, or 1x128 of a in blocks."""
    recipes = [*recipe_a, *recipe_b]
    if any([*swizzle_a, *swizzle_b]) or contraction_dim:
        raise Leave("scales swizzled, or contracted otherwise")
    if recipes == [_BY_1X128, _BY_128X128]:  # b's may be padded to a multiple of four, for the library
        left, right = scale_a[0], scale_b[0][: -(-a.shape[-1] // 128)]
    elif recipes == [_BY_1X128] * 2:  # b's are [N, K / 128]
        left, right = scale_a[0], scale_b[0].mT
    elif recipes[:1] == [_BY_128X128]:
        raise Leave("one scale for 128 rows of a, which may be other requests'")
    elif recipes in ([_BY_TENSOR] * 2, [_BY_ROW] * 2):
        left, right = scale_a[0].reshape(-1, 1), scale_b[0].reshape(1, -1)
    else:
        raise Leave("scales in other blocks")
    return scaled_mm(kernels, a, b, left, right, bias, None, out_dtype)


def scaled_grouped_mm(
    kernels: Kernels,
    x: torch.Tensor,
    weight: torch.Tensor,
    scale_x: torch.Tensor,
    scale_weight: torch.Tensor,
    offs: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    scale_result: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    use_fast_accum: bool = False,  # as above
) -> torch.Tensor:
    """float8 x [R, K], weight [G, K, N] with scales [R] and [G, N], offs [G] -> [R, N] of out_dtype, or bfloat16."""
    out_dtype = out_dtype or torch.bfloat16
    if bias is not None or scale_result is not None or out_dtype not in DTYPES:
        raise Leave("a bias, or a result in FP8")
    if x.dim() != 2 or weight.dim() != 3 or offs is None:
        raise Leave("groups along K or N, as gradients have them")
    if x.is_cuda and torch.cuda.is_current_stream_capturing():
        raise Leave("the host reads where an expert's rows end, which a CUDA graph can't")
    try:
        return kernels.scaled_grouped_matmul(x, weight, scale_x, scale_weight, offs, out_dtype)
    except ValueError:
        raise Leave("scales of another form") from None


def scaled_grouped_mm_v2(
    kernels: Kernels,
    x: torch.Tensor,
    weight: torch.Tensor,
    scale_x: list[torch.Tensor],
    recipe_x: list[int],
    swizzle_x: list[int],
    scale_weight: list[torch.Tensor],
    recipe_weight: list[int],
    swizzle_weight: list[int],
    offs: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    contraction_dim: Sequence[int] = (),
    use_fast_accum: bool = False,  # as above
) -> torch.Tensor:
    """`torch.nn.functional.scaled_grouped_mm`: as `scaled_grouped_mm`, a scale for each row."""
    if [*recipe_x, *recipe_weight] != [_BY_ROW] * 2 or any([*swizzle_x, *swizzle_weight]) or contraction_dim:
        raise Leave("scales not of rows, swizzled, or contracted otherwise")
    return scaled_grouped_mm(kernels, x, weight, scale_x[0], scale_weight[0], offs, bias, None, out_dtype)


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
    """As torch defines it: `is_causal` is aligned to the first key, and a mask gives everything else."""
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
        broadcast = is_causal or attn_mask.shape[-1] != k_len  # one column for all keys
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
    if beta == 0:  # torch guarantees that NaN in the input is ignored
        return product
    out = product + (bias if beta == 1 else bias * beta)
    if out.shape != product.shape:
        raise Leave(_MISFIT)  # torch's own error
    return out


def _fit(a: torch.Tensor, b: torch.Tensor, axes: int) -> None:
    if a.dim() != axes or b.dim() != axes or a.shape[-1] != b.shape[-2] or a.shape[:-2] != b.shape[:-2]:
        raise Leave(_MISFIT)


# Mixtures of experts. transformers computes them in one of three ways, which all choose experts by topk, for which
# torch leaves ties open; generation changes from one to another between prefill and decoding:
#
# - "grouped_mm": tokens sorted by expert, aten::_grouped_mm, or products into slices of one tensor (mm with out=), and
#   a sum over each token's experts in the order of their rank.
# - "batched_mm": a weight gathered for each token and expert, and one batched product with vectors, which here has the
#   bits of the grouped product (`nondet.kernels.dispatch.transformers`).
# - "eager": expert by expert, added onto the tokens by index_add_, in the order of the experts' numbers. Rounded after
#   each addition, so its bits differ from those of the other two.

SHORT = 64  # additions that one program makes in sequence


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
    return kernels.grouped_matmul(x, weight, offs)


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
        return kernels.topk(x, k)
    values, indices = kernels.topk(x.movedim(dim, -1), k)
    return values.movedim(-1, dim).contiguous(), indices.movedim(-1, dim).contiguous()


def index_add_(
    kernels: Kernels, target: torch.Tensor, dim: int, index: torch.Tensor, source: torch.Tensor, *, alpha: float = 1
) -> torch.Tensor:
    """alpha times source added to the target's slices at index, in place and in the order of index."""
    require(target, source)
    if target.dim() == 0 or source.dim() != target.dim():
        raise Leave("a scalar")
    rows, added = target.movedim(dim, 0), source.movedim(dim, 0)
    if added.shape != (index.numel(), *rows.shape[1:]):
        raise Leave(_MISFIT)  # torch's own errors
    width = rows.shape[1:].numel()
    flat = rows.reshape(rows.shape[0], width)
    kernels.index_add_(flat, index.reshape(-1), added.reshape(index.numel(), width), alpha)
    if flat.data_ptr() != target.data_ptr():  # it has no such view
        rows.copy_(flat.view(rows.shape))
    return target


def index_add(
    kernels: Kernels, target: torch.Tensor, dim: int, index: torch.Tensor, source: torch.Tensor, *, alpha: float = 1
) -> torch.Tensor:
    """`index_add_` into a copy."""
    return index_add_(kernels, target.clone(memory_format=torch.contiguous_format), dim, index, source, alpha=alpha)


def scatter_add(
    kernels: Kernels, target: torch.Tensor, dim: int, index: torch.Tensor, source: torch.Tensor
) -> torch.Tensor:
    """source added to the target along an axis at index: each element's sum in the order of the axis."""
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
        raise Leave(_MISFIT)  # torch's own errors
    if int(index.min()) < 0 or int(index.max()) >= target.shape[dim]:
        raise Leave("an index out of range")  # torch's own error
    places = torch.zeros((), dtype=torch.int64, device=target.device)
    for d, size in enumerate(target.shape):
        at = index.long() if d == dim else torch.arange(index.shape[d], device=target.device)
        places = places * size + (at if d == dim else at.view(-1, *(1,) * (axes - 1 - d)))
    values = source[tuple(slice(n) for n in index.shape)]
    return kernels.scatter_add(target.reshape(-1), places.reshape(-1), values.reshape(-1)).view(target.shape)


def _rows(
    x: torch.Tensor, dim: Sequence[int] | int | None, dtype: torch.dtype | None
) -> tuple[torch.Tensor, list[int]]:
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
    kept = [d for d in range(x.dim()) if d not in axes]
    if axes != list(range(len(kept), x.dim())):
        x = x.permute(*kept, *axes)
    return x.flatten(len(kept)) if len(axes) > 1 else x


def _with_axes(out: torch.Tensor, x: torch.Tensor, axes: list[int], keepdim: bool) -> torch.Tensor:
    return out.reshape([1 if d in axes else n for d, n in enumerate(x.shape)]) if keepdim else out


def reducing(name: str) -> Callable[..., torch.Tensor]:
    """sum or mean over axes."""

    def replace(
        kernels: Kernels, x: torch.Tensor, dim: Any, keepdim: bool = False, *, dtype: torch.dtype | None = None
    ) -> torch.Tensor:
        x, axes = _rows(x, dim, dtype)
        _note_over_batch(name, x, axes)
        out = _reduced_in_place(kernels, name, x, axes[0]) if len(axes) == 1 else None
        if out is None:
            out = getattr(kernels, name)(_last(x, axes))
        return _with_axes(out, x, axes, keepdim)

    return replace


def _reduced_in_place(kernels: Kernels, name: str, x: torch.Tensor, axis: int) -> torch.Tensor | None:
    """Over one axis other than the last, in place; None without a kernel for that."""
    if axis == x.dim() - 1:
        return None
    short = x.is_cuda and name == "sum" and x.shape[axis] <= SHORT
    if not short and padded_in_front(x, axis):  # one by one from the first position zeros in front change nothing
        _note(name, x, MOVED)
    before, after = x.shape[:axis], x.shape[axis + 1 :]
    if short:
        out: torch.Tensor = kernels.sum_middle(x.reshape(before.numel(), x.shape[axis], after.numel()))
        return out.view(*before, *after)
    if not x.is_cuda:
        from nondet.kernels.rows.cpu import sum_over_rows

        out = sum_over_rows(x, axis)
        return (out if name == "sum" else out / x.shape[axis]).to(x.dtype)
    if name == "sum" and x.dim() == 2 and x.numel():
        from nondet.kernels.gradients import cuda  # the same order, columns next to each other

        return cuda.sum_over_rows(x.contiguous(), x.dtype)
    return None


def logsumexp(kernels: Kernels, x: torch.Tensor, dim: Any, keepdim: bool = False) -> torch.Tensor:
    """A row of only -inf gives -inf, as torch's."""
    x, axes = _rows(x, dim, None)
    _note_over_batch("logsumexp", x, axes)
    return _with_axes(kernels.logsumexp(_last(x, axes)), x, axes, keepdim)


def _note(name: str, x: torch.Tensor, why: str) -> None:
    count("at_risk", f"{name} {str(x.dtype).removeprefix('torch.')}: {why}")


def _note_over_batch(name: str, x: torch.Tensor, axes: Sequence[int]) -> None:
    """Count a reduction over the batch's own axis, whose bits no kernel can make independent of other requests."""
    if why := over_batch(x, axes):
        _note(name, x, why)


def note_hidden(name: str, x: torch.Tensor) -> None:
    """Count a softmax over attention scores some of which are hidden: padding moves the sums' order along the row.

    Models that write out attention (mpt, bloom, gptj, ...) hide scores by a large negative number and take the softmax
    over all keys, including the padding. A score counts as hidden if it is so far below another that its exponential is
    0: models subtract as little as 1e4. On a GPU this is not read, because that would wait for the device: every
    softmax of three axes or more is counted.
    """
    if x.dim() < 2:
        return
    if (x.dim() > 2) if x.is_cuda else not _within(x):
        _note(name, x, "over scores of which some are hidden")


_SPREAD = 80.0  # exp(-80) is a normal float32, so no bit is lost
_HIDDEN = -1e30


def _within(x: torch.Tensor) -> bool:
    """Whether no number vanishes next to another or (matrices) is masked off; False with NaN or infinities."""
    if not x.numel():
        return True
    low, high = map(float, torch.aminmax(x))
    if x.dim() == 2:
        return low > (-3e4 if x.dtype == torch.float16 else _HIDDEN)
    return high - low <= _SPREAD


def normalizing(name: str) -> Callable[..., torch.Tensor]:
    """softmax or log_softmax over an axis."""

    def replace(kernels: Kernels, x: torch.Tensor, dim: int, half_to_float: bool) -> torch.Tensor:
        require(x)
        note_hidden(name, x)
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
        raise Leave(_MISFIT)  # torch's own error
    return kernels.rms_norm(x, weight, eps)


def layer_norm(
    kernels: Kernels,
    x: torch.Tensor,
    normalized_shape: Sequence[int],
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    eps: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Two means in float32, then elementwise; also returns mean and 1 / deviation, as torch's own does."""
    require(x)
    if len(normalized_shape) != 1:
        raise Leave("over more than one axis")
    width, given = tuple(normalized_shape), [p for p in (weight, bias) if p is not None]
    if tuple(x.shape[-1:]) != width or any(tuple(p.shape) != width for p in given):
        raise Leave(_MISFIT)  # torch's own error
    if len({p.dtype for p in given}) > 1 or any(p.dtype not in (x.dtype, torch.float32) for p in given):
        raise Leave("dtypes that do not fit")  # likewise
    if x.is_cuda:
        from nondet.kernels.rows.cuda import layer_norm as fused

        made = fused(x, weight, bias, eps)
        if made is not None:
            return made
    else:
        from nondet.kernels.rows.cpu import layer_norm as by_rows

        return by_rows(x, weight, bias, eps)
    wide = x.float()
    mean = kernels.mean(wide)[..., None]
    centred = wide - mean
    scale = 1.0 / root(kernels.mean(centred * centred)[..., None] + eps)
    out = centred * scale
    if weight is not None:
        out = out * weight.float()
    if bias is not None:
        out = out + bias.float()
    return out.to(x.dtype).contiguous(), mean, scale  # contiguous, whatever x is, as torch's own


def root(x: torch.Tensor) -> torch.Tensor:
    """Correctly rounded, as a GPU's is; torch's on a CPU may be MKL's."""
    if x.is_cuda:
        return torch.sqrt(x)
    from nondet.kernels.rows.cpu import square_roots

    return square_roots(x)


mean, sum = reducing("mean"), reducing("sum")
softmax, log_softmax = normalizing("softmax"), normalizing("log_softmax")


# Pointwise operators on a CPU, each by one formula, because a vector loop and its scalar rest may use different ones.
# Which operators do depends on instruction set, dtype and build of torch, so none is trusted.

_FLOATING_ONLY = frozenset(
    {"silu", "gelu", "mish", "softplus", "elu", "hardswish", "hardsigmoid", "softshrink", "pow.Tensor_Scalar"}
)


def _elementwise(name: str) -> Callable[..., torch.Tensor]:
    """The operator, only by its vector body; integers in the default dtype, where torch accepts them."""
    operator = operator_of(name)

    def replace(kernels: Kernels, x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        from nondet.kernels.pointwise.cpu import vectors_only

        if not (x.dtype.is_floating_point or x.dtype.is_complex):
            if name in _FLOATING_ONLY:
                raise Leave  # torch's own error, or integers
            x = x.to(torch.get_default_dtype())
        return vectors_only(lambda piece: operator(piece, *args, **kwargs), x)

    return replace


# of them sqrt, since MKL's, where torch was built with it, is not correctly rounded
globals().update({name: _elementwise(name) for name in NAMES})


def rsqrt(kernels: Kernels, x: torch.Tensor) -> torch.Tensor:
    """Two correctly rounded operations of IEEE 754, so that only one result is possible; in float32, rounded last."""
    from nondet.kernels.rows.cpu import square_roots

    require(x)
    return (1.0 / square_roots(x.float())).to(x.dtype)


pow_scalar = _elementwise("pow.Tensor_Scalar")


def pow_scalar_(kernels: Kernels, x: torch.Tensor, exponent: Any) -> torch.Tensor:
    """x ** exponent, in place."""
    return x.copy_(pow_scalar(kernels, x, exponent))


# torch.distributed's reductions: the family "all-reduce".
# They are registered for c10d's own operators, which every form ends in: `torch.distributed.all_reduce`, the functional
# collectives (so DTensor and torch.compile too), and a ProcessGroup's own method. Sums of floating point are replaced
# (`nondet.kernels.all_reduce.chain`); maxima, minima and integers are exact in any order, and run unchanged; gathers
# copy; other reductions are counted as left or at risk. All ranks must enter and leave their blocks at the same calls.
# They are registered at the key BackendSelect, above the device's own, and continue by a redispatch, which releases
# the interpreter's lock, as `call_boxed` does not: a library's threads hold a queue's lock while they free finished
# tensors, for which they need the interpreter's, so enqueuing with that held can deadlock (seen with gloo).


class _Form(NamedTuple):
    """One of c10d's operators that sum."""

    name: str  # its name in the coverage
    group: int  # index of the process group among its arguments; the reduction is the next one
    answers: bool = True  # whether it returns its tensors in addition to the work
    replaced: bool = True  # False: its order is the library's

    def pairs(self, args: tuple[Any, ...]) -> list[tuple[torch.Tensor, Any]]:
        """(result, message): one tensor twice for an all-reduce, which is in place."""
        outs, messages = (x if isinstance(x, list) else [x] for x in (args[0], args[self.group - 1]))
        return list(zip(outs, messages, strict=True))


_FORMS = {
    "allreduce_": _Form("all_reduce", 1),
    "allreduce_coalesced_": _Form("all_reduce", 1, answers=False),
    "_reduce_scatter_base_": _Form("reduce_scatter", 2),
    "reduce_scatter_": _Form("reduce_scatter", 2),
    "reduce_scatter_tensor_coalesced_": _Form("reduce_scatter", 2, answers=False),
    "reduce_": _Form("reduce_", 1, replaced=False),
}  # gathers and broadcasts copy
_KEY = "BackendSelect"
_EXACT = ("MAX", "MIN", "BAND", "BOR", "BXOR")


def functions(devices: tuple[str, ...]) -> dict[tuple[str, str], Callable[..., Any]]:
    """(operator, dispatch key) -> function; empty where torch was built without distributed."""
    if not torch.distributed.is_available():
        return {}
    types = frozenset(device.lower() for device in devices)
    made: dict[tuple[str, str], Callable[..., Any]] = {}
    for name, form in _FORMS.items():
        if hasattr(torch.ops.c10d, name):  # not each is in every torch
            made[f"c10d::{name}", _KEY] = _replacing(form, _stock(name), types)
    return made


def _stock(name: str) -> Callable[..., Any]:
    """The device's own kernel, called without the interpreter's lock."""
    operator = getattr(torch.ops.c10d, name).default
    here = getattr(torch._C.DispatchKey, _KEY)

    def stock(keyset: Any, *args: Any, **kwargs: Any) -> Any:
        return operator.redispatch(keyset.remove(here), *args, **kwargs)

    return stock


def _replacing(form: _Form, stock: Callable[..., Any], devices: frozenset[str]) -> Callable[..., Any]:
    def run(keyset: Any, *args: Any, **kwargs: Any) -> Any:
        now = current()
        tensors = args[: form.group]
        if inside.active or not now.coverages or not _on(tensors, devices):
            return stock(keyset, *args, **kwargs)
        reduction = _name_of(args[form.group + 1])
        how, reason = "", ""
        if floating(tensors, {}) and reduction not in _EXACT:
            if ALL_REDUCES.name not in now.families or not form.replaced:
                how = "at_risk"
            else:
                reason = _reduced(form, args, reduction)
                how = "left" if reason else "replaced"
        if how == "replaced":
            count(how, form.name)
            waited = any(x is False for x in args[form.group + 2 :])  # async_op; left out where it is True
            work = _finished(form.pairs(args)[0][0], waited)
            return (args[0], work) if form.answers else work
        if how:
            count(how, label(form.name, tensors, reason))
        return stock(keyset, *args, **kwargs)

    return run


def _on(args: tuple[Any, ...], devices: frozenset[str]) -> bool:
    for x in args:
        if isinstance(x, torch.Tensor):
            return x.device.type in devices
        if isinstance(x, (list, tuple)) and x:
            return _on(tuple(x), devices)
    return False


def _name_of(operation: Any) -> str:
    from torch.distributed import ReduceOp

    if not isinstance(operation, torch.ScriptObject) or not hasattr(operation, "op"):
        return ""
    name: str = ReduceOp.RedOpType(int(operation.op())).name
    return name


def _reduced(form: _Form, args: tuple[Any, ...], reduction: str) -> str:
    """Sum over the group, or the reason why it stays stock, which is determined before anything is written."""
    from torch.distributed import ProcessGroup
    from torch.distributed.distributed_c10d import _resolve_process_group

    from nondet.kernels.all_reduce.chain import all_reduce, reduce_scatter

    if reduction != "SUM":
        return f"a reduction by {reduction or 'another name'}"
    before, inside.active = inside.active, True
    try:
        group = _resolve_process_group(ProcessGroup.unbox(args[form.group]).group_name)
        pairs = form.pairs(args)
        if form.answers and len(pairs) != 1:
            return "several tensors at once"
        reason = next((text for text in map(partial(_misfit, group.size()), pairs) if text), "")
        with torch.no_grad():
            for out, x in () if reason else pairs:
                if out is x:
                    all_reduce(x, group)
                else:
                    reduce_scatter(out, x if isinstance(x, torch.Tensor) else torch.stack(list(x)), group)
    finally:
        inside.active = before
    return reason


def _misfit(world: int, pair: tuple[torch.Tensor, Any]) -> str:
    from nondet.kernels.all_reduce.chain import DTYPES

    out, x = pair
    parts = [x] if isinstance(x, torch.Tensor) else list(x)
    if any(t.layout != torch.strided for t in (out, *parts)):
        return "a sparse tensor"
    if any(t.dtype not in DTYPES or t.dtype != out.dtype for t in (out, *parts)):
        return f"no sum in a fixed order of {parts[0].dtype}"
    if any(t.device != out.device for t in parts):
        return "tensors on several devices"
    if isinstance(x, torch.Tensor):
        return "" if out is x or x.numel() == world * out.numel() else "sizes that do not fit"
    return "" if len(parts) == world and all(t.shape == out.shape for t in parts) else "shares of several sizes"


def _finished(x: torch.Tensor, waited: bool) -> Any:
    """A boxed Work of something that is already on the current stream, so a later wait on that stream comes after it.

    It is made of a future, which is pure C++: a Work written in Python loses its Python half when it is boxed, and the
    rest waits for ever. `waited`: the caller waits at once, on the stream that computed.
    """
    c10d: Any = torch._C._distributed_c10d  # its stubs lack what makes a work of a future
    if waited or (x.is_cuda and torch.cuda.is_current_stream_capturing()):
        return c10d.Work.boxed(c10d.FakeWork())
    done: torch.futures.Future[torch.Tensor] = torch.futures.Future(devices=[x.device] if x.is_cuda else None)
    done.set_result(x)
    return c10d.Work.boxed(c10d._create_work_from_future(done))
