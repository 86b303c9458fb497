"""Where completions of one prompt part, and how close the race was there: the tree of completions, with its texts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
import numpy.typing as npt

from nondet.core.traces import Trace
from nondet.sampling.prefixes import Ids, Rows, Span, in_order, spans_of, spread
from nondet.sampling.summary import Branch, Fork, TreeNode

__all__ = ["Group", "Grown", "grow", "text_of"]

_BEFORE, _AFTER = 120, 80
# The "next token" of a completion that ends where others go on.
_END = -1


@dataclass
class Group:
    """Completions with one text: a distinct completion with all its traces (digest -> how often)."""

    tokens: tuple[int, ...]
    count: int = 0
    traces: Counter[str] = field(default_factory=Counter)

    @cached_property
    def ids(self) -> Ids:
        """The tokens as an array."""
        return np.asarray(self.tokens, dtype=np.int32)

    def token(self, index: int) -> int:
        """The token there; one that no model has where it has ended."""
        return self.tokens[index] if index < len(self.tokens) else _END


@dataclass(frozen=True)
class Grown:
    """The tree of completions and what it shows.

    Attributes:
        places: For each group, in the order given, the forks at which it takes its way, rising.
        spread: Largest spread of one token's logprob over traces that share it and everything before it.
    """

    tree: TreeNode
    forks: tuple[Fork, ...]
    places: Sequence[npt.NDArray[np.int64]]
    spread: float


def text_of(tokens: Sequence[int], pieces: Mapping[int, str]) -> str:
    """The tokens' own texts, one after the other."""
    return "".join(pieces.get(t, "") for t in tokens)


def grow(
    groups: Sequence[Group],
    traces: Mapping[str, Trace],
    pieces: Mapping[int, str],
    prompt: str,
    *,
    margins: bool = True,
) -> Grown:
    """The tree of completions, with every fork in it.

    Args:
        groups: Distinct completions, the commonest first.
        prompt: The text before all of them.
        margins: Whether branches get their margins: of drawn tokens they are not what decides.
    """
    return _Grower(groups, traces, pieces, prompt, margins).grow()


class _Grower:
    """`place` counts the texts in their sorted order, `rank` in the order of the groups, `row` the traces."""

    def __init__(
        self,
        groups: Sequence[Group],
        traces: Mapping[str, Trace],
        pieces: Mapping[int, str],
        prompt: str,
        margins: bool,
    ) -> None:
        self.groups, self.pieces, self.prompt = groups, pieces, prompt
        order = in_order([g.ids for g in groups])
        self.ranks = np.array(order, dtype=np.int64)
        ordered = [groups[rank] for rank in order]
        self.spans = spans_of([g.ids for g in ordered])
        # [groups + 1] completions, and rows, before each place
        self.counts = np.cumsum([0, *(g.count for g in ordered)])
        self.rows = np.cumsum([0, *(len(g.traces) for g in ordered)])
        members = [(traces[digest], count) for g in ordered for digest, count in g.traces.items()]
        self.weights = np.array([count for _, count in members], dtype=np.int64)
        nothing = np.zeros(0, dtype=np.float32)
        self.margins = Rows([t.margin_array if margins else nothing for t, _ in members])
        self.logprobs = Rows([t.logprob_array for t, _ in members])

    def grow(self) -> Grown:
        """Fork by fork, from the root; a loop, since forks may nest deeper than Python recurses."""
        root = TreeNode(0, 0, 0, "")
        forks: list[Fork] = []
        places: list[npt.NDArray[np.int64]] = [np.zeros(0, dtype=np.int64)] * len(self.groups)
        none: tuple[int, ...] = ()
        pending = [(root, self.spans, none)] if self.spans is not None else []
        while pending:
            node, span, before = pending.pop()
            node.length, node.count = span.end - span.start, self._count(span)
            node.text = text_of(self._commonest(span).tokens[span.start : span.end], self.pieces)
            if not span.ways:
                places[int(self.ranks[span.first])] = np.array(before, dtype=np.int64)
                continue
            ways = sorted(span.ways, key=lambda way: (-self._count(way), self._commonest(way).token(span.end)))
            forks.append(self._fork(span, ways))
            node.children = [TreeNode(span.end, 0, 0, "") for _ in ways]
            here = (*before, span.end)
            pending += [(child, way, here) for child, way in zip(node.children, ways, strict=True)]
        forks.sort(key=lambda f: (f.index, -sum(b.count for b in f.branches), f.before))
        return Grown(root, tuple(forks), places, spread(self.spans, self.rows, self.logprobs))

    def _count(self, span: Span) -> int:
        return int(self.counts[span.last] - self.counts[span.first])

    def _commonest(self, span: Span) -> Group:
        return self.groups[int(self.ranks[span.first : span.last].min())]

    def _fork(self, span: Span, ways: Sequence[Span]) -> Fork:
        tokens = self._commonest(span).tokens
        # a token may have no text of its own, but hardly four in a row
        before = self.prompt + text_of(tokens[max(0, span.end - 4 * _BEFORE) : span.end], self.pieces)
        return Fork(span.end, before[-_BEFORE:], tuple(self._branch(way) for way in ways))

    def _branch(self, way: Span) -> Branch:
        index, group = way.start, self._commonest(way)
        known, margins = self.margins.at(int(self.rows[way.first]), int(self.rows[way.last]), index)
        each = np.repeat(margins.astype(np.float64), self.weights[known])
        return Branch(
            token_id=group.token(index),
            text=self.pieces.get(group.token(index), ""),
            count=self._count(way),
            continuation=text_of(group.tokens[index + 1 : index + 1 + 4 * _AFTER], self.pieces)[:_AFTER],
            margin_min=float(each.min()) if len(each) else None,
            margin_median=float(np.median(each)) if len(each) else None,
        )
