"""How a batch is cut into calls of row counts that share one numerics class, on a CPU; see `cpu_tiles`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import torch

__all__ = ["Plan", "Tiles", "padded"]

_ALIGNMENT = 64


@dataclass(frozen=True)
class Plan:
    """How a number of rows is cut.

    Attributes:
        sizes: Of the calls, in order.
        label: A name for `launch.note`.
        whole: One call takes all rows, and no more.
    """

    sizes: tuple[int, ...]
    label: str
    whole: bool


@dataclass
class Tiles:
    """Row counts of one numerics class.

    Attributes:
        what: The operator, for notes and errors.
        base: The tile that was checked for position-invariance.
        sizes: Certified row counts, ascending; `base` among them.
        rejected: Row counts that gave other bits.
        seconds: What one call of each size took when it was certified; it steers speed only.
    """

    what: str
    base: int
    sizes: tuple[int, ...]
    rejected: tuple[int, ...]
    seconds: dict[int, float]
    _plans: dict[int, Plan] = field(default_factory=dict, repr=False)

    def plan(self, rows: int) -> Plan:
        """Cut `rows` (at least 1) into certified sizes; only the last call may reach beyond the rows."""
        found = self._plans.get(rows)
        if found is None:
            sizes = self._cut(rows)
            label = f"{self.what}[{'+'.join(map(str, _runs(sizes)))}]"
            found = self._plans[rows] = Plan(sizes, label, sizes == (rows,))
        return found

    def _cut(self, rows: int) -> tuple[int, ...]:
        largest = self.sizes[-1]
        whole = (largest,) * (rows // largest)
        rest = rows - largest * len(whole)
        return whole + self._cut_rest(rest)[1] if rest else whole

    def _cut_rest(self, rows: int) -> tuple[float, tuple[int, ...]]:
        """Cheapest of one padded call and the largest exact call with what it leaves."""
        if rows in self.seconds:
            return self.seconds[rows], (rows,)
        options: list[tuple[float, tuple[int, ...]]] = []
        above = [s for s in self.sizes if s > rows]
        if above:
            options.append((self.seconds[above[0]], (above[0],)))
        below = [s for s in self.sizes if s < rows]
        if below:
            cost, tail = self._cut_rest(rows - below[-1])
            options.append((self.seconds[below[-1]] + cost, (below[-1], *tail)))
        return min(options)

    def apply(self, inputs: Sequence[torch.Tensor], out: torch.Tensor, call: Callable[..., object]) -> torch.Tensor:
        """Fill `out` by calls of certified sizes.

        Args:
            inputs: Contiguous tensors that share their first axis, the rows.
            out: Contiguous, same first axis.
            call: call(*tiles, out_tile) fills out_tile; all of them are contiguous and aligned.

        Returns:
            `out`.
        """
        rows = out.shape[0]
        plan = self.plan(rows)
        sizes = plan.sizes
        if plan.whole and all(map(_aligned, inputs)):
            call(*inputs, out)
            return out
        start = 0
        for size in sizes:
            stop = start + size
            if stop <= rows:
                tiles = [_at(x, start, stop) for x in inputs]
                target = out[start:stop]
                if _aligned(target):
                    call(*tiles, target)
                    start = stop
                    continue
            else:
                stop = rows
                tiles = [padded(x, start, size) for x in inputs]
            fresh = out.new_empty((size, *out.shape[1:]))
            call(*tiles, fresh)
            out[start:stop] = fresh[: stop - start]
            start = stop
        return out


def _aligned(x: torch.Tensor) -> bool:
    return x.data_ptr() % _ALIGNMENT == 0


def _at(x: torch.Tensor, start: int, stop: int) -> torch.Tensor:
    tile = x[start:stop]
    return tile if _aligned(tile) else tile.clone()


def padded(x: torch.Tensor, start: int, size: int) -> torch.Tensor:
    """Rows start ... start + size of x, zeros beyond its end."""
    tile = x.new_zeros((size, *x.shape[1:]))
    tile[: x.shape[0] - start] = x[start:]
    return tile


def _runs(sizes: Iterable[int]) -> list[str]:
    """[256, 256, 16] as ["2x256", "16"]: a short name for a long batch."""
    out: list[tuple[int, int]] = []
    for size in sizes:
        if out and out[-1][1] == size:
            out[-1] = (out[-1][0] + 1, size)
        else:
            out.append((1, size))
    return [f"{n}x{size}" if n > 1 else str(size) for n, size in out]
