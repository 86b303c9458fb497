"""Anchors and members of the products that are no function of a kernel module as they stand.

A tile asked for, the library called alone, the user's own call with TF32 allowed. Every function has the signature of
its operator (`nondet.kernels.reference`) and raises NotImplementedError where it does not apply;
`nondet.core.registry` names them. CUDA; forward only.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

__all__ = [
    "chain_anchor_linear",
    "chain_anchor_linear_tf32",
    "chain_anchor_matmul",
    "chain_anchor_matmul_tf32",
    "cublaslt_linear",
    "cublaslt_matmul",
    "cublaslt_ranks_linear",
    "cublaslt_ranks_matmul",
    "hopper_tiles_linear",
    "hopper_tiles_matmul",
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
    from nondet.kernels.matmul.cuda_tiles import anchor
    from nondet.kernels.matmul.cuda_triton import matmul_chain

    return matmul_chain(a, b, bias, tile=anchor(a.dtype), tf32=tf32)


class _Chosen:
    """The dispatcher's member of a name, whatever is proven of it, with the signature of linear or of matmul.

    `claim` names the certificate that the dispatcher looks for before it uses the member on such operands.
    """

    def __init__(self, choice: str, wrap: Callable[..., Any], tf32: bool = False) -> None:
        self.choice, self._wrap, self._tf32 = choice, wrap, tf32

    def __call__(self, *operands: torch.Tensor | None) -> torch.Tensor:
        from nondet.kernels.matmul.cuda_members import run_member

        result: torch.Tensor = self._wrap(partial(run_member, self.choice, tf32=self._tf32), *operands)
        return result

    def claim(self, *operands: torch.Tensor | None) -> tuple[str, str] | None:
        """(member, key) of the certificate; None where the member is not for these operands."""
        from nondet.kernels.matmul.cuda_members import claim_of

        claims: list[tuple[str, str] | None] = []

        def product(a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
            claims.append(claim_of(self.choice, a, b, bias, tf32=self._tf32))
            return a.new_empty(a.shape[0], a.shape[1], b.shape[2])

        self._wrap(product, *operands)
        return claims[0]


def _family(prefix: str, wrap: Call, tf32: bool, dtype: str) -> dict[str, Call]:
    from nondet.kernels.matmul.cuda_tiles import tiles
    from nondet.kernels.matmul.hopper import HOPPER_TILES

    names: tuple[str, ...]
    if prefix == "cublaslt:":
        names = _RANKS if dtype in ("bfloat16", "float16", "float32") else ()
    elif prefix in ("tma:", "hopper:") and dtype not in ("bfloat16", "float16"):
        names = ()
    elif prefix == "hopper:":
        names = tuple(tile.name for tile in HOPPER_TILES)
    else:
        names = tuple(tile.name for tile in tiles(getattr(torch, dtype)))
    return {name: _Chosen(f"{prefix}{name}", wrap, tf32) for name in names}


_RANKS = ("1", "2", "3")  # the library's next choices; its favourite is a member of its own

chain_anchor_linear = partial(_as_linear, partial(_anchor_chain, False))
chain_anchor_matmul = partial(_as_matmul, partial(_anchor_chain, False))
chain_anchor_linear_tf32 = partial(_as_linear, partial(_anchor_chain, True))
chain_anchor_matmul_tf32 = partial(_as_matmul, partial(_anchor_chain, True))
cublaslt_linear = _Chosen("cublaslt:0", _as_linear)
cublaslt_ranks_linear = partial(_family, "cublaslt:", _as_linear, False)
triton_tiles_linear = partial(_family, "", _as_linear, False)
tma_tiles_linear = partial(_family, "tma:", _as_linear, False)
hopper_tiles_linear = partial(_family, "hopper:", _as_linear, False)
triton_tiles_linear_tf32 = partial(_family, "", _as_linear, True)
cublaslt_matmul = _Chosen("cublaslt:0", _as_matmul)
cublaslt_ranks_matmul = partial(_family, "cublaslt:", _as_matmul, False)
triton_tiles_matmul = partial(_family, "", _as_matmul, False)
tma_tiles_matmul = partial(_family, "tma:", _as_matmul, False)
hopper_tiles_matmul = partial(_family, "hopper:", _as_matmul, False)
triton_tiles_matmul_tf32 = partial(_family, "", _as_matmul, True)


def _with_tf32(product: str, *operands: torch.Tensor | None) -> torch.Tensor:
    """What a user gets who allowed TF32, which is a setting of the process: put back when done."""
    from nondet.kernels.matmul import cuda

    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    try:
        result: torch.Tensor = getattr(cuda, product)(*operands)
    finally:
        torch.set_float32_matmul_precision(before)
    return result


tf32_linear = partial(_with_tf32, "linear")
tf32_matmul = partial(_with_tf32, "matmul")
