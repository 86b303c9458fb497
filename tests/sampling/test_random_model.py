"""Random models by name: what is made, always the same, and what is refused."""

from __future__ import annotations

import pytest
import torch

from nondet.errors import UserError
from nondet.sampling.model import load_model, random_config


def test_a_random_model_is_the_same_every_time() -> None:
    """Its name decides its weights, whatever was drawn before, and its tokenizer is the embedded one."""
    torch.manual_seed(1)
    once = load_model("random:qwen3-1x128", "float32", "cpu")
    torch.manual_seed(2)
    again = load_model("random:qwen3-1x128", "float32", "cpu")
    assert once.name == "random:qwen3-1x128"
    assert (once.identity["class"], once.identity["layers"], once.identity["hidden"]) == ("Qwen3ForCausalLM", 1, 128)
    for (name, a), (_, b) in zip(once.model.named_parameters(), again.model.named_parameters(), strict=True):
        assert torch.equal(a, b), name
        assert a.dim() == 1 or a.std() > 0, name
    assert once.encode_plain("one word") == load_model(None, "float32", "cpu").encode_plain("one word")


@pytest.mark.parametrize("architecture", ["qwen3", "llama", "mistral", "gemma3_text"])
def test_every_architecture_computes(architecture: str) -> None:
    """Each that is offered makes a model that gives finite logits."""
    loaded = load_model(f"random:{architecture}-2x128", "bfloat16", "cpu")
    with torch.no_grad():
        logits = loaded.model(torch.tensor([loaded.encode("one word")])).logits
    assert torch.isfinite(logits).all()
    assert logits.float().std() > 0


def test_the_name_says_the_sizes() -> None:
    """Qwen3-0.6B's proportions at its width."""
    config = random_config("random:qwen3-12x1024", 4096)
    sizes = (config.num_hidden_layers, config.hidden_size, config.num_attention_heads, config.num_key_value_heads)
    assert (*sizes, config.intermediate_size, config.head_dim) == (12, 1024, 16, 8, 3072, 128)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("random:qwen3", "makes no sense"),
        ("random:qwen-12x1024", "qwen3"),
        ("random:qwen3-0x1024", "0 layers"),
        ("random:qwen3-12x1000", "multiple of 128"),
    ],
)
def test_other_names_are_refused(name: str, words: str) -> None:
    """In one line, with what was meant."""
    with pytest.raises(UserError, match=words):
        load_model(name, "float32", "cpu")
