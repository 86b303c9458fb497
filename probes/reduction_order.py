"""The order in which a sum is added: its reduction tree, found by masks and proven by predicting bits.

Where +big and -big meet, what was added to either before is lost: how much of the rest survives gives the size of the
smallest partial sum that holds both (FPRev, USENIX ATC 2025). The tree is then proven if an exact emulator
(`nondet.kernels.emulator`) that adds numbers in that order gives exactly the implementation's bits, in all sums tested.
Otherwise the row lists the tree as unproven, with the sums that failed: the function may not be a sum, or may round
where no tree shows it. Masks are columns of the weight, or one row of x at a time, since the order may depend on M.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import torch

from nondet.core.compare import bits, identical
from nondet.core.inputs import generator, make, product_operands
from nondet.core.measure import Trial
from nondet.errors import reason_of
from nondet.kernels import emulator
from nondet.kernels.emulator import Arithmetic, Array, Mask, Tree
from nondet.kernels.order_words import compared, folded, words
from nondet.probes import base
from nondet.probes.additions import in_parts
from nondet.probes.base import Case, Classes, Operator, Options, Probe, dtypes, require_memory, weight_scale
from nondet.ranks.group import shared_gpus
from nondet.ranks.operators import Message

_WIDTHS = {"sum": (1000, 4096), "mean": (1000,)}
_LAYERS = {"cpu": ((1000, 64), (4096, 1), (4096, 64)), "cuda": ((4096, 1), (4096, 4096), (12288, 4096))}  # K, N
_LONGEST = 16384  # also measured in a full run
_HEAD = 64  # of attention, and its keys:
_KEYS = {"cpu": 512, "cuda": 2048}
_PARTS = 4  # of K, for operators that take their number
_RANKS, _WIDTH = 4, {"cpu": 64, "cuda": 4096}
_LISTS = 1024  # of the ranks' terms, cycling over a message; numbers of it that are checked per order
_PRODUCTS = ("linear", "split_k", "grouped_matmul")
_BATCHES = {"cpu": (1, 2, 16, 64), "cuda": (1, 16, 64, 256)}
# Inputs whose bits a proven tree predicts. The last two are this probe's own, see `_one_sign` and `_zeros`.
_KINDS = ("bell", "wide", "cancel", "order", "outlier", "one sign", "zeros")
_SUMS = 24  # of each kind, if a call gives one; six times as many of zeros
_APART = 16  # every n-th column: their weights are aligned alike, so their orders may agree where others differ
_MORE = 48  # further draws at most, until they refute each of:
_WRONG = 4  # trees with two elements exchanged that the proof must refute, each by this many sums:
_TELLING = 4
_AT_A_TIME = 18  # parts of the sums, predicted by the wrong trees until all of these are refuted
_COLUMNS = 64  # of each kind, if a call gives many
_CLASSES = 12  # classes of one row, each with its own tree, and orders of one message
_BIG = {torch.float16: (2.0**15, 2.0**-24), torch.bfloat16: (2.0**100, 1.0)}  # and what survives
_ELEMENTS = 2**20  # of rows that are drawn and copied at once
_DIGITS = {torch.float16: 11, torch.bfloat16: 8, torch.float32: 24, torch.float64: 53}
_SEEDS = 1000


class NotASumError(Exception):
    """The masks show that the function is not a sum of these terms."""


Drawn = tuple[torch.Tensor, torch.Tensor | None, torch.Tensor]


class MeasuredSum(NamedTuple):
    """An operator reduced to one element of its result, at one number of rows: the sum of K terms that we choose."""

    # terms [n, K] of the dtype, n <= at_once -> [n]: the element, for each list of terms
    evaluate: Callable[[torch.Tensor], torch.Tensor]
    # sample(kind, seed, *dropped) -> (x [n, K], y [n, K] or None, got [n]): random operands, and the element for them.
    # `dropped`: positions that the sum ignores, so that sums near zero can be drawn.
    sample: Callable[..., Drawn]
    at_once: int  # lists of terms that one call takes
    # `K`, `dtype`, `device`: of the terms
    K: int
    dtype: torch.dtype
    device: str
    finishes: tuple[str, ...] = ("",)  # possible operations on the root, of `Arithmetic.finish`
    which: str = ""  # the measured columns of a product: "" for all
    # the same sum with fewer columns, because all columns together may have several trees
    fewer: Callable[[], Any] | None = None


class Found(NamedTuple):
    """A tree and its evidence."""

    tree: Tree
    proven: Arithmetic | None  # the arithmetic with which it predicts every bit that was checked; None if there is none
    best: Arithmetic
    # `checked`, `missed`: sums predicted; of them, sums with other bits under the arithmetic that misses fewest
    checked: int
    missed: int
    failed_on: str  # kinds of input on which that arithmetic misses any, or why nothing could be predicted
    refuted: int = 0  # trees with two elements exchanged that did not predict every bit: without any, nothing is proven
    masks: int = 0

    def record(self) -> dict[str, Any]:
        """The fields of a row. If `drawn` leaves lines out, it has the digest, like `words`."""
        said = words(self.tree)
        drawn: list[list[Any]] = [[depth, line] for depth, line in folded(self.tree)]
        if said.endswith(")"):
            drawn[0][1] += said[said.rfind(" (digest ") :]
        share = 1.0 - 0.05 ** (1.0 / self.checked)  # the bound at 95% after so many sums without a miss
        hidden = f"another order for fewer than {100 * share:.2g}% of such rows would not be seen"
        return {
            "words": said,
            "digest": self.tree.digest,
            "proven": self.proven is not None,
            "arithmetic": (self.proven or self.best).words,
            "hidden": hidden if self.proven is not None else "",
            "drawn": drawn,
        } | {name: getattr(self, name) for name in ("checked", "missed", "failed_on", "refuted", "masks")}


def find(measured: MeasuredSum, seed: int = 0) -> Found:
    """The tree of one element, and whether it predicts the element's bits. Raises NotASumError: masks show no sum."""
    masks = _Masks(measured)
    positions = masks.positions()
    tree = emulator.find_tree(masks.survivors, positions, measured.K, 2 ** _DIGITS[measured.dtype], seed)
    return prove(measured, tree, seed)._replace(masks=masks.count)


