"""Every record of a run file, by section, the run that collects them, and what a reader checks of them. No torch."""

from __future__ import annotations

import itertools
import math
import struct
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from enum import StrEnum
from typing import Annotated, Any, ClassVar, Self, Union, get_args, get_origin, get_type_hints

import msgspec

NUMBER_MOST = 2**53  # the largest integer on which JSON readers agree
TOKENS_MOST = 2**24
# A count, a size, a list of tokens, a figure, and a digest (empty where there is none).
Count = Annotated[int, msgspec.Meta(ge=0, le=NUMBER_MOST)]
Size = Annotated[int, msgspec.Meta(ge=1, le=NUMBER_MOST)]
Tokens = Annotated[int, msgspec.Meta(ge=0, le=TOKENS_MOST)]
Figure = Annotated[float, msgspec.Meta(ge=0.0)]
Bits = Annotated[str, msgspec.Meta(pattern=r"\A0x[0-9a-f]{1,16}\Z")]  # of the widest element, float64
Digest = Annotated[str, msgspec.Meta(pattern=r"\A([0-9a-f]{16})?\Z")]
Whole = Annotated[int, msgspec.Meta(ge=-NUMBER_MOST, le=NUMBER_MOST)]
Large = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]  # a distance in ULP of float64, bytes, operations
Value = Whole | str
# [first step, steps, query tokens], see `_schedule`
Stretch = Annotated[list[Count], msgspec.Meta(min_length=3, max_length=3)]
Outcome = Annotated[str, msgspec.Meta(pattern=r"\A(ok|error)\Z")]


class Status:
    """Statuses of a row, and of an implementation in a benchmark case. Plain strings, as in the run file."""

    IDENTICAL: ClassVar[str] = "identical"
    DIVERGENT: ClassVar[str] = "divergent"
    WRONG: ClassVar[str] = "wrong"  # the result is not a valid answer, even if all variants agree
    TIMED: ClassVar[str] = "timed"
    SKIPPED: ClassVar[str] = "skipped"
    ERROR: ClassVar[str] = "error"


class Axis(StrEnum):
    """What kind of thing varied between the variants of a row."""

    RUN = "run"
    BATCH = "batch"
    ORDER = "order"
    OTHER = "other"


# What varied, by its kind, where a case does not give one. Anything else is `Axis.OTHER`: bits depend on length.
_VARIED = {
    Axis.RUN: ("run", "history"),
    Axis.BATCH: (
        *("batch_size", "position", "micro_batch", "query_chunk", "routing", "cache", "load"),
        *("neighbour_values", "neighbour_length", "prompt_length"),  # more tokens of the same prompt are in the batch
    ),
    Axis.ORDER: ("split", "order"),
}
_AXES = {name: axis for axis, names in _VARIED.items() for name in names}


class Role(StrEnum):
    """What an implementation is to a reader of a report."""

    STOCK = "stock"  # what a user gets by default
    BACKEND = "backend"  # one of stock's backends, selected by name
    INVARIANT = "invariant"
    PART = "part"  # one family of operators replaced, the rest stock
    OTHER = "other"  # a user's own function, or a member of a numerics class


def role_of(impl: str) -> Role:
    """The role of an implementation by its name: stock, stock-flash, invariant, invariant:attention."""
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


_EXACT_INPUTS = {"integers", "ones"}


class Record(msgspec.Struct, frozen=True, kw_only=True):
    """One line of a run file, between its header and its end. A kind of record is a class and a field of `Run`."""

    keyed_by: ClassVar[tuple[str, ...]] = ()
    kept_when_refused: ClassVar[tuple[str, ...]] = ()  # besides these, by a record that can fail

    @property
    def key(self) -> tuple[str, ...]:
        """By what a resumed run recognizes a finished record: its tag, and what its `keyed_by` names."""
        parts = (getattr(self, name) for name in self.keyed_by)
        return (str(self.__struct_config__.tag), *("+".join(p) if isinstance(p, list) else str(p) for p in parts))

    def refused(self, why: str) -> Self:
        """The record as a failure, where its kind can fail: written if a reader would reject the record itself."""
        if not hasattr(self, "status"):
            return self
        kept = {name: getattr(self, name) for name in (*self.keyed_by, *self.kept_when_refused)}
        return type(self)(**kept, status=Status.ERROR, reason=why)


class ImplementationRecord(Record, frozen=True, kw_only=True):
    """A record of one implementation: stock, invariant, invariant:attention, a server's ..."""

    impl: str

    @property
    def role(self) -> Role:
        """What the implementation is to a reader."""
        return role_of(self.impl)


class Difference(msgspec.Struct, frozen=True, kw_only=True):
    """How two tensors of one shape and dtype differ, element by element, as bits."""

    mismatched: Count  # elements whose bits differ
    compared: Count
    max_abs: Figure  # largest absolute difference over elements finite on both sides; 0.0 where none differs
    max_ulp: Large  # largest distance in units in the last place, over the same elements. Two zeros are 0 ULP apart
    nonfinite: Count = 0  # mismatched elements where at least one side is NaN or infinite: no distance is defined there
    first_mismatch: list[Count] | None = None  # index of the first mismatched element, None where there is none
    # the bits there, as hex ("0x3f800000"), of the reference and of the other; left out where nothing differs
    first_bits: list[Bits] | msgspec.UnsetType = msgspec.UNSET
    label: Whole | msgspec.UnsetType = msgspec.UNSET  # the class of the other side, where the reference is the first
    scale: Figure | None = None  # largest magnitude of the reference's finite elements; None if nothing differs


class ErrorFigures(msgspec.Struct, frozen=True, kw_only=True):
    """Distance from the float64 reference: accuracy, not identity."""

    max_abs: Figure | None  # largest absolute error; None where it is not a finite number (the result overflowed, say)
    relative_norm: Figure | None  # ||out - ref|| / ||ref|| (Frobenius); None as above
    max_ulp: Large  # largest, of the output dtype, against the reference rounded to it, where both sides are finite


class ClassError(msgspec.Struct, frozen=True, kw_only=True):
    """How far the results of one class of bits are from the float64 reference, in ULP of the output dtype (the distance
    between neighbours at the reference), over elements that are finite on both sides."""

    elements: Count
    median: Figure  # of the error's size
    p99: Figure
    most: Figure
    mean: float  # with its sign: a bias
    closer: Count  # elements at which the class is nearer to the reference than the first class, and
    farther: Count  # farther; the others are as near


class Accuracy(msgspec.Struct, frozen=True, kw_only=True):
    """Whole results of an operator, compared with the float64 reference element by element."""

    calls: Count  # calls whose whole result was checked: shape, dtype and every element
    elements: Count
    # the largest error relative to its element's bound; above 1 the result is wrong. None where no bound is known
    worst: Figure | None
    source: str  # the bound, and why


