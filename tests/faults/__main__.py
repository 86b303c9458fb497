"""Every planted fault, in operators and in whole models, and one confusion matrix of what is said of them.

Beside those that are kept, each seed draws its own from the grammar.

python -m tests.faults [--models] [--seeds 0 1 2] [name ...]
"""

from __future__ import annotations

import argparse
import itertools
import sys
from collections import Counter
from collections.abc import Iterator

import pandas as pd
import torch

from tests.faults.models import MODELS, judge_model
from tests.faults.operators import PLANTED, Judged, drawn, judge


def judged(names: list[str], seeds: list[int], *, models: bool = False) -> Iterator[Judged]:
    # each that is kept, under all seeds; those that the grammar draws, each under the seed that drew it
    operators = [(p, seed) for p in PLANTED for seed in seeds] + [(p, seed) for seed in seeds for p in drawn(seed)]
    for planted, seed in () if models else operators:
        if any(part in planted.name for part in names or [""]):
            yield judge(planted, seed, hasty=planted not in PLANTED)
    for model, seed in itertools.product(MODELS, seeds):
        if any(part in model.name for part in names or [""]):
            yield judge_model(model, seed)


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", help="parts of names; all without any")
    parser.add_argument("--models", action="store_true", help="whole models alone")
    parser.add_argument("--seeds", nargs="*", type=int, default=[0, 1, 2])
    asked = parser.parse_args(arguments)
    torch.set_num_threads(1)
    matrix: list[tuple[str, str]] = []
    counts: Counter[str] = Counter()
    for j in judged(asked.names, asked.seeds, models=asked.models):
        matrix.append((j.right, j.said))
        counts["control" if j.right == "sound" else "fault"] += 1
        counts["said wrongly"] += not j.ok
        counts["cause wrong"] += j.ok and not j.cause
        print(f"{'ok ' if j.ok and j.cause else 'BAD'} {j.name:52} {j.said}; {j.detail}", flush=True)  # noqa: T201 - a command
    if matrix:
        planted, said = map(pd.Series, zip(*matrix, strict=True))
        print(pd.crosstab(planted, said, rownames=["planted"], colnames=["said"]).to_string())  # noqa: T201 - the same
    print(", ".join(f"{name}: {count}" for name, count in counts.items()))  # noqa: T201 - the same
    return int(not counts or counts["said wrongly"] > 0 or counts["cause wrong"] > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
