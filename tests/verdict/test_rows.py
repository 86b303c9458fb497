"""Verdicts on rows: a wrong one is the worst bug."""

from __future__ import annotations

from nondet.core.records import Axis, Status
from nondet.verdict.findings import Finding, sort_impls
from nondet.verdict.rows import axis_of, judge_rows
from tests.build import failed, row


def test_parting_over_the_batch_is_batch_dependence_and_agreement_is_not_determinism() -> None:
    """Stock parts over M; invariant does not, and is never called deterministic or identical for that."""
    runs = {"varied": "run", "case": "runs"}
    stock, invariant = judge_rows(
        [row([0, 1, 1]), row([0, 0], **runs), row([0, 0, 0], impl="invariant"), row([0, 0], impl="invariant", **runs)]
    )
    assert (stock.impl, stock.finding, stock.notes) == ("stock", Finding.BATCH, ())
    assert stock.text == "batch-dependent in 1 of 1 case (linear)"
    assert invariant.finding == Finding.CLEAN
    assert not invariant.finding.is_divergence
    assert invariant.text == (
        "no divergence observed in 5 trials of 2 cases (0 of 3 comparisons differed; varied: run, batch size; "
        "operators: linear; batch sizes over all cases: 1-3)"
    )
    assert "%" not in invariant.text  # chosen sizes are no sample: there is no rate
    assert not any("determin" in text for text in (invariant.text, *invariant.notes))


def test_a_clean_verdict_says_which_sizes_were_tried() -> None:
    """In ranges, of batch sizes alone; of very many the rest is counted."""
    sizes = [1, 2, 3, 7, 64, 65]
    (few,) = judge_rows([row([0] * 6, values=sizes), row([0, 0], values=[13, 7]), row([0, 0], varied="run")])
    assert few.text.endswith("; batch sizes over all cases: 1-3, 7, 13, 64-65)")
    (many,) = judge_rows([row([0] * 40, values=list(range(1, 80, 2)))])
    assert many.text.endswith(", 47 and 16 more up to 79)")
    (none,) = judge_rows([row([0, 0], varied="run")])
    assert "batch sizes" not in none.text


def test_every_way_to_vary_the_batch_counts_as_batch() -> None:
    """Whatever rides along, comes before or shares the call is the batch."""
    for varied in ["batch_size", "position", "query_chunk", "cache", "load", "prompt_length"]:
        assert judge_rows([row([0, 1], varied=varied)])[0].finding == Finding.BATCH


def test_the_same_call_again_is_run_to_run() -> None:
    """Parting while nothing changed is run-to-run nondeterminism, and says nothing of the batch."""
    (verdict,) = judge_rows([row([0, 1, 2], varied="run", operator="index_add")])
    assert verdict.finding == Finding.RUN_TO_RUN
    assert verdict.text == "run-to-run nondeterministic in 1 of 1 case (index_add)"
    assert any("batch was not varied" in note for note in verdict.notes)


def test_run_to_run_forbids_blaming_the_batch_of_the_same_operator_alone() -> None:
    """A sweep of an operator that parts anyway is no evidence; a sweep of another one still is."""
    rows = [row([0, 1], varied="run", operator="index_add"), row([0, 1], operator="index_add")]
    (verdict,) = judge_rows(rows)
    assert verdict.findings == (Finding.RUN_TO_RUN,)
    assert any("is not known" in note for note in verdict.notes)
    (both,) = judge_rows([*rows, row([0, 1], operator="linear"), row([0, 0], operator="linear", varied="run")])
    assert both.findings == (Finding.RUN_TO_RUN, Finding.BATCH)
    assert "batch-dependent in 1 of 1 case (linear)" in both.text


def test_run_to_run_in_another_dtype_casts_no_doubt() -> None:
    """Other kernels serve other dtypes: float32 atomics do not excuse a bfloat16 sweep."""
    unsteady = row([0, 1], varied="run", dtype="float32")
    (verdict,) = judge_rows([unsteady, row([0, 1], dtype="bfloat16")])
    assert verdict.findings == (Finding.RUN_TO_RUN, Finding.BATCH)


def test_the_batch_is_not_named_where_nothing_was_repeated() -> None:
    """Without repeated calls noise of one run looks like the batch; one repeated call of the operator tells."""
    (verdict,) = judge_rows([row([0, 1], operator="attention", replays=0)])
    assert verdict.findings == (Finding.UNATTRIBUTED,)
    assert verdict.is_fault
    (note,) = verdict.notes
    assert note == "No call of attention was repeated: differences there may be batch or run-to-run effects."
    (told,) = judge_rows([row([0, 1], operator="attention", replays=1)])
    assert (told.finding, told.notes) == (Finding.BATCH, ())


def test_orders_taken_on_purpose_are_no_fault() -> None:
    """Other orders give other sums: that is what floating-point does."""
    (verdict,) = judge_rows([row([0, 1, 2], varied="order", operator="float_sum", demonstration=True, impl="python")])
    assert verdict.finding == Finding.ORDER
    assert not verdict.finding.is_divergence
    assert (
        verdict.text
        == "dependent on the order of reduction in 1 of 1 case (float_sum): this is expected of floating-point, and "
        "no fault"
    )


def test_an_order_that_cannot_matter_is_a_fault_if_it_does() -> None:
    """Sums of small integers are exact in every order, so parting there is a finding; agreement is none."""
    assert axis_of(row([0, 1], varied="order", inputs="integers")) == Axis.OTHER
    assert axis_of(row([0, 0], varied="order", inputs="integers")) == Axis.ORDER
    (verdict,) = judge_rows([row([0, 1], varied="split", inputs="ones", operator="split_k", demonstration=True)])
    assert verdict.finding == Finding.OTHER
    assert verdict.text == "bits depend on split in 1 of 1 case (split_k)"


