"""Rotary embeddings that follow the longest request: what parts under `batch_invariant()` is said to be at risk."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers

from nondet.core.compare import identical
from nondet.kernels.dispatch.block import batch_invariant

_ORIGINAL = 16  # positions that the model was made for
_SIZES = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 1, "num_attention_heads": 4}
_PLACES = {"vocab_size": 128, "pad_token_id": 0, "bos_token_id": None, "eos_token_id": None}
_LONG = {"original_max_position_embeddings": _ORIGINAL, "short_factor": [1.0] * 8, "long_factor": [2.0] * 8}
# rope type -> model type, its configuration
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "longrope": (
        "phi3",
        {
            "max_position_embeddings": 64,
            "original_max_position_embeddings": _ORIGINAL,
            "rope_parameters": {"rope_type": "longrope", "rope_theta": 1e4, **_LONG},
        },
    ),
    "dynamic": (
        "llama",
        {
            "max_position_embeddings": _ORIGINAL,
            "rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0},
        },
    ),
}


def logits_of_row_zero(kind: str, longest: int) -> tuple[bool, list[str]]:
    """A prompt of 7 tokens alone and beside one of `longest`: are its logits equal, and what the coverage says."""
    name, more = MODELS[kind]
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(name, **_SIZES, **_PLACES, **more)
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    ids, mask = torch.zeros(2, 2, longest, dtype=torch.long)
    ids[0, :7], mask[0, :7] = torch.arange(1, 8), 1
    ids[1], mask[1] = torch.arange(1, longest + 1), 1
    with torch.no_grad(), batch_invariant() as block:
        alone = model(input_ids=ids[:1, :7]).logits[0]
        beside = model(input_ids=ids, attention_mask=mask).logits[0, :7]
    coverage = block.coverage()
    return identical(alone, beside), [what for what in coverage.at_risk if kind in what]


@pytest.mark.parametrize("kind", MODELS)
def test_frequencies_of_the_longest_request_are_said(kind: str) -> None:
    """Beside a request beyond the original length the bits are others, and the coverage names the embedding."""
    equal, said = logits_of_row_zero(kind, 40)
    assert not equal, "the longer request should change the frequencies, or this test shows nothing"
    assert said == [f"transformers rotary embedding '{kind}': frequencies by the longest request of the step"]


@pytest.mark.parametrize("kind", MODELS)
def test_within_the_original_length_nothing_is_counted(kind: str) -> None:
    """Everybody has the original frequencies: equal bits, and no word of them."""
    assert logits_of_row_zero(kind, _ORIGINAL - 2) == (True, [])
