"""Grouped products on a CPU: a row has the bits that it has alone, wherever its expert's weight lies."""

from __future__ import annotations

import itertools

import pytest
import torch

from nondet.core import compare, inputs
from nondet.errors import UserError
from nondet.kernels import reference
from nondet.kernels.experts import cpu as cpu_grouped_matmul
from nondet.kernels.matmul import cpu as cpu_matmul
from tests.build import accuracy_bound

# Rows of each expert: empty ones at both ends and between, one row, more than a tile; rows after the last offset.
OFFSETS = ([0, 3, 3, 21, 22, 22], [0, 0, 0, 40, 40, 40], [7, 14, 21, 28, 35, 42], [0, 0, 0, 0, 0, 0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
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


def test_cpu_experts_share_one_order_wherever_they_lie():
    """Weights of odd sizes start at any alignment: one expert's weight under another's number gives the same bits."""
    rng = inputs.generator(0, "cpu")
    x = inputs.make("cancel", (40, 129), torch.float32, "cpu", rng)
    weight = inputs.make("bell", (1, 35, 129), torch.float32, "cpu", rng).expand(5, -1, -1).contiguous().mT
    assert len({w.data_ptr() % 64 for w in weight}) > 1
    rows = [cpu_grouped_matmul.grouped_matmul(x, weight, torch.tensor([0] * e + [40] * (5 - e))) for e in range(5)]
    assert all(compare.identical(rows[0], other) for other in rows)


@pytest.mark.parametrize("n", [32, 35])
def test_cpu_gathered_weights_give_the_grouped_bits(n):
    """A batched product with vectors, as decoding has it, and the grouped product of prefill are one class."""
    rng = inputs.generator(0, "cpu")
    x = inputs.make("cancel", (40, 129), torch.float32, "cpu", rng)
    weight = inputs.make("bell", (3, n, 129), torch.float32, "cpu", rng)
    grouped = cpu_grouped_matmul.grouped_matmul(x, weight.mT, torch.tensor([20, 21, 40], dtype=torch.int32))
    gathered = weight[torch.tensor([0] * 20 + [1] + [2] * 19)]
    assert compare.identical(cpu_matmul.vectors_by_weights(gathered, x), grouped)
    assert compare.identical(cpu_matmul.vectors_by_weights(gathered[7:9], x[7:9]), grouped[7:9])


@pytest.mark.parametrize("offsets", [[3, 2], [3, 9], [-1, 4]])
def test_cpu_refuses_offsets_that_make_no_sense(offsets):
    """On a CPU the offsets can be read, so wrong ones are an error; so are shapes that do not fit."""
    with pytest.raises(ValueError, match="ascend"):
        cpu_grouped_matmul.grouped_matmul(torch.ones(4, 8), torch.ones(2, 8, 3), torch.tensor(offsets))
    with pytest.raises(ValueError, match="takes"):
        cpu_grouped_matmul.grouped_matmul(torch.ones(4, 7), torch.ones(2, 8, 3), torch.tensor([1, 2]))
    with pytest.raises(UserError):
        cpu_grouped_matmul.grouped_matmul(
            torch.ones(4, 8, dtype=torch.int32), torch.ones(2, 8, 3, dtype=torch.int32), torch.tensor([1, 2])
        )
