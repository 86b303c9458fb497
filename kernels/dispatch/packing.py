"""A model's linear weights kept in the layout that a CPU's library computes in, for as long as a block is entered."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch

__all__ = ["packing"]

# Of the memory that is free when packing begins, the share that copies may take: the step needs some, too.
_SHARE = 0.5


def packing(model: Any, most: int | None) -> AbstractContextManager[int]:
    """See `nondet.kernels.matmul.cpu_onednn.packed_weights`.

    Args:
        most: Bytes of copies; None: half of what the machine has free now, and nothing where it does not say.
    """
    from nondet.kernels.matmul.cpu_onednn import packed_weights

    return packed_weights(_linear_weights(model), int(_SHARE * _free()) if most is None else most)


def _linear_weights(model: Any) -> Iterator[tuple[torch.Tensor, bool]]:
    for module in model.modules():
        if type(module) is torch.nn.Linear:
            yield module.weight, module.bias is not None


def _free() -> int:
    """Bytes that can be had without swapping, as Linux says, in the container that this runs in; 0 elsewhere."""
    try:
        with open("/proc/meminfo", encoding="ascii") as lines:
            fields = dict(line.split(":", 1) for line in lines)
        free = 1024 * int(fields["MemAvailable"].split()[0])
    except (OSError, KeyError, ValueError):
        return 0
    try:
        limit, used = (Path("/sys/fs/cgroup", name).read_text().strip() for name in ("memory.max", "memory.current"))
        return free if limit == "max" else max(0, min(free, int(limit) - int(used)))
    except (OSError, ValueError):  # no container, or one of an older kind
        return free
