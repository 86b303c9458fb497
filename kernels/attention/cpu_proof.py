"""The proof at first use that attention on this CPU gives a query one and the same bits, in whatever company it is."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from nondet.kernels.attention.cpu_plan import BLOCK
from nondet.kernels.matmul.cpu_tiles import NotInvariantError

__all__ = ["prove"]


def prove(varlen: Callable[..., torch.Tensor], dim: int, capped: bool) -> None:
    """Hold the whole to its promise, the exponential, a soft cap's tanh and the sums with it.

    Args:
        varlen: varlen(q, k, v, cu_seqlens_q, cu_seqlens_k, softcap=...), packed attention without checks.
        dim: Head dim.
        capped: With a soft cap.

    Raises:
        NotInvariantError: a query has other bits in a decode step, a chunk or a batch than in its prefill.
    """
    rng = torch.Generator().manual_seed(23)
    length, heads = 3 * BLOCK - 7, 6
    q, k, v = (4.0 * torch.rand(length, h, dim, generator=rng) - 2.0 for h in (heads, 2, 2))

    def packed(pieces: Sequence[tuple[int, int]]) -> list[torch.Tensor]:
        sizes = [end - start for start, end in pieces]
        cu_q = torch.tensor([0, *sizes]).cumsum(0)
        cu_k = torch.tensor([0, *(end for _, end in pieces)]).cumsum(0)
        out = varlen(
            torch.cat([q[a:b] for a, b in pieces]),
            torch.cat([k[:b] for _, b in pieces]),
            torch.cat([v[:b] for _, b in pieces]),
            cu_q,
            cu_k,
            softcap=1.5 if capped else None,
        )
        return list(out.split(sizes))

    prefill = packed([(0, length)])[0]
    last = length - 1
    mixes = (
        [(last, length)],
        [(5, 6)],
        [(BLOCK, BLOCK + 1), (0, 3), (last, length), (60, 70)],
        [(0, BLOCK), (9, length)],
    )
    for pieces in mixes:
        for (start, end), got in zip(pieces, packed(pieces), strict=True):
            if not torch.equal(got, prefill[start:end]):
                raise NotInvariantError(
                    f"cpu_attention with head dim {dim}: queries {start}..{end} have other bits in the batch {pieces} "
                    "than in a prefill here"
                )
