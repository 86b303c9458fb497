"""Exact arithmetic of one fused step of a matrix unit, and of reduction trees.

A fused step of a tensor core adds k products and the accumulator at once. Products are exact, every term is cut to F
fraction bits below the largest exponent, the integers are added exactly, and the sum is cut to the accumulator's
digits. So the order inside a step is irrelevant, and a long product is a sequence of steps.

A reduction tree describes which partial sums are added to each other. Predicted bits are exact: IEEE additions, fused
multiply-adds and fused steps are computed exactly here, then rounded as the machine rounds. Only NumPy is needed; the
code is vectorized over sums.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

Array = np.ndarray[Any, np.dtype[Any]]

# ---- one fused step


class Format(NamedTuple):
    """A format of operands: digits of its significand, and the exponent of its smallest normal number."""

    digits: int
    smallest: int


FORMATS = {
    "float16": Format(11, -14),
    "bfloat16": Format(8, -126),
    "tf32": Format(11, -126),  # operands are float32, of which the last 13 bits are dropped
    "float8_e4m3fn": Format(4, -6),
    "float8_e5m2": Format(3, -14),
    "float32": Format(24, -126),
    "float64": Format(53, -1022),
}


class Unit(NamedTuple):
    """How a chip adds products of one type."""

    fraction: int  # bits that a term keeps below the largest exponent of its step
    terms: int  # products of one step; a longer instruction is several steps in sequence
    kept: int = 23  # fraction bits of a float32 result; what is beyond them is cut
    floor: int = -133  # the largest exponent of a step is at least this
    measured: str = ""  # where it was compared with the chip; "" if only read from other models
    # each float32 operand is two TF32 numbers, and a step is three (3xTF32 of CUTLASS): see `_wide_step`
    split: bool = False


# Taken from two independent models that agree where both have a chip: microsoft/MMA-Sim (MIT,
# mmasim/simulator/{nv,functions}.py at 16a0188) and north-numerical-computing/MATLAB-tensor-core (BSD-2).
# `lab/emulator_gpu.py` compares the entries with the installed chip. On an H200 (docs/evidence/h200/README.md) 10^6
# sums of each type were predicted under wgmma and under mma.sync, except 19 below 2^-126, which needed a floor of -133
# instead of -132. Lower floors give the same bits. fp8 was not compared under mma.sync. For other chips the floor is an
# assumption.
UNITS: dict[tuple[str, str], Unit] = {
    ("Volta", "float16"): Unit(23, 4),
    **{(chip, dtype): Unit(24, 8) for chip in ("Ampere", "Ada") for dtype in ("float16", "bfloat16")},
    ("Turing", "float16"): Unit(24, 8),
    **{(chip, "tf32"): Unit(24, 4) for chip in ("Ampere", "Ada")},
    **{("Ada", dtype): Unit(13, 16, kept=13) for dtype in ("float8_e4m3fn", "float8_e5m2")},
    **{("Blackwell", dtype): Unit(25, 16) for dtype in ("float16", "bfloat16")},
    ("Blackwell", "tf32"): Unit(25, 8),
    **{("Hopper", dtype): Unit(25, 16, measured="H200") for dtype in ("float16", "bfloat16")},
    ("Hopper", "tf32"): Unit(25, 8, measured="H200"),
    **{("Hopper", dtype): Unit(13, 32, kept=13, measured="H200") for dtype in ("float8_e4m3fn", "float8_e5m2")},
    **{("Blackwell", dtype): Unit(25, 32) for dtype in ("float8_e4m3fn", "float8_e5m2")},
}
CHIPS = {(7, 0): "Volta", (7, 5): "Turing", (8, 0): "Ampere", (8, 9): "Ada", (9, 0): "Hopper", (10, 0): "Blackwell"}


def _parts(x: Array, form: Format) -> tuple[Array, Array]:
    """Finite float64 numbers of a format -> (signed integer significand, exponent): m * 2^(e - digits + 1)."""
    _, exponent = np.frexp(x)
    e = np.maximum(exponent.astype(np.int64) - 1, form.smallest)
    return np.ldexp(x, form.digits - 1 - e).astype(np.int64), e


def _shifted(m: Array, by: Array) -> Array:
    cut = np.abs(m) >> np.minimum(np.maximum(-by, 0), 63)
    return np.where(by >= 0, np.abs(m) << np.minimum(np.maximum(by, 0), 62), cut) * np.sign(m)


def fused_step(a: Array, b: Array, c: Array, dtype: str, unit: Unit) -> Array:
    """a [..., k] times b [..., k], added to c [...] in one step of the unit -> [...] float32.

    The sum of all k + 1 terms is exact, so the order within a step changes nothing.

    Args:
        a, b: float64 that holds numbers of `dtype`, a key of `FORMATS`; for tf32 of float32, which are cut.
        c: The accumulator, float64 that holds float32 numbers.
    """
    if dtype == "tf32":
        a, b = (_cut_to_tf32(x) for x in (a, b))
    form, single = FORMATS[dtype], FORMATS["float32"]
    with np.errstate(invalid="ignore", over="ignore"):
        loose = (a * b).sum(-1) + c
    lost = ~np.isfinite(loose)
    a, b, c = (np.where(np.isfinite(x), x, 0.0) for x in (a, b, c))
    (ma, ea), (mb, eb), (mc, ec) = _parts(a, form), _parts(b, form), _parts(c, single)
    product, exponent, nothing = ma * mb, ea + eb, -(10**6)
    top = np.maximum(np.where(product == 0, nothing, exponent).max(-1), np.where(mc == 0, nothing, ec))
    top = np.maximum(top, unit.floor)
    grid = top - unit.fraction  # everything is a multiple of 2^grid from here on
    total = _shifted(product, exponent - 2 * (form.digits - 1) - grid[..., None]).sum(-1)
    total = total + _shifted(mc, ec - 23 - grid)
    _, digits = np.frexp(total.astype(np.float64))
    lowest = np.maximum(np.maximum(digits + grid - 1, -126) - unit.kept, grid)
    value = np.ldexp(_shifted(total, grid - lowest).astype(np.float64), lowest)
    with np.errstate(over="ignore"):
        return np.where(lost, loose, value).astype(np.float32)


def _cut_to_tf32(x: Array) -> Array:
    whole = np.ascontiguousarray(x, dtype=np.float32).view(np.uint32) & np.uint32(0xFFFFE000)
    return whole.view(np.float32).astype(np.float64)


def fused_chain(a: Array, b: Array, c: Array, dtype: str, unit: Unit) -> Array:
    """Steps in sequence over the last axis of a and b [..., K]; c [...] is the first accumulator."""
    for start in range(0, a.shape[-1], unit.terms):
        stop = start + unit.terms
        c = fused_step(a[..., start:stop], b[..., start:stop], c, dtype, unit).astype(np.float64)
    return c.astype(np.float32)


# ---- roundings


def round_to(x: Array, dtype: str) -> Array:
    """float64 -> float64 that holds the nearest numbers of `dtype`, ties to even, subnormal ones included."""
    if dtype == "float64":
        return x
    if dtype == "float32":
        with np.errstate(over="ignore"):
            return x.astype(np.float32).astype(np.float64)
    form = FORMATS[dtype]
    finite = np.where(np.isfinite(x), x, 0.0)
    _, exponent = np.frexp(finite)
    lowest = np.maximum(exponent.astype(np.int64) - form.digits, form.smallest - form.digits + 1)
    near = np.ldexp(np.rint(np.ldexp(finite, -lowest)), lowest)
    most = {"float16": 65504.0, "bfloat16": float(np.ldexp(255.0, 120))}[dtype]
    return np.where(np.isfinite(x), np.where(np.abs(near) > most, np.copysign(np.inf, x), near), x)


def _two_sum(a: Array, b: Array) -> tuple[Array, Array]:
    """a + b in float64, and its rounding error, exactly (Knuth)."""
    total = a + b
    back = total - a
    return total, (a - (total - back)) + (b - back)


def _odd_sum(a: Array, b: Array) -> Array:
    """a + b in float64, rounded to odd: rounded again, to half as many digits, it equals a + b rounded once."""
    total, rest = _two_sum(a, b)
    even = (total.view(np.int64) & 1) == 0
    toward = np.where(rest > 0, np.inf, -np.inf)
    return np.where(np.isfinite(total) & (rest != 0) & even, np.nextafter(total, toward), total)


def _sum_of_three(a: Array, b: Array, c: Array) -> Array:
    """Rounded once (Boldo and Melquiond 2008)."""
    some, rest = _two_sum(b, c)
    total, more = _two_sum(a, some)
    return np.where(np.isfinite(total), total + _odd_sum(more, rest), total)


def _rest_of_product(x: Array, y: Array) -> Array:
    """x * y minus its rounding in float64, exactly (Dekker): what a fused multiply-add keeps."""

    def halves(a: Array) -> tuple[Array, Array]:
        big = a * (2.0**27 + 1)
        high = big - (big - a)
        return high, a - high

    (a, b), (c, d), rounded = halves(x), halves(y), x * y
    return ((a * c - rounded) + a * d + b * c) + b * d


# ---- reduction trees


class Tree(NamedTuple):
    """Which partial sums are added to each other."""

    leaves: int  # terms, numbered 0 ... leaves - 1 in the operator's own order.
    # children of node `leaves + i`, each a leaf or an earlier node. Two are added; more are one fused step. The last
    # node is the root. A leaf that is in no node is dropped. Without nodes, `root` is the one leaf.
    nodes: tuple[tuple[int, ...], ...]

    @property
    def sizes(self) -> list[int]:
        """Leaves under each leaf (1) and node."""
        return self._folded([1] * self.leaves, sum)

    @property
    def firsts(self) -> list[int]:
        """The smallest leaf under each leaf and node."""
        return self._folded(list(range(self.leaves)), min)

    def _folded(self, each: list[int], join: Callable[[Iterable[int]], int]) -> list[int]:
        for children in self.nodes:
            each.append(join(each[c] for c in children))
        return each

    @property
    def dropped(self) -> list[int]:
        """Leaves that are in no sum."""
        named = {c for children in self.nodes for c in children}
        return [leaf for leaf in range(self.leaves) if leaf not in named] if self.nodes else []

    @property
    def digest(self) -> str:
        """16 hex digits that are equal for two trees if and only if they add the same partial sums."""
        return self._hashes(shape=False)[-1].hex()

    def shapes(self) -> list[bytes]:
        """For each leaf and node a digest of its shape, without its leaves' numbers."""
        return self._hashes(shape=True)

    @functools.lru_cache(16)  # noqa: B019 - a handful of trees
    def _hashes(self, *, shape: bool) -> list[bytes]:
        def of(data: bytes) -> bytes:
            return hashlib.sha256(data).digest()[:8]

        made = [of(b"leaf")] * self.leaves if shape else [of(b"%d" % leaf) for leaf in range(self.leaves)]
        for children in self.nodes:
            made.append(of(b"|".join(sorted(made[c] for c in children))))
        return made


