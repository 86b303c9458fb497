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
    for one, other in zip(got, wanted, strict=True):
        if one.shape != other.shape or one.dtype != other.dtype:
            return f"it returned {_described(out)}, where stock returns {_described(expected)}"
        if not one.dtype.is_floating_point or not one.numel():
            continue
        scale = torch.linalg.vector_norm(other, dtype=torch.float32)
        apart = float(torch.linalg.vector_norm(one.float() - other.float()) / scale.clamp_min(1e-30))
        bound = max(_LEAST, _ROUNDINGS * torch.finfo(one.dtype).eps)
        if not apart <= bound:  # NaN is not
            return f"its result is not stock's: relative difference {apart:.3g}, and roundings explain {bound:.2g}"
    return None


def _tensors(x: Any) -> tuple[torch.Tensor, ...] | None:
    found = x if isinstance(x, tuple | list) else (x,)
    return tuple(found) if found and all(isinstance(one, torch.Tensor) for one in found) else None


def _described(x: Any) -> str:
    found = _tensors(x)
    if found is None:
        return type(x).__name__
    return ", ".join(f"{str(one.dtype).removeprefix('torch.')} {list(one.shape)}" for one in found)
