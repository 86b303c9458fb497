"""Which aten operators `batch_invariant()` replaces, family by family, and which it leaves because they are exact.

A replacement takes the device's `Kernels` and the operator's own arguments. It computes, or raises `Leave` with the
reason why it does not: then the original kernel runs, and the coverage reports it. Every replacement also serves its
operator's out= and in-place forms, which code generators call.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from nondet.core.operator import AtenOperator
from nondet.core.registry import declared, load_object
from nondet.kernels.dispatch.state import WHOLE, Kernels, Leave, operator_of, over_batch

# The allow list: aten operators whose bits cannot depend on the batch, with the reason for each. They run unchanged, so
# an entry has to be right on every machine, or name its device; tests/kernels/dispatch/test_sweep.py compares the list
# with torch's operator database. All others that are not replaced and not certifiable are at risk, and counted.
# Names are without overload and without the in-place underscore, unless an overload is meant.
# add, sub, mul, div and abs are exact only for real numbers, but are not watched on a CPU for complex ones, or for
# `alpha` (docs/limits.md), because the watcher would cost as much as the operation at every call.

Matters = Callable[..., bool | str]


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


# reason -> operators, on any device
EXACT: dict[str, frozenset[str]] = {
    "moves numbers, and computes none": _names(
        """
        _chunk_cat _copy_from _copy_from_and_resize _efficientzerotensor _fw_primal _lazy_clone
        _local_scalar_dense _pack_padded_sequence _pin_memory _reshape_alias _reshape_copy _resize_output _stack
        _to_copy _unsafe_index _unsafe_index_put _unsafe_masked_index _unsafe_view alias_copy as_strided_copy
        as_strided_scatter block_diag cat channel_shuffle clone complex conj_physical constant_pad_nd copy diag_embed
        diagonal_copy diagonal_scatter embedding expand_copy flip gather im2col index index_copy index_fill index_put
        index_select lift lift_fresh_copy masked_fill masked_scatter masked_select max_unpool2d max_unpool3d
        narrow_copy native_channel_shuffle permute_copy pixel_shuffle pixel_unshuffle reflection_pad1d
        reflection_pad2d reflection_pad3d repeat repeat_interleave replication_pad1d replication_pad2d
        replication_pad3d resize roll rot90 scatter.src scatter.src_out scatter_.src scatter.value scatter.value_out
        scatter_.value select_backward select_copy select_scatter set slice_backward slice_copy slice_scatter
        split_copy split_with_sizes_copy squeeze_copy stack t_copy take transpose_copy tril triu unbind_copy
        unfold_copy unsqueeze_copy upsample_nearest1d upsample_nearest2d upsample_nearest3d _upsample_nearest_exact1d
        _upsample_nearest_exact2d _upsample_nearest_exact3d view_as_complex_copy view_as_real_copy view_copy where
        """
    ),
    "writes a constant, or makes room": _names(
        """
        empty empty_like empty_permuted empty_strided eye fill full full_like new_empty new_empty_strided new_full
        new_ones new_zeros ones ones_like scalar_tensor zero zeros zeros_like
        """
    ),
    "compares, and gives one of its numbers, a truth or a place": _names(
        """
        _aminmax _cummax_helper _cummin_helper _is_all_true _is_any_true adaptive_max_pool2d adaptive_max_pool3d all
        amax amin aminmax any argmax argmin bucketize clamp clamp_max clamp_min count_nonzero cummax cummin eq equal
        fmax fmin ge gt hardshrink hardtanh heaviside is_set_to isfinite isin isinf isnan isneginf isposinf le
        logical_and logical_not logical_or logical_xor lt max max_pool2d_with_indices max_pool3d_with_indices maximum
        min minimum nan_to_num ne nonzero nonzero_static relu searchsorted sign signbit threshold
        threshold_backward
        """
    ),
    "a real number's one operation that IEEE 754 rounds correctly, or that is exact": _names(
        """
        abs add.Tensor add_.Tensor add.out ceil copysign div.Tensor div_.Tensor div.out floor frac leaky_relu
        mul.Tensor mul_.Tensor mul.out neg nextafter positive _prelu_kernel round round.out round_ rsub.Tensor
        sub.Tensor sub_.Tensor sub.out trunc
        """
    ),
    "a row's own one number, by scalar code": _names("nll_loss_backward"),
    "of integers or truths alone": _names(
        """
        __and__ __iand__ __ilshift__ __ior__ __irshift__ __ixor__ __lshift__ __or__ __rshift__ __xor__
        bitwise_and bitwise_left_shift bitwise_not bitwise_or bitwise_right_shift bitwise_xor gcd lcm
        """
    ),
    "counts, in numbers that hold the count exactly": _names("histc"),
    "of arguments alone, not of a batch": _names("arange linspace logspace range tril_indices triu_indices"),
    "asks, and computes nothing": _names(
        """
        _assert_async _assert_tensor_metadata _functional_assert_async _fused_sdp_choice _has_same_storage_numel
        _nnz dense_dim is_coalesced is_pinned is_same_size q_per_channel_axis q_scale q_zero_point qscheme sparse_dim
        record_stream
        """
    ),
    "calls operators that are watched themselves": _names("mean.default mean.dtype_out sum.default sum.out"),
}

_NOT_ROUNDED_ONCE = _names("round.decimals round.decimals_out round_.decimals")

# Every element is computed by the same instructions in any thread: torch tags it `pointwise`, or it is one of these.
EXACT_ON_CUDA = _names(
    "glu hardsigmoid hardswish log_sigmoid_forward mish polar rsub softplus softshrink elu gelu silu _conj_physical"
)


# In sequence: the k-th element has the k-th number, whatever comes after it.
EXACT_ON_CPU = _names("random randperm uniform")


def _complex(x: torch.Tensor, **kwargs: Any) -> bool:
    """Complex quotients use one formula in vectors and another in the scalar rest."""
    return x.dtype.is_complex


def _accumulates(x: Any, indices: Any, values: Any, accumulate: bool = False, *rest: Any, **more: Any) -> bool:
    """Numbers with equal indices are added in an unspecified order."""
    return accumulate


def _only_moves(x: Any, indices: Any, values: Any, accumulate: bool = False, *rest: Any, **more: Any) -> bool:
    """Nothing is added, or at most once per index: the gradient of a boolean mask."""
    given = [index for index in indices if index is not None]
    return not accumulate or (len(given) == 1 and given[0].dtype in (torch.bool, torch.uint8))


def _weighted(x: Any, weights: Any = None, *rest: Any, **more: Any) -> bool:
    """Without weights it only counts."""
    return weights is not None


def _extreme(x: Any, dim: Any = None, *rest: Any, **more: Any) -> str:
    """Exact, but over all numbers of an axis: one scale for a whole batch depends on other requests' extremes."""
    said = over_batch(x, dim)
    if said or dim is None or x.dim() < 3 or x.shape[0] != 1 or x.numel() == x.shape[-1]:
        return said
    # of [1, M, K] over M and K, as torchao scales a whole tensor: every axis that is one
    axes = {d % x.dim() for d in ((dim,) if isinstance(dim, int) else dim)}
    return WHOLE if all(size == 1 or axis in axes for axis, size in enumerate(x.shape)) else ""


