"""Which axis counts what, whose rows and keys are compared, and which call is named."""

from __future__ import annotations

from typing import Any

import torch

from nondet.sampling.plan import Span
from nondet.trace.align import canonical, first_responsible, roles_of, select
from nondet.trace.capture import visible_keys
from nondet.trace.recorder import Event, EventKey, Sizes, Slot, StepRecord


def test_an_axis_counts_what_it_follows_in_every_step_seen() -> None:
    """A width that equals one step's size counts nothing; of one size only, of rows times experts, or of another rank
    nothing is claimed."""
    for one, two, roles in [
        ((Sizes(64, 64, 3), (1, 64, 64)), (Sizes(5, 70, 2), (1, 5, 64)), ("", "tokens", "")),
        ((Sizes(4, 9, 1), (1, 2, 4, 9)), (Sizes(7, 30, 2), (1, 2, 7, 30)), ("", "", "tokens", "keys")),
        ((Sizes(11, 11, 1), (1, 11, 64)), (Sizes(1, 12, 1), (1, 1, 64)), ("", "tokens", "")),
        ((Sizes(4, 9, 1), (1, 1, 160)), (Sizes(7, 30, 2), (1, 2, 160)), ("", "predicted", "")),
        ((Sizes(64, 64, 3), (1, 64, 256)), (Sizes(64, 64, 3), (1, 64, 256)), None),
        ((Sizes(4, 9, 1), (8, 16)), (Sizes(7, 9, 1), (14, 16)), None),
        ((Sizes(4, 9, 1), (4, 16)), (Sizes(7, 9, 1), (1, 7, 16)), None),
        ((Sizes(2, 9, 1), (2, 16)), (Sizes(2, 9, 1), (2, 16)), None),  # two may be the tokens, or a width
    ]:
        assert roles_of([one, two]) == roles


def test_a_position_sees_its_own_keys() -> None:
    for window, columns, keys in [(None, range(4, 16), 4 + 13), (4, range(5, 9), 4 + 3 + 3)]:
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


def both() -> list[tuple[torch.Tensor, int]]:
    """Each arm's rows, and which of them is the request's."""
    return [(torch.full((1, 4), 7.0), 0), (torch.tensor([[9.0] * 4, [7.0] * 4, [1.0] * 4]), 1)]


def arms() -> list[StepRecord]:
    """A row 7.0 alone and among others; the step computes a shared maximum, then divides by it, then doubles."""
    return [
        record(len(x), row, [("max", [x], [x.max()]), ("scale", [x, x.max()], [x / x.max()]), ("twice", [x], [2 * x])])
        for x, row in both()
    ]


def test_a_shared_scale_is_responsible_and_what_reaches_no_row_is_not() -> None:
    """Of what all rows share its maker is where others' data came in, unless no row changes by it, as by a count.
    Where inputs differ though no call before is responsible, the call is named as what comes after."""
    finding = first_responsible(*arms(), [])
    assert finding.responsible is not None
    assert finding.responsible.a.key.call == "max"
    assert finding.responsible.shared
    a, b = arms()
    for step in (a, b):
        del step.events[1]
    finding = first_responsible(a, b, [])
    assert (finding.responsible, finding.after) == (None, None)
    for step in (a, b):
        del step.events[0]
    unseen = b.events[0].inputs[0].value
    assert unseen is not None
    unseen[1, 2] += 1
    finding = first_responsible(a, b, [])
    assert finding.responsible is None
    assert finding.after is not None
    assert finding.after.unequal_inputs == ["0"]


def test_calls_of_one_arm_alone_are_listed() -> None:
    a, b = arms()
    b.events.insert(1, record(3, 1, [("cast", [torch.ones(3, 4)], [torch.ones(3, 4)])]).events[0])
    finding = first_responsible(a, b, [])
    assert finding.unmatched == ["second arm: m cast"]
    assert finding.responsible is not None


def test_a_request_s_part_is_found_wherever_it_is() -> None:
    value = torch.arange(24.0).reshape(1, 2, 3, 4)
    part = select(value, ("", "", "tokens", "keys"), StepRecord(Sizes(3, 4, 1), 1, range(2, 4), 0))
    assert part is not None
    assert part.flatten().tolist() == [6.0, 7.0, 18.0, 19.0]
    logits = torch.arange(12.0).reshape(1, 3, 4)
    for predicted in [0, 2, -1]:
        part = select(logits, ("", "predicted", ""), StepRecord(Sizes(9, 0, 3), 1, range(0), predicted))
        assert (None if part is None else part.flatten().tolist()) == (
            None if predicted < 0 else logits[0, predicted].tolist()
        )


HEADS, GROUP, WIDTH = 2, 3, 4


def attention(tokens: int, query: torch.Tensor, keys: torch.Tensor, out: torch.Tensor, *, cached: bool) -> StepRecord:
    """An attention call, after an update of a cache of HEADS heads if there is one."""
    update = [("cache.update", [torch.zeros(1, HEADS, tokens, WIDTH)], [])] if cached else []
    mask = torch.zeros(1, 1, query.shape[2], keys.shape[2])
    wide = torch.arange(float(query[..., :1].numel())).view(*query.shape[:3], 1)
    return record(tokens, 0, [*update, ("scaled_dot_product_attention", [query, keys, keys, mask, wide], [out])])


