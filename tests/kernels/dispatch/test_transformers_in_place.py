"""Paged keys read where they lie: the places that are told hold what the engine would have gathered."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from nondet.kernels.dispatch import transformers_attention as hf_attention
from nondet.kernels.dispatch.block import batch_invariant
from nondet.sampling.engine import run_session
from nondet.sampling.model import load_model
from nondet.sampling.plan import Load, Request
from nondet.sampling.schedule import KeptKeys


def test_the_cache_read_in_place_is_the_cache_gathered(monkeypatch: pytest.MonkeyPatch) -> None:
    """In every step and layer of a session of chunks, decodes and a shared prefix."""
    seen: list[bool] = []

    def both(cache: Any, layer: int, key: torch.Tensor, value: torch.Tensor, kwargs: dict[str, Any]) -> Any:
        apart = dict(kwargs)
        gathered = hf_attention.update_cache(cache, layer, key, value, apart, "full_attention")
        kept = original(cache, layer, key, value, kwargs)
        if kept is not None:
            keys, values, index = kept
            seen.append(torch.equal(keys[index], gathered[0]) and torch.equal(values[index], gathered[1]))
            assert torch.equal(apart["cu_seq_lens_k"], kwargs["cu_seq_lens_k"])
            assert hf_attention.longest("k", apart) == hf_attention.longest("k", kwargs)
        return kept

    original = hf_attention.write_in_place
    monkeypatch.setattr(hf_attention, "write_in_place", both)
    monkeypatch.setattr(KeptKeys, "note", lambda self, layer: self._written.update({layer: 0.5}))  # both of them write
    loaded = load_model("random:qwen3-2x128", "float32", "cpu")
    requests = [Request(f"t{i}", True, tuple(range(1, 20 + i)), 4, 3 * i) for i in range(3)]
    load = Load(others=0, targets=3, spread=1, prompt=(1, 1), tokens=(1, 1), budget=16, requests=3)
    with batch_invariant(families=["attention"]):
        session = run_session(loaded.model, requests, load)
    assert not session.fatal
    assert len(seen) > session.steps
    assert all(seen)
