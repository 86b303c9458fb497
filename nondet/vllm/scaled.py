"""FP8 layers of vLLM whose own kernel does not stand, by nondet's product in class "chain-fp8".

Such a layer gets another method: its activations are quantized by vLLM's own kernels (a maximum over a row, or over
128 numbers of it, and then each number by itself, so that a row depends on itself alone), and multiplied by a member
that is proven for the numbers of rows that `operators.row_counts` lists; any other is filled up, as plain products are.
The whole of it is then asked for the same bits at each of these numbers as at the largest.

One scale for all activations of a step is the batch's by its meaning, and no product mends it: such a layer stays as it
is, at risk.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from importlib import import_module
from typing import Any

import torch

from nondet.core.launch import first_uses, listen
from nondet.kernels.scaled.functions import BLOCK, quantize_block, quantize_by, quantize_row
from nondet.vllm.operators import Certified, float32_default, padded, stands_alone

# vLLM's kernels whose weights lie as they were loaded: by columns [K, N], or in blocks [N, K]
_BY_ROWS = frozenset(
    (
        *("CutlassFP8ScaledMMLinearKernel", "FlashInferFP8ScaledMMLinearKernel"),
        *(f"{kind}TorchFP8ScaledMMLinearKernel" for kind in ("PerTensor", "ChannelWise", "RowWise")),
    )
)
_IN_BLOCKS = frozenset(
    (
        *("CutlassFp8BlockScaledMMKernel", "TritonFp8BlockScaledMMKernel", "DeepGemmFp8BlockScaledMMKernel"),
        "FlashInferFp8DeepGEMMDynamicBlockScaledKernel",
    )
)
_GIVEN = ("input_scale", "input_scale_ub")  # of a layer: the one scale of its activations, the limit of theirs
_SCALES = "nondet_scales"  # of a layer that is replaced: [1, N], or in blocks [K / 128, N / 128]


def product(
    x: torch.Tensor,
    weight: torch.Tensor,
    scales: torch.Tensor,
    static: torch.Tensor | None = None,
    limit: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """x [..., K] quantized, times an FP8 weight, plus bias [N] -> [..., N] of x's dtype, in class "chain-fp8".

    Args:
        weight: float8_e4m3fn, [K, N], or in blocks [N, K].
        scales: float32, [1, N], or in blocks of 128x128 [K / 128, N / 128].
        static: One scale of all activations that was there before; None: one a row, or one for 128 numbers of it.
        limit: Largest number that a row's scale is made for.
    """
    return padded(lambda rows: _of_rows(rows, weight, scales, static, limit, bias), x)


def _of_rows(
    rows: torch.Tensor,
    weight: torch.Tensor,
    scales: torch.Tensor,
    static: torch.Tensor | None,
    limit: torch.Tensor | None,
    bias: torch.Tensor | None,
) -> torch.Tensor:
    blocks = _in_blocks(weight)
    if rows.is_cuda:
        q, left = _by_vllm(rows, static, limit, blocks=blocks)
    elif static is not None:
        q, left = quantize_by(static, rows)
    else:
        q, left = quantize_block(rows) if blocks else quantize_row(rows, limit=limit)
    if left.numel() == 1:
        left = left.reshape(1, 1).expand(len(rows), 1).contiguous()
    # the Triton form is not imported where vLLM runs on a CPU
    kernels = import_module(f"nondet.kernels.scaled.{'cuda' if rows.is_cuda else 'cpu'}")
    out: torch.Tensor = kernels.scaled_matmul(q, weight.t() if blocks else weight, left, scales, rows.dtype, bias)
    return out


def _in_blocks(weight: torch.Tensor) -> bool:
    """Whether a weight lies by rows, [N, K], as vLLM keeps those with scales in blocks."""
    return weight.stride(0) != 1


def _by_vllm(
    rows: torch.Tensor, static: torch.Tensor | None, limit: torch.Tensor | None, *, blocks: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """FP8 numbers and their scales, in one launch."""
    if blocks:
        from vllm.model_executor.layers.quantization.utils.fp8_utils import per_token_group_quant_fp8

        q, left = per_token_group_quant_fp8(rows, BLOCK, use_ue8m0=False)
    else:
        from vllm._custom_ops import scaled_fp8_quant

        q, left = scaled_fp8_quant(rows, static, scale_ub=limit, use_per_token_if_dynamic=static is None)
    return q, left


def product_shape(
    x: torch.Tensor,
    weight: torch.Tensor,
    scales: torch.Tensor,
    static: torch.Tensor | None = None,
    limit: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """What `product` gives, for a tracer."""
    return x.new_empty((*x.shape[:-1], weight.shape[0 if _in_blocks(weight) else 1]))


# name under torch.ops.vllm -> what computes it, what a tracer is told
OPERATORS = {"nondet_scaled_product": (product, product_shape)}


class ScaledMethod:
    """In the place of a layer's method: the product that `replace` proved."""

    def apply(self, layer: Any, x: Any, bias: Any = None) -> Any:
        """As vLLM's linear methods are called; Dynamo traces it and keeps the operator whole."""
        given = (getattr(layer, name, None) for name in _GIVEN)
        return torch.ops.vllm.nondet_scaled_product(x, layer.weight, getattr(layer, _SCALES), *given, bias)


