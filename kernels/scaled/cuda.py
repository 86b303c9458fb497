"""FP8 products of class "chain-fp8": by torch's own where that is proven, by Triton, and the proofs.

Every program processes K from 0 on in steps of 128, with any tile: the matrix unit adds a step's products in an
accumulator that starts from zero, and the step's sum is added to a float32 total on the CUDA cores. So the order
depends neither on M, nor on the row's position, nor on the tile, as far as the matrix instructions of two tiles agree.
Hopper's keep few bits of such sums, and mma.sync and wgmma need not agree, so each tile is proven by bits against
`anchor` at its first use on a machine (`nondet.core.certificates`); the anchor's own tile is the last choice.

On an H200 the class is also that of cuBLASLt's kernels behind torch._scaled_mm (docs/evidence/h200): a stretch of 128 k
from zero, and the scales as in `_scaled_kernel`. So torch's own call is a member, faster from some rows on. The library
picks its kernel by M: it is proven at each M, and Triton's run where it is not.

On an H100 the Triton tiles' bits did not follow the batch at two layers' sizes (docs/evidence/h100); elsewhere nothing
is claimed beyond what the proof at first use finds.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterator
from functools import partial

import torch
import triton
import triton.language as tl

from nondet.core.certificates import certificates
from nondet.core.launch import note
from nondet.core.proof import PRODUCT_INPUTS, Claim, established, operands_key
from nondet.core.proof import prove as prove_by_bits
from nondet.kernels.matmul.triton_kernels import Tile, tile_offsets
from nondet.kernels.scaled import cpu
from nondet.kernels.scaled.functions import BLOCK, Operands, checked, laid_out, operands
from nondet.kernels.stock import block_scales, or_refused
from nondet.kernels.triton_common import INTERPRETED, on_device

# Triton reads a kernel's annotations itself and allows only tl.constexpr.
# mypy: allow-untyped-defs, allow-incomplete-defs

# block_k is the promotion interval: part of the class, the same for all.
TILES = (
    Tile(16, 64, BLOCK, 4, 4),
    Tile(32, 64, BLOCK, 4, 4),
    Tile(64, 64, BLOCK, 4, 4),
    Tile(64, 128, BLOCK, 4, 4),
    Tile(128, 128, BLOCK, 8, 3),
)
ANCHOR = TILES[2]
ROWS_PROVEN = 140  # more than one tile's, and not a multiple of any


@triton.jit(do_not_specialize=["M"])
def _scaled_kernel(
    a_ptr,
    b_ptr,
    left_ptr,
    right_ptr,
    bias_ptr,
    out_ptr,
    M,
    N,
    K,
    stride_am,
    stride_ak,
    stride_bk,
    stride_bn,
    stride_lm,
    stride_ls,
    stride_rs,
    stride_rn,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PER_SCALE: tl.constexpr,
    BLOCKED: tl.constexpr,
    SINGLE: tl.constexpr,
    BIAS: tl.constexpr,
):
    offs_m, offs_n = tile_offsets(tl.program_id(0), M, N, BLOCK_M, BLOCK_N, 8)
    offs_k = tl.arange(0, BLOCK_K)
    rows, cols = offs_m.to(tl.int64), offs_n.to(tl.int64)
    in_m, in_n = offs_m < M, offs_n < N
    lefts = left_ptr + rows * stride_lm
    # a block's scale is one for all columns of a tile
    rights = right_ptr + (tl.min(offs_n, 0) // PER_SCALE if PER_SCALE > 1 else cols) * stride_rn
    total = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for k in range(0, K, BLOCK_K):
        ks = (k + offs_k).to(tl.int64)
        a = tl.load(
            a_ptr + rows[:, None] * stride_am + ks[None, :] * stride_ak,
            mask=in_m[:, None] & (ks[None, :] < K),
            other=0.0,
        )
        b = tl.load(
            b_ptr + ks[:, None] * stride_bk + cols[None, :] * stride_bn,
            mask=in_n[None, :] & (ks[:, None] < K),
            other=0.0,
        )
        if BLOCKED:  # loaded before the product, to hide their latency
            left = tl.load(lefts + (k // BLOCK_K) * stride_ls, mask=in_m, other=0.0)
            if PER_SCALE > 1:
                scale = left[:, None] * tl.load(rights + (k // BLOCK_K) * stride_rs)
            else:
                scale = left[:, None] * tl.load(rights + (k // BLOCK_K) * stride_rs, mask=in_n, other=0.0)[None, :]
        # a limit of its own keeps Triton from adding onto the total in the matrix unit, and from cutting the step
        part = tl.dot(a, b, out_dtype=tl.float32, max_num_imprecise_acc=BLOCK_K)
        total = tl.fma(part, tl.broadcast_to(scale, (BLOCK_M, BLOCK_N)), total) if BLOCKED else total + part
    if not BLOCKED:
        left = tl.load(lefts, mask=in_m, other=0.0)
        right = tl.load(rights, mask=in_n, other=0.0)
        total = total * (left[:, None] * right[None, :]) if SINGLE else total * right[None, :] * left[:, None]
    if BIAS:
        total = total + tl.load(bias_ptr + cols, mask=in_n, other=0.0).to(tl.float32)[None, :]
    out = out_ptr + rows[:, None] * N + cols[None, :]
    tl.store(out, total.to(out_ptr.dtype.element_ty), mask=in_m[:, None] & in_n[None, :])


def tile_for(m: int) -> Tile:
    """The tile for m rows: few that hold no row."""
    return next((tile for tile in TILES[:3] if m <= tile.block_m), TILES[3] if m <= 256 else TILES[4])


def scaled_matmul(
    a: torch.Tensor,
    b: torch.Tensor,
    scale_a: torch.Tensor,
    scale_b: torch.Tensor,
    dtype: torch.dtype,
    bias: torch.Tensor | None = None,
    *,
    tile: Tile | None = None,
    tiles_only: bool = False,
) -> torch.Tensor:
    """a [M, K] times b [K, N], float8_e4m3fn or float8_e5m2, with float32 scales -> [M, N] of the dtype. Any strides.

    Scales per tensor, per row, or in blocks; see `nondet.kernels.reference`. Order and invariance: top of this file. A
    bias [N] is added in float32 before the one rounding. Forward only. `tile`: one of `TILES`, unproven; None chooses
    by M among the members proven here, with `tiles_only` not torch's own, which is proven again at each M. Raises
    ValueError: shapes that do not fit; NotImplementedError: a device or dtype without a kernel, or no proven member.
    """
    blocked = checked(a, b, scale_a, scale_b, dtype)
    if not (a.is_cuda or INTERPRETED):
        raise NotImplementedError(f"scaled_matmul has no Triton kernel for device {a.device}; it runs on CUDA")
    if INTERPRETED and dtype == torch.bfloat16:
        raise NotImplementedError("scaled_matmul: Triton's interpreter computes bfloat16 wrongly; use float32")
    (M, K), N = a.shape, b.shape[1]
    if M * N == 0:
        return torch.empty(M, N, device=a.device, dtype=dtype)
    given = (a, b, scale_a, scale_b)
    if tile is None and M > MOST_ROWS:  # parts: a row has the same bits in any, and a proof fits into memory
        scales = scale_a.split(MOST_ROWS) if scale_a.numel() > 1 else [scale_a] * -(-M // MOST_ROWS)
        parts = zip(a.split(MOST_ROWS), scales, strict=True)
        return torch.cat([scaled_matmul(p, b, s, scale_b, dtype, bias, tiles_only=tiles_only) for p, s in parts])
    if tile is None:
        step = None if tiles_only else library_step(given, dtype, bias)
        if step is not None:
            note(f"scaled_matmul[{_named(step)}]")
            return library(*given, dtype, bias, step=step)
        tile = proven_tile(a, b, blocked, dtype, tile_for(M))
    out = torch.empty(M, N, device=a.device, dtype=dtype)
    left, right = laid_out(scale_a, scale_b, (M, K, N), repeated=not blocked)
    note(f"scaled_matmul[{tile}{' blocks' if blocked else ''}]")
    with on_device(a):
        _scaled_kernel[(triton.cdiv(M, tile.block_m) * triton.cdiv(N, tile.block_n),)](
            *(a, b, left, right, out if bias is None else bias.contiguous(), out, M, N, K),
            *(*a.stride(), *b.stride(), *left.stride(), *right.stride()),
            BLOCK_M=tile.block_m,
            BLOCK_N=tile.block_n,
            BLOCK_K=BLOCK,
            PER_SCALE=1 if right.shape[1] == N else BLOCK,
            BLOCKED=blocked,
            SINGLE=scale_b.numel() == 1,  # only of b's: one row's scale of a is one number, too
            BIAS=bias is not None,
            num_warps=tile.warps,
            num_stages=tile.stages,
            enable_fp_fusion=False,
        )
    return out


MOST_ROWS = 8192
LIBRARY = "torch._scaled_mm"
# Rows in multiples of these: the library needs 16 bytes of a block's scales together; and where it splits K at few
# rows, which leaves the class, it may not at 64.
_STEPS = (4, 64)


def _named(step: int) -> str:
    return LIBRARY if step in (1, _STEPS[0]) else f"{LIBRARY} of {step} rows"


def library(
    a: torch.Tensor,
    b: torch.Tensor,
    scale_a: torch.Tensor,
    scale_b: torch.Tensor,
    dtype: torch.dtype,
    bias: torch.Tensor | None = None,
    *,
    step: int = _STEPS[0],
) -> torch.Tensor:
    """torch's own product, proven or not, or NotImplementedError; scales in blocks take multiples of `step` rows."""
    rows, blocks = len(a), _form(scale_a, scale_b, len(a), b.shape[1]) == "block"
    if blocks and (more := -rows % step):
        padded = a.new_zeros(rows + more, a.shape[1], dtype=torch.uint8)
        padded[:rows] = a.view(torch.uint8)
        a, scale_a = padded.view(a.dtype), torch.nn.functional.pad(scale_a, (0, 0, 0, more))
    # in torch's layout; copied only if they have another, because each copy is a launch
    left, right = block_scales(scale_a, scale_b) if blocks else (scale_a.contiguous(), scale_b.contiguous())
    return or_refused(lambda: torch._scaled_mm(a, b, left, right, bias, out_dtype=dtype), LIBRARY, a)[:rows]


