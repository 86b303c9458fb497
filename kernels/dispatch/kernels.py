"""The batch-invariant kernels of one device type, as `batch_invariant()` calls them, and how a call is declined."""

from __future__ import annotations

import functools
from typing import Any

import torch

from nondet.core.registry import declared, load_object

__all__ = ["DTYPES", "Kernels", "Leave", "kernels_for", "require"]

DTYPES = (torch.float16, torch.bfloat16, torch.float32)


class Leave(Exception):  # noqa: N818 - a decision, not an error
    """This call is left to the original kernel; the message is the reason, "" where the dtype says it all."""


class Kernels:
    """The batch-invariant kernels of one device type, by the names that declarations give them.

    `kernels.softmax` is the very function that the registry has for softmax's invariant implementation on the device,
    with the operator's signature (`nondet.kernels.reference`); `kernels.mm` is an entry of matmul's declaration. Each
    is imported at its first use.
    """

    def __init__(self, device: str) -> None:
        self.device = device
        self._targets: dict[str, str | None] = {}
        for operator in declared().values():
            chosen = operator.invariant_on(device)
            self._targets[operator.name] = chosen.target(device) if chosen else None
            entries = chosen.entries if chosen else {}
            self._targets |= {name: targets.get(device) for name, targets in entries.items()}

    def __getattr__(self, name: str) -> Any:
        """Called for names that are not set yet.

        Raises:
            AttributeError: no declaration has that name.
            Leave: it is declared, and has no such kernel on this device.
        """
        if name not in self._targets:
            raise AttributeError(f"no declared operator or entry is called {name!r}")
        target = self._targets[name]
        if target is None:
            raise Leave(f"no {name} on {self.device}")
        self.__dict__[name] = load_object(target)
        return self.__dict__[name]


@functools.cache
def kernels_for(device: str) -> Kernels:
    """The kernels of "cpu" or "cuda"."""
    return Kernels(device)


def require(*tensors: torch.Tensor) -> None:
    """One floating dtype that the kernels have, or `Leave`."""
    dtype = tensors[0].dtype
    if dtype not in DTYPES:
        raise Leave
    for x in tensors[1:]:
        if x.dtype != dtype:
            raise Leave
