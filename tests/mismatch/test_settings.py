"""Temperatures, top-k and top-p of a sampler and a trainer, on a small model of tables: sound pairs and planted ones.

How a side comes from logits to logprobs is computed here by sorting and masking, as trainers do.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import product
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from nondet.core.records import Header, MismatchRollout, Run
from nondet.mismatch.kinds import fit, share_of
from nondet.mismatch.rollouts import Rollout
from nondet.mismatch.trainer import NO_FAULT, Fault, Spec, score
from nondet.verdict.gate import judge
from nondet.verdict.mismatch import Pair, pairs
from tests.build import tiers

V, WIDTH = 512, 64
LEFT = Spec(padding="left", micro=4)
Mass = Callable[[torch.Tensor], torch.Tensor]


class Tables(torch.nn.Module):
    """Tokens, positions, the mean of what came before, three layers: logits depend on all, and bits on the batch."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        drawn = torch.Generator().manual_seed(0)
        self.words, self.places = torch.nn.Embedding(V, WIDTH), torch.nn.Embedding(256, WIDTH)
        self.up, self.down = torch.nn.Linear(WIDTH, 2 * WIDTH), torch.nn.Linear(2 * WIDTH, WIDTH)
        self.head = torch.nn.Linear(WIDTH, V, bias=False)
        with torch.no_grad():
            for p in self.parameters():
                large = p is self.words.weight or p is self.places.weight
                p.copy_(torch.randn(p.shape, generator=drawn) * (1.0 if large else 0.35))
        self.to(dtype)
        self.config = SimpleNamespace(get_text_config=lambda: SimpleNamespace(vocab_size=V))

    def get_output_embeddings(self) -> torch.nn.Module:
        return self.head

    def forward(self, input_ids: torch.Tensor, position_ids: torch.Tensor, attention_mask: Any = None, **_: Any) -> Any:
        x = self.words(input_ids) + self.places(position_ids)
        seen = torch.ones_like(input_ids) if attention_mask is None else attention_mask
        seen = seen[..., None].to(x.dtype)
        x = x + (x * seen).cumsum(1) / seen.cumsum(1).clamp(min=1)
        for _ in range(3):
            x = x + self.down(torch.nn.functional.silu(multiplied(self.up, x) + self.up.bias)) * 0.5
            x = x / x.pow(2).mean(-1, keepdim=True).sqrt()
        return SimpleNamespace(logits=self.head(x))


def multiplied(layer: torch.nn.Linear, x: torch.Tensor) -> torch.Tensor:
    """Over the layer's weights at once, or for more than four rows of a batch as the sum of two rounded halves."""
    if len(x) <= 4:
        return x @ layer.weight.T
    (one, other), (first, second) = x.chunk(2, -1), layer.weight.chunk(2, -1)
    return one @ first.T + other @ second.T


def whole(x: torch.Tensor) -> torch.Tensor:
    return x.logsumexp(-1)


def top_k(x: torch.Tensor) -> torch.Tensor:
    return x.topk(50, -1).values.logsumexp(-1)


def top_p(x: torch.Tensor, p: float = 0.9) -> torch.Tensor:
    ranked = x.sort(-1, descending=True).values
    share = ranked.softmax(-1)
    return ranked.masked_fill(share.cumsum(-1) - share >= p, -torch.inf).logsumexp(-1)


def min_p(x: torch.Tensor, p: float = 0.1) -> torch.Tensor:
    return x.masked_fill(x < x.amax(-1, keepdim=True) + math.log(p), -torch.inf).logsumexp(-1)


def top_k_and_p(x: torch.Tensor) -> torch.Tensor:
    return top_p(x.masked_fill(x < x.topk(20, -1).values[:, -1:], -torch.inf), 0.95)


@torch.no_grad()
def played(model: Any, seed: int, heat: float, kept: Mass, *, raw: bool, tokens: int) -> list[Rollout]:
    """Tokens drawn one by one from what is kept at a temperature, with its logprobs, or those of the logits."""
    drawn, values = torch.Generator().manual_seed(seed), list[torch.Tensor]()
    ids = torch.randint(0, V, (16, 3), generator=drawn)
    for _ in range(tokens):
        plain = model(ids, torch.arange(ids.shape[1])[None].expand_as(ids)).logits[:, -1].float()
        x = plain / heat
        ranked, order = x.sort(-1, descending=True)
        share = (ranked - kept(x)[:, None]).exp()
        share = torch.where(share.cumsum(-1) - share < 1 - 1e-6, share, 0.0)
        chosen = order.gather(-1, torch.multinomial(share, 1, generator=drawn))
        given, mass = (plain, whole) if raw else (x, kept)
        values.append(given.gather(-1, chosen).squeeze(-1) - mass(given))
        ids = torch.cat([ids, chosen], -1)
    logprobs = torch.stack(values, -1).numpy().astype(np.float32)
    return [Rollout(f"r{i}", row.tolist(), range(3, len(row)), logprobs[i]) for i, row in enumerate(ids)]