class Judged(msgspec.Struct, frozen=True, kw_only=True):
    """Whether a difference is rounding, as far as that was found."""

    kind: Annotated[str, msgspec.Meta(pattern=r"\A(rounding|bug|open)\Z")]
    far: Figure  # the largest difference as a share of the results' scale; of integers, the share that differs
    bound: Figure | None  # what rounding may give, the same; None where it is not known
    dtype: str
    look: Annotated[str, msgspec.Meta(pattern=r"\A[a-z-]*\Z")] = ""  # what looks so, a key of the verdict's words


class Row(Record, frozen=True, tag="row", kw_only=True):
    """One case under one implementation: variants that ought to give equal bits, and the classes they fell into."""

    keyed_by = ("probe", "case", "dtype", "device", "impl")
    kept_when_refused = (
        *("operator", "shape", "inputs", "varied", "axis", "demonstration", "exact", "role", "claims_invariance"),
        *("group", "place"),
    )
    probe: str
    case: str  # name of the case, unique within a probe, a device and a dtype
    operator: str
    shape: dict[str, Whole]  # named sizes: M, N, K, or B, Hq, Hkv, Tq, Tk, D, or whatever the operator has
    dtype: str
    device: str
    inputs: str  # kind of input: bell, wide, cancel, outlier, linspace, ... (see `nondet.core.inputs`)
    varied: str  # what varied between the variants: batch_size, position, run, query_chunk, split, order, ...
    axis: Annotated[str, msgspec.Meta(pattern=r"\A(run|batch|order|other)?\Z")] = ""  # its kind, an `Axis`
    demonstration: bool = False  # whether a probe built the operator to show a cause: no verdict on a library
    exact: bool | None = None  # whether every partial sum is exact, so that all orders must agree
    impl: str
    role: Annotated[str, msgspec.Meta(pattern=r"\A(stock|backend|invariant|part|other)?\Z")] = ""  # a `Role`
    claims_invariance: bool | None = None  # whether it claims that its bits don't depend on what varied
    status: Annotated[str, msgspec.Meta(pattern=r"\A(identical|divergent|wrong|skipped|error)\Z")]
    ran: list[str] = []  # what really ran, as launchers and the profiler named it, over all variants
    values: list[Value] = []  # the variants, in order (M for a batch sweep); empty where there are too many to list
    labels: list[Count] = []  # the class of each value, numbered by first appearance. As long as values
    class_sizes: list[Size] = []  # trials in each class. Sums to trials
    kernel_sets: list[list[str]] = []  # the distinct sets of device kernels that a variant launched
    kernels: list[Count] = []  # for each value the index of its set in kernel_sets; empty where nothing was profiled
    trials: Count = 0  # variants compared; `distinct` of them had different bits
    distinct: Count = 0
    replays: Count = 0  # variants that were computed again, after all others, and compared with their first result
    replays_parted: Count = 0  # how many of those gave different bits: run-to-run, whatever else was varied
    difference: Difference | None = None  # the largest of any class from the first; None where nothing was compared
    error: ErrorFigures | None = None  # the first variant against the float64 reference; None where the probe has none
    worst_error: ErrorFigures | None = None  # the worst class against the float64 reference
    class_errors: list[ClassError] = []  # of each class, by label; empty if there is one, or many, or no reference
    accuracy: Accuracy | None = None  # whole results against the reference; None where none was checked
    nonfinite: Count = 0  # elements of the first variant that are NaN or infinite
    judged: Judged | msgspec.UnsetType = msgspec.UNSET  # rounding or not; of a run of `check` on one row
    extra: dict[str, Any] = {}  # what only this probe measures (a reduction tree, the range of the sums, ...)
    reason: str = ""  # why a row is wrong, skipped or failed; a note otherwise
    group: str = ""  # the benchmark cases that the row is for, as `Cell.group`; empty elsewhere
    # index of the row in its plan: several processes finish their rows in any order, and a reader sorts them by it.
    # Unset, and left out of a file, where rows are written one after the other
    place: Whole | msgspec.UnsetType = msgspec.UNSET
    seconds: Figure = 0.0  # wall time of the whole case

    def __post_init__(self) -> None:
        """Fill in what a caller left out."""
        role = role_of(self.impl)
        usual: dict[str, str | bool] = {
            "axis": _AXES.get(self.varied, Axis.OTHER).value,
            "exact": self.inputs in _EXACT_INPUTS,
            "role": role.value,
            "claims_invariance": role in (Role.INVARIANT, Role.PART),
        }
        for name, value in usual.items():
            if getattr(self, name) in ("", None):
                msgspec.structs.force_setattr(self, name, value)

    @property
    def differs(self) -> bool:
        """Whether the variants fell into more than one class, by their count or by the status."""
        return self.distinct > 1 or self.status == Status.DIVERGENT

    @property
    def wrong(self) -> bool:
        """Whether a result is not a valid answer, identical or not: by the status, or by a missed exact sum."""
        return self.status == Status.WRONG or self.extra.get("exact") is False

    @property
    def measured(self) -> bool:
        """Whether the row holds figures."""
        return self.status not in (Status.SKIPPED, Status.ERROR)


BASE_ARM = "base"  # the arm that every axis is compared with


def arm_of(axis: str, value: str) -> str:
    """The arm of the completions that an axis's value has: "chunk=16"."""
    return f"{axis}={value}"


class AxisValue(ImplementationRecord, frozen=True, tag="axis-value", kw_only=True):
    """One value of one axis that was varied by itself, and whether it took effect."""

    keyed_by = ("impl", "axis", "value")
    axis: str  # "sharing", "chunk", ...: a key of `nondet.sampling.axes.AXES`
    value: str  # as it is written after --vary; "" where the axis has no value to vary here
    arm: str  # of its completions: "base" for the value that the base has
    # whether completions of all values are compared with each other; not of an axis that changes the arithmetic itself
    held: bool
    proven: bool  # whether the engine's own steps show that the value took effect
    proof: str  # the figures that show it, or fail to
    changes: str = ""  # what the axis varies, in a phrase
    note: str = ""  # why nothing was run


class Limit(Record, frozen=True, tag="limit", kw_only=True):
    """The most that the machine can do, measured in the same run as what is compared with it."""

    keyed_by = ("name", "device")
    name: str  # "copy", or "peak bfloat16" and so on
    what: str  # what was measured, the fastest of several ways where there were several
    unit: str  # "B/s" or "FLOP/s"
    device: str
    rate: Annotated[float, msgspec.Meta(gt=0.0)]  # work over the fastest replay: what the machine can do at most
    work: Count  # bytes (read and written) or floating-point operations of one call
    method: str
    samples_us: list[Figure]  # microseconds a call, one figure a replay


