"""Faults that people have reported of layers, scores and gradients, made small: what nondet says of each."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from nondet.core.compare import identical
from nondet.core.inputs import product_operands
from nondet.core.records import Row, Run
from nondet.errors import UserError
from nondet.probes.base import Options, in_batches
from nondet.probes.functions import check, check_operator, run_of
from nondet.probes.runner import plan_jobs, run_jobs
from nondet.reports.content import build, headline
from nondet.reports.first_screen import chain
from nondet.testing import assert_batch_invariant
from nondet.verdict.findings import Finding
from nondet.verdict.gate import judge
from nondet.verdict.rows import judge_rows
from tests.probes.toys import Bias, _plus


def findings(rows: list[Row]) -> tuple[Finding, ...]:
    (verdict,) = judge_rows(rows)
    return verdict.findings


def of_scale(run: Run) -> float:
    """The largest difference between two batches, beside the largest number of the result."""
    difference = run.rows[0].difference
    return difference.max_abs / (difference.scale or 1.0)


def test_a_library_s_product_is_what_it_is_by_hand():
    """A stock linear layer depends on its rows exactly where its own calls do; the cure has one class."""
    options = Options(m=8, k=1000, n=64, dtypes=("float32",), inputs=("order",))
    jobs = [j for j in plan_jobs(["matmul"], ["stock", "invariant"], options) if j.case.varied == "batch_size"]
    stock, invariant = run_jobs([j for j in jobs if not j.case.data["layout"]], 0)
    x, w = product_operands("order", (16, 1000), (64, 1000), torch.float32, "cpu", 0, weight_kind="bell")
    run = run_of([stock], {}, None)
    assert stock.distinct == 1 or "not rounding" not in headline(run, judge(run))
    assert stock.distinct == 1 or "by rounding" in headline(run, judge(run))
    results = [in_batches(lambda batch: F.linear(batch, w * 2.0**-5), x, 16, M) for M in stock.values]
    assert [identical(results[0], result) for result in results] == [label == 0 for label in stock.labels]
    assert invariant.distinct == 1


def eight_bits(x: torch.Tensor, weight: torch.Tensor, bias: Bias = None) -> torch.Tensor:
    """Columns with a large number in any row stay as they are; the others are rounded to 8 bits of each row."""
    rows = x.reshape(-1, x.shape[-1]).float()
    outlying = (rows.abs() > 6.0).any(0)
    rounded = []
    for operand in (rows.masked_fill(outlying, 0.0), weight.float()):
        step = operand.abs().amax(1, keepdim=True).clamp(min=1e-8) / 127
        rounded.append((operand / step).round().double() * step)
    out = rounded[0] @ rounded[1].T + rows[:, outlying].double() @ weight[:, outlying].double().T
    return _plus(out.to(x.dtype).reshape(*x.shape[:-1], -1), bias)


def test_eight_bit_columns_that_a_neighbour_chooses():
    """Batch-dependent by what neighbours hold, at one size, by far more than a rounding; and this is said first."""
    run = check_operator(eight_bits, m=17, k=96, n=16, varied={"batch_size", "neighbour_values"})
    (row,) = [r for r in run.rows if r.varied == "neighbour_values" and r.inputs == "mixed"]
    assert row.differs
    assert row.difference.max_abs > 1e-3 * (row.difference.scale or 1.0)
    assert {Finding.BATCH, Finding.UNATTRIBUTED} & set(findings(run.rows))
    assert "; not rounding in " in headline(run, judge(run))
    (kernel,) = [step.text for step in chain(build([run])) if step.label == "kernel"]
    assert "while other rows hold other values" in kernel
    assert "neighbour values as drawn" in kernel


def test_scores_that_are_shares_of_their_batch():
    """What neighbours hold decides at equal size; alone a score is 1."""
    pairs = torch.randn(16, 8, generator=torch.Generator().manual_seed(1))

    def scores(x: torch.Tensor) -> torch.Tensor:
        return torch.softmax(x.double().sum(-1), 0)

    begins = r"^[^ ]*: other requests' data in a request's row, not rounding: .*one factor"
    with pytest.raises(AssertionError, match=begins):
        assert_batch_invariant(scores, make_inputs=lambda size: pairs[:size], over=[1, 3, 16])
    beside: dict[Any, torch.Tensor] = {"these": pairs[:4], "others": torch.cat([pairs[:1], pairs[5:8]])}
    run = check(scores, beside.__getitem__, list(beside), varied="neighbour_values", select=lambda out, _: out[:1])
    assert run.rows[0].differs
    assert of_scale(run) > 0.01


def gradient(micro: int) -> torch.Tensor:
    """Of a head's weight, by micro-batches that each take the mean over their own tokens."""
    drawn = torch.Generator().manual_seed(0)
    table, head = (torch.randn(50, 8, generator=drawn, dtype=torch.float64) for _ in range(2))
    head.requires_grad_()
    rows = [torch.randint(0, 50, (n,), generator=drawn) for n in (3, 30, 7, 12)]
    for part in (rows[i : i + micro] for i in range(0, len(rows), micro)):
        x, y = (torch.cat(ids) for ids in ([row[:-1] for row in part], [row[1:] for row in part]))
        (F.cross_entropy(table[x] @ head.T, y) * micro / len(rows)).backward()
    found: Any = head.grad
    return found


def test_micro_batches_that_weigh_their_own_tokens():
    """Tens of percent in float64; one result for the whole batch is compared whole, and is no wrong result."""
    whole: Callable[[Any, Any], torch.Tensor] = lambda out, _: out  # noqa: E731 - as a user writes it
    run = check(gradient, lambda micro: (micro,), [1, 2, 4], varied="micro_batch", select=whole)
    assert Finding.WRONG not in findings(run.rows)
    assert run.rows[0].distinct == 3
    assert of_scale(run) > 0.1
    with pytest.raises(UserError, match="the same shape") as caught:
        check(lambda micro: gradient(micro)[None], lambda micro: (micro,), [1, 2, 4])
    assert "select=" in (caught.value.hint or "")


@pytest.mark.nightly
def test_a_compiled_block_is_judged_by_its_own_bits() -> None:
    x, w = (torch.randn(64, 64, generator=torch.Generator().manual_seed(i)) for i in range(2))
    compiled = torch.compile(lambda rows: torch.softmax(rows * rows.pow(2).mean(-1, True).rsqrt() @ w, -1))
    (row, *_) = check(compiled, lambda size: x[:size], [1, 2, 3, 8, 17, 64]).rows
    results = [compiled(x[:size])[:1] for size in row.values]
    assert [identical(results[0], result) for result in results] == [label == 0 for label in row.labels]
