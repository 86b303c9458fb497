"""Batch-invariant matrix products on a CPU: the library's own GEMM and oneDNN's inner product, at certified row counts.

Numerics: the order along K that the library (oneDNN for bfloat16 and float16, and for layers' weights in float32; MKL
for other float32 operands; or what torch was built with) takes for a base tile of rows, accumulated in float32 and
rounded once to the dtype. `nondet.kernels.matmul.cpu_tiles` keeps that order fixed.

Invariance: a row of the result depends on that row of `a`, on `b`, and on the process (instruction set, thread count,
layout and alignment of `b`), not on the number of rows nor on its position among them. Not reproducible across
machines: another CPU has another order.

Forward only: a gradient or a dtype that is not floating raises UserError, while under `nondet.batch_invariant()`
autograd works as usual. NotInvariantError: this machine has no certified way.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch

from nondet.core.inputs import kept_order_revealing as order_revealing
from nondet.core.inputs import underflow
from nondet.core.launch import note
from nondet.errors import UserError
from nondet.kernels import originals
from nondet.kernels.matmul.cpu_tiles import (
    Case,
    NotInvariantError,
    Tiles,
    agrees,
    environment_key,
    prove,
    proven,
    sizes_for,
)

# oneDNN's inner product, and weights kept in the layout that it computes in.
# This file uses it for a layer's weight in float32, because its rows are one class from two on, where
# MKL's GEMM needs sixteen. It copies a weight from torch's layout into its own at every call. `packed_weights` keeps
# those copies, which doubles the memory, and uses row counts certified to give exactly the plain weight's bits. So
# packing changes only the time.

_LEAST = 2**14  # multiply-adds of a row: scores of a model that writes out attention stay with the GEMM
_SEEDS_ONEDNN = ((11, False), (12, False), (12, True))  # and whether products underflow
_ALIGNMENT = 64
# The number of rows that a copy is laid out for. In bfloat16 1 gives the longest accumulation along K of all hints that
# were tried, and the plain product's at every number of rows that it has a class for.
_HINTS: dict[torch.dtype, int | None] = {torch.bfloat16: 1, torch.float32: None}


def computes() -> bool:
    """Whether torch has oneDNN, enabled."""
    return bool(torch._C._get_mkldnn_enabled() and torch.backends.mkldnn.is_available())


def suits(b: torch.Tensor) -> bool:
    """Whether the class of products with b [K, N] is oneDNN's inner product, where that can be proven."""
    if b.dtype != torch.float32 or b.shape[0] * b.shape[1] < _LEAST or min(b.shape) < 2:
        return False
    return b.t().is_contiguous() and computes()


class _Packed(NamedTuple):
    """A copy of a weight, valid while the weight's version and shape are these."""

    weight: torch.Tensor
    version: int
    shape: torch.Size
    copy: torch.Tensor
    environment: tuple[object, ...]
    tiles: Tiles
    bias: bool  # whether they were proven with one


# By the weight's address, of every entered block; blocks may be left in any order, and the last is used.
packed_copies: dict[int, list[_Packed]] = {}
_lock = threading.Lock()


