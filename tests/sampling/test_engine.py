"""The engine: transformers' own, on our clock, with everything written down and no bit changed."""

from __future__ import annotations

import inspect
import itertools
import random
import signal
import sys
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch
import transformers
from transformers import AutoConfig, GenerationConfig
from transformers.generation.continuous_batching.input_outputs import build_attention_mask
from transformers.generation.continuous_batching.scheduler import SCHEDULER_MAPPING
from transformers.models.diffllama.modeling_diffllama import DiffLlamaAttention

from nondet.core.launch import FirstUses, first_uses, listen_to_triton, proving
from nondet.embedded import DEFAULT_PROMPT
from nondet.errors import UserError
from nondet.sampling import engine
from nondet.sampling.engine import (
    batching_config,
    run_session,
    sizes_of,
    start,
    stock_attention,
    warm_up,
    why_no_graphs,
    write_mask,
)
from nondet.sampling.implementations import implementation
from nondet.sampling.model import LoadedModel, load_model, random_config
from nondet.sampling.plan import Outcome, Plan, Request, Session, build_plan, parse_load
from nondet.sampling.schedule import SessionLog, TopRing, UnservedError
from nondet.services.sample import SampleRequest, load_of
from tests.sampling.conftest import planned

PROMPT = "The following exceptions are raised when"
MIXED = "others=3,targets=4,spread=8,prompt=4-24,tokens=4-12,budget=16"
FEW = "others=0,targets=2,spread=1,budget=16,requests=4"


def plan_of(loaded: LoadedModel, spec: str, new: int = 12) -> Plan:
    return planned(loaded, spec, PROMPT, new=new)


def run(loaded: LoadedModel, spec: str) -> Session:
    plan = plan_of(loaded, spec)
    return run_session(loaded.model, plan.rounds[0], plan.load)


def targets(session: Session) -> list[Outcome]:
    return [o for o in session.outcomes if o.request.target]


def traces(session: Session) -> set[tuple[tuple[int, ...], bytes]]:
    return {(tuple(o.token_ids), o.logprobs) for o in targets(session)}


def test_the_load_changes_bits_and_its_absence_does_not(tiny_float32: LoadedModel) -> None:
    """Stock float32 products depend on M on every CPU: a mixed load shows it, and requests that are served solo agree.
    One plan gives the same tokens, logprobs, margins and batches twice."""
    mixed = run(tiny_float32, MIXED)
    assert len(traces(mixed)) > 1
    assert mixed.outcomes == run(tiny_float32, MIXED).outcomes
    assert len(traces(run(tiny_float32, "none,targets=4"))) == 1


def test_schedules_add_up_to_the_batches(tiny: LoadedModel) -> None:
    """The exact batch of every step can be read off the schedules; no step exceeds the budget; nobody comes early.
    Results arrive as requests finish; outcomes are in the plan's order."""
    for sharing in ["on", "off"]:
        plan, sums, counted = plan_of(tiny, f"{MIXED},sharing={sharing},page=4"), Counter[int](), Counter[str]()
        session = run_session(
            tiny.model, plan.rounds[0], plan.load, on_token_count=lambda r, new, seen=counted: seen.update({r.id: new})
        )
        assert [o.request for o in session.outcomes] == list(plan.rounds[0])
        assert counted == {o.request.id: len(o.token_ids) for o in session.outcomes}
        assert counted.total() == session.tokens
        for outcome in session.outcomes:
            assert outcome.finish == "length"
            assert outcome.schedule[0][0] >= outcome.request.arrival_step
            own = sum(steps * tokens for _, steps, tokens in outcome.schedule)
            needed = len(outcome.request.prompt) + outcome.request.max_new_tokens - 1
            assert own == needed or (own < needed and sharing == "on")
            sums.update({s: tokens for first, steps, tokens in outcome.schedule for s in range(first, first + steps)})
        assert (len(sums), max(sums.values())) == (session.steps, 16)
        for outcome in session.outcomes:
            mine = [sums[s] for first, steps, _ in outcome.schedule for s in range(first, first + steps)]
            assert (outcome.batch_min, outcome.batch_max) == (min(mine), max(mine))
        assert any(len(o.schedule) > 2 for o in session.outcomes), "no prefill was chunked: the load is too light"


