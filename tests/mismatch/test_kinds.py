"""Each kind of mismatch, planted in the embedded model under three seeds, is named; set-ups that are sound are not.

What is planted is computed here from logits, or by another model; what is fitted comes from nondet.mismatch.kinds.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch

from nondet.core.records import Header, MismatchFloor, MismatchRollout, Run
from nondet.mismatch.collect import Asked, sampled
from nondet.mismatch.figures import Logprobs
from nondet.mismatch.kinds import fit
from nondet.mismatch.rollouts import Rollout
from nondet.mismatch.trainer import Fault, Spec, rounded_to_fp8, score, weights_changed
from nondet.sampling.model import LoadedModel, load_model
from nondet.verdict.mismatch import Pair, pairs, removed

FAMILIES = ("template", "stale weights", "float32 head", "another formula")  # one of each layer is part of every run
PROMPTS = ("For example, the", "Return a", "The class is a subclass of", "If the argument is not given, the default is")
PLAIN = Spec()
SEEDS = (0, 1, 2)


@cache
def loaded() -> LoadedModel:
    torch.set_num_threads(1)
    return load_model(None, "bfloat16", "cpu")


@cache
def drawn(seed: int, kind: str = "") -> list[Rollout]:
    """Rollouts of the engine, from the model or from what the sampler has in its place."""
    model = loaded().model
    asked = Asked(PROMPTS, 4, 24, seed)
    if kind == "fp8":
        with weights_changed(model, lambda name, weight: rounded_to_fp8(name, weight, "row")):
            return sampled(loaded(), asked)
    if kind:
        with weights_changed(model, lambda name, _: dict(other(seed, kind).named_parameters())[name]):
            return sampled(loaded(), asked)
    return sampled(loaded(), asked)


@cache
def other(seed: int, kind: str) -> Any:
    """The model with 1% of noise on each weight, or with a matrix of rank 4 added to each matrix."""
    made, generator = copy.deepcopy(loaded().model), torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in made.parameters():
            if kind == "stale":
                p.add_(torch.randn(p.shape, generator=generator).to(p.dtype) * p.std() * 1e-2)
            elif p.dim() == 2:
                left, right = (torch.randn(shape, generator=generator) for shape in ((p.shape[0], 4), (4, p.shape[1])))
                p.add_((left @ right * float(p.std()) * 0.05).to(p.dtype))
    return made


@cache
def wide() -> Any:
    return copy.deepcopy(loaded().model).float()


def from_logits(rollouts: list[Rollout], mass: Callable[[torch.Tensor], torch.Tensor], heat: float = 1.0) -> Logprobs:
    """The trainer's logprobs where its logits are divided by `heat` and `mass` [n] is what it takes for their sum."""
    logits: list[torch.Tensor] = []
    ids: list[torch.Tensor] = []

    def keep(values: torch.Tensor, chosen: torch.Tensor) -> None:
        logits.append(values.float())
        ids.append(chosen)

    score(loaded().model, rollouts, PLAIN, keep=keep)
    rows = torch.cat(logits) / heat
    values: Logprobs = (rows.gather(-1, torch.cat(ids)[:, None]).squeeze(-1) - mass(rows)).numpy()
    return values


def top_k(x: torch.Tensor, k: int = 200) -> torch.Tensor:
    """Logits' mass in the k largest: a token outside of them is divided by it, too, so that none is -inf."""
    return x.topk(k, -1).values.logsumexp(-1)


def top_p(x: torch.Tensor, p: float = 0.95) -> torch.Tensor:
    ranked = x.sort(-1, descending=True).values
    share = ranked.softmax(-1)
    return ranked.masked_fill(share.cumsum(-1) - share >= p, -torch.inf).logsumexp(-1)


