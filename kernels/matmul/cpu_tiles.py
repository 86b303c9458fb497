"""Batch invariance on a CPU: call the library only at row counts that were seen to give the same bits.

A CPU library picks its inner kernel by the shape of the call, the layout, the alignment, the instruction set and the
thread count, never by the values. So a call of a fixed shape always adds in the same order, and the question is only
which row counts share one order. That is certified on the machine, at a shape's first use:

1. A base tile is found whose rows do not depend on their position in the tile or on their neighbours
(position-invariance). The inputs are `order_revealing`: their exact result is zero, so the result consists of the
rounding errors of the order of additions, in the leading bits, even where it is rounded to bfloat16.
2. Every other row count tried is compared with the base tile on the same rows, every row at its position. Those with
equal bits in all of them form one numerics class; the others are never called.

A batch is then cut into calls of certified sizes, the last padded with zero rows where need be. Inputs and outputs of
each call start on 64-byte boundaries, as they did when it was certified (MKL's own condition for repeatable results).
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import torch

from nondet.core.certificates import Certificate, certificates
from nondet.core.launch import proving
from nondet.core.proof import operands_key
from nondet.errors import UserError

_ALIGNMENT = 64


@dataclass(frozen=True)
class Plan:
    """How a number of rows is cut into calls."""

    sizes: tuple[int, ...]
    label: str


@dataclass
class Tiles:
    """Row counts of one numerics class."""

    what: str  # the operator, for notes and errors
    base: int  # the tile that was checked for position-invariance
    sizes: tuple[int, ...]  # certified row counts, ascending; `base` among them
    rejected: tuple[int, ...]  # row counts that gave different bits
    _plans: dict[int, Plan] = field(default_factory=dict, repr=False)

    def plan(self, rows: int) -> Plan:
        """Cut `rows` (at least 1) into certified sizes; only the last call may reach beyond the rows."""
        found = self._plans.get(rows)
        if found is None:
            sizes = (self.sizes[-1],) * (rows // self.sizes[-1])
            left = rows % self.sizes[-1]
            while left > 0:  # padded to the next size, unless that doubles the rows
                above = next(size for size in self.sizes if size >= left)
                below = [size for size in self.sizes if size < left]
                sizes += (below[-1] if below and above > 2 * left else above,)
                left -= sizes[-1]
            label = f"{self.what}[{'+'.join(map(str, _runs(sizes)))}]"
            found = self._plans[rows] = Plan(sizes, label)
        return found

    def apply(self, inputs: Sequence[torch.Tensor], call: Callable[..., torch.Tensor]) -> torch.Tensor:
        """All rows, by calls of certified sizes: call(*tiles) takes aligned rows of inputs that are contiguous."""
        rows = inputs[0].shape[0]
        sizes = self.plan(rows).sizes
        if len(sizes) == 1:
            out = call(*[_tile(x, 0, sizes[0]) for x in inputs])
            return out if sizes[0] == rows else out[:rows]
        start = 0
        for size in sizes:
            part = call(*[_tile(x, start, size) for x in inputs])
            if start == 0:
                out = part.new_empty((rows, *part.shape[1:]))
            out[start : start + size] = part[: rows - start]
            start += size
        return out


def _tile(x: torch.Tensor, start: int, size: int) -> torch.Tensor:
    """Rows start ... start + size of x, aligned, with zeros beyond its end."""
    if start + size > x.shape[0]:
        return padded(x, start, size)
    tile = x if size == x.shape[0] else x[start : start + size]
    return tile if tile.data_ptr() % _ALIGNMENT == 0 else tile.clone()


def padded(x: torch.Tensor, start: int, size: int) -> torch.Tensor:
    """Rows start ... start + size of x, zeros beyond its end."""
    tile = x.new_zeros((size, *x.shape[1:]))
    tile[: x.shape[0] - start] = x[start:]
    return tile


def _runs(sizes: Iterable[int]) -> list[str]:
    runs = [(len([*run]), size) for size, run in itertools.groupby(sizes)]
    return [f"{n}x{size}" if n > 1 else str(size) for n, size in runs]


def restored(what: str, proof: Certificate | None) -> Tiles | None:
    """The tiles that a certificate lists; None without one, or if its numbers can't be tiles."""
    if proof is None or not proof.holds:
        return None
    numbers = proof.numbers
    sizes, base, rejected = (tuple(numbers.get(name, ())) for name in ("sizes", "base", "rejected"))
    if len(base) != 1 or base[0] not in sizes or min(sizes) < 1:
        return None
    return Tiles(what, base[0], sizes, rejected)


_BASES = (16, 64, 48, 24, 12)

# Row counts tried: fewer for rows with more multiply-adds, to keep a certificate under a few tenths of a second.
# Batches between them are cut or padded, which costs a little speed and no bits.
_DENSE = (*range(1, 33), *range(36, 65, 4), *range(72, 129, 8), *range(144, 257, 16), 512)
_MEDIUM = (*range(1, 17), *range(20, 33, 4), *range(40, 65, 8), *range(80, 129, 16), 192, 256)
_LADDER = (1, 2, 4, 8, 12, 16, 20, 24, 28, 32, 40, 48, 56, 64, 96, 128, 256)
_SPARSE = (1, 4, 16, 64)
_AFFORDABLE = ((2**18, _DENSE), (2**21, _MEDIUM), (2**23, _LADDER))


