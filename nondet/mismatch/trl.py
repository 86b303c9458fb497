"""Compares the sampler of TRL's GRPOTrainer with its trainer while it trains: the same tokens, step by step.

With `use_transformers_continuous_batching` TRL samples with the engine of `nondet.sampling`, in the trainer's own
process and with its weights, and corrects for no mismatch. Written against TRL 1.16 and transformers 5.23.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch

from nondet.core.compare import weights_digest
from nondet.core.environment import collect
from nondet.core.records import TrainingStep
from nondet.core.runfile import open_run
from nondet.core.traces import tokens_digest
from nondet.errors import UserError
from nondet.kernels.dispatch.state import current
from nondet.mismatch.grpo import compared

_SCORE = "_get_per_token_logps_and_entropies"


class Watch(ExitStack):
    """The block that `mismatch_of` returns."""

    def __init__(self, trainer: Any, out: str | Path, *, force: bool) -> None:
        super().__init__()
        self._trainer, self._out, self._force = trainer, Path(out), force
        self._model = trainer.accelerator.unwrap_model(trainer.model)
        self._sampled: dict[tuple[int, ...], list[torch.Tensor]] = {}
        self._pairs: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._fresh = False  # whether the weights are those that sampled
        self._step: dict[str, Any] = {}
        self._pending: TrainingStep | None = None

    def __enter__(self) -> Watch:
        from transformers import TrainerCallback

        trainer, args = self._trainer, self._trainer.args
        self._invariant = current().training
        self._impl = "invariant" if self._invariant else "stock"
        model = {"class": type(self._model).__name__, "weights": weights_digest(self._model)}
        plan = {"arms": [self._impl], "steps": args.max_steps, "lr": args.learning_rate, "trainer": "trl.GRPOTrainer"}
        plan |= {"model": model, "dtype": str(self._model.dtype).removeprefix("torch.")}
        writer = open_run(self._out, command="rl", plan=plan, environment=collect(args.seed), force=self._force)
        self.callback(writer.close)
        self._writer = writer

        def finish(kind: Any, *_: Any) -> None:
            self.settle()
            if kind is None:
                writer.finish()

        self.push(finish)
        config = trainer.continuous_batching_config
        self.callback(setattr, config, "return_logprobs", config.return_logprobs)
        config.return_logprobs = True
        self._put(self._model, "generate_batch", self._sampling)
        self._put(trainer, _SCORE, self._scoring)
        called = {
            "on_step_end": lambda *given, **_: self.stepped(given[2].global_step),
            "on_log": lambda *_, logs=None, **__: self.settle((logs or {}).get("grad_norm")),
        }
        steps = type("Steps", (TrainerCallback,), called)()
        trainer.add_callback(steps)
        self.callback(trainer.remove_callback, steps)
        return self

    def _put(self, owner: Any, name: str, wrapper: Callable[..., Any]) -> None:
        original = getattr(owner, name)
        setattr(owner, name, lambda *args, **kwargs: wrapper(original, *args, **kwargs))
        self.callback(delattr, owner, name)

    def _sampling(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """The engine's rollouts, kept with their logprobs until the next ones; without an evaluation's."""
        if not self._model.training:
            return original(*args, **kwargs)
        started = time.perf_counter()
        outputs = original(*args, **kwargs)
        self._since, self._fresh, self._pairs, self._sampled = time.perf_counter(), True, [], defaultdict(list)
        for output in outputs.values():
            logprobs = torch.from_numpy(np.asarray(output.logprobs, dtype=np.float32))
            self._sampled[(*output.prompt_ids, *output.generated_tokens)].append(logprobs)
        ids = [token for text in sorted(self._sampled) for token in text]
        self._step = {"rollouts": len(outputs), "tokens_digest": tokens_digest(ids)}
        self._step["sample_seconds"] = self._since - started
        return outputs

    def _scoring(self, original: Callable[..., Any], model: Any, ids: Any, mask: Any, keep: int, **kw: Any) -> Any:
        """The trainer's logprobs: its own, or under the block by one formula; compared with the sampler's."""
        scored = (self._score if self._invariant else original)(model, ids, mask, keep, **kw)
        if self._fresh and scored[0].requires_grad:
            for row in mask[:, -keep:].any(1).nonzero()[:, 0].tolist():  # TRL masks the whole completion of the others
                known = self._sampled.get(tuple(ids[row][mask[row].bool()].tolist()))
                if not known:
                    raise UserError("TRL trains on tokens that its sampler did not give", "Leave tools out.")
                trained = scored[0].detach()[row][mask[row, -keep:].bool()].float()
                self._pairs.append((known.pop(0).to(trained.device), trained))
        return scored

    def _score(
        self,
        model: Any,
        ids: Any,
        mask: Any,
        keep: int,
        batch_size: int = 0,
        compute_entropy: bool = False,
        **other: Any,
    ) -> tuple[torch.Tensor, torch.Tensor | None, None]:
        """TRL's logprobs, from whole logits by the engine's formula, and at positions that do not count padding. TRL's
        own counts the padding before a prompt as positions, a shift that changes only rounding."""
        if odd := [name for name, value in other.items() if value not in (None, False)]:
            raise UserError(f"mismatch_of() can't score {', '.join(odd)}", "Train on text only.")
        logprobs, entropies, size = [], [], batch_size or len(ids)
        for first in range(0, len(ids), size):
            part = slice(first, first + size)
            inputs = {"attention_mask": mask[part], "position_ids": (mask[part].cumsum(-1) - 1).clamp(min=0)}
            logits = model(input_ids=ids[part], logits_to_keep=keep + 1, use_cache=False, **inputs).logits[:, :-1]
            shares = (logits.float() / self._trainer.temperature).softmax(-1)
            logprobs.append(shares.gather(-1, ids[part, -keep:, None]).squeeze(-1).log())
            if compute_entropy:
                fixed = shares.detach()
                entropies.append(-(fixed * fixed.clamp_min(torch.finfo(fixed.dtype).tiny).log()).sum(-1))
        return torch.cat(logprobs), torch.cat(entropies) if compute_entropy else None, None

    def stepped(self, number: int) -> None:
        """Called after an optimizer step."""
        self.settle()
        if self._pairs:
            sampler, trainer = (torch.cat(side) for side in zip(*self._pairs, strict=True))
            metrics = {name: values[-1] for name, values in self._trainer._metrics["train"].items() if values}
            groups = self._step["rollouts"] // self._trainer.num_generations
            self._pending = TrainingStep(
                impl=self._impl, seed=self._trainer.args.seed, step=number - 1, reward=metrics.get("reward"),
                entropy=metrics.get("entropy"), groups=groups, weights_digest=weights_digest(self._model),
                flat=round(groups * metrics.get("frac_reward_zero_std", 0.0)),
                train_seconds=time.perf_counter() - self._since, **self._step, **compared(sampler, trainer),
            )  # fmt: skip
        self._fresh, self._pairs = False, []

    def settle(self, grad_norm: float | None = None) -> None:
        """Write the last step's record, once TRL has reported its gradient, or will not."""
        if self._pending is not None:
            self._writer.write(msgspec.structs.replace(self._pending, grad_norm=grad_norm))
            self._pending = None


