"""The names of the device kernels that each variant of a case launched, from one torch.profiler session a case."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch

__all__ = ["VariantProfile", "profile_variants"]

_MARK = "nondet-variant-"


class VariantProfile:
    """Marks variants while they run, and says afterwards which kernels each launched."""

    def __init__(self, session: Any = None) -> None:
        self._session = session
        self._marked: list[int] = []

    def variant(self, index: int) -> AbstractContextManager[Any]:
        """Run one variant inside this."""
        self._marked.append(index)
        if self._session is None:
            return nullcontext()
        return torch.profiler.record_function(f"{_MARK}{index}")

    def kernels(self, variants: int) -> list[list[str]]:
        """Distinct kernel names of each variant, in launch order; [] where nothing was profiled."""
        if self._session is None:
            return []
        names: dict[int, dict[str, None]] = {i: {} for i in self._marked}
        for event in self._session.events():
            if not event.kernels:
                continue
            owner = event
            while owner is not None and not owner.name.startswith(_MARK):
                owner = owner.cpu_parent
            if owner is not None:
                for kernel in event.kernels:
                    if kernel.name.startswith(_MARK):
                        continue  # the mark itself, as the profiler draws it on the device's time line
                    names[int(owner.name.removeprefix(_MARK))].setdefault(kernel.name)
        # a variant with many results was marked once, at its first index
        out: list[list[str]] = []
        for i in range(variants):
            out.append(list(names[i]) if i in names else out[-1])
        return out


@contextmanager
def profile_variants(device: str) -> Iterator[VariantProfile]:
    """Profile what runs inside if the device is "cuda"; else a no-op: the launchers' own notes name what ran."""
    if device != "cuda":
        yield VariantProfile()
        return
    torch.cuda.synchronize()
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities, acc_events=True) as session:
        profile = VariantProfile(session)
        yield profile
        torch.cuda.synchronize()
