"""Batched products with vectors on a CPU: no row's bits by the rows or batches beside it, and transformers' experts."""

from __future__ import annotations

import pytest
import torch
from transformers.integrations import moe

from nondet.core.compare import identical
from nondet.core.inputs import order_revealing
from nondet.kernels.dispatch.block import batch_invariant

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
ROWS = (1, 2, 3, 7, 8, 16, 17, 33, 96, 200)
BATCHES = 5


def operands(depth: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """[BATCHES, max(ROWS), depth] and [BATCHES, depth], whose products are the rounding errors of an order alone."""
    matrices = order_revealing(BATCHES * max(ROWS), depth, dtype, 1, negate=False)
    return matrices.view(BATCHES, max(ROWS), depth), order_revealing(BATCHES, depth, dtype, 2, negate=True)


def products(matrices: torch.Tensor, vectors: torch.Tensor) -> torch.Tensor:
    """[B, M, K] times [B, K] -> [B, M], by bmm."""
    return torch.bmm(matrices, vectors[:, :, None])[:, :, 0].contiguous()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("depth", [64, 129])
def test_rows_and_batches_decide_nothing(depth: int, dtype: torch.dtype) -> None:
    """A bmm with vectors, for every number of rows and of batches, and as einsum("tk,k->t") and mv: equal bits."""
    matrices, vectors = operands(depth, dtype)
    with torch.no_grad(), batch_invariant() as block:
        whole = products(matrices, vectors)
        for rows in ROWS:
            some = products(matrices[:, :rows].contiguous(), vectors)
            assert identical(some, whole[:, :rows].contiguous()), f"{rows} rows"
        for batches in range(1, BATCHES):
            assert identical(products(matrices[:batches], vectors[:batches]), whole[:batches])
        for i in range(BATCHES):
            assert identical(torch.einsum("tk,k->t", matrices[i], vectors[i]), whole[i])
            assert identical(torch.mv(matrices[i], vectors[i]), whole[i])
        expanded = torch.bmm(matrices, vectors[:1, :, None].expand(BATCHES, -1, -1))
        assert identical(expanded[0, :, 0].contiguous(), whole[0])
    assert "bmm" in block.coverage().replaced
    assert not block.coverage().left
    assert not block.coverage().at_risk


@pytest.mark.parametrize("equation", ["btk,bk->bt", "bk,btk->bt", "btk,bk", "...tk,...k->...t"])
def test_einsum_of_vectors_is_at_risk(equation: str) -> None:
    """torch makes one batch another product than two, and of k,tk->t one whose weight is the rows: both are said."""
    matrices, vectors = operands(129, torch.float32)
    first = (vectors, matrices) if equation.startswith("bk") else (matrices, vectors)
    with torch.no_grad():
        for batches in (1, 2):
            with batch_invariant() as block:
                torch.einsum(equation, *(x[:batches] for x in first))
            assert set(block.coverage().at_risk) == {"einsum float32"}
        with batch_invariant() as block:
            torch.einsum("k,tk->t", vectors[0], matrices[0])
        assert block.coverage().at_risk
        with batch_invariant() as block:
            torch.einsum("bqd,bkd->bqk", matrices, matrices)
            torch.einsum("tk,nk->tn", matrices[0], matrices[1])
        assert not block.coverage().at_risk


def test_stock_depends_on_the_rows() -> None:
    """Beside it, stock: some number of rows gives other bits, so the inputs show an order."""
    matrices, vectors = operands(129, torch.float32)
    whole = products(matrices, vectors)
    parts = [products(matrices[:, :rows].contiguous(), vectors) for rows in ROWS]
    if all(identical(part, whole[:, : part.shape[1]].contiguous()) for part in parts):
        pytest.skip("this CPU's library takes one order at every number of rows")
    assert len({part.shape[1] for part in parts}) > 1


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("columns", [1, 2, 35, 96])
@pytest.mark.parametrize("tokens", [1, 2, 9])
def test_transformers_vectors_have_the_grouped_bits(tokens: int, columns: int, dtype: torch.dtype) -> None:
    """transformers' own two functions agree for each token and expert, also for top-1 with a single token."""
    x = order_revealing(tokens, 129, dtype, 2, negate=True)
    weight = order_revealing(4 * columns, 129, dtype, 1, negate=False).view(4, columns, 129)
    experts = torch.arange(tokens) % 3
    order = torch.sort(experts, stable=True).indices
    ends = torch.tensor([int((experts <= e).sum()) for e in range(4)], dtype=torch.int32)
    with torch.no_grad(), batch_invariant() as block:
        batched = moe._batched_linear(x, weight[experts])
        grouped = moe._grouped_linear(x[order], weight, ends)
    assert identical(batched[order], grouped)
    assert not block.coverage().at_risk
    assert not block.coverage().left


def test_the_stand_in_goes_with_the_block() -> None:
    """Outside of a block transformers' function is its own, and inside a plain bmm is not taken for an expert's."""
    original = moe._batched_linear
    matrices, vectors = operands(129, torch.float32)
    with torch.no_grad(), batch_invariant():
        assert moe._batched_linear is not original
        plain = torch.bmm(matrices, vectors[:, :, None])[:, :, 0]
        by_weights = moe._batched_linear(vectors, matrices)
        assert identical(torch.bmm(matrices, vectors[:, :, None])[:, :, 0], plain)
    assert not identical(plain, by_weights), "both orders are one here: the test of the two shows nothing"
    assert moe._batched_linear is original
