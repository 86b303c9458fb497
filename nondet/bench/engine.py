"""`nondet bench engine`: whole models under transformers' continuous batching, by the clock, implementations in
turn."""

from __future__ import annotations

import gc
import hashlib
import os
import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch

from nondet.bench.cells import BenchCase, Key, in_turn, keys_of, sizes_text, timed_of, whole_groups
from nondet.core.launch import first_uses, listen
from nondet.core.measure import row_of
from nondet.core.processes import interrupts_later
from nondet.core.records import Record, Row, Status, Timed
from nondet.core.traces import trace_digest
from nondet.errors import UserError, reason_of
from nondet.ranks.group import RankError, RankGroup, check_ranks, limit_or, shared_group
from nondet.sampling.engine import engine_of, set_wake_event
from nondet.sampling.implementations import RANK_FREE, STOCK_FLASH, STOCK_NO_CUDNN, implementation
from nondet.sampling.model import (
    EMBEDDED,
    LoadedModel,
    check_dtype,
    check_memory,
    embedded_folder,
    is_published,
    is_random,
    load_model,
    local_folder,
    offline,
    random_config,
    random_model,
    read_config,
    read_tokenizer,
    weight_names,
)
from nondet.sampling.plan import Load, Request
from nondet.sampling.ranks import check_heads, check_loader, cut, failures_told, load
from nondet.sampling.schedule import SessionLog

# An engine that stays up, for timing: the same requests are served wave after wave, each from idle to idle.
#
# Its CUDA graphs are captured in the first wave, with the implementation that is on, and replayed in all that follow.
# Several stand beside each other on one model, and one of them is busy at a time. Nothing is watched: no hook runs, no
# margin is kept. Pages are not shared, so a wave finds nothing of the one before.
#
# Between waves the engine's thread is held (see `Gate`): idle, it looks for requests ten times a second else, and over
# ranks talks to the others' threads each time. So a wave begins with all of its requests in the queue, and ends with
# nothing under way: no thread computes while another engine is busy, nor while the implementation changes.

_POLL_S = 0.5


@dataclass(frozen=True)
class Wave:
    """What one wave was.

    Attributes:
        seconds: From its first step's beginning to its last request's end, first uses left out.
        steps, tokens: Engine steps, and tokens generated in them.
        digests: The trace of each request, in the plan's order.
        packs: Who was in each step, at which positions: equal in waves of equal batches.
        captured: CUDA graphs captured in it.
        first_use_seconds: What was proven or compiled in it.
        attention: As the engine has set it.
        ran: Launches and replacements in it, with counts; over ranks the first rank's.
    """

    seconds: float
    steps: int
    tokens: int
    digests: tuple[str, ...]
    packs: tuple[tuple[tuple[int, int, int], ...], ...] = field(repr=False)
    captured: int
    first_use_seconds: float
    attention: str = ""
    ran: Counter[str] = field(default_factory=Counter)


class Gate:
    """Stands in the place of the event that the engine's idle thread waits for, and holds it until it is let on."""

    def __init__(self) -> None:
        self._let_on, self._holds = threading.Event(), threading.Event()
        self.filling = False  # what is added meanwhile wakes nobody

    def set(self) -> None:
        """Let the thread on: from outside, or by the engine when there is something to do."""
        if not self.filling:
            self._let_on.set()

    def wait(self, timeout: float | None = None) -> bool:
        """The engine's thread comes here when it is idle, whatever time limit it has in mind."""
        self._holds.set()
        self._let_on.wait()
        self._holds.clear()
        self._let_on.clear()
        return True

    def clear(self) -> None:
        """`wait` has done so: what was set since is not to be lost."""

    def holds(self, timeout: float) -> bool:
        """Whether the thread is held by now, or within so many seconds."""
        return self._holds.wait(timeout)


