"""Members put to questions: every answer compared with the anchor's, bit by bit, and what that says as rows."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from nondet.certificates import Certificates
from nondet.certify.findings import suspicion
from nondet.certify.questions import Call, Question
from nondet.compare import difference, error_against, identical, same
from nondet.errors import UserError
from nondet.kernels.launch import listen
from nondet.kernels.matmul.members import dispatcher_key
from nondet.result import Difference, ErrorFigures, Row, Status

__all__ = ["PROBE", "ask", "row_key"]

PROBE = "certify"
_ANCHOR = "anchor"


def row_key(question: Question, member: str) -> tuple[str, ...]:
    """As `Row.key` of the row that `ask` will give."""
    return ("row", PROBE, question.name, question.dtype, question.device, member)


class _DeviceLostError(RuntimeError):
    """A sticky CUDA error: every later call would fail, and a proof of anything mean nothing."""


@dataclass
class _Book:
    """What one member showed on one question.

    Attributes:
        apart: Variant -> 1 where it parted from the anchor and yet has the bits of the member's own whole answer, 2
            where it has neither; over all kinds of input the larger.
        first: The first parting: variant, kind, difference.
        failed: Variant -> why it could not be computed.
        refused: Every failure was the member's own "not here".
        elements: Finite elements compared.
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


def ask(
    question: Question,
    members: Mapping[str, Call],
    anchor: Call,
    certificates: Certificates,
    names: Mapping[str, str] | None = None,
) -> Iterator[Row]:
    """Put every member to the question, and record what was proven.

    Args:
        names: What certificates call a member, where that is not its name.

    Yields:
        A row for each member. Its first value is the anchor; the others are the question's variants. Their classes over
        all inputs are at most three: the anchor's bits, the member's own (those of its largest batch), and others.
    """
    books = {name: _Book() for name in members}
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
            for name, call in members.items():
                _put(books[name], question, kind, inputs, whole, call, reference)
                if not all(map(identical, operands, saved)):
                    # What it gave afterwards was of other operands: that says nothing about its order
                    failed = dict.fromkeys(question.values, "it writes to its operands")
                    books[name] = _Book(seconds=books[name].seconds, failed=failed, refused=False)
                    for x, before in zip(operands, saved, strict=True):
                        x.copy_(before)
            del inputs, whole, reference, operands, saved
    except _DeviceLostError:
        raise
    except Exception as error:  # noqa: BLE001 - the anchor or the inputs failed: said in every row, and the run goes on
        for name in members:
            yield _failed(question, name, f"the anchor failed: {_said(error)}")
        return
    for name, book in books.items():
        _record(certificates, (names or {}).get(name, name), question, book)
        yield _row(question, name, book, anchor_error)


def _put(
    book: _Book,
    question: Question,
    kind: str,
    inputs: Any,
    whole: torch.Tensor,
    call: Call,
    reference: tuple[int | str, torch.Tensor] | None,
) -> None:
    began = time.perf_counter()
    own: torch.Tensor | None = None
    for value in question.values:
        if value in book.failed:
            continue
        expected = question.part(whole, value)
        try:
            with listen() as noted:
                got = question.answer(inputs, call, value)
            equal = bool(same(expected, got).all())
            again = got
            repeats = kind == question.kinds[0] and value in (question.values[0], question.values[-1])
            if repeats:
                again = question.answer(inputs, call, value)
        except Exception as error:  # noqa: BLE001 - whatever a kernel raises is said in its row, and the run goes on
            book.failed[value] = _said(error)
            book.refused = book.refused and isinstance(error, NotImplementedError | UserError)
            if question.device == "cuda":
                _check_device_alive(error)
            continue
        book.ran.update(noted)
        finite = int(torch.isfinite(expected).sum())
        book.elements += finite
        book.per_variant[value] = book.per_variant.get(value, 0) + finite
        if reference is not None and value == reference[0]:
            book.error = error_against(got, reference[1])
        if repeats:
            book.replays += 1
            book.replays_parted += not identical(again, got)
        if equal:
            book.apart.setdefault(value, 0)
            continue
        apart = difference(expected, got)
        book.first = book.first or (value, kind, apart)
        book.widest = max(filter(None, (book.widest, apart)), key=lambda d: (d.nonfinite, d.max_ulp, d.mismatched))
        own = _own(question, inputs, call) if own is None else own
        alike = own.numel() > 0 and identical(question.part(own, value), got)
        book.apart[value] = max(book.apart.get(value, 0), 1 if alike else 2)
    book.seconds += time.perf_counter() - began


def _tensors(inputs: Any) -> list[torch.Tensor]:
    """Every tensor of a question's inputs, which are nested tuples and lists."""
    if isinstance(inputs, torch.Tensor):
        return [inputs]
    return [x for part in inputs for x in _tensors(part)] if isinstance(inputs, tuple | list) else []


def _check_device_alive(error: Exception) -> None:
    try:
        torch.cuda.synchronize()
    except Exception as sticky:
        raise _DeviceLostError(f"the CUDA context is lost after: {error}") from sticky


