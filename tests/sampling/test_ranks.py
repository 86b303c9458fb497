"""Continuous batching over ranks: the engine's own sessions, one model cut over two processes."""

from __future__ import annotations

import os
import signal
import time
from contextlib import closing

import pytest
import torch

from nondet.cli import main
from nondet.core.launch import listen
from nondet.core.runfile import read_run
from nondet.errors import UserError
from nondet.kernels.dispatch.block import batch_invariant
from nondet.ranks.rank_free import rank_free
from nondet.sampling import collect as collecting
from nondet.sampling.axes import Conditions, Subject, plan_axes
from nondet.sampling.engine import run_session
from nondet.sampling.plan import Load, Request, Session, build_plan
from nondet.sampling.ranks import RanksEngine
from nondet.sampling.replay import recording_of
from tests.build import needs_accelerate
from tests.sampling.conftest import sampled_into

LOAD = Load(others=0, targets=3, spread=1, prompt=(1, 1), tokens=(1, 1), budget=32, requests=8)


pytestmark = [pytest.mark.slow, needs_accelerate]


@pytest.fixture(scope="module")
def over_two(tiny_float32):
    """A model of two layers on two ranks, over which its sums have other bits than over one."""
    with closing(RanksEngine(tiny_float32, 2)) as engine:
        yield engine


def _requests(count: int) -> list[Request]:
    """The request under study, alone or before others of other lengths."""
    return [Request(f"t{i}", True, tuple(range(5 + i, 17 + 2 * i)), 3, i) for i in range(count)]


def _trace(session: Session) -> tuple[tuple[int, ...], bytes]:
    outcome = session.outcomes[0]
    assert not session.fatal + outcome.reason
    return tuple(outcome.token_ids), outcome.logprobs


def test_a_session_over_two_ranks_is_the_engines_own(over_two):
    """Ids, logprob bits, margins and schedules come from the ranks, and all ranks came to the same."""
    session = over_two.run(_requests(3), LOAD)
    assert [o.finish for o in session.outcomes] == ["length"] * 3
    assert all(len(o.logprobs) == len(o.margins) == 3 * 4 and o.schedule for o in session.outcomes)
    assert session.outcomes[0].batch_max > session.outcomes[0].batch_min, "the requests never shared a step"
    assert over_two.describe()["ranks"] == 2


@pytest.mark.nightly
def test_invariant_over_ranks_does_not_follow_the_company(over_two):
    """One trace alone and beside others, with sums over ranks replaced; what stood under it is told."""
    with listen() as ran:
        alone, beside = (_trace(over_two.run(_requests(count), LOAD, "invariant")) for count in (1, 3))
    assert alone == beside
    assert ran["replaced: all_reduce"] > 0


def test_rank_free_does_not_follow_the_ranks(tiny_float32, over_two):
    """One rank and two give one trace; sums in the order of the ranks give two, or this would prove nothing."""
    traces = {}
    with torch.no_grad(), batch_invariant():
        traces["invariant", 1] = _trace(run_session(tiny_float32.model, _requests(1), LOAD))
        with rank_free(tiny_float32.model):
            traces["rank-free", 1] = _trace(run_session(tiny_float32.model, _requests(1), LOAD))
    for way in ("invariant", "rank-free"):
        traces[way, 2] = _trace(over_two.run(_requests(1), LOAD, way))
    assert traces["rank-free", 1] == traces["rank-free", 2]
    assert traces["invariant", 1] != traces["invariant", 2]


