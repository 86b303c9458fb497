"""Is what is timed the operator at all? A kernel that computes nothing would win every comparison."""

from __future__ import annotations

from typing import Any

import torch

__all__ = ["fault"]

# Rounding differs between orders by a few units in the last place. This asks for the same operator, not for accuracy,
# which `nondet probe` compares with float64: so the bound is loose, and a wrong result is far outside of it.
_ROUNDINGS = 8
_LEAST = 1e-3


def fault(out: Any, expected: Any) -> str | None:
    """Why `out` is not the result that stock's `expected` is, or None: shapes, dtypes and, loosely, values.

    Both are a tensor or a tuple of tensors on one device; nothing but one number a tensor is copied to the host.
    """
    got, wanted = _tensors(out), _tensors(expected)
    if got is None or wanted is None or len(got) != len(wanted):
        return f"it returned {_described(out)}, where stock returns {_described(expected)}"
    for result, reference in zip(got, wanted, strict=True):
        if result.shape != reference.shape or result.dtype != reference.dtype:
            return f"it returned {_described(out)}, where stock returns {_described(expected)}"
        if not result.dtype.is_floating_point or not result.numel():
            continue
        scale = torch.linalg.vector_norm(reference, dtype=torch.float32)
        apart = float(torch.linalg.vector_norm(result.float() - reference.float()) / scale.clamp_min(1e-30))
        bound = max(_LEAST, _ROUNDINGS * torch.finfo(result.dtype).eps)
        if not apart <= bound:  # NaN is not
            return f"its result is not stock's: relative difference {apart:.3g}, and roundings explain {bound:.2g}"
    return None


def _tensors(x: Any) -> tuple[torch.Tensor, ...] | None:
    outputs = x if isinstance(x, tuple | list) else (x,)
    return tuple(outputs) if outputs and all(isinstance(output, torch.Tensor) for output in outputs) else None


def _described(x: Any) -> str:
    tensors = _tensors(x)
    if tensors is None:
        return type(x).__name__
    return ", ".join(f"{str(t.dtype).removeprefix('torch.')} {list(t.shape)}" for t in tensors)
