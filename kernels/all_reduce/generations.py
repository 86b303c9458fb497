"""What is kept for a process group, for as long as it is that very group.

torch gives the names of groups again: after `destroy_process_group` the next group may have an old one's name and other
ranks. So beside the name stands a weak reference to the group that was met: another object under the name is another
group, and what was kept for the old one says nothing of it. torch.distributed holds its groups' objects until it
destroys them, so all ranks of a new group find nothing, also those that were in the old one.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Generic, TypeVar

import torch.distributed as dist

__all__ = ["ByGroup"]

T = TypeVar("T")


class ByGroup(Generic[T]):
    """A value for each group, made when the group is met first.

    Args:
        make: Takes the value of the last group that had the name, None for the first, and makes the new one's.
    """

    def __init__(self, make: Callable[[T | None], T]) -> None:
        self._make = make
        self._kept: dict[str, tuple[weakref.ref[dist.ProcessGroup], T]] = {}

    def of(self, group: dist.ProcessGroup) -> T:
        """The group's own value."""
        kept = self._kept.get(group.group_name)
        if kept is not None and kept[0]() is group:
            return kept[1]
        value = self._make(None if kept is None else kept[1])
        self._kept[group.group_name] = weakref.ref(group), value
        return value

    def clear(self) -> None:
        """Forget all."""
        self._kept.clear()
