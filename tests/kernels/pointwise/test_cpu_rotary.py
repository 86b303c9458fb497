"""The rotary embedding on a CPU called past what watches its operators: stock's bits and strides."""

from __future__ import annotations

import pytest
import torch

from nondet.core.compare import identical
from nondet.kernels.dispatch.block import batch_invariant, on_call
from nondet.kernels.pointwise.cpu import rotary


def rand(*shape: int) -> torch.Tensor:
    return torch.rand(shape, generator=torch.Generator().manual_seed(sum(shape))) * 4.0 - 2.0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_it_has_stocks_bits(dtype: torch.dtype) -> None:
    """As the engine lays queries and keys out, under a block and beside it; hooks see the operators."""
    from transformers.models.qwen3 import modeling_qwen3 as qwen3

    q, k = (rand(1, 9, heads, 64).to(dtype).transpose(1, 2) for heads in (6, 3))
    cos, sin = rand(1, 9, 64).to(dtype), rand(1, 9, 64).flip(0, 1, 2).to(dtype)
    seen: list[str] = []
    with torch.no_grad():
        stock = qwen3.apply_rotary_pos_emb(q, k, cos, sin)
        alone = rotary(q, k, cos, sin)
        with batch_invariant() as block:
            ours = qwen3.apply_rotary_pos_emb(q, k, cos, sin)
            assert not block.coverage().counts()
            with on_call(lambda call: seen.append(call.name)):
                qwen3.apply_rotary_pos_emb(q, k, cos, sin)
    assert "aten::mul.Tensor" in seen
    assert alone is not None
    for theirs, found, other in zip(stock, ours, alone, strict=True):
        assert found.stride() == theirs.stride()
        assert identical(found.contiguous(), theirs.contiguous())
        assert identical(other.contiguous(), theirs.contiguous())
    turned = rotary(q, k, sin, cos)
    assert turned is not None
    assert not identical(turned[0].contiguous(), stock[0].contiguous())


def test_mixed_dtypes_are_left() -> None:
    """torch's own promotion, and its rounding, then."""
    q, cos = rand(1, 2, 3, 64), rand(1, 3, 64)
    assert rotary(q, q, cos.half(), cos.half()) is None
