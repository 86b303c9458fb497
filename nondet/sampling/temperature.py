"""Drawing at a temperature: what a request asks for, and which implementation draws how. Plain data, no torch.

Two things make a text at T > 0 depend on the batch: the logits, and the draw. A sampler with one generator for the
whole batch gives a request other numbers in other company, whatever the logits; a draw that belongs to the seed and the
position leaves the logits alone to blame. So the implementations are told apart:

    stock                stock logits, drawn as transformers' engine draws: one generator for the batch
    stock-seeded         stock logits, our draw
    unseeded-invariant   invariant logits, drawn as the engine draws
    invariant            invariant logits, our draw
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from nondet.errors import UserError

__all__ = ["DRAWN", "SEEDS_MOST", "Sampling", "check_sampling", "draws_itself", "is_sampling", "kernels_of"]

# Implementations that exist at a temperature alone -> the kernels they run on.
DRAWN = {"stock-seeded": "stock", "unseeded-invariant": "invariant"}
SEEDS_MOST = 10_000
_HOTTEST = 100.0


@dataclass(frozen=True, slots=True)
class Sampling:
    """How one request's tokens are drawn.

    Attributes:
        temperature: Logits are divided by it; above 0.
        top_k: The largest logits that are kept, exactly so many, ties by the smaller token id; 0 keeps all.
        top_p: The nucleus: of these the fewest, the largest first, that hold this share of their mass; 1.0 keeps all.
        seed: What the draws belong to, together with the position.
        seeded: Whether they do: False leaves the draw to the engine, which has one generator for everybody.
    """

    temperature: float
    top_k: int
    top_p: float
    seed: int
    seeded: bool = True


def is_sampling(values: Mapping[str, Any]) -> bool:
    """Whether values from a file are those of a `Sampling` that can be drawn from."""
    if set(values) != {f.name for f in fields(Sampling)} or not isinstance(values["seeded"], bool):
        return False
    if not all(type(values[name]) is int and 0 <= values[name] < 2**64 for name in ("top_k", "seed")):
        return False
    if not all(type(values[name]) in (int, float) for name in ("temperature", "top_p")):
        return False
    return bool(0 < values["temperature"] <= _HOTTEST and 0 < values["top_p"] <= 1)


def check_sampling(temperature: float, top_k: int, top_p: float, seeds: int) -> bool:
    """Whether anything is to be drawn.

    Raises:
        UserError: a value that makes no sense, or a sampler's option at temperature 0.
    """
    if not (math.isfinite(temperature) and 0.0 <= temperature <= _HOTTEST):
        raise UserError(f"--temperature {temperature:g} makes no sense", f"Give 0 (greedy) to {_HOTTEST:g}.")
    if top_k < 0:
        raise UserError(f"--top-k {top_k} makes no sense", "Give the number of tokens to keep, or 0 for all.")
    if not 0.0 < top_p <= 1.0:
        raise UserError(f"--top-p {top_p:g} makes no sense", "Give a share of the mass above 0, up to 1 for all.")
    if not 1 <= seeds <= SEEDS_MOST:
        raise UserError(f"--seeds {seeds} makes no sense", f"Give the number of seeds, from 1 to {SEEDS_MOST:,}.")
    if temperature == 0.0 and (top_k or top_p < 1.0 or seeds > 1):
        raise UserError("--top-k, --top-p and --seeds need a temperature above 0", "Add --temperature 0.8, say.")
    return temperature > 0.0


def kernels_of(impl: str) -> str:
    """The implementation whose kernels it runs on."""
    return DRAWN.get(impl, impl)


def draws_itself(impl: str) -> bool:
    """Whether the draw is left to the engine under it."""
    from nondet.verdict.samples import UNSEEDED  # with NumPy, which --help does without

    return impl in UNSEEDED
