"""FP8 layers under vLLM, against toys of its kernels: what stands is kept, what does not is replaced, or refused."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from nondet.core import compare
from nondet.engines import layers
from nondet.errors import UserError
from nondet.kernels import reference
from nondet.kernels.scaled import cpu
from nondet.kernels.scaled.functions import BLOCK, FLOAT8, quantize_block, quantize_by, quantize_row, quantize_tensor
from nondet.vllm import operators
from tests.vllm import toys
from tests.vllm.test_plugin import Toy, loaded
from tests.vllm.test_plugin import toy as toy

K, N = 512, 256


class CutlassFP8ScaledMMLinearKernel:
    """As vLLM's: one scale for a weight or for each of its columns; activations a row, or all of them, a scale."""

    def __init__(self, **of_quantizer: Any) -> None:
        self.quant_fp8 = SimpleNamespace(static=False, use_per_token_if_dynamic=True, use_ue8m0=False)
        vars(self.quant_fp8).update(of_quantizer)


class CutlassFp8BlockScaledMMKernel(CutlassFP8ScaledMMLinearKernel):
    """As vLLM's: weights in blocks of 128x128, activations in shares of 128."""

    def __init__(self, **of_quantizer: Any) -> None:
        super().__init__(**({"group_size": BLOCK} | of_quantizer))


class MarlinFP8ScaledMMLinearKernel(CutlassFP8ScaledMMLinearKernel):
    """One that multiplies in bfloat16."""


