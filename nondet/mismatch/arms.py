"""Arms of `nondet mismatch` and of `nondet rl`. No torch."""

from __future__ import annotations

from typing import NamedTuple

from nondet.sampling.plan import kernels_of


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
    base, _, families = kernels_of(name).partition(":")
    return ARMS.get(base, ARMS["stock"])._replace(families=tuple(families.split("+")) if families else ())
