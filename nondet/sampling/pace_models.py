"""Where `nondet bench engine` has its model: in this process, or cut over ranks of nondet's own.

Either gives the same: for a load, something to call with an implementation's name, which serves one wave of it.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch

from nondet.core.launch import listen
from nondet.errors import UserError
from nondet.ranks.group import RankError, RankGroup, check_ranks, limit_or, shared_group
from nondet.sampling.implementations import implementation
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
from nondet.sampling.pace_ranks import Opened, RankTurn, merged
from nondet.sampling.plan import Load, Request
from nondet.sampling.ranks import check_heads, check_loader
from nondet.sampling.standing import StandingEngine, Wave

__all__ = ["Here", "OverRanks", "TimedModel", "Turn", "check_cut", "open_model"]

_RANK = "nondet.sampling.pace_ranks"
_OPEN_LIMIT_S, _WAVE_LIMIT_S, _LEAVE_LIMIT_S = 600.0, 600.0, 60.0


@dataclass(frozen=True)
class Turn:
    """One wave.

    Attributes:
        ran: Launches and replacements in it, with counts; over ranks the first rank's.
        attention: As the engine has set it.
    """

    wave: Wave
    ran: Counter[str]
    attention: str


class TimedModel(Protocol):
    """A model to time engines on."""

    vocabulary: int

    def stand(
        self, requests: Sequence[Request], load: Load, impls: Sequence[str]
    ) -> AbstractContextManager[Callable[[str], Turn]]:
        """An engine for each implementation, and what serves a wave of one of them."""
        ...

    def close(self) -> None:
        """Let go of it."""
        ...


class Here:
    """A model in this process."""

    def __init__(self, loaded: LoadedModel) -> None:
        self.vocabulary: int = loaded.identity["vocabulary"]
        self._model: Any = loaded.model

    @contextmanager
    def stand(self, requests: Sequence[Request], load: Load, impls: Sequence[str]) -> Iterator[Callable[[str], Turn]]:
        """See `TimedModel`."""
        model = self._model
        with ExitStack() as stack:
            engines = {impl: stack.enter_context(StandingEngine(model, requests, load)) for impl in impls}

            def turn(impl: str) -> Turn:
                with torch.no_grad(), implementation(impl, model) as coverage, listen() as launched:
                    wave = engines[impl].wave()
                    return Turn(wave, coverage() + Counter(launched), engines[impl].attention)

            yield turn

    def close(self) -> None:
        """See `TimedModel`."""
        self._model = None


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
        # NCCL's log of its choices is not to be in the times; and no two graphs of ours are under way at once, for
        # which transformers' engine turns this off as well, where it can before the ranks meet
        self._environment = {"NCCL_DEBUG": os.environ.get("NCCL_DEBUG", "WARN")}
        if graphs:
            self._environment["NCCL_GRAPH_MIXING_SUPPORT"] = os.environ.get("NCCL_GRAPH_MIXING_SUPPORT", "0")
        self._group: RankGroup | None = None
        try:
            self.vocabulary = self._start()[0].vocabulary
        except RankError as error:
            raise UserError(f"{source} could not be put on {world} ranks: {error}", "Use fewer --ranks.") from error

    @property
    def pids(self) -> list[int]:
        """Process ids, by rank; empty once they have ended."""
        return self._group.pids if self._group is not None else []

    @contextmanager
    def stand(self, requests: Sequence[Request], load: Load, impls: Sequence[str]) -> Iterator[Callable[[str], Turn]]:
        """See `TimedModel`.

        Raises:
            RankError: a rank failed, died or hung, there or in a wave.
        """
        if self._group is None or not self._group.alive:
            self._start()
        group = self._group
        assert group is not None  # noqa: S101 - it was started
        group.ask(f"{_RANK}:stand", list(requests), load, list(impls), limit_s=limit_or(_WAVE_LIMIT_S))

        def turn(impl: str) -> Turn:
            turns: list[RankTurn] = group.ask(f"{_RANK}:wave", impl, limit_s=limit_or(_WAVE_LIMIT_S))
            return Turn(*merged(turns))

        try:
            yield turn
        finally:
            if group.alive:
                with suppress(RankError):  # what was measured stands; the next load gets new ranks
                    group.ask(f"{_RANK}:leave", limit_s=_LEAVE_LIMIT_S)

    def close(self) -> None:
        """Have the ranks let go of the model."""
        group, self._group = self._group, None
        if group is not None and group.alive:
            with suppress(RankError):
                group.ask(f"{_RANK}:let_go", limit_s=_LEAVE_LIMIT_S)

    def _start(self) -> list[Opened]:
        self._group = group = shared_group(self._world, self._device, self._environment, _WAVE_LIMIT_S)
        try:
            opened: list[Opened] = group.ask(f"{_RANK}:open_model", *self._question, limit_s=limit_or(_OPEN_LIMIT_S))
            if len({o.weights for o in opened}) > 1:
                raise RankError("the ranks drew different weights from one seed")
        except BaseException:
            group.close()
            raise
        return opened


def open_model(source: str, dtype: str, device: str, world: int, *, graphs: bool) -> TimedModel:
    """The model in this process, or over so many ranks.

    Raises:
        UserError: it can't be had.
    """
    if world > 1:
        return OverRanks(source, dtype, device, world, graphs=graphs)
    return Here(load_model(None if source == EMBEDDED else source, dtype, device))


def check_cut(source: str, world: int) -> None:
    """Refuse a model whose heads the ranks don't divide, where its config lies here and can be read.

    Raises:
        UserError: as said.
    """
    folder = embedded_folder() if source == EMBEDDED else None if is_random(source) else local_folder(source)
    if is_random(source):
        config = random_config(source, vocabulary=512)
    elif folder is None:
        return  # on the hub: seen when it is loaded
    else:
        try:
            config = read_config(source, folder, {})
        except UserError:
            return  # a row of the run file says why
    check_heads(source, config, world)


def _weights(source: str, world: int) -> str:
    """What the ranks load: random weights by name, else the folder that holds them.

    Raises:
        UserError: it can't be had, or can't be cut.
    """
    if is_random(source):
        return source
    folder = embedded_folder() if source == EMBEDDED else local_folder(source)
    if folder is None:
        from huggingface_hub import snapshot_download

        folder = Path(
            snapshot_download(source, allow_patterns=["*.json", "*.safetensors"], local_files_only=offline(source))
        )
    config = read_config(source, folder, {})
    weight_names(source, folder, config, {})  # the ranks load them by transformers
    check_heads(source, config, world)
    return str(folder.resolve())
