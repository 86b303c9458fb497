"""Each kind of mismatch, planted in the embedded model under three seeds, is named; set-ups that are sound are not.

What is planted is computed by another model or layout; temperatures, top-k and top-p are in test_settings.py.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch

from nondet.core.records import MismatchFloor
from nondet.mismatch.collect import RolloutPlan, sample_rollouts
from nondet.mismatch.figures import Logprobs
from nondet.mismatch.kinds import fit
from nondet.mismatch.rollouts import Rollout
from nondet.mismatch.trainer import Fault, Spec, rounded_to_fp8, score, weights_changed
from nondet.sampling.model import LoadedModel, load_model
from nondet.verdict.mismatch import Pair, removed
from tests.mismatch.test_settings import judged as pair_of

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
    plan = RolloutPlan(PROMPTS, 3, 24, seed)

    def changed(name: str, weight: torch.Tensor) -> torch.Tensor | None:
        if kind == "fp8":
            return rounded_to_fp8(name, weight, "row")
        return dict(other(seed, kind).named_parameters())[name] if kind else None

    with weights_changed(model, changed):
        return sample_rollouts(loaded(), plan)


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


def judged(texts: list[Rollout], trainer: Logprobs, spec: Spec = PLAIN, sampler: Any = None, older: Any = None) -> Pair:
    """Of the embedded model; the sampler's logprobs are the rollouts' own, or these."""
    sampler = np.concatenate([r.sampler for r in texts]) if sampler is None else sampler
    return pair_of(loaded().model, texts, sampler, trainer, spec, older)


def as_trained(spec: Spec = PLAIN, **changes: Any) -> Callable[[int], Pair]:
    """A trainer with that layout, and with that fault."""
    return lambda seed: judged(drawn(seed), score(loaded().model, drawn(seed), spec, Fault(**changes)), spec)


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
        model, texts = loaded().model, drawn(seed)[:6]  # a few: bits are compared
        return judged(texts, score(model, texts, spec), sampler=score(model, texts, PLAIN))

    return planted


def autocast(seed: int) -> Pair:
    return judged(drawn(seed), score(wide(), drawn(seed), Spec(autocast="bfloat16")))


PLANTED: dict[str, tuple[str, str, Callable[[int], Pair]]] = {
    "positions with a gap": ("positions", "trainer", as_trained(positions="gap")),
    "positions that begin anew": ("positions", "trainer", as_trained(positions="restart")),
    "padding mask": ("padding mask", "trainer", as_trained(Spec(padding="left"), mask=False)),
    "template": ("template", "trainer", as_trained(front=1)),
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
    if name == "stale weights":  # without --older they are unexplained, and the side is known
        pair = judged(drawn(seed, "stale"), score(loaded().model, drawn(seed, "stale"), PLAIN))
        assert (pair.named, pair.off) == (None, ["sampler"])


SOUND: dict[str, Callable[[int], Pair]] = {
    "padded on the right": as_trained(),
    "padded on the left": as_trained(Spec(padding="left")),
    "packed": as_trained(Spec(padding="packed")),
    "one at a time": as_trained(Spec(micro=1)),
    "micro-batches of four": as_trained(Spec(micro=4)),
    "all positions one later": as_trained(positions="shift"),  # rotary positions are relative
}


@pytest.mark.parametrize(("name", "seed"), tiers(SOUND, ("padded on the left",)))
def test_what_is_sound_has_no_cause_named(name: str, seed: int) -> None:
    pair = SOUND[name](seed)
    assert pair.figures.differ > 0  # other kernels, so that there is something to explain
    assert pair.named is None, pair.named
    assert pair.off == []


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


@pytest.mark.slow
def test_equal_bits_have_rounding_to_explain_them() -> None:
    """Both sides may have the same kernels here: their distance is nothing, and their floor what formats round."""
    own = score(loaded().model, drawn(0), PLAIN)
    floor = next(iter(fit(loaded().model, drawn(0), PLAIN, own, own, "stock")))
    assert isinstance(floor, MismatchFloor)
    assert floor.k3 == 0.0
    assert floor.floor == 2 * floor.own > 0.0
