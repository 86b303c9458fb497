"""A model whose row-parallel layers are cut over ranks: stock sums follow their number, rank-free ones do not."""

from __future__ import annotations

import pytest
import torch

from nondet.compare import identical
from nondet.errors import UserError
from nondet.kernels.all_reduce.model import rank_free, row_parallel_layers
from nondet.kernels.dispatch.block import batch_invariant
from nondet.ranks.group import RankGroup
from tests.ranks.tasks import Toy, _drawn

TASKS = "tests.ranks.tasks"


def test_the_number_of_ranks_changes_a_model_unless_it_is_rank_free():
    """One rank and two: the layers that the plan names have one order, where an all-reduce of products has another."""
    model = Toy()
    x = _drawn(5 * 64, torch.bfloat16, 53).view(5, 64)
    with torch.no_grad(), batch_invariant():
        plain = model(x)
        with rank_free(model) as names:
            free = model(x)
        assert identical(model(x), plain), "the layers are as they were"
    assert names == ["layers.0.down"]
    group = RankGroup(2, "cpu", limit_s=120)
    try:
        for part in group.ask(f"{TASKS}:toy_over_ranks", True):
            assert identical(part, free)
        for part in group.ask(f"{TASKS}:toy_over_ranks", False):
            assert not identical(part, plain), "the test would prove nothing"
    finally:
        group.close()


def test_what_is_not_rank_free_is_said():
    """A model without a plan, and a forward pass with gradients."""
    with pytest.raises(UserError, match="Linear has no tensor-parallel plan"):
        row_parallel_layers(torch.nn.Linear(8, 8))
    model = Toy()
    with rank_free(model), pytest.raises(UserError, match="forward only"):
        model(torch.ones(1, 64, dtype=torch.bfloat16))