def chain(leaves: int, order: Iterable[int] | None = None, terms: int = 1) -> Tree:
    """One accumulator that takes `terms` leaves at a time, in `order` (default: rising)."""
    left = list(range(leaves) if order is None else order)
    nodes: list[tuple[int, ...]] = []
    while left:
        taken, left = left[:terms], left[terms:]
        if nodes:
            taken.insert(0, leaves + len(nodes) - 1)
        elif len(taken) == 1 and left:
            taken.append(left.pop(0))
        nodes.append(tuple(taken))
    return Tree(leaves, tuple(nodes))


# Attention on a CPU in a short dtype (AVX-512): torch's vectors compute exp(x) as 2 to the whole part minus a
# polynomial, which is 1.07e-4 at 0 (`fexp_u20`, aten/src/ATen/cpu/vec/vec512/vec512_float.h), and the rest of a row one
# by one. A weight is rounded to the dtype, to 1, but the sum that divides the values is of the unrounded weights.
VECTOR_WEIGHTS = "times 1/(sum of K exp(0), in vectors 1 - 896/2^24)"
_OFF_IN_VECTORS, _LANES = 896 / 2**24, 16


class Arithmetic(NamedTuple):
    """How the additions of a tree are done."""

    accumulator: str = "float32"  # dtype of partial sums
    fused: bool = False  # a product is not rounded before it is added to a partial sum (a fused multiply-add)
    first: str = "low"  # which of two products is the accumulator, and so is rounded first: "low" or "high" number
    unit: Unit | None = None  # the unit that adds more than two at once
    dtype: str = ""  # of the operands, for `unit`
    # "", "divided by K", "times 1/K" or `VECTOR_WEIGHTS`, applied to the root; rounded to the accumulator. Where
    # several give the bits that were checked: "divided by K or times 1/K", which only `words` accepts.
    finish: str = ""
    twice: bool = False  # the root is rounded to float32 before a shorter dtype, as torch converts float64
    aside: str = ""  # what it does not hold for, in words

    @property
    def words(self) -> str:
        """ "float32, each product fused into its addition"."""
        how = ", each product fused into its addition" if self.fused else ""
        how += ", of two the later rounded first" if self.fused and self.first == "high" else ""
        fused = f", {self.unit.terms} products a fused step" if self.unit is not None else ""
        if self.unit is not None and self.dtype == "tf32":
            fused += " of 3xTF32" if self.unit.split else " of TF32"
        end = ", the sum rounded to float32 first" if self.twice else ""
        end += self.aside and f", {self.aside}"
        return f"in {self.accumulator}{how}{fused}{self.finish and ', ' + self.finish}{end}"


