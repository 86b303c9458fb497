"""The batch-invariant kernels of one device type, as `batch_invariant()` calls them, and how a call is declined."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from dataclasses import dataclass

import torch

__all__ = ["DTYPES", "Kernels", "Leave", "kernels_for", "require"]

DTYPES = (torch.float16, torch.bfloat16, torch.float32)


class Leave(Exception):  # noqa: N818 - a decision, not an error
    """This call is left to the original kernel; the message is the reason, "" where the dtype says it all."""


@dataclass(frozen=True, slots=True)
class Kernels:
    """The batch-invariant kernels of one device type; signatures as in `nondet.kernels.reference`."""

    mm: Callable[..., torch.Tensor]
    bmm: Callable[..., torch.Tensor]
    linear: Callable[..., torch.Tensor]
    mean: Callable[..., torch.Tensor]
    sum: Callable[..., torch.Tensor]
    softmax: Callable[..., torch.Tensor]
    log_softmax: Callable[..., torch.Tensor]
    rms_norm: Callable[..., torch.Tensor]
    attention: Callable[..., torch.Tensor]
    attention_varlen: Callable[..., torch.Tensor]
    max_head_dim: int


@functools.cache
def kernels_for(device: str) -> Kernels:
    """The kernels of "cpu" or "cuda". Only the modules of that device are imported."""
    if device == "cpu":
        from nondet.kernels.attention import cpu as cpu_attention
        from nondet.kernels.matmul import cpu as cpu_matmul
        from nondet.kernels.rows import cpu as cpu_rows

        return Kernels(
            cpu_matmul.mm,
            cpu_matmul.bmm,
            cpu_matmul.linear,
            cpu_rows.mean,
            cpu_rows.sum,
            cpu_rows.softmax,
            cpu_rows.log_softmax,
            cpu_rows.rms_norm,
            cpu_attention.attention,
            cpu_attention.attention_varlen,
            sys.maxsize,
        )
    from nondet.kernels.attention import cuda as triton_attention
    from nondet.kernels.matmul import cuda as matmul_choice
    from nondet.kernels.rows import cuda as triton_rows

    return Kernels(
        matmul_choice.mm,
        matmul_choice.bmm,
        matmul_choice.linear,
        triton_rows.mean,
        triton_rows.sum,
        triton_rows.softmax,
        triton_rows.log_softmax,
        triton_rows.rms_norm,
        triton_attention.attention,
        triton_attention.attention_varlen,
        256,
    )


def require(*tensors: torch.Tensor) -> None:
    """One floating dtype that the kernels have, or `Leave`."""
    dtype = tensors[0].dtype
    if dtype not in DTYPES:
        raise Leave
    for x in tensors[1:]:
        if x.dtype != dtype:
            raise Leave
