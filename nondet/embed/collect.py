"""An encoder's vectors into a run file: each implementation, each arm, and what other batches did to neighbours."""

from __future__ import annotations

import hashlib
import time
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from nondet.core.compare import difference, same
from nondet.core.measure import Trial, check_device_alive, failed, kept_warnings, measure, reason_of
from nondet.core.records import Axis, EmbedPass, Neighbours, Row
from nondet.core.runfile import RunWriter
from nondet.embed.arms import ALONE, Arm, build_arms
from nondet.embed.model import LoadedEncoder
from nondet.embed.vectors import POOLINGS, cosine_distances, nearest, rank_changes, vectors
from nondet.sampling.implementations import implementation

__all__ = ["K", "collect", "describe"]

K = 10
# A packed text may differ from the text alone by so many roundings of the dtype, and by no more than a seventh of its
# length; further apart, the model has not kept the texts apart.
_ROUNDINGS, _APART_MOST = 1000, 0.14
Progress = Callable[[str, str], None]


def describe(
    loaded: LoadedEncoder, texts: Sequence[str], ids: Sequence[Sequence[int]], cut: int, **asked: Any
) -> dict[str, Any]:
    """The plan of an embed run, for its header."""
    sha = hashlib.sha256("\0".join(texts).encode())
    return {
        "texts": len(texts),
        "texts_digest": sha.hexdigest()[:16],
        "tokens": sum(map(len, ids)),
        "longest": max(map(len, ids)),
        "cut": cut,
        "model": loaded.identity,
        "device": loaded.device,
        "dtype": loaded.dtype,
        **asked,
    }


def collect(
    loaded: LoadedEncoder,
    ids: Sequence[Sequence[int]],
    impls: Sequence[str],
    writer: RunWriter,
    *,
    batch: int,
    seed: int,
    progress: Progress | None = None,
) -> None:
    """Measure whatever the run file does not hold yet.

    Args:
        ids: Token ids of each text.
        progress: Called with (implementation, arm) whenever all texts went through.
    """
    arms = build_arms([len(row) for row in ids], batch, seed)
    for impl in impls:
        head = _head(loaded, len(ids), impl)
        if head.key not in writer.done:
            _Implementation(loaded, ids, arms, impl, writer, progress).run(head)


def _head(loaded: LoadedEncoder, texts: int, impl: str) -> Row:
    return Row(
        probe="embed",
        case=f"{texts} texts, each alone and in batches",
        operator="encoder",
        shape={"texts": texts, "poolings": len(POOLINGS), "hidden": int(loaded.identity["hidden"] or 0)},
        dtype=loaded.dtype,
        device=loaded.device,
        inputs="texts",
        varied="batches",
        axis=Axis.BATCH.value,
        exact=False,
        impl=impl,
        status="",
    )


