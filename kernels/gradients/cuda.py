"""Gradients of softmaxes and RMSNorm on CUDA in one pass or two, with the bits of the formulas in torch's operators.

Order: sums are those of class "lanes" (`nondet.kernels.rows.cuda_softmax`), over a row by its width, and of a norm's
weight over the rows by their number; the rest is elementwise, one rounding per operation, nothing contracted. So these
are the bits of `nondet.kernels.dispatch.gradients`, and a row's bits are its own: neither the number of rows nor the
launch enters. (exp of log_softmax's results is CUDA's, as torch's; subnormals are 0.)
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra import libdevice

from nondet.core.launch import note
from nondet.kernels.rows.cuda_softmax import add_tree, load_tile, merged_sum, plan, store_tile
from nondet.kernels.triton_common import INTERPRETED, launch, on_device

# Triton reads a kernel's annotations itself and allows only tl.constexpr.
# mypy: allow-untyped-defs, allow-incomplete-defs

_COMPILED = tl.constexpr(not INTERPRETED)
_COLUMNS, _LANES = 64, 32  # of a program that adds up rows
_EXACT = {"enable_fp_fusion": False}


@triton.jit
def _row_sum(x, ROWS: tl.constexpr, SPAN: tl.constexpr, HALVES: tl.constexpr, LEVELS: tl.constexpr):
    """`add_tree`; one row is a scalar, which has any layout: else each thread would hold the whole row."""
    total = add_tree(x, ROWS, SPAN, HALVES, LEVELS)
    return tl.full((1, 1), tl.sum(total), tl.float32) if ROWS == 1 else total


@triton.jit(do_not_specialize=["M"])
def _softmax_kernel(
    g_ptr, y_ptr, parts_ptr, out_ptr, M, WIDTH, CHUNKS, LOG: tl.constexpr, PASS: tl.constexpr, ROWS: tl.constexpr,
    SPAN: tl.constexpr, HALVES: tl.constexpr, LEVELS: tl.constexpr, MERGE: tl.constexpr, MERGE_LEVELS: tl.constexpr,
):  # fmt: skip
    """A row of one chunk (PASS 0), or one chunk of a wide row: its sum (1), then its results by the row's sums (2)."""
    first = tl.program_id(0) // CHUNKS * ROWS
    start = tl.program_id(0) % CHUNKS * SPAN
    g = load_tile(g_ptr, first, start, WIDTH, WIDTH, 1, M, ROWS, SPAN, 0.0).to(tl.float32)
    y = g
    if not LOG or PASS != 1:
        y = load_tile(y_ptr, first, start, WIDTH, WIDTH, 1, M, ROWS, SPAN, 0.0).to(tl.float32)
    if PASS == 2:
        total = tl.full((1, 1), merged_sum(parts_ptr, first, CHUNKS, MERGE, MERGE_LEVELS), tl.float32)
    else:
        total = _row_sum(g if LOG else g * y, ROWS, SPAN, HALVES, LEVELS)
    if PASS == 1:
        store_tile(parts_ptr, total, first, tl.program_id(0) % CHUNKS, CHUNKS, CHUNKS, M, 1, 1)
    else:
        out = g - (libdevice.exp(y) if _COMPILED else tl.exp(y)) * total if LOG else (g - total) * y
        store_tile(out_ptr, out, first, start, WIDTH, WIDTH, M, ROWS, SPAN)


@triton.jit(do_not_specialize=["M"])
def _norm_kernel(
    g_ptr, x_ptr, weight_ptr, out_ptr, scale_ptr, M, WIDTH,
    EPS: tl.constexpr, ROWS: tl.constexpr, SPAN: tl.constexpr, HALVES: tl.constexpr, LEVELS: tl.constexpr,
):  # fmt: skip
    first = tl.program_id(0) * ROWS
    cols = tl.arange(0, SPAN)[None, :]
    x = load_tile(x_ptr, first, 0, WIDTH, WIDTH, 1, M, ROWS, SPAN, 0.0).to(tl.float32)
    g = load_tile(g_ptr, first, 0, WIDTH, WIDTH, 1, M, ROWS, SPAN, 0.0).to(tl.float32)
    weighted = g * tl.load(weight_ptr + cols, mask=cols < WIDTH, other=0.0).to(tl.float32)
    scale = tl.math.div_rn(1.0, tl.math.sqrt_rn(_row_sum(x * x, ROWS, SPAN, HALVES, LEVELS) / WIDTH + EPS))
    normed = x * scale
    inner = _row_sum(weighted * normed, ROWS, SPAN, HALVES, LEVELS) / WIDTH
    store_tile(out_ptr, (weighted - normed * inner) * scale, first, 0, WIDTH, WIDTH, M, ROWS, SPAN)
    store_tile(scale_ptr, scale, first, 0, 1, 1, M, ROWS, 1)