def test_shared_prefixes_are_skipped_and_idle_steps_too(tiny: LoadedModel) -> None:
    """With sharing, a later target prefills less than the whole prompt. An arrival far in the future costs no steps."""
    spec = "others=0,targets=4,spread=20,budget=64,page=4"
    together, apart = run(tiny, spec), run(tiny, f"{spec},sharing=off")
    prefilled = [{o.schedule[0][2] for o in targets(s)} for s in (together, apart)]
    assert min(prefilled[0]) < min(prefilled[1]) == len(tiny.encode(PROMPT))
    late = [Request("a", True, (1, 2, 3), 2, 0), Request("b", True, (1, 2, 3), 2, 1_000_000)]
    session = run_session(tiny.model, late, parse_load("none"))
    assert (session.steps, session.outcomes[1].schedule[0][0]) == (4, 1_000_000)


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


def leftovers(model: Any) -> tuple[Any, ...]:
    hooks, attention = len(model._forward_hooks), model.config._attn_implementation
    return sorted(SCHEDULER_MAPPING), hooks, attention, threading.active_count()


def test_a_crash_leaves_an_outcome_for_every_request(tiny: LoadedModel) -> None:
    """An engine that dies in step 7 says so, and every request has its reason; what was done by then is kept."""
    before, plan = leftovers(tiny.model), plan_of(tiny, "others=0,targets=3,spread=1,budget=16,requests=1", new=4)
    fail = Mock(side_effect=[None] * 6 + [RuntimeError("a kernel failed\nwith a long story")])
    with tiny.model.register_forward_pre_hook(fail):
        session = run_session(tiny.model, plan.rounds[0], plan.load)
    assert session.fatal.endswith("a kernel failed")
    assert [o.finish for o in session.outcomes] == ["length", "error", "error"]
    assert all("a kernel failed" in o.reason for o in session.outcomes[1:])
    assert leftovers(tiny.model) == before


def test_ctrl_c_stops_the_engine_and_leaves_nothing_behind(tiny: LoadedModel) -> None:
    """After Ctrl-C the engine's thread is gone, and the model is as it was."""
    before, plan = leftovers(tiny.model), plan_of(tiny, MIXED)
    with pytest.raises(KeyboardInterrupt):
        run_session(tiny.model, plan.rounds[0], plan.load, on_token_count=Mock(side_effect=KeyboardInterrupt))
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


def test_the_cache_suffices_for_whom_a_step_takes(tiny: LoadedModel) -> None:
    """The cache is made for as many requests as a step takes: nobody is preempted, and nobody starves."""
    for budget, limits in [(16, "requests=1"), (16, "requests=3,page=4"), (2, "page=4,sharing=off")]:
        session = run(tiny, f"others=2,targets=3,spread=4,prompt=4-16,tokens=4-8,budget={budget},{limits}")
        assert {o.finish for o in session.outcomes} == {"length"}
        needed = [len(o.request.prompt) + o.request.max_new_tokens - 1 for o in session.outcomes]
        done = [sum(steps * tokens for _, steps, tokens in o.schedule) for o in session.outcomes]
        assert all(d <= n for d, n in zip(done, needed, strict=True)), "a preempted request is prefilled a second time"


def test_what_does_not_fit_and_what_a_cpu_lacks_is_one_line(tiny: LoadedModel) -> None:
    """A load beyond the machine's memory, and on a CPU steps as CUDA graphs."""
    with pytest.raises(UserError, match="does not fit"):
        run_session(tiny.model, [Request("a", True, (1,) * 10, 10**13, 0)], parse_load("none"))
    if not torch.cuda.is_available():
        with pytest.raises(UserError, match="need a CUDA device"):
            run_session(tiny.model, [], parse_load("light,graphs=on"))


# Models that transformers' engine runs and does not serve: refused after one step, whatever would have come out.

