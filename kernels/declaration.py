"""What an operator is to nondet: one frozen `Operator` in the folder of its kernels, and nothing about it elsewhere.

`nondet.registry` lists the declarations. It gives probes their implementations by name; `kernels/dispatch` reads which
aten operators they replace, `kernels/classes.py` which orders of reduction they claim, `nondet.certify` what is asked
of them, `nondet.bench` what is timed. So an operator is added in its own folder, and a backend is one file and its
lines here.

A target is "module:attribute", imported at first use: declarations import no torch and no kernel. Device types are
"cpu" and "cuda"; `ANY` stands for every one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from nondet.kernels.workload import Bench, Operand, QuestionForm, RowProbing

__all__ = [
    "ANY",
    "INVARIANT",
    "ONE_ROW",
    "AccuracyBound",
    "AtenOperator",
    "Claim",
    "Family",
    "Implementation",
    "Operator",
    "OrderClass",
]

ANY = "*"
INVARIANT = "invariant"
ONE_ROW = "each row alone"


@dataclass(frozen=True, kw_only=True)
class Implementation:
    """One way to compute the operator, under the operator's signature (`nondet.kernels.reference`).

    Attributes:
        name: As asked for on the command line.
        targets: Device type -> target.
        stock: What a user gets by default, or one of its named backends: others are held against it.
        invariant: It claims that an element's bits do not depend on the batch. The first such implementation with a
            target for a device is what replacements reach as `Kernels.NAME` there, and what `nondet certify` calls
            "invariant".
        slow: Timed only where it is asked for by its name.
        entries: Further functions of the same kernels, for callers who know more than the signature says: name ->
            device type -> target. `kernels/dispatch` reaches them as `Kernels.NAME`.
    """

    name: str
    targets: Mapping[str, str]
    stock: bool = False
    invariant: bool = False
    slow: bool = False
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
    """An operator of torch that `batch_invariant()` replaces.

    Attributes:
        name: "mm", or with its overload "mean.dim".
        replacement: Target of a function that takes the device's `Kernels` and the operator's own arguments.
        out: Its out= form, where that has a kernel of its own in torch.
        in_place: It has a form that ends in "_".
        composed: torch makes it of other operators; a replacement of the whole has no gradient.
    """

    name: str
    replacement: str
    out: str | None = None
    in_place: bool = False
    composed: bool = False


@dataclass(frozen=True, kw_only=True)
class OrderClass:
    """One order of reduction, written down: implementations of one class give equal bits for every input.

    Attributes:
        device: "cuda" or "cpu".
        dtypes: Of the operands, by default those that are certified; results have the first operand's.
        accumulator: Where sums are kept.
        order: In plain words, for the writer of another kernel.
        formula: The same in symbols; fl is one rounding to the accumulator's format.
    """

    name: str
    device: str
    dtypes: tuple[str, ...]
    accumulator: str
    order: str
    formula: str


@dataclass(frozen=True, kw_only=True)
class Claim:
    """That functions for one operator belong to an order class, for `nondet certify` to prove or to refute.

    Attributes:
        order: The class.
        anchor: Target of the function that all others are compared with, bit by bit; or `ONE_ROW`: the invariant
            implementation on each row alone, where a library's own order is the class.
        members: Name -> target, or `INVARIANT`: the implementation that a user gets. A name that ends in "/*" is a
            family of members: its target takes a dtype's name and gives {name: callable}.
    """

    order: OrderClass
    anchor: str = ONE_ROW
    members: Mapping[str, str] = field(default_factory=lambda: {INVARIANT: INVARIANT})


@dataclass(frozen=True)
class AccuracyBound:
    """How far from the float64 oracle a sound implementation may be, whatever its order.

    Attributes:
        bound: Target of a function of `nondet.accuracy`: of one call's terms and operands, what is allowed at each
            element.
        source: The same in words, and where it is from.
    """

    bound: str
    source: str


@dataclass(frozen=True, kw_only=True)
class Operator:
    """One operator.

    Attributes:
        name: In snake_case; on the command line underscores may be hyphens.
        reference: Target of the float64 oracle, whose signature is the operator's.
        implementations: In the order in which they are listed. None at all: known to `batch_invariant()` alone.
        family: Of its aten operators.
        accuracy: What results are held to; None: shape, dtype and finiteness alone.
        operands: The tensor arguments, as they are timed and certified.
        probe: What the probe of its own asks; None: it has none, or one that is a file in `probes/`.
        bench: What is timed; None: nothing.
        questions: Device type -> what is asked by `nondet certify`, of the classes that `claims` names there.
    """

    name: str
    reference: str | None = None
    implementations: tuple[Implementation, ...] = ()
    family: Family | None = None
    aten: tuple[AtenOperator, ...] = ()
    claims: tuple[Claim, ...] = ()
    accuracy: AccuracyBound | None = None
    operands: tuple[Operand, ...] = ()
    probe: RowProbing | None = None
    bench: Bench | None = None
    questions: Mapping[str, QuestionForm] = field(default_factory=dict)

    def implementation(self, name: str) -> Implementation | None:
        """The implementation of that name."""
        return next((i for i in self.implementations if i.name == name), None)

    def invariant_on(self, device: str) -> Implementation | None:
        """What `batch_invariant()` uses on the device type."""
        return next((i for i in self.implementations if i.invariant and i.target(device)), None)
