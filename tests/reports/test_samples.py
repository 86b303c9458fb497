"""Curves, trees and branches: the geometry says what the counts say."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from nondet.core.statistics import round_interval
from nondet.reports.plots import Plot, Points, answers_picture, counts_text
from nondet.reports.samples import branch_of, curve_plots
from nondet.reports.text import token
from nondet.sampling.analysis import SampleSummary
from tests.build import sampled, summaries_of


@pytest.fixture(scope="module")
def stock(tmp_path_factory: pytest.TempPathFactory) -> SampleSummary:
    """52, 6, 1 and 1 of 60: parting at tokens 5 and 17, the last two from one another at 30."""
    return summaries_of(sampled(tmp_path_factory.mktemp("runs"), impls=("stock",)))[0]


def drawn(*summaries: SampleSummary) -> tuple[Plot, dict[str, Points]]:
    plots = curve_plots(summaries)
    (plot,) = plots.panels[0].plots
    return plot, {mark.style: mark.points for mark in plot.marks}


def test_the_curve_steps_down_where_completions_part(stock: SampleSummary) -> None:
    plot, marks = drawn(stock)
    assert [round(x * 40) for x, _ in marks["curve"]] == [0, 6, 6, 18, 18, 40, 40]
    share = [0.8 + 0.2 * y for _, y in marks["curve"]]
    assert share == pytest.approx([1, 1, 0.9, 0.9, 52 / 60, 52 / 60, 52 / 60], abs=1e-3)
    assert [text for text, _ in plot.levels] == ["80%", "85%", "90%", "95%", "100%"]
    assert curve_plots([replace(stock, survival=())]) is curve_plots([]) is None
    held = {1: (5,) * 2 + (40,) * 18, 2: (17,) + (40,) * 19, 3: (40,) * 20}
    assert "band" not in marks
    band = [y for _, y in drawn(replace(stock, held_rounds=held, confidence=0.975))[1]["band"]]
    low, high = round_interval([18, 19, 20], [20] * 3, 0.975)
    assert low < 0.8 < high
    assert band[4] == pytest.approx((high - 0.8) / 0.2, abs=1e-4)
    assert min(band) == 0.0


def test_the_picture_of_answers_has_a_branch_for_each(stock: SampleSummary, tmp_path: Path) -> None:
    one = replace(stock, impl="invariant", distinct_completions=1, distinct_traces=1, completions=stock.completions[:1])
    picture = answers_picture((stock, one))
    assert [words.text for words in picture.words][2:10:2] == ["52", "1", "1", "6"]
    assert sorted(s.x0 * 40 / 240 for s in picture.strokes if s.x0 == s.x1) == pytest.approx([5, 17, 30])
    assert (picture.strokes[-1].x0, picture.strokes[-1].x1, picture.strokes[-1].colour) == (0, 240, "r1")
    assert all(s.y0 < picture.height for s in picture.strokes)
    short = replace(stock.completions[0], pieces=(" one", " word"), token_ids=(1, 2))  # over before they differ
    assert answers_picture((stock, replace(one, completions=(short,)))).words[-1].text == "“one word”"
    assert counts_text(replace(one, distinct_traces=3)) == "60 requests, 1 answer; logprobs differ"
    each = lambda _, i: ((((i % 30, i // 30),) if i else ()), 0)  # noqa: E731 - one line
    (crowd,) = summaries_of(sampled(tmp_path, impls=("stock",), n=90, variants=each))
    assert crowd.distinct_completions > 50
    said = [words.text for words in answers_picture((crowd,)).words]
    shown = sum(int(count) for count in said[2:18:2])
    assert said[19] == f"not drawn: {crowd.distinct_completions - 8} rarer answers to {90 - shown} requests"


def test_branches_mark_the_first_different_token(stock: SampleSummary) -> None:
    top, *others = stock.completions
    assert branch_of(top, 5).mark == " an"
    for completion in others:
        at = completion.parts_at
        code = branch_of(completion, at)
        assert code.mark == completion.pieces[at] != top.pieces[at]
        assert completion.pieces[:at] == top.pieces[:at]
        assert (code.text + code.mark + code.after).removeprefix("…").removesuffix("…") in completion.text
    short = branch_of(replace(others[0], pieces=top.pieces[:9]), 9)
    assert (short.mark, short.after) == ("ends here", "")
    assert short.marked.endswith("⟦ends here⟧")
    named = [token("", 4), token("\ufffd", 5), token(" a\n", 6), token("", -1)]  # two without a text differ
    assert named == ["<token 4>", "<token 5>", "“ a⏎”", "(the end)"]
