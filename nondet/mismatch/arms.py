"""Arms of `nondet mismatch` and of `nondet rl`, and the tasks that `rl` learns. No torch."""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import NamedTuple

from nondet.embedded import DEFAULT_PROMPT
from nondet.sampling.plan import DRAWN


class Arm(NamedTuple):
    """Which side runs batch-invariant kernels, and whether the difference is corrected by importance weights."""

    sampler: bool = False
    trainer: bool = False
    weighted: bool = False
    help: str = ""
    families: tuple[str, ...] = ()  # of operators; () for all


ARMS: dict[str, Arm] = {
    "stock": Arm(help="stock kernels on both sides, nothing corrected"),
    "stock+tis": Arm(weighted=True, help="the same, with importance weights truncated at --cap"),
    "sampler-only": Arm(sampler=True, help="a batch-invariant sampler, as an engine's flag gives, and a stock trainer"),
    "invariant": Arm(sampler=True, trainer=True, help="batch-invariant kernels on both sides"),
}


def arm_of(name: str) -> Arm:
    """The arm of this name in `ARMS`, or "invariant:attention+norm" with these families; stock for "file"."""
    base, _, families = DRAWN.get(name, name).partition(":")
    return ARMS.get(base, ARMS["stock"])._replace(families=tuple(families.split("+")) if families else ())


# Tasks whose rewards follow from the text only, so that no data is fetched.

# Beginnings that the embedded model continues in the style of documentation, where calls have parentheses.
_BEGINNINGS = (
    DEFAULT_PROMPT, "Return a", "The class is", "If the argument is not given,", "This function", "The method",
    "A string", "Raises an error if",
)  # fmt: skip
PROMPTS_MOST = len(_BEGINNINGS)


class Task(NamedTuple):
    """`prompts` of (count, rng): a step's texts, equal for equal rngs; `reward` of (prompt, completion), 0 to 1."""

    prompts: Callable[[int, random.Random], Sequence[str]]
    reward: Callable[[str, str], float]
    help: str


def balanced(_prompt: str, completion: str) -> float:
    """1 where there is a pair of parentheses and all are matched."""
    depths = list(accumulate((char == "(") - (char == ")") for char in completion))
    return float("(" in completion and depths[-1] == 0 == min(depths))


def summed(prompt: str, completion: str) -> float:
    """1 where the completion of "17+25=" begins with the sum."""
    wanted = sum(map(int, re.findall(r"\d+", prompt)))
    found = re.match(r"\s*(\d{1,9})(?!\d)", completion)
    return float(found is not None and int(found[1]) == wanted)


def _sums(count: int, rng: random.Random) -> list[str]:
    return [f"{rng.randint(1, 99)}+{rng.randint(1, 99)}=" for _ in range(count)]


TASKS: dict[str, Task] = {
    "parentheses": Task(lambda count, _: _BEGINNINGS[:count], balanced, "a pair of parentheses, all of them balanced"),
    "sums": Task(_sums, summed, "the sum of two numbers up to 99; too hard for the embedded model"),
}