def predict(tree: Tree, x: Array, y: Array | None = None, arithmetic: Arithmetic | None = None) -> Array:
    """The sums of x [R, K], or of the products x * y, in the order of the tree -> [R] float64 before the last rounding.

    `x`, `y`: float64 that holds the operands' own numbers. Products of float32 and shorter types are exact in it.
    Raises NotImplementedError: a node adds more than two and no unit is given, or joins two partial sums to products.
    """
    how = arithmetic or Arithmetic()
    terms = x if y is None else x * y
    if not tree.nodes:
        return round_to(terms[:, 0], how.accumulator)
    K = tree.leaves
    values = np.empty((K + len(tree.nodes), len(terms)))
    values[:K] = terms.T if how.fused else round_to(terms.T, how.accumulator)
    rests = None
    if how.fused and how.accumulator == "float64" and y is not None:  # all other products are exact in float64
        rests = np.zeros_like(values)
        rests[:K] = _rest_of_product(x, y).T
    with np.errstate(over="ignore", invalid="ignore"):
        for wide, (to, left, right), both, low in _levels(tree):
            for i in wide:
                values[K + i] = _wide_step(tree.nodes[i], values, x, y, how, K)
            if not np.size(to):
                continue
            one, other = values[left], values[right]
            if not how.fused:
                values[to] = round_to(one + other, how.accumulator)
                continue
            # of two products one becomes the accumulator, and is rounded as it goes in
            goes = both & (low == (how.first == "low"))
            if np.any(both):
                one = np.where(goes[..., None], round_to(one, how.accumulator), one)
                other = np.where((both & ~goes)[..., None], round_to(other, how.accumulator), other)
            if rests is None:
                values[to] = round_to(_odd_sum(one, other), how.accumulator)
                continue
            rest = np.where(goes[..., None], 0, rests[left]) + np.where((both & ~goes)[..., None], 0, rests[right])
            values[to] = _sum_of_three(one, other, rest)
    root = values[-1]
    if how.finish == "divided by K":
        root = round_to(root / K, how.accumulator)
    elif how.finish:
        by = K - _OFF_IN_VECTORS * (K - K % _LANES) if how.finish == VECTOR_WEIGHTS else K
        root = round_to(root * round_to(np.array([1.0 / by]), how.accumulator), how.accumulator)
    return round_to(root, "float32") if how.twice else root


