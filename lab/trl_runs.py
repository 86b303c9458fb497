"""The real TRL on the embedded model, as it comes and with nondet's two lines: a run file of each in FOLDER.

python lab/trl_runs.py FOLDER          needs `pip install nondet-llm[trl]`

GRPO in bfloat16 on a CPU: 12 steps of 16 completions of up to 48 tokens, padded on the left, micro-batches of 8.
Run files that are there are not made again.
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
from nondet.core.runfile import read_run
from tests.training.test_training import trainer

MODEL = Path(nondet.__file__).parent / "embedded"


def train(out: Path, *, invariant: bool) -> None:
    """12 steps, recorded in a run file."""
    cut = {"per_device_train_batch_size": 8, "gradient_accumulation_steps": 2, "num_generations": 4}
    with TemporaryDirectory() as scratch:
        made = trainer(MODEL, Path(scratch), **cut, max_steps=12, max_completion_length=48, learning_rate=1e-4)
        block: Any = nondet.batch_invariant(training=True) if invariant else nullcontext()
        with block, nondet.mismatch_of(made, out=out):
            made.train()


def main() -> None:
    """All of it."""
    folder = Path(sys.argv[1])
    torch.set_num_threads(1)
    print("TRL {}, transformers {}, torch {}".format(*map(version, ("trl", "transformers", "torch"))))
    for name, invariant in (("stock", False), ("invariant", True)):
        out = folder / f"trl-{name}.jsonl"
        if not out.exists():
            train(out, invariant=invariant)
        found = read_run(out).training_steps
        tokens, differ, k3 = (sum(getattr(s, figure) for s in found) for figure in ("tokens", "differ", "k3"))
        what = "two lines" if invariant else "stock"
        print(f"{what}: {len(found)} steps, {differ:,} of {tokens:,} tokens have other bits, "
              f"mean K3 {k3 / len(found):.1e}; weights at last {found[-1].weights_digest}", flush=True)  # fmt: skip


if __name__ == "__main__":
    main()
