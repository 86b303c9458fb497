"""transformers' eager attention under `batch_invariant()`: Gemma 2 with its soft cap and windows, and what is left."""

from __future__ import annotations

import functools
import sys
from dataclasses import fields
from itertools import pairwise
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
import transformers

from nondet.core.compare import error_against, identical
from nondet.kernels.dispatch import transformers_attention as hf_eager
from nondet.kernels.dispatch.block import batch_invariant

WINDOW, LENGTH, PADDING, VOCABULARY = 12, 41, 14, 384
AT_RISK = "transformers eager attention: sums over padded keys"
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


@functools.cache
def model_of(name: str, device: str = "cpu") -> Any:
    """A tiny random model; gemma2 with a window in its first layer, none in its second, and caps low enough to bend."""
    torch.manual_seed(0)
    more: dict[str, Any] = {}
    if name == "gemma2":
        more = {"sliding_window": WINDOW, "layer_types": ["sliding_attention", "full_attention"]}
        more |= {"query_pre_attn_scalar": 32, "attn_logit_softcapping": 0.5}
    config = transformers.AutoConfig.for_model(
        name,
        vocab_size=VOCABULARY,
        hidden_size=96,
        intermediate_size=200,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=256,
        pad_token_id=0,
        bos_token_id=None,
        eos_token_id=None,
        **more,
    )
    return transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval().to(device)


def tokens(*shape: int, seed: int) -> torch.Tensor:
    return torch.randint(1, VOCABULARY, shape, generator=torch.Generator().manual_seed(seed))


def ways(model: Any) -> dict[str, torch.Tensor]:
    """Logits [8, V] of the prompt's end: alone, left-padded, in chunks, and decoded from a cache that drops keys."""
    prompt = tokens(1, LENGTH, seed=1)
    ids = torch.cat([torch.zeros(1, PADDING, dtype=torch.long), prompt], 1)
    ids = torch.cat([ids, tokens(1, LENGTH + PADDING, seed=2)]).to(model.device)
    prompt, mask = prompt.to(model.device), torch.ones_like(ids)
    mask[0, :PADDING] = 0
    position = (mask.cumsum(-1) - 1).clamp_min(0)

    def steps(cache: Any, borders: list[int]) -> torch.Tensor:
        parts = [model(prompt[:, a:b], past_key_values=cache, use_cache=True).logits[0] for a, b in pairwise(borders)]
        return torch.cat(parts)[-8:]

    return {
        "alone": model(prompt).logits[0, -8:],
        "left-padded": model(ids, attention_mask=mask, position_ids=position).logits[0, -8:],
        "in chunks": steps(transformers.DynamicCache(), [0, 7, 30, LENGTH - 1, LENGTH]),
        "decoded": steps(transformers.DynamicCache(config=model.config), [0, 5, *range(28, LENGTH + 1)]),
    }


def parted(found: dict[str, torch.Tensor]) -> list[str]:
    return [way for way, logits in found.items() if not identical(logits.contiguous(), found["alone"].contiguous())]


@pytest.mark.parametrize("name", ["gemma2", "qwen3"])
@pytest.mark.parametrize("device", DEVICES)
def test_eager_attention_has_one_answer(name: str, device: str) -> None:
    """With a soft cap and windows, and without: equal bits in every way, unlike stock, at stock's accuracy."""
    model = model_of(name, device)
    with torch.no_grad():
        stock = ways(model)
        with batch_invariant() as block:
            invariant = ways(model)
        assert identical(ways(model)["alone"], stock["alone"])
    assert parted(stock), "stock kernels should part somewhere, or this test shows nothing"
    assert parted(invariant) == []
    assert block.coverage().replaced["transformers eager attention"] > 0
    assert (block.coverage().at_risk, block.coverage().left) == ({}, {})
    torch.testing.assert_close(invariant["alone"], stock["alone"], rtol=1e-4, atol=1e-5)


def test_the_cap_is_computed() -> None:
    """Against float64: what bends the scores is the model's cap, and it bends them."""
    q, k, v = (4 * torch.rand(1, h, 30, 32, generator=torch.Generator().manual_seed(h)) - 2 for h in (4, 2, 2))
    mask = torch.full((1, 1, 30, 30), torch.finfo(torch.float32).min).triu(1)
    layer = SimpleNamespace(training=False, num_key_value_groups=2, head_dim=32)
    scores = q.double() @ k.double().repeat_interleave(2, 1).mT / 32**0.5

    def right(s: torch.Tensor) -> torch.Tensor:
        return (torch.softmax(s + mask.double(), -1) @ v.double().repeat_interleave(2, 1)).transpose(1, 2)

    got = hf_eager._compute(layer, q, k, v, mask, softcap=0.5)
    assert got is not None
    assert error_against(got, right(torch.tanh(scores / 0.5) * 0.5)).relative_norm < 1e-6
    assert error_against(got, right(scores)).relative_norm > 1e-2