def test_heads_of_a_single_query_are_brought_into_one_form_and_nothing_else_is() -> None:
    packed = torch.arange(float(HEADS * GROUP * WIDTH)).view(1, HEADS, GROUP, WIDTH)
    keys = torch.randn(1, HEADS, 5, WIDTH)
    event = list(canonical(attention(1, packed, keys, packed + 1, cached=True)))[-1]
    query, key, value, mask, wide = event.inputs
    for slot, whole in ((query, packed), (event.outputs[0], packed + 1)):
        assert slot.shape == (1, HEADS * GROUP, 1, WIDTH)
        assert slot.value is not None
        assert slot.value.tolist() == whole.reshape(slot.shape).tolist()
    assert [s.shape for s in (key, value, mask)] == [tuple(keys.shape)] * 2 + [(1, 1, GROUP, 5)]
    assert wide.shape == (1, HEADS * GROUP, 1, 1)
    for tokens, cached in [(2, True), (1, False)]:
        event = list(canonical(attention(tokens, packed, packed, packed, cached=cached)))[-1]
        assert [s.shape for s in (*event.inputs[:3], *event.outputs)] == [tuple(packed.shape)] * 4


def test_repeated_keys_are_one_for_each_group_again() -> None:
    for repeated in [True, False]:
        keys = torch.randn(1, HEADS, 5, WIDTH)
        wide = keys.repeat_interleave(GROUP, 1)
        if not repeated:
            wide[0, 1, 4, 3] += 1
        query = torch.randn(1, HEADS * GROUP, 2, WIDTH)
        slot = list(canonical(attention(2, query, wide, query, cached=True)))[-1].inputs[1]
        assert slot.value is not None
        assert torch.equal(slot.value, keys if repeated else wide)
        assert slot.shape == tuple(slot.value.shape)
        bare = attention(2, query, wide, query, cached=True)
        bare.events[-1].inputs[1].value = None  # a step of which only shapes are wanted
        assert list(canonical(bare))[-1].inputs[1].shape == tuple(keys.shape)
        odd = Slot("1", (1, HEADS * GROUP - 1, 5, WIDTH), torch.float32, False, None)
        bare.events[-1].inputs[1] = odd  # heads that no whole number of groups makes
        assert list(canonical(bare))[-1].inputs[1] == odd


def test_where_a_call_reads_is_no_input_of_what_it_reads() -> None:
    for call in ["Tensor.index_select", "embedding", "add"]:
        x = torch.ones(3, 4)
        a, b = (record(3, 0, [(call, [x, torch.tensor(at)], [x + at])]) for at in (0, 1))
        finding = first_responsible(a, b, [record(2, 0, [(call, [x[:2], torch.tensor(0)], [x[:2]])])])
        assert (finding.responsible is None) == (call == "add")
        assert (finding.after is None) == (call != "add")


def differing() -> list[StepRecord]:
    """One call whose inputs are equal on the row and whose results are not."""
    return [record(len(x), row, [("call", [x], [2 * x + row])]) for x, row in both()]


def test_what_decides_whether_inputs_are_equal() -> None:
    finding = first_responsible(*differing(), [])
    assert (finding.responsible is not None, finding.compared) == (True, 1)
    weighed, numbered, lacking, unknown = (differing() for _ in range(4))
    for step in weighed:
        step.events[0].inputs.append(Slot("1", (4, 4), torch.float32, True))
    assert first_responsible(*weighed, []).responsible is not None
    for step, eps in zip(numbered, (0.5, 0.25), strict=True):
        step.events[0].constants["eps"] = eps
    finding = first_responsible(*numbered, [])
    assert finding.responsible is None
    assert finding.after is not None
    assert finding.after.unequal_inputs == ["eps=0.5 against 0.25"]
    lacking[1].events[0].inputs.append(Slot("1", (3, 4), torch.float32, False, torch.ones(3, 4)))
    for step in unknown:
        step.events[0].outputs[0].value = None
    for steps in (lacking, unknown):
        finding = first_responsible(*steps, [])
        assert (finding.responsible, finding.after, finding.compared) == (None, None, 0)


def test_a_shared_result_is_followed_to_whom_it_reaches() -> None:
    for through in [True, False]:
        steps = []
        for x, row in both():
            top = x.max()
            scale = top * 2 if through or not row else torch.tensor(5.0)
            calls = [("max", [x], [top]), ("scale", [top], [scale]), ("divide", [x, scale], [x / scale])]
            steps.append(record(len(x), row, calls if through else [calls[0], calls[2]]))
        if not through:  # the first arm's call takes the maximum itself, the second's something else
            divide = steps[0].events[1].inputs[1]
            divide.value = steps[0].events[0].outputs[0].value
        finding = first_responsible(*steps, [])
        named = finding.responsible if through else finding.after
        assert named is not None
        assert named.a.key.call == ("max" if through else "divide")
        assert (finding.responsible is None) == (not through)
