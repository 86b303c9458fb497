"""Batch-invariant matrix products on CUDA at no cost: one numerics class, "chain", and its fastest member everywhere.

The class fixes the order (K from 0 on in one accumulator, the bias there, one rounding; see
`nondet.kernels.matmul.cuda_triton`), so the implementation may be chosen by M freely: cuBLASLt without split-K, Triton
tiles, Triton with TMA. `nondet.kernels.matmul.cuda_tables` says which is fast. Whether it may be used is another
question, and the answer a certificate: a member that is not the class's anchor runs only where its bits are proven
equal to the anchor's, on this machine. Where that is unknown, the first use proves it
(`nondet.kernels.matmul.cuda_members`); while a CUDA graph is captured nothing can be proven, and the next certified
member runs. No timing happens here, and none could change a bit.

float32 products follow torch's own switch: IEEE, unless `torch.backends.cuda.matmul.fp32_precision` is "tf32" (also
set by `allow_tf32 = True` and by `set_float32_matmul_precision("high")`): then they are of the class "chain-tf32",
which has Triton members only. cuBLASLt rounds to TF32 in another way: none of its algorithms had the bits at any of 44
problems tried on an H200.

Under torch.compile the products are the operators nondet::linear and nondet::matmul. Forward only.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from nondet.core.launch import note
from nondet.core.proof import distinct
from nondet.kernels.matmul import cuda_tables as matmul_tables
from nondet.kernels.matmul.cuda_members import Launch, Member, alignment_of, member, prove, run_member, stands
from nondet.kernels.matmul.cuda_tiles import anchor
from nondet.kernels.matmul.cuda_triton import linear_operands, matmul_chain, matmul_operands
from nondet.kernels.triton_common import INTERPRETED, on_device

__all__ = ["Member", "bmm", "class_of", "forget", "linear", "matmul", "member", "mm", "prove", "run_member"]

_MAX_PLANS = 16384


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
    alignment = alignment_of(a, b, bias)
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
        if plan.label:
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
        return _Plan(_any_layout(a, b), shape, "", index), True
    tf32 = class_of(a.dtype) == "chain-tf32"
    capturing = torch.cuda.is_current_stream_capturing()
    lasting = True
    names: list[str] = []
    if distinct(a) and distinct(b):  # no inputs of a proof fit where elements share a place in memory
        names = matmul_tables.choices(batch, m, n, k, a.dtype, torch.cuda.get_device_name(index))
    for choice in (*names, anchor(a.dtype).name):
        if tf32 and choice.startswith("cublaslt:"):
            continue
        bound = member(choice, a, b, bias, tf32=tf32, alignment=alignment)
        if bound is None:
            continue
        holds = stands(bound, a, b, bias, tf32=tf32, alignment=alignment, may_prove=not capturing)
        lasting = lasting and holds is not None
        if holds:
            return _Plan(bound.launch, shape, bound.label, index), lasting
    raise AssertionError("the anchor takes every problem")


def _any_layout(a: torch.Tensor, b: torch.Tensor) -> Launch:
    """The anchor, launched in Triton's own way, which looks at every argument again: operands of any alignment."""
    a_size, a_stride, b_size, b_stride = a.shape, a.stride(), b.shape, b.stride()
    tf32 = class_of(a.dtype) == "chain-tf32"
    tile = None if INTERPRETED else anchor(a.dtype)

    def launch(a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor) -> None:
        left, right = a.as_strided(a_size, a_stride), b.as_strided(b_size, b_stride)
        matmul_chain(left, right, bias, tile, tf32=tf32, out=out.view(a_size[0], a_size[1], b_size[2]))

    return launch


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
