"""What happened under `batch_invariant()`, operator by operator: plain counts, in four groups.

And the two ways in which a call depends on the batch whatever kernel computes it: it goes over the batch's own axis, or
along places that other requests' lengths move.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

__all__ = ["KINDS", "MOVED", "Coverage", "over_batch", "padded_in_front"]

# attribute of `Coverage` -> what it is called for people, in run files too
KINDS: dict[str, str] = {
    "replaced": "replaced",
    "certified": "certified stock",
    "left": "left stock",
    "at_risk": "at risk",
}

_lock = threading.Lock()  # of all counts: `counter[what] += 1` is three steps, between which threads change


@dataclass
class Coverage:
    """Calls while a context was entered, by operator.

    Attributes:
        replaced: Computed by an invariant kernel. Which member of its class ran, `nondet.core.launch` says: it may
            be a library's own kernel, where this machine's certificates say that its bits are those of the class.
        certified: Stock, because stock was proven on this machine to give each row the bits that the row has alone, at
            this very shape and dtype (`nondet.kernels.dispatch.certified`).
        left: Of a family that is on, but left to the stock kernel: "mm float64", with the reason where there is one.
            Its bits may depend on the batch.
        at_risk: Stock, because no invariant kernel exists or the operator's family is off. Or by any kernel, where the
            call itself depends on the batch, as the reason beside it says.
    """

    replaced: Counter[str] = field(default_factory=Counter)
    certified: Counter[str] = field(default_factory=Counter)
    left: Counter[str] = field(default_factory=Counter)
    at_risk: Counter[str] = field(default_factory=Counter)

    def add(self, kind: str, what: str, times: int = 1) -> None:
        """Count one call, or several; from any thread, and none is lost."""
        counter: Counter[str] = getattr(self, kind)
        with _lock:
            counter[what] += times

    def lines(self) -> list[str]:
        """One line for each operator, the commonest first."""
        with _lock:
            return [
                f"{label}: {name} ({n} calls)"
                for kind, label in KINDS.items()
                for name, n in getattr(self, kind).most_common()
            ]

    def counts(self) -> Counter[str]:
        """All of it in one counter, for a run file: "replaced: mm" -> calls."""
        with _lock:
            return Counter(
                {f"{label}: {name}": n for kind, label in KINDS.items() for name, n in getattr(self, kind).items()}
            )


_WHOLE, _FIRST = "over the whole tensor, the batch's axis included", "over the first axis, which may be the batch's"
MOVED = "over places that padding in front moves"


def over_batch(x: torch.Tensor, dim: Sequence[int] | int | None = None) -> str:
    """Words for a reduction of x over axes `dim` (none: all) by which requests may decide each other's; "" for none.

    Of a row alone, of one axis (nobody can tell whose), of parameters, and in a backward pass, whose sums over the
    batch are what a gradient is, nothing is said.
    """
    if x.dim() < 2 or isinstance(x, torch.nn.Parameter) or torch._C._current_graph_task_id() != -1:
        return ""
    axes = {d % x.dim() for d in ((dim,) if isinstance(dim, int) else dim or range(x.dim()))}
    if len(axes) == x.dim():
        return _WHOLE if x.numel() > x.shape[-1] else ""
    return _FIRST if 0 in axes and x.shape[0] > 1 else ""


def padded_in_front(x: torch.Tensor, axis: int) -> bool:
    """Do some entries of x's first axis, and not all, begin along `axis` with what padding leaves?

    That is zeros, or a number again and again: chunked scans of state-space layers hide a short request's first places
    so. The sum then begins elsewhere in its order than alone. Zeros in between are no padding but a choice, of experts.
    On a GPU nobody looks, which would wait for it: there the answer is yes.
    """
    if x.dim() < 3 or axis == 0 or x.shape[0] < 2 or x.shape[axis] < 3 or not x.numel():
        return False
    if x.is_cuda:
        return True
    first, second = x.select(axis, 0), x.select(axis, 1)
    alike = ((first == 0) | (first == second)).reshape(*x.shape[:axis], -1).all(-1)
    if not (alike.any(0) & ~alike.all(0)).any():
        return False
    there = (x != 0).reshape(*x.shape[: axis + 1], -1).any(-1)
    starts = there[..., 0] + (there[..., 1:] & ~there[..., :-1]).sum(-1)
    return bool((alike & there.any(-1)).any() and (starts <= 1).all())
