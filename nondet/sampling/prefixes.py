"""The tree of distinct completions, from their order: sorted, those that share a beginning stand side by side.

So a node of the tree is a range of the sorted texts, and its figures are those of a range of rows of flat arrays: a
thousand texts that part one after the other take a thousand steps, and no step looks at single tokens in Python.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np
import numpy.typing as npt

__all__ = ["Ids", "Rows", "Span", "in_order", "shared_length", "spans_of", "spread"]

Ids = npt.NDArray[np.int32]
# Values gathered at once where traces are compared: 8 MB of places.
_GATHERED = 1_000_000


@dataclass
class Span:
    """Tokens `start` to `end` that the texts `first` to `last` (exclusive, in sorted order) have in common.

    Attributes:
        ways: Where they part at `end`, the span of each way on; a text that ends there has one of its own.
    """

    first: int
    last: int
    start: int
    end: int
    ways: list[Span] = field(default_factory=list)


class Rows:
    """One array of float32 a trace, as one flat array: the values of a range of traces at one place are one look.

    Args:
        members: [T] float32 of each trace, [0] where it has none.
    """

    def __init__(self, members: Sequence[npt.NDArray[np.float32]]) -> None:
        self.lengths = np.array([len(m) for m in members], dtype=np.int64)
        self._starts = np.cumsum(self.lengths) - self.lengths
        self._flat = np.concatenate(members) if members else np.zeros(0, dtype=np.float32)

    def at(self, first: int, last: int, place: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float32]]:
        """Which of the traces `first` to `last` have a finite value at `place`, and the values."""
        known = first + np.flatnonzero(self.lengths[first:last] > place)
        values = self._flat[self._starts[known] + place]
        finite = np.isfinite(values)
        return known[finite], values[finite]

    def blocks(self, first: int, last: int, start: int, end: int) -> Iterator[npt.NDArray[np.float32]]:
        """[rows, end - start] of the traces that have any values, a bounded number at a time."""
        known = first + np.flatnonzero(self.lengths[first:last] >= end)
        step = max(1, _GATHERED // (end - start))
        places = np.arange(start, end)
        for at in range(0, len(known), step):
            yield self._flat[self._starts[known[at : at + step], None] + places]


def shared_length(one: Ids, other: Ids) -> int:
    """Index of the first token that not both have, or have alike."""
    length = min(len(one), len(other))
    differ = one[:length] != other[:length]
    at = int(differ.argmax()) if length else 0
    return at if length and differ[at] else length


def in_order(texts: Sequence[Ids]) -> list[int]:
    """Indices of the texts, sorted by their tokens; a text stands before those that go on from it."""
    # ids are below 2^31, so that bytes compare as the numbers do
    keys = [text.astype(">u4").tobytes() for text in texts]
    return sorted(range(len(texts)), key=keys.__getitem__)


def spans_of(texts: Sequence[Ids]) -> Span | None:
    """The root of the tree of distinct texts that are in order; None of no texts.

    A loop: forks may nest deeper than Python recurses.
    """
    if not texts:
        return None
    shared = np.array([shared_length(a, b) for a, b in pairwise(texts)], dtype=np.int64)
    root = Span(0, len(texts), 0, 0)
    pending = [root]
    while pending:
        span = pending.pop()
        if span.last - span.first == 1:
            span.end = len(texts[span.first])
            continue
        here = shared[span.first : span.last - 1]
        span.end = int(here.min())
        cuts = span.first + 1 + np.flatnonzero(here == span.end)
        edges = [span.first, *cuts.tolist(), span.last]
        span.ways = [Span(a, b, span.end, span.end) for a, b in pairwise(edges)]
        pending += span.ways
    return root


def spread(root: Span | None, first_trace: npt.NDArray[np.int64], logprobs: Rows) -> float:
    """Largest spread of one token's logprob over traces that share it and everything before it.

    Args:
        first_trace: [texts + 1] where the traces of each text, in the texts' order, begin among the rows.
        logprobs: Of the traces; what is not finite is left out.
    """
    widest = 0.0
    pending = [root] if root is not None else []
    while pending:
        span = pending.pop()
        pending += span.ways
        first, last = int(first_trace[span.first]), int(first_trace[span.last])
        if last - first < 2 or span.end == span.start:
            continue
        low = np.full(span.end - span.start, np.inf, dtype=np.float32)
        high = -low
        for block in logprobs.blocks(first, last, span.start, span.end):
            finite = np.isfinite(block)
            np.minimum(low, np.where(finite, block, np.inf).min(axis=0), out=low)
            np.maximum(high, np.where(finite, block, -np.inf).max(axis=0), out=high)
        known = high >= low
        widest = max(widest, float((high[known].astype(np.float64) - low[known]).max(initial=0.0)))
    return widest
