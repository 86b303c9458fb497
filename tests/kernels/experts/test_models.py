"""Mixtures of experts under `batch_invariant()`: each way of computing experts, alone and in company, bit for bit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers

from nondet.core.compare import identical
from nondet.kernels.dispatch.block import batch_invariant
from nondet.kernels.experts import cpu as cpu_grouped_matmul
from tests.build import DEVICE

WAYS = ("eager", "batched_mm", "grouped_mm")
SIZES = {
    "vocab_size": 257,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_experts_per_tok": 2,
}


def qwen3_moe(way: str, dtype: torch.dtype) -> Any:
    config = transformers.Qwen3MoeConfig(
        **SIZES, head_dim=16, moe_intermediate_size=40, num_experts=8, norm_topk_prob=True
    )
    return drawn(transformers.Qwen3MoeForCausalLM, config, way, dtype)


def mixtral(way: str, dtype: torch.dtype) -> Any:
    config = transformers.MixtralConfig(**SIZES, num_local_experts=5)
    return drawn(transformers.MixtralForCausalLM, config, way, dtype)


def drawn(kind: Any, config: Any, way: str, dtype: torch.dtype) -> Any:
    """A model of weights large enough for experts, and their neighbours' rounding errors, to matter."""
    model = kind._from_config(config, experts_implementation=way, dtype=dtype).eval().to(DEVICE)
    assert model.config._experts_implementation == way
    rng = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for weight in model.parameters():
            if weight.dim() > 1:
                weight.copy_((torch.rand(weight.shape, generator=rng) - 0.5) * (4.0 / weight.shape[-1] ** 0.5))
    return model


MODELS = {"qwen3-moe": qwen3_moe, "mixtral": mixtral}


def prompts(rows: int, length: int, seed: int = 1) -> torch.Tensor:
    return torch.randint(0, 257, (rows, length), generator=torch.Generator().manual_seed(seed)).to(DEVICE)


def keeps(model: Any, length: int = 24) -> list[bool]:
    """Whether the first prompt's logits are those it has alone, in batches of several sizes, and as the last row."""
    ids = prompts(9, length)
    alone = model(ids[:1]).logits
    others = [model(ids[:rows]).logits[:1] for rows in (2, 3, 5, 9)]
    return [identical(alone, other) for other in (*others, model(ids.flip(0)).logits[-1:])]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("model", MODELS)
def test_logits_do_not_depend_on_the_batch(model, way, dtype):
    """A prompt alone and among others: equal logits, with nothing of the experts left to a stock kernel."""
    made = MODELS[model](way, dtype)
    with torch.no_grad(), batch_invariant() as block:
        assert all(keeps(made))
    ran = block.coverage().replaced
    assert {"topk", "_softmax", "sum.dim_IntList"} <= set(ran)
    assert ran[{"eager": "index_add_", "batched_mm": "bmm", "grouped_mm": "_grouped_mm"}[way]] > 0
    stock = {*block.coverage().left, *block.coverage().at_risk}
    assert not {name for name in stock if name.split()[0] in {"_grouped_mm", "topk", "index_add_", "bmm", "mm"}}


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("way", ["eager", "grouped_mm"])
def test_stock_parts_in_float32(model, way):
    """The test can fail: as it comes, the same model gives the prompt other bits in some batch."""
    if DEVICE != "cpu":
        pytest.skip("what a GPU's libraries do at these sizes is theirs")
    with torch.no_grad():
        made = MODELS[model](way, torch.float32)
        assert not all(kept for length in (1, 5, 24) for kept in keeps(made, length))


@pytest.mark.parametrize("model", MODELS)
def test_decoding_and_prefill_are_one_class(model):
    """Generation goes over to gathered weights for decoding: each step has the bits of the whole prompt's prefill."""
    ids = prompts(3, 20)
    with torch.no_grad(), batch_invariant():
        prefill = MODELS[model]("grouped_mm", torch.float32)
        whole = prefill(ids).logits
        decode = MODELS[model]("batched_mm", torch.float32)
        assert identical(decode(ids).logits, whole)
        cache = prefill(ids[:, :14]).past_key_values
        for position in range(14, 20):
            step = decode(ids[:, position : position + 1], past_key_values=cache)
            assert identical(step.logits[:, 0], whole[:, position])


