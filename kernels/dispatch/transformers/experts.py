"""transformers' experts in decoding: which operand of a batched product is the weight.

With "batched_mm" each token's expert weight [N, K] is gathered and multiplied with the token as a vector:
bmm(weights [S, N, K], tokens [S, K, 1]). To a product the last operand is the weight, whose shape may decide an order;
here that would be the token. So while transformers' `_batched_linear` runs, a batched product with vectors is told so,
and takes each vector as one row of the product with its weight, which is what the grouped product of prefill does.

Where there is no such function (another transformers), and while torch.compile traces, the product is that of any
`bmm`: no less invariant, but in float32 on a CPU not in the bits of the grouped product.
"""

from __future__ import annotations

import functools
import sys
from typing import Any

import torch

from nondet.kernels.dispatch.state import count, weights_first

__all__ = ["install", "uninstall"]

_MODULE, _NAME = "transformers.integrations.moe", "_batched_linear"
_installed: list[Any] = []  # [the function as it was], while installed


def install() -> None:
    """Stand in for it, if that module is imported."""
    module = sys.modules.get(_MODULE)
    if module is None or _installed or not hasattr(module, _NAME):
        return
    _installed.append(getattr(module, _NAME))
    setattr(module, _NAME, _telling(_installed[0]))


def uninstall() -> None:
    """Put back what was there; nothing if nothing was installed. A thread inside a stand-in ends in it undisturbed."""
    if _installed:
        original, module = _installed.pop(), sys.modules.get(_MODULE)
        if module is not None:
            setattr(module, _NAME, original)


def _telling(original: Any) -> Any:
    @functools.wraps(original)
    def batched_linear(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            _note_traced()
            return original(*args, **kwargs)
        before, weights_first.active = weights_first.active, True
        try:
            return original(*args, **kwargs)
        finally:
            weights_first.active = before

    return batched_linear


def _note_traced() -> None:
    """Count once for each trace; a compiler takes what this returns as a constant, and does not look inside."""
    count("at_risk", "transformers experts, compiled: batched products not in the grouped product's bits")


_note_traced._dynamo_marked_constant = True  # type: ignore[attr-defined]  # as torch.compiler.assume_constant_result