class Timed(msgspec.Struct, frozen=True, kw_only=True):
    """One implementation in one benchmark case."""

    impl: str
    status: Annotated[str, msgspec.Meta(pattern=r"\A(timed|skipped|error)\Z")]
    reason: str = ""  # of the other statuses than "timed"
    samples_us: list[Figure] = []  # microseconds a call, one figure a replay, in the order of the replays
    median_us: Figure = 0.0  # their median and quartiles
    low_us: Figure = 0.0
    high_us: Figure = 0.0
    ran: list[str] = []
    kernels: list[str] = []  # device kernels of one call, as the profiler named them; empty where nothing was profiled

    @property
    def role(self) -> Role:
        """What the implementation is to a reader."""
        return role_of(self.impl)


class Cell(Record, frozen=True, tag="cell", kw_only=True):
    """One call of one shape, timed under all implementations in turn: replay i of each next to the others'."""

    keyed_by = ("section", "case", "dtype", "device")
    section: str  # what it is reported with: "matmul", "attention decode", ...
    operator: str
    case: str  # name, unique within a section, a device and a dtype
    group: str  # cases that share it should give equal bits: the weight shape of a product, the width of a row operator
    axis: str  # the size that differs within a group: a key of `shape`
    shape: dict[str, Count]
    dtype: str
    device: str
    bytes: Large  # each input read once and the output written once
    flops: Large  # floating-point operations; 0 where only memory can be the limit
    limit_us: Figure | None  # the longer of bytes over copy bandwidth and flops over the peak; None if not measured
    limited_by: str  # "memory" or "arithmetic"
    method: str  # "cuda graph" or "perf_counter"; of an engine's run what its steps were
    sets: Count  # sets of buffers that the calls of one replay use in turn
    calls: Count
    cold: bool  # whether the sets together exceed the last cache, so that no call finds its inputs there
    bus_bytes: Large = 0  # of a sum over ranks: 2 (ranks - 1) / ranks times the message, which each link must carry
    tokens: Count = 0  # of an engine's run: generated in its steps, whose number is `calls`. 0 elsewhere
    timed: list[Timed]
    seconds: Figure = 0.0


class Step(Record, frozen=True, tag="step", kw_only=True):
    """One step of a diagnosis that came to its end: the unit of resuming."""

    keyed_by = ("name",)
    # a key of `nondet.diagnose.verdict.QUESTIONS`
    name: Annotated[str, msgspec.Meta(pattern=r"\A(greedy|run|batch|axes|operator|margin|cure|cost)\Z")]
    outcome: str  # the answer in a word: "yes", "no", "unknown" or "skipped"
    sentence: str
    figures: dict[str, float] = {}
    facts: dict[str, str] = {}  # digests and texts that later steps and reports use
    seconds: float = 0.0


class AxisTried(Record, frozen=True, tag="axis", kw_only=True):
    """One property of the concurrent requests varied, with the others fixed, compared with the solo request."""

    keyed_by = ("impl", "axis")
    axis: str  # "batch size", "ragged company", "long prompt", "chunked prefill" or "prefix sharing"
    impl: str
    held: str
    values: list[str]
    parted: list[str]  # those values at which a trace differed
    tried: Whole  # completions compared with the solo one
    traces: Whole  # how many of them have other logprob bits
    tokens: Whole  # and other tokens
    first: Whole | None = None  # the first generated token at which anything differed; None where nothing did
    note: str = ""  # why nothing was tried, or what did not occur


class Conclusion(Record, frozen=True, kw_only=True):
    """What a diagnosis or a trace came to."""

    finding: str  # "run-to-run", "batch-dependent", "a defect", ...: see `is_fault`

    @property
    def is_fault(self) -> bool | None:
        """Whether something diverged or is wrong; None where that has no answer."""
        return None if self.finding == "unknown" else self.finding != "no divergence observed"


class Diagnosis(Conclusion, frozen=True, tag="diagnosis", kw_only=True):
    """What a diagnosis came to."""

    # whether, where, why, cure, cost: the answers, each a sentence or a few; "" where the question did not arise
    whether: str
    where: str = ""
    why: str = ""
    cure: str = ""
    cost: str = ""
    limits: list[str] = []  # what was not tested, or has no answer


class EmbedPass(ImplementationRecord, frozen=True, tag="embed_pass", kw_only=True):
    """All texts through the encoder once, in one arm."""

    keyed_by = ("impl", "arm")
    arm: str  # how they were batched: "alone", "sorted by 32", ...
    texts: Whole
    batches: Whole
    tokens: Whole  # of the texts
    computed: Whole  # the same with padding
    seconds: float
    ran: dict[str, Whole] = {}  # what the dispatcher reports: "replaced: linear" -> calls
    reason: str = ""  # why the arm is not available; empty where it is


class Neighbours(ImplementationRecord, frozen=True, tag="neighbours", kw_only=True):
    """One arm's vectors compared with those of the texts one by one, under the same implementation."""

    keyed_by = ("impl", "pooling", "arm")
    arm: str
    pooling: str  # "mean" or "cls"
    texts: Whole
    parted: Whole  # texts whose vector has different bits
    max_ulp: Large  # the largest distance of an element
    cosine_distance: float  # the largest 1 - cosine of a text's two vectors, in float64
    k: Whole
    top1_changed: Whole  # texts whose nearest neighbour is another text
    topk_changed: Whole  # texts whose k nearest neighbours are another set
    topk_reordered: Whole  # the same set in another order
    first: Whole | None = None  # index of the first text whose vector differs; None where none does


class LayerStanding(Record, frozen=True, tag="layer-standing", kw_only=True):
    """Layers of one kind that vLLM has loaded, and what computes them, with nondet's plugin or without."""

    keyed_by = ("number",)
    number: Count
    kind: str  # the class, with the method of a quantized one
    standing: str  # "replaced", "certified stock", "elementwise" or "at risk"
    why: str
    first: str  # name of the first of them
    layers: Size