@functools.lru_cache(8)
def _levels(tree: Tree) -> list[tuple[list[int], tuple[Any, Any, Any], Any, Any]]:
    """Of nodes of one height: those that add more than two; where other sums go, their left and right terms; whether
    both are leaves; and whether the left one has the lower number.
    """
    height, levels, K = [0] * tree.leaves, list[list[int]](), tree.leaves
    for i, children in enumerate(tree.nodes):
        height.append(1 + max(height[c] for c in children))
        if height[-1] > len(levels):
            levels.append([])
        levels[height[-1] - 1].append(i)
    made = []
    for nodes in levels:
        two = np.array([(K + i, *tree.nodes[i]) for i in nodes if len(tree.nodes[i]) == 2], np.int64).reshape(-1, 3)
        to, left, right = two[0] if len(two) == 1 else two.T  # a single row is a view, which makes chains fast
        wide = [i for i in nodes if len(tree.nodes[i]) > 2]
        made.append((wide, (to, left, right), (left < K) & (right < K), left < right))
    return made


def _wide_step(children: Sequence[int], values: Array, x: Array, y: Array | None, how: Arithmetic, K: int) -> Array:
    sums = [c for c in children if c >= K]
    terms = [c for c in children if c < K]
    if how.unit is None or len(sums) > 1 or len(terms) > how.unit.terms:
        raise NotImplementedError(f"no arithmetic is known that adds {len(children)} at once")
    other = np.ones_like(x[:, terms]) if y is None else y[:, terms]
    total = values[sums[0]] if sums else np.zeros(len(x))
    steps = [(x[:, terms], other)]
    if how.unit.split:  # CUTLASS's FastF32: the rest below the first 11 digits is rounded to 11 digits, half upwards
        (one, small), (two, least) = (_in_two(part) for part in steps[0])
        steps = [(small, two), (one, least), (one, two)]
    for one, two in steps:
        total = fused_step(one, two, total, how.dtype, how.unit).astype(np.float64)
    return total