@triton.jit(do_not_specialize=["M"])
def _columns_kernel(
    x_ptr, g_ptr, scale_ptr, out_ptr, M, WIDTH, NORMED: tl.constexpr,
    SPAN: tl.constexpr, LANES: tl.constexpr, HALVES: tl.constexpr, LEVELS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Rows that the tree over M adds first: 2^LEVELS neighbouring lanes of a chunk, and all that is added to them.

    The chunk of x [M, WIDTH], or of g (x scale), is SPAN rows, and its halves are added until LANES are left. Rows are
    held in the order in which every level adds halves, so that a thread's own are added first: neighbours last bit
    first.
    """
    NEXT: tl.constexpr = 1 << LEVELS
    TAKEN: tl.constexpr = NEXT << HALVES
    part = tl.program_id(0) // tl.cdiv(WIDTH, COLUMNS)
    index = tl.arange(0, TAKEN)
    rows = part // (LANES // NEXT) * SPAN + part % (LANES // NEXT) * NEXT + index // NEXT * LANES
    for bit in tl.static_range(LEVELS):
        rows += (index >> bit & 1) << (LEVELS - 1 - bit)
    cols = (tl.program_id(0) % tl.cdiv(WIDTH, COLUMNS) * COLUMNS + tl.arange(0, COLUMNS))[None, :]
    at, inside = rows[:, None].to(tl.int64) * WIDTH + cols, (rows < M)[:, None] & (cols < WIDTH)
    x = tl.load(x_ptr + at, mask=inside, other=0.0).to(tl.float32)
    if NORMED:
        g = tl.load(g_ptr + at, mask=inside, other=0.0).to(tl.float32)
        x = g * (x * tl.load(scale_ptr + rows, mask=rows < M, other=0.0)[:, None])
    for level in tl.static_range(HALVES + LEVELS):
        x = tl.sum(tl.reshape(x, (2, TAKEN >> (level + 1), COLUMNS)), axis=0)
    tl.store(out_ptr + part.to(tl.int64) * WIDTH + cols, x.to(out_ptr.dtype.element_ty), mask=cols < WIDTH)


def softmax_gradient(gradient: torch.Tensor, output: torch.Tensor, dtype: torch.dtype, *, log: bool) -> torch.Tensor:
    """p (g - sum of g p) of g and p [..., W]; with `log` g - exp(y) (sum of g) of g and y: [..., W], rounded once."""
    g, y = gradient.contiguous(), output.contiguous()
    out = torch.empty(g.shape, device=g.device, dtype=dtype)
    if not out.numel():
        return out
    m, width = g.numel() // g.shape[-1], g.shape[-1]
    how = plan(width, g.element_size())
    parts = torch.empty((m, how.chunks), dtype=torch.float32, device=g.device) if how.chunks > 1 else out
    together, warps = how.rows_and_warps(m)  # one row if it has several chunks
    note(f"{'log_' * log}softmax_gradient[{how.chunks}x{how.span}]")
    grid, numbers = (-(-m // together) * how.chunks,), (m, width, how.chunks)
    with on_device(g):
        for number in (1, 2) if how.chunks > 1 else (0,):
            how_many = {"LOG": log, "PASS": number, "ROWS": together, **how.tree(), **how.merging()}
            launch(_softmax_kernel, grid, (g, y, parts, out), numbers, how_many, num_warps=warps, **_EXACT)
    return out


def rms_norm_gradient(
    gradient: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Of x [M, H], in its dtype, and the scales 1 / sqrt(mean(x^2) + eps) [M] float32; None: wider than one chunk.

    gradient [M, H] and weight [H] are of any floating dtype up to float32; all is contiguous.
    """
    (m, width), how = x.shape, plan(x.shape[1], x.element_size())
    if how.chunks > 1 or not x.numel():
        return None
    out, scale = torch.empty_like(x), torch.empty(m, dtype=torch.float32, device=x.device)
    together, warps = how.rows_and_warps(m)
    warps *= 2 if how.span > 8192 else 1  # two rows and a weight are held, for a softmax only one row
    note(f"rms_norm_gradient[{how.span}]")
    with on_device(x):
        tensors, constants = (gradient, x, weight, out, scale), {"EPS": eps, "ROWS": together, **how.tree()}
        launch(_norm_kernel, (-(-m // together),), tensors, (m, width), constants, num_warps=warps, **_EXACT)
    return out, scale


def sum_over_rows(
    x: torch.Tensor, dtype: torch.dtype, gradient: torch.Tensor | None = None, scale: torch.Tensor | None = None
) -> torch.Tensor:
    """x [M, W] -> [W], M and W > 0: the bits of class "lanes" over M numbers, in one pass over whole rows.

    With a gradient [M, W] and scales [M] float32, of gradient (x scale) in float32. All is contiguous.
    """
    (rows, width), how = x.shape, plan(len(x), 4)
    note(f"sum_over_rows[{how.chunks}x{how.span}]")
    span, lanes, halves = how.span, how.span >> how.halves, how.halves
    while True:
        taken = min(lanes, _LANES)
        count = -(-rows // span) * (lanes // taken)
        out = torch.empty((count, width), device=x.device, dtype=dtype if count == 1 else torch.float32)
        constants = {"NORMED": gradient is not None, "SPAN": span, "LANES": lanes, "HALVES": halves}
        constants |= {"LEVELS": taken.bit_length() - 1, "COLUMNS": _COLUMNS}
        grid, warps = (count * triton.cdiv(width, _COLUMNS),), 8 if taken << halves > 128 else 4
        with on_device(x):
            tensors = (x, gradient, scale, out)
            launch(_columns_kernel, grid, tensors, (rows, width), constants, num_warps=warps, **_EXACT)
        if count == 1:
            return out[0]
        x, gradient, scale, rows = out, None, None, count
        span = lanes = triton.next_power_of_2(count)
        halves = 0
