"""transformers' attention modules on a CPU, no dispatcher around attention: the operators' bits where nobody looks."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from nondet.core.compare import identical
from nondet.core.inputs import generator, make
from nondet.kernels.dispatch import transformers
from nondet.kernels.dispatch.block import batch_invariant, on_call

DTYPES = [torch.bfloat16, torch.float32]
MODELS = ["qwen3", "qwen2", "llama"]
_TOKENS, _DIM = 24, 32


@pytest.fixture(autouse=True)
def _no_gradients() -> Iterator[None]:
    with torch.no_grad():
        yield


def attention(model: str, dtype: torch.dtype) -> Any:
    """A layer of 4 heads over 2 of keys, whose norms are no ones."""
    from transformers.models.llama import modeling_llama
    from transformers.models.qwen2 import modeling_qwen2
    from transformers.models.qwen3 import modeling_qwen3

    names = {"qwen3": "Qwen3", "qwen2": "Qwen2", "llama": "Llama"}
    source = vars({"qwen3": modeling_qwen3, "qwen2": modeling_qwen2, "llama": modeling_llama}[model])
    config = source[f"{names[model]}Config"](
        hidden_size=128, num_attention_heads=4, num_key_value_heads=2, head_dim=_DIM, num_hidden_layers=1
    )
    config._attn_implementation = "sdpa"
    torch.manual_seed(3)
    layer = source[f"{names[model]}Attention"](config, 0).eval()
    for name, parameter in layer.named_parameters():
        if "norm" in name:
            parameter.copy_(torch.rand(_DIM) + 0.5)
    return layer.to(dtype)


def inputs(dtype: torch.dtype, tokens: int = _TOKENS) -> tuple[torch.Tensor, tuple[torch.Tensor, torch.Tensor]]:
    x = make("bell", (1, _TOKENS, 128), dtype, "cpu", generator(8, "cpu"))[:, :tokens].clone()
    angles = torch.arange(tokens)[:, None] / 10000.0 ** (torch.arange(_DIM // 2) / (_DIM // 2))
    whole = torch.cat((angles, angles), -1)[None]
    return x, (whole.cos().to(dtype), whole.sin().to(dtype))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("model", MODELS)
def test_it_has_the_bits_of_the_operators(monkeypatch: pytest.MonkeyPatch, model: str, dtype: torch.dtype) -> None:
    """At its first call, by the short way after it, and as hooks see it; the coverage says the same of all three."""
    layer = attention(model, dtype)
    short = []
    honest = transformers._projected

    def listening(*args: Any) -> Any:
        short.append(honest(*args))
        return short[-1]

    monkeypatch.setattr(transformers, "_projected", listening)
    x, places = inputs(dtype)
    with batch_invariant() as block:
        first = layer(x, places, None)[0]
        assert short.pop() is None
        counted = dict(block.coverage().replaced)
    with batch_invariant() as block:
        second = layer(x, places, None)[0]
        assert short.pop() is not None
        assert dict(block.coverage().replaced) == counted
        with on_call(lambda call: None):
            by_operators = layer(x, places, None)[0]
        assert not short
    assert identical(first, second)
    assert identical(first, by_operators)
    stock = layer(x, places, None)[0]
    assert stock.shape == first.shape


def test_a_hook_on_a_part_is_called() -> None:
    """Adapters and traces hang on the projections and norms: such a module runs as it did."""
    layer, (x, places) = attention("qwen3", torch.float32), inputs(torch.float32)
    with batch_invariant():
        right = [layer(x, places, None)[0] for _ in range(2)][1]
        for part in (layer.k_proj, layer.q_norm):
            handle = part.register_forward_hook(lambda module, args, out: out * 2)
            doubled = layer(x, places, None)[0]
            handle.remove()
            assert not identical(doubled, right)
        assert identical(layer(x, places, None)[0], right)


def test_a_cache_of_the_modules_own_is_left_to_it() -> None:
    """A prefill and one token behind it, by a cache that the module updates: the last row of the whole."""
    from transformers import DynamicCache

    layer = attention("qwen3", torch.bfloat16)
    x, (cos, sin) = inputs(torch.bfloat16)
    with batch_invariant():
        whole = layer(x, (cos, sin), None)[0]
        cache = DynamicCache()
        layer(x[:, :-1], (cos[:, :-1], sin[:, :-1]), None, cache)
        last = layer(x[:, -1:], (cos[:, -1:], sin[:, -1:]), None, cache)[0]
    assert identical(last[0, 0], whole[0, -1])


def test_other_texts_have_no_form() -> None:
    """What is not the known text is not taken, by whatever name it goes."""

    class Qwen3Attention(torch.nn.Module):
        def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
            return hidden_states

    assert transformers.form_of_projections(Qwen3Attention) is None
    assert transformers.form_of_projections(type(attention("qwen3", torch.float32))) == transformers.ProjectionsForm(
        normed=True, window=True
    )
