"""A prompt that is long enough to be cut, shared and edited."""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["LONG", "earlier_text", "long_prompt"]

# A prompt shorter than this is followed by its own completion, so that there is something to chunk or share.
LONG = 44
_EVERY = 8


def long_prompt(prompt: Sequence[int], completion: Sequence[int], context: int) -> tuple[int, ...]:
    """The prompt, with as much of its own completion behind it as makes `LONG` tokens of a short one."""
    if len(prompt) >= LONG:
        return tuple(prompt)
    return (*prompt, *completion)[: max(len(prompt), min(LONG, context - 1))]


def earlier_text(completion: Sequence[int]) -> tuple[int, ...]:
    """The completion as it was before somebody edited it: every eighth token is the one that stood before it."""
    return tuple(completion[i - 1] if i % _EVERY == _EVERY - 1 else token for i, token in enumerate(completion))
