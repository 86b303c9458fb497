"""The numerics classes: for each operator the order of reduction that its bits are defined by, and who claims it.

Two implementations of one class give equal bits for every input, whatever their tiles, their library or the batch, so
that the faster one may be taken at each shape. A class is an order written down, not a tolerance: `order` says it in
words, `formula` in symbols, and `anchors` names the implementation that all others are compared with, bit by bit.

Claims are claims until `nondet certify` or a dispatcher's first use has proven them on the machine at hand: hardware
and libraries decide whether a chain of matrix instructions really adds in the order in which its source is written.

A target is "module:attribute", or INVARIANT: what `nondet.registry` calls so, which is what a user gets. Anchors and
members have their operator's signature (`nondet.kernels.reference`) and raise NotImplementedError where they do not
apply. The anchor ONE_ROW is the invariant implementation on each row alone: where a library's own order is the class, a
row by itself defines it. A member whose name ends in "/*" is a family: its target takes a dtype's name and gives
{name: callable}. This module imports nothing heavy; `nondet list` reads it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from nondet.errors import UnknownNameError, UserError

__all__ = ["CLASSES", "INVARIANT", "ONE_ROW", "NumericsClass", "classes_for", "operators"]

INVARIANT = "invariant"
ONE_ROW = "each row alone"


@dataclass(frozen=True)
class NumericsClass:
    """One order of reduction.

    Attributes:
        device: "cuda" or "cpu".
        dtypes: Of the operands, by default those that are certified; results have the first operand's.
        accumulator: Where sums are kept.
        order: In plain words, for the writer of another kernel.
        formula: The same in symbols; fl is one rounding to the accumulator's format.
        anchors: operator -> target.
        members: operator -> name -> target.
    """

    name: str
    device: str
    dtypes: tuple[str, ...]
    accumulator: str
    order: str
    formula: str
    anchors: Mapping[str, str]
    members: Mapping[str, Mapping[str, str]]


_AT = "nondet.kernels.{}.members"
_MATMUL, _EXPERTS, _ATTENTION, _LANES = (_AT.format(folder) for folder in ("matmul", "experts", "attention", "rows"))
_ROWS = ("sum", "mean", "rms_norm", "rms_norm_residual", "softmax", "log_softmax", "logsumexp", "cross_entropy")


def _chain_members(operator: str, tf32: str = "") -> dict[str, str]:
    # cuBLASLt's TF32 kernels never had the chain's bits on an H200, so they claim nothing and the dispatcher asks none
    library = {
        "cublaslt": f"{_MATMUL}:cublaslt_{operator}",
        "cublaslt/*": f"{_MATMUL}:cublaslt_ranks_{operator}",
    }
    return {
        "invariant": f"{_MATMUL}:tf32_{operator}" if tf32 else INVARIANT,
        **({} if tf32 else library),
        "triton/*": f"{_MATMUL}:triton_tiles_{operator}{tf32}",
        **({} if tf32 else {"tma/*": f"{_MATMUL}:tma_tiles_{operator}"}),
    }


_CHAIN_WORDS = (
    "Each element of the result is one chain over K, from 0 to K - 1, in one accumulator that starts from zero; the "
    "bias is added to the accumulator; one rounding to the result's dtype ends it. Within a step of a matrix "
    "instruction (16 k for half precision on Hopper) the hardware's own order holds, so the anchor's instruction is "
    "part of the class: no split of K, no second accumulator, no running total that is fed back in another format."
)

CLASSES: dict[str, NumericsClass] = {
    found.name: found
    for found in (
        NumericsClass(
            name="chain",
            device="cuda",
            dtypes=("bfloat16", "float16", "float32", "float64"),
            accumulator="float32; float64 for float64",
            order=_CHAIN_WORDS + " float32 goes through fused multiply-adds, one k after the other, never TF32.",
            formula="c[m,n] = round(acc_K + bias[n]),  acc_0 = 0,  acc_(s+1) = mma(acc_s, a[m,ks], b[ks,n]), s rising",
            anchors={op: f"{_MATMUL}:chain_anchor_{op}" for op in ("linear", "matmul")},
            members={op: _chain_members(op) for op in ("linear", "matmul")},
        ),
        NumericsClass(
            name="chain-tf32",
            device="cuda",
            dtypes=("float32",),
            accumulator="float32",
            order="As chain, of float32 operands that the matrix instruction takes as TF32 (10 bits of mantissa).",
            formula="c[m,n] = acc_K + bias[n],  acc_0 = 0,  acc_(s+1) = mma(acc_s, tf32(a[m,ks]), tf32(b[ks,n]))",
            anchors={"linear": f"{_MATMUL}:chain_anchor_linear_tf32", "matmul": f"{_MATMUL}:chain_anchor_matmul_tf32"},
            members={op: _chain_members(op, "_tf32") for op in ("linear", "matmul")},
        ),
        NumericsClass(
            name="grouped",
            device="cuda",
            dtypes=("bfloat16", "float16", "float32"),
            accumulator="float32",
            order="Each row times its expert's weight, in class chain: the bits of that row's own plain product.",
            formula="y[r,n] = chain(x[r,:], w[expert(r),:,n])",
            anchors={"grouped_matmul": f"{_EXPERTS}:grouped_anchor"},
            members={
                "grouped_matmul": {
                    "invariant": INVARIANT,
                    "triton/*": f"{_EXPERTS}:grouped_tiles",
                }
            },
        ),
        NumericsClass(
            name="segments",
            device="cuda",
            dtypes=("bfloat16", "float16", "float32"),
            accumulator="float32",
            order=(
                "For one query of one head: keys in segments of 512, each in tiles anchored at key 0 (128 keys for "
                "half precision and head dims to 128, 64 up to 256, 32 for float32). In a segment an online softmax "
                "over its tiles in order: scores by one chain over the head dim; the maximum in units of raw scores; "
                "p = exp2(fma(s, scale log2 e, -max scale log2 e)); row sums in 8 partial sums by halving, before p is "
                "rounded to the input's dtype; acc = acc alpha + p v, one chain over the tile's keys. Segments are "
                "then merged in order, and the result is acc / l, rounded once. No contraction but the fma's of the "
                "source."
            ),
            formula=(
                "L' = fma(L, exp2((M-M')c), l exp2((m-M')c)),  A' likewise,  M' = max(M, m),  c = scale log2(e);  "
                "out = A/L"
            ),
            anchors={"attention": f"{_ATTENTION}:segments_anchor"},
            members={
                "attention": {
                    "invariant": INVARIANT,
                    "hopper": f"{_ATTENTION}:segments_hopper",
                    "split": f"{_ATTENTION}:segments_split",
                    "varlen": f"{_ATTENTION}:segments_varlen",
                }
            },
        ),
        NumericsClass(
            name="lanes",
            device="cuda",
            dtypes=("bfloat16", "float16", "float32"),
            accumulator="float32; float64 for float64",
            order=(
                "Over the last axis of width W. A row of at most 16384 is one chunk, a wider one is cut into chunks of "
                "4096 from element 0. In a chunk, filled up with zeros to a power of two: element j is added to "
                "element j + n/2, for n = the length, half of it, ... until LANES are left (a quarter of the length, "
                "but at least 256 and at most 2048, and never more than the length); then 2j to 2j + 1 until one is "
                "left. Chunks' results, filled up to a power of two, 2j to 2j + 1 again. No contraction; one rounding "
                "at the end. Softmax and RMSNorm add their exponentials and squares in this order."
            ),
            formula="x'[j] = x[j] + x[j+n/2] for n > LANES;  x'[j] = x[2j] + x[2j+1] for n <= LANES;  sum = x'[0]",
            anchors=dict.fromkeys(_ROWS, ONE_ROW) | {"sum": f"{_LANES}:lanes_sum"},
            members={op: {"invariant": INVARIANT} for op in _ROWS},
        ),
        NumericsClass(
            name="cpu-tiles",
            device="cpu",
            dtypes=("bfloat16", "float16", "float32"),
            accumulator="the library's: float32 for the dtypes here",
            order=(
                "Whatever order the library takes for a row in its base tile, a number of rows at which no row minds "
                "its place or its neighbours: `nondet.kernels.matmul.cpu_tiles` finds it for each weight at first use. "
                "So the class belongs to the weight's shape and layout, the instruction set and the thread count, "
                "never to M."
            ),
            formula="y[m,:] = library(base tile that holds x[m])[m]",
            anchors={"linear": ONE_ROW, "matmul": ONE_ROW, "grouped_matmul": f"{_EXPERTS}:each_row_by_cpu_matmul"},
            members={op: {"invariant": INVARIANT} for op in ("linear", "matmul", "grouped_matmul")},
        ),
        NumericsClass(
            name="cpu-blocks",
            device="cpu",
            dtypes=("bfloat16", "float32"),
            accumulator="float32",
            order=(
                "For one query: keys in blocks of 64 anchored at the request's first key; in each the library's order "
                "at a certified tile; maximum, sum and weighted values merged block by block, in order, in float32."
            ),
            formula="l = l exp(m-m') + sum p,  acc = acc exp(m-m') + p v,  block by block;  out = acc/l",
            anchors={"attention": "nondet.kernels.attention.cpu:attention"},
            members={"attention": {"invariant": INVARIANT, "varlen": f"{_ATTENTION}:blocks_varlen"}},
        ),
        NumericsClass(
            name="cpu-rows",
            device="cpu",
            dtypes=("bfloat16", "float32"),
            accumulator="float32",
            order="The library's own order for one row, as a row alone has it.",
            formula="y[m] = library(x[m])",
            anchors=dict.fromkeys(_ROWS, ONE_ROW),
            members={op: {"invariant": INVARIANT} for op in _ROWS},
        ),
    )
}


def operators(device: str) -> list[str]:
    """Every operator that some class of the device has members for."""
    return list(dict.fromkeys(op for c in CLASSES.values() if c.device == device for op in c.members))


def classes_for(operator: str, device: str, name: str | None = None) -> list[NumericsClass]:
    """The classes that an operator has on a device, or the one asked for.

    Raises:
        UnknownNameError: no such class.
        UserError: the class is another device's or another operator's.
    """
    fitting = [c for c in CLASSES.values() if c.device == device and operator in c.members]
    if name is None:
        return fitting
    if name not in CLASSES:
        raise UnknownNameError("numerics class", name, CLASSES)
    found = CLASSES[name]
    if found.device != device:
        known = f"On {device} {operator} has: {', '.join(c.name for c in fitting)}." if fitting else ""
        raise UserError(f"class {name!r} belongs to {found.device}, and this is {device}", known or "Try --device.")
    if operator not in found.members:
        raise UserError(f"class {name!r} has no {operator}", f"It has: {', '.join(found.members)}.")
    return [found]
