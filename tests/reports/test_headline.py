"""The one sentence over a run: the finding, and nothing that buries it."""

from __future__ import annotations

from pathlib import Path

from nondet.reports.content import build, headline
from nondet.reports.first_screen import chain
from nondet.verdict.rows import judge_rows
from tests.reports.factory import row, run_of, sampled, stock_parts


def test_backends_stay_out_of_the_headline_unless_they_add_to_it():
    """A backend of stock is named there only where it finds what stock's own verdict does not."""
    stock = row([0, 1], operator="attention")
    agreeing = row([0, 1], impl="stock-flash", operator="attention")
    clean = row([0, 0], impl="stock-math", operator="attention")
    verdicts = judge_rows([stock, agreeing, clean])
    said = headline(run_of(stock, agreeing, clean), verdicts)
    assert said.startswith("stock: batch-dependent")
    assert "stock-flash" not in said
    assert "stock-math" not in said
    quiet = row([0, 0], operator="attention")
    assert "stock-flash: batch-dependent" in headline(run_of(quiet, agreeing), judge_rows([quiet, agreeing]))


def test_the_headline_counts_cases_and_leaves_the_operators_to_the_verdicts():
    """The list of operators would bury the finding."""
    rows = [row([0, 1], operator="attention"), row([0, 1]), row([0, 0], case="another")]
    verdict = judge_rows(rows)[0]
    assert "(attention 1 of 1, linear 1 of 2)" in verdict.text or "(linear 1 of 2, attention 1 of 1)" in verdict.text
    assert headline(run_of(*rows), [verdict]) == "stock: batch-dependent in 2 of 3 cases"


def test_many_that_agree_are_counted_and_whoever_parts_is_named():
    """Forty members of a class make one sentence, and the one that parts is in it."""
    rows = [row([0, 0], impl=f"tile-{i}") for i in range(8)]
    agreeing = judge_rows(rows)
    assert "tile-7: no divergence observed" in headline(run_of(*rows), agreeing)
    rows += [row([0, 1], impl="tile-8"), row([0, 0], impl="invariant")]
    said = headline(run_of(*rows), judge_rows(rows))
    assert "tile-8: batch-dependent" in said
    assert "invariant: no divergence observed" in said
    assert said.endswith("; 8 others: no divergence observed")


def test_a_run_without_a_verdict_says_that_nothing_was_compared() -> None:
    """It was measured, and still holds no comparison: neither a finding nor "nothing was measured"."""
    assert headline(run_of(row([0, 0])), []) == "nothing was compared"
    assert headline(run_of(row([0, 0]), complete=False), []) == "incomplete run, so far: nothing was compared"


def test_drawn_tokens_are_not_sent_to_a_greedy_trace(tmp_path: Path) -> None:
    """A trace is offered where logits part under a draw of their own, and says that it is greedy; margins are not."""
    for impls, command in (
        (("stock",), "nondet sample --impl stock-seeded --temperature 0.8"),
        (("stock", "stock-seeded"), ""),
        (("stock-seeded",), "nondet trace"),
        (("invariant",), ""),
    ):
        parts = (
            stock_parts if len(impls) == 2 else lambda impl, number: stock_parts(impl.removesuffix("-seeded"), number)
        )
        run = sampled(tmp_path, impls=impls, name=f"{len(impls)}{impls[0]}.jsonl", variants=parts)
        greedy = build([run])
        run.header.plan["sampling"] = {"temperature": 0.8, "top_k": 0, "top_p": 1.0, "seeds": 1}
        drawn = build([run])
        [operator] = [step for step in chain(drawn) if step.label == "operator"]
        assert operator.command == command
        assert ("greedy" in operator.text) == (command == "nondet trace")
        for report, margins in ((greedy, True), (drawn, False)):
            branches = [b for s in report.runs[0].samples[0].summaries for f in s.forks for b in f.branches]
            assert [b.margin_min is not None for b in branches] == [margins] * len(branches)
            assert bool(branches) == ("invariant" not in impls)
