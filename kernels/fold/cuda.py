"""Sums of class "fold" on CUDA: a product whose accumulator starts from what was there, and rows one after the other.

Each element of acc[n, k] is one chain over tokens in steps of 16, the k of a matrix instruction in 16-bit formats: the
chain of `nondet.kernels.matmul.triton_kernels` with the first accumulator loaded in place of zero. float32 operands go
through fused multiply-adds, one token after the other. An accumulator is a float32 register between two instructions
anyway, so to store it after one call and to load it in the next ought to change nothing; and a wider tile ought to give
the anchor's bits. Both are the hardware's properties: they are proven by bits at first use on a machine, and where the
first does not hold there the product is refused, by name.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
import triton
import triton.language as tl

from nondet.core.certificates import certificates
from nondet.core.launch import note
from nondet.core.proof import Claim, operands_key, product_inputs, prove
from nondet.errors import UserError
from nondet.kernels.matmul.triton_kernels import Tile, tile_offsets
from nondet.kernels.triton_common import HALF, INTERPRETED, multiprocessors, on_device, require

# Triton reads a kernel's annotations itself: only tl.constexpr may stand there.
# mypy: allow-untyped-defs, allow-incomplete-defs

STEP = 16
ANCHOR = Tile(64, 64, STEP, 4, 3)
# In 16-bit formats: what is tried, and elements of the weight that such a tile makes in a given time, guessed.
WIDE = {Tile(128, 256, 64, 8, 3): 1.0, Tile(128, 128, 64, 8, 3): 0.85, Tile(128, 64, 64, 4, 4): 0.65}
_CUT, _TOKENS, _COLUMNS = 5 * STEP, 21 * STEP, 256  # of a proof


@triton.jit(do_not_specialize=["S"])
def _fold_kernel(
    acc_ptr, g_ptr, x_ptr, at_ptr, S, N, K, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_S: tl.constexpr
):
    """acc [N, K] += g [S, N] transposed times x [S, K], all row by row, in steps of BLOCK_S tokens.

    With `at` [S] a token's row of g and x, and -1 for none; else they are its rows as they lie.
    """
    offs_n, offs_k = tile_offsets(tl.program_id(0), N, K, BLOCK_N, BLOCK_K, 8)
    in_n, in_k = offs_n < N, offs_k < K
    places = acc_ptr + offs_n.to(tl.int64)[:, None] * K + offs_k[None, :]
    inside = in_n[:, None] & in_k[None, :]
    acc = tl.load(places, mask=inside, other=0.0)
    offs_s = tl.arange(0, BLOCK_S)
    for s in range(0, S, BLOCK_S):
        rows, there = s + offs_s, s + offs_s < S
        if at_ptr is not None:
            rows = tl.load(at_ptr + rows, mask=there, other=-1)
            there = rows >= 0
        rows = rows.to(tl.int64)
        g = tl.load(g_ptr + rows[None, :] * N + offs_n[:, None], mask=in_n[:, None] & there[None, :], other=0.0)
        x = tl.load(x_ptr + rows[:, None] * K + offs_k[None, :], mask=there[:, None] & in_k[None, :], other=0.0)
        acc = tl.dot(g, x, acc, input_precision="ieee", out_dtype=tl.float32)
    tl.store(places, acc, mask=inside)


@triton.jit(do_not_specialize=["steps"])
def _steps_kernel(acc_ptr, rows_ptr, steps, H, BLOCK: tl.constexpr):
    """acc [H] += rows [steps, H], one row after the other."""
    cols = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = cols < H
    acc = tl.load(acc_ptr + cols, mask=inside, other=0.0)
    for step in range(steps):
        acc += tl.load(rows_ptr + step * H.to(tl.int64) + cols, mask=inside, other=0.0)
    tl.store(acc_ptr + cols, acc, mask=inside)


def launch(acc: torch.Tensor, grad: torch.Tensor, x: torch.Tensor, tile: Tile, at: torch.Tensor | None = None) -> None:
    """`fold_product` by that tile, proven or not."""
    n, k = grad.shape[1], x.shape[1]
    size = len(grad) if at is None else len(at)
    note(f"fold_product[{tile}]")
    with on_device(acc):
        _fold_kernel[(triton.cdiv(n, tile.block_m) * triton.cdiv(k, tile.block_n),)](
            *(acc, grad.contiguous(), x.contiguous(), at, size, n, k, tile.block_m, tile.block_n, tile.block_k),
            num_warps=tile.warps,
            num_stages=tile.stages if at is None else 2 * tile.stages - 1,  # indices are a stage of their own
        )


def fold_product(acc: torch.Tensor, grad: torch.Tensor, x: torch.Tensor, at: torch.Tensor | None = None) -> None:
    """acc [N, K] float32 += grad [S, N] transposed times x [S, K], S a multiple of 16.

    float16, bfloat16 or float32, both of one dtype; accumulated in float32, nothing is rounded. With `at` int32 [S] the
    tokens are rows at[s] of grad and x, zeros where that is -1.

    Raises:
        UserError: on this machine a chain that is stored and loaded again has other bits.
        NotImplementedError: a dtype or device without a kernel.
        ValueError: shapes that do not fit.
    """
    size = len(x) if at is None else len(at)
    if len(grad) != len(x) or size % STEP or acc.shape != (grad.shape[1], x.shape[1]) or not acc.is_contiguous():
        raise ValueError(f"fold_product got {tuple(acc.shape)}, {tuple(grad.shape)} and {tuple(x.shape)}")
    require("fold_product", (*HALF, torch.float32), grad, x)
    if acc.numel() and size:
        launch(acc, grad, x, ANCHOR if INTERPRETED else tile_for(grad.dtype, *acc.shape, x.device), at)


def fold_steps(acc: torch.Tensor, rows: torch.Tensor) -> None:
    """acc [H] += rows [S, H], both float64, one row after the other."""
    require("fold_steps", (torch.float64,), acc, rows)
    note("fold_steps")
    with on_device(acc):
        _steps_kernel[(triton.cdiv(acc.numel(), 64),)](acc, rows.contiguous(), len(rows), acc.numel(), 64, num_warps=2)


@functools.lru_cache(maxsize=4096)
def tile_for(dtype: torch.dtype, n: int, k: int, device: torch.device) -> Tile:
    """The quickest tile that has the anchor's bits, as guessed: turns of all multiprocessors; if chains are carried."""
    tiles = {"fold/carried": ANCHOR, **({f"fold/{tile.name}": tile for tile in WIDE} if dtype in HALF else {})}
    key = operands_key("fold", (), (str(dtype).removeprefix("torch."), f"N={n}", f"K={k}"))
    kept = certificates("cuda")
    if any(kept.standing(name, key) is None for name in tiles):
        claims = [Claim(name, key, carried(tile, _CUT)) for name, tile in tiles.items()]
        # columns that end within a tile where the weight's do; beyond that their number decides no order
        left, right = (size if size <= _COLUMNS else _COLUMNS + size % _COLUMNS for size in (n, k))
        with torch.no_grad():
            prove(claims, carried(ANCHOR, _TOKENS), product_inputs(left, right, _TOKENS, dtype, device), kept)
    if not kept.standing("fold/carried", key):
        raise UserError(
            f"fold is not proven on this machine ({key}): a chain that is carried from call to call has other bits",
            "Train without nondet.fold() here.",
        )

    def turns(tile: Tile) -> float:
        programs = triton.cdiv(n, tile.block_m) * triton.cdiv(k, tile.block_n)
        return triton.cdiv(programs, multiprocessors(device)) * tile.block_m * tile.block_n / WIDE.get(tile, 0.1)

    return min((tile for name, tile in tiles.items() if kept.standing(name, key)), key=turns)


def carried(tile: Tile, cut: int) -> Callable[..., torch.Tensor]:
    """(x [N, S], weight [K, S], _) -> [N, K] float32: the fold from zero in two calls, the first of `cut` tokens."""

    def call(x: torch.Tensor, weight: torch.Tensor, bias: None) -> torch.Tensor:
        grad, other = x.t().contiguous(), weight.t().contiguous()
        acc = torch.zeros(len(x), len(weight), dtype=torch.float32, device=x.device)
        for begin, end in ((0, cut), (cut, len(grad))):
            if end > begin:
                launch(acc, grad[begin:end], other[begin:end], tile)
        return acc

    return call
