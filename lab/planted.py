"""What is planted, and what `nondet mismatch` says of it: JSON lines, added to FILE; what it has is not done again.

python lab/planted.py FILE

Of tests/mismatch/test_kinds.py each kind under three seeds and each sound set-up; of tests/trace/test_trainer.py twenty
faulty operators in the trainer. K3 is of the two sides, `floor` is what rounding explains of it, `left` what the named
cause leaves, `removed` the share of what stands above the floor that it takes away, `exactly` the share of tokens whose
very bits it gives; of a set-up in which nothing is named, of the hypothesis that comes nearest.
"""

from __future__ import annotations

import json
import random
import sys
import time
from collections.abc import Callable, Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

import nondet
from nondet.verdict.mismatch import Pair, removed
from tests.mismatch import test_kinds as kinds
from tests.trace import test_trainer as trace

Told = dict[str, Any]


def of_pair(pair: Pair, wanted: tuple[str, str] | None) -> Told:
    """What was named, and how far it reaches."""
    best = pair.named or max(pair.kinds, key=removed)
    named = (pair.named.cause, pair.named.side) if pair.named else None
    told: Told = {"ok": named == wanted and (wanted is not None or not pair.off), "named": named}
    if pair.figures is not None:
        told |= {"tokens": pair.figures.tokens, "differ": pair.figures.differ}
    told["of"] = [best.cause, best.side, best.fitted]
    figures = {"k3": best.k3, "floor": best.floor, "left": best.left, "removed": removed(best), "exactly": best.exactly}
    return told | {name: float(f"{value:.3g}") for name, value in figures.items()} | {"off": pair.off}


def operator(seed: int) -> Told:
    """As the test of the same draw."""
    rng = random.Random(seed)  # noqa: S311 - a draw, no secret
    name = rng.choice(sorted({call.name for call, _ in trace.calls()}))
    faulty, module = rng.choice([(call, path) for call, path in trace.calls() if call.name == name])
    planted = trace.Planted(faulty)
    with planted.watch(trace.loaded().model):
        found = trace.place(trace.LAYOUTS[seed % len(trace.LAYOUTS)])
    ok = found.module == module and found.difference is not None and found.difference.mismatched > 0
    return {"ok": ok, "planted": [module, *faulty], "found": [found.module, found.call], "position": found.position}


def cases() -> Iterator[tuple[str, str, int, Callable[[], Told]]]:
    """Each with what it is, its name and its seed."""
    for seed in kinds.SEEDS:
        for name, (cause, side, plant) in kinds.PLANTED.items():
            yield "planted", name, seed, lambda p=plant, s=seed, w=(cause, side): of_pair(p(s), w)  # type: ignore[misc]
        for name, sound in kinds.SOUND.items():
            yield "sound", name, seed, lambda p=sound, s=seed: of_pair(p(s), None)  # type: ignore[misc]
    for seed in range(20):
        yield "operator", "in the trainer", seed, lambda s=seed: operator(s)  # type: ignore[misc]


def main() -> None:
    """All that the file lacks."""
    path = Path(sys.argv[1])
    known = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    done = {(line.get("what"), line.get("name"), line.get("seed")) for line in known}
    with path.open("a") as file:
        if not known:
            told = {name: version(name) for name in ("torch", "transformers")} | {"nondet": nondet.__version__}
            print(json.dumps(told), file=file, flush=True)
        torch.set_num_threads(1)
        for what, name, seed, ask in cases():
            if (what, name, seed) not in done:
                began = time.process_time()
                line = {"what": what, "name": name, "seed": seed, **ask()}
                print(json.dumps(line | {"cpu": round(time.process_time() - began, 1)}), file=file, flush=True)


if __name__ == "__main__":
    main()
