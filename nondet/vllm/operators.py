"""What computes vLLM's layers under the plugin: opaque operators over nondet's kernels, and their proofs at start.

torch.compile does not look into an operator, so Inductor, which tunes its reductions in every process, can't change
these, and the member of a class is chosen by the real number of rows, at launch or capture.

Products and norms are those of `nondet.engines.layers`, which pads to certified row counts.

Quantized layers keep their own kernel where it is invariant, in an operator as well (`OwnMethod`), and so is vLLM's sum
over ranks: both run only at the certified row counts.

An FP8 layer whose own kernel is not invariant gets class "chain-fp8" (`nondet.kernels.scaled`): activations are
quantized by vLLM's own kernels (a maximum over a row, or over 128 numbers of it, and then each number by itself: a row
depends only on itself), the product is certified as plain ones are, and the whole must give the same bits at each row
count as at the largest. One scale for all activations of a step depends on the batch by definition, and no product
fixes that: such a layer stays as it is, at risk.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from importlib import import_module
from typing import Any
from weakref import WeakValueDictionary

import torch

from nondet.core import inputs
from nondet.core.certificates import Certificates
from nondet.core.proof import Claim, prove
from nondet.engines import layers
from nondet.engines.layers import (
    Certified,
    add_rms_norm,
    bias_of,
    certified,
    float32_default,
    note,
    padded,
    product,
    rms_norm,
    width_of,
)
from nondet.kernels.scaled.functions import BLOCK, quantize_block, quantize_by, quantize_row

_owners: WeakValueDictionary[int, Any] = WeakValueDictionary()  # address of a weight -> the layer that keeps its kernel


def padded_sum(compute: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    """x [..., N] added over ranks by compute, at a certified row count; at its own where there are none yet."""
    return padded(compute, x) if layers.has_counts() and x.ndim > 1 else compute(x)


def silu_mul(x: torch.Tensor) -> torch.Tensor:
    """silu(x[..., :H]) * x[..., H:] of x [..., 2 H]: `nondet.kernels.pointwise.cuda.silu_mul`, or torch's operators."""
    from nondet.kernels.pointwise.cuda import silu_mul as compute

    out = compute(x)
    return torch.nn.functional.silu(x.chunk(2, -1)[0]) * x.chunk(2, -1)[1] if out is None else out


def scaled_product(
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
        static: One given scale of all activations; None: one per row, or one for 128 numbers of it.
        limit: Largest number for which a row's scale is made.
    """
    note(weight)

    def compute(rows: torch.Tensor) -> torch.Tensor:
        blocks = _in_blocks(weight)
        if rows.is_cuda:
            q, left = _quantized_by_vllm(rows, static, limit, blocks=blocks)
        elif static is not None:
            q, left = quantize_by(static, rows)
        else:
            q, left = quantize_block(rows) if blocks else quantize_row(rows, limit=limit)
        if left.numel() == 1:
            left = left.reshape(1, 1).expand(len(rows), 1).contiguous()
        # the Triton form is not imported where vLLM runs on a CPU
        kernels = import_module(f"nondet.kernels.scaled.{'cuda' if rows.is_cuda else 'cpu'}")
        made: torch.Tensor = kernels.scaled_matmul(q, weight.t() if blocks else weight, left, scales, rows.dtype, bias)
        return made

    return padded(compute, x)


def _in_blocks(weight: torch.Tensor) -> bool:
    """Whether a weight is stored by rows, [N, K], as vLLM keeps those with scales in blocks."""
    return weight.stride(0) != 1


def _quantized_by_vllm(
    rows: torch.Tensor, static: torch.Tensor | None, limit: torch.Tensor | None, *, blocks: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    if blocks:
        from vllm.model_executor.layers.quantization.utils.fp8_utils import per_token_group_quant_fp8

        return per_token_group_quant_fp8(rows, BLOCK, use_ue8m0=False)
    from vllm._custom_ops import scaled_fp8_quant

    return scaled_fp8_quant(rows, static, scale_ub=limit, use_per_token_if_dynamic=static is None)


def own_product(x: torch.Tensor, weight: torch.Tensor, width: int, bias: torch.Tensor | None = None) -> torch.Tensor:
    """x [..., K] -> [..., width] by the own kernel of the quantized layer that has this weight; see `keep_own`."""
    note(weight)
    layer = _owners[weight.data_ptr()]
    own: OwnMethod = layer.quant_method
    # a head gets more rows than requests where prompts have logprobs
    parts = x.reshape(-1, x.shape[-1]).split(own.most)
    made = [padded(lambda rows: own.method.apply(layer, rows, bias), part) for part in parts]
    return (made[0] if len(made) == 1 else torch.cat(made)).view(*x.shape[:-1], width)


# name under torch.ops.vllm -> (what computes it, what a tracer gets)
OPERATORS: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
    "nondet_product": (product, lambda x, weight, *_: x.new_empty((*x.shape[:-1], weight.shape[0]))),
    "nondet_scaled_product": (
        scaled_product,
        lambda x, weight, *_: x.new_empty((*x.shape[:-1], weight.shape[0 if _in_blocks(weight) else 1])),
    ),
    "nondet_own_product": (own_product, lambda x, weight, width, *_: x.new_empty((*x.shape[:-1], width))),
    "nondet_rms_norm": (rms_norm, lambda x, *_: x.new_empty(x.shape)),
    "nondet_add_rms_norm": (add_rms_norm, lambda x, *_: (x.new_empty(x.shape), x.new_empty(x.shape))),
    "nondet_silu_mul": (silu_mul, lambda x: x.new_empty((*x.shape[:-1], x.shape[-1] // 2))),
}


# A quantized layer keeps its own kernel if that is invariant: each number of rows is compared with the largest, on
# ordinary and on hard inputs, as its first and as its last rows.
PROBED_KINDS = ("bell", "wide", "outlier", "cancel")


def first_size_that_differs(
    compute: Callable[[torch.Tensor], torch.Tensor],
    width: int,
    dtype: torch.dtype,
    device: torch.device | str,
    counts: Sequence[int],
) -> int | None:
    """The first of `counts` at which compute([M, width]) differs in a row's bits from the largest; None if there is
    none. Raises RuntimeError: it fails to run at some M, or gives another shape, or nothing finite. Nothing is kept for
    the next start, because a quantized layer's kernel depends on settings that are not in our keys."""
    most, kept = max(counts), Certificates({"device": str(device)}, None)
    whole: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}
    with float32_default(), torch.inference_mode():
        for kind in PROBED_KINDS:
            drawn = inputs.make(kind, (most, width), dtype, device, inputs.generator(1, device))
            whole[kind] = (drawn, compute(drawn))
        for rows in counts:
            part = partial(lambda n, x, _large, start: compute(x[start : start + n].clone()), rows)
            claim = Claim("own kernel", f"M={rows} of {most}", part)
            starts = [(kind, start) for kind in PROBED_KINDS for start in sorted({0, most - rows})]
            cases = ((f"{kind} from row {start}", (*whole[kind], start)) for kind, start in starts)
            known = prove([claim], lambda x, large, start, n=rows: large[start : start + n], cases, kept)[0]
            if known is None:
                raise RuntimeError(f"M={rows}: {kept.aside().get(claim[:2], 'out of memory')}")
            if not known:
                return rows
    return None


