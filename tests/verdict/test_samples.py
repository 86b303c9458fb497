"""Verdicts on completions: what may be blamed on the batch, and what may not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from nondet.core.records import AxisValue, Completion, Round, Row, Run, Status
from nondet.errors import UserError
from nondet.reports.content import build
from nondet.verdict.findings import Finding
from nondet.verdict.gate import judge
from nondet.verdict.samples import replays, tally_axes
from tests.build import beside, completion, header, replayed, sampled


def replay(parted: int, impl: str = "stock") -> Row:
    return replayed(impl, 60, parted)


def test_one_trace_of_two_texts_is_an_edited_file() -> None:
    completions = [completion("0", "A", tokens_digest=text) for text in "ab"]
    with pytest.raises(UserError, match=r"stock has 2 completions in one trace\b.*edited by hand"):
        judge(Run(header=header("sample", {"prompts": [{"text": "p", "tokens": 4}]}), completions=completions))


def test_the_repeated_round_is_evidence_and_no_probe_of_its_own(tmp_path: Path) -> None:
    run = sampled(tmp_path, again=False)
    run.rows += [replay(2), replay(0, "invariant")]
    (section,) = build([run]).runs
    assert {v.impl: v.finding for v in section.verdicts} == {"stock": Finding.RUN_TO_RUN, "invariant": Finding.CLEAN}
    assert not section.probes
    run.rows[0] = msgspec.structs.replace(replay(0), status=Status.ERROR, reason="out of memory")
    assert replays(run).keys() == {"invariant"}
    assert [p.reason for p in build([run]).runs[0].problems] == ["out of memory"]


# Axes varied alone: a verdict and a gate rest on what was compared, and on values that took effect.

# axis=value -> traces of its requests in their order, "" for a failed one; two requests make a round
Arms = dict[str, str | list[str]]


def varied(arms: Arms, unproven: str = "", per_round: int = 4, note: str = "", lost: str = "") -> Run:
    """The base and these arms under stock; dtype changes the arithmetic itself; `lost` traces hold NaN."""
    completions, rounds, values = list[Completion](), list[Round](), list[AxisValue]()
    plan = {"vary": {}, "prompts": [{"text": "p", "tokens": 5}], "impls": ["stock"]}
    figures: dict[str, Any] = {"targets": per_round, "others": 0, "steps": 1, "tokens": 1, "seconds": 1.0}
    usual: dict[str, Any] = {"impl": "stock", "changes": "c", "proof": "p"}
    for arm, traces in arms.items():
        first = len(rounds)
        for i, trace in enumerate(traces):
            fields = {"round": first + i // per_round, "arm": arm, "nonfinite": int(bool(trace) and trace in lost)}
            completions.append(completion(f"{arm} t{i}", trace, **fields))
        numbers = range(first, first + -(-len(traces) // per_round))
        rounds += [Round(impl="stock", round=n, arm=arm, **figures) for n in numbers]
        axis, _, value = arm.partition("=")
        for name, of, proven in [("as it is", "base", True), (value, arm, arm != unproven)] if axis != "base" else ():
            values.append(AxisValue(axis=axis, held=axis != "dtype", value=name, arm=of, proven=proven, **usual))
    if note:
        values.append(AxisValue(axis="graphs", note=note, value="", arm="", held=True, proven=False, **usual))
    records: dict[str, Any] = {"completions": completions, "rounds": rounds, "axis_values": values}
    return Run(header=header("sample", plan), rows=[replayed("stock", 4)], complete=True, **records)


BASE: Arms = {"base": "AAAA"}


def tallied(run: Run) -> list[tuple[object, ...]]:
    return [(t.axis, t.texts, t.traces, t.traces_within, t.moved, t.compared) for t in tally_axes(run, "stock")]


def test_each_implementation_has_its_own_completions() -> None:
    clean = varied(BASE | {"chunk=5": "AAAA"})
    untested = varied(BASE | {"chunk=5": ["", "", "", ""]})
    for finding, run in {
        Finding.WRONG: varied(BASE | {"chunk=5": "AAAA"}, lost="A"),
        Finding.OTHER: varied(BASE | {"chunk=5": "BBBB"}),
        Finding.BATCH: varied({"base": "AABB", "chunk=5": "AABB"}),
        Finding.UNTESTED: untested,
    }.items():
        assert [v.finding for v in judge(beside(clean, run))] == [Finding.CLEAN, finding]
        assert [v.finding for v in judge(beside(run, clean))] == [finding, Finding.CLEAN]
        assert tallied(beside(clean, run)) == tallied(clean)
    several = varied(BASE | {"chunk=5": "AAAA"}, per_round=1)
    assert judge(beside(clean, several))[0].text == judge(clean)[0].text  # its own rounds bound it
    later, first = (varied({"base": t, "chunk=5": t}, per_round=2) for t in ("AAAB", "ABAB"))
    assert [v.finding for v in judge(beside(later, first))] == [Finding.UNATTRIBUTED, Finding.BATCH]
    idle = varied(BASE | {"chunk=5": "AAAA", "page=4": "AAAA"}, "page=4", note="needs CUDA")
    assert tallied(beside(clean, idle)) == tallied(clean)
    assert len(tally_axes(beside(clean, idle), "invariant")) == 3
    assert ["4 failed requests" in " ".join(v.notes) for v in judge(beside(untested, clean))] == [True, False]
