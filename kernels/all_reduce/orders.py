"""The two orders in which ranks' contributions are added here, written down in plain torch.

Both are elementwise: the bits of an element follow from the W numbers that the ranks hold there, and from nothing else:
not from the message's size, the element's place in it, the member that computes it or the run.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

__all__ = ["ORDERS", "chain", "tree"]


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


ORDERS = {"chain": chain, "tree": tree}
