"""The probes of row operators call an order of summation that follows from the batch divergent, and nothing else."""

from __future__ import annotations

from unittest.mock import Mock

import pytest
import torch

from nondet.core.registry import load_probe
from nondet.probes import pointwise
from nondet.probes.base import Options
from nondet.probes.runner import plan_jobs, run_jobs
from tests.build import tiers
from tests.probes.toys import exp_with_a_tail, measure, statuses

ALWAYS = [("softmax", "softmax"), ("reduction", "sum")]
OPERATORS = [*ALWAYS, ("rms-norm", "rms_norm"), ("log-softmax", "log_softmax"), ("reduction", "mean")]
SMALL = {"m": 33, "k": 1000, "dtypes": ("float32",)}


@pytest.mark.parametrize(("probe", "operator"), tiers(ALWAYS, OPERATORS))
def test_order_that_follows_from_the_batch_is_flagged(probe, operator):
    """Summed in another order from 8 rows on: two classes, split at 8, on ordinary inputs already."""
    rows = measure(probe, f"{operator}__order__any__from_8", **SMALL, asked={"batch_size", "position"})
    row = next(r for n, r in rows.items() if "in batches" in n and n.startswith(operator) and r.inputs == "bell")
    assert (row.status, row.labels) == ("divergent", [int(value >= 8) for value in row.values])
    assert statuses(rows, operator=operator, varied="position") == {"identical"}


EACH = [(*operator, dtype) for operator in OPERATORS for dtype in ("float32", "bfloat16", "float16")]


@pytest.mark.parametrize(("probe", "operator", "dtype"), tiers([EACH[1], EACH[3], EACH[6]], EACH))
def test_sound_operator_is_not_flagged(probe, operator, dtype):
    """Rows computed by themselves are identical in every case, and near the oracle. Infinities that are the answer
    carry no note: the oracle has them too; a NaN that it has not would be counted."""
    rows = measure(probe, f"{operator}__order__any__never", m=9, k=257, dtypes=(dtype,))
    rows = [row for row in rows.values() if row.operator == operator]
    assert {(row.status, row.wrong) for row in rows} == {("identical", False)}
    assert all(row.error.relative_norm < 0.01 for row in rows if row.inputs == "bell")
    if operator == "sum":
        (row,) = [r for r in rows if (r.inputs, r.varied) == ("infinite", "batch_size")]
        assert (row.nonfinite, row.reason) == (0, "")
        assert row.error.max_abs is not None


def test_rows_keep_their_order_in_every_batch():
    """Batches of any size give back the same rows: an operator that does nothing must come out unmoved."""
    probe = load_probe("softmax")
    cases = [c for c in probe.cases(Options(m=70, k=5, dtypes=("float32",))) if c.varied in ("batch_size", "position")]
    assert {case.varied for case in cases} == {"batch_size", "position"}
    for case in cases:
        x = probe.prepare(case, "cpu", 0)["x"][: case.data["rows"]]
        spy = Mock(side_effect=lambda batch: batch)
        for trial in probe.trials(case, probe.prepare(case, "cpu", 0), spy):
            results = trial.compute() if trial.many else trial.compute()[None]
            assert all(torch.equal(result, x) for result in results), (case.name, trial.value)
        sizes = {len(call.args[0]) for call in spy.mock_calls}
        assert sizes == ({case.shape["M"]} if case.varied == "position" else set(case.data["values"]))


def test_widths_of_a_model_and_of_the_user():
    """A model's hidden size or vocabulary takes the place of the default widths, --k that of a model's."""
    config = {"hidden": 96, "head_dim": 32, "vocabulary": 640}
    for probe in map(load_probe, ("rms-norm", "softmax", "log-softmax", "reduction")):
        assert {list(c.shape.values())[1] for c in probe.cases(Options(config=config))} <= {96, 32, 640}
        assert {list(c.shape.values())[1] for c in probe.cases(Options(config=config, k=7))} == {7}


# The pointwise probe calls a tail that computes otherwise divergent, and a correctly rounded operator identical.


def test_tail_that_computes_otherwise_is_flagged_and_a_square_is_not(monkeypatch):
    """Vectors of 16 through one function, the rest through another: pieces show it. A square has one rounding."""
    monkeypatch.setattr(pointwise, "OPERATORS", {"exp": exp_with_a_tail, "square": torch.square})
    rows = list(run_jobs(plan_jobs(["pointwise"], ["stock"], Options(dtypes=("float32",), k=256)), 0))
    assert [(r.operator, r.status) for r in rows] == [("exp", "divergent"), ("square", "identical")]
    assert rows[0].values == [256, 100, 65, 31, 17, 7]


def test_inputs_are_in_every_operator_s_domain():
    """No operator is asked about numbers that it has no answer for: NaN would be called identical. A hard input must
    not make the largest logit take it all, or no order of softmax's sum could ever show."""
    probe = pointwise.Pointwise()
    cases = list(probe.cases(Options(inputs=("bell", "wide"))))
    assert {case.inputs for case in cases} == {"bell", "wide"}
    for case in cases:
        assert torch.isfinite(probe.reference(case, probe.prepare(case, "cpu", 0))).all() or case.operator == "exp"
    softmax = load_probe("softmax")
    for case in (case for case in softmax.cases(Options(k=1000)) if case.varied == "batch_size"):
        share = softmax.prepare(case, "cpu", 0)["x"].double().softmax(-1).amax(-1)
        assert float(share.median()) < 0.99, case.name
