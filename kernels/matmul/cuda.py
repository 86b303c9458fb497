"""Batch-invariant matrix products on CUDA: the members of class "chain", which is fastest where, and their proof.

The class fixes the order (K from 0 on in one accumulator, the bias there, one rounding; see
`nondet.kernels.matmul.triton_kernels`), so M may choose the implementation: cuBLASLt without split-K, Triton tiles,
Triton with TMA. A member other than the class's anchor runs only where a certificate proves that its bits equal the
anchor's on this machine. If that is unknown, the first use proves it; while a CUDA graph is captured nothing can be
proven, and the next certified member runs. No timing happens here, and none could change a bit.

float32 products follow torch's own switch: IEEE, unless `torch.backends.cuda.matmul.fp32_precision` is "tf32" (also set
by `allow_tf32 = True` and by `set_float32_matmul_precision("high")`): then they are of the class "chain-tf32", which
has only Triton members. cuBLASLt rounds to TF32 in another way: none of its algorithms had the bits at any of 44
problems tried on an H200.

Under torch.compile the products are the operators nondet::linear and nondet::matmul. Forward only. NotImplementedError:
a device or dtype without a kernel; ValueError: shapes that do not fit.
"""

from __future__ import annotations

import functools
import json
import re
import warnings
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch

from nondet.core import inputs
from nondet.core.certificates import cache_folder, certificates
from nondet.core.launch import note
from nondet.core.proof import BIAS_SIZE, Claim, distinct, established, operands_key
from nondet.core.proof import prove as prove_by_bits
from nondet.kernels.matmul import cublaslt
from nondet.kernels.matmul.hopper import HOPPER_TILES, bind_hopper, hopper_takes, hopper_tile
from nondet.kernels.matmul.triton_kernels import (
    anchor,
    bind_chain,
    bind_tma,
    linear_operands,
    matmul_chain,
    matmul_operands,
    tile_for,
    tile_named,
    tiles,
    tma_takes,
)
from nondet.kernels.triton_common import INTERPRETED, Buffer, buffer_of, empty_strided, on_device

# Tables of measured times choose the fastest member of class "chain"; a rule chooses for all other shapes.
# A table changes only speed: the member that it names must be proven to have the class's bits before it is used. Tables
# are JSON, one row per measured product: kernels/matmul/tables/ holds those that are included, and lab/tune.py writes
# one for this machine into the user's cache folder, whose rows come first. `KINDS` has the names of choices.

FORM = 1
TABLES = Path(__file__).parent / "tables"


class Row(NamedTuple):
    """One measured product, x [m, k] times weight [n, k] transposed."""

    dtype: str
    k: int
    n: int
    m: int
    choice: str  # the fastest member, and its time
    choice_us: float
    triton: str  # the fastest member that needs no library, and its time
    triton_us: float
    stock_us: float  # torch.nn.functional.linear with torch's own settings


class Table(NamedTuple):
    """What was measured on one kind of GPU; `ranks` are those of one version of cuBLASLt."""

    gpu: str
    torch: str
    triton: str
    cublaslt: int
    rows: list[Row]


def slug(gpu: str) -> str:
    """A GPU's name as a file's: "NVIDIA H200" -> "nvidia-h200"."""
    return re.sub(r"[^a-z0-9]+", "-", gpu.lower()).strip("-")


def user_folder() -> Path | None:
    """Where `nondet tune` keeps tables: next to the certificates; None if there is no home."""
    folder = cache_folder()
    return None if folder is None else folder.parent / "matmul-tables"


def read(path: Path) -> Table:
    """Read a table. Raises ValueError: it is not one, of another form, or names no known member."""
    data: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(data, dict) or data.get("form") != FORM or data.get("columns") != list(Row._fields):
        raise ValueError(f"{path} is no table of matmul choices of form {FORM}")
    rows = [Row(*row) for row in data["rows"]]
    for row in rows:
        if not (is_choice(row.choice) and is_choice(row.triton) and isinstance(row.m, int)):
            raise ValueError(f"{path} has a row that can't be: {list(row)}")
    return Table(data["gpu"], data["torch"], data["triton"], data["cublaslt"], rows)


