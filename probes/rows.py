"""The common part of the probes of row operators: rows in batches of other sizes and at other positions.

A kernel that divides few long rows among many thread blocks, or packs many short rows into one, sums in an order that
depends on the number of rows. Two orders often round to the same sum (of squares of 1,024 ordinary numbers in 66 of 100
rows), so a case tests dozens of rows, where a matmul, with a sum in every column, needs only one.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from nondet.core.inputs import EXACT, generator
from nondet.core.measure import Trial
from nondet.core.operands import HARD, drawn
from nondet.core.operator import Operator as DeclaredOperator
from nondet.core.operator import RowProbing
from nondet.core.registry import declared
from nondet.probes import base
from nondet.probes.base import Case, Operator, Options, Probe, dtypes, kinds, some, sweep

# The batch at most, in rows and in elements: 4096 rows of a vocabulary would only be memory traffic.
_LARGEST = {"cpu": 256, "cuda": 4096}
_ELEMENTS = {"cpu": 2**22, "cuda": 2**26}
_ROWS = {"cpu": 64, "cuda": 32}
_POSITIONS = {100: 16, 300: 4}  # width -> rows, which take turns there
_WIDE = 16384  # of longer rows, of the drawn width, and of hard inputs fewer batch sizes are tested
_NARROW, _FAR = 1024, 6001  # rows up to this width are tested in a batch of this many
_FEW = (1, 2, 3, 7, 8, 16, 17, 27, 64, 129)
_FEWEST = (1, 2, 8, 17, 32)


@dataclass
class RowProbe(Probe):
    """An operator over the last axis of x [M, W]."""

    name: str
    operators: tuple[str, ...]  # declared operators that take x, or x and a weight [W]
    axis: str  # the name of the width in a row's shape
    tested: RowProbing
    exact: tuple[str, ...] = ()  # those of the operators whose answer for integers is exact
    answers = EXACT

    @classmethod
    def of(cls, operator: DeclaredOperator) -> RowProbe:
        """The probe of the operator's declaration, under the operator's name."""
        if operator.probe is None:
            raise ValueError(f"{operator.name} declares no probe")
        name, axis = operator.name.replace("_", "-"), operator.operands[0].axes[-1]
        return cls(name, (operator.name,), axis, operator.probe)

    def cases(self, options: Options) -> Iterable[Case]:
        """For each operator, width and dtype a sweep over M; at the first width all other cases, too."""
        given, sizes = (base.given_layer(options) or ())[:1], options.config
        configured = given or tuple(dict.fromkeys(sizes[k] for k in self.tested.width_keys if k in sizes))
        widths, chosen = configured or self.tested.widths, bool(configured)
        seeded = random.Random(options.seed).randint(65, 9000)  # noqa: S311 - a size, not a secret
        for operator in self.operators:
            for width in (*widths, *(() if chosen else (seeded,))):
                # a vocabulary takes most of the time, and float32 shows an order best
                first, wide = width == widths[0], width > _WIDE and options.device == "cpu"
                few = not chosen and (wide or (options.one_of_all and not first))
                for dtype in dtypes(options, operator, ("float32",) if few else ("bfloat16", "float32")):
                    yield from self._cases(options, operator, width, dtype, first=first, drawn=width not in widths)

    def _cases(
        self, options: Options, operator: str, width: int, dtype: str, *, first: bool, drawn: bool
    ) -> Iterator[Case]:
        fitting = max(32, _ELEMENTS[options.device] // width)
        largest = base.largest_batch(options, min(4096 if options.full else _LARGEST[options.device], fitting))
        rows = max(16, min(_ROWS[options.device], 2**20 // width))
        made = max(largest, rows) + (max(positions * each for positions, each in _POSITIONS.items()) if first else 0)
        # drawn in float32; two results are alive while comparing; the rows are checked in float64
        needed = made * width * (3 * getattr(torch, dtype).itemsize + 12) + rows * width * 16
        base.require_memory(options.device, needed, f"{operator} of M={largest} {self.axis}={width} in {dtype}")
        tested = self.tested
        # what shows an order, solo and among others
        best, mixed = ("order", "mixed") if tested.adds else ("bell", "bell")

        def batch_sizes(kind: str) -> list[int]:
            """The batch sizes: all of the sweep for the inputs that show an order best, some for the others."""
            shows = kind == best and width <= _WIDE
            if options.full or options.m is not None or options.inputs or (shows and first):
                return sweep(largest, options, dense=first and kind == best)
            return some(_FEW if shows else _FEWEST, largest, options)

        def case(varied: str, kind: str, rows: int, M: int, what: str = "", sizes: Sequence[int] = ()) -> Case:
            what = what or f"rows among {M}, {base.AXES[varied]}"
            title, shape = f"{operator}: {what}, {self.axis}={width}, {kind}", {"M": M, self.axis: width}
            data = {"values": list(sizes) or batch_sizes(kind), "rows": rows}
            return Case(title, operator, shape, dtype, varied, kind, data=data)

        if first:  # two orders of squares or exponentials mostly agree in one row, so dozens are compared
            held = 8 if tested.adds else max(8, min(64, 2**17 // width))
            yield case("history", mixed, held, held)
        exact = ("integers",) if operator in self.exact and width <= _WIDE else ()
        hard, numbers = (HARD, tested.numbers) if first else ((), ())
        for kind in kinds(options, ("bell", best, *hard, *exact, *numbers)):
            yield case("batch_size", kind, rows, largest, f"{rows} rows in batches of M")
        if width <= _NARROW and options.m is None and not drawn:
            what = f"{rows} rows in batches of M, the largest beyond all others"
            yield case("batch_size", best, rows, _FAR, what, (1, 17, _FAR))
        if first:
            for positions, each in _POSITIONS.items():
                what = f"{each} rows at every place among {positions}"
                yield case("position", best, each, positions, what)
            for kind in (mixed, "positive"):
                yield case("neighbour_values", kind, 64, 64)
            yield case("alignment", best, 33, 33)

    def prepare(self, case: Case, device: str, seed: int) -> Any:
        """x of the compared rows and of others to fill the largest batch; a weight [W] where there is one."""
        rows = max(case.data["rows"], 0 if case.varied == "position" else case.shape["M"])
        declaration, rng = declared()[case.operator], generator(seed, device)
        shape = {"M": rows, declaration.operands[0].axes[-1]: case.shape[self.axis]}
        x, *weights = drawn(declaration, shape, case.torch_dtype, device, rng, case.inputs)
        return {"x": x, "weights": tuple(weights)}

    def trials(self, case: Case, inputs: Any, operator: Operator) -> Iterator[Trial]:
        """The rows in batches of M for every M; at every position of one batch; or with other rows."""
        x, weights = inputs["x"], inputs["weights"]
        # of a call at other times all rows are compared
        every = torch.ones(len(x), dtype=torch.bool, device=x.device) if case.varied == "history" else None
        call = base.Call.of((x, *weights), every)
        rows = case.data["rows"]
        return base.batch_trials(case, lambda batch: operator(batch, *weights), x, rows, call, operator)


class Reduction(RowProbe):
    """Over a hidden size (the mean of RMSNorm, as transformers writes it), an odd width, and a vocabulary."""

    def __init__(self) -> None:
        widths, keys, numbers = (4096, 1000, 151936), ("hidden", "vocabulary"), ("denormal", "infinite")
        tested = RowProbing(widths=widths, width_keys=keys, adds=True, numbers=numbers)
        super().__init__("reduction", ("sum", "mean"), "K", tested, exact=("sum",))