@pytest.mark.nightly
def test_ranks_are_an_axis(tiny_float32, over_two, tmp_path, monkeypatch):
    """One rank and two in one run: proven by the share that a rank holds, one trace where rank-free, several else."""
    monkeypatch.setattr(collecting.Here, "_over", lambda self, ranks: over_two)
    load = Load(others=1, targets=2, spread=2, prompt=(4, 9), tokens=(2, 3), budget=32, requests=8)
    given = {"prompts": [range(5, 17)], "max_new_tokens": 3, "context": 256, "encode": tiny_float32.encode_plain}
    plan = build_plan(load, n=2, seed=0, **given)
    base = Conditions(load, tiny_float32.dtype)
    axes = plan_axes({"ranks": []}, Subject(base, "cpu", (), torch.get_num_threads(), heads=2))
    assert [value for value, _ in axes[0].values] == ["2"]
    run = sampled_into(tmp_path / "run.jsonl", tiny_float32, plan, ["invariant", "rank-free"], base=base, axes=axes)
    values = {(v.impl, v.value): v for v in run.axis_values}
    assert all(v.proven for v in values.values())
    assert "2 ranks came to the same" in values["rank-free", "2"].proof
    assert {v.impl for v in run.axis_values if v.held} == {"rank-free"}
    traces = {impl: {c.trace for c in run.completions if c.impl == impl} for impl in ("invariant", "rank-free")}
    assert [len(traces[impl]) for impl in ("invariant", "rank-free")] == [2, 1]
    assert any(name.startswith("replaced: all_reduce") for r in run.rounds for name in r.ran)


@pytest.mark.nightly
def test_sample_over_ranks(over_two, tiny_folder, tmp_path, monkeypatch):
    """The command's completions come from the ranks, its header says so, and no rank of its own plays them again."""
    monkeypatch.setattr(collecting.Here, "_over", lambda self, ranks: over_two)
    monkeypatch.chdir(tmp_path)
    options = ("--n", "2", "--max-tokens", "2", "--load", "targets=2,others=0", "--impl", "invariant", "--quiet")
    model = ("--model", str(tiny_folder), "--dtype", "float32")
    assert main(["sample", "--ranks", "2", "--device", "cpu", *model, *options, "--out", "r.jsonl"]) == 0
    run = read_run(tmp_path / "r.jsonl")
    assert run.header.plan["ranks"] == 2
    assert {c.trace for c in run.completions if c.status == "ok"}
    assert {tape.engine["ranks"] for tape in run.tapes} == {2}
    with pytest.raises(UserError, match="ran over 2 ranks"):
        recording_of(run, run.completions[0])


def test_what_ranks_refuse_is_one_line(capsys, tmp_path_factory: pytest.TempPathFactory, monkeypatch):
    """Before anything is started, and no run file is begun."""
    for argv, line in [
        (("--ranks", "2,4"), "several numbers"),
        (("--ranks", "two"), "not a list of numbers"),
        (("--ranks", "2", "--vary", "chunk"), "exclude each other"),
        (("--vary", "ranks=4"), "can be cut by 2 at most"),
        (("--ranks", "2", "--impl", "invariant:matmul"), "does not run over ranks"),
        (("--ranks", "4", "--load", "none"), "has 2 key heads"),
    ]:
        tmp_path = tmp_path_factory.mktemp("case")
        monkeypatch.chdir(tmp_path)
        assert main(["sample", "--device", "cpu", "--n", "2", "--max-tokens", "2", *argv]) == 2
        assert line in capsys.readouterr().err
        assert not list(tmp_path.iterdir())


@pytest.mark.nightly
def test_a_step_that_fails_on_one_rank_is_told_at_once(tiny_float32):
    """The engine of a rank that failed waits for the others, which wait for it: the failure is the answer, in time."""
    with closing(RanksEngine(tiny_float32, 2)) as engine:
        engine._group.call("tests.ranks.tasks:break_a_step")
        started = time.monotonic()
        session = engine.run(_requests(2), LOAD)
        assert "rank 1 of 2: ValueError: broken in a test" in session.fatal
        assert {o.finish for o in session.outcomes} == {"error"}
        assert time.monotonic() - started < 30


@pytest.mark.nightly
def test_a_rank_that_dies_is_an_answer(over_two):
    """Each request says what became of the rank, and nothing waits for ever. The last test of these ranks."""
    os.kill(over_two.pids[1], signal.SIGKILL)
    session = over_two.run(_requests(2), LOAD)
    assert "was killed by SIGKILL" in session.fatal
    assert {o.finish for o in session.outcomes} == {"error"}
    with pytest.raises(UserError, match="the ranks have ended"):
        over_two.run(_requests(1), LOAD)