def _every_form(names: dict[str, Matters], forms: str) -> dict[str, Matters]:
    return {form.format(name): matters for name, matters in names.items() for form in forms.split()}


# Exact unless the arguments prevent it: device -> operator -> matters(*args, **kwargs), which may give the reason.
_ANYWHERE: dict[str, Matters] = {
    **_every_form({"amax": _extreme, "amin": _extreme, "aminmax": _extreme}, "{} {}.out"),
    **_every_form({"max": _extreme, "min": _extreme}, "{} {}.unary_out {}.dim"),
    "max.dim_max": _extreme,
    "min.dim_min": _extreme,
    "bincount": _weighted,
    "bincount.out": _weighted,
    "put_": _accumulates,
}
CONDITIONS: dict[str, dict[str, Matters]] = {
    "CUDA": _ANYWHERE,
    "CPU": {
        **_ANYWHERE,
        **_every_form({"reciprocal": _complex, "sgn": _complex}, "{} {}_ {}.out"),
        "angle": _complex,
        "angle.out": _complex,
    },
}


def reason(name: str, device: str) -> str:
    """Why aten's operator `name` ("add.Tensor") cannot depend on the batch on "CPU" or "CUDA"; "" where it can."""
    packet, _, overload = name.partition(".")
    operator = operator_of(name)
    if operator is None:
        return ""
    returns = operator._schema.returns
    if returns and all(r.alias_info is not None and not r.alias_info.is_write for r in returns):
        return "a view"
    if name in _NOT_ROUNDED_ONCE:
        return ""
    base = packet if packet.startswith("__") else packet.removesuffix("_")
    for why, names in EXACT.items():
        if name in names or base in names or f"{packet}.{overload or 'default'}" in names:
            return why
    if device == "CPU" and base in EXACT_ON_CPU:
        return "the generator's next numbers in order, as many as there are"
    if device == "CUDA" and (torch.Tag.pointwise in operator.tags or base in EXACT_ON_CUDA):
        return "every element by the same instructions on a GPU"
    return ""


