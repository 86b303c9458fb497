"""What the cells of a run say: ratios within it, their intervals, shares of the limit, means, and classes of bits.

A ratio is the best stock time over an implementation's: above 1 is faster than stock. Best means the fastest stock
implementation of that very cell. Its interval is a bootstrap over replays, drawn in pairs, since replay i of one stood
beside replay i of the other. It covers what varied within this run, and not what another day or machine would give.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from nondet.core.records import Cell, Role, Row, Run, Status, Timed, role_of

__all__ = [
    "SLOW",
    "BitsCount",
    "Comparison",
    "Section",
    "Summary",
    "best_stock",
    "compare",
    "failures",
    "is_stock",
    "sections",
]

Floats = npt.NDArray[np.float64]

# What the project holds itself to: no cell below this.
SLOW = 0.9
_DRAWS = 1000
_SEED = 0


def is_stock(impl: str) -> bool:
    """Whether it is what a user gets by default, or one of its named backends."""
    return role_of(impl) in (Role.STOCK, Role.BACKEND)


def _measured(timed: Timed) -> bool:
    """Whether there are times to divide by: a run file may have been edited, or a clock too coarse."""
    return timed.status == Status.TIMED and timed.median_us > 0 and min(timed.samples_us, default=0.0) > 0


def best_stock(cell: Cell) -> Timed | None:
    """The fastest stock implementation of the cell."""
    timed = [t for t in cell.timed if is_stock(t.impl) and _measured(t)]
    return min(timed, key=lambda t: t.median_us, default=None)


@dataclass(frozen=True)
class Comparison:
    """One implementation in one cell, against the best stock one.

    Attributes:
        baseline: None where no stock implementation was timed; then there is no ratio.
    """

    cell: Cell
    timed: Timed
    baseline: Timed | None

    @cached_property
    def draws(self) -> Floats:
        """Bootstrapped ratios; empty without a baseline."""
        if self.baseline is None or not _measured(self.timed):
            return np.empty(0)
        count = min(len(self.baseline.samples_us), len(self.timed.samples_us))
        chosen = np.random.default_rng(_SEED).integers(0, count, (_DRAWS, count))
        theirs, ours = (np.asarray(t.samples_us[:count])[chosen] for t in (self.baseline, self.timed))
        drawn: Floats = np.median(theirs, 1) / np.median(ours, 1)
        return drawn

    @property
    def ratio(self) -> float | None:
        """Best stock's median over this one's; None where one of them was not timed."""
        return None if self.baseline is None or not self.draws.size else self.baseline.median_us / self.timed.median_us

    @cached_property
    def interval(self) -> tuple[float, float]:
        """95%, by percentiles of the bootstrap. Only where there is a ratio."""
        low, high = np.percentile(self.draws, [2.5, 97.5])
        return float(low), float(high)

    @property
    def within_noise(self) -> bool:
        """Whether the interval holds 1: neither is shown to be faster."""
        return self.ratio is not None and self.interval[0] <= 1.0 <= self.interval[1]

    @property
    def share(self) -> float | None:
        """Limit over time: 1 is all that the machine can do. None where the limit is unknown or does not hold.

        Inputs that stay in a cache are not bound by memory's bandwidth.
        """
        limit = self.cell.limit_us
        if limit is None or not _measured(self.timed):
            return None
        return None if not self.cell.cold and self.cell.limited_by == "memory" else limit / self.timed.median_us


def compare(cell: Cell) -> list[Comparison]:
    """Every implementation of the cell, in the order of the run."""
    baseline = best_stock(cell)
    return [Comparison(cell, timed, baseline) for timed in cell.timed]


@dataclass(frozen=True)
class Summary:
    """One implementation over the cells of one section that have a ratio."""

    impl: str
    compared: tuple[Comparison, ...]
    failed: int

    @property
    def mean(self) -> float:
        """Geometric mean of the ratios."""
        return float(np.exp(np.mean(np.log([c.ratio for c in self.compared if c.ratio is not None]))))

    @property
    def interval(self) -> tuple[float, float]:
        """95% of the geometric mean: cells are timed apart, so their draws are independent."""
        logs = np.log(np.stack([np.random.default_rng(i).permutation(c.draws) for i, c in enumerate(self.compared)]))
        low, high = np.percentile(np.exp(logs.mean(0)), [2.5, 97.5])
        return float(low), float(high)

    @property
    def worst(self) -> Comparison:
        """The cell with the lowest ratio."""
        return min(self.compared, key=lambda c: c.ratio or 0.0)

    @property
    def slow(self) -> int:
        """Cells below `SLOW`."""
        return sum((c.ratio or 0.0) < SLOW for c in self.compared)

    @property
    def shares(self) -> tuple[float, float] | None:
        """Lowest and highest share of the limit, over cells that have one."""
        shares = [c.share for c in self.compared if c.share is not None]
        return (min(shares), max(shares)) if shares else None


@dataclass(frozen=True)
class BitsCount:
    """How many groups of a section gave one class of bits under an implementation."""

    impl: str
    one_class: int
    groups: int
    failed: int


@dataclass(frozen=True)
class Section:
    """Cells that are reported together."""

    name: str
    dtype: str
    device: str
    impls: tuple[str, ...]
    cells: tuple[Cell, ...]
    rows: tuple[Row, ...]

    @cached_property
    def compared(self) -> tuple[tuple[Comparison, ...], ...]:
        """Each cell's implementations."""
        return tuple(tuple(compare(cell)) for cell in self.cells)

    @cached_property
    def summaries(self) -> tuple[Summary, ...]:
        """Every implementation that is not stock, and has a ratio anywhere."""
        summaries = []
        for impl in self.impls:
            mine = [c for row in self.compared for c in row if c.timed.impl == impl]
            compared = tuple(c for c in mine if c.ratio is not None)
            if compared and not is_stock(impl):
                failed = sum(not _measured(c.timed) for c in mine)
                summaries.append(Summary(impl, compared, failed))
        return tuple(summaries)

    @cached_property
    def bits(self) -> tuple[BitsCount, ...]:
        """Every implementation whose bits were compared."""
        counts = []
        for impl in self.impls:
            mine = [r for r in self.rows if r.impl == impl]
            measured = [r for r in mine if r.status in (Status.IDENTICAL, Status.DIVERGENT)]
            if mine:
                alike = sum(r.status == Status.IDENTICAL for r in measured)
                counts.append(BitsCount(impl, alike, len(measured), len(mine) - len(measured)))
        return tuple(counts)

    @property
    def groups(self) -> dict[str, list[tuple[Comparison, ...]]]:
        """Cells by group, but for those that no implementation was put to."""
        groups: dict[str, list[tuple[Comparison, ...]]] = {}
        for row in filter(None, self.compared):
            groups.setdefault(row[0].cell.group, []).append(row)
        return groups


