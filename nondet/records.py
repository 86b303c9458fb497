"""What one line of a run file can say of operators: rows, and what they are made of. Plain typed data, no torch.

What a reader must know of a row to judge it is in its fields: what kind of thing varied, whether the case shows a cause
on purpose, whether every sum in it is exact, what role its implementation has and whether that claims invariance. Files
from before schema 3 lack these fields; they are filled in here, from the names such files used, and nowhere else.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Any, ClassVar, Self

import msgspec

__all__ = [
    "Accuracy",
    "Axis",
    "Difference",
    "ErrorFigures",
    "Record",
    "Role",
    "Row",
    "Status",
    "Value",
    "families_of",
    "role_of",
]

Value = int | str


class Status:
    """Statuses of a row, and of an implementation in a cell. Plain strings: a run file reads without this module."""

    IDENTICAL: ClassVar[str] = "identical"
    DIVERGENT: ClassVar[str] = "divergent"
    WRONG: ClassVar[str] = "wrong"  # no answer to the question that was put; its variants may agree all the same
    TIMED: ClassVar[str] = "timed"
    SKIPPED: ClassVar[str] = "skipped"
    ERROR: ClassVar[str] = "error"


class Axis(StrEnum):
    """What kind of thing varied between the variants of a row."""

    RUN = "run"
    BATCH = "batch"
    ORDER = "order"
    OTHER = "other"


# What varied -> its kind, where a case does not say. What is not listed is called by its name: bits depend on length.
_AXES: dict[str, Axis] = {
    "run": Axis.RUN,
    "batch_size": Axis.BATCH,
    "position": Axis.BATCH,
    "query_chunk": Axis.BATCH,
    "routing": Axis.BATCH,  # which experts the other tokens go to
    "cache": Axis.BATCH,
    "load": Axis.BATCH,
    "neighbour_values": Axis.BATCH,
    "neighbour_length": Axis.BATCH,
    "history": Axis.RUN,  # the same call at another moment
    "prompt_length": Axis.BATCH,  # more tokens of the same prompt ride along
    "split": Axis.ORDER,
    "order": Axis.ORDER,
}


class Role(StrEnum):
    """What an implementation is to a reader of a report."""

    STOCK = "stock"  # what a user gets by default
    BACKEND = "backend"  # one of stock's backends, asked for by name
    INVARIANT = "invariant"
    PART = "part"  # one family of operators replaced, the rest stock
    OTHER = "other"  # a user's own function, a rival, a member of a numerics class


def role_of(impl: str) -> Role:
    """The role that a name of ours stands for: stock, stock-flash, invariant, invariant:attention. The only place."""
    if impl in ("stock", "invariant"):
        return Role(impl)
    if impl == "server" or impl.startswith("server-"):  # whatever it runs is what its users get
        return Role.STOCK
    if impl.startswith("stock-"):
        return Role.BACKEND
    return Role.PART if impl.startswith(("invariant-", "invariant:")) else Role.OTHER


def families_of(impl: str) -> str:
    """What a partial replacement replaces, "attention" or "attention+matmul"; empty for every other role."""
    return impl.partition(":")[2] if role_of(impl) == Role.PART else ""


# How files from before schema 3 told what is a field now.
_SHOWN_ON_PURPOSE = {"float_sum", "split_k"}
_EXACT_INPUTS = {"integers", "ones"}


class Record(msgspec.Struct, frozen=True, kw_only=True):
    """One line of a run file, between its header and its end. A kind of record is a class and a field of `Run`."""

    @property
    def key(self) -> tuple[str, ...]:
        """What a resumed run recognizes a finished record by; it begins with the record's tag."""
        raise NotImplementedError

    def refused(self, why: str) -> Self:
        """What is written where no reader would take the record: itself as a failure, where its kind can fail."""
        return self


class Difference(msgspec.Struct, frozen=True, kw_only=True):
    """How two tensors of one shape and dtype differ, element by element, as bits.

    Attributes:
        mismatched: Elements whose bits differ.
        compared: Elements compared.
        max_abs: Largest absolute difference over elements finite on both sides; 0.0 where none differs.
        max_ulp: Largest distance in units in the last place, over the same elements. -0.0 and 0.0 are 0 ULP apart, yet
            mismatch.
        nonfinite: Mismatched elements where at least one side is NaN or infinite: no distance is defined there.
        first_mismatch: Index of the first mismatched element, None where there is none.
        first_bits: The bits of both sides there, as hex ("0x3f800000"): the reference's, then the other's. Unset, and
            left out of a file, where nothing differs and in files from before it was recorded.
        label: The class of the other side, where the reference is the first of several classes; unset elsewhere.
        scale: Largest magnitude of the reference's finite elements, what max_abs is held against; None in files that
            did not record it, and where nothing differs.
    """

    mismatched: int
    compared: int
    max_abs: float
    max_ulp: int
    nonfinite: int = 0
    first_mismatch: list[int] | None = None
    first_bits: list[str] | msgspec.UnsetType = msgspec.UNSET
    label: int | msgspec.UnsetType = msgspec.UNSET
    scale: float | None = None


class ErrorFigures(msgspec.Struct, frozen=True, kw_only=True):
    """Distance from the float64 reference: accuracy, not identity.

    Attributes:
        max_abs: Largest absolute error; None where it is not a finite number (the result overflowed, say).
        relative_norm: ||out - ref|| / ||ref|| (Frobenius), what the accuracy bound is stated in; None as above.
        max_ulp: Largest error in ULP of the output dtype, against the reference rounded to that dtype, over elements
            finite on both sides.
    """

    max_abs: float | None
    relative_norm: float | None
    max_ulp: int


