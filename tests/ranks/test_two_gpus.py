"""Two GPUs of one host: sums and products over NCCL's ranks have the bits that one GPU and plain torch give."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from nondet.ranks.group import RankGroup
from scripts.ranks_model import WAYS, traces, write_model

TASKS = "tests.ranks.gpu_tasks"
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices"),
]


@pytest.fixture(scope="module")
def pair() -> Iterator[RankGroup]:
    """A rank on each of two GPUs."""
    group = RankGroup(2, "cuda", limit_s=120)
    yield group
    group.close()


def test_members_have_the_bits_of_the_order_on_gpus(pair):
    """Each member of all-reduce and reduce-scatter that applies; symmetric memory has to be among them."""
    answers = pair.ask(f"{TASKS}:members_on_gpus")
    assert len(answers) == 2
    for agreed in answers:
        assert {"library", "ordered_gather", "one_shot", "two_shot", "peers_one_shot"} <= set(agreed["all_reduce"])
        assert {"exchange", "library", "peers"} == set(agreed["reduce_scatter"])


def test_collectives_are_replaced_in_eager_and_in_graphs(pair):
    """What a graph replays has the bits of the order for numbers that it was not captured with."""
    answers = pair.ask(f"{TASKS}:captured_under_a_block")
    assert len(answers) == 2
    for told in answers:
        assert told["unlike the order"] == []
        assert not [line for line in told["coverage"] if not line.startswith("replaced")]


def test_a_row_parallel_product_is_that_of_one_gpu(pair):
    """Bits do not follow the ranks, the rows or a graph."""
    assert pair.ask(f"{TASKS}:products_on_gpus") == [[], []]


def test_a_model_over_two_gpus(pair, tmp_path):
    """A Qwen3 by transformers' own plan: one invariant trace over batches, and one rank-free trace over the ranks."""
    folder = write_model(str(tmp_path / "model"), layers=2, hidden=1024)
    question = (folder, "cuda", WAYS[1:], (1, 3, 17), 4)
    whole, _ = traces(*question)
    free = {t.logits for t in whole if t.way == "rank-free"}
    answers = pair.ask("scripts.ranks_model:traces", *question, limit_s=120)
    assert len(answers) == 2
    for told, coverage in answers:
        bits = {way: {t.logits for t in told if t.way == way} for way in WAYS[1:]}
        assert len(bits["invariant"]) == 1
        assert bits["rank-free"] == free
        assert len(free) == 1
        assert any(line.startswith("replaced: all_reduce") for line in coverage["invariant"])
