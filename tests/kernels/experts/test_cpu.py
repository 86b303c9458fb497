"""Grouped products on a CPU: a row has the bits that it has alone, wherever its expert's weight lies."""

import itertools
from typing import Any

import pytest
import torch
from transformers.integrations import moe

from nondet.core import compare, inputs
from nondet.core.compare import identical
from nondet.core.inputs import order_revealing
from nondet.errors import UserError
from nondet.kernels import reference
from nondet.kernels.dispatch.block import batch_invariant
from nondet.kernels.experts import cpu as cpu_grouped_matmul
from nondet.kernels.matmul import cpu as cpu_matmul
from tests.build import DEVICE, accuracy_bound
from tests.kernels.tiers import at_length, exposed, tiny

# Rows of each expert: empty ones at both ends and between, one row, more than a tile; rows after the last offset.
OFFSETS = ([0, 3, 3, 21, 22, 22], [0, 0, 0, 40, 40, 40], [7, 14, 21, 28, 35, 42], [0, 0, 0, 0, 0, 0])


@pytest.mark.parametrize("dtype", [torch.float32, *at_length(torch.bfloat16, torch.float16)])
def test_cpu_bits_are_those_of_the_row_alone(dtype):
    """Rows of any count at any expert have the bits of one row; a stock loop in float32 does not keep them."""
    rng = inputs.generator(0, "cpu")
    x = inputs.make("bell", (42, 72), dtype, "cpu", rng)
    weight = inputs.make("bell", (6, 40, 72), dtype, "cpu", rng).mT
    for offsets in OFFSETS[:3]:
        ends = torch.tensor(offsets, dtype=torch.int32)
        out = cpu_grouped_matmul.grouped_matmul(x, weight, ends)
        right = reference.grouped_matmul(x, weight, ends)
        assert compare.error_against(out, right).relative_norm <= accuracy_bound(dtype, 72)
        for expert, (start, end) in enumerate(itertools.pairwise([0, *offsets])):
            for row in range(start, end):
                assert compare.identical(out[row : row + 1], cpu_matmul.matmul(x[row : row + 1], weight[expert]))


def test_a_weight_has_one_order_at_any_place() -> None:
    """One expert's weight under other numbers, which starts off any alignment."""
    rng = inputs.generator(0, "cpu")
    x = inputs.make("cancel", (40, 129), torch.float32, "cpu", rng)
    same = inputs.make("bell", (1, 35, 129), torch.float32, "cpu", rng).expand(5, -1, -1).contiguous().mT
    assert len({w.data_ptr() % 64 for w in same}) > 1
    rows = [cpu_grouped_matmul.grouped_matmul(x, same, torch.tensor([0] * e + [40] * (5 - e))) for e in range(5)]
    assert all(compare.identical(rows[0], other) for other in rows)


def test_cpu_refuses_offsets_that_make_no_sense():
    x, weight = torch.ones(4, 8), torch.ones(2, 8, 3)
    for given, offsets, words in (
        *(((x, weight), wrong, "ascend") for wrong in ([3, 2], [3, 9], [-1, 4])),
        ((x[:, :7], weight), [1, 2], "takes"),
        ((x.int(), weight.int()), [1, 2], "int32"),
    ):
        with pytest.raises((ValueError, UserError), match=words):
            cpu_grouped_matmul.grouped_matmul(*given, torch.tensor(offsets))
    for wrong in (-1, 4):
        with pytest.raises(IndexError, match="4 rows"):
            cpu_grouped_matmul.index_add_(x, torch.tensor([0, wrong]), torch.ones(2, 8))


ROWS = (1, 2, 3, 7, 8, 16, 17, 33, 96, 200)
BATCHES = 5


def operands(depth: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """[BATCHES, max(ROWS), depth] and [BATCHES, depth], whose products are the rounding errors of an order alone."""
    matrices = order_revealing(BATCHES * max(ROWS), depth, dtype, 1, negate=False)
    return matrices.view(BATCHES, max(ROWS), depth), order_revealing(BATCHES, depth, dtype, 2, negate=True)


def products(matrices: torch.Tensor, vectors: torch.Tensor) -> torch.Tensor:
    return torch.bmm(matrices, vectors[:, :, None])[:, :, 0].contiguous()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, *at_length(torch.float16)], ids=str)
@pytest.mark.parametrize("depth", [129, *at_length(64)])
def test_rows_and_batches_decide_nothing(depth: int, dtype: torch.dtype) -> None:
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
        if dtype == torch.float32:  # another order has other bits, which rounding to fewer may hide
            assert not identical(products(matrices.flip(2), vectors.flip(1)), whole)
        expanded = torch.bmm(matrices, vectors[:1, :, None].expand(BATCHES, -1, -1))
        assert identical(expanded[0, :, 0].contiguous(), whole[0])
    assert "bmm" in block.coverage().replaced
    assert not exposed(block)


