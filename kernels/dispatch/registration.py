"""Putting functions under torch's operators, and taking them away, while other threads compute.

torch's dispatcher keeps a table of kernels for each operator and does not lock it for callers. So nothing is
registered or taken away while a block is entered, whatever else changes: the functions look up what is on. They are
put there when the first block (or hook) comes, and taken away when the last one goes, so that stock costs nothing
again. What was taken away is kept alive for a number of such turns, since a thread may still be inside.

That leaves one narrow place, which is torch's own: its table is written without a lock, a few nanoseconds an operator,
when the first block is entered and when the last one is left. Hold a block around threads that enter and leave others.
What a thread is in the midst of when functions are put there ends as it began, in torch's kernels: nothing is on yet
(`nondet.kernels.dispatch.block._GRACE`).
"""

from __future__ import annotations

import threading
import warnings
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

import torch

__all__ = ["Registration"]

_TURNS_KEPT = 8  # of some 1,000 handles, a few hundred bytes each


class Registration:
    """A set of functions under operators, there or not.

    Args:
        make: Gives the functions, (operator with namespace and overload, dispatch key) -> function; called once, at
            the first use, with nothing registered.
    """

    def __init__(self, make: Callable[[], Mapping[tuple[str, str], Callable[..., Any]]]) -> None:
        self._make = make
        self._functions: Mapping[tuple[str, str], Callable[..., Any]] | None = None
        self._libraries: list[torch.library.Library] = []
        self._users = self._operators = 0
        self._kept: deque[list[Any]] = deque(maxlen=_TURNS_KEPT)

    def prepare(self) -> None:
        """Make the functions, while the kernels that are registered are still torch's own."""
        if self._functions is None:
            self._operators = len(torch._C._dispatch_get_all_op_names())
            self._functions = self._make()

    def enter(self) -> None:
        """One more user; the first puts the functions there. Not for two threads at once."""
        if not self._users:
            self.prepare()
            operators = len(torch._C._dispatch_get_all_op_names())
            if operators != self._operators:  # a library that was loaded since has brought some
                self._functions, self._operators = self._make(), operators
            try:
                self._put()
            except BaseException:
                self._take_away()
                raise
        self._users += 1

    def leave(self) -> None:
        """One user less; the last takes the functions away."""
        self._users -= 1
        if not self._users:
            self._take_away()

    def _put(self) -> None:
        functions = self._functions or {}
        libraries: dict[str, torch.library.Library] = {}
        with warnings.catch_warnings():
            # torch says, once, that an operator is overridden: that is what this is for
            warnings.filterwarnings("ignore", message="Warning only once for all operators", category=UserWarning)
            for (qualified, key), function in functions.items():
                namespace, _, name = qualified.partition("::")
                library = libraries.get(namespace)
                if library is None:
                    library = libraries[namespace] = torch.library.Library(namespace, "IMPL")
                    self._libraries.append(library)
                library.impl(name, function, key, with_keyset=True, allow_override=True)

    def _take_away(self) -> None:
        if not self._libraries:
            return
        if threading.active_count() > 1:
            kept = []  # what a thread may be inside of, or on its way into
            for qualified, key in self._functions or {}:
                try:
                    place = torch._C._dispatch_key_parse(key)
                    kept.append(torch._C._dispatch_get_computed_kernel_for_dispatch_key(qualified, place))
                except RuntimeError:
                    continue
            self._kept.append(kept)
        for library in self._libraries:
            library._destroy()
        self._libraries.clear()
