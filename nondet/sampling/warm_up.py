"""What happens before the first timed round: lazy initialization, library heuristics, compilers and proofs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from nondet.core.launch import FirstUses, first_uses
from nondet.kernels.dispatch.block import Progress, prepare
from nondet.sampling.batching import query_step
from nondet.sampling.plan import Load, Plan, Request

__all__ = ["sizes_of", "warm_up"]

# On a CPU the warm-up takes the head of a round, a few requests and tokens: a full prefill and some decodes.
_REQUESTS, _TOKENS = 16, 3
# Every size up to here is one that a step may have; of larger ones, a full budget.
_SIZES_MOST = 256


def warm_up(
    model: Any, plan: Plan, device: str, play: Callable[[Sequence[Request]], object], progress: Progress | None = None
) -> None:
    """Meet what the rounds will meet, under the implementation that is on.

    On CUDA that is a matter of each size met (a kernel is compiled, a library's algorithm proven, cuDNN plans). So the
    model's layers are called at the sizes that steps may have, and the whole first round is played. What a later round
    still meets for the first time is proven off its clock, see `nondet.core.launch`.

    Args:
        model: Whose layers are called; None: they are in other processes.
        play: Plays requests in a session.
        progress: Told of the calls of layers and of the round, one call more: whenever it compiles or proves something.
    """
    if device == "cuda":
        if model is None:
            play(plan.rounds[0])
        else:
            _prepare_and_play(model, plan, play, progress or (lambda *_: None))
        return
    head = plan.rounds[0][:_REQUESTS]
    play([replace(r, max_new_tokens=min(r.max_new_tokens, _TOKENS), arrival_step=0) for r in head])


def _prepare_and_play(model: Any, plan: Plan, play: Callable[[Sequence[Request]], object], progress: Progress) -> None:
    calls = 0

    def layers(done: int, total: int, _: FirstUses) -> None:
        nonlocal calls
        calls = total
        progress(done, total + 1, uses)

    with first_uses() as uses:
        prepare(model, *sizes_of(plan.load), layers)
        uses.on_change = lambda so_far: progress(calls, calls + 1, so_far)
        play(plan.rounds[0])
    progress(calls + 1, calls + 1, uses)


def sizes_of(load: Load) -> tuple[list[int], list[int]]:
    """Query tokens of steps, and requests. A step that decodes has one token of each, a prefill takes what is left."""
    requests = min(load.requests, load.budget, _SIZES_MOST)
    if load.graphs:  # padded, and so is the number of requests
        step = query_step(load.requests, load.budget)
        tokens = sorted({*[*range(step, load.budget, step)][:_SIZES_MOST], load.budget})
        return tokens, sorted({min(n, requests) for n in tokens})
    return [*range(1, min(load.budget, _SIZES_MOST) + 1), load.budget], list(range(1, requests + 1))
