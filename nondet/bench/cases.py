"""What is timed: cells, by section, and how the inputs of each are made.

A section is one table of the report; a group holds the cells that ask for equal bits (one weight shape, one width).
The defaults for CUDA are the shapes of an 8B model and of serving loads; those for a CPU finish within a minute.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch

from nondet.bench.work import ITEM_BYTES, Work, work_of
from nondet.errors import UnknownNameError, UserError
from nondet.inputs import make

__all__ = ["BenchCase", "Sizes", "arguments", "first_rows", "parse_sizes", "plan_cases", "tile_borders"]

Draw = Callable[..., torch.Tensor]

# command-line name -> operators of the registry
OPERATORS = {
    "matmul": "linear",
    "attention": "attention",
    "rms-norm": "rms_norm",
    "rms-norm-residual": "rms_norm_residual",
    "softmax": "softmax",
    "log-softmax": "log_softmax",
    "mean": "mean",
    "logsumexp": "logsumexp",
    "grouped": "grouped_matmul",
}

# The largest size, and how many of them, that are taken for meant
MOST, MOST_SIZES = 2**24, 10_000
_WITH_N = {"matmul", "grouped"}

_M = (1, 8, 16, 64, 128, 256, 512, 1024, 2048, 4096, 8192)
_KN = ((4096, 6144), (4096, 24576), (12288, 4096), (8192, 8192), (4096, 4096), (1024, 3072))
_DECODE = ((1, 1024), (1, 8192), (1, 32768), (8, 4096), (32, 2048), (64, 2048), (64, 8192))
_VOCABULARY = 151936
# (rows, width) by operator, beyond the cache and at decode size
_ROWS = {
    "rms_norm": ((1, 4096), (256, 4096), (4096, 4096), (65536, 4096), (131072, 128)),
    "rms_norm_residual": ((1, 4096), (256, 4096), (4096, 4096), (65536, 4096)),
    "softmax": ((1, _VOCABULARY), (256, _VOCABULARY), (4096, _VOCABULARY)),
    "log_softmax": ((1, _VOCABULARY), (256, _VOCABULARY), (4096, _VOCABULARY)),
    "mean": ((1, 4096), (256, 4096), (4096, 4096), (65536, 4096)),
    "logsumexp": ((1, _VOCABULARY), (256, _VOCABULARY), (4096, _VOCABULARY)),
}
_WIDTH = {"rms_norm": "H", "rms_norm_residual": "H", "mean": "K"}  # the others: V


@dataclass(frozen=True)
class Sizes:
    """Sizes that the user gave; None: the defaults of the device.

    Attributes:
        m: Rows; for attention the batch.
        k: K of a product, the width of a row operator, the KV length of attention.
        n: N of a product.
        jigsaw: M in steps on both sides of tile borders, for products.
    """

    m: tuple[int, ...] | None = None
    k: int | None = None
    n: int | None = None
    jigsaw: bool = False


@dataclass(frozen=True)
class BenchCase:
    """One cell. Attributes as in `nondet.result.Cell`."""

    section: str
    operator: str
    name: str
    group: str
    axis: str
    shape: Mapping[str, int]
    dtype: str

    @property
    def torch_dtype(self) -> torch.dtype:
        """The dtype as torch has it."""
        dtype: torch.dtype = getattr(torch, self.dtype)
        return dtype

    @property
    def work(self) -> Work:
        """What one call must move and compute."""
        return work_of(self.operator, self.shape, self.dtype)

    def resized(self, size: int) -> BenchCase:
        """The same with another size on the axis."""
        shape = {**self.shape, self.axis: size}
        return BenchCase(self.section, self.operator, _name(shape), self.group, self.axis, shape, self.dtype)


def plan_cases(names: Iterable[str], sizes: Sizes, device: str, dtypes: tuple[str, ...] | None) -> list[BenchCase]:
    """Every cell, in the order of the run.

    Raises:
        UnknownNameError: no such operator.
        UserError: a dtype that is not timed, or sizes that make no sense or that no operator asked for has.
    """
    asked = list(names)
    for name in asked:
        if name != "all" and name not in OPERATORS:
            raise UnknownNameError("operator", name, [*OPERATORS, "all"])
    chosen = list(OPERATORS) if "all" in asked else list(dict.fromkeys(asked))
    for dtype in dtypes or ():
        if dtype not in ITEM_BYTES:
            raise UnknownNameError("dtype", dtype, ITEM_BYTES)
    for option, size in (("k", sizes.k), ("n", sizes.n)):
        if size is not None and not 1 <= size <= MOST:
            raise UserError(f"--{option} {size} makes no sense", f"Give a size from 1 to {MOST:,}.")
    if sizes.n is not None and not _WITH_N & set(chosen):
        raise UserError(f"--n {sizes.n} is a product's, and {', '.join(chosen)} has none", "Leave it out.")
    if sizes.jigsaw and "matmul" not in chosen:
        raise UserError(f"--jigsaw is about matmul, and only {', '.join(chosen)} was asked for", "Leave it out.")
    cases: list[BenchCase] = []
    for dtype in dtypes or (("bfloat16",) if device == "cuda" else ("float32",)):
        for name in chosen:
            operator = OPERATORS[name]
            make_cases = {"linear": _products, "attention": _attention, "grouped_matmul": _grouped}.get(operator)
            if make_cases is not None:
                cases += make_cases(sizes, device, dtype)
            else:
                cases += _rows(operator, sizes, device, dtype)
    return cases


def _name(shape: Mapping[str, int]) -> str:
    return " ".join(f"{key}={size}" for key, size in shape.items())


def _products(sizes: Sizes, device: str, dtype: str) -> list[BenchCase]:
    on_cpu = device == "cpu"
    weights = ((1024, 1024), (2048, 512)) if on_cpu else _KN
    if sizes.k is not None or sizes.n is not None:
        k, n = sizes.k or sizes.n, sizes.n or sizes.k
        weights = ((k, n),)  # type: ignore[assignment] # at least one of the two is given
    rows = sizes.m or (tile_borders(1, 256 if on_cpu else 4096) if sizes.jigsaw else (1, 16, 128) if on_cpu else _M)
    return [
        _case("matmul", "linear", "M", {"M": m, "K": k, "N": n}, dtype, f"K={k} N={n}")
        for k, n in weights
        for m in rows
    ]


def _grouped(sizes: Sizes, device: str, dtype: str) -> list[BenchCase]:
    """M rows, each of one of E experts, in equal shares as far as M goes."""
    on_cpu = device == "cpu"
    experts, k, n = (8, 256, 512) if on_cpu else (64, 2048, 1536)
    k, n = sizes.k or k, sizes.n or n
    rows = sizes.m or ((8, 64) if on_cpu else (8, 64, 512, 4096, 16384))
    shapes = [{"M": m, "K": k, "N": n, "E": experts} for m in rows]
    return [_case("grouped", "grouped_matmul", "M", s, dtype, f"E={experts} K={k} N={n}") for s in shapes]


def _rows(operator: str, sizes: Sizes, device: str, dtype: str) -> list[BenchCase]:
    axis = _WIDTH.get(operator, "V")
    shapes: Sequence[tuple[int, int]] = _ROWS[operator]
    if device == "cpu":
        shapes = tuple((m, min(width, 8192)) for m, width in ((1, shapes[0][1]), (64, shapes[0][1])))
    if sizes.k is not None or sizes.m is not None:
        widths = [sizes.k] if sizes.k is not None else list(dict.fromkeys(width for _, width in shapes))
        shapes = [(m, w) for w in widths for m in sizes.m or (1, 256, 4096)]
    return [_case(operator, operator, "M", {"M": m, axis: w}, dtype, f"{axis}={w}") for m, w in shapes]


def _attention(sizes: Sizes, device: str, dtype: str) -> list[BenchCase]:
    heads = {"Hq": 8, "Hkv": 2, "D": 64} if device == "cpu" else {"Hq": 32, "Hkv": 8, "D": 128}
    decode: Iterable[tuple[int, int]] = ((1, 512), (4, 256)) if device == "cpu" else _DECODE
    prefill: Iterable[int] = (256,) if device == "cpu" else (4096, 16384)
    if sizes.m is not None or sizes.k is not None:
        lengths = [sizes.k] if sizes.k is not None else [2048]
        decode = [(b, kv) for kv in lengths for b in sizes.m or (1, 8, 64)]
        prefill = lengths
    cases = []
    for name, pairs in (("decode", [(b, 1, kv) for b, kv in decode]), ("prefill", [(1, kv, kv) for kv in prefill])):
        for b, tq, tk in pairs:
            shape = {"B": b, "Tq": tq, "Tk": tk, **heads}
            cases.append(_case(f"attention {name}", "attention", "B", shape, dtype, f"Tk={tk}"))
    return cases


def _case(section: str, operator: str, axis: str, shape: dict[str, int], dtype: str, group: str) -> BenchCase:
    return BenchCase(section, operator, _name(shape), group, axis, shape, dtype)


def arguments(case: BenchCase, device: str, rng: torch.Generator) -> tuple[torch.Tensor, ...]:
    """One set of fresh inputs of the cell, in the order of the operator's signature (`nondet.kernels.reference`)."""

    def draw(*shape: int) -> torch.Tensor:
        return make("bell", shape, case.torch_dtype, device, rng)

    s = case.shape
    if case.operator == "linear":
        return draw(s["M"], s["K"]), draw(s["N"], s["K"])
    if case.operator == "attention":
        kv = (s["B"], s["Hkv"], s["Tk"], s["D"])
        return draw(s["B"], s["Hq"], s["Tq"], s["D"]), draw(*kv), draw(*kv)
    if case.operator == "grouped_matmul":
        weight = draw(s["E"], s["N"], s["K"]).transpose(1, 2)  # as models hold it: each expert's like a linear layer's
        return draw(s["M"], s["K"]), weight, _expert_ends(s["M"], s["E"], device)
    if case.operator == "rms_norm":
        return draw(s["M"], s["H"]), draw(s["H"])
    if case.operator == "rms_norm_residual":
        return draw(s["M"], s["H"]), draw(s["M"], s["H"]), draw(s["H"])
    return (draw(s["M"], s[_WIDTH.get(case.operator, "V")]),)


