"""torch's own CPU kernels, called straight while functions of ours stand under their operators.

Kernels of ours call torch's in small pieces. Under `batch_invariant()` each such call would go through the dispatcher
into our function for the operator, which passes it on to the original: two microseconds, many times a layer. What is
called here is that original; outside of a block it is torch's public function, which ends in the same kernel.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

# Operators that are called here, of aten where no namespace is named.
NAMES = (
    *("mm", "addmm", "mm.out", "addmm.out", "bmm.out", "mul.Tensor", "add.Tensor", "silu", "_softmax.out", "amax"),
    "mkldnn::_linear_pointwise",
)

_CPU = torch._C.DispatchKeySet(torch._C.DispatchKey.CPU)
_kept: dict[str, Callable[..., Any]] = {}
_used: Mapping[str, Callable[..., Any]] = {}


def keep(kernels: Mapping[str, Callable[..., Any]]) -> None:
    """Remember the boxed originals of NAMES. To be called while nothing of ours stands under them."""
    _kept.update(kernels)


def stand_under(whether: bool) -> None:
    """From now on, functions of ours stand under torch's operators, or don't."""
    global _used
    _used = _kept if whether else {}


def mm(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor) -> None:
    """torch.mm into out."""
    kernel = _used.get("mm.out")
    if kernel is None:
        torch.mm(a, b, out=out)
    else:
        kernel(_CPU, a, b, out=out)


def product(a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """torch.mm, or torch.addmm where there is a bias."""
    kernel = _used.get("mm" if bias is None else "addmm")
    if kernel is None:
        return torch.mm(a, b) if bias is None else torch.addmm(bias, a, b)
    out: torch.Tensor = kernel(_CPU, a, b) if bias is None else kernel(_CPU, bias, a, b)
    return out


def addmm(bias: torch.Tensor, a: torch.Tensor, b: torch.Tensor, out: torch.Tensor) -> None:
    """torch.addmm into out."""
    kernel = _used.get("addmm.out")
    if kernel is None:
        torch.addmm(bias, a, b, out=out)
    else:
        kernel(_CPU, bias, a, b, out=out)


def bmm(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor) -> None:
    """torch.bmm into out."""
    kernel = _used.get("bmm.out")
    if kernel is None:
        torch.bmm(a, b, out=out)
    else:
        kernel(_CPU, a, b, out=out)


def inner_product(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """oneDNN's inner product: x [..., K], weight [N, K] in torch's layout or in oneDNN's, bias [N] -> [..., N]."""
    kernel = _used.get("mkldnn::_linear_pointwise")
    out: torch.Tensor
    if kernel is None:
        out = torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
    else:
        out = kernel(_CPU, x, weight, bias, "none", [], "")
    return out


def mul(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """torch.mul."""
    kernel = _used.get("mul.Tensor")
    product: torch.Tensor = a * b if kernel is None else kernel(_CPU, a, b)
    return product


def add(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """torch.add."""
    kernel = _used.get("add.Tensor")
    total: torch.Tensor = a + b if kernel is None else kernel(_CPU, a, b)
    return total


def softmax(x: torch.Tensor, out: torch.Tensor) -> None:
    """torch.softmax over the last axis into out."""
    kernel = _used.get("_softmax.out")
    if kernel is None:
        torch.softmax(x, -1, out=out)
    else:
        kernel(_CPU, x, -1, False, out=out)


def silu(x: torch.Tensor) -> torch.Tensor:
    """torch's silu."""
    kernel = _used.get("silu")
    out: torch.Tensor = torch.nn.functional.silu(x) if kernel is None else kernel(_CPU, x)
    return out


def amax(x: torch.Tensor) -> torch.Tensor:
    """The largest over the last axis."""
    kernel = _used.get("amax")
    out: torch.Tensor = x.amax(-1) if kernel is None else kernel(_CPU, x, [-1], False)
    return out