_LOAD = parse_load("others=0,targets=2,spread=1,budget=32,requests=2")
_SIZES = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "max_position_embeddings": 64}
_SIZES |= {"vocab_size": 128, "bos_token_id": None, "eos_token_id": None, "pad_token_id": 0}
_HEADS = {"num_key_value_heads": 2, "intermediate_size": 96}
# model type -> its configuration, what is wrong
MODELS: dict[str, tuple[dict[str, Any], str]] = {
    "falcon": ({"alibi": False}, r"layer 0 keeps no keys in the engine's cache \(2 of 2 layers\)"),
    "diffllama": (_HEADS, r"layer 0 overwrites its own keys in the engine's cache \(2 of 2 layers\)"),
}
# since 5.24: DiffLlama writes once and is served, and Falcon's write is an error of the engine's
WRITTEN_BY_MODELS = "cache" in inspect.signature(DiffLlamaAttention.forward).parameters


def model_of(name: str, **more: Any) -> Any:
    torch.manual_seed(0)
    config = AutoConfig.for_model(name, **_SIZES, **more)
    return transformers.AutoModelForCausalLM.from_config(config, attn_implementation="sdpa").eval()


def requests(tokens: int) -> list[Request]:
    return [Request(f"r{i}", True, tuple(range(1, 6 + 4 * i)), tokens, 0) for i in range(2)]


def test_a_model_is_served_if_it_keeps_its_keys() -> None:
    """Falcon's own attention reads the tokens of the whole pack; DiffLlama's second call replaces its first one's. A
    Llama beside them runs, also for one step, and the cache's own update is back after it."""
    for tokens, (name, (more, reason)) in itertools.product((1, 3), MODELS.items()):
        if WRITTEN_BY_MODELS:
            session = run_session(model_of(name, **more), requests(tokens), _LOAD)
            assert bool(session.fatal) == (name == "falcon")
            continue
        with pytest.raises(UnservedError, match=reason):
            run_session(model_of(name, **more), requests(tokens), _LOAD)
    model = model_of("llama", **_HEADS)
    assert [len(o.token_ids) for o in run_session(model, requests(1), _LOAD).outcomes] == [1, 1]
    session = run_session(model, requests(3), _LOAD)
    assert [(o.finish, len(o.token_ids)) for o in session.outcomes] == [("length", 3)] * 2


# First uses are on no clock: what is proven or compiled once is counted, told, and left out of every timed step.


def test_what_is_proven_inside_of_a_step_is_not_in_its_seconds(tiny: LoadedModel) -> None:
    """A layer that proves for 0.2 s in one step, on the engine's thread: its seconds stand beside the session's."""
    plan, calls = plan_of(tiny, FEW, 6), itertools.count(1)

    def prove(*_: Any) -> None:
        if next(calls) == 3:
            with proving():
                time.sleep(0.2)

    def play(hook: Any = lambda *_: None) -> Any:
        with tiny.model.register_forward_pre_hook(hook):
            return run_session(tiny.model, plan.rounds[0], plan.load)

    began = time.perf_counter()
    session = play(prove)
    wall = time.perf_counter() - began
    assert 0.2 <= session.first_use_seconds < 0.4
    assert session.seconds <= wall - session.first_use_seconds
    assert sum(p.seconds for p in session.pace) == pytest.approx(session.seconds)
    assert session.outcomes == play().outcomes
    assert play(lambda *_: time.sleep(0.02)).first_use_seconds == 0.0, "what is slow is not what is new"


def test_first_uses_of_all_threads_are_counted_once_each() -> None:
    """A proof within a proof, and what it compiles, are its own time; a stretch outside of the two times is no part."""
    told, heard, seconds = list[tuple[int, int]](), list[bool](), SimpleNamespace(total=2e6)
    knobs = SimpleNamespace(listener=lambda **event: heard.append(event["cache_hit"]))
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "triton", SimpleNamespace(knobs=SimpleNamespace(compilation=knobs)))
        listen_to_triton()
    with first_uses(lambda uses: told.append((uses.proofs, uses.compiled))) as uses:

        def prove() -> None:
            with proving(), proving():
                knobs.listener(times=seconds, cache_hit=False)

        with ThreadPoolExecutor(1) as pool:
            pool.submit(prove).result()
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
    # two threads that prove at once took the time together: subtracting both would flatter a rate
    uses = FirstUses(stretches=[(0.0, 10.0), (2.0, 8.0), (9.0, 12.0)])
    assert uses.within(0.0, 20.0) == uses.seconds == 12.0
    assert uses.within(1.0, 9.5) == 8.5


