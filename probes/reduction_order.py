"""The order in which a sum is added: its reduction tree, found by masks and proven by predicting bits.

Where +big and -big meet, what was added to either before is lost: how much of the rest survives gives the size of the
smallest partial sum that holds both (FPRev, USENIX ATC 2025). The tree is then proven if an exact emulator
(`nondet.kernels.emulator`) that adds numbers in that order gives exactly the implementation's bits, in all sums tested:
of ordinary and of hard inputs, of both signs and of one. Otherwise the row lists the tree as unproven, with the sums
that failed: the function may not be a sum, or may round where no tree shows it.

The masks are columns of the weight, or one row of x at a time; never more rows than the M in question, since the order
may depend on the number of rows.
"""

from __future__ import annotations

import functools
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
from nondet.probes.base import Case, Operator, Options, Probe, dtypes, require_memory, weight_scale
from nondet.probes.split_k import in_parts
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
_COLUMNS = 64  # of each kind, if a call gives many
_CLASSES = 12  # classes of one row, each with its own tree, and orders of one message
_BIG = {torch.float16: (2.0**15, 2.0**-24), torch.bfloat16: (2.0**100, 1.0)}  # and what survives
_CELLS = 2**20  # elements of rows that are drawn and copied at once
_DIGITS = {torch.float16: 11, torch.bfloat16: 8, torch.float32: 24, torch.float64: 53}
_SEEDS = 1000


class NotASumError(Exception):
    """The masks show that the function is not a sum of these terms."""


class MeasuredSum(NamedTuple):
    """An operator reduced to one element of its result, at one number of rows: the sum of K terms that we choose."""

    # (terms [at_once, K] of the dtype, n) -> [n]: the element, for each of the first n lists of terms
    evaluate: Callable[[torch.Tensor, int], torch.Tensor]
    # sample(kind, seed, *dropped) -> (x [n, K], y [n, K] or None, got [n]): random operands, and the element for them.
    # `dropped`: positions that the sum ignores, so that sums near zero can be drawn.
    sample: Callable[..., tuple[torch.Tensor, torch.Tensor | None, torch.Tensor]]
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
    masks: int
    proven: Arithmetic | None  # the arithmetic with which it predicts every bit that was checked; None if there is none
    best: Arithmetic
    # `checked`, `missed`: sums predicted; of them, sums with other bits under the arithmetic that misses fewest
    checked: int
    missed: int
    failed_on: str  # kinds of input on which that arithmetic misses any, or why nothing could be predicted
    refuted: int = 0  # trees with two elements exchanged that did not predict every bit: without any, nothing is proven

    @property
    def words(self) -> str:
        """ "8 lanes of stride 8, ...: proven, 120 of the 120 sums tested predicted bit for bit, in float32"."""
        said = words(self.tree)
        if self.proven is not None:
            return (
                f"{said}: proven, {self.checked:,} of the {self.checked:,} sums tested predicted bit for bit "
                f"{self.proven.words}; {hidden(self.checked)}"
            )
        return f"{said}: unproven, {self.failed_on}"

    def record(self) -> dict[str, Any]:
        """The fields of a row. If `drawn` leaves lines out, it has the digest, like `words`."""
        said, ((depth, line), *lines) = words(self.tree), folded(self.tree)
        drawn = [(depth, line + said[said.rfind(" (digest ") :] * said.endswith(")")), *lines]
        return {
            "words": said,
            "digest": self.tree.digest,
            "proven": self.proven is not None,
            "arithmetic": (self.proven or self.best).words,
            "checked": self.checked,
            "missed": self.missed,
            "failed_on": self.failed_on,
            "refuted": self.refuted,
            "hidden": hidden(self.checked) if self.proven is not None else "",
            "masks": self.masks,
            "drawn": [[depth, line] for depth, line in drawn],
        }


def hidden(checked: int) -> str:
    """The bound at 95% after this many sums without a miss: 1 - 0.05^(1 / n) of rows like them."""
    share = 1.0 - 0.05 ** (1.0 / checked)
    return f"another order for fewer than {100 * share:.2g}% of such rows would not be seen"


def find(measured: MeasuredSum, seed: int = 0) -> Found:
    """The reduction tree of one element, and whether it predicts the element's bits. Raises NotASumError: the masks
    show that it is not a sum: it does not return a single term, or does not count ones."""
    masks = _Masks(measured)
    positions = masks.positions()
    tree = emulator.find_tree(masks.survivors, positions, measured.K, 2 ** _DIGITS[measured.dtype], seed)
    return prove(measured, tree, seed)._replace(masks=masks.count)


