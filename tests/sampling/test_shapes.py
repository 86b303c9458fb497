"""The shapes that were met, and operators compared at these."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from nondet.core.records import Round, Run, Status
from nondet.sampling.model import LoadedModel
from nondet.sampling.shapes import Shapes, explain_no_divergence, shapes_met
from tests.build import completion, header


def test_shapes_are_read_off_the_schedules() -> None:
    """Tokens, requests and keys of each step that a target took part in, added up by hand."""
    run = Run(header=header("sample"))
    # target: a prefill of 5 in step 0, three decodes; background: 4 and 4 in chunks, then decodes until step 5
    other = completion("x", schedule=[[0, 9, 9]], impl="invariant")
    run.completions = [completion("t", schedule=[[0, 1, 5], [1, 3, 1]]), other]
    background = {"b": [[1, 2, 4], [3, 3, 1]]}
    run.rounds = [
        Round(impl="stock", round=0, targets=1, others=1, steps=6, tokens=9, seconds=1.0, background=background)
    ]
    shapes = shapes_met(run, "stock")
    # step 0: 5 | step 1: 1 + 4, keys 6 + 4 | step 2: 1 + 4, keys 7 + 8 | step 3: 1 + 1, keys 8 + 9
    assert shapes == Shapes(tokens=(2, 5), requests=(1, 2), keys=((2, 17), (5, 5), (5, 10), (5, 15)))
    # under CUDA graphs padded to 8 query tokens, of which the budget leaves 6: other sizes were not computed
    run.header.plan["load"] = {"graphs": True, "requests": 4, "budget": 6}
    assert shapes_met(run, "stock") == Shapes(tokens=(6,), requests=(4,), keys=())


def test_rows_name_operators_and_sizes(tiny_float32: LoadedModel) -> None:
    """One row for each size of layer, the output projection at the number of requests, attention at its packings."""
    keys = tuple((q, 60 + 7 * q) for q in (1, 3, 9, 17))
    rows = explain_no_divergence(tiny_float32, Shapes(tokens=(1, 2, 3, 17, 40), requests=(1, 2, 5), keys=keys))
    assert len({row.key for row in rows}) == len(rows)
    linear = [row for row in rows if row.operator == "linear"]
    assert {(row.shape["K"], row.shape["N"]) for row in linear} == {(64, 64), (64, 32), (64, 128), (128, 64), (64, 512)}
    for row in linear:
        assert row.values == ([1, 2, 5] if row.shape["N"] == 512 else [1, 2, 3, 17, 40])
        assert (row.trials, sum(row.class_sizes)) == (len(row.values), row.trials)
    assert {row.shape["K"] for row in rows if row.operator == "rms_norm"} == {16, 64}
    (attention,) = [row for row in rows if row.operator == "attention"]
    assert attention.values == ["1x67", "3x81", "9x123", "17x179"]
    assert attention.difference.max_abs < 1e-5, "whatever is packed around them, the query attends to the same keys"
    assert any(row.status == Status.DIVERGENT for row in rows), "float32 products depend on M on every CPU tried"


class Layer(torch.nn.Linear):
    """Multiplies one row at a time, and adds something to every row where there are more than `few`."""

    few = 99

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[1, M, K] -> [1, M, N]."""
        return torch.stack([torch.mv(self.weight, row) for row in x[0]]).unsqueeze(0) + (x.shape[1] > self.few)


def test_a_layer_that_depends_on_m_is_found_and_one_that_does_not_is_not(tiny_float32: LoadedModel) -> None:
    """The comparison sees a dependence where there is one, and none where there is none."""
    for few, labels in [(99, [0] * 5), (3, [0, 0, 0, 1, 1])]:
        model: Any = torch.nn.Sequential(layer := Layer(24, 8, bias=False))
        layer.few = few
        model.dtype, model.get_output_embeddings = torch.float32, lambda: None
        loaded = replace(tiny_float32, model=model)
        (row,) = explain_no_divergence(loaded, Shapes(tokens=(1, 2, 3, 17, 40), requests=(), keys=()))
        assert row.labels == labels
        assert row.status == (Status.DIVERGENT if few == 3 else Status.IDENTICAL)
