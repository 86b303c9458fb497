"""What an operator is: one frozen `Operator` in the folder of its kernels, with its benchmarks and certification."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field

# Probes, `kernels/dispatch`, `nondet.certify` and `nondet.bench` read these declarations. A target is
# "module:attribute", imported at first use: declarations import no torch and no kernel. Device types are "cpu" and
# "cuda"; `ANY` means both.

ANY = "*"
INVARIANT = "invariant"
ONE_ROW = "each row alone"

Shape = Mapping[str, int]  # named axes -> sizes: {"M": 16, "K": 4096, "N": 6144}
Layer = tuple[str, int, int]  # name of a model's linear layer, K, N

_ROW_BATCHES = (1, 256, 4096)  # of a width that the user gave
_CPU_WIDTH, _CPU_ROWS = 8192, (1, 64)
_MOST_ELEMENTS = {"cuda": 2**24, "cpu": 2**22}


@dataclass(frozen=True)
class Operand:
    """One tensor argument, in the order of the signature."""

    axes: tuple[str, ...]  # of its shape. The first operand's first axis is the batch; others may begin with it as well
    transposed: bool = False  # drawn in the order of `axes`, then passed with its last two axes exchanged
    below: str | None = None  # it holds integers from 0 up to the size of that axis (exclusive)
    # target of (shape, device) -> tensor, or another argument, for what follows from the sizes only
    made_by: str | None = None
    hard_scale: float = 1.0  # factor on numbers of many sizes, where one term would dominate or a sum overflow


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """What the user of `nondet bench` or `nondet certify` gave; None: the defaults of the device."""

    m: tuple[int, ...] | None = None  # rows; for attention the batch
    k: int | None = None  # K of a product, the width of a row operator, the KV length of attention
    n: int | None = None
    jigsaw: bool = False  # M on both sides of tile boundaries, for products
    dtypes: tuple[str, ...] | None = None
    layers: tuple[Layer, ...] = ()  # of a model
    full: bool = False

    @property
    def layer(self) -> tuple[int, int] | None:
        """K and N of a product's weight; one of them gives both. None: neither was given."""
        return None if self.k is None and self.n is None else (self.k or self.n or 0, self.n or self.k or 0)


@dataclass(frozen=True)
class BenchCell:
    """One benchmark case: the section of the report that it belongs to, and its shape."""

    section: str
    shape: Shape


@dataclass(frozen=True, kw_only=True)
class Bench:
    """What is timed."""

    cells: Callable[[Sizes, str], list[BenchCell]]  # (sizes, device type) -> benchmark cases, in order
    # shape -> (elements read and written, floating-point operations): each input read once, each output written once.
    # No operations where memory is the limit on every machine.
    work: Callable[[Shape], tuple[int, int]]
    group: tuple[str, ...]  # axes whose sizes the cases of a group share: they should give equal bits
    options: frozenset[str] = frozenset()  # that its sizes follow, beside --m and --k: "n", "jigsaw"
    aliases: tuple[str, ...] = ()
    fp8: bool = False  # operands are float8_e4m3fn, whatever dtype is requested, and `work` counts bytes


def row_cells(section: str, axis: str, shapes: tuple[tuple[int, int], ...]) -> Callable[[Sizes, str], list[BenchCell]]:
    """Cases of an operator over rows [M, axis]: (M, width) on CUDA, two sizes of the first width on a CPU."""

    def cells(sizes: Sizes, device: str) -> list[BenchCell]:
        pairs = shapes
        if device == "cpu":
            pairs = tuple((m, min(shapes[0][1], _CPU_WIDTH)) for m in _CPU_ROWS)
        if sizes.k is not None or sizes.m is not None:
            widths = [sizes.k] if sizes.k is not None else list(dict.fromkeys(width for _, width in pairs))
            pairs = tuple((m, width) for width in widths for m in sizes.m or _ROW_BATCHES)
        return [BenchCell(section, {"M": m, axis: width}) for m, width in pairs]

    return cells


def tile_borders(first: int, last: int) -> tuple[int, ...]:
    """M on both sides of tile boundaries, where a sawtooth shows: b and b + 1 for every boundary b in [first, last].
    Boundaries are the multiples of 8 up to 64, of 64 up to 1024, and of 256 beyond: tile heights are such multiples."""
    borders = [*range(8, 65, 8), *range(128, 1025, 64), *range(1280, last + 1, 256)]
    rows = {first, last} | {m for b in borders for m in (b, b + 1) if first <= m <= last}
    return tuple(sorted(rows))


@dataclass(frozen=True, kw_only=True)
class RowProbing:
    """What `nondet probe` tests of an operator over rows: it gets a probe under its own name."""

    widths: tuple[int, ...]  # of real models, and an odd one; the first gets the hard inputs and all tests
    width_keys: tuple[str, ...]  # sizes of a model (hidden, head_dim, vocabulary) that are widths of this operator
    adds: bool = False  # it adds the elements themselves, so that rows whose sum is exactly 0 show its order
    numbers: tuple[str, ...] = ()  # kinds of input (`nondet.core.inputs`) beside ordinary and hard ones


