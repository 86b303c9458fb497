"""Elementwise operators on a CPU: an element's bits don't depend on how many elements there are."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from nondet.core.compare import identical
from nondet.kernels.pointwise.cpu import in_vectors, vectors_only

CASES = [
    (torch.nn.functional.silu, torch.float32),
    (torch.sigmoid, torch.float32),
    (torch.nn.functional.gelu, torch.float32),
    (torch.rsqrt, torch.bfloat16),
    (torch.exp2, torch.float32),
]


@pytest.mark.parametrize(("operator", "dtype"), CASES)
def test_every_element_takes_the_same_formula(
    operator: Callable[[torch.Tensor], torch.Tensor], dtype: torch.dtype
) -> None:
    """Slices of every length and start have the bits of a long stretch: those of stock torch's vector body."""
    x = (torch.rand(40_000, generator=torch.Generator().manual_seed(1)) * 8.0 + 0.1).to(dtype)
    body = operator(x[:16_384])
    assert identical(vectors_only(operator, x)[:16_384], body)
    for start in (0, 1, 5):
        for n in (1, 3, 63, 64, 65, 1000):
            assert identical(vectors_only(operator, x[start : start + n]), body[start : start + n])
    assert identical(vectors_only(operator, x[:15_000].view(100, 150).t()), body[:15_000].view(100, 150).t())


def test_stock_takes_two() -> None:
    """At least one of these operators ends a loop by another formula on this CPU, or the test above shows nothing."""
    x = torch.rand(1 << 14, generator=torch.Generator().manual_seed(2)) * 8.0 + 0.1
    # these inputs show another formula, on any CPU
    assert any(not identical(operator(x.double()).float(), operator(x)) for operator, _ in CASES)
    for operator, dtype in CASES:
        body = operator(x.to(dtype))
        rest = torch.cat([operator(piece) for piece in x.to(dtype).split(7)])
        if not identical(rest, body):
            return
    pytest.skip("torch's vector loops and their scalar rest agree on this CPU, for all operators tried")


def test_where_no_element_is_left_over() -> None:
    """A call goes through as it is only where every thread's share is whole registers."""
    assert in_vectors(32768 + 64)
    torch.set_num_threads(2)
    assert in_vectors(64)
    assert not in_vectors(65)
    assert in_vectors(1 << 16)
    assert not in_vectors(32768 + 64)  # two shares of 16,416
