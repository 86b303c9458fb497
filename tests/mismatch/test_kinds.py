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
from tests.build import tiers
from tests.mismatch.test_settings import judged

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


def pair(
    seed: int, spec: Spec = PLAIN, kind: str = "", *, older: bool = False, cast: bool = False, alike: bool = False,
    change: Callable[[Logprobs], Logprobs] = np.copy, **fault: Any,
) -> Pair:  # fmt: skip
    """The embedded model as sampler, of what `kind` makes of its weights, and as trainer, with that layout and fault.
    `older`: the other weights are given. `cast`: the trainer's weights are float32. `alike`: few rollouts, a sampler
    with the bits of a plain forward: no kernels hide what the trainer does. `change`: of the sampler's logprobs."""
    model, texts = loaded().model, drawn(seed, kind)[: 6 if alike else None]
    sampler = score(model, texts, PLAIN) if alike else np.concatenate([r.sampler for r in texts])
    trainer = score(copy.deepcopy(model).float() if cast else model, texts, spec, Fault(**fault))
    return judged(model, texts, change(sampler), trainer, spec, other(seed, kind) if older else None)


PLANTED: dict[str, tuple[str, str, dict[str, Any]]] = {
    "positions with a gap": ("positions", "trainer", {"positions": "gap"}),
    "positions that begin anew": ("positions", "trainer", {"positions": "restart"}),
    "padding mask": ("padding mask", "trainer", {"spec": Spec(padding="left"), "mask": False}),
    "template": ("template", "trainer", {"front": 1}),
    "stale weights": ("stale weights", "sampler", {"kind": "stale", "older": True}),
    "LoRA": ("an unmerged LoRA", "sampler", {"kind": "lora", "older": True}),
    "fp8": ("fp8 weights", "sampler", {"kind": "fp8"}),
    "autocast": ("autocast over float32 weights", "trainer", {"spec": Spec(autocast="bfloat16"), "cast": True}),
    "float32 head": ("a float32 head", "trainer", {"spec": Spec(head="float32"), "alike": True}),
    "bf16 logprobs": (
        "rounded logprobs", "sampler", {"change": lambda x: torch.from_numpy(x).bfloat16().float().numpy()},
    ),
    "another formula": ("another formula", "trainer", {"spec": Spec(formula="token_logprobs"), "alike": True}),
}  # fmt: skip


def seeded(names: Iterable[Any], kept: Sequence[str]) -> Any:
    """Each name under each seed; of those that are kept one is part of every run."""
    first = [pytest.param(name, 0, marks=pytest.mark.slow) for name in kept]
    later = [(name, seed) for name in names for seed in SEEDS if name not in kept or seed]
    return pytest.mark.parametrize(("name", "seed"), tiers(first, later))


@seeded(PLANTED, FAMILIES)
def test_what_is_planted_is_named(name: str, seed: int) -> None:
    cause, side, how = PLANTED[name]
    found = pair(seed, **how)
    assert found.named is not None, [(k.cause, k.side, k.left, k.k3) for k in found.kinds[:4]]
    assert (found.named.cause, found.named.side) == (cause, side)
    assert found.named.exactly >= 0.9 or removed(found.named) >= 0.9
    if name == "stale weights":  # without --older they are unexplained, and the side is known
        unknown = pair(seed, kind="stale")
        assert (unknown.named, unknown.off) == (None, ["sampler"])


SOUND: dict[str, dict[str, Any]] = {f"padded on the {name}": {"spec": Spec(padding=name)} for name in ("left", "right")}
SOUND |= {"packed": {"spec": Spec(padding="packed")}, "micro-batches of four": {"spec": Spec(micro=4)}}
SOUND |= {
    "one at a time": {"spec": Spec(micro=1)},
    "all positions one later": {"positions": "shift"},
}  # they are relative


@seeded(SOUND, ("padded on the left",))
def test_what_is_sound_has_no_cause_named(name: str, seed: int) -> None:
    found = pair(seed, **SOUND[name])
    assert found.figures.differ > 0  # other kernels, so that there is something to explain
    assert (found.named, found.off) == (None, [])


def off_by_12(sampler: Logprobs) -> Logprobs:
    return sampler - 12 * (np.arange(len(sampler)) == 5).astype(np.float32)


def early(sampler: Logprobs) -> Logprobs:
    """Each rollout of 24 tokens one early."""
    rows = sampler.reshape(-1, 24)
    return np.concatenate([rows[:, :1], rows[:, :-1]], 1).ravel()


def invented(sampler: Logprobs) -> Logprobs:
    return -np.random.default_rng(0).exponential(2.0, len(sampler)).astype(np.float32)


@seeded((off_by_12, early, invented), ())
def test_no_cause_is_named_that_leaves_more_than_rounding(name: Any, seed: int) -> None:
    """A token that is far off, or logprobs that are none of these tokens': any temperature fits K3 a bit."""
    found = pair(seed, change=name)
    assert any(removed(k) >= 0.1 for k in found.kinds), "one of them takes some of it away"
    assert (found.named, found.off) == (None, ["sampler"])


@pytest.mark.slow
def test_equal_bits_have_rounding_to_explain_them() -> None:
    """Both sides may have the same kernels here: their distance is nothing, and their floor what formats round."""
    own = score(loaded().model, drawn(0), PLAIN)
    floor = next(iter(fit(loaded().model, drawn(0), PLAIN, own, own, "stock")))
    assert isinstance(floor, MismatchFloor)
    assert floor.k3 == 0.0
    assert floor.floor == 2 * floor.own > 0.0
