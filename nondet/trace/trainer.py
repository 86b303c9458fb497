"""A trainer's forward as an arm: the first call where it and an engine's step have equal inputs and different outputs.

The engine's tensors are [1, tokens, ...], the trainer's [B, W, ...]: of these the row of one rollout is taken. Its axes
of length W then count tokens, keys or predicted rows, whichever the same call's axis counts in the engine. Attention is
one call on both sides, over the keys that the position sees; its mask is not compared, so a wrong mask shows there.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Any, NamedTuple

import msgspec
import torch

from nondet.core.records import MismatchPlace
from nondet.sampling.plan import Span, Watcher
from nondet.trace.align import first_responsible
from nondet.trace.capture import CoarseCapture, FineCapture, RowHashes, watch_layers, wrapped_attention
from nondet.trace.recorder import Sizes, Slot, StepRecord, add_hooks, find_layers
from nondet.trace.replays import families_for
from nondet.trace.search import Site, least_site, same_records

Run = Callable[[Watcher], object]


class Row(NamedTuple):
    """The position of a rollout of `length` tokens in the trainer's batch [B, W]: its row, and its first column
    there."""

    batch: int
    width: int
    row: int
    start: int
    length: int

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        """[B, W, ...] -> [length, ...]."""
        return tensor.detach()[self.row, self.start : self.start + self.length]


class Batch(NamedTuple):
    """A forward of the trainer's, and each request's rollout in it."""

    forward: Callable[[], object]
    rows: Mapping[str, Row]


def first_differing_call(arm: str, run: Run, model: Any, batches: Sequence[Batch]) -> MismatchPlace:
    """Compare hashes of all layers, position by position, and then the calls of the layer where they first differ.
    `run` repeats the sampler's session, from an empty engine, with a watcher; each batch's `forward` calls the
    trainer's `model` once."""
    nowhere = MismatchPlace(impl=arm, rollout="", position=-1, layer="formula", rows=[0, 0])
    requests = [request for batch in batches for request in batch.rows]
    engines = CoarseCapture(requests[0]), CoarseCapture(requests[0])
    for capture in engines:
        run(capture)
    trainers = [_coarse(model, batches) for _ in range(2)]
    for side, (one, two) in (("sampler", engines), ("trainer", trainers)):
        if same_records(one, two) is not None:
            return msgspec.structs.replace(nowhere, unsteady=side)
    engine, trainer = engines[0], trainers[0]
    common = [name for name in engine.names if name in trainer.names]
    for records in (engine, trainer):
        columns = [records.names.index(name) for name in common]
        records.rows = {owner: hashes[columns] for owner, hashes in records.rows.items()}
        records.names = common
    sites = [(least_site(engine, trainer, (r, r)), r) for r in requests]
    differing = [(site.position, r, site) for site, r in sites if site is not None]
    if not differing:
        return nowhere
    _, request, site = min(differing, key=lambda one: one[:2])
    batch = next(b for b in batches if request in b.rows)
    place = msgspec.structs.replace(nowhere, rollout=request, position=site.position, layer=site.region)
    found = _fine(run, model, batch, site, place)
    if not found.call and site.region != "embedding":
        # what is computed before the layers and is not a hidden state, as the rotary embedding, shows in a layer first
        before = replace(site, record="input")
        earlier = _fine(run, model, batch, before, msgspec.structs.replace(place, layer=before.region))
        found = earlier if earlier.call else found
    return found