class Accuracy(msgspec.Struct, frozen=True, kw_only=True):
    """Whole results of an operator, held against the float64 reference element by element.

    Attributes:
        calls: Calls whose whole result was checked: shape, dtype and every element.
        elements: Elements checked.
        worst: The largest error over what is allowed at its element; above 1 the result is wrong. None where no bound
            is known for the operator: then shape, dtype and finiteness alone were checked.
        source: What is allowed, and why.
    """

    calls: int
    elements: int
    worst: float | None
    source: str


class Row(Record, frozen=True, tag="row", kw_only=True):
    """One case under one implementation: variants that ought to give equal bits, and the classes that they fell into.

    Attributes:
        probe: Name of the probe, as on the command line.
        case: Name of the case, unique within a probe, a device and a dtype.
        operator: The operator asked of: linear, matmul, attention, rms_norm, ...
        shape: Named sizes: M, N, K, or B, Hq, Hkv, Tq, Tk, D, or whatever the operator has.
        inputs: Kind of input: bell, wide, cancel, outlier, linspace, ... (see `nondet.inputs`).
        varied: What varied between the variants: batch_size, position, run, query_chunk, split, order, ...
        axis: Its kind, an `Axis`.
        demonstration: Whether a probe built the operator to show a cause: no verdict on what a library runs by default.
        exact: Whether every partial sum is exact, so that all orders must agree and what parts is a bug.
        impl: The implementation asked for.
        role: What it is, a `Role`.
        claims_invariance: Whether it says that its bits don't depend on what varied, however the work is split.
        ran: What really ran, as launchers and the profiler named it, over all variants.
        values: The variants tried, in order (M for a batch sweep). Empty where there are too many to list (see trials).
        labels: The class of each value, numbered by first appearance. As long as values.
        class_sizes: Trials in each class. Sums to trials.
        kernel_sets: The distinct sets of device kernels that a variant launched, in launch order, by first appearance.
        kernels: For each value the index of its set in kernel_sets; empty where nothing was profiled.
        trials: Variants compared. `distinct` of them were different bit patterns.
        replays: Variants that were computed again, after all others, and compared with their first result.
        replays_parted: How many of those came out otherwise: run-to-run nondeterminism, whatever else was varied.
        difference: The largest over all classes, each against the first variant's; None where nothing was compared.
        error: The first variant against the float64 reference; None where the probe has none.
        worst_error: The worst class against the float64 reference.
        accuracy: Whole results against the reference; None where none was checked.
        nonfinite: Elements of the first variant that are NaN or infinite.
        extra: What only this probe can say (a reduction tree, the range of the sums, ...).
        reason: Why a row is wrong, skipped or failed; a note otherwise.
        group: The cells of a bench run that the row speaks for, as `Cell.group`; empty elsewhere.
        place: Where the row stands among all that its plan makes, from 0: several processes finish theirs in any order,
            and a reader gets rows by place. Unset, and left out of a file, where rows are written one after the other.
        seconds: Wall time of the whole case.
    """

    probe: str
    case: str
    operator: str
    shape: dict[str, int]
    dtype: str
    device: str
    inputs: str
    varied: str
    axis: str = ""
    demonstration: bool | None = None
    exact: bool | None = None
    impl: str
    role: str = ""
    claims_invariance: bool | None = None
    status: str
    ran: list[str] = []
    values: list[Value] = []
    labels: list[int] = []
    class_sizes: list[int] = []
    kernel_sets: list[list[str]] = []
    kernels: list[int] = []
    trials: int = 0
    distinct: int = 0
    replays: int = 0
    replays_parted: int = 0
    difference: Difference | None = None
    error: ErrorFigures | None = None
    worst_error: ErrorFigures | None = None
    accuracy: Accuracy | None = None
    nonfinite: int = 0
    extra: dict[str, Any] = {}
    reason: str = ""
    group: str = ""
    place: int | msgspec.UnsetType = msgspec.UNSET
    seconds: float = 0.0

    def __post_init__(self) -> None:
        """Fill in what was left out: by a caller that means the usual, or by a file from before schema 3."""
        usual = {
            "axis": lambda: _AXES.get(self.varied, Axis.OTHER).value,
            "demonstration": lambda: self.operator in _SHOWN_ON_PURPOSE,
            "exact": lambda: self.inputs in _EXACT_INPUTS,
            "role": lambda: role_of(self.impl).value,
            "claims_invariance": lambda: role_of(self.impl) in (Role.INVARIANT, Role.PART),
            # "matmul K=4096 N=6144: row 0 of M rows"
            "group": lambda: self.case.partition(":")[0].partition(" ")[2] if self.probe == "bench" else "",
        }
        for name, value in usual.items():
            if getattr(self, name) in ("", None):
                msgspec.structs.force_setattr(self, name, value())

    @property
    def key(self) -> tuple[str, ...]:
        """As `Record.key`."""
        return ("row", self.probe, self.case, self.dtype, self.device, self.impl)

    def refused(self, why: str) -> Self:
        """As `Record.refused`: what was asked, without what came of it."""
        asked = "probe case operator shape dtype device inputs varied axis demonstration exact impl role group place"
        kept = {name: getattr(self, name) for name in (*asked.split(), "claims_invariance")}
        return type(self)(**kept, status=Status.ERROR, reason=why)

    @property
    def parted(self) -> bool:
        """Whether the variants fell into more than one class. Count and status are both believed."""
        return self.distinct > 1 or self.status == Status.DIVERGENT

    @property
    def wrong(self) -> bool:
        """Whether a result is no answer to what was asked, identical or not; `exact` is how older files say it."""
        return self.status == Status.WRONG or self.extra.get("exact") is False

    @property
    def measured(self) -> bool:
        """Whether the row holds figures."""
        return self.status not in (Status.SKIPPED, Status.ERROR)