class StandingEngine(ExitStack):
    """An engine over these requests. Use it in a `with` statement, and waves of several one after the other.

    Args:
        model: A causal LM of transformers, on its device.
        requests: Of each wave; all come at once.
        load: Without sharing.
    """

    def __init__(self, model: Any, requests: Sequence[Request], load: Load) -> None:
        super().__init__()
        self.requests = list(requests)
        self._model, self._load = model, load
        self._log, self._gate = SessionLog({}), Gate()
        self._waves = 0
        self._manager: Any = None
        self._attention = ""

    def __enter__(self) -> StandingEngine:
        self._manager = self.enter_context(engine_of(self._model, self.requests, self._load, self._log, watched=False))
        set_wake_event(self._manager, self._gate)
        return self

    def wave(self) -> Wave:
        """Serve every request once more.

        Raises:
            UserError: the engine died, or did not serve a request to its end.
        """
        log, manager = self._log, self._manager
        own = [replace(r, id=f"w{self._waves}-{r.id}") for r in self.requests]
        self._waves += 1
        begun, graphs = log.steps, self._graphs()
        with first_uses() as uses:
            self._gate.filling = True  # all of them are waiting before any is served: equal waves are equal batches
            try:
                for r in own:
                    log.arrivals[r.id] = 0
                    manager.add_request(list(r.prompt), request_id=r.id, max_new_tokens=r.max_new_tokens)
            finally:
                self._gate.filling = False
            if manager.is_running():
                self._gate.set()
            else:
                with interrupts_later():
                    manager.start()
                self._attention = str(self._model.config._attn_implementation).removeprefix("paged|")
            results = self._collected(len(own))
            while not self._gate.holds(_POLL_S):  # until the engine's thread has nothing under way
                self._check_alive()
        first = log.marks[begun]
        lost = uses.within(first, log.ended)
        place = {r.id: i for i, r in enumerate(own)}
        packs = (log.packs[step] for step in sorted(log.packs)[begun:])
        return Wave(
            seconds=log.ended - first - lost,
            steps=log.steps - begun,
            tokens=sum(len(names) for names in log.rows[begun:]),
            digests=tuple(_digest(results[r.id], r) for r in own),
            packs=tuple(tuple((place[s.request], s.first, s.rows) for s in pack) for pack in packs),
            captured=self._graphs() - graphs,
            first_use_seconds=lost,
            attention=self._attention,
        )

    def _collected(self, count: int) -> dict[str, Any]:
        results: dict[str, Any] = {}
        while len(results) < count:
            result = self._manager.get_result(timeout=_POLL_S)
            if result is not None and result.is_finished():
                results[result.request_id] = result
            elif result is None:
                self._check_alive()
        return results

    def _check_alive(self) -> None:
        if not self._manager.is_running():
            error = self._manager.background_thread_status.fatal_error
            raise UserError(f"the engine stopped in step {self._log.steps}: {reason_of(error)}", "Use less load.")

    def _graphs(self) -> int:
        """CUDA graphs that the engine holds."""
        processor = getattr(self._manager, "batch_processor", None)
        graphs = getattr(getattr(processor, "inputs_and_outputs", None), "graphs", None)
        return len(getattr(graphs, "_storage", ()))


def _digest(result: Any, request: Request) -> str:
    """The digest of a request's trace; a `UserError` where it has none."""
    if result.error is not None:
        raise UserError(f"{request.id}: {reason_of(result.error)}", "Use less load.")
    tokens = list(result.generated_tokens)
    if len(tokens) != request.max_new_tokens or len(result.logprobs) != len(tokens):
        raise UserError(f"{request.id} ended after {len(tokens)} of {request.max_new_tokens} tokens", "Use less load.")
    return trace_digest(tokens, np.asarray(result.logprobs, dtype="<f4").tobytes(), None)


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

    Attributes:
        graphs: Steps as CUDA graphs.
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
    """Every cell, in the order of the run: model by model, by number of ranks, the smallest load first.

    Raises:
        UserError: graphs without a GPU.
    """
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


Serve = Callable[[str], Wave]


