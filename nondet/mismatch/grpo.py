"""Reinforcement learning on one small model: transformers' engine samples, a full forward with gradients trains.

A minimal GRPO: rewards of a prompt's rollouts minus their mean, over their deviation, without a reference model.
Sampler and trainer are one model in one process, so only their kernels can differ: the weights, the tokens, temperature
1 and the formula for a token's logprob are the same. The arm decides which side is batch-invariant.
"""

from __future__ import annotations

import hashlib
import random
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch

from nondet.core.compare import digest, weights_digest
from nondet.core.records import TrainingStep
from nondet.core.runfile import RunWriter, replacing
from nondet.core.traces import tokens_digest
from nondet.errors import UserError, one_line, reason_of
from nondet.kernels.dispatch.block import batch_invariant
from nondet.mismatch.arms import ARMS, TASKS, Arm
from nondet.mismatch.collect import RolloutPlan, kernels, make_requests, rollouts_of, run_requests
from nondet.mismatch.figures import Figures
from nondet.mismatch.rollouts import Rollout
from nondet.mismatch.trainer import Spec, micro_batches, predicting_rows, rounded_to_fp8, weights_changed, widths
from nondet.sampling.logprobs import token_logprobs
from nondet.sampling.model import LoadedModel
from nondet.sampling.plan import Request

_CLIP, _GRADIENT_MOST, _BETAS = 0.2, 1.0, (0.9, 0.95)
_LAYOUT = Spec()  # padded on the right
_SOFTENED = 1e-4  # of the deviation of a group's rewards, so that it is never 0
_ENTROPY_ELEMENTS = 2**24  # of logits for the entropy of a step


@dataclass(frozen=True, kw_only=True)
class Settings:
    """The settings of a run besides the model; the plan holds them, and the options of `nondet rl` explain them."""

    arms: tuple[str, ...]
    seed: int
    seeds: int
    steps: int
    task: str
    groups: int  # prompts of a step
    group: int  # rollouts of each
    tokens: int
    lr: float
    epochs: int
    micro: int  # 0: all rollouts in one forward
    cap: float
    rollouts: str  # "" for the trainer's own weights


def checkpoint_path(run: Path, arm: str, seed: int) -> Path:
    """The checkpoint next to the run file, one for each arm and seed in training: RUN.stock+tis.0.safetensors."""
    return run.with_name(f"{run.name.removesuffix('.jsonl')}.{arm}.{seed}.safetensors")