def rule(m: int, n: int, k: int, dtype: torch.dtype) -> list[str]:
    """Choices for a shape without a table, best first; the last is Triton's, for any layout.

    From the figures of an H200. At half precision the library's first choice without split-K is the fastest nearly
    everywhere, or within a few percent of it; at one row of a narrow product its second choice is. With few columns
    over a long K it waits for the chain, which the Hopper member shortens. float32 (IEEE) up to 16 rows uses Triton:
    the library's kernels there mostly add in an order of their own.
    """
    tile = tile_for(m, n, dtype)
    if dtype in (torch.float16, torch.bfloat16):
        favourites = ["cublaslt:1", "cublaslt:0"] if m == 1 and n < 2048 else ["cublaslt:0"]
        without = next(name for most, name in _WITHOUT_LIBRARY if m <= most)
        few = hopper_tile(m, n, k)
        return [*([] if few is None else [f"hopper:{few.name}"]), *favourites, without, tile.name]
    if dtype == torch.float32 and m > 16:
        return ["cublaslt:0", "cublaslt:1", tile.name]
    return [tile.name]


# Where the library has nothing in the class: the first whose M is not exceeded
_WITHOUT_LIBRARY = (
    (16, "16x32x128w4s7"),
    (64, "tma:64x32x128w4s5"),
    (256, "tma:64x64x128w4s4"),
    (2**31, "tma:128x128x64w4s4"),
)


def choices(batch: int, m: int, n: int, k: int, dtype: torch.dtype, gpu: str) -> list[str]:
    """Choices for a product on that GPU, best first: the table's for the next measured m, then the rule's."""
    general = rule(m, n, k, dtype)
    by_shape, ranked_by = _tables(gpu)
    rows = by_shape.get((str(dtype).removeprefix("torch."), k, n))
    if rows is None or batch != 1 or m > 2 * rows[-1].m:
        return general
    row = rows[min(bisect_left(rows, m, key=lambda r: r.m), len(rows) - 1)]
    choice = row.choice
    if choice.startswith("cublaslt:") and (row.m != m or ranked_by != cublaslt.version()):
        choice = "cublaslt:0"
    favourite = ["cublaslt:0"] if choice.startswith("cublaslt:") else []
    return list(dict.fromkeys([choice, *favourite, row.triton, *general]))


@functools.cache
def _tables(gpu: str) -> tuple[dict[tuple[str, int, int], list[Row]], int]:
    found: dict[tuple[str, int, int], list[Row]] = {}
    ranked_by = 0
    for folder in (user_folder(), TABLES):
        path = None if folder is None else folder / f"{slug(gpu)}.json"
        if path is None or not path.is_file():
            continue
        try:
            table = read(path)
        except (OSError, ValueError, KeyError, TypeError) as error:
            warnings.warn(f"the table of matmul choices {path} was ignored: {error}", stacklevel=2)
            continue
        ranked_by = ranked_by or table.cublaslt
        measured: dict[tuple[str, int, int], list[Row]] = {}
        for row in table.rows:
            if table.cublaslt != ranked_by and row.choice.startswith("cublaslt:"):
                row = row._replace(choice="cublaslt:0")
            measured.setdefault((row.dtype, row.k, row.n), []).append(row)
        for shape, rows in measured.items():
            found.setdefault(shape, sorted(rows, key=lambda r: r.m))
    return found, ranked_by


def forget_tables() -> None:
    """Read the tables again at the next use."""
    _tables.cache_clear()


# The members of class "chain" by name, and the proof that one of them has the class's bits.
# A member's bits may depend on everything that it gets about a product: shape, strides, alignment, bias, algorithm or
# tile. So each is proven at the exact problem that it will compute, on hard inputs of that shape and layout, under the
# key that `nondet.core.proof.operands_key` makes of the operands. `nondet certify` uses the same keys, so its proofs
# are not repeated.

Launch = Callable[[torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor], None]


