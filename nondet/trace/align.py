"""Matching the calls of two arms, and finding the first with equal inputs and different outputs.

What an axis of a tensor counts is not guessed from one size: it counts tokens if it was as long as the step in every
step seen, over steps of several lengths, and keys or predicted rows likewise. Then a call's tensors are compared on the
rows of the position under study, and on the keys that it sees, in order of position, wherever in the pack or in the
pages they are. An axis that follows none of the three (for example rows sorted by expert) is not understood, and
nothing is claimed about that tensor.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace

import torch

from nondet.core.compare import difference, identical
from nondet.core.records import Difference
from nondet.trace.recorder import Event, Sizes, Slot, StepRecord

# (module, call, occurrence, path) -> the shapes that it had at which sizes
Shapes = dict[tuple[str, str, int, str], list[tuple[Sizes, tuple[int, ...]]]]
Roles = tuple[str, ...]  # for each axis "tokens", "keys", "predicted" or "": one that no step changed
_CUT = Sizes(-1, -1, -1)  # where tensors were cut to the position's rows: no axis counts anything any more
# Their integer operands are read positions, which differ between packs; what was read is compared.
_INDEXING = ("getitem", "index_select", "gather", "take", "index", "embedding", "Tensor.index_select", "Tensor.gather")


@dataclass
class Pair:
    """The same call in both arms."""

    a: Event
    b: Event
    # equal_inputs, equal_outputs: on this request's rows; None where one of the tensors is not understood
    equal_inputs: bool | None = True
    equal_outputs: bool | None = True
    unequal_inputs: list[str] = field(default_factory=list)
    # the results that differ: their paths, and the differences
    unequal: list[tuple[str, Difference]] = field(default_factory=list)
    # whether the result that differs belongs to no row: something that all rows share, like a scale
    shared: bool = True
    roles: dict[str, Roles] = field(default_factory=dict)  # path of an input or a result -> what its axes count
    not_understood: list[str] = field(default_factory=list)


@dataclass
class Finding:
    """The result of comparing one region."""

    responsible: Pair | None = None  # the first call with equal inputs and different outputs
    # where there is none: the first call whose inputs differ already, though no earlier call is responsible
    after: Pair | None = None
    outside: bool = False  # whether these are arguments of the region, so that no call in there computed them
    compared: int = 0  # calls that were matched and understood
    # calls before the responsible one that only one arm made, as "a: module call"
    unmatched: list[str] = field(default_factory=list)


def first_responsible(a: StepRecord, b: StepRecord, shapes: Sequence[StepRecord]) -> Finding:
    """The first call in order of time whose inputs are bitwise equal on this request's rows and whose outputs are not.
    A module ends after the calls inside it, so the innermost comparable call is named. Results that belong to no row (a
    scale, a count) make their call responsible only if a later call takes them and gives this request's row different
    bits, because bookkeeping always differs between packs."""
    events_a, events_b = list(canonical(a)), list(canonical(b))
    seen: Shapes = {}
    for record in (a, b, *shapes):
        for event in canonical(record):
            for slot in (*event.inputs, *event.outputs):
                sizes = _CUT if record.cut else record.sizes
                seen.setdefault((*event.key, slot.path), []).append((sizes, slot.shape))
    finding = Finding()
    pairs: list[Pair] = []
    for one, two in aligned(events_a, events_b, finding.unmatched):
        pair = _compare(one, two, a, b, seen)
        pairs.append(pair)
        finding.compared += pair.equal_inputs is not None and pair.equal_outputs is not None
    for index, pair in enumerate(pairs):
        if (
            pair.equal_inputs
            and pair.equal_outputs is False
            and (a.cut or not pair.shared or _reaches(pair, pairs[index + 1 :]))
        ):
            finding.responsible = pair
            return finding
        if pair.equal_inputs is False and finding.after is None:
            finding.after = pair
    finding.outside = finding.after is not None and _is_given(finding.after, pairs)
    return finding


def _is_given(pair: Pair, pairs: Sequence[Pair]) -> bool:
    """Whether an input that differs is an argument of a module around the call: then no call in there computed it."""
    inside = f"{pair.a.key.module}."
    around = [p.a for p in pairs if p.a.of_module and p is not pair and inside.startswith(f"{p.a.key.module}.")]
    given = [slot.value.reshape(-1) for event in around for slot in event.inputs if slot.value is not None]
    made = [slot.value.reshape(-1) for event in around for slot in event.outputs if slot.value is not None]
    values = [s.value.reshape(-1) for s in pair.a.inputs if s.path in pair.unequal_inputs and s.value is not None]
    return any(any(_is(v, x) for x in given) and not any(_is(v, x) for x in made) for v in values)


def canonical(record: StepRecord) -> Iterator[Event]:
    """The calls, with attention's tensors in one form: transformers packs the heads of a single query differently. For
    one query, query [1, Hkv, Hq/Hkv, D] becomes [1, Hq, 1, D], in the same order; for several, keys and values that
    were repeated for each head of a group become one for each group again."""
    kv_heads = 0
    for event in record.events:
        if event.key.call == "cache.update":
            kv_heads = event.inputs[0].shape[1]
        if event.key.call != "scaled_dot_product_attention" or not kv_heads:
            yield event
            continue
        query, *keys_and_values = event.inputs[:3]
        inputs = [_unpacked(query, record.sizes), *(_ungrouped(slot, kv_heads) for slot in keys_and_values)]
        inputs += [_unpacked(slot, record.sizes) if slot.shape[1] > 1 else slot for slot in event.inputs[3:]]
        yield replace(event, inputs=inputs, outputs=[_unpacked(event.outputs[0], record.sizes)])


def _unpacked(slot: Slot, sizes: Sizes) -> Slot:
    if sizes.tokens != 1 or slot.shape[2] == 1:
        return slot
    shape = (slot.shape[0], slot.shape[1] * slot.shape[2], 1, slot.shape[3])
    return replace(slot, shape=shape, value=None if slot.value is None else slot.value.reshape(shape))


def _ungrouped(slot: Slot, kv_heads: int) -> Slot:
    step, rest = divmod(slot.shape[1], kv_heads)
    if step <= 1 or rest:
        return slot
    value = slot.value
    if value is not None:
        kept = value[:, ::step]
        if not torch.equal(kept.repeat_interleave(step, 1), value):  # not a repetition after all
            return slot
        value = kept
    return replace(slot, shape=(slot.shape[0], kv_heads, *slot.shape[2:]), value=value)


def roles_of(observations: Sequence[tuple[Sizes, tuple[int, ...]]]) -> Roles | None:
    """What each axis counts, by all steps seen; None where that is undecided."""
    ranks = {len(shape) for _, shape in observations}
    if len(ranks) != 1:
        return None
    roles = []
    for axis in range(ranks.pop()):
        lengths = [shape[axis] for _, shape in observations]
        fits = [role for role in Sizes._fields if [getattr(sizes, role) for sizes, _ in observations] == lengths]
        if len(set(lengths)) > 1:
            if not fits:
                return None
            roles.append(fits[0])
        elif fits and lengths[0] > 1:
            return None  # a length that never varied: it may count tokens, or be a width that happens to equal them
        else:
            roles.append("")  # nothing to choose from along an axis of length 1
    return tuple(roles)


def select(value: torch.Tensor, roles: Roles, record: StepRecord) -> torch.Tensor | None:
    """This request's part: its row, and the keys that it sees; None where it has no row there."""
    for axis, role in enumerate(roles):
        if role == "tokens":
            value = value.narrow(axis, record.row, 1)
        elif role == "keys":
            value = value.narrow(axis, record.columns.start, len(record.columns))
        elif role == "predicted":
            if record.predicted < 0:
                return None
            value = value.narrow(axis, record.predicted, 1)
    return value


