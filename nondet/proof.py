"""The comparison that a certificate rests on: a member against its class's anchor, by bits, on the device."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch

from nondet.compare import difference, same
from nondet.inputs import generator, make, product_operands

__all__ = ["BIAS_SIZE", "PRODUCT_INPUTS", "product_inputs", "prove"]

# "order" first: its exact result is zero, so that what comes out is the rounding errors of the order and nothing else.
# "order-wide" is the same with exponents further apart, for sums of few terms.
PRODUCT_INPUTS = ("order", "order-wide", "wide", "cancel", "outlier", "bell")

# A bias of the size of the rounding errors: a larger one would hide them where the result is rounded to bfloat16.
BIAS_SIZE = {"order": 2.0**-14, "order-wide": 2.0**-4}


def prove(
    member_call: Callable[..., torch.Tensor],
    anchor_call: Callable[..., torch.Tensor],
    inputs: Iterable[tuple[str, tuple[torch.Tensor | None, ...]]],
) -> tuple[bool, str]:
    """Whether the member gives the anchor's bits on all of the inputs, and the evidence in words.

    Args:
        member_call: member_call(*tensors) -> the result; its shape and dtype are the anchor's.
        anchor_call: The same of the anchor.
        inputs: (name, tensors) one after the other, as `product_inputs` makes them. Both calls get the very same
            tensors and must not write to them.

    Returns:
        (True, what was compared) or (False, where it parted first). A member that fails to
        run, or that gives another shape or dtype, has not proven anything: (False, its words). So has one that was
        given no inputs, or nothing but NaN and infinities.

    Raises:
        torch.cuda.OutOfMemoryError: memory did not suffice. That says nothing about the member.
    """
    compared, kinds = 0, []
    for name, tensors in inputs:
        expected = anchor_call(*tensors)
        try:
            got = member_call(*tensors)
            alike = same(expected, got)
        except torch.cuda.OutOfMemoryError:
            raise
        except Exception as error:  # noqa: BLE001 - whatever a library raises, it is not a proof
            said = (str(error).strip() or type(error).__name__).splitlines()[0][:300]
            return False, f"{name}: {type(error).__name__}: {said}"
        if not bool(alike.all()):
            apart = difference(expected, got)
            return False, (
                f"{name}: {apart.mismatched} of {apart.compared} elements differ, first at {apart.first_mismatch}, "
                f"by up to {apart.max_ulp} ULP" + (f", {apart.nonfinite} not finite" if apart.nonfinite else "")
            )
        compared += int(torch.isfinite(expected).sum())  # NaN and infinities are the same in any order
        kinds.append(name)
    if not compared:
        return False, f"nothing finite was compared ({', '.join(kinds) or 'no inputs'})"
    return True, f"{compared} elements equal on {', '.join(kinds)}"


def product_inputs(
    m: int,
    n: int,
    k: int,
    dtype: torch.dtype,
    device: str | torch.device,
    *,
    bias: bool = False,
    batch: int = 1,
    kinds: Iterable[str] = PRODUCT_INPUTS,
    seed: int = 0,
) -> Iterable[tuple[str, tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]]]:
    """Operands of a product over K, one kind after another: (kind, (x [m, k], weight [n, k], bias [n] or None)).

    With batch > 1 x is [batch, m, k] and weight [batch, n, k]. Both are contiguous: a caller that is about another
    layout makes it of them (weight.T for "tn"). Made on the device, one kind at a time.
    """
    for kind in kinds:
        x, weight = product_operands(kind, (batch * m, k), (batch * n, k), dtype, device, seed)
        with_bias = None
        if bias:
            with_bias = make("bell", (n,), dtype, device, generator(seed + 2, device)) * BIAS_SIZE.get(kind, 1.0)
        if batch > 1:
            x, weight = x.view(batch, m, k), weight.view(batch, n, k)
        yield kind, (x, weight, with_bias)