class _Masks:
    """Evaluates a sum on terms of +big, -big, one and zero."""

    def __init__(self, measured: MeasuredSum) -> None:
        self._measured, self.count = measured, 0
        self._big, self._one = _BIG.get(measured.dtype, (2.0**100, 1.0))
        self._terms = torch.zeros((measured.at_once, measured.K), dtype=measured.dtype, device=measured.device)
        self._sets = max(1, _CELLS // measured.K)
        self._rows = torch.arange(measured.at_once, device=measured.device)
        self._scale = 1.0 / self._one
        if measured.finishes != ("",):  # a mean: what survives is divided by K
            self._scale *= measured.K

    def positions(self) -> list[int]:
        """The terms that are in the sum. Raises NotASumError."""
        self._terms.zero_()
        alone = self._each(np.arange(self._measured.K), self._one)
        if not set(np.unique(alone).tolist()) <= {0.0, 1.0}:
            odd = alone[~np.isin(alone, (0.0, 1.0))]
            raise NotASumError(f"of a term by itself it gives {float(odd[0]):.6g} times as much")
        named = np.flatnonzero(alone).tolist()
        if len(named) < min(2, self._measured.K):
            raise NotASumError(f"it gives back {len(named)} of {self._measured.K:,} terms, each by itself")
        return [int(position) for position in named]

    def survivors(self, masks: Sequence[Mask]) -> list[Array]:
        """For `nondet.kernels.emulator.find_tree`; masks with few js share calls."""
        found: list[Array] = [np.empty(0)] * len(masks)
        few: list[int] = []
        rows = 0
        for at, mask in enumerate(masks):
            if len(mask.js) * 2 > self._measured.at_once:
                self._set([mask], len(self._terms))
                found[at] = self._each(mask.js, -self._big)
                continue
            if rows + len(mask.js) > self._measured.at_once:
                self._together(masks, few, found)
                few, rows = [], 0
            few.append(at)
            rows += len(mask.js)
        if few:
            self._together(masks, few, found)
        for mask, counts in zip(masks, found, strict=True):
            # a short dtype rounds the counts, maybe upwards
            most = len(mask.ones) * (1 + 2.0 ** -_DIGITS[self._measured.dtype])
            odd = ~(np.isfinite(counts) & (counts >= 0) & (counts <= most))
            if odd.any():
                raise NotASumError(f"of {len(mask.ones):,} ones {float(counts[odd][0]):.6g} survive")
        return found

    def _together(self, masks: Sequence[Mask], few: list[int], found: list[Array]) -> None:
        start = 0
        for some in (few[i : i + self._sets] for i in range(0, len(few), self._sets)):
            start = self._set([masks[at] for at in some], start=start)
        counts = self._each(np.concatenate([masks[at].js for at in few]), -self._big)
        for at, own in zip(few, np.split(counts, np.cumsum([len(masks[at].js) for at in few])[:-1]), strict=True):
            found[at] = own

    def _set(self, masks: Sequence[Mask], rows: int = 0, start: int = 0) -> int:
        """Write each mask to `rows` rows, by default one per j, in one copy; returns the index after them."""
        made = np.zeros((len(masks), self._measured.K), np.float32)
        for row, mask in zip(made, masks, strict=True):
            row[mask.ones] = self._one
            row[mask.i] = self._big
        of = np.repeat(np.arange(len(masks)), [rows or len(mask.js) for mask in masks])
        terms = torch.from_numpy(made).to(self._terms)
        self._terms[start : start + len(of)] = (
            terms if len(masks) == 1 else terms[torch.from_numpy(of).to(terms.device)]
        )
        return start + len(of)

    def _each(self, positions: Array, value: float) -> Array:
        """The results where the term at each position in turn is `value`, and the others are as set."""
        self.count += len(positions)
        made = []
        one = self._terms.new_full((), value)  # a Python number would be copied to a GPU synchronously
        for some in torch.from_numpy(positions).to(self._terms.device).split(self._measured.at_once):
            rows = self._rows[: len(some)]
            before = self._terms[rows, some]
            self._terms[rows, some] = one
            made.append(self._measured.evaluate(self._terms, len(some)))
            self._terms[rows, some] = before
        counts: Array = torch.cat(made).double().cpu().numpy() * self._scale
        return np.where(np.isfinite(counts), np.rint(counts), counts)


# ---- the proof


def _arithmetics(measured: MeasuredSum, tree: Tree, products: bool) -> list[Arithmetic]:
    """Possible arithmetics, the simplest first; those that add more than two at once only where the tree does."""
    name = str(measured.dtype).removeprefix("torch.")
    accumulators = dict.fromkeys(("float32", "float64", name) if name != "float64" else ("float64",))
    units: list[tuple[str, emulator.Unit | None]] = [(name, None)]
    if measured.device == "cuda" and products and any(len(node) > 2 for node in tree.nodes):
        chip = emulator.CHIPS.get(torch.cuda.get_device_capability(), "")
        dtype = "tf32" if name == "float32" else name
        unit = emulator.UNITS.get((chip, dtype))
        split = [(dtype, unit._replace(split=True))] if unit is not None and dtype == "tf32" else []
        units = [(dtype, unit), *split]
    ways: list[Mapping[str, Any]] = [{}]
    if products:
        ways += [{"fused": True, "first": first} for first in ("low", "high")]
    return [
        Arithmetic(accumulator=accumulator, finish=finish, unit=unit, dtype=dtype, twice=twice, **way)
        for accumulator in accumulators
        for twice in ((False, True) if accumulator == "float64" and name in ("bfloat16", "float16") else (False,))
        for way in ways
        for finish in measured.finishes
        for dtype, unit in units
        if not (way and accumulator == "float64" != name)
    ]


def prove(measured: MeasuredSum, tree: Tree, seed: int = 0) -> Found:
    """Predict the sum for real operands, under one arithmetic after the other until one predicts every bit."""
    drawn = [_drawn(measured, tree, kind, seed + _SEEDS) for kind in _KINDS]
    of = np.repeat(_KINDS, [len(got) for *_, got in drawn])  # all at once: a chain's links cost alike
    x, y, got = np.concatenate([x for x, *_ in drawn]), None, torch.cat([got for *_, got in drawn])
    if drawn[0][1] is not None:
        y = np.concatenate([y for _, y, _ in drawn if y is not None])
    checked, reason, fits = len(of), "", list[Arithmetic]()
    ways = _arithmetics(measured, tree, y is not None)
    best, sums = ways[0], np.empty(0)
    try:
        best, sums, fits = _fitting(measured, tree, ways, x, y, got)
        wrong = _wrong(measured, sums, got)
        failed = {kind: int(n) for kind in _KINDS if (n := (of[wrong] == kind).sum())}
        if failed:
            reason = ", ".join(f"{count:,} sums of {kind} numbers" for kind, count in failed.items())
            reason = f"other bits in {reason}, of {checked:,} in all (nearest: {best.words})"
    except NotImplementedError as error:
        reason, failed = str(error), {kind: len(got) for kind, (*_, got) in zip(_KINDS, drawn, strict=True)}
    others = [] if failed else _exchanged(tree, seed)

    def telling(t: Tree, x: Array, y: Array | None, got: torch.Tensor, sums: Array) -> int:
        """The number of sums that refute t; `sums` are the tree's predictions."""
        said = emulator.predict(t, x, y, best)
        new = said != sums
        return int(_wrong(measured, said[new], got[torch.from_numpy(new)]).sum()) if new.any() else 0

    left = [(t, n) for t in others if (n := _TELLING - telling(t, x, y, got, sums)) > 0]
    for more in range(_MORE):  # further sums that must refute these trees
        if not left:
            break
        kind = _KINDS[-1]
        x, y, got = _drawn(measured, tree, kind, seed + (more + 2) * _SEEDS)
        checked += len(got)
        added = [(how, emulator.predict(tree, x, y, how)) for how in fits]
        missed = [int(_wrong(measured, said, got).sum()) for _, said in added]
        if min(missed):
            failed[kind] = failed.get(kind, 0) + min(missed)
            reason = f"other bits in {min(missed):,} sums of {kind} numbers, of {checked:,} (nearest: {best.words})"
        fits = [how for how, n in zip(fits, missed, strict=True) if n == min(missed)]
        best = fits[0]
        left = [(t, n) for t, m in left if (n := m - telling(t, x, y, got, dict(added)[best])) > 0]
    if left and not failed:
        reason = f"{len(left)} of {len(others)} trees with two elements exchanged predict the same bits"
    refuted = len(others) - len(left)
    proven = None if reason else best._replace(finish=" or ".join(how.finish for how in fits))
    if proven is not None:  # the order is the same even if these are flushed to 0
        x, y, got = _drawn(measured, tree, "tiny", seed + _SEEDS)
        if lost := int(_wrong(measured, emulator.predict(tree, x, y, best), got).sum()):
            aside = f"but for numbers that are not normal, or hardly: other bits in {lost:,} of {len(got):,} such sums"
            proven = proven._replace(aside=aside)
    return Found(tree, 0, proven, best, checked, sum(failed.values()), reason, refuted)


def _fitting(
    measured: MeasuredSum, tree: Tree, ways: Sequence[Arithmetic], x: Array, y: Array | None, got: torch.Tensor
) -> tuple[Arithmetic, Array, list[Arithmetic]]:
    """The arithmetic that predicts most sums, and its predictions; those that predict all, with any operation on the
    root that shows."""
    best, sums, least, fits = ways[0], np.empty(0), len(got) + 1, list[Arithmetic]()
    for how in ways:  # until one of them misses none; then the other operations on the root
        if fits and how._replace(finish=best.finish) != best:
            continue
        said = emulator.predict(tree, x, y, how)
        wrong = int(_wrong(measured, said, got).sum())
        if wrong < least:
            best, sums, least = how, said, wrong
        if not wrong and (how is best or (said != sums).any()):
            fits.append(how)
    return best, sums, fits


def _drawn(measured: MeasuredSum, tree: Tree, kind: str, seed: int) -> tuple[Array, Array | None, torch.Tensor]:
    """Real operands in float64, and the measured sums of them."""
    x, y, got = measured.sample(kind, seed, *(tree.dropped if kind == "zeros" else ()))
    return x.double().cpu().numpy(), None if y is None else y.double().cpu().numpy(), got


def _wrong(measured: MeasuredSum, said: Array, got: torch.Tensor) -> Array:
    rounded = torch.from_numpy(emulator.round_to(said, str(measured.dtype).removeprefix("torch."))).to(got.dtype)
    other: Array = (bits(rounded) != bits(got.cpu())).numpy()
    return other


def _exchanged(tree: Tree, seed: int) -> list[Tree]:
    """Trees with two elements exchanged, each different from the tree; fewer where hardly any is."""
    rng = np.random.default_rng(seed)
    named = sorted({c for node in tree.nodes for c in node if c < tree.leaves})
    made: list[Tree] = []
    for _ in range(_WRONG * 4 if len(named) > 2 else 0):
        one, other = (int(leaf) for leaf in rng.choice(named, 2, replace=False))
        new = {one: other, other: one}
        if not any(one in node and other in node for node in tree.nodes):  # else the same partial sums occur
            made.append(Tree(tree.leaves, tuple(tuple(new.get(c, c) for c in node) for node in tree.nodes)))
        if len(made) == _WRONG:
            break
    return made


def _rows(
    kind: str, K: int, dtype: torch.dtype, device: str, seed: int, dropped: Sequence[int], many: int = 1
) -> torch.Tensor:
    """Rows [n, K] of the kind, n a multiple of `many`."""
    count = many * -(-_SUMS * (6 if kind == "zeros" else 1) // many)
    if kind in ("zeros", "tiny"):
        return _zeros(count, K, dtype, device, seed, dropped, kind)
    if kind == "one sign":
        return _one_sign(count, K, dtype, device, seed)
    return _lengthened(make(kind, (count, K), dtype, device, generator(seed, device)), seed)


def _lengthened(made: torch.Tensor, seed: int) -> torch.Tensor:
    """float64 numbers with all digits: `make` draws them in float32, whose sums and products float64 holds exactly."""
    if made.dtype != torch.float64:
        return made
    more = torch.rand(made.shape, generator=generator(seed, made.device), dtype=made.dtype, device=made.device)
    return made * (1 + 2.0**-24 * more)


def _one_sign(rows: int, K: int, dtype: torch.dtype, device: str, seed: int) -> torch.Tensor:
    """[rows, K]: numbers of one sign, as after ReLU, of exponentials and of squares, with some zeros.

    In a short dtype a few of the terms lift the exact sum to the middle between two of its numbers, where any rounding
    on the way shows.
    """
    rng, digits, short = np.random.default_rng(seed), _DIGITS[dtype], dtype in (torch.float16, torch.bfloat16)
    made = np.zeros((rows, K))
    top = 17 if dtype != torch.float16 else 11 - int(np.log2(K))
    for i, row in enumerate(made):
        positions = rng.permutation(K)[: max(1, K // (1, 2, 4)[i % 3])]
        powers = rng.uniform(1, 2, len(positions))
        powers *= 2.0 ** rng.integers(top - (20 if short else 8), top, len(positions))
        row[positions] = torch.from_numpy(powers).to(dtype).double().numpy()
        for at in positions[:4] if short and len(positions) > 8 else ():
            row[at] = 0.0
        if short and len(positions) > 8:
            total = row.sum()
            unit = 2.0 ** (np.frexp(total)[1] - digits)
            rest = (np.floor(total / unit) + 1.5) * unit - total
            for at in positions[:4]:
                row[at] = np.floor(rest / (own := 2.0 ** (np.frexp(rest)[1] - digits))) * own if rest else 0.0
                rest -= row[at]
        row *= rng.choice([-1, 1, 1])
    return torch.from_numpy(made).to(dtype).to(device)


def _zeros(
    rows: int, K: int, dtype: torch.dtype, device: str, seed: int, dropped: Sequence[int] = (), kind: str = "zeros"
) -> torch.Tensor:
    """[rows, K]: numbers and their negatives at random positions, on all terms that are added or on few of them.

    Half of the numbers are so much larger than the others that adding one of each rounds, in any dtype: in float32, and
    in float64 in a third of the rows. Each sum is 0 except for these roundings, so that a short result shows them. In
    half of the rows the smallest number has no negative, since of two pairs ((a + b) + (-a - b)) is 0 by symmetry. If
    the number of terms is odd, one has only their last digits instead. Rows are of many sizes, where the dtype has
    room. Half of the rows have two more numbers, whose sum is midway between two of the dtype, so that a result that is
    not small shows the roundings, too. Tiny ones are near the least normal number.
    """
    rng, own = np.random.default_rng(seed), _DIGITS[dtype]
    made, named = np.zeros((rows, K)), np.delete(np.arange(K), dropped)
    K, spread = len(named), 8 + int(np.log2(K)) // 2
    for i, row in zip(rng.integers(0, 36, rows).tolist(), made, strict=True):  # random forms, even for one row
        half = min(max(4, K // (1, 1, 4)[i % 3]), K) // 2
        high, digits = (12, 24) if dtype == torch.float16 else ((17, 24), (17, 24), (46, 53))[i // 3 % 3]
        positions = rng.permutation(named)
        exponents = np.where(
            rng.random(half) < 0.5, rng.integers(high, high + 3, half), rng.integers(0, spread, half) + high - digits
        )
        numbers = rng.uniform(1, 2, half) * 2.0**exponents
        row[positions[:half]] = numbers
        row[positions[half : 2 * half]] = -numbers
        if i >= 18 and (half > 1 or K == 2):
            at = rng.integers(high - 10, high + 3)
            row[positions[0]] = np.rint(rng.uniform(1, 2) * 2.0 ** (own - 1)) * 2.0 ** (at - own + 1)
            row[positions[half]] = rng.choice([-1, 1]) * 2.0 ** (at - own)
            row *= rng.choice([-1, 1])
        elif K - 2 * half == 1:
            row[positions[-1]] = rng.uniform(1, 2) * 2.0 ** (high - digits + rng.integers(4))
        elif half and i % 2:
            row[positions[half + np.abs(numbers).argmin()]] = 0.0
        least = torch.finfo(dtype).smallest_normal * 2.0**-8
        row *= least if kind == "tiny" else 2.0 ** rng.integers(-40 if dtype != torch.float16 else -12, 1)
    return torch.from_numpy(made).to(dtype).to(device)


# ---- what is measured


def of_rows(
    operator: Operator, M: int, K: int, dtype: torch.dtype, device: str, finishes: tuple[str, ...]
) -> MeasuredSum:
    """Element 0 of `operator(x [M, K]) -> [M]`: the sum of row 0."""
    x = torch.ones((M, K), dtype=dtype, device=device)
    in_turn = partial(_in_turn, x[0], lambda: operator(x)[0])

    def evaluate(terms: torch.Tensor, n: int) -> torch.Tensor:
        return in_turn(terms[:n])

    def sample(kind: str, seed: int, *dropped: int) -> tuple[torch.Tensor, None, torch.Tensor]:
        rows = _rows(kind, K, dtype, device, seed, dropped)
        return rows, None, in_turn(rows)

    return MeasuredSum(evaluate, sample, max(1, min(K, _CELLS // K)), K, dtype, device, finishes)


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
    """The last of M queries over K keys, all seen with equal scores: the mean of each column of the values.

    A weight is exp(0) before it is divided: 1, or the result of torch's vectors. Afterwards it is 1 / K, which is exact
    where K is a power of two. `operator`: (q [1, 1, M, D], k, v [1, 1, K, D]) -> [1, 1, M, D], causal.
    """
    q, k = (torch.zeros((1, 1, n, D), dtype=dtype, device=device) for n in (M, K))
    columns = torch.arange(0, D, every, device=device)
    v = torch.zeros((1, 1, K, D), dtype=dtype, device=device)

    def evaluate(terms: torch.Tensor, n: int) -> torch.Tensor:
        v[0, 0, :, columns] = terms.T
        return operator(q, k, v)[0, 0, -1, columns[:n]]

    def sample(kind: str, seed: int, *dropped: int) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor]:
        rows = _rows(kind, K, dtype, device, seed, dropped, len(columns))
        got = torch.cat([evaluate(part, len(part)) for part in rows.split(len(columns))])
        return (torch.ones_like(rows), rows, got) if device == "cuda" else (rows, None, got)  # a matrix unit's products

    which = "column 0" if every >= D else f"every {every}th column" if every > 1 else ""
    further = _APART if every == 1 and D > _APART else D
    fewer = partial(of_attention, operator, M, K, dtype, device, D, further) if every < D else None
    finishes = ("divided by K", "times 1/K", *([emulator.VECTOR_WEIGHTS] if device == "cpu" else []))
    return MeasuredSum(evaluate, sample, len(columns), K, dtype, device, finishes, which, fewer)


def of_ranks(operator: Operator, message: Message) -> list[MeasuredSum]:
    """For each order in which a message's numbers are added over the ranks, the numbers that are added so.

    A ring cuts a message into pieces that begin at different ranks, so each number has its own masks. `operator`:
    message with `terms` -> all of its sums [rows * width].
    """
    K, dtype = message.world, getattr(torch, message.dtype)
    big, one = _BIG.get(dtype, (2.0**100, 1.0))
    given = functools.cache(lambda *terms: operator(replace(message, terms=terms)).flatten())
    pairs = [tuple({i: big, j: -big}.get(rank, one) for rank in range(K)) for j in range(K) for i in range(j)]
    orders = torch.stack([given(pair) for pair in pairs]).nan_to_num().unique(dim=1, return_inverse=True)[1]
    pieces = sorted((torch.nonzero(orders == order)[:, 0] for order in orders.unique()), key=lambda of: int(of[0]))
    least, lists = min(map(len, pieces)), min(len(orders), _LISTS)

    def piece(of: torch.Tensor) -> MeasuredSum:
        some = of[torch.linspace(0, len(of) - 1, min(len(of), _LISTS)).round().long()]

        def evaluate(terms: torch.Tensor, n: int) -> torch.Tensor:
            row = terms[0].tolist()
            if min(row) < 0 and row.index(min(row)) < row.index(max(row)):  # symmetric, so computed once
                row = [-term if abs(term) == big else term for term in row]
            return given(tuple(row))[of[:1]]

        def sample(kind: str, seed: int, *dropped: int) -> tuple[torch.Tensor, None, torch.Tensor]:
            seeds = range(seed, seed + min(-(-_SUMS * (6 if kind == "zeros" else 1) // least), _SUMS))
            drawn = [_rows(kind, K, dtype, "cpu", one, dropped, lists)[:lists] for one in seeds]
            got = [given(*map(tuple, rows.tolist()))[some] for rows in drawn]
            return torch.cat([rows[some % lists] for rows in drawn]), None, torch.cat(got)

        left = f"; {len(pieces) - _CLASSES} more orders left out" if len(pieces) > _CLASSES else ""
        return MeasuredSum(evaluate, sample, 1, K, dtype, "cpu", which=_numbers(of, len(orders)) + left)

    return [piece(of) for of in pieces[:_CLASSES]]


def _numbers(of: torch.Tensor, every: int) -> str:
    runs = 1 + int((of.diff() != 1).sum())
    if runs == 1:
        return f"numbers {int(of[0]):,} to {int(of[-1]):,} of {every:,}"
    return f"{len(of):,} of {every:,} numbers, in {runs:,} runs from {int(of[0]):,} on"


def as_linear(name: str, operator: Operator) -> Operator:
    """One of `_PRODUCTS` as x [M, K], w [N, K] -> [M, N]: K in parts, or all rows at the first of two experts."""

    def parts(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return in_parts(operator, x, w.T, _PARTS)

    def grouped(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        ends = torch.full((2,), len(x), dtype=torch.int32, device=x.device)
        return operator(x, torch.stack([w, w]).mT, ends)

    return {"split_k": parts, "grouped_matmul": grouped}.get(name, operator)


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
    in_turn = partial(_in_turn, weight[0], lambda: operator(ones, weight)[0, 0])

    def evaluate(terms: torch.Tensor, n: int) -> torch.Tensor:
        if N == 1:
            return in_turn(terms[:n]) / ones[0, 0]
        if every > 1:
            weight[columns] = terms
        return operator(ones, weight if every > 1 else terms)[0, columns[:n]] / ones[0, 0]

    def sample(kind: str, seed: int, *dropped: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        drawn = []
        few = columns[torch.linspace(0, len(columns) - 1, min(len(columns), _COLUMNS)).round().long()]
        for i in range(-(-_SUMS * (6 if kind == "zeros" else 1) // len(few))):
            if kind in ("one sign", "zeros", "tiny"):
                signed = [0.5, 1.0, 1.0, 2.0] if kind == "one sign" else [-2.0, -1.0, 1.0, 2.0]
                powers = torch.tensor(signed, dtype=dtype, device=device)  # so that products are exact, too
                a = powers[torch.randint(4, (M, K), generator=generator(seed + i, device), device=device)]
                w = torch.zeros_like(weight)
                w[few] = _rows(kind, K, dtype, device, seed + i, dropped, len(few))[: len(few)] / a[0]
            else:
                a, w = product_operands(kind, (M, K), (N, K), dtype, device, seed + i, weight_kind="bell")
                a, w = _lengthened(a, seed + i), _lengthened(w, seed + i + 1) * weight_scale(K)
            drawn.append((a[:1].expand(len(few), K), w[few], operator(a, w)[0, few]))
        x, y, got = (torch.cat(parts) for parts in zip(*drawn, strict=True))
        return x, y, got

    fewer = partial(of_product, operator, M, K, N, dtype, device, min(_APART, N)) if every == 1 < N else None
    which = "column 0" if 1 < every == N else f"every {every}th column" if every > 1 else ""
    lists = len(columns) if N > 1 else max(1, _CELLS // K)
    return MeasuredSum(evaluate, sample, lists, K, dtype, device, which=which, fewer=fewer)


class ReductionOrder(Probe):
    """The tree of row 0 at some M; where its bits differ, the tree of each class."""

    name = "reduction-order"

    def __init__(self) -> None:
        self._operators: dict[str, Operator] = {}

    def cases(self, options: Options) -> Iterable[Case]:
        """Sums and means of each width; a GEMV (M = 1) and elements of GEMMs of each layer, with K in parts, and at an
        expert; the values of attention; a sum over ranks. Among all probes a sum of the first width."""
        if options.one_of_all:
            K, N = next(_sizes("sum", options))  # the others take a minute
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
            rows = make("wide", (_WIDTH[device], K), dtype, "cpu", generator(seed, "cpu"))
            terms = tuple(map(tuple, rows.tolist()))
            return {"message": Message(K, device, "all_reduce", "stock", case.dtype, M, len(rows), terms=terms)}
        if case.operator == "attention":
            v = make("order", (_HEAD, K), dtype, device, generator(seed, device)).T.contiguous()
            q, k = (torch.zeros((1, 1, n, _HEAD), dtype=dtype, device=device) for n in (M, K))
            return {"q": q, "k": k, "v": v[None, None]}  # equal scores: only the order of the values differs
        if case.operator not in _PRODUCTS:
            return {"x": make("order", (M, K), dtype, device, generator(seed, device))}
        x, w = product_operands("order", (M, K), (case.shape["N"], K), dtype, device, seed, weight_kind="bell")
        return {"x": x, "w": w * weight_scale(K)}

    def trials(self, case: Case, inputs: Any, operator: Operator) -> Iterator[Trial]:
        """Row 0 in batches of M; for attention the last query of M."""
        self._operators[case.operator] = operator
        for M in case.data["values"]:
            yield Trial(M, partial(_result_of, case, operator, inputs, M))

    def reference(self, case: Case, inputs: Any) -> torch.Tensor | None:
        """The row in float64."""
        if case.operator == "all_reduce":
            return torch.tensor(inputs["message"].terms, dtype=torch.float64).sum(1).repeat(2)[None]
        return super().reference(case, inputs)

    def extra(self, case: Case, inputs: Any, results: list[torch.Tensor]) -> dict[str, Any]:
        """The tree of each class, at the first M that has it, and how the trees differ."""
        operator = self._operators[case.operator]
        given = [_result_of(case, operator, inputs, M) for M in case.data["values"]]
        firsts = [next((i for i, got in enumerate(given) if identical(got, result)), None) for result in results]
        sizes = [case.data["values"][i] for i in firsts if i is not None]
        measured = [(M, one) for M in sizes[:_CLASSES] for one in _sums_of(case, operator, inputs, M)]
        return trees_of([one for _, one in measured], [M for M, _ in measured] + sizes[_CLASSES:])


def _sizes(operator: str, options: Options) -> Iterator[tuple[int, int]]:
    device, given = options.device, base.given_layer(options)
    if operator == "all_reduce":
        worlds = options.ranks or (_RANKS,)
        yield from ((n, 1) for n in worlds if device == "cpu" or options.ranks or n <= torch.cuda.device_count())
    elif given is not None:
        yield given if operator in _PRODUCTS else (given[0], 1)
    elif operator == "linear" and options.layers:
        yield from ((K, N) for _, K, N in options.layers)
    elif operator in _PRODUCTS:
        yield from _LAYERS[device] if operator == "linear" else _LAYERS[device][-1:]
    else:
        yield from ((K, 1) for K in _WIDTHS.get(operator, (_KEYS[device],)))
    if options.full and given is None and operator != "all_reduce":
        yield _LONGEST, 64 if operator in _PRODUCTS else 1


def _case(operator: str, K: int, N: int, dtype: str, options: Options) -> Case:
    device = options.device
    largest = None if options.m is None else base.size("--m", options.m, 1)
    batches = [m for m in _BATCHES[device] if largest is None or m < largest] + ([largest] if largest else [])
    M = max(batches)
    needed = (M * K + 3 * N * K) * base.element_bytes(dtype) + 5 * min(N, _COLUMNS) * K * 8 + K * 400
    needed += 2 * N * K * base.element_bytes(dtype) if operator == "grouped_matmul" else 0
    needed += M * K * 4 + 4 * K * _HEAD * 8 if operator == "attention" else 0
    require_memory(device, needed, f"the order of {operator} of M={M} K={K} N={N} in {dtype}")
    what = f"{operator}: the order in which row 0 of M is added, K={K}"
    if operator == "attention":
        what = f"{operator}: the order in which values are added for the last query of M, K={K}"
    elif operator == "all_reduce":
        what = f"{operator}: the order in which ranks are added in the first and the last of M rows, K={K}"
        what += shared_gpus(K) if device == "cuda" else ""
    elif operator == "split_k":
        what = f"{operator}: the order in which row 0 of M is added, K={K} in {_PARTS} parts"
    shape = {"M": M, "K": K} | ({"N": N} if operator in _PRODUCTS else {})
    title = what + (f" N={N}" if operator in _PRODUCTS else "")
    data = {"values": batches if len(batches) > 1 else [1, *batches]}
    return Case(f"{title}, order", operator, shape, dtype, "batch_size", "order", data=data)


def _sums_of(case: Case, operator: Operator, inputs: Any, M: int) -> list[MeasuredSum]:
    """The sums whose trees are measured: several for a sum over ranks."""
    if case.operator == "all_reduce":
        return of_ranks(operator, replace(inputs["message"], rows=M))
    K, dtype = case.shape["K"], case.torch_dtype
    device = str(next(iter(inputs.values())).device.type)
    if case.operator == "attention":
        return [of_attention(operator, M, K, dtype, device)]
    if case.operator in _PRODUCTS:
        return [of_product(as_linear(case.operator, operator), M, K, case.shape["N"], dtype, device)]
    finishes = ("divided by K", "times 1/K") if case.operator == "mean" else ("",)
    return [of_rows(operator, M, K, dtype, device, finishes)]


def _result_of(case: Case, operator: Operator, inputs: Any, M: int) -> torch.Tensor:
    """The compared part: row 0 of M, the last query of M, or a message's first row and its last."""
    if case.operator == "all_reduce":
        message = replace(inputs["message"], rows=M)
        return operator(message).view(M, message.width)[[0, -1]].view(1, -1)
    if case.operator == "attention":
        return operator(inputs["q"][:, :, -M:].contiguous(), inputs["k"], inputs["v"])[0, 0, -1:]
    return row_0(as_linear(case.operator, operator), inputs["x"][:M], inputs.get("w"))


def row_0(operator: Operator, x: torch.Tensor, w: torch.Tensor | None) -> torch.Tensor:
    """The result of row 0 of x; `w`: of a product."""
    return operator(x.contiguous(), *(() if w is None else (w,)))[:1]


def trees_of(measured: Sequence[MeasuredSum], sizes: Sequence[int]) -> dict[str, Any]:
    """For a row's extra: the tree at each of these M, each of another class, and how consecutive ones differ. Further
    classes are only counted."""
    left, sizes = len(sizes) - len(measured), sizes[: len(measured)]
    kept: list[dict[str, Any]] = []
    trees: list[tuple[str, Found]] = []
    for M, one in zip(sizes, measured, strict=True):
        name = f"M = {M}" + f", {one.which}" * (sizes.count(M) > 1)
        one, found, said = _tree_of(one)
        trees += [(name, found)] if found is not None else []
        kept.append({"M": M, "K": one.K, **said})
    between = [f"{m} and {n}: {_between(a, b)}" for (m, a), (n, b) in pairwise(trees)]
    between += [f"{left} more of the classes: not asked for their trees"] if left else []
    return {"reduction_trees": {"classes": kept, "between": between}}


def _tree_of(one: MeasuredSum) -> tuple[MeasuredSum, Found | None, dict[str, Any]]:
    """The first tree that is proven, trying fewer columns at once; else the first tree; and its record."""
    kept, found, measured = one, None, one
    said = {"words": "no tree", "proven": False, "failed_on": "", "drawn": []}
    while found is None or found.proven is None:
        try:
            again = find(measured)
            if found is None or again.proven is not None:
                kept, found = measured, again
        except NotASumError as error:
            said["failed_on"] = said["failed_on"] or str(error)
        except Exception as error:  # noqa: BLE001 - a kernel may raise anything at masks: the row then has no tree
            said["failed_on"] = said["failed_on"] or reason_of(error)
        if measured.fewer is None:
            break
        measured = measured.fewer()
    return kept, found, said if found is None else found.record() | ({"which": kept.which} if kept.which else {})


def trees_of_product(
    operator: Operator, x: torch.Tensor, w: torch.Tensor, values: Sequence[int], results: Sequence[torch.Tensor],
    most: int,
) -> dict[str, Any]:  # fmt: skip
    """As `trees_of`, for the classes of a sweep over M whose row 0 differs; {} where it is the same in all.

    Args:
        x, w: [M, K] and [N, K].
        values: M of the sweep.
        results: One result of each class; row 0 of each is row 0 of x.
        most: How many trees are measured.
    """
    seen: list[torch.Tensor] = []
    for result in results:
        if not any(identical(result[:1], row) for row in seen):
            seen.append(result[:1])
    sizes: list[int] = []
    left = seen if len(seen) > 1 else []
    for M in values:
        row = row_0(operator, x[:M], w) if left else None
        if row is not None and any(identical(row, other) for other in left):
            sizes.append(M)
            left = [other for other in left if not identical(row, other)]
    if len(sizes) < 2:
        return {}
    (K, N), device = (w.shape[1], w.shape[0]), str(x.device.type)
    return trees_of([of_product(operator, M, K, N, x.dtype, device) for M in sizes[:most]], sizes)


def _between(a: Found, b: Found) -> str:
    said = compared(a.tree, b.tree)
    if a.tree.digest != b.tree.digest:
        return said
    if a.proven is not None and a.proven == b.proven and not a.proven.aside:  # so no tested sum has other bits
        return f"{said} and arithmetic, {a.proven.words}: what differs is not in the sums that were tested"
    if a.proven is not None and b.proven is not None:
        return f"{said}, and other bits: something else than the order ({a.proven.words}; and {b.proven.words})"
    what = "something else than the order (precision, fused multiply-adds, promotion)"
    return f"{said}, and other bits: {what}, as far as masks show: not both trees are proven"
