"""Verdicts on rows: a wrong one is the worst bug."""

from __future__ import annotations

from typing import Any

from nondet.core.records import Row, Status
from nondet.verdict.findings import Finding, sort_impls
from nondet.verdict.rows import judge_rows
from tests.build import failed, row

UNSTEADY = row([0, 1], varied="run", operator="index_add")
ORDERS: dict[str, Any] = {"varied": "order", "operator": "float_sum", "impl": "torch"}
ATOMIC = row([0, 1], varied="run", operator="split_k", demonstration=True)

SPLIT: dict[str, Any] = {"varied": "split", "operator": "split_k", "demonstration": True}
OTHERS = "op0 1 of 1, op1 1 of 1, op2 1 of 1, op3 1 of 1, op4 1 of 1, op5 1 of 1, and 3 more operators"
EXPECTED = "order of reduction in 1 of 1 case (float_sum): this is expected of floating-point, and no fault"
BATCH, RUN, ORDER, OTHER, CLEAN, UNTESTED = (
    Finding.BATCH, Finding.RUN_TO_RUN, Finding.ORDER, Finding.OTHER, Finding.CLEAN, Finding.UNTESTED,
)  # fmt: skip

# what the case is: its rows, of one implementation; the findings; a part of its text and notes
CASES: list[tuple[list[Row], tuple[Finding, ...], str]] = [
    # the batch: whatever comes along, comes before or shares the call
    ([row([0, 1, 1]), row([0, 0], varied="run")], (BATCH,), "batch-dependent in 1 of 1 case"),
    *(
        ([row([0, 1], varied=varied)], (BATCH,), "batch-dependent")
        for varied in ("position", "query_chunk", "cache", "load", "prompt_length")
    ),
    # status and counts disagree
    ([row([0, 1], status=Status.IDENTICAL)], (BATCH,), "batch-dependent"),
    ([row([0, 0], status=Status.DIVERGENT)], (BATCH,), "batch-dependent"),
    # nothing, or one call, was repeated
    (
        [row([0, 1], replays=0)],
        (Finding.UNATTRIBUTED,),
        "No call of linear was repeated: differences there may be batch",
    ),
    ([row([0, 1], replays=1)], (BATCH,), "batch-dependent"),
    # the same call again says nothing of the batch, and forbids blaming it for the same operator in the same dtype
    ([UNSTEADY], (RUN,), "batch was not varied"),
    ([UNSTEADY, row([0, 1], operator="index_add")], (RUN,), "is not known"),
    ([UNSTEADY, row([0, 1]), row([0, 0], varied="run")], (RUN, BATCH), "batch-dependent in 1 of 1 case (linear)"),
    ([row([0, 1], varied="run", dtype="float32"), row([0, 1], dtype="bfloat16")], (RUN, BATCH), ""),
    ([row([0, 1, 1], replays=2, replays_parted=1)], (RUN,), "1 of 1 case"),
    ([row([0, 1, 1], replays=2, replays_parted=0)], (BATCH,), ""),
    # orders of reduction that were changed on purpose: no fault, unless they can't matter
    ([row([0, 1, 2], varied="order", operator="float_sum", demonstration=True)], (ORDER,), EXPECTED),
    ([row([0, 1], **ORDERS), row([0, 0], inputs="integers", **ORDERS)], (ORDER,), "1 of 2 cases"),
    ([row([0, 1], inputs="integers", **ORDERS)], (OTHER,), "bits depend on order in 1 of 1 case"),
    ([row([0, 1], inputs="ones", **SPLIT)], (OTHER,), "bits depend on split in 1 of 1 case (split_k)"),
    ([row([0, 1], **SPLIT)], (ORDER,), ""),
    ([row([0, 1], impl="invariant", **SPLIT)], (OTHER,), ""),
    # what a probe builds itself is all there is to say only where it is alone, or claims to be invariant
    ([ATOMIC], (RUN,), ""),
    ([ATOMIC, row([0, 0]), row([0, 0], varied="run")], (CLEAN,), "not counted in this verdict (split_k): run-to-run"),
    ([row([0, 1], impl="invariant", **SPLIT | {"varied": "run"}), row([0], impl="invariant")], (RUN,), ""),
    # an axis of its own; wrong in every order
    ([row([0, 1], varied="memory_format", operator="conv")], (OTHER,), "depend on memory format in 1 of 1 case (conv)"),
    ([row([0, 0], varied="split", inputs="ones", extra={"exact": False})], (Finding.WRONG,), "wrong in 1 of 1 case"),
    # nothing compared is no verdict, neither good nor bad: failed, skipped, one variant, none
    ([failed()], (UNTESTED,), "nothing was compared"),
    ([failed(Status.SKIPPED, "no such kernel")], (UNTESTED,), "nothing was compared"),
    ([row([0])], (UNTESTED,), "nothing was compared"),
    ([row([], trials=0)], (UNTESTED,), "nothing was compared"),
    ([row([0, 1], operator=f"op{i}") for i in range(9)], (BATCH,), f"batch-dependent in 9 of 9 cases ({OTHERS})"),
    # every case that was tried is accounted for, and a function's name is said once
    (
        [row([0, 1]), *[row([0, 0], operator=f"op{i}") for i in range(3)]],
        (BATCH,),
        "4 cases (linear 1 of 1, others 0 of 3)",
    ),
    ([row([0, 1], impl="a:<lambda>", operator="a:<lambda>")], (BATCH,), "batch-dependent in 1 of 1 case"),
]


