"""An operator under watch: calls made twice, and results held against the float64 oracle, row by row.

An oracle costs more than the call. So it is asked about rows from the whole batch, its first and last among them, and
once for all implementations that are given the same operands.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from nondet.accuracy import bound_of, declared_bound
from nondet.compare import identical, numbers
from nondet.errors import WrongResultError
from nondet.records import Accuracy

__all__ = ["Answers", "Watch"]

Operator = Callable[..., Any]

# Multiply-adds of an oracle beyond which a call is not checked: about a second in float64.
_WORK_MOST = {"cpu": 4e9, "cuda": 4e11}
_REPEATED_MOST = 3  # calls of one variant that are made twice; a sweep in single rows makes hundreds
_CHECKED_MOST = 4  # calls of a row that are held against the oracle, one a variant
_ANSWERS_MOST = 8  # of the oracle that a case's implementations share
_ROWS = (8, 16, 8)  # checked of a larger batch: its first, some between, its last
_LONG_ROWS = (2, 2, 2)  # of results as wide as a vocabulary
_LONG = 2**16
_REQUESTS = (2, 4, 2)
# Operators whose rows are independent: of the first operand's leading axes, of its first axis alone, of requests.
_BY_ROWS = ("linear", "rms_norm", "softmax", "log_softmax", "logsumexp", "sum", "mean")
_FEW_TERMS = ("rms_norm", "softmax", "log_softmax")  # a few operations an element of the result, however long a row is
_ROW_PASSES = 64  # of them, at most
_UNBOUNDED = "no bound is known for this operator: shape, dtype and finiteness alone"


class _Answer(NamedTuple):
    """What the oracle gave for these operands, and what is allowed around it for results of this dtype."""

    operands: tuple[Any, ...]
    keywords: dict[str, Any]
    dtype: torch.dtype | None
    references: list[torch.Tensor]
    allowed: torch.Tensor | None


class Answers:
    """The oracle of one case, whose implementations are given the same operands: it is asked once for each.

    Operands are known again by their bits, never by their addresses: they are copied, so that a kernel that writes to
    its inputs changes no answer.
    """

    def __init__(self, operator: str, oracle: Operator) -> None:
        self.operator, self._oracle = operator, oracle
        self.takes = frozenset(inspect.signature(oracle).parameters)
        self._answers: list[_Answer] = []

    def of(
        self, operands: tuple[Any, ...], keywords: dict[str, Any], dtype: torch.dtype | None
    ) -> tuple[list[torch.Tensor], torch.Tensor | None]:
        """(float64 results, what is allowed at each element of a single one).

        Args:
            dtype: Of the first result.
        """
        for answer in self._answers:
            if answer.dtype == dtype and _alike((answer.operands, answer.keywords), (operands, keywords)):
                return answer.references, answer.allowed
        references = _tensors(self._oracle(*operands, **keywords))
        allowed = None
        if len(references) == 1 and dtype is not None:  # a bound of several results is written for the first
            allowed = bound_of(self.operator, operands, keywords, references[0], dtype)
        kept = tuple(self._copied(x) for x in operands)
        self._answers = [*self._answers[1 - _ANSWERS_MOST :], _Answer(kept, keywords, dtype, references, allowed)]
        return references, allowed

    def _copied(self, operand: Any) -> Any:
        """A copy; of a weight that an earlier answer has already, that one."""
        if not isinstance(operand, torch.Tensor):
            return operand
        for answer in self._answers:
            for copy in answer.operands:
                if isinstance(copy, torch.Tensor) and _alike(copy, operand):
                    return copy
        return operand.clone()


def _alike(a: Any, b: Any) -> bool:
    """Equal bits, through tuples and mappings."""
    if isinstance(a, torch.Tensor) or isinstance(b, torch.Tensor):
        both = isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor)
        return both and a.shape == b.shape and a.dtype == b.dtype and a.device == b.device and identical(a, b)
    if isinstance(a, tuple | list) and isinstance(b, tuple | list):
        return len(a) == len(b) and all(_alike(x, y) for x, y in zip(a, b, strict=True))
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(_alike(a[key], b[key]) for key in a)
    return bool(a == b)


def _places(count: int, parts: tuple[int, int, int], device: torch.device) -> torch.Tensor | None:
    """Which of so many rows are checked: the first ones, some evenly between, the last ones; None: all of them."""
    first, between, last = parts
    if count <= sum(parts):
        return None
    middle = torch.linspace(first, count - last - 1, between).long()
    return torch.cat([torch.arange(first), middle, torch.arange(count - last, count)]).to(device)


def _sampled(
    operator: str, operands: tuple[Any, ...], results: list[torch.Tensor]
) -> tuple[tuple[Any, ...], list[torch.Tensor]]:
    """The operands and results of some rows, or requests; all where rows are not independent or are few."""
    first, result = operands[0], results[0]
    if len(results) > 1 or not all(isinstance(x, torch.Tensor) for x in operands):
        return operands, results
    if operator == "attention":
        at = _places(len(first), _REQUESTS, first.device)
        if at is None or len(result) != len(first):
            return operands, results
        return tuple(x.index_select(0, at) for x in operands), [result.index_select(0, at)]
    lead = first.shape[:-1]
    by_rows = operator in _BY_ROWS or (operator in ("matmul", "grouped_matmul") and first.dim() == 2)
    if not by_rows or not lead or result.shape[: len(lead)] != lead:
        return operands, results
    long = operator in _FEW_TERMS and first.shape[-1] > _LONG
    at = _places(lead.numel(), _LONG_ROWS if long else _ROWS, first.device)
    if at is None:
        return operands, results
    rows = first.flatten(0, -2).index_select(0, at)
    others = operands[1:]
    if operator == "grouped_matmul":  # where each expert's rows end among those that are left
        weight, offsets = others
        others = (weight, torch.searchsorted(at, offsets.long()).to(offsets.dtype))
    return (rows, *others), [result.flatten(0, len(lead) - 1).index_select(0, at)]


class Watch:
    """An operator under watch: `call` is passed on as it is, until `checking`; then results are checked.

    While checking, the first calls of a variant are made twice in a row, with the same operands. So noise that comes
    every so many calls shows as two results of one call, whatever the variants around it do.

    Attributes:
        repeats: Calls that were made twice.
        repeats_parted: Those whose second result had other bits.
    """

    def __init__(self, call: Operator, answers: Answers) -> None:
        self.operator, self._call, self._answers = answers.operator, call, answers
        self.checking = False
        self.repeats = self.repeats_parted = 0
        self._calls = self._elements = self._of_this_variant = 0
        self._worst: float | None = None
        self.fault = ""

    @property
    def call(self) -> Operator:
        """The operator, with its name and signature."""

        @functools.wraps(self._call)
        def run(*arguments: Any, **keywords: Any) -> Any:
            out = self._call(*arguments, **keywords)
            if self.checking and self._of_this_variant < _REPEATED_MOST:
                self._of_this_variant += 1
                self._repeat(out, arguments, keywords)
                if self._of_this_variant == 1 and self._calls < _CHECKED_MOST:
                    self._check(out, arguments, keywords)
            return out

        return run

    def next_variant(self) -> None:
        """Another variant begins: its first call is checked, and some are repeated."""
        self._of_this_variant = 0

    @property
    def accuracy(self) -> Accuracy | None:
        """What was checked; None where nothing was."""
        if not self._calls:
            return None
        source = self._source if self._worst is not None else _UNBOUNDED
        return Accuracy(calls=self._calls, elements=self._elements, worst=self._worst, source=source)

    @property
    def _source(self) -> str:
        declared = declared_bound(self.operator)
        return _UNBOUNDED if declared is None else declared.source

    def _repeat(self, out: Any, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> None:
        again = self._call(*arguments, **keywords)
        pairs = zip(_tensors(out), _tensors(again), strict=True)
        self.repeats += 1
        self.repeats_parted += not all(a.shape == b.shape and identical(a, b) for a, b in pairs)

    def _check(self, out: Any, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> None:
        results = _tensors(out)
        kept = {k: v for k, v in keywords.items() if k in self._answers.takes}
        first = next((x for x in arguments if isinstance(x, torch.Tensor)), None)
        if first is None:  # the operands are with other processes; the row has its error from the case's own reference
            return
        operands, results = _sampled(self.operator, arguments, results)
        terms = _ROW_PASSES if self.operator in _FEW_TERMS else first.shape[-1]
        if sum(r.numel() for r in results) * terms > _WORK_MOST[first.device.type]:
            return
        references, allowed = self._answers.of(operands, kept, results[0].dtype if results else None)
        if len(results) != len(references):
            raise WrongResultError(f"{self.operator} gave {len(results)} results, not {len(references)}")
        self._calls += 1
        for result, reference in zip(results, references, strict=True):
            if result.shape != reference.shape:
                raise WrongResultError(
                    f"{self.operator} gave the shape {tuple(result.shape)}, not {tuple(reference.shape)}"
                )
            if reference.dtype.is_floating_point and result.dtype != first.dtype:
                raise WrongResultError(f"{self.operator} gave {result.dtype} for {first.dtype}")
            self._elements += result.numel()
            self._hold(result, reference, allowed)

    def _hold(self, result: torch.Tensor, reference: torch.Tensor, allowed: torch.Tensor | None) -> None:
        wide, rounded = result.double(), reference.to(result.dtype).double()
        known = torch.isfinite(reference) & torch.isfinite(rounded)
        if result.dtype.is_floating_point and allowed is not None:  # a step short of overflow may overflow
            known &= reference.abs() + allowed < torch.finfo(result.dtype).max
        finite = torch.isfinite(wide)
        missing = (known & ~finite).sum()
        bounded = allowed is not None and result.numel() > 0
        ratio = torch.zeros(1, dtype=torch.float64, device=result.device)
        if allowed is not None and bounded:
            gap = torch.where(known & finite, (wide - reference).abs(), torch.zeros_like(wide))
            ratio = torch.where(gap > 0, gap / allowed, torch.zeros_like(gap)).nan_to_num(nan=0.0)
        lost, largest = numbers(missing, ratio.max())
        if lost:
            self.fault = (
                self.fault or f"{lost} of {result.numel()} elements are NaN or infinite where the oracle is not"
            )
        if not bounded:
            return
        worst = min(largest, sys.float_info.max)
        self._worst = max(self._worst or 0.0, worst)
        if worst > 1.0:
            over = int((ratio > 1.0).sum())
            self.fault = self.fault or (
                f"{over} of {result.numel()} elements are off by more than any rounding explains, "
                f"up to {worst:.3g} times the bound ({self._source})"
            )


def _tensors(out: Any) -> list[torch.Tensor]:
    """What a call gave, one tensor or several.

    Raises:
        WrongResultError: something else.
    """
    results = list(out) if isinstance(out, tuple | list) else [out]
    for result in results:
        if not isinstance(result, torch.Tensor):
            raise WrongResultError(f"the result is a {type(result).__name__}, not a tensor")
    return results