class Policy:
    """A model with its float32 weights, in one tensor, and its optimizer: everything that a step changes."""

    def __init__(self, model: Any, lr: float) -> None:
        self.model, self.parameters = model, list(model.parameters())
        self.device = self.parameters[0].device
        self.master = self._joined(self.parameters)
        self.optimizer = torch.optim.AdamW([self.master], lr=lr, betas=_BETAS, weight_decay=0.0)

    @staticmethod
    @torch.no_grad()
    def _joined(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        return torch.cat([x.detach().float().flatten() for x in tensors])

    @torch.no_grad()
    def publish(self) -> None:
        """Round the float32 weights into the model's."""
        parts = self.master.split([p.numel() for p in self.parameters])
        for parameter, exact in zip(self.parameters, parts, strict=True):
            parameter.copy_(exact.view_as(parameter))

    def update(self) -> float:
        """One optimizer step with the current gradients; returns their norm."""
        gradient = self._joined([torch.zeros_like(p) if p.grad is None else p.grad for p in self.parameters])
        norm = float(gradient.norm())
        if not np.isfinite(norm):
            raise ArithmeticError(f"the norm of the gradient is {norm}")
        self.master.grad = gradient * min(1.0, _GRADIENT_MOST / (norm + 1e-9))
        self.optimizer.step()
        self.publish()
        return norm

    def save(self, path: Path, record: TrainingStep) -> None:
        """Write the state after the step of `record`, whole or not at all; with its digest and the record."""
        from safetensors import SafetensorError
        from safetensors.torch import save_file

        state = {"weight": self.master, **self.optimizer.state[self.master]}
        state = {name: state[name].cpu() for name in sorted(state)}
        described = {"record": msgspec.json.encode(record).decode(), "digest": digest(*state.values())}
        with replacing(path) as scratch:
            try:
                save_file(state, str(scratch), metadata=described)
            except SafetensorError as error:
                raise UserError(f"{path} can't be written: {one_line(str(error), 120)}", "Make room.") from error

    def load(self, path: Path) -> TrainingStep:
        """Continue from a checkpoint; returns the record of its step. Raises UserError: it is missing, is another
        model's, or its bits do not have the recorded digest."""
        from safetensors import SafetensorError, safe_open

        hint = "Put back the one that the run wrote, or begin anew with --force."
        try:
            with safe_open(str(path), framework="pt") as file:
                described = file.metadata() or {}
                state = {name: file.get_tensor(name) for name in sorted(file.keys())}
            record = msgspec.json.decode(described["record"], type=TrainingStep)
            weight, wanted = state.pop("weight"), described["digest"]
        except FileNotFoundError:
            raise UserError(f"the run can't be continued: its checkpoint {path} is not there", hint) from None
        except (SafetensorError, OSError, LookupError, ValueError) as error:
            raise UserError(f"{path} is no checkpoint of a run: {one_line(reason_of(error), 120)}", hint) from error
        if digest(*(state | {"weight": weight}).values()) != wanted:
            raise UserError(f"{path} is damaged: its tensors do not have the digest that it names", hint)
        if weight.shape != self.master.shape:
            raise UserError(f"{path} is a checkpoint of another model", hint)
        self.master.copy_(weight)
        self.optimizer.state[self.master] = {n: x if n == "step" else x.to(self.device) for n, x in state.items()}
        self.publish()
        if weights_digest(self.model) != record.weights_digest:
            raise UserError(f"{path} does not give the weights of its step {record.step}", hint)
        return record


def requests_of(settings: Settings, loaded: LoadedModel, seed: int, step: int) -> tuple[list[Request], list[str]]:
    """The requests of a step and the text of each group's prompt; all from seed and step, so the same in every arm.
    They always arrive at the same steps of the engine, because on a GPU torch's cuDNN plans for every new shape."""
    texts = list(TASKS[settings.task].prompts(settings.groups, random.Random(f"nondet rl {seed} {step}")))  # noqa: S311

    def own(group: int, rollout: int) -> int:
        return int.from_bytes(hashlib.sha256(f"{seed} {step} {group} {rollout}".encode()).digest()[:8], "big")

    plan = RolloutPlan(texts, settings.group, settings.tokens, seed)
    return make_requests(loaded, plan, "rl", own), texts


def advantages_of(
    settings: Settings, loaded: LoadedModel, rollouts: Sequence[Rollout], texts: Sequence[str]
) -> tuple[torch.Tensor, dict[str, Any]]:
    """Advantages [B] float32 within each group, 0 where its rewards are equal; and the fields of a record."""
    reward, size = TASKS[settings.task].reward, settings.group
    answers = [tuple(r.ids[i] for i in r.drawn) for r in rollouts]
    rewards = torch.tensor([reward(texts[i // size], loaded.decode(ids)) for i, ids in enumerate(answers)])
    grouped = rewards.view(len(texts), size)
    flat = (grouped == grouped[:, :1]).all(1)
    alike = sum(len(set(answers[first : first + size])) == 1 for first in range(0, len(answers), size))
    centred = grouped - grouped.mean(1, keepdim=True)
    advantages = torch.where(flat[:, None], 0.0, centred / (grouped.std(1, keepdim=True) + _SOFTENED))
    fields = {"reward": float(rewards.mean()), "rollouts": len(rollouts), "groups": len(texts)}
    return advantages.flatten(), fields | {"flat": int(flat.sum()), "alike": alike}


def compared(sampler: torch.Tensor, trainer: torch.Tensor) -> dict[str, Any]:
    """The fields of a record that measure how far logprobs [N] float32 of the two sides differ. Raises ArithmeticError
    where one of them is NaN or infinite: then nothing can be compared or learned."""
    try:
        figures = Figures(sampler.cpu().numpy(), trainer.cpu().numpy(), [len(sampler)])
    except ValueError as error:
        raise ArithmeticError(str(error)) from error
    least, most = figures.ratios
    named = {name: getattr(figures, name) for name in ("tokens", "differ", "k3", "outside", "mult_prob_error")}
    return named | {"ratio_least": least, "ratio_most": most}


def learn(
    policy: Policy, settings: Settings, arm: Arm, rollouts: Sequence[Rollout], advantages: torch.Tensor,
    ran: Counter[str],
) -> dict[str, Any]:  # fmt: skip
    """The optimizer steps on one batch of rollouts; figures of the first pass, where both sides have the same weights.
    The loss is GRPO's with PPO's clipped ratio to the first pass, which is 1 in it, over a constant number of tokens.
    An arm's importance weights, if any, are the first pass's probabilities over the sampler's, truncated."""
    figures: dict[str, Any] = {}
    gains = advantages.repeat_interleave(torch.tensor([len(r.drawn) for r in rollouts])).to(policy.device)
    sampled = torch.from_numpy(np.concatenate([r.sampler for r in rollouts])).to(policy.device)
    before, entropy = torch.empty_like(sampled), 0.0
    for epoch in range(settings.epochs):
        policy.model.zero_grad(set_to_none=True)
        last = 0
        for part in micro_batches(rollouts, settings.micro):
            with kernels("trainer", ran, arm.trainer):
                logits, ids, _ = predicting_rows(policy.model, part, _LAYOUT, widths(rollouts, 0))
                rows = slice(last, last := last + len(ids))
                logprobs = token_logprobs(logits, ids)
                if epoch == 0:
                    before[rows] = logprobs.detach()
                ratio = (logprobs - before[rows]).exp()
                least = torch.minimum(ratio * gains[rows], ratio.clamp(1 - _CLIP, 1 + _CLIP) * gains[rows])
                if arm.weighted:
                    least = least * (before[rows] - sampled[rows]).exp().clamp(max=settings.cap)
                (-least.sum() / (settings.tokens * len(rollouts))).backward()
            if epoch == 0:  # the mean over rows; with a large vocabulary over every k-th
                shares = logits.detach()[:: max(1, logits.numel() // _ENTROPY_ELEMENTS)].float().log_softmax(-1)
                entropy -= float((shares.exp() * shares).sum(-1).mean()) * len(logprobs) / len(before)
        if epoch == 0:
            figures = compared(sampled, before) | {"entropy": entropy}
        figures = {"grad_norm": policy.update()} | figures
    return figures


def step_of(policy: Policy, loaded: LoadedModel, settings: Settings, arm: str, seed: int, step: int) -> TrainingStep:
    """Sample, compute rewards, learn: one record."""
    requests, texts = requests_of(settings, loaded, seed, step)
    ran, started = Counter[str](), time.perf_counter()
    fp8 = partial(rounded_to_fp8, scale="row")  # else the sampler's weights are the model's own
    weights = weights_changed(policy.model, fp8) if settings.rollouts == "fp8" else nullcontext()
    with weights, kernels("sampler", ran, ARMS[arm].sampler):
        rollouts = rollouts_of(run_requests(loaded, requests))
    drawn = time.perf_counter()
    advantages, figures = advantages_of(settings, loaded, rollouts, texts)
    figures |= learn(policy, settings, ARMS[arm], rollouts, advantages, ran)
    return TrainingStep(
        impl=arm, seed=seed, step=step, ran=dict(ran) if step == 0 else {}, weights_digest=weights_digest(policy.model),
        tokens_digest=tokens_digest([token for r in rollouts for token in r.ids]),
        sample_seconds=drawn - started, train_seconds=time.perf_counter() - drawn, **figures,
    )  # fmt: skip


Progress = Callable[[str, int, int, TrainingStep], None]


def collect(
    loaded: LoadedModel, settings: Settings, writer: RunWriter, earlier: Sequence[TrainingStep], progress: Progress
) -> None:
    """Train each arm under each seed, from the same weights, as far as the run file does not hold it yet: `earlier`.
    `progress` is called with (arm, seed, steps done, the last of them) after each, and where an arm continues. Raises
    UserError: the file can't be continued."""
    initial = [p.detach().clone() for p in loaded.model.parameters()]
    for seed in range(settings.seed, settings.seed + settings.seeds):
        for arm in settings.arms:
            steps = [r for r in earlier if (r.impl, r.seed) == (arm, seed)]
            if len(steps) == settings.steps or any(r.status == "error" for r in steps):
                checkpoint_path(writer.path, arm, seed).unlink(missing_ok=True)
                progress(arm, seed, settings.steps, steps[-1])
                continue
            with torch.no_grad():
                for parameter, value in zip(loaded.model.parameters(), initial, strict=True):
                    parameter.copy_(value)
            # An empty block around the blocks of both sides, because entering the outermost block takes time.
            with batch_invariant([]) if ARMS[arm].sampler and ARMS[arm].trainer else nullcontext():
                _train(loaded, settings, arm, seed, writer, steps, progress)


def _train(
    loaded: LoadedModel, settings: Settings, arm: str, seed: int, writer: RunWriter, steps: Sequence[TrainingStep],
    progress: Progress,
) -> None:  # fmt: skip
    """One arm under one seed, from its checkpoint if it has one. A step's checkpoint is written before its record, and
    holds it: after a kill between the two, the run continues with the bits that it would have had."""
    policy, path, first = Policy(loaded.model, settings.lr), checkpoint_path(writer.path, arm, seed), len(steps)
    if writer.resumed and (steps or path.exists()):
        record = policy.load(path)
        if (record.impl, record.seed, record.step) == (arm, seed, first):
            writer.write(record)
            first += 1
        elif not steps or record != steps[-1]:
            what = f"{path} is the checkpoint of step {record.step} of {one_line(record.impl, 40)}"
            raise UserError(f"{what}; the run file has {first} of {arm}", "Begin anew with --force.")
        progress(arm, seed, first, record)

    for step in range(first, settings.steps):
        try:
            record = step_of(policy, loaded, settings, arm, seed, step)
        except UserError:
            raise
        except Exception as error:  # noqa: BLE001 - any error becomes the arm's last record; the others continue
            record = TrainingStep(impl=arm, seed=seed, step=step, status="error", reason=reason_of(error))
        else:
            policy.save(path, record)
        record = writer.write(record)
        progress(arm, seed, step + 1, record)
        if record.status != "ok":
            break
    path.unlink(missing_ok=True)


def describe(loaded: LoadedModel, settings: Settings) -> dict[str, Any]:
    """The plan, for the header."""
    where = {"model": {"name": loaded.name, **loaded.identity}, "device": loaded.device, "dtype": loaded.dtype}
    return {**asdict(settings), "arms": list(settings.arms), **where}
