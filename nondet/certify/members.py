"""Anchors and members that are no function of a kernel module as they stand: a tile asked for, a library called alone.

Every function here has the signature of its operator (`nondet.kernels.reference`) and raises NotImplementedError where
it does not apply; `nondet.kernels.numerics` names them. CUDA, but for the last three; forward only.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

__all__ = [
    "blocks_varlen",
    "chain_anchor_linear",
    "chain_anchor_linear_tf32",
    "chain_anchor_matmul",
    "chain_anchor_matmul_tf32",
    "cublaslt_linear",
    "cublaslt_linear_tf32",
    "cublaslt_matmul",
    "cublaslt_matmul_tf32",
    "each_row_by_cpu_matmul",
    "grouped_anchor",
    "grouped_tiles",
    "lanes_sum",
    "segments_anchor",
    "segments_split",
    "segments_varlen",
    "tf32_linear",
    "tf32_matmul",
    "triton_tiles_linear",
    "triton_tiles_linear_tf32",
    "triton_tiles_matmul",
    "triton_tiles_matmul_tf32",
]

Call = Callable[..., torch.Tensor]


def _as_linear(product: Call, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    rows = x.reshape(x.shape[:-1].numel(), x.shape[-1])
    return product(rows[None], weight.T[None], bias)[0].view(*x.shape[:-1], weight.shape[0])


def _as_matmul(product: Call, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return product(a[None], b[None])[0] if a.ndim == 2 else product(a, b)


def _anchor_chain(tf32: bool, a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """a [B, M, K] times b [B, K, N], plus bias [N], by the tile whose bits are the class by definition."""
    from nondet.kernels.triton_matmul import anchor, matmul_chain

    return matmul_chain(a, b, bias, tile=anchor(a.dtype), tf32=tf32)


def _cublaslt(tf32: bool, a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """The same by cuBLASLt's favourite algorithm without split-K."""
    from nondet.kernels.blas_matmul import ALIGNMENT_BYTES, Product, algorithms, problem_of

    problem = problem_of(a, b, bias, tf32)
    if problem is None:
        raise NotImplementedError("cuBLASLt: a dtype or layout that it does not take")
    places = [a.data_ptr(), b.data_ptr(), *([] if bias is None else [bias.data_ptr()])]
    steps = [problem.lda, problem.ldb, problem.a_step, problem.b_step, problem.n]
    if any(p % ALIGNMENT_BYTES for p in places) or any(s * a.element_size() % ALIGNMENT_BYTES for s in steps):
        raise NotImplementedError(f"cuBLASLt: an operand or stride that is no multiple of {ALIGNMENT_BYTES} bytes")
    index = a.device.index if a.device.index is not None else torch.cuda.current_device()
    found = algorithms(problem, index)
    if not found:
        raise NotImplementedError("cuBLASLt: no algorithm without split-K")
    out = torch.empty(problem.batch, problem.m, problem.n, device=a.device, dtype=a.dtype)
    with torch.cuda.device(index):
        Product(problem, index, found[0])(a, b, bias, out)
    return out


def _tiles(tf32: bool, wrap: Callable[..., torch.Tensor], dtype: str) -> dict[str, Call]:
    from nondet.kernels.triton_matmul import matmul_chain, tiles

    found = tiles(getattr(torch, dtype))
    return {tile.name: partial(wrap, partial(_by_tile, matmul_chain, tile, tf32)) for tile in found}