def sections(run: Run) -> list[Section]:
    """The sections of a run, in its order."""
    grouped: dict[tuple[str, str, str], list[Cell]] = {}
    for cell in run.cells:
        grouped.setdefault((cell.section, cell.dtype, cell.device), []).append(cell)
    listed = []
    for (name, dtype, device), cells in grouped.items():
        impls = tuple(dict.fromkeys(t.impl for cell in cells for t in cell.timed))
        groups = {cell.group for cell in cells}
        rows = [r for r in run.rows if r.probe == "bench" and r.operator == cells[0].operator]
        mine = [r for r in rows if (r.dtype, r.device) == (dtype, device) and r.group in groups]
        listed.append(Section(name, dtype, device, impls, tuple(cells), tuple(mine)))
    return listed


def failures(listed: Sequence[Section]) -> list[tuple[str, str, str]]:
    """(status, which, reason) of whatever was not timed; cells of one section with the same reason are joined."""
    joined: dict[tuple[str, str, str, str], list[str]] = {}
    for section in listed:
        for cell in section.cells:
            for timed in cell.timed:
                if timed.status != Status.TIMED:
                    joined.setdefault((timed.status, section.name, timed.impl, timed.reason), []).append(cell.case)
    return [
        (status, f"{name}, {impl}: {cases[0] if len(cases) == 1 else f'{len(cases)} cells, {cases[0]} first'}", reason)
        for (status, name, impl, reason), cases in joined.items()
    ]
