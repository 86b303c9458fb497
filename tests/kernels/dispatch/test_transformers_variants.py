"""Soft caps and hybrid windows under `batch_invariant()`: the stand-ins compute the model that the originals do."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers

from nondet.core.compare import identical
from nondet.kernels.dispatch.block import batch_invariant
from tests.kernels.dispatch.test_transformers_attention import generate

_WINDOW, _LENGTH = 8, 20
_PROMPTS = [list(range(3, 3 + n)) for n in (30, 7, 19)]


def called(softcap: float | None, mask: torch.Tensor | None) -> torch.Tensor | str:
    """What transformers' table has under "sdpa" gives for one layer with a window, or the reason that it gives none."""
    from transformers.modeling_utils import AttentionInterface

    q, k, v = (4 * torch.rand(1, h, _LENGTH, 16, generator=torch.Generator().manual_seed(h)) for h in (4, 2, 2))
    layer = SimpleNamespace(num_key_value_groups=2, is_causal=True)
    places: dict[str, Any] = {"position_ids": torch.arange(_LENGTH)[None], "sliding_window": _WINDOW}
    try:
        out: torch.Tensor = AttentionInterface()["sdpa"](layer, q, k, v, mask, scaling=0.25, softcap=softcap, **places)[
            0
        ]
    except ValueError as error:
        return str(error)
    return out


def window() -> torch.Tensor:
    ahead = torch.arange(_LENGTH)[:, None] - torch.arange(_LENGTH)
    return ((ahead >= 0) & (ahead < _WINDOW))[None, None]


@pytest.mark.parametrize("mask", [None, window()], ids=["all keys", "a window"])
def test_sdpa_makes_of_a_cap_what_it_makes_of_it_outside(mask: torch.Tensor | None) -> None:
    """transformers' sdpa leaves a cap out before 5.23 and refuses it since; the stand-in does so in a window, too."""
    stock = called(0.5, mask)
    with torch.no_grad(), batch_invariant():
        capped, plain = called(0.5, mask), called(None, mask)
    if isinstance(stock, str):
        assert capped == stock
    else:
        assert isinstance(capped, torch.Tensor)
        assert isinstance(plain, torch.Tensor)
        assert identical(capped, plain)
        torch.testing.assert_close(capped, stock, rtol=1e-4, atol=1e-5)


# what the engine makes of it -> model type, what is its own, the engine's attention
ENGINES: dict[str, tuple[str, dict[str, Any], str]] = {
    "no soft cap": ("gemma2", {"query_pre_attn_scalar": 1, "attn_logit_softcapping": 0.05}, "eager"),
    "a window in the mask alone": ("phimoe", {"num_local_experts": 2, "num_experts_per_tok": 1}, "sdpa"),
    "the call's window, not the module's": ("exaone4", {"sliding_window_pattern": 2}, "sdpa"),
}


@pytest.mark.parametrize("what", ENGINES)
def test_the_engine_computes_the_same_model_as_stock(what: str) -> None:
    """The engine's attention has no cap; EXAONE 4's full layers keep a window's size, Phi-3.5-MoE's name none."""
    name, more, implementation = ENGINES[what]
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}
    heads = {"num_key_value_heads": 2, "head_dim": 16, "sliding_window": 16, "initializer_range": 0.3}
    places = {"vocab_size": 384, "pad_token_id": 0, "bos_token_id": None, "eos_token_id": None}
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(name, **sizes, **heads, **places, **more)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation=implementation).eval()
    stock = generate(model, _PROMPTS, sharing=False, budget=24, implementation=implementation)
    with batch_invariant() as block:
        found = generate(model, _PROMPTS, sharing=False, budget=24, implementation=implementation)
        assert generate(model, _PROMPTS[:1], sharing=False, budget=64, implementation=implementation) == found[:1]
    said = [what for what in (*block.coverage().at_risk, *block.coverage().left) if "attention" in what]
    assert said == []
    for (tokens, logprobs), (stock_tokens, stock_logprobs) in zip(found, stock, strict=True):
        assert tokens == stock_tokens
        torch.testing.assert_close(torch.tensor(logprobs), torch.tensor(stock_logprobs), rtol=1e-3, atol=1e-4)


def test_a_window_under_autocast_is_cast_as_sdpa_casts_it() -> None:
    """Gemma 3 under autocast: queries of float32, values of bfloat16; computed in autocast's dtype, as stock is."""
    from transformers.modeling_utils import AttentionInterface

    q, k, v = (torch.rand(1, h, _LENGTH, 16, generator=torch.Generator().manual_seed(h)) for h in (4, 2, 2))
    layer = SimpleNamespace(num_key_value_groups=2, is_causal=True)
    places: dict[str, Any] = {"position_ids": torch.arange(_LENGTH)[None], "sliding_window": _WINDOW}

    def attend() -> torch.Tensor:
        out, _ = AttentionInterface()["sdpa"](layer, q, k, v.bfloat16(), window(), scaling=0.25, **places)
        assert isinstance(out, torch.Tensor)
        return out

    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        stock = attend()
        with batch_invariant() as block:
            found = attend()
    assert block.coverage().replaced["transformers attention 'sdpa', windowed"] == 1
    assert found.dtype == stock.dtype == torch.bfloat16
    torch.testing.assert_close(found, stock, rtol=2e-2, atol=2e-2)