Case = tuple[Callable[..., torch.Tensor], Sequence[torch.Tensor]]


class NotInvariantError(UserError, RuntimeError):
    """No way to compute an operator here was seen to be batch-invariant."""


def sizes_for(work: float) -> tuple[int, ...]:
    """Row counts worth certifying where one row costs `work` multiply-adds: the more expensive a row, the fewer."""
    for limit, sizes in _AFFORDABLE:
        if work <= limit:
            return sizes
    return _SPARSE


def prove(what: str, cases: Sequence[Case], sizes: Sequence[int], bases: Sequence[int] = _BASES) -> Tiles:
    """Find the row counts among `sizes` of one numerics class, that of the first of `bases` that minds no position.

    `what` is said in notes and errors. A case is (call, inputs): call(*tiles) is the fixed-shape call under test; the
    inputs share their first axis. A row count has to agree in every case. NotInvariantError: no base will do.
    """
    for base in bases:
        expected = [_expected(call, inputs, base, max(*sizes, base)) for call, inputs in cases]
        right = [e for e in expected if e is not None]
        if len(right) == len(cases):
            tried, each = sorted({*sizes, base}), list(zip(cases, right, strict=True))
            kept = tuple(size for size in tried if all(agrees(case, rows, size) for case, rows in each))
            return Tiles(what, base, kept, tuple(size for size in tried if size not in kept))
    raise NotInvariantError(
        f"{what}: no tile of {', '.join(map(str, bases))} rows gives bits that are independent of a row's place here",
        "Another thread count (torch.set_num_threads) or instruction set (MKL_CBWR, ONEDNN_MAX_CPU_ISA) may have one.",
    )


def agrees(case: Case, right: torch.Tensor, size: int) -> bool:
    """Whether a call of the first `size` rows gives the first of `right`, bit for bit."""
    call, inputs = case
    out = call(*(x[:size] if x.shape[0] >= size else padded(x, 0, size) for x in inputs))
    return _same_bits(out[: right.shape[0]], right[:size])


def _expected(
    call: Callable[..., torch.Tensor], inputs: Sequence[torch.Tensor], base: int, rows: int
) -> torch.Tensor | None:
    """Results of the first `rows` rows in base tiles; None where the base tile is not position-invariant."""
    rows = min(rows, inputs[0].shape[0])
    parts = []
    for start in range(0, rows, base):
        stop = min(start + base, rows)
        parts.append(call(*(padded(x[:stop], start, base) for x in inputs))[: stop - start])
    first = [padded(x[:base], 0, base) for x in inputs]
    right = call(*first)
    if not bool(torch.isfinite(right).all()):  # it would show nothing
        return None
    for shift in range(1, base):  # every row at every position, with other neighbours
        if not _same_bits(call(*(x.roll(shift, 0) for x in first)).roll(-shift, 0), right):
            return None
    for x in first:
        x[1:] = 0  # as padding does
    if not _same_bits(call(*first)[:1], right[:1]):
        return None
    return torch.cat(parts)


def _same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))


KNOWN: dict[tuple[object, ...], Tiles | NotInvariantError] = {}
use_kept = True
_lock = threading.RLock()


# looked up once, because every product of a step needs them
_threads, _onednn = torch.get_num_threads, torch._C._get_mkldnn_enabled
_precision = torch._C._get_float32_matmul_precision


def environment_key() -> tuple[object, ...]:
    """Settings within the process that change which kernel a CPU library picks."""
    return _threads(), _onednn(), _precision()


def proven(what: str, key: tuple[object, ...], make: Callable[[], Tiles]) -> Tiles:
    """The tiles of `what` under `key`, proven by `make` at the first use on this machine; the process caches a failure.

    The certificate is kept, so that the next process, and a dispatcher after `nondet certify`, proves nothing. `key` is
    whatever may change the bits, `environment_key()` included. Raises NotInvariantError: as `prove`.
    """
    tiles = KNOWN.get(key)
    if tiles is None:
        with _lock:
            tiles = KNOWN.get(key)
            if tiles is None:
                tiles = KNOWN[key] = _kept_or_made(what, key, make)
    if isinstance(tiles, NotInvariantError):
        raise tiles
    return tiles


def _kept_or_made(what: str, key: tuple[object, ...], make: Callable[[], Tiles]) -> Tiles | NotInvariantError:
    kept, written = certificates("cpu"), operands_key(f"cpu-tiles {what}", (), map(str, key))
    tiles = restored(what, kept.proof("tiles", written)) if use_kept else None
    if tiles is not None:
        return tiles
    try:
        with torch.no_grad(), proving():
            tiles = make()
    except NotInvariantError as error:
        return error
    evidence = f"base {tiles.base}: a row has its bits at every place; {len(tiles.sizes)} row counts have the same"
    numbers = {"base": [tiles.base], "sizes": list(tiles.sizes), "rejected": list(tiles.rejected)}
    kept.record("tiles", written, True, evidence, numbers)
    return tiles


def forget() -> None:
    """Prove everything again at its next use, whatever certificates exist."""
    global use_kept
    with _lock:
        KNOWN.clear()
        use_kept = False
