"""`rank_free`: a transformers model whose results do not depend on the number of ranks.

Under tensor parallelism a layer that is cut along its rows (o_proj, down_proj) adds up partial sums over the ranks, so
another number of ranks is another order. Inside `rank_free` those layers run as `row_parallel`, which has one order for
1, 2, 4 and 8 ranks. Everything else of a decoder is whole on some rank (columns, heads, norms, the vocabulary's
columns), and the kernels of `batch_invariant()` do not depend on how many of them a rank holds. So you need both:

    with nondet.batch_invariant(), nondet.rank_free(model): ...

On a CPU a library distributes a product's columns by their number, and each may have an order of its own. So a layer
that is cut along its columns (q_proj, gate_proj, lm_head) runs there as 8 products of equal width; one whose width 8
does not divide stays whole, and may depend on the ranks. An embedding that is cut along the vocabulary is a sum of one
number and zeros: exact, except for the sign of a zero.

One rank needs it too, because a plain product has another order.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from nondet.errors import UserError
from nondet.kernels.all_reduce.tree import CHUNKS, row_parallel
from nondet.kernels.dispatch.state import guarded


def row_parallel_layers(model: torch.nn.Module) -> dict[str, torch.nn.Linear]:
    """The layers that the model's own tensor-parallel plan cuts along their rows, by name.

    Raises:
        UserError: the model has no such plan.
    """
    if not any(way == "rowwise" for way in _plan(model).values()):
        raise UserError(
            f"{type(model).__name__} has no tensor-parallel plan with layers cut along their rows",
            "rank_free() takes a transformers model whose config has base_model_tp_plan.",
        )
    return _layers(model, "rowwise")


def _plan(model: torch.nn.Module) -> dict[str, str]:
    config: Any = getattr(model, "config", None)
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    own: Any = getattr(model, "_tp_plan", None)
    return {**(getattr(text, "base_model_tp_plan", None) or {}), **(own if isinstance(own, dict) else {})}


def _layers(model: torch.nn.Module, way: str) -> dict[str, torch.nn.Linear]:
    patterns = [
        re.compile(r"(?:.*\.)?" + re.escape(name).replace(r"\*", r"\d+"))
        for name, planned in _plan(model).items()
        if planned.startswith(way)
    ]
    return {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, torch.nn.Linear) and any(p.fullmatch(name) for p in patterns)
    }


@contextmanager
def rank_free(model: torch.nn.Module) -> Iterator[list[str]]:
    """Run the model's row-parallel layers in class "ranks-tree" inside the `with` block, on one rank or on several.

    On a CPU column-parallel ones run in a fixed number of parts, too.

    The ranks are those that the layers' weights are spread over (DTensor), as `from_pretrained` under a tensor-parallel
    plan leaves them; a plain weight is one rank's. Forward only: with gradients on, a layer refuses.

    Yields:
        The names of the row-parallel layers.

    Raises:
        UserError: the model has no plan; see `row_parallel_layers`.
    """
    rows = row_parallel_layers(model)
    forwards = [(vars(layer), _forward(layer)) for layer in rows.values()]
    columns = (layer for layer in _layers(model, "colwise").values() if layer.weight.device.type == "cpu")
    forwards += [(vars(layer), _in_columns(layer)) for layer in columns]
    before = [own.get("forward") for own, _ in forwards]
    for own, forward in forwards:
        own["forward"] = forward
    try:
        yield list(rows)
    finally:
        for (own, _), earlier in zip(forwards, before, strict=True):
            own["forward"] = earlier
            if earlier is None:
                del own["forward"]


def _forward(layer: torch.nn.Linear) -> Any:
    product = guarded(row_parallel)
    kept: Any = None  # the weight of the next two, because looking them up takes longer than a small product
    weight: Any = None
    group: Any = None

    def forward(x: torch.Tensor) -> torch.Tensor:
        nonlocal kept, weight, group
        if torch.is_grad_enabled():
            raise UserError("rank_free() is forward only", "Run the model under torch.no_grad().")
        if layer.weight is not kept:
            kept = layer.weight
            weight, group = _local(kept)
        bias = None if layer.bias is None else _local(layer.bias)[0]
        out: torch.Tensor = product(_local(x)[0], weight, bias, group)
        return out

    return forward


def _in_columns(layer: torch.nn.Linear) -> Any:
    whole = layer.forward  # transformers' own, where it has cut the layer

    def forward(*args: Any, **kwargs: Any) -> Any:
        group = _local(layer.weight)[1]
        world = 1 if group is None else group.size()
        with _Columns(max(1, CHUNKS // world)):
            return whole(*args, **kwargs)

    return forward


class _Columns(TorchFunctionMode):
    def __init__(self, count: int) -> None:
        super().__init__()
        self.count = count

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not torch.nn.functional.linear or len(args) != 3 or kwargs:
            return func(*args, **(kwargs or {}))
        x, weight, bias = args
        if weight.shape[0] % self.count or any(hasattr(a, "device_mesh") for a in args):
            return func(*args)
        parts = weight.chunk(self.count)
        biases = [None] * self.count if bias is None else bias.chunk(self.count)
        return torch.cat([func(x, part, added) for part, added in zip(parts, biases, strict=True)], -1)


def _local(x: torch.Tensor) -> tuple[torch.Tensor, Any]:
    mesh = getattr(x, "device_mesh", None)
    if mesh is None:
        return x, None
    return x.to_local(), mesh.get_group() if mesh.ndim == 1 else mesh.get_group("tp")  # type: ignore[attr-defined]
