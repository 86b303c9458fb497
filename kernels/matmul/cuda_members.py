"""The members of class "chain" by name, and the proof that one of them has the class's bits.

A member's bits may depend on everything that it is told about a product: shape, strides, alignment, bias, algorithm or
tile. So each is proven at the very problem that it is to serve, on hard inputs of that shape and layout, under the key
that `nondet.core.proof.operands_key` makes of the operands. `nondet certify` asks under the same keys: what it has
proven is not proven again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch

from nondet.core import inputs
from nondet.core.certificates import certificates
from nondet.core.proof import BIAS_SIZE, Claim, operands_key
from nondet.core.proof import prove as prove_by_bits
from nondet.kernels.matmul import cublaslt
from nondet.kernels.matmul import cuda_blas as blas_matmul
from nondet.kernels.matmul.cuda_tiles import anchor, tile_named
from nondet.kernels.matmul.cuda_tma import bind_tma, tma_takes
from nondet.kernels.matmul.cuda_triton import bind_chain
from nondet.kernels.matmul.hopper import bind_hopper, hopper_takes
from nondet.kernels.triton_common import on_device

__all__ = ["Launch", "Member", "alignment_of", "claim_of", "member", "prove", "run_member", "stands"]

Launch = Callable[[torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor], None]


class Member(NamedTuple):
    """An implementation bound to one problem: where its standing is written down, and how it is launched.

    Attributes:
        name: "cublaslt 21.18.5.0a1b2c3d", "triton 16x32x128w4s5", "tma 128x128x64w4s4".
        key: The problem, as `nondet.core.proof.operands_key` writes it.
    """

    name: str
    key: str
    label: str
    launch: Launch
    is_anchor: bool


def alignment_of(a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None = None) -> int:
    """What a member is bound for: 256 where every operand starts at such a multiple, else 16, else 1 (bytes)."""
    low = a.data_ptr() | b.data_ptr() | (0 if bias is None else bias.data_ptr())
    return 256 if not low & 255 else 16 if not low & 15 else 1


def member(
    choice: str,
    a: torch.Tensor,
    b: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    tf32: bool = False,
    alignment: int = 16,
) -> Member | None:
    """The member called `choice` (see `matmul_tables`) for a [B, M, K] x b [B, K, N] + bias [N]; None: not for it.

    Args:
        alignment: Of all operands that it will be launched with, in bytes: 16, or 256, which gives cuBLASLt more to
            choose from.

    Raises:
        ValueError: no such name.
    """
    key = operands_key("chain-tf32" if tf32 else "chain", (a, b, bias), alignment=alignment)
    if choice.startswith("cublaslt:"):
        return _cublaslt(int(choice.partition(":")[2]), key, a, b, bias, tf32, alignment)
    way, _, name = choice.rpartition(":")
    tile = tile_named(name)
    if way == "hopper":
        if tf32 or not hopper_takes(a, b, tile):
            return None
        return Member(f"hopper {tile.name}", key, f"matmul_chain_hopper[{tile}]", bind_hopper(a, b, bias, tile), False)
    if way == "tma":
        if tf32 or not tma_takes(a, b):
            return None
        return Member(f"tma {tile.name}", key, f"matmul_chain_tma[{tile}]", bind_tma(a, b, bias, tile), False)
    launch = bind_chain(a, b, bias, tile, tf32=tf32)
    return Member(f"triton {tile.name}", key, f"matmul_chain[{tile}]", launch, tile == anchor(a.dtype))


def _cublaslt(
    rank: int,
    key: str,
    a: torch.Tensor,
    b: torch.Tensor,
    bias: torch.Tensor | None,
    tf32: bool,
    alignment: int,
) -> Member | None:
    problem = blas_matmul.problem_of(a, b, bias, tf32) if cublaslt.available() else None
    if problem is None or not a.is_cuda:
        return None
    offered = blas_matmul.algorithms(problem, a.device.index, rank + 1, alignment)
    chosen = next((one for one in offered if one.rank == rank), None)
    if chosen is None:
        return None
    product = blas_matmul.Product(problem, a.device.index, chosen)
    return Member(f"cublaslt {chosen}", key, f"cublaslt[{chosen.number}.{chosen.tile}]", product, False)


def run_member(
    choice: str, a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None = None, *, tf32: bool = False
) -> torch.Tensor:
    """a [B, M, K] x b [B, K, N] (+ bias [N]) by the member called `choice`, whatever its standing: to certify it.

    Raises:
        NotImplementedError: the member does not take this problem.
    """
    bound = _bound(choice, a, b, bias, tf32)
    if bound is None:
        raise NotImplementedError(f"{choice} takes no {tuple(a.shape)} x {tuple(b.shape)} of {a.dtype} so laid out")
    out = torch.empty(a.shape[0], a.shape[1], b.shape[2], dtype=a.dtype, device=a.device)
    with on_device(a):
        bound.launch(a, b, bias, out)
    return out


def claim_of(
    choice: str, a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None = None, *, tf32: bool = False
) -> tuple[str, str] | None:
    """(member, key) that the dispatcher would look `choice` up by for these operands; None: it is not for them."""
    bound = _bound(choice, a, b, bias, tf32)
    return None if bound is None else (bound.name, bound.key)


def _bound(choice: str, a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None, tf32: bool) -> Member | None:
    alignment = alignment_of(a, b, bias)
    if alignment < 16 or not (a.shape[0] and a.shape[1] and b.shape[2]):
        return None
    return member(choice, a, b, bias, tf32=tf32, alignment=alignment)


def prove(
    members: Sequence[Member],
    a: torch.Tensor,
    b: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    tf32: bool = False,
    alignment: int = 16,
) -> list[bool | None]:
    """For each member: has it the anchor's bits on hard inputs of the shapes and strides of a, b and bias?

    As `nondet.core.proof.prove` says and records it. Inputs start at multiples of `alignment` bytes and, below 256, at
    none of a larger power of two.
    """
    if not members:
        return []
    shape = (a.shape[0], a.shape[1], b.shape[2])

    def called(launch: Launch) -> Callable[..., torch.Tensor]:
        def call(left: torch.Tensor, right: torch.Tensor, extra: torch.Tensor | None) -> torch.Tensor:
            out = torch.full(shape, torch.nan, dtype=a.dtype, device=a.device)
            launch(left, right, extra, out)
            return out

        return call

    with torch.no_grad():
        return prove_by_bits(
            [Claim(bound.name, bound.key, called(bound.launch)) for bound in members],
            called(bind_chain(a, b, bias, anchor(a.dtype), tf32=tf32)),
            _proof_inputs(a, b, bias, alignment),
            certificates(),
        )


def stands(
    bound: Member,
    a: torch.Tensor,
    b: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    tf32: bool = False,
    alignment: int = 16,
    may_prove: bool = True,
) -> bool | None:
    """Is the member, bound to a, b and bias, proven? If nobody knows and it may be, prove it now."""
    if bound.is_anchor:
        return True
    known = certificates().standing(bound.name, bound.key)
    if known is not None or not may_prove:
        return known
    return prove([bound], a, b, bias, tf32=tf32, alignment=alignment)[0]


# The first two have an exact result of zero: what is left is the rounding errors of the order, and nothing else.
_PROOFS = ("order", "order-wide", "wide, cancel, outlier, bell")
_PIECE = 2**22


def _proof_inputs(
    a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None, alignment: int
) -> Iterator[tuple[str, tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]]]:
    for kind in _PROOFS:
        left = _hard(a, kind, negate=True, alignment=alignment)
        right = _hard(b.mT, kind, negate=False, alignment=alignment).mT
        extra = None
        if bias is not None:
            extra = _hard(bias[None], "bell", negate=False, alignment=alignment)[0] * BIAS_SIZE.get(kind, 1.0)
        yield kind, (left, right, extra)


def _hard(x: torch.Tensor, kind: str, *, negate: bool, alignment: int = 256) -> torch.Tensor:
    """Of x's shape, dtype, device and strides, with rows of the kind. Beyond 4 M elements rows repeat."""
    span = 1 + sum((size - 1) * step for size, step in zip(x.shape, x.stride(), strict=True))
    offset = 0 if alignment >= 256 else alignment // x.element_size()
    out = torch.empty(offset + span, dtype=x.dtype, device=x.device).as_strided(x.shape, x.stride(), offset)
    width = x.shape[-1]
    rows = max(1, min(x.shape[-2], _PIECE // width))
    seed = 2 if kind == "order-wide" else 1
    if kind.startswith("order"):
        piece = inputs.order_revealing(rows, width, x.dtype, seed, negate=negate, device=x.device)
    else:
        rng = inputs.generator(int(negate), x.device)
        drawn = [inputs.make(one, (rows, width), x.dtype, x.device, rng) for one in kind.split(", ")]
        piece = torch.stack(drawn, 1).flatten(0, 1)  # the kinds take turns, from row to row
    for product in out if out.dim() == 3 else out[None]:
        for start in range(0, product.shape[0], piece.shape[0]):
            part = product[start : start + piece.shape[0]]
            part.copy_(piece[: part.shape[0]])
    return out
