"""transformers' gated MLPs on a CPU, no dispatcher in between: the bits of the operators, where nobody looks on."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from nondet.core.compare import identical
from nondet.core.inputs import generator, make
from nondet.kernels.dispatch import transformers as hf_mlp
from nondet.kernels.dispatch.block import batch_invariant, on_call
from nondet.kernels.matmul.cpu import linear_again

DTYPES = [torch.bfloat16, torch.float32]


@pytest.fixture(autouse=True)
def _no_gradients() -> Iterator[None]:
    with torch.no_grad():
        yield


def mlp(dtype: torch.dtype, width: int = 64) -> Any:
    from transformers.models.qwen3.modeling_qwen3 import Qwen3Config, Qwen3MLP

    torch.manual_seed(3)
    return Qwen3MLP(Qwen3Config(hidden_size=width, intermediate_size=3 * width)).to(dtype)


def rows(count: int, dtype: torch.dtype, width: int = 64) -> torch.Tensor:
    return make("bell", (1, 64, width), dtype, "cpu", generator(8, "cpu"))[:, :count].clone()


@pytest.mark.parametrize("dtype", DTYPES)
def test_it_has_the_bits_of_the_operators(monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype) -> None:
    """At its first call and after it, for row counts with and without a library call of their own, and as hooks see."""
    layer = mlp(dtype)
    short = []
    monkeypatch.setattr(hf_mlp, "_computed", _listening(hf_mlp._computed, short))
    with batch_invariant() as block:
        whole = layer(rows(64, dtype))
        for count in (64, 32, 16, 3, 1):
            first, second = layer(rows(count, dtype)), layer(rows(count, dtype))
            with on_call(lambda call: None):
                by_operators = layer(rows(count, dtype))
            assert identical(first, second)
            assert identical(first, by_operators)
            assert identical(first, whole[:, :count].contiguous())
        counted = block.coverage().replaced
    assert any(out is not None for out in short)
    assert dict(counted) == {"linear": 3 * 16, "silu": 16}


def _listening(function: Any, seen: list[Any]) -> Any:
    def call(*args: Any) -> Any:
        seen.append(function(*args))
        return seen[-1]

    return call


def test_a_hook_on_a_part_is_called() -> None:
    """Adapters and traces hang on the linear layers: a part with a hook, or of another class, is called as a module."""
    layer, x = mlp(torch.float32), rows(16, torch.float32)
    with batch_invariant():
        right = layer(x)
        layer(x)
        handle = layer.up_proj.register_forward_hook(lambda module, args, out: out * 2)
        doubled = layer(x)
        handle.remove()
        assert identical(layer(x), right)
        assert not identical(doubled, right)

        class Halved(torch.nn.Linear):
            def forward(self, x: torch.Tensor) -> torch.Tensor:
                return super().forward(x) / 2

        layer.down_proj.__class__ = Halved
        assert identical(layer(x), right / 2)


def test_a_mode_sees_the_operators() -> None:
    """A tracer's function mode in this thread is shown the module's own calls, not those that a stand-in makes."""
    from torch.overrides import TorchFunctionMode

    seen = []

    class Mode(TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(getattr(func, "__name__", ""))
            return func(*args, **(kwargs or {}))

    layer, x = mlp(torch.float32), rows(16, torch.float32)
    with batch_invariant():
        right = layer(layer(x))
        with Mode():
            out = layer(layer(x))
    assert identical(out, right)
    assert seen.count("linear") == 6
    assert "new_empty" not in seen


def test_half_of_its_families_is_not_enough() -> None:
    """An ablation that replaces products alone leaves silu to torch, and says so."""
    layer, x = mlp(torch.float32), rows(16, torch.float32)
    with batch_invariant(["matmul"]) as block:
        for _ in range(3):
            layer(x)
    assert dict(block.coverage().replaced) == {"linear": 9}
    assert block.coverage().at_risk["silu float32"] == 3


def test_other_texts_are_not_recognized() -> None:
    """Llama's and Gemma's MLPs are gated ones; one with another formula is not, and the class is itself afterwards."""
    from transformers.models.gemma3.modeling_gemma3 import Gemma3MLP
    from transformers.models.gpt_neox.modeling_gpt_neox import GPTNeoXMLP
    from transformers.models.llama.modeling_llama import LlamaMLP

    original = LlamaMLP.forward
    assert hf_mlp.is_known(LlamaMLP)
    assert hf_mlp.is_known(Gemma3MLP)
    assert not hf_mlp.is_known(GPTNeoXMLP)
    with batch_invariant():
        assert LlamaMLP.forward is not original
    assert LlamaMLP.forward is original


def test_a_product_found_again_is_that_of_the_weight_as_it_is() -> None:
    """New numbers in the weight's place are seen; another shape, dtype, layout or alignment is no call like before."""
    x, weight = rows(16, torch.float32)[0], torch.rand(48, 64, generator=generator(9, "cpu"))
    with batch_invariant():
        right = torch.nn.functional.linear(x, weight)
        again = linear_again(x, weight)
        assert again is not None
        assert identical(again, right)
        weight.mul_(3.0)
        other = linear_again(x, weight)
        assert other is not None
        assert identical(other, torch.nn.functional.linear(x, weight.clone()))
        assert not identical(other, right)
        assert linear_again(x, weight[:32]) is None
        assert linear_again(x, weight.view(-1).as_strided((48, 64), (1, 48))) is None
        assert linear_again(x, weight.view(torch.int32)) is None
        assert linear_again(x.new_empty(16, 65)[:, 1:].copy_(x), weight) is None
        assert linear_again(x.new_empty(16 * 64 + 1)[1:].view(16, 64).copy_(x), weight) is None
        threads = torch.get_num_threads()
        torch.set_num_threads(threads + 1)
        try:
            assert linear_again(x, weight) is None
        finally:
            torch.set_num_threads(threads)


def test_autocast_chooses_the_dtype_before_and_after_a_first_call() -> None:
    """A product found again goes past autocast's key: one shape in float32 and another in bfloat16 was two classes."""
    layer = mlp(torch.float32)
    with batch_invariant():
        layer(rows(64, torch.float32))
        with torch.autocast("cpu", torch.bfloat16):
            whole, part = layer(rows(64, torch.float32)), layer(rows(16, torch.float32))
    assert whole.dtype == part.dtype == torch.bfloat16
    assert identical(whole[:, :16].contiguous(), part)


def test_what_only_looks_like_its_parts_is_left_alone() -> None:
    """Another class of the name SiLU, and weights of a class that computes its own products."""

    class SiLU(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * torch.sigmoid(1.702 * x)

    class Doubling(torch.nn.Parameter):
        pass

    layer = mlp(torch.float32)
    assert hf_mlp._plain(layer)
    activation, layer.act_fn = layer.act_fn, SiLU()
    assert not hf_mlp._plain(layer)
    layer.act_fn = activation
    layer.down_proj.weight = Doubling(layer.down_proj.weight.data)
    assert not hf_mlp._plain(layer)