def test_einsum_of_vectors_is_at_risk() -> None:
    """torch makes one batch another product than two, and of k,tk->t one whose weight is the rows: both are said."""
    matrices, vectors = operands(129, torch.float32)
    with torch.no_grad():
        for equation in ("btk,bk->bt", "bk,btk->bt", "btk,bk", "...tk,...k->...t"):
            first = (vectors, matrices) if equation.startswith("bk") else (matrices, vectors)
            for batches in (1, 2):
                with batch_invariant() as block:
                    torch.einsum(equation, *(x[:batches] for x in first))
                assert set(block.coverage().at_risk) == {"einsum float32"}, equation
        with batch_invariant() as block:
            torch.einsum("k,tk->t", vectors[0], matrices[0])
        assert block.coverage().at_risk
        with batch_invariant() as block:
            torch.einsum("bqd,bkd->bqk", matrices, matrices)
            torch.einsum("tk,nk->tn", matrices[0], matrices[1])
            torch.einsum("t k, k -> t", matrices[0], vectors[0])
        assert not block.coverage().at_risk


@pytest.mark.parametrize("dtype", [torch.float32, *at_length(torch.bfloat16, torch.float16)], ids=str)
def test_transformers_vectors_have_the_grouped_bits(dtype: torch.dtype) -> None:
    """transformers' own two functions agree for each token and expert, also for top-1 with a single token."""
    for tokens, columns in ((1, 35), (2, 1), (9, 2), (9, 96)):
        x = order_revealing(tokens, 129, dtype, 2, negate=True)
        weight = order_revealing(4 * columns, 129, dtype, 1, negate=False).view(4, columns, 129)
        experts = torch.arange(tokens) % 3
        order = torch.sort(experts, stable=True).indices
        ends = torch.tensor([int((experts <= e).sum()) for e in range(4)], dtype=torch.int32)
        with torch.no_grad(), batch_invariant() as block:
            batched = moe._batched_linear(x, weight[experts])
            grouped = moe._grouped_linear(x[order], weight, ends)
        assert identical(batched[order], grouped), (tokens, columns)
        assert not exposed(block)


def test_the_stand_in_goes_with_the_block() -> None:
    """Outside of a block transformers' function is its own, and inside a plain bmm is not taken for an expert's."""
    original = moe._batched_linear
    matrices, vectors = operands(129, torch.float32)
    out = torch.zeros(BATCHES, BATCHES)  # where torch has no grouped kernel, transformers multiplies into slices
    with torch.no_grad(), batch_invariant() as block:
        for part in (slice(1), slice(1, None)):
            torch.mm(vectors[part], vectors.t(), out=out[part])
        assert identical(out, torch.mm(vectors, vectors.t()))
        assert block.coverage().replaced["mm.out"] == 2
        assert moe._batched_linear is not original
        plain = torch.bmm(matrices, vectors[:, :, None])[:, :, 0]
        by_weights = moe._batched_linear(vectors, matrices)
        assert identical(torch.bmm(matrices, vectors[:, :, None])[:, :, 0], plain)
    assert not identical(plain, by_weights), "both orders are one here: the test of the two shows nothing"
    assert moe._batched_linear is original


WAYS = ("eager", "batched_mm", "grouped_mm")
QWEN3_MOE = {"moe_intermediate_size": 40, "num_experts": 8, "norm_topk_prob": True}
MODELS = {"qwen3-moe": ("qwen3_moe", QWEN3_MOE), "mixtral": ("mixtral", {"num_local_experts": 5})}


def model_of(name: str, way: str, dtype: torch.dtype = torch.float32) -> Any:
    """A model of weights large enough for experts, and their neighbours' rounding errors, to matter."""
    kind, more = MODELS[name]
    how = {"experts_implementation": way, "dtype": dtype}
    model = tiny(kind, how, num_hidden_layers=1, num_experts_per_tok=2, **more).to(DEVICE)
    assert model.config._experts_implementation == way
    rng = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for weight in model.parameters():
            if weight.dim() > 1:
                weight.copy_((torch.rand(weight.shape, generator=rng) - 0.5) * (4.0 / weight.shape[-1] ** 0.5))
    return model


def prompts(rows: int, length: int, seed: int = 1) -> torch.Tensor:
    return torch.randint(0, 257, (rows, length), generator=torch.Generator().manual_seed(seed)).to(DEVICE)


