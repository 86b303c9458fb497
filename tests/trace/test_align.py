"""Which axis counts what, whose rows and keys are compared, and which call is named."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from nondet.sampling.schedule import Span
from nondet.trace.align import first_guilty, roles_of, select
from nondet.trace.events import Event, EventKey, Sizes, Slot, StepRecord
from nondet.trace.fine import visible_keys


def test_axes_are_told_by_steps_of_several_sizes() -> None:
    """An axis counts tokens if it follows the step in every step seen; a width that equals one step's size does not."""
    wide = [(Sizes(64, 64, 3), (1, 64, 64)), (Sizes(5, 70, 2), (1, 5, 64))]
    assert roles_of(wide) == ("", "tokens", "")
    scores = [(Sizes(4, 9, 1), (1, 2, 4, 9)), (Sizes(7, 30, 2), (1, 2, 7, 30))]
    assert roles_of(scores) == ("", "", "tokens", "keys")
    single = [(Sizes(11, 11, 1), (1, 11, 64)), (Sizes(1, 12, 1), (1, 1, 64))]
    assert roles_of(single) == ("", "tokens", "")
    logits = [(Sizes(4, 9, 1), (1, 1, 160)), (Sizes(7, 30, 2), (1, 2, 160))]
    assert roles_of(logits) == ("", "predicted", "")


def test_what_cannot_be_told_is_not_guessed() -> None:
    """One size alone, rows times experts, and another rank: no claim."""
    assert roles_of([(Sizes(64, 64, 3), (1, 64, 256))]) is None
    assert roles_of([(Sizes(4, 9, 1), (8, 16)), (Sizes(7, 9, 1), (14, 16))]) is None
    assert roles_of([(Sizes(4, 9, 1), (4, 16)), (Sizes(7, 9, 1), (1, 7, 16))]) is None


@pytest.mark.parametrize(
    ("window", "columns", "keys"),
    # b computes positions 10 to 12 beside a's 0 to 3; with a window of 4 its keys begin at 7, and 11 sees 8 to 11
    [(None, range(4, 16), 4 + 13), (4, range(5, 9), 4 + 3 + 3)],
)
def test_a_position_sees_its_own_keys(window: int | None, columns: range, keys: int) -> None:
    """Keys of a request follow one another in the pack: all so far, or the last cached ones of a window."""
    pack = (Span("a", 0, 4, True), Span("b", 10, 3, True))
    assert visible_keys(pack, "b", 11, window) == (columns, keys)


def record(tokens: int, row: int, calls: list[tuple[str, list[Any], list[Any]]]) -> StepRecord:
    """A step whose calls are (name, inputs, outputs)."""

    def slots(values: list[Any], names: str) -> list[Slot]:
        return [Slot(f"{names}{i}", tuple(v.shape), v.dtype, False, v) for i, v in enumerate(values)]

    made = StepRecord(Sizes(tokens, 0, 1), row, range(0), -1)
    for name, inputs, outputs in calls:
        occurrence = sum(e.key.call == name for e in made.events)
        made.events.append(Event(EventKey("m", name, occurrence), slots(inputs, ""), slots(outputs, "out")))
    return made


def arms(second_call: str = "scale") -> tuple[StepRecord, StepRecord]:
    """A row 7.0 alone and among others; the step computes a shared maximum, then divides by it, then doubles."""
    a, b = torch.full((1, 4), 7.0), torch.tensor([[9.0] * 4, [7.0] * 4, [1.0] * 4])
    steps = []
    for x, row in ((a, 0), (b, 1)):
        top = x.max()
        divided = (second_call, [x, top], [x / top])
        calls: list[tuple[str, list[Any], list[Any]]] = [("max", [x], [top]), divided]
        steps.append(record(len(x), row, [*calls, ("twice", [x], [2 * x])]))
    return steps[0], steps[1]


def test_a_shared_scale_is_guilty_and_its_user_is_not() -> None:
    """What all rows share is an input of the call that takes it: its maker is where others' data came in."""
    finding = first_guilty(*arms(), [])
    assert finding.guilty is not None
    assert finding.guilty.a.key.call == "max"
    assert finding.guilty.shared


def test_a_shared_result_that_reaches_no_row_is_bookkeeping() -> None:
    """A count that differs between packs names nobody, as long as no row changes by it."""
    a, b = arms()
    for step in (a, b):
        del step.events[1]
    finding = first_guilty(a, b, [])
    assert finding.guilty is None
    assert finding.after is None


def test_a_write_that_nobody_saw_is_not_pinned_on_the_next_call() -> None:
    """Inputs that differ though no call before is guilty: the call is named as what comes after, not as guilty."""
    a, b = arms()
    for step in (a, b):
        del step.events[:2]
    moved = b.events[0].inputs[0].value
    assert moved is not None
    moved[1, 2] += 1
    finding = first_guilty(a, b, [])
    assert finding.guilty is None
    assert finding.after is not None
    assert finding.after.unequal_inputs == ["0"]


def test_calls_of_one_arm_alone_are_listed() -> None:
    """Another path in one arm: what matches is compared, what does not is told."""
    a, b = arms()
    b.events.insert(1, record(3, 1, [("cast", [torch.ones(3, 4)], [torch.ones(3, 4)])]).events[0])
    finding = first_guilty(a, b, [])
    assert finding.unmatched == ["second arm: m cast"]
    assert finding.guilty is not None


def test_a_row_is_found_wherever_it_is() -> None:
    """This request's row and keys, and nothing of anybody else's."""
    value = torch.arange(24.0).reshape(1, 2, 3, 4)
    step = StepRecord(Sizes(3, 4, 1), 1, range(2, 4), 0)
    part = select(value, ("", "", "tokens", "keys"), step)
    assert part is not None
    assert part.flatten().tolist() == [6.0, 7.0, 18.0, 19.0]
