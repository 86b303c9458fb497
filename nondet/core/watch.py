"""Checks of an operator's calls: some are made twice, and results are compared with the float64 oracle.

An oracle costs more than the call. So it computes some rows of the whole batch, the first and the last among them, and
once for all implementations that get the same operands.
"""

from __future__ import annotations

import functools
import inspect
import math
import sys
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from nondet.core.compare import agreement, identical, numbers
from nondet.core.operator import AccuracyBound
from nondet.core.records import Accuracy
from nondet.core.registry import load_object, operators
from nondet.errors import WrongResultError

# How far a result may be from the float64 oracle, element by element, in the worst case for a correct implementation,
# whatever its order of additions: what exceeds a bound is wrong and not another rounding. The price is that an error of
# the size of a reordering is not detected.
#
# The bounds are those of Higham, Accuracy and Stability of Numerical Algorithms (2nd ed., 2002), section 3.1: a sum of
# n products errs by at most gamma_n * sum |x||w|, with gamma_n = n u / (1 - n u), whatever its order. Here u is twice
# the unit roundoff of the accumulator, because tensor cores truncate; sum |x||w| is at most ||x|| ||w||
# (Cauchy-Schwarz). Added are the result's rounding and those that torch's settings allow (TF32, reduced precision).

_ROUNDINGS = 16.0  # of exp, rsqrt, division and the like, in units of the accumulator's epsilon


class _Terms(NamedTuple):
    reference: torch.Tensor  # float64, one result
    dtype: torch.dtype  # of the result

    unit: float  # roundoff of the result
    epsilon: float  # of the accumulator: float32, or float64 for float64
    flushed: float  # what a term may lose where the accumulator's format flushes to zero

    @property
    def rounded(self) -> torch.Tensor:
        """Two roundings of the result (a bias may come after the first), and what flushing to zero takes."""
        return self.reference.abs() * (2 * self.unit) + torch.finfo(self.dtype).tiny

    def gamma(self, n: int, epsilon: float | None = None) -> float:
        """Relative error of a sum of n terms in the accumulator, in any order; infinite where the bound is void."""
        error = n * (epsilon or self.epsilon)
        return error / (1 - error) if error < 0.5 else math.inf


