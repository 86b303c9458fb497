"""Each member's answers to a question are compared with the anchor's, bit by bit; the results become rows and words."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import msgspec
import torch

from nondet.certify.plan import Assignment, Call, Inputs, Question
from nondet.core.certificates import Certificates
from nondet.core.compare import difference, identical
from nondet.core.launch import DeviceLostError, listen, wait_for_device
from nondet.core.measure import fingerprint, row_of, written_to
from nondet.core.proof import attempt, in_words, operands_key, settings
from nondet.core.records import Difference, Row, Status, Value
from nondet.errors import UserError

_Certificate = tuple[str, str]  # (member, key)


@dataclass
class _Variant:
    """One member's answers for one variant, over all kinds of input."""

    failure: str = ""  # why it could not be computed
    label: int = 0  # 1 where it has the bits of the member's own whole answer and not the anchor's, 2 where neither
    compared: int = 0  # finite elements
    found: list[tuple[str, Difference]] = field(default_factory=list)  # where it differed: kind of input, difference
    certificates: dict[_Certificate, None] = field(default_factory=dict)  # of its calls


@dataclass
class _Member:
    """One member, and its results for one question. It is called in the member's place, to note under which
    certificates its calls are: those that the dispatcher looks for."""

    question: Question
    name: str
    call: Call
    known_as: str  # in certificates, unless it reports them itself (`claim`), as the dispatcher's members do
    seconds: float = 0.0
    ran: set[str] = field(default_factory=set)
    replays: int = 0
    unsteady: int = 0  # replays with other bits
    refused: bool = True  # every failure was the member's own "not here"

    def __post_init__(self) -> None:
        self.variants: dict[Value, _Variant] = {value: _Variant() for value in self.question.values}
        self._settings = settings(self.question.device)
        self._certificates: dict[_Certificate, None] = {}
        if hasattr(self.call, "ragged"):
            self.ragged = partial(self, of=self.call.ragged)

    def __call__(self, *operands: Any, of: Callable[..., Any] | None = None) -> Any:
        claim: Callable[..., _Certificate | None] = getattr(self.call, "claim", lambda *_: None)
        cls = f"{self.question.cls} {self.question.operator}"
        self._certificates[claim(*operands) or (self.known_as, operands_key(cls, operands, self._settings))] = None
        return (of or self.call)(*operands)

    def answer(self, kind: str, inputs: Inputs, whole: torch.Tensor) -> None:
        """Compare the answers on one kind of input with the anchor's."""
        question, own, began = self.question, None, time.perf_counter()
        ends = (question.values[0], question.values[-1]) if kind == question.kinds[0] else ()  # computed twice
        for value, variant in self.variants.items():
            if variant.failure:
                continue
            expected = question.part(whole, value)
            self._certificates = variant.certificates
            compute = partial(question.answer, inputs, self, value)
            with listen() as noted:
                tried = attempt(expected, compute)
            again = attempt(expected, compute) if value in ends and tried.result is not None else tried
            if tried.result is None or again.result is None:
                failure = tried.failure or again.failure
                variant.failure = in_words(failure)
                self.refused &= isinstance(failure, NotImplementedError | UserError)
                continue
            self.ran.update(noted)
            variant.compared += int(torch.isfinite(expected).sum())
            self.replays += value in ends
            self.unsteady += value in ends and not identical(again.result, tried.result)
            if tried.equal:
                continue
            self._certificates = {}  # its own whole answer is not a variant
            if own is None:
                with suppress(Exception):  # reported already, at this variant
                    own = question.answer(inputs, self, question.whole)
            alike = own is not None and identical(question.part(own, value), tried.result)
            variant.label = max(variant.label, 1 if alike else 2)
            variant.found.append((kind, difference(expected, tried.result)))
        self.seconds += time.perf_counter() - began

    def row(self) -> Row:
        """What was found, with the reasons."""
        axis, head, every = self.question.axis, self.question.head(self.name), self.variants.values()
        computed = {value: v.label for value, v in self.variants.items() if not v.failure}
        failed = {value: v.failure for value, v in self.variants.items() if v.failure}
        left, elements = [value for value, label in computed.items() if label], sum(v.compared for v in every)
        if not computed or not (elements or left):
            status = Status.SKIPPED if computed or self.refused else Status.ERROR
            reason = "nothing finite was compared" if computed else next(iter(failed.values()))
            return msgspec.structs.replace(head, status=status, reason=reason, seconds=self.seconds)
        notes = ["the same call again gives other bits"] if self.unsteady else []
        if left:
            kind, first = self.variants[left[0]].found[0]
            at = f"element {first.first_mismatch} on {kind!r} inputs, up to {first.max_ulp:,} ULP"
            notes.append(where_it_differs(axis, list(computed), left, alike=2 not in computed.values()))
            notes.append(f"first: {axis} = {left[0]}, {at}")
        widest = Difference(mismatched=0, compared=elements, max_abs=0.0, max_ulp=0)
        found = [each for v in every for _, each in v.found]
        widest = max(found, key=lambda d: (d.nonfinite, d.max_ulp, d.mismatched), default=widest)
        notes += ["NaN or infinity on one side only"] if widest.nonfinite else []
        notes += [f"{axis} = {value}: {why}" for value, why in failed.items()]
        status = Status.DIVERGENT if left or self.unsteady else Status.IDENTICAL
        if status == Status.IDENTICAL and failed and not self.refused:
            status = Status.ERROR  # a variant that crashed proves nothing about the whole
        figures: dict[str, Any] = {"replays": self.replays, "replays_parted": self.unsteady, "difference": widest}
        figures |= {"extra": head.extra | {"elements": elements, "left_at": left}, "seconds": self.seconds}
        figures |= {"status": status, "ran": sorted(self.ran), "reason": "; ".join(notes)[:1000]}
        return row_of(head, ["anchor", *computed], [0, *computed.values()], **figures)

    def record(self, kept: Certificates) -> None:
        """A proof for each certificate whose calls all agreed, an exclusion for those that differed; none for failures.

        A form consists of several calls (a prompt in chunks). Where it differs, those of its calls that agreed
        elsewhere are not the ones that differed, unless all of them agreed elsewhere: then none is trusted.
        """
        axis, differing = self.question.axis, dict[_Certificate, Value]()
        agreed = {at: v for at, v in self.variants.items() if not (v.label or v.failure or self.unsteady)}
        good = {c: at for at, v in agreed.items() for c in v.certificates}
        for value, v in self.variants.items():
            if v.label or self.unsteady:
                differing |= dict.fromkeys([c for c in v.certificates if c not in good] or v.certificates, value)
        for (member, key), value in differing.items():
            evidence = ": the same call again gave other bits"
            if not self.unsteady:
                kind, found = self.variants[value].found[0]
                elements = f"{found.mismatched} of {found.compared} elements differ, first at {found.first_mismatch}"
                evidence = f", {axis}={value}, {kind}: {elements}"
            kept.record(member, key, False, self.question.name + evidence)
        for (member, key), value in good.items():
            compared = self.variants[value].compared
            if compared and (member, key) not in differing:
                equal = f"{compared} finite elements equal to the anchor's on {', '.join(self.question.kinds)}"
                kept.record(member, key, True, f"{axis}={value}: {equal}")