def test_the_warm_up_calls_layers_at_the_sizes_of_steps_and_plays_the_first_round(tiny: LoadedModel) -> None:
    """On CUDA the round after the layers; on a CPU, and of a model that is elsewhere, only the round."""
    plan, played, far = plan_of(tiny, FEW, 6), [], []

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
    assert played == [plan.rounds[0]] * 3


# CUDA graphs under the engine: when they are the default, what they keep, and the mask that is written for a step.


def session_of(loaded: LoadedModel, spec: str) -> Session:
    plan = planned(loaded, spec, DEFAULT_PROMPT, new=24)
    return run_session(loaded.model, plan.rounds[0], plan.load)


def test_the_mask_is_transformers_own() -> None:
    """Written for a whole step at once, it holds the numbers that transformers writes request by request."""
    rng, least = random.Random(0), torch.finfo(torch.bfloat16).min  # noqa: S311 - sizes of a test
    for _ in range(60):
        window, queries, keys = rng.choice([1, 1, 3, 5]), [0], [0]
        for _ in range(rng.randint(1, 5)):
            past = rng.choice([0, rng.randint(1, 9)])
            queries.append(queries[-1] + rng.randint(1, 6))
            keys.append(keys[-1] + queries[-1] - queries[-2] + (past if window == 1 else min(past, window - 1)))
        theirs, ours = (torch.full((1, 1, 40, 90), least, dtype=torch.bfloat16) for _ in range(2))
        build_attention_mask(theirs, queries, keys, window)
        write_mask(ours, queries, keys, window)
        assert torch.equal(theirs, ours), (queries, keys, window)


def test_a_ring_of_tops_forgets_no_step() -> None:
    """What graphs keep on the device is what a hook would have kept, also once the ring has gone round."""
    ring = TopRing(rows=3, device=torch.device("cpu"), places=4)
    drawn = torch.Generator().manual_seed(0)
    steps = [torch.randn(rows, 7, generator=drawn) for rows in (2, 3, 1, 3, 2, 1)]
    kept: list[tuple[torch.Tensor, torch.Tensor]] = []
    for i, logits in enumerate(steps):
        if ring.full(i):
            kept += ring.read([len(x) for x in steps[:i]])
        ring.write(logits)
    kept += ring.read([len(x) for x in steps] + [3])  # a seventh step crashed
    assert len(kept) == len(steps)
    for (values, tokens), logits in zip(kept, steps, strict=True):
        best = torch.topk(logits, 2)
        assert torch.equal(values, best.values)
        assert torch.equal(tokens, best.indices)
    # two equal logits: margin 0, and the runner-up is the one that was not chosen
    log = SessionLog({"a": 0}, rows=[["a"]])
    output = SimpleNamespace(logits=torch.tensor([[[0.0, 3.0, 3.0]]]))
    log.record_logits(None, (), {"logits_indices": torch.tensor([0])}, output)
    best, next_best, first, second = log.tops()["a"][0]
    assert best == next_best == 3.0
    assert {first, second} == {1, 2}


@pytest.mark.gpu
def test_graphs_change_no_bit_of_the_invariant() -> None:
    """Tokens, logprobs and margins with graphs are those without; stock runs, and its margins are kept as well."""
    for impl in ["stock-flash", "invariant"]:
        loaded = load_model(None, "bfloat16", "cuda")
        spec = "others=12,targets=12,spread=24,prompt=8-64,tokens=8-32"
        with implementation(impl):
            apart, graphed = session_of(loaded, spec), session_of(loaded, f"{spec},graphs=on")
        for session in (apart, graphed):
            assert not session.fatal
            assert all(len(o.margins) == 4 * len(o.token_ids) for o in session.outcomes)
        assert not any(p.captured for p in apart.pace)
        assert 0 < sum(p.captured for p in graphed.pace) < graphed.steps / 2
        if impl == "invariant":
            assert apart.outcomes == graphed.outcomes
            assert len({(tuple(o.token_ids), o.logprobs) for o in graphed.outcomes if o.request.target}) == 1


