"""The engine: transformers' own, on our clock, with everything written down and no bit changed."""

from __future__ import annotations

import signal
import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch

from nondet.errors import UserError
from nondet.sampling.engine import batching_config, run_session, stock_attention
from nondet.sampling.model import LoadedModel
from nondet.sampling.plan import Load, Outcome, Plan, Request, Session, build_plan, parse_load

PROMPT = "The following exceptions are raised when"
MIXED = "others=6,targets=8,spread=12,prompt=4-24,tokens=4-16,budget=16"


def plan_of(loaded: LoadedModel, spec: str, new: int = 12) -> Plan:
    load = parse_load(spec)
    return build_plan(
        load, n=load.targets, seed=0, prompt=loaded.encode(PROMPT), max_new_tokens=new, context=256,
        encode=loaded.encode_plain,
    )  # fmt: skip


def run(loaded: LoadedModel, spec: str) -> Session:
    plan = plan_of(loaded, spec)
    return run_session(loaded.model, plan.rounds[0], plan.load)


def targets(session: Session) -> list[Outcome]:
    return [o for o in session.outcomes if o.request.target]


def traces(session: Session) -> set[tuple[tuple[int, ...], bytes]]:
    return {(tuple(o.token_ids), o.logprobs) for o in targets(session)}


def test_one_plan_gives_the_same_bits_twice(tiny: LoadedModel) -> None:
    """Running twice with one seed gives the same tokens, logprobs, margins and batches on the same machine."""
    assert run(tiny, MIXED).outcomes == run(tiny, MIXED).outcomes


def test_the_load_changes_bits_and_its_absence_does_not(tiny_float32: LoadedModel) -> None:
    """Stock float32 products depend on M on every CPU: a mixed load shows it, and requests served alone agree."""
    assert len(traces(run(tiny_float32, MIXED))) > 1
    assert len(traces(run(tiny_float32, "none,targets=4"))) == 1


@pytest.mark.parametrize("sharing", ["on", "off"])
def test_schedules_add_up_to_the_batches(tiny: LoadedModel, sharing: str) -> None:
    """The exact batch of every step can be read off the schedules; no step exceeds the budget; nobody comes early."""
    session = run(tiny, f"{MIXED},sharing={sharing},page=4")
    sums: Counter[int] = Counter()
    for outcome in session.outcomes:
        assert outcome.finish == "length"
        assert outcome.schedule[0][0] >= outcome.request.arrival_step
        own = sum(steps * tokens for _, steps, tokens in outcome.schedule)
        needed = len(outcome.request.prompt) + outcome.request.max_new_tokens - 1
        assert own <= needed
        if sharing == "off":
            assert own == needed
        for first, steps, tokens in outcome.schedule:
            for step in range(first, first + steps):
                sums[step] += tokens
    assert len(sums) == session.steps
    assert max(sums.values()) == 16
    for outcome in session.outcomes:
        mine = [sums[s] for first, steps, _ in outcome.schedule for s in range(first, first + steps)]
        assert (outcome.batch_min, outcome.batch_max) == (min(mine), max(mine))
    assert any(len(o.schedule) > 2 for o in session.outcomes), (
        "no prefill was chunked: the load is too light to test it"
    )


def test_shared_prefixes_are_skipped(tiny: LoadedModel) -> None:
    """With sharing, a later target prefills less than the whole prompt: the engine's cache is really used."""
    together = run(tiny, "others=0,targets=4,spread=20,budget=64,page=4")
    apart = run(tiny, "others=0,targets=4,spread=20,budget=64,page=4,sharing=off")
    prefilled = [{o.schedule[0][2] for o in targets(s)} for s in (together, apart)]
    assert min(prefilled[0]) < min(prefilled[1]) == len(tiny.encode(PROMPT))


def test_the_clock_jumps_over_idle_steps(tiny: LoadedModel) -> None:
    """An arrival far in the future neither stalls the engine nor costs steps."""
    requests = [Request("a", True, (1, 2, 3), 2, 0), Request("b", True, (1, 2, 3), 2, 1_000_000)]
    session = run_session(tiny.model, requests, parse_load("none"))
    assert session.steps == 4
    assert session.outcomes[1].schedule[0][0] == 1_000_000


