"""The engine by the clock: whole models under transformers' continuous batching, implementations in turn.

A cell is one model under one load: so many requests that all come at once, prompts of drawn lengths, everybody's
completion of one length. Each implementation has an engine of its own that stays up, and runs the load from idle to
idle: to warm up (kernels are compiled and proven there, a library plans, CUDA graphs are captured), then so many times,
implementations taking turns run by run. A run's figure is microseconds a step over all of its steps. A run in which
something was proven, compiled or captured after all, or whose batches were others, is played again.

The requests of a load are the first of the next larger one. So the smallest load's requests, in every load and every
run, have to come out with the same bits under kernels that do not follow the batch: a row of the run file says so.

Over ranks the turns are the same, wave by wave of all ranks together. A wave's time is the slowest rank's, and ranks
that met other batches or came to other answers are a failure of the implementation.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np
import torch

from nondet.core.records import Cell, Record, Row, Status, Timed
from nondet.errors import UserError, reason_of
from nondet.ranks.group import RankError
from nondet.sampling.pace import OPERATOR, EngineCase, engine_keys, groups_of, head_of
from nondet.sampling.pace_models import TimedModel, Turn, open_model

__all__ = ["collect_engine"]

# How often a run is played again because something was proven or compiled in it.
_TRIES = 3
# The first may prove while it captures, and what it proves may be captured in the next one only.
_WARM_WAVES = 2


@dataclass
class _Book:
    """What the runs of one implementation in one case gave.

    Attributes:
        samples: Microseconds a step, one figure a run.
        digests: Trace of every request, for each run.
        ran: Launches and replacements of the first wave: a replayed graph runs no Python.
        head: The attention that ran, and whether graphs did.
        packs: Who was in each step of a wave; every timed one has to have these.
    """

    samples: list[float] = field(default_factory=list)
    digests: list[tuple[str, ...]] = field(default_factory=list)
    ran: list[str] = field(default_factory=list)
    head: list[str] = field(default_factory=list)
    packs: tuple[Any, ...] = field(default=(), repr=False)
    captured: int = 0
    steps: int = 0
    tokens: int = 0
    failure: str = ""


def collect_engine(
    cases: Sequence[EngineCase],
    impls: Sequence[str],
    device: str,
    seed: int,
    runs: int,
    done: Collection[tuple[str, ...]] = (),
) -> Iterator[Record]:
    """Measure what is not in `done`, model by model: its cells, then a row on its bits for each implementation.

    A model of which anything is missing is measured whole, since its bits are compared with one another; what is done
    already is not given again. A model that can't be had, or does not fit, is an error in each of its cells.
    """
    for group in groups_of(cases):
        if all(key in done for key in engine_keys(group, impls, device)):
            continue
        timed_model, failure = _load(group[0], device)
        books: list[dict[str, _Book]] = []
        for case in group:
            started = time.perf_counter()
            mine = {impl: _Book(failure=failure) for impl in impls}
            if timed_model is not None:
                _play(case, timed_model, mine, seed, runs)
            books.append(mine)
            if case.key(device) not in done:
                yield _cell(case, mine, device, time.perf_counter() - started)
        if timed_model is not None:
            timed_model.close()
        del timed_model
        gc.collect()  # a model is held by cycles, and the next one may need its memory
        if device == "cuda":
            torch.cuda.empty_cache()
        for impl in impls:
            row = _bits(group, impl, device, [book[impl] for book in books])
            if row.key not in done:
                yield row


def _load(case: EngineCase, device: str) -> tuple[TimedModel | None, str]:
    try:
        return open_model(case.model, case.dtype, device, case.ranks, graphs=case.graphs), ""
    except (UserError, RuntimeError) as error:  # a row of the run file: the other models are still to come
        return None, reason_of(error)


def _play(case: EngineCase, timed_model: TimedModel, books: dict[str, _Book], seed: int, runs: int) -> None:
    """Warm everybody up, then everybody in turn; the order within a turn moves on by one each time."""
    requests = case.plan(timed_model.vocabulary, seed)
    names = list(books)
    busy = ""
    try:
        with timed_model.stand(requests, case.load, names) as serve:
            for turn in range(-_WARM_WAVES, runs):
                first = turn % len(names)
                for impl in names[first:] + names[:first]:
                    if not books[impl].failure:
                        busy = impl
                        _once(case, serve, impl, books[impl], timed=turn >= 0)
    except RankError as error:  # it takes the engines of all implementations along
        for impl, book in books.items():
            if not book.failure:
                book.failure = f"under {busy}: {error}" if busy and impl != busy else str(error)
    sound = [book for book in books.values() if not book.failure]
    if any(book.packs != sound[0].packs for book in sound):
        for book in sound:
            book.failure = "the implementations met different batches: their steps are not to be compared"


def _once(case: EngineCase, serve: Callable[[str], Turn], impl: str, book: _Book, *, timed: bool) -> None:
    """One wave, or another one in its place where something was proven, compiled or captured after all."""
    try:
        for _ in range(_TRIES if timed else 1):
            turn = serve(impl)
            wave = turn.wave
            if not (wave.first_use_seconds or wave.captured or wave.packs != (book.packs or wave.packs)):
                break
    except RankError:
        raise
    except (UserError, RuntimeError, MemoryError) as error:
        book.failure = reason_of(error)
        return
    if not timed:
        book.packs, book.captured = wave.packs, book.captured + wave.captured
        book.ran = book.ran or sorted(turn.ran, key=lambda name: (-turn.ran[name], name))
    elif wave.first_use_seconds or wave.captured or wave.packs != book.packs:
        book.failure = f"{_TRIES} runs in a row proved something, captured a graph or met other batches"
    else:
        book.steps, book.tokens = wave.steps, wave.tokens
        book.samples.append(1e6 * wave.seconds / wave.steps)
        book.digests.append(wave.digests)
        graphs = f"CUDA graphs, {book.captured} captured" if case.graphs else "no CUDA graphs"
        book.head = [f"attention {turn.attention}", graphs]


def _timed(impl: str, book: _Book) -> Timed:
    if book.failure:
        return Timed(impl=impl, status=Status.ERROR, reason=book.failure, ran=[*book.head, *book.ran])
    low, median, high = (float(x) for x in np.percentile(book.samples, [25, 50, 75]))
    return Timed(
        impl=impl,
        status=Status.TIMED,
        samples_us=[round(us, 2) for us in book.samples],
        median_us=round(median, 2),
        low_us=round(low, 2),
        high_us=round(high, 2),
        ran=[*book.head, *book.ran],
    )


def _cell(case: EngineCase, books: dict[str, _Book], device: str, seconds: float) -> Cell:
    known = next((b for b in books.values() if b.samples), _Book())
    return Cell(
        section=case.section,
        operator=OPERATOR,
        case=case.name,
        group=case.group,
        axis="requests",
        shape=case.shape,
        dtype=case.dtype,
        device=device,
        bytes=0,
        flops=0,
        limit_us=None,
        limited_by="",
        method="steps of the engine, host included" + (", the slowest rank" if case.ranks > 1 else ""),
        sets=1,
        calls=known.steps,
        cold=False,
        tokens=known.tokens,
        timed=[_timed(impl, book) for impl, book in books.items()],
        seconds=seconds,
    )


def _bits(group: Sequence[EngineCase], impl: str, device: str, books: Sequence[_Book]) -> Row:
    """The traces of the requests that every load has, in every load and every run."""
    head = head_of(group, impl, device)
    common = group[0].requests
    seen: dict[tuple[str, ...], int] = {}
    values: list[int | str] = []
    labels: list[int] = []
    for case, book in zip(group, books, strict=True):
        own: dict[int, int] = {}
        for number, digests in enumerate(book.digests):
            label = seen.setdefault(digests[:common], len(seen))
            own.setdefault(label, number)
        for label, number in own.items():  # one value for each load, but where its runs came out otherwise
            values.append(case.requests if not number else f"{case.requests}, run {number + 1}")
            labels.append(label)
    failure = next((book.failure for book in books if book.failure), "")
    if len(values) < 2:
        status = Status.ERROR if failure else Status.SKIPPED
        return msgspec.structs.replace(head, status=status, reason=failure or "nothing to compare it with")
    runs = [digests[:common] for book in books for digests in book.digests]
    parted = sum(len(set(traces)) > 1 for traces in zip(*runs, strict=True))
    return msgspec.structs.replace(
        head,
        status=Status.DIVERGENT if len(seen) > 1 else Status.IDENTICAL,
        ran=sorted({name for book in books for name in (*book.head, *book.ran)}),
        values=values,
        labels=labels,
        class_sizes=[labels.count(label) for label in range(len(seen))],
        trials=len(values),
        distinct=len(seen),
        replays=sum(len(book.digests) - 1 for book in books if book.digests),
        replays_parted=sum(digests != book.digests[0] for book in books for digests in book.digests[1:]),
        extra={"requests": common, "parted": parted, "runs": len(runs)},
        reason=failure,
    )
