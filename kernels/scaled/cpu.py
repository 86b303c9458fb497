"""FP8 products on a CPU, in plain torch: exact sums of 128 products, added in float32 in one order.

The numbers of float8_e4m3fn are multiples of 2^-9 below 2^9, so products are multiples of 2^-18 below 2^18 and 128 of
them add up exactly in float64, in any order and by any library: 43 of its 53 bits. A float8_e5m2 number is split first,
into numbers of at least 1 and smaller ones; each part has exact sums of its own, which are added in float64 in one
order. So a sum of 128 does not depend on a library's choice of tiles, threads or splits. The rest is elementwise:
rounded to float32, times its scales where they are in blocks, added to a float32 total in the order of k, times the
scales where they are per row or per tensor, rounded to the result's dtype. That is the order of DeepGEMM's and
CUTLASS's kernels, whose partial sums are promoted to float32 after every 128 k, with the sums themselves exact. A row's
bits depend only on the row, its scales and the weight.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable

import torch

from nondet.core.launch import note
from nondet.kernels.scaled.functions import BLOCK, FLOAT8, checked, laid_out


def scaled_matmul(
    a: torch.Tensor,
    b: torch.Tensor,
    scale_a: torch.Tensor,
    scale_b: torch.Tensor,
    dtype: torch.dtype,
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """a [M, K] times b [K, N], float8_e4m3fn or float8_e5m2, with float32 scales -> [M, N] of the dtype.

    Scales per tensor, per row, or in blocks (1x128 of a; 128x128, or 128x1, of b); see `nondet.kernels.reference`. The
    order and why it is invariant: above. A bias [N] is added in float32 before the one rounding. Raises ValueError:
    shapes that do not fit; NotImplementedError: other dtypes, or another device.
    """
    if a.device.type != "cpu":
        raise NotImplementedError(f"it runs on a CPU, not on {a.device.type}")
    note("scaled_matmul[exact sums of 128]")
    return in_order(a, b, scale_a, scale_b, dtype, bias)


def in_order(
    a: torch.Tensor,
    b: torch.Tensor,
    scale_a: torch.Tensor,
    scale_b: torch.Tensor,
    dtype: torch.dtype,
    bias: torch.Tensor | None = None,
    *,
    interval: int = BLOCK,
    splits: int = 1,
    product: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] = torch.matmul,
) -> torch.Tensor:
    """`scaled_matmul` in this order or, to distinguish orders, in others; on any device.

    Args:
        interval: k of one exact sum; 0: all of K. With scales in blocks it must divide 128.
        splits: K in this many parts of whole intervals, each with a total of its own; they are added in order.
        product: Of float64 [M, k] and [k, N]; any gives the same bits, as long as it rounds no sum that fits.
    """
    blocked = checked(a, b, scale_a, scale_b, dtype)
    (M, K), N = a.shape, b.shape[1]
    left, right = laid_out(scale_a, scale_b, (M, K, N))
    step = interval or max(K, 1)
    step = min(step, BLOCK) if blocked else step
    starts = range(0, K, step)
    each = -(-len(starts) // splits)
    total = torch.zeros(M, N, dtype=torch.float32, device=a.device)
    for first in range(0, len(starts), max(each, 1)):
        mine = torch.zeros(M, N, dtype=torch.float32, device=a.device)
        for k in starts[first : first + each]:
            sum_of = exact(a[:, k : k + step], b[k : k + step], product).float()
            if blocked:
                sum_of = sum_of * (left[:, k // BLOCK, None] * right[k // BLOCK])
            mine = mine + sum_of
        total = mine if splits == 1 else total + mine
    if not blocked:
        total = total * (left * right)
    if bias is not None:
        total = total + bias.float()
    return total.to(dtype)


def exact(
    a: torch.Tensor, b: torch.Tensor, product: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] = torch.matmul
) -> torch.Tensor:
    """a [M, k] times b [k, N] in float64: exact, or for float8_e5m2 a few exact sums added in one order."""
    parts = [(x.double(),) if x.dtype == FLOAT8[0] else _halves(x.double()) for x in (a, b)]
    total = torch.zeros(a.shape[0], b.shape[1], dtype=torch.float64, device=a.device)
    for left, right in itertools.product(*parts):
        total = total + product(left, right)
    if FLOAT8[1] in (a.dtype, b.dtype) and not torch.isfinite(total).all():
        # an infinity times a part that is zero would be NaN; finite elements keep their bits
        total = torch.where(torch.isfinite(total), total, a.double() @ b.double())
    return total


def _halves(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """x split into numbers of at least 1 and smaller ones: multiples of 2^-2 below 2^16, and of 2^-16 below 1."""
    small = x.abs() < 1
    return x.masked_fill(small, 0.0), x.masked_fill(~small, 0.0)


def anchor(
    a: torch.Tensor, b: torch.Tensor, scale_a: torch.Tensor, scale_b: torch.Tensor, dtype: torch.dtype
) -> torch.Tensor:
    """The class without any library's product: one k after another, each product exact, elementwise in float64."""
    return in_order(a, b, scale_a, scale_b, dtype, product=_one_by_one)


def _one_by_one(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    total = torch.zeros(a.shape[0], b.shape[1], dtype=torch.float64, device=a.device)
    for k in range(a.shape[1]):
        total = total + a[:, k, None] * b[k]
    return total


def scaled_grouped_matmul(
    x: torch.Tensor,
    weight: torch.Tensor,
    scale_x: torch.Tensor,
    scale_weight: torch.Tensor,
    offsets: torch.Tensor,
    dtype: torch.dtype,
    *,
    product: Callable[..., torch.Tensor] = scaled_matmul,
) -> torch.Tensor:
    """Rows offsets[g - 1] ... offsets[g] - 1 of x [R, K] (scales [R]) times weight[g] of [G, K, N] ([G, N]) -> [R, N].

    Each expert's rows by `product`, one expert after another: a row has the bits of its own plain product. Later rows
    are zeros. Offsets are read on the host. Errors as `scaled_matmul`; ValueError also for offsets that do not ascend.
    """
    ends = [0, *offsets.tolist()]
    if weight.dim() != 3 or len(ends) != len(weight) + 1 or ends != sorted(ends) or ends[-1] > len(x):
        raise ValueError(f"{len(weight)} weights and rows that end at {ends[1:]} do not fit {len(x)} rows")
    out = torch.zeros(len(x), weight.shape[2], dtype=dtype, device=x.device)
    for g, (start, end) in enumerate(itertools.pairwise(ends)):
        if start < end:
            scales = scale_x[start:end, None], scale_weight[g][None]
            out[start:end] = product(x[start:end], weight[g], *scales, dtype)
    return out