def _by_tile(
    chain: Call, tile: Any, tf32: bool, a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    return chain(a, b, bias, tile=tile, tf32=tf32)


chain_anchor_linear = partial(_as_linear, partial(_anchor_chain, False))
chain_anchor_matmul = partial(_as_matmul, partial(_anchor_chain, False))
chain_anchor_linear_tf32 = partial(_as_linear, partial(_anchor_chain, True))
chain_anchor_matmul_tf32 = partial(_as_matmul, partial(_anchor_chain, True))
cublaslt_linear = partial(_as_linear, partial(_cublaslt, False))
cublaslt_matmul = partial(_as_matmul, partial(_cublaslt, False))
cublaslt_linear_tf32 = partial(_as_linear, partial(_cublaslt, True))
cublaslt_matmul_tf32 = partial(_as_matmul, partial(_cublaslt, True))
triton_tiles_linear = partial(_tiles, False, _as_linear)
triton_tiles_matmul = partial(_tiles, False, _as_matmul)
triton_tiles_linear_tf32 = partial(_tiles, True, _as_linear)
triton_tiles_matmul_tf32 = partial(_tiles, True, _as_matmul)


def _with_tf32(operator: str, *operands: torch.Tensor | None) -> torch.Tensor:
    """What a user gets who allowed TF32, which is a setting of the process: put back when done."""
    from nondet.registry import load_implementation

    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    try:
        result: torch.Tensor = load_implementation(operator, "invariant", "cuda").call(*operands)
    finally:
        torch.set_float32_matmul_precision(before)
    return result


tf32_linear = partial(_with_tf32, "linear")
tf32_matmul = partial(_with_tf32, "matmul")


def grouped_anchor(x: torch.Tensor, weight: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
    """Each expert's rows by the anchor of class chain, one plain product after the other."""
    return _each_group(partial(_as_matmul, partial(_anchor_chain, False)), x, weight, offsets)


def _each_group(product: Call, x: torch.Tensor, weight: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
    out = x.new_zeros((x.shape[0], weight.shape[2]))
    start = 0
    for group, end in enumerate(offsets.tolist()):
        if start < end:
            out[start:end] = product(x[start:end], weight[group])
        start = end
    return out


def grouped_tiles(dtype: str) -> dict[str, Call]:
    """Every tile of the grouped kernels, with pointers and, where operands allow it, with TMA."""
    from nondet.kernels.grouped_matmul import grouped_chain, tiles

    found = tiles(getattr(torch, dtype))
    plain: dict[str, Call] = {tile.name: partial(grouped_chain, tile=tile, tma=False) for tile in found}
    return plain | {
        f"{tile.name} tma": partial(_grouped_tma, tile) for tile in found if dtype in ("bfloat16", "float16")
    }


def _grouped_tma(tile: Any, x: torch.Tensor, weight: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
    from nondet.kernels.grouped_matmul import grouped_chain, takes_tma

    if not takes_tma(x, weight):
        raise NotImplementedError("TMA does not read this layout here")
    return grouped_chain(x, weight, offsets, tile=tile, tma=True)


def segments_anchor(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, causal: bool = True, scale: float | None = None
) -> torch.Tensor:
    """One program walks a query's segments in order."""
    from nondet.kernels.triton_attention import attention

    return attention(q, k, v, causal=causal, scale=scale, split=False)


def segments_split(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, causal: bool = True, scale: float | None = None
) -> torch.Tensor:
    """A program for each segment, merged afterwards: split-KV, also where it is the slower way."""
    from nondet.kernels.triton_attention import attention

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
        from nondet.registry import load_object

        lengths = [(q.shape[1], k.shape[1]) for q, k, _ in requests]
        packed = [torch.cat([one[i].transpose(0, 1) for one in requests]).contiguous() for i in range(3)]
        out = load_object(self.target)(
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


segments_varlen = _Varlen("nondet.kernels.triton_attention:attention_varlen")
blocks_varlen = _Varlen("nondet.kernels.cpu_attention:attention_varlen")

_LANES = 4096


def lanes_sum(x: torch.Tensor) -> torch.Tensor:
    """x [..., W] -> [...]: the order of class lanes in PyTorch's elementwise additions, which have no order to choose.

    float32, float64 for float64; lane j takes x[j], x[j + BLOCK], ... in turn, then neighbours are added until one is
    left. Works on any device.
    """
    wide = x.to(torch.float64 if x.dtype == torch.float64 else torch.float32)
    width = x.shape[-1]
    block = min(_LANES, 1 << max(width - 1, 0).bit_length())
    lanes = wide.new_zeros(*x.shape[:-1], block)
    for start in range(0, width, block):
        part = wide[..., start : start + block]
        lanes += torch.nn.functional.pad(part, (0, block - part.shape[-1]))
    while lanes.shape[-1] > 1:
        lanes = lanes[..., 0::2] + lanes[..., 1::2]
    return lanes[..., 0].to(x.dtype)


def each_row_by_cpu_matmul(x: torch.Tensor, weight: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
    """Each row alone times its expert's weight, which lies on a 64-byte boundary, as the class asks."""
    from nondet.kernels.cpu_matmul import matmul

    aligned = [w if w.data_ptr() % 64 == 0 else w.clone() for w in weight]
    out = x.new_zeros((x.shape[0], weight.shape[2]))
    start = 0
    for group, end in enumerate(offsets.tolist()):
        for row in range(start, end):
            out[row : row + 1] = matmul(x[row : row + 1], aligned[group])
        start = end
    return out
