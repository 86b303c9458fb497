"""transformers' RMSNorm modules in one launch: the bits of the operators one by one, where the text is known."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from nondet.core.compare import identical
from nondet.kernels.dispatch import transformers as hf_norms
from nondet.kernels.dispatch.block import batch_invariant
from nondet.kernels.rows import cpu as cpu_rows
from nondet.kernels.rows import cuda as triton_rows
from nondet.kernels.rows.cuda import module_norm
from tests.build import DEVICE

DTYPES = [torch.float16, torch.float32, *([torch.bfloat16] if torch.cuda.is_available() else [])]


def rand(*shape: int) -> torch.Tensor:
    return torch.rand(shape, generator=torch.Generator().manual_seed(sum(shape))) * 4.0 - 2.0


def composed(x: torch.Tensor, weight: torch.Tensor, eps: float, round_first: bool, plus_one: bool) -> torch.Tensor:
    """What a module's forward does, operator by operator, over the invariant mean."""
    wide = x.float()
    normed = wide * torch.rsqrt(triton_rows.mean(wide.pow(2))[..., None] + eps)
    if plus_one:
        return (normed * (1.0 + weight.float())).to(x.dtype)
    return weight * normed.to(x.dtype) if round_first else (weight * normed).to(x.dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("round_first", "plus_one"), [(True, False), (False, False), (False, True)])
@pytest.mark.parametrize("width", [128, 100, 1024])
def test_it_has_the_bits_of_the_operators(width: int, round_first: bool, plus_one: bool, dtype: torch.dtype) -> None:
    """So a forward under autograd, which runs the operators, agrees with a sampler, which runs the kernel."""
    x, weight = rand(5, 3, width).to(DEVICE, dtype), rand(width).to(DEVICE, dtype)
    got = module_norm(x, weight, 1e-6, round_first=round_first, plus_one=plus_one)
    assert got is not None
    assert identical(got, composed(x, weight, 1e-6, round_first, plus_one))
    other = module_norm(x, weight, 1e-6, round_first=not round_first, plus_one=plus_one)
    assert other is not None
    if dtype != torch.float32:  # there is nothing to round in float32
        assert not identical(got, other)


@pytest.mark.parametrize("width", [128, 1000])
def test_a_row_has_its_own_bits(width: int) -> None:
    """One row alone, in a batch of any size and at any place of it: the same bits, unlike after another row's."""
    x, weight = rand(40, width).to(DEVICE), rand(width).to(DEVICE)
    whole = module_norm(x, weight, 1e-6, round_first=True, plus_one=False)
    assert whole is not None
    for row, rows in ((0, 1), (7, 3), (20, 17)):
        part = module_norm(x[row : row + rows], weight, 1e-6, round_first=True, plus_one=False)
        assert part is not None
        assert identical(part, whole[row : row + rows].contiguous())
    assert not identical(whole[:1].contiguous(), whole[1:2].contiguous())


def test_another_dtype_or_width_is_left() -> None:
    """A float32 weight under half activations, and rows wider than a program holds: the module's own operators run."""
    x = rand(2, 128).to(DEVICE, torch.float16)
    assert module_norm(x, rand(128).to(DEVICE), 1e-6, round_first=True, plus_one=False) is None
    wide = rand(1, 20000).to(DEVICE)
    assert module_norm(wide, wide[0], 1e-6, round_first=True, plus_one=False) is None


def test_known_modules_are_recognized_by_their_text() -> None:
    """Llama's and Gemma's forms are found under any class name; a module with one operator more is not."""
    from transformers.models.gemma3.modeling_gemma3 import Gemma3RMSNorm
    from transformers.models.llama.modeling_llama import LlamaRMSNorm
    from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm

    class Otherwise(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5) * 2

    assert hf_norms.form_of(LlamaRMSNorm) == hf_norms.form_of(Qwen3RMSNorm) == ("variance_epsilon", True, False)
    assert hf_norms.form_of(Gemma3RMSNorm) == ("eps", False, True)
    assert hf_norms.form_of(Otherwise) is None


def test_what_is_patched_comes_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """The classes' forward is the kernel's while installed, on CUDA tensors alone, and the original afterwards."""
    from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm

    original = Qwen3RMSNorm.forward
    with monkeypatch.context() as patch:  # and no longer: what asks next for the machine would look at its GPU
        patch.setattr(torch.cuda, "is_available", lambda: True)
        hf_norms.install(hf_norms.REPLACEMENTS)
    try:
        assert Qwen3RMSNorm.forward is not original
        norm: Any = Qwen3RMSNorm(64)
        with torch.no_grad(), batch_invariant(["softmax"]) as block:
            torch.testing.assert_close(norm(rand(3, 64)), cpu_rows.rms_norm(rand(3, 64), norm.weight))
        assert not block.coverage().replaced  # a CPU's tensor takes the module's own operators
    finally:
        hf_norms.uninstall()
    assert Qwen3RMSNorm.forward is original
