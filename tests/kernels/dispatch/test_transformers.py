"""Somebody's functions and weights in a model of transformers under the block: they are called, and their bits hold."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from transformers.models.llama import modeling_llama as modeling

from nondet.core.compare import identical
from nondet.core.inputs import generator, make
from nondet.kernels.dispatch.block import batch_invariant
from tests.kernels.tiers import tiny


def test_autocast_chooses_the_dtype_before_and_after_a_first_call() -> None:
    """One shape in float32 and then in bfloat16: autocast chooses before the block does."""
    layer, rows = torch.nn.Linear(64, 64), make("bell", (64, 64), torch.float32, "cpu", generator(8, "cpu"))
    with torch.no_grad(), batch_invariant():
        layer(rows)
        with torch.autocast("cpu", torch.bfloat16):
            whole, part = layer(rows), layer(rows[:16].clone())
    assert whole.dtype == part.dtype == torch.bfloat16
    assert identical(whole[:16], part)


# Somebody's function in the place of one that a stand-in would skip: it is called, every time, or nothing is
# replaced.
#
# Each is held against the same patched model without nondet. A tolerance tells a skipped function (off by tenths) from
# another order of sums (2e-4 in logits of 21).

Patch = Callable[[pytest.MonkeyPatch], None]


def doubled(function: Any) -> Any:
    """A wrapper that says that it is what it wraps."""

    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        out = function(*args, **kwargs)
        return (out[0] * 2, *out[1:]) if isinstance(out, tuple) else out * 2

    return wrapper


def wrapped(owner: Any, name: str) -> Patch:
    return lambda patch: patch.setattr(owner, name, doubled(vars(owner)[name]))


LINEAR = F.linear
PATCHES: dict[str, Patch] = {
    "F.linear": lambda patch: patch.setattr(F, "linear", lambda *args: LINEAR(*args) * 1.5),
    "attention": wrapped(modeling.LlamaAttention, "forward"),
    "norm": wrapped(modeling.LlamaRMSNorm, "forward"),
    "rotary": wrapped(modeling, "apply_rotary_pos_emb"),
}


def logits(model: Any) -> torch.Tensor:
    ids = torch.arange(1, 20)[None]
    with torch.no_grad():
        return model(ids, use_cache=False).logits


def test_what_stands_in_a_functions_place_is_called(monkeypatch: pytest.MonkeyPatch) -> None:
    """With functools.wraps or without, put there before a block, inside of one or after one has ended."""
    model = tiny("llama", num_hidden_layers=1, initializer_range=0.2)
    plain = logits(model)
    for name, put in PATCHES.items():
        with monkeypatch.context() as patch:
            put(patch)
            wanted = logits(model)
            assert not torch.allclose(wanted, plain, atol=1e-2), "the patch changes something"
            with batch_invariant():
                assert torch.allclose(logits(model), wanted, rtol=1e-4, atol=1e-3), name
        with batch_invariant():
            assert torch.allclose(logits(model), plain, rtol=1e-4, atol=1e-3), name
            with monkeypatch.context() as patch:  # in the place of a stand-in of ours
                put(patch)
                assert torch.allclose(logits(model), wanted, rtol=1e-4, atol=1e-3), name
