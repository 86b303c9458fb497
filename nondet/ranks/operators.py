"""The collectives as operators of the registry: called outside of the ranks, computed inside of them.

Each takes a `nondet.ranks.messages.Message`, whose ranks are started where they are not running, and gives the row that
the message asks about, as the rank `answers` has it. What the ranks' launchers noted is noted here, and the
kernels that they launched are the kernels of the variant that is being computed.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from nondet.core.launch import note
from nondet.core.measure import launched_elsewhere
from nondet.ranks.group import shared_group
from nondet.ranks.messages import Message, Outcome, exact_row

__all__ = ["collective", "invariant", "reference", "stock"]


def reference(message: Message) -> torch.Tensor:
    """The row's sum in float64."""
    return exact_row(message)


def stock(message: Message) -> torch.Tensor:
    """torch.distributed's own: NCCL's on CUDA, gloo's on a CPU."""
    return collective(replace(message, impl="stock"))


def invariant(message: Message) -> torch.Tensor:
    """In the order of ranks, see `nondet.kernels.all_reduce.chain`; a gather is a copy as it is."""
    return collective(replace(message, impl="invariant"))


def collective(message: Message) -> torch.Tensor:
    """The row [width], on the CPU.

    Raises:
        RankError: a rank failed, died or hung.
        NotImplementedError: the implementation does not apply.
    """
    group = shared_group(message.world, message.device, dict(message.environment))
    outcomes: list[Outcome] = group.ask("nondet.ranks.messages:collect", message)
    for name in outcomes[0].notes:
        note(name)
    launched_elsewhere([*outcomes[0].kernels, *(n for n in outcomes[0].notes if n.startswith("nccl "))])
    row = outcomes[message.answers].row
    if row is None:
        raise NotImplementedError(f"rank {message.answers} holds no part of the row")
    return torch.frombuffer(bytearray(row), dtype=getattr(torch, message.dtype))