@pytest.mark.parametrize(
    ("model", "way", "dtype"),
    [
        *(("qwen3-moe", way, torch.float32) for way in WAYS),
        *at_length(*(("mixtral", way, torch.float32) for way in WAYS)),
        *at_length(*((model, way, torch.bfloat16) for model in MODELS for way in WAYS)),
    ],
)
def test_logits_do_not_depend_on_the_batch(model, way, dtype):
    made, ids = model_of(model, way, dtype), prompts(9, 24)
    with torch.no_grad(), batch_invariant() as block:
        alone = made(ids[:1]).logits
        others = [made(ids[:rows]).logits[:1] for rows in (2, 3, 5, 9)]
        assert all(identical(alone, other) for other in (*others, made(ids.flip(0)).logits[-1:]))
    ran = block.coverage().replaced
    assert {"topk", "_softmax", "sum.dim_IntList"} <= set(ran)
    assert ran[{"eager": "index_add_", "batched_mm": "bmm", "grouped_mm": "_grouped_mm"}[way]] > 0
    stock = {*block.coverage().left, *block.coverage().at_risk}
    assert not {name for name in stock if name.split()[0] in {"_grouped_mm", "topk", "index_add_", "bmm", "mm"}}


def test_a_tie_of_experts_is_decided_by_the_row():
    """Router logits of bfloat16 tie often: the lower expert wins, in any batch; so does topk along another axis."""
    x = torch.tensor([[1.0, 3.0, 3.0, 0.0, 3.0], [2.0, 2.0, 2.0, 2.0, 2.0]])
    with batch_invariant():
        values, indices = torch.topk(x, 2)
        assert indices.tolist() == [[1, 2], [0, 1]]
        assert torch.topk(x[1:], 2).indices.tolist() == [[0, 1]]
        assert values.tolist() == [[3.0, 3.0], [2.0, 2.0]]
        assert torch.topk(x.T, 2, dim=0).indices.T.tolist() == [[1, 2], [0, 1]]
        assert torch.topk(x, 2, largest=False).indices.tolist() == [[3, 0], [0, 1]]
        with pytest.raises(RuntimeError, match="out of range"):
            torch.topk(x, 6)


def test_index_add_of_every_shape():
    """In place and out of place, along any axis, scaled: the target's own memory gets the sums, and nothing else."""
    index = torch.tensor([4, 1, 4])
    for target, dim, source in (
        (torch.rand(6, 4), 0, torch.rand(3, 4)),
        (torch.rand(4, 6), 1, torch.rand(4, 3)),
        (torch.rand(6), 0, torch.rand(3)),
        (torch.rand(2, 6, 3), -2, torch.rand(2, 3, 3)),
        (torch.rand(3, 2, 6).permute(2, 0, 1), 0, torch.rand(3, 3, 2)),
    ):
        right = target.double().index_add(dim, index, source.double(), alpha=2)
        with batch_invariant() as block:
            new = torch.index_add(target, dim, index, source, alpha=2)
            kept = target.index_add_(dim, index, source, alpha=2)
        assert kept is target
        assert identical(new, target), target.shape
        torch.testing.assert_close(target.double(), right, rtol=1e-6, atol=1e-6)
        assert not block.coverage().left


def test_what_is_not_for_it_stays_stock_and_gradients_are_torchs():
    """Integers, groups along K and wrong shapes go to torch; under autograd its own formula gives the gradients."""
    x, weight = torch.rand(8, 16), torch.rand(2, 16, 8)
    offs = torch.tensor([2, 8], dtype=torch.int32)
    with torch.no_grad(), batch_invariant() as block:
        assert torch.topk(torch.tensor([1, 3, 2]), 1).indices.item() == 1
        grown = torch._grouped_mm(x.T[:, :4].contiguous(), x[:4], offs=torch.tensor([4], dtype=torch.int32))
        with pytest.raises((RuntimeError, IndexError)):
            torch.zeros(4, 2).index_add_(0, torch.tensor([0, 9]), torch.ones(2, 2))
        out = torch._grouped_mm(x, weight, offs=offs)
    assert grown.shape == (1, 16, 16)
    assert identical(out, cpu_grouped_matmul.grouped_matmul(x, weight, offs))
    assert {name.split(":")[0] for name in block.coverage().left} == {"_grouped_mm float32"}  # integers have no order
    x, weight = torch.rand(6, 16, requires_grad=True), torch.rand(2, 16, 8, requires_grad=True)
    offs = torch.tensor([2, 6], dtype=torch.int32)
    with batch_invariant() as block:
        torch._grouped_mm(x, weight, offs=offs).backward(torch.ones(6, 8))
    assert block.coverage().replaced["_grouped_mm"] >= 1
    right = torch.cat([weight[0].sum(-1).expand(2, 16), weight[1].sum(-1).expand(4, 16)])
    torch.testing.assert_close(x.grad, right)
    torch.testing.assert_close(weight.grad, torch.stack([x[:2].sum(0), x[2:].sum(0)])[..., None].expand(2, 16, 8))