def test_exact_inputs_that_agree_do_not_make_a_clean_verdict() -> None:
    """The rows that had to agree must not hide those that did not."""
    orders = {"varied": "order", "operator": "float_sum", "impl": "torch"}
    (verdict,) = judge_rows([row([0, 1], **orders), row([0, 0], inputs="integers", **orders)])
    assert verdict.finding == Finding.ORDER
    assert "1 of 2 cases" in verdict.text


def test_an_invariant_kernel_may_not_depend_on_how_the_work_is_split() -> None:
    """What excuses a stock split-K does not excuse the kernel that claims invariance."""
    stock, invariant = judge_rows(
        [
            row([0, 1], varied="split", operator="split_k", demonstration=True, impl=impl)
            for impl in ("stock", "invariant")
        ]
    )
    assert stock.finding == Finding.ORDER
    assert invariant.finding == Finding.OTHER
    assert invariant.finding.is_divergence


def test_demonstrations_are_no_verdict_on_the_library() -> None:
    """Atomic split-K is built by the probe: beside real operators it is a note; alone it is all there is to say."""
    atomic = row([0, 1], varied="run", operator="split_k", demonstration=True)
    (alone,) = judge_rows([atomic])
    assert alone.finding == Finding.RUN_TO_RUN
    (beside,) = judge_rows([atomic, row([0, 0]), row([0, 0], varied="run")])
    assert beside.finding == Finding.CLEAN
    assert any("not counted in this verdict (split_k): run-to-run" in note for note in beside.notes)
    (claimed,) = judge_rows(
        [
            row([0, 1], varied="run", operator="split_k", demonstration=True, impl="invariant"),
            row([0], impl="invariant"),
        ]
    )
    assert claimed.finding == Finding.RUN_TO_RUN


def test_unknown_axes_are_called_by_their_name() -> None:
    """A probe's own axis gives "bits depend on it", not a claim about the batch."""
    (verdict,) = judge_rows([row([0, 1], varied="memory_format", operator="conv")])
    assert verdict.finding == Finding.OTHER
    assert verdict.text == "bits depend on memory format in 1 of 1 case (conv)"


def test_nothing_compared_is_no_verdict() -> None:
    """Failures, skips and single variants show nothing, neither good nor bad."""
    for rows in [[failed()], [failed(Status.SKIPPED, "no such kernel")], [row([0])], [row([], trials=0)]]:
        (verdict,) = judge_rows(rows)  # type: ignore[arg-type] # rows of the factory
        assert verdict.finding == Finding.UNTESTED
        assert "nothing was compared" in verdict.text


def test_failures_are_counted_beside_a_clean_verdict() -> None:
    """A clean verdict says how much it leaves out, and warns of rows that carry a note."""
    rows = [row([0, 0]), failed(), failed(Status.SKIPPED, "no kernel"), row([0, 0], reason="3 of 8 elements are NaN")]
    (verdict,) = judge_rows(rows)
    assert verdict.finding == Finding.CLEAN
    assert "1 case failed and 1 case skipped, counted in no other figure." in verdict.notes
    assert "1 case has a note, listed below." in verdict.notes
    assert "4 trials of 2 cases (0 of 2 comparisons" in verdict.text


def test_a_wrong_answer_is_called_a_bug() -> None:
    """All orders agreeing on the wrong sum is worse than any divergence, and must not pass as clean in silence."""
    (verdict,) = judge_rows([row([0, 0], varied="split", inputs="ones", extra={"exact": False})])
    assert verdict.finding == Finding.WRONG
    assert verdict.text == "wrong in 1 of 1 case (linear)"


def test_counts_and_status_are_both_believed() -> None:
    """A row whose status and counts disagree counts as parted: silence would be the worse mistake."""
    assert judge_rows([row([0, 1], status=Status.IDENTICAL)])[0].finding == Finding.BATCH
    assert judge_rows([row([0, 0], status=Status.DIVERGENT)])[0].finding == Finding.BATCH


def test_many_operators_are_named_up_to_six() -> None:
    """A verdict over a long list stays a phrase."""
    (verdict,) = judge_rows([row([0, 1], operator=f"op{i}") for i in range(9)])
    assert verdict.text.startswith("batch-dependent in 9 of 9 cases (op0 1 of 1, ")
    assert verdict.text.endswith("and 3 more operators)")


def test_implementations_come_in_one_order() -> None:
    """Stock, its backends, invariant, its parts, then a user's own; a user's module called invariant_x is their own."""
    names = ["mine:f", "invariant:matmul", "invariant", "stock-flash", "stock", "invariant_x:f", "stock"]
    assert sort_impls(names) == ["stock", "stock-flash", "invariant", "invariant:matmul", "mine:f", "invariant_x:f"]


def test_a_replay_that_parts_is_run_to_run_nondeterminism():
    """A sweep whose variants don't even repeat themselves is no evidence of batch dependence; a steady replay is."""
    unsteady = judge_rows([row([0, 1, 1], replays=2, replays_parted=1)])[0]
    assert unsteady.finding == Finding.RUN_TO_RUN
    assert "1 of 1 case" in unsteady.text
    assert Finding.BATCH not in unsteady.findings
    steady = judge_rows([row([0, 1, 1], replays=2, replays_parted=0)])[0]
    assert steady.finding == Finding.BATCH
    assert steady.notes == ()
