"""A call under watch: what it gave is held against the oracle, by number, shape, dtype and value."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from nondet.core.watch import Answers, Watch
from nondet.errors import WrongResultError
from nondet.kernels import reference


def watched(call: Any, operator: str = "linear") -> Watch:
    watch = Watch(call, Answers(operator, getattr(reference, operator)))
    watch.checking = True
    return watch


def linear(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return x @ weight.T


X, WEIGHT = torch.ones(3, 8), torch.ones(4, 8)


@pytest.mark.parametrize(
    ("made", "why"),
    [
        (lambda out: [out, out], "linear gave 2 results, not 1"),
        (lambda out: out[:2], r"linear gave the shape \(2, 4\), not \(3, 4\)"),
        (lambda out: out.double(), "linear gave torch.float64 for torch.float32"),
        (lambda out: 1.0, "the result is a float, not a tensor"),
    ],
)
def test_a_result_of_another_form_is_wrong(made: Any, why: str) -> None:
    """Said with both, as a wrong result and not as a failure; the same in the oracle's form is none."""
    with pytest.raises(WrongResultError, match=why):
        watched(lambda x, weight: made(linear(x, weight))).call(X, WEIGHT)
    sound = watched(lambda x, weight: [linear(x, weight)])
    sound.call(X, WEIGHT)
    assert (sound.fault, len(sound.repeated())) == ("", 1)


def test_several_results_are_each_held_against_the_oracle() -> None:
    """One of two is missing, or one too many."""
    operands = torch.ones(3, 8), torch.ones(3, 8), torch.ones(8)
    whole = tuple(x.float() for x in reference.rms_norm_residual(*operands))
    assert len(whole) == 2
    for results in (whole[:1], (*whole, whole[0])):
        with pytest.raises(WrongResultError, match=f"gave {len(results)} results, not 2"):
            watched(lambda *_, results=results: results, "rms_norm_residual").call(*operands)
    watch = watched(lambda *_: whole, "rms_norm_residual")
    watch.call(*operands)
    assert watch.fault == ""
    assert watch.accuracy is not None
    assert watch.accuracy.elements == 2 * 24


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf"), 8.5])
def test_a_value_that_the_oracle_does_not_have_is_a_fault(value: float) -> None:
    """A single one of twelve; of the oracle's own infinity nothing is asked."""

    def off(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        out = linear(x, weight)
        out[1, 2] = value
        return out

    watch = watched(off)
    watch.call(X, WEIGHT)
    assert watch.fault.startswith("1 of 12 elements are ")
    assert ("NaN or infinite where the oracle is not" in watch.fault) == (value != 8.5)
    shared = watched(linear)
    shared.call(X * value, WEIGHT)
    assert shared.fault == ""
