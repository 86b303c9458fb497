"""Elementwise operators on a CPU: an element's bits don't depend on how many elements there are."""

from __future__ import annotations

import pytest
import torch

from nondet.core.compare import identical
from nondet.kernels.dispatch import transformers as hf_rotary
from nondet.kernels.pointwise.cpu import in_vectors, vectors_only
from nondet.kernels.pointwise.cuda import rotary as cuda_rotary
from nondet.kernels.pointwise.cuda import silu_mul
from tests.build import DEVICE, rand
from tests.kernels.tiers import at_length

CASES = [
    (torch.nn.functional.silu, torch.float32),
    (torch.sigmoid, torch.float32),
    (torch.nn.functional.gelu, torch.float32),
    (torch.rsqrt, torch.bfloat16),
    (torch.exp2, torch.float32),
]


@pytest.mark.parametrize(("operator", "dtype"), CASES)
def test_every_element_takes_the_same_formula(operator, dtype) -> None:
    """Slices of every length and start have the bits of a long stretch: those of stock torch's vector body."""
    x = (torch.rand(40_000, generator=torch.Generator().manual_seed(1)) * 8.0 + 0.1).to(dtype)
    body = operator(x[:16_384])
    assert identical(vectors_only(operator, x)[:16_384], body)
    for start in (0, 1, 5):
        for n in (1, 3, 63, 64, 65, 1000):
            assert identical(vectors_only(operator, x[start : start + n]), body[start : start + n])
    assert identical(vectors_only(operator, x[:15_000].view(100, 150).t()), body[:15_000].view(100, 150).t())


def test_where_no_element_is_left_over() -> None:
    """A call goes through as it is only where every thread's share is whole registers."""
    assert in_vectors(32768 + 64)
    torch.set_num_threads(2)
    assert in_vectors(64)
    assert not in_vectors(65)
    assert in_vectors(1 << 16)
    assert not in_vectors(32768 + 64)  # two shares of 16,416


DTYPES = [torch.float16, torch.float32, *([torch.bfloat16] if torch.cuda.is_available() else [])]


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float16, *at_length(*DTYPES[1:])])
@pytest.mark.parametrize(
    ("batch", "tokens", "heads_q", "heads_k", "dim"), [(1, 9, 6, 3, 64), *at_length((2, 1, 4, 4, 128))]
)
def test_one_launch_has_stocks_bits(batch, tokens, heads_q, heads_k, dim, dtype) -> None:
    """Products rounded, then their sum, for queries and keys as the engine and as generate lay them out."""
    from transformers.models.qwen3.modeling_qwen3 import apply_rotary_pos_emb

    q = rand(batch, tokens, heads_q, dim).to(DEVICE, dtype).transpose(1, 2)
    k = rand(batch, tokens, heads_k, dim).to(DEVICE, dtype).transpose(1, 2)
    angles = rand(1, tokens, dim).to(DEVICE)
    cos, sin = angles.cos().to(dtype), angles.sin().to(dtype)
    got, stock = cuda_rotary(q, k, cos, sin), apply_rotary_pos_emb(q, k, cos, sin)
    for ours, theirs in zip(got, stock, strict=True):
        assert [s for s, n in zip(ours.stride(), ours.shape, strict=True) if n > 1] == [
            s for s, n in zip(theirs.stride(), theirs.shape, strict=True) if n > 1
        ]
        assert identical(ours.contiguous(), theirs.contiguous())
    other = cuda_rotary(q, k, sin, cos)
    assert not identical(other[0].contiguous(), stock[0].contiguous())


def test_what_it_does_not_take_is_left() -> None:
    q, cos = rand(1, 2, 3, 64).to(DEVICE), rand(1, 3, 64).to(DEVICE)
    assert cuda_rotary(q, q, cos.half(), cos.half()) is None
    odd = rand(1, 2, 3, 96).to(DEVICE)
    assert cuda_rotary(odd, odd, odd[:, 0], odd[:, 0]) is None


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


def every_number(dtype: torch.dtype) -> torch.Tensor:
    return torch.arange(2**16, dtype=torch.int32).to(torch.int16).view(dtype).view(16, 4096).to(DEVICE)


@pytest.mark.slow
def test_silu_times_a_gate_is_that_of_each_element() -> None:
    """Against float64, rounded twice; rows by themselves, and what this kernel does not do."""
    x = torch.randn(7, 2 * 1300, generator=torch.Generator().manual_seed(3)).to(DEVICE, torch.float16)
    out = silu_mul(x)
    wide, gate = x.double().chunk(2, -1)
    exact = (wide / (1 + torch.exp(-wide))).half().double() * gate
    assert ((out.double() - exact).abs() <= 2.0**-10 * exact.abs() + 2.0**-24).all()  # two roundings of 11 digits
    assert all(identical(silu_mul(x[i]), out[i]) for i in range(7))
    assert silu_mul(x[:0]).shape == (0, 1300)  # type: ignore[union-attr] # it is done here
    assert silu_mul(x.float()) is None
    assert silu_mul(x[:, 2:]) is None
    assert silu_mul(x[:, :-1].contiguous()) is None


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_silu_times_a_gate_has_torch_s_bits(dtype: torch.dtype) -> None:
    """Of every number there is, NaN and subnormal ones among them, times ordinary ones."""
    x = every_number(dtype)
    for seed in range(4):
        gate = torch.randn(x.shape, generator=torch.Generator().manual_seed(seed)).to(x)
        assert identical(silu_mul(torch.cat([x, gate], -1)), torch.nn.functional.silu(x) * gate)