@dataclass(frozen=True)
class CertifyCell:
    """One question of `nondet certify`, for every member of a class."""

    shape: Shape  # named sizes without what varies, for the row
    values: tuple[int | str, ...]  # what varies: numbers of rows, which --m limits, or names
    kinds: tuple[str, ...] = ()  # inputs (`nondet.core.inputs`), each tested in turn; empty: those of products
    layout: str = ""  # strides of operands, and further options: "nt", "nt, bias", "strided", "GQA", ...
    tiles: bool = True  # families of members answer it as well


Questions = Callable[[Sizes, str, str], Iterable[CertifyCell]]  # (sizes, device type, dtype) -> in order


def row_questions(
    kinds: tuple[str, ...],
    widths: Mapping[str, tuple[int, ...]],
    batches: Mapping[str, tuple[int, ...]],
    others: Shape | None = None,
) -> Questions:
    """About an operator over the last axis, by device type; the first width in strided rows, too, and few rows of wide
    ones. `others`: sizes of operands' axes between the batch's and the last."""

    def questions(sizes: Sizes, device: str, dtype: str) -> Iterator[CertifyCell]:
        for i, width in enumerate((sizes.k,) if sizes.k else widths[device]):
            fitting = tuple(m for m in batches[device] if m * width <= _MOST_ELEMENTS[device])
            for layout in ("contiguous", "strided") if i == 0 else ("contiguous",):
                yield CertifyCell({"W": width, **(others or {})}, fitting, kinds, layout)

    return questions


@dataclass(frozen=True, kw_only=True)
class Implementation:
    """One way to compute the operator, under the operator's signature (`nondet.kernels.reference`)."""

    name: str  # as on the command line
    targets: Mapping[str, str]  # device type -> target
    stock: bool = False  # what a user gets by default, or one of its named backends: others are compared with it
    # it claims that an element's bits do not depend on the batch. The first such one with a target for a device is
    # `Kernels.NAME` for replacements there, and "invariant" for `nondet certify`.
    invariant: bool = False
    slow: bool = False  # timed only where it is requested by its name
    # further functions of the same kernels, which `kernels/dispatch` reaches as `Kernels.NAME`: name -> device type ->
    # target
    entries: Mapping[str, Mapping[str, str]] = field(default_factory=dict)

    def target(self, device: str) -> str | None:
        """The target on the device type; None where there is none."""
        return self.targets.get(device, self.targets.get(ANY))


@dataclass(frozen=True)
class Family:
    """Operators that `batch_invariant()` turns on and off together; `text` is a line of help."""

    name: str
    text: str


@dataclass(frozen=True, kw_only=True)
class AtenOperator:
    """An operator of torch that `batch_invariant()` replaces."""

    name: str  # "mm", or with its overload "mean.dim"
    replacement: str  # target of a function that takes the device's `Kernels` and the operator's own arguments
    out: str | None = None  # its out= form, where torch has a separate kernel for it
    in_place: bool = False
    composed: bool = False  # torch composes it of other operators; a replacement of the whole has no gradient


@dataclass(frozen=True, kw_only=True)
class OrderClass:
    """One order of reduction: implementations of one class give equal bits for every input."""

    name: str
    device: str
    dtypes: tuple[str, ...]  # of the operands that are certified by default; results have the first operand's
    accumulator: str  # where sums are kept
    order: str  # in plain words, for the author of another kernel
    formula: str  # the same in symbols; fl is one rounding to the accumulator's format


@dataclass(frozen=True, kw_only=True)
class Claim:
    """That functions for one operator belong to an order class, for `nondet certify` to prove or to refute."""

    order: OrderClass
    # target of the function that all others are compared with, bit by bit; or the invariant implementation on each row
    anchor: str = ONE_ROW
    # name -> target, or `INVARIANT`: what a user gets. A name that ends in "/*" is a family of members: its target
    # takes a dtype's name and gives {name: callable}.
    members: Mapping[str, str] = field(default_factory=lambda: {INVARIANT: INVARIANT})


@dataclass(frozen=True)
class AccuracyBound:
    """How far from the float64 oracle a correct implementation may be, whatever its order. `bound` is the target of a
    function of `nondet.core.watch`: one call's terms and operands -> allowed error per element; `source` the same in
    words, and where it is from."""

    bound: str
    source: str


@dataclass(frozen=True, kw_only=True)
class Operator:
    """One operator."""

    name: str  # in snake_case; on the command line underscores may be hyphens
    reference: str | None = None  # target of the float64 oracle, whose signature is the operator's
    implementations: tuple[Implementation, ...] = ()  # empty: only `batch_invariant()` uses the operator
    family: Family | None = None
    aten: tuple[AtenOperator, ...] = ()
    claims: tuple[Claim, ...] = ()
    accuracy: AccuracyBound | None = None  # bound on the results; None: only shape, dtype and finiteness are checked
    operands: tuple[Operand, ...] = ()  # the tensor arguments, as they are timed and certified
    probe: RowProbing | None = None  # what its probe tests; None: it has none, or one that is a file in `probes/`
    bench: Bench | None = None
    # target of (kind, layout, shape, dtype, device, seed) -> operands that are made for each other, as a product's are
    drawn_by: str | None = None
    questions: Questions | None = None  # what `nondet certify` tests, of the classes that `claims` names on the device

    def implementation(self, name: str) -> Implementation | None:
        """The implementation of that name."""
        return next((i for i in self.implementations if i.name == name), None)

    def invariant_on(self, device: str) -> Implementation | None:
        """What `batch_invariant()` uses on the device type."""
        return next((i for i in self.implementations if i.invariant and i.target(device)), None)
