"""The two orders in which ranks' contributions are added, in plain torch; and what is kept for a process group.

Both are elementwise: the bits of an element depend only on the W numbers that the ranks hold there, not on the
message's size, the element's position, the member that computes it or the run.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

import torch
import torch.distributed as dist

# torch reuses the names of groups: after `destroy_process_group` the next group may have an old one's name and other
# ranks. So a weak reference to the group is kept with the name: another object under the name is another group, and
# what was kept for the old one does not apply. torch.distributed holds its groups' objects until it destroys them, so
# all ranks of a new group find nothing, including those that were in the old one.

T = TypeVar("T")


class ByGroup(Generic[T]):
    """A value for each group, made at its first use: make(the value of the last group with that name, or None)."""

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


def chain(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """((x0 + x1) + x2) + ... over one tensor per rank, each addition rounded to the tensors' own dtype."""
    total = parts[0]
    for part in parts[1:]:
        total = total + part
    return total


def tree(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """Neighbours first, (x0 + x1) + (x2 + x3), each addition rounded to the tensors' own dtype.

    A rank can replace neighbouring leaves by their sum in this order: the bits do not depend on the number of ranks.
    `parts`: 1, 2, 4, 8, ... tensors of equal shape and dtype. Raises ValueError: their number is not a power of two.
    """
    level = list(parts)
    if not level or len(level) & (len(level) - 1):
        raise ValueError(f"a tree takes 1, 2, 4, 8, ... parts, got {len(level)}")
    while len(level) > 1:
        level = [left + right for left, right in zip(level[::2], level[1::2], strict=True)]
    return level[0]
