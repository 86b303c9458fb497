"""The collectives as operators of the registry: called outside of the ranks, computed inside of them.

Each takes a `nondet.ranks.messages.Message`, whose ranks are started where they are not running, and gives the row that
the message asks about, as the first rank that holds it has it. What the ranks' launchers noted is noted here, and the
kernels that they launched are the kernels of the variant that is being computed.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from nondet.kernel_names import launched_elsewhere
from nondet.kernels.launch import note
from nondet.ranks.group import shared_group
from nondet.ranks.messages import Message, Outcome, exact_row

__all__ = ["by_rank", "collective", "invariant", "reference", "stock"]


def reference(message: Message) -> torch.Tensor:
    """The row's sum in float64."""
    return exact_row(message)


def stock(message: Message) -> torch.Tensor:
    """torch.distributed's own: NCCL's on CUDA, gloo's on a CPU."""
    return collective(replace(message, impl="stock"))


def invariant(message: Message) -> torch.Tensor:
    """In the order of ranks, see `nondet.kernels.all_reduce.invariant`; a gather is a copy as it is."""
    return collective(replace(message, impl="invariant"))


def collective(message: Message) -> torch.Tensor:
    """The row [width], on the CPU.

    Raises:
        RankError: a rank failed, died or hung.
        NotImplementedError: the implementation does not apply.
    """
    return next(row for row in by_rank(message) if row is not None)


def by_rank(message: Message) -> list[torch.Tensor | None]:
    """The row as each rank has it; None where it has not."""
    group = shared_group(message.world, message.device, dict(message.environment))
    outcomes: list[Outcome] = group.ask("nondet.ranks.messages:collect", message)
    for name in outcomes[0].notes:
        note(name)
    launched_elsewhere([*outcomes[0].kernels, *(n for n in outcomes[0].notes if n.startswith("nccl "))])
    dtype: torch.dtype = getattr(torch, message.dtype)
    return [None if o.row is None else torch.frombuffer(bytearray(o.row), dtype=dtype) for o in outcomes]
