"""How far an implementation may be from float64."""

from __future__ import annotations

import math

import torch


def accuracy_bound(dtype: torch.dtype, terms: int) -> float:
    """Bound on ||out - ref|| / ||ref|| for ordinary inputs: one rounding to `dtype` plus a float32 accumulation.

    The accumulation term is the probabilistic bound of Higham & Mary (2019, doi 10.1137/18M1226312), sqrt(n) u with a
    factor of 8 for the confidence and for products of rounded operands; u is the unit roundoff of float32, and of
    float64 for float64. It does not hold for inputs that cancel: those are judged against stock on the same inputs.
    """
    accumulator = torch.float64 if dtype == torch.float64 else torch.float32
    unit = torch.finfo(accumulator).eps / 2
    return torch.finfo(dtype).eps / 2 + 8.0 * math.sqrt(terms) * unit