def _copy_in_use(rows: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> _Packed | None:
    """The kept copy of that weight, for these rows [M, K]; None where there is none, or the weight or the settings have
    changed since.
    """
    stack = packed_copies.get(weight.data_ptr())
    if not stack or not rows.numel() or not rows.is_contiguous() or rows.dtype is not weight.dtype:
        return None
    kept = stack[-1]
    if kept.weight is not weight or kept.version != weight._version or kept.shape != weight.shape:
        return None
    fits = bias is None or (bias.dtype is rows.dtype and bias.shape == weight.shape[:1])
    if kept.bias != (bias is not None) or not fits:
        return None
    return kept if kept.environment == environment_key() and weight.is_contiguous() else None


def packable(weight: torch.Tensor) -> bool:
    """Whether oneDNN has a layout of its own for that weight [N, K], and its bits may be those of the plain product."""
    if weight.dtype not in _HINTS or weight.dim() != 2 or weight.device.type != "cpu" or min(weight.shape) < 2:
        return False
    if type(weight) not in (torch.Tensor, torch.nn.Parameter) or weight.is_inference():  # those count no changes
        return False
    return weight.is_contiguous() and computes() and reorders(weight.dtype)


@functools.cache
def reorders(dtype: torch.dtype) -> bool:
    """Whether oneDNN has the dtype's layout on this CPU: bfloat16's needs AVX-512."""
    try:
        _copy_of(torch.zeros(64, 64, dtype=dtype, device="cpu"))
    except (RuntimeError, NotImplementedError):
        return False
    return True


@contextmanager
def packed_weights(weights: Iterable[tuple[torch.Tensor, bool]], most: int) -> Iterator[int]:
    """Keep copies of these weights in oneDNN's layout until the block ends; they must not change meanwhile.

    A change that torch counts (in place, by an optimizer) is noticed, and that copy is not used any more. You must
    prevent others: `weight.data.copy_(...)`, `weight.data += delta` as in some merges of LoRA adapters, a write through
    `weight.numpy()`. `weights`: of linear layers, [N, K], each with whether it has a bias. `most`: bytes of copies;
    what is beyond them stays plain. Yields the bytes kept.
    """
    mine: dict[int, _Packed] = {}
    spent = 0
    with torch.no_grad():
        for weight, with_bias in weights:
            size, address = weight.numel() * weight.element_size(), weight.data_ptr()
            if not packable(weight) or address in mine or spent + size > most:
                continue
            kept = _kept(weight, with_bias)
            if kept is not None:
                mine[address] = kept
                spent += size
    with _lock:
        for address, kept in mine.items():
            # a new list: other threads read without the lock
            packed_copies[address] = [*packed_copies.get(address, ()), kept]
    try:
        yield spent
    finally:
        with _lock:
            for address, kept in mine.items():
                left = [other for other in packed_copies[address] if other is not kept]
                if left:
                    packed_copies[address] = left
                else:
                    del packed_copies[address]


def _kept(weight: torch.Tensor, with_bias: bool) -> _Packed | None:
    try:
        tiles, copy = _tiles(weight, with_bias), _copy_of(weight)
    except (NotInvariantError, RuntimeError, NotImplementedError):  # oneDNN has none here, as bfloat16 without AVX-512
        return None
    return _Packed(weight, weight._version, weight.shape, copy, environment_key(), tiles, with_bias)


def _by_copy(copy: torch.Tensor, bias: torch.Tensor | None, x: torch.Tensor) -> torch.Tensor:
    """oneDNN's inner product: x [..., K], a weight [N, K] in torch's layout or in oneDNN's, bias [N] -> [..., N]."""
    return originals.call("mkldnn::_linear_pointwise", x, copy, bias, "none", [], "")


def _copy_of(weight: torch.Tensor) -> torch.Tensor:
    copy: torch.Tensor = torch.ops.mkldnn._reorder_linear_weight(weight.detach(), _HINTS[weight.dtype])
    return copy


def _tiles(weight: torch.Tensor, with_bias: bool) -> Tiles:
    plain, dtype = tiles_of(weight.t(), with_bias), weight.dtype
    what = f"cpu_matmul {str(dtype).removeprefix('torch.')} packed"
    offset = weight.data_ptr() % _ALIGNMENT  # the plain product is proven at this offset, too
    key = ("packed", dtype, weight.shape, offset, with_bias, plain.what, plain.base, *environment_key())
    return proven(what, key, lambda: _prove_onednn(what, weight, with_bias, plain.base))


def _prove_onednn(what: str, weight: torch.Tensor, with_bias: bool, base: int) -> Tiles:
    columns, depth = weight.shape
    sizes = sorted({*sizes_for(depth * columns), base})
    dtype = weight.dtype
    bias = order_revealing(1, columns, dtype, 13, negate=False)[0] if with_bias else None
    agreed = sizes
    for seed, tiny in _SEEDS_ONEDNN:
        rows = order_revealing(max(sizes), depth, dtype, seed, negate=True)
        twin = _like(weight.t(), weight.data_ptr() % _ALIGNMENT, seed).t()
        if tiny:
            rows, twin = _tiny(rows), twin.mul_(underflow(dtype))
            bias = None if bias is None else bias * underflow(dtype) ** 2
        right, copy = mm(rows, twin.t(), bias), _copy_of(twin)
        case = functools.partial(_by_copy, copy, bias), (rows,)
        agreed = [size for size in agreed if agrees(case, right, size)]
    if base not in agreed:
        raise NotInvariantError(f"{what}: another class than the plain product's here", "It is computed plainly.")
    return Tiles(what, base, tuple(agreed), tuple(n for n in sizes if n not in agreed))


# Where a row gives few numbers, two orders of additions may agree in all of them by chance: then more rows are drawn.
_SEEDS, _SEEDS_IF_NARROW, _NARROW = (11, 12), tuple(range(11, 23)), 32
# The library distributes columns, and each may have an order of its own along K; so a wide operand is certified on
# numbers that repeat after this many columns.
_FRESH_COLUMNS = 512
_LANES = 16


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """x [..., K] times weight [N, K] transposed, plus bias [N] -> [..., N], in x's dtype.

    The library adds the bias before the one rounding or after it, the same way for every number of rows.
    """
    _refuse(x, weight, bias)
    rows = x if x.dim() == 2 else x.reshape(-1, x.shape[-1])
    kept = _copy_in_use(rows, weight, bias) if packed_copies else None
    if kept is None:
        out = mm(rows, weight.t(), bias)
    else:
        note(kept.tiles.plan(len(rows)).label)
        out = kept.tiles.apply((rows,), functools.partial(_by_copy, kept.copy, bias))
    return out if x.dim() == 2 else out.view(*x.shape[:-1], weight.shape[0])


def matmul(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """a [M, K] times b [K, N] -> [M, N]; or batched, a [B, M, K] times b [B, K, N] -> [B, M, N]. Any strides."""
    _refuse(a, b, None)
    return mm(a, b) if a.dim() == 2 else bmm(a, b)


def _refuse(a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None) -> None:
    if not a.dtype.is_floating_point:
        raise UserError(
            f"cpu_matmul has no {a.dtype}", "Use a floating dtype; integer sums do not depend on the order."
        )
    if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in (a, b, bias)):
        raise UserError("cpu_matmul computes no gradients", "Call it under torch.no_grad().")


def mm(a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """a [M, K] times b [K, N], plus bias [N] -> [M, N]; `matmul` without its checks. Layouts have separate
    certificates.
    """
    rows, depth = a.shape
    columns = b.shape[1]
    if rows == 0 or columns == 0 or depth == 0:
        empty = a.new_zeros((rows, columns))
        return empty if bias is None else empty + bias
    if depth == 1:  # one term: nothing to order, and rotary embeddings need it with many widths
        product = a * b
        return product if bias is None else product + bias
    if columns == 1 or 0 in b.stride():
        b = _vector(b) if columns == 1 else b.contiguous()
    try:
        tiles, call = _way_of(b, bias is not None)
    except NotInvariantError:
        if columns % _LANES == 0 and depth % _LANES == 0:
            raise
        return _mm_padded(a, b, bias)
    note(tiles.plan(rows).label)
    return tiles.apply((a.contiguous(),), lambda tile: call(tile, b, bias))


def _vector(b: torch.Tensor) -> torch.Tensor:
    """b [K, 1], dense and aligned: a vector is often one of a batch, and its address must not choose its order."""
    flat = b[:, 0].contiguous()
    return (flat if flat.data_ptr() % 64 == 0 else flat.clone()).unsqueeze(1)


def _mm_padded(a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """`mm` with zeros appended to K, which add nothing, and to N, which is cut off again.

    For narrow operands: MKL's float32 product with 2 to 10 columns gives a row other bits at another place in any tile.
    """
    (depth, columns), rows = b.shape, a.shape[0]
    wide, deep = -(-columns // _LANES) * _LANES, -(-depth // _LANES) * _LANES
    right = b.new_zeros((deep, wide))
    right[:depth, :columns] = b
    left = a
    if deep != depth:
        left = a.new_zeros((rows, deep))
        left[:, :depth] = a
    if bias is not None:
        bias = torch.cat([bias, bias.new_zeros(wide - columns)])
    return mm(left, right, bias)[:, :columns].contiguous()


def bmm(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """a [B, M, K] times b [B, K, N] -> [B, M, N], one `mm` per slice: one call over the batch is not invariant. b's
    matrices are row by row first, because `torch.matmul` copies a transposed operand at some batch sizes only.
    """
    batch, rows, depth = a.shape
    columns = b.shape[2]
    if depth == 1:
        return a * b
    if batch and b.stride(0) == 0:  # one weight, expanded: as many rows of a single product
        return mm(a.reshape(batch * rows, depth), b[0]).view(batch, rows, columns)
    out = a.new_empty((batch, rows, columns))
    for i, matrix in enumerate(_slices(b.contiguous())):
        out[i] = mm(a[i], matrix)
    return out


def vectors_by_weights(weight: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """weight [B, N, K] times x [B, K] -> [B, N]: slice by slice, the bits that `mm(x[i:i+1], weight[i].T)` gives x[i].

    For callers that know which operand is the weight, as in a mixture of experts: its number of rows N may decide the
    order along K, as in any product with it, but the number of vectors may not. `bmm` takes the last operand as the
    weight.
    """
    out = x.new_empty(weight.shape[:2])
    for i, matrix in enumerate(_slices(weight.mT)):
        out[i : i + 1] = mm(x[i : i + 1], matrix)
    return out


def _slices(b: torch.Tensor) -> Iterator[torch.Tensor]:
    """The matrices of b [B, K, N]; copied where their alignments differ, because each has an order of its own."""
    aligned = (b.data_ptr() | b.stride(0) * b.element_size()) % 64 == 0
    for matrix in b:
        yield matrix if aligned else matrix.clone()


def tiles_of(b: torch.Tensor, with_bias: bool = False) -> Tiles:
    """The certified row counts for products with operands like b. Raises NotInvariantError: none was found."""
    return _way_of(b, with_bias)[0]


_Call = Callable[[torch.Tensor, torch.Tensor, "torch.Tensor | None"], torch.Tensor]


def _way_of(b: torch.Tensor, with_bias: bool) -> tuple[Tiles, _Call]:
    offset = b.data_ptr() % 64
    key = (b.dtype, b.shape, b.stride(), offset, with_bias, *environment_key())
    if suits(b):
        try:
            name = f"{_name(b)} inner product"
            tiles = proven(name, ("inner product", *key), lambda: _prove(name, _inner_product, b, offset, with_bias))
        except NotInvariantError:
            pass
        else:
            return tiles, _inner_product
    name = _name(b)
    return proven(name, ("mm", *key), lambda: _prove(name, _call, b, offset, with_bias)), _call


def _name(b: torch.Tensor) -> str:
    return f"cpu_matmul {str(b.dtype).removeprefix('torch.')}"


def _prove(name: str, call: _Call, b: torch.Tensor, offset: int, with_bias: bool) -> Tiles:
    depth, columns = b.shape
    # few CPUs multiply float16: it is emulated, many times slower
    sizes = sizes_for(depth * columns * (8 if b.dtype == torch.float16 else 1))
    bias = order_revealing(1, columns, b.dtype, 13, negate=False)[0] if with_bias else None

    def case(seed: int, tiny: bool) -> Case:
        right, added = _like(b, offset, seed), bias
        rows = order_revealing(max(sizes), depth, b.dtype, seed, negate=True)
        if tiny:
            rows, right = _tiny(rows), right.mul_(underflow(b.dtype))
            added = None if bias is None else bias * underflow(b.dtype) ** 2
        return (lambda x: call(x, right, added)), (rows,)

    *seeds, last = _SEEDS if columns >= _NARROW else _SEEDS_IF_NARROW
    cases = [case(seed, False) for seed in (*seeds, *([last] if with_bias else []))]  # a bias would hide small errors
    return prove(name, [*cases, case(last, True)], sizes)


def _tiny(rows: torch.Tensor) -> torch.Tensor:
    """A copy in which products of a few rows with a tiny weight underflow (more would be slow): not every kernel keeps
    subnormal numbers, and the sign of a zero."""
    rows = rows.clone()
    rows[::31] *= underflow(rows.dtype)
    return rows


def _call(x: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    return originals.call("mm", x, b) if bias is None else originals.call("addmm", bias, x, b)


def _inner_product(x: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    return _by_copy(b.t(), bias, x)


def _like(b: torch.Tensor, offset: int, seed: int) -> torch.Tensor:
    depth, columns = b.shape
    span = 1 + sum((n - 1) * s for n, s in zip(b.shape, b.stride(), strict=True))
    storage = b.new_zeros(span + 64 // b.element_size())
    twin = storage.as_strided(b.shape, b.stride(), offset // b.element_size())
    fresh = order_revealing(min(columns, _FRESH_COLUMNS), depth, b.dtype, seed, negate=False).t()
    for start in range(0, columns, _FRESH_COLUMNS):
        width = min(_FRESH_COLUMNS, columns - start)
        twin[:, start : start + width] = fresh[:, :width]
    return twin