def judged(rollouts: list[Rollout], trainer: Logprobs, spec: Spec = PLAIN, **more: Any) -> Pair:
    """As a run file would have it."""
    sampler = more.pop("sampler", None)
    sampler = np.concatenate([r.sampler for r in rollouts]) if sampler is None else sampler
    header = Header(format="nondet-run", schema=3, command="mismatch", plan={}, environment={}, started="2026-01-01")
    run, at = Run(header=header), 0
    for r in rollouts:
        mine = slice(at, at := at + len(r.drawn))
        sides = {"sampler": sampler[mine].astype("<f4").tobytes(), "trainer": trainer[mine].astype("<f4").tobytes()}
        run.add(MismatchRollout(impl="stock", name=r.name, tokens=len(r.drawn), ids=list(r.ids), **sides))
    for record in fit(loaded().model, rollouts, spec, sampler, trainer, "stock", **more):
        run.add(record)
    return pairs(run)[0]


def faulty(**changes: Any) -> Callable[[int], Pair]:
    return lambda seed: judged(drawn(seed), score(loaded().model, drawn(seed), PLAIN, Fault(**changes)))


def unmasked(seed: int) -> Pair:
    left = Spec(padding="left")
    texts = drawn(seed)
    return judged(texts, score(loaded().model, texts, left, Fault(mask=False)), left)


def hot(seed: int) -> Pair:
    return judged(drawn(seed), from_logits(drawn(seed), lambda x: x.logsumexp(-1), (0.8, 0.95, 1.3)[seed]))


def with_older(kind: str) -> Callable[[int], Pair]:
    def planted(seed: int) -> Pair:
        texts = drawn(seed, kind)
        return judged(texts, score(loaded().model, texts, PLAIN), older=other(seed, kind))

    return planted


def rounded(seed: int) -> Pair:
    texts = drawn(seed)
    sampler = torch.from_numpy(np.concatenate([r.sampler for r in texts])).bfloat16().float().numpy()
    return judged(texts, score(loaded().model, texts, PLAIN), sampler=sampler)


def matched(spec: Spec) -> Callable[[int], Pair]:
    """A sampler with the bits of a plain forward: no other kernels hide what the trainer does otherwise."""

    def planted(seed: int) -> Pair:
        model, texts = loaded().model, drawn(seed)
        return judged(texts, score(model, texts, spec), sampler=score(model, texts, PLAIN))

    return planted


def autocast(seed: int) -> Pair:
    return judged(drawn(seed), score(wide(), drawn(seed), Spec(autocast="bfloat16")))


PLANTED: dict[str, tuple[str, str, Callable[[int], Pair]]] = {
    "temperature": ("temperature", "trainer", hot),
    "top-k": ("top-k", "trainer", lambda seed: judged(drawn(seed), from_logits(drawn(seed), top_k))),
    "top-p": ("top-p", "trainer", lambda seed: judged(drawn(seed), from_logits(drawn(seed), top_p))),
    "positions with a gap": ("positions", "trainer", faulty(positions="gap")),
    "positions that begin anew": ("positions", "trainer", faulty(positions="restart")),
    "padding mask": ("padding mask", "trainer", unmasked),
    "template": ("template", "trainer", faulty(front=1)),
    "stale weights": ("stale weights", "sampler", with_older("stale")),
    "LoRA": ("an unmerged LoRA", "sampler", with_older("lora")),
    "fp8": (
        "fp8 weights", "sampler",
        lambda seed: judged(drawn(seed, "fp8"), score(loaded().model, drawn(seed, "fp8"), PLAIN)),
    ),
    "autocast": ("autocast over float32 weights", "trainer", autocast),
    "float32 head": ("a float32 head", "trainer", matched(Spec(head="float32"))),
    "bf16 logprobs": ("rounded logprobs", "sampler", rounded),
    "another formula": ("another formula", "trainer", matched(Spec(formula="token_logprobs"))),
}  # fmt: skip