class _Implementation:
    """One implementation's part of a run."""

    def __init__(
        self,
        loaded: LoadedEncoder,
        ids: Sequence[Sequence[int]],
        arms: Sequence[Arm],
        impl: str,
        writer: RunWriter,
        progress: Progress | None,
    ) -> None:
        self.loaded, self.ids, self.arms, self.impl, self.writer = loaded, ids, arms, impl, writer
        self._progress = progress
        self._passes: dict[str, EmbedPass] = {}
        self._results: list[torch.Tensor] = []

    def run(self, head: Row) -> None:
        """Write the passes, what they did to neighbours, and last the row that says that all of it is there."""
        started = time.perf_counter()
        with kept_warnings() as caught, implementation(self.impl) as counts:
            try:
                arms = [arm for arm in self.arms if not arm.packed or self._can_pack(arm)]
                trials = [Trial(arm.name, partial(self._compute, arm, counts)) for arm in arms]
                row = measure(head, trials, extra=self._keep, started=started)
            except Exception as error:  # noqa: BLE001 - whatever a model raises becomes a row; the run goes on
                row = failed(head, error, started, caught)
                check_device_alive(self.loaded.device, error)
        for record in self._passes.values():
            if record.key not in self.writer.done:
                self.writer.write(record)
        for neighbours in self._neighbours(row):
            if neighbours.key not in self.writer.done:
                self.writer.write(neighbours)
        self.writer.write(row)

    def _compute(self, arm: Arm, counts: Callable[[], Counter[str]]) -> torch.Tensor:
        """All texts in one arm; what it took is noted the first time."""
        before, started = counts(), time.perf_counter()
        out = vectors(self.loaded, self.ids, arm)
        if self.loaded.device == "cuda":
            torch.cuda.synchronize()
        if arm.name not in self._passes:
            seconds = time.perf_counter() - started
            self._passes[arm.name] = self._pass(arm, seconds, counts() - before)
            if self._progress is not None:
                self._progress(self.impl, arm.name)
        return out

    def _pass(self, arm: Arm, seconds: float, ran: Counter[str], reason: str = "") -> EmbedPass:
        widths = [max(arm.width, *(len(self.ids[i]) for i in members)) for members in arm.batches]
        tokens = sum(map(len, self.ids))
        padded = sum(width * len(members) for width, members in zip(widths, arm.batches, strict=True))
        return EmbedPass(
            impl=self.impl,
            arm=arm.name,
            texts=len(self.ids),
            batches=len(arm.batches),
            tokens=tokens,
            computed=tokens if arm.packed else padded,
            seconds=seconds,
            ran=dict(ran),
            reason=reason,
        )

    def _can_pack(self, arm: Arm) -> bool:
        """Whether the model keeps packed texts apart: else the arm computes something else, and is left out."""
        few = Arm(arm.name, (arm.batches[0],), packed=True)
        members = torch.tensor(arm.batches[0])
        try:
            packed = vectors(self.loaded, self.ids, few)[members]
            alone = vectors(self.loaded, self.ids, Arm(ALONE, tuple((i,) for i in arm.batches[0])))[members]
        except Exception as error:  # noqa: BLE001 - a model that takes no positions or masks says so in its own way
            reason = f"the model can't pack texts: {reason_of(error)[1]}"
        else:
            apart = float(cosine_distances(packed.flatten(0, 1), alone.flatten(0, 1)).max())
            relative = min(_APART_MOST, _ROUNDINGS * torch.finfo(packed.dtype).eps)
            if apart <= relative * relative / 2:
                return True
            reason = f"the model does not keep packed texts apart (1 - cosine {apart:.2g})"
        self._passes[arm.name] = self._pass(arm, 0.0, Counter(), reason)
        return False

    def _keep(self, results: list[torch.Tensor]) -> dict[str, Any]:
        """Keeps the distinct results for `_neighbours`; each arm's is the one of its class."""
        self._results = results
        return {"poolings": list(POOLINGS)}

    def _neighbours(self, row: Row) -> list[Neighbours]:
        if not row.labels:
            return []
        out = []
        texts = len(self.ids)
        k = min(K, texts - 1)
        for place, pooling in enumerate(POOLINGS):
            by_class: dict[int, dict[str, Any]] = {}
            alone = self._results[0][:, place]
            ranks = nearest(alone, k)
            for value, label in zip(row.values, row.labels, strict=True):
                if value == ALONE:
                    continue
                if label not in by_class:
                    by_class[label] = _figures(alone, self._results[label][:, place], ranks, k)
                figures = by_class[label]
                out.append(Neighbours(impl=self.impl, arm=str(value), pooling=pooling, texts=texts, k=k, **figures))
        return out


def _figures(alone: torch.Tensor, other: torch.Tensor, ranks: torch.Tensor, k: int) -> dict[str, Any]:
    """What `Neighbours` says of one arm's vectors [n, D]."""
    parted = (~same(alone, other)).any(1)
    changes = rank_changes(ranks, nearest(other, k))
    return {
        "parted": int(parted.sum()),
        "first": int(parted.to(torch.uint8).argmax()) if bool(parted.any()) else None,
        "max_ulp": difference(alone, other).max_ulp,
        "cosine_distance": float(cosine_distances(alone, other).max().nan_to_num(2.0)),
        "top1_changed": changes.top1,
        "topk_changed": changes.topk,
        "topk_reordered": changes.reordered,
    }
