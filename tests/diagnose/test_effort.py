"""How much a diagnosis asks: all of it where sessions are quick, less where they are slow, and never in silence."""

from __future__ import annotations

from typing import Any

import pytest

from nondet.core.records import Header, Run, Step
from nondet.diagnose.steps import Budget, Effort, chosen_effort, effort_of, make_axes, thinned
from nondet.diagnose.verdict import conclude
from nondet.sampling.plan import parse_load

# Seconds of a round and of the prompt alone: on two cores of a Xeon, and where each step of stock costs 56 ms.
XEON, SLOW = (1.4, 0.6), (8.0, 5.5)


def test_a_quick_machine_is_asked_everything() -> None:
    """Nothing is left out, and nothing is said."""
    effort = chosen_effort(5, *XEON, 6.0, 180.0)
    assert (effort.rounds, effort.every, effort.margins, effort.times) == (5, 1, 2, 2)
    assert effort.sentence(5, 180.0) == ""


def test_a_slow_one_is_asked_less_and_told_what() -> None:
    """Fewer rounds and values, never fewer than two rounds, with both figures and the way out in the sentence."""
    effort = chosen_effort(5, *SLOW, 36.0, 120.0)
    assert (effort.rounds, effort.every, effort.margins, effort.times) == (2, 3, 1, 1)
    sentence = effort.sentence(5, 120.0)
    assert "2 rounds of 5 and every third value" in sentence
    assert "8.0 s" in sentence
    assert "--within 0" in sentence


@pytest.mark.parametrize("planned", [1, 2, 3, 5, 9])
def test_more_time_never_asks_less(planned: int) -> None:
    """Along the limit the rounds grow and the axes fill up; without a limit all is asked; of one round, one."""
    efforts = [chosen_effort(planned, *SLOW, 36.0, within) for within in (1.0, 100.0, 300.0, 500.0, 900.0, 1e9, 0.0)]
    sizes = [(e.rounds, -e.every, e.margins, e.times) for e in efforts]
    assert sizes == sorted(sizes)
    assert sizes[0][0] == min(planned, 2)
    assert sizes[-1] == sizes[-2] == (planned, -1, 2, 2)


def test_a_budget_counts_what_went_by() -> None:
    """By a clock made by hand; without a limit nothing is ever left out, and what later parts need is kept for them."""
    now = 100.0
    budget = Budget(60.0, 10.0, lambda: now)
    assert (budget.spent, budget.left) == (10.0, 50.0)
    assert budget.lacks("a trace", 30.0, 20.0) == ""
    now += 1.0
    reason = budget.lacks("a trace", 30.0, 20.0)
    assert reason.startswith("a trace would take 30 s or more, and of 60 s 29 s are left beside 20 s for what follows")
    now += 100.0
    assert "of 60 s 0 s are left" in budget.lacks("a trace", 1.0)
    assert Budget(clock=lambda: now).lacks("a trace", 1e9, 1e9) == ""


def test_the_least_cure_is_never_more_than_the_cure() -> None:
    """What is kept for it while a trace runs is the least, and grows with what a session takes."""
    for effort in (chosen_effort(5, *XEON, 6.0, 180.0), chosen_effort(5, *SLOW, 36.0, 120.0), Effort(1)):
        assert effort.least_cure.cure_s <= effort.cure_s
    assert chosen_effort(5, *XEON, 0.0, 0.0).least_cure.cure_s < chosen_effort(5, *SLOW, 0.0, 0.0).least_cure.cure_s


def run_of(**more: Any) -> Run:
    header = Header(format="nondet-run", schema=3, command="diagnose", plan={}, environment={}, started="")
    return Run(header=header, **more)


def test_what_was_decided_is_read_back() -> None:
    """A resumed run asks what the first process decided, older files everything; the verdict's limits say so."""
    effort = chosen_effort(5, *SLOW, 36.0, 120.0)
    less = effort.sentence(5, 120.0)
    step = Step(
        name="run", outcome="yes", sentence="s", figures={"alone": 3.0, **effort.figures()}, facts={"less": less}
    )
    assert effort_of(run_of(steps=[step]), 5) == effort
    assert effort_of(run_of(steps=[Step(name="run", outcome="yes", sentence="s")]), 5) == Effort(5)
    assert any("2 rounds of 5" in line for line in conclude(run_of(steps=[step])).limits)


def test_thinned_axes_keep_their_ends() -> None:
    """The smallest and the largest stay, and so does what shares a prefix: its two trials are two questions."""
    axes = make_axes(parse_load("default"), range(30), range(30), 512)
    values = {axis.name: [t.value for t in axis.trials] for axis in thinned(axes, 3)}
    assert values["batch size"] == ["2 requests", "8 requests", "32 requests"]
    assert len(values["prefix sharing"]) == 2
    assert values["chunked prefill"] == ["chunks of 1", "chunks of 32"]
    assert [len(axis.trials) for axis in thinned(axes, 1)] == [len(axis.trials) for axis in axes]
