"""Stock launchers: they are torch's operators, with the signatures that every implementation has."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from nondet.core.compare import error_against, identical
from nondet.core.inputs import generator, make
from nondet.core.launch import listen
from nondet.core.registry import implementation_names, load_implementation
from nondet.kernels import reference, stock
from tests.build import DEVICE, accuracy_bound


def bell(*shape: int) -> torch.Tensor:
    return make("bell", shape, torch.float32, DEVICE, generator(11, DEVICE))


@pytest.mark.parametrize("operator", ["softmax", "log_softmax", "sum", "mean"])
def test_row_operators(operator: str) -> None:
    """Near float64, and said by name."""
    x = bell(5, 300)
    with listen() as heard:
        got = getattr(stock, operator)(x)
    assert list(heard) == [f"torch.{operator}"]
    right = getattr(reference, operator)(x)
    assert error_against(got, right).relative_norm <= accuracy_bound(torch.float32, 300)


@pytest.mark.parametrize("name", ["rms_norm", "rms_norm_hf"])
def test_rms_norm(name: str) -> None:
    """torch's one call and the spelling of transformers' models, both near float64."""
    x, weight = bell(5, 64), bell(64)
    got = getattr(stock, name)(x, weight, 1e-5)
    right = reference.rms_norm(x, weight, 1e-5)
    assert error_against(got, right).relative_norm <= 2 * accuracy_bound(torch.float32, 64)


def test_the_hf_spelling_is_the_models_own() -> None:
    """Bit for bit what transformers' Qwen3 computes, in bfloat16, where the two roundings show."""
    from transformers.models.qwen3 import modeling_qwen3 as modeling

    x, weight = bell(7, 96).bfloat16(), bell(96).bfloat16()
    norm = modeling.Qwen3RMSNorm(96, eps=1e-6).to(DEVICE, torch.bfloat16)
    norm.weight.data.copy_(weight)
    with torch.no_grad():
        assert identical(stock.rms_norm_hf(x, weight), norm(x))


def test_products() -> None:
    """F.linear, torch.mm and torch.bmm themselves."""
    x, weight, bias = bell(5, 16), bell(8, 16), bell(8)
    assert identical(stock.linear(x, weight, bias), F.linear(x, weight, bias))
    assert identical(stock.matmul(x, weight.t()), torch.mm(x, weight.t()))
    batch = bell(3, 5, 16)
    assert identical(stock.matmul(batch, batch.mT), torch.bmm(batch, batch.mT))


@pytest.mark.parametrize("q_len", [1, 7, 20])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("heads", [(4, 4), (4, 2)])
def test_attention(q_len: int, causal: bool, heads: tuple[int, int]) -> None:
    """Prefill, chunk and decode, aligned to the end, by every backend that this machine has."""
    q, k, v = bell(2, heads[0], q_len, 32), bell(2, heads[1], 20, 32), bell(2, heads[1], 20, 32)
    right = reference.attention(q, k, v, causal=causal, scale=0.3)
    ran = []
    for name in implementation_names("attention", DEVICE):
        if name.startswith("stock"):
            try:
                got = load_implementation("attention", name, DEVICE).call(q, k, v, causal=causal, scale=0.3)
            except RuntimeError as error:
                assert "No available kernel" in str(error)  # noqa: PT017 - any other error fails the test
                continue
            ran.append(name)
            # TF32 or half-precision products inside would be ten times further off
            assert error_against(got, right).relative_norm <= 1e-5
    assert {"stock", "stock-math"} <= set(ran)


def test_scatters() -> None:
    """torch's own, and the target is not changed."""
    target, index, source = bell(6, 3), torch.tensor([5, 0, 5], device=DEVICE), bell(3, 3)
    before = target.clone()
    assert (
        error_against(stock.index_add(target, index, source), reference.index_add(target, index, source)).max_ulp <= 2
    )
    flat = stock.scatter_add(target[:, 0], index, source[:, 0])
    assert error_against(flat, reference.scatter_add(target[:, 0], index, source[:, 0])).max_ulp <= 2
    assert identical(target, before)
