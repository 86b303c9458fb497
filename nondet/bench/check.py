"""`nondet bench --check`: a new run held against a kept one, by ratios that each run measured within itself.

Microseconds of two runs say little of the code: clocks, heat and neighbours differ. What is compared is best stock's
time over an implementation's, cell by cell. An implementation regressed in a cell where the ratio fell by more than
`CELL_MARGIN` beyond the noise of both runs, and in a section where the geometric mean fell by more than `MEAN_MARGIN`
beyond it. Noise is the bootstrap's standard error of both; since many cells are asked, the level of 5% is shared among
them (Bonferroni). The margins are for what a bootstrap over one run's replays can't see: another process, another day.

On another machine a ratio may be another one for good reasons, so nothing is judged there but what no machine excuses:
bits that had one class and have several, in an implementation that is not stock.

A coarse check is for machines that are shared or are not the kept run's own, as those of CI: a cell regressed where its
ratio fell by more than a factor that is given. That is asked of the medians, beyond the noise of both runs as above,
and of the fastest replays as well: neighbours only ever add time, while slower code is slower in every replay. Such a
factor is held on another CPU too where ATen uses the same vector instructions with as many threads (on a GPU: where the
compute capability is the same).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np

from nondet.bench.summary import Comparison, compare, is_stock
from nondet.core.records import Cell, Row, Run, Status

__all__ = ["CELL_MARGIN", "MEAN_MARGIN", "Check", "cells_of", "check_runs"]

CELL_MARGIN, MEAN_MARGIN = 0.10, 0.05
_LEVEL = 0.05

Key = tuple[str, ...]


@dataclass(frozen=True)
class Check:
    """What a comparison of two runs found.

    Attributes:
        regressions: One line each.
        notes: What was compared, and what could not be.
    """

    regressions: tuple[str, ...]
    notes: tuple[str, ...]


def cells_of(run: Run) -> dict[Key, Cell]:
    """Cells by what they compute and by which clock, whatever section they are reported in."""
    return {_key(cell.operator, cell.shape, cell.dtype, cell.device, cell.method): cell for cell in run.cells}


def _key(operator: str, shape: Mapping[str, int], dtype: str, device: str, method: str) -> Key:
    return (operator, " ".join(f"{axis}={shape[axis]}" for axis in sorted(shape)), dtype, device, method)


def check_runs(kept: Run, new: Run, factor: float | None = None) -> Check:
    """Hold every implementation that is not stock, in every cell that both runs have, against the kept run.

    Args:
        factor: How many times slower against stock a cell may be than it was, of a coarse check. None: the margins
            above, on the machine of the kept run.
    """
    kept_cells, new_cells = cells_of(kept), cells_of(new)
    common = [key for key in new_cells if key in kept_cells]
    regressions = _parted(kept, new)
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
    """Stock's fastest replay over the implementation's."""
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
    """What differs of the machine that ratios depend on; empty where nothing does."""
    on_gpu = any(cell.device == "cuda" for cell in new.cells)
    before, after = kept.header.environment, new.header.environment
    fields: tuple[str, ...] = ("gpu",) if on_gpu else ("cpu", "num_threads")
    # "DEFAULT" is what ATen says of any CPU whose vector instructions it does not use: no two of them are alike
    if coarse and on_gpu:
        fields = ("gpu_capability",)
    elif coarse and before.get("aten_cpu_capability") not in (None, "DEFAULT"):
        fields = ("aten_cpu_capability", "num_threads")
    return ", ".join(
        f"{name} {after.get(name)}, was {before.get(name)}" for name in fields if before.get(name) != after.get(name)
    )


def _parted(kept: Run, new: Run) -> list[str]:
    """Groups whose bits were of one class and are not any more."""

    def key(row: Row) -> Key:
        return (row.operator, row.group, row.dtype, row.device, row.impl)

    whole = {key(row) for row in kept.rows if row.probe == "bench" and row.status == Status.IDENTICAL}
    return [
        f"{row.operator} {row.group} {row.dtype}, {row.impl}: {row.distinct} classes of bits, and it was one"
        for row in new.rows
        if row.probe == "bench" and row.status == Status.DIVERGENT and not is_stock(row.impl) and key(row) in whole
    ]