@contextmanager
def standing(model: Any, requests: Sequence[Request], load: Load, impls: Sequence[str]) -> Iterator[Serve]:
    """An engine for each implementation, and what serves a wave of one of them, the implementation in place."""
    with ExitStack() as stack:
        engines = {impl: stack.enter_context(StandingEngine(model, requests, load)) for impl in impls}

        def serve(impl: str) -> Wave:
            with torch.no_grad(), implementation(impl, model) as coverage, listen() as launched:
                once = engines[impl].wave()
                return replace(once, ran=coverage() + Counter(launched))

        yield serve


class Here:
    """A model in this process."""

    def __init__(self, loaded: LoadedModel) -> None:
        self.vocabulary: int = loaded.identity["vocabulary"]
        self._model: Any = loaded.model

    def stand(self, requests: Sequence[Request], load: Load, impls: Sequence[str]) -> AbstractContextManager[Serve]:
        """See `standing`."""
        return standing(self._model, requests, load, impls)

    def close(self) -> None:
        """Let go of it."""
        self._model = None


# In a rank: standing engines over a model that is cut by its own tensor-parallel plan.
#
# The caller asks all ranks for one wave after the other. Every rank serves the same requests; the engine's first rank
# hands them on, and the steps of all go together, for each begins with an exchange over the ranks.

_model: Any = None
_stack = ExitStack()
_serve: Serve | None = None


def open_model(source: str, dtype: str, device: str, threads: int) -> tuple[int, str]:
    """Have this rank's share of the model, in the place of an earlier one.

    Args:
        source: A folder, or random weights: each rank draws all of them on its own device, from one seed, and keeps
            its share.
        threads: Of this rank on a CPU, as in `nondet.sampling.ranks.open_model`.

    Returns:
        The whole model's vocabulary, and a digest of weights that were drawn here, before they were cut; "" where they
        came from a folder.

    Raises:
        UserError: random weights that do not fit.
        ValueError: heads or widths that the ranks don't divide, as transformers says it.
    """
    global _model
    import torch.distributed as dist

    let_go()
    torch.set_num_threads(threads)
    place = torch.device(device, dist.get_rank()) if device == "cuda" else torch.device("cpu")
    torch_dtype: torch.dtype = getattr(torch, dtype)
    digest = ""
    if is_random(source):
        vocabulary = read_tokenizer(str(embedded_folder()), embedded_folder(), {}).get_vocab()
        config = random_config(source, max(vocabulary.values()) + 1)
        made_on = str(place) if is_published(source) else "cpu"
        check_memory(source, config, torch_dtype, "cpu" if made_on == "cpu" else device)
        whole = random_model(config, torch_dtype, made_on)
        digest = _digest_of_weights(whole)
        _model = cut(whole)
        del whole
        _give_back()
    else:
        _model = load(source, place, dtype=torch_dtype)
    if _model.device.type != device:
        raise ValueError(f"transformers left the model on {_model.device.type}")
    return int(_model.config.get_text_config().vocab_size), digest


def _digest_of_weights(model: Any) -> str:
    """Of the sums of each parameter's bits, as integers."""
    sums = []
    for _, parameter in sorted(model.named_parameters()):
        view = parameter.detach().view(torch.int32 if parameter.element_size() == 4 else torch.int16)
        sums.append(int(view.sum(dtype=torch.int64)))
    return hashlib.sha256(repr(sums).encode()).hexdigest()[:16]


def stand(requests: Sequence[Request], load: Load, impls: Sequence[str]) -> None:
    """Set an engine up for each implementation; those that stood before are ended."""
    global _serve
    leave()
    _stack.enter_context(failures_told())
    _serve = _stack.enter_context(standing(_model, requests, load, impls))


def wave(impl: str) -> Wave | tuple[str, str]:
    """One wave of the implementation's engine, or what the engine refused, and what to try."""
    assert _serve is not None  # noqa: S101 - the parent asks for waves of what stands
    try:
        return _serve(impl)
    except UserError as error:  # what all ranks refuse alike; of anything else the group's parent is told at once
        return error.what, error.hint


def leave() -> None:
    """End the engines."""
    global _serve
    _serve = None  # it holds the model
    _stack.close()


