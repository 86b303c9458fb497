"""Reports of extreme runs: deep trees, figures that are no numbers, many completions; in bounded time and memory."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from nondet.reports import html, markdown
from nondet.reports.content import load_summaries
from nondet.traces import Trace, TraceWriter, trace_digest
from tests.reports.factory import sampled


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
