"""The members of class "chain" by name, and the proof that one of them has the class's bits.

cuBLASLt's bits may depend on everything that it is told about a product, so it is proven at each shape, layout, bias
and algorithm, on hard inputs of that very shape. A Triton tile walks K as its source says whatever the shape; what is
proven is that the machine's instructions do, once for each tile and dtype, at a size of our own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from nondet import inputs
from nondet.certificates import certificates
from nondet.kernels.matmul import cublaslt
from nondet.kernels.matmul import cuda_blas as blas_matmul
from nondet.kernels.matmul.cuda_tma import bind_tma, tma_takes
from nondet.kernels.matmul.cuda_triton import anchor, bind_chain, tile_named
from nondet.kernels.triton_common import on_device
from nondet.proof import BIAS_SIZE

__all__ = ["Launch", "Member", "member", "prove", "prove_tile", "run_member", "stands"]

Launch = Callable[[torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor], None]

# M, N, and a K that every BLOCK_K divides and one that none does
_TILE_PROOF = (192, 160, (4096, 4104))
_INTEGERS = {2: torch.int16, 4: torch.int32, 8: torch.int64}


class Member(NamedTuple):
    """An implementation bound to one problem: where its standing is written down, and how it is launched."""

    name: str
    key: str
    label: str
    launch: Launch
    is_anchor: bool


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
    kind = "chain-tf32" if tf32 else "chain"
    dtype = str(a.dtype).removeprefix("torch.")
    if choice.startswith("cublaslt:"):
        return _cublaslt(int(choice.partition(":")[2]), f"{kind} {dtype}", a, b, bias, tf32, alignment)
    tile = tile_named(choice.removeprefix("tma:"))
    key = f"{kind} {dtype} {choice}"
    if choice.startswith("tma:"):
        if not tma_takes(a, b):
            return None
        return Member("triton-tma", key, f"matmul_chain_tma[{tile}]", bind_tma(a, b, bias, tile), False)
    launch = bind_chain(a, b, bias, tile, tf32=tf32)
    return Member("triton", key, f"matmul_chain[{tile}]", launch, tile == anchor(a.dtype))


def _cublaslt(
    rank: int,
    kind: str,
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
    (batch, m, k), n = a.shape, b.shape[2]
    extra = (" bias" if bias is not None else "") + (f" B={batch}" if batch > 1 else "")
    key = f"{kind} M={m} N={n} K={k} {problem.layout()}{extra} algo={chosen}"
    product = blas_matmul.Product(problem, a.device.index, chosen)
    return Member("cublaslt", key, f"cublaslt[{chosen.number}.{chosen.tile}]", product, False)


def run_member(
    choice: str, a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None = None, *, tf32: bool = False
) -> torch.Tensor:
    """a [B, M, K] x b [B, K, N] (+ bias [N]) by the member called `choice`, whatever its standing: to certify it.

    Raises:
        NotImplementedError: the member does not take this problem.
    """
    low = a.data_ptr() | b.data_ptr() | (0 if bias is None else bias.data_ptr())
    found = None
    if low % 16 == 0 and a.shape[0] and a.shape[1] and b.shape[2]:
        found = member(choice, a, b, bias, tf32=tf32, alignment=16 if low % 256 else 256)
    if found is None:
        raise NotImplementedError(f"{choice} takes no {tuple(a.shape)} x {tuple(b.shape)} of {a.dtype} so laid out")
    out = torch.empty(a.shape[0], a.shape[1], b.shape[2], dtype=a.dtype, device=a.device)
    with on_device(a):
        found.launch(a, b, bias, out)
    return out


def prove(
    members: Sequence[Member],
    a: torch.Tensor,
    b: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    tf32: bool = False,
) -> list[bool | None]:
    """For each member: has it the anchor's bits on hard inputs of the shapes and strides of a, b and bias? Recorded.

    None, and nothing recorded, where memory does not suffice for the inputs: then the member is not to be used.
    """
    verdicts: list[bool | None] = [True] * len(members)
    if not members:
        return verdicts
    whole = _INTEGERS[a.element_size()]
    elements = a.shape[0] * a.shape[1] * b.shape[2]
    evidence = f"{{}}: {elements} elements against tile {anchor(a.dtype).name}"
    try:
        for kind in _PROOFS:
            left, right = _hard(a, kind, negate=True), _hard(b.mT, kind, negate=False).mT
            extra = None if bias is None else _hard(bias[None], "bell", negate=False)[0] * BIAS_SIZE.get(kind, 1.0)
            wanted = torch.empty(a.shape[0], a.shape[1], b.shape[2], dtype=a.dtype, device=a.device)
            out = torch.empty_like(wanted)
            bind_chain(left, right, extra, anchor(a.dtype), tf32=tf32)(left, right, extra, wanted)
            for i, found in enumerate(members):
                if not verdicts[i]:
                    continue
                try:
                    found.launch(left, right, extra, out.fill_(torch.nan))
                except torch.cuda.OutOfMemoryError:
                    raise
                except Exception as error:  # noqa: BLE001 - what can't run here (shared memory, say) is no member here
                    certificates().record(found.name, found.key, False, f"{type(error).__name__}: {error}"[:300])
                    verdicts[i] = False
                    continue
                if not torch.equal(out.view(whole), wanted.view(whole)):
                    parted = int(torch.count_nonzero(out.view(whole) != wanted.view(whole)))
                    said = f"{parted} differ of {evidence.format(kind)}"
                    certificates().record(found.name, found.key, False, said)
                    verdicts[i] = False
    except torch.cuda.OutOfMemoryError:
        return [None if verdict else verdict for verdict in verdicts]
    for found, verdict in zip(members, verdicts, strict=True):
        if verdict:
            certificates().record(found.name, found.key, True, evidence.format(", ".join(_PROOFS)))
    return verdicts


def prove_tile(choice: str, dtype: torch.dtype, device: torch.device, *, tf32: bool = False) -> bool | None:
    """Has the Triton tile called `choice` the anchor's bits on this machine? Recorded, for every shape.

    At sizes that fill no tile, and over a K so long that an order which is not the anchor's would show.
    """
    verdict: bool | None = True
    m, n, ks = _TILE_PROOF
    for k in ks:
        a = torch.empty(1, m, k, dtype=dtype, device=device)
        b = torch.empty(n, k, dtype=dtype, device=device).T[None]
        found = member(choice, a, b, tf32=tf32)
        if found is None:
            return None
        if found.is_anchor:
            return True
        (verdict,) = prove([found], a, b, tf32=tf32)
        if not verdict:
            return verdict
    return verdict


def stands(
    choice: str,
    found: Member,
    a: torch.Tensor,
    b: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    tf32: bool = False,
    ask: bool = True,
) -> bool | None:
    """Is the member, called `choice` and bound to a, b and bias, proven? If nobody knows and `ask`, prove it now."""
    if found.is_anchor:
        return True
    known = certificates().standing(found.name, found.key)
    if known is not None or not ask:
        return known
    if found.name != "cublaslt":
        return prove_tile(choice, a.dtype, a.device, tf32=tf32)
    return prove([found], a, b, bias, tf32=tf32)[0]


# The first two have an exact result of zero: what is left is the rounding errors of the order, and nothing else.
_PROOFS = ("order", "order-wide", "wide, cancel, outlier, bell")
_PIECE = 2**22


def _hard(x: torch.Tensor, kind: str, *, negate: bool) -> torch.Tensor:
    """Of x's shape, dtype, device and strides, with rows of the kind. Beyond 4 M elements rows repeat."""
    out = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=x.device)
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
