"""The two orders in which ranks' contributions are added, in plain torch; and what is kept for a process group.

Both are elementwise: the bits of an element follow from the W numbers that the ranks hold there, and from nothing else:
not from the message's size, the element's place in it, the member that computes it or the run.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

import torch
import torch.distributed as dist

# What is kept for a process group, for as long as it is that very group.
#
# torch gives the names of groups again: after `destroy_process_group` the next group may have an old one's name and
# other ranks. So beside the name stands a weak reference to the group that was met: another object under the name is
# another group, and what was kept for the old one says nothing of it. torch.distributed holds its groups' objects
# until it destroys them, so all ranks of a new group find nothing, also those that were in the old one.

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


def chain(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """((x0 + x1) + x2) + ..., rank by rank, each addition rounded to the tensors' own dtype.

    Args:
        parts: One tensor a rank, in the order of ranks; equal shapes and dtypes.
    """
    total = parts[0]
    for part in parts[1:]:
        total = total + part
    return total


def tree(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """Neighbours first, (x0 + x1) + (x2 + x3), each addition rounded to the tensors' own dtype.

    A rank that holds the sums of neighbouring leaves, added in this order, can stand for them: the bits are those of
    the leaves, however many ranks they are spread over.

    Args:
        parts: 1, 2, 4, 8, ... tensors of equal shape and dtype.

    Raises:
        ValueError: their number is no power of two.
    """
    level = list(parts)
    if not level or len(level) & (len(level) - 1):
        raise ValueError(f"a tree takes 1, 2, 4, 8, ... parts, got {len(level)}")
    while len(level) > 1:
        level = [left + right for left, right in zip(level[::2], level[1::2], strict=True)]
    return level[0]