class Fp8LinearMethod:
    """As vLLM's; from `parts` rows on K is split in two, and each half's sum rounded."""

    def __init__(self, kernel: Any, parts: int = 10**9) -> None:
        self.fp8_linear, self.parts = kernel, parts

    def apply(self, layer: Any, x: torch.Tensor, bias: Any = None) -> torch.Tensor:
        q, left = rows_of(layer, x)
        blocks = hasattr(layer, "weight_scale_inv")
        b, right = (layer.weight.t(), layer.weight_scale_inv.t()) if blocks else (layer.weight, layer.weight_scale)
        right = right if blocks else right.reshape(1, -1).expand(1, N)
        if len(x) < self.parts:
            return cpu.in_order(q, b, left, right, x.dtype, bias)
        scales = ((left[:, :2], right[:2]), (left[:, 2:], right[2:])) if blocks else ((left, right),) * 2
        halves = zip(q.split(K // 2, 1), b.split(K // 2), scales, (None, bias), strict=True)
        first, second = (cpu.in_order(*ab, *scale, x.dtype, added) for *ab, scale, added in halves)
        return first + second


def rows_of(layer: Any, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """A layer's activations in FP8, and their scales."""
    if hasattr(layer, "weight_scale_inv"):
        return quantize_block(x)
    given = getattr(layer, "input_scale", None)
    if given is None and not getattr(layer, "per_tensor", False):
        return quantize_row(x, limit=getattr(layer, "input_scale_ub", None))
    q, scale = quantize_tensor(x) if given is None else quantize_by(given, x)
    return q, scale.expand(len(x), 1)


def fp8(kernel: Any, parts: int, bias: bool = False, scales: str = "row", **given: Any) -> Any:
    """A layer of vLLM's after its weights are loaded: [K, N] by columns, or [N, K] in blocks."""
    torch.manual_seed(0)
    layer = toys.QKVParallelLinear(K, N, Fp8LinearMethod(kernel, parts), bias)
    layer.output_size_per_partition = N
    if layer.bias is not None:
        layer.bias.data = layer.bias.data.bfloat16()
    wide = torch.randn(N, K) / 16
    if isinstance(kernel, CutlassFp8BlockScaledMMKernel):
        tiles = wide.view(N // BLOCK, BLOCK, K // BLOCK, BLOCK)
        scale = tiles.abs().amax((1, 3), keepdim=True) / 448
        layer.weight.data = (tiles / scale).view(N, K).to(FLOAT8[0])
        layer.weight_scale_inv = torch.nn.Parameter(scale[:, 0, :, 0].contiguous(), requires_grad=False)
    else:
        scale = (wide.abs().amax() if scales == "tensor" else wide.abs().amax(1, keepdim=True)) / 448
        layer.weight.data = (wide / scale).to(FLOAT8[0]).t()
        layer.weight_scale = torch.nn.Parameter(scale, requires_grad=False)
    for name, value in given.items():
        setattr(layer, name, value)
    return layer


ROWS, BLOCKS = CutlassFP8ScaledMMLinearKernel, CutlassFp8BlockScaledMMKernel
FORMS: dict[str, tuple[Any, dict[str, Any]]] = {
    "rows": (ROWS(), {}),
    "rows, a limit, a bias": (ROWS(), {"bias": True, "input_scale_ub": torch.tensor([2.0])}),
    "tensor, static": (ROWS(static=True), {"scales": "tensor", "input_scale": torch.tensor([0.01])}),
    "blocks": (BLOCKS(), {}),
}


@pytest.mark.parametrize("form", FORMS)
def test_what_stands_is_kept_and_else_replaced(toy: Toy, form: str) -> None:
    kernel, given = FORMS[form]
    sound, x = fp8(kernel, 10**9, **given), torch.randn(64, K, dtype=torch.bfloat16)
    before = sound(x)
    worker = loaded(toy, torch.nn.Sequential(sound))
    assert worker.of_nondet[0].standing == "certified stock"
    assert compare.identical(sound(x), before)
    assert worker.vllm_config.additional_config == {}
    layer = fp8(kernel, 32, **given)
    worker = loaded(toy, torch.nn.Sequential(layer))
    (standing,) = worker.of_nondet
    assert (standing.kind, standing.standing) == ("QKVParallelLinear by Fp8LinearMethod", "replaced")
    assert "chain-fp8" in standing.why
    assert worker.vllm_config.additional_config["nondet_scaled"] == ["0"], "the key of a compiled graph"
    whole = layer(x)
    for rows in (1, 3, 33, 64):
        assert compare.identical(layer(x[:rows]), whole[:rows])
        assert compare.identical(layer(x[-rows:]), whole[-rows:])
    assert compare.identical(layer(x.view(2, 32, K)), whole.view(2, 32, N))
    layer.quant_method = Fp8LinearMethod(kernel)  # the same scales, in the order of class chain-fp8
    assert compare.identical(whole, layer(x))
    q, left = rows_of(layer, x)
    blocks = form == "blocks"
    right = layer.weight_scale_inv.t() if blocks else layer.weight_scale.reshape(1, -1).expand(1, N)
    exact = reference.scaled_matmul(q, layer.weight.t() if blocks else layer.weight, left, right, x.dtype)
    exact = exact if layer.bias is None else exact + layer.bias.double()
    # one rounding to bfloat16, and float32 sums of K / 128 shares: far below a second rounding
    torch.testing.assert_close(whole.double(), exact, rtol=2**-8, atol=1e-5)


UNFIT: list[tuple[Any, tuple[str, Any] | None, str]] = [
    (MarlinFP8ScaledMMLinearKernel(), None, "no FP8 kernel that nondet has one for"),
    (ROWS(), ("weight", lambda w: w.float().to(torch.float8_e5m2)), "no FP8 kernel that nondet has one for"),
    (ROWS(), ("weight", lambda w: w.contiguous()), "a weight of another layout"),
    (ROWS(), ("weight_scale", lambda scale: scale.half()), r"scales of torch.float16 in \[256, 1\]"),
    (BLOCKS(group_size=64), None, "activations in other shares than 128"),
    (BLOCKS(use_ue8m0=True), None, "activations in other shares than 128"),
]


def test_what_has_no_form_of_ours_stays_at_risk(toy: Toy) -> None:
    for kernel, change, named in UNFIT:
        layer = fp8(kernel, 32)
        if change is not None:
            parameter = getattr(layer, change[0])
            parameter.data = change[1](parameter.data)
        kept = layer.quant_method
        with pytest.raises(UserError, match=f"1 layers are at risk.*; not replaced: .*{named}"):
            loaded(toy, torch.nn.Sequential(layer))
        assert layer.quant_method is kept


def test_ours_is_proven_and_not_believed(toy: Toy, monkeypatch: pytest.MonkeyPatch) -> None:
    """One scale for the whole batch, by vLLM's own choice or planted under our product: the layer stays at risk."""
    layer = fp8(CutlassFP8ScaledMMLinearKernel(use_per_token_if_dynamic=False), 10**9, per_tensor=True)
    with pytest.raises(UserError, match=r"different bits at M=1 and M=64; not replaced: one scale for all activations"):
        loaded(toy, torch.nn.Sequential(layer))

    def of_the_batch(rows: torch.Tensor, limit: Any = None) -> tuple[torch.Tensor, torch.Tensor]:
        q, scale = quantize_tensor(rows)
        return q, scale.expand(len(rows), 1).contiguous()

    monkeypatch.setattr(operators, "quantize_row", of_the_batch)
    layer = fp8(CutlassFP8ScaledMMLinearKernel(), 32)
    kept = layer.quant_method
    with pytest.raises(UserError, match="not replaced: its product gives a row different bits at M=1 and M=64"):
        loaded(toy, torch.nn.Sequential(layer))
    assert layer.quant_method is kept


def test_a_tracer_sees_the_shape(toy: Toy) -> None:
    loaded(toy, torch.nn.Sequential(fp8(CutlassFP8ScaledMMLinearKernel(), 10**9)))
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        x = torch.empty(3, 5, K, dtype=torch.bfloat16)
        by_columns = torch.empty(N, K, dtype=FLOAT8[0]).t()
        asked = torch.ops.vllm.nondet_scaled_product
        assert asked(x, by_columns, torch.empty(1, N)).shape == (3, 5, N)
        assert asked(x, torch.empty(N, K, dtype=FLOAT8[0]), torch.empty(K // BLOCK, N // BLOCK)).shape == (3, 5, N)
    assert layers.padded_rows(33) == 64