def test_graphs_are_the_default_where_they_can_be(tiny: LoadedModel, capsys: pytest.CaptureFixture[str]) -> None:
    """For a dense model on CUDA, unless the load or the option says otherwise; not for experts or windows."""

    def graphs(spec: str = "heavy", device: str = "cuda", **more: Any) -> bool:
        request = SampleRequest(load=spec, **more)
        return load_of(request, replace(tiny, device=device), False, SimpleNamespace(say=print)).graphs

    assert all(map(graphs, ("heavy", "default", "light")))
    assert capsys.readouterr().out.count("steps run as CUDA graphs") == 3
    assert not graphs("budget=8")  # padded to their budget alone, no product would meet another M
    assert "padded to one size" in capsys.readouterr().out
    assert graphs(cuda_graphs=True)
    assert graphs("light,graphs=on")
    for options in ({"cuda_graphs": False}, {"spec": "heavy,graphs=off"}, {"device": "cpu"}, {"temperature": 0.8}):
        assert not graphs(**options)
    assert not graphs(ranks="2")
    assert not why_no_graphs(tiny.model.config)
    assert not why_no_graphs(random_config("random:mistral-2x128", 512))
    for name in ("gemma3_text", "mistral"):  # as they come: layers with a sliding window
        assert "full attention" in why_no_graphs(AutoConfig.for_model(name))
    assert "has been seen" in why_no_graphs(AutoConfig.for_model("gpt2"))
    stretched = AutoConfig.for_model("llama", rope_parameters={"rope_type": "dynamic", "factor": 2.0})
    assert "has been seen" in why_no_graphs(stretched), "it reads the longest position back"
    assert "experts" in why_no_graphs(SimpleNamespace(get_text_config=lambda: SimpleNamespace(num_experts=8)))


def test_a_warm_up_meets_the_sizes_that_graphs_have() -> None:
    """Steps are padded, so other sizes are not asked of the layers, which would take the time of all of them."""
    assert sizes_of(parse_load("budget=20,requests=5")) == ([*range(1, 21), 20], [1, 2, 3, 4, 5])
    graphed = parse_load("budget=20,requests=5,graphs=on")
    assert batching_config([], graphed, pages=4).q_padding_interval_size == 8
    assert sizes_of(graphed) == ([8, 16, 20], [5])


def test_rounds_in_graphs_have_few_shapes_between_them(tiny: LoadedModel) -> None:
    """Attention's shapes are query tokens by keys, in a mask as wide as the cache: dozens of rounds share a few, where
    steps of their own size have new ones round by round. Steps still have several sizes."""
    for spec, sizes in [("light", [8, 16, 24, 32]), ("default", [24, 48, 72, 96])]:
        load = parse_load(f"{spec},graphs=on")
        drawn: dict[str, Any] = {"n": 16 * load.targets, "prompts": [(1, 2, 3)], "max_new_tokens": 64, "context": 2048}
        rounds = build_plan(load, **drawn, seed=3, encode=tiny.encode_plain).rounds
        assert sizes_of(load)[0] == sizes
        configs = [batching_config(requests, load) for requests in rounds]
        assert {c.q_padding_interval_size for c in configs} == {sizes[0]}
        assert len({(c.num_blocks, c.kv_padding_interval_size) for c in configs}) <= 2
        apart = [batching_config(requests, parse_load(spec)) for requests in rounds]
        assert len({c.num_blocks for c in apart}) > 5
        for one, other in zip(configs, apart, strict=True):
            assert one.num_blocks >= other.num_blocks, "nobody loses a place in the cache"
            assert one.num_blocks * load.page <= 4 * one.kv_padding_interval_size


def test_sessions_on_a_gpu_take_turns_on_one_thread(tiny: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a library keeps for a thread is there in the next session, with the outcomes of threads of their own."""
    met, spec = list[threading.Thread](), "others=2,targets=3,spread=4,prompt=4-9,tokens=3-5"

    def sessions() -> tuple[list[Session], set[threading.Thread]]:
        met.clear()
        return [session_of(tiny, spec) for _ in range(2)], set(met)

    with tiny.model.register_forward_pre_hook(lambda *_: met.append(threading.current_thread())):
        plain, threads = sessions()
        assert len(threads) == 2
        monkeypatch.setattr(engine, "start", lambda manager, _: start(manager, torch.device("cuda")))
        kept, threads = sessions()
    assert len(threads) == 1
    assert threads.pop().is_alive()
    assert [s.outcomes for s in kept] == [s.outcomes for s in plain]
    assert not any(s.fatal for s in kept)
