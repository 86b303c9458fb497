"""A model's first use ahead of time: what its layers would compile and prove when they first meet a number of tokens.

The layers are called as a forward pass calls them, under whatever is on, so that plans, certificates and compiled
kernels are there afterwards: before a clock runs, before requests come, before a CUDA graph is captured, where nothing
can be proven. Attention and whatever is no linear layer and no norm is prepared by a forward pass alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

from nondet.core.launch import FirstUses, first_uses

__all__ = ["Progress", "prepare"]

Progress = Callable[[int, int, FirstUses], None]


def prepare(
    model: Any, tokens: Iterable[int], requests: Iterable[int] | None = None, progress: Progress | None = None
) -> FirstUses:
    """Call each kind of linear layer and norm of the model once at each size.

    Args:
        model: With linear layers as torch.nn.Linear, and norms as modules with a weight [H] whose class is called
            ...Norm, as transformers has them.
        tokens: Query tokens of a step: rows of every layer but the output projection.
        requests: Rows of the output projection, one for each request of a step; None: as `tokens`.
        progress: Called with (calls done, calls, what was proven and compiled so far) before each call.

    Returns:
        What was proven and compiled.
    """
    sizes = sorted(set(tokens))
    ends = sizes if requests is None else sorted(set(requests))
    calls = [(module, width, size) for module, width, last in _kinds(model) for size in (ends if last else sizes)]
    with first_uses() as uses, torch.no_grad():
        for done, (module, width, size) in enumerate(calls):
            if progress is not None:
                progress(done, len(calls), uses)
            weight: torch.Tensor = module.weight
            module(torch.zeros(1, size, width, dtype=weight.dtype, device=weight.device))
        if progress is not None:
            progress(len(calls), len(calls), uses)
    return uses


def _kinds(model: Any) -> Iterator[tuple[Any, int, bool]]:
    """(module, width of its input, whether it is the output projection), one of each kind that kernels tell apart."""
    head = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
    seen = set()
    for module in model.modules():
        weight = getattr(module, "weight", None)
        if not isinstance(weight, torch.Tensor) or weight.is_meta:
            continue
        if isinstance(module, torch.nn.Linear):
            kind: tuple[Any, ...] = (weight.shape, weight.stride(), module.bias is None, module is head)
        elif type(module).__name__.endswith("Norm") and weight.dim() == 1:
            kind = (type(module), weight.shape)
        else:
            continue
        kind += (weight.dtype, weight.device)
        if kind not in seen:
            seen.add(kind)
            yield module, weight.shape[-1], module is head