def first_sum_that_differs(
    group: Any,
    capture: Callable[[Any], Any],
    width: int,
    dtype: torch.dtype,
    counts: Sequence[int],
    graphs: Sequence[int],
) -> int | None:
    """As `first_size_that_differs`, of vLLM's sum over ranks, whose order may depend on the message's size and a
    number's position in it. Raises Exception: it failed, perhaps on this rank only: then the others wait in a sum until
    this process ends.

    Args:
        group: vLLM's GroupCoordinator. All ranks call this, with the same arguments.
        capture: vLLM's graph_capture(device).
        counts: Every M that is tested without a graph, ascending.
        graphs: Those that are captured and replayed as well; without effect off CUDA.
    """
    device = group.device
    captured: dict[int, tuple[Any, torch.Tensor, torch.Tensor]] = {}

    def replayed(x: torch.Tensor) -> torch.Tensor:
        if len(x) not in captured:
            graph, given = torch.cuda.CUDAGraph(), x.clone()
            with capture(device) as context, torch.cuda.graph(graph, stream=context.stream):
                captured[len(x)] = graph, given, group.all_reduce(given)
        graph, given, out = captured[len(x)]
        given.copy_(x)
        graph.replay()
        return out

    def summed(x: torch.Tensor) -> torch.Tensor:
        mine = x.roll(group.rank_in_group, -1)
        mine[:, 0] = -0.0  # on all ranks: adding to a local zero, or using -0.0 for "not there yet", loses the sign
        again = replayed if device.type == "cuda" and len(x) in graphs else group.all_reduce
        # every rank compares the bits of all, so that all decide the same, and none waits for another
        return group.all_gather(torch.cat((group.all_reduce(mine), again(mine)), -1), -1)

    return first_size_that_differs(summed, width, dtype, device, counts)


class OwnMethod:
    """Replaces a quantized layer's method: calls that method in an operator and at certified row counts, at most
    `most`. The parameter `weight` identifies the layer; `width` is the result's."""

    def __init__(self, method: Any, weight: str, width: int, most: int) -> None:
        self.method, self.weight, self.width, self.most = method, weight, width, most
        if hasattr(method, "embedding"):
            self.embedding = method.embedding

    def apply(self, layer: Any, x: Any, bias: Any = None) -> Any:
        """As vLLM's linear methods are called; Dynamo traces it and keeps the operator whole."""
        return torch.ops.vllm.nondet_own_product(x, getattr(layer, self.weight), self.width, bias)


