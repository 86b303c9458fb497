"""Each member's answers to a question are compared with the anchor's, bit by bit; the results become rows and words."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import msgspec
import torch

from nondet.certify.plan import Assignment, Call, Question
from nondet.core.certificates import Certificates
from nondet.core.compare import difference, error_against, identical
from nondet.core.launch import listen, wait_for_device
from nondet.core.measure import row_of
from nondet.core.proof import DeviceLostError, attempt, in_words, operands_key, settings
from nondet.core.records import Difference, ErrorFigures, Row, Status
from nondet.errors import UserError

_TAILS = (128, 64, 32, 16, 8, 4, 2)


def suspicion(
    axis: str,
    asked: Sequence[int | str],
    left: Sequence[int | str],
    *,
    alike: bool,
    error: ErrorFigures | None = None,
    of: ErrorFigures | None = None,
) -> str:
    """Where a member differed from the anchor, and what that pattern usually means.

    Args:
        axis: "M", or "form" for named variants.
        asked: The variants that ran, in order.
        left: Those that gave other bits; not empty.
        alike: The member's own bits do not depend on the variant.
        error: The member's error against float64.
        of: The anchor's, on the same inputs.
    """
    said = _pattern(axis, asked, left, alike)
    lesser = _lesser(error, of)
    return f"{said}; {lesser}" if lesser else said


def _pattern(axis: str, asked: Sequence[int | str], left: Sequence[int | str], alike: bool) -> str:
    every, at = list(asked), list(left)
    if len(at) == len(every):
        what = f"differs at every {axis} tried"
        if alike:
            return f"{what}, and by itself gives one result at all of them: another order, whatever the batch"
        return f"{what}, and not alike at all of them: another order, and one that depends on the batch"
    if axis != "M":
        kept = [str(v) for v in every if v not in at]
        return f"differs for {', '.join(map(str, at))}; not for {', '.join(kept)}"
    if at == [1]:
        return "differs only at M = 1: a matrix-vector kernel with an order of its own, it seems"
    if at == every[: len(at)]:
        return f"differs at M <= {at[-1]}, not from {every[len(at)]} on: another kernel for small batches, it seems"
    if at == every[-len(at) :]:
        return f"differs from M = {at[0]} on: another kernel for large batches (split-K, another tile), it seems"
    for tail in _TAILS:
        if set(at) == {m for m in every if isinstance(m, int) and m % tail}:
            return f"differs only where M is no multiple of {tail}: tails are handled in another order, it seems"
    return f"differs at M = {where(at)} of those tried: a choice made by M that touches the order, it seems"


def _lesser(error: ErrorFigures | None, of: ErrorFigures | None) -> str:
    """An accumulator of less precision shows as a larger error; only another order does not."""
    if error is None or of is None or of.relative_norm is None:
        return ""
    if error.relative_norm is None:
        return "results overflow where the anchor's do not: an accumulator of less range, it seems"
    if error.relative_norm > 2 * of.relative_norm:
        return (
            f"its relative error is {error.relative_norm:.1e} against the anchor's {of.relative_norm:.1e}: an "
            "accumulator of less precision, it seems"
        )
    return ""


def where(values: Sequence[int | str]) -> str:
    """ "1, 2, 3, 8 and 12 more"."""
    shown = ", ".join(map(str, values[:8]))
    return shown if len(values) <= 8 else f"{shown} and {len(values) - 8} more"


PROBE = "certify"
_ANCHOR = "anchor"


def row_key(question: Question, member: str) -> tuple[str, ...]:
    """The `Row.key` of the row that `ask` will give."""
    return ("row", PROBE, question.name, question.dtype, question.device, member)


_Certificate = tuple[str, str]  # (member, key)


class _Witness:
    """A member that records under which certificates its calls are: those that the dispatcher looks for. A dispatcher's
    member reports them itself (`claim`). Any other has its name and the arguments of its call."""

    def __init__(self, call: Call, member: str, question: Question) -> None:
        self._call, self._member = call, member
        self._cls, self._options = f"{question.cls} {question.operator}", settings(question.device)
        self._claim: Callable[..., _Certificate | None] | None = getattr(call, "claim", None)
        self.certificates: dict[_Certificate, None] = {}
        ragged = getattr(call, "ragged", None)
        if ragged is not None:
            self.ragged = partial(self._seen, ragged, None)

    def __call__(self, *operands: Any, **options: Any) -> torch.Tensor:
        result: torch.Tensor = self._seen(self._call, self._claim, *operands, **options)
        return result

    def _seen(
        self, call: Callable[..., Any], claim: Callable[..., _Certificate | None] | None, *operands: Any, **options: Any
    ) -> Any:
        named = [f"{name}={value}" for name, value in options.items()]
        certificate = (self._member, operands_key(self._cls, operands, [*named, *self._options]))
        if claim is not None:
            claimed = claim(*operands, **options)
            if claimed is not None:
                certificate = claimed
        self.certificates[certificate] = None
        return call(*operands, **options)


@dataclass
class _Book:
    """The results of one member for one question.

    Attributes:
        apart: Variant -> 1 where it differed from the anchor but has the bits of the member's own whole answer, 2 where
            it has neither; over all kinds of input the larger.
        first: The first difference: variant, kind, difference.
        failed: Variant -> why it could not be computed.
        refused: Every failure was the member's own "not here".
        certificates: Variant -> the certificates of its calls.
    """

    seconds: float = 0.0
    apart: dict[int | str, int] = field(default_factory=dict)
    first: tuple[int | str, str, Difference] | None = None
    widest: Difference | None = None
    failed: dict[int | str, str] = field(default_factory=dict)
    refused: bool = True
    elements: int = 0
    per_variant: dict[int | str, int] = field(default_factory=dict)
    ran: set[str] = field(default_factory=set)
    error: ErrorFigures | None = None
    replays: int = 0
    replays_parted: int = 0
    certificates: dict[int | str, dict[_Certificate, None]] = field(default_factory=dict)


def ask(
    question: Question,
    members: Mapping[str, Call],
    anchor: Call,
    certificates: Certificates,
    names: Mapping[str, str] | None = None,
) -> Iterator[Row]:
    """Test every member on the question, and record what was proven.

    Args:
        names: What certificates call a member, where that is not its name.

    Yields:
        A row for each member. Its first value is the anchor; the others are the question's variants. Their classes over
        all inputs are at most three: the anchor's bits, the member's own (those of its largest batch), and others.
    """
    books = {name: _Book() for name in members}
    witnesses = {name: _Witness(call, (names or {}).get(name, name), question) for name, call in members.items()}
    anchor_error: ErrorFigures | None = None
    try:
        for kind in question.kinds:
            inputs = question.prepare(kind)
            whole = question.expected(inputs, anchor)
            reference = question.reference(inputs) if kind == "bell" else None
            if reference is not None:
                anchor_error = error_against(question.part(whole, reference[0]), reference[1])
            operands = _tensors(inputs)
            saved = [x.clone() for x in operands]
            for name, call in witnesses.items():
                _put(books[name], question, kind, inputs, whole, call, reference)
                if not all(map(identical, operands, saved)):
                    # Later results were of other operands, so they show nothing about its order
                    failed = dict.fromkeys(question.values, "it writes to its operands")
                    books[name] = _Book(seconds=books[name].seconds, failed=failed, refused=False)
                    for x, before in zip(operands, saved, strict=True):
                        x.copy_(before)
            del inputs, whole, reference, operands, saved
    except DeviceLostError:
        raise
    except Exception as error:  # noqa: BLE001 - the anchor or the inputs failed: reported in every row
        for name in members:
            yield _failed(question, name, f"the anchor failed: {in_words(error)}")
        return
    for name, book in books.items():
        _record(certificates, question, book)
        yield _row(question, name, book, anchor_error)


_SAMPLED_S = 6.0  # of timing a few members at most, without the last call
_SAMPLED = 3  # timed questions of an operator's class, if there is time


def estimate(planned: Sequence[Assignment], clock: Callable[[], float] = time.perf_counter) -> list[float]:
    """About how many seconds each question will take, all its members together.

    For each operator's class a few questions are put to one member, with one kind of input: the middle one by its size
    first, then the largest and the smallest. Any other is assumed to cost what the timed one of the nearest size does.
    On a GPU each member of each dtype compiles once, as long as those did on average.
    """
    until = clock() + _SAMPLED_S
    groups: dict[tuple[str, str], list[int]] = {}
    for place in sorted(range(len(planned)), key=lambda i: _work(planned[i].question)):
        groups.setdefault((planned[place].question.operator, planned[place].question.cls), []).append(place)
    timed: dict[int, _Cost] = {}
    for turn in range(_SAMPLED):
        for places in groups.values():
            place = places[(len(places) // 2, -1, 0)[turn]]
            if clock() < until and place not in timed:
                timed[place] = _timed(planned[place], until, clock)

    compiled: set[tuple[str, ...]] = set()
    seconds = []
    for item in planned:
        question, own = item.question, _work(item.question)
        group = [i for i in groups[question.operator, question.cls] if i in timed] or list(timed)
        cost = timed[min(group, key=lambda i: abs(math.log(_work(planned[i].question) / own)))]
        new = {(question.operator, question.cls, question.dtype, name) for name in item.members} - compiled
        compiled |= new
        first = statistics.mean(timed[i].first for i in group) * len(new) if question.device == "cuda" else 0.0
        seconds.append(len(question.kinds) * (cost.shared + len(item.members) * cost.each) + first)
    return seconds


class _Cost(NamedTuple):
    """Seconds per kind of input: inputs and the anchor's answer; one member's answers; its first call."""

    shared: float
    each: float = 0.0
    first: float = 0.0


def _work(question: Question) -> float:
    return math.prod(question.shape.values()) * sum(int(v) if isinstance(v, int) else 1 for v in question.values)


def _timed(item: Assignment, until: float, clock: Callable[[], float]) -> _Cost:
    """The cost of one member, and the shared cost. A first call is separate, because it may load what all others use.
    When the time is up, the remaining answers are assumed to cost what the others do."""
    question, began = item.question, clock()
    member = next(iter(item.members.values()))
    try:
        inputs = question.prepare(question.kinds[0])
        shared = clock() - began
        question.answer(inputs, item.anchor, question.values[0])
        question.expected(inputs, item.anchor)
        wait_for_device()
        began = clock()
        question.expected(inputs, item.anchor)
        wait_for_device()
        shared += clock() - began
        first, each, asked = 0.0, 0.0, 0
        for value in (question.values[0], question.values[-1], *question.values[1:-1]):  # smallest, largest, others
            times = []
            for _ in range(2):  # the first may compile, on a GPU for seconds; the second is typical
                began = clock()
                question.answer(inputs, member, value)
                wait_for_device()
                times.append(clock() - began)
            first, each, asked = first + max(0.0, times[0] - times[1]), each + times[1], asked + 1
            if asked > 1 and clock() > until:
                break
    except Exception:  # noqa: BLE001 - its rows will say why; what fails takes hardly any time
        return _Cost(clock() - began)
    each *= len(question.values) / asked
    again = 1 + 2 / (len(question.values) * len(question.kinds))  # two answers are computed twice
    return _Cost(shared, each * again, first)


def _put(
    book: _Book,
    question: Question,
    kind: str,
    inputs: Any,
    whole: torch.Tensor,
    call: _Witness,
    reference: tuple[int | str, torch.Tensor] | None,
) -> None:
    began = time.perf_counter()
    own: torch.Tensor | None = None
    for value in question.values:
        if value in book.failed:
            continue
        expected = question.part(whole, value)
        call.certificates = book.certificates.setdefault(value, {})
        with listen() as noted:
            tried = attempt(expected, partial(question.answer, inputs, call, value))
        again = tried
        repeats = kind == question.kinds[0] and value in (question.values[0], question.values[-1])
        if repeats and tried.result is not None:
            again = attempt(expected, partial(question.answer, inputs, call, value))
        if tried.result is None or again.result is None:
            failure = tried.failure or again.failure
            book.failed[value] = in_words(failure)
            book.refused = book.refused and isinstance(failure, NotImplementedError | UserError)
            continue
        got = tried.result
        book.ran.update(noted)
        finite = int(torch.isfinite(expected).sum())
        book.elements += finite
        book.per_variant[value] = book.per_variant.get(value, 0) + finite
        if reference is not None and value == reference[0]:
            book.error = error_against(got, reference[1])
        if repeats:
            book.replays += 1
            book.replays_parted += not identical(again.result, got)
        if tried.equal:
            book.apart.setdefault(value, 0)
            continue
        apart = difference(expected, got)
        book.first = book.first or (value, kind, apart)
        book.widest = max(filter(None, (book.widest, apart)), key=lambda d: (d.nonfinite, d.max_ulp, d.mismatched))
        call.certificates = {}  # its own whole answer is not a variant
        own = _own(question, inputs, call) if own is None else own
        alike = own.numel() > 0 and identical(question.part(own, value), got)
        book.apart[value] = max(book.apart.get(value, 0), 1 if alike else 2)
    book.seconds += time.perf_counter() - began


def _tensors(inputs: Any) -> list[torch.Tensor]:
    if isinstance(inputs, torch.Tensor):
        return [inputs]
    return [x for part in inputs for x in _tensors(part)] if isinstance(inputs, tuple | list) else []


def _own(question: Question, inputs: Any, call: Call) -> torch.Tensor:
    try:
        return question.answer(inputs, call, question.whole)
    except Exception:  # noqa: BLE001 - reported already, at this variant
        return torch.empty(0)


def _row(question: Question, member: str, book: _Book, anchor_error: ErrorFigures | None) -> Row:
    asked = [v for v in question.values if v not in book.failed]
    notes = [f"{question.axis} = {value}: {why}" for value, why in book.failed.items()]
    if not asked:
        reason = next(iter(dict.fromkeys(book.failed.values())), "nothing was asked")
        return _failed(question, member, reason, Status.SKIPPED if book.refused else Status.ERROR, book.seconds)
    if not book.elements and not any(book.apart.values()):
        return _failed(question, member, "nothing finite was compared", Status.SKIPPED, book.seconds)
    left = [v for v in asked if book.apart[v]]
    if left:
        said = suspicion(
            question.axis, asked, left, alike=all(book.apart[v] == 1 for v in left), error=book.error, of=anchor_error
        )
        notes.insert(0, said)
    if book.replays_parted:
        notes.insert(0, "the same call again gives other bits")
    if book.widest is not None and book.widest.nonfinite:
        notes.insert(1, "NaN or infinity on one side only")
    if left or book.replays_parted:
        status = Status.DIVERGENT
    else:  # a variant that crashed proves nothing about the whole
        status = Status.ERROR if book.failed and not book.refused else Status.IDENTICAL
    head = _head(question, member)
    extra = head.extra | {"elements": book.elements, "left_at": left, "unanswered_at": list(book.failed)}
    if book.first is not None:
        value, kind, apart = book.first
        where_first = f"first: {question.axis} = {value}, element {apart.first_mismatch} on {kind!r} inputs"
        notes.insert(1, f"{where_first}, up to {apart.max_ulp:,} ULP")
        extra["first"] = {"at": value, "inputs": kind, "element": apart.first_mismatch, "max_ulp": apart.max_ulp}
    if anchor_error is not None:
        extra["anchor_relative_error"] = anchor_error.relative_norm
    return row_of(
        head,
        [_ANCHOR, *asked],
        [0, *(book.apart[v] for v in asked)],
        status=status,
        ran=sorted(book.ran),
        replays=book.replays,
        replays_parted=book.replays_parted,
        difference=book.widest or Difference(mismatched=0, compared=book.elements, max_abs=0.0, max_ulp=0),
        error=book.error,
        extra=extra,
        reason="; ".join(notes)[:1000],
        seconds=book.seconds,
    )


def _failed(question: Question, member: str, reason: str, status: str = Status.ERROR, seconds: float = 0.0) -> Row:
    return msgspec.structs.replace(_head(question, member), status=status, reason=reason, seconds=seconds)


def _head(question: Question, member: str) -> Row:
    return Row(
        probe=PROBE,
        case=question.name,
        operator=question.operator,
        shape=dict(question.shape),
        dtype=question.dtype,
        device=question.device,
        inputs="hard",
        varied="class",
        impl=member,
        status="",
        extra={"class": question.cls, "layout": question.layout, "inputs": list(question.kinds)},
    )


def _record(kept: Certificates, question: Question, book: _Book) -> None:
    """A proof for each certificate whose calls all agreed, an exclusion for those that differed; none for failures.

    A form consists of several calls (a prompt in chunks). Where it differs, those of its calls that agreed elsewhere
    are not the ones that differed, unless all of them agreed elsewhere: then none is trusted.
    """
    if book.replays_parted:
        for member, key in dict.fromkeys(c for calls in book.certificates.values() for c in calls):
            kept.record(member, key, False, f"{question.name}: the same call again gave other bits")
        return
    held = {v: book.certificates[v] for v in question.values if book.apart.get(v) == 0 and v not in book.failed}
    left = {v: book.certificates[v] for v in question.values if book.apart.get(v)}
    kinds = ", ".join(question.kinds)
    good = {certificate: value for value, calls in held.items() for certificate in calls}
    parted: dict[_Certificate, int | str] = {}
    for value, calls in left.items():
        parted |= dict.fromkeys([c for c in calls if c not in good] or calls, value)
    for (member, key), value in parted.items():
        kept.record(member, key, False, _parting(question, book, value))
    for (member, key), value in good.items():
        elements = book.per_variant[value]
        if elements and (member, key) not in parted:
            evidence = f"{question.axis}={value}: {elements} finite elements equal to the anchor's on {kinds}"
            kept.record(member, key, True, evidence)


def _parting(question: Question, book: _Book, value: int | str) -> str:
    if book.first is None or book.first[0] != value:
        return f"{question.name}, {question.axis}={value}: other bits than the anchor's"
    _, kind, apart = book.first
    evidence = f"{apart.mismatched} of {apart.compared} elements differ, first at {apart.first_mismatch}"
    return f"{question.name}, {question.axis}={value}, {kind}: {evidence}"
