"""Hashes of rows: equal for equal bits, whatever the batch; different for what an XOR or a norm would not see."""

from __future__ import annotations

import pytest
import torch

from nondet.core.compare import row_hashes, weights_digest
from nondet.errors import UserError
from nondet.sampling.plan import Session
from nondet.trace.capture import CoarseCapture
from nondet.trace.search import logits_at_fault


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.int64])
def test_a_row_has_one_hash_in_every_batch(dtype: torch.dtype) -> None:
    """Alone, among others and at another place a row has the same hash: else the tool would be what it looks for."""
    x = torch.randint(-50, 50, (37, 129)).to(dtype)
    whole = row_hashes(x)
    assert torch.equal(whole[5:6], row_hashes(x[5:6]))
    order = torch.randperm(37)
    assert torch.equal(whole[order], row_hashes(x[order]))
    assert torch.equal(whole, row_hashes(x.reshape(37, 3, 43)))


def test_a_last_bit_a_swap_and_a_sign_of_zero_change_it() -> None:
    """Differences that sums of magnitudes or XORs miss."""
    x = torch.rand(1, 64)
    last = x.clone()
    last.view(torch.int32)[0, 17] ^= 1
    swapped = x.clone()
    swapped[0, [3, 9]] = x[0, [9, 3]]
    zeros = torch.zeros(1, 64)
    signed = zeros.clone()
    signed[0, 5] = -0.0
    assert row_hashes(x) != row_hashes(last)
    assert row_hashes(x) != row_hashes(swapped)
    assert row_hashes(zeros) != row_hashes(signed)


def test_every_nan_is_one() -> None:
    """A NaN's payload carries no result."""
    one, two = torch.full((1, 4), float("nan")), torch.full((1, 4), float("nan"))
    two.view(torch.int32)[0, 2] ^= 7
    assert row_hashes(one) == row_hashes(two)


def test_the_weights_digest_sees_one_bit_of_one_weight() -> None:
    """The digest is over bits and names, not over sizes."""
    model = torch.nn.Linear(33, 7)
    before = weights_digest(model)
    assert before == weights_digest(model)
    with torch.no_grad():
        model.weight.view(torch.int32)[3, 3] ^= 1
    assert weights_digest(model) != before


def test_a_hidden_state_of_another_form_is_one_line() -> None:
    """Gemma 3n keeps several predictions of each token: said with its shape, no error of numpy's."""
    capture = CoarseCapture("r0")
    with pytest.raises(UserError, match=r"has shape \(4, 1, 6, 8\), not one row for each token"):
        capture._input(None, (torch.zeros(4, 1, 6, 8),), {})


@pytest.mark.parametrize(
    ("without", "captured", "why"),
    [
        ((2.0, 1.0), (2.0, 1.0), ""),
        ((2.0, 0.0), (2.0, -0.0), "the logits of r0 change when it is captured"),
        ((float("nan"), 1.0), (float("nan"), 1.0), "logits of r0 are NaN or infinite"),
        ((float("inf"), 1.0), (float("inf"), 1.0), "logits of r0 are NaN or infinite"),
        ((2.0, float("-inf")), (2.0, float("-inf")), ""),  # a vocabulary's masked rows
    ],
)
def test_logits_are_held_against_each_other_by_bits(
    without: tuple[float, float], captured: tuple[float, float], why: str
) -> None:
    """NaN agrees with itself, so that capture is not blamed for it; a sign of zero does not."""
    bare, seen = (
        Session(outcomes=[], steps=1, tokens=1, seconds=1.0, tops={"r0": [(*top, 7, 8)]}) for top in (without, captured)
    )
    assert logits_at_fault(bare, seen).startswith(why)
    assert bool(logits_at_fault(bare, seen)) == bool(why)
