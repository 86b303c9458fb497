"""`nondet bench engine`: whole models under transformers' continuous batching, by the clock, implementations in
turn."""

from __future__ import annotations

import os
import random
import time
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import msgspec
import torch

from nondet.bench.cells import BenchCase, Key, in_turn, keys_of, sizes_text, timed_of, whole_groups
from nondet.core.measure import row_of
from nondet.core.records import Record, Row, Status, Timed
from nondet.errors import UserError, reason_of
from nondet.ranks.group import RankError, RankGroup, check_ranks, limit_or, shared_group
from nondet.sampling.implementations import RANK_FREE, STOCK_FLASH, STOCK_NO_CUDNN
from nondet.sampling.model import (
    EMBEDDED,
    LoadedModel,
    check_dtype,
    embedded_folder,
    is_random,
    load_model,
    local_folder,
    offline,
    random_config,
    read_config,
    weight_names,
)
from nondet.sampling.plan import Load, Request, Session, Span
from nondet.sampling.ranks import (
    IN_RANK,
    LOAD_LIMIT_S,
    Played,
    Serve,
    check_heads,
    check_loader,
    check_refused,
    give_back,
    warm_engines,
)
from nondet.sampling.replay import digest_of

OPERATOR = "engine"

# By device: requests of a load, the mean prompt and the completion in tokens, query tokens that a step takes
_REQUESTS = {"cuda": (8, 32, 128), "cpu": (2, 8)}
_PROMPT = {"cuda": 128, "cpu": 12}
_TOKENS = {"cuda": 64, "cpu": 8}
_BUDGET = {"cuda": 512, "cpu": 32}
_MODELS = {"cuda": ("random:qwen3-0.6b", "random:qwen3-8b"), "cpu": ("random:qwen3-2x{width}",)}
_HEAD = 128  # on a CPU the model is as wide as gives each rank a key head
RUNS = 5