def _coarse(model: Any, batches: Sequence[Batch]) -> RowHashes:
    """The trainer's records, under the engine's names."""
    records = RowHashes()
    layers = [layer for _, layer in find_layers(model)]
    rows: Mapping[str, Row] = {}

    def note(name: str, tensor: torch.Tensor) -> None:
        records.note(name, torch.cat([row.of(tensor) for row in rows.values()]))

    def keys(original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def run(module: Any, query: Any, key: torch.Tensor, value: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            for name, states in (("k", key), ("v", value)):  # [B, Hkv, W, D]
                note(f"{module.layer_idx}.{name}", states.transpose(1, 2))
            return original(module, query, key, value, *args, **kwargs)

        return run

    with ExitStack() as stack:
        watch_layers(stack, layers, note)
        add_hooks(stack, model, after=lambda _module, _args, _kwargs, output: note("logits", output.logits))
        stack.enter_context(wrapped_attention(keys))
        for batch in batches:
            rows = batch.rows
            batch.forward()
            records.keep([Span(request, 0, row.length, True) for request, row in rows.items()])
    if "logits" in records.names:  # missing where the trainer computes them outside of the model, in another format
        column = records.names.index("logits")
        records.logits = {owner: int(hashes[column]) for owner, hashes in records.rows.items()}
    return records


class _Trainer(FineCapture):
    """Records the calls of one region in the trainer's forward, of one rollout's row. With `flat` the engine's cache
    gives keys as [keys, Hkv, D] (transformers 5.17), not as [1, Hkv, keys, D]."""

    def __init__(self, row: Row, position: int, region: str, *, flat: bool) -> None:
        super().__init__("", position, region, opaque_attention=True)
        self._row, self._flat = row, flat
        self.pack: tuple[Span, ...] = ()  # of a step's log: there is no schedule here

    def _begin(self, *_: Any) -> None:
        row, at = self._row, self._row.start + self.position
        oldest = 0 if self._window is None else max(0, self.position - self._window + 1)
        sizes = Sizes(row.width, row.width, row.width)
        self.start(StepRecord(sizes, at, range(row.start + oldest, at + 1), at))

    def _noted(self, slot: Slot, _tensor: torch.Tensor) -> Slot:
        row = self._row
        step = {row.batch: 1, row.batch * row.width: row.width}.get(slot.shape[0] if slot.shape else 0)
        if row.batch > 1 and step and not slot.weight:
            slot.shape = (step, *slot.shape[1:])
            slot.value = None if slot.value is None else slot.value[row.row * step : (row.row + 1) * step]
        return slot

    def _cached(self, key: torch.Tensor, value: torch.Tensor) -> list[Slot]:
        slots = self.kept({"keys": key, "values": value})
        for slot in slots if self._flat else ():
            slot.value = None if slot.value is None else slot.value[0].transpose(0, 1)
            slot.shape = (slot.shape[2], slot.shape[1], slot.shape[3])
        return slots


def _fine(run: Run, model: Any, batch: Batch, site: Site, found: MismatchPlace) -> MismatchPlace:
    """The calls at the site compared: what was found there, added to the place."""
    row = batch.rows[found.rollout]
    engine = FineCapture(site.owners[0], site.position, site.region, opaque_attention=True)
    run(engine)
    read = [slot for e in (engine.site.events if engine.site else ()) for slot in e.inputs if slot.path == "keys"]
    trainer = _Trainer(row, site.position, site.region, flat=any(len(slot.shape) == 3 for slot in read))
    with trainer.attached(model, trainer):
        batch.forward()
    if engine.site is None or trainer.site is None:
        return found
    finding = first_responsible(_unmasked(engine.site), _unmasked(trainer.site), engine.shapes)
    about: dict[str, Any] = {"rows": [engine.site.sizes.tokens, row.batch * row.width], "compared": finding.compared}
    pair = finding.responsible
    if pair is not None:
        family = next(iter(families_for(pair.a.key.call.removeprefix("Tensor."))), "")
        about |= pair.a.key._asdict() | {"difference": pair.unequal[0][1], "family": family}
    elif finding.after is not None:
        about["after"] = f"{finding.after.a.key.module} {finding.after.a.key.call}"
    return msgspec.structs.replace(found, **about)


def _unmasked(record: StepRecord) -> StepRecord:
    """Attention without its mask: each side builds its own, of another shape or none."""
    events = [
        replace(e, inputs=[slot for slot in e.inputs if not slot.path.endswith("attention_mask")])
        for e in record.events
    ]
    return replace(record, events=events)
