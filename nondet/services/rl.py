"""`nondet rl`."""

from __future__ import annotations

from dataclasses import dataclass, fields
from functools import cached_property
from pathlib import Path
from typing import Any

from nondet.core.records import TrainingStep
from nondet.core.runfile import begun, check_free, read_run
from nondet.mismatch.arms import ARMS, PROMPTS_MOST, TASKS
from nondet.services import options as o
from nondet.services.run import Output, Request, Sink
from nondet.services.sample import open_model

_MODEL = "Folder, hub name, or random weights such as random:qwen3-12x1024."
_ARMS = "; ".join(f"{name}: {arm.help}" for name, arm in ARMS.items())
_TASKS = "; ".join(f"{name}: {task.help}" for name, task in TASKS.items())


@dataclass(frozen=True, kw_only=True)
class RlRequest(o.ModelOptions, Request):
    """The options of `nondet rl`."""

    arms: str = o.own(f"Comma-separated: {_ARMS}.", default=",".join(ARMS), shown="all four")
    steps: int = o.own("Steps of each arm.", default=60, check=o.Range(1, 100_000))
    seeds: int = o.own("Number of seeds; each runs all arms.", default=1, check=o.Range(1, 100))
    task: str = o.own(f"What earns a reward. {_TASKS}.", default="parentheses", check=o.OneOf(tuple(TASKS)))
    prompts: int = o.own("Prompts of a step.", default=6, check=o.Range(1, PROMPTS_MOST))
    group: int = o.own("Rollouts of each prompt.", default=8, check=o.Range(2, 1024))
    tokens: int = o.own("Tokens of each rollout.", default=20, check=o.Range(1, 100_000))
    lr: float = o.own("Learning rate of AdamW.", default=1e-4, check=o.Range(1e-12, 1.0))
    epochs: int = o.own("Optimizer steps on the same rollouts.", default=1, check=o.Range(1, 100))
    micro: int = o.own("Rollouts of one forward; 0: all.", default=0, check=o.Range(0, 2**20))
    cap: float = o.own("Where importance weights are truncated.", default=2.0, check=o.Range(1, 1e6))
    sampler: str | None = o.own(
        "fp8: the sampler's matrices are rounded to float8_e4m3fn.",
        shown="the trainer's weights",
        check=o.OneOf(("fp8",)),
    )
    model: str | None = o.own(_MODEL, shown="the embedded model")

    def _check(self) -> None:
        _ = self.arm_names

    @cached_property
    def arm_names(self) -> tuple[str, ...]:
        """The arms, in the order of the table."""
        return tuple(sorted(o.arms(self.arms, ARMS), key=list(ARMS).index))


def rl(request: RlRequest, sink: Sink) -> Path:
    """Train by reinforcement with stock and with batch-invariant kernels: reward and KL of sampler to trainer."""
    output = Output(request, "rl", sink)

    from nondet.mismatch.grpo import Settings, checkpoint_path, collect, describe, requests_of
    from nondet.sampling.model import check_lengths

    given: dict[str, Any] = {"arms": request.arm_names, "groups": request.prompts, "rollouts": request.sampler or ""}
    same = {f.name: getattr(request, f.name) for f in fields(Settings) if f.name not in given}
    settings = Settings(**given, **same)
    resumed = request.resume and begun(output.path)
    trained = [(arm, settings.seed + i) for i in range(settings.seeds) for arm in settings.arms]
    checkpoints = [checkpoint_path(output.path, arm, seed) for arm, seed in trained]
    for path in () if resumed else checkpoints:
        check_free(path, force=request.force, hint="Go on with its run by --resume, or use --force to overwrite it.")
    loaded = open_model(request, sink)
    for planned in requests_of(settings, loaded, settings.seed, 0)[0]:
        check_lengths(loaded, planned.prompt, settings.tokens)
    total = settings.steps * len(checkpoints)
    with output.recording("rl", describe(loaded, settings), request.seed, total) as writer, sink.progress() as progress:
        earlier = read_run(output.path, allow_truncated=True).training_steps if writer.resumed else []
        for path in () if writer.resumed else checkpoints:
            path.unlink(missing_ok=True)
        tasks = {
            (arm, seed): progress.add_task(_label(arm, seed, settings.seeds), total=settings.steps, start=False)
            for arm, seed in trained
        }

        def advance(arm: str, seed: int, done: int, record: TrainingStep) -> None:
            task, said = tasks[arm, seed], _label(arm, seed, settings.seeds)
            if record.status == "ok":
                said += f": reward {record.reward or 0.0:.2f}, K3 {record.k3:.1e}, entropy {record.entropy or 0.0:.2f}"
            progress.start_task(task)
            progress.update(task, completed=done, description=said)

        collect(loaded, settings, writer, earlier, advance)
    return output.present()


def _label(arm: str, seed: int, seeds: int) -> str:
    return f"{arm}, seed {seed}" if seeds > 1 else arm
