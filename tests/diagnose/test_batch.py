"""What the completions of a diagnosis may be said to show, from records made up for it."""

from __future__ import annotations

import msgspec
import pytest

from nondet.core.records import Completion, Run
from nondet.diagnose.verdict import cure_step
from tests.reports.factory import header, replayed

IMPL = "invariant"


def under_the_cure(count: int = 6, failed: int = 0, again: bool = True) -> Run:
    """So many completions of one trace, the last ones failed, and the round that came again."""
    sound = Completion(
        impl=IMPL, request="", round=0, prompt=0, tokens_digest="t", trace="a", n_tokens=8, finish="length",
        arrival_step=0, schedule=[[0, 1, 4]], batch_min=1, batch_max=9,
    )  # fmt: skip
    lost = msgspec.structs.replace(sound, status="error", trace="", tokens_digest="", reason="it stopped")
    completions = [
        msgspec.structs.replace(lost if i >= count - failed else sound, request=f"t{i}") for i in range(count)
    ]
    run = Run(header=header("diagnose", {}), completions=completions)
    run.rows += [replayed(IMPL, count)] if again else []
    return run


def test_equal_completions_and_a_round_that_came_again_are_a_cure() -> None:
    """And a trace that is not the one alone is none, whatever came again."""
    step = cure_step(under_the_cure(), IMPL, "a", ())
    assert step.outcome == "yes"
    assert "the first round came again equal" in step.sentence
    assert cure_step(under_the_cure(), IMPL, "b", ()).outcome == "no"
    assert cure_step(under_the_cure(again=False), IMPL, "b", ()).outcome == "no"


@pytest.mark.parametrize(
    ("run", "words"),
    [
        (under_the_cure(again=False), "no round was run again"),
        (under_the_cure(60, failed=59), "59 completions failed"),
        (under_the_cure(failed=6), "6 completions failed"),
    ],
)
def test_what_was_not_seen_is_no_cure(run: Run, words: str) -> None:
    """No repetition on record, or completions that failed: neither a cure nor its absence is shown."""
    step = cure_step(run, IMPL, "a", ())
    assert step.outcome == "unknown"
    assert words in step.sentence
    assert ("came again equal" in step.sentence) == any(run.rows)