def padded(a, b, scale_a, scale_b, dtype) -> torch.Tensor:
    """torch's product with scales in blocks at any M: torch refuses rows that are not a multiple of four."""
    if scale_a.dim() < 2 or scale_a.shape[1] == 1:
        raise NotImplementedError("with one scale or scales of rows nothing is padded: see stock")
    note(f"{LIBRARY}, rows in fours")
    return library(a, b, scale_a, scale_b, dtype)


def _form(scale_a: torch.Tensor, scale_b: torch.Tensor, rows: int, columns: int) -> str | None:
    if scale_b.numel() == 1:
        return "tensor" if scale_a.numel() == 1 else None
    if (scale_a.shape, scale_b.shape) == ((rows, 1), (1, columns)):
        return "row"
    if scale_a.dim() == 2 and scale_a.shape[1] == scale_b.shape[0] > 1 and scale_b.shape[1] == -(-columns // BLOCK):
        return "block" if len(scale_a) == rows else None
    return None


# Expert by expert, by the proven kernel. There is no launch for all of them yet, so this is slow.
scaled_grouped_matmul = partial(cpu.scaled_grouped_matmul, product=partial(scaled_matmul, tiles_only=True))


def anchor(
    a: torch.Tensor, b: torch.Tensor, scale_a: torch.Tensor, scale_b: torch.Tensor, dtype: torch.dtype
) -> torch.Tensor:
    """The tile whose bits define the class."""
    return scaled_matmul(a, b, scale_a, scale_b, dtype, tile=ANCHOR)


def tile_members(dtype: str) -> dict[str, Callable[..., torch.Tensor]]:
    """Every tile, by name."""
    return {tile.name: partial(scaled_matmul, tile=tile) for tile in TILES}


def library_member(dtype: str) -> dict[str, Callable[..., torch.Tensor]]:
    """torch's own product, in each multiple of rows."""
    return {_named(step): partial(library, step=step) for step in _STEPS}


def proven_tile(a: torch.Tensor, b: torch.Tensor, blocked: bool, dtype: torch.dtype, tile: Tile) -> Tile:
    """The tile if proven, now if need be; else the anchor's, if that gives the same bits again; else
    NotImplementedError.
    """
    if INTERPRETED:  # NumPy's products there: they show nothing about the hardware
        return tile
    key = _written(a.dtype, b.dtype, dtype, *b.shape, a.stride(1), *b.stride(), _aligned(a, b), f"blocks={blocked}")
    form = "block" if blocked else "row"
    for one in dict.fromkeys((tile, ANCHOR)):
        member = f"triton {one.name}"
        alone, ours = partial(_and_few, ANCHOR, dtype), partial(_and_few, one, dtype)
        if _stands(a, b, (form, ROWS_PROVEN), alone, Claim(member, key, ours)):
            return one
    raise NotImplementedError("no FP8 product is proven to be of class chain-fp8 here, for these dtypes, K, N, layout")


def library_step(given: Operands, dtype: torch.dtype, bias: torch.Tensor | None) -> int | None:
    """The multiple of rows at which torch's own is proven at exactly these sizes, now if need be; None: not."""
    a, b, scale_a, scale_b = given
    rows, form = len(a), _form(scale_a, scale_b, len(a), b.shape[1])
    if INTERPRETED or form is None or torch.cuda.tunable.is_enabled():  # a tuned library picks by time
        return None
    if form == "row" and rows <= (64 if b.shape[1] >= 16384 else 48):  # there Triton's tiles were faster on an H200
        return None
    if _aligned(a, b) != 16 or a.stride() != (len(b), 1) or b.stride() != (1, len(b)):  # as a proof's inputs
        return None
    about = (form, rows, None if bias is None else bias.dtype, torch._C._get_sm_carveout_experimental())
    key = _written(a.dtype, b.dtype, dtype, *b.shape, 1, *b.stride(), 16, *about, *_workspace())
    for step in (1,) if form != "block" else _STEPS if rows < _STEPS[1] else _STEPS[:1]:
        products = (partial(scaled_matmul, tile=ANCHOR), partial(library, step=step))
        plain, torchs = (partial(_with_bias, product, dtype, bias) for product in products)
        if _stands(a, b, (form, rows), plain, Claim(_named(step), key, torchs)):
            return step
    return None


@functools.cache
def _workspace() -> tuple[str | None, ...]:
    """The settings of the library's workspace, which torch reads once and which decide the algorithms."""
    return tuple(
        map(os.environ.get, ("CUBLASLT_WORKSPACE_SIZE", "CUBLAS_WORKSPACE_CONFIG", "TORCH_CUBLASLT_UNIFIED_WORKSPACE"))
    )


@functools.lru_cache(maxsize=4096)
def _written(*facts: object) -> str:
    left, right, out, k, n, step, rows, columns, aligned, *about = facts
    words = (str(left), str(right), f"into {out}", f"K={k} N={n}", f"a={step}", f"b={rows},{columns}")
    return operands_key("chain-fp8", (w.replace("torch.", "") for w in words), (*map(str, about), f"@{aligned}"))


def _aligned(a: torch.Tensor, b: torch.Tensor) -> int:
    """16 where both operands and their rows start at a multiple of 16 bytes, which Triton compiles for; else 1."""
    return 1 if (a.data_ptr() | b.data_ptr() | max(a.stride()) | max(b.stride())) % 16 else 16


def _and_few(tile: Tile, dtype: torch.dtype, *given: torch.Tensor) -> torch.Tensor:
    """A tile's rows, and its first ones by themselves; of the anchor, these once more."""
    a, b, scale_a, scale_b = given
    whole = scaled_matmul(a, b, scale_a, scale_b, dtype, tile=tile)
    few = [
        whole[:m] if tile == ANCHOR else scaled_matmul(a[:m], b, scale_a[:m], scale_b, dtype, tile=tile) for m in (1, 3)
    ]
    return torch.cat([whole, *few])


def _with_bias(
    product: Callable[..., torch.Tensor], dtype: torch.dtype, like: torch.Tensor | None, *given: torch.Tensor
) -> torch.Tensor:
    bias = None
    if like is not None:  # of the size of rounding errors, which a larger one would hide
        bias = (torch.arange(len(like), device=like.device) % 13 - 6).to(like.dtype) * 2.0**-14
    return product(*given, dtype, bias)


def _stands(
    a: torch.Tensor, b: torch.Tensor, form: tuple[str, int], plain: Callable[..., torch.Tensor], claim: Claim
) -> bool | None:
    def inputs() -> Iterator[tuple[str, Operands]]:
        how, rows = form
        for kind in PRODUCT_INPUTS:
            left, right, *scales = operands(kind, how, (rows, *b.shape), (a.dtype, b.dtype), a.device, 0)
            shift = 0 if _aligned(a, b) == 16 else 1
            yield kind, (_laid(left, a, shift), _laid(right, b, shift), scales[0], scales[1])

    kept = certificates()
    return established(claim.member, claim.key, kept, lambda: prove_by_bits([claim], plain, inputs(), kept)[0])


def _laid(x: torch.Tensor, like: torch.Tensor, shift: int) -> torch.Tensor:
    by_rows = like.stride(1) <= like.stride(0)
    flat = (x if by_rows else x.mT).contiguous()
    moved = torch.empty(flat.numel() + shift, dtype=torch.uint8, device=x.device)[shift:].view(flat.shape)
    laid = moved.copy_(flat.view(torch.uint8)).view(x.dtype)
    return laid if by_rows else laid.mT