class Member(NamedTuple):
    """An implementation bound to one problem: the key of its certificate, and how it is launched."""

    name: str  # "cublaslt 21.18.5.0a1b2c3d", "triton 16x32x128w4s5", "tma 128x128x64w4s4"
    key: str  # the problem, as `nondet.core.proof.operands_key` writes it
    label: str
    launch: Launch
    is_anchor: bool


def alignment_of(a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None = None) -> int:
    """The alignment to bind a member for: 256 where every operand starts at such a multiple, else 16, else 1 byte."""
    low = a.data_ptr() | b.data_ptr() | (0 if bias is None else bias.data_ptr())
    return 256 if not low & 255 else 16 if not low & 15 else 1


class Operands(NamedTuple):
    """One product, a [B, M, K] x b [B, K, N] + bias [N], as members are bound to it."""

    a: torch.Tensor
    b: torch.Tensor
    bias: torch.Tensor | None = None
    tf32: bool = False
    alignment: int = 16  # of all operands at launch, in bytes: 16, or 256, which gives cuBLASLt more choices


def member(choice: str, given: Operands) -> Member | None:
    """The member called `choice` (see `KINDS`); None: not for these operands. Raises ValueError: no such name."""
    key = operands_key("chain-tf32" if given.tf32 else "chain", given[:3], alignment=given.alignment)
    prefix, _, name = choice.rpartition(":")
    if prefix not in KINDS:
        raise ValueError(f"no member of class chain is called {choice!r}")
    return KINDS[prefix].bind(name, key, given)


def _triton(name: str, key: str, given: Operands) -> Member | None:
    tile, dtype = tile_named(name), given.a.dtype
    launch = bind_chain(*given[:3], tile, tf32=given.tf32)
    return Member(f"triton {tile.name}", key, f"matmul_chain[{tile}]", launch, tile == anchor(dtype))


def _tma(name: str, key: str, given: Operands) -> Member | None:
    tile = tile_named(name)
    if given.tf32 or not tma_takes(given.a, given.b):
        return None
    return Member(f"tma {tile.name}", key, f"matmul_chain_tma[{tile}]", bind_tma(*given[:3], tile), False)


def _hopper(name: str, key: str, given: Operands) -> Member | None:
    tile = tile_named(name)
    if given.tf32 or not hopper_takes(given.a, given.b, tile):
        return None
    return Member(f"hopper {tile.name}", key, f"matmul_chain_hopper[{tile}]", bind_hopper(*given[:3], tile), False)


def _cublaslt(name: str, key: str, given: Operands) -> Member | None:
    a, b, bias, tf32, alignment = given
    rank, problem = int(name), cublaslt.problem_of(a, b, bias, tf32) if cublaslt.available() else None
    if problem is None or not a.is_cuda:
        return None
    offered = cublaslt.algorithms(problem, a.device.index, rank + 1, alignment)
    chosen = next((one for one in offered if one.rank == rank), None)
    if chosen is None:
        return None
    product = cublaslt.Product(problem, a.device.index, chosen)
    return Member(f"cublaslt {chosen}", key, f"cublaslt[{chosen.number}.{chosen.tile}]", product, False)


class Kind(NamedTuple):
    """Members of one kind, called "PREFIX:NAME"."""

    pattern: str  # of NAME
    # bind(NAME, key, operands) -> the member; None where it is not for these operands
    bind: Callable[[str, str, Operands], Member | None]
    dtypes: tuple[str, ...]  # that it takes
    # certified(dtype) -> each NAME that `nondet certify` tests, in addition to a library's first choice
    certified: Callable[[torch.dtype], Iterable[str]]


def _tile_names(dtype: torch.dtype) -> list[str]:
    return [tile.name for tile in tiles(dtype)]