class _Masks:
    """Evaluates a sum on terms of +big, -big, one and zero."""

    def __init__(self, measured: MeasuredSum) -> None:
        self._measured, self.count = measured, 0
        self._big, self._one = _BIG.get(measured.dtype, (2.0**100, 1.0))
        self._scale = (measured.K if measured.finishes != ("",) else 1) / self._one  # a mean is divided by K

    def positions(self) -> list[int]:
        """The terms that are in the sum. Raises NotASumError."""
        K = self._measured.K
        single = self._each(np.zeros((1, K)), np.zeros(K, np.int64), np.arange(K), self._one)
        odd = single[(single != 0.0) & (single != 1.0)]
        if len(odd):
            raise NotASumError(f"of a term by itself it gives {float(odd[0]):.6g} times as much")
        named: list[int] = np.flatnonzero(single).tolist()
        if len(named) < min(2, K):
            raise NotASumError(f"it gives back {len(named)} of {K:,} terms, each by itself")
        return named

    def survivors(self, masks: Sequence[Mask]) -> list[Array]:
        """For `nondet.kernels.emulator.find_tree`: masks share calls."""
        if not masks:
            return []
        found, sizes, at_once = [], [len(mask.js) for mask in masks], max(1, _ELEMENTS // self._measured.K)
        for start in range(0, len(masks), at_once):
            some = masks[start : start + at_once]
            made = np.zeros((len(some), self._measured.K), np.float32)
            for row, mask in zip(made, some, strict=True):
                row[mask.ones] = self._one
                row[mask.i] = self._big
            of = np.repeat(np.arange(len(some)), [len(mask.js) for mask in some])
            found.append(self._each(made, of, np.concatenate([mask.js for mask in some]), -self._big))
        counts = np.concatenate(found)
        most = np.repeat([len(mask.ones) for mask in masks], sizes)
        # a short dtype rounds the counts, maybe upwards
        odd = ~((counts >= 0) & (counts <= most * (1 + 2.0 ** -_DIGITS[self._measured.dtype])))
        if odd.any():
            raise NotASumError(f"of {most[odd][0]:,} ones {float(counts[odd][0]):.6g} survive")
        return np.split(counts, np.cumsum(sizes)[:-1])

    def _each(self, made: Array, of: Array, at: Array, value: float) -> Array:
        """The results for these rows `of` the masks made, each with `value` at one position more."""
        self.count += len(at)
        masks = torch.from_numpy(made).to(self._measured.device, self._measured.dtype)
        one, results = masks.new_full((), value), []  # a Python number would be copied to a GPU synchronously
        for start in range(0, len(at), self._measured.at_once):
            some = slice(start, start + self._measured.at_once)
            terms = masks[torch.from_numpy(of[some]).to(masks.device)]
            terms[torch.arange(len(terms), device=masks.device), torch.from_numpy(at[some]).to(masks.device)] = one
            results.append(self._measured.evaluate(terms))
        counts: Array = torch.cat(results).double().cpu().numpy() * self._scale
        return np.where(np.isfinite(counts), np.rint(counts), counts)


# ---- the proof


def _arithmetics(measured: MeasuredSum, tree: Tree, products: bool) -> list[Arithmetic]:
    """Possible arithmetics, the simplest first; those that add more than two at once only where the tree does."""
    name = str(measured.dtype).removeprefix("torch.")
    units: list[tuple[str, emulator.Unit | None]] = [(name, None)]
    if measured.device == "cuda" and products and any(len(node) > 2 for node in tree.nodes):
        dtype = "tf32" if name == "float32" else name
        unit = emulator.UNITS.get((emulator.CHIPS.get(torch.cuda.get_device_capability(), ""), dtype))
        split = [(dtype, unit._replace(split=True))] if unit is not None and dtype == "tf32" else []
        units = [(dtype, unit), *split]
    ways: list[Mapping[str, Any]] = [{}]
    ways += [{"fused": True, "first": first} for first in ("low", "high")] if products else []
    return [
        Arithmetic(accumulator=accumulator, finish=finish, unit=unit, dtype=dtype, twice=twice, **way)
        for accumulator in (dict.fromkeys(("float32", "float64", name)) if name != "float64" else ("float64",))
        for twice in ((False, True) if accumulator == "float64" and name in ("bfloat16", "float16") else (False,))
        for way in ways
        for finish in measured.finishes
        for dtype, unit in units
        if not (way and accumulator == "float64" != name)
    ]


class _Sums(NamedTuple):
    """Real operands in float64, and the measured sums of them."""

    x: Array
    y: Array | None
    got: torch.Tensor

    def some(self, chosen: Array) -> _Sums:
        """Those of these indices."""
        return _Sums(self.x[chosen], None if self.y is None else self.y[chosen], self.got[torch.from_numpy(chosen)])

    def exchanged(self, pairs: Sequence[tuple[int, int]]) -> _Sums:
        """All of them for each pair of elements, with the two exchanged."""
        orders = np.tile(np.arange(self.x.shape[1]), (len(pairs), 1))
        for order, (one, other) in zip(orders, pairs, strict=True):
            order[[one, other]] = other, one
        y = None if self.y is None else np.concatenate([self.y[:, order] for order in orders])
        return _Sums(np.concatenate([self.x[:, order] for order in orders]), y, self.got.repeat(len(pairs)))

    def missed(self, said: Array) -> Array:
        """Whether each sum has other bits than these predictions, rounded."""
        rounded = torch.from_numpy(emulator.round_to(said, str(self.got.dtype).removeprefix("torch."))).to(self.got)
        other: Array = (bits(rounded) != bits(self.got)).numpy()
        return other


def _drawn(measured: MeasuredSum, tree: Tree, kinds: Sequence[str], seed: int) -> tuple[Array, _Sums]:
    """Sums of these kinds, and the kind of each."""
    parts = [measured.sample(kind, seed, *tree.dropped) for kind in kinds]
    of = np.repeat(kinds, [len(got) for *_, got in parts])
    x, ys = torch.cat([x for x, *_ in parts]), [y for _, y, _ in parts if y is not None]
    y = torch.cat(ys).double().cpu().numpy() if ys else None
    return of, _Sums(x.double().cpu().numpy(), y, torch.cat([got for *_, got in parts]).cpu())


def prove(measured: MeasuredSum, tree: Tree, seed: int = 0) -> Found:
    """Predict the sum for real operands, under one arithmetic after the other until one predicts every bit."""
    of, sums = _drawn(measured, tree, (*_KINDS, "tiny"), seed + _SEEDS)  # all at once: a chain's links cost alike
    tiny, zeros = of == "tiny", _KINDS[-1]
    checked, ways = int((~tiny).sum()), _arithmetics(measured, tree, sums.y is not None)
    try:
        best, wrong, fits = _fitting(tree, ways, sums, tiny)
    except NotImplementedError as error:
        return Found(tree, None, ways[0], checked, checked, str(error))
    failed = Counter(of[wrong & ~tiny].tolist())
    # pairs of elements, and how many sums have yet to refute the tree in which they are exchanged
    left = {} if failed else dict.fromkeys(_exchanges(tree, seed), _TELLING)
    wrong_trees = len(left)
    first = np.argsort(of != zeros, kind="stable")
    parts = np.array_split(first[~tiny[first]], _AT_A_TIME)
    for turn in range(_AT_A_TIME + _MORE):
        if not left or failed:
            break
        if turn < _AT_A_TIME:
            part = sums.some(parts[turn])
        else:  # further sums that must refute these trees
            _, part = _drawn(measured, tree, (zeros,), seed + turn * _SEEDS)
            checked += len(part.got)
            missed = {how: int(part.missed(emulator.predict(tree, part.x, part.y, how)).sum()) for how in fits}
            fits = [how for how in fits if missed[how] == min(missed.values())]
            best, failed = fits[0], Counter({zeros: missed[fits[0]]} if missed[fits[0]] else {})
        others = part.exchanged(list(left))
        refuting = others.missed(emulator.predict(tree, others.x, others.y, best)).reshape(len(left), -1).sum(1)
        left = {pair: n for (pair, before), new in zip(left.items(), refuting, strict=True) if (n := before - new) > 0}
    reason = ""
    if failed:
        reason = ", ".join(f"{failed[kind]:,} sums of {kind} numbers" for kind in _KINDS if failed[kind])
        reason = f"other bits in {reason}, of {checked:,} in all (nearest: {best.words})"
    elif left:
        reason = f"{len(left)} of {wrong_trees} trees with two elements exchanged predict the same bits"
    proven = None if reason else best._replace(finish=" or ".join(how.finish for how in fits))
    if proven is not None and (lost := int((wrong & tiny).sum())):  # the order is the same even if these are flushed
        aside = f"but for numbers that are not normal, or hardly: other bits in {lost:,} of {tiny.sum():,} such sums"
        proven = proven._replace(aside=aside)
    return Found(tree, proven, best, checked, failed.total(), reason, wrong_trees - len(left))


def _fitting(
    tree: Tree, ways: Sequence[Arithmetic], sums: _Sums, aside: Array
) -> tuple[Arithmetic, Array, list[Arithmetic]]:
    """The arithmetic that misses fewest sums but those set `aside`, the sums it misses, and those that miss none."""
    best, predicted, missed, least, fits = ways[0], np.empty(0), aside, len(aside) + 1, list[Arithmetic]()
    for how in ways:  # until one of them misses none; then the other operations on the root
        if fits and how._replace(finish=best.finish) != best:
            continue
        said = emulator.predict(tree, sums.x, sums.y, how)
        wrong = sums.missed(said)
        count = int(wrong[~aside].sum())
        if count < least:
            best, predicted, missed, least = how, said, wrong, count
        if not count and (how is best or (said != predicted)[~aside].any()):
            fits.append(how)
    return best, missed, fits


def _exchanges(tree: Tree, seed: int) -> list[tuple[int, int]]:
    """Pairs of elements of which an exchange makes another tree; fewer where hardly any does."""
    rng = np.random.default_rng(seed)
    named = sorted({c for node in tree.nodes for c in node if c < tree.leaves})
    drawn = [rng.choice(named, 2, replace=False).tolist() for _ in range(_WRONG * 4 if len(named) > 2 else 0)]
    # of two in one node the same partial sums occur
    pairs = [(one, other) for one, other in drawn if not any({one, other} <= {*node} for node in tree.nodes)]
    return list(dict.fromkeys(pairs))[:_WRONG]


# ---- terms


def _terms(
    kind: str, count: int, K: int, dtype: torch.dtype, device: str, seed: int, dropped: Sequence[int] = ()
) -> torch.Tensor:
    """Lists of terms [count, K] of a kind."""
    if kind not in ("one sign", "zeros", "tiny"):
        return _lengthened(make(kind, (count, K), dtype, device, generator(seed, device)), seed)
    made = _one_sign(count, K, dtype, seed) if kind == "one sign" else _zeros(count, K, dtype, seed, dropped)
    made *= torch.finfo(dtype).smallest_normal * 2.0**-8 if kind == "tiny" else 1.0
    return torch.from_numpy(made).to(dtype).to(device)


def _count(kind: str, many: int = 1) -> int:
    """How many sums of a kind are predicted, as calls of `many` give them."""
    return many * -(-_SUMS * (6 if kind == "zeros" else 1) // many)


def _lengthened(made: torch.Tensor, seed: int) -> torch.Tensor:
    """float64 numbers with all digits: `make` draws them in float32, whose sums and products float64 holds exactly."""
    if made.dtype != torch.float64:
        return made
    more = torch.rand(made.shape, generator=generator(seed, made.device), dtype=made.dtype, device=made.device)
    return made * (1 + 2.0**-24 * more)


def _one_sign(rows: int, K: int, dtype: torch.dtype, seed: int) -> Array:
    """[rows, K]: numbers of one sign, as after ReLU, with some zeros. In a short dtype a few of the terms lift the
    exact sum to the middle between two of its numbers, where any rounding on the way shows."""
    rng, digits, short = np.random.default_rng(seed), _DIGITS[dtype], dtype in (torch.float16, torch.bfloat16)
    top = 17 if dtype != torch.float16 else 11 - int(np.log2(K))
    many = np.maximum(1, K // np.array([1, 2, 4])[np.arange(rows) % 3])
    made = rng.uniform(1, 2, (rows, K)) * 2.0 ** rng.integers(top - (20 if short else 8), top, (rows, K))
    made = torch.from_numpy(made).to(dtype).double().numpy()
    made[np.arange(K) >= many[:, None]] = 0.0
    lifted = np.flatnonzero((many > 8) & short)
    if len(lifted):
        made[lifted, :4] = 0.0
        total = made[lifted].sum(1)
        unit = 2.0 ** (np.frexp(total)[1] - digits)
        rest = (np.floor(total / unit) + 1.5) * unit - total
        for at in range(4):
            own = 2.0 ** (np.frexp(rest)[1] - digits)
            made[lifted, at] = np.floor(rest / own) * own
            rest -= made[lifted, at]
    return rng.permuted(made * rng.choice([-1, 1, 1], (rows, 1)), axis=1)


def _zeros(rows: int, K: int, dtype: torch.dtype, seed: int, dropped: Sequence[int] = ()) -> Array:
    """[rows, K]: numbers and their negatives at random positions, on all terms that are added or on few of them.

    Half of the numbers are so much larger than the others that adding one of each rounds, in float32, and in a third of
    the rows in float64. Each sum is 0 except for these roundings, so that a short result shows them. In half of the
    rows the smallest number has no negative, since of two pairs ((a + b) + (-a - b)) is 0 by symmetry; of an odd number
    of terms one has only their last digits. Half of the rows have two more numbers, whose sum is midway between two of
    the dtype, so that a result that is not small shows the roundings, too.
    """
    rng, own, half_precision = np.random.default_rng(seed), _DIGITS[dtype], dtype == torch.float16
    named = np.delete(np.arange(K), dropped)
    n, most = len(named), len(named) // 2
    form = rng.integers(0, 36, (rows, 1))  # random forms, even for one row
    pairs = np.minimum(np.maximum(4, n // np.array([1, 1, 4])[form % 3]), n) // 2
    long = (form // 3 % 3 == 2) & (not half_precision)
    high, digits = np.where(long, 46, 12 if half_precision else 17), np.where(long, 53, 24)
    large = high + rng.integers(0, 3, (rows, most))
    small = high - digits + rng.integers(0, 8 + int(np.log2(n)) // 2, (rows, most))
    numbers = np.ldexp(rng.uniform(1, 2, (rows, most)), np.where(rng.random((rows, most)) < 0.5, large, small))
    numbers[np.arange(most) >= pairs] = 0.0
    made = np.concatenate([numbers, -numbers, np.zeros((rows, n - 2 * most))], 1)

    midway = np.flatnonzero((form >= 18) & ((pairs > 1) | (n == 2)))
    single = np.setdiff1d(np.flatnonzero(n - 2 * pairs == 1), midway)
    unpaired = np.setdiff1d(np.flatnonzero((pairs > 0) & (form % 2 == 1)), np.union1d(midway, single))
    at = (high + rng.integers(-10, 3, (rows, 1)))[midway, 0]
    if len(midway):
        sign = rng.choice([-1, 1], (2, len(midway)))
        made[midway, 0] = np.ldexp(np.rint(rng.uniform(1, 2, len(midway)) * 2.0 ** (own - 1)), at - own + 1)
        made[midway, most] = np.ldexp(sign[0], at - own)
        made[midway] *= sign[1][:, None]
    made[single, -1] = np.ldexp(rng.uniform(1, 2, len(single)), (high - digits)[single, 0] + rng.integers(4))
    smallest = np.where(numbers > 0, numbers, np.inf).argmin(1) if most else np.zeros(rows, np.int64)
    made[unpaired, most + smallest[unpaired]] = 0.0
    placed = np.zeros((rows, K))
    placed[:, named] = rng.permuted(made * 2.0 ** rng.integers(-12 if half_precision else -40, 1, (rows, 1)), axis=1)
    return placed


# ---- what is measured


def _sampler(
    evaluate: Callable[[torch.Tensor], torch.Tensor], many: int, K: int, dtype: torch.dtype, device: str,
    *, weighted: bool = False,
) -> Callable[..., Drawn]:  # fmt: skip
    """`MeasuredSum.sample` of terms that are chosen themselves. `weighted`: a matrix unit multiplies each by 1."""

    def sample(kind: str, seed: int, *dropped: int) -> Drawn:
        rows = _terms(kind, _count(kind, many), K, dtype, device, seed, dropped)
        got = torch.cat([evaluate(part) for part in rows.split(many)])
        return (torch.ones_like(rows), rows, got) if weighted else (rows, None, got)

    return sample


def of_rows(
    operator: Operator, M: int, K: int, dtype: torch.dtype, device: str, finishes: tuple[str, ...] = ("",)
) -> MeasuredSum:
    """Element 0 of `operator(x [M, K]) -> [M]`: the sum of row 0."""
    x = torch.ones((M, K), dtype=dtype, device=device)
    evaluate = partial(_in_turn, x[0], lambda: operator(x)[0])
    sample = _sampler(evaluate, 1, K, dtype, device)
    return MeasuredSum(evaluate, sample, max(1, min(K, _ELEMENTS // K)), K, dtype, device, finishes)


def _in_turn(into: torch.Tensor, evaluate: Callable[[], torch.Tensor], rows: torch.Tensor) -> torch.Tensor:
    """The results for rows [n, K], each at the same address, since the order may depend on alignment -> [n]."""
    given = []
    for row in rows.unbind():
        into.copy_(row)
        given.append(evaluate().clone())
    return torch.stack(given)


def of_attention(
    operator: Operator, M: int, K: int, dtype: torch.dtype, device: str, D: int = _HEAD, every: int = 1
) -> MeasuredSum:
    """The last of M queries over K keys, all seen with equal scores: the mean of each column of the values. `operator`:
    (q [1, 1, M, D], k, v [1, 1, K, D]) -> [1, 1, M, D], causal."""
    q, k = (torch.zeros((1, 1, n, D), dtype=dtype, device=device) for n in (M, K))
    columns = torch.arange(0, D, every, device=device)
    v = torch.zeros((1, 1, K, D), dtype=dtype, device=device)

    def evaluate(terms: torch.Tensor) -> torch.Tensor:
        v[0, 0, :, columns[: len(terms)]] = terms.T
        return operator(q, k, v)[0, 0, -1, columns[: len(terms)]]

    further = _APART if every == 1 and D > _APART else D
    fewer = partial(of_attention, operator, M, K, dtype, device, D, further) if every < D else None
    finishes = ("divided by K", "times 1/K", *([emulator.VECTOR_WEIGHTS] if device == "cpu" else []))
    sample = _sampler(evaluate, len(columns), K, dtype, device, weighted=device == "cuda")
    return MeasuredSum(evaluate, sample, len(columns), K, dtype, device, finishes, _which(every, D), fewer)


def _which(every: int, columns: int) -> str:
    return "" if every == 1 else "column 0" if every >= columns else f"every {every}th column"


def of_ranks(operator: Operator, message: Message) -> list[MeasuredSum]:
    """For each order in which a message's numbers are added over the ranks, the numbers added so: a ring cuts a message
    into pieces that begin at different ranks. `operator`: message with `terms` -> its sums [rows * width]."""
    K, dtype = message.world, getattr(torch, message.dtype)
    big, one = _BIG.get(dtype, (2.0**100, 1.0))
    given = functools.cache(lambda *terms: operator(replace(message, terms=terms)).flatten())
    pairs = [tuple({i: big, j: -big}.get(rank, one) for rank in range(K)) for j in range(K) for i in range(j)]
    orders = torch.stack([given(pair) for pair in pairs]).nan_to_num().unique(dim=1, return_inverse=True)[1]
    pieces = sorted((torch.nonzero(orders == order)[:, 0] for order in orders.unique()), key=lambda of: int(of[0]))
    least, lists = min(map(len, pieces)), min(len(orders), _LISTS)
    left = f"; {len(pieces) - _CLASSES} more orders left out" if len(pieces) > _CLASSES else ""

    def piece(of: torch.Tensor) -> MeasuredSum:
        some = of[torch.linspace(0, len(of) - 1, min(len(of), _LISTS)).round().long()]

        def evaluate(terms: torch.Tensor) -> torch.Tensor:
            row = terms[0].tolist()
            if min(row) < 0 and row.index(min(row)) < row.index(max(row)):  # symmetric, so computed once
                row = [-term if abs(term) == big else term for term in row]
            return given(tuple(row))[of[:1]]

        def sample(kind: str, seed: int, *dropped: int) -> Drawn:
            seeds = range(seed, seed + min(-(-_count(kind) // least), _SUMS))
            drawn = [_terms(kind, lists, K, dtype, "cpu", one, dropped) for one in seeds]
            got = [given(*map(tuple, rows.tolist()))[some] for rows in drawn]
            return torch.cat([rows[some % lists] for rows in drawn]), None, torch.cat(got)

        begin, end, runs = int(of[0]), int(of[-1]), 1 + int((of.diff() != 1).sum())
        which = f"{len(of):,} of {len(orders):,} numbers, in {runs:,} runs from {begin:,} on"
        which = f"numbers {begin:,} to {end:,} of {len(orders):,}" if runs == 1 else which
        return MeasuredSum(evaluate, sample, 1, K, dtype, "cpu", which=which + left)

    return [piece(of) for of in pieces[:_CLASSES]]


def of_product(
    operator: Operator, M: int, K: int, N: int, dtype: torch.dtype, device: str, every: int = 1
) -> MeasuredSum:
    """Row 0 of `operator(x [M, K], w [N, K]) -> [M, N]`, in all or some columns: each has its own sum."""
    ones = torch.ones((M, K), dtype=dtype, device=device)
    columns = torch.arange(0, N, every, device=device)
    weight = torch.zeros((N, K), dtype=dtype, device=device)
    if dtype == torch.float16:
        ones *= 16.0  # so that the rest is not subnormal, unless partial sums have no room for that
        weight[:, 0], weight[:, 1:2] = _BIG[dtype][0], -_BIG[dtype][0]
        ones /= 1.0 if operator(ones, weight).isfinite().all() else 16.0
        weight.zero_()
    # sums of random operands are of some columns; those between have the same weights
    few = columns[torch.linspace(0, len(columns) - 1, min(len(columns), _COLUMNS)).round().long()]
    nearest = torch.searchsorted(few, torch.arange(N, device=device)).clamp(max=len(few) - 1)

    def evaluate(terms: torch.Tensor) -> torch.Tensor:
        if N == 1:
            return _in_turn(weight[0], lambda: operator(ones, weight)[0, 0], terms) / ones[0, 0]
        weight[columns[: len(terms)]] = terms
        return operator(ones, weight)[0, columns[: len(terms)]] / ones[0, 0]

    def sample(kind: str, seed: int, *dropped: int) -> Drawn:
        drawn = []
        for at in range(seed, seed + _count(kind, len(few)) // len(few)):
            if kind in ("one sign", "zeros", "tiny"):
                signed = [0.5, 1.0, 1.0, 2.0] if kind == "one sign" else [-2.0, -1.0, 1.0, 2.0]
                powers = torch.tensor(signed, dtype=dtype, device=device)  # so that products are exact, too
                a = powers[torch.randint(4, (M, K), generator=generator(at, device), device=device)]
                w = _terms(kind, len(few), K, dtype, device, at, dropped) / a[0]
            else:
                a, w = product_operands(kind, (M, K), (len(few), K), dtype, device, at, weight_kind="bell")
                a, w = _lengthened(a, at), _lengthened(w, at + 1) * weight_scale(K)
            drawn.append((a[:1].expand(len(few), K), w, operator(a, w[nearest])[0, few]))
        x, y, got = (torch.cat(parts) for parts in zip(*drawn, strict=True))
        return x, y, got

    fewer = partial(of_product, operator, M, K, N, dtype, device, min(_APART, N)) if every == 1 < N else None
    lists = len(columns) if N > 1 else max(1, _ELEMENTS // K)
    return MeasuredSum(evaluate, sample, lists, K, dtype, device, which=_which(every, N), fewer=fewer)


class ReductionOrder(Probe):
    """The tree of row 0 at some M; where its bits differ, the tree of each class."""

    name = "reduction-order"

    def cases(self, options: Options) -> Iterable[Case]:
        """Sums and means of each width; a GEMV (M = 1) and elements of GEMMs of each layer, with K in parts, and at an
        expert; the values of attention; a sum over ranks. Among all probes a sum of the first width."""
        if options.one_of_all:
            (K, N), *_ = _sizes("sum", options)  # the others take a minute
            yield _case("sum", K, N, dtypes(options, "reduction-order", ("float32",))[0], options)
            return
        for operator in ("sum", "mean", "attention", *_PRODUCTS, "all_reduce"):
            for K, N in dict.fromkeys(_sizes(operator, options)):
                for dtype in dtypes(options, "reduction-order", ("float32", "bfloat16")):
                    yield _case(operator, K, N, dtype, options)

    def prepare(self, case: Case, device: str, seed: int) -> Any:
        """x [M, K], and for products w [N, K]; q [1, 1, M, D] and k, v [1, 1, K, D]; the ranks' message."""
        M, K, dtype = case.shape["M"], case.shape["K"], case.torch_dtype
        if case.operator == "all_reduce":
            rows = make("wide", (_WIDTH[device], K), dtype, "cpu", generator(seed, "cpu")).tolist()
            return [Message(K, device, "all_reduce", "stock", case.dtype, M, len(rows), terms=tuple(map(tuple, rows)))]
        if case.operator == "attention":
            v = make("order", (_HEAD, K), dtype, device, generator(seed, device)).T.contiguous()
            q, k = (torch.zeros((1, 1, n, _HEAD), dtype=dtype, device=device) for n in (M, K))
            return [q, k, v[None, None]]  # equal scores: only the order of the values differs
        if case.operator not in _PRODUCTS:
            return [make("order", (M, K), dtype, device, generator(seed, device))]
        x, w = product_operands("order", (M, K), (case.shape["N"], K), dtype, device, seed, weight_kind="bell")
        return [x, w * weight_scale(K)]

    def trials(self, case: Case, inputs: Any, operator: Operator) -> Iterator[Trial]:
        """Row 0 in batches of M; for attention the last query of M; of a message the first row of M and the last."""
        first, *others = inputs
        call = _linear_of(case.operator, operator)

        def at(M: int) -> torch.Tensor:
            if case.operator == "all_reduce":
                return operator(replace(first, rows=M)).view(M, first.width)[[0, -1]].view(1, -1)
            if case.operator == "attention":
                return operator(first[:, :, -M:].contiguous(), *others)[0, 0, -1:]
            return call(first[:M].contiguous(), *others)[:1]

        for M in case.data["values"]:
            yield Trial(M, partial(at, M))

    def reference(self, case: Case, inputs: Any) -> torch.Tensor | None:
        """The row in float64."""
        if case.operator == "all_reduce":
            return torch.tensor(inputs[0].terms, dtype=torch.float64).sum(1).repeat(2)[None]
        return super().reference(case, inputs)

    def findings(self, case: Case, inputs: Any, classes: Classes, operator: Operator) -> dict[str, Any]:
        """The tree of each class, at the first M that has it, and how the trees differ."""
        K, dtype, first, sizes = case.shape["K"], case.torch_dtype, inputs[0], classes.firsts
        call = _linear_of(case.operator, operator)

        def sums_at(M: Any) -> list[MeasuredSum]:
            """The sums whose trees are measured: several for a sum over ranks."""
            if case.operator == "all_reduce":
                return of_ranks(operator, replace(first, rows=M))
            if case.operator == "attention":
                return [of_attention(operator, M, K, dtype, first.device.type)]
            if case.operator in _PRODUCTS:
                return [of_product(call, M, K, case.shape["N"], dtype, first.device.type)]
            finishes = ("divided by K", "times 1/K") if case.operator == "mean" else ("",)
            return [of_rows(operator, M, K, dtype, first.device.type, finishes)]

        measured = [(one, M) for M in sizes[:_CLASSES] for one in sums_at(M)]
        return trees_of([one for one, _ in measured], [M for _, M in measured] + sizes[_CLASSES:])


def _linear_of(name: str, operator: Operator) -> Operator:
    """One of `_PRODUCTS` as x [M, K], w [N, K] -> [M, N]: K in parts, or all rows at the first of two experts."""

    def grouped(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        ends = torch.full((2,), len(x), dtype=torch.int32, device=x.device)
        return operator(x, torch.stack([w, w]).mT, ends)

    return {"split_k": lambda x, w: in_parts(operator, x, w.T, _PARTS), "grouped_matmul": grouped}.get(name, operator)


def _sizes(operator: str, options: Options) -> Sequence[tuple[int, int]]:
    """K and N of each case."""
    device, product = options.device, operator in _PRODUCTS
    if operator == "all_reduce":
        enough = device == "cpu" or torch.cuda.device_count() >= _RANKS
        return [(ranks, 1) for ranks in options.ranks or ((_RANKS,) if enough else ())]
    if given := base.given_layer(options):
        return [given if product else (given[0], 1)]
    longest = [(_LONGEST, 64 if product else 1)] if options.full else []
    if operator == "linear":
        return [*([(K, N) for _, K, N in options.layers] or _LAYERS[device]), *longest]
    sizes = [_LAYERS[device][-1]] if product else [(K, 1) for K in _WIDTHS.get(operator, (_KEYS[device],))]
    return sizes + longest


def _case(operator: str, K: int, N: int, dtype: str, options: Options) -> Case:
    device, M, product = options.device, options.m or max(_BATCHES[options.device]), operator in _PRODUCTS
    batches = [*(m for m in _BATCHES[device] if m < M), M]
    # weights of a product are held three times, an expert's five times
    needed = (2 * M * K + 5 * N * K) * getattr(torch, dtype).itemsize + 5 * min(N, _COLUMNS) * K * 8
    needed += K * (400 + 4 * _HEAD * 8)
    require_memory(device, needed, f"the order of {operator} of M={M} K={K} N={N} in {dtype}")
    where = {
        "attention": "values are added for the last query of M",
        "all_reduce": "ranks are added in the first and the last of M rows",
    }.get(operator, "row 0 of M is added")
    more = {"split_k": f" in {_PARTS} parts", "all_reduce": shared_gpus(K) if device == "cuda" else ""}
    title = f"{operator}: the order in which {where}, K={K}{more.get(operator, '')}{f' N={N}' * product}, order"
    shape = {"M": M, "K": K} | ({"N": N} if product else {})
    data = {"values": batches if M > 1 else [1, 1]}
    return Case(title, operator, shape, dtype, "batch_size", "order", data=data)


def trees_of(measured: Sequence[MeasuredSum], sizes: Sequence[Any]) -> dict[str, Any]:
    """For a row's extra: the tree at each of these M, and how consecutive ones differ; further M are only counted."""
    kept: list[dict[str, Any]] = []
    trees: list[tuple[str, Found]] = []
    for M, one in zip(sizes, measured, strict=False):
        found, said = _tree_of(one)
        if found is not None:
            trees.append((f"M = {M}" + f", {one.which}" * (sizes.count(M) > 1), found))
        kept.append({"M": M, "K": one.K, **said})
    between = [f"{m} and {n}: {_between(a, b)}" for (m, a), (n, b) in pairwise(trees)]
    if left := len(sizes) - len(measured):
        between.append(f"{left} more of the classes: not asked for their trees")
    return {"reduction_trees": {"classes": kept, "between": between}}


def _tree_of(measured: MeasuredSum | None) -> tuple[Found | None, dict[str, Any]]:
    """The first tree that is proven, trying fewer columns at once; else the first tree; and its record."""
    found: list[tuple[Found, str]] = []
    why = ""
    while measured is not None and not (found and found[-1][0].proven):
        try:
            found.append((find(measured), measured.which))
        except Exception as error:  # noqa: BLE001 - a kernel may raise anything at masks: the row then has no tree
            why = why or (str(error) if isinstance(error, NotASumError) else reason_of(error))
        measured = measured.fewer() if measured.fewer is not None else None
    if not found:
        return None, {"words": "no tree", "proven": False, "failed_on": why, "drawn": []}
    tree, which = found[-1] if found[-1][0].proven else found[0]
    return tree, tree.record() | ({"which": which} if which else {})


def trees_of_product(operator: Operator, w: torch.Tensor, classes: Classes, most: int) -> dict[str, Any]:
    """As `trees_of`, of w [N, K], for the classes of a sweep over M whose row 0 differs; {} if it is the same in all.
    `most`: how many trees are measured."""
    sizes: list[tuple[torch.Tensor, Any]] = []
    for result, M in zip(*classes, strict=True):
        if not any(identical(result[:1], row) for row, _ in sizes):
            sizes.append((result[:1], M))
    if len(sizes) < 2:
        return {}
    N, K = w.shape
    measured = [of_product(operator, M, K, N, w.dtype, w.device.type) for _, M in sizes[:most]]
    return trees_of(measured, [M for _, M in sizes])


def _between(a: Found, b: Found) -> str:
    said, one, other = compared(a.tree, b.tree), a.proven, b.proven
    if a.tree.digest != b.tree.digest:
        return said
    if one is not None and one == other and not one.aside:  # so no tested sum has other bits
        return f"{said} and arithmetic, {one.words}: what differs is not in the sums that were tested"
    if one is not None and other is not None:
        return f"{said}, and other bits: something else than the order ({one.words}; and {other.words})"
    what = "something else than the order (precision, fused multiply-adds, promotion)"
    return f"{said}, and other bits: {what}, as far as masks show: not both trees are proven"
