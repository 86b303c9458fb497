"""The pointwise probe calls a tail that computes otherwise divergent, and a correctly rounded operator identical."""

from __future__ import annotations

import pytest
import torch

from nondet.errors import UserError
from nondet.probes import pointwise
from nondet.probes.base import Options
from nondet.probes.runner import plan_jobs, run_jobs
from tests.probes.toys import exp_with_a_tail


def test_tail_that_computes_otherwise_is_flagged_and_a_square_is_not(monkeypatch):
    """Vectors of 16 through one function, the rest through another: pieces show it. A square has one rounding."""
    monkeypatch.setattr(pointwise, "OPERATORS", {"exp": exp_with_a_tail, "square": torch.square})
    rows = list(run_jobs(plan_jobs(["pointwise"], ["stock"], Options(dtypes=("float32",), k=256)), 0, set()))
    assert [(r.operator, r.status) for r in rows] == [("exp", "divergent"), ("square", "identical")]
    assert rows[0].values == [256, 100, 65, 31, 17, 7]


def test_inputs_are_in_every_operator_s_domain():
    """No operator is asked about numbers that it has no answer for: NaN would be called identical."""
    probe = pointwise.Pointwise()
    cases = list(probe.cases(Options(inputs=("bell", "wide"))))
    assert {case.inputs for case in cases} == {"bell", "wide"}
    for case in cases:
        assert torch.isfinite(probe.reference(case, probe.prepare(case, "cpu", 0))).all() or case.operator == "exp"


def test_bad_size_is_refused():
    """No elements, nothing to ask."""
    with pytest.raises(UserError, match="--k 0"):
        list(pointwise.Pointwise().cases(Options(k=0)))