def aligned(a: list[Event], b: list[Event], unmatched: list[str]) -> Iterator[tuple[Event, Event]]:
    """Pairs in order of time: calls are matched by module, and within a module by their longest common subsequence."""
    partner: dict[int, Event] = {}
    for module in dict.fromkeys(e.key.module for e in (*a, *b)):
        mine = [(i, e) for i, e in enumerate(a) if e.key.module == module]
        theirs = [e for e in b if e.key.module == module]
        names = [e.key.call for _, e in mine], [e.key.call for e in theirs]
        matcher = difflib.SequenceMatcher(None, *names, autojunk=False)
        for tag, i0, i1, j0, j1 in matcher.get_opcodes():
            if tag == "equal":
                partner.update({mine[i0 + n][0]: theirs[j0 + n] for n in range(i1 - i0)})
            else:
                unmatched += [f"first arm: {module} {name}" for name in names[0][i0:i1]]
                unmatched += [f"second arm: {module} {name}" for name in names[1][j0:j1]]
    for index, event in enumerate(a):
        if index in partner:
            yield event, partner[index]


def _compare(a: Event, b: Event, record_a: StepRecord, record_b: StepRecord, seen: Shapes) -> Pair:
    pair = Pair(a, b)

    def parts(one: Slot, two: Slot | None) -> tuple[torch.Tensor, torch.Tensor] | None:
        """This request's part of a tensor in either arm; None, and noted, where it is not understood."""
        if two is not None and one.value is not None and two.value is not None:
            shapes = seen[*a.key, one.path] + (seen[*b.key, two.path] if a.key != b.key else [])
            axes = roles_of(shapes)
            if axes is not None:
                pair.roles[one.path] = axes
                left, right = select(one.value, axes, record_a), select(two.value, axes, record_b)
                if left is not None and right is not None and left.shape == right.shape and left.dtype == right.dtype:
                    return left, right
        pair.not_understood.append(one.path)
        return None

    _compare_inputs(pair, parts)
    for slot, other in zip(a.outputs, b.outputs, strict=False):
        if not slot.dtype.is_floating_point:
            continue
        both = parts(slot, other)
        if both is None:
            pair.equal_outputs = None if pair.equal_outputs else pair.equal_outputs
        elif not identical(*both):
            pair.unequal.append((slot.path, difference(*both)))
            pair.shared = pair.shared and not any(pair.roles[slot.path])
            pair.equal_outputs = False
    return pair


