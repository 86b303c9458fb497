"""Records of `nondet bench`: what the machine can do, and timed cells. Plain typed data, no torch."""

from __future__ import annotations

import msgspec

from nondet.records import Record, Role, role_of

__all__ = ["Cell", "Limit", "Timed"]


class Limit(Record, frozen=True, tag="limit", kw_only=True):
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
        """As `Record.key`."""
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

    @property
    def role(self) -> Role:
        """What the implementation is to a reader."""
        return role_of(self.impl)


class Cell(Record, frozen=True, tag="cell", kw_only=True):
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
        method: "cuda graph" or "perf_counter"; of an engine's run what its steps were.
        sets: Sets of buffers that the calls of one replay walk over in turn.
        calls: Calls in one replay.
        cold: Whether the sets together exceed the last cache, so that no call finds its inputs there.
        bus_bytes: Of a sum over ranks: 2 (ranks - 1) / ranks times the message, what each rank's links must carry; over
            the time it is the bus bandwidth. 0 elsewhere.
        tokens: Of an engine's run: generated in its steps, whose number is `calls`. 0 elsewhere.
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
    bus_bytes: int = 0
    tokens: int = 0
    timed: list[Timed]
    seconds: float = 0.0

    @property
    def key(self) -> tuple[str, ...]:
        """As `Record.key`."""
        return ("cell", self.section, self.case, self.dtype, self.device)
