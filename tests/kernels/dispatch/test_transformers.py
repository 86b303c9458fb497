"""transformers' gated MLPs on a CPU, no dispatcher in between: the bits of the operators, where nobody looks on."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import transformers as transformers_module
from transformers.models.llama import modeling_llama as modeling

from nondet.core.compare import identical
from nondet.core.inputs import generator, make
from nondet.core.launch import listen
from nondet.kernels.dispatch import transformers
from nondet.kernels.dispatch import transformers as hf_mlp
from nondet.kernels.dispatch.block import batch_invariant
from nondet.kernels.matmul import cpu as cpu_matmul
from nondet.kernels.matmul.cpu import linear_again, packed_again
from tests.kernels.tiers import at_length, in_full

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
    """At its first call and after it, for row counts with and without a library call of their own, and in full."""
    layer = mlp(dtype)
    short = []
    monkeypatch.setattr(hf_mlp, "_computed", _listening(hf_mlp._computed, short))
    with batch_invariant() as block:
        whole = layer(rows(64, dtype))
        for count in (64, 16, 3, 1):
            first, second = layer(rows(count, dtype)), layer(rows(count, dtype))
            with in_full():
                by_operators = layer(rows(count, dtype))
            assert identical(first, second)
            assert identical(first, by_operators)
            assert identical(first, whole[:, :count].contiguous())
        counted = block.coverage().replaced
    assert any(out is not None for out in short)
    assert dict(counted) == {"linear": 3 * 13, "silu": 13}


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


def packed_calls(notes: Counter[str]) -> int:
    return sum(times for note, times in notes.items() if "packed" in note)


@pytest.mark.parametrize(
    ("dtype", "width"),
    [(torch.bfloat16, 64), (torch.float32, 64), (torch.float32, 43), *at_length((torch.float32, 48))],
)
def test_two_packed_products_at_once_have_the_bits_of_each(dtype: torch.dtype, width: int) -> None:
    """Gate and up as one product, for widths that are whole vectors and others; a new number in one of them is seen."""
    layer, few = mlp(dtype, width), (64, 33, 4, 1)
    with batch_invariant() as block:
        right = {count: layer(rows(count, dtype, width)) for count in few}
        if not block.pack(layer):
            pytest.skip("oneDNN has no layout for it here")
        # where both have one class with their joint copy: of 48 inputs they have not on a CPU with AMX, in bfloat16
        joint = packed_again(rows(64, dtype, width), (layer.gate_proj.weight, layer.up_proj.weight)) is not None
        assert joint or width != 64
        for count in few:
            layer(rows(count, dtype, width))  # the third product's first call of this kind is no second one
            with listen() as notes:
                assert identical(layer(rows(count, dtype, width)), right[count])
            if 3 * width * count % 64 == 0:
                assert packed_calls(notes) == 1 + joint
        layer.up_proj.weight.mul_(2.0)
        with listen() as notes:
            assert identical(layer(rows(4, dtype, width)), right[4] * 2.0)
        assert packed_calls(notes) == 1


def test_a_product_found_again_is_that_of_the_weight_as_it_is() -> None:
    """New numbers in the weight's place are seen; another shape, dtype, layout or alignment is no call like before."""
    x, weight = rows(16, torch.float32)[0], torch.rand(48, 64, generator=generator(9, "cpu"))
    cpu_matmul._before.clear()  # an earlier test's calls may be like those that must not be found
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


# transformers' attention modules on a CPU, no dispatcher around attention: the operators' bits where nobody looks.

_TOKENS, _DIM = 24, 32


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


EACH = [("qwen3", torch.bfloat16), ("qwen2", torch.float32), ("llama", torch.float32)]


@pytest.mark.parametrize(("model", "dtype"), EACH)
def test_attention_has_the_bits_of_the_operators(model: str, dtype: torch.dtype) -> None:
    """At its first call, by the short way after it, and in full; the coverage says the same of all three."""
    layer = attention(model, dtype)
    x, places = inputs(dtype)
    with batch_invariant() as block:
        first = layer(x, places, None)[0]
        counted = dict(block.coverage().replaced)
    with batch_invariant() as block:
        second = layer(x, places, None)[0]
        assert dict(block.coverage().replaced) == counted
        with in_full():
            by_operators = layer(x, places, None)[0]
    assert identical(first, second)
    assert identical(first, by_operators)
    stock = layer(x, places, None)[0]
    assert stock.shape == first.shape


@pytest.mark.parametrize(("model", "dtype"), EACH)
def test_packed_projections_at_once_have_the_bits_of_each(model: str, dtype: torch.dtype) -> None:
    """Three products as one, queries and keys normed and rotated together; by themselves where a bias goes with them
    (Qwen2), where the norms are of two kinds, and where a weight has changed."""
    layer = attention(model, dtype)
    given = [inputs(dtype, tokens) for tokens in (1, 3, _TOKENS)]

    def results() -> list[torch.Tensor]:
        return [layer(x, places, None)[0] for x, places in given]

    def packed() -> tuple[list[torch.Tensor], int]:
        results()
        with listen() as notes:
            return results(), packed_calls(notes) // len(given)

    def same(a: list[torch.Tensor], b: list[torch.Tensor]) -> bool:
        return all(map(identical, a, b))

    with batch_invariant() as block:
        right = results()
        if not block.pack(layer):
            pytest.skip("oneDNN has no layout for it here")
        found, calls = packed()
        assert same(found, right)
        assert calls == (4 if model == "qwen2" else 2)
        if model == "qwen3":
            before, layer.k_norm.variance_epsilon = layer.k_norm.variance_epsilon, 0.5
            found, calls = packed()
            with in_full():
                assert same(found, results())
            assert calls == 2
            assert not same(found, right)
            layer.k_norm.variance_epsilon = before
        layer.k_proj.weight.mul_(-1.0)
        found, calls = packed()
        with in_full():
            assert same(found, results())
        assert calls == (3 if model == "qwen2" else 1)
        assert not same(found, right)