def mismatch_of(trainer: Any, out: str | Path, *, force: bool = False) -> Watch:
    """Record, while the block is entered, how far the sampler and the trainer of a TRL trainer differ.

        with nondet.batch_invariant(training=True), nondet.mismatch_of(trainer, out="rl.jsonl"):
            trainer.train()

    By itself it changes nothing. Within `batch_invariant(training=True)` it also computes TRL's logprobs by the
    engine's formula, at the positions that tokens have there: then the two have equal bits, and training is on-policy.
    Steps whose weights are no longer those that sampled (`num_iterations` above 1, say) have no record. `nondet report`
    and `nondet gate` read the file.

    Args:
        trainer: A `trl.GRPOTrainer` with `use_transformers_continuous_batching=True`.
        out: Run file to write (.jsonl).
        force: Overwrite it.

    Raises:
        UserError: another trainer or sampler, or the file exists.
    """
    if not getattr(trainer, "use_transformers_continuous_batching", False) or not hasattr(trainer, _SCORE):
        what = f"mismatch_of() can't watch this {type(trainer).__name__}: it does not sample in its own process"
        raise UserError(what, "Give a trl.GRPOTrainer with use_transformers_continuous_batching=True.")
    if trainer.accelerator.num_processes > 1:
        raise UserError("mismatch_of() watches one process, and this trainer has several", "Train on one GPU.")
    if Path(out).suffix != ".jsonl":
        raise UserError(f"out={str(out)!r} is not a .jsonl file", "Run files end in .jsonl.")
    return Watch(trainer, out, force=force)
