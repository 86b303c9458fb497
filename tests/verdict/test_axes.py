"""Axes varied alone: a verdict and a gate rest on what was compared, and on values that took effect."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from nondet.result import AxisValue, Completion, Round, Run
from nondet.verdict import Finding, exit_code, judge
from tests.reports.factory import header, replayed

# axis=value -> traces of its requests in their order, "" for a failed one; two requests make a round
Arms = dict[str, str | list[str]]


def varied(arms: Arms, unproven: str = "", per_round: int = 4, note: str = "") -> Run:
    """The base and these arms under stock; dtype is the axis that changes the arithmetic itself."""
    completions, rounds, values = [], [], []
    first = 0
    for arm, traces in arms.items():
        for i, trace in enumerate(traces):
            completions.append(
                Completion(
                    impl="stock", request=f"{arm} t{i}", round=first + i // per_round, prompt=0, tokens_digest="T",
                    trace=trace, n_tokens=4, finish="length" if trace else "error", arrival_step=0, schedule=[],
                    batch_min=1, batch_max=4, status="ok" if trace else "error", arm=arm,
                )
            )  # fmt: skip
        numbers = range(first, first + -(-len(traces) // per_round))
        figures: dict[str, Any] = {"targets": per_round, "others": 0, "steps": 1, "tokens": 1, "seconds": 1.0}
        rounds += [Round(impl="stock", round=n, arm=arm, **figures) for n in numbers]
        first = numbers.stop
        axis, _, value = arm.partition("=")
        if axis != "base":
            shared: dict[str, Any] = {"impl": "stock", "axis": axis, "held": axis != "dtype", "changes": "c"}
            values.append(AxisValue(value="as it is", arm="base", proven=True, proof="p", **shared))
            values.append(AxisValue(value=value, arm=arm, proven=arm != unproven, proof="p", **shared))
    if note:
        values.append(
            AxisValue(
                impl="stock", axis="graphs", value="", arm="", held=True, proven=False, proof="", changes="c", note=note
            )
        )
    return Run(
        header=header("sample", {"vary": {}, "prompts": [{"text": "p", "tokens": 5}], "impls": ["stock"]}),
        completions=completions, rounds=rounds, axis_values=values, rows=[replayed("stock", 4)], complete=True,
    )  # fmt: skip


BASE: Arms = {"base": "AAAA"}


@pytest.mark.parametrize(
    ("run", "finding", "code"),
    [
        (varied(BASE | {"chunk=5": "AAAA"}), Finding.CLEAN, 0),
        (varied(BASE | {"chunk=5": "AAAA"}, note="needs CUDA"), Finding.CLEAN, 0),
        (varied(BASE | {"chunk=5": "BBBB"}), Finding.OTHER, 3),
        # nothing compared: one completion a value of an axis whose values are not held against each other; none left
        (varied({"base": "A", "dtype=float16": "A"}), Finding.UNTESTED, 1),
        (varied({"base": "A", "dtype=float16": "B"}), Finding.UNTESTED, 1),
        (varied(BASE | {"chunk=5": ["", "", "", ""]}), Finding.UNTESTED, 1),
        (varied({"base": ["", "", "", ""], "chunk=5": "AAAA"}), Finding.UNTESTED, 1),
        # an axis without effect, beside one that had some; of several values one is enough
        (varied(BASE | {"chunk=5": "AAAA"}, "chunk=5"), Finding.UNTESTED, 1),
        (varied(BASE | {"chunk=5": "AAAA", "page=4": "AAAA"}, "chunk=5"), Finding.UNPROVEN, 1),
        (varied(BASE | {"chunk=5": "AAAA", "chunk=16": "AAAA"}, "chunk=5"), Finding.CLEAN, 0),
        (varied(BASE | {"chunk=5": "ABAA", "page=4": "AAAA"}, "chunk=5"), Finding.UNATTRIBUTED, 3),
        (varied(BASE | {"chunk=5": "BBBB"}, "chunk=5"), Finding.UNATTRIBUTED, 3),
        # what moved in the second round alone, which nobody ran again
        (varied(BASE | {"chunk=5": "AAAB"}, per_round=2), Finding.UNATTRIBUTED, 3),
    ],
)
def test_a_gate_opens_on_axes_that_were_compared(run: Run, finding: Finding, code: int) -> None:
    """3 where bits parted, 1 where an axis that was asked for said nothing, 0 where every axis was compared."""
    (verdict,) = judge(run)
    assert verdict.finding == finding
    got, line = exit_code(run, "divergent")
    assert (got, bool(line)) == (code, code == 1)


def test_what_followed_an_axis_is_told_from_what_the_run_may_have_done() -> None:
    """Only in the base's first round, which came out the same again, is the axis what is left."""
    first, later = (judge(varied(BASE | {"chunk=5": traces}, per_round=2))[0] for traces in ("BAAA", "AAAB"))
    assert Finding.OTHER in first.findings
    assert Finding.OTHER not in later.findings
    assert "not run again" in later.notes[-1]


def test_words_of_an_axis_without_effect() -> None:
    """The verdict names it; without a round of the base there is no bound."""
    run = varied(BASE | {"chunk=5": "AAAA", "page=4": "AAAA"}, "chunk=5")
    (verdict,) = judge(run)
    assert "but of chunk no value took effect" in verdict.text
    assert exit_code(run, "divergent")[1].endswith("can't be answered: under stock an axis was not tested.")
    rounds = [msgspec.structs.replace(r, arm="other") for r in run.rounds]
    assert "too few for a bound" in judge(msgspec.structs.replace(run, rounds=rounds))[0].text
