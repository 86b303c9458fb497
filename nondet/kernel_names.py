"""The names of the device kernels that each variant of a case launched, from one profiler session a case.

Only device activity is recorded, and read straight from the profiler's own list: matching kernels to operators through
the CPU's call stack, as `torch.profiler` does, takes longer than the measurement. Instead a kernel that nothing else
launches marks the beginning and the end of each variant, and what ran between two marks is the variant's.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch

__all__ = ["VariantProfile", "between_marks", "launched_elsewhere", "profile_variants"]

# torch.nextafter is compiled into torch (no first-call compilation), and no probe or kernel of ours computes it.
_MARK = "nextafter"
# Copies and fills that belong to the allocator or the launcher, not to the arithmetic.
_NOT_KERNELS = ("Memcpy", "Memset")


class VariantProfile:
    """Marks variants while they run, and says afterwards which kernels each launched."""

    def __init__(self, session: Any = None, mark: torch.Tensor | None = None) -> None:
        self._session, self._mark = session, mark
        self._marked: list[int] = []
        self._elsewhere: dict[int, list[str]] = {}

    def variant(self, index: int) -> AbstractContextManager[Any]:
        """Run one variant inside this."""
        global _under_way
        self._marked.append(index)
        _under_way = self
        return nullcontext() if self._mark is None else _between(self._mark)

    def add_elsewhere(self, names: Sequence[str]) -> None:
        """See `launched_elsewhere`."""
        self._elsewhere.setdefault(self._marked[-1], list(names))

    def kernels(self, variants: int) -> list[list[str]]:
        """Distinct kernel names of each variant, in launch order; [] where nothing was profiled."""
        if self._elsewhere:
            return [self._elsewhere.get(i, []) for i in range(variants)]
        if self._session is None:
            return []
        events = [
            (event.start_ns(), event.name())
            for event in self._session.kineto_results.events()
            if event.device_type() == torch.autograd.DeviceType.CUDA
        ]
        stretches = between_marks([name for _, name in sorted(events)])
        if len(stretches) != len(self._marked):
            raise RuntimeError(f"the profiler saw {len(stretches)} of {len(self._marked)} variants")
        # a variant with many results was marked once, at its first index
        by_index = dict(zip(self._marked, stretches, strict=True))
        out: list[list[str]] = []
        for i in range(variants):
            out.append(by_index[i] if i in by_index else out[-1])
        return out


_under_way: VariantProfile | None = None


def launched_elsewhere(names: Sequence[str]) -> None:
    """Say what the variant that is being computed launched in other processes, whose kernels no profiler here sees."""
    if names and _under_way is not None:
        _under_way.add_elsewhere(names)


@contextmanager
def _between(mark: torch.Tensor) -> Iterator[None]:
    torch.nextafter(mark, mark)
    yield
    torch.nextafter(mark, mark)


def between_marks(names: Sequence[str]) -> list[list[str]]:
    """Kernel names in launch order -> the distinct ones of each marked stretch; others are left out."""
    stretches: list[dict[str, None]] = []
    inside = False
    for name in names:
        if _MARK in name:
            inside = not inside
            if inside:
                stretches.append({})
        elif inside and not name.startswith(_NOT_KERNELS):
            stretches[-1].setdefault(name)
    return [list(stretch) for stretch in stretches]


@contextmanager
def profile_variants(device: str) -> Iterator[VariantProfile]:
    """Profile what runs inside if the device is "cuda"; else a no-op: the launchers' own notes name what ran."""
    if device != "cuda":
        yield VariantProfile()
        return
    mark = torch.ones(1, device="cuda")
    torch.cuda.synchronize()
    # torch.profiler.profile would first import torch's compiler, nine hundred modules that nobody here uses
    with torch.autograd.profiler.profile(use_cpu=False, use_device="cuda", use_kineto=True) as session:
        yield VariantProfile(session, mark)
        torch.cuda.synchronize()
