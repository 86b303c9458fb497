"""The products of a mixture of experts on CUDA, their proof, the choice of experts, and the sum of their results.

The order of reduction is that of class "chain" (`nondet.kernels.matmul.triton_kernels`). So a row has the bits of the
plain product of that row with its expert's weight, whatever the other rows are, however they are spread over the
experts, and wherever it lies. The tile is chosen by the number of rows per expert, and changes only speed.

Each program finds its tile's expert from the offsets on the device: nothing is read back to the host, so you can
capture a launch in a CUDA graph and replay it with other offsets.

One kernel uses TMA (tensor descriptors), for float16 and bfloat16 whose rows are aligned, on GPUs that have it; one
pointers. That tiles and kernels agree is a property of the hardware. So each is proven by bits at its first use on a
machine, against the anchor of class chain (`nondet.core.certificates`); one that fails is not used.

Functions raise NotImplementedError for a device or dtype without a kernel, and ValueError for shapes that do not fit.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from nondet.core.certificates import certificates
from nondet.core.inputs import placed
from nondet.core.launch import note
from nondet.core.proof import Claim, distinct, established, operands_key, product_inputs
from nondet.core.proof import prove as prove_by_bits
from nondet.kernels.experts import topk as ordered_topk
from nondet.kernels.experts.topk import check_shapes
from nondet.kernels.matmul import triton_kernels as chain_tiles
from nondet.kernels.matmul.cuda import alignment_of
from nondet.kernels.matmul.triton_kernels import Tile, anchor, chain, matmul_chain
from nondet.kernels.rows.cuda_softmax import softmax
from nondet.kernels.triton_common import HALF, INTERPRETED, accumulator, capability, on_device, require

# Triton reads a kernel's annotations itself and allows only tl.constexpr.
# mypy: allow-untyped-defs, allow-incomplete-defs

_DTYPES_ROUTING = (torch.float16, torch.bfloat16, torch.float32)
_MAX_EXPERTS = 1024
_MAX_TOP = 64


@triton.jit
def _topk_kernel(
    x_ptr, values_ptr, indices_ptr, M, WIDTH, K, stride_row, stride_col, ROWS: tl.constexpr, BLOCK: tl.constexpr
):
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    cols = tl.arange(0, BLOCK)
    inside = (rows[:, None] < M) & (cols[None, :] < WIDTH)
    x = tl.load(x_ptr + rows[:, None] * stride_row + cols[None, :] * stride_col, mask=inside, other=0.0)
    x = x.to(tl.float32) + 0.0  # -0.0 becomes 0.0
    bits = x.to(tl.int32, bitcast=True)
    bits = tl.where(x != x, 0x7FFFFFFF, bits)  # NaN is the greatest, as in torch
    ordered = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits).to(tl.int64)
    # One integer for number and index: the greatest of them is the greatest number at its lowest index.
    keys = tl.where(inside, ordered * 4294967296 + (BLOCK - 1 - cols[None, :]), -9223372036854775807)
    for rank in range(K):
        best = tl.max(keys, axis=1)
        index = BLOCK - 1 - (best & 0xFFFFFFFF)
        out = rows * K + rank
        value = tl.load(x_ptr + rows * stride_row + index * stride_col, mask=rows < M, other=0.0)
        tl.store(values_ptr + out, value, mask=rows < M)
        tl.store(indices_ptr + out, index, mask=rows < M)
        keys = tl.where(keys == best[:, None], -9223372036854775807, keys)


def topk(x: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The k largest of each row of x [..., W]: values [..., k] in x's dtype and indices [..., k] int64, largest first.

    Exact. Equal numbers come in ascending order of their indices; NaN counts as the greatest. Rows wider than any
    router's, or of float64, go to `nondet.kernels.experts.topk`, which has the same order.
    """
    width = x.shape[-1]
    if x.dtype not in _DTYPES_ROUTING or width > _MAX_EXPERTS or k > _MAX_TOP:
        return ordered_topk.topk(x, k)
    require("topk", _DTYPES_ROUTING, x)
    rows = x.reshape(x.shape[:-1].numel(), width)
    values = torch.empty(*x.shape[:-1], k, device=x.device, dtype=x.dtype)
    indices = torch.empty(*x.shape[:-1], k, device=x.device, dtype=torch.int64)
    if values.numel() == 0:
        return values, indices
    block = triton.next_power_of_2(width)
    together = max(1, 512 // block)
    note(f"routing_topk[{together}x{block}]")
    with on_device(x):
        _topk_kernel[(triton.cdiv(rows.shape[0], together),)](
            rows, values, indices, rows.shape[0], width, k, *rows.stride(), ROWS=together, BLOCK=block, num_warps=4
        )
    return values, indices


@triton.jit
def _sum_middle_kernel(x_ptr, out_ptr, R, C, stride_a, stride_r, stride_c, BLOCK: tl.constexpr, ACC: tl.constexpr):
    a = tl.program_id(0).to(tl.int64)
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = cols < C
    x_ptrs = x_ptr + a * stride_a + cols.to(tl.int64) * stride_c
    total = tl.zeros((BLOCK,), dtype=ACC)
    for _ in range(R):
        total += tl.load(x_ptrs, mask=inside, other=0.0).to(ACC)
        x_ptrs += stride_r
    tl.store(out_ptr + a * C + cols, total.to(out_ptr.dtype.element_ty), mask=inside)


def sum_middle(x: torch.Tensor) -> torch.Tensor:
    """Over the middle axis of x [A, R, C] -> [A, C]: a token's experts, weighted, in the order of their rank.

    Accumulated in float32, from the first to the last of R, rounded once. A row depends only on its own numbers.
    """
    if x.ndim != 3:
        raise ValueError(f"sum_middle takes [A, R, C], got {tuple(x.shape)}")
    require("sum_middle", _DTYPES_ROUTING, x)
    first, between, columns = x.shape
    out = torch.empty(first, columns, device=x.device, dtype=x.dtype)
    if out.numel() == 0:
        return out
    block = min(1024, triton.next_power_of_2(columns))
    note(f"routing_sum[{block}]")
    with on_device(x):
        _sum_middle_kernel[(first, triton.cdiv(columns, block))](
            x, out, between, columns, *x.stride(), BLOCK=block, ACC=accumulator(x.dtype), num_warps=4
        )
    return out


@triton.jit(do_not_specialize=["n"])
def _index_add_kernel(
    target_ptr,
    row_ptr,
    order_ptr,
    source_ptr,
    n,
    R,
    C,
    alpha,
    stride_tr,
    stride_tc,
    stride_sr,
    stride_sc,
    BLOCK: tl.constexpr,
    ACC: tl.constexpr,
):
    """row_ptr [n] ascends; the program of a row's first entry adds all of them, in sequence."""
    place = tl.program_id(0)
    row = tl.load(row_ptr + place)
    tl.device_assert((row >= 0) & (row < R), "index_add_: an index outside of the target")
    before = tl.load(row_ptr + place - 1, mask=place > 0, other=-1)
    if row != before:
        cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        inside = cols < C
        targets = target_ptr + row * stride_tr + cols.to(tl.int64) * stride_tc
        total = tl.load(targets, mask=inside, other=0.0).to(ACC)
        more = place < n
        while more:
            source = tl.load(order_ptr + place)
            sources = source_ptr + source * stride_sr + cols.to(tl.int64) * stride_sc
            total += tl.load(sources, mask=inside, other=0.0).to(ACC) * alpha
            place += 1
            more = tl.load(row_ptr + place, mask=place < n, other=-1) == row
        tl.store(targets, total.to(target_ptr.dtype.element_ty), mask=inside)


def index_add_(target: torch.Tensor, index: torch.Tensor, source: torch.Tensor, alpha: float = 1.0) -> torch.Tensor:
    """target [R, C], in place, with alpha times source [n, C] added to its rows index [n]; any strides.

    A row's additions follow the order of `index`, onto the row's own number, in float32; rounded once. So a row depends
    only on what is added to it, in that order. One program adds all contributions of a row.
    """
    if target.ndim != 2 or index.ndim != 1 or source.shape != (index.shape[0], target.shape[1]):
        raise ValueError(
            f"index_add_ takes [R, C], [n] and [n, C], got {tuple(target.shape)}, {tuple(index.shape)} and "
            f"{tuple(source.shape)}"
        )
    require("index_add_", _DTYPES_ROUTING, target, source)
    if source.numel() == 0:
        return target
    row, order = torch.sort(index.to(torch.int64), stable=True)
    columns = target.shape[1]
    block = min(1024, triton.next_power_of_2(columns))
    note(f"routing_index_add[{block}]")
    with on_device(target):
        _index_add_kernel[(index.shape[0], triton.cdiv(columns, block))](
            *(target, row, order, source, index.shape[0], target.shape[0], columns, float(alpha)),
            *(*target.stride(), *source.stride()),
            BLOCK=block,
            ACC=accumulator(target.dtype),
            num_warps=4,
            enable_fp_fusion=False,
            debug=True,
        )
    return target


def proven(x: torch.Tensor, weight: torch.Tensor, tile: Tile, tma: bool) -> tuple[Tile, bool]:
    """The tile and kernel if proven, now if need be; else the anchor's tile with pointers; else NotImplementedError."""
    if INTERPRETED:  # NumPy's products there: they show nothing about the hardware
        return tile, tma
    for one, copied in ((tile, tma), (anchor(x.dtype), False)):
        named = _named(x, weight, one, copied)
        if established(*named, certificates(), functools.partial(prove, x, weight, one, copied)):
            return one, copied
    raise NotImplementedError(
        "no grouped product is proven to be of class chain for this dtype, K, N and layout on this machine; before a "
        "CUDA graph is captured, run it once"
    )


def _named(x: torch.Tensor, weight: torch.Tensor, tile: Tile, tma: bool) -> tuple[str, str]:
    """(member, key) of the certificate: one expert's product at any number of rows."""
    step = x.stride(0) if x.shape[0] > 1 else x.shape[1]
    aligned = alignment_of(x, weight)
    return _written(tile, tma, x.dtype, x.shape[1], weight.shape[2], step, *weight.stride()[1:], aligned)


@functools.lru_cache(maxsize=4096)  # looked up at every call, and it takes ten times as long to write
def _written(tile: Tile, tma: bool, *facts: Any) -> tuple[str, str]:
    dtype, k, n, step, rows, columns, aligned = facts  # aligned in bytes: Triton compiles for 16, or for less
    key = (str(dtype).removeprefix("torch."), f"K={k} N={n}", f"x={step}", f"weight={rows},{columns}")
    return f"triton {tile.name}{' tma' * tma}", operands_key("grouped", key, (f"@{min(aligned, 16)}",))


def prove(x: torch.Tensor, weight: torch.Tensor, tile: Tile, tma: bool) -> bool | None:
    """Compare a member with the anchor of class chain on hard inputs of x's and weight's K, N, strides and alignment.

    Three groups whose rows begin and end within tiles hold all rows of one product in sequence. The result is recorded,
    see `nondet.core.proof.prove`.
    """
    rows, (depth, columns) = 140, weight.shape[1:]
    offsets = torch.tensor([rows, 2 * rows, 3 * rows], dtype=torch.int32, device=x.device)
    step = x.stride(0) if x.shape[0] > 1 else depth
    inner, offset = weight.stride()[1:], int(alignment_of(x, weight) < 16)
    outer = columns * inner[1] if inner[0] == 1 else 1 + (depth - 1) * inner[0] + (columns - 1) * inner[1]

    def member(left: torch.Tensor, right: torch.Tensor, bias: None) -> torch.Tensor:
        packed = placed(left.flatten(0, 1), (step, 1), offset)
        return grouped_chain(packed, placed(right.mT, (outer, *inner), offset), offsets, tile, tma)

    def plain(left: torch.Tensor, right: torch.Tensor, bias: None) -> torch.Tensor:
        return matmul_chain(left, right.mT, tile=anchor(x.dtype)).flatten(0, 1)

    claim = Claim(*_named(x, weight, tile, tma), member)
    with torch.no_grad():
        inputs = product_inputs((rows, columns, depth), x.dtype, x.device, batch=3)
        return prove_by_bits([claim], plain, inputs, certificates())[0]


_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_HALF_TILES = (
    Tile(16, 64, 64, 4, 6),
    Tile(16, 128, 64, 4, 5),
    Tile(32, 128, 64, 4, 4),
    Tile(64, 128, 64, 4, 4),
    Tile(64, 256, 64, 8, 4),
    Tile(128, 128, 64, 8, 4),
    Tile(128, 256, 64, 8, 4),
)


def tiles(dtype: torch.dtype) -> tuple[Tile, ...]:
    """All tiles that may be launched for the dtype: the members of the class."""
    return _HALF_TILES if dtype in HALF else chain_tiles.tiles(dtype)


def tile_for(rows: int, groups: int, n: int, dtype: torch.dtype) -> Tile:
    """The tile for `rows` rows over `groups` weights with n columns: by the mean number of rows of a weight.

    The limits are those of an H200 in bfloat16 (64 experts, 8 a token, K x N of 2048 x 1536 and 768 x 2048).
    """
    known = tiles(dtype)
    mean = rows / groups
    if dtype not in HALF:
        return known[0] if mean <= 16 else known[-1]
    if mean <= 8:
        return known[0] if n < 2048 else known[1]
    if mean <= 24:
        return known[2]
    if mean <= 96:
        return known[3]
    return known[5] if n <= 128 else known[6]


@triton.jit
def _place(offsets_ptr, R, N, GROUPS, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_G: tl.constexpr):
    """This program's expert, its tile's first row and column, and where the expert's rows end; expert GROUPS gives
    zeros.
    """
    tiles_n = tl.cdiv(N, BLOCK_N)
    pid = tl.program_id(0)
    groups = tl.arange(0, BLOCK_G)
    # Offsets beyond R, or that descend, are the caller's error: nothing outside of the tensors is touched.
    ends = tl.minimum(tl.load(offsets_ptr + groups, mask=groups < GROUPS, other=R), R)
    starts = tl.load(offsets_ptr + groups - 1, mask=(groups > 0) & (groups <= GROUPS), other=0)
    starts = tl.where(groups <= GROUPS, tl.maximum(starts, 0), R)
    counts = tl.cdiv(tl.maximum(ends - starts, 0), BLOCK_M)
    upto = tl.cumsum(counts, axis=0)
    group = tl.sum((upto <= pid // tiles_n).to(tl.int32), axis=0)
    mine = groups == group
    start = tl.sum(tl.where(mine, starts, 0), axis=0)
    end = tl.sum(tl.where(mine, ends, 0), axis=0)
    tiles_m = tl.sum(tl.where(mine, counts, 0), axis=0)
    within = pid - tl.sum(tl.where(mine, upto - counts, 0), axis=0) * tiles_n
    first_m = within // (8 * tiles_n) * 8
    high = tl.maximum(tl.minimum(tiles_m - first_m, 8), 1)
    pid_m = first_m + (within % (8 * tiles_n)) % high
    pid_n = (within % (8 * tiles_n)) // high
    return group, start + pid_m * BLOCK_M, pid_n * BLOCK_N, end


@triton.jit(do_not_specialize=["R"])
def _grouped_pointer_kernel(
    x_ptr,
    weight_ptr,
    out_ptr,
    offsets_ptr,
    R,
    N,
    K,
    GROUPS,
    stride_xr,
    stride_xk,
    stride_wg,
    stride_wk,
    stride_wn,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_G: tl.constexpr,
    EVEN_K: tl.constexpr,
    ACC: tl.constexpr,
):
    group, row, col, end = _place(offsets_ptr, R, N, GROUPS, BLOCK_M, BLOCK_N, BLOCK_G)
    offs_m = row + tl.arange(0, BLOCK_M)
    offs_n = col + tl.arange(0, BLOCK_N)
    acc = chain(
        x_ptr,
        weight_ptr + group.to(tl.int64) * stride_wg,
        offs_m,
        offs_n,
        0,
        tl.where(group < GROUPS, K, 0),
        end,
        N,
        stride_xr,
        stride_xk,
        stride_wk,
        stride_wn,
        BLOCK_M,
        BLOCK_N,
        BLOCK_K,
        EVEN_K,
        ACC,
        "ieee",
    )
    out = out_ptr + offs_m.to(tl.int64)[:, None] * N + offs_n[None, :]
    tl.store(out, acc.to(out_ptr.dtype.element_ty), mask=(offs_m[:, None] < end) & (offs_n[None, :] < N))


@triton.jit(do_not_specialize=["R"])
def _grouped_tma_kernel(
    x_desc,
    weight_desc,
    out_ptr,
    offsets_ptr,
    R,
    N,
    K,
    GROUPS,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_G: tl.constexpr,
):
    """x_desc [R, K], weight_desc [GROUPS * N, K]. A block may reach into the next expert's rows: those sums are not
    stored.
    """
    group, row, col, end = _place(offsets_ptr, R, N, GROUPS, BLOCK_M, BLOCK_N, BLOCK_G)
    acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for k in range(0, tl.where(group < GROUPS, K, 0), BLOCK_K):
        x = x_desc.load([row, k])
        weight = weight_desc.load([group * N + col, k])
        acc = tl.dot(x, weight.T, acc, out_dtype=tl.float32)
    offs_m = row + tl.arange(0, BLOCK_M)
    offs_n = col + tl.arange(0, BLOCK_N)
    out = out_ptr + offs_m.to(tl.int64)[:, None] * N + offs_n[None, :]
    tl.store(out, acc.to(out_ptr.dtype.element_ty), mask=(offs_m[:, None] < end) & (offs_n[None, :] < N))


def takes_tma(x: torch.Tensor, weight: torch.Tensor) -> bool:
    """Whether tensor descriptors can read x [R, K] and weight [G, K, N]: it depends on layouts, not on R or offsets."""
    if x.dtype not in HALF or x.shape[0] == 0:
        return False
    if not INTERPRETED and capability(x.device) < (9, 0):
        return False
    groups, depth, columns = weight.shape
    flat = weight.stride(1) == 1 and (groups == 1 or weight.stride(0) == columns * weight.stride(2))
    aligned = weight.stride(2) % 8 == 0 and x.stride(0) % 8 == 0  # TMA counts strides in 16 bytes
    return (
        flat
        and aligned
        and weight.stride(2) >= depth
        and x.stride(1) == 1
        and x.stride(0) >= depth
        and alignment_of(x, weight) >= 16
        and groups * columns < 2**31
    )


def grouped_chain(
    x: torch.Tensor, weight: torch.Tensor, offsets: torch.Tensor, tile: Tile | None = None, tma: bool | None = None
) -> torch.Tensor:
    """`grouped_matmul` without its checks; None for `tile` or `tma` chooses among the proven ones.

    NotImplementedError: TMA is asked for, and does not read this layout.
    """
    (rows, depth), (groups, _, columns) = x.shape, weight.shape
    out = torch.empty(rows, columns, device=x.device, dtype=x.dtype)
    if out.numel() == 0:
        return out
    if groups == 0:
        return out.zero_()
    if x.stride(1) != 1 or (rows > 1 and x.stride(0) < depth):
        x = x.contiguous()
    if not distinct(weight[0]):
        weight = weight.contiguous()
    takes = takes_tma(x, weight)
    if tma and not takes:
        raise NotImplementedError("TMA does not read this layout here")
    tma = takes if tma is None else tma
    if tile is None:
        tile, tma = proven(x, weight, tile_for(rows, groups, columns, x.dtype), tma)
    # An upper bound of the tiles of rows: every group may leave one unfilled, and so may the rows after the last.
    most = (rows + (tile.block_m - 1) * min(groups + 1, rows)) // tile.block_m
    grid = (most * triton.cdiv(columns, tile.block_n),)
    common: dict[str, Any] = {
        "BLOCK_M": tile.block_m,
        "BLOCK_N": tile.block_n,
        "BLOCK_K": tile.block_k,
        "BLOCK_G": triton.next_power_of_2(groups + 1),
        "num_warps": tile.warps,
        "num_stages": tile.stages,
    }
    note(f"grouped_matmul[{tile}{' tma' if tma else ''}]")
    with on_device(x):
        if tma:
            x_desc = TensorDescriptor(x, [rows, depth], [x.stride(0), 1], [tile.block_m, tile.block_k])
            stride = weight.stride(2)
            weight_desc = TensorDescriptor(weight, [groups * columns, depth], [stride, 1], [tile.block_n, tile.block_k])
            _grouped_tma_kernel[grid](x_desc, weight_desc, out, offsets, rows, columns, depth, groups, **common)
        else:
            _grouped_pointer_kernel[grid](
                *(x, weight, out, offsets, rows, columns, depth, groups, *x.stride(), *weight.stride()),
                EVEN_K=depth % tile.block_k == 0,
                ACC=accumulator(x.dtype),
                **common,
            )
    return out


def grouped_matmul(x: torch.Tensor, weight: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
    """Rows offsets[g - 1] ... offsets[g] - 1 of x [R, K] times weight[g] of [G, K, N] -> [R, N]. Any strides.

    float16, bfloat16 and float32 (accumulated in float32, in IEEE arithmetic) or float64 (in float64). The order is a
    chain over K in one accumulator, rounded once: the bits of a row are those of
    `nondet.kernels.matmul.triton_kernels.matmul_chain`, so they depend only on the row and its weight. Rows
    after the last offset belong to no weight and give zeros. Offsets are read only on the device: they have to ascend,
    and what is beyond R is cut. Forward only. NotImplementedError also where no kernel is proven (see `proven`).
    """
    check_shapes(x, weight, offsets)
    if offsets.dtype not in (torch.int32, torch.int64) or offsets.device != x.device:
        raise ValueError(f"grouped_matmul takes int32 or int64 offsets on {x.device}, got {offsets.dtype}")
    require("grouped_matmul", _DTYPES, x, weight)
    return grouped_chain(x, weight, offsets.to(torch.int32).contiguous())


# A whole layer of experts, for a server that calls no aten function of it.


def route(logits: torch.Tensor, k: int, *, renormalize: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits [M, E] -> the k largest of their softmax: weights float32 [M, k], largest first, and experts int64 [M, k].

    In float32: `softmax` in class lanes, then `topk`, of equal numbers the lower index. `renormalize`: divide a token's
    weights by their sum, added in their order.
    """
    weights, chosen = topk(softmax(logits.float()), k)
    return weights / sum_middle(weights.unsqueeze(-1)) if renormalize else weights, chosen


def weighted_experts(
    x: torch.Tensor, w13: torch.Tensor, w2: torch.Tensor, weights: torch.Tensor, chosen: torch.Tensor
) -> torch.Tensor:
    """The weighted sum of a token's experts' results, with SiLU gates: x [M, H] -> [M, H], in x's dtype.

    Class "grouped" twice; then a token's weighted numbers are added up in float32, in the order of `chosen` (integers
    [M, k]), and rounded once. Only integers are sorted and counted, and nothing is read back to the host. `w13` is [E,
    2 I, H], an expert's gates above the projections that they gate; `w2` [E, H, I]; `weights` float32 [M, k].
    """
    (tokens, top), inner = chosen.shape, w2.shape[2]
    owner, order = torch.sort(chosen.reshape(-1), stable=True)
    ends = torch.searchsorted(owner, torch.arange(len(w13), device=x.device, dtype=owner.dtype), right=True)
    ends = ends.to(torch.int32)
    wide = grouped_matmul(x[order // top], w13.mT, ends)
    given = grouped_matmul(torch.nn.functional.silu(wide[:, :inner]) * wide[:, inner:], w2.mT, ends)
    place = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=x.device))
    return sum_middle(given[place].view(tokens, top, w2.shape[1]) * weights.unsqueeze(-1)).to(x.dtype)
