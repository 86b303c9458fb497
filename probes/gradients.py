"""A gradient over splits of one batch: accumulated over micro-batches, padded and packed in another way."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from msgspec.structs import replace
from torch.utils._pytree import tree_leaves, tree_map

from nondet.core.measure import Trial
from nondet.core.records import Run, Value
from nondet.errors import UserError
from nondet.probes.functions import compare, head_of, name_of, run_of
from nondet.probes.rounding import judged, rounding_of

Loss = Callable[[Any], torch.Tensor]
_FITTED = 2**20  # elements of a gradient to which its parts are fitted
_FITS = 4.0  # times rounding: as near as that, parts make up the whole


def check_gradient(
    loss: Loss,
    batch: Any,
    over: Sequence[int] = (1, 2, 4),
    *,
    combine: str = "mean",
    error: float | None = None,
    name: str = "",
) -> Run:
    """Compare the gradient of a batch with those of its splits, whose parts' gradients are accumulated: consecutive
    requests in each number of parts, then parts of other requests, which are padded or packed otherwise. The arguments
    are those of `nondet.check_gradient`, as are the errors."""
    parts = [x for x in tree_leaves(batch, is_leaf=lambda x: isinstance(x, list)) if isinstance(x, list | torch.Tensor)]
    size, label = len(parts[0]), name or name_of(loss)
    if combine not in ("mean", "sum"):
        raise UserError(f"combine={combine!r} is unknown", "Give 'mean' or 'sum'.")
    if len(set(over)) < 2 or min(over) < 1 or max(over) > size:
        raise UserError(f"over={[*over]} compares nothing of {size} requests", f"Give numbers from 1 to {size}.")
    leaves, mixed = _leaves(loss(batch)), [*range(0, size, 2), *range(1, size, 2)]
    splits: dict[Value, tuple[Sequence[int], int]] = {count: (range(size), count) for count in over}
    splits["other parts"] = (mixed, max(over))
    gradients = partial(_gradients, loss, leaves, size)

    def whole(order: Sequence[int], parts: int) -> torch.Tensor:
        return gradients(batch, order, parts).sum(0) / (parts if combine == "mean" else 1)

    dtype = min((x.dtype for x in leaves), key=lambda d: d.itemsize)
    case, device = f"the gradient of {size} requests in {', '.join(map(str, over))} parts", leaves[0].device.type
    head = head_of(label, case, "micro_batch", device, str(dtype).removeprefix("torch."), M=size)
    row = compare(head, [Trial(value, partial(whole, *split)) for value, split in splits.items()])
    if row.distinct > 1 and not row.replays_parted:
        bound = error
        if bound is None:  # with noise at each sum of the forward and the backward pass
            bound = rounding_of(lambda given: gradients(given, range(size), 1).sum(0), batch, dtype)
        each = [gradients(batch, order, max(over)) for order in (range(size), mixed)]
        look = _look(each, whole(range(size), over[0]), bound or 0.0)
        far = max(x["far"] for x in row.extra["apart"].values())
        row = replace(row, judged=judged(far, bound, dtype, look, own=error is not None))
    compared = {"elements": row.difference.compared if row.difference is not None else 0}
    plan = {"impls": [label], "varied": "micro_batch", "over": list(over), "combine": combine, "error": error}
    return run_of([replace(row, extra=row.extra | compared)], plan, None)


def _look(splits: Sequence[torch.Tensor], whole: torch.Tensor, bound: float) -> str:
    """What looks like the difference: parts that have to be weighed by their tokens, added, or can't make up the whole.
    The parts of each split are fitted to the whole's gradient."""
    step, looks = -(-len(whole) // _FITTED), list[str]()
    target = whole[::step].double().cpu()
    for split in splits:
        parts = split[:, ::step].double().cpu()
        weights = torch.linalg.lstsq(parts.T, target[:, None], driver="gelsd").solution[:, 0]
        if float((weights @ parts - target).abs().max()) > _FITS * bound * float(target.abs().max()):
            return "micro-parts"
        looks.append("micro-sum" if bool((weights > 0.99).all()) else "micro-mean")
    return looks[0]


def _gradients(
    loss: Loss, leaves: Sequence[torch.Tensor], size: int, batch: Any, order: Sequence[int], parts: int
) -> torch.Tensor:
    """[parts, elements]: the gradient of each part by itself, of all parameters one after another."""

    def taken(x: Any, index: Sequence[int]) -> Any:  # what is not as long as the batch is shared
        if isinstance(x, torch.Tensor):
            return x[torch.tensor(index, device=x.device)] if x.dim() and len(x) == size else x
        return [x[i] for i in index] if isinstance(x, list) and len(x) == size else x

    rows = []
    for part in range(parts):
        index = [*order[part * size // parts : (part + 1) * size // parts]]
        cut = tree_map(lambda x, index=index: taken(x, index), batch, is_leaf=lambda x: isinstance(x, list))
        found = torch.autograd.grad(loss(cut), leaves, allow_unused=True, materialize_grads=True)
        rows.append(torch.cat([g.flatten() for g in found]))
    return torch.stack(rows)


def _leaves(loss: torch.Tensor) -> list[torch.Tensor]:
    """The parameters that a loss depends on, in the order in which its graph names them."""
    if not isinstance(loss, torch.Tensor) or loss.numel() != 1 or loss.grad_fn is None:
        raise UserError("the loss is no tensor of one element with a gradient", "Give loss(part) -> loss.")
    seen, waiting = dict[Any, None](), list[Any]([loss.grad_fn])
    while waiting:
        if (node := waiting.pop()) is not None and node not in seen:
            seen[node] = None
            waiting += [following for following, _ in node.next_functions]
    return [*dict.fromkeys(node.variable for node in seen if hasattr(node, "variable"))]
