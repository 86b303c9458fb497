"""Anchors and members of attention that are no function of a kernel module as they stand.

Every function has the operator's signature (`nondet.kernels.reference`) and raises NotImplementedError where it does
not apply; `nondet.core.registry` names them. CUDA, but for `blocks_varlen`; forward only.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module

import torch

__all__ = ["blocks_varlen", "segments_anchor", "segments_hopper", "segments_split", "segments_varlen"]


def segments_anchor(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, causal: bool = True, scale: float | None = None
) -> torch.Tensor:
    """The one plan that can serve every call: a program walks a query's segments in order."""
    from nondet.kernels.attention.cuda import attention_by_one_plan

    return attention_by_one_plan(q, k, v, causal=causal, scale=scale)


def segments_hopper(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, causal: bool = True, scale: float | None = None
) -> torch.Tensor:
    """The warp-specialized prefill kernel, also where it is the slower way."""
    from nondet.kernels.attention.hopper import prefill, supports

    reason = supports(q, k, v, causal, None, None)
    if reason is not None:
        raise NotImplementedError(reason)
    return prefill(q, k, v, causal=causal, scale=scale)


def segments_split(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, causal: bool = True, scale: float | None = None
) -> torch.Tensor:
    """A program for each segment, merged afterwards: split-KV, also where it is the slower way."""
    from nondet.kernels.attention.cuda import attention

    return attention(q, k, v, causal=causal, scale=scale, split=True)


class _Varlen:
    """An `attention_varlen` as `attention`, and for requests of unequal lengths at once."""

    def __init__(self, target: str) -> None:
        self.target = target

    def __call__(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, causal: bool = True, scale: float | None = None
    ) -> torch.Tensor:
        requests = [(q[b], k[b], v[b]) for b in range(q.shape[0])]
        return torch.stack(self.ragged(requests, causal=causal, scale=scale))

    def ragged(
        self,
        requests: Sequence[tuple[torch.Tensor, torch.Tensor, torch.Tensor]],
        *,
        causal: bool = True,
        scale: float | None = None,
    ) -> list[torch.Tensor]:
        """Each request's q [Hq, Tq, D] over k, v [Hkv, Tk, D] -> [Hq, Tq, D], all in one call."""
        lengths = [(q.shape[1], k.shape[1]) for q, k, _ in requests]
        packed = [torch.cat([one[i].transpose(0, 1) for one in requests]).contiguous() for i in range(3)]
        module, _, name = self.target.partition(":")
        out: torch.Tensor = getattr(import_module(module), name)(
            *packed,
            cu_seqlens_q=_starts([tq for tq, _ in lengths], packed[0].device),
            cu_seqlens_k=_starts([tk for _, tk in lengths], packed[0].device),
            max_seqlen_q=max(tq for tq, _ in lengths),
            max_seqlen_k=max(tk for _, tk in lengths),
            causal=causal,
            scale=scale,
        )
        return [part.transpose(0, 1) for part in out.split([tq for tq, _ in lengths])]


def _starts(lengths: list[int], device: torch.device) -> torch.Tensor:
    ends = torch.tensor([0, *lengths]).cumsum(0)
    return ends.to(device=device, dtype=torch.int32)


segments_varlen = _Varlen("nondet.kernels.attention.cuda:attention_varlen")
blocks_varlen = _Varlen("nondet.kernels.attention.cpu:attention_varlen")
