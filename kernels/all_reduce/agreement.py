"""Whether a member over ranks may be used: proven by all ranks together, and agreed on.

At its first use in a process the ranks look at this machine's certificates together, prove what none of them knows, and
agree. One rank's no is everybody's no, since ranks that chose differently would wait for each other for ever. While a
CUDA graph is captured nothing can be proven: what is not agreed on by then does not stand. What was agreed on belongs
to the group, and not to the next one of its name (`nondet.kernels.all_reduce.generations`).
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist

from nondet.core.certificates import certificates
from nondet.core.launch import proving
from nondet.kernels.all_reduce.generations import ByGroup
from nondet.kernels.all_reduce.members import gather_into

__all__ = ["agreed", "forget", "together"]

_agreed: ByGroup[dict[tuple[str, str], bool]] = ByGroup(lambda _: {})


def forget() -> None:
    """Look at the certificates again: after they have changed within the process. On all ranks, or none."""
    _agreed.clear()


def agreed(
    member: str,
    key: str,
    device: torch.device,
    group: dist.ProcessGroup,
    prove: Callable[[], tuple[bool, str]],
) -> bool:
    """Whether all ranks hold the member proven at the key; proven now where one of them does not know.

    Args:
        prove: Called by all ranks at once; whether it holds, the same on all of them (see `together`), and the
            evidence. NotImplementedError, on all ranks alike: it does not apply to this group, and nothing is kept.
    """
    mine, at = _agreed.of(group), (member, key)
    known = mine.get(at)
    if known is not None:
        return known
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        return False
    with proving():
        mine[at] = holds = _vote(member, key, device, group, prove)
    return holds


def _vote(
    member: str, key: str, device: torch.device, group: dist.ProcessGroup, prove: Callable[[], tuple[bool, str]]
) -> bool:
    store = certificates(device.type)
    standing = store.standing(member, key)
    votes = torch.tensor([standing is None, standing is False], dtype=torch.int32, device=device)
    dist.all_reduce(votes, op=dist.ReduceOp.MAX, group=group)
    unknown, excluded = (bool(v) for v in votes.tolist())
    if excluded or not unknown:
        return not excluded
    try:
        holds, evidence = prove()
    except NotImplementedError:
        return False
    if dist.get_rank(group) == 0:
        store.record(member, key, holds, evidence)
    return holds


def together(apart: str, evidence: str, device: torch.device, group: dist.ProcessGroup) -> tuple[bool, str]:
    """The ranks' verdict: it holds where it held on every rank.

    Args:
        apart: Where this rank's bits parted; "" where they did not.
        evidence: What was compared, for a verdict that holds.
    """
    world = dist.get_world_size(group)
    vote = torch.tensor([1 if apart else 0], dtype=torch.int32, device=device)
    votes = torch.empty(world, dtype=torch.int32, device=device)
    gather_into(votes, vote, group)
    parted = votes.tolist()
    if not any(parted):
        return True, evidence
    where = ", ".join(str(r) for r, v in enumerate(parted) if v)
    return False, f"not the bits of the anchor on rank {where}{': ' + apart if apart else ''}"
