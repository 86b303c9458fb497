"""What is left of the seconds that a diagnosis was given with --within."""

from __future__ import annotations

import math
import time
from collections.abc import Callable

__all__ = ["Budget"]


class Budget:
    """Seconds for a whole diagnosis, those included that an earlier process spent on it.

    Args:
        within_s: 0.0: as many as it takes.
        spent_s: What went by before.
        clock: In seconds.
    """

    def __init__(
        self, within_s: float = 0.0, spent_s: float = 0.0, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self.within_s, self._clock = within_s, clock
        self._began = clock() - spent_s

    @property
    def spent(self) -> float:
        """What went by."""
        return self._clock() - self._began

    @property
    def left(self) -> float:
        """What may still go by; below 0 where it was overrun."""
        return self.within_s - self.spent if self.within_s else math.inf

    def lacks(self, part: str, needs_s: float, keep_s: float = 0.0) -> str:
        """Why a part is left out; "" where it fits.

        Args:
            part: What takes the time, as a noun.
            needs_s: What it takes at least.
            keep_s: What later parts are to find left.
        """
        left = self.left - keep_s
        if left >= needs_s:
            return ""
        kept = f" beside {keep_s:.0f} s for what follows" if keep_s else ""
        return (
            f"{part} would take {needs_s:.0f} s or more, and of {self.within_s:.0f} s {max(0.0, left):.0f} s are "
            f"left{kept} (--within 0 asks all)"
        )
