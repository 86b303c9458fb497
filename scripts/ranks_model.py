"""A random 12-layer Qwen3 on several GPUs: python scripts/ranks_model.py OUT [RANKS [BATCHES]], as 1,2,4 and 1,8.

JSON lines: one a trace (its batch, the digest of its tokens and of its logits' bits, seconds of the whole batch), and
one with the coverage, for every rank.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path

import torch

from nondet.core.environment import collect
from nondet.ranks.group import RankGroup
from nondet.sampling.ranks import WAYS, traces, write_model

STEPS = 16


def main() -> None:
    """Write the traces of every number of ranks that the GPUs allow."""
    out = Path(sys.argv[1])
    worlds = [int(w) for w in (sys.argv[2] if len(sys.argv) > 2 else "1,2,4").split(",")]
    batches = tuple(int(b) for b in (sys.argv[3] if len(sys.argv) > 3 else "1,2,5,8,32").split(","))
    lines: list[dict[str, object]] = [{"environment": collect(0), "batches": batches, "steps": STEPS}]
    with tempfile.TemporaryDirectory() as folder:
        write_model(folder, layers=12, hidden=1024)
        for world in worlds:
            if world > torch.cuda.device_count():
                break
            question = (folder, "cuda", WAYS, batches, STEPS)
            if world == 1:
                answers = [traces(*question)]
            else:
                group = RankGroup(world, "cuda", limit_s=150)
                answers = group.ask("nondet.sampling.ranks:traces", *question)
                group.close()
            for rank, (found, coverage) in enumerate(answers):
                lines += [{"world": world, "rank": rank, **trace._asdict()} for trace in found]
                lines.append({"world": world, "rank": rank, "coverage": coverage})
            out.write_text("".join(json.dumps(line) + "\n" for line in lines))


if __name__ == "__main__":
    main()
