"""Summaries of benchmark cases: ratios, intervals, shares of the limit, and the check against a kept run. No torch.

A ratio is the best stock time over an implementation's: above 1 is faster than stock. Best means the fastest stock
implementation of that case. Replay i of one ran next to replay i of the other: the ratio is the median of these pairs'
ratios, and its interval a bootstrap over the pairs. It covers variation within this run, but not another day or
machine.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from statistics import NormalDist

import numpy as np
import numpy.typing as npt

from nondet.core.records import Cell, Role, Row, Run, Status, Timed, role_of

Floats = npt.NDArray[np.float64]

# The project's own limit: no case below this.
SLOW = 0.9
_DRAWS = 1000
_SEED = 0


def is_stock(impl: str) -> bool:
    """Whether it is the default or one of its named backends."""
    return role_of(impl) in (Role.STOCK, Role.BACKEND)


def _measured(timed: Timed) -> bool:
    """Whether it has positive times: a run file may have been edited, or the clock is too coarse."""
    return timed.status == Status.TIMED and timed.median_us > 0 and min(timed.samples_us, default=0.0) > 0


def best_stock(cell: Cell) -> Timed | None:
    """The fastest stock implementation of the case."""
    timed = [t for t in cell.timed if is_stock(t.impl) and _measured(t)]
    return min(timed, key=lambda t: t.median_us, default=None)


@dataclass(frozen=True)
class Comparison:
    """One implementation in one case, compared with the best stock one; without a `baseline` there is no ratio."""

    cell: Cell
    timed: Timed
    baseline: Timed | None

    @cached_property
    def paired(self) -> Floats:
        """Stock's time over this one's, replay by replay; empty without a baseline. Replay i of one ran next to replay
        i of the other, so a clock that changes between two replays affects both."""
        if self.baseline is None or not _measured(self.timed):
            return np.empty(0)
        count = min(len(self.baseline.samples_us), len(self.timed.samples_us))
        return np.divide(self.baseline.samples_us[:count], self.timed.samples_us[:count], dtype=np.float64)

    @cached_property
    def draws(self) -> Floats:
        """Bootstrapped ratios; empty without a baseline."""
        count = len(self.paired)
        if not count:
            return self.paired
        return np.median(self.paired[np.random.default_rng(_SEED).integers(0, count, (_DRAWS, count))], 1)

    @cached_property
    def ratio(self) -> float | None:
        """Median over replays of the best stock's time over this one's; None where one of them was not timed."""
        return float(np.median(self.paired)) if len(self.paired) else None

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
        """Limit over time: 1 is the machine's limit. None where the limit is unknown or does not hold. Inputs that stay
        in a cache are not bound by memory's bandwidth."""
        limit = self.cell.limit_us
        if limit is None or not _measured(self.timed):
            return None
        return None if not self.cell.cold and self.cell.limited_by == "memory" else limit / self.timed.median_us


def compare(cell: Cell) -> list[Comparison]:
    """Every implementation of the case, in the order of the run."""
    baseline = best_stock(cell)
    return [Comparison(cell, timed, baseline) for timed in cell.timed]


