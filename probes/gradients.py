"""A gradient over splits of one batch: accumulated over micro-batches, padded and packed in another way."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import msgspec
import torch

from nondet.core.measure import Trial
from nondet.core.records import Judged, Row, Run
from nondet.errors import UserError
from nondet.probes.functions import compare, name_of, run_of
from nondet.probes.rounding import judged, rounding_of

_FITTED = 2**20
_WHOLE = 0.99  # the least weight of parts that only have to be added
_FITS = 4.0  # times rounding: as near as that, parts make up the whole


def check_gradient(
    loss: Callable[[Any], torch.Tensor],
    batch: Any,
    over: Sequence[int] = (1, 2, 4),
    *,
    combine: str = "mean",
    error: float | None = None,
    name: str = "",
) -> Run:
    """Compare the gradient of a batch with those of its splits, whose parts' gradients are accumulated.

    Args:
        loss: Takes a part of the batch and gives a loss of one element; it is called again for each split.
        batch: A tensor, a list of requests, or a tuple or mapping of such, all as long as the first. Parts are
            consecutive requests; a second case takes them in another order, so that each part is padded otherwise.
        over: Numbers of parts, the first is what the others are compared with.
        combine: "mean" divides each part's loss by the number of parts, as trainers do; "sum" adds them.
        error: What rounding may change, as a share of the gradient's largest element; None: found by noise.

    Raises:
        UserError: more parts than requests, a loss that needs no gradient, or another `combine`.
    """
    started, size, label = time.perf_counter(), _length(batch), name or name_of(loss)
    if combine not in ("mean", "sum"):
        raise UserError(f"combine={combine!r} is unknown", "Give 'mean' or 'sum'.")
    if len(set(over)) < 2 or min(over) < 1 or max(over) > size:
        raise UserError(f"over={[*over]} compares nothing of {size} requests", f"Give several numbers from 1 to {size}.")
    gradients = partial(_gradients, loss, batch)
    leaves = _leaves(loss(batch))
    orders = {"as given": range(size), "other parts": [*range(0, size, 2), *range(1, size, 2)]}

    def whole(order: Sequence[int], parts: int) -> torch.Tensor:
        return gradients(leaves, order, parts).sum(0) / (parts if combine == "mean" else 1)

    splits = [Trial(parts, partial(whole, orders["as given"], parts)) for parts in over]
    mixed = [Trial(order, partial(whole, orders[order], max(over))) for order in orders]
    dtype = min((x.dtype for x in leaves), key=lambda d: d.itemsize)
    head = Row(
        probe="check", case=f"the gradient of {size} requests in {', '.join(map(str, over))} parts", operator=label,
        shape={"M": size}, dtype=str(dtype).removeprefix("torch."), device=leaves[0].device.type, inputs="given",
        varied="micro_batch", impl=label, exact=False, status="",
    )  # fmt: skip
    other = msgspec.structs.replace(
        head, case=f"{max(over)} parts of requests in another order", varied="position", axis=""
    )
    rows = [compare(head, splits, started), compare(other, mixed, time.perf_counter())]
    found: Judged | msgspec.UnsetType = msgspec.UNSET
    far = [x["far"] for row in rows if row.distinct > 1 for x in row.extra["apart"].values()]
    if far and not any(row.replays_parted for row in rows):
        bound = error if error is not None else _bound(loss, batch, leaves, size, dtype)
        each = [gradients(leaves, order, max(over)) for order in orders.values()]
        found = judged(max(far), bound, dtype, _look(each, whole(range(size), over[0]), bound or 0.0))
    compared = rows[0].difference.compared if rows[0].difference is not None else 0
    rows[0] = msgspec.structs.replace(rows[0], judged=found, extra=rows[0].extra | {"elements": compared})
    plan = {"impls": [label], "varied": "micro_batch", "over": list(over), "combine": combine, "error": error}
    return run_of(rows, plan, None)


def _bound(
    loss: Callable[[Any], torch.Tensor], batch: Any, leaves: Sequence[torch.Tensor], size: int, dtype: torch.dtype
) -> float | None:
    """What rounding may change: with noise at each sum, in the forward and the backward pass."""
    return rounding_of(lambda given: _gradients(loss, given, leaves, range(size), 1).sum(0), batch, dtype)


def _look(splits: Sequence[torch.Tensor], whole: torch.Tensor, bound: float) -> str:
    """What looks like the difference: parts that have to be weighed by their tokens, added, or can't make up the whole.
    The parts of each split are fitted to the whole's gradient, at a million evenly spread elements."""
    step, looks = -(-len(whole) // _FITTED), list[str]()
    target = whole[::step].double().cpu()
    for split in splits:
        parts = split[:, ::step].double().cpu()
        weights = torch.linalg.lstsq(parts.T, target[:, None], driver="gelsd").solution[:, 0]
        if float((weights @ parts - target).abs().max()) > _FITS * bound * float(target.abs().max()):
            return "micro-parts"
        looks.append("micro-sum" if bool((weights > _WHOLE).all()) else "micro-mean")
    return looks[0]


def _gradients(
    loss: Callable[[Any], torch.Tensor], batch: Any, leaves: Sequence[torch.Tensor], order: Sequence[int], parts: int
) -> torch.Tensor:
    """[parts, elements]: the gradient of each part by itself, of all parameters one after another."""
    size, rows = _length(batch), []
    for part in range(parts):
        index = order[part * len(order) // parts : (part + 1) * len(order) // parts]
        found = torch.autograd.grad(loss(_taken(batch, index, size)), leaves, allow_unused=True)
        rows.append(torch.cat([(torch.zeros_like(x) if g is None else g).flatten() for x, g in zip(leaves, found, strict=True)]))
    return torch.stack(rows)


def _leaves(loss: torch.Tensor) -> list[torch.Tensor]:
    """The parameters that a loss depends on, in the order in which its graph names them."""
    if not isinstance(loss, torch.Tensor) or loss.numel() != 1 or loss.grad_fn is None:
        raise UserError("the loss is no tensor of one element with a gradient", "Give loss(part) -> loss.")
    found, waiting, seen = dict[torch.Tensor, None](), [loss.grad_fn], set[Any]()
    while waiting:
        node: Any = waiting.pop()
        if node in seen:
            continue
        seen.add(node)
        if hasattr(node, "variable"):
            found.setdefault(node.variable)
        waiting += [following for following, _ in node.next_functions if following is not None]
    return [*found]


def _length(batch: Any) -> int:
    if isinstance(batch, Mapping):
        return _length(next(iter(batch.values())))
    return _length(batch[0]) if isinstance(batch, tuple) else len(batch)


def _taken(batch: Any, index: Sequence[int], size: int) -> Any:
    """Those requests of a batch; what is not as long as the batch is shared."""
    if isinstance(batch, Mapping):
        return {key: _taken(value, index, size) for key, value in batch.items()}
    if isinstance(batch, tuple):
        return tuple(_taken(value, index, size) for value in batch)
    if isinstance(batch, torch.Tensor) and batch.dim() and len(batch) == size:
        return batch[torch.tensor([*index], device=batch.device)]
    return [batch[i] for i in index] if isinstance(batch, list) and len(batch) == size else batch
