"""The real TRL: it samples with transformers' engine and trains in the same process. Asked where it is installed."""

from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import nondet
from nondet.cli import main
from nondet.core.records import TrainingStep
from nondet.core.runfile import read_run
from nondet.errors import UserError
from tests.sampling.conftest import write_tiny_model

STEPS = 3


def trainer(folder: Path, out: Path, **changes: Any) -> Any:
    """A GRPOTrainer on a tiny model, prompts of several lengths, so that TRL pads on the left."""
    trl = pytest.importorskip("trl", reason="TRL is not installed: pip install nondet-llm[trl]")
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

    tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(folder / "tokenizer.json"))
    tokenizer.pad_token = tokenizer.eos_token = tokenizer.convert_ids_to_tokens(0)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16, attn_implementation="sdpa")
    engine = {"num_blocks": 64, "page_size": 16, "max_batch_tokens": 32}
    given: dict[str, Any] = {
        "output_dir": str(out), "use_cpu": True, "bf16": False, "max_steps": STEPS, "seed": 5, "logging_steps": 1,
        "per_device_train_batch_size": 4, "gradient_accumulation_steps": 2, "num_generations": 4, "report_to": [],
        "max_completion_length": 8, "learning_rate": 1e-2, "save_strategy": "no", "disable_tqdm": True,
        "use_transformers_continuous_batching": True, "transformers_continuous_batching_config": engine,
    }  # fmt: skip
    prompts = ["For example, the", "Return", "The class is a kind of", "This"] * 8
    held_out = Dataset.from_dict({"prompt": prompts[:4]}) if "eval_strategy" in changes else None

    def length(completions: list[str], **_: Any) -> list[float]:
        return [len(text) / 100 for text in completions]

    return trl.GRPOTrainer(
        model=model, reward_funcs=length, args=trl.GRPOConfig(**given | changes), processing_class=tokenizer,
        train_dataset=Dataset.from_dict({"prompt": prompts}), eval_dataset=held_out,
    )  # fmt: skip


def watched(folder: Path, tmp_path: Path, *, invariant: bool) -> list[TrainingStep]:
    """What a run of a few steps left; TRL is its own again afterwards."""
    made, out = trainer(folder, tmp_path / "out"), tmp_path / "rl.jsonl"
    before = made.continuous_batching_config.return_logprobs
    block: Any = nondet.batch_invariant(training=True) if invariant else nullcontext()
    with block, nondet.mismatch_of(made, out=out):
        made.train()
    assert not {"generate_batch", "_get_per_token_logps_and_entropies"} & {*vars(made.model), *vars(made)}
    assert made.continuous_batching_config.return_logprobs == before
    run = read_run(out)
    assert run.complete
    assert [r.step for r in run.training_steps] == list(range(STEPS))
    assert all(r.tokens > 8 and r.grad_norm and r.reward and r.groups == 2 for r in run.training_steps)
    assert len({r.weights_digest for r in run.training_steps}) == STEPS
    return run.training_steps


@pytest.mark.trl
def test_trl_is_on_policy_with_two_lines_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Not one bit in any step, with padding on the left, after optimizer steps, in micro-batches."""
    folder = write_tiny_model(tmp_path / "model")
    steps = watched(folder, tmp_path, invariant=False)
    assert all(r.impl == "stock" and r.differ > r.tokens / 4 and r.k3 > 0 for r in steps)
    assert main(["gate", str(tmp_path / "rl.jsonl")]) == 3
    (tmp_path / "rl.jsonl").unlink()
    steps = watched(folder, tmp_path, invariant=True)
    assert [(r.impl, r.differ, r.k3) for r in steps] == [("invariant", 0, 0.0)] * STEPS
    assert main(["gate", str(tmp_path / "rl.jsonl")]) == 0
    assert main(["report", str(tmp_path / "rl.jsonl"), "--quiet"]) == 0
    assert f"KL 0 in {STEPS} of {STEPS} steps (0 of" in " ".join(capsys.readouterr().out.split())


@pytest.mark.trl
def test_what_trl_does_not_train_on_is_in_no_figure(tmp_path: Path) -> None:
    """Rollouts of one generation serve two steps, of which the first is recorded, and each step is evaluated; with
    mask_truncated_completions nobody trains on what was cut off: here most, or all, of them."""
    folder, kept = write_tiny_model(tmp_path / "model"), []
    evaluated = {"max_steps": 4, "steps_per_generation": 4, "eval_strategy": "steps", "eval_steps": 1}
    for i, more in enumerate((evaluated, {"mask_truncated_completions": True, "max_completion_length": 40})):
        made, out = trainer(folder, tmp_path / "out", **more), tmp_path / f"rl{i}.jsonl"
        with nondet.batch_invariant(training=True), nondet.mismatch_of(made, out=out):
            made.train()
        kept.append(read_run(out).training_steps)
    assert [(s.step, s.differ) for s in kept[0]] == [(0, 0), (2, 0)]
    assert made.state.global_step == STEPS, "it went on to its end"
    assert all(step.differ == 0 and 0 < step.tokens < 40 * step.rollouts for step in kept[1])


def test_what_can_t_be_watched_is_refused(tmp_path: Path) -> None:
    """One line, before anything is trained or written."""
    engine = {"use_transformers_continuous_batching": True, "_get_per_token_logps_and_entropies": None}
    two, one = (SimpleNamespace(accelerator=SimpleNamespace(num_processes=n), **engine) for n in (2, 1))
    plain = SimpleNamespace(use_transformers_continuous_batching=False)
    for given, out, said in [
        (SimpleNamespace(), "rl.jsonl", "can't watch this SimpleNamespace"),
        (plain, "rl.jsonl", "use_transformers_continuous_batching"),
        (two, "rl.jsonl", "this trainer has several"),
        (one, "rl.pt", "is not a .jsonl file"),
    ]:
        with pytest.raises(UserError, match=said):
            nondet.mismatch_of(given, out=tmp_path / out)
    assert list(tmp_path.iterdir()) == []
