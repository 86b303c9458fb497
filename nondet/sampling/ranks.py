"""The continuous-batching engine over several ranks: as an engine of `nondet sample`, and in each rank."""

from __future__ import annotations

import hashlib
import importlib.util
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from nondet.core.launch import listen, note
from nondet.errors import UnknownNameError, UserError
from nondet.ranks.group import RankError, RankGroup, check_ranks, fail_now, limit_or
from nondet.sampling.engine import TransformersEngine, run_session
from nondet.sampling.implementations import RANK_FREE, implementation
from nondet.sampling.model import EMBEDDED, LoadedModel, embedded_folder, quiet
from nondet.sampling.plan import Load, Outcome, Request, Session

# In a rank: every rank runs the same requests in the same order, and the collectives synchronize them. The result is
# rank 0's session and every rank's digest of it, so that different answers of ranks are detected.

# implementation -> see `nondet.sampling.implementations.implementation`
RANK_WAYS = ("stock", "stock-no-cudnn", "stock-flash", "invariant", RANK_FREE)

_model: Any = None


def load(folder: str, device: torch.device, *, dtype: torch.dtype | str = "auto") -> Any:
    """The model on this rank: cut by its plan over all ranks, or whole if there is only one."""
    from transformers import AutoModelForCausalLM

    world = dist.get_world_size() if dist.is_initialized() else 1
    options: dict[str, Any] = {"dtype": dtype, "trust_remote_code": False, "use_safetensors": True}
    if world == 1:
        return AutoModelForCausalLM.from_pretrained(folder, **options).to(device).eval()
    from transformers.distributed import DistributedConfig
    from transformers.utils import logging

    # transformers' bar uses a lock of several processes, which a rank that is ended would leave behind
    logging.disable_progress_bar()
    logging.set_verbosity_error()
    plan = DistributedConfig(tp_plan="auto", tp_size=world)
    return AutoModelForCausalLM.from_pretrained(folder, distributed_config=plan, **options).eval()


@dataclass(frozen=True)
class Played:
    """One rank's result of a session."""

    digest: str = ""  # SHA-256 (first 16 hex digits) over ids, logprob bits and schedules of all requests
    session: Session | None = None  # rank 0's; None of the others
    ran: Counter[str] = field(default_factory=Counter)  # the dispatcher's counts, and the launchers' notes
    refusal: tuple[str, str] | None = None  # the engine's refusal, and a hint; None where it does not refuse


def open_model(folder: str, dtype: str, device: str, threads: int) -> int:
    """Load this rank's share of the model; returns its parameters. transformers' `ValueError` if ranks don't divide it.
    On a CPU, `threads` is the caller's own number, because ranks are compared with one process."""
    global _model
    torch.set_num_threads(threads)
    where = torch.device(device, dist.get_rank()) if device == "cuda" else torch.device("cpu")
    _model = load(folder, where, dtype=getattr(torch, dtype))
    if _model.device.type != device:
        raise ValueError(f"transformers left the model on {_model.device.type}")
    return sum((p.to_local() if hasattr(p, "to_local") else p).numel() for p in _model.parameters())


def play(impl: str, requests: Sequence[Request], load: Load, options: dict[str, Any]) -> Played:
    """One session of the engine on this rank, under `impl`; `options` as of `nondet.sampling.engine.run_session`."""
    model = _model if impl == RANK_FREE else None  # weights are packed only where there are no ranks
    with report_failures(), implementation(impl, model) as counted, listen() as ran, torch.no_grad():
        try:
            session = run_session(_model, requests, load, **options)
        except UserError as error:  # what all ranks refuse alike
            return Played(refusal=(error.what, error.hint))
        coverage = counted()
    sha = hashlib.sha256()
    for outcome in session.outcomes:
        sha.update(repr((outcome.request.id, outcome.token_ids, outcome.finish, outcome.schedule)).encode())
        sha.update(outcome.logprobs)
    return Played(sha.hexdigest()[:16], session if dist.get_rank() == 0 else None, coverage + ran)


@contextmanager
def report_failures() -> Iterator[None]:
    """Report what ends the engine's thread before the engine looks for the other ranks. It waits for them to end their
    step first, and a step that waits for this rank never ends."""
    from transformers.generation.continuous_batching.continuous_api import ContinuousBatchingManager as Manager

    handle = Manager._handle_critical_error

    def reported(self: Any, error: Exception, processor: Any) -> None:
        if not isinstance(error, MemoryError):  # raised in all ranks alike, and handled separately
            fail_now(error)
        handle(self, error, processor)

    Manager._handle_critical_error = reported
    try:
        yield
    finally:
        Manager._handle_critical_error = handle


# The caller is not a rank: it passes the plan to a group of its own, in which each rank runs the engine over its share
# of the model. One request's bits can then depend on the batch in one more way (the order of a sum over ranks depends
# on the message's size) and on the number of ranks in another (another cut of K).

