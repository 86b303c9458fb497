"""How much longer a trace may take: asked before each run of both arms that its answer can do without."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

__all__ = ["OutOfTimeError", "Pace"]


class OutOfTimeError(Exception):
    """What is left would not do for another run of both arms."""


class Pace:
    """What runs of both arms take, held against what is left.

    Args:
        left: Seconds that the trace may still take; none: as many as it needs.
        clock: In seconds.
    """

    def __init__(
        self, left: Callable[[], float] = lambda: math.inf, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self._left, self._clock, self._longest = left, clock, 0.0

    def check(self) -> None:
        """Go on only where the longest run of both arms so far would fit once more.

        Raises:
            OutOfTimeError: it would not.
        """
        if self._left() < self._longest:
            raise OutOfTimeError

    @contextmanager
    def timed(self) -> Iterator[None]:
        """A run of both arms."""
        began = self._clock()
        yield
        self._longest = max(self._longest, self._clock() - began)
