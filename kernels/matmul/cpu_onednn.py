"""oneDNN's inner product on a CPU, and weights kept in the layout that it computes in.

In float32 it is what `nondet.kernels.matmul.cpu` takes for a layer's weight: rows of one class from two on, where MKL's
GEMM wants sixteen. Given torch's own layout, oneDNN copies the weight into its own at every call. `packed_weights`
keeps those copies, which takes as much memory again, and calls with them at row counts certified to give the very bits
that the plain weight gives. So who packs and who does not have the same bits; only the time differs.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch

from nondet.core.inputs import order_revealing
from nondet.core.launch import note
from nondet.kernels import originals
from nondet.kernels.matmul.cpu_plan import Tiles
from nondet.kernels.matmul.cpu_tiles import NotInvariantError, environment_key, proven, same_bits_at, sizes_for

__all__ = ["computes", "packable", "packed_again", "packed_weights", "suits"]

_LEAST = 2**14  # multiply-adds of a row: scores of attention written out in a model stay with the GEMM
_SEEDS = (11, 12)
_ALIGNMENT = 64
# What a copy is laid out for, in rows. In bfloat16 1 gives the longest accumulation along K of all hints that were
# tried, and that of the plain product at every number of rows that it has a class for.
_HINTS: dict[torch.dtype, int | None] = {torch.bfloat16: 1, torch.float32: None}


def computes() -> bool:
    """Whether torch has oneDNN, and leave to use it."""
    return bool(torch._C._get_mkldnn_enabled() and torch.backends.mkldnn.is_available())


def suits(b: torch.Tensor) -> bool:
    """Whether the class of products with b [K, N] is oneDNN's inner product, where that can be proven."""
    if b.dtype != torch.float32 or b.shape[0] * b.shape[1] < _LEAST or min(b.shape) < 2:
        return False
    return b.t().is_contiguous() and computes()


class _Packed(NamedTuple):
    """A copy of a weight, and when it may stand for it."""

    weight: torch.Tensor
    version: int
    copy: torch.Tensor
    environment: tuple[object, ...]
    tiles: Tiles  # without a bias; with one, the same row counts were proven, too, or `bias` is False
    bias: bool


# By the weight's address, of every block that is entered; blocks may be left in any order, and the last is used.
_packed: dict[int, list[_Packed]] = {}
_lock = threading.Lock()