def keep_own(layer: Any, dtype: torch.dtype, counts: Sequence[int]) -> None:
    """Have a quantized layer's own kernel run only at these certified row counts. The layer is found by its largest
    parameter: with the layer's name in the operator, torch.compile would compile each layer separately. Raises
    RuntimeError: it gives another dtype than it takes, or has no parameter."""
    sizes = {name: weight.numel() for name, weight in layer.named_parameters(recurse=False)}
    name, method = max(sizes, key=lambda one: sizes[one], default=""), layer.quant_method
    if not sizes.get(name):
        raise RuntimeError("it has no weight of its own")
    weight = getattr(layer, name).data
    with float32_default(), torch.inference_mode():
        made = method.apply(layer, torch.zeros(counts[0], width_of(layer), dtype=dtype, device=weight.device), None)
    if made.dtype != dtype:
        raise RuntimeError(f"it gives {made.dtype} for {dtype}")
    _owners[weight.data_ptr()] = layer
    vars(layer).pop("input_quant_key", None)  # else a kernel before it would pass it quantized numbers
    layer.quant_method = OwnMethod(method, name, made.shape[-1], counts[-1])


# FP8 layers by another kernel than their own.

# vLLM's kernels whose weights are stored as they were loaded: by columns [K, N], or in blocks [N, K]
_BY_ROWS = {
    "CutlassFP8ScaledMMLinearKernel", "FlashInferFP8ScaledMMLinearKernel", "PerTensorTorchFP8ScaledMMLinearKernel",
    "ChannelWiseTorchFP8ScaledMMLinearKernel", "RowWiseTorchFP8ScaledMMLinearKernel",
}  # fmt: skip
_IN_BLOCKS = {
    "CutlassFp8BlockScaledMMKernel", "TritonFp8BlockScaledMMKernel", "DeepGemmFp8BlockScaledMMKernel",
    "FlashInferFp8DeepGEMMDynamicBlockScaledKernel",
}  # fmt: skip
_GIVEN = ("input_scale", "input_scale_ub")  # of a layer: the one scale of its activations, the limit of theirs
_SCALES = "nondet_scales"  # of a replaced layer: [1, N], or in blocks [K / 128, N / 128]


class ScaledMethod:
    """Replaces a layer's method by the product that `replace_scaled` proved."""

    def apply(self, layer: Any, x: Any, bias: Any = None) -> Any:
        """As vLLM's linear methods are called; Dynamo traces it and keeps the operator whole."""
        given = (getattr(layer, name, None) for name in _GIVEN)
        return torch.ops.vllm.nondet_scaled_product(x, layer.weight, getattr(layer, _SCALES), *given, bias)


def unfit_scaled(layer: Any) -> str:
    """Why `ScaledMethod` can't compute a layer; "" where it can."""
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
        "a weight of another layout, or padded": (tuple(weight.shape), weight.stride())
        != (((N, K), (K, 1)) if blocks else ((K, N), (1, K))),
        f"scales of {scales.dtype} in {list(scales.shape)}": scales.dtype != torch.float32
        or (tuple(scales.shape) != shape if blocks else scales.numel() not in (1, N)),
        "activations in other shares than 128": blocks
        and (K % BLOCK > 0 or getattr(quantizer, "group_size", 0) != BLOCK or quantizer.use_ue8m0),
    }
    return ", ".join(what for what, applies in faults.items() if applies)


def _scales_of(layer: Any) -> torch.Tensor:
    found = getattr(layer, "weight_scale_inv", None)
    return (layer.weight_scale if found is None else found).data


def replace_scaled(
    layer: Any, counts: Sequence[int], dtype: torch.dtype, known: dict[tuple[Any, ...], Certified]
) -> None:
    """Give a layer our product, proven at each of these numbers of rows; layers of one layout, a key of `known`, once.
    Raises NotImplementedError: no member is proven here, or the whole has different bits at some number of rows."""
    scales, weight = _scales_of(layer), layer.weight.data
    scales = scales.t() if _in_blocks(weight) else scales.reshape(1, -1).expand(1, weight.shape[1])
    given = (weight, scales.contiguous(), *(getattr(layer, name, None) for name in _GIVEN), bias_of(layer))
    key = ("scaled", *((x.shape, x.stride()) if x is not None else None for x in given))

    def prove_all() -> None:
        for rows in counts:
            scaled_product(torch.zeros(rows, width, dtype=dtype, device=weight.device), *given)
        failed = first_size_that_differs(lambda x: scaled_product(x, *given), width, dtype, weight.device, counts)
        if failed is not None:
            raise NotImplementedError(f"its product gives a row different bits at M={failed} and M={counts[-1]}")

    width = layer.input_size_per_partition
    if key not in known:
        known[key] = certified(prove_all)
    layer.register_buffer(_SCALES, given[1], persistent=False)
    vars(layer).pop("input_quant_key", None)  # else a kernel before it would pass it quantized numbers
    layer.quant_method = ScaledMethod()