def _own(question: Question, inputs: Any, call: Call) -> torch.Tensor:
    """The member's own whole answer; empty if it has none."""
    try:
        return question.answer(inputs, call, question.whole)
    except Exception:  # noqa: BLE001 - it is said already, where this variant was asked
        return torch.empty(0)


def _row(question: Question, member: str, book: _Book, anchor_error: ErrorFigures | None) -> Row:
    asked = [v for v in question.values if v not in book.failed]
    notes = [f"{question.axis} = {value}: {why}" for value, why in book.failed.items()]
    if not asked:
        reason = next(iter(dict.fromkeys(book.failed.values())), "nothing was asked")
        return _failed(question, member, reason, Status.SKIPPED if book.refused else Status.ERROR, book)
    if not book.elements and not any(book.apart.values()):
        return _failed(question, member, "nothing finite was compared", Status.SKIPPED, book)
    labels = [0, *(book.apart[v] for v in asked)]
    numbers = {label: i for i, label in enumerate(dict.fromkeys(labels))}
    labels = [numbers[label] for label in labels]
    left = [v for v in asked if book.apart[v]]
    if left:
        said = suspicion(
            question.axis, asked, left, alike=all(book.apart[v] == 1 for v in left), error=book.error, of=anchor_error
        )
        notes.insert(0, said)
    if book.widest is not None and book.widest.nonfinite:
        notes.insert(1, "NaN or infinity on one side only")
    if left or book.replays_parted:
        status = Status.DIVERGENT
    else:  # a variant that crashed is no proof of the others' whole
        status = Status.ERROR if book.failed and not book.refused else Status.IDENTICAL
    extra: dict[str, Any] = {
        "class": question.cls,
        "layout": question.layout,
        "inputs": list(question.kinds),
        "elements": book.elements,
        "left_at": left,
        "unanswered_at": list(book.failed),
    }
    if book.first is not None:
        value, kind, apart = book.first
        extra["first"] = {"at": value, "inputs": kind, "element": apart.first_mismatch, "max_ulp": apart.max_ulp}
    if anchor_error is not None:
        extra["anchor_relative_error"] = anchor_error.relative_norm
    return Row(
        **_head(question, member, status),
        ran=sorted(book.ran),
        values=[_ANCHOR, *asked],
        labels=labels,
        class_sizes=[labels.count(i) for i in range(len(numbers))],
        trials=len(labels),
        distinct=len(numbers),
        replays=book.replays,
        replays_parted=book.replays_parted,
        difference=book.widest or Difference(mismatched=0, compared=book.elements, max_abs=0.0, max_ulp=0),
        error=book.error,
        extra=extra,
        reason="; ".join(notes)[:1000],
        seconds=book.seconds,
    )


def _failed(question: Question, member: str, reason: str, status: str = Status.ERROR, book: _Book | None = None) -> Row:
    extra = {"class": question.cls, "layout": question.layout, "inputs": list(question.kinds)}
    head = _head(question, member, status)
    return Row(**head, reason=reason, extra=extra, seconds=book.seconds if book else 0.0)


def _head(question: Question, member: str, status: str) -> dict[str, Any]:
    return {
        "probe": PROBE,
        "case": question.name,
        "operator": question.operator,
        "shape": dict(question.shape),
        "dtype": question.dtype,
        "device": question.device,
        "inputs": "hard",
        "varied": "class",
        "impl": member,
        "status": status,
    }


def _record(certificates: Certificates, member: str, question: Question, book: _Book) -> None:
    """One proof for the variants that hold, one exclusion for those that do not; nothing for what could not run."""
    key = f"{question.name} {question.dtype} {question.axis}="
    held = [v for v in question.values if book.apart.get(v) == 0 and v not in book.failed]
    left = [v for v in question.values if book.apart.get(v)]
    if book.replays_parted:
        certificates.record(member, key + _joined(question.values), False, "the same call again gave other bits")
        return
    kinds = ", ".join(question.kinds)
    elements = sum(book.per_variant[v] for v in held)
    if held and elements:
        evidence = f"{elements} finite elements equal to the anchor's on {kinds}"
        certificates.record(member, key + _joined(held), True, evidence)
    if left and book.first is not None:
        at, kind, apart = book.first
        evidence = f"{apart.mismatched} of {apart.compared} elements differ, first at {apart.first_mismatch}"
        said = f"{question.axis}={at}, {kind}: {evidence}"
        certificates.record(member, key + _joined(left), False, said)
        elsewhere = dispatcher_key(member, question.cls, question.dtype)
        if elsewhere is not None:
            certificates.record(*elsewhere, False, f"{question.name}, {said}")


def _joined(values: Any) -> str:
    return ",".join(map(str, values))


def _said(error: Exception) -> str:
    said = (str(error).strip() or type(error).__name__).splitlines()[0][:300]
    return said if isinstance(error, NotImplementedError | UserError) else f"{type(error).__name__}: {said}"
