"""Batch-invariant matrix products on CUDA at no cost: one numerics class, "chain", and its fastest member everywhere.

The class fixes the order (K from 0 on in one accumulator, the bias there, one rounding; see
`nondet.kernels.triton_matmul`), so the implementation may be chosen by M freely: cuBLASLt without split-K, Triton
tiles, Triton with TMA. `nondet.kernels.matmul_tables` says which is fast. Whether it may be used is another question,
and the answer a certificate: a member that is not the class's anchor runs only where its bits are proven equal to the
anchor's, on this machine. Where that is unknown, the first use proves it, on generated hard inputs of the very shape,
dtype, layout and algorithm; while a CUDA graph is captured nothing can be proven, and the next certified member runs.
No timing happens here, and none could change a bit.

float32 products follow torch's own switch: IEEE, unless `torch.backends.cuda.matmul.fp32_precision` is "tf32" (also
set by `allow_tf32 = True` and by `set_float32_matmul_precision("high")`): then they are of the class "chain-tf32",
which has Triton members only. cuBLASLt rounds to TF32 in another way: none of its algorithms had the bits at any of 44
problems tried on an H200.

Under torch.compile the products are the operators nondet::linear and nondet::matmul. Forward only.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from nondet import inputs
from nondet.certificates import certificates
from nondet.kernels import blas_matmul, cublaslt, matmul_tables
from nondet.kernels.launch import note
from nondet.kernels.triton_common import INTERPRETED, on_device
from nondet.kernels.triton_matmul import (
    anchor,
    bind_chain,
    linear_operands,
    matmul_chain,
    matmul_operands,
    tile_named,
)
from nondet.kernels.triton_matmul_tma import bind_tma, tma_takes

__all__ = ["Member", "bmm", "class_of", "forget", "linear", "matmul", "member", "mm", "prove", "run_member"]

Launch = Callable[[torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor], None]

_MAX_PLANS = 16384
_INTEGERS = {2: torch.int16, 4: torch.int32, 8: torch.int64}


class Member(NamedTuple):
    """An implementation bound to one problem: where its standing is written down, and how it is launched."""

    name: str
    key: str
    label: str
    launch: Launch
    is_anchor: bool


class _Plan(NamedTuple):
    launch: Launch | None  # None: there is nothing to compute
    shape: tuple[int, ...]
    label: str
    device_index: int  # the CUDA device that has to be the current one; -1 in the interpreter


_plans: dict[tuple[Any, ...], _Plan] = {}


def mm(a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """a [M, K] times b [K, N], plus bias [N] -> [M, N]. Dtypes, order and invariance as `matmul`."""
    if torch.compiler.is_compiling():
        return matmul(a, b) if bias is None else linear(a, b.mT, bias)
    return _run(False, a, b, None) if bias is None else _run(True, a, b.mT, bias)


def bmm(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """a [B, M, K] times b [B, K, N] -> [B, M, N]. Dtypes, order and invariance as `matmul`."""
    return matmul(a, b)


def matmul(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """a [M, K] times b [K, N] -> [M, N], or batched, a [B, M, K] times b [B, K, N] -> [B, M, N]. Any strides.

    float16, bfloat16 and float32 (accumulated in float32) or float64 (in float64); both operands of one dtype. Class
    "chain" (float32 may be "chain-tf32", see the module): a chain over K in one accumulator, rounded once, so the
    result is batch- and position-invariant, whichever member computes it. Forward only.

    Raises:
        NotImplementedError: a device or dtype without a kernel.
        ValueError: shapes that do not fit.
    """
    if torch.compiler.is_compiling():
        compiled: torch.Tensor = torch.ops.nondet.matmul(a, b)
        return compiled
    return _run(False, a, b, None)


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """x [..., K] times weight [N, K] transposed, plus bias [N] -> [..., N].

    Dtypes, order and invariance as `matmul`; the bias is added in the accumulator, before the one rounding.

    Raises:
        NotImplementedError: a device or dtype without a kernel.
        ValueError: shapes that do not fit.
    """
    if torch.compiler.is_compiling():
        compiled: torch.Tensor = torch.ops.nondet.linear(x, weight, bias)
        return compiled
    return _run(True, x, weight, bias)


def forget() -> None:
    """Choose anew: after certificates or tables have changed within the process."""
    _plans.clear()
    matmul_tables.forget()


def _run(is_linear: bool, a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    low = a.data_ptr() | b.data_ptr()
    if bias is not None:
        low |= bias.data_ptr()
    alignment = 256 if not low & 255 else 16 if not low & 15 else 1
    key = (
        is_linear,
        alignment,
        a.shape,
        a.stride(),
        a.dtype,
        a.device,
        b.shape,
        b.stride(),
        b.dtype,
        b.device,
        None if bias is None else (bias.shape, bias.stride(), bias.dtype, bias.device),
        a.dtype is torch.float32 and _tf32(),
    )
    plan = _plans.get(key)
    if plan is None:
        a3, b3, bias = linear_operands(a, b, bias) if is_linear else (*matmul_operands(a, b), None)
        if a3.data_ptr() != a.data_ptr():  # rows that are no view of x: their copy has a plan of its own
            return _run(True, a3[0], b, bias).view(*a.shape[:-1], b.shape[0])
        shape = (*a.shape[:-1], b3.shape[2])
        with on_device(a):
            plan, lasting = _choose(a3, b3, bias, shape, alignment)
        if lasting and (bias is None or bias.is_contiguous()):
            if len(_plans) >= _MAX_PLANS:
                _plans.clear()
            _plans[key] = plan
    out = torch.empty(plan.shape, dtype=a.dtype, device=a.device)
    if plan.launch is not None:
        note(plan.label)
        if plan.device_index < 0 or torch._C._cuda_getDevice() == plan.device_index:
            plan.launch(a, b, bias, out)
        else:
            with torch.cuda.device(plan.device_index):
                plan.launch(a, b, bias, out)
    return out


def _tf32() -> bool:
    return torch.backends.cuda.matmul.fp32_precision == "tf32"


def class_of(dtype: torch.dtype) -> str:
    """The class that a product of this dtype has now: "chain", or "chain-tf32" where torch is asked for TF32."""
    return "chain-tf32" if dtype == torch.float32 and _tf32() else "chain"


def _choose(
    a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None, shape: tuple[int, ...], alignment: int
) -> tuple[_Plan, bool]:
    """The plan for a [B, M, K] x b [B, K, N], and whether it may be kept (a proof may still be owing)."""
    index = a.device.index if a.is_cuda else -1
    (batch, m, k), n = a.shape, b.shape[2]
    if 0 in (batch, m, n):
        return _Plan(None, shape, "", index), True
    if k == 0 or alignment < 16 or INTERPRETED:
        return _Plan(_any_layout(a, b, shape), shape, "matmul_chain", index), True
    tf32 = class_of(a.dtype) == "chain-tf32"
    capturing = torch.cuda.is_current_stream_capturing()
    lasting = True
    names = matmul_tables.choices(batch, m, n, k, a.dtype, torch.cuda.get_device_name(index))
    for choice in (*names, anchor(a.dtype).name):
        found = member(choice, a, b, bias, tf32=tf32, alignment=alignment)
        if found is None:
            continue
        holds = True if found.is_anchor else certificates().standing(found.name, found.key)
        if holds is None:
            if capturing:
                lasting = False
                continue
            (holds,) = prove([found], a, b, bias, tf32=tf32)
            lasting = lasting and holds is not None
        if holds:
            return _Plan(found.launch, shape, found.label, index), lasting
    raise AssertionError("the anchor takes every problem")


def _any_layout(a: torch.Tensor, b: torch.Tensor, shape: tuple[int, ...]) -> Launch:
    """Triton's own way to launch, which looks at every argument again: operands of any alignment."""
    a_size, a_stride, b_size, b_stride = a.shape, a.stride(), b.shape, b.stride()
    tf32 = class_of(a.dtype) == "chain-tf32"

    def launch(a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor) -> None:
        left, right = a.as_strided(a_size, a_stride), b.as_strided(b_size, b_stride)
        matmul_chain(left, right, bias, tf32=tf32, out=out.view(a_size[0], a_size[1], b_size[2]))

    return launch


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
    whole = _INTEGERS[a.element_size()]
    elements = a.shape[0] * a.shape[1] * b.shape[2]
    evidence = f"{{}}: {elements} elements against tile {anchor(a.dtype).name}"
    try:
        for kind in _PROOFS:
            left, right = _hard(a, kind, negate=True), _hard(b.mT, kind, negate=False).mT
            extra = None if bias is None else _hard(bias[None], "bell", negate=False)[0]
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


@torch.library.custom_op("nondet::linear", mutates_args=())
def _linear_op(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    return _run(True, x, weight, bias)


@_linear_op.register_fake
def _(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    return x.new_empty(*x.shape[:-1], weight.shape[0])


@torch.library.custom_op("nondet::matmul", mutates_args=())
def _matmul_op(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return _run(False, a, b, None)


@_matmul_op.register_fake
def _(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return a.new_empty(*a.shape[:-1], b.shape[-1])