def _in_two(x: Array) -> tuple[Array, Array]:
    """float32 numbers as TF32 cut towards zero, and the rest plus half of its last digit, because a step cuts it."""
    big = _cut_to_tf32(x)
    rest = np.ascontiguousarray(x - big, dtype=np.float32)
    return big, (rest.view(np.uint32) + np.uint32(0x1000)).view(np.float32).astype(np.float64)


# ---- a tree found by masks


class Mask(NamedTuple):
    """+big at leaf `i`, -big at each of `js` in turn, ones at `ones`, except at i and the current j."""

    i: int
    js: Array
    ones: Array


Survivors = Callable[[Sequence[Mask]], list[Array]]


def find_tree(survivors: Survivors, places: Sequence[int], leaves: int, exact: int, seed: int = 0) -> Tree:
    """The tree of a sum, from the ones that survive where +big and -big cancel (FPRev, USENIX ATC 2025).

    A one that is added to a partial sum with only one of the two is lost. So the ones that survive are those outside
    the smallest subtree that holds both.

    Args:
        survivors: For each mask and each of its js how many ones survive. Counts from `exact` on may be rounded, but
            never decrease. All masks of a round are passed at once.
        places: The leaves that are in the sum.
        exact: Counts below this are never rounded, nor is any other rounded to one of them.
        seed: Chooses which leaves are tested first; the tree is the same for each. A chain takes about 2 K masks, a
            balanced tree K log K.
    """
    rng = np.random.default_rng(seed)
    groups = [np.array(sorted(places))]  # the leaves of a subtree; its parts come later in the list
    parts_of: list[list[int]] = []
    pivots: list[int] = []
    while len(parts_of) < len(groups):
        begun = groups[len(parts_of) :]
        chosen = [int(rng.choice(group)) for group in begun]
        rests = [group[group != pivot] for group, pivot in zip(begun, chosen, strict=True)]
        splits = iter(
            _outwards(survivors, [Mask(p, r, r) for p, r in zip(chosen, rests, strict=True) if len(r)], exact)
        )
        for rest in rests:
            parts = next(splits) if len(rest) else []
            parts_of.append(list(range(len(groups), len(groups) + len(parts))))
            groups += parts
        pivots += chosen
    return _joined(survivors, groups, parts_of, pivots, leaves)


