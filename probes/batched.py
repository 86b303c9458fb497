"""One product among those of other requests in one batched call, as attention that is written out makes it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

import torch

from nondet.core.inputs import product_operands
from nondet.core.measure import Trial
from nondet.probes.base import Case, Options
from nondet.probes.sizes import dtypes, element_bytes, kinds, require_memory

__all__ = ["asked", "cases", "operands", "reference", "trials"]


def asked(options: Options) -> bool:
    """Whether a trace met products in batches."""
    return any(batch for _, batch in options.met)


def cases(options: Options) -> Iterable[Case]:
    """The sizes met, for each kind of input; and one product alone of each size."""
    K, N = options.k or 1, options.n or 1
    B, M = max(batch for _, batch in options.met), max(rows for rows, _ in options.met)
    sizes = sorted({(rows, b) for rows, batch in options.met for b in (1, batch)})
    for dtype in dtypes(options, "matmul", ("float32",)):
        require_memory(options.device, 3 * B * (M * K + K * N + M * N) * (element_bytes(dtype) + 8), f"{B} products")
        for kind in kinds(options, ("bell", "order")):
            yield Case(
                name=f"one product among B of M rows, as a trace met them, K={K} N={N}, {kind}",
                operator="matmul",
                shape={"B": B, "M": M, "N": N, "K": K},
                dtype=dtype,
                varied="batch_size",
                inputs=kind,
                data={"batched": sizes},
            )


def operands(case: Case, device: str, seed: int) -> dict[str, torch.Tensor]:
    """a [B, M, K] and b [B, K, N] of the largest sizes."""
    B, M, K, N = (case.shape[axis] for axis in "BMKN")
    a, b = product_operands(case.inputs, (B * M, K), (B * N, K), case.torch_dtype, device, seed, weight_kind="bell")
    b *= 2.0 ** -round(math.log2(K) / 2)
    return {"a": a.view(B, M, K), "b": b.view(B, N, K).mT.contiguous()}


def trials(case: Case, inputs: Any, operator: Callable[..., torch.Tensor]) -> Iterator[Trial]:
    """The first product's first rows, as many as all sizes have, in calls of each size."""
    for rows, batch in case.data["batched"]:
        value = f"{batch} product{'s' if batch > 1 else ''} of {rows} row{'s' if rows > 1 else ''}"
        yield Trial(value, partial(_first, operator, inputs["a"], inputs["b"], rows, batch, _shared(case)))


def reference(case: Case, inputs: Any) -> torch.Tensor:
    """What is compared, in float64."""
    return inputs["a"][0, : _shared(case)].double() @ inputs["b"][0].double()


def _shared(case: Case) -> int:
    return min(rows for rows, _ in case.data["batched"])


def _first(
    operator: Callable[..., torch.Tensor], a: torch.Tensor, b: torch.Tensor, rows: int, batch: int, shared: int
) -> torch.Tensor:
    return operator(a[:batch, :rows].contiguous(), b[:batch])[0, :shared]
