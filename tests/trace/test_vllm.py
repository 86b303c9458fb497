"""`nondet trace --engine vllm` on a toy of vLLM's model, and, where vLLM is installed, on the embedded model."""

from __future__ import annotations

import importlib.util
import pickle
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from nondet.cli import main
from nondet.core.records import Control, Culprit, TraceVerdict
from nondet.core.runfile import read_run
from nondet.errors import UserError
from nondet.sampling.plan import Load, Outcome, Request, Session, Span, parse_load
from nondet.services.trace import TraceRequest
from nondet.trace.search import Arm
from nondet.trace.vllm import VllmTrace, parts_of

H, V, TOKENS = 16, 40, 6


class Attention(nn.Module):
    """Sums a request's values so far; `faulty` where it does so differently beside others."""

    def __init__(self) -> None:
        super().__init__()
        self.cache: dict[str, torch.Tensor] = {}
        self.step: list[Span] = []
        self.faulty = False

    def forward(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        out, start = torch.empty_like(query), 0
        for part in self.step:
            rows = slice(start, start + part.rows)
            before = self.cache.get(part.request, value[:0])[: part.first]
            values = torch.cat([before, value[rows]])
            self.cache[part.request] = values
            sums = values.cumsum(0)[part.first :]
            off = self.faulty and len(self.step) > 2 and part.first > 4
            out[rows] = query[rows] + (sums * 1.001 if off else sums)
            start += part.rows
        return out


class Product(nn.Module):
    """Weights [N, K], each row of x [M, K] by itself: the sum has one order at every M."""

    def __init__(self, inner: int, out: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(out, inner) / inner**0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x[:, None] * self.weight).sum(-1)


class Layer(nn.Module):
    """Attention between two products; `split` where what follows depends on the number of rows."""

    def __init__(self) -> None:
        super().__init__()
        self.proj, self.attn, self.down = Product(H, 3 * H), Attention(), Product(H, H)
        self.split = False

    def forward(self, positions: torch.Tensor, hidden: torch.Tensor, residual: torch.Tensor) -> Any:
        x = torch.relu(hidden + residual)
        q, k, v = self.proj(x).split(H, -1)
        out = self.attn(q + positions[:, None] * 0.01, k, v)
        return self.down(out) * (1.001 if self.split and len(x) > 3 else 1.0), x


class LogitsProcessor(nn.Module):
    """By its name."""

    def forward(self, head: Product, hidden: torch.Tensor) -> torch.Tensor:
        return head(hidden / hidden.abs().amax(-1, keepdim=True))


class Model(nn.Module):
    """As vLLM's: hidden states out, logits apart."""

    def __init__(self, layers: int = 3) -> None:
        super().__init__()
        self.config = SimpleNamespace(get_text_config=lambda: SimpleNamespace(num_hidden_layers=layers))
        self.embed, self.layers = nn.Embedding(V, H), nn.ModuleList(Layer() for _ in range(layers))
        self.head, self.logits_processor = Product(H, V), LogitsProcessor()

    def forward(self, input_ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        hidden, residual = self.embed(input_ids), torch.zeros(len(input_ids), H)
        for layer in self.layers:
            hidden, residual = layer(positions, hidden, residual)
        return hidden


def sent(watcher: Any) -> Any:
    """As a pipe brings it."""
    return pickle.loads(pickle.dumps(watcher))  # noqa: S301 - ours


class Engine:
    """Plays requests as vLLM's process does: everybody's next tokens in one step, prompts in chunks of four. Its runner
    is vLLM's first, which keeps one batch, or its second, which makes one a step and sorts it."""

    def __init__(self, second: bool = False) -> None:
        torch.manual_seed(0)
        self.second = second
        self.model = Model().eval()
        self.implementations: list[str] = []

    @contextmanager
    def implementation(self, name: str) -> Iterator[Any]:
        self.implementations.append(name)
        yield None

    def run(self, requests: Sequence[Request], load: Load, watcher: Any = None, **_: Any) -> Session:
        texts = {r.id: list(r.prompt) for r in requests}
        done = dict.fromkeys(texts, 0)
        logprobs: dict[str, list[float]] = {r.id: [] for r in requests}
        batch = SimpleNamespace(req_ids=[], num_computed_tokens_cpu=[])
        runner = SimpleNamespace(get_model=lambda: self.model)
        if self.second:
            runner.prepare_inputs = lambda output: made(output.num_scheduled_tokens)
        else:
            runner.input_batch = batch
        worker = SimpleNamespace(model_runner=runner)

        def made(counts: dict[str, int]) -> Any:
            order = sorted(counts, key=counts.__getitem__)
            return SimpleNamespace(req_ids=order, num_computed_tokens_np=np.array([done[r] for r in order]))

        llm, taken, step = SimpleNamespace(collective_rpc=lambda f: [f(worker)]), list[Any](), 0
        there = sent(watcher)  # vLLM's process is another one
        with ExitStack() as stack, torch.inference_mode():
            if there is not None:
                stack.enter_context(there.attached(llm, taken))
            while True:
                here = [r for r in requests if r.arrival_step <= step and len(logprobs[r.id]) < r.max_new_tokens]
                if not here and all(len(logprobs[r.id]) == r.max_new_tokens for r in requests):
                    break
                counts = {r.id: min(4, len(texts[r.id]) - done[r.id]) for r in here}
                step += 1
                if here:
                    batch.req_ids, batch.num_computed_tokens_cpu = [*counts], [done[r] for r in counts]
                    taken.append(SimpleNamespace(num_scheduled_tokens=counts))
                    now = runner.prepare_inputs(taken[-1]) if self.second else batch
                    self._step(parts_of(now, counts), texts, done, logprobs)
        if watcher is not None:
            vars(watcher).update(vars(sent(there)))
        outcomes = []
        for r in requests:
            values = np.float32(logprobs[r.id]).tobytes()
            outcomes.append(Outcome(r, token_ids=texts[r.id][len(r.prompt) :], logprobs=values, finish="length"))
        return Session(outcomes=outcomes, steps=step, tokens=0, seconds=0.0)

    def _step(self, parts: list[Span], texts: Any, done: Any, logprobs: Any) -> None:
        for layer in self.model.layers:
            layer.attn.step = parts
        ids = [i for p in parts for i in texts[p.request][p.first : p.first + p.rows]]
        positions = [i for p in parts for i in range(p.first, p.first + p.rows)]
        hidden = self.model(input_ids=torch.tensor(ids), positions=torch.tensor(positions))
        ends = np.cumsum([p.rows for p in parts]) - 1
        logits = self.model.logits_processor(self.model.head, hidden[ends])
        for part, row in zip(parts, logits.log_softmax(-1), strict=True):
            done[part.request] += part.rows
            if done[part.request] == len(texts[part.request]):
                token = int(row.argmax())
                texts[part.request].append(token)
                logprobs[part.request].append(float(row[token]))


def traced(engine: Engine) -> tuple[TraceVerdict, dict[str, Control], list[Culprit]]:
    solo = Request("t000000", True, (3, 9, 27, 5, 8, 1), TOKENS, 0)
    others = [Request(f"b{i:03d}", False, tuple(range(i, i + 7)), 9, i) for i in range(4)]
    load, toy, wrote = parse_load("default"), engine, list[Any]()
    arms = Arm("alone", solo.id, [solo], load), Arm("in company", solo.id, [solo, *others], load)
    verdict = VllmTrace(toy, None, *arms, impl="stock", write=wrote.append, say=lambda _: None).run()
    assert engine.implementations == ["stock"]
    return verdict, {r.name: r for r in wrote if isinstance(r, Control)}, [r for r in wrote if isinstance(r, Culprit)]


def test_nothing_is_named_where_nothing_differs() -> None:
    for second in [False, True]:
        verdict, controls, culprits = traced(Engine(second))
        assert verdict.finding == "no divergence observed"
        assert controls["run to run"].passed
        assert controls["capture"].passed
        assert controls["company"].figures == {"requests": 1, "logprobs": 0, "tokens": 0}
        assert not culprits


def test_attention_that_follows_its_step_is_named() -> None:
    for layer in [0, 1, 2]:
        for second in [False, True]:
            engine = Engine(second)
            engine.model.layers[layer].attn.faulty = True
            verdict, controls, [culprit] = traced(engine)
            assert verdict.finding == "batch-dependent"
            assert (culprit.module, culprit.call) == (f"layers.{layer}.attn", "Attention")
            assert (culprit.layer, culprit.position, culprit.token) == (str(layer), 6, 1)
            assert next(iter(culprit.differences.values())).mismatched
            assert "prefills of b0" in controls["step"].sentence or "next tokens" in controls["step"].sentence


def test_a_product_that_follows_its_rows_is_named_by_its_operator() -> None:
    engine = Engine()
    engine.model.layers[1].split = True
    _, _, [culprit] = traced(engine)
    assert (culprit.module, culprit.layer) == ("layers.1", "1")
    assert culprit.call == "aten::mul"
    assert culprit.differences


def test_an_engine_that_differs_from_itself_is_no_matter_of_batches() -> None:
    seen = set[int]()

    def warms_up(_module: Any, _args: Any, out: torch.Tensor) -> torch.Tensor:
        first = len(out) not in seen
        seen.add(len(out))
        return out * (1 + 2.0**-10 * first)

    for fault in (lambda _m, _a, out: out + torch.rand_like(out) * 1e-3, warms_up):
        engine = Engine()
        engine.model.layers[0].down.register_forward_hook(fault)
        verdict, controls, culprits = traced(engine)
        assert verdict.finding == "run-to-run"
        assert controls["run to run"].passed is False
        assert [(c.module, c.call) for c in culprits] == [("layers.0.down", "aten::rand_like")][: fault is not warms_up]
    assert "its first session in this process differs" in verdict.sentences[0]


def test_a_layer_that_differs_is_found_where_no_logprob_does() -> None:
    engine = Engine()
    last = engine.model.layers[2]
    last.register_forward_hook(lambda _m, _a, out: (out[0], out[1] * (1.001 if len(out[1]) > 3 else 1.0)))
    verdict, controls, [culprit] = traced(engine)
    assert verdict.finding == "batch-dependent"
    assert controls["company"].figures == {"requests": 1, "logprobs": 0, "tokens": 0}
    assert culprit.layer == "2"


def test_a_capture_that_changes_answers_names_nobody() -> None:
    engine = Engine()
    weight = engine.model.head.weight.data

    class Watched(Engine):
        def run(self, requests: Sequence[Request], load: Load, watcher: Any = None, **_: Any) -> Session:
            engine.model.head.weight.data = weight + 0.1 if watcher is not None else weight
            return engine.run(requests, load, watcher)

    verdict, controls, culprits = traced(Watched())
    assert verdict.finding == "unknown"
    assert controls["capture"].passed is False
    assert not culprits


def test_an_engine_that_only_samples_is_refused() -> None:
    """`nondet sample` and `nondet trace` share a table of engines: transformers never stands in for another."""
    with pytest.raises(UserError, match="--engine other can't be traced"):
        TraceRequest._check(SimpleNamespace(engine="other"))  # type: ignore[arg-type] # an engine that is to come


@pytest.mark.vllm
@pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed")
def test_the_real_one_names_its_attention_or_its_product(tmp_path: Path) -> None:
    """vLLM 0.25.1 on a CPU in float32: attention splits a request's keys by how many requests its step has. On a CPU
    without AVX-512 oneDNN's products depend on M as well, as `nondet certify --vllm` says there."""
    out = tmp_path / "t.jsonl"
    asked = ["trace", "--engine", "vllm", "--dtype", "float32", "--device", "cpu", "--threads", "2", "--out", str(out)]
    assert main(asked) == 0
    run = read_run(out)
    [verdict] = run.trace_verdicts
    assert verdict.finding == "batch-dependent"
    [culprit] = run.culprits
    assert culprit.call in ("vllm::unified_attention_with_output", "_C::onednn_mm")
    assert {control.name for control in run.controls} == {"run to run", "capture", "company", "parting", "step"}
