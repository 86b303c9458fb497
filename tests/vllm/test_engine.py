"""vLLM as an engine of `nondet sample`, against a toy of its LLMEngine; the real one under the marker vllm."""

from __future__ import annotations

import importlib.util
import struct
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from transformers import LlamaConfig, MambaConfig, Qwen3Config

from nondet.cli import main
from nondet.core.runfile import read_run
from nondet.errors import UserError
from nondet.sampling.axes import Conditions, Subject, plan_axes
from nondet.sampling.plan import PRESETS, Request
from nondet.vllm import engine

needs_vllm = pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed")


class Toy:
    """An LLMEngine of `budget` tokens a step that has `cached` of a prompt; `parts`: logprobs follow the batch."""

    def __init__(self, taken: list[Any], budget: int = 4, parts: bool = False, cached: int = 0) -> None:
        self.taken, self.budget, self.parts, self.cached = taken, budget, parts, cached
        self.left: dict[str, Any] = {}
        self.resets, self.step_number = 0, -1

    def reset_prefix_cache(self) -> None:
        self.resets += 1

    def has_unfinished_requests(self) -> bool:
        return bool(self.left)

    def add_request(self, name: str, prompt: Any, params: Any) -> None:
        ids = prompt["prompt_token_ids"]
        cached = min(self.cached, len(ids) - 1)
        one = SimpleNamespace(prompt=len(ids) - cached, cached=cached, first=ids[0], ids=[], params=params)
        self.left[name] = one

    def step(self) -> list[Any]:
        self.step_number += 1
        room, scheduled, done = self.budget, {}, []
        for name, one in self.left.items():
            tokens = min(one.prompt, room) if one.prompt else min(1, room)
            if not tokens:
                continue
            scheduled[name], room = tokens, room - tokens
            one.prompt = max(0, one.prompt - tokens)
            if not one.prompt:
                one.ids.append(one.first * 100 + len(one.ids))
        for name, one in list(self.left.items()):
            if len(one.ids) == one.params.max_tokens:
                del self.left[name]
                score = -0.5 - (len(scheduled) * 2.0**-20 if self.parts else 0.0)
                tops = [{i: SimpleNamespace(logprob=score)} for i in one.ids]
                given = tops if one.params.logprobs is not None else None
                output = SimpleNamespace(token_ids=one.ids, logprobs=given, finish_reason="length")
                done.append(
                    SimpleNamespace(request_id=name, finished=True, outputs=[output], num_cached_tokens=one.cached)
                )
        preempted = {"x"} if self.step_number == 1 else None
        self.taken.append(SimpleNamespace(num_scheduled_tokens=scheduled, preempted_req_ids=preempted))
        return done


@pytest.fixture
def vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    """A vllm that has sampling parameters and nothing else."""
    made = ModuleType("vllm")
    made.SamplingParams = SimpleNamespace  # type: ignore[attr-defined] # a toy
    monkeypatch.setitem(sys.modules, "vllm", made)


REQUESTS = [Request("t0", True, (7,) * 6, 2, 0), Request("r0", False, (8,), 1, 1), Request("t1", True, (9, 9), 2, 9)]


@pytest.mark.usefixtures("vllm")
def test_requests_arrive_at_their_steps_and_batches_are_the_schedulers() -> None:
    taken: list[Any] = []
    toy = Toy(taken)
    played = engine.play(toy, REQUESTS, [2], taken)
    assert played.steps == [{"t0": 4}, {"t0": 2, "r0": 1}, {"t0": 1}, *[{}] * 6, {"t1": 2}, {"t1": 1}]
    assert (toy.resets, played.preempted) == (1, ["x"])
    session = engine.session_of(played, REQUESTS)
    first, other, last = session.outcomes
    assert first.schedule == [[0, 1, 4], [1, 1, 2], [2, 1, 1]]
    assert (first.batch_min, first.batch_max, first.token_ids) == (1, 4, [700, 701])
    assert first.logprobs == struct.pack("<2f", -0.5, -0.5)
    assert (other.schedule, other.logprobs) == ([[1, 1, 1]], b"")
    assert last.schedule == [[9, 1, 2], [10, 1, 1]]
    assert (session.steps, session.tokens) == (11, 5)
    outcome = engine.session_of(engine.Played({}, [], 0.0, []), REQUESTS[:1]).outcomes[0]
    assert (outcome.finish, outcome.reason) == ("error", "vLLM gave no answer")


