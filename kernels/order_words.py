"""A reduction tree in words: repeated parts are described, and drawn, once."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby, pairwise
from typing import NamedTuple

from nondet.kernels.emulator import Tree

_DEEP = 8  # nested folds that are described
_KINDS = 4  # kinds of parts of one sum that are described
_NUMBERS = 4  # elements that are listed


class _Part(NamedTuple):
    """A node; or (node -1) leaves that one fused step adds to its accumulator."""

    node: int
    leaves: tuple[int, ...] = ()


class _Split(NamedTuple):
    parts: list[_Part]
    binary: bool


class _Reader:
    def __init__(self, tree: Tree) -> None:
        self.tree, self.sizes, self.shapes, self.firsts = tree, tree.sizes, tree.shapes(), tree.firsts

    def children(self, node: int) -> tuple[int, ...]:
        return self.tree.nodes[node - self.tree.leaves] if node >= self.tree.leaves else ()

    def shape(self, part: _Part) -> tuple[bytes, int]:
        return (b"", len(part.leaves)) if part.leaves else (self.shapes[part.node], 0)

    def is_step(self, node: int) -> bool:
        children = self.children(node)
        return len(children) > 2 and all(c < self.tree.leaves for c in children)

    def size(self, part: _Part) -> int:
        return len(part.leaves) or self.sizes[part.node]

    def members(self, part: _Part) -> list[int]:
        found, pending = list(part.leaves), [] if part.leaves else [part.node]
        while pending:
            node = pending.pop()
            if node < self.tree.leaves:
                found.append(node)
            pending += self.children(node)
        return sorted(found)

    def split(self, node: int) -> _Split:
        """A chain down its largest children; or a balanced tree, as far as its parts have equal shapes and layouts."""
        pairs = [node]
        apart = None
        while len({self.shapes[n] for n in pairs}) == 1 and self._is_pair(pairs[0]):
            one, other = self.children(pairs[0])
            lie_apart = self.members(_Part(one))[-1] < self.firsts[other]
            if self.sizes[one] > 1 and apart not in (None, lie_apart):
                break
            apart = lie_apart if apart is None else apart
            pairs = [c for n in pairs for c in self.children(n)]
        if len(pairs) > 1:
            return _Split([_Part(n) for n in pairs], binary=True)
        parts: list[_Part] = []
        while not self._is_pair(node) and (children := self.children(node)) and not self.is_step(node):
            spine = max(children, key=lambda c: (self.sizes[c], -self.firsts[c]))
            others = tuple(c for c in children if c != spine)
            wide = len(children) > 2 and all(c < self.tree.leaves for c in others)
            parts += [_Part(-1, others)] if wide else [_Part(c) for c in reversed(others)]
            node = spine
            if self.sizes[spine] < 2 * self.size(parts[-1]):  # not a partial sum of a chain: a part like the other
                break
        else:
            if self._is_pair(node):
                one, node = self.children(node)
                parts += [_Part(node), _Part(one)]
                return _Split(parts[::-1], binary=False)
        # the first step of a chain has no accumulator yet; one whose sum is added afterwards is a part by itself
        parts.append(_Part(-1, self.children(node)) if parts[-1].leaves and self.is_step(node) else _Part(node))
        return _Split(sorted(parts[-2:], key=self._first) + parts[-3::-1], binary=False)

    def _first(self, part: _Part) -> int:
        return min(part.leaves) if part.leaves else self.firsts[part.node]

    def _is_pair(self, node: int) -> bool:
        children = self.children(node)
        return len(children) == 2 and self.shapes[children[0]] == self.shapes[children[1]]

    def layout(self, parts: list[_Part]) -> str:
        """How the leaves of equal parts lie: "lanes of stride 8", "splits of 512"."""
        lists = [self.members(part) for part in parts]
        steps = {b - a for leaves in lists for a, b in pairwise(leaves)}
        stride = f" of stride {min(steps):,}" if len(steps) == 1 and steps != {1} else ""
        if all(a[-1] < b[0] for a, b in pairwise(sorted(lists))):
            return f"splits of {len(lists[0]):,}{stride}"
        return f"lanes{stride}" if stride else f"interleaved parts of {len(lists[0]):,}"

    def in_order(self, parts: list[_Part], binary: bool = False) -> str:
        """The order of the parts: "" where they come as numbered (in a binary tree, neighbour with neighbour)."""
        firsts = [self._first(part) for part in parts]
        if firsts == sorted(firsts):
            return ""
        if binary:
            halves = [0]
            while len(halves) < len(firsts):
                halves = [2 * at for at in halves] + [2 * at + 1 for at in halves]
            return " by halves" if firsts == [sorted(firsts)[at] for at in halves] else f", of {_listed(firsts)}"
        if sorted(firsts, reverse=True) in (firsts, [*firsts[1::-1], *firsts[2:]]):  # the first two commute
            return ", the last first"
        for ring in (firsts, [*firsts[1::-1], *firsts[2:]]) if len(firsts) > _NUMBERS else ():
            for way, turn in (("on", ring), ("down", ring[::-1])):
                at = turn.index(min(turn))
                if turn[at:] + turn[:at] == sorted(firsts):
                    return f", from {ring[0]:,} {way} and round"
        swapped = [firsts[i ^ 1] if i ^ 1 < len(firsts) else firsts[i] for i in range(len(firsts))]
        near = [sorted(firsts[i : i + 2]) for i in range(0, len(firsts), 2)]
        paired = swapped == sorted(firsts) or [n for two in near for n in two] == sorted(firsts)
        if paired and len(firsts) > _NUMBERS:
            return ", of each two the second first"
        return f", in the order {_listed(firsts)}"

    def is_described(self, part: _Part, depth: int = 0) -> bool:
        """Whether the words determine the part: it is regular, and all of it is described."""
        if part.leaves or self.size(part) == 1 or self.is_step(part.node):
            return bool(part.leaves) or self.size(part) == 1 or depth < _DEEP
        split, start = self.split(part.node), 0
        runs = [list(run) for _, run in groupby(split.parts, key=self.shape)]
        place = {leaf: at for at, leaf in enumerate(self.members(part))}
        for i, run in enumerate(runs):
            lists = sorted([place[leaf] for leaf in self.members(one)] for one in run)
            size, count = len(lists[0]), len(run)
            stop = start + size * count
            splits = [list(range(at, at + size)) for at in range(start, stop, size)]
            order = self.in_order(run, split.binary and count > 2)
            if lists not in (splits, [list(range(start + at, stop, count)) for at in range(count)]):
                return False
            if "..." in order or "each two" in order or (order and i and count == 2):
                return False
            if (size > 1 and len({self.ranked(one) for one in run}) > 1) or not self.is_described(run[0], depth + 1):
                return False
            start = stop
        return len(runs) <= _KINDS and depth < _DEEP

    def ranked(self, part: _Part) -> str:
        """A digest of a part, its leaves renumbered from 0 in rising order."""
        pending, nodes = [] if part.leaves else [part.node], []
        for node in pending:  # which grows
            nodes += [node] if node >= self.tree.leaves else []
            pending += self.children(node)
        number = {c: at for at, c in enumerate([*self.members(part), *sorted(nodes)])}
        made = tuple(tuple(number[c] for c in self.children(node)) for node in sorted(nodes))
        return Tree(self.size(part), made).digest


def _listed(numbers: list[int]) -> str:
    shown = ", ".join(f"{n:,}" for n in numbers[:_NUMBERS])
    return shown if len(numbers) <= _NUMBERS else f"{shown}, ... {numbers[-1]:,}"


def folded(tree: Tree) -> list[tuple[int, str]]:
    """(depth, line) from the root down: only the first of equally shaped parts is drawn."""
    reader = _Reader(tree)
    lines = list(_lines(reader, _Part(tree.leaves + len(tree.nodes) - 1 if tree.nodes else 0), 0))
    dropped = tree.dropped
    return [*lines, (0, f"not added: {len(dropped):,} of {tree.leaves:,}: {_listed(dropped)}")] if dropped else lines


def _lines(reader: _Reader, part: _Part, depth: int) -> Iterator[tuple[int, str]]:
    if part.leaves or reader.is_step(part.node):
        yield depth, f"one fused step of {reader.size(part):,}: {_listed(reader.members(part))}"
        return
    if reader.size(part) == 1:
        yield depth, f"element {reader.members(part)[0]:,}"
        return
    split = reader.split(part.node)
    kinds = [list(run) for _, run in groupby(split.parts, key=reader.shape)]
    if len(kinds) == 1:
        yield depth, _alike(reader, split)
        if reader.size(kinds[0][0]) > 1 and reader.shape(kinds[0][0])[1] == 0:
            part, deep = kinds[0][0], depth + 1 < _DEEP
            yield from _lines(reader, part, depth + 1) if deep else [(depth + 1, f"a sum of {reader.size(part):,}")]
        return
    whole = reader.size(kinds[0][0]) == 1 or reader.shape(kinds[0][0])[1]  # a chain of elements goes on as this sum
    count = len(split.parts) - (len(kinds[0]) - 1 if whole else 0)
    yield depth, f"{count:,} parts, added in order"
    for i, run in enumerate(kinds[:_KINDS]):
        inner = list(_lines(reader, run[0], depth + 1)) if depth + 1 < _DEEP else []
        if len(run) > 1:
            alone = reader.size(run[0]) == 1 or reader.shape(run[0])[1]
            own = [(depth + 1, _alike(reader, _Split(run, binary=False)))]
            inner = own + [(d + 1, line) for d, line in inner if not alone]
        inner = inner or [(depth + 1, f"a sum of {reader.size(run[0]):,}")]
        yield inner[0][0], f"{'then' if i else 'first'} {inner[0][1]}"
        yield from inner[1:]
    if len(kinds) > _KINDS:
        yield depth + 1, f"and {sum(map(len, kinds[_KINDS:])):,} more"


def _alike(reader: _Reader, split: _Split) -> str:
    parts, count = split.parts, len(split.parts)
    step = reader.shape(parts[0])[1]
    order = reader.in_order(parts, split.binary) if count > 2 else ""
    how = f"a binary tree{order}" if split.binary and count > 2 else f"added in order{order}"
    if step:
        return f"one chain of {count:,} groups of {step}{order}"
    if reader.size(parts[0]) > 1:
        return f"{count:,} {reader.layout(parts)}, {how if count > 2 else 'added'}"
    leaves = [reader.members(part)[0] for part in parts]
    steps = {b - a for a, b in pairwise(sorted(leaves))}
    stride = f" of stride {min(steps):,}" if len(steps) == 1 and steps != {1} else ""
    if split.binary and count > 2:
        return f"a binary tree over {count:,}{stride}{order}: {_listed(leaves)}"
    return f"{f'one chain of {count:,}' if count > 2 else 'a pair'}{stride}{order}: {_listed(leaves)}"


def words(tree: Tree) -> str:
    """One line: "8 lanes of stride 8, added in order; each one chain of 128 of stride 8".

    No two trees share one: where the words leave something out, the tree's digest is added.
    """
    lines = folded(tree)
    said = [
        line.partition(":")[0] if "chain of" in line or "pair" in line or "tree" in line else line for _, line in lines
    ]
    line = "; each ".join(said) if all(b == a + 1 for (a, _), (b, _) in pairwise(lines)) else "; ".join(said)
    dropped = tree.dropped
    listed = len(dropped) <= _NUMBERS or dropped == list(range(dropped[0], dropped[-1] + 1))
    root = _Part(tree.leaves + len(tree.nodes) - 1 if tree.nodes else 0)
    return line if listed and _Reader(tree).is_described(root) else f"{line} (digest {tree.digest[:8]})"


def compared(one: Tree, other: Tree) -> str:
    """Two trees over the same leaves: that they are equal, or the first pair of elements that they add elsewhere."""
    if one.digest == other.digest:
        return "the same reduction tree"
    if one.leaves != other.leaves:
        return f"trees of {one.leaves:,} and {other.leaves:,} elements"
    if one.dropped != other.dropped:
        return f"one leaves out {len(one.dropped):,} elements, the other {len(other.dropped):,}"
    for leaf in range(min(one.leaves, 64)):
        first, second = _meetings(one, leaf), _meetings(other, leaf)
        for at in range(one.leaves):
            if first[at] != second[at]:
                return f"elements {leaf:,} and {at:,} meet in a sum of {first[at]:,}, and of {second[at]:,}"
    return "other partial sums meet"


def _meetings(tree: Tree, leaf: int) -> list[int]:
    """For each leaf the number of leaves of the smallest sum that has both."""
    reader, found, above = _Reader(tree), [1] * tree.leaves, [leaf]
    for i, children in enumerate(tree.nodes):
        above += [tree.leaves + i] if above[-1] in children else []
    for node in reversed(above[1:]):
        for member in reader.members(_Part(node)):
            found[member] = reader.sizes[node]
    found[leaf] = 1
    return found
