"""What is timed: cells, by section, and how the inputs of each are made; both follow from the operators' declarations.

A section is one table of the report; a group holds the cells that ask for equal bits (one weight shape, one width).
The defaults for CUDA are the shapes of an 8B model and of serving loads; those for a CPU finish within a minute.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

import torch

from nondet.bench.work import ITEM_BYTES, Work, timed_operators, work_of
from nondet.core.inputs import make
from nondet.core.operator import Bench, BenchSizes, Operand, Operator, tile_borders
from nondet.core.registry import load_object, operators
from nondet.errors import UnknownNameError, UserError

__all__ = ["BenchCase", "BenchSizes", "arguments", "bench_names", "first_rows", "parse_sizes", "plan_cases"]

# The largest size, and how many of them, that are taken for meant
MOST, MOST_SIZES = 2**24, 10_000


@dataclass(frozen=True)
class BenchCase:
    """One cell. Attributes as in `nondet.core.records.Cell`."""

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

    @property
    def company(self) -> str:
        """As `Bench.company` of the operator."""
        return _bench(operators()[self.operator]).company

    def resized(self, size: int) -> BenchCase:
        """The same with another size on the axis."""
        shape = {**self.shape, self.axis: size}
        return replace(self, name=_sizes(shape), shape=shape)


def bench_names() -> dict[str, str]:
    """Names on the command line -> operators that are timed; aliases stand behind the operators' own names."""
    timed = timed_operators()
    names = {name: operator.name for name, operator in timed.items()}
    return names | {alias: operator.name for operator in timed.values() for alias in _bench(operator).aliases}


def _bench(operator: Operator) -> Bench:
    if operator.bench is None:
        raise AssertionError(f"{operator.name} is not timed")
    return operator.bench


def plan_cases(names: Iterable[str], sizes: BenchSizes, device: str, dtypes: tuple[str, ...] | None) -> list[BenchCase]:
    """Every cell, in the order of the run.

    Raises:
        UnknownNameError: no such operator.
        UserError: a dtype that is not timed, or sizes that make no sense or that no operator asked for has.
    """
    wanted, known = list(names), bench_names()
    for name in wanted:
        if name != "all" and name not in known:
            raise UnknownNameError("operator", name, [*known, "all"])
    chosen = list(dict.fromkeys(known.values() if "all" in wanted else (known[name] for name in wanted)))
    for dtype in dtypes or ():
        if dtype not in ITEM_BYTES:
            raise UnknownNameError("dtype", dtype, ITEM_BYTES)
    for option, size in (("k", sizes.k), ("n", sizes.n)):
        if size is not None and not 1 <= size <= MOST:
            raise UserError(f"--{option} {size} makes no sense", f"Give a size from 1 to {MOST:,}.")
    options = {option for name in chosen for option in _bench(operators()[name]).options}
    if sizes.n is not None and "n" not in options:
        raise UserError(f"--n {sizes.n} is a product's, and {', '.join(wanted)} has none", "Leave it out.")
    if sizes.jigsaw and "jigsaw" not in options:
        raise UserError(f"--jigsaw is about linear and matmul, and {', '.join(wanted)} was asked for", "Leave it out.")
    return [
        case
        for dtype in dtypes or (("bfloat16",) if device == "cuda" else ("float32",))
        for name in chosen
        for case in _cases(operators()[name], sizes, device, dtype)
    ]


def _cases(operator: Operator, sizes: BenchSizes, device: str, dtype: str) -> list[BenchCase]:
    bench, axis = _bench(operator), operator.operands[0].axes[0]
    return [
        BenchCase(
            section=cell.section,
            operator=operator.name,
            name=_sizes(cell.shape),
            group=_sizes({key: cell.shape[key] for key in bench.group}),
            axis=axis,
            shape=cell.shape,
            dtype=dtype,
        )
        for cell in bench.cells(sizes, device)
    ]


def _sizes(shape: Mapping[str, int]) -> str:
    return " ".join(f"{key}={size}" for key, size in shape.items())


def arguments(case: BenchCase, device: str, rng: torch.Generator) -> tuple[torch.Tensor, ...]:
    """One set of fresh inputs of the cell, in the order of the operator's signature (`nondet.kernels.reference`)."""
    shape, tensors = case.shape, []
    for operand in operators()[case.operator].operands:
        size = tuple(shape[axis] for axis in operand.axes)
        if operand.made_by is not None:
            tensors.append(load_object(operand.made_by)(shape, device))
        elif operand.below is not None:
            tensors.append(torch.randint(0, shape[operand.below], size, device=device, generator=rng))
        else:
            drawn = make("bell", size, case.torch_dtype, device, rng)
            tensors.append(drawn.transpose(-1, -2) if operand.transposed else drawn)
    return tuple(tensors)


def first_rows(case: BenchCase, whole: tuple[torch.Tensor, ...], m: int) -> tuple[torch.Tensor, ...]:
    """The same inputs with the first m rows of the batch alone; weights stay."""
    shape = {**case.shape, case.axis: m}

    def part(operand: Operand, x: torch.Tensor) -> torch.Tensor:
        if operand.made_by is not None:
            remade: torch.Tensor = load_object(operand.made_by)(shape, str(x.device))
            return remade
        return x[:m] if operand.axes[0] == case.axis else x

    operands = operators()[case.operator].operands
    return tuple(part(operand, x) for operand, x in zip(operands, whole, strict=True))


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
