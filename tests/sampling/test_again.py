"""Which rounds are run again, so that a prompt's divergence can be told from noise."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from nondet.core.records import Completion, Status
from nondet.sampling import engine
from nondet.sampling.engine import run_session
from nondet.sampling.model import LoadedModel
from nondet.sampling.plan import Outcome, Pace, Request, Session
from nondet.sampling.replay import repeat_row, rounds_to_settle
from nondet.verdict.findings import Finding
from nondet.verdict.gate import judge
from tests.sampling import test_collect
from tests.sampling.test_collect import sample


def completions(*rounds: dict[int, str]) -> list[Completion]:
    """Round by round: prompt -> one trace name for each of its completions there."""
    return [
        Completion(
            impl="stock", request=f"{number}-{prompt}-{i}", round=number, prompt=prompt, tokens_digest="", trace=name,
            n_tokens=1, finish="length", arrival_step=0, schedule=[], batch_min=1, batch_max=1,
        )
        for number, members in enumerate(rounds)
        for prompt, names in members.items()
        for i, name in enumerate(names)
    ]  # fmt: skip


def test_rounds_are_chosen_by_what_they_settle() -> None:
    """None where the first round shows it or nothing parts; else what settles most; two where it takes two."""
    assert rounds_to_settle(completions({0: "ab"}, {0: "cd"}), 3) == []
    assert rounds_to_settle(completions({0: "aa", 1: "xx"}, {0: "a", 1: "x"}), 3) == []
    parted = completions({0: "a", 1: "x", 2: "p"}, {0: "b", 1: "x"}, {0: "b", 1: "y", 2: "p"})
    assert rounds_to_settle(parted, 3) == [2]
    assert rounds_to_settle(parted, 0) == []
    later = completions({0: "a"}, {1: "x"}, {1: "y"})
    assert rounds_to_settle(later, 3) == [1, 2]
    assert len(rounds_to_settle(completions({9: "a"}, *({i: "ab"} for i in range(8))), 3)) == 3


def test_a_prompt_that_parts_between_rounds_is_settled(
    tiny_float32: LoadedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One completion a round: the first alone can't tell, further rounds run again do, and noise there is seen."""
    monkeypatch.setattr(test_collect, "LOAD", "others=3,targets=1,spread=6,prompt=4-16,tokens=2-6,budget=16,page=4")
    open_ = sample(tiny_float32, tmp_path / "open.jsonl", n=4)
    assert [v.finding for v in judge(open_)] == [Finding.UNATTRIBUTED]
    settled = sample(tiny_float32, tmp_path / "settled.jsonl", n=4, settle=3)
    assert [v.finding for v in judge(settled)] == [Finding.BATCH]
    (_, *further) = settled.rows
    assert [r.extra["round"] for r in further] == rounds_to_settle(open_.completions, 3) != []
    assert sample(tiny_float32, tmp_path / "settled.jsonl", n=4, settle=3, resume=True).rows == settled.rows
    calls = 0

    def unsteady(*args: Any, **named: Any) -> Session:
        nonlocal calls
        calls += 1
        session = run_session(*args, **named)
        if calls <= 6:  # a warm-up, four rounds and the first again
            return session
        outcomes = [replace(o, logprobs=bytes([calls]) + o.logprobs[1:]) for o in session.outcomes]
        return replace(session, outcomes=outcomes)

    monkeypatch.setattr(engine, "run_session", unsteady)
    noisy = sample(tiny_float32, tmp_path / "noisy.jsonl", n=4, settle=3)
    assert [v.finding for v in judge(noisy)] == [Finding.RUN_TO_RUN]


def test_steps_before_a_capture_are_held_against_their_like(tiny_float32: LoadedModel) -> None:
    """What a graph gave against what ran without one is no run to run: no answer, whether it parts or not."""

    def session(captured: tuple[bool, ...], logprobs: bytes) -> Session:
        outcome = Outcome(Request("t0", True, (1,), 1, 0), [5], logprobs, b"", [], "length", [[0, 1, 1]], 1, 1)
        pace = [Pace(0.1, 1, step) for step in captured]
        return Session(outcomes=[outcome], steps=2, tokens=1, seconds=0.2, fatal="", pace=pace)

    once = session((True, False), bytes(4))
    for captured, logprobs, status in (
        ((True, False), bytes(4), Status.IDENTICAL),
        ((True, False), bytes([0, 0, 0, 1]), Status.DIVERGENT),
        ((False, True), bytes(4), Status.ERROR),
        ((False, False), bytes([0, 0, 0, 1]), Status.ERROR),
    ):
        made = repeat_row(tiny_float32, "stock", once, session(captured, logprobs), 0.0)
        assert made.status == status
        assert ("captured in other steps" in made.reason) == (status == Status.ERROR)
