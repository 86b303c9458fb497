"""transformers' RMSNorm modules on a CPU in a few passes: the bits of the operators one by one."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from nondet.core.compare import identical
from nondet.core.inputs import generator, make
from nondet.kernels.dispatch.block import batch_invariant, on_call
from nondet.kernels.rows.cpu import module_norm, square_roots

CLASSES = ["Qwen3RMSNorm", "Gemma3RMSNorm"]


def norm_of(name: str, width: int, dtype: torch.dtype) -> Any:
    from transformers.models.gemma3 import modeling_gemma3
    from transformers.models.qwen3 import modeling_qwen3

    norm = vars(modeling_qwen3 if name.startswith("Qwen") else modeling_gemma3)[name](width)
    norm.weight.data = make("bell", (width,), torch.float32, "cpu", generator(5, "cpu"))
    return norm.to(dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("name", CLASSES)
@pytest.mark.parametrize("width", [64, 100, 1024])
def test_it_has_the_bits_of_the_operators(width: int, name: str, dtype: torch.dtype) -> None:
    """Small batches and large ones, beside what hooks see, who get the operators; and a row has its own bits."""
    norm = norm_of(name, width, dtype)
    x = make("wide", (1, 700, width), dtype, "cpu", generator(6, "cpu"))
    x[0, 3, 5] = torch.inf
    seen = []
    with torch.no_grad(), batch_invariant() as block:
        got = norm(x)
        assert dict(block.coverage().replaced) == {"RMSNorm module": 1}
        with on_call(lambda call: seen.append(call.name)):
            by_operators = norm(x)
        assert "aten::mean.dim" in seen
        assert identical(got, by_operators)
        for start, stop in ((0, 1), (7, 10), (600, 617)):
            assert identical(norm(x[:, start:stop].clone()), got[:, start:stop].contiguous())
    if dtype != torch.float32:  # what is rounded first, and what is not: two results
        twin, turned = (
            module_norm(x, norm.weight.data, 1e-6, round_first=first, plus_one=False) for first in (True, False)
        )
        assert twin is not None
        assert turned is not None
        assert not identical(twin, turned)


def test_half_of_its_families_is_not_enough() -> None:
    """An ablation that replaces the mean alone leaves the square root to torch: the module's own operators run."""
    norm = norm_of("Qwen3RMSNorm", 64, torch.float32)
    with torch.no_grad(), batch_invariant(["norm"]) as block:
        norm(torch.rand(3, 64))
    assert dict(block.coverage().replaced) == {"mean.dim": 1}


def test_square_roots_are_correctly_rounded() -> None:
    """MKL's, which torch takes, are not; ours are those of the exact root, at every place of every length."""
    x = torch.rand(4099, generator=generator(7, "cpu")) * 1e3
    right = torch.from_numpy(np.sqrt(x.double().numpy())).float()
    assert identical(square_roots(x), right)
    assert identical(torch.cat([square_roots(part) for part in x.split(7)]), right)
    with torch.no_grad(), batch_invariant():
        assert identical(torch.rsqrt(x), 1.0 / right)
