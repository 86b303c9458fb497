"""Faults in whole models are found where they are and named for what they are; all: python -m tests.faults."""

from __future__ import annotations

import os

import pytest

import tests.faults.__main__ as command
from tests.faults.models import MODELS, PlantedModel, ToldOfModel, judge_model
from tests.faults.operators import PLANTED

# Weights, prompts and arrivals follow it; fresh ones as in test_operators.py.
SEED = int(os.environ.get("NONDET_FAULT_SEED", "101"))
# A fault of each kind and one that is none, under five loads: what fits into a minute.
_HERE = (
    "splits_by_rows in down_proj",
    "shared_scale in down_proj",
    "drifts in down_proj",
    "long_request_joins",
    "scale_of_each_row in down_proj",
)


@pytest.mark.parametrize("planted", [m for m in MODELS if m.name in _HERE], ids=lambda m: m.name)
def test_the_diagnosis_of_a_planted_model(planted: PlantedModel) -> None:
    """The finding is right, and the first culprit is where the fault is."""
    told = judge_model(planted, SEED)
    assert told.right(planted), f"seed {SEED}: {told}"
    assert told.cause(planted), f"seed {SEED}: {told}"


def test_there_are_enough_of_both() -> None:
    """At least 10 faults and 5 controls in models, 40 and 20 with those in operators; each is listed once."""
    assert len({m.name for m in MODELS}) == len(MODELS)
    assert set(_HERE) <= {m.name for m in MODELS}
    faults, controls = sum(bool(m.findings) for m in MODELS), sum(not m.findings for m in MODELS)
    assert faults >= 10
    assert controls >= 5
    assert faults + sum(bool(p.finding) for p in PLANTED) >= 40
    assert controls + sum(not p.finding for p in PLANTED) >= 20


def test_the_matrix_counts_what_is_said_wrongly(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A fault that is missed and one that is found in another place both fail the command, and stand in the matrix."""
    told = iter(
        [
            ToldOfModel("no divergence observed", "", "", 0.1),
            ToldOfModel("batch-dependent", "model.layers.0.mlp", "linear", 0.1),
            ToldOfModel("batch-dependent", "model.layers.1.mlp.down_proj", "linear", 0.1),
        ]
    )
    monkeypatch.setattr(command, "judge_model", lambda *_: next(told))
    assert command.main(["splits_where_single", "--seeds", "0", "1"]) == 1
    text = capsys.readouterr().out
    assert "fault: 2, said wrongly: 1, cause wrong: 1" in text
    assert text.splitlines()[-2].split()[-2:] == ["1", "1"]
    assert command.main(["splits_where_single", "--seeds", "0"]) == 0
    assert command.main(["pointwise square", "--seeds", "1"]) == 0  # an operator's, judged for good
    assert command.main(["no such name"]) == 1
