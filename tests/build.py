"""What the tests of several files are made of: operands, and how far an implementation may be from float64."""

from __future__ import annotations

import math

import torch

from nondet.core import compare, inputs

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def bell(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    """Ordinary operands, on a GPU where there is one."""
    return inputs.make("bell", shape, dtype, DEVICE, inputs.generator(seed, DEVICE))


def rand(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Numbers in [-1, 1), always the same for one shape, on the CPU."""
    return (torch.rand(shape, generator=torch.Generator().manual_seed(sum(shape))) * 2.0 - 1.0).to(dtype)


def error(out: torch.Tensor, ref: torch.Tensor) -> float:
    """||out - ref|| / ||ref||, as `accuracy_bound` bounds it."""
    return compare.error_against(out, ref).relative_norm


def accuracy_bound(dtype: torch.dtype, terms: int) -> float:
    """Bound on ||out - ref|| / ||ref|| for ordinary inputs: one rounding to `dtype` plus a float32 accumulation.

    The accumulation term is the probabilistic bound of Higham & Mary (2019, doi 10.1137/18M1226312), sqrt(n) u with a
    factor of 8 for the confidence and for products of rounded operands; u is the unit roundoff of float32, and of
    float64 for float64. It does not hold for inputs that cancel: those are judged against stock on the same inputs.
    """
    accumulator = torch.float64 if dtype == torch.float64 else torch.float32
    unit = torch.finfo(accumulator).eps / 2
    return torch.finfo(dtype).eps / 2 + 8.0 * math.sqrt(terms) * unit
