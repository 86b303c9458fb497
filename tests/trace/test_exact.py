"""A bug told from rounding: calls on ones and small integers, sound ones in any order and broken ones."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from nondet.trace.replays import RecordedCall, exact


def product(function: Callable[..., torch.Tensor], dtype: torch.dtype) -> RecordedCall:
    """Row 3 of 7 rows times a weight."""
    x, weight = torch.randn(7, 1000).to(dtype), torch.randn(24, 1000).to(dtype)
    roles: dict[str, Any] = {"0": ("tokens", ""), "1": ("", ""), "": ("tokens", "")}
    return RecordedCall(function, (x, weight), {}, roles, "tokens", 3, 7, range(0), 0)


def attention(function: Callable[..., torch.Tensor], dtype: torch.dtype) -> RecordedCall:
    """The last of 5 queries over 133 keys of its own."""
    q, k, v = (torch.randn(1, 2, n, 16).to(dtype) for n in (5, 133, 133))
    roles: dict[str, Any] = {
        "0": ("", "", "tokens", ""),
        "1": ("", "", "keys", ""),
        "2": ("", "", "keys", ""),
        "": ("", "", "tokens", ""),
    }
    return RecordedCall(function, (q, k, v), {}, roles, "tokens", 4, 5, range(133), 133)


def split(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """K in four parts, each rounded to the format: another order, and as right as the format allows."""
    return sum((F.linear(x[:, i::4], w[:, i::4]) for i in range(1, 4)), F.linear(x[:, ::4], w[:, ::4]))


# The faults below are of one kernel: the float64 one, which the oracle runs, is another and has none. A fault of every
# dtype alike can't be seen this way, and the docstring of `exact` says so.
def lost_tail(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """The last 40 of K are missing."""
    return F.linear(x, w) if x.dtype == torch.float64 else F.linear(x[:, :-40], w[:, :-40])


def flipped(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """A part of K has the wrong sign."""
    sign = 1 if x.dtype == torch.float64 else -1
    return F.linear(x[:, :900], w[:, :900]) + sign * F.linear(x[:, 900:], w[:, 900:])


def lost_keys(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """The last block of keys counts in the sum of weights alone."""
    factor = 1 if q.dtype == torch.float64 else 0
    out: torch.Tensor = F.scaled_dot_product_attention(q, k, torch.cat([v[:, :, :-32], v[:, :, -32:] * factor], 2))
    return out


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("function", [F.linear, split])
def test_rounding_is_no_bug(function: Callable[..., torch.Tensor], dtype: torch.dtype) -> None:
    """Whatever the order, and with partial sums in half precision."""
    if dtype == torch.float16 and function is split:
        dtype = torch.float32  # its sums of ones need 10 bits on the way, as every fp16 sum of 1,000 does
    assert exact(product(function, dtype), "linear").status == "identical"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_a_mean_of_integers_that_cancel_is_no_bug(dtype: torch.dtype) -> None:
    """Near zero the distance in ULP is in the thousands, and means nothing."""
    assert exact(attention(F.scaled_dot_product_attention, dtype), "scaled_dot_product_attention").status == "identical"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("function", [lost_tail, flipped])
def test_a_wrong_sum_is_a_bug(function: Callable[..., torch.Tensor], dtype: torch.dtype) -> None:
    """What is lost or of the wrong sign is beyond rounding."""
    replay = exact(product(function, dtype), "linear")
    assert replay.status == "divergent"
    assert "a bug" in replay.sentence


def test_lost_keys_are_a_bug() -> None:
    """An attention that drops its last block of keys."""
    assert exact(attention(lost_keys, torch.bfloat16), "scaled_dot_product_attention").status == "divergent"