@pytest.mark.usefixtures("vllm")
def test_a_batch_that_changes_a_logprob_shows() -> None:

    def logprobs(requests: list[Request], parts: bool) -> bytes:
        taken: list[Any] = []
        played = engine.play(Toy(taken, budget=16, parts=parts), requests, [], taken)
        return engine.session_of(played, requests).outcomes[0].logprobs

    pair = [Request("t0", True, (7,), 2, 0), Request("r0", False, (8,), 2, 0)]
    assert logprobs(pair[:1], True) != logprobs(pair, True)
    assert logprobs(pair[:1], False) == logprobs(pair, False)


@pytest.mark.usefixtures("vllm")
def test_what_a_session_did_is_counted_for_its_axis() -> None:
    taken: list[Any] = []
    figures = engine.session_of(engine.play(Toy(taken, cached=3), REQUESTS, [], taken), REQUESTS).figures
    # of 6, 1 and 2 prompt tokens 3, none and 1 came from its cache
    found = {"page": 0, "graphs": 0, "step_most": 3, "preempted": 1, "cached": 4, "hits": 2}
    assert figures.items() >= (found | {"piece_most": 3, "in_pieces": 0, "recomputed": 0}).items()
    toy = Toy(taken, budget=2)
    toy.vllm_config = SimpleNamespace(  # type: ignore[attr-defined] # as LLMEngine has it
        cache_config=SimpleNamespace(block_size=32),
        compilation_config=SimpleNamespace(cudagraph_mode=SimpleNamespace(name="FULL")),
    )
    figures = engine.session_of(engine.play(toy, REQUESTS, [], taken), REQUESTS).figures
    assert {name: figures[name] for name in ("page", "graphs", "step_most", "piece_most", "in_pieces")} == {
        "page": 32, "graphs": 1, "step_most": 2, "piece_most": 2, "in_pieces": 1
    }  # fmt: skip