_TILE = r"\d+x\d+x\d+w\d+s\d+"  # as 16x32x128w4s5: BLOCK_M x BLOCK_N x BLOCK_K, warps, stages
_HALF = ("bfloat16", "float16")
# Every kind of member by its prefix; Triton's plain tiles have none.
KINDS: dict[str, Kind] = {
    "": Kind(_TILE, _triton, (*_HALF, "float32", "float64"), _tile_names),
    "tma": Kind(_TILE, _tma, _HALF, _tile_names),
    "hopper": Kind(_TILE, _hopper, _HALF, lambda _: [tile.name for tile in HOPPER_TILES]),
    # the library's algorithm of that rank, without split-K
    "cublaslt": Kind(r"\d{1,3}", _cublaslt, (*_HALF, "float32"), lambda _: ("1", "2", "3")),
}


def is_choice(name: Any) -> bool:
    """Whether some kind of member has names like that."""
    prefix, colon, rest = str(name).rpartition(":")
    return bool(colon) == bool(prefix) and prefix in KINDS and re.fullmatch(KINDS[prefix].pattern, rest) is not None


def run_member(
    choice: str, a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None = None, *, tf32: bool = False
) -> torch.Tensor:
    """a [B, M, K] x b [B, K, N] (+ bias [N]) by the member called `choice`, proven or not, or NotImplementedError."""
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
    """(member, key) of the certificate that the dispatcher needs for `choice` and these operands, or None."""
    bound = _bound(choice, a, b, bias, tf32)
    return None if bound is None else (bound.name, bound.key)


def _bound(choice: str, a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None, tf32: bool) -> Member | None:
    alignment = alignment_of(a, b, bias)
    if alignment < 16 or not (a.shape[0] and a.shape[1] and b.shape[2]):
        return None
    return member(choice, Operands(a, b, bias, tf32, alignment))


def prove(members: Sequence[Member], given: Operands) -> list[bool | None]:
    """Whether each member has the anchor's bits on hard inputs of the operands' shapes and strides.

    See `nondet.core.proof.prove`. Inputs start at multiples of the operands' alignment and, below 256, at none of a
    larger power of two.
    """
    if not members:
        return []
    a, b, bias, tf32, _ = given
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
            proof_inputs(given),
            certificates(),
        )


def stands(bound: Member, given: Operands, *, may_prove: bool = True) -> bool | None:
    """Whether the member, bound to these operands, is proven; proven now if that is unknown and allowed."""
    if bound.is_anchor:
        return True
    if not may_prove:
        return certificates().standing(bound.name, bound.key)
    return established(bound.name, bound.key, certificates(), lambda: prove([bound], given)[0])


# The first two have an exact result of zero, so only the rounding errors of the order are left.
PROOFS = ("order", "order-wide", "wide, cancel, outlier, bell, underflow")
_PIECE = 2**22


def proof_inputs(given: Operands) -> Iterator[tuple[str, tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]]]:
    """(kind, operands like these) of each case of a proof."""
    a, b, bias, _, alignment = given
    for kind in PROOFS:
        left = hard_operand(a, kind, negate=True, alignment=alignment)
        right = hard_operand(b.mT, kind, negate=False, alignment=alignment).mT
        extra = None
        if bias is not None:
            extra = hard_operand(bias[None], "bell", negate=False, alignment=alignment)[0] * BIAS_SIZE.get(kind, 1.0)
        yield kind, (left, right, extra)


def hard_operand(x: torch.Tensor, kind: str, *, negate: bool, alignment: int = 256) -> torch.Tensor:
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
        piece = torch.stack(drawn, 1).flatten(0, 1)  # the kinds alternate from row to row
    for product in out if out.dim() == 3 else out[None]:
        for start in range(0, product.shape[0], piece.shape[0]):
            part = product[start : start + piece.shape[0]]
            part.copy_(piece[: part.shape[0]])
    return out


_MAX_PLANS = 16384