def tiers(names: Iterable[str], kept: Sequence[str]) -> list[Any]:
    """Each name under each seed; of those that are kept one is part of every run."""
    return [
        pytest.param(name, seed, marks=pytest.mark.slow if name in kept and seed == 0 else pytest.mark.nightly)
        for name in names
        for seed in SEEDS
    ]


@pytest.mark.parametrize(("name", "seed"), tiers(PLANTED, FAMILIES))
def test_what_is_planted_is_named(name: str, seed: int) -> None:
    cause, side, plant = PLANTED[name]
    pair = plant(seed)
    assert pair.named is not None, [(k.cause, k.side, k.left, k.k3) for k in pair.kinds[:4]]
    assert (pair.named.cause, pair.named.side) == (cause, side)
    assert pair.named.exactly >= 0.9 or removed(pair.named) >= 0.9


def sound(spec: Spec, fault: Fault | None = None) -> Callable[[int], Pair]:
    return lambda seed: judged(drawn(seed), score(loaded().model, drawn(seed), spec, fault), spec)


SOUND: dict[str, Callable[[int], Pair]] = {
    "padded on the right": sound(PLAIN),
    "padded on the left": sound(Spec(padding="left")),
    "packed": sound(Spec(padding="packed")),
    "one at a time": sound(Spec(micro=1)),
    "micro-batches of four": sound(Spec(micro=4)),
    "all positions one later": sound(PLAIN, Fault(positions="shift")),  # rotary positions are relative
}


@pytest.mark.parametrize(("name", "seed"), tiers(SOUND, ("padded on the left",)))
def test_what_is_sound_has_no_cause_named(name: str, seed: int) -> None:
    pair = SOUND[name](seed)
    assert pair.figures is not None
    assert pair.figures.differ > 0  # other kernels, so that there is something to explain
    assert pair.named is None, pair.named
    assert pair.off == []


@pytest.mark.slow
def test_other_weights_that_nobody_suspects_are_unexplained() -> None:
    texts = drawn(0, "stale")
    pair = judged(texts, score(loaded().model, texts, PLAIN))
    assert (pair.named, pair.off) == (None, ["sampler"])


@pytest.mark.parametrize(("fault", "seed"), tiers(("one token", "shifted by one", "invented"), ()))
def test_no_cause_is_named_that_leaves_more_than_rounding(fault: str, seed: int) -> None:
    """A token that is far off, or logprobs that are none of these tokens': any temperature fits K3 a bit."""
    texts = drawn(seed)
    sampler = np.concatenate([r.sampler for r in texts])
    if fault == "one token":
        sampler[5] -= 12
    elif fault == "shifted by one":
        sampler = np.concatenate([np.append(r.sampler[:1], r.sampler[:-1]) for r in texts])
    else:
        sampler = -np.random.default_rng(seed).exponential(2.0, len(sampler)).astype(np.float32)
    pair = judged(texts, score(loaded().model, texts, PLAIN), sampler=sampler)
    assert any(removed(k) >= 0.1 for k in pair.kinds), "one of them takes some of it away"
    assert pair.named is None, pair.named
    assert pair.off == ["sampler"]


@pytest.mark.nightly
def test_a_fitted_value_is_the_planted_one() -> None:
    for seed, value in enumerate((0.8, 0.95, 1.3)):
        named = hot(seed).named
        assert named is not None
        assert float(named.fitted) == pytest.approx(value, rel=0.01)
    named = PLANTED["top-p"][2](0).named
    assert named is not None
    assert float(named.fitted) == pytest.approx(0.95, abs=0.01)


@pytest.mark.slow
def test_equal_bits_have_rounding_to_explain_them() -> None:
    """Both sides may have the same kernels here: their distance is nothing, and their floor what formats round."""
    own = score(loaded().model, drawn(0), PLAIN)
    floor = next(iter(fit(loaded().model, drawn(0), PLAIN, own, own, "stock")))
    assert isinstance(floor, MismatchFloor)
    assert floor.k3 == 0.0
    assert floor.floor == 2 * floor.own > 0.0
