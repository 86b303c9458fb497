"""First uses are on no clock: what is proven or compiled once is counted, told, and left out of every timed step."""

from __future__ import annotations

import threading
import time
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from nondet.core.launch import FirstUses, first_uses, listen_to_triton, proving
from nondet.errors import UserError
from nondet.kernels.dispatch.block import batch_invariant
from nondet.kernels.matmul import cpu_tiles
from nondet.sampling.engine import run_session, warm_up
from nondet.sampling.model import LoadedModel
from nondet.sampling.plan import Plan, build_plan, parse_load


def _plan(loaded: LoadedModel) -> Plan:
    load = parse_load("others=0,targets=2,spread=1,budget=16,requests=4")
    prompt = loaded.encode("The following exceptions")
    return build_plan(
        load, n=2, seed=0, prompt=prompt, max_new_tokens=6, context=256, encode=loaded.encode_plain
    )  # fmt: skip


def test_what_is_proven_inside_of_a_step_is_not_in_its_seconds(tiny: LoadedModel) -> None:
    """A layer that proves for 0.4 s in one step, on the engine's thread: its seconds stand beside the session's."""
    plan, calls = _plan(tiny), []

    def prove(*_: Any) -> None:
        calls.append(1)
        if len(calls) == 3:
            with proving():
                time.sleep(0.4)

    def play(*hooks: Any) -> Any:
        handles = [tiny.model.register_forward_pre_hook(hook) for hook in hooks]
        try:
            return run_session(tiny.model, plan.rounds[0], plan.load)
        finally:
            for handle in handles:
                handle.remove()

    began = time.perf_counter()
    session = play(prove)
    wall = time.perf_counter() - began
    assert 0.4 <= session.first_use_seconds < 0.5
    assert session.seconds <= wall - session.first_use_seconds
    assert sum(p.seconds for p in session.pace) == pytest.approx(session.seconds)
    assert session.outcomes == play().outcomes
    assert play(lambda *_: time.sleep(0.05)).first_use_seconds == 0.0, "what is slow is not what is new"


def test_first_uses_of_all_threads_are_counted_once_each() -> None:
    """A proof within a proof, and what it compiles, are its own time; a stretch outside of the two times is no part."""
    knobs = SimpleNamespace(listener=None)
    told: list[tuple[int, int]] = []
    seconds = SimpleNamespace(total=2e6)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(__import__("sys").modules, "triton", SimpleNamespace(knobs=SimpleNamespace(compilation=knobs)))
        heard: list[bool] = []
        knobs.listener = lambda **event: heard.append(event["cache_hit"])
        listen_to_triton()
    with first_uses(lambda uses: told.append((uses.proofs, uses.compiled))) as uses:

        def prove() -> None:
            with proving(), proving():
                knobs.listener(times=seconds, cache_hit=False)

        thread = threading.Thread(target=prove)
        thread.start()
        thread.join()
        assert (uses.proofs, uses.compiled, len(uses.stretches)) == (1, 1, 1)
        assert uses.seconds < 1.0, "what a proof compiles is not counted twice"
        knobs.listener(times=seconds, cache_hit=True)
        assert uses.compiled == 1, "what was on disk is no first use"
        knobs.listener(times=seconds, cache_hit=False)
    assert told[-1] == (1, 2)
    assert heard == [False, True, False], "whoever listened before still does"
    begin, end = uses.stretches[-1]
    assert end - begin == pytest.approx(2.0)
    assert uses.within(begin + 0.5, end + 9.0) == pytest.approx(1.5, abs=0.01)
    with proving():
        pass
    assert uses.proofs == 1, "nobody listens any more"


def test_a_prepared_model_proves_nothing_when_it_meets_the_sizes(
    tiny: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each kind of layer once a size, with how far it is; the model's own pass has that much less to prove."""
    monkeypatch.setattr(cpu_tiles, "_use_kept", False)
    far: list[tuple[int, int]] = []

    def proofs_of_a_pass() -> int:
        with first_uses() as uses, torch.no_grad():
            tiny.model(torch.zeros(1, 5, dtype=torch.long), logits_to_keep=1)
        return uses.proofs

    with batch_invariant(families=["matmul"]) as invariance:
        monkeypatch.setattr(cpu_tiles, "_known", {})
        unprepared = proofs_of_a_pass()
        monkeypatch.setattr(cpu_tiles, "_known", {})
        uses = invariance.prepare(tiny.model, [1, 5], [1], lambda done, total, _: far.append((done, total)))
        assert uses.proofs >= 4
        assert proofs_of_a_pass() <= unprepared - uses.proofs, "what is no layer, at most"
        assert proofs_of_a_pass() == 0
    with pytest.raises(UserError, match="outside"):
        invariance.prepare(tiny.model, [1])
    assert far[0] == (0, far[-1][1])
    assert far[-1][0] == far[-1][1] == len(far) - 1


def test_the_warm_up_calls_layers_at_the_sizes_of_steps_and_plays_the_first_round(tiny: LoadedModel) -> None:
    """On CUDA the whole round after the layers; on a CPU its head; of a model that is elsewhere, only the round."""
    plan, played, far = _plan(tiny), [], []

    def play(requests: object) -> None:
        with proving():
            played.append(requests)

    warm_up(tiny.model, plan, "cuda", play, lambda done, total, uses: far.append((done, total, uses.proofs)))
    assert played == [plan.rounds[0]]
    kinds, sizes = divmod(far[-1][1] - 1 - 4, 16)
    assert sizes == 0, "4 sizes of the projection, 16 of every other kind, and the round"
    calls = far[-1][1] - 1
    assert far[-2][:2] == (calls, calls + 1), "what the round proves is told while it plays"
    assert far[-1] == (calls + 1, calls + 1, far[-2][2])
    assert far[-2][2] >= 1
    assert kinds >= 4
    warm_up(None, plan, "cuda", played.append, lambda *_: pytest.fail("it has no layers here"))
    warm_up(tiny.model, plan, "cpu", played.append)
    assert len(played[2]) <= len(plan.rounds[0])
    assert all(request.max_new_tokens <= 3 for request in played[2])


def test_stretches_of_two_threads_count_once() -> None:
    """Two threads that prove at once took the time together: subtracting both would flatter a rate."""
    uses = FirstUses(stretches=[(0.0, 10.0), (2.0, 8.0), (9.0, 12.0)])
    assert uses.within(0.0, 20.0) == uses.seconds == 12.0
    assert uses.within(1.0, 9.5) == 8.5
