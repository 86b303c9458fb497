"""Continuous batching over ranks: the engine's own sessions, one model cut over two processes."""

from __future__ import annotations

import os
import signal

import pytest
import torch

from nondet.errors import UserError
from nondet.kernels.all_reduce.model import rank_free
from nondet.kernels.dispatch.block import FAMILIES, batch_invariant
from nondet.sampling.engine import run_session
from nondet.sampling.model import LoadedModel, load_model
from nondet.sampling.plan import Load, Request
from nondet.sampling.protocol import Session
from nondet.sampling.ranks_engine import RanksEngine

LOAD = Load(others=0, targets=3, spread=1, prompt=(1, 1), tokens=(1, 1), budget=32, requests=8)


@pytest.fixture(scope="module")
def embedded() -> LoadedModel:
    """The embedded model."""
    return load_model(None, "bfloat16", "cpu")


@pytest.fixture(scope="module")
def over_two(embedded):
    """It, on two ranks."""
    with RanksEngine(embedded, 2) as engine:
        yield engine


def _requests(count: int) -> list[Request]:
    """The request under study, alone or before others of other lengths."""
    return [Request(f"t{i}", True, tuple(range(5 + i, 17 + 2 * i)), 3, i) for i in range(count)]


def _trace(session: Session) -> tuple[tuple[int, ...], bytes]:
    outcome = session.outcomes[0]
    assert not session.fatal
    assert not outcome.reason
    return tuple(outcome.token_ids), outcome.logprobs


def test_a_session_over_two_ranks_is_the_engines_own(over_two):
    """Ids, logprob bits, margins and schedules come from the ranks, and all ranks came to the same."""
    session = over_two.run(_requests(3), LOAD)
    assert [o.finish for o in session.outcomes] == ["length"] * 3
    assert all(len(o.logprobs) == len(o.margins) == 3 * 4 and o.schedule for o in session.outcomes)
    assert session.outcomes[0].batch_max > session.outcomes[0].batch_min, "the requests never shared a step"
    assert over_two.describe()["ranks"] == 2


def test_invariant_over_ranks_does_not_follow_the_company(over_two):
    """One trace alone and beside others, with sums over ranks replaced; what stood under it is told."""
    with over_two.implementation("invariant") as coverage:
        alone, beside = (_trace(over_two.run(_requests(count), LOAD)) for count in (1, 3))
        assert alone == beside
        assert coverage()["replaced: all_reduce"] > 0


def test_rank_free_does_not_follow_the_ranks(embedded, over_two):
    """One rank and two give one trace; sums in the order of the ranks give two, or this would prove nothing."""
    traces = {}
    with torch.no_grad(), batch_invariant(families=[*FAMILIES]):
        traces["invariant", 1] = _trace(run_session(embedded.model, _requests(1), LOAD))
        with rank_free(embedded.model):
            traces["rank-free", 1] = _trace(run_session(embedded.model, _requests(1), LOAD))
    for way in ("invariant", "rank-free"):
        with over_two.implementation(way):
            traces[way, 2] = _trace(over_two.run(_requests(1), LOAD))
    assert traces["rank-free", 1] == traces["rank-free", 2]
    assert traces["invariant", 1] != traces["invariant", 2]


def test_a_rank_that_dies_is_an_answer(over_two):
    """Each request says what became of the rank, and nothing waits for ever. The last test of these ranks."""
    os.kill(over_two.pids[1], signal.SIGKILL)
    session = over_two.run(_requests(2), LOAD)
    assert "was killed by SIGKILL" in session.fatal
    assert {o.finish for o in session.outcomes} == {"error"}
    with pytest.raises(UserError, match="the ranks have ended"):
        over_two.run(_requests(1), LOAD)


def test_ranks_that_do_not_divide_the_heads_are_refused(embedded):
    """Transformers would cut a head in two."""
    with pytest.raises(UserError, match="has 2 key heads"):
        RanksEngine(embedded, 4)