def test_every_case_has_its_findings_and_words() -> None:
    for rows, findings, words in CASES:
        (verdict,) = judge_rows(rows)
        assert verdict.findings == findings, rows
        assert words in " ".join((verdict.text, *verdict.notes)), rows
        assert verdict.is_fault == (findings[0] not in (CLEAN, ORDER, UNTESTED)), rows
    names = ["mine:f", "invariant:matmul", "invariant", "stock-flash", "stock", "invariant_x:f", "stock"]
    assert sort_impls(names) == ["stock", "stock-flash", "invariant", "invariant:matmul", "mine:f", "invariant_x:f"]


def test_agreement_is_not_determinism() -> None:
    """Invariant, beside a stock that parts, is never called deterministic or identical; sizes are no sample."""
    runs = {"varied": "run", "case": "runs"}
    mine = [row([0, 0, 0], impl="invariant"), row([0, 0], impl="invariant", **runs)]
    stock, invariant = judge_rows([row([0, 1, 1]), row([0, 0], **runs), *mine])
    assert (stock.impl, stock.finding, stock.notes) == ("stock", Finding.BATCH, ())
    assert (invariant.finding, invariant.notes) == (Finding.CLEAN, ())
    assert invariant.text == (
        "no divergence observed in 5 trials of 2 cases (0 of 3 comparisons differed; varied: run, batch size; "
        "operators: linear; batch sizes over all cases: 1-3)"
    )


def test_a_clean_verdict_says_which_sizes_were_tried() -> None:
    runs, few, many = row([0, 0], varied="run"), [1, 2, 3, 7, 64, 65], list(range(1, 80, 2))
    for rows, end in [
        ([row([0] * 6, values=few), row([0, 0], values=[13, 7]), runs], " over all cases: 1-3, 7, 13, 64-65)"),
        ([row([0] * 40, values=many)], ", 47 and 16 more up to 79)"),
        ([runs], "; operators: linear)"),
    ]:
        assert judge_rows(rows)[0].text.endswith(end)
    rows = [row([0, 0]), failed(), failed(Status.SKIPPED, "no kernel"), row([0, 0], reason="3 of 8 elements are NaN")]
    (verdict,) = judge_rows(rows)
    assert verdict.finding == Finding.CLEAN
    left_out = "1 case failed and 1 case skipped, counted in no other figure."
    assert verdict.notes == (left_out, "1 case has a note, listed below.")
    assert "4 trials of 2 cases (0 of 2 comparisons" in verdict.text
