"""Inputs that operators are asked about: ordinary ones, and the hard ones that rounding errors hide from.

Built from `torch.rand` alone, whose bits do not depend on the CPU's instruction set (those of `randn` do), so that one
seed means one input on every CPU. A GPU's generator draws other numbers for the same seed; rows carry their device.
"""

from __future__ import annotations

import torch

__all__ = ["KINDS", "generator", "make"]

KINDS = {
    "bell": "sum of three uniforms, mean 0, variance 1: ordinary activations",
    "wide": "exponents spread evenly over 2^-12 ... 2^12: small terms are lost or kept depending on the order",
    "cancel": "pairs that nearly cancel along the last axis: the result is made of rounding errors",
    "outlier": "bell, with one in 256 elements 1,000 times larger, as in real activations",
}


def generator(seed: int, device: str | torch.device) -> torch.Generator:
    """A seeded generator on the device."""
    return torch.Generator(device=device).manual_seed(seed)


def make(
    kind: str, shape: tuple[int, ...], dtype: torch.dtype, device: str | torch.device, rng: torch.Generator
) -> torch.Tensor:
    """A tensor of the kind.

    Args:
        kind: A key of `KINDS`.
        shape: Any shape; `cancel` pairs neighbours along the last axis.
        dtype: Floating dtype of the result; the numbers are drawn in float32.
        device: Where it is made; `rng` must live there.

    Raises:
        ValueError: unknown kind.
    """

    def uniform() -> torch.Tensor:
        return torch.rand(shape, generator=rng, device=device, dtype=torch.float32)

    def bell() -> torch.Tensor:
        x = uniform()
        x += uniform()
        x += uniform()
        return x.sub_(1.5).mul_(2.0)

    if kind == "bell":
        return bell().to(dtype)
    if kind == "wide":
        sign = torch.where(uniform() < 0.5, -1.0, 1.0)
        exponent = torch.floor(uniform() * 25.0) - 12.0
        return (torch.ldexp(uniform() + 1.0, exponent) * sign).to(dtype)
    if kind == "cancel":
        x = bell() * 64.0
        pairs = shape[-1] // 2
        x[..., 1 : 2 * pairs : 2] = -x[..., 0 : 2 * pairs : 2] * (1.0 + (uniform()[..., :pairs] - 0.5) * 2.0**-6)
        return x.to(dtype)
    if kind == "outlier":
        return torch.where(uniform() < 1.0 / 256.0, bell() * 1000.0, bell()).to(dtype)
    raise ValueError(f"unknown input kind {kind!r}; known: {', '.join(KINDS)}")
