"""A model whose answers do not follow the number of ranks: `rank_free`, around a transformers model.

Under tensor parallelism a layer that is cut along its rows (o_proj, down_proj) adds up partial sums over the ranks, so
another number of ranks is another order. Inside `rank_free` those layers run as `row_parallel`, which has one order
for 1, 2, 4 and 8 ranks. Everything else of a decoder is whole on some rank: columns, heads, norms, the vocabulary's
columns; of those the kernels of `batch_invariant()` do not depend on how many a rank holds. So both are needed:

    with nondet.batch_invariant(), nondet.rank_free(model): ...

One rank needs it as much as four: what is compared is the order, and a plain product has another.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from nondet.errors import UserError
from nondet.kernels.all_reduce.row_parallel import row_parallel
from nondet.kernels.dispatch.state import guarded

__all__ = ["rank_free", "row_parallel_layers"]


def row_parallel_layers(model: torch.nn.Module) -> dict[str, torch.nn.Linear]:
    """The layers that the model's own tensor-parallel plan cuts along their rows, by name.

    Raises:
        UserError: the model has no such plan.
    """
    config: Any = getattr(model, "config", None)
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    plan: dict[str, str] = getattr(text, "base_model_tp_plan", None) or {}
    patterns = [
        re.compile(r"(?:.*\.)?" + re.escape(name).replace(r"\*", r"\d+"))
        for name, way in plan.items()
        if way == "rowwise"
    ]
    if not patterns:
        raise UserError(
            f"{type(model).__name__} has no tensor-parallel plan with layers cut along their rows",
            "rank_free() takes a transformers model whose config has base_model_tp_plan.",
        )
    return {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, torch.nn.Linear) and any(p.fullmatch(name) for p in patterns)
    }


@contextmanager
def rank_free(model: torch.nn.Module) -> Iterator[list[str]]:
    """Run the model's row-parallel layers in class "ranks-tree" inside the `with` block, on one rank or on several.

    The ranks are those that the layers' weights are spread over (DTensor), as `from_pretrained` under a tensor-parallel
    plan leaves them; a plain weight is one rank's. Forward only: with gradients on, a layer refuses.

    Yields:
        The names of the layers.

    Raises:
        UserError: the model has no plan; see `row_parallel_layers`.
    """
    layers = row_parallel_layers(model)
    before = {name: layer.__dict__.get("forward") for name, layer in layers.items()}
    for layer in layers.values():
        layer.__dict__["forward"] = _forward(layer)
    try:
        yield list(layers)
    finally:
        for name, layer in layers.items():
            if before[name] is None:
                del layer.__dict__["forward"]
            else:
                layer.__dict__["forward"] = before[name]


def _forward(layer: torch.nn.Linear) -> Any:
    product = guarded(row_parallel)

    def forward(x: torch.Tensor) -> torch.Tensor:
        if torch.is_grad_enabled():
            raise UserError("rank_free() is forward only", "Run the model under torch.no_grad().")
        weight, group = _local(layer.weight)
        bias = None if layer.bias is None else _local(layer.bias)[0]
        out: torch.Tensor = product(_local(x)[0], weight, bias, group)
        return out

    return forward


def _local(x: torch.Tensor) -> tuple[torch.Tensor, Any]:
    """This rank's part of a tensor, and the group that it is spread over; None for a plain tensor."""
    mesh = getattr(x, "device_mesh", None)
    if mesh is None:
        return x, None
    return x.to_local(), mesh.get_group() if mesh.ndim == 1 else mesh.get_group("tp")  # type: ignore[attr-defined]
