"""Somebody's function in the place of one that a stand-in would skip: it is called, every time, or nothing is replaced.

Each is held against the same patched model without nondet, at the second and third call of a shape, where the short
ways are open. A tolerance tells a skipped function (off by tenths) from another order of sums (2e-4 in logits of 21).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from transformers.models.llama import modeling_llama as modeling

from nondet.kernels.dispatch.block import batch_invariant

Patch = Callable[[pytest.MonkeyPatch], None]


def model_of() -> Any:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        hidden_size=128, intermediate_size=256, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=300, max_position_embeddings=128, initializer_range=0.2,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config).eval()


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


@pytest.mark.parametrize("late", [False, True], ids=["before any block", "after a block"])
@pytest.mark.parametrize("name", PATCHES)
def test_what_stands_in_a_functions_place_is_called(name: str, late: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """With functools.wraps or without, put there before a block or after one has ended."""
    model = model_of()
    plain = logits(model)
    if late:
        with batch_invariant():
            for _ in range(2):
                assert torch.allclose(logits(model), plain, rtol=1e-4, atol=1e-3)
    PATCHES[name](monkeypatch)
    wanted = logits(model)
    assert not torch.allclose(wanted, plain, atol=1e-2), "the patch changes something"
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