def test_margins_are_those_of_the_model_itself(tiny_float32: LoadedModel) -> None:
    """Margin, runner-up and logprob agree with the logits of a plain forward pass over prompt and completion."""
    outcome = targets(run(tiny_float32, "none,targets=1"))[0]
    prompt = list(outcome.request.prompt)
    with torch.no_grad():
        logits = tiny_float32.model(torch.tensor([prompt + outcome.token_ids])).logits[0, len(prompt) - 1 : -1].double()
    values, tokens = torch.topk(logits, 2, dim=-1)
    assert tokens[:, 0].tolist() == outcome.token_ids
    assert tokens[:, 1].tolist() == outcome.runner_up
    np.testing.assert_allclose(np.frombuffer(outcome.margins, "<f4"), values[:, 0] - values[:, 1], atol=2e-4)
    expected = torch.log_softmax(logits, -1).amax(-1)
    np.testing.assert_allclose(np.frombuffer(outcome.logprobs, "<f4"), expected, atol=2e-4)


def test_watching_changes_no_bit(tiny: LoadedModel) -> None:
    """Same requests, same batches, in transformers' own generate_batch without our scheduler and hook: equal bits."""
    from transformers import GenerationConfig

    plan = plan_of(tiny, "others=4,targets=4,spread=1,prompt=4-24,tokens=12,budget=16,sharing=off")
    ours = run_session(tiny.model, plan.rounds[0], plan.load).outcomes
    with stock_attention(tiny.model):
        theirs = tiny.model.generate_batch(
            [list(r.prompt) for r in plan.rounds[0]],
            generation_config=GenerationConfig(do_sample=False, eos_token_id=-1, max_new_tokens=12),
            continuous_batching_config=batching_config(plan.rounds[0], plan.load),
            warmup=False,
        )
    assert len(ours) == len(plan.rounds[0]) > 4
    for mine, other in zip(ours, theirs.values(), strict=True):
        assert mine.token_ids == other.generated_tokens
        assert mine.logprobs == np.asarray(other.logprobs, "<f4").tobytes()


def test_a_completion_can_end_early(tiny: LoadedModel) -> None:
    """With an end token given, a completion stops there and says so; without, all are equally long."""
    full = targets(run(tiny, "none,targets=1"))[0]
    stop = full.token_ids[5]
    plan = plan_of(tiny, "none,targets=1")
    ended = run_session(tiny.model, plan.rounds[0], plan.load, eos=[stop]).outcomes[0]
    assert full.finish == "length"
    assert ended.finish == "eos"
    assert ended.token_ids == full.token_ids[: full.token_ids.index(stop) + 1]
    assert len(ended.runner_up) == len(ended.token_ids)


@contextmanager
def breaking(model: Any, calls: int, error: BaseException) -> Iterator[None]:
    """Let the model raise in its call number `calls`."""
    seen = 0

    def hook(*_: Any) -> None:
        nonlocal seen
        seen += 1
        if seen == calls:
            raise error

    handle = model.register_forward_pre_hook(hook)
    try:
        yield
    finally:
        handle.remove()


def leftovers(model: Any) -> tuple[Any, ...]:
    from transformers.generation.continuous_batching.scheduler import SCHEDULER_MAPPING

    return (
        sorted(SCHEDULER_MAPPING),
        len(model._forward_hooks),
        model.config._attn_implementation,
        threading.active_count(),
    )


def test_a_crash_leaves_an_outcome_for_every_request(tiny: LoadedModel) -> None:
    """An engine that dies in step 7 says so, and every request has its reason; what was done by then is kept."""
    before = leftovers(tiny.model)
    plan = plan_of(tiny, "others=0,targets=3,spread=1,budget=16,requests=1", new=4)
    with breaking(tiny.model, 7, RuntimeError("a kernel failed\nwith a long story")):
        session = run_session(tiny.model, plan.rounds[0], plan.load)
    assert "a kernel failed" in session.fatal
    assert "long story" not in session.fatal
    assert [o.finish for o in session.outcomes] == ["length", "error", "error"]
    assert all("a kernel failed" in o.reason for o in session.outcomes[1:])
    assert leftovers(tiny.model) == before


