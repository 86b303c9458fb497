"""How texts are put into batches: alone, padded, sorted, shuffled, packed. Pure data, drawn from a seed."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["ALONE", "Arm", "build_arms"]

ALONE = "alone"


@dataclass(frozen=True)
class Arm:
    """One way to put all texts through the encoder.

    Attributes:
        batches: Indices of texts, batch by batch; each text once.
        width: Padded to so many tokens; 0: to the longest text of the batch.
        packed: The texts of a batch stand in one row, and see their own tokens alone.
    """

    name: str
    batches: tuple[tuple[int, ...], ...]
    width: int = 0
    packed: bool = False


def build_arms(lengths: Sequence[int], batch: int, seed: int) -> list[Arm]:
    """The arms for texts of these lengths; the first one is what the others are held against.

    Args:
        batch: Texts in a batch.
    """
    everyone = list(range(len(lengths)))
    ordered = sorted(everyone, key=lambda i: (lengths[i], i))
    shuffled = list(everyone)
    random.Random(f"nondet embed {seed}").shuffle(shuffled)  # noqa: S311 - an order, not a secret
    odd = max(2, batch // 2 - 1)  # a multiple of no tile
    return [
        Arm(ALONE, _cut(everyone, 1)),
        Arm(f"alone, padded to {max(lengths)}", _cut(everyone, 1), width=max(lengths)),
        Arm(f"sorted by length, {batch} a batch", _cut(ordered, batch)),
        Arm(f"shuffled, {batch} a batch", _cut(shuffled, batch)),
        Arm(f"shuffled otherwise, {odd} a batch", _cut(shuffled[::-1], odd)),
        Arm(f"packed, {batch} in a row", _cut(shuffled, batch), packed=True),
    ]


def _cut(order: Sequence[int], size: int) -> tuple[tuple[int, ...], ...]:
    return tuple(tuple(order[start : start + size]) for start in range(0, len(order), size))