@dataclass(frozen=True)
class EngineCase(BenchCase):
    """One model under one load.

    Its shape: `requests` that come at once, as many as a step takes; the mean length of a `prompt`, each drawn between
    half and one and a half of it; `tokens` of each completion; the `budget` of query tokens that a step takes; and the
    `ranks` that the model is cut over, where it is.
    """

    model: str
    graphs: bool

    @property
    def requests(self) -> int:
        """That come at once."""
        return self.shape["requests"]

    @property
    def ranks(self) -> int:
        """That the model is cut over; 1 for this process."""
        return self.shape.get("ranks", 1)

    @property
    def load(self) -> Load:
        """For the engine."""
        return Load(
            others=0,
            targets=self.requests,
            spread=1,
            prompt=(1, 1),
            tokens=(1, 1),
            budget=self.shape["budget"],
            requests=self.requests,
            sharing=False,
            graphs=self.graphs,
        )

    def plan(self, vocabulary: int, seed: int) -> list[Request]:
        """The requests: those of a smaller load are the first of a larger one's."""
        drawn, mean = [], self.shape["prompt"]
        for i in range(self.requests):
            rng = random.Random(f"nondet engine {seed} {i}")  # noqa: S311 - a load, not a secret
            length = rng.randint(max(1, mean // 2), mean + mean // 2)
            tokens = tuple(rng.randrange(vocabulary) for _ in range(length))
            drawn.append(Request(f"t{i:06d}", True, tokens, self.shape["tokens"], 0))
        return drawn


def plan_engine(
    models: Sequence[str] | None,
    requests: Sequence[int] | None,
    device: str,
    dtypes: Sequence[str] | None,
    *,
    graphs: bool,
    ranks: Sequence[int] = (1,),
) -> list[EngineCase]:
    """Every cell, by model, by number of ranks, the smallest load first; graphs without a GPU are a `UserError`."""
    if graphs and device != "cuda":
        raise UserError("--cuda-graphs needs a CUDA device", "Leave it out on a CPU.")
    same = {"prompt": _PROMPT[device], "tokens": _TOKENS[device]}

    def case(model: str, count: int, dtype: str, world: int) -> EngineCase:
        over = {"ranks": world} if world > 1 else {}
        section = f"engine, {model}" + (f", {world} ranks" if over else "")
        group = f"{model} {sizes_text(same)} graphs={'on' if graphs else 'off'} {sizes_text(over)}".rstrip()
        shape = {"requests": count, **same, "budget": max(_BUDGET[device], count), **over}
        return EngineCase(section, OPERATOR, group, "requests", shape, dtype, model, graphs)

    return [
        case(model, count, dtype, world)
        for dtype in dtypes or ("bfloat16",)
        for model in models or [name.format(width=_HEAD * max(ranks)) for name in _MODELS[device]]
        for world in ranks
        for count in sorted(set(requests or _REQUESTS[device]))
    ]


def engine_impls(wanted: Sequence[str], device: str, graphs: bool) -> list[str]:
    """The implementations that the names stand for; "stock" stands for the backends that a user could have, too.

    Launched from the host cuDNN's attention is planned anew for every length, which no user would keep: without graphs
    stock is the one without it.
    """
    chosen: dict[str, None] = {}
    for name in wanted:
        if name == "stock" and device == "cuda":
            chosen |= dict.fromkeys(("stock" if graphs else STOCK_NO_CUDNN, STOCK_FLASH))
        else:
            chosen[name] = None
    return list(chosen)


def engine_keys(cases: Sequence[EngineCase], impls: Sequence[str], device: str) -> list[Key]:
    """Keys of every record, for a progress bar and for resuming."""
    return keys_of(cases, device, lambda group: [head_of(group, impl, device) for impl in impls])


def head_of(group: Sequence[EngineCase], impl: str, device: str) -> Row:
    """The row of a model's cells under one implementation, with everything but figures."""
    first = group[0]
    title = f"engine {first.group}: the first {first.requests} requests among so many"
    about = {"case": title, "inputs": "requests", "varied": "batch_size"}
    return first.row(impl, device, "budget", claims_invariance=impl in ("invariant", RANK_FREE), **about)


# Where the model is: in this process, or cut over ranks of nondet's own. Either gives the same: for a load, something
# to call with an implementation's name, which serves one wave of it.


class Here:
    """A model in this process."""

    def __init__(self, loaded: LoadedModel) -> None:
        self.vocabulary: int = loaded.identity["vocabulary"]
        self._model: Any = loaded.model

    @contextmanager
    def stand(self, requests: Sequence[Request], load: Load, impls: Sequence[str]) -> Iterator[Serve]:
        """See `warm_engines`."""
        with warm_engines(self._model, requests, load, impls) as serve:
            yield lambda impl: merged([serve(impl)])

    def close(self) -> None:
        """Let go of it."""
        self._model = None


def merged(parts: Sequence[Played]) -> Played:
    """What all ranks say of one wave, as one: the slowest one's seconds, everything else the first one's.

    An engine that refused, and ranks that met other batches or came to other answers, are a `UserError`.
    """
    check_refused(parts)
    sessions = [session_of(part) for part in parts]
    if any(session.packs != sessions[0].packs for session in sessions):
        raise UserError(f"{len(parts)} ranks met different batches in one wave")
    answers = len({part.digest for part in parts})
    if answers > 1:
        raise UserError(f"{len(parts)} ranks came to {answers} different answers in one wave")
    most = {name: max(getattr(s, name) for s in sessions) for name in ("seconds", "first_use_seconds")}
    figures = sessions[0].figures | {"captured": max(s.figures["captured"] for s in sessions)}
    return replace(parts[0], session=replace(sessions[0], **most, figures=figures))


def session_of(wave: Played) -> Session:
    """Of a wave that was not refused."""
    assert wave.session is not None  # noqa: S101 - every rank gives one wherever it refuses nothing
    return wave.session


_WAVE_LIMIT_S, _LEAVE_LIMIT_S = 600.0, 60.0


class OverRanks:
    """A model that is cut over ranks; this process holds nothing of it.

    The ranks stay for the next model. Where they ended, since one of them failed, they are started anew.

    Args:
        graphs: Whether steps will be CUDA graphs.

    Raises:
        UserError: ranks that can't be had, or a model that can't be cut over them.
    """

    def __init__(self, source: str, dtype: str, device: str, world: int, *, graphs: bool) -> None:
        check_loader()
        check_ranks([world], device, torch.cuda.device_count() if device == "cuda" else 0)
        check_dtype(dtype, device)
        self._question = (_weights(source, world), dtype, device, torch.get_num_threads())
        self._world, self._device = world, device
        self._group: RankGroup | None = None
        # NCCL's log of its choices is not to be in the times; and no two graphs of ours are under way at once, for
        # which transformers' engine turns this off as well, where it can before the ranks meet
        self._environment = {"NCCL_DEBUG": os.environ.get("NCCL_DEBUG", "WARN")}
        if graphs:
            self._environment["NCCL_GRAPH_MIXING_SUPPORT"] = os.environ.get("NCCL_GRAPH_MIXING_SUPPORT", "0")
        try:
            self.vocabulary = self._start()
        except RankError as error:
            raise UserError(f"{source} could not be put on {world} ranks: {error}", "Use fewer --ranks.") from error

    @contextmanager
    def stand(self, requests: Sequence[Request], load: Load, impls: Sequence[str]) -> Iterator[Serve]:
        """See `warm_engines`. Raises RankError: a rank failed, died or hung, there or in a wave."""
        if self._group is None or not self._group.alive:
            self._start()
        group = self._group
        assert group is not None  # noqa: S101 - it was started
        group.ask(f"{IN_RANK}:stand", list(requests), load, list(impls), limit_s=limit_or(_WAVE_LIMIT_S))

        def serve(impl: str) -> Played:
            return merged(group.ask(f"{IN_RANK}:wave", impl, limit_s=limit_or(_WAVE_LIMIT_S)))

        try:
            yield serve
        finally:
            _ask_in_peace(group, "leave")

    def close(self) -> None:
        """Have the ranks let go of the model."""
        group, self._group = self._group, None
        _ask_in_peace(group, "let_go")

    def _start(self) -> int:
        """Ranks that hold the model; returns its vocabulary."""
        self._group = group = shared_group(self._world, self._device, self._environment, _WAVE_LIMIT_S)
        try:
            shares = group.ask(f"{IN_RANK}:open_model", *self._question, limit_s=limit_or(LOAD_LIMIT_S))
            if len({share.digest for share in shares}) > 1:
                raise RankError("the ranks drew different weights from one seed")
        except BaseException:
            group.close()
            raise
        return int(shares[0].vocabulary)


def _ask_in_peace(group: RankGroup | None, what: str) -> None:
    """Have the ranks leave off, where there are any; what was measured stands, and the next load gets new ones."""
    if group is not None and group.alive:
        with suppress(RankError):
            group.ask(f"{IN_RANK}:{what}", limit_s=_LEAVE_LIMIT_S)


def open_bench_model(source: str, dtype: str, device: str, world: int, *, graphs: bool) -> Here | OverRanks:
    """The model in this process, or over so many ranks; a `UserError` where it can't be had."""
    if world > 1:
        return OverRanks(source, dtype, device, world, graphs=graphs)
    return Here(load_model(None if source == EMBEDDED else source, dtype, device))


def check_cut(source: str, world: int) -> None:
    """Refuse, as a `UserError`, a model whose heads the ranks don't divide, where its config lies here."""
    config = random_config(source, vocabulary=512) if is_random(source) else None
    folder = None if is_random(source) else _folder_of(source)
    if folder is not None:  # else on the hub: seen when it is loaded
        with suppress(UserError):  # a row of the run file says why
            config = read_config(source, folder, {})
    if config is not None:
        check_heads(source, config, world)


def _folder_of(source: str) -> Path | None:
    return embedded_folder() if source == EMBEDDED else local_folder(source)


def _weights(source: str, world: int) -> str:
    """What the ranks load: random weights by name, else the folder that holds them."""
    if is_random(source):
        return source
    folder = _folder_of(source)
    if folder is None:
        from huggingface_hub import snapshot_download

        folder = Path(
            snapshot_download(source, allow_patterns=["*.json", "*.safetensors"], local_files_only=offline(source))
        )
    config = read_config(source, folder, {})
    weight_names(source, folder, config, {})  # the ranks load them by transformers
    check_heads(source, config, world)
    return str(folder.resolve())


# The engine by the clock, implementations taking turns wave by wave.
#
# A case is one model under one load: so many requests that all come at once, prompts of drawn lengths, everybody's
# completion of one length. Each implementation's engine runs the load to warm up (kernels are compiled and proven
# there, a library plans, CUDA graphs are captured), then so many times. A run's figure is microseconds a step over all
# of its steps. A run in which something was proven, compiled or captured after all, or whose batches were others, is
# played again.
#
# The requests of a load are the first of the next larger one. So the smallest load's requests, in every load and every
# run, have to come out with the same bits under kernels that do not follow the batch: a row of the run file says so.
#
# Over ranks a wave's time is the slowest rank's, and ranks that met other batches or came to other answers are a
# failure of the implementation.

# How often a run is played again because something was proven or compiled in it.
_TRIES = 3
# The first may prove while it captures, and what it proves may be captured in the next one only.
_WARM_WAVES = 2


@dataclass
class _Book:
    """What the runs of one implementation in one case gave."""

    samples: list[float] = field(default_factory=list)  # microseconds a step, one figure a run
    digests: list[tuple[str, ...]] = field(default_factory=list)  # trace of every request, for each run
    ran: list[str] = field(default_factory=list)  # of the first wave: a replayed graph runs no Python
    head: list[str] = field(default_factory=list)  # the attention that ran, and whether graphs did
    packs: dict[int, tuple[Span, ...]] = field(default_factory=dict)  # every timed wave has to have these
    captured: int = 0
    steps: int = 0
    tokens: int = 0
    failure: str = ""

    def timed(self, impl: str) -> Timed:
        failure = (Status.ERROR, self.failure) if self.failure else None
        return timed_of(impl, self.samples, [*self.head, *self.ran], failure=failure, digits=2)


def collect_engine(
    cases: Sequence[EngineCase],
    impls: Sequence[str],
    device: str,
    seed: int,
    runs: int,
    done: Collection[Key] = (),
) -> Iterator[Record]:
    """Measure what is not in `done`, model by model: its cells, then a row on its bits for each implementation.

    A model that can't be had, or does not fit, is an error in each of its cells.
    """
    return whole_groups(
        cases,
        lambda group: engine_keys(group, impls, device),
        lambda group: _measured(group, impls, device, seed, runs),
        done,
    )


def _measured(group: Sequence[EngineCase], impls: Sequence[str], device: str, seed: int, runs: int) -> Iterator[Record]:
    first, failure = group[0], ""
    try:
        model = open_bench_model(first.model, first.dtype, device, first.ranks, graphs=first.graphs)
    except (UserError, RuntimeError) as error:  # a row of the run file: the other models are still to come
        model, failure = None, reason_of(error)
    books: list[dict[str, _Book]] = []
    for case in group:
        began = time.perf_counter()
        mine = {impl: _Book(failure=failure) for impl in impls}
        if model is not None:
            _play(case, model, mine, seed, runs)
        books.append(mine)
        known = next((b for b in mine.values() if b.samples), _Book())
        yield case.cell(
            device,
            [book.timed(impl) for impl, book in mine.items()],
            began,
            method="steps of the engine, host included" + (", the slowest rank" if case.ranks > 1 else ""),
            calls=known.steps,
            tokens=known.tokens,
        )
    if model is not None:
        model.close()
    del model
    give_back()
    for impl in impls:
        yield _bits(group, head_of(group, impl, device), [book[impl] for book in books])


def _play(case: EngineCase, model: Here | OverRanks, books: dict[str, _Book], seed: int, runs: int) -> None:
    """Warm everybody up, then everybody in turn."""
    busy = ""
    try:
        with model.stand(case.plan(model.vocabulary, seed), case.load, list(books)) as serve:
            for number, impl in in_turn(list(books), range(-_WARM_WAVES, runs)):
                if not books[impl].failure:
                    busy = impl
                    _once(case, serve, impl, books[impl], timed=number >= 0)
    except RankError as error:  # it takes the engines of all implementations along
        for impl, book in books.items():
            if not book.failure:
                book.failure = f"under {busy}: {error}" if busy and impl != busy else str(error)
    sound = [book for book in books.values() if not book.failure]
    if any(book.packs != sound[0].packs for book in sound):
        for book in sound:
            book.failure = "the implementations met different batches: their steps are not to be compared"


def _once(case: EngineCase, serve: Serve, impl: str, book: _Book, *, timed: bool) -> None:
    """One wave, or another one in its place where something was proven, compiled or captured after all."""
    try:
        for _ in range(_TRIES if timed else 1):
            played = serve(impl)
            wave = session_of(played)
            unlike = wave.first_use_seconds or wave.figures["captured"] or wave.packs != (book.packs or wave.packs)
            if not unlike:
                break
    except RankError:
        raise
    except (UserError, RuntimeError, MemoryError) as error:
        book.failure = reason_of(error)
        return
    if not timed:
        book.packs, book.captured = wave.packs, book.captured + wave.figures["captured"]
        ran = played.coverage + played.ran
        book.ran = book.ran or sorted(ran, key=lambda name: (-ran[name], name))
    elif unlike:
        book.failure = f"{_TRIES} runs in a row proved something, captured a graph or met other batches"
    else:
        book.steps, book.tokens = wave.steps, wave.tokens
        book.samples.append(1e6 * wave.seconds / wave.steps)
        book.digests.append(tuple(map(digest_of, wave.outcomes)))
        attention = next(name.removeprefix("ran ") for name in wave.figures if name.startswith("ran attention "))
        graphs = f"CUDA graphs, {book.captured} captured" if case.graphs else "no CUDA graphs"
        book.head = [attention, graphs]


def _bits(group: Sequence[EngineCase], head: Row, books: Sequence[_Book]) -> Row:
    """The traces of the requests that every load has, in every load and every run."""
    common = group[0].requests
    values: list[int | str] = []
    results: list[tuple[str, ...]] = []
    for case, book in zip(group, books, strict=True):
        own: dict[tuple[str, ...], int] = {}
        for number, digests in enumerate(book.digests):
            own.setdefault(digests[:common], number)
        results += own
        # one value for each load, but where its runs came out otherwise
        values += [case.requests if not number else f"{case.requests}, run {number + 1}" for number in own.values()]
    failure = next((book.failure for book in books if book.failure), "")
    if len(values) < 2:
        status = Status.ERROR if failure else Status.SKIPPED
        return msgspec.structs.replace(head, status=status, reason=failure or "nothing to compare it with")
    runs = [digests[:common] for book in books for digests in book.digests]
    return row_of(
        head,
        values,
        results,
        ran=sorted({name for book in books for name in (*book.head, *book.ran)}),
        replays=sum(len(book.digests) - 1 for book in books if book.digests),
        replays_parted=sum(digests != book.digests[0] for book in books for digests in book.digests[1:]),
        extra={
            "requests": common,
            "parted": sum(len(set(traces)) > 1 for traces in zip(*runs, strict=True)),
            "runs": len(runs),
        },
        reason=failure,
    )