@dataclass(frozen=True)
class Summary:
    """One implementation over the cases of one section that have a ratio."""

    impl: str
    compared: tuple[Comparison, ...]
    failed: int

    @property
    def mean(self) -> float:
        """Geometric mean of the ratios."""
        return float(np.exp(np.mean(np.log([c.ratio for c in self.compared if c.ratio is not None]))))

    @property
    def interval(self) -> tuple[float, float]:
        """95% of the geometric mean: cases are timed separately, so their draws are independent."""
        logs = np.log(np.stack([np.random.default_rng(i).permutation(c.draws) for i, c in enumerate(self.compared)]))
        low, high = np.percentile(np.exp(logs.mean(0)), [2.5, 97.5])
        return float(low), float(high)

    @property
    def worst(self) -> Comparison:
        """The case with the lowest ratio."""
        return min(self.compared, key=lambda c: c.ratio or 0.0)

    @property
    def slow(self) -> int:
        """Cases below `SLOW`."""
        return sum((c.ratio or 0.0) < SLOW for c in self.compared)

    @property
    def shares(self) -> tuple[float, float] | None:
        """Lowest and highest share of the limit, over cases that have one."""
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
    """Benchmark cases that are reported together."""

    name: str
    dtype: str
    device: str
    impls: tuple[str, ...]
    cells: tuple[Cell, ...]
    rows: tuple[Row, ...]

    @cached_property
    def compared(self) -> tuple[tuple[Comparison, ...], ...]:
        """Each case's implementations."""
        return tuple(tuple(compare(cell)) for cell in self.cells)

    @cached_property
    def summaries(self) -> tuple[Summary, ...]:
        """Every implementation that is not stock and has a ratio in some case."""
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
        """Cases by group, without those that no implementation ran."""
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
    """(status, case, reason) of what was not timed; cases of one section with the same reason are joined."""
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


# `nondet bench --check` compares a new run with a kept one by ratios that each run measured within itself, because
# microseconds of two runs show little of the code: clocks, heat and neighbours differ. An implementation regressed in a
# case where its ratio to the best stock fell by more than `CELL_MARGIN` beyond the noise of both runs, and in a section
# where the geometric mean fell by more than `MEAN_MARGIN` beyond it. Noise is the bootstrap's standard error of both;
# the level of 5% is shared among all cases (Bonferroni). The margins cover what a bootstrap over one run's replays
# can't see: another process, another day. On another machine only bits are judged that had one class and have several,
# in an implementation that is not stock. A coarse check is for machines that are shared or are not the kept run's own,
# such as those of CI. There a case regressed where its ratio fell by more than a given factor, by the medians beyond
# noise and by the fastest replays as well: neighbours only add time, while slower code is slower in every replay. The
# factor applies on another CPU too where ATen uses the same vector instructions with as many threads (on a GPU: where
# the compute capability is the same).

CELL_MARGIN, MEAN_MARGIN = 0.10, 0.05
_LEVEL = 0.05

Key = tuple[str, ...]


@dataclass(frozen=True)
class Check:
    """What a comparison of two runs found; `notes` list what was compared, and what could not be."""

    regressions: tuple[str, ...]
    notes: tuple[str, ...]


def cells_of(run: Run) -> dict[Key, Cell]:
    """Cases by what they compute and by clock, whatever their section."""
    return {_key(cell.operator, cell.shape, cell.dtype, cell.device, cell.method): cell for cell in run.cells}


def _key(operator: str, shape: Mapping[str, int], dtype: str, device: str, method: str) -> Key:
    return (operator, " ".join(f"{axis}={shape[axis]}" for axis in sorted(shape)), dtype, device, method)


