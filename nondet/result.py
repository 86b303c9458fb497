"""Runs and rows: plain typed data, and the JSONL file that holds them.

A run file is one header line (format, schema, environment, plan), then one line a record, written and flushed as the
record is made, then one end line. Everything people see is rendered from these records and nothing else. This module
imports neither torch nor pandas.
"""

from __future__ import annotations

from typing import Any, ClassVar

import msgspec

__all__ = [
    "FORMAT",
    "SCHEMA_VERSION",
    "Cell",
    "Completion",
    "Difference",
    "End",
    "ErrorFigures",
    "Header",
    "Limit",
    "Record",
    "Round",
    "Row",
    "Run",
    "Status",
    "Timed",
]

FORMAT = "nondet-run"
SCHEMA_VERSION = 2  # 2: cells and limits of `nondet bench`

Value = int | str


class Status:
    """Statuses of a row, and of an implementation in a cell. Plain strings: a run file reads without this module."""

    IDENTICAL: ClassVar[str] = "identical"
    DIVERGENT: ClassVar[str] = "divergent"
    TIMED: ClassVar[str] = "timed"
    SKIPPED: ClassVar[str] = "skipped"
    ERROR: ClassVar[str] = "error"


class Header(msgspec.Struct, frozen=True, tag="header", kw_only=True):
    """The first line of a run file.

    Attributes:
        plan: The options that decide which records the run holds. A run is resumed only under an equal plan.
        environment: What a reader needs to trust the figures; see `nondet.environment.collect`.
        started: UTC, ISO 8601.
    """

    format: str
    schema: int
    command: str
    plan: dict[str, Any]
    environment: dict[str, Any]
    started: str


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
    """

    mismatched: int
    compared: int
    max_abs: float
    max_ulp: int
    nonfinite: int = 0
    first_mismatch: list[int] | None = None


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


class Row(msgspec.Struct, frozen=True, tag="row", kw_only=True):
    """One case under one implementation: variants that ought to give equal bits, and the classes that they fell into.

    Attributes:
        probe: Name of the probe, as on the command line.
        case: Name of the case, unique within a probe, a device and a dtype.
        operator: The operator asked of: linear, matmul, attention, rms_norm, ...
        shape: Named sizes: M, N, K, or B, Hq, Hkv, Tq, Tk, D, or whatever the operator has.
        inputs: Kind of input: bell, wide, cancel, outlier, linspace, ... (see `nondet.inputs`).
        varied: What varied between the variants: batch_size, position, run, query_chunk, split, order, ...
        impl: The implementation asked for.
        ran: What really ran, as launchers and the profiler named it, over all variants.
        values: The variants tried, in order (M for a batch sweep). Empty where there are too many to list (see trials).
        labels: The class of each value, numbered by first appearance. As long as values.
        class_sizes: Trials in each class. Sums to trials.
        kernel_sets: The distinct sets of device kernels that a variant launched, in launch order, by first appearance.
        kernels: For each value the index of its set in kernel_sets; empty where nothing was profiled.
        trials: Variants compared. `distinct` of them were different bit patterns.
        replays: Variants that were computed a second time, after all others, and compared with their first result.
        replays_parted: How many of those came out otherwise: run-to-run nondeterminism, whatever else was varied.
        difference: The largest over all classes, each against the first variant's; None where nothing was compared.
        error: The first variant against the float64 reference; None where the probe has none.
        worst_error: The worst class against the float64 reference.
        extra: What only this probe can say (a reduction tree, the range of the sums, ...).
        reason: Why a row is skipped or failed; a note otherwise.
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
    impl: str
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
    extra: dict[str, Any] = {}
    reason: str = ""
    seconds: float = 0.0

    @property
    def key(self) -> tuple[str, ...]:
        """What a resumed run recognizes a finished row by."""
        return ("row", self.probe, self.case, self.dtype, self.device, self.impl)


class Completion(msgspec.Struct, frozen=True, tag="completion", kw_only=True):
    """One completion of the request under study.

    Attributes:
        impl: Implementation asked for: stock, invariant, invariant:attention, ...
        request: Identifier, unique within the implementation.
        round: Number of the round (one engine session) that it belongs to.
        prompt: Index of the prompt in the header's plan.
        tokens_digest: SHA-256 (first 16 hex digits) of the token ids: equal digests are equal completions.
        trace: SHA-256 (first 16 hex digits) of token ids and logprob bits; the side file holds the trace under it.
        n_tokens: Tokens generated.
        finish: "length", "eos" or "error".
        arrival_step: The engine step from which the request was allowed to be scheduled.
        schedule: Run-length list of [first_step, steps, query_tokens]: the engine steps in which the request took part.
            Over all requests of a round this gives the exact batch of each step.
        batch_min: Smallest and
        batch_max: largest number of query tokens in a step that this request took part in.
    """

    impl: str
    request: str
    round: int
    prompt: int
    tokens_digest: str
    trace: str
    n_tokens: int
    finish: str
    arrival_step: int
    schedule: list[list[int]]
    batch_min: int
    batch_max: int
    status: str = "ok"
    reason: str = ""

    @property
    def key(self) -> tuple[str, ...]:
        """What a resumed run recognizes a finished completion by."""
        return ("completion", self.impl, self.request)


