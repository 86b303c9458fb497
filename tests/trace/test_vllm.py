"""`nondet trace --engine vllm` on a toy of vLLM's model, and, where vLLM is installed, on the embedded model."""

from __future__ import annotations

import importlib.util
import pickle
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from torch import nn

from nondet.cli import main
from nondet.core.records import Control, Culprit, OperatorCompared, TraceVerdict
from nondet.core.runfile import read_run
from nondet.errors import UserError
from nondet.sampling.plan import Load, Outcome, Request, Session, Span, parse_load
from nondet.services.trace import TraceRequest
from nondet.trace.against import Against, Kept, read_recording, record
from nondet.trace.search import Arm
from nondet.trace.vllm import VllmTrace, Whole, parts_of
from tests.trace.conftest import model_of

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


class QKVParallelLinear(nn.Module):
    """Products of transformers' in one."""

    def __init__(self, *parts: Any) -> None:
        super().__init__()
        self.parts, self.output_sizes = [lambda x, p=p: p(x) for p in parts], [len(p.weight) for p in parts]
        self.off = 1.0

    def forward(self, x: torch.Tensor) -> Any:
        return torch.cat([part(x[None])[0] for part in self.parts], -1) * self.off, None


class RMSNorm(nn.Module):
    """Of a sum, where there is one."""

    def __init__(self, norm: Any) -> None:
        super().__init__()
        self.norm = [norm]

    def forward(self, x: torch.Tensor, residual: torch.Tensor | None = None) -> Any:
        whole = x if residual is None else x + residual
        out = self.norm[0](whole)
        return out if residual is None else (out, whole)


class HeadsApart(nn.Module):
    """vLLM's attention over a whole text."""

    def __init__(self, attention: Any) -> None:
        super().__init__()
        self.of, self.head_size = [attention], attention.head_dim

    def forward(self, *given: torch.Tensor) -> torch.Tensor:
        from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

        heads = [x.view(1, len(x), -1, self.head_size).transpose(1, 2) for x in given]
        out, _ = ALL_ATTENTION_FUNCTIONS["sdpa"](self.of[0], *heads, None, scaling=self.of[0].scaling)
        return out.reshape(len(given[0]), -1)


class SelfAttention(nn.Module):
    """Around it."""

    def __init__(self, of: Any) -> None:
        super().__init__()
        self.qkv_proj, self.o_proj = QKVParallelLinear(of.q_proj, of.k_proj, of.v_proj), QKVParallelLinear(of.o_proj)
        self.q_norm, self.k_norm, self.attn = RMSNorm(of.q_norm), RMSNorm(of.k_norm), Heads(of)

    def forward(self, positions: torch.Tensor, x: torch.Tensor, rotary: Any) -> torch.Tensor:
        from transformers.models.qwen3.modeling_qwen3 import apply_rotary_pos_emb

        q, k, v = self.qkv_proj(x)[0].split(self.qkv_proj.output_sizes, -1)
        q, k = (norm(y.view(len(x), -1, self.attn.head_size)) for norm, y in ((self.q_norm, q), (self.k_norm, k)))
        q, k = apply_rotary_pos_emb(*(y[None].transpose(1, 2) for y in (q, k)), *rotary(x[None], positions[None]))
        q, k = (y.transpose(1, 2).reshape(len(x), -1) for y in (q, k))
        return self.o_proj(self.attn(q, k, v))[0]


class Mlp(nn.Module):
    """Two products in one."""

    def __init__(self, of: Any) -> None:
        super().__init__()
        self.gate_up_proj, self.down_proj = QKVParallelLinear(of.gate_proj, of.up_proj), QKVParallelLinear(of.down_proj)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate, up = self.gate_up_proj(x)[0].chunk(2, -1)
        return self.down_proj(torch.nn.functional.silu(gate) * up)[0]


