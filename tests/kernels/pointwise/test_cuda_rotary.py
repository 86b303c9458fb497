"""The rotary embedding in one launch: stock's bits, and only where its text is known."""

from __future__ import annotations

import pytest
import torch

from nondet.core.compare import identical
from nondet.kernels.dispatch import transformers as hf_rotary
from nondet.kernels.pointwise.cuda import rotary
from tests.build import DEVICE

DTYPES = [torch.float16, torch.float32, *([torch.bfloat16] if torch.cuda.is_available() else [])]


def rand(*shape: int) -> torch.Tensor:
    return torch.rand(shape, generator=torch.Generator().manual_seed(sum(shape))) * 4.0 - 2.0


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("batch", "tokens", "heads_q", "heads_k", "dim"), [(1, 9, 6, 3, 64), (2, 1, 4, 4, 128)])
def test_it_has_stocks_bits(batch: int, tokens: int, heads_q: int, heads_k: int, dim: int, dtype: torch.dtype) -> None:
    """Products rounded, then their sum, for queries and keys as the engine and as generate lay them out."""
    from transformers.models.qwen3.modeling_qwen3 import apply_rotary_pos_emb

    q = rand(batch, tokens, heads_q, dim).to(DEVICE, dtype).transpose(1, 2)
    k = rand(batch, tokens, heads_k, dim).to(DEVICE, dtype).transpose(1, 2)
    angles = rand(1, tokens, dim).to(DEVICE)
    cos, sin = angles.cos().to(dtype), angles.sin().to(dtype)
    got, stock = rotary(q, k, cos, sin), apply_rotary_pos_emb(q, k, cos, sin)
    assert got is not None
    for ours, theirs in zip(got, stock, strict=True):
        assert [s for s, n in zip(ours.stride(), ours.shape, strict=True) if n > 1] == [
            s for s, n in zip(theirs.stride(), theirs.shape, strict=True) if n > 1
        ]
        assert identical(ours.contiguous(), theirs.contiguous())
    other = rotary(q, k, sin, cos)
    assert other is not None
    assert not identical(other[0].contiguous(), stock[0].contiguous())


def test_what_it_does_not_take_is_left() -> None:
    """Mixed dtypes and head dims that are no power of two."""
    q, cos = rand(1, 2, 3, 64).to(DEVICE), rand(1, 3, 64).to(DEVICE)
    assert rotary(q, q, cos.half(), cos.half()) is None
    odd = rand(1, 2, 3, 96).to(DEVICE)
    assert rotary(odd, odd, odd[:, 0], odd[:, 0]) is None


def test_known_functions_are_recognized_by_their_text(monkeypatch: pytest.MonkeyPatch) -> None:
    """Qwen3's and Gemma 3's are Llama's; one that rotates otherwise is not, and what is patched comes back."""
    from transformers.models.gemma3 import modeling_gemma3 as gemma3
    from transformers.models.glm import modeling_glm as glm
    from transformers.models.qwen3 import modeling_qwen3 as qwen3

    assert hf_rotary.rotates(qwen3, qwen3.apply_rotary_pos_emb)
    assert hf_rotary.rotates(gemma3, gemma3.apply_rotary_pos_emb)
    assert not hf_rotary.rotates(glm, glm.apply_rotary_pos_emb)
    original = qwen3.apply_rotary_pos_emb
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    hf_rotary.install(hf_rotary.REPLACEMENTS)
    try:
        assert qwen3.apply_rotary_pos_emb is not original
        assert hf_rotary.installed(glm, "apply_rotary_pos_emb") == (None, None)
    finally:
        hf_rotary.uninstall()
    assert qwen3.apply_rotary_pos_emb is original
