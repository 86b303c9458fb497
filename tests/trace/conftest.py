"""Tiny random models of several architectures, and a way to trace them without a tokenizer."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any

import torch

from nondet.core.records import Control, Culprit, Record, Substitution, TraceVerdict
from nondet.sampling.engine import TransformersEngine
from nondet.sampling.plan import Load, Request
from nondet.trace.search import Arm, Search, Site
from tests.kernels.tiers import tiny

ARCHITECTURES: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen3": {},
    "mistral": {"sliding_window": 8},
    "gemma2": {
        "sliding_window": 8,
        "query_pre_attn_scalar": 16,
        "layer_types": ["sliding_attention", "full_attention"],
    },
    "qwen3_moe": {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 48, "norm_topk_prob": True},
}


def model_of(name: str, dtype: torch.dtype = torch.float32, seed: int = 0, **more: Any) -> Any:
    """A random model of that architecture, for inference, whose outputs differ with their batch."""
    how = {"attn_implementation": "eager" if name == "gemma2" else "sdpa", "dtype": dtype}
    own = {"vocab_size": 160, "max_position_embeddings": 256, "tie_word_embeddings": True, "initializer_range": 0.2}
    return tiny(name, how, seed=seed, **(own | {"eos_token_id": 0, "pad_token_id": None} | ARCHITECTURES[name] | more))


@dataclass
class Traced:
    """What a trace wrote, by kind, and what it said meanwhile."""

    verdict: TraceVerdict
    search: Search
    records: list[Record] = field(default_factory=list)
    said: list[str] = field(default_factory=list)

    @property
    def culprits(self) -> list[Culprit]:
        return [r for r in self.records if isinstance(r, Culprit)]

    @property
    def substitutions(self) -> list[Substitution]:
        return [r for r in self.records if isinstance(r, Substitution)]

    def control(self, name: str) -> Control:
        return next(r for r in self.records if isinstance(r, Control) and r.name == name)


class FirstOnly(Search):
    """A search that is over with its first culprit, as inside vLLM: for tests that look at no replacement."""

    def _until_fixed(self, site: Site) -> TraceVerdict:
        self._name(1, site)
        self.left_out = "which replacements make the arms agree is not tested"
        return self._end("batch-dependent")


LOAD = Load(
    others=5, targets=2, spread=6, prompt=(4, 24), tokens=(4, 10), budget=16, requests=16, page=4, sharing=False
)


def arms_of(load: Load, *, prompt: int = 11, new: int = 8, seed: int = 0) -> tuple[Arm, Arm]:
    """A request alone, and in ragged company: chunked prefills, decodes beside prefills."""
    rng = random.Random(seed)  # noqa: S311 - prompts, not secrets
    mine = tuple(rng.randrange(1, 160) for _ in range(prompt))
    requests = [Request(f"t{i}", True, mine, new, rng.randrange(load.spread)) for i in range(load.targets)]
    for i in range(load.others):
        length = rng.randint(*load.prompt)
        others = tuple(rng.randrange(1, 160) for _ in range(length))
        requests.append(Request(f"b{i}", False, others, rng.randint(*load.tokens), rng.randrange(load.spread)))
    requests.sort(key=lambda r: r.arrival_step)
    alone = next(r for r in requests if r.target)
    return Arm("alone", alone.id, (alone,), load), Arm("in company", alone.id, requests, load)


def trace(
    model: Any,
    load: Load = LOAD,
    *,
    impl: str = "stock",
    arms: tuple[Arm, Arm] | None = None,
    records: list[Record] | None = None,
    sweeps: bool = True,
    search: type[Search] = Search,
) -> Traced:
    """A whole trace."""
    records = [] if records is None else records
    said: list[str] = []
    a, b = arms or arms_of(load)
    made = search(
        TransformersEngine(model), model, a, b, impl=impl, choose=True, write=records.append,
        say=said.append, sweeps=sweeps,
    )  # fmt: skip
    return Traced(made.run(), made, records, said)