class Block(nn.Module):
    """A layer."""

    def __init__(self, of: Any) -> None:
        super().__init__()
        self.self_attn, self.mlp = SelfAttention(of.self_attn), Mlp(of.mlp)
        self.input_layernorm = RMSNorm(of.input_layernorm)
        self.post_attention_layernorm = RMSNorm(of.post_attention_layernorm)

    def forward(self, positions: torch.Tensor, x: torch.Tensor, residual: Any, rotary: Any) -> Any:
        x, residual = (self.input_layernorm(x), x) if residual is None else self.input_layernorm(x, residual)
        x, residual = self.post_attention_layernorm(self.self_attn(positions, x, rotary), residual)
        return self.mlp(x), residual


class Fused(nn.Module):
    """A model of transformers' as vLLM arranges it: rows without a batch, fused products, sums inside of norms."""

    packed_modules_mapping: ClassVar = {
        "qkv_proj": ["q_proj", "k_proj", "v_proj"],
        "gate_up_proj": ["gate_proj", "up_proj"],
    }

    def __init__(self, of: Any) -> None:
        super().__init__()
        self.config, self.rotary, self.head = of.config, [of.model.rotary_emb], [of.lm_head]
        self.model = nn.Module()
        self.model.embed_tokens, self.model.norm = of.model.embed_tokens, RMSNorm(of.model.norm)
        self.model.layers = nn.ModuleList(map(Block, of.model.layers))
        self.logits_processor = LogitsProcessor()

    def forward(self, input_ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        body: Any = self.model
        x, residual = body.embed_tokens(input_ids), None
        for layer in body.layers:
            x, residual = layer(positions, x, residual, self.rotary[0])
        return body.norm(x, residual)[0]


Heads = type("Attention", (HeadsApart,), {})  # found by its name


def test_a_recording_of_vllm_is_read_by_transformers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Products, norms, attention and the whole feed-forward compare bit for bit; a planted difference is named."""
    monkeypatch.setattr(LogitsProcessor, "forward", lambda _self, head, hidden: head(hidden))
    model, tokens = model_of("qwen3"), [(7 * i + 3) % 159 + 1 for i in range(24)]
    path, about = tmp_path / "v.safetensors", {"dtype": "float32", "threads": 1, "made_by": "a toy of vLLM"}

    def compared(fault: Any = None) -> tuple[TraceVerdict, list[OperatorCompared], str]:
        toy = Fused(model)
        for layer in toy.model.layers if fault else ():
            layer.get_submodule(fault).off = 1.01

        def play(texts: Sequence[Sequence[int]]) -> Kept:
            whole = Whole(2**24)
            with ExitStack() as stack, torch.inference_mode():
                whole.put(toy, list, stack)
                for text in texts:
                    hidden = toy(torch.tensor(text, dtype=torch.int32), torch.arange(len(text)))
                    toy.logits_processor(toy.head[0], hidden[-1:])
            kept: Kept = sent(whole).kept
            return kept

        record(model, tokens, path, about, play)
        *records, verdict = Against(model, read_recording(path), {}).run()
        assert isinstance(verdict, TraceVerdict)
        listed = "; ".join(r.name for r in records if isinstance(r, Control))
        return verdict, [r for r in records if isinstance(r, OperatorCompared)], listed

    verdict, operators, listed = compared()
    assert verdict.finding == "no divergence observed", verdict.sentences
    assert verdict.sentences[-1] == "from end to end the logits have equal bits"
    layer = "model.layers.*."
    names = {f"{layer}{name}_proj" for name in ("self_attn.q", "self_attn.k", "self_attn.v", "self_attn.o", "mlp.down")}
    names |= {layer + name for name in ("input_layernorm", "post_attention_layernorm", "self_attn.q_norm", "mlp")}
    found = {op.module: op.calls for op in operators}
    layers = 3 * len(model.model.layers)
    assert {*found.items()} >= {(name, layers) for name in names} | {
        ("model.norm", 3),
        ("lm_head", 3),
        ("model.embed_tokens", 3),
    }
    assert ("attention", layers) in [(op.call, op.calls) for op in operators]
    assert "other shapes" not in listed

    for fault, module in (("self_attn.qkv_proj", "self_attn.q_proj"), ("mlp.down_proj", "mlp.down_proj")):
        verdict, operators, _ = compared(fault)
        assert verdict.finding == "not rounding"
        assert next(op.module for op in operators if op.differing) == layer + module


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
