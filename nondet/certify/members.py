"""Anchors and members that are no function of a kernel module as they stand: a tile asked for, a library called alone.

Every function here has the signature of its operator (`nondet.kernels.reference`) and raises NotImplementedError where
it does not apply; `nondet.kernels.classes` names them. CUDA, but for the last three; forward only.
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
    "cublaslt_matmul",
    "cublaslt_ranks_linear",
    "cublaslt_ranks_matmul",
    "dispatcher_key",
    "each_row_by_cpu_matmul",
    "grouped_anchor",
    "grouped_tiles",
    "lanes_sum",
    "segments_anchor",
    "segments_hopper",
    "segments_split",
    "segments_varlen",
    "tf32_linear",
    "tf32_matmul",
    "tma_tiles_linear",
    "tma_tiles_matmul",
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
    from nondet.kernels.matmul.cuda_triton import anchor, matmul_chain

    return matmul_chain(a, b, bias, tile=anchor(a.dtype), tf32=tf32)


def _member(
    choice: str, tf32: bool, a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """The same by the dispatcher's member of that name, whatever is proven of it."""
    from nondet.kernels.matmul.cuda_members import run_member

    return run_member(choice, a, b, bias, tf32=tf32)


def _family(prefix: str, wrap: Call, tf32: bool, dtype: str) -> dict[str, Call]:
    from nondet.kernels.matmul.cuda_triton import tiles

    names: tuple[str, ...]
    if prefix == "cublaslt:":
        names = _RANKS if dtype in ("bfloat16", "float16", "float32") else ()
    elif prefix == "tma:" and dtype not in ("bfloat16", "float16"):
        names = ()
    else:
        names = tuple(tile.name for tile in tiles(getattr(torch, dtype)))
    return {name: partial(wrap, partial(_member, f"{prefix}{name}", tf32)) for name in names}


def dispatcher_key(member: str, cls: str, dtype: str) -> tuple[str, str] | None:
    """What `matmul_members` looks a tile's standing up by, which it proves once for all shapes; None for other members.

    A tile that leaves its class at one shape must not be used at any.
    """
    family, _, tile = member.partition("/")
    if not cls.startswith("chain") or family not in ("triton", "tma") or not tile:
        return None
    return ("triton", f"{cls} {dtype} {tile}") if family == "triton" else ("triton-tma", f"{cls} {dtype} tma:{tile}")


_RANKS = ("1", "2", "3")  # the library's next choices; its favourite is a member of its own

chain_anchor_linear = partial(_as_linear, partial(_anchor_chain, False))
chain_anchor_matmul = partial(_as_matmul, partial(_anchor_chain, False))
chain_anchor_linear_tf32 = partial(_as_linear, partial(_anchor_chain, True))
chain_anchor_matmul_tf32 = partial(_as_matmul, partial(_anchor_chain, True))
cublaslt_linear = partial(_as_linear, partial(_member, "cublaslt:0", False))
cublaslt_ranks_linear = partial(_family, "cublaslt:", _as_linear, False)
triton_tiles_linear = partial(_family, "", _as_linear, False)
tma_tiles_linear = partial(_family, "tma:", _as_linear, False)
triton_tiles_linear_tf32 = partial(_family, "", _as_linear, True)
cublaslt_matmul = partial(_as_matmul, partial(_member, "cublaslt:0", False))
cublaslt_ranks_matmul = partial(_family, "cublaslt:", _as_matmul, False)
triton_tiles_matmul = partial(_family, "", _as_matmul, False)
tma_tiles_matmul = partial(_family, "tma:", _as_matmul, False)
triton_tiles_matmul_tf32 = partial(_family, "", _as_matmul, True)


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
    from nondet.kernels.experts.cuda import grouped_chain, tiles

    found = tiles(getattr(torch, dtype))
    plain: dict[str, Call] = {tile.name: partial(grouped_chain, tile=tile, tma=False) for tile in found}
    return plain | {
        f"{tile.name} tma": partial(_grouped_tma, tile) for tile in found if dtype in ("bfloat16", "float16")
    }


def _grouped_tma(tile: Any, x: torch.Tensor, weight: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
    from nondet.kernels.experts.cuda import grouped_chain, takes_tma

    if not takes_tma(x, weight):
        raise NotImplementedError("TMA does not read this layout here")
    return grouped_chain(x, weight, offsets, tile=tile, tma=True)


def segments_anchor(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, causal: bool = True, scale: float | None = None
) -> torch.Tensor:
    """One program walks a query's segments in order."""
    from nondet.kernels.attention.cuda import attention

    return attention(q, k, v, causal=causal, scale=scale, split=False)


def segments_hopper(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, causal: bool = True, scale: float | None = None
) -> torch.Tensor:
    """The warp-specialized prefill kernel, also where it is the slower way."""
    from nondet.kernels.attention.hopper import prefill, supports

    reason = supports(q, k, v, causal, None, None)
    if reason is not None:
        raise NotImplementedError(reason)
    return prefill(q, k, v, causal=causal, scale=scale)


def segments_split(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, causal: bool = True, scale: float | None = None
) -> torch.Tensor:
    """A program for each segment, merged afterwards: split-KV, also where it is the slower way."""
    from nondet.kernels.attention.cuda import attention

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


segments_varlen = _Varlen("nondet.kernels.attention.cuda:attention_varlen")
blocks_varlen = _Varlen("nondet.kernels.attention.cpu:attention_varlen")

_ONE_CHUNK, _CHUNK, _LEAST_LANES, _MOST_LANES = 16384, 4096, 256, 2048


def lanes_sum(x: torch.Tensor) -> torch.Tensor:
    """x [..., W] -> [...]: the order of class lanes in PyTorch's elementwise additions, which have no order to choose.

    Written from the class's words (`nondet.kernels.classes`) alone. float32, float64 for float64; any device.
    """
    wide = x.to(torch.float64 if x.dtype == torch.float64 else torch.float32)
    width = x.shape[-1]
    size = _power_of_two(width) if width <= _ONE_CHUNK else _CHUNK
    lanes = min(size, max(_LEAST_LANES, min(size // 4, _MOST_LANES)))
    sums = []
    for start in range(0, max(width, 1), size):
        part = wide[..., start : start + size]
        part = torch.nn.functional.pad(part, (0, size - part.shape[-1]))
        while part.shape[-1] > lanes:
            half = part.shape[-1] // 2
            part = part[..., :half] + part[..., half:]
        sums.append(_neighbours(part))
    chunks = torch.stack(sums, -1)
    return _neighbours(torch.nn.functional.pad(chunks, (0, _power_of_two(len(sums)) - len(sums)))).to(x.dtype)


def _neighbours(x: torch.Tensor) -> torch.Tensor:
    while x.shape[-1] > 1:
        x = x[..., 0::2] + x[..., 1::2]
    return x[..., 0]


def _power_of_two(n: int) -> int:
    return 1 << max(n - 1, 0).bit_length()


def each_row_by_cpu_matmul(x: torch.Tensor, weight: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
    """Each row alone times its expert's weight, which lies on a 64-byte boundary, as the class asks."""
    from nondet.kernels.matmul.cpu import matmul

    aligned = [w if w.data_ptr() % 64 == 0 else w.clone() for w in weight]
    out = x.new_zeros((x.shape[0], weight.shape[2]))
    start = 0
    for group, end in enumerate(offsets.tolist()):
        for row in range(start, end):
            out[row : row + 1] = matmul(x[row : row + 1], aligned[group])
        start = end
    return out