def packed_again(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor | None:
    """x [..., K], weight [N, K], bias [N] -> [..., N] by the kept copy; None where there is none that may be used."""
    stack = _packed.get(weight.data_ptr())
    if not stack:
        return None
    kept = stack[-1]
    if (
        kept.weight is not weight
        or kept.version != weight._version
        or not weight.is_contiguous()
        or x.dtype is not weight.dtype
        or x.shape[-1] != weight.shape[1]
        or not x.is_contiguous()
        or (bias is not None and not (kept.bias and bias.dtype is x.dtype and bias.shape == weight.shape[:1]))
        or kept.environment != environment_key()
    ):
        return None
    rows = x.numel() // weight.shape[1]
    if not rows:
        return None
    plan = kept.tiles.plan(rows)
    note(plan.label)
    if plan.whole and x.data_ptr() % 64 == 0:
        return originals.inner_product(x, kept.copy, bias)
    out = x.new_empty((*x.shape[:-1], weight.shape[0]))

    def call(tile: torch.Tensor, into: torch.Tensor) -> None:
        into.copy_(originals.inner_product(tile, kept.copy, bias))

    kept.tiles.apply((x.view(rows, -1),), out.view(rows, -1), call)
    return out


def packable(weight: torch.Tensor) -> bool:
    """Whether oneDNN has a layout of its own for that weight [N, K], and its bits may be those of the plain product."""
    if weight.dtype not in _HINTS or weight.dim() != 2 or weight.device.type != "cpu" or min(weight.shape) < 2:
        return False
    if type(weight) not in (torch.Tensor, torch.nn.Parameter) or weight.is_inference():  # those count no changes
        return False
    return weight.is_contiguous() and computes()


@contextmanager
def packed_weights(weights: Iterable[tuple[torch.Tensor, bool]], most: int) -> Iterator[int]:
    """Keep copies of these weights in oneDNN's layout until the block ends; they must not change meanwhile.

    A change that torch counts (in place, by an optimizer) is seen, and that copy is not used any more. One that goes
    around its count is not: `weight.data.copy_(...)`, `weight.data += delta` as some merge LoRA adapters, a write
    through `weight.numpy()`. Whoever enters this vouches that there is none.

    Args:
        weights: Of linear layers, [N, K], each with whether a bias goes with it.
        most: Bytes of copies; what is beyond them stays plain.

    Yields:
        Bytes kept.
    """
    mine: dict[int, _Packed] = {}
    spent = 0
    with torch.no_grad():
        for weight, with_bias in weights:
            size = weight.numel() * weight.element_size()
            if not packable(weight) or weight.data_ptr() in mine or spent + size > most:
                continue
            kept = _kept(weight, with_bias)
            if kept is not None:
                mine[weight.data_ptr()] = kept
                spent += size
    with _lock:
        for address, kept in mine.items():
            _packed[address] = [*_packed.get(address, ()), kept]  # a new list: other threads read without the lock
    try:
        yield spent
    finally:
        with _lock:
            for address, kept in mine.items():
                left = [other for other in _packed[address] if other is not kept]
                if left:
                    _packed[address] = left
                else:
                    del _packed[address]


def _kept(weight: torch.Tensor, with_bias: bool) -> _Packed | None:
    try:
        tiles = _tiles(weight, False)
        biased = with_bias and _tiles(weight, True).sizes == tiles.sizes
        copy = _copy_of(weight)
    except (NotInvariantError, RuntimeError, NotImplementedError):  # oneDNN has none here, as bfloat16 without AVX-512
        return None
    return _Packed(weight, weight._version, copy, environment_key(), tiles, biased)


def _by_copy(copy: torch.Tensor, bias: torch.Tensor | None, x: torch.Tensor) -> torch.Tensor:
    return originals.inner_product(x, copy, bias)


def _copy_of(weight: torch.Tensor) -> torch.Tensor:
    copy: torch.Tensor = torch.ops.mkldnn._reorder_linear_weight(weight.detach(), _HINTS[weight.dtype])
    return copy


def _tiles(weight: torch.Tensor, with_bias: bool) -> Tiles:
    """The row counts at which the copy gives the plain product's bits.

    Raises:
        NotInvariantError: its base tile does not, or the plain product has no class.
    """
    from nondet.kernels.matmul.cpu import tiles_of  # which asks this module first

    plain = tiles_of(weight.t(), with_bias)
    what = f"cpu_matmul {str(weight.dtype).removeprefix('torch.')} packed"
    offset = weight.data_ptr() % _ALIGNMENT  # the plain product's bits are proven by it as well
    key = ("packed", weight.dtype, weight.shape, offset, with_bias, plain.what, plain.base, *environment_key())
    return proven(what, key, lambda: _prove(what, weight, with_bias, plain))


def _beside(weight: torch.Tensor) -> torch.Tensor:
    """Room for a tensor like the weight, as far from a border of 64 bytes."""
    size = weight.element_size()
    room = torch.empty(weight.numel() + _ALIGNMENT // size, dtype=weight.dtype)
    first = (weight.data_ptr() - room.data_ptr()) % _ALIGNMENT // size
    return room[first : first + weight.numel()].view(weight.shape)


def _prove(what: str, weight: torch.Tensor, with_bias: bool, plain: Tiles) -> Tiles:
    from nondet.kernels.matmul.cpu import mm  # the plain product, whatever computes it

    columns, depth = weight.shape
    sizes = sorted({*sizes_for(depth * columns), plain.base})
    bias = order_revealing(1, columns, weight.dtype, 13, negate=False)[0] if with_bias else None
    agreed: dict[int, float] | None = None
    for seed in _SEEDS:
        fresh = order_revealing(min(columns, 512), depth, weight.dtype, seed, negate=False)
        twin = _beside(weight).copy_(fresh.repeat(-(-columns // len(fresh)), 1)[:columns])
        rows = order_revealing(max(sizes), depth, weight.dtype, seed, negate=True)
        right = mm(rows, twin.t(), bias)
        copy = _copy_of(twin)
        seconds = same_bits_at(sizes, rows, right, functools.partial(_by_copy, copy, bias))
        agreed = seconds if agreed is None else {n: min(agreed[n], s) for n, s in seconds.items() if n in agreed}
    if not agreed or plain.base not in agreed:
        raise NotInvariantError(f"{what}: another class than the plain product's here", "It is computed plainly.")
    return Tiles(what, plain.base, tuple(agreed), tuple(n for n in sizes if n not in agreed), agreed)