def _expert_ends(rows: int, experts: int, device: str) -> torch.Tensor:
    """int32 [E]: where each expert's rows end, in shares as equal as they go."""
    owners = torch.arange(rows, device=device) % experts
    return torch.bincount(owners, minlength=experts).cumsum(0).to(torch.int32)


def first_rows(case: BenchCase, whole: tuple[torch.Tensor, ...], m: int) -> tuple[torch.Tensor, ...]:
    """The same inputs with the first m rows alone; weights stay. For operators with an axis M."""
    if case.operator == "grouped_matmul":
        return whole[0][:m], whole[1], _expert_ends(m, case.shape["E"], str(whole[0].device))
    leading = 2 if case.operator == "rms_norm_residual" else 1
    return *(x[:m] for x in whole[:leading]), *whole[leading:]


def tile_borders(first: int, last: int) -> tuple[int, ...]:
    """M on both sides of the borders of tiles, where a sawtooth shows: b and b + 1 for every border b in [first, last].

    Borders are the multiples of 8 up to 64, of 64 up to 1024, and of 256 beyond: tile heights are such multiples.
    """
    borders = [*range(8, 65, 8), *range(128, 1025, 64), *range(1280, last + 1, 256)]
    found = {first, last} | {m for b in borders for m in (b, b + 1) if first <= m <= last}
    return tuple(sorted(found))