def unfit(layer: Any) -> str:
    """Why a layer is not one that `ScaledMethod` computes; "" where it is."""
    method = getattr(layer, "quant_method", None)
    kernel: Any = getattr(method, "fp8_linear", None) or getattr(getattr(layer, "scheme", None), "fp8_linear", None)
    name, weight = type(kernel).__name__, getattr(layer, "weight", None)
    if name not in _BY_ROWS | _IN_BLOCKS or weight is None or weight.dtype != torch.float8_e4m3fn:
        return "no FP8 kernel that nondet has one for"
    blocks, quantizer = name in _IN_BLOCKS, kernel.quant_fp8
    K, N = layer.input_size_per_partition, layer.output_size_per_partition
    scales = _scales_of(layer)
    shape = (-(-N // BLOCK), -(-K // BLOCK)) if blocks else None
    faults = {
        "one scale for all activations of a step": not blocks
        and not quantizer.static
        and not quantizer.use_per_token_if_dynamic,
        "a weight that lies otherwise, or is filled up": (tuple(weight.shape), weight.stride())
        != (((N, K), (K, 1)) if blocks else ((K, N), (1, K))),
        f"scales of {scales.dtype} in {list(scales.shape)}": scales.dtype != torch.float32
        or (tuple(scales.shape) != shape if blocks else scales.numel() not in (1, N)),
        "activations in other shares than 128": blocks
        and (K % BLOCK > 0 or getattr(quantizer, "group_size", 0) != BLOCK or quantizer.use_ue8m0),
    }
    return ", ".join(what for what, stands in faults.items() if stands)


def _scales_of(layer: Any) -> torch.Tensor:
    found = getattr(layer, "weight_scale_inv", None)
    return (layer.weight_scale if found is None else found).data


def replace(layer: Any, counts: Sequence[int], dtype: torch.dtype, known: dict[tuple[Any, ...], Certified]) -> None:
    """Give a layer that fits the product of ours, proven at each of these numbers of rows.

    Args:
        known: What was proven before, by the layout of a layer; layers of one layout are proven once.

    Raises:
        NotImplementedError: no member is proven here, or the whole has other bits at one number of rows than at the
            largest; the layer is as it was.
    """
    scales, weight = _scales_of(layer), layer.weight.data
    scales = scales.t() if _in_blocks(weight) else scales.reshape(1, -1).expand(1, weight.shape[1])
    bias = None if getattr(layer, "skip_bias_add", False) else getattr(layer, "bias", None)
    given = (weight, scales.contiguous(), *(getattr(layer, name, None) for name in _GIVEN), bias)
    key = ("scaled", *((x.shape, x.stride()) if x is not None else None for x in given))
    if key not in known:
        known[key] = _proven(given, layer.input_size_per_partition, counts, dtype)
    layer.register_buffer(_SCALES, given[1], persistent=False)
    vars(layer).pop("input_quant_key", None)  # else a kernel before it would hand it quantized numbers
    layer.quant_method = ScaledMethod()


def _proven(given: tuple[Any, ...], width: int, counts: Sequence[int], dtype: torch.dtype) -> Certified:
    began, ran, device = time.perf_counter(), {}, given[0].device
    with float32_default(), torch.inference_mode(), first_uses() as uses:
        for rows in counts:
            with listen() as noted:
                product(torch.zeros(rows, width, dtype=dtype, device=device), *given)
            ran[rows] = next((name for name, _ in noted.most_common(1)), "?")
        failed = stands_alone(lambda x: product(x, *given), width, dtype, device, counts)
    if failed is not None:
        raise NotImplementedError(f"its product gives a row other bits at M={failed} than at M={counts[-1]}")
    return Certified(time.perf_counter() - began, uses.proofs, uses.compiled, ran)