def ask(
    question: Question, members: Mapping[str, Call], anchor: Call, certificates: Certificates,
    names: Mapping[str, str] | None = None,
) -> Iterator[Row]:  # fmt: skip
    """Test every member on the question, and record what was proven; `names`: what certificates call a member, where
    that is not its name. Yields a row for each. Its first value is the anchor; the others are the question's variants.
    Their classes over all inputs are at most three: the anchor's bits, the member's own (those of its largest batch),
    and others."""
    tested = [_Member(question, name, call, (names or {}).get(name, name)) for name, call in members.items()]
    try:
        for kind in question.kinds:
            inputs = question.prepare(kind)
            whole, written = question.expected(inputs, anchor), fingerprint(inputs)
            for member in tested:
                member.answer(kind, inputs, whole)
                if written_to(written, inputs):  # its later results were of other operands: they show nothing
                    member.variants = {value: _Variant("it writes to its operands") for value in question.values}
                    member.refused, inputs = False, question.prepare(kind)
            del inputs, whole, written
    except DeviceLostError:
        raise
    except Exception as error:  # noqa: BLE001 - the anchor or the inputs failed: reported in every row
        reason = f"the anchor failed: {in_words(error)}"
        for name in members:
            yield msgspec.structs.replace(question.head(name), status=Status.ERROR, reason=reason)
        return
    for member in tested:
        member.record(certificates)
        yield member.row()


