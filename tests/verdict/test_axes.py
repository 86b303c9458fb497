"""Axes varied alone: a verdict and a gate rest on what was compared, and on values that took effect."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from nondet.core.records import AxisValue, Completion, Round, Run
from nondet.verdict.findings import Finding
from nondet.verdict.gate import exit_code, judge
from nondet.verdict.samples import tally_axes
from tests.reports.factory import header, replayed

# axis=value -> traces of its requests in their order, "" for a failed one; two requests make a round
Arms = dict[str, str | list[str]]


def varied(arms: Arms, unproven: str = "", per_round: int = 4, note: str = "", lost: str = "") -> Run:
    """The base and these arms under stock; dtype is the axis that changes the arithmetic itself.

    Args:
        lost: The traces that hold NaN.
    """
    completions, rounds, values = [], [], []
    first = 0
    for arm, traces in arms.items():
        for i, trace in enumerate(traces):
            completions.append(
                Completion(
                    impl="stock", request=f"{arm} t{i}", round=first + i // per_round, prompt=0, tokens_digest="T",
                    trace=trace, n_tokens=4, finish="length" if trace else "error", arrival_step=0, schedule=[],
                    batch_min=1, batch_max=4, status="ok" if trace else "error", arm=arm,
                    nonfinite=int(bool(trace) and trace in lost),
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


def beside(stock: Run, other: Run, impl: str = "invariant") -> Run:
    """Both in one file, the second under another name."""
    fields = ("completions", "rounds", "axis_values", "rows")
    moved = {name: [msgspec.structs.replace(r, impl=impl) for r in getattr(other, name)] for name in fields}
    return msgspec.structs.replace(stock, **{name: getattr(stock, name) + moved[name] for name in fields})


@pytest.mark.parametrize("other", ["AAAA", "BBBB"])
def test_nan_that_agrees_with_itself_is_wrong(other: str) -> None:
    """Whatever else is found: the gate is shut, and the count of such completions comes first."""
    run = varied(BASE | {"chunk=5": other}, lost="A")
    (verdict,) = judge(run)
    assert verdict.finding == Finding.WRONG
    assert (Finding.OTHER in verdict.findings) == (other == "BBBB")
    assert verdict.text.startswith(f"{8 if other == 'AAAA' else 4} completions hold NaN or infinite logprobs: wrong")
    assert exit_code(run, "divergent") == (3, "")


def test_each_implementation_has_its_own_completions() -> None:
    """NaN, failures, bits that follow an axis and noise of one are nothing of the other's, whichever it is."""
    clean = varied(BASE | {"chunk=5": "AAAA"})
    faulty = {
        Finding.WRONG: varied(BASE | {"chunk=5": "AAAA"}, lost="A"),
        Finding.OTHER: varied(BASE | {"chunk=5": "BBBB"}),
        Finding.BATCH: varied({"base": "AABB", "chunk=5": "AABB"}),
        Finding.UNTESTED: varied(BASE | {"chunk=5": ["", "", "", ""]}),
    }
    found = [
        ([v.finding for v in judge(beside(clean, run))], [v.finding for v in judge(beside(run, clean))], finding)
        for finding, run in faulty.items()
    ]
    assert found == [([Finding.CLEAN, finding], [finding, Finding.CLEAN], finding) for finding in faulty]
    assert [tally_axes(beside(clean, run), "stock") for run in faulty.values()] == [tally_axes(clean, "stock")] * 4
    several = varied(BASE | {"chunk=5": "AAAA"}, per_round=1)
    assert judge(beside(clean, several))[0].text == judge(clean)[0].text  # its own rounds bound it
    later, first = (varied({"base": t, "chunk=5": t}, per_round=2) for t in ("AAAB", "ABAB"))
    assert [v.finding for v in judge(beside(later, first))] == [Finding.UNATTRIBUTED, Finding.BATCH]
    idle = varied(BASE | {"chunk=5": "AAAA", "page=4": "AAAA"}, "page=4", note="needs CUDA")
    assert tally_axes(beside(clean, idle), "stock") == tally_axes(clean, "stock")
    assert len(tally_axes(beside(clean, idle), "invariant")) == 3
    sound, failed = judge(beside(clean, faulty[Finding.UNTESTED]))
    assert (any("failed" in n for n in sound.notes), any("4 failed requests" in n for n in failed.notes)) == (
        False,
        True,
    )


def test_one_failed_request_takes_no_other_with_it() -> None:
    """Its own comparison is gone and told; the other three stand, and decide."""
    [tally] = tally_axes(varied(BASE | {"chunk=5": ["A", "", "A", "B"]}), "stock")
    assert ([v.n for v in tally.values], tally.compared, tally.moved) == ([4, 3], 3, 1)
    assert (tally.traces, tally.traces_within, tally.texts, tally.texts_within) == (2, 2, 1, 1)
    (verdict,) = judge(varied(BASE | {"chunk=5": ["A", "", "A", "A"]}))
    assert (verdict.finding, verdict.notes[0]) == (Finding.CLEAN, "1 failed request in no other figure.")
    assert "below 63.2% of completions if they were independent (3)" in verdict.text


def test_notes_say_what_was_run_again_and_what_was_not() -> None:
    """Each of the three notes where it holds, and nowhere else; an axis that was not run keeps its reason."""
    again, other = (
        "Run again: 1 round of 4 requests the same, bit for bit: 1 repetition.",
        "in rounds that were not run",
    )
    first, later = (judge(varied(BASE | {"chunk=5": traces}, per_round=2))[0] for traces in ("BAAA", "AAAB"))
    assert first.notes == (again,)
    assert later.notes == (again, later.notes[-1])
    assert other in later.notes[-1]
    never = msgspec.structs.replace(varied(BASE | {"chunk=5": "BAAA"}, "page=4"), rows=[])
    assert judge(never)[0].notes == ("The base was not run again: run may be the cause.",)
    assert judge(never)[0].finding == Finding.UNATTRIBUTED
    run = varied(BASE | {"chunk=5": "AAAA"}, note="needs CUDA")
    assert [t.note for t in tally_axes(run, "stock")] == ["", "needs CUDA"]