def test_what_it_cannot_compute_is_said() -> None:
    """Attention weights asked for, and attention that is left out: the original runs, its bits and its note with it."""
    model = model_of("qwen3")
    ids = tokens(1, 9, seed=3)
    with torch.no_grad(), batch_invariant() as block:
        found = model(ids, output_attentions=True).attentions
    assert [tuple(x.shape) for x in found] == [(1, 4, 9, 9)] * 2
    assert block.coverage().at_risk[AT_RISK] == 2
    with torch.no_grad(), batch_invariant(["matmul"]) as block:
        model(ids)
    assert block.coverage().at_risk[AT_RISK] == 2


def test_compiled_attention_is_not_traced() -> None:
    """torch.compile would take the kernels apart: eager attention and full windows run stock under it, and are said."""
    model = model_of("gemma2")
    ids = tokens(1, 30, seed=4)
    with torch.no_grad(), batch_invariant() as block:
        compiled = torch.compile(model, backend="eager")(ids).logits
        torch.testing.assert_close(compiled, model(ids).logits, rtol=1e-4, atol=1e-5)
    assert block.coverage().at_risk[AT_RISK] > 0


def test_a_copy_with_other_code_is_not_guessed_at(monkeypatch: pytest.MonkeyPatch) -> None:
    """A model whose eager attention does something else keeps it, and is at risk; afterwards all is put back."""
    other = ModuleType("transformers.models.other.modeling_other")
    other.eager_attention_forward = original = lambda *args, **kwargs: "its own"  # type: ignore[attr-defined]  # a model's
    monkeypatch.setitem(sys.modules, other.__name__, other)
    with batch_invariant() as block:
        assert other.eager_attention_forward(None, None, None, None, None) == "its own"
    assert block.coverage().at_risk == {AT_RISK: 1}
    assert other.eager_attention_forward is original


def generate(model: Any, prompts: list[list[int]], budget: int) -> list[Any]:
    """(tokens, logprobs) of each prompt, in order, from transformers' own continuous batching."""
    from transformers.generation.configuration_utils import ContinuousBatchingConfig

    known = {f.name for f in fields(ContinuousBatchingConfig)}
    before = model.config._attn_implementation
    model.set_attn_implementation("paged|eager")
    config = ContinuousBatchingConfig(
        **{"page_size" if "page_size" in known else "block_size": 16},
        **({"auto_switch_to_flash": False} if "auto_switch_to_flash" in known else {}),
        num_blocks=200,
        max_batch_tokens=budget,
        max_blocks_per_request=0,
        use_async_batching=False,
        use_cuda_graph=False,
        safety_margin=0.0,
        return_logprobs=True,
    )
    try:
        found = model.generate_batch(
            prompts,
            generation_config=transformers.GenerationConfig(do_sample=False, eos_token_id=-1, max_new_tokens=9),
            continuous_batching_config=config,
            progress_bar=False,
        )
    finally:
        model.set_attn_implementation(before)
    ordered = sorted(found.values(), key=lambda o: int(o.request_id.rsplit("_", 1)[-1]))
    return [(o.generated_tokens, o.logprobs) for o in ordered]


@pytest.mark.parametrize("device", DEVICES)
def test_continuous_batching_of_both_kinds_of_layers(device: str) -> None:
    """Paged caches of a window and of all keys in one model, with a soft cap: a request has one answer under load."""
    model = model_of("gemma2", device)
    target = tokens(40, seed=40).tolist()
    others = [tokens(n, seed=n).tolist() for n in (50, 3, 33, 17)]
    with batch_invariant() as block:
        right = generate(model, [target], 64)[0]
        loaded = generate(model, [*others, target], 64)[-1]
        chunked = generate(model, [target, *others], 23)[0]
    assert [loaded == right, chunked == right] == [True, True]
    # not of a plain forward pass: whether there is a cap under pages follows the version of transformers
    stock = generate(model, [target], 64)[0]
    assert right[0][0] == stock[0][0]
    assert right[1][0] == pytest.approx(stock[1][0], abs=1e-4)
    assert block.coverage().replaced["transformers attention 'paged|eager', paged"] > 0
    assert block.coverage().at_risk == {}
