"""Whole decoders under `batch_invariant()` on a CPU: one prompt's logits, however they are batched or chunked."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch

from nondet.core.compare import identical
from nondet.kernels.dispatch.block import batch_invariant
from nondet.kernels.dispatch.state import Coverage

_COMMON = {
    "vocab_size": 384,
    "hidden_size": 256,
    "intermediate_size": 640,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_LAYERS = ["sliding_attention", "full_attention"]
ARCHITECTURES: dict[str, dict[str, Any]] = {
    "qwen3": {},
    "llama": {"attention_bias": True, "mlp_bias": True},
    "mistral": {"sliding_window": 64},
    "gemma3_text": {"sliding_window": 64, "query_pre_attn_scalar": 64, "layer_types": _LAYERS},
    "gemma2": {"query_pre_attn_scalar": 64, "layer_types": _LAYERS},
    "qwen3_moe": {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 128},
}
_PROMPT, _CHUNK = 41, 17


@functools.cache
def model_of(name: str, window: int | None = None, attention: str = "sdpa") -> Any:
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    more = {"sliding_window": window} if window else {}
    config = AutoConfig.for_model(name, **_COMMON | ARCHITECTURES[name] | more)
    return AutoModelForCausalLM.from_config(config, attn_implementation=attention).eval()


def ways(model: Any) -> dict[str, torch.Tensor]:
    """The logits of the prompt's last 8 tokens [8, V]: alone, left-padded among longer ones, and in chunks."""
    from transformers import DynamicCache

    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(3, _COMMON["vocab_size"], (3, _PROMPT + 14), generator=generator)
    prompt = ids[1:2, 14:]
    mask = torch.ones_like(ids)
    mask[1, :14] = 0
    mask[2, :5] = 0
    places = (mask.cumsum(-1) - 1).clamp(min=0)
    cache = DynamicCache()
    model(input_ids=prompt[:, :_CHUNK], past_key_values=cache, use_cache=True)
    steps = [model(input_ids=prompt[:, _CHUNK:-1], past_key_values=cache, use_cache=True).logits[0]]
    steps.append(model(input_ids=prompt[:, -1:], past_key_values=cache, use_cache=True).logits[0])
    return {
        "alone": model(input_ids=prompt, use_cache=False).logits[0, -8:],
        "in a batch": model(input_ids=ids, attention_mask=mask, position_ids=places, use_cache=False).logits[1, -8:],
        "in chunks": torch.cat(steps)[-8:],
    }


def parted(found: dict[str, torch.Tensor]) -> list[str]:
    return [way for way, logits in found.items() if not identical(logits.contiguous(), found["alone"].contiguous())]


@pytest.mark.parametrize("name", [name for name in ARCHITECTURES if name != "gemma2"])
def test_logits_are_those_of_the_prompt_alone(name: str) -> None:
    """Alone, in a padded batch and in chunks: equal bits under the block, unlike stock, and nothing left or at risk."""
    model = model_of(name)
    with torch.no_grad():
        stock = ways(model)
        with batch_invariant() as block:
            invariant = ways(model)
    assert parted(stock), "stock kernels should part somewhere, or this test shows nothing"
    assert parted(invariant) == []
    assert exposed(block.coverage()) == []
    torch.testing.assert_close(invariant["alone"], stock["alone"], rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("name", ["mistral", "gemma3_text"])
def test_a_window_is_computed_or_said(name: str) -> None:
    """Beyond a sliding window: either no bit depends on the company, or the coverage says what may."""
    model = model_of(name, 12)
    with torch.no_grad(), batch_invariant() as block:
        found = ways(model)
    assert not parted(found) or exposed(block.coverage())
    assert block.coverage().replaced["linear"] > 0


def test_eager_attention_is_computed() -> None:
    """Gemma 2's soft cap has no scaled_dot_product_attention: its eager attention has kernels, in a window too."""
    model = model_of("gemma2", 12, "eager")
    with torch.no_grad():
        assert parted(ways(model)), "stock kernels should part somewhere, or this test shows nothing"
        with batch_invariant() as block:
            found = ways(model)
    assert parted(found) == []
    assert exposed(block.coverage()) == []


def exposed(coverage: Coverage) -> list[str]:
    """What may depend on the batch."""
    return sorted([*coverage.left, *coverage.at_risk])


def test_a_family_left_out_is_at_risk() -> None:
    """Without the products' family the same model parts, and the coverage names them."""
    with torch.no_grad(), batch_invariant(["norm", "softmax", "reduction", "pointwise", "attention"]) as block:
        found = ways(model_of("qwen3"))
    assert parted(found)
    assert "mm float32" in block.coverage().at_risk
