"""Every planted fault is named for what it is, by a question about its cause; nothing is said of sound kernels."""

from __future__ import annotations

import os

import pytest

from tests.faults.operators import PLANTED, Planted, judge

# Sizes and inputs that no list holds. One seed in CI, so that a landing is not a throw of dice; fresh ones by
# `python -m tests.faults --seeds ...`, or here by NONDET_FAULT_SEED.
SEED = int(os.environ.get("NONDET_FAULT_SEED", "101"))


@pytest.mark.parametrize("planted", PLANTED, ids=lambda p: p.name)
def test_the_verdict_of_planted(planted: Planted) -> None:
    """The finding is right, and of a fault a case shows it that is about its cause."""
    told = judge(planted, SEED)
    assert told.right(planted), f"seed {SEED}: {told}"
    assert told.cause(planted), f"seed {SEED}: {told}"


def test_there_are_enough_of_both() -> None:
    """At least 30 faults and 15 controls, each listed once."""
    assert len({p.name for p in PLANTED}) == len(PLANTED)
    assert sum(bool(p.finding) for p in PLANTED) >= 30
    assert sum(not p.finding for p in PLANTED) >= 15
