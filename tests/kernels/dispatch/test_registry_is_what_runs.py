"""What is probed, timed and certified is what runs: the registry's "invariant" and torch's call in the block."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F

from nondet.core.compare import identical
from nondet.core.registry import load_implementation
from nondet.kernels.dispatch.block import batch_invariant


def rand(*shape: int) -> torch.Tensor:
    return torch.rand(shape, generator=torch.Generator().manual_seed(sum(shape))) * 8.0 - 4.0


X, W, Q, TARGET = rand(9, 300), rand(40, 300), rand(2, 2, 70, 32), torch.arange(9) * 7
INDEX = torch.arange(9) % 2
V, MANY = rand(7), torch.arange(9 * 300) % 7
# operator -> (arguments of the registry's, the torch call that a model makes)
CALLS: dict[str, tuple[tuple[torch.Tensor, ...], Callable[[], torch.Tensor]]] = {
    "linear": ((X, W), lambda: F.linear(X, W)),
    "matmul": ((X, W.t()), lambda: X @ W.t()),
    "attention": ((Q, Q, Q), lambda: F.scaled_dot_product_attention(Q, Q, Q, is_causal=True)),
    "rms_norm": ((X, W[0]), lambda: F.rms_norm(X, (300,), W[0], 1e-6)),
    "softmax": ((X,), lambda: torch.softmax(X, -1)),
    "log_softmax": ((X,), lambda: torch.log_softmax(X, -1)),
    "logsumexp": ((X,), lambda: torch.logsumexp(X, -1)),
    "cross_entropy": ((X, TARGET), lambda: F.cross_entropy(X, TARGET, reduction="none")),
    "index_add": ((W, INDEX, X), lambda: W.index_add(0, INDEX, X)),
    "scatter_add": ((V, MANY, X.flatten()), lambda: V.scatter_add(0, MANY, X.flatten())),
    "sum": ((X,), lambda: X.sum(-1)),
    "mean": ((X,), lambda: X.mean(-1)),
}


@pytest.mark.parametrize("operator", CALLS)
def test_the_block_runs_the_registrys_function(operator: str) -> None:
    """The same bits from both, on numbers where another order or formula would show."""
    arguments, call = CALLS[operator]
    with torch.no_grad():
        registered = load_implementation(operator, "invariant", "cpu").call(*arguments)
        with batch_invariant():
            under_the_block = call()
    assert identical(registered, under_the_block)
