"""Telling a wrong result from a rounding: inputs whose answer is the same in every order of additions."""

from __future__ import annotations

from typing import Any

import torch

from nondet.compare import identical
from nondet.inputs import EXACT
from nondet.probes.base import Case

__all__ = ["exactness"]


def exactness(case: Case, reference: torch.Tensor | None, results: list[torch.Tensor]) -> dict[str, Any]:
    """{"exact": whether every class is the known answer, rounded once}, where the inputs are exact; {} elsewhere.

    Args:
        reference: The answer in float64, as `Probe.reference` gives it.
        results: One of each class.
    """
    if case.inputs not in EXACT or reference is None:
        return {}
    return {"exact": all(r.shape == reference.shape and identical(r, reference.to(r.dtype)) for r in results)}