def _compare_inputs(pair: Pair, parts: Callable[[Slot, Slot | None], tuple[torch.Tensor, torch.Tensor] | None]) -> None:
    others = {slot.path: slot for slot in pair.b.inputs}
    for slot in pair.a.inputs:
        other = others.pop(slot.path, None)
        if other is not None and slot.weight and other.weight:
            continue
        if not slot.dtype.is_floating_point and pair.a.key.call.removeprefix("Tensor.") in _INDEXING:
            continue
        both = parts(slot, other)
        if both is None and slot.dtype.is_floating_point:
            pair.equal_inputs = None
        elif both is not None and not identical(*both):
            pair.unequal_inputs.append(slot.path)
    if any(slot.dtype.is_floating_point for slot in others.values()):
        pair.equal_inputs = None
    for name, value in pair.a.constants.items():
        theirs = pair.b.constants.get(name)
        if isinstance(value, float | bool | str) and theirs != value:
            pair.unequal_inputs.append(f"{name}={value} against {theirs}")
    if pair.unequal_inputs:
        pair.equal_inputs = False


def _reaches(pair: Pair, later: Sequence[Pair]) -> bool:
    """Whether a later call takes a result that belongs to no row and gives this request's row different bits."""
    values = [(x.value, y.value) for x, y in zip(pair.a.outputs, pair.b.outputs, strict=False)]
    for index, user in enumerate(later):
        inputs = {slot.path: slot.value for slot in user.b.inputs}
        for slot in user.a.inputs:
            for mine, theirs in values:
                taken = _is(slot.value, mine) and _is(inputs.get(slot.path), theirs)
                if taken and user.equal_outputs is False and (not user.shared or _reaches(user, later[index + 1 :])):
                    return True
    return False


def _is(x: torch.Tensor | None, y: torch.Tensor | None) -> bool:
    return x is not None and y is not None and x.shape == y.shape and x.dtype == y.dtype and identical(x, y)
