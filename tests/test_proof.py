"""The dispatchers' proof, and the inputs that it rests on."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from nondet.proof import product_inputs, prove

K, N = 48, 24


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """In float64: exact enough to have one order."""
    return (x.double() @ weight.double().T + (0 if bias is None else bias.double())).to(x.dtype)


def split_k(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    parts = [x[:, s].float() @ weight[:, s].float().T for s in (slice(20), slice(20, None))]
    return (parts[0] + parts[1] + (0 if bias is None else bias.float())).to(x.dtype)


def absent(*_: Any) -> torch.Tensor:
    raise NotImplementedError("not on this machine")


def wrong_dtype(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    return linear(x, weight, bias).double()


def test_prove_compares_and_says_what() -> None:
    """The dispatchers' helper: equal, different, failing, mistyped, and nothing to compare are five answers."""
    inputs = list(product_inputs(3, N, K, torch.bfloat16, "cpu"))
    holds, said = prove(linear, linear, inputs)
    assert holds
    assert "elements equal on order" in said
    assert prove(split_k, linear, inputs)[0] is False
    assert prove(absent, linear, inputs) == (False, "order: NotImplementedError: not on this machine")
    assert prove(wrong_dtype, linear, inputs)[0] is False
    assert prove(linear, linear, []) == (False, "nothing finite was compared (no inputs)")
    infinite = [("inf", (torch.full((2, K), torch.inf), torch.ones(N, K)))]
    assert prove(linear, linear, infinite)[0] is False


def test_a_full_memory_is_no_verdict() -> None:
    """It goes to the caller, who is not to record an exclusion that would outlive it."""

    def full(*_: Any) -> torch.Tensor:
        raise torch.cuda.OutOfMemoryError("CUDA out of memory")

    with pytest.raises(torch.cuda.OutOfMemoryError):
        prove(full, linear, product_inputs(3, N, K, torch.bfloat16, "cpu"))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_order_inputs_have_an_exact_sum_of_zero(dtype: torch.dtype) -> None:
    """So that a result is nothing but the rounding errors of its order; and a bias is not large enough to hide them."""
    for kind, (x, weight, bias) in product_inputs(4, N, K, dtype, "cpu", bias=True, kinds=("order", "order-wide")):
        products = x.double()[:, None] * weight.double()  # exact, and so is fsum
        assert {math.fsum(terms) for terms in products.reshape(-1, K).tolist()} == {0.0}, kind
        errors = x.float() @ weight.float().T
        assert float(errors.abs().max()) > 0
        assert bias is not None
        assert float(bias.abs().max()) < (2.0**-12 if kind == "order" else 1.0)
