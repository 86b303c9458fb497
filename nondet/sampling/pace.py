"""What `nondet bench engine` times: whole models, each under several loads. See `nondet.sampling.pace_runs`."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

from nondet.core.records import Row
from nondet.errors import UserError
from nondet.sampling.implementations import RANK_FREE, STOCK_FLASH, STOCK_NO_CUDNN
from nondet.sampling.plan import Load, Request

__all__ = ["OPERATOR", "RUNS", "EngineCase", "engine_impls", "engine_keys", "groups_of", "head_of", "plan_engine"]

OPERATOR = "engine"

# By device: requests of a load, the mean prompt and the completion in tokens, query tokens that a step takes
_REQUESTS = {"cuda": (8, 32, 128), "cpu": (2, 8)}
_PROMPT = {"cuda": 128, "cpu": 12}
_TOKENS = {"cuda": 64, "cpu": 8}
_BUDGET = {"cuda": 512, "cpu": 32}
_MODELS = {"cuda": ("random:qwen3-0.6b", "random:qwen3-8b"), "cpu": ("random:qwen3-2x{width}",)}
_HEAD = 128  # on a CPU the model is as wide as gives each rank a key head
RUNS = 5


@dataclass(frozen=True)
class EngineCase:
    """One model under one load.

    Attributes:
        requests: That come at once; as many as a step takes.
        prompt: Mean length of a prompt; each is drawn between half and one and a half of it.
        tokens: Of each completion.
        budget: Query tokens that a step takes.
        graphs: Steps as CUDA graphs.
        ranks: That the model is cut over; 1 for this process.
    """

    model: str
    requests: int
    prompt: int
    tokens: int
    budget: int
    dtype: str
    graphs: bool
    ranks: int = 1

    @property
    def section(self) -> str:
        """The table that it stands in."""
        return f"engine, {self.model}" + (f", {self.ranks} ranks" if self.ranks > 1 else "")

    @property
    def shape(self) -> dict[str, int]:
        """Its sizes by name."""
        sizes = {"requests": self.requests, "prompt": self.prompt, "tokens": self.tokens, "budget": self.budget}
        return sizes | ({"ranks": self.ranks} if self.ranks > 1 else {})

    @property
    def name(self) -> str:
        """As `Cell.case`."""
        return " ".join(f"{key}={size}" for key, size in self.shape.items())

    @property
    def group(self) -> str:
        """As `Cell.group`: the model, and everything but the number of requests and the budget that follows it."""
        over = f" ranks={self.ranks}" if self.ranks > 1 else ""
        return f"{self.model} prompt={self.prompt} tokens={self.tokens} graphs={'on' if self.graphs else 'off'}{over}"

    def key(self, device: str) -> tuple[str, ...]:
        """As `Cell.key`."""
        return ("cell", self.section, self.name, self.dtype, device)

    @property
    def load(self) -> Load:
        """For the engine."""
        return Load(
            others=0,
            targets=self.requests,
            spread=1,
            prompt=(1, 1),
            tokens=(1, 1),
            budget=self.budget,
            requests=self.requests,
            sharing=False,
            graphs=self.graphs,
        )

    def plan(self, vocabulary: int, seed: int) -> list[Request]:
        """The requests: those of a smaller load are the first of a larger one's."""
        drawn = []
        for i in range(self.requests):
            rng = random.Random(f"nondet engine {seed} {i}")  # noqa: S311 - a load, not a secret
            length = rng.randint(max(1, self.prompt // 2), self.prompt + self.prompt // 2)
            tokens = tuple(rng.randrange(vocabulary) for _ in range(length))
            drawn.append(Request(f"t{i:06d}", True, tokens, self.tokens, 0))
        return drawn


def plan_engine(
    models: Sequence[str] | None,
    requests: Sequence[int] | None,
    device: str,
    dtypes: Sequence[str] | None,
    *,
    graphs: bool,
    ranks: Sequence[int] = (1,),
) -> list[EngineCase]:
    """Every cell, in the order of the run: model by model, by number of ranks, the smallest load first.

    Raises:
        UserError: graphs without a GPU.
    """
    if graphs and device != "cuda":
        raise UserError("--cuda-graphs needs a CUDA device", "Leave it out on a CPU.")
    return [
        EngineCase(model, count, _PROMPT[device], _TOKENS[device], max(_BUDGET[device], count), dtype, graphs, world)
        for dtype in dtypes or ("bfloat16",)
        for model in models or [name.format(width=_HEAD * max(ranks)) for name in _MODELS[device]]
        for world in ranks
        for count in sorted(set(requests or _REQUESTS[device]))
    ]


def engine_impls(wanted: Sequence[str], device: str, graphs: bool) -> list[str]:
    """The implementations that the names stand for; "stock" stands for the backends that a user could have, too.

    Launched from the host cuDNN's attention is planned anew for every length, which no user would keep: without graphs
    stock is the one without it.
    """
    chosen: dict[str, None] = {}
    for name in wanted:
        if name == "stock" and device == "cuda":
            chosen |= dict.fromkeys(("stock" if graphs else STOCK_NO_CUDNN, STOCK_FLASH))
        else:
            chosen[name] = None
    return list(chosen)


def engine_keys(cases: Sequence[EngineCase], impls: Sequence[str], device: str) -> list[tuple[str, ...]]:
    """Keys of every record, for a progress bar and for resuming."""
    keys: list[tuple[str, ...]] = []
    for group in groups_of(cases):
        keys += [case.key(device) for case in group]
        keys += [head_of(group, impl, device).key for impl in impls]
    return keys


def groups_of(cases: Sequence[EngineCase]) -> list[list[EngineCase]]:
    """Cells of one model over one number of ranks, which is loaded once for them."""
    groups: dict[tuple[str, str, int], list[EngineCase]] = {}
    for case in cases:
        groups.setdefault((case.model, case.dtype, case.ranks), []).append(case)
    return list(groups.values())


def head_of(group: Sequence[EngineCase], impl: str, device: str) -> Row:
    """The row of a group under one implementation, with everything but figures."""
    first = group[0]
    shape: dict[str, int] = {key: size for key, size in first.shape.items() if key not in ("requests", "budget")}
    return Row(
        probe="bench",
        case=f"engine {first.group}: the first {first.requests} requests among so many",
        operator=OPERATOR,
        shape=shape,
        dtype=first.dtype,
        device=device,
        inputs="requests",
        varied="batch_size",
        impl=impl,
        status="",
        group=first.group,
        claims_invariance=impl in ("invariant", RANK_FREE),
    )
