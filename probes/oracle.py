"""Telling a wrong result from a rounding: inputs whose answer is the same in every order of additions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from nondet.core.compare import identical
from nondet.core.inputs import EXACT
from nondet.probes.base import Case

__all__ = ["exactness"]


def exactness(case: Case, reference: Callable[[], torch.Tensor | None], results: list[torch.Tensor]) -> dict[str, Any]:
    """{"exact": whether every class is the known answer, rounded once}, where the inputs are exact; {} elsewhere.

    Args:
        reference: Gives the answer in float64, as `Probe.reference` does; called where the inputs are exact.
        results: One of each class.
    """
    answer = reference() if case.inputs in EXACT else None
    if answer is None:
        return {}
    return {"exact": all(r.shape == answer.shape and identical(r, answer.to(r.dtype)) for r in results)}
