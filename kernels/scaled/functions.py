"""FP8 operands: how activations are quantized today, operands and scales for probes and proofs, and their checks.

A quantizer gives float8 numbers and the float32 scales to multiply them with. If one scale is taken over a whole batch,
a request's numbers depend on the largest number of the other requests, and no order of additions can prevent it. A
scale for each row, or for 128 numbers of a row, depends only on the row.
"""

from __future__ import annotations

from typing import Any

import torch

from nondet.core.inputs import EXACT, ORDER, generator, product_operands
from nondet.core.launch import note
from nondet.core.operator import Shape
from nondet.kernels.reference import dequantized

BLOCK = 128  # k in one stretch with a scale of its own, after which sums go to float32
FLOAT8 = (torch.float8_e4m3fn, torch.float8_e5m2)
SCALES = ("tensor", "row", "block")
RESULTS = (torch.bfloat16, torch.float16, torch.float32)
_LEAST = 1e-12  # the least largest number of a scale's share, so that zeros get a nonzero scale


def _quantized(x: torch.Tensor, largest: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    most = torch.finfo(FLOAT8[0]).max
    scale = largest.float().clamp(min=_LEAST) / most
    return (x.float() / scale).clamp(-most, most).to(FLOAT8[0]), scale


def quantize_tensor(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """x [M, K] with one scale [1, 1] over all of it, a dynamic scale per tensor: the batch's, not a row's."""
    note("quantize[tensor]")
    return _quantized(x, x.abs().amax()[None, None])


def quantize_by(scale: torch.Tensor, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """x [M, K] with one given scale [1, 1]: static, so that a row depends only on itself."""
    most, scale = torch.finfo(FLOAT8[0]).max, scale.float().reshape(1, 1)
    return (x.float() / scale).clamp(-most, most).to(FLOAT8[0]), scale


def quantize_row(x: torch.Tensor, limit: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """x [M, K] with a scale for each row, [M, 1]: a row depends only on itself (a maximum is exact).

    With a `limit` [1] larger numbers don't count for the scale and are cut, as in FBGEMM.
    """
    note("quantize[row]")
    largest = x.abs().amax(-1, keepdim=True)
    return _quantized(x, largest if limit is None else torch.minimum(largest.float(), limit))


def quantize_block(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """x [M, K] with a scale for each 128 numbers of a row, [M, K / 128]; the last share may be shorter."""
    note("quantize[1x128]")
    K = x.shape[1]
    shares = torch.nn.functional.pad(x, (0, -K % BLOCK)).unflatten(1, (-1, BLOCK))
    q, scale = _quantized(shares, shares.abs().amax(-1, keepdim=True))
    return q.flatten(1)[:, :K].contiguous(), scale[..., 0]


Operands = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


def operands(
    kind: str,
    how: str,
    sizes: tuple[int, int, int],
    dtypes: tuple[torch.dtype, torch.dtype],
    device: str | torch.device,
    seed: int,
) -> Operands:
    """float8 a [M, K] and b [K, N] (a weight [N, K], transposed) with float32 scales, as `scaled_matmul` takes them.

    Args:
        kind: Of `nondet.core.inputs`. Order-revealing rows keep their exact sum of zero: their scales are those of rows
            and columns, the same along K. Integers are -1, 0 and 1 here, so that a sum of 8,192 fits into 14 bits, and
            have powers of two as scales: the result is exact in every order.
        how: One of `SCALES`.
        sizes: (M, K, N).
    """
    M, K, N = sizes
    a, w = product_operands(kind, (M, K), (N, K), torch.float32, device, seed, weight_kind="bell")
    most = (torch.finfo(dtypes[0]).max, torch.finfo(dtypes[1]).max)
    if kind in EXACT:
        most = (1.0, 1.0)
    a, w = (x.clamp(-limit, limit).to(dtype) for x, limit, dtype in zip((a, w), most, dtypes, strict=True))
    stretches, tiles = -(-K // BLOCK), -(-N // BLOCK)
    shapes = {"tensor": ((1, 1), (1, 1)), "row": ((M, 1), (1, N)), "block": ((M, stretches), (stretches, tiles))}[how]
    scales = []
    for place, (rows, columns) in enumerate(shapes):
        along_k = (columns, rows)[place] if how == "block" else 1
        rng = generator(seed + 2 + place, device)
        drawn = torch.rand(rows, columns, dtype=torch.float32, device=device, generator=rng) + 0.5
        if kind in (*ORDER, "mixed") and along_k > 1:
            drawn = (drawn[:, :1] if place == 0 else drawn[:1]).expand(rows, columns).contiguous()
        scales.append(torch.exp2(torch.floor(drawn * 2) - 2) if kind in EXACT else drawn)
    return a, w.mT, scales[0], scales[1]


def drawn(
    kind: str, layout: str, shape: Shape, dtype: torch.dtype, device: str, seed: int
) -> tuple[torch.Tensor | torch.dtype, ...]:
    """As `operands`, and the result's dtype; `layout` is "row into float32"."""
    how, _, out = layout.split()
    sizes = (shape["M"], shape["K"], shape["N"])
    return *operands(kind, how, sizes, (dtype, dtype), device, seed), getattr(torch, out)


def _steps(rows: int, columns: int, device: str) -> torch.Tensor:
    flat = (torch.arange(rows * columns, device=device).view(rows, columns) * 37 % 101).float() / 101 + 0.5
    return flat.mT.contiguous().mT


def row_scales(shape: Shape, device: str) -> torch.Tensor:
    """Scales of `nondet bench`: [M, 1], or [M, scales]; a row's are the same in any batch."""
    return _steps(shape["M"], shape["scales"], device)


def column_scales(shape: Shape, device: str) -> torch.Tensor:
    """Those of b: [1, N] with scales of rows, [scales, N / 128] with blocks."""
    N, scales = shape["N"], shape["scales"]
    return _steps(scales, N if scales == 1 else -(-N // BLOCK), device)


def result_dtype(_: Shape, __: str) -> torch.dtype:
    """bfloat16, as models use it."""
    return torch.bfloat16


def checked(a: torch.Tensor, b: torch.Tensor, scale_a: torch.Tensor, scale_b: torch.Tensor, dtype: torch.dtype) -> bool:
    """Whether sums are scaled per 128 k. ValueError: shapes that do not fit; NotImplementedError: dtypes without a
    class.
    """
    if a.dim() != 2 or b.dim() != 2 or a.shape[1] != b.shape[0]:
        raise ValueError(f"scaled_matmul takes [M, K] and [K, N], got {tuple(a.shape)} and {tuple(b.shape)}")
    if a.dtype not in FLOAT8 or b.dtype not in FLOAT8 or dtype not in RESULTS:
        raise NotImplementedError(f"no invariant product of {a.dtype} and {b.dtype} into {dtype}")
    if scale_a.dtype != torch.float32 or scale_b.dtype != torch.float32:
        raise NotImplementedError(f"scales of {scale_a.dtype} and {scale_b.dtype}, not of float32")
    (M, K), N = a.shape, b.shape[1]
    stretches = -(-K // BLOCK)
    fitting = (scale_a, (M,), (1, stretches)), (scale_b, (1, stretches), (N, -(-N // BLOCK)))
    if not all(
        scale.numel() == 1 or (scale.dim() == 2 and scale.shape[0] in rows and scale.shape[1] in columns)
        for scale, rows, columns in fitting
    ):
        raise ValueError(
            f"scales of {tuple(scale_a.shape)} and {tuple(scale_b.shape)} do not fit [{M}, {K}] and [{K}, {N}]: one "
            "for all, one for each row and column, or in blocks of 1x128 and 128x128"
        )
    return (scale_a.dim() == 2 and scale_a.shape[1] > 1) or (scale_b.dim() == 2 and scale_b.shape[0] > 1)


def laid_out(
    scale_a: torch.Tensor, scale_b: torch.Tensor, sizes: tuple[int, int, int], *, repeated: bool = True
) -> tuple[torch.Tensor, torch.Tensor]:
    """Scales as [M, s] and [s, N] views, s the stretches of 128 k or 1; nothing is computed.

    A scale of 128 columns is `repeated` for each of them, which is a copy; else these are [s, N / 128].
    """
    M, K, N = sizes
    left = scale_a.reshape(1, 1) if scale_a.numel() == 1 else scale_a
    right = scale_b.reshape(1, 1) if scale_b.numel() == 1 else scale_b
    columns = N
    if right.shape[1] not in (1, N):
        right = right.repeat_interleave(BLOCK, 1)[:, :N] if repeated else right
        columns = right.shape[1]
    stretches = -(-K // BLOCK)
    both = stretches if max(left.shape[1], right.shape[0]) > 1 else 1
    return left.expand(M, both), right.expand(both, columns)


# How far from the float64 oracle a sound product may be, for `nondet.core.watch`: the bound of a sum in any order.
# Hopper's matrix unit cuts FP8 products and their running sum to 13 fraction bits, so on a GPU the bound is that of
# such sums; from K = 4,096 on it allows anything, and results are only checked to be finite.


def bound(t: Any, a: torch.Tensor, b: torch.Tensor, *rest: Any) -> torch.Tensor:
    """gamma_K ||a|| ||b|| of a row and a column, each with its scales; `rest` begins with these."""
    left, right = dequantized(a, rest[0]).norm(dim=1), dequantized(b, rest[1]).norm(dim=0)
    return _allowed(t, a.shape[1], left[:, None] * right)


def bound_grouped(t: Any, x: torch.Tensor, weight: torch.Tensor, *rest: Any) -> torch.Tensor:
    """As `bound`, of each row and its own weight; `rest` is the scales, the offsets and the dtype."""
    scale_x, scale_weight, offsets, _ = rest
    rows = dequantized(x, scale_x[:, None]).norm(dim=1)
    expert = torch.searchsorted(offsets.long(), torch.arange(len(x), device=x.device), right=True)
    columns = weight.double().norm(dim=1) * scale_weight.double()
    columns = torch.cat([columns, columns.new_zeros(1, weight.shape[2])])  # of rows that belong to no weight
    return _allowed(t, x.shape[1], rows[:, None] * columns[expert])


def _allowed(t: Any, k: int, size: torch.Tensor) -> torch.Tensor:
    epsilon = t.epsilon if t.reference.device.type == "cpu" else 2.0**-13
    terms = (k + 4) * epsilon
    allowed: torch.Tensor = t.rounded + (size * (terms / (1 - terms)) if terms < 0.5 else torch.inf)
    return allowed