def check_runs(kept: Run, new: Run, factor: float | None = None) -> Check:
    """Compare every implementation that is not stock, in every case that both runs have, with the kept run. `factor`,
    for a coarse check: how many times slower against stock a case may become. None: the margins above, on the machine
    of the kept run."""
    kept_cells, new_cells = cells_of(kept), cells_of(new)
    common = [key for key in new_cells if key in kept_cells]
    regressions = _diverged(kept, new)
    moved = _moved(kept, new, coarse=factor is not None)
    notes = [f"checked against {kept.header.started}: {len(common)} of {len(new_cells)} cells are in both runs"]
    if moved:
        notes.append(f"speed is not judged, since the machine is another one: {moved}")
        return Check(tuple(regressions), tuple(notes))
    pairs: list[tuple[Comparison, Comparison]] = []
    for key in common:
        before = {c.timed.impl: c for c in compare(kept_cells[key]) if c.ratio is not None}
        after = {c.timed.impl: c for c in compare(new_cells[key]) if not is_stock(c.timed.impl)}
        for impl, comparison in after.items():
            if impl in before and comparison.ratio is None:
                reason = comparison.timed.reason or "no time"
                regressions.append(f"{_where(comparison)}: it was timed, and now: {reason}")
            elif impl in before:
                pairs.append((before[impl], comparison))
    sections: dict[tuple[str, str, str], list[tuple[Comparison, Comparison]]] = {}
    for pair in pairs:
        cell = pair[1].cell
        sections.setdefault((cell.section, cell.dtype, pair[1].timed.impl), []).append(pair)
    means = sections if factor is None else {}
    tests = len(pairs) + len(means)
    for old, now in pairs:
        if factor is None:
            fell = _fell([(old, now)], 1 / (1 - CELL_MARGIN), tests)
        else:
            fell = _fell([(old, now)], factor, tests) and _of_fastest(old) > factor * _of_fastest(now)
        if fell:
            regressions.append(f"{_where(now)}: {now.ratio:.3f} of stock, and it was {old.ratio:.3f}")
    for (section, dtype, impl), members in means.items():
        if _fell(members, 1 / (1 - MEAN_MARGIN), tests):
            before_mean, after_mean = (_mean([pair[i] for pair in members]) for i in (0, 1))
            where = f"{section} {dtype}, {impl}, {len(members)} cells"
            regressions.append(f"{where}: {after_mean:.3f} of stock on average, and it was {before_mean:.3f}")
    bound = "" if factor is None else f" of more than {factor:g} times"
    notes.append(f"{len(pairs)} ratios compared, {len(regressions)} regressions{bound} beyond noise")
    return Check(tuple(regressions), tuple(notes))


def _where(comparison: Comparison) -> str:
    cell = comparison.cell
    return f"{cell.section} {cell.case} {cell.dtype}, {comparison.timed.impl}"


def _mean(comparisons: list[Comparison]) -> float:
    return math.exp(sum(math.log(c.ratio or 1.0) for c in comparisons) / len(comparisons))


def _of_fastest(comparison: Comparison) -> float:
    if comparison.baseline is None:
        raise AssertionError("only what has a ratio is compared")
    return min(comparison.baseline.samples_us) / min(comparison.timed.samples_us)


def _fell(pairs: list[tuple[Comparison, Comparison]], factor: float, tests: int) -> bool:
    """Whether the geometric mean of the ratios fell by more than the factor and the noise of both runs."""
    fall = sum(math.log(old.ratio or 1.0) - math.log(now.ratio or 1.0) for old, now in pairs) / len(pairs)
    variance = sum(float(np.var(np.log(c.draws))) for pair in pairs for c in pair) / len(pairs) ** 2
    quantile = NormalDist().inv_cdf(1 - _LEVEL / max(tests, 1))
    return fall > math.log(factor) + quantile * math.sqrt(variance)


def _moved(kept: Run, new: Run, *, coarse: bool) -> str:
    on_gpu = any(cell.device == "cuda" for cell in new.cells)
    before, after = kept.header.environment, new.header.environment
    fields: tuple[str, ...] = ("gpu",) if on_gpu else ("cpu", "num_threads")
    # ATen reports "DEFAULT" for any CPU whose vector instructions it does not use, so two of them may differ
    if coarse and on_gpu:
        fields = ("gpu_capability",)
    elif coarse and before.get("aten_cpu_capability") not in (None, "DEFAULT"):
        fields = ("aten_cpu_capability", "num_threads")
    return ", ".join(
        f"{name} {after.get(name)}, was {before.get(name)}" for name in fields if before.get(name) != after.get(name)
    )


def _diverged(kept: Run, new: Run) -> list[str]:
    """Groups whose bits had one class and no longer have."""

    def key(row: Row) -> Key:
        return (row.operator, row.group, row.dtype, row.device, row.impl)

    whole = {key(row) for row in kept.rows if row.probe == "bench" and row.status == Status.IDENTICAL}
    return [
        f"{row.operator} {row.group} {row.dtype}, {row.impl}: {row.distinct} classes of bits, and it was one"
        for row in new.rows
        if row.probe == "bench" and row.status == Status.DIVERGENT and not is_stock(row.impl) and key(row) in whole
    ]