_RANGE = re.compile(r"^(\d+)-(\d+)(?::(\d+))?$")


def parse_sizes(option: str, given: Iterable[str]) -> tuple[int, ...] | None:
    """ "16", "1-4096" (around tile borders) or "1-4096:64" (in steps), several of them, as rising sizes.

    Raises:
        UserError: not a size, one too large, or a range that is empty or of too many.
    """
    sizes: set[int] = set()
    for text in given:
        match = _RANGE.match(text)
        if match is not None:
            first, last, step = int(match[1]), int(match[2]), match[3]
            if not 1 <= first <= last or step == "0":
                raise UserError(f"--{option} {text} is an empty range", "Give FIRST-LAST or FIRST-LAST:STEP.")
            most = last
            if last <= MOST:
                between = range(first, last + 1, int(step)) if step else tile_borders(first, last)
                if len(between) > MOST_SIZES:
                    raise UserError(f"--{option} {text} is {len(between):,} sizes", "Give larger steps.")
                sizes |= set(between)
        elif text.isdecimal() and int(text) > 0:
            most = int(text)
            sizes.add(most)
        else:
            raise UserError(f"--{option} {text!r} is no size", "Give 16, 1-4096 (around tile borders) or 1-4096:64.")
        if most > MOST:
            raise UserError(f"--{option} {text} makes no sense", f"Give sizes up to {MOST:,}.")
    return tuple(sorted(sizes)) or None