class _Plan(NamedTuple):
    launch: Launch | None  # None: there is nothing to compute
    buffer: Buffer
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
    result is batch- and position-invariant, whichever member computes it.
    """
    if torch.compiler.is_compiling():
        compiled: torch.Tensor = torch.ops.nondet.matmul(a, b)
        return compiled
    return _run(False, a, b, None)


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """x [..., K] times weight [N, K] transposed, plus bias [N] before the rounding -> [..., N]; else as `matmul`."""
    if torch.compiler.is_compiling():
        compiled: torch.Tensor = torch.ops.nondet.linear(x, weight, bias)
        return compiled
    return _run(True, x, weight, bias)


def forget() -> None:
    """Choose again, after certificates or tables have changed within the process."""
    _plans.clear()
    forget_tables()


def bound(
    is_linear: bool, a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None = None
) -> Callable[..., torch.Tensor] | None:
    """`linear`, or else `matmul`, bound to operands of these shapes, strides, alignments and device, which it does not
    check again.

    A caller with a key of its own saves the cost of ours. None: there is no lasting plan (no such call was made, a
    proof is pending, or rows are not a view of x), so `linear` or `matmul` has to be called.
    """
    plan = _plans.get(_key(is_linear, alignment_of(a, b, bias), a, b, bias))
    return None if plan is None else partial(_launched, plan)


def _key(
    is_linear: bool, alignment: int, a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None
) -> tuple[Any, ...]:
    return (
        *(is_linear, alignment, a.shape, a.stride(), a.dtype, a.get_device(), b.shape, b.stride(), b.dtype),
        b.get_device(),
        None if bias is None else (bias.shape, bias.stride(), bias.dtype, bias.get_device()),
        a.dtype is torch.float32 and _tf32(),
    )


def _run(is_linear: bool, a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    alignment = alignment_of(a, b, bias)
    key = _key(is_linear, alignment, a, b, bias)
    plan = _plans.get(key)
    if plan is None:
        a3, b3, bias = linear_operands(a, b, bias) if is_linear else (*matmul_operands(a, b), None)
        if a3.data_ptr() != a.data_ptr():  # rows that are not a view of x: their copy has a plan of its own
            return _run(True, a3[0], b, bias).view(*a.shape[:-1], b.shape[0])
        shape = (*a.shape[:-1], b3.shape[2])
        with on_device(a):
            plan, lasting = _choose(a3, b3, bias, shape, alignment)
        if lasting and (bias is None or bias.is_contiguous()):
            if len(_plans) >= _MAX_PLANS:
                _plans.clear()
            _plans[key] = plan
    return _launched(plan, a, b, bias)


def _launched(plan: _Plan, a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    if plan.device_index >= 0 and torch._C._cuda_getDevice() != plan.device_index:
        with torch.cuda.device(plan.device_index):
            return _launched(plan, a, b, bias)
    out = empty_strided(*plan.buffer)
    if plan.launch is not None:
        if plan.label:
            note(plan.label)
        plan.launch(a, b, bias, out)
    return out


def _tf32() -> bool:
    return torch.backends.cuda.matmul.fp32_precision == "tf32"


def class_of(dtype: torch.dtype) -> str:
    """The class of a product of this dtype now: "chain", or "chain-tf32" where torch allows TF32."""
    return "chain-tf32" if dtype == torch.float32 and _tf32() else "chain"


def _choose(
    a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None, shape: tuple[int, ...], alignment: int
) -> tuple[_Plan, bool]:
    """The plan for a [B, M, K] x b [B, K, N], and whether it may be kept (a proof may be pending)."""
    index, buffer = a.device.index if a.is_cuda else -1, buffer_of(shape, a.dtype)
    (batch, m, k), n = a.shape, b.shape[2]
    if 0 in (batch, m, n):
        return _Plan(None, buffer, "", index), True
    if k == 0 or alignment < 16 or INTERPRETED:
        return _Plan(_any_layout(a, b), buffer, "", index), True
    given = Operands(a, b, bias, class_of(a.dtype) == "chain-tf32", alignment)
    lasting = True
    names: list[str] = []
    if distinct(a) and distinct(b):  # a proof's inputs can't fit where elements overlap in memory
        names = choices(batch, m, n, k, a.dtype, torch.cuda.get_device_name(index))
    for choice in (*names, anchor(a.dtype).name):
        if given.tf32 and choice.startswith("cublaslt:"):
            continue
        bound = member(choice, given)
        if bound is None:
            continue
        holds = stands(bound, given)
        lasting = lasting and holds is not None
        if holds:
            return _Plan(bound.launch, buffer, bound.label, index), lasting
    raise AssertionError("the anchor takes every problem")


def _any_layout(a: torch.Tensor, b: torch.Tensor) -> Launch:
    """The anchor, launched by Triton, which checks every argument again: operands of any alignment."""
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


# Anchors and members of the products: a fixed tile, only the library, the user's own call with TF32 allowed. Every
# function has the signature of its operator (`nondet.kernels.reference`) and raises NotImplementedError where it does
# not apply; `nondet.core.registry` names them. CUDA; forward only.

Call = Callable[..., torch.Tensor]


def _as_linear(product: Call, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    rows = x.reshape(x.shape[:-1].numel(), x.shape[-1])
    return product(rows[None], weight.T[None], bias)[0].view(*x.shape[:-1], weight.shape[0])


def _as_matmul(product: Call, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return product(a[None], b[None])[0] if a.ndim == 2 else product(a, b)


def _anchor_chain(tf32: bool, a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    return matmul_chain(a, b, bias, tile=anchor(a.dtype), tf32=tf32)


class _Chosen:
    """The dispatcher's member of a name, proven or not, with the signature of linear or of matmul."""

    def __init__(self, choice: str, wrap: Callable[..., Any], tf32: bool = False) -> None:
        self.choice, self._wrap, self._tf32 = choice, wrap, tf32

    def __call__(self, *operands: torch.Tensor | None) -> torch.Tensor:
        result: torch.Tensor = self._wrap(partial(run_member, self.choice, tf32=self._tf32), *operands)
        return result

    def claim(self, *operands: torch.Tensor | None) -> tuple[str, str] | None:
        claims: list[tuple[str, str] | None] = []

        def product(a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
            claims.append(claim_of(self.choice, a, b, bias, tf32=self._tf32))
            return a.new_empty(a.shape[0], a.shape[1], b.shape[2])

        self._wrap(product, *operands)
        return claims[0]


def _family(prefix: str, wrap: Call, tf32: bool, dtype: str) -> dict[str, Call]:
    kind = KINDS[prefix]
    names = kind.certified(getattr(torch, dtype)) if dtype in kind.dtypes else ()
    return {name: _Chosen(f"{prefix}:{name}".removeprefix(":"), wrap, tf32) for name in names}


chain_anchor_linear = partial(_as_linear, partial(_anchor_chain, False))
chain_anchor_matmul = partial(_as_matmul, partial(_anchor_chain, False))
chain_anchor_linear_tf32 = partial(_as_linear, partial(_anchor_chain, True))
chain_anchor_matmul_tf32 = partial(_as_matmul, partial(_anchor_chain, True))
cublaslt_linear = _Chosen("cublaslt:0", _as_linear)
cublaslt_ranks_linear = partial(_family, "cublaslt", _as_linear, False)
triton_tiles_linear = partial(_family, "", _as_linear, False)
tma_tiles_linear = partial(_family, "tma", _as_linear, False)
hopper_tiles_linear = partial(_family, "hopper", _as_linear, False)
triton_tiles_linear_tf32 = partial(_family, "", _as_linear, True)
cublaslt_matmul = _Chosen("cublaslt:0", _as_matmul)
cublaslt_ranks_matmul = partial(_family, "cublaslt", _as_matmul, False)
triton_tiles_matmul = partial(_family, "", _as_matmul, False)
tma_tiles_matmul = partial(_family, "tma", _as_matmul, False)
hopper_tiles_matmul = partial(_family, "hopper", _as_matmul, False)
triton_tiles_matmul_tf32 = partial(_family, "", _as_matmul, True)


def _with_tf32(product: str, *operands: torch.Tensor | None) -> torch.Tensor:
    """A user's call with TF32 allowed, which is a setting of the process: restored afterwards."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    try:
        calls: dict[str, Call] = {"linear": linear, "matmul": matmul}
        result: torch.Tensor = calls[product](*operands)
    finally:
        torch.set_float32_matmul_precision(before)
    return result


tf32_linear = partial(_with_tf32, "linear")
tf32_matmul = partial(_with_tf32, "matmul")
