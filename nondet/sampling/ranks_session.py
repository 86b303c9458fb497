"""In a rank: the continuous-batching engine over a model that is cut by its own tensor-parallel plan.

Every rank runs the same requests in the same order, and the collectives keep them in step. What comes back is rank 0's
session and every rank's digest of it, so that ranks that came to different answers are seen.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

from nondet.errors import UserError
from nondet.ranks.group import fail_now
from nondet.sampling.plan import Load, Request
from nondet.sampling.protocol import Session
from nondet.sampling.setting import PLAIN, Setting

__all__ = ["RANK_WAYS", "Played", "failures_told", "open_model", "play"]

# implementation -> what stands under the model in a rank; see `_enter`
RANK_WAYS = ("stock", "stock-no-cudnn", "stock-flash", "invariant", "rank-free")

_model: Any = None


@dataclass(frozen=True)
class Played:
    """What one rank has to say of a session.

    Attributes:
        digest: SHA-256 (first 16 hex digits) over ids, logprob bits and schedules of all requests.
        session: Rank 0's; None of the others.
        coverage: What the dispatcher says, as `Coverage.counts`; empty for stock.
        ran: What launchers noted, with counts.
        refusal: What the engine refuses, and what to try; empty where it does not.
    """

    digest: str = ""
    session: Session | None = None
    coverage: Counter[str] = field(default_factory=Counter)
    ran: Counter[str] = field(default_factory=Counter)
    refusal: tuple[str, str] | None = None


def open_model(folder: str, dtype: str, device: str, threads: int, trust_remote_code: bool = False) -> int:
    """Load this rank's share; returns how many parameters that is.

    Args:
        threads: Of this rank on a CPU. The caller's own number: bits follow it, so that ranks can only be held against
            one process at the same.

    Raises:
        ValueError: heads or widths that the ranks don't divide, as transformers says it.
    """
    global _model
    import torch
    import torch.distributed as dist

    from nondet.ranks.models import load

    torch.set_num_threads(threads)
    rank = dist.get_rank()
    place = torch.device(device, rank) if device == "cuda" else torch.device("cpu")
    _model = load(folder, place, dtype=getattr(torch, dtype), trust_remote_code=trust_remote_code)
    return sum(_local(p).numel() for p in _model.parameters())


def _local(parameter: Any) -> Any:
    return parameter.to_local() if hasattr(parameter, "to_local") else parameter


def play(
    impl: str,
    requests: Sequence[Request],
    load: Load,
    seed: int,
    eos: Sequence[int],
    forced: Mapping[str, Sequence[int]] | None = None,
    setting: Setting = PLAIN,
) -> Played:
    """One session of the engine on this rank, under `impl`."""
    import torch
    import torch.distributed as dist

    from nondet.core.launch import listen
    from nondet.sampling.engine import run_session

    with ExitStack() as stack:
        block = _enter(impl, stack)
        ran = stack.enter_context(listen())
        stack.enter_context(torch.no_grad())
        stack.enter_context(failures_told())
        try:
            session = run_session(_model, requests, load, seed=seed, eos=eos, forced=forced, setting=setting)
        except UserError as error:
            return Played(refusal=(error.what, error.hint))
        coverage = Counter(block.coverage().counts()) if block is not None else Counter[str]()
    return Played(
        digest=_digest(session),
        session=session if dist.get_rank() == 0 else None,
        coverage=coverage,
        ran=Counter(ran),
    )


@contextmanager
def failures_told() -> Iterator[None]:
    """Tell of what ends the engine's thread before the engine looks for the other ranks.

    It waits for them to end their step first, and a step that waits for this rank never ends.
    """
    from transformers.generation.continuous_batching.continuous_api import ContinuousBatchingManager as Manager

    handle = Manager._handle_critical_error

    def told(self: Any, error: Exception, processor: Any) -> None:
        if not isinstance(error, MemoryError):  # of all ranks alike: it has an answer of its own
            fail_now(error)
        handle(self, error, processor)

    Manager._handle_critical_error = told
    try:
        yield
    finally:
        Manager._handle_critical_error = handle


def _enter(impl: str, stack: ExitStack) -> Any:
    if impl.startswith("stock"):
        from nondet.sampling.implementations import implementation

        stack.enter_context(implementation(impl))
        return None
    from nondet.kernels.dispatch.block import batch_invariant
    from nondet.kernels.dispatch.rank_free import rank_free

    block = stack.enter_context(batch_invariant())
    if impl == "rank-free":
        stack.enter_context(rank_free(_model))
    return block


def _digest(session: Session) -> str:
    sha = hashlib.sha256()
    for outcome in session.outcomes:
        sha.update(repr((outcome.request.id, outcome.token_ids, outcome.finish, outcome.schedule)).encode())
        sha.update(outcome.logprobs)
    return sha.hexdigest()[:16]
