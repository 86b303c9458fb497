"""Which rounds are run again, so that a prompt's divergence can be told from noise."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from nondet.result import Completion
from nondet.sampling import engine
from nondet.sampling.again import rounds_to_settle
from nondet.sampling.engine import Session, run_session
from nondet.sampling.model import LoadedModel
from nondet.verdict import Finding, judge
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
