"""The continuous-batching engine over several ranks, as an engine of `nondet sample`.

The caller is no rank: it hands the plan to a group of its own (see `nondet.ranks.group`), in which each rank runs
transformers' engine over its share of the model. One request's bits can then follow the batch in one more way (the
order of a sum over ranks goes by the message's size) and the number of ranks in another (another cut of K).
"""

from __future__ import annotations

import importlib.util
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nondet.core.launch import note
from nondet.errors import UnknownNameError, UserError
from nondet.ranks.group import RankError, RankGroup, check_ranks, limit_or
from nondet.sampling.engine import TransformersEngine
from nondet.sampling.plan import Load, Request
from nondet.sampling.protocol import Outcome, Session, Watcher
from nondet.sampling.ranks_session import RANK_WAYS, Played
from nondet.sampling.setting import PLAIN, Setting

if TYPE_CHECKING:
    from nondet.sampling.model import LoadedModel

__all__ = ["RanksEngine", "check_heads", "check_loader"]

_SESSION = "nondet.sampling.ranks_session"
LOAD_LIMIT_S, SESSION_LIMIT_S = 600.0, 1800.0


class RanksEngine:
    """A group of ranks that holds one model. Close it, or use it in a `with` statement.

    Args:
        loaded: The model as the caller loaded it: its tokenizer, its identity and its weights are what the ranks get.
        world: Ranks; 1 too, for a comparison by one means.

    Attributes:
        shares: Parameters that each rank holds.

    Raises:
        UserError: ranks that can't be had, or a model that can't be cut over them.
    """

    def __init__(self, loaded: LoadedModel, world: int, *, trust_remote_code: bool = False) -> None:
        import torch

        check_loader()
        if world != 1:
            check_ranks([world], loaded.device, torch.cuda.device_count())
        check_heads(loaded.name, loaded.model.config, world)
        self.world, self.impl = world, "stock"
        self._model = loaded.model
        self._coverage: Counter[str] = Counter()
        self._group: RankGroup | None = None
        with _folder(loaded) as folder:
            try:
                self._group = RankGroup(world, loaded.device, limit_s=limit_or(SESSION_LIMIT_S))
                self.shares: list[int] = self._group.ask(
                    f"{_SESSION}:open_model",
                    str(folder),
                    loaded.dtype,
                    loaded.device,
                    torch.get_num_threads(),
                    trust_remote_code,
                    limit_s=limit_or(LOAD_LIMIT_S),
                )
            except RankError as error:
                self.close()
                raise UserError(
                    f"{loaded.name} could not be put on {world} ranks: {error}",
                    "Use fewer --ranks, or a model with a tensor-parallel plan.",
                ) from error
            except BaseException:
                self.close()
                raise

    def __enter__(self) -> RanksEngine:
        return self

    def __exit__(self, *rest: object) -> None:
        self.close()

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
        """What is fixed beside the load."""
        return TransformersEngine(self._model).describe() | {"ranks": self.world, "sampling": "greedy"}

    @contextmanager
    def implementation(self, name: str) -> Iterator[Callable[[], Counter[str]]]:
        """Put the implementation under the model in every rank, for the sessions inside the `with` block.

        Yields:
            What rank 0's dispatcher has said so far, over all sessions of the block.

        Raises:
            UnknownNameError: no such implementation of several ranks.
        """
        if name not in RANK_WAYS:
            raise UnknownNameError("implementation under --ranks", name, RANK_WAYS)
        before, self.impl, self._coverage = self.impl, name, Counter()
        try:
            yield lambda: Counter(self._coverage)
        finally:
            self.impl = before

    def run(
        self,
        requests: Sequence[Request],
        load: Load,
        *,
        seed: int = 0,
        eos: Sequence[int] = (),
        on_token_count: Callable[[Request, int], None] | None = None,
        forced: Mapping[str, Sequence[int]] | None = None,
        watcher: Watcher | None = None,
        until: str | None = None,
        setting: Setting = PLAIN,
    ) -> Session:
        """See `nondet.sampling.engine.run_session`. Finished requests are told at the session's end.

        Raises:
            UserError: the engine refuses, or a session that ranks can't run (watched, or cut short).
        """
        if watcher is not None or until is not None:
            raise UserError("a session over ranks can't be watched or cut short", "Trace the model on one rank.")
        if self._group is None:
            raise UserError("the ranks have ended", "Start again with --resume.")
        try:
            parts: list[Played] = self._group.ask(
                f"{_SESSION}:play", self.impl, list(requests), load, seed, list(eos), forced, setting
            )
        except RankError as error:
            self.close()
            return Session(outcomes=_lost(requests, str(error)), steps=0, tokens=0, seconds=0.0, fatal=str(error))
        refusal = next((p.refusal for p in parts if p.refusal is not None), None)
        if refusal is not None:
            raise UserError(*refusal)
        session = parts[0].session
        assert session is not None  # noqa: S101 - rank 0 gives one wherever it refuses nothing
        self._coverage += parts[0].coverage
        for name, times in parts[0].ran.items():
            note(name, times)
        if len({p.digest for p in parts}) > 1:
            fatal = f"{self.world} ranks came to {len({p.digest for p in parts})} different answers in one session"
            return Session(outcomes=_lost(requests, fatal), steps=session.steps, tokens=0, seconds=0.0, fatal=fatal)
        if on_token_count is not None:
            for outcome in session.outcomes:
                on_token_count(outcome.request, len(outcome.token_ids))
        return session


def _lost(requests: Sequence[Request], reason: str) -> list[Outcome]:
    return [
        Outcome(
            request=request,
            token_ids=[],
            logprobs=b"",
            margins=b"",
            runner_up=[],
            finish="error",
            schedule=[],
            batch_min=0,
            batch_max=0,
            reason=reason,
        )
        for request in requests
    ]


def check_loader() -> None:
    """Refuse where the package is missing by which transformers loads a model in shares.

    Raises:
        UserError: as said.
    """
    if importlib.util.find_spec("accelerate") is None:
        raise UserError("a model over ranks needs the package accelerate", "pip install accelerate")


def check_heads(name: str, config: Any, world: int) -> None:
    """Refuse what transformers would cut in the middle of a head.

    Raises:
        UserError: the ranks don't divide the heads.
    """
    text = config.get_text_config()
    for field, what in (("num_key_value_heads", "key heads"), ("num_attention_heads", "heads")):
        heads = getattr(text, field, None)
        if isinstance(heads, int) and heads % world:
            raise UserError(f"{world} ranks: {name} has {heads} {what}", "Give a number of ranks that divides them.")


@contextmanager
def _folder(loaded: LoadedModel) -> Iterator[Path]:
    """Where the ranks load from: the model's own folder, else its weights as the caller holds them, for a while."""
    from nondet.sampling.loading import quiet
    from nondet.sampling.model import EMBEDDED, embedded_folder

    if loaded.name == EMBEDDED:
        yield embedded_folder()
        return
    local = Path(loaded.name)
    if local.is_dir():
        yield local.resolve()
        return
    with tempfile.TemporaryDirectory(prefix="nondet-ranks-") as folder:
        with quiet():
            loaded.model.save_pretrained(folder)
        yield Path(folder)
