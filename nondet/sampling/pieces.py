"""The text of single tokens, for pointing at one."""

from __future__ import annotations

from collections.abc import Callable

from nondet.sampling.model import LoadedModel

__all__ = ["piece_of"]


def piece_of(loaded: LoadedModel) -> Callable[[int], str]:
    """The text that a token adds after another one: decoded alone, some tokenizers drop its leading space."""
    before = loaded.encode_plain("a")
    head = loaded.decode(before)

    def piece(token: int) -> str:
        text = loaded.decode([*before, token])
        return text[len(head) :] if text.startswith(head) else loaded.decode([token])

    return piece