def test_ctrl_c_stops_the_engine_and_leaves_nothing_behind(tiny: LoadedModel) -> None:
    """After Ctrl-C the engine's thread is gone, and the model is as it was."""
    before = leftovers(tiny.model)
    plan = plan_of(tiny, MIXED)

    def interrupt(request: Request, tokens: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_session(tiny.model, plan.rounds[0], plan.load, on_token_count=interrupt)
    assert leftovers(tiny.model) == before
    assert run_session(tiny.model, plan.rounds[0], plan.load).fatal == ""


@pytest.mark.skipif(not hasattr(signal, "pthread_sigmask"), reason="needs POSIX signals")
def test_ctrl_c_while_the_thread_starts_is_heard_after(tiny: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread that exists but never began can't be joined: that was a traceback, seen once in six hundred kills."""
    begin = threading.Thread.start
    sent = []

    def start(thread: threading.Thread) -> None:
        if not sent and threading.current_thread() is threading.main_thread():
            sent.append(thread)
            signal.raise_signal(signal.SIGINT)
        begin(thread)

    before, left = signal.signal(signal.SIGINT, signal.default_int_handler), leftovers(tiny.model)
    monkeypatch.setattr(threading.Thread, "start", start)
    try:
        with pytest.raises(KeyboardInterrupt):
            run(tiny, "others=1,targets=1,spread=4,prompt=4-8,tokens=2-4")
    finally:
        signal.signal(signal.SIGINT, before)
    assert sent
    assert not sent[0].is_alive()
    assert leftovers(tiny.model) == left


def test_the_engines_thread_has_the_pinned_threads(tiny: LoadedModel) -> None:
    """Thread counts are kept by thread in OpenMP: the engine's own must have the one that was set."""
    seen: set[int] = set()
    handle = tiny.model.register_forward_pre_hook(lambda *_: seen.add(torch.get_num_threads()))
    try:
        for count in (2, 1):
            torch.set_num_threads(count)
            run(tiny, "none,targets=1")
            assert seen == {count}
            seen.clear()
    finally:
        handle.remove()


def test_a_tie_names_the_token_that_lost(tiny: LoadedModel) -> None:
    """Two equal logits: margin 0, and the runner-up is the one that was not chosen."""
    from nondet.sampling.schedule import SessionLog

    log = SessionLog({"a": 0}, rows=[["a"]])
    output = type("Output", (), {"logits": torch.tensor([[[0.0, 3.0, 3.0]]])})
    log.record_logits(None, (), {"logits_indices": torch.tensor([0])}, output)
    gap, first, second = log.margins()["a"][0]
    assert gap == 0.0
    assert {first, second} == {1, 2}


def ids(requests: Sequence[Request]) -> list[str]:
    return [r.id for r in requests]


def test_outcomes_come_in_the_plans_order(tiny: LoadedModel) -> None:
    """Results arrive as requests finish; outcomes are matched to requests by name and kept in order."""
    plan = plan_of(tiny, MIXED)
    counted: list[tuple[str, int]] = []
    session = run_session(
        tiny.model, plan.rounds[0], plan.load, on_token_count=lambda r, tokens: counted.append((r.id, tokens))
    )
    assert ids([o.request for o in session.outcomes]) == ids(plan.rounds[0])
    assert sorted(name for name, _ in counted) == sorted(ids(plan.rounds[0]))
    assert sum(tokens for _, tokens in counted) == session.tokens


@pytest.mark.parametrize("limits", ["requests=1", "requests=2", "requests=3,page=4", "budget=2,page=4,sharing=off"])
def test_the_cache_suffices_for_whom_a_step_takes(tiny: LoadedModel, limits: str) -> None:
    """The cache is made for as many requests as a step takes: nobody is preempted, and nobody starves."""
    session = run(tiny, f"others=6,targets=8,spread=12,prompt=4-24,tokens=4-16,budget=16,{limits}")
    assert {o.finish for o in session.outcomes} == {"length"}
    needed = [len(o.request.prompt) + o.request.max_new_tokens - 1 for o in session.outcomes]
    done = [sum(steps * tokens for _, steps, tokens in o.schedule) for o in session.outcomes]
    assert all(d <= n for d, n in zip(done, needed, strict=True)), "a preempted request is prefilled a second time"


def test_a_cache_that_does_not_fit_is_the_users_to_shrink(tiny: LoadedModel) -> None:
    """A load beyond the machine's memory is one clear line."""
    requests = [Request("a", True, (1,) * 10, 10**13, 0)]
    with pytest.raises(UserError, match="does not fit"):
        run_session(tiny.model, requests, parse_load("none"))


def test_loads_are_what_they_say() -> None:
    """A frozen dataclass: the header's copy of the load can't drift from the one that ran."""
    load: Load = parse_load("default")
    with pytest.raises(AttributeError):
        load.budget = 1  # type: ignore[misc] # that is the point


@pytest.mark.skipif(torch.cuda.is_available(), reason="with a CUDA device there are graphs")
def test_graphs_need_a_gpu(tiny: LoadedModel) -> None:
    """On a CPU they are refused in one line, and nothing is left behind."""
    load = parse_load("light,graphs=on")
    with pytest.raises(UserError, match="need a CUDA device"):
        run_session(tiny.model, [], load)
