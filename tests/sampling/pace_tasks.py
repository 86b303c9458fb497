"""What tests of `nondet bench engine` over ranks have each rank do."""

from __future__ import annotations

import os
import signal
from typing import Any

import torch
import torch.distributed as dist

from nondet.bench.engine import StandingEngine, Wave


def _from_wave(number: int, instead: Any) -> None:
    """On rank 1, waves from this number on (counted over all engines, the first is 0) go by another function."""
    original, waves = StandingEngine.wave, 0

    def wave(engine: StandingEngine) -> Wave:
        nonlocal waves
        waves += 1
        return instead(original, engine) if waves > number else original(engine)

    if dist.get_rank() == 1:
        StandingEngine.wave = wave  # type: ignore[method-assign] # for as long as this rank lives, or `as_it_was`


def answer_otherwise(number: int) -> None:
    """Rank 1 says that it came to other bits."""
    from dataclasses import replace

    _from_wave(number, lambda original, engine: replace(original(engine), digests=("other",)))


def die(number: int) -> None:
    """Rank 1 is killed in the middle of a wave's questions, as the system kills what has no memory left."""
    _from_wave(number, lambda original, engine: os.kill(os.getpid(), signal.SIGKILL))


_original = StandingEngine.wave


def as_it_was() -> None:
    """Undo what stands in the place of a wave."""
    StandingEngine.wave = _original  # type: ignore[method-assign] # as above


def shares(source: str, folder: str) -> dict[str, Any]:
    """This rank's share of a random model, cut in memory and as transformers loads it from the folder."""
    from nondet.sampling.model import random_config, random_model
    from nondet.sampling.ranks import cut, load

    whole = random_model(random_config(source, 512), torch.bfloat16)
    loaded = load(folder, torch.device("cpu"), dtype=torch.bfloat16)
    ours, theirs = ({name: _local(p) for name, p in m.named_parameters()} for m in (cut(whole), loaded))
    return {
        "names": ours.keys() == theirs.keys(),
        "unlike": [n for n, p in ours.items() if not torch.equal(p.view(torch.int16), theirs[n].view(torch.int16))],
        "strides": [n for n, p in ours.items() if p.stride() != theirs[n].stride()],
        "holding more": [n for n, p in ours.items() if p.untyped_storage().nbytes() != 2 * p.numel()],
        "share": sum(p.numel() for p in ours.values()) / whole.num_parameters(),
    }


def _local(parameter: Any) -> torch.Tensor:
    local: torch.Tensor = parameter.to_local() if hasattr(parameter, "to_local") else parameter
    return local.detach()