def test_a_hook_on_a_part_of_attention_is_called() -> None:
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


# Somebody's function in the place of one that a stand-in would skip: it is called, every time, or nothing is
# replaced.
#
# Each is held against the same patched model without nondet, at the second and third call of a shape, where the short
# ways are open. A tolerance tells a skipped function (off by tenths) from another order of sums (2e-4 in logits of
# 21).

Patch = Callable[[pytest.MonkeyPatch], None]


def model_of() -> Any:
    torch.manual_seed(0)
    config = transformers_module.LlamaConfig(
        hidden_size=128, intermediate_size=256, num_hidden_layers=1, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=300, max_position_embeddings=128, initializer_range=0.2,
    )  # fmt: skip
    return transformers_module.LlamaForCausalLM(config).eval()


def doubled(function: Any) -> Any:
    """A wrapper that says that it is what it wraps."""

    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        out = function(*args, **kwargs)
        return (out[0] * 2, *out[1:]) if isinstance(out, tuple) else out * 2

    return wrapper


def scaled_linear(patch: pytest.MonkeyPatch) -> None:
    own = torch.nn.Linear.forward
    patch.setattr(torch.nn.Linear, "forward", lambda self, x: own(self, x) * 1.5)


def scaled_product(patch: pytest.MonkeyPatch) -> None:
    own = torch.nn.functional.linear
    patch.setattr(torch.nn.functional, "linear", lambda *args: own(*args) * 1.5)


def wrapped(owner: Any, name: str) -> Patch:
    return lambda patch: patch.setattr(owner, name, doubled(vars(owner)[name]))


PATCHES: dict[str, Patch] = {
    "Linear.forward": scaled_linear,
    "F.linear": scaled_product,
    "attention": wrapped(modeling.LlamaAttention, "forward"),
    "mlp": wrapped(modeling.LlamaMLP, "forward"),
    "norm": wrapped(modeling.LlamaRMSNorm, "forward"),
    "rotary": wrapped(modeling, "apply_rotary_pos_emb"),
}


def logits(model: Any) -> torch.Tensor:
    ids = torch.arange(1, 20)[None]
    with torch.no_grad():
        return model(ids, use_cache=False).logits


@pytest.mark.parametrize("name", PATCHES)
def test_what_stands_in_a_functions_place_is_called(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With functools.wraps or without, put there before a block or after one has ended."""
    model = model_of()
    plain = logits(model)
    with monkeypatch.context() as patch:
        PATCHES[name](patch)
        wanted = logits(model)
        assert not torch.allclose(wanted, plain, atol=1e-2), "the patch changes something"
        for _ in range(2):
            with batch_invariant():
                for _ in range(2):
                    assert torch.allclose(logits(model), wanted, rtol=1e-4, atol=1e-3)
    with batch_invariant():
        for _ in range(2):
            assert torch.allclose(logits(model), plain, rtol=1e-4, atol=1e-3)
    PATCHES[name](monkeypatch)  # after a block, whose short ways were open for the function as it is
    with batch_invariant():
        for _ in range(3):
            assert torch.allclose(logits(model), wanted, rtol=1e-4, atol=1e-3)


def test_a_rotary_embedding_put_there_inside_a_block(monkeypatch: pytest.MonkeyPatch) -> None:
    """The attention module's short way looks at who rotates now."""
    model = model_of()
    with batch_invariant():
        logits(model)
        monkeypatch.setattr(modeling, "apply_rotary_pos_emb", lambda q, k, *_, **__: (q * 2, k))
        inside = [logits(model) for _ in range(3)]
        monkeypatch.undo()
    monkeypatch.setattr(modeling, "apply_rotary_pos_emb", lambda q, k, *_, **__: (q * 2, k))
    wanted = logits(model)
    assert all(torch.allclose(x, wanted, rtol=1e-4, atol=1e-3) for x in inside)


def test_an_attention_class_of_another_module() -> None:
    """One that inherits a known forward has the eager attention of the module that wrote it, and no other."""

    class Mine(modeling.LlamaAttention):
        pass

    model = model_of()
    model.set_attn_implementation("eager")
    wanted = logits(model)
    for layer in model.model.layers:
        layer.self_attn.__class__ = Mine
    with batch_invariant():
        for _ in range(3):
            assert torch.allclose(logits(model), wanted, rtol=1e-4, atol=1e-3)


def test_a_weight_that_is_no_parameter_goes_by_the_module() -> None:
    """FSDP and others keep it as an attribute of its own."""
    model = model_of()
    wanted = logits(model)
    for part in (model.model.layers[0].self_attn.q_proj, model.model.layers[0].mlp.up_proj):
        weight = part.weight.data
        del part.weight
        part.weight = weight
    with batch_invariant():
        for _ in range(2):
            assert torch.allclose(logits(model), wanted, rtol=1e-4, atol=1e-3)