def of_linear(t: _Terms, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """x [..., K] by weight [N, K]."""
    products = _of_products(t, x.shape[-1], x.double().norm(dim=-1)[..., None], weight.double().norm(dim=-1))
    extra = 0.0 if bias is None else bias.double().abs() * (t.gamma(2) + 2 * t.unit)
    return t.rounded + products + extra


def of_matmul(t: _Terms, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """a [.., M, K] by b [.., K, N]."""
    left, right = a.double().norm(dim=-1)[..., None], b.double().norm(dim=-2)[..., None, :]
    return t.rounded + _of_products(t, a.shape[-1], left, right)


def of_grouped(t: _Terms, x: torch.Tensor, weight: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
    """x [R, K] by each row's own weight of [E, K, N]."""
    expert = torch.searchsorted(offsets.long(), torch.arange(x.shape[0], device=x.device), right=True)
    columns = torch.cat([weight.double().norm(dim=1), weight.new_zeros((1, weight.shape[2]), dtype=torch.float64)])
    # rows after the last expert's are zeros
    return t.rounded + _of_products(t, x.shape[-1], x.double().norm(dim=-1)[:, None], columns[expert])


def _of_products(t: _Terms, terms: int, left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """Of rows and columns of these norms; operands and products below the smallest normal number may count as zero."""
    flushed = t.flushed * (math.sqrt(terms) * (left + right) + terms)
    return left * right * (t.gamma(terms + 1) + _operand_rounding(t) + _partial_rounding(t)) + flushed


def _operand_rounding(t: _Terms) -> float:
    """What float32 operands lose where torch may round them: to TF32 (11 bits), or to bfloat16 (8 bits)."""
    lost = operand_loss() if t.dtype == torch.float32 else 0.0
    return 2 * lost + lost * lost


def operand_loss() -> float:
    """What a float32 operand loses where torch may round it, relative to its size."""
    return {"highest": 0.0, "high": 2.0**-10, "medium": 2.0**-7}[torch.get_float32_matmul_precision()]


def _partial_rounding(t: _Terms) -> float:
    """What split-K may lose by keeping its partial sums in the result's dtype, each rounded once."""
    flags = torch.backends.cuda.matmul
    allowed = {
        torch.bfloat16: flags.allow_bf16_reduced_precision_reduction,
        torch.float16: flags.allow_fp16_reduced_precision_reduction,
    }
    return 2 * t.unit if t.reference.is_cuda and allowed.get(t.dtype) else 0.0


def of_attention(
    t: _Terms,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    causal: bool = True,
    scale: float | None = None,
    mask: torch.Tensor | None = None,
) -> torch.Tensor:
    """Scores err by what their products do and by roundings to the operands' dtype; so do the weights."""
    depth, groups = q.shape[-1], q.shape[1] // k.shape[1]
    factor = scale if scale is not None else depth**-0.5
    keys = k.double().norm(dim=-1).amax(-1).repeat_interleave(groups, 1)[..., None, None]  # [B, Hq, 1, 1]
    largest = q.double().norm(dim=-1)[..., None] * keys * abs(factor)  # |score| at most, [B, Hq, Tq, 1]
    score = largest * (t.gamma(depth + 2) + _operand_rounding(t) + 4 * t.unit)
    values = v.double().abs().amax(-2).repeat_interleave(groups, 1)[..., None, :]  # [B, Hq, 1, D]
    weights = torch.expm1(2 * score) + t.gamma(k.shape[-2] + 2) + 4 * t.unit + _ROUNDINGS * t.epsilon
    return t.rounded + (weights + _operand_rounding(t)) * values


def of_rms_norm(t: _Terms, x: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
    """All terms of the mean have one sign; transformers round three times, and always to float32."""
    single = torch.finfo(torch.float32).eps
    return t.rounded + t.reference.abs() * (t.gamma(x.shape[-1], single) + 4 * t.unit + _ROUNDINGS * single)


def of_softmax(t: _Terms, x: torch.Tensor) -> torch.Tensor:
    """exp errs by the distance from the maximum, whose rounding it takes; then a sum of one sign."""
    distance = x.double().amax(-1, keepdim=True) - x.double()
    relative = t.gamma(x.shape[-1]) + (_ROUNDINGS + 2 * distance) * t.epsilon + 2 * t.unit
    return t.rounded + t.reference.abs() * relative.nan_to_num(nan=float("inf"))


def of_logarithm(t: _Terms, x: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
    """x, its maximum and the logarithm of a sum are added: each brings a rounding of its own size. torch's CPU kernel
    keeps the logarithm, at most log V, in the result's dtype."""
    largest = x.double().nan_to_num(neginf=0.0).abs().amax(-1, keepdim=t.reference.dim() == x.dim())
    logarithm = t.gamma(x.shape[-1]) + 2 * t.unit * math.log(x.shape[-1])
    return t.rounded * 3 + logarithm + _ROUNDINGS * t.epsilon * (largest + t.reference.abs() + 1)


def of_sum(t: _Terms, x: torch.Tensor) -> torch.Tensor:
    """Over the last axis, in any order."""
    return t.rounded + t.gamma(x.shape[-1]) * x.double().abs().sum(-1) + x.shape[-1] * t.flushed


def of_cumsum(t: _Terms, x: torch.Tensor) -> torch.Tensor:
    """Each a sum of all up to it, which a GPU's scan keeps in the result's dtype."""
    epsilon = max(t.epsilon, 2 * t.unit) if t.reference.is_cuda else t.epsilon
    return t.rounded + t.gamma(x.shape[-1], epsilon) * x.double().abs().cumsum(-1) + x.shape[-1] * t.flushed


def of_mean(t: _Terms, x: torch.Tensor) -> torch.Tensor:
    """A sum, and a division."""
    return t.rounded * 2 + t.gamma(x.shape[-1] + 1) * x.double().abs().mean(-1) + t.flushed


def of_scattered(t: _Terms, target: torch.Tensor, index: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
    """Sums are kept in the target's own dtype."""
    most = int(index.flatten().bincount().max()) if index.numel() else 0
    add = torch.Tensor.index_add if source.dim() > 1 else torch.Tensor.scatter_add
    return t.rounded + t.gamma(most + 1, 2 * t.unit) * add(target.double().abs(), 0, index, source.double().abs())


def declared_bound(operator: str) -> AccuracyBound | None:
    """The bound that the operator's declaration gives; None where it gives none."""
    return operators()[operator].accuracy if operator in operators() else None


def bound_of(
    operator: str, arguments: Sequence[Any], keywords: dict[str, Any], reference: torch.Tensor, dtype: torch.dtype
) -> torch.Tensor | None:
    """What is allowed at each element, float64 of the reference's shape; None where no bound is written down.
    `arguments` and `keywords` are the call's, `reference` its float64 result, `dtype` the result's own."""
    declared = declared_bound(operator)
    if declared is None or not dtype.is_floating_point:
        return None
    bound: Callable[..., torch.Tensor] = load_object(declared.bound)
    accumulator = torch.finfo(torch.float64 if dtype == torch.float64 else torch.float32)
    terms = _Terms(reference, dtype, torch.finfo(dtype).eps / 2, accumulator.eps, accumulator.tiny)
    return bound(terms, *arguments, **keywords)


Operator = Callable[..., Any]

# Multiply-adds of an oracle beyond which a call is not checked: about a second in float64.
_WORK_MOST = {"cpu": 4e9, "cuda": 4e11}
_REPEATED_MOST = 3  # calls of one variant that are made twice; a sweep in single rows makes hundreds
_CHECKED_MOST = 4  # calls of a row that are compared with the oracle, one per variant
_ANSWERS_MOST = 8  # of the oracle that a case's implementations share
_ROWS = (8, 16, 8)  # checked of a larger batch: its first, some between, its last
_LONG_ROWS = (2, 2, 2)  # of results as wide as a vocabulary
_LONG = 2**16
_REQUESTS = (2, 4, 2)
# Operators whose rows are independent: along all leading axes of the first operand, its first axis only, or requests.
_BY_ROWS = ("linear", "rms_norm", "softmax", "log_softmax", "logsumexp", "sum", "mean", "cumsum")
# A few operations for each element of the result, however long a row is.
_FEW_TERMS = ("rms_norm", "softmax", "log_softmax", "cumsum")
_ROW_PASSES = 64  # of them, at most
_UNBOUNDED = "no bound is known for this operator: only shape, dtype and finiteness were checked"


class _Answer(NamedTuple):
    """What the oracle gave for these operands, and the allowed error for results of this dtype."""

    operands: tuple[Any, ...]
    keywords: dict[str, Any]
    dtype: torch.dtype | None
    references: list[torch.Tensor]
    allowed: torch.Tensor | None


class Answers:
    """The oracle of one case, whose implementations get the same operands: each answer is computed once. Operands are
    recognized by their bits and copied, so that a kernel that writes to its inputs changes no answer."""

    def __init__(self, operator: str, oracle: Operator) -> None:
        self.operator, self._oracle = operator, oracle
        self.takes = frozenset(inspect.signature(oracle).parameters)
        self._answers: list[_Answer] = []

    def of(
        self, operands: tuple[Any, ...], keywords: dict[str, Any], dtype: torch.dtype | None
    ) -> tuple[list[torch.Tensor], torch.Tensor | None]:
        """(float64 results, allowed error at each element of a single one); `dtype` is the first result's."""
        for answer in self._answers:
            if _alike((answer.operands, answer.keywords, answer.dtype), (operands, keywords, dtype)):
                return answer.references, answer.allowed
        references = _tensors(self._oracle(*operands, **keywords))
        allowed = None
        if len(references) == 1 and dtype is not None:  # a bound is defined for a single result only
            allowed = bound_of(self.operator, operands, keywords, references[0], dtype)
        kept = tuple(self._copy_of(x) for x in operands)
        self._answers = [*self._answers[1 - _ANSWERS_MOST :], _Answer(kept, keywords, dtype, references, allowed)]
        return references, allowed

    def _copy_of(self, operand: Any) -> Any:
        """A copy of a tensor: that of an earlier answer, where its bits are the same, as a weight's are."""
        if not isinstance(operand, torch.Tensor):
            return operand
        earlier = (part for answer in self._answers for part in answer.operands)
        copy = next((part for part in earlier if _alike(part, operand)), None)
        return operand.clone() if copy is None else copy


def _alike(a: Any, b: Any) -> bool:
    """Whether these are the same, at every depth: tensors bit for bit, everything else as Python compares it."""
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        return a.shape == b.shape and a.dtype == b.dtype and a.device == b.device and identical(a, b)
    if type(a) is not type(b):
        return False
    if isinstance(a, dict):
        a, b = [*a.items()], [*b.items()]
    if isinstance(a, tuple | list):
        return len(a) == len(b) and all(map(_alike, a, b))
    return bool(a == b)


def _places(count: int, parts: tuple[int, int, int], device: torch.device) -> torch.Tensor | None:
    """Which of `count` rows are checked: the first ones, some evenly between, the last ones; None: all of them."""
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
    if operator == "grouped_matmul":  # where each expert's rows end among the selected ones
        weight, offsets = others
        others = (weight, torch.searchsorted(at, offsets.long()).to(offsets.dtype))
    return (rows, *others), [result.flatten(0, len(lead) - 1).index_select(0, at)]


class _Held(NamedTuple):
    """How a result compares with the oracle: tensors of one element, not yet copied to the host."""

    missing: torch.Tensor  # elements that are not finite and should be
    largest: torch.Tensor  # error in units of what is allowed, float64
    over: torch.Tensor  # elements beyond it
    elements: int
    bounded: bool


class Watch:
    """Wraps an operator: `call` is passed through until `checking`; then results are checked, and the first calls of a
    variant are made twice in a row: noise that occurs every few calls shows as two results of one call. On a GPU
    nothing waits until `repeated`, `accuracy` or `fault` is called."""

    def __init__(self, call: Operator, answers: Answers) -> None:
        self.operator, self._call, self._answers = answers.operator, call, answers
        declared = declared_bound(self.operator)
        self._source = _UNBOUNDED if declared is None else declared.source
        self.checking = False
        self._calls = self._elements = self._of_this_variant = 0
        self._repeats: list[torch.Tensor] = []
        self._held: list[_Held] = []
        self._worst: float | None = None
        self._fault = ""

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
                    self._check(self._owned(out, arguments), arguments, keywords)
            return out

        return run

    def next_variant(self) -> None:
        """Begin another variant: its first call is checked, and some are repeated."""
        self._of_this_variant = 0

    def repeated(self) -> list[torch.Tensor]:
        """For each call that was made twice since the last use: whether both had the same bits. For `looked_at`."""
        repeats, self._repeats = self._repeats, []
        return repeats

    @property
    def fault(self) -> str:
        """Why a checked result is not a valid answer; "" where nothing shows that."""
        self._settle()
        return self._fault

    @property
    def accuracy(self) -> Accuracy | None:
        """What was checked; None where nothing was."""
        if not self._calls:
            return None
        self._settle()
        source = self._source if self._worst is not None else _UNBOUNDED
        return Accuracy(calls=self._calls, elements=self._elements, worst=self._worst, source=source)

    def _repeat(self, out: Any, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> None:
        again = self._owned(self._call(*arguments, **keywords), arguments)
        pairs = zip(_tensors(self._owned(out, arguments)), _tensors(again), strict=True)
        self._repeats += [agreement(a, b) if a.shape == b.shape else torch.tensor(False) for a, b in pairs]

    def _owned(self, out: Any, arguments: tuple[Any, ...]) -> Any:
        """The result with zeros in rows after the last expert's, where torch leaves old memory."""
        if self.operator != "grouped_matmul" or not isinstance(out, torch.Tensor) or len(out) != len(arguments[0]):
            return out
        later = torch.arange(len(out), device=out.device) >= arguments[2][-1]
        return out.masked_fill(later[:, None], 0.0)

    def _check(self, out: Any, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> None:
        results = _tensors(out)
        kept = {k: v for k, v in keywords.items() if k in self._answers.takes}
        first = next((x for x in arguments if isinstance(x, torch.Tensor)), None)
        if first is None:  # the operands are in other processes; the row has its error from the case's own reference
            return
        operands, results = _sampled(self.operator, arguments, results)
        terms = _ROW_PASSES if self.operator in _FEW_TERMS else first.shape[-1]
        if sum(r.numel() for r in results) * terms > _WORK_MOST[first.device.type]:
            return
        references, allowed = self._answers.of(operands, kept, results[0].dtype if results else None)
        if not references:  # it has more than one correct answer
            return
        if len(results) != len(references):
            raise WrongResultError(f"{self.operator} gave {len(results)} results, not {len(references)}")
        self._calls += 1
        wanted = next((x for x in arguments if isinstance(x, torch.dtype)), first.dtype)
        for result, reference in zip(results, references, strict=True):
            if result.shape != reference.shape:
                shapes = f"{tuple(result.shape)}, not {tuple(reference.shape)}"
                raise WrongResultError(f"{self.operator} gave the shape {shapes}")
            if reference.dtype.is_floating_point and result.dtype != wanted:
                raise WrongResultError(f"{self.operator} gave {result.dtype} for {wanted}")
            self._elements += result.numel()
            self._hold(result, reference, allowed)

    def _hold(self, result: torch.Tensor, reference: torch.Tensor, allowed: torch.Tensor | None) -> None:
        wide, rounded = result.double(), reference.to(result.dtype).double()
        known = torch.isfinite(reference) & torch.isfinite(rounded)
        if result.dtype.is_floating_point and allowed is not None:  # a value just short of overflow may overflow
            known &= reference.abs() + allowed < torch.finfo(result.dtype).max
        finite = torch.isfinite(wide)
        missing = (known & ~finite).sum()
        bounded = allowed is not None and result.numel() > 0
        ratio = torch.zeros(1, dtype=torch.float64, device=result.device)
        if allowed is not None and bounded:
            gap = torch.where(known & finite, (wide - reference).abs(), torch.zeros_like(wide))
            ratio = torch.where(gap > 0, gap / allowed, torch.zeros_like(gap)).nan_to_num(nan=0.0)
        self._held.append(_Held(missing, ratio.max(), (ratio > 1.0).sum(), result.numel(), bounded))

    def _settle(self) -> None:
        held, self._held = self._held, []
        if not held:
            return
        figures = iter(numbers(*(x for h in held for x in (h.missing, h.largest, h.over))))
        for h in held:
            lost, worst, over = next(figures), min(next(figures), sys.float_info.max), next(figures)
            if h.bounded:
                self._worst = max(self._worst or 0.0, worst)
            if not self._fault and lost:
                self._fault = f"{lost} of {h.elements} elements are NaN or infinite where the oracle is not"
            elif not self._fault and h.bounded and worst > 1.0:
                self._fault = (
                    f"{over} of {h.elements} elements are off by more than any rounding explains, "
                    f"up to {worst:.3g} times the bound ({self._source})"
                )


def _tensors(out: Any) -> list[torch.Tensor]:
    """What a call gave, one tensor or several; something else is a `WrongResultError`."""
    results = list(out) if isinstance(out, tuple | list) else [out]
    for result in results:
        if not isinstance(result, torch.Tensor):
            raise WrongResultError(f"the result is a {type(result).__name__}, not a tensor")
    return results
