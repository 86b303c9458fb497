"""The trainer's forward as an arm: a faulty operator planted in it is named; a sound pair has no place."""

from __future__ import annotations

import random
from contextlib import ExitStack, nullcontext
from functools import cache, partial
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch.overrides import TorchFunctionMode

from nondet.core.records import MismatchPlace
from nondet.kernels.dispatch.block import batch_invariant
from nondet.kernels.dispatch.operators import FAMILIES
from nondet.mismatch.collect import RolloutPlan, find_place, sample_rollouts
from nondet.mismatch.figures import Logprobs
from nondet.mismatch.rollouts import Rollout
from nondet.mismatch.trainer import Spec, score
from nondet.sampling.model import LoadedModel, load_model
from nondet.trace.recorder import add_hooks
from tests.build import tiers
from tests.trace.conftest import model_of

PLAN = RolloutPlan(("For example, the", "Return a"), 2, 6, 0)
_FORMULA = "token_logprobs"
LAYOUTS = (
    Spec(formula=_FORMULA), Spec(padding="left", micro=2, formula=_FORMULA),
    Spec(padding="packed", micro=3, formula=_FORMULA), Spec(micro=1, formula=_FORMULA),
)  # fmt: skip
FAULTY = ("linear", "embedding", "silu", "mul", "add", "rsqrt", "mean", "neg", "scaled_dot_product_attention")
_PARTS_OF_ATTENTION = ("scaled_dot_product_attention", "attention")


@cache
def loaded() -> LoadedModel:
    torch.set_num_threads(1)
    return load_model(None, "bfloat16", "cpu")


@cache
def drawn() -> list[Rollout]:
    with batch_invariant():
        return sample_rollouts(loaded(), PLAN)


class Call(NamedTuple):
    """The n-th call of a function in one forward of the trainer."""

    name: str
    number: int


class Planted(TorchFunctionMode):
    """The trainer's calls, and who makes them; one of them may be faulty: 1% off. The engine has its own thread."""

    def __init__(self, faulty: Call | None = None) -> None:
        super().__init__()
        self.faulty, self.seen = faulty, list[tuple[Call, str]]()
        self._path, self._count = [""], dict[str, int]()

    def watch(self, model: Any) -> ExitStack:
        """Follow which module is under way, in the trainer's mode alone."""
        stack = ExitStack()
        for path, module in model.named_modules():
            add_hooks(stack, module, partial(self._begin, path), self._end)
        stack.enter_context(self)
        return stack

    def _begin(self, path: str, module: Any, *_: Any) -> None:
        if module.training:
            if not path:
                self._count.clear()
            self._path.append(path)

    def _end(self, module: Any, *_: Any) -> None:
        if module.training:
            self._path.pop()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        name = func.__name__.strip("_")
        if name not in FAULTY or not isinstance(out, torch.Tensor) or not out.is_floating_point():
            return out
        call = Call(name, self._count.get(name, 0))
        self._count[name] = call.number + 1
        self.seen.append((call, self._path[-1]))
        return out + out * 0.01 if call == self.faulty else out


def trainer_logprobs(spec: Spec) -> Logprobs:
    with batch_invariant(training=True):
        return score(loaded().model, drawn(), spec, gradients=True)


def place(spec: Spec) -> MismatchPlace:
    return find_place("invariant", loaded(), loaded().model, PLAN, drawn(), spec)


@cache
def calls() -> list[tuple[Call, str]]:
    """Of one forward, those inside the model."""
    planted = Planted()
    with planted.watch(loaded().model):
        trainer_logprobs(LAYOUTS[0])
    return [(call, path) for call, path in planted.seen if path]


@pytest.mark.parametrize("seed", tiers(range(1), range(1, 20)))
def test_a_faulty_operator_in_the_trainer_is_named(seed: int) -> None:
    rng = random.Random(seed)  # noqa: S311 - a draw of tests
    names = sorted({call.name for call, _ in calls()})
    assert len(names) >= 6
    assert len(calls()) > 40
    name = rng.choice(names)
    faulty, module = rng.choice([(call, path) for call, path in calls() if call.name == name])
    spec = LAYOUTS[seed % len(LAYOUTS)]
    planted = Planted(faulty)
    with planted.watch(loaded().model):
        found = place(spec)
    assert found.module == module, (found, faulty)
    named = found.call.removeprefix("Tensor.").strip("_")
    whole = type(loaded().model.get_submodule(module)).__name__  # where its calls are not the engine's
    assert named in (faulty.name, whole) or {named, faulty.name} <= {*_PARTS_OF_ATTENTION}, (found, faulty)
    assert found.difference is not None
    assert found.difference.mismatched


def test_a_fault_in_attention_is_attention_s_and_not_its_module_s() -> None:
    faulty = next(call for call, _ in calls() if call.name == "scaled_dot_product_attention")
    planted = Planted(faulty)
    with planted.watch(loaded().model):
        found = place(LAYOUTS[0])
    assert (found.call in _PARTS_OF_ATTENTION, found.family) == (True, "attention"), found


@pytest.mark.parametrize("layout", tiers([2], [0, 1, 3]))
def test_a_sound_pair_has_no_place(layout: int) -> None:
    values = trainer_logprobs(LAYOUTS[layout])
    bits = np.concatenate([rollout.sampler for rollout in drawn()]).view(np.uint32)
    assert (values.view(np.uint32) == bits).all()
    found = place(LAYOUTS[layout])
    assert (found.position, found.layer, found.call) == (-1, "formula", "")


@pytest.mark.parametrize("name", tiers(["mistral"], ["llama", "qwen3_moe"]))
def test_windows_and_experts(name: str) -> None:

    def encode(text: str) -> list[int]:
        return [3 + ord(c) % 150 for c in text]

    model = model_of(name)
    tiny: Any = SimpleNamespace(model=model, dtype="float32", encode=encode)
    for arm in ("stock", "invariant"):
        block = batch_invariant() if arm == "invariant" else nullcontext()
        with block:
            rollouts = sample_rollouts(tiny, PLAN)
        found = find_place(arm, tiny, model, PLAN, rollouts, LAYOUTS[1])
        assert bool(found.call) == (arm == "stock"), found
        if found.call:
            assert found.family in FAMILIES
            assert found.difference is not None
            assert found.difference.mismatched
        assert (found.layer == "formula") == (arm == "invariant")  # which of stock's is first depends on the CPU
