"""Models that write their attention out: alone and in a padded batch the same bits, or the coverage says at risk."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers

from nondet.core.compare import identical
from nondet.kernels.dispatch.block import batch_invariant

LENGTHS, WIDTH = (5, 23, 11), 37
PLACES = {"vocab_size": 128, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
GPT = {"n_embd": 64, "n_head": 4, "n_layer": 2, "n_positions": 64}
# model type -> (its class, its configuration)
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "mpt": ("MptForCausalLM", {"d_model": 64, "n_heads": 4, "n_layers": 2, "max_seq_len": 64}),
    "bloom": ("BloomForCausalLM", {"hidden_size": 64, "n_head": 4, "n_layer": 2}),
    "gptj": ("GPTJForCausalLM", {**GPT, "rotary_dim": 8}),
    "codegen": ("CodeGenForCausalLM", {**GPT, "rotary_dim": 8}),
    "gpt_neo": (
        "GPTNeoForCausalLM",
        {
            "hidden_size": 64,
            "num_heads": 4,
            "num_layers": 2,
            "max_position_embeddings": 64,
            "attention_types": [[["global", "local"], 1]],
            "window_size": 8,
        },
    ),
    "xglm": (
        "XGLMForCausalLM",
        {"d_model": 64, "attention_heads": 4, "num_layers": 2, "ffn_dim": 128, "max_position_embeddings": 64},
    ),
    "openai-gpt": ("OpenAIGPTLMHeadModel", GPT),
}


def model_of(name: str, dtype: torch.dtype) -> Any:
    class_name, sizes = MODELS[name]
    cls = getattr(transformers, class_name, None)
    if cls is None:
        pytest.skip(f"transformers {transformers.__version__} has no {class_name}")
    torch.manual_seed(0)
    return cls(cls.config_class(**PLACES, **sizes)).to(dtype).eval()


def run(name: str, model: Any, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Logits, each request's positions counted from its own first token."""
    places = {} if name in ("mpt", "bloom") else {"position_ids": (mask.cumsum(1) - 1).clamp(min=0)}  # those have alibi
    logits: torch.Tensor = model(input_ids=ids, attention_mask=mask, **places).logits
    return logits


def padded(prompts: list[torch.Tensor], side: str) -> tuple[torch.Tensor, torch.Tensor]:
    ids, mask = torch.zeros(2, len(prompts), WIDTH, dtype=torch.long)
    for row, prompt in enumerate(prompts):
        place = slice(WIDTH - len(prompt), WIDTH) if side == "left" else slice(len(prompt))
        ids[row, place], mask[row, place] = prompt, 1
    return ids, mask


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", MODELS)
def test_padding_changes_no_bit_or_is_said_to(name: str, dtype: torch.dtype) -> None:
    """Prompts alone against a batch padded on either side: what is not equal is named by the batch's own coverage."""
    model = model_of(name, dtype)
    generator = torch.Generator().manual_seed(3)
    prompts = [torch.randint(5, 128, (length,), generator=generator) for length in LENGTHS]
    with torch.no_grad(), batch_invariant():
        alone = [run(name, model, p[None], torch.ones(1, len(p), dtype=torch.long))[0] for p in prompts]
        for side in ("right", "left"):
            ids, mask = padded(prompts, side)
            with batch_invariant() as block:
                logits = run(name, model, ids, mask)
            coverage = block.coverage()
            assert coverage.replaced
            parted = [not identical(a, logits[i][mask[i].bool()]) for i, a in enumerate(alone)]
            said = [what for what in (*coverage.left, *coverage.at_risk) if "softmax" in what]
            assert said or not any(parted), f"{side}: requests {parted} have other bits, and nothing says so"


@pytest.mark.parametrize("name", ["gptj", "openai-gpt"])
def test_the_same_batch_without_padding_is_equal(name: str) -> None:
    """Beside it: prompts of one length have the bits that they have alone, so it is the padding that parts them."""
    model = model_of(name, torch.float32)
    ids = torch.randint(5, 128, (3, 23), generator=torch.Generator().manual_seed(3))
    mask = torch.ones_like(ids)
    with torch.no_grad(), batch_invariant():
        together = run(name, model, ids, mask)
        alone = torch.cat([run(name, model, ids[i : i + 1], mask[i : i + 1]) for i in range(3)])
    assert identical(together, alone)


@pytest.mark.parametrize("mask", [-1e4, -1e9, torch.finfo(torch.float32).min, -torch.inf])
def test_hidden_scores_are_seen_whatever_hides_them(mask: float) -> None:
    """A softmax over scores hidden by any of the numbers in use is at risk; one over scores near each other is not."""
    scores = torch.randn(2, 4, 9, 9, generator=torch.Generator().manual_seed(1))
    with torch.no_grad(), batch_invariant() as near:
        torch.softmax(scores, -1)
    with torch.no_grad(), batch_invariant() as far:
        torch.softmax(scores + torch.where(torch.arange(9) > 6, mask, 0.0), -1)
    assert not near.coverage().at_risk
    assert list(far.coverage().at_risk) == ["softmax float32: over scores of which some are hidden"]
