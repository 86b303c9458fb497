"""torch's own CPU kernels, called directly while our functions are registered for their operators.

Our kernels call torch's in small pieces. Under `batch_invariant()` the dispatcher would pass each such call through our
function for the operator, which costs two microseconds, many times per layer.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

_NAMES = ("mm", "addmm", "bmm", "_softmax", "mkldnn::_linear_pointwise")

_CPU = torch._C.DispatchKeySet(torch._C.DispatchKey.CPU)
_kernels: dict[str, Callable[..., Any]] = {}


def keep() -> None:
    """Look the kernels up, once. Call it while none of our functions is registered for their operators."""
    for name in () if _kernels else _NAMES:
        qualified = name if "::" in name else f"aten::{name}"
        kernel = torch._C._dispatch_get_computed_kernel_for_dispatch_key(qualified, torch._C.DispatchKey.CPU)
        _kernels[name] = kernel.call_boxed


def call(name: str, *args: Any) -> torch.Tensor:
    """aten's `name` ("mm"), or oneDNN's, by torch's own CPU kernel; it records no gradient."""
    if not _kernels:
        keep()
    out: torch.Tensor = _kernels[name](_CPU, *args)
    return out