def _outwards(survivors: Survivors, masks: Sequence[Mask], exact: int) -> list[list[Array]]:
    """For each mask its js in parts: the first part is added to leaf i's sum first."""
    found: list[list[Any]] = [[] for _ in masks]
    left = list(zip(found, masks, strict=True))
    while left:
        following: list[tuple[list[Any], Mask]] = []
        for (into, mask), counts in zip(left, survivors([mask for _, mask in left]), strict=True):
            values, many = np.unique(-counts, return_counts=True)
            rising = mask.js[np.argsort(-counts, kind="stable")]
            for value, part in zip((-values).tolist(), np.split(rising, np.cumsum(many)[:-1]), strict=True):
                if value < exact or len(part) == 1 or len(part) == len(mask.js) == len(mask.ones):
                    into.append(part)
                else:  # rounded: tested again with ones on these only, until counts are exact
                    into.append([])
                    following.append((into[-1], Mask(mask.i, part, part)))
        left = following
    return [list(_flat(parts)) for parts in found]


def _flat(parts: Iterable[Any]) -> Iterator[Array]:
    for part in parts:
        yield from _flat(part) if isinstance(part, list) else (part,)


def _joined(
    survivors: Survivors, groups: list[Array], parts_of: list[list[int]], pivots: list[int], leaves: int
) -> Tree:
    """The tree of these subtrees: each is its pivot, to which its parts are added in turn.

    If a part's own root is the step that also takes the pivot, the part is not a partial sum: its children are that
    step's.
    """
    wide = [(t, part) for t, parts in enumerate(parts_of) for part in parts if len(groups[part]) > 1]
    # a part's pivot is added to the last of its own parts in its root
    masks = [Mask(pivots[p], groups[parts_of[p][-1]][:1], np.array([pivots[t]])) for t, p in wide]
    one_step = {part for (_, part), left in zip(wide, survivors(masks), strict=True) if not left[0]}
    nodes: list[tuple[int, ...]] = []
    made: dict[int, int] = {}
    for t in reversed(range(len(groups))):
        now = pivots[t]
        for part in parts_of[t]:
            joined = [now, made[part]]
            if part in one_step:
                joined = [now, *nodes[made[part] - leaves]]
                nodes[made[part] - leaves] = ()
            nodes.append(tuple(joined))
            now = leaves + len(nodes) - 1
        made[t] = now
    return _canonical(leaves, nodes, made[0])


def _canonical(leaves: int, nodes: list[tuple[int, ...]], root: int) -> Tree:
    order, firsts = [root] if root >= leaves else [], list(range(leaves + len(nodes)))
    for at in order:  # which grows
        order += [c for c in nodes[at - leaves] if c >= leaves]
    for at in reversed(order):
        firsts[at] = min(firsts[c] for c in nodes[at - leaves])
    stack, order = order[:1], []
    while stack:
        at = stack.pop()
        order.append(at)
        stack += sorted((c for c in nodes[at - leaves] if c >= leaves), key=firsts.__getitem__)
    number = {at: leaves + i for i, at in enumerate(reversed(order))}
    made = []
    for at in reversed(order):
        children = sorted(nodes[at - leaves], key=firsts.__getitem__)
        made.append(tuple(number.get(c, c) for c in children))
    return Tree(leaves, tuple(made))
