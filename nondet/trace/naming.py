"""From the place where two arms part to the guilty call: the fine pass there, and the replays of what it names."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
import torch

from nondet.core.compare import digest, row_hashes
from nondet.core.records import Culprit, Replay
from nondet.sampling.plan import Engine
from nondet.trace.align import Finding, Pair, first_guilty, select
from nondet.trace.arms import Arm, Site
from nondet.trace.calls import RecordedCall
from nondet.trace.coarse import CoarseCapture
from nondet.trace.events import StepRecord
from nondet.trace.fine import FineCapture
from nondet.trace.replays import families_for, kernels_of, replays
from nondet.trace.words import culprit_sentence, place_of

__all__ = ["Guilty", "name_culprit"]

_SAMPLER = (
    "the logits agree and the logprobs do not: what differs is the engine's own softmax over the vocabulary, outside "
    "of the model, and no call is named"
)
_CAPTURE = "the fine pass did not meet the bits of the coarse one: the capture is at fault, and no call is named"


@dataclass
class Guilty:
    """A culprit, and what a stand-alone script needs of it.

    Attributes:
        calls: The call of either arm; empty where it can't be made alone.
        outs: This request's part of either result.
    """

    culprit: Culprit
    calls: list[RecordedCall] = field(default_factory=list)
    outs: list[torch.Tensor] = field(default_factory=list)


def name_culprit(
    engine: Engine,
    model: Any,
    arms: tuple[Arm, Arm],
    coarse: tuple[CoarseCapture, CoarseCapture],
    site: Site,
    *,
    number: int,
    replaced: Sequence[str],
    opaque_attention: bool,
    steady: bool = True,
) -> Guilty:
    """Run both arms to the site, set their calls side by side, and replay the guilty one.

    Args:
        coarse: The coarse records that led to the site: the fine pass must meet their bits again.
        replaced: Families that are replaced in both arms by now; the caller has entered them.
        steady: Whether an arm gives the same bits each time; where it does not, the coarse bits can't be asked for.

    Raises:
        EngineStoppedError: an arm died.
    """
    naming = _Naming(model, arms, site, number, list(replaced))
    if site.record == "logprob":
        return naming.unnamed(_SAMPLER)
    captures: list[FineCapture] = []
    records: list[StepRecord] = []
    for arm, owner, before in zip(arms, site.owners, coarse, strict=True):
        fine = FineCapture(owner, site.position, site.region, opaque_attention=opaque_attention)
        arm.run(engine, fine)
        if fine.site is None:
            return naming.unnamed(f"arm {arm.name} did not compute that position again in the fine pass")
        if steady and not _agrees(fine.site, before, owner, site):
            return naming.unnamed(f"arm {arm.name}: {_CAPTURE}")
        captures.append(fine)
        records.append(fine.site)
    finding = first_guilty(records[0], records[1], [*captures[0].shapes, *captures[1].shapes])
    if finding.guilty is None:
        return naming.unnamed(_what_is_known(finding), finding, limited=any(r.limited for r in records))
    return naming.replayed(finding.guilty, finding, (records[0], records[1]))


@dataclass
class _Naming:
    """What every culprit's record has in common."""

    model: Any
    arms: tuple[Arm, Arm]
    site: Site
    number: int
    replaced: list[str]

    def replayed(self, pair: Pair, finding: Finding, records: tuple[StepRecord, StepRecord]) -> Guilty:
        """The named call, made again alone."""
        name = pair.a.key.call.removeprefix("Tensor.")
        calls = [RecordedCall.of(pair, records[0], second=False), RecordedCall.of(pair, records[1], second=True)]
        able = [call for call in calls if call is not None]
        outs = [
            select(event.outputs[0].value, pair.roles.get(event.outputs[0].path, ()), record)
            for event, record in zip((pair.a, pair.b), records, strict=True)
            if event.outputs[0].value is not None
        ]
        parts = [out for out in outs if out is not None]
        kernels: list[list[str]] = []
        done: list[Replay] = []
        if len(able) == 2 and len(parts) == 2:
            device = self.model.device.type
            kernels = [kernels_of(call, device) for call in able]
            done = list(replays(able[0], able[1], parts[0], parts[1], name))
        cured = [str(r.values[0]) for r in done if r.name == "substitution" and r.status == "identical"]
        if not cured and any("keys" in roles for roles in pair.roles.values()):
            cured = ["attention"]  # a part of attention: its cure is one order over a request's own keys
        elif not cured and len(able) < 2:  # it can't be made alone: what its name points to is tried in the whole run
            cured = list(families_for(name)[:1])
        key = pair.a.key
        culprit = msgspec.structs.replace(
            self.unnamed("", finding).culprit,
            module=key.module,
            call=key.call,
            occurrence=key.occurrence,
            shapes=[{s.path: list(s.shape) for s in (*e.inputs, *e.outputs)} for e in (pair.a, pair.b)],
            axes={place: list(roles) for place, roles in pair.roles.items()},
            digests=_digests(pair, records[0]),
            differences=dict(pair.unequal),
            kernels=kernels,
            replays=done,
            family=cured[0] if cured else "",
            not_understood=pair.not_understood,
        )
        sentence = culprit_sentence(culprit, [r.sizes for r in records])
        culprit = msgspec.structs.replace(culprit, sentence=sentence)
        return Guilty(culprit, able, parts) if len(able) == len(parts) == 2 else Guilty(culprit)

    def unnamed(self, sentence: str, finding: Finding | None = None, *, limited: bool = False) -> Guilty:
        """A place without a call."""
        if limited:
            sentence += "; the copies of that step's tensors met the memory limit, so not every call was compared"
        site = self.site
        culprit = Culprit(
            number=self.number,
            replaced=self.replaced,
            position=site.position,
            token=max(-1, site.position - len(self.arms[0].prompt) + 1),
            layer=site.region,
            module="",
            call="",
            occurrence=0,
            requests=list(site.owners),
            shapes=[],
            axes={},
            digests={},
            differences={},
            kernels=[],
            replays=[],
            family="",
            sentence=f"position {site.position}, {place_of(site)}: {sentence}",
            unmatched=finding.unmatched if finding else [],
            compared=finding.compared if finding else 0,
        )
        return Guilty(culprit)


def _agrees(record: StepRecord, coarse: CoarseCapture, owner: str, site: Site) -> bool:
    """Whether the layer's output in the fine pass has the hash of the coarse pass."""
    if not site.region.isdigit() or record.limited or not record.events:
        return True
    value = record.events[-1].outputs[0].value
    hashes = coarse.rows.get((owner, site.position))
    if value is None or hashes is None:
        return True
    rows = value[0][record.row : record.row + 1]
    return int(row_hashes(rows)[0]) == int(hashes[coarse.names.index(f"{site.region}.out")])


def _digests(pair: Pair, record: StepRecord) -> dict[str, str]:
    out = {}
    for slot in pair.a.inputs:
        if slot.value is not None and slot.path in pair.roles:
            part = select(slot.value, pair.roles[slot.path], record)
            if part is not None:
                out[slot.path] = digest(part)
    return out


def _what_is_known(finding: Finding) -> str:
    if finding.after is None:
        return (
            f"{finding.compared} calls were compared and none has equal inputs and unequal outputs: what differs there "
            "was not seen by the capture"
        )
    key = finding.after.a.key
    return (
        f"the inputs of `{key.call}` in {key.module} differ already ({', '.join(finding.after.unequal_inputs)}), "
        "though no call before it that was understood has equal inputs and unequal outputs: something wrote in between "
        "that the capture does not see"
    )