def test_vllm_is_started_anew_for_each_arm_and_implementation(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[Any] = []

    def started(loaded: Any, load: Any, longest: int, **more: Any) -> Any:
        @contextmanager
        def implementation(name: str) -> Iterator[None]:
            said.append((name, more))
            yield
            said.append("ended")

        made = SimpleNamespace(implementation=implementation, describe=lambda: more)
        made.run, made.close = lambda requests, load, **_: load.budget, lambda: said.append("closed")
        return made

    monkeypatch.setattr(engine, "VllmEngine", started)
    base = Conditions(load=PRESETS["light"], dtype="float32")
    chunked = replace(base, setting=replace(base.setting, chunk=8))
    with closing(engine.VllmHost(SimpleNamespace(), 99, 32)) as arms:  # type: ignore[arg-type] # no model is loaded
        assert arms.describe(base) == {"block_size": 32, "long_prefill_token_threshold": 0}
        assert said == ["closed"]
        said.clear()
        assert [arms.play([], c, "stock", 0, None) for c in (base, base, chunked)] == [base.load.budget] * 3
        arms.play([], chunked, "invariant", 0, None)
    first, second = ({"block_size": 32, "long_prefill_token_threshold": n} for n in (0, 8))
    over = ["ended", "closed"]
    assert said == [("stock", first), *over, ("stock", second), *over, ("invariant", second), *over]


def test_axes_that_vllm_lacks_are_refused() -> None:
    base = Conditions(load=replace(PRESETS["light"], page=32), dtype="float32")
    subject = Subject(base, "cpu", grain=32)
    varied = {v.axis.name: v for v in plan_axes({"all": []}, subject)}
    assert {name for name, v in varied.items() if v.values} == {"sharing", "chunk", "budget", "page"}
    assert varied["routing"].note == "vLLM is varied along sharing, chunk, budget, page, graphs"
    assert [value for value, _ in varied["page"].values] == ["64", "128"]
    for name, values, named in (
        ("routing", [], "--vary routing: vLLM is varied along"),
        ("page", ["20"], "page=20: vLLM's pages are multiples of 32 here"),
        ("graphs", [], "--vary graphs: CUDA graphs need a CUDA device"),
    ):
        with pytest.raises(UserError, match=named):
            plan_axes({name: values}, subject)
    assert plan_axes({"page": ["20"]}, replace(subject, grain=0))  # nondet's own engine has pages of any size


VALIDATION = """1 validation error for ModelConfig
  Value error, too long [type=value_error, input_value=1]
    For further information visit https://errors.pydantic.dev/2/v/value_error"""


def test_why_vllm_did_not_start_is_one_line() -> None:
    for error, line in (
        (ValueError("first\n\n last one.\n"), "ValueError: last one"),
        (ValueError(VALIDATION), "ValueError: Value error, too long"),
        (RuntimeError(), "RuntimeError"),
        (UserError("it is off", "Put it on."), "it is off"),
    ):
        assert engine.reason_of(error) == line


def test_what_vllm_is_made_with_follows_the_load_and_its_cache_leaves_the_rest_free() -> None:
    """4 layers, 2 heads of 64, K and V of 2 bytes: 2,048 bytes a token; 64 requests of 208 tokens and a page."""

    def arguments(device: str, *config: Any) -> dict[str, Any]:
        return engine.arguments_of(Path("m"), "bfloat16", device, PRESETS["default"], 200, *config)

    made = arguments("cuda")
    assert (made["max_num_batched_tokens"], made["max_num_seqs"], made["max_model_len"]) == (96, 64, 200)
    assert (made["block_size"], made["enforce_eager"], made["enable_prefix_caching"]) == (16, True, True)
    assert made["gpu_memory_utilization"] == 0.9
    assert not {"block_size", "kv_cache_memory_bytes"} & set(arguments("cpu", Qwen3Config()))
    sizes = {"num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2}
    for config in (Qwen3Config(**sizes, head_dim=64), LlamaConfig(**sizes, hidden_size=256)):
        assert engine.cache_bytes(config, 10) == 20_480
        assert arguments("cuda", config)["kv_cache_memory_bytes"] == 1.5 * 64 * 224 * 2048
    assert engine.cache_bytes(MambaConfig(), 10) == 0
    assert "kv_cache_memory_bytes" not in arguments("cuda", MambaConfig())


@pytest.mark.vllm
@needs_vllm
def test_what_stands_of_a_real_one(tmp_path: Path) -> None:
    out = tmp_path / "run.jsonl"
    assert main(["certify", "--vllm", "--dtype", "float32", "--m", "40", "--out", str(out), "--quiet"]) == 0
    run = read_run(out)
    assert run.header.plan["vllm"] == "stock"
    found = {s.kind.partition(" ")[0]: s for s in run.layer_standings}
    assert found["Attention"].standing == "at risk"
    asked = [found[kind] for kind in ("QKVParallelLinear", "RowParallelLinear", "RMSNorm")]
    assert all("40 row counts" in s.why or "different bits at M=" in s.why for s in asked)


@pytest.mark.vllm
@needs_vllm
def test_a_real_one(tmp_path: Path) -> None:
    """Every request has an answer, batches add up, and each value of an axis is one that vLLM ran with."""
    out = tmp_path / "run.jsonl"
    command = ["sample", "--engine", "vllm", "--impl", "stock", "--load", "light", "--n", "8", "--max-tokens", "8"]
    assert main([*command, "--vary", "sharing,chunk=8", "--out", str(out)]) == 0
    run = read_run(out)
    assert {c.status for c in run.completions} == {"ok"}
    assert all(c.n_tokens == 8 and sum(steps * tokens for _, steps, tokens in c.schedule) >= 8 for c in run.completions)
    assert run.header.plan["engine"]["name"] == "vllm"
    assert {(v.axis, v.value): v.proven for v in run.axis_values} == dict.fromkeys(
        [("sharing", "on"), ("sharing", "off"), ("chunk", "none"), ("chunk", "8")], True
    )
