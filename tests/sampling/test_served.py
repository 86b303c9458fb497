"""Models that transformers' engine runs and does not serve: refused after one step, whatever would have come out."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers

from nondet.sampling.engine import run_session
from nondet.sampling.plan import Load, Request
from nondet.sampling.schedule import UnservedError

_LOAD = Load(others=0, targets=2, spread=1, prompt=(4, 9), tokens=(3, 3), budget=32, requests=2)
_PLACES = {"vocab_size": 128, "bos_token_id": None, "eos_token_id": None, "pad_token_id": 0}
_SIZES = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "max_position_embeddings": 64}
_HEADS = {"num_key_value_heads": 2, "intermediate_size": 96}
# model type -> its configuration, what is wrong
MODELS: dict[str, tuple[dict[str, Any], str]] = {
    "falcon": ({"alibi": False}, r"layer 0 keeps no keys in the engine's cache \(2 of 2 layers\)"),
    "diffllama": (_HEADS, r"layer 0 overwrites its own keys in the engine's cache \(2 of 2 layers\)"),
}


def model_of(name: str, **more: Any) -> Any:
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(name, **_PLACES, **_SIZES, **more)
    return transformers.AutoModelForCausalLM.from_config(config, attn_implementation="sdpa").eval()


def requests(tokens: int) -> list[Request]:
    return [Request(f"r{i}", True, tuple(range(1, 6 + 4 * i)), tokens, 0) for i in range(2)]


@pytest.mark.parametrize("tokens", [1, 3])
@pytest.mark.parametrize("name", MODELS)
def test_a_model_that_goes_around_the_cache_is_refused(name: str, tokens: int) -> None:
    """Falcon's own attention reads the tokens of the whole pack; DiffLlama's second call replaces its first one's."""
    more, reason = MODELS[name]
    with pytest.raises(UnservedError, match=reason):
        run_session(model_of(name, **more), requests(tokens), _LOAD)


def test_a_model_that_keeps_its_keys_is_served() -> None:
    """Beside them: a Llama runs, also for one step alone, and the cache's own update is back after it."""
    model = model_of("llama", **_HEADS)
    assert [len(o.token_ids) for o in run_session(model, requests(1), _LOAD).outcomes] == [1, 1]
    session = run_session(model, requests(3), _LOAD)
    assert [(o.finish, len(o.token_ids)) for o in session.outcomes] == [("length", 3)] * 2
