"""Elementwise operators on a CPU without the scalar rest of torch's vector loops.

A vector loop over n elements computes the last few of them, and of every thread's share, one by one, by another
formula: torch's float32 silu and sigmoid, and its bfloat16 gelu, give different bits there. So an element's bits depend
on the number of elements. Here the operator gets only multiples of 64 contiguous elements in one thread's share, where
all of them go through vector registers: unchanged where that holds already, else in pieces, the last one padded.
Batch-invariant and position-invariant; the bits are those of stock torch's vector body.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

_LANES = 64  # at least four registers of 16 float32, the most that torch's loops take at once
_GRAIN = 32768  # from here on torch distributes a loop among its threads (at::internal::GRAIN_SIZE)
_PIECE = 16384


def in_vectors(elements: int) -> bool:
    """Whether a loop over this many contiguous elements leaves none to scalar code, in any thread's share."""
    if elements % _LANES:
        return False
    threads = torch.get_num_threads()
    if elements < _GRAIN or threads == 1:
        return True
    shares = min(threads, -(-elements // _GRAIN))
    return -(-elements // shares) % _LANES == 0


def vectors_only(call: Callable[..., torch.Tensor], x: torch.Tensor, *others: torch.Tensor) -> torch.Tensor:
    """call(x, *others) for an elementwise `call` that keeps the shape, computed only by its vector body.

    The other arguments of the operator are bound in `call`. x and others have one shape and any strides. The result has
    the strides that torch's own would have: x's, where x is dense in memory (channels_last, transposed), else
    contiguous ones in x's order of axes.
    """
    like = torch.empty_like(x)  # has the strides of the result
    dense = [_dense(t, like) for t in (x, *others)]
    result = _flat(call, *dense)
    return result.view(x.shape) if like.is_contiguous() else result.as_strided(x.shape, like.stride())


def _dense(x: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    if x.stride() != like.stride() and not (x.is_contiguous() and like.is_contiguous()):
        x = torch.empty_like(like).copy_(x)
    return x.view(-1) if x.is_contiguous() else x.as_strided((x.numel(),), (1,))


def _flat(call: Callable[..., torch.Tensor], *flat: torch.Tensor) -> torch.Tensor:
    count = flat[0].numel()
    if in_vectors(count):
        return call(*flat)
    if count <= _PIECE:
        return _padded(call, *flat)
    first = call(*(t[:_PIECE] for t in flat))
    out = first.new_empty(count)
    out[:_PIECE] = first
    for start in range(_PIECE, count, _PIECE):
        out[start : start + _PIECE] = _padded(call, *(t[start : start + _PIECE] for t in flat))
    return out


def _padded(call: Callable[..., torch.Tensor], *pieces: torch.Tensor) -> torch.Tensor:
    count = pieces[0].numel()
    if not -count % _LANES:
        return call(*pieces)
    whole = []
    for piece in pieces:
        # ones: no operator here treats them specially
        padded = piece.new_ones(count + -count % _LANES)
        padded[:count] = piece
        whole.append(padded)
    return call(*whole)[:count]
