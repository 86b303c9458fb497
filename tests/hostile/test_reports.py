"""Reports of extreme runs: deep trees, figures that are no numbers, many completions; in bounded time and memory."""

from __future__ import annotations

import io
import json
import random
from pathlib import Path
from xml.etree import ElementTree

import msgspec
import numpy as np
import pytest
from rich.console import Console

from nondet.commands.output import PipedConsole, put, say
from nondet.core.traces import Trace, TraceWriter, trace_digest
from nondet.reports import gate, html, markdown, terminal
from nondet.reports.content import load_summaries
from nondet.testing.messages import run_text
from nondet.testing.plugin import assert_open
from nondet.verdict.gate import decide
from tests.reports.factory import failed, row, run_of, sampled


def comb(impl: str, number: int) -> tuple[list[tuple[int, int]], int]:
    """Request i leaves the others at token i: every fork lies within the one before."""
    return ([(number, 11)] if impl == "stock" else []), 0


def test_six_hundred_nested_forks_are_a_page(tmp_path: Path) -> None:
    """A tree that nests deeper than Python recurses is drawn, cut, and none of it is lost in the figures."""
    run = sampled(tmp_path, n=600, length=640, impls=("stock",), variants=comb)
    (summary,) = load_summaries(run)
    assert len(summary.forks) >= 500
    assert sum(b.count for b in summary.forks[0].branches) == 600
    assert "<svg" in html.render([run])
    assert markdown.render([run])


@pytest.mark.parametrize("margin", [float("nan"), float("inf")])
def test_margins_that_are_no_numbers_are_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, margin: float
) -> None:
    """A model that computes NaN has NaN for margins: the page is made, and says that there is no figure."""
    write = TraceWriter.write

    def spoilt(self: TraceWriter, traces: list[Trace]) -> None:
        changed = []
        for t in traces:
            margins = np.full(len(t.token_ids), margin, dtype="<f4").tobytes()
            digest = trace_digest(t.token_ids, t.logprobs)
            assert digest == t.digest
            changed.append(Trace(digest=digest, token_ids=t.token_ids, logprobs=t.logprobs, margins=margins))
        write(self, changed)

    monkeypatch.setattr(TraceWriter, "write", spoilt)
    run = sampled(tmp_path, n=30, length=24)
    summary = load_summaries(run)[0]
    assert summary.first_fork is not None
    assert all(branch.margin_min is None for branch in summary.first_fork.branches)
    assert "not recorded" in html.render([run])


WORDS = [
    "::error::owned",
    "::set-output name=a::b",
    "::stop-commands::x",
    "##[error]owned",
    "##vso[task.x]",
    "at::mm",
    "a",
]


def commands(text: str) -> list[str]:
    """The lines that a CI's runner would obey: GitHub trims a line's beginning, and finds ##[ anywhere."""
    return [x for x in text.splitlines() if x.strip().startswith("::") or "##[" in x or "##vso[" in x]


@pytest.mark.parametrize("seed", range(6))
def test_no_line_that_is_wrapped_is_a_command(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], seed: int
) -> None:
    """Names and reasons of a run at many widths: on a terminal as it is a line begins with ::error, here none does."""
    rng = random.Random(seed)  # noqa: S311 - a test's inputs

    def words(count: int) -> str:
        return " ".join(rng.choices(WORDS, k=count))

    rows = [failed(impl=words(3), case=words(6), reason=words(30)), row((0, 1, 1), impl=words(9), case=words(12))]
    run = run_of(*rows)
    for width in rng.sample(range(30, 140), 8):
        monkeypatch.setenv("COLUMNS", str(width))
        for verbose in (False, True):
            terminal.render([run], PipedConsole(), verbose=verbose)
    say(words(20))
    put(gate.text(decide(run, rate=0.1, confidence=0.95, by="load"), run))
    with pytest.raises(AssertionError) as caught:  # pytest shows it in the same log
        assert_open(run)
    assert "owned" in str(caught.value)
    assert commands(str(caught.value)) + commands(run_text(run)) == []
    seen = capsys.readouterr()
    assert "owned" in seen.out
    assert "error" in seen.err
    assert commands(seen.out) + commands(seen.err) == []
    raw = io.StringIO()
    for width in range(30, 140, 5):
        terminal.render([run], Console(file=raw, width=width), verbose=True)
    assert commands(raw.getvalue())


def test_json_on_stdout_is_the_same_and_no_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """##[ is found anywhere in a line, inside of JSON too: it is written as an escape, and reads as it was."""
    put([json.dumps({"a": "##[error] ##vso[x] #1"})], as_json=True)
    out = capsys.readouterr().out
    assert commands(out) == []
    assert json.loads(out) == {"a": "##[error] ##vso[x] #1"}


@pytest.mark.parametrize("bad", [0, 8, 0xB, 0x1F, 0x7F, 0x85, 0x2028, 0xD800, 0xFFFE, 0xFFFF, 0x1FFFE])
def test_junit_is_xml_whatever_a_run_holds(bad: int) -> None:
    """No character that a parser refuses gets into the file: not by a name, a reason, nor what a header says."""
    text = f"a{chr(bad)}b]]>&<"
    run = run_of(failed(impl=text, case=text, reason=f"{text}\n{text}"), row((0, 1), impl=text, case=text))
    run.header = msgspec.structs.replace(run.header, command=text, started=text)
    xml = gate.junit(decide(run, rate=0.1, confidence=0.95, by="load"), run, 1.0)
    root = ElementTree.fromstring(xml.encode("utf-8"))  # noqa: S314 - written a line above
    assert "]]>&<" in str(root[0].get("timestamp"))
    assert any("]]>&<" in str(case.get("name")) for case in root.iter("testcase"))