def own_formula(kept: Mass, heat: float, logits: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    rows = (logits / heat).float()
    return rows.gather(-1, ids[:, None]).squeeze(-1) - kept(rows)


def pair(
    dtype: str = "bfloat16", heat: float = 1.0, trained: float | None = None, kept: Mass = whole, over: Any = None, *,
    seed: int = 0, raw: bool = False, tokens: int = 24, spec: Spec = LEFT, fault: Fault = NO_FAULT,
) -> Pair:  # fmt: skip
    """A sampler at `heat`, and a trainer at `trained` or the same, over what the sampler keeps or over `over`."""
    model = Tables(getattr(torch, dtype))
    texts = played(model, seed, heat, kept, raw=raw, tokens=tokens)

    formulas = [partial(own_formula, over or kept, heat if trained is None else trained)] * len(texts)
    trainer, sampler = score(model, texts, spec, fault, formulas=formulas), np.concatenate([r.sampler for r in texts])
    seen = judged(model, texts, sampler, trainer)
    assert seen.figures.differ > 0  # other orders of addition, so that there is something to explain
    return seen


def judged(
    model: Any, texts: list[Rollout], sampler: np.ndarray, trainer: np.ndarray, spec: Spec = LEFT, older: Any = None
) -> Pair:
    """As a run file would have it."""
    header = Header(format="nondet-run", schema=3, command="mismatch", plan={}, environment={}, started="2026-01-01")
    run, at = Run(header=header), 0
    for r in texts:
        mine = slice(at, at := at + len(r.drawn))
        sides = {"sampler": sampler[mine].astype("<f4").tobytes(), "trainer": trainer[mine].astype("<f4").tobytes()}
        run.add(MismatchRollout(impl="file", name=r.name, tokens=len(r.drawn), ids=list(r.ids), **sides))
    for record in fit(model, texts, spec, sampler, trainer, "file", older):
        run.add(record)
    seen = pairs(run)[0]
    wrong = bool(seen.off) if seen.named is None else seen.named.k3 > 1.5 * seen.named.floor  # another formula rounds
    assert judge(run)[0].text.startswith("not rounding: " if wrong else "rounding: ")
    return seen


SOUND: dict[str, dict[str, Any]] = {
    f"{kept.__name__} at {heat:g}, {dtype}": {"dtype": dtype, "heat": heat, "kept": kept}
    for dtype, heat in product(("bfloat16", "float16", "float32"), (0.6, 0.7, 1.0, 1.3))
    for kept in (whole, top_p, top_k, min_p)
}
SOUND |= {
    f"raw, tokens of {kept.__name__} at {heat:g}, {dtype}": {
        "dtype": dtype, "heat": heat, "trained": 1.0, "kept": kept, "over": whole, "raw": True,
    }
    for dtype in ("bfloat16", "float32") for heat in (0.6, 1.3) for kept in (whole, top_p)
}  # fmt: skip
SOUND |= {f"of few tokens at {heat:g}": {"heat": heat, "tokens": 2} for heat in (0.7, 1.0)}
SOUND["in micro-batches of two"] = {"spec": Spec(micro=2), "seed": 4}
OFTEN = ("whole at 0.6, float32", "of few tokens at 0.7", "top_p at 0.7, bfloat16", "in micro-batches of two")
OFTEN += ("raw, tokens of top_p at 0.6, bfloat16",)


@pytest.mark.parametrize("name", tiers(OFTEN, [n for n in SOUND if n not in OFTEN]))
def test_what_both_sides_do_is_no_mismatch(name: str) -> None:
    """Every one at a temperature other than 1 was "unexplained": other weights look so."""
    seen = pair(**SOUND[name])
    assert (seen.named, seen.off) == (None, [])
    settled = SOUND[name].get("heat", 1.0) != 1 and not SOUND[name].get("raw")
    assert "tokens" in SOUND[name] or ("at temperature" in seen.floor.wide) == settled


@pytest.mark.parametrize("dtype", tiers(["float32"], ["bfloat16"]))
def test_lines_have_their_own_temperatures_and_cuts(dtype: str) -> None:
    """Of one file, under which both sides are near, or the one of which a setting is of its own."""
    model, sampled, trained = Tables(getattr(torch, dtype)), list[Rollout](), list[Any]()
    for heat in (0.5, 1.2):
        setting = {"temperature": heat, "top-k": 20, "top-p": 0.95}
        texts = played(model, 1, heat, top_k_and_p, raw=False, tokens=8)
        sampled += [replace(r, name=f"{r.name} {heat}", setting=setting) for r in texts]
        trained += [heat] * len(texts)
    sampler = np.concatenate([r.sampler for r in sampled])

    def of(kept: Mass, heats: list[float]) -> Pair:
        formulas = [partial(own_formula, kept, heat) for heat in heats]
        return judged(model, sampled, sampler, score(model, sampled, LEFT, formulas=formulas))

    both, uncut, plain = of(top_k_and_p, trained), of(whole, trained), of(whole, [1.0] * len(trained))
    assert (both.named, both.off) == (None, [])
    assert both.floor.wide.endswith(" at the settings of each line")
    for seen, cause in ((uncut, "top-k and top-p"), (plain, "temperature and top-k and top-p")):
        assert (seen.named.cause, seen.named.side) == (cause, "sampler")
        assert seen.named.fitted == "the settings of each line"


PLANTED: dict[str, tuple[dict[str, Any], tuple[str, str, str]]] = {
    "a temperature": ({"heat": 0.6, "trained": 1.0}, ("temperature", "sampler", "0.6")),
    "in float32": ({"dtype": "float32", "heat": 0.6, "trained": 1.0}, ("temperature", "sampler", "0.6")),
    "the trainer's": ({"trained": 0.8}, ("temperature", "trainer", "0.8")),
    # renormalised over the tokens that top-p keeps, where the trainer's go over the whole vocabulary
    "top-p": ({"kept": top_p, "over": whole}, ("top-p", "sampler", "0.9")),
    "the trainer's top-p": ({"over": partial(top_p, p=0.95)}, ("top-p", "trainer", "0.95")),
    "at a temperature": ({"heat": 0.7, "kept": top_p, "over": whole}, ("top-p", "sampler", "0.9")),
    "at one in float32": (
        {"dtype": "float32", "heat": 0.7, "kept": top_p, "over": whole}, ("top-p", "sampler", "0.9"),
    ),
    "top-k at a temperature": ({"heat": 1.3, "kept": top_k, "over": whole}, ("top-k", "sampler", "50")),
    "min-p": ({"heat": 0.7, "kept": min_p, "over": whole}, ("min-p", "sampler", "0.1")),
    "beside a cut of both": (
        {"dtype": "float32", "heat": 1.3, "trained": 1.5, "kept": top_p}, ("temperature", "trainer", "1.5"),
    ),
    "both": (
        {"dtype": "float32", "heat": 0.6, "trained": 1.0, "kept": top_p, "over": whole},
        ("temperature and top-p", "sampler", "0.6, 0.9"),
    ),
    "a template in float32": (
        {"dtype": "float32", "fault": Fault(front=1)}, ("template", "trainer", "its first token is missing"),
    ),
    "positions at a temperature": ({"heat": 0.7, "fault": Fault(positions="gap")}, ("positions", "trainer", "gap")),
}  # fmt: skip
_PLANTED_SELDOM = ("beside a cut of both", "a temperature", "top-p", "at one in float32", "a template in float32")


@pytest.mark.parametrize("name", tiers([n for n in PLANTED if n not in _PLANTED_SELDOM], _PLANTED_SELDOM))
def test_what_one_side_does_is_named(name: str) -> None:
    """In float32 none was, since the fit was coarser than rounding there; at a temperature other causes hid."""
    given, wanted = PLANTED[name]
    named = pair(**given).named
    assert (named.cause, named.side) == wanted[:2]
    if wanted[2][0].isdigit():
        assert [*map(float, named.fitted.split(", "))] == pytest.approx([*map(float, wanted[2].split(", "))], rel=0.012)
    else:
        assert named.fitted == wanted[2]
    assert named.left <= max(1.5 * named.floor, 1e-3 * named.k3) < named.k3


def test_a_few_rollouts_that_are_wrong_are_no_rounding() -> None:
    """Logprobs of two of 112 rollouts exchanged, where hypotheses are computed for two dozen of them."""
    model = Tables(torch.bfloat16)
    once = played(model, 0, 1.0, whole, raw=False, tokens=24)
    texts = [replace(r, name=f"{r.name} {i}") for i in range(7) for r in once]
    trainer = np.tile(score(model, once, LEFT), 7)
    sampler = np.stack([r.sampler for r in texts])
    one, two = [i for i in range(len(texts)) if i not in share_of(texts)][3:5]
    sampler[[one, two]] = sampler[[two, one]]
    seen = judged(model, texts, sampler.ravel(), trainer)
    assert (seen.named, seen.off) == (None, ["sampler"])


def drawn_setting(rng: random.Random) -> dict[str, Any]:
    """As the acceptance has them: temperatures 0.3 to 1.5, top-p 0.8 to 1, float32 and bfloat16."""
    p = rng.choice([1.0, round(rng.uniform(0.8, 1.0), rng.choice([2, 3]))])
    heat, dtype = round(rng.uniform(0.3, 1.5), rng.choice([1, 2, 4])), rng.choice(["float32", "bfloat16"])
    return {"dtype": dtype, "heat": heat, "kept": whole if p == 1 else partial(top_p, p=p)}


@pytest.mark.parametrize("seed", tiers([3], range(200)))
def test_no_sound_pair_is_called_faulty(seed: int) -> None:
    seen = pair(**drawn_setting(random.Random(seed)), seed=seed)  # noqa: S311 - no secret
    assert (seen.named, seen.off) == (None, [])


def test_a_token_at_the_edge_of_top_p_is_in_no_figure() -> None:
    """In float32 rounding put it on one side of the edge there, and top-p was named."""
    seen = pair("float32", 0.5, kept=partial(top_p, p=0.896), seed=90)
    assert (seen.named, seen.off) == (None, [])