_ATEN: dict[str, AtenOperator] = {aten.name: aten for operator in declared().values() for aten in operator.aten}

FAMILIES: dict[str, str] = {o.family.name: o.family.text for o in declared().values() if o.family is not None}

OPERATORS: dict[str, dict[str, Callable[..., Any]]] = {family: {} for family in FAMILIES}
for _operator in declared().values():
    if _operator.family is not None:
        OPERATORS[_operator.family.name] |= {aten.name: load_object(aten.replacement) for aten in _operator.aten}

# Operators that torch composes of others: a replacement of the whole has no gradient, so it is only for inference.
COMPOSED = frozenset(name for name, aten in _ATEN.items() if aten.composed)


def _power_is_exact(x: torch.Tensor, exponent: Any, *rest: Any, **more: Any) -> bool:
    return not x.dtype.is_complex and exponent in (0, 1, 2)


# Calls of replaced operators that need no replacement: a constant, a copy, a product that is rounded once.
EXEMPT: dict[str, Callable[..., bool]] = {
    **dict.fromkeys(("pow.Tensor_Scalar", "pow.Tensor_Scalar_out", "pow_.Scalar"), _power_is_exact),
    "_index_put_impl_": _only_moves,
}


def variants(name: str, replacement: Callable[..., Any]) -> dict[str, Callable[..., Any]]:
    """The operator and its out= and in-place forms: name -> replacement."""
    aten = _ATEN[name]
    forms = {name: replacement}
    if aten.out is not None:
        forms[aten.out] = _into(replacement)
    if aten.in_place:
        forms[f"{name}_"] = _in_place(replacement)
    return forms


def _into(replacement: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    def replace(kernels: Kernels, *args: Any, out: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        result = replacement(kernels, *args, **kwargs)
        if out.dtype != result.dtype:
            raise Leave("an out of another dtype")
        if out.shape != result.shape:
            out.resize_(result.shape)
        return out.copy_(result)

    return replace


def _in_place(replacement: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    def replace(kernels: Kernels, x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        result = replacement(kernels, x, *args, **kwargs)
        if result.shape != x.shape:
            raise Leave("shapes that do not fit")  # torch's own error
        return x.copy_(result)

    return replace


# Operators over one axis without a kernel here. At its first use each (shape, dtype) is proven: does stock give every
# row its solo bits? If so it is left, as certified; if not it is at risk.
CERTIFIABLE = (
    *("cumprod", "cumsum", "linalg_vector_norm", "_logcumsumexp", "prod.dim_int", "sort.stable"),
    *("std.correction", "var.correction", "var_mean.correction"),
)


def _chain(matrices: Any, *rest: Any, **more: Any) -> bool:
    return len(matrices) > 2


def _planned(equation: str, operands: Any, *, path: Any = None) -> bool:
    if len(operands) > 2:
        return path is not None
    return len(operands) == 2 and _weight_is_open(equation)


@functools.lru_cache(maxsize=1024)
def _weight_is_open(equation: str) -> bool:
    """Whether it is matrices with vectors, of which torch picks the last operand by their sizes.

    "btk,bk->bt" of one batch is another product than of two; "k,tk->t" and "hk,bhk->bh" use all rows as the weight.
    Only "tk,k->t" always ends in rows with one vector.
    """
    inputs, arrow, output = equation.replace(" ", "").replace("...", ".").partition("->")
    left, right = (set(labels) for labels in inputs.split(","))
    kept = set(output) if arrow else left ^ right
    own_left, own_right = (left - right) & kept, (right - left) & kept
    if bool(own_left) == bool(own_right):
        return False
    return bool(own_right) or len(left) > 2 or "." in left


# Composed of replaced products in a way that depends on the sizes, including the number of rows: at risk.
ORDERED_BY_SIZES: dict[str, Callable[..., bool]] = {
    "einsum": _planned,
    "linalg_multi_dot": _chain,
    "linalg_multi_dot.out": _chain,
}

# Operators that torch registers as if composed of others, but that compute past the dispatcher: nothing else would
# notice them.
COMPUTES = _names(
    """
    _convolution _foreach_mm _grid_sampler_2d_cpu_fallback _grid_sampler_2d_cpu_fallback_backward
    _nnpack_spatial_convolution conv_tbc convolution convolution_backward mkldnn_convolution
    """
)