IN_RANK = "nondet.sampling.ranks"
LOAD_LIMIT_S, SESSION_LIMIT_S = 600.0, 1800.0


class RanksEngine:
    """A group of `world` ranks that holds one model, `loaded` by the caller; one rank too, for a comparison by the same
    means. Close it. `shares`: parameters of each rank. Raises UserError: no such ranks, or no model that can be cut."""

    def __init__(self, loaded: LoadedModel, world: int) -> None:
        check_loader()
        if world != 1:
            check_ranks([world], loaded.device, torch.cuda.device_count())
        check_heads(loaded.name, loaded.model.config, world)
        self.world, self._model = world, loaded.model
        self._group: RankGroup | None = None
        try:
            with model_folder(loaded) as folder:
                self._group = RankGroup(world, loaded.device, limit_s=limit_or(SESSION_LIMIT_S))
                question = (str(folder), loaded.dtype, loaded.device, torch.get_num_threads())
                opened = self._group.call(f"{IN_RANK}:open_model", *question, limit_s=limit_or(LOAD_LIMIT_S))
        except BaseException as error:
            self.close()
            if not isinstance(error, RankError):
                raise
            what = f"{loaded.name} could not be put on {world} ranks: {error}"
            raise UserError(what, "Use fewer --ranks, or a model with a tensor-parallel plan.") from error
        self.shares: list[int] = opened

    def close(self) -> None:
        """End the ranks."""
        if self._group is not None:
            self._group.close()
            self._group = None

    @property
    def pids(self) -> list[int]:
        """Process ids, by rank; empty once they have ended."""
        return self._group.pids if self._group is not None else []

    def describe(self) -> dict[str, Any]:
        """What is fixed in addition to the load."""
        return TransformersEngine(self._model).describe() | {"ranks": self.world, "sampling": "greedy"}

    def run(self, requests: Sequence[Request], load: Load, impl: str = "stock", **options: Any) -> Session:
        """See `run_session`; progress is reported at its end, and what ran on rank 0 is noted. A `UserError` if it is
        watched, cut short or refused, or if ranks have no such implementation."""
        if impl not in RANK_WAYS:
            raise UnknownNameError("implementation under --ranks", impl, RANK_WAYS)
        on_token_count = options.pop("on_token_count", None)
        if options.pop("watcher", None) is not None or options.pop("until", None) is not None:
            raise UserError("a session over ranks can't be watched or cut short", "Trace the model on one rank.")
        if self._group is None:
            raise UserError("the ranks have ended", "Start again with --resume.")
        try:
            parts: list[Played] = self._group.call(f"{IN_RANK}:play", impl, list(requests), load, options)
        except RankError as error:
            self.close()
            return _lost(requests, str(error))
        for part in parts:
            if part.refusal is not None:
                raise UserError(*part.refusal)
        session = parts[0].session
        assert session is not None  # noqa: S101 - rank 0 gives one wherever it refuses nothing
        for name, times in parts[0].ran.items():
            note(name, times)
        if (answers := len({p.digest for p in parts})) > 1:
            fatal = f"{self.world} ranks came to {answers} different answers in one session"
            return _lost(requests, fatal, session.steps)
        for outcome in session.outcomes if on_token_count is not None else ():
            on_token_count(outcome.request, len(outcome.token_ids))
        return session


def _lost(requests: Sequence[Request], reason: str, steps: int = 0) -> Session:
    return Session([Outcome(r, reason=reason) for r in requests], steps=steps, tokens=0, seconds=0.0, fatal=reason)


def check_loader() -> None:
    """Refuse, as a `UserError`, if the package is missing with which transformers loads a model in shares."""
    if importlib.util.find_spec("accelerate") is None:
        raise UserError("a model over ranks needs the package accelerate", "pip install accelerate")


def check_heads(name: str, config: Any, world: int) -> None:
    """Refuse, as a `UserError`, a model that transformers would cut in the middle of a head."""
    text = config.get_text_config()
    for key, what in (("num_key_value_heads", "key heads"), ("num_attention_heads", "heads")):
        heads = getattr(text, key, None)
        if isinstance(heads, int) and heads % world:
            raise UserError(f"{world} ranks: {name} has {heads} {what}", "Give a number of ranks that divides them.")


@contextmanager
def model_folder(loaded: LoadedModel) -> Iterator[Path]:
    """A folder from which another process can load it: the model's own, else its weights written to a temporary one."""
    local = embedded_folder() if loaded.name == EMBEDDED else Path(loaded.name)
    if local.is_dir():
        yield local.resolve()
        return
    with tempfile.TemporaryDirectory(prefix="nondet-ranks-") as folder:
        with quiet():
            loaded.model.save_pretrained(folder)
        yield Path(folder)