class Served(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How a server answered one request."""

    sent: Figure = 0.0  # its first byte, in seconds from the beginning of its round (or of its part of the round)
    first: Figure | None = None  # token received; None if not streamed
    done: Figure = 0.0  # last byte received
    attempts: Count = 1
    refusals: dict[str, Count] = {}  # what went wrong at the attempts before the last: kind -> times
    kind: str = ""  # the kind of failure; empty unless it failed
    # prompt_tokens, cached_tokens, completion_tokens: as the server counts them; None where it does not
    prompt_tokens: Tokens | None = None
    cached_tokens: Tokens | None = None
    completion_tokens: Tokens | None = None
    in_flight: Count = 1  # the most requests of ours in flight at once during this one, itself included
    # digest of the completion's text, by which two servers are compared where their token ids are not; or empty
    text: Digest = ""
    odd: list[str] = []  # what was odd about the answer, for example a count that was ignored; a phrase each


class Traffic(msgspec.Struct, frozen=True, kw_only=True):
    """What a round was meant to be, and what shows whether it was."""

    pattern: str  # how requests arrived, and what ran concurrently, in words
    concurrency: Count  # most requests in flight at once
    rate: Figure = 0.0  # requests sent per second; 0.0: no limit
    polls: Count = 0  # how often the server's own counters were read while the round ran
    running_most: Figure | None = None  # requests that the server reported as running; None where it reports none
    running_median: Figure | None = None
    waiting_most: Figure | None = None  # the most that it reported as waiting; None where it reports none
    decoding_most: Count = 0  # the most answers that streamed at the same time; 0 where none did
    # targets that streamed while another answer of ours did, or during a poll that reported two or more as running
    in_company: Count = 0
    parts: Count = 1  # sessions that it took; more than 1 where it was stopped and resumed
    counters: dict[str, float] = {}  # change of the server's own counters over the round, by name
    others_failed: dict[str, Count] = {}  # requests alongside that failed: kind -> times
    fingerprints: dict[str, Count] = {}  # in the answers to targets -> times; "" where there was none
    odd: list[str] = []  # the server's own counters that were at times not a number of requests: then ignored


class ServerSeen(ImplementationRecord, frozen=True, tag="server", kw_only=True):
    """What a server, "server" or "server-2", reported about itself when a run began or was resumed."""

    keyed_by = ("impl", "number")
    number: Whole  # 0 when the run began, then one more each time that it was resumed
    url: str  # without what could be a secret
    protocol: str
    model: str  # the name that was requested,
    answered_as: str  # and the name in its answers
    listed: list[str]
    fingerprint: str
    known_by: str  # what completions are compared by: "ids", "bytes" or "text"
    logprobs: bool
    software: str = ""  # what it seems to be by its pages, with its version; "" where that is unknown


class ContractAnswer(ImplementationRecord, frozen=True, tag="contract", kw_only=True):
    """One check of the contract: whether the server does what a comparison of its answers assumes."""

    keyed_by = ("impl", "question")
    question: str  # the check's name; `nondet.endpoint.contract.QUESTIONS` has its words
    answer: Annotated[str, msgspec.Meta(pattern=r"\A(yes|no|unknown)\Z")]  # "yes", "no" or "unknown"
    evidence: str


class Completion(ImplementationRecord, frozen=True, tag="completion", kw_only=True):
    """One completion of the request under study."""

    keyed_by = ("impl", "request")
    request: str  # identifier, unique within the implementation
    round: Count  # number of the round (one engine session) that it belongs to
    prompt: Count  # index of the prompt in the header's plan
    tokens_digest: Digest  # SHA-256 (first 16 hex digits) of the token ids: equal digests are equal completions
    trace: Digest  # SHA-256 (first 16 hex digits) of token ids and logprob bits; the side file holds the trace under it
    n_tokens: Count
    finish: str  # "length", "eos" or "error"
    arrival_step: Count  # the engine step from which the request was allowed to be scheduled
    # run-length list of [first_step, steps, query_tokens]: the engine steps in which the request took part
    schedule: list[Stretch]
    batch_min: Count  # smallest, and
    batch_max: Count  # largest number of query tokens in a step that this request took part in
    nonfinite: Count = 0  # tokens whose logprob is NaN or infinite
    status: Outcome = "ok"
    reason: str = ""
    arm: str = ""  # of a server: solo, loaded, cold, ...; of an axis that is varied "base", "chunk=16", ...; else empty
    served: Served | None = None

    def refused(self, why: str) -> Self:
        """As `Record.refused`."""
        return type(self)(
            impl=self.impl, request=self.request, round=self.round, prompt=self.prompt, tokens_digest="", trace="",
            n_tokens=0, finish="error", arrival_step=0, schedule=[], batch_min=0, batch_max=0, status="error",
            reason=why, arm=self.arm, served=self.served and Served(kind="unrecordable"),
        )  # fmt: skip


class Round(ImplementationRecord, frozen=True, tag="round", kw_only=True):
    """One engine session: a slice of the load plan, run from an empty engine, and the unit of resuming."""

    keyed_by = ("impl", "round")
    round: Count
    targets: Count  # completions of the request under study
    others: Count
    steps: Count
    tokens: Count  # tokens generated for all requests
    seconds: Figure  # wall time of the steps. Left out are the model's loading, the warm-up and `first_use_seconds`
    background: dict[str, list[Stretch]] = {}  # of the requests alongside: request id -> run-length schedule
    ran: dict[str, Count] = {}  # what the launchers and the dispatcher reported, with counts
    arm: str = ""  # as a completion's
    traffic: Traffic | None = None  # of a server
    figures: dict[str, Count] = {}  # of an axis that is varied: what the engine's steps show, see `sampling.schedule`
    first_use_seconds: float = 0.0  # of these steps, spent on compiling kernels and proving members of classes


class TapedRequest(msgspec.Struct, frozen=True, kw_only=True):
    """One request of a recording."""

    id: str
    target: bool
    prompt: Count  # index among the recording's prompts
    new: Size  # tokens to generate
    arrival: Count  # engine step from which it may be scheduled
    sampling: dict[str, Any] | None = None  # as `nondet.sampling.plan.Sampling`; None of greedy requests


class Tape(ImplementationRecord, frozen=True, tag="tape", kw_only=True):
    """What is needed to replay one round, and to see whether the replay is the same."""

    keyed_by = ("impl", "round")
    round: Whole
    requests: list[TapedRequest]
    prompts: list[list[Count]]  # token ids of each distinct prompt
    load: dict[str, Any]  # the load's parameters: limits of the engine, chunking, sharing
    seed: int
    eos: list[Whole]
    engine: dict[str, Any]
    weights: str  # digest over the names, shapes and bits of all parameters and buffers
    # the schedule, as [first step, steps, [request, first position, rows], ...]: requests by their index, in the order
    # of the rows. In each further step of the same entry every request advances by its rows
    steps: list[list[Any]]
    padding: str = ""  # what steps are padded to; "" for no padding


class Replayed(ImplementationRecord, frozen=True, tag="replayed", kw_only=True):
    """A recorded completion that was replayed."""

    keyed_by = ("impl", "request", "how")
    request: str
    how: str  # "as recorded", "alone", or "shrunk"
    company: list[str]
    recorded: str  # as `got` a digest of tokens and logprob bits
    got: str
    same: bool
    first_token: Whole | None  # first token that differs from the recorded completion; None where none does
    first_logprob: Whole | None  # first position where tokens or logprob bits differ; None where none does
    sessions: Whole
    sentence: str
    seconds: float


class TrainingStep(ImplementationRecord, frozen=True, tag="training-step", kw_only=True):
    """One step of reinforcement learning under one arm: its reward, and how far sampler and trainer were apart.
    Logprobs are of the sampled tokens at temperature 1 over the whole vocabulary; a ratio is the trainer's probability
    of a token over the sampler's, before any correction, in the first pass over the rollouts: with equal weights."""

    keyed_by = ("impl", "seed", "step")
    seed: Count
    step: Count  # from 0
    reward: Annotated[float, msgspec.Meta(gt=-NUMBER_MOST, lt=NUMBER_MOST)] | None = None  # mean over the rollouts
    entropy: Figure | None = None  # nats per token, mean over the sampled positions, as the trainer computes it
    grad_norm: Figure | None = None  # over all weights, before it is clipped
    rollouts: Count = 0
    groups: Count = 0  # prompts, each with the same number of rollouts
    flat: Count = 0  # groups whose rollouts have one reward: their advantage is 0, so they change nothing
    alike: Count = 0  # of these, groups whose rollouts are one text, token for token
    tokens: Count = 0  # sampled
    differ: Count = 0  # of these, how many have another logprob in the trainer, bit for bit
    k3: Figure = 0.0  # mean of ratio - 1 - ln ratio, in float64: an estimate of the KL of sampler to trainer
    ratio_least: Figure = 1.0
    ratio_most: Figure = 1.0
    outside: Count = 0  # tokens whose ratio is outside of 0.99 to 1.01
    mult_prob_error: Figure | None = None  # mean of exp |ln ratio|; None of older files
    tokens_digest: Digest = ""  # of all prompts and rollouts, in order
    weights_digest: Digest = ""  # after the step
    sample_seconds: Figure = 0.0
    train_seconds: Figure = 0.0
    ran: dict[str, Count] = {}  # of an arm's first step, on either side: "trainer: replaced: mm" -> calls
    status: Outcome = "ok"
    reason: str = ""  # why a step, and so its arm, failed


class MismatchRollout(ImplementationRecord, frozen=True, tag="mismatch-rollout", kw_only=True):
    """One rollout with the logprobs that the sampler and the trainer give its tokens."""

    keyed_by = ("impl", "name")
    name: str
    step: Count = 0  # of training
    tokens: Count = 0  # sampled
    ids: list[Count] = []  # prompt and completion
    drawn: list[Count] = []  # positions of the sampled tokens; empty where these are the last
    sampler: bytes = b""  # little-endian float32, one for each sampled token; in the file as base64
    trainer: bytes = b""
    status: Outcome = "ok"
    reason: str = ""


class MismatchFloor(ImplementationRecord, frozen=True, tag="mismatch-floor", kw_only=True):
    """How much rounding can explain, and how far each side is from a forward in a wider format."""

    keyed_by = ("impl",)
    tokens: Size  # over which this and all hypotheses are computed
    rollouts: Size
    k3: Figure  # of the two sides over these tokens
    floor: Figure  # K3 that rounding explains
    sampler: Figure  # K3 of each side to the wider forward
    trainer: Figure
    own: Figure  # and of the model's own plain forward
    wide: str  # its dtype, and what both sides' logprobs are of: "float32 at temperature 0.7"


class MismatchKind(ImplementationRecord, frozen=True, tag="mismatch-kind", kw_only=True):
    """One hypothesis on one side: K3 before it, and what it leaves."""

    keyed_by = ("impl", "cause", "side", "fitted")
    layer: str  # semantic, weights, format or formula
    cause: str
    side: str  # the side to which it applies: sampler or trainer
    fitted: str  # the value that leaves least, or which form of it
    k3: Figure
    floor: Figure
    left: Figure
    exactly: Figure  # share of tokens whose bits it reproduces, beyond those that were equal without it


class MismatchEffect(ImplementationRecord, frozen=True, tag="mismatch-effect", kw_only=True):
    """What the mismatch does to one step's gradient; in files of earlier versions."""

    keyed_by = ("impl",)
    rollouts: Size
    moved: Figure  # norm of the change by weighting tokens with their ratios, over the gradient's norm
    cosine: float  # of the gradients with and without
    other: float  # cosine with the gradient of as many other rollouts


class MismatchPlace(ImplementationRecord, frozen=True, tag="mismatch-place", kw_only=True):
    """The first call where the trainer's forward and the sampler's step have equal inputs and different outputs."""

    keyed_by = ("impl",)
    rollout: str  # of those where it comes first; "" where hidden states and logits of all agree
    position: Whole  # of the first difference, in its text; -1 where hidden states and logits agree
    layer: str  # number of a layer, "embedding", "head", or "formula": from logits to logprobs
    module: str = ""  # of the call; "" where none that was compared has equal inputs and unequal outputs
    call: str = ""
    occurrence: Count = 0
    difference: Difference | None = None  # of its result, on that position's row
    family: str = ""  # the family of batch_invariant() that its name suggests
    rows: list[Count] = []  # tokens of the sampler's step, and of the trainer's batch with its padding
    compared: Count = 0  # calls that were compared
    after: str = ""  # where no call is named: the first whose inputs differ already
    unsteady: str = ""  # sampler or trainer, if a repeat gave different bits: then nothing can be concluded


class MismatchVocabulary(ImplementationRecord, frozen=True, tag="mismatch-vocabulary", kw_only=True):
    """Whole rows of both sides' logits, each before a sampled token; the rows were chosen before sampling."""

    keyed_by = ("impl",)
    size: Size  # of the vocabulary
    rollouts: list[str] = []  # of each row: its rollout's name,
    positions: list[Count] = []  # the position in its text,
    differ: list[Count] = []  # logits that are not the same number on both sides, bit for bit,
    kl: list[Figure] = []  # and KL(sampler || trainer) in nats at temperature 1, summed in float64

    def __post_init__(self) -> None:
        """Raises ValueError: a row lacks one of its entries."""
        if len({len(self.rollouts), len(self.positions), len(self.differ), len(self.kl)}) != 1:
            raise ValueError("rows of logits have lists of other lengths")


class MismatchCost(ImplementationRecord, frozen=True, tag="mismatch-cost", kw_only=True):
    """Seconds of both sides of an arm, and what the dispatcher reports there."""

    keyed_by = ("impl",)
    sample_seconds: Figure
    train_seconds: Figure
    ran: dict[str, Count] = {}


class Control(Record, frozen=True, tag="control", kw_only=True):
    """One thing that must hold before a trace concludes anything, or, where `passed` is None, a note for readers."""

    keyed_by = ("name",)
    name: str
    passed: bool | None
    sentence: str
    figures: dict[str, float] = {}


class Replay(msgspec.Struct, frozen=True, kw_only=True):
    """The responsible call repeated by itself, with one thing changed."""

    name: str  # "repeat", "rows only", "values", "order", "M", "keys", "exact", "tree", "substitution" or "rounding"
    status: str  # "identical", "divergent" or "error"
    sentence: str
    trials: Whole = 0
    distinct: Whole = 0
    equals_first: bool | None = None  # whether the result has the bits of either arm; None where that was not tested
    equals_second: bool | None = None
    values: list[Whole | str] = []  # what was swept, and the class of bits of each
    labels: list[Whole] = []
    kernels: list[list[str]] = []  # the kernels of each value, where a profiler saw them


class Culprit(Record, frozen=True, tag="culprit", kw_only=True):
    """The first call with bitwise equal inputs and unequal outputs, with what was replaced by then."""

    keyed_by = ("number",)
    number: Whole  # 1 for the first of the list
    replaced: list[str]  # families whose invariant implementation was in place in both arms
    position: Whole  # absolute, in the sequence
    token: Whole  # which generated token its logits predict, or -1
    layer: str  # number of the layer, "embedding" or "head"
    module: str = ""  # the caller and the operator, and which of the module's calls it is
    call: str = ""  # "" where no call could be named: then `sentence` has what is known
    occurrence: Whole = 0
    requests: list[str]  # whose rows were compared: of either arm, or the one that wrote the keys that it read
    shapes: list[dict[str, list[Whole]]] = []  # for either arm, position of a tensor -> its shape
    axes: dict[str, list[str]] = {}  # position of a tensor -> what its axes count
    digests: dict[str, str] = {}  # position of an input -> digest of this request's part, equal in both arms
    differences: dict[str, Difference] = {}  # result -> how it differs
    kernels: list[list[str]] = []  # for either arm, what ran
    replays: list[Replay] = []
    family: str = ""  # the family of batch_invariant() that the call belongs to; "" where there is none
    sentence: str
    unmatched: list[str] = []  # calls before it that only one arm made
    not_understood: list[str] = []  # its tensors about which nothing is claimed
    compared: Whole = 0


class Substitution(Record, frozen=True, tag="substitution", kw_only=True):
    """The whole run again with families replaced in both arms."""

    keyed_by = ("role", "families")
    role: str  # "search" for one more replacement, "left out" for the test that each is needed, "all" for every family
    families: list[str]
    agree: bool  # whether hidden states, K, V, logits and logprobs agree in every position
    position: Whole  # where the arms differ now; -1 and "" where they agree
    layer: str
    sentence: str
    at_risk: list[str] = []  # calls that the replacements left stock and unproven


class OperatorCompared(Record, frozen=True, tag="operator-compared", kw_only=True):
    """Calls of one operator with the inputs of a recording, compared with its results."""

    keyed_by = ("number",)
    number: Count
    module: str  # "*" for the number of a layer
    call: str
    calls: Count
    differing: Count
    elements: Count
    verdict: str  # "equal", "rounding", "not decided" or "not rounding"
    difference: Difference | None = None  # the largest, in ULP
    times: Figure = 0.0  # the largest difference, in units of `bound`
    bound: str = ""  # what could be rounding


class TraceVerdict(Conclusion, frozen=True, tag="trace_verdict", kw_only=True):
    """What a trace came to."""

    culprits: list[str]  # one line for each responsible call, in the order in which they were found
    families: list[str] | None  # the smallest set of replacements after which the arms agree; None where none was found
    sentences: list[str]  # for people
    repro: str = ""  # the standalone script, and its output when it was run; "" without one
    seconds: float = 0.0


class Fingerprint(ImplementationRecord, frozen=True, tag="fingerprint", kw_only=True):
    """The bits of one fixed computation on this machine, and whether all repetitions and copies had them."""

    keyed_by = ("impl", "cls", "operator", "case", "dtype")
    kept_when_refused = ("device",)
    cls: str  # its numerics class; "" of stock and of completions
    operator: str  # or "completion", of the embedded model
    case: str  # sizes and layout, or "tokens" and "logprobs"
    dtype: str
    device: str
    status: Annotated[str, msgspec.Meta(pattern=r"\A(ok|skipped|error)\Z")] = "ok"
    given: Digest = ""  # of the operands: where it differs, results can't be compared
    digest: Digest = ""  # of the result that most repetitions and copies gave
    runs: Count = 0  # repetitions
    units: Count = 0  # equal copies of the operands in one call, over the whole chip; 1 where copies may differ
    differing: Count = 0  # results, of runs * units, that had other bits
    runs_differing: Count = 0  # repetitions with such a result
    units_differing: Count = 0  # copies with such a result
    reason: str = ""

    @property
    def wrong(self) -> bool:
        """Whether results differ that are promised to be equal: invariant ones. Stock promises nothing."""
        return self.differing > 0 and self.role == Role.INVARIANT

    @property
    def results(self) -> int:
        """All that were compared with each other."""
        return self.runs * self.units


class MachineSeen(Record, frozen=True, tag="machine", kw_only=True):
    """Who a fingerprint is of, and the state of its GPU: none of this decides bits."""

    name: str = ""  # as given; reports call it by its file's name otherwise
    host: str = ""  # the following only with --identify
    gpu_uuid: str = ""
    gpu_serial: str = ""
    clocks_mhz: dict[str, Count] = {}  # "sm", "memory", after the work
    ecc: dict[str, Count] = {}  # "uncorrected since boot", ...: errors that the GPU's memory counted


# A run file is one header line (format, schema, environment, plan), then one line for each record, then one end line.
#
# A new kind of record is one class (a `Record` with a tag and a key) and one field of `Run`: what the reader decodes,
# where it stores it, and by what a resumed run skips it all follow from the fields of `Run`.

FORMAT = "nondet-run"
SCHEMA_VERSION = 3  # 2: cases and limits of `nondet bench`; 3: the status "wrong", and fields for what was in names


class Header(msgspec.Struct, frozen=True, tag="header", kw_only=True):
    """The first line of a run file."""

    format: str
    schema: int
    command: str
    plan: dict[str, Any]  # the options that decide which records the run holds; resumed only under an equal plan
    environment: dict[str, Any]  # what a reader needs to trust the figures; see `nondet.core.environment.collect`
    started: str  # UTC, ISO 8601


class End(msgspec.Struct, frozen=True, tag="end", kw_only=True):
    """The last line of a run that was completed."""

    records: Count
    seconds: Figure


class Run(msgspec.Struct, kw_only=True):
    """A run file in memory: a list for each kind of record, in the order of the file."""

    header: Header
    rows: list[Row] = []
    completions: list[Completion] = []
    rounds: list[Round] = []
    limits: list[Limit] = []
    cells: list[Cell] = []
    tapes: list[Tape] = []
    replayed: list[Replayed] = []
    controls: list[Control] = []
    culprits: list[Culprit] = []
    substitutions: list[Substitution] = []
    operators_compared: list[OperatorCompared] = []
    trace_verdicts: list[TraceVerdict] = []
    steps: list[Step] = []
    axes: list[AxisTried] = []
    diagnoses: list[Diagnosis] = []
    servers: list[ServerSeen] = []
    contract: list[ContractAnswer] = []
    axis_values: list[AxisValue] = []
    embed_passes: list[EmbedPass] = []
    neighbours: list[Neighbours] = []
    training_steps: list[TrainingStep] = []
    layer_standings: list[LayerStanding] = []
    mismatch_rollouts: list[MismatchRollout] = []
    mismatch_floors: list[MismatchFloor] = []
    mismatch_kinds: list[MismatchKind] = []
    mismatch_effects: list[MismatchEffect] = []
    mismatch_costs: list[MismatchCost] = []
    mismatch_places: list[MismatchPlace] = []
    mismatch_vocabularies: list[MismatchVocabulary] = []
    fingerprints: list[Fingerprint] = []
    machines: list[MachineSeen] = []
    complete: bool = True  # whether the end line is there
    source: str = ""  # where it was read from, for messages

    def add(self, record: Record) -> None:
        """Store a record with its kind."""
        getattr(self, RECORDS[type(record)]).append(record)

    @property
    def statuses(self) -> list[str]:
        """Of every record that can fail."""
        can_fail = Row, Completion, TrainingStep, MismatchRollout, Fingerprint
        return [record.status for record in self.records() if isinstance(record, can_fail)]

    def records(self) -> Iterator[Record]:
        """Every record, kind by kind."""
        for name in RECORDS.values():
            yield from getattr(self, name)


def engine_of(run: Run) -> str:
    """The engine of a run, which no recording of ours can replay; empty of nondet's own."""
    engine = run.header.plan.get("engine")
    return str(engine.get("name", "")) if isinstance(engine, dict) else ""


# Kind of record -> the field of `Run` that holds it.
RECORDS: dict[type[Record], str] = {
    get_args(hint)[0]: name for name, hint in get_type_hints(Run).items() if get_origin(hint) is list
}


# Decodes any line of a run file: its header, a record of any kind, its end.
LINE: msgspec.json.Decoder[Any] = msgspec.json.Decoder(Union[(Header, End, *RECORDS)])


# What a reader checks of each record, by itself and with its plan and other records. Code that computes with a record
# (class maps, batches, trees, pages) relies on it. A failed check names the field; the reader adds the file and line.

_DEPTH_MOST = 16  # of a plan, an environment, a row's extra: ours have 4
_DIGITS_MOST = 2**64
STEPS_MOST = 2**22  # engine steps of one round, idle ones between arrivals counted: ten times what a plan can need
_STEPS_MOST_OF_ALL = 2**26
# Entries of a row's extra that verdicts and reports count with.
_COUNTED = {"elements", "requests", "requests_parted", "round", "seconds_again", "tokens_per_second_again"}


class ContradictionError(ValueError):
    """A field that contradicts itself or others."""


def _need(holds: bool, field: str, why: str) -> None:
    if not holds:
        raise ContradictionError(f"{field}: {why}")


def _count(field: str, *values: int, most: int) -> None:
    for value in values:
        _need(0 <= value <= most, field, f"{str(value)[:40]} is not from 0 to {most}")


def _tree(field: str, root: Any) -> None:
    """Free-form data: not deeper than ours, no endless integer. A loop, because recursion would overflow the stack."""
    pending: list[tuple[Any, int]] = [(root, 0)]
    while pending:
        value, depth = pending.pop()
        if isinstance(value, (dict, list)):
            _need(depth < _DEPTH_MOST, field, f"nested more than {_DEPTH_MOST} deep")
            pending += [(child, depth + 1) for child in (value.values() if isinstance(value, dict) else value)]
        elif isinstance(value, int):
            _need(abs(value) <= _DIGITS_MOST, field, "a number of more digits than any of ours")


def _row(row: Row) -> None:
    _count("replays_parted", row.replays_parted, most=row.replays)
    _need(len(row.labels) == len(row.values), "labels", f"{len(row.labels)} of {len(row.values)} values")
    _need(len(row.kernels) in (0, len(row.values)), "kernels", f"{len(row.kernels)} of {len(row.values)} values")
    _count("kernels", *row.kernels, most=len(row.kernel_sets) - 1)
    if row.class_sizes:
        _need(sum(row.class_sizes) == row.trials, "class_sizes", f"{sum(row.class_sizes)} trials of {row.trials}")
        _need(len(row.class_sizes) == row.distinct, "distinct", f"{row.distinct} with {len(row.class_sizes)} sizes")
    if row.labels:
        sizes = Counter(row.labels)
        _need(list(sizes) == list(range(len(sizes))), "labels", f"{list(sizes)[:8]}, not numbered by first appearance")
        _need(list(sizes.values()) == row.class_sizes, "class_sizes", f"{row.class_sizes[:8]}, counted {sizes}"[:200])
    _need(row.distinct <= max(row.trials, 1), "distinct", f"{row.distinct} of {row.trials} trials")
    if row.status == Status.IDENTICAL:
        same = row.distinct <= 1 and not row.replays_parted
        _need(same, "status", f"identical, with {row.distinct} distinct results")
    if (found := row.difference) is not None:
        _count("difference.mismatched", found.mismatched, most=found.compared)
        _count("difference.nonfinite", found.nonfinite, most=found.mismatched)
        if isinstance(found.label, int):
            _count("difference.label", found.label, most=max(row.distinct - 1, 0))
    _tree("extra", row.extra)
    if row.probe == "certify":
        for name in ("left_at", "unanswered_at", "inputs"):
            _need(isinstance(row.extra.get(name, []), list), f"extra.{name}", "is no list")
        first = row.extra.get("first", {"at": 1, "element": [], "inputs": "", "max_ulp": 0})
        known = isinstance(first, dict) and {"at", "element", "inputs"} <= first.keys()
        _need(known and isinstance(first.get("max_ulp"), int), "extra.first", "is not where a difference was first")
    for name in _COUNTED & row.extra.keys():
        value = row.extra[name]
        _need(isinstance(value, int | float) and value >= 0, f"extra.{name}", f"{str(value)[:40]!r} is no figure")


def _completion(c: Completion) -> None:
    _count("nonfinite", c.nonfinite, most=c.n_tokens)
    _count("batch_min", c.batch_min, most=c.batch_max)
    _need(bool(c.trace and c.tokens_digest) or c.status != "ok", "trace", "a completion without one, or without tokens")
    _schedule("schedule", c.schedule)
    if (s := c.served) is not None:
        first = s.done if s.first is None else s.first
        _need(s.sent <= first <= s.done, "served", "an answer that came before its request")


def _schedule(field: str, schedule: list[list[int]]) -> None:
    """[first step, steps, query tokens], one after the other."""
    end = 0
    for first, steps, tokens in schedule:
        _need(end <= first, field, f"step {first} comes after step {end}")
        _need(steps > 0 and 0 < tokens <= TOKENS_MOST, field, f"{steps} steps of {tokens} tokens")
        end = first + steps
        _need(end <= STEPS_MOST, field, f"goes beyond step {STEPS_MOST:,}")


def _cell(cell: Cell) -> None:
    _need(cell.axis in cell.shape, "axis", f"{cell.axis[:40]!r} is no size of the cell")
    names = [t.impl for t in cell.timed]
    _need(len(set(names)) == len(names), "timed", "an implementation twice")
    for t in cell.timed:
        if t.status == Status.TIMED:
            _need(bool(t.samples_us) and min(t.samples_us) > 0, "timed.samples_us", "no time at all")
            _need(0 < t.low_us <= t.median_us <= t.high_us, "timed.median_us", "is not between its quartiles")


def _training_step(step: TrainingStep) -> None:
    _need(step.status == "error" or bool(step.tokens and step.weights_digest), "tokens", "a step without any")
    for name, most in (("differ", step.tokens), ("outside", step.tokens), ("flat", step.groups), ("alike", step.flat)):
        _count(name, getattr(step, name), most=most)
    _need(step.ratio_least <= step.ratio_most, "ratio_least", "is above the largest")
    alike = step.k3 == step.outside == 0 and step.mult_prob_error in (None, 1.0)
    _need(step.differ > 0 or alike, "k3", "a KL between logprobs of equal bits")


def _step(step: Step) -> None:
    lacks = {"n", "rounds"} - step.figures.keys() if step.name == "batch" and step.outcome in ("yes", "no") else ()
    _need(not lacks, "figures", f"an answer without {' and '.join(sorted(lacks))}")


def _fingerprint(f: Fingerprint) -> None:
    _need(bool(f.digest and f.given and f.results) or f.status != "ok", "digest", "a result without one")
    _count("differing", f.differing, most=f.results)
    _count("runs_differing", f.runs_differing, most=min(f.runs, f.differing))
    _count("units_differing", f.units_differing, most=min(f.units, f.differing))
    _need(not f.differing or (f.runs_differing > 0 < f.units_differing), "differing", "in no run, or in no copy")


def _culprit(culprit: Culprit) -> None:
    for place, axes in culprit.axes.items():
        sizes = [shapes[place] for shapes in culprit.shapes if place in shapes]
        _need(all(len(axes) <= len(shape) for shape in sizes), "shapes", f"{place[:40]} has fewer sizes than axes")


def _mismatch_rollout(r: MismatchRollout) -> None:
    _need(r.status == "error" or 0 < r.tokens < len(r.ids), "tokens", "a rollout without any, or without a prompt")
    _need(len(r.drawn) in (0, r.tokens), "drawn", f"{len(r.drawn)} places for {r.tokens} tokens")
    _need(all(0 < a < b for a, b in itertools.pairwise([*r.drawn, len(r.ids)])), "drawn", "places out of order")
    for name, data in (("sampler", r.sampler), ("trainer", r.trainer)):
        _need(len(data) == 4 * r.tokens, name, f"{len(data)} bytes for {r.tokens} logprobs")
        _need(all(map(math.isfinite, struct.unpack(f"<{r.tokens}f", data))), name, "a logprob that is no number")


_CHECKS: dict[type[Any], Callable[[Any], None]] = {
    Row: _row,
    Completion: _completion,
    Cell: _cell,
    Tape: lambda record: _tree("tape", msgspec.to_builtins(record)),
    TrainingStep: _training_step,
    Step: _step,
    Culprit: _culprit,
    Fingerprint: _fingerprint,
    MismatchPlace: lambda r: _need(len(r.rows) in (0, 2), "rows", f"{len(r.rows)} numbers, not one for either side"),
    MismatchRollout: _mismatch_rollout,
}


def _planned(header: Header) -> dict[tuple[str, ...], int]:
    """(kind, arm) -> how many of them a complete run has, where its plan shows it."""
    plan = header.plan
    arms, texts = plan.get("arms"), plan.get("texts")
    sizes: list[Any]
    if header.command == "rl":
        kind, sizes = "training-step", [plan.get("steps"), plan.get("seeds")]
    elif header.command == "mismatch" and isinstance(scored := plan.get("scored"), dict):
        return {("mismatch-rollout", arm): count for arm, count in scored.items() if type(count) is int}
    elif header.command == "mismatch":
        kind, sizes = "mismatch-rollout", [plan.get("n"), len(texts) if isinstance(texts, list) else None]
    else:
        return {}
    if not isinstance(arms, list) or any(type(size) is not int for size in sizes):
        return {}
    return {(kind, arm): math.prod(sizes) for arm in arms if isinstance(arm, str)}


class RunChecks:
    """The checks of one file, record by record, and the checks that need all records."""

    def __init__(self, header: Header) -> None:
        self._keys: set[tuple[str, ...]] = set()
        self._prompts = len(prompts) if isinstance(prompts := header.plan.get("prompts"), list) else 0
        self._ends: dict[tuple[str, int], int] = {}
        self._steps = 0
        self._finished: Counter[tuple[str, int]] = Counter()
        self._over: set[tuple[str, int]] = set()
        self._planned, self._failed = _planned(header), set[str]()

    def header(self, header: Header) -> None:
        """Check the plan's shape. Raises ContradictionError."""
        _tree("plan", header.plan)
        _tree("environment", header.environment)
        prompts, cut = header.plan.get("prompts", []), header.plan.get("cut", 0)
        _need(header.command != "embed" or type(cut) is int, "plan.cut", "is no number of texts")
        _need(isinstance(prompts, list), "plan.prompts", "is no list")
        for prompt in prompts:
            fits = isinstance(prompt, dict) and isinstance(prompt.get("text"), str)
            _need(fits and type(prompt.get("tokens")) is int, "plan.prompts", "an entry without its text and tokens")
            _count("plan.prompts", prompt["tokens"], most=TOKENS_MOST)

    def record(self, record: Record) -> None:
        """Check one record, by itself and with those before it. Raises ContradictionError; then it was not counted."""
        key = record.key
        if check := _CHECKS.get(type(record)):
            check(record)
        _need(key not in self._keys, "key", f"{' '.join(key)[:200]} is there twice")
        if isinstance(record, Completion):
            _need(record.prompt < self._prompts, "prompt", f"{record.prompt} of {self._prompts} in the plan")
            place = (record.impl, record.round)
            _need(place not in self._over, "round", f"{record.round} of {record.impl[:80]} is over before it")
            self._span(place, [record.schedule])
            self._finished[place] += 1
        elif isinstance(record, Round):
            place = (record.impl, record.round)
            for schedule in record.background.values():
                _schedule("background", schedule)
            counted = self._finished[place]
            _need(counted == record.targets, "targets", f"{record.targets}, with {counted} completions before it")
            self._span(place, record.background.values())
            self._over.add(place)
        elif isinstance(record, TrainingStep) and record.status != "ok":
            self._failed.add(record.impl)  # which ended it early
        self._keys.add(key)

    def end(self, end: End) -> None:
        """The last line counts the records before it, and nothing of the plan is missing. Raises ContradictionError."""
        _need(end.records == len(self._keys), "records", f"{end.records}, with {len(self._keys)} in the file")
        counted = Counter(key[:2] for key in self._keys)
        for of, planned in self._planned.items():
            whole = counted[of] == planned or of[1] in self._failed
            _need(whole, "records", f"{counted[of]} of {planned} {of[0]} of {of[1][:80]}, as planned")

    def _span(self, place: tuple[str, int], schedules: Iterable[list[list[int]]]) -> None:
        before = self._ends.get(place, 0)
        last = max(before, *(s[-1][0] + s[-1][1] for s in schedules if s), 0)
        total = self._steps + last - before
        _need(total <= _STEPS_MOST_OF_ALL, "schedule", f"the rounds go over {total:,} steps together")
        self._ends[place], self._steps = last, total
