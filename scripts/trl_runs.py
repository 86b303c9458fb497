"""The real TRL on the embedded model, as it comes and with nondet's two lines: a run file of each in FOLDER.

python scripts/trl_runs.py FOLDER          needs `pip install nondet-llm[trl]`

GRPO in bfloat16 on a CPU: 12 steps of 16 completions of up to 48 tokens, padded on the left, micro-batches of 8.
Then promise C: with `nondet.fold`, and without, micro-batches of 8 and 2, three steps each. Run files that are there
are not made again.
"""

from __future__ import annotations

import sys
from contextlib import nullcontext
from importlib.metadata import version
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

import nondet
from nondet.core.records import TrainingStep
from nondet.core.runfile import read_run
from tests.training.test_trl import trainer

MODEL = Path(nondet.__file__).parent / "embedded"


def trained(out: Path, micro: int, steps: int, *, invariant: bool, fold: bool = False) -> list[TrainingStep]:
    """The records of a run, whose line is printed."""
    cut = {"per_device_train_batch_size": micro, "gradient_accumulation_steps": 16 // micro, "num_generations": 4}
    if out.exists():
        return _told(out, micro, invariant=invariant, fold=fold)
    with TemporaryDirectory() as scratch:
        made = trainer(MODEL, Path(scratch), **cut, max_steps=steps, max_completion_length=48, learning_rate=1e-4)
        block: Any = nondet.batch_invariant(training=True) if invariant else nullcontext()
        with block, nondet.fold(made.model) if fold else nullcontext(), nondet.mismatch_of(made, out=out):
            made.train()
    return _told(out, micro, invariant=invariant, fold=fold)


def _told(out: Path, micro: int, *, invariant: bool, fold: bool) -> list[TrainingStep]:
    found = read_run(out).training_steps
    tokens, differ, k3 = (sum(getattr(s, name) for s in found) for name in ("tokens", "differ", "k3"))
    what = ("two lines" if invariant else "stock") + ", fold" * fold
    print(f"{what}, micro-batches of {micro}: {len(found)} steps, {differ:,} of {tokens:,} tokens have other bits, "
          f"mean K3 {k3 / len(found):.1e}; weights at last {found[-1].weights_digest}", flush=True)  # fmt: skip
    return found


def main() -> None:
    """All of it."""
    folder = Path(sys.argv[1])
    torch.set_num_threads(1)
    print("TRL {}, transformers {}, torch {}".format(*map(version, ("trl", "transformers", "torch"))))
    for name, invariant in (("stock", False), ("invariant", True)):
        trained(folder / f"trl-{name}.jsonl", 8, 12, invariant=invariant)
    for name, fold in (("fold", True), ("plain", False)):
        for micro in (8, 2):
            trained(folder / f"trl-{name}-{micro}.jsonl", micro, 3, invariant=True, fold=fold)


if __name__ == "__main__":
    main()
