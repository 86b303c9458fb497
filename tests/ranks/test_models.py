"""A model whose row-parallel layers are cut over ranks: stock sums follow their number, rank-free ones do not."""

from __future__ import annotations

import pytest
import torch

from nondet.core.compare import identical
from nondet.errors import UserError
from nondet.kernels.dispatch.block import batch_invariant
from nondet.kernels.dispatch.rank_free import rank_free, row_parallel_layers
from scripts.ranks_model import WAYS, traces, write_model
from tests.ranks.tasks import Toy, _drawn

TASKS = "tests.ranks.tasks"


def test_the_number_of_ranks_changes_a_model_unless_it_is_rank_free(two):
    """One rank and two: the layers that the plan names have one order, where an all-reduce of products has another."""
    model = Toy()
    x = _drawn(5 * 64, torch.bfloat16, 53).view(5, 64)
    with torch.no_grad(), batch_invariant():
        plain = model(x)
        with rank_free(model) as names:
            free = model(x)
        assert identical(model(x), plain), "the layers are as they were"
    assert names == ["layers.0.down"]
    for part in two.ask(f"{TASKS}:toy_over_ranks", True):
        assert identical(part, free)
    for part in two.ask(f"{TASKS}:toy_over_ranks", False):
        assert not identical(part, plain), "the test would prove nothing"


def test_many_small_sums_under_a_block_end(two):
    """A sum that is enqueued while the library's thread frees the last one's message does not wait for it for ever.

    With the interpreter's lock held while enqueueing, 4,000 sums never came to their end on two ranks.
    """
    assert two.ask(f"{TASKS}:many_sums", 4000, limit_s=60) == [2.0 * 3999] * 2


def test_transformers_tensor_parallelism_is_reached_unmodified(two, tmp_path):
    """A Qwen3 cut by its own plan: invariant traces do not follow the batch, rank-free ones not the ranks either.

    The invariant pass comes first, with nothing proven yet. Ranks that wait for each other are ended by the limit.
    """
    pytest.importorskip("transformers.distributed", reason="tensor-parallel plans are transformers'")
    folder = write_model(str(tmp_path / "model"), layers=2, hidden=256, dtype="float32")
    answers = two.ask(f"{TASKS}:tensor_parallel", folder, WAYS[1:], (1, 3), 2, limit_s=120)
    alone, _ = traces(folder, "cpu", WAYS[1:], (1, 3), 2)
    whole = {way: {t.logits for t in alone if t.way == way} for way in WAYS}
    assert len(answers) == 2
    for rank_traces, coverage in answers:
        bits = {way: {t.logits for t in rank_traces if t.way == way} for way in WAYS}
        assert len(bits["invariant"]) == len(bits["rank-free"]) == 1
        assert bits["rank-free"] == whole["rank-free"]
        assert bits["invariant"] != whole["invariant"], "the test would prove nothing"
        assert any(line.startswith("replaced: all_reduce") for line in coverage["invariant"])
        for line in coverage["invariant"] + coverage["rank-free"]:
            assert "all_reduce" not in line or line.startswith("replaced")


def test_what_is_not_rank_free_is_said():
    """A model without a plan, and a forward pass with gradients."""
    with pytest.raises(UserError, match="Linear has no tensor-parallel plan"):
        row_parallel_layers(torch.nn.Linear(8, 8))
    model = Toy()
    with rank_free(model), pytest.raises(UserError, match="forward only"):
        model(torch.ones(1, 64, dtype=torch.bfloat16))