class Round(msgspec.Struct, frozen=True, tag="round", kw_only=True):
    """One engine session: a slice of the load plan, run from an empty engine, and the unit of resuming.

    Attributes:
        targets: Completions of the request under study.
        others: Requests that ran alongside.
        steps: Engine steps.
        tokens: Tokens generated for everybody.
        seconds: Wall time of the steps, model loading and warm-up left out.
        background: Schedules of the requests alongside: request id -> run-length schedule.
        ran: What the launchers and the dispatcher say ran, with counts.
    """

    impl: str
    round: int
    targets: int
    others: int
    steps: int
    tokens: int
    seconds: float
    background: dict[str, list[list[int]]] = {}
    ran: dict[str, int] = {}

    @property
    def key(self) -> tuple[str, ...]:
        """What a resumed run recognizes a finished round by."""
        return ("round", self.impl, str(self.round))


class Limit(msgspec.Struct, frozen=True, tag="limit", kw_only=True):
    """What the machine can do at most, measured in the same run as what is held against it.

    Attributes:
        name: "copy", or "peak bfloat16" and so on.
        what: What was measured, the fastest of several ways where there were several.
        unit: "B/s" or "FLOP/s".
        rate: Work over the fastest replay: what the machine can do at most.
        work: Bytes (read and written) or floating-point operations of one call.
        samples_us: Microseconds a call, one figure a replay.
    """

    name: str
    what: str
    unit: str
    device: str
    rate: float
    work: int
    method: str
    samples_us: list[float]

    @property
    def key(self) -> tuple[str, ...]:
        """What a resumed run recognizes it by."""
        return ("limit", self.name, self.device)


class Timed(msgspec.Struct, frozen=True, kw_only=True):
    """One implementation in one cell.

    Attributes:
        status: `Status.TIMED`, or skipped or error, with the reason.
        samples_us: Microseconds a call, one figure a replay, in the order of the replays.
        median_us, low_us, high_us: Their median and quartiles.
        ran: What the launchers noted.
        kernels: Device kernels of one call, as the profiler named them; empty where nothing was profiled.
    """

    impl: str
    status: str
    reason: str = ""
    samples_us: list[float] = []
    median_us: float = 0.0
    low_us: float = 0.0
    high_us: float = 0.0
    ran: list[str] = []
    kernels: list[str] = []


class Cell(msgspec.Struct, frozen=True, tag="cell", kw_only=True):
    """One call of one shape, timed under every implementation in turn: replay i of one stands beside replay i of all.

    Attributes:
        section: What it is reported with: "matmul", "attention decode", ...
        case: Name, unique within a section, a device and a dtype.
        group: Cells that share it ask for equal bits: the weight shape of a product, the width of a row operator.
        axis: The size that differs within a group: a key of `shape`.
        bytes: Each input read once and the output written once.
        flops: Floating-point operations; 0 where memory alone can be the limit.
        limit_us: The longer of bytes over copy bandwidth and flops over the peak; None where that was not measured.
        limited_by: "memory" or "arithmetic".
        method: "cuda graph" or "perf_counter".
        sets: Sets of buffers that the calls of one replay walk over in turn.
        calls: Calls in one replay.
        cold: Whether the sets together exceed the last cache, so that no call finds its inputs there.
        timed: One for each implementation.
    """

    section: str
    operator: str
    case: str
    group: str
    axis: str
    shape: dict[str, int]
    dtype: str
    device: str
    bytes: int
    flops: int
    limit_us: float | None
    limited_by: str
    method: str
    sets: int
    calls: int
    cold: bool
    timed: list[Timed]
    seconds: float = 0.0

    @property
    def key(self) -> tuple[str, ...]:
        """What a resumed run recognizes a finished cell by."""
        return ("cell", self.section, self.case, self.dtype, self.device)


class End(msgspec.Struct, frozen=True, tag="end", kw_only=True):
    """The last line of a run that came to its end."""

    records: int
    seconds: float


Record = Row | Completion | Round | Limit | Cell


class Run(msgspec.Struct, kw_only=True):
    """A run file in memory.

    Attributes:
        complete: Whether the end line is there.
        source: Where it was read from, for messages.
    """

    header: Header
    rows: list[Row] = []
    completions: list[Completion] = []
    rounds: list[Round] = []
    limits: list[Limit] = []
    cells: list[Cell] = []
    complete: bool = True
    source: str = ""