def test_mixed_lengths_in_one_batch():
    """Left padding, as unequal prompts are batched: a prompt's last logits are those it has alone."""
    model = qwen3_moe("grouped_mm", torch.float32)
    short, long = prompts(1, 11), prompts(1, 24, seed=2)
    batch = torch.cat([torch.nn.functional.pad(short, (13, 0)), long])
    mask = torch.ones_like(batch)
    mask[0, :13] = 0
    with torch.no_grad(), batch_invariant():
        places = (mask.cumsum(-1) - 1).clamp_min(0)
        together = model(batch, attention_mask=mask, position_ids=places).logits
        assert identical(together[:1, -1], model(short).logits[:, -1])
        assert identical(together[1:], model(long).logits)


def test_products_into_slices_are_invariant():
    """Where torch has no grouped kernel, transformers multiplies into slices of one tensor: mm with out=."""
    x, weight, out = torch.rand(40, 129), torch.rand(129, 24), torch.zeros(40, 24)
    with torch.no_grad(), batch_invariant() as block:
        torch.mm(x[:1], weight, out=out[:1])
        torch.mm(x[1:], weight, out=out[1:])
        assert identical(out, torch.mm(x, weight))
    assert block.coverage().replaced["mm.out"] == 2


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


SHAPES: dict[str, Callable[[], tuple[torch.Tensor, int, torch.Tensor]]] = {
    "rows": lambda: (torch.rand(6, 4), 0, torch.rand(3, 4)),
    "columns": lambda: (torch.rand(4, 6), 1, torch.rand(4, 3)),
    "a vector": lambda: (torch.rand(6), 0, torch.rand(3)),
    "the middle of three": lambda: (torch.rand(2, 6, 3), -2, torch.rand(2, 3, 3)),
    "a transposed view": lambda: (torch.rand(3, 2, 6).permute(2, 0, 1), 0, torch.rand(3, 3, 2)),
}


@pytest.mark.parametrize("shape", SHAPES)
def test_index_add_of_every_shape(shape):
    """In place and out of place, along any axis, scaled: the target's own memory gets the sums, and nothing else."""
    target, dim, source = SHAPES[shape]()
    index = torch.tensor([4, 1, 4])
    right = target.double().index_add(dim, index, source.double(), alpha=2)
    with batch_invariant() as block:
        new = torch.index_add(target, dim, index, source, alpha=2)
        kept = target.index_add_(dim, index, source, alpha=2)
    assert kept is target
    assert identical(new, target)
    torch.testing.assert_close(target.double(), right, rtol=1e-6, atol=1e-6)
    assert not block.coverage().left


def test_what_is_not_for_it_stays_stock_and_is_told():
    """Integers, gradients' groups along K and wrong shapes go to torch, whose errors and results stand."""
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


def test_gradients_of_grouped_products():
    """Under autograd the forward is replaced, and torch's own formula gives the gradients."""
    x, weight = torch.rand(6, 16, requires_grad=True), torch.rand(2, 16, 8, requires_grad=True)
    offs = torch.tensor([2, 6], dtype=torch.int32)
    with batch_invariant() as block:
        torch._grouped_mm(x, weight, offs=offs).backward(torch.ones(6, 8))
    assert block.coverage().replaced["_grouped_mm"] >= 1
    right = torch.cat([weight[0].sum(-1).expand(2, 16), weight[1].sum(-1).expand(4, 16)])
    torch.testing.assert_close(x.grad, right)
    torch.testing.assert_close(weight.grad, torch.stack([x[:2].sum(0), x[2:].sum(0)])[..., None].expand(2, 16, 8))
