"""The routing around grouped products: ties, sums over experts and additions to rows have one order."""

from __future__ import annotations

import pytest
import torch

from nondet.core import compare, inputs
from nondet.kernels.experts import cpu as cpu_grouped_matmul
from nondet.kernels.experts import cuda as triton_routing
from nondet.kernels.experts import topk as ordered_topk
from tests.build import DEVICE, bell

ROUTING = [triton_routing] if DEVICE == "cuda" else [triton_routing, cpu_grouped_matmul]
TOPKS = [triton_routing, ordered_topk]


@pytest.mark.parametrize("module", TOPKS)
@pytest.mark.parametrize("width", [1, 8, 60, 128])
def test_topk_takes_the_lower_index_of_a_tie(module, width):
    """Few distinct numbers, so nearly all are ties: the order is that of a stable sort; torch.topk's is not always."""
    x = torch.randint(-2, 2, (30, width), generator=inputs.generator(0, DEVICE), device=DEVICE).float()
    x[3, 0], x[4, -1], x[5], x[6, 0] = float("nan"), float("inf"), -0.0, float("-inf")
    x[5, ::2] = 0.0
    for dtype in (torch.float32, torch.float16):
        for k in {1, min(8, width)}:
            values, indices = module.topk(x.to(dtype), k)
            right = torch.sort(x.to(dtype), dim=-1, descending=True, stable=True)
            assert torch.equal(indices, right.indices[:, :k])
            assert compare.identical(values, right.values[:, :k])
            assert compare.identical(module.topk(x[7:8].to(dtype), k)[1], indices[7:8])


@pytest.mark.parametrize("module", TOPKS)
def test_topk_of_other_shapes(module):
    """Leading axes, transposed rows, rows wider than any router, float64 and no rows at all."""
    x = bell(2, 3, 1500)
    for y, k in ((x, 5), (x[..., :40], 3), (x[0, :, :40].double(), 3), (bell(40, 6).mT, 4), (x[:0, :, :9], 2)):
        values, indices = module.topk(y, k)
        right = torch.topk(y, k)
        assert compare.identical(values, right.values)
        assert compare.identical(indices, right.indices)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_sum_over_the_middle_is_a_chain_in_order(dtype):
    """Each token's experts are added from first to last, whoever else is there; backwards gives other bits."""
    x = bell(7, 8, 70, dtype=dtype) * torch.tensor([2.0**p for p in range(8)], device=DEVICE, dtype=dtype)[:, None]
    total = torch.zeros(7, 70, device=DEVICE)
    for rank in range(8):
        total = total + x[:, rank].float()
    out = triton_routing.sum_middle(x)
    assert compare.identical(out, total.to(dtype))
    assert compare.identical(triton_routing.sum_middle(x[3:4]), out[3:4])
    assert compare.identical(triton_routing.sum_middle(x.mT.contiguous().mT), out)
    if dtype == torch.float32:
        assert not compare.identical(triton_routing.sum_middle(x.flip(1)), out)
    assert triton_routing.sum_middle(x[:0]).shape == (0, 70)


@pytest.mark.parametrize("module", ROUTING)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_index_add_is_a_chain_in_order(module, dtype):
    """Additions to a row come in the order of the index, onto the row's own number, and round once."""
    target, source = bell(9, 33, dtype=dtype), bell(60, 33, dtype=dtype, seed=1)
    index = torch.randint(0, 8, (60,), generator=inputs.generator(0, DEVICE), device=DEVICE)
    total = target.float().clone()
    for row, added in zip(index.tolist(), source.float(), strict=True):
        total[row] += added * 0.5
    got = target.clone()
    assert module.index_add_(got, index, source, 0.5) is got
    assert compare.identical(got, total.to(dtype))
    assert compare.identical(got[8], target[8])
    backwards = module.index_add_(target.clone(), index.flip(0), source.flip(0), 0.5)
    if dtype == torch.float32:
        assert not compare.identical(backwards, got)
    wide = bell(9, 66, dtype=dtype)
    wide[:, ::2] = target
    module.index_add_(wide[:, ::2], index.int(), source, 0.5)
    assert compare.identical(wide[:, ::2].contiguous(), got)


@pytest.mark.parametrize("module", ROUTING)
def test_index_add_once_to_each_row_is_the_registered_one(module):
    """Where no row is named twice, as for one expert's tokens, every order is one: all implementations agree."""
    target, source = bell(20, 16), bell(7, 16, seed=1)
    index = torch.tensor([3, 19, 0, 7, 8, 2, 11], device=DEVICE)
    got = module.index_add_(target.clone(), index, source)
    assert compare.identical(got, cpu_grouped_matmul.index_add(target, index, source))
    assert compare.identical(got, target.index_add(0, index, source))
    assert compare.identical(module.index_add_(target.clone(), index[:0], source[:0]), target)


def test_cpu_index_add_refuses_other_rows():
    """A row that is not there is an error, as for torch."""
    for wrong in (-1, 4):
        with pytest.raises(IndexError, match="4 rows"):
            cpu_grouped_matmul.index_add_(torch.ones(4, 2), torch.tensor([0, wrong]), torch.ones(2, 2))