def let_go() -> None:
    """End the engines and hold no model any more."""
    global _model
    leave()
    if _model is not None:
        _model = None
        _give_back()


def _give_back() -> None:
    """Memory that nothing needs, to the device: a model is held by cycles, and the next one may need its room."""
    gc.collect()
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()


def merged(told: Sequence[Wave | tuple[str, str]]) -> Wave:
    """What all ranks say of one wave, as one wave: the slowest one's seconds, everything else the first one's.

    Raises:
        UserError: an engine refused, or the ranks met other batches or came to other answers.
    """
    refusal = next((what for what in told if not isinstance(what, Wave)), None)
    if refusal is not None:
        raise UserError(*refusal)
    waves = [wave for wave in told if isinstance(wave, Wave)]
    if len({w.packs for w in waves}) > 1:
        raise UserError(f"{len(waves)} ranks met different batches in one wave")
    answers = len({w.digests for w in waves})
    if answers > 1:
        raise UserError(f"{len(waves)} ranks came to {answers} different answers in one wave")
    return replace(
        waves[0],
        **{name: max(getattr(w, name) for w in waves) for name in ("seconds", "captured", "first_use_seconds")},
    )


_RANK = "nondet.bench.engine"
_OPEN_LIMIT_S, _WAVE_LIMIT_S, _LEAVE_LIMIT_S = 600.0, 600.0, 60.0


class OverRanks:
    """A model that is cut over ranks; this process holds nothing of it.

    The ranks stay for the next model. Where they ended, since one of them failed, they are started anew.

    Args:
        source: As for `load_model`.
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

    @property
    def pids(self) -> list[int]:
        """Process ids, by rank; empty once they have ended."""
        return self._group.pids if self._group is not None else []

    @contextmanager
    def stand(self, requests: Sequence[Request], load: Load, impls: Sequence[str]) -> Iterator[Serve]:
        """See `standing`.

        Raises:
            RankError: a rank failed, died or hung, there or in a wave.
        """
        if self._group is None or not self._group.alive:
            self._start()
        group = self._group
        assert group is not None  # noqa: S101 - it was started
        group.ask(f"{_RANK}:stand", list(requests), load, list(impls), limit_s=limit_or(_WAVE_LIMIT_S))

        def serve(impl: str) -> Wave:
            return merged(group.ask(f"{_RANK}:wave", impl, limit_s=limit_or(_WAVE_LIMIT_S)))

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
            opened = set(group.ask(f"{_RANK}:open_model", *self._question, limit_s=limit_or(_OPEN_LIMIT_S)))
            if len(opened) > 1:
                raise RankError("the ranks drew different weights from one seed")
        except BaseException:
            group.close()
            raise
        return int(opened.pop()[0])


def _ask_in_peace(group: RankGroup | None, what: str) -> None:
    """Have the ranks leave off, where there are any; what was measured stands, and the next load gets new ones."""
    if group is not None and group.alive:
        with suppress(RankError):
            group.ask(f"{_RANK}:{what}", limit_s=_LEAVE_LIMIT_S)


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
    packs: tuple[Any, ...] = ()
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
    _give_back()
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
            wave = serve(impl)
            if not (wave.first_use_seconds or wave.captured or wave.packs != (book.packs or wave.packs)):
                break
    except RankError:
        raise
    except (UserError, RuntimeError, MemoryError) as error:
        book.failure = reason_of(error)
        return
    if not timed:
        book.packs, book.captured = wave.packs, book.captured + wave.captured
        book.ran = book.ran or sorted(wave.ran, key=lambda name: (-wave.ran[name], name))
    elif wave.first_use_seconds or wave.captured or wave.packs != book.packs:
        book.failure = f"{_TRIES} runs in a row proved something, captured a graph or met other batches"
    else:
        book.steps, book.tokens = wave.steps, wave.tokens
        book.samples.append(1e6 * wave.seconds / wave.steps)
        book.digests.append(wave.digests)
        graphs = f"CUDA graphs, {book.captured} captured" if case.graphs else "no CUDA graphs"
        book.head = [f"attention {wave.attention}", graphs]


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