def where_it_differs(axis: str, every: Sequence[Value], left: Sequence[Value], *, alike: bool) -> str:
    """The variants of `every` that gave other bits, `left`; `alike`: the member's own do not depend on the variant."""
    if len(left) < len(every):
        return f"differs at {axis} = {_listed(left)}, not at {_listed([v for v in every if v not in left])}"
    if alike:
        return f"differs at every {axis} tried, by itself with one result at all of them: another order, or accumulator"
    return f"differs at every {axis} tried, and not alike: another order, and one that depends on the batch"


def _listed(values: Sequence[Value]) -> str:
    """ "1, 2, 3, 8 and 12 more"."""
    return ", ".join(map(str, values[:8])) + (f" and {len(values) - 8} more" if len(values) > 8 else "")


_SAMPLED_S = 3.0  # of timing a few members at most, without the last call
_COMPILED_S = 0.6  # a Triton kernel, on an H200's host; measured calls say too little: earlier runs left some compiled


def estimate(planned: Sequence[Assignment], clock: Callable[[], float] = time.perf_counter) -> list[float]:
    """About how many seconds each question will take, all its members together.

    For a few seconds questions are put to one member, with one kind of input: of each operator's class, the one of
    most questions first, the middle one by its size, then the largest and the smallest. Any other is assumed to cost
    what the timed one of the nearest size does. On a GPU each member compiles once for each dtype and layout.
    """
    until, groups = clock() + _SAMPLED_S, dict[tuple[str, str], list[int]]()
    counts = [sum(v if isinstance(v, int) else 1 for v in item.question.values) for item in planned]
    work = [math.prod(item.question.shape.values()) * n for item, n in zip(planned, counts, strict=True)]
    for i in sorted(range(len(planned)), key=work.__getitem__):
        groups.setdefault((planned[i].question.operator, planned[i].question.cls), []).append(i)
    most = sorted(groups.values(), key=len, reverse=True)
    timed: dict[int, tuple[float, float]] = {}
    for i in dict.fromkeys([*(g[len(g) // 2] for g in most), *(g[-1] for g in most), *(g[0] for g in most)]):
        if clock() < until:
            timed[i] = _timed(planned[i], clock)

    compiled, seconds = set[tuple[str, ...]](), list[float]()
    for item, own in zip(planned, work, strict=True):
        question, of = item.question, (item.question.operator, item.question.cls)
        near = [i for i in groups[of] if i in timed] or list(timed)
        shared, each = timed[min(near, key=lambda i: abs(math.log(work[i] / own)))]
        made = {(*of, question.dtype, question.layout, name) for name in item.members if question.device == "cuda"}
        seconds.append(len(question.kinds) * (shared + len(item.members) * each) + _COMPILED_S * len(made - compiled))
        compiled |= made
    return seconds


def _timed(item: Assignment, clock: Callable[[], float]) -> tuple[float, float]:
    """Seconds per kind of input: of inputs and the anchor's answer, which are shared; and of one member's answers, from
    its first and its last variant. Each is called once before, since a first call loads and may compile."""
    question, member, began = item.question, next(iter(item.members.values())), clock()

    def seconds(call: Callable[..., Any], *arguments: Any) -> float:
        for _ in range(2):
            before = clock()
            call(*arguments)
            wait_for_device()
        return clock() - before

    low, high = question.values[0], question.values[-1]
    try:
        inputs = question.prepare(question.kinds[0])
        shared = clock() - began + seconds(question.expected, inputs, item.anchor)
        short, long = (seconds(question.answer, inputs, member, value) for value in (low, high))
    except Exception:  # noqa: BLE001 - its rows will say why; what fails takes hardly any time
        return clock() - began, 0.0
    share = 0.5  # of the last variant in a typical one: by its rows
    if isinstance(low, int) and isinstance(high, int) and high > low:
        share = statistics.mean((int(v) - low) / (high - low) for v in question.values)
    answers = len(question.values) + 2 / len(question.kinds)  # two answers are computed twice
    return shared, answers * (short + share * (long - short))
