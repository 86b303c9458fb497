"""What the completions of a run show: how many differ, where they diverge, how small the margins are, at what speed.

Reads only a run file and its side file: no torch, no model, no tokenizer. Failed completions are only counted.
"""

from __future__ import annotations

import math
import statistics
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import pairwise
from statistics import fmean
from typing import Any

import numpy as np
import numpy.typing as npt

from nondet.core.records import Completion, EmbedPass, Role, Round, Run, families_of, role_of
from nondet.core.statistics import (
    CONFIDENCE,
    LogRank,
    SurvivalStep,
    confidence_sequence,
    k3,
    kaplan_meier,
    log_rank,
    mcnemar,
    median_interval,
    new_share,
    one_sided_bound,
    pair_disagreement,
    paired_permutation,
    round_interval,
    superiority,
)
from nondet.core.traces import Trace, tokens_digest
from nondet.errors import one_line

# The speed of a sampled run, and the ratio of two implementations.
#
# Tokens per second are the median over rounds, because one-time costs (compiling, proving, filling caches) fall into a
# few of them. Every implementation runs the same rounds.

# Figures of a diagnosis' timed rounds: "stock_tokens_per_second", "invariant:attention_tokens_per_second".
_RATE, _MAIN = "_tokens_per_second", ("stock", "invariant")
# The least and the largest ratio of a round, where several were timed. Older runs lack them.
_SPAN = ("invariant_ratio_low", "invariant_ratio_high")

# Figures of a round whose session captured CUDA graphs: the steps without a capture.
TIMED_TOKENS, TIMED_US = "tokens beside captures", "µs beside captures"

NAME = "speed ratio"
DEFINITION = (
    "speed ratio: invariant's tokens/s over those of the fastest stock, each the median over rounds of the tokens "
    "of all requests over engine time (of a diagnosis: the better of its warm rounds, run in turn); above 1 invariant "
    "is faster; in brackets the 95% interval of the median ratio of a round (of a diagnosis: the least and "
    "the largest)"
)
_MEDIAN_LEAST = 6  # the median of fewer rounds has no interval
TOO_FEW_ROUNDS = "too few rounds were timed for an interval"
NOT_IN_TURN = "the implementations did not take turns, as under nondet sample --turns"
# On an H200 4.4 s of host time in cuDNN's attention for 11 ms on the GPU: docs/evidence/h200/stock-profile.txt.
HOST_NOTE = (
    "stock may run cuDNN's attention here, whose work on the host can outweigh the GPU's, so the ratio is not the cost "
    "of the invariant kernels; --impl stock-no-cudnn leaves cuDNN out"
)


@dataclass(frozen=True)
class SpeedRatio:
    """Invariant against the fastest stock that ran."""

    baseline: str
    # `stock`, `invariant`: tokens per second; `baseline` names that stock
    stock: float
    invariant: float
    host_bound: bool = False  # stock may have waited for cuDNN's work on the host, see `HOST_NOTE`
    # of the ratio of a round, at 95%; of a diagnosis the least and the largest of its few timed rounds. None where too
    # few were timed, or not in turn, as `reason` explains: then the ratio is not a result.
    interval: tuple[float, float] | None = None
    rounds: int = 0  # rounds that both completed
    reason: str = TOO_FEW_ROUNDS

    @property
    def is_cost(self) -> bool:
        """Whether the ratio may be reported as the cost of the fix."""
        return self.interval is not None and not self.host_bound

    @property
    def ratio(self) -> float:
        """Invariant over stock; above 1 invariant is faster."""
        return self.invariant / self.stock


def median_rate(rounds: Iterable[Round]) -> float:
    """Tokens generated per second for all requests, the median over rounds that took time; 0.0 without one."""
    rates = [rate for r in rounds if (rate := _rate(r)) > 0]
    return statistics.median(rates) if rates else 0.0


def _rate(r: Round) -> float:
    """Tokens per second of a round; if it captured CUDA graphs, of the other steps."""
    if TIMED_US in r.figures:
        return 1e6 * r.figures[TIMED_TOKENS] / r.figures[TIMED_US] if r.figures[TIMED_US] else 0.0
    return r.tokens / r.seconds if r.seconds > 0 else 0.0


def speed_ratio(rates: Mapping[str, float], *, host_bound: bool = False) -> SpeedRatio | None:
    """The ratio from each implementation's tokens per second; None unless invariant and a stock have one."""
    stock = {impl: rate for impl, rate in rates.items() if role_of(impl) in (Role.STOCK, Role.BACKEND) and rate > 0}
    invariant = next((rate for impl, rate in rates.items() if role_of(impl) == Role.INVARIANT and rate > 0), None)
    if not stock or invariant is None:
        return None
    baseline = max(stock, key=stock.__getitem__)
    return SpeedRatio(baseline, stock[baseline], invariant, host_bound and baseline == Role.STOCK)


def speed_ratio_of(run: Run) -> SpeedRatio | None:
    """The ratio of a run's rounds; for a diagnosis of its timed warm rounds, None without any."""
    host_bound = _host_bound(run)
    if run.steps:
        timed = _timed(run)
        speed = speed_ratio({impl: float(timed.get(f"{impl}{_RATE}", 0.0)) for impl in _MAIN}, host_bound=host_bound)
        if speed is None or not {"rounds", *_SPAN} <= timed.keys():
            return speed
        return replace(speed, interval=(float(timed[_SPAN[0]]), float(timed[_SPAN[1]])), rounds=int(timed["rounds"]))
    impls = dict.fromkeys(r.impl for r in run.rounds)
    rates = {impl: median_rate(r for r in run.rounds if r.impl == impl) for impl in impls}
    speed = speed_ratio(rates, host_bound=host_bound)
    if speed is None:
        return None
    invariant = next(impl for impl in impls if role_of(impl) == Role.INVARIANT and rates[impl] > 0)
    ours, stock = (
        {(r.round, r.steps): _rate(r) for r in run.rounds if r.impl == impl and _rate(r) > 0}
        for impl in (invariant, speed.baseline)
    )
    ratios = [ours[same] / stock[same] for same in ours.keys() & stock.keys()]
    if not run.header.plan.get("turns"):
        return replace(speed, rounds=len(ratios), reason=NOT_IN_TURN)
    return replace(speed, interval=median_interval(ratios), rounds=len(ratios))


def ratio_text(speed: SpeedRatio) -> str:
    """ "speed ratio 0.98 against stock-no-cudnn (0.95 to 1.02, 25 rounds)", or that the ratio is not a cost."""
    if not speed.is_cost:
        return f"cost not measured: {HOST_NOTE if speed.host_bound else speed.reason}"
    low, high = speed.interval or (0.0, 0.0)
    span, stock = f"{low:.2f} to {high:.2f}", one_line(speed.baseline, 40)
    if speed.rounds < _MEDIAN_LEAST:  # of a diagnosis: too few rounds for a result
        return f"{NAME} {span} against {stock} ({speed.rounds} rounds)"
    return f"{NAME} {speed.ratio:.2f} against {stock} ({span}, {speed.rounds} rounds)"


def diagnosed_cost(run: Run) -> str:
    """The cost that a diagnosis reports from its timed rounds; "" without any."""
    speed = speed_ratio_of(run)
    timed = _timed(run)
    if speed is None or not timed:
        return ""
    rates = [f"{speed.invariant:,.0f} against {speed.stock:,.0f} tokens/s, warm"]
    for name, rate in timed.items():
        if name.startswith("invariant:") and name.endswith(_RATE):
            family = name.removeprefix("invariant:").removesuffix(_RATE)
            rates.append(f"with only {one_line(family, 60)} {float(rate):,.0f}")
    if speed.interval is None or speed.host_bound:
        why = HOST_NOTE if speed.host_bound else TOO_FEW_ROUNDS
        return f"Not measured: {why} ({'; '.join(rates)})."
    said = ratio_text(speed)
    return f"{said[:1].upper()}{said[1:]}."


def _timed(run: Run) -> Mapping[str, Any]:
    return next((s.figures for s in run.steps if s.name == "cost" and s.outcome == "yes"), {})


def _host_bound(run: Run) -> bool:
    load = run.header.plan.get("load")
    graphs = isinstance(load, dict) and bool(load.get("graphs"))
    return run.header.plan.get("device") == "cuda" and not graphs


# Which operators of a sampled run were batch-invariant: rounds, and an encoder's passes, hold the counts of
# `batch_invariant()` ("replaced: mm" -> calls) and of the launchers.

# group, as in the records -> what it means to a reader
GROUPS: dict[str, str] = {
    "replaced": "batch-invariant kernels",
    "certified stock": "stock, proven here to give each row the bits that it has solo",
    "left stock": "stock, since no kernel takes this call: its bits may depend on the batch",
    "at risk": "stock without a batch-invariant kernel, or over the batch itself: its bits may depend on the batch",
}


def coverage_of(run: Run, impl: str) -> dict[str, Counter[str]]:
    """Group -> operator -> calls, over all rounds of that implementation; the groups in order, those with calls."""
    groups: dict[str, Counter[str]] = {group: Counter() for group in GROUPS}
    records: list[Round | EmbedPass] = [*run.rounds, *run.embed_passes]
    for record in records:
        for name, calls in record.ran.items() if record.impl == impl else ():
            group, _, operator = name.partition(": ")
            if group in groups:
                groups[group][operator] += calls
    return {group: counts for group, counts in groups.items() if counts}


def _coverages(run: Run) -> list[tuple[str, dict[str, Counter[str]]]]:
    impls = dict.fromkeys(r.impl for r in (*run.rounds, *run.embed_passes))
    return [(one_line(impl, 80), coverage_of(run, impl)) for impl in impls]


def coverage_rows(run: Run) -> list[tuple[str, str, str, int]]:
    """(implementation, group, operator, calls) of all rounds, by falling calls within a group."""
    return [
        (impl, group, one_line(name, 160), calls)
        for impl, groups in _coverages(run)
        for group, counts in groups.items()
        for name, calls in counts.most_common()
    ]


def coverage_text(run: Run) -> list[str]:
    """For each implementation that has a coverage, a phrase with the calls in each group."""
    lines = []
    for impl, groups in _coverages(run):
        named = [f"{sum(counts.values()):,} calls {group}" for group, counts in groups.items()]
        named += [] if {"left stock", "at risk"} & set(groups) else ["none left stock unproven or at risk"]
        lines += [f"{impl}: {', '.join(named)}"] if groups else []
    return lines


# The completions of one prompt under one implementation, as plain data that `nondet.reports` draws.

ANYTIME, ONE_SIDED, TOO_FEW = "anytime-valid", "0 of n, one-sided", "no interval: too few rounds"
# Completions that are not a sample of one thing, as those of a server's arms together, have counts and no interval.
COUNTS = "counts only"


@dataclass(frozen=True)
class Interval:
    """A rate with its 95% interval: k of n."""

    k: int
    n: int
    low: float
    high: float
    # `ANYTIME` for two-sided ones, see `nondet.core.statistics.round_interval`; `ONE_SIDED` where nothing was seen;
    # `TOO_FEW` where no round was compared with another; `COUNTS` where there is no single sample
    method: str
    # rounds that were compared with an earlier one. The interval assumes only that these are independent.
    rounds: int = 0

    @property
    def two_sided(self) -> bool:
        """Whether both ends are bounds; else nothing was seen, and only `high` is one."""
        return self.method == ANYTIME


@dataclass(frozen=True)
class Branch:
    """One continuation at a fork: `continuation` is the text that follows (about 80 characters of its most common
    completion), margins are top-1 minus top-2 logit at the fork over its completions, or None."""

    token_id: int
    text: str
    count: int
    continuation: str
    margin_min: float | None = None
    margin_median: float | None = None


@dataclass(frozen=True)
class Fork:
    """Where completions with one history diverge: `index` is the first differing token, `before` the text up to it."""

    index: int
    before: str
    branches: tuple[Branch, ...]


@dataclass(frozen=True)
class DistinctCompletion:
    """One distinct completion; `parts_at` is the first token unlike the most common one's, None for that one itself."""

    digest: str
    count: int
    token_ids: tuple[int, ...]
    pieces: tuple[str, ...]
    text: str
    parts_at: int | None


@dataclass
class TreeNode:
    """A run of tokens shared by `count` completions, from `start`; the children begin where they diverge. A node
    without children ends its completions. The leaves' counts sum to n."""

    start: int
    length: int
    count: int
    text: str
    children: list[TreeNode] = field(default_factory=list)


@dataclass(frozen=True)
class FlipMargins:
    """Top-1 minus top-2 logit where completions diverge, compared with the other positions."""

    flips: int  # margins at forks, one for each distinct trace and fork that it takes part in
    median: float
    largest: float
    ties: int  # completions whose margin at a fork is exactly 0
    elsewhere: int  # margins at all other positions of all distinct traces
    elsewhere_median: float
    as_close: float  # share of these that are no larger than the largest at a fork
    apart: float  # probability that a margin elsewhere exceeds one at a fork; 0.5 if margins explain nothing


@dataclass(frozen=True)
class TokenFlips:
    """Greedy tokens compared with the most common completion's up to the first difference, and the margins there."""

    # `flips`, `tokens`: completions that differ from the first most common one, and tokens compared until they do
    flips: int
    tokens: int
    # `low`, `high`: 95% interval of one over the other, by round; None where no round was compared with an earlier one
    low: float | None
    high: float | None
    rounds: int
    # `moved`, `compared`: over distinct traces against the most common one's, at shared positions with the same two top
    # tokens: positions whose margin has different bits, and all of them. 0 of 0 where none was recorded.
    moved: int
    compared: int
    classes: int  # largest number of different margins at one position
    # `median`, `largest`: of the nonzero changes of a margin, in logits; 0.0 without one
    median: float
    largest: float
    # `near`, `met`: margins of the most common trace that are no larger than the largest change, and all of them
    near: int
    met: int


@dataclass(frozen=True)
class FlipDraws:
    """How near the draws were to another token where completions first diverge; see `nondet.sampling.engine.Draw`."""

    # `border`, `border_elsewhere`: median distance of the draw from a boundary between tokens, there and elsewhere
    border: float
    border_elsewhere: float | None
    nearest: float
    # `cut`, `cut_ties`: the smallest gap at the boundary of top-k there, in logits, and how many traces tie exactly;
    # None without top-k
    cut: float | None
    cut_ties: int
    nucleus: float | None  # the smallest distance of the kept mass from top_p there; None without


@dataclass(frozen=True)
class SampleSummary:
    """Everything about the completions of one prompt under one implementation."""

    impl: str
    prompt: int
    prompt_text: str
    n: int
    failed: int  # requests that ended in an error; they are in no other figure
    distinct_completions: int
    distinct_traces: int
    agree: Interval
    # share of completions that differ from the most common; where none does, the one-sided bound 1 - 0.05^(1/(n-1)): n
    # completions make n - 1 comparisons
    rate: Interval
    first_fork: Fork | None
    forks: tuple[Fork, ...]
    completions: tuple[DistinctCompletion, ...]
    tree: TreeNode
    # survival[i] is the share of completions whose first i tokens are those of the most common one
    survival: tuple[float, ...]
    has_logprobs: bool  # whether any trace has logprobs; without them (some servers) a trace is its tokens
    logprob_spread: float  # largest difference of the logprob of one token with one history between traces
    # `batch_min`, `batch_max`: query tokens in the steps that the completions took part in
    batch_min: int
    batch_max: int
    distinct_batches: int
    tokens_per_second: float
    # share of pairs of completions that differ, which does not grow with n; None of fewer than two
    disagreement: float | None = None
    # good's estimate of the probability that the next completion is a new one: those seen once, over n
    new_share: float | None = None
    rounds: int = 0
    # rounds after the first with the most common completion: for each completion of the round, in rising order, the
    # number of tokens shared with the most common one
    held_rounds: Mapping[int, tuple[int, ...]] = field(default_factory=dict)
    # of the intervals. It accounts for choosing the most common from the same data: the j-th text to occur has 0.05 /
    # (j (j + 1)), over all texts together 0.05.
    confidence: float = CONFIDENCE
    margins: FlipMargins | None = None  # None where nothing diverged, or no margins were recorded
    draws: FlipDraws | None = None  # None where nothing diverged, or the draws are not known
    flips: TokenFlips | None = None  # None of drawn tokens, and where nothing was compared
    # mean K3 of the other traces against the most common one, over the tokens shared; None where all are equal
    k3: float | None = None

    def band(self, index: int) -> tuple[float, float]:
        """The interval of survival[index]; 0 to 1 where no round was compared with another."""
        held = list(self.held_rounds.values())
        if not held:
            return 0.0, 1.0
        agreeing = [sum(shared >= index for shared in lengths) for lengths in held]
        return round_interval(agreeing, [len(lengths) for lengths in held], self.confidence)


# The tree of distinct completions from their sorted order, in which texts with a common beginning are adjacent.
#
# So a node of the tree is a range of the sorted texts, and no step looks at single tokens in Python.

Ids = npt.NDArray[np.int32]
Floats = npt.NDArray[np.float32]
_NO_FLOATS: Floats = np.zeros(0, dtype=np.float32)


@dataclass
class Span:
    """Tokens `start` to `end` that the texts `first` to `last` (exclusive, in sorted order) have in common. Where they
    diverge at `end`, `ways` has the span of each continuation; a text that ends there has one of its own. `low` and
    `high` are of the finite logprobs of each token up to `end`, over all traces of the texts; see `spread`."""

    first: int
    last: int
    start: int
    end: int
    ways: list[Span] = field(default_factory=list)
    low: Floats = field(default_factory=lambda: _NO_FLOATS)
    high: Floats = field(default_factory=lambda: _NO_FLOATS)


def shared_length(one: Ids, other: Ids) -> int:
    """Index of the first token that differs, or that only one of them has."""
    length = min(len(one), len(other))
    differ = one[:length] != other[:length]
    at = int(differ.argmax()) if length else 0
    return at if length and differ[at] else length


def spans_of(texts: Sequence[Ids]) -> list[Span]:
    """The tree of sorted distinct texts: its root first, and every span before its continuations."""
    shared = np.array([shared_length(a, b) for a, b in pairwise(texts)], dtype=np.int64)
    spans = [Span(0, len(texts), 0, 0)] if texts else []
    for span in spans:  # more are appended: nesting may be too deep to recurse
        if span.last - span.first == 1:
            span.end = len(texts[span.first])
            continue
        here = shared[span.first : span.last - 1]
        span.end = int(here.min())
        cuts = span.first + 1 + np.flatnonzero(here == span.end)
        edges = [span.first, *cuts.tolist(), span.last]
        span.ways = [Span(a, b, span.end, span.end) for a, b in pairwise(edges)]
        spans += span.ways
    return spans


def spread(spans: Sequence[Span], logprobs: Sequence[Sequence[Floats]]) -> float:
    """Largest spread of one token's logprob over traces that share it and everything before it. `logprobs`: for each
    text, in the order of the spans, those of its traces; empty ones and values that are not finite are left out."""
    widest = 0.0
    for span in reversed(spans):
        low, high = [way.low[: span.end] for way in span.ways], [way.high[: span.end] for way in span.ways]
        if not span.ways:
            known = [x[: span.end] for x in logprobs[span.first] if len(x) >= span.end]
            low = high = [np.where(np.isfinite(x), x, np.nan) for x in known] or [np.full(span.end, np.nan, np.float32)]
        span.low, span.high = np.fmin.reduce(low), np.fmax.reduce(high)
        apart = span.high[span.start :].astype(np.float64) - span.low[span.start :]
        widest = max(widest, float(np.fmax.reduce(apart, initial=0.0)))
    return widest


_BEFORE, _AFTER = 120, 80
_END = -1  # the "next token" of a completion that ends where others continue


@dataclass
class Group:
    """Completions with one text: a distinct completion with all its traces (digest -> how often)."""

    tokens: tuple[int, ...]
    count: int = 0
    traces: Counter[str] = field(default_factory=Counter)

    @cached_property
    def ids(self) -> Ids:
        """The tokens as an array."""
        return np.asarray(self.tokens, dtype=np.int32)

    def token(self, index: int) -> int:
        """The token there; `_END` where the completion has ended."""
        return self.tokens[index] if index < len(self.tokens) else _END


@dataclass(frozen=True)
class Grown:
    """The tree of completions and its figures; `places` are each group's forks, rising, groups in the order given."""

    tree: TreeNode
    forks: tuple[Fork, ...]
    places: Sequence[npt.NDArray[np.int64]]
    spread: float


def text_of(tokens: Sequence[int], pieces: Mapping[int, str]) -> str:
    """The tokens' own texts, joined."""
    return "".join(pieces.get(t, "") for t in tokens)


class Grower:
    """The tree of completions, with every fork in it. `groups` are distinct completions, the most common first.

    A place is an index into the sorted texts, a rank into the groups as given, a row into the traces. Without `margins`
    branches get none, because they don't decide drawn tokens.
    """

    def __init__(
        self,
        groups: Sequence[Group],
        traces: Mapping[str, Trace],
        pieces: Mapping[int, str],
        prompt: str,
        *,
        margins: bool = True,
    ) -> None:
        self.groups, self.pieces, self.prompt = groups, pieces, prompt
        # by their tokens, a text before its continuations: ids are below 2^31, so big-endian bytes compare as they do
        keys = [g.ids.astype(">u4").tobytes() for g in groups]
        order = sorted(range(len(groups)), key=keys.__getitem__)
        self.ranks = np.array(order, dtype=np.int64)
        ordered = [groups[rank] for rank in order]
        self.spans = spans_of([g.ids for g in ordered])
        # [groups + 1] completions, and rows, before each place
        self.counts = np.cumsum([0, *(g.count for g in ordered)])
        self.rows = np.cumsum([0, *(len(g.traces) for g in ordered)])
        self.weights = np.array([count for g in ordered for count in g.traces.values()], dtype=np.int64)
        self.logprobs = [[traces[digest].logprob_array for digest in g.traces] for g in ordered]
        # the margins of all rows, one after the other
        kept = [traces[d].margin_array if margins else _NO_FLOATS for g in ordered for d in g.traces]
        self.lengths = np.array([len(m) for m in kept], dtype=np.int64)
        self.starts = np.cumsum(self.lengths) - self.lengths
        self.margins = np.concatenate([_NO_FLOATS, *kept])

    def grow(self) -> Grown:
        """Add fork after fork, from the root; a loop, because forks may be nested deeper than Python can recurse."""
        root = TreeNode(0, 0, 0, "")
        forks: list[Fork] = []
        places: list[npt.NDArray[np.int64]] = [np.zeros(0, dtype=np.int64)] * len(self.groups)
        none: tuple[int, ...] = ()
        pending = [(root, span, none) for span in self.spans[:1]]
        while pending:
            node, span, before = pending.pop()
            node.length, node.count = span.end - span.start, self._count(span)
            node.text = text_of(self._commonest(span).tokens[span.start : span.end], self.pieces)
            if not span.ways:
                places[int(self.ranks[span.first])] = np.array(before, dtype=np.int64)
                continue
            ways = sorted(span.ways, key=lambda way: (-self._count(way), self._commonest(way).token(span.end)))
            forks.append(self._fork(span, ways))
            node.children = [TreeNode(span.end, 0, 0, "") for _ in ways]
            here = (*before, span.end)
            pending += [(child, way, here) for child, way in zip(node.children, ways, strict=True)]
        forks.sort(key=lambda f: (f.index, -sum(b.count for b in f.branches), f.before))
        return Grown(root, tuple(forks), places, spread(self.spans, self.logprobs))

    def _count(self, span: Span) -> int:
        return int(self.counts[span.last] - self.counts[span.first])

    def _commonest(self, span: Span) -> Group:
        return self.groups[int(self.ranks[span.first : span.last].min())]

    def _fork(self, span: Span, ways: Sequence[Span]) -> Fork:
        tokens = self._commonest(span).tokens
        # a token may have no text of its own, but hardly four in a row
        before = self.prompt + text_of(tokens[max(0, span.end - 4 * _BEFORE) : span.end], self.pieces)
        return Fork(span.end, before[-_BEFORE:], tuple(self._branch(way) for way in ways))

    def _branch(self, way: Span) -> Branch:
        index, group = way.start, self._commonest(way)
        first, last = self.rows[way.first], self.rows[way.last]
        known = first + np.flatnonzero(self.lengths[first:last] > index)
        margins = self.margins[self.starts[known] + index]
        finite = np.isfinite(margins)
        each = np.repeat(margins[finite].astype(np.float64), self.weights[known[finite]])
        return Branch(
            token_id=group.token(index),
            text=self.pieces.get(group.token(index), ""),
            count=self._count(way),
            continuation=text_of(group.tokens[index + 1 : index + 1 + 4 * _AFTER], self.pieces)[:_AFTER],
            margin_min=float(each.min()) if len(each) else None,
            margin_median=float(np.median(each)) if len(each) else None,
        )


# A distinct trace, its count, and the positions, rising, of its forks.
Member = tuple[Trace, int, npt.NDArray[np.int64]]


def flip_margins(traces: Sequence[Member]) -> FlipMargins | None:
    """Margins where completions diverge, compared with those elsewhere; None where either is not recorded."""
    at, ties, elsewhere = [], 0, []
    for trace, count, places in traces:
        margins = trace.margin_array
        if not len(margins):
            continue
        known = places[: np.searchsorted(places, len(margins))]
        here = margins[known]
        here = here[np.isfinite(here)]
        at.append(here)
        ties += count * int((here == 0.0).sum())
        together = np.ones(len(margins), dtype=bool)
        together[known] = False
        rest = margins[together]
        elsewhere.append(rest[np.isfinite(rest)])
    if not sum(map(len, at)) or not sum(map(len, elsewhere)):
        return None
    flips, others = np.concatenate(at), np.concatenate(elsewhere)
    return FlipMargins(
        flips=len(flips),
        median=float(np.median(flips)),
        largest=float(flips.max()),
        ties=ties,
        elsewhere=len(others),
        elsewhere_median=float(np.median(others)),
        as_close=float((others <= flips.max()).mean()),
        apart=superiority(flips, others),
    )


def token_flips(
    reference: Trace,
    others: Mapping[str, tuple[Trace, int, int]],
    rounds: Mapping[int, tuple[int, int, int]],
    held: Sequence[int],
    confidence: float,
) -> TokenFlips | None:
    """How often a token flips, and how far margins change compared with their size; None where nothing was compared.

    Args:
        others: As of `k3_of`.
        rounds: Of each round (completions that differ from the most common, tokens compared, completions).
        held: The rounds that were compared with an earlier one.
    """
    length = len(reference.token_ids)
    flips = sum(differ for differ, _, _ in rounds.values())
    # the first most common completion is the reference
    tokens = sum(tokens for _, tokens, _ in rounds.values()) - length
    if tokens <= 0:
        return None
    bounds = _flip_bounds([rounds[r] for r in held], length + 1, confidence) if held else None
    margins, second = reference.margin_array, np.asarray(reference.runner_up)
    places, moves = [np.zeros(0, dtype=np.int64)], [np.zeros(0)]
    for digest, (trace, _, shared) in others.items():
        end = min(shared, len(margins), len(trace.margin_array), len(second), len(trace.runner_up))
        if digest == reference.digest or not end:
            continue
        move = trace.margin_array[:end].astype(np.float64) - margins[:end]
        known = np.flatnonzero(np.isfinite(move) & (second[:end] == np.asarray(trace.runner_up)[:end]))
        places.append(known)
        moves.append(move[known])
    where, by = np.concatenate(places), np.concatenate(moves)
    moved = np.abs(by[by != 0.0])
    largest = float(moved.max()) if len(moved) else 0.0
    # position and change of each other class
    several = np.unique(np.stack([where[by != 0.0], by[by != 0.0]]), axis=1)[0]
    met = margins[np.isfinite(margins)]
    return TokenFlips(
        flips=flips,
        tokens=tokens,
        low=min(bounds[0], flips / tokens) if bounds else None,
        high=max(bounds[1], flips / tokens) if bounds else None,
        rounds=len(held),
        moved=len(moved),
        compared=len(by),
        classes=1 + max(Counter(several.tolist()).values(), default=0),
        median=float(np.median(moved)) if len(moved) else 0.0,
        largest=largest,
        near=int((met <= largest).sum()),
        met=len(met),
    )


def _flip_bounds(rounds: Sequence[tuple[int, int, int]], most: int, confidence: float) -> tuple[float, float]:
    """Of flips over tokens: a completion's probability to diverge over the tokens it is expected to be compared for.
    Both have intervals by round, as a share of completions and of the `most` tokens that one may take, each at half of
    the error; the quotients of their ends hold with both."""
    each = 1.0 - (1.0 - confidence) / 2
    sizes = [n for _, _, n in rounds]
    low, high = round_interval([differ for differ, _, _ in rounds], sizes, each)
    short, long = round_interval([tokens for _, tokens, _ in rounds], [n * most for n in sizes], each)
    return low / (long * most), min(1.0, high / (short * most)) if short else 1.0  # of empty completions nothing


def flip_draws(traces: Sequence[Member], first: int) -> FlipDraws | None:
    """How near the draws were at the first fork, at index `first`; None where they are not known."""
    known = [(t, bool((places == first).any())) for t, _, places in traces if t.border]
    there = [t for t, parts in known if parts]
    if not there:
        return None
    borders = [float(_floats(t.border)[first]) for t in there]
    rest = [np.delete(_floats(t.border), first) if parts else _floats(t.border) for t, parts in known]
    elsewhere = np.concatenate(rest)
    cuts = [c for t in there if np.isfinite(c := float(_floats(t.cut)[first]))]
    nuclei = [n for t in there if np.isfinite(n := float(_floats(t.nucleus)[first]))]
    return FlipDraws(
        border=float(np.median(borders)),
        border_elsewhere=float(np.median(elsewhere)) if len(elsewhere) else None,
        nearest=min(borders),
        cut=min(cuts) if cuts else None,
        cut_ties=sum(c == 0.0 for c in cuts),
        nucleus=min(nuclei) if nuclei else None,
    )


def _floats(data: bytes) -> Floats:
    return np.frombuffer(data, dtype="<f4")


def k3_of(reference: Trace, others: Mapping[str, tuple[Trace, int, int]]) -> float | None:
    """Mean K3 of the other traces against the reference, over the tokens that each shares with it from the start.
    `others`: digest -> (trace, how often it occurred, tokens that it shares with the reference). None where no other
    trace shares a token, or logprobs are missing."""
    total, tokens = 0.0, 0
    for digest, (trace, count, length) in others.items():
        if digest == reference.digest or not trace.logprobs or not reference.logprobs:
            continue
        here, there = reference.logprob_array[:length], trace.logprob_array[:length]
        finite = np.isfinite(here) & np.isfinite(there)
        if number := int(finite.sum()):
            total += count * number * k3(here[finite], there[finite])
            tokens += count * number
    # to six digits: further ones depend on the CPU's exp, and a report is the same on every machine
    return float(f"{total / tokens:.6g}") if tokens else None


def schedules_of(run: Run, impl: str) -> dict[int, list[tuple[bool, list[list[int]]]]]:
    """Round -> for every request whether it is under study, and its schedule."""
    rounds: dict[int, list[tuple[bool, list[list[int]]]]] = defaultdict(list)
    for completion in run.completions:
        if completion.impl == impl:
            rounds[completion.round].append((True, completion.schedule))
    for record in run.rounds:
        if record.impl == impl:
            rounds[record.round] += [(False, schedule) for schedule in record.background.values()]
    return rounds


def batch_totals(run: Run, impl: str) -> dict[int, npt.NDArray[np.int64]]:
    """Round -> query tokens of the whole batch at each step, from the schedules of all requests."""
    totals = {}
    for number, schedules in schedules_of(run, impl).items():
        parts = [part for _, schedule in schedules for part in schedule]
        totals[number] = _per_step(parts, [tokens for _, _, tokens in parts])
    return totals


def batch_sizes(batches: Mapping[int, npt.NDArray[np.int64]], good: Sequence[Completion]) -> set[int]:
    """Sizes, in query tokens, of the steps that the completions took part in."""
    under_study: dict[int, list[list[int]]] = defaultdict(list)
    for completion in good:
        under_study[completion.round] += completion.schedule
    sizes: set[int] = set()
    for number, parts in under_study.items():
        taken = _per_step(parts, [1] * len(parts))
        sizes.update(np.unique(batches[number][: len(taken)][taken > 0]).tolist())
    return sizes


def _per_step(parts: Sequence[list[int]], amounts: Sequence[int]) -> npt.NDArray[np.int64]:
    """[steps]: at each step the sum of the amounts of the parts, [first step, steps, ...], that cover it."""
    change = np.zeros(max((first + steps for first, steps, _ in parts), default=0) + 1, dtype=np.int64)
    for (first, steps, _), amount in zip(parts, amounts, strict=True):
        change[first] += amount
        change[first + steps] -= amount
    return np.cumsum(change)


def smallest_cures(summaries: Sequence[SampleSummary]) -> list[str]:
    """Sets of operator families, "attention" or "attention+matmul", that made invariant by themselves left one trace.
    `summaries` are those of one prompt: stock, and invariant:FAMILY[+FAMILY] for what was tried. A set that contains
    another cure is left out. Empty where stock did not diverge: there is nothing to cure."""
    stock = next((s for s in summaries if s.impl == "stock"), None)
    if stock is None or stock.distinct_traces < 2:
        return []
    parts = [s for s in summaries if role_of(s.impl) == Role.PART]
    cures = [families_of(s.impl) for s in parts if s.distinct_traces == 1 and s.n >= stock.n]  # fewer trials prove less
    sets = [set(cure.split("+")) for cure in cures]
    return [cure for cure, families in zip(cures, sets, strict=True) if not any(other < families for other in sets)]


# All prompts of a run together: how many diverge, when, and whether one implementation diverges more than another.
#
# Prompts are the unit of every comparison between implementations, because a set is a sample of prompts.


@dataclass(frozen=True)
class PromptSet:
    """The prompts of one implementation."""

    impl: str
    # `parted_traces`, `parted_tokens`: prompts with two or more logprob traces, and completions
    parted_traces: int
    parted_tokens: int
    # `share_low`, `share_high`: 95% interval of the share of prompts whose traces diverge, under such loads
    share_low: float
    share_high: float
    # `n`, `failed`, `rounds`: of all prompts together
    n: int
    failed: int
    rounds: int
    # `bound_rounds`, `bound_completions`: one-sided 95% bounds where no trace diverged; None where one did, or too
    # little was compared. The second holds only if completions are independent.
    bound_rounds: float | None
    bound_completions: float | None
    # `disagreement`, `new`: means over prompts of the share of pairs that differ, and of the chance of a new text
    disagreement: float | None
    new: float | None
    # kaplan-Meier of the first token that differs from the prompt's most common completion; the end of an equal text is
    # censoring. Intervals by round, as `effect`.
    curve: tuple[SurvivalStep, ...]
    # completions that are worth one independent trial: all, over the rounds that were compared with another, of the
    # largest of them. Infinite where there is none.
    effect: float
    summaries: Mapping[int, SampleSummary]
    unit: str = "prompt"  # what a prompt is called: a prompt with its seed is a subject of its own

    @property
    def prompts(self) -> int:
        """How many have completions."""
        return len(self.summaries)


@dataclass(frozen=True)
class Comparison:
    """Two implementations on the prompts that both completed."""

    first: str
    second: str
    unit: str
    prompts: int
    only_first: int  # prompts whose completions diverge under the first only
    only_second: int  # and under the second only
    mcnemar: float  # two-sided p over prompts, of these counts
    permutation: float  # the same of the shares of pairs that differ
    log_rank: LogRank  # of when completions first diverge, stratified by prompt, divided by the larger effect


def prompt_sets(summaries: Sequence[SampleSummary], rounds: Mapping[str, int], unit: str = "prompt") -> list[PromptSet]:
    """One for each implementation, in the order of the summaries. `rounds` counts rounds with a completion that
    succeeded; the bound by round counts only those in which one was compared with an earlier one of its prompt."""
    by_impl: dict[str, dict[int, SampleSummary]] = {}
    for s in summaries:
        by_impl.setdefault(s.impl, {})[s.prompt] = s
    return [_prompt_set(impl, members, rounds.get(impl, 0), unit) for impl, members in by_impl.items()]


def _prompt_set(impl: str, members: Mapping[int, SampleSummary], rounds: int, unit: str) -> PromptSet:
    diverged = sum(s.distinct_traces > 1 for s in members.values())
    n = sum(s.n for s in members.values())
    comparisons = sum(max(0, s.n - 1) for s in members.values())  # a prompt's first completion is the reference
    clean = not diverged and comparisons > 0
    pairs = [s.disagreement for s in members.values() if s.disagreement is not None]
    news = [s.new_share for s in members.values() if s.new_share is not None]
    low, high = confidence_sequence(diverged, len(members))
    times, ends = [], []
    for s in members.values():
        t, e = _times(s)
        times += t
        ends += e
    held: Counter[int] = Counter()
    for s in members.values():
        held.update({number: len(lengths) for number, lengths in s.held_rounds.items()})
    effect = n * max(held.values()) / held.total() if held else math.inf
    return PromptSet(
        impl=impl,
        parted_traces=diverged,
        parted_tokens=sum(s.distinct_completions > 1 for s in members.values()),
        share_low=low,
        share_high=high,
        n=n,
        failed=sum(s.failed for s in members.values()),
        rounds=rounds,
        bound_rounds=one_sided_bound(len(held)) if clean and held else None,
        bound_completions=one_sided_bound(comparisons) if clean else None,
        disagreement=fmean(pairs) if pairs else None,
        new=fmean(news) if news else None,
        curve=tuple(kaplan_meier(times, ends, effect)) if times else (),
        effect=effect,
        summaries=dict(members),
        unit=unit,
    )


def compared(first: PromptSet, second: PromptSet) -> Comparison:
    """Compare two implementations on the prompts that both have."""
    both = [(first.summaries[p], second.summaries[p]) for p in first.summaries if p in second.summaries]
    only_first = sum(a.distinct_completions > 1 >= b.distinct_completions for a, b in both)
    only_second = sum(b.distinct_completions > 1 >= a.distinct_completions for a, b in both)
    pairs = [(a.disagreement, b.disagreement) for a, b in both]
    shares = [(x, y) for x, y in pairs if x is not None and y is not None]
    return Comparison(
        first=first.impl,
        second=second.impl,
        unit=first.unit,
        prompts=len(both),
        only_first=only_first,
        only_second=only_second,
        mcnemar=mcnemar(only_first, only_second),
        permutation=paired_permutation([x for x, _ in shares], [y for _, y in shares]),
        log_rank=log_rank({a.prompt: (_times(a), _times(b)) for a, b in both}, max(first.effect, second.effect)),
    )


def _times(summary: SampleSummary) -> tuple[list[int], list[bool]]:
    """For each completion the tokens that it shares with the most common, and whether it differs after them."""
    times, ends = [], []
    for c in summary.completions:
        times += [len(c.token_ids) if c.parts_at is None else c.parts_at] * c.count
        ends += [c.parts_at is not None] * c.count
    return times, ends


def summarize_all(run: Run, traces: Mapping[str, Trace], pieces: Mapping[int, str]) -> list[SampleSummary]:
    """A summary of each prompt under each implementation, if it completed anything, in the order of the file.
    `traces` (by digest) and `pieces`: see `nondet.core.traces.read_traces`. Raises KeyError: a trace is missing."""
    subjects: dict[tuple[str, int], list[Completion]] = defaultdict(list)
    for c in run.completions:
        subjects[c.impl, c.prompt].append(c)
    batches = {impl: batch_totals(run, impl) for impl in dict.fromkeys(impl for impl, _ in subjects)}
    return [
        _summarize(run, traces, pieces, mine, batches[impl])
        for (impl, _), mine in subjects.items()
        if any(c.status == "ok" for c in mine)
    ]


_Rounds = Mapping[int, Counter[tuple[int, ...]]]  # round -> tokens -> how many completions


def _summarize(
    run: Run,
    traces: Mapping[str, Trace],
    pieces: Mapping[int, str],
    completions: Sequence[Completion],
    batches: Mapping[int, npt.NDArray[np.int64]],
) -> SampleSummary:
    """Of all completions of one prompt under one implementation; at least one succeeded."""
    impl, prompt = completions[0].impl, completions[0].prompt
    good = [c for c in completions if c.status == "ok"]
    texts: dict[int, Counter[tuple[int, ...]]] = {}
    distinct: dict[tuple[int, ...], Group] = {}
    for completion in good:
        tokens = tuple(traces[completion.trace].token_ids)
        texts.setdefault(completion.round, Counter())[tokens] += 1
        group = distinct.setdefault(tokens, Group(tokens))
        group.count += 1
        group.traces[completion.trace] += 1
    came = _first_seen(texts)
    groups = sorted(distinct.values(), key=lambda g: (-g.count, came[g.tokens]))
    n, top, text = len(good), groups[0], run.header.plan["prompts"][prompt]["text"]
    # a draw does not depend on the margin, but on its distance from a boundary
    drawn = bool(run.header.plan.get("sampling"))
    grown = Grower(groups, traces, pieces, text, margins=not drawn).grow()
    forks = grown.forks
    # completions of one round share batches, so what changes one changes its neighbours. Rounds are therefore compared
    # with the round in which the most common completion first occurred, which itself does not count
    begin = min(r for r in texts if top.tokens in texts[r])
    held = [r for r in sorted(texts) if r > begin]
    place = came[top.tokens]
    confidence = 1.0 - (1.0 - CONFIDENCE) / (place * (place + 1))
    low, high, method = _rate_interval(top, n, [texts[r] for r in held], confidence)
    # every distinct trace of a completion has the same forks
    members = [
        (traces[d], count, places)
        for g, places in zip(groups, grown.places, strict=True)
        for d, count in g.traces.items()
    ]
    lengths = {g.tokens: shared_length(g.ids, top.ids) for g in groups}
    relatives = {d: (traces[d], c, lengths[g.tokens]) for g in groups for d, c in g.traces.items()}
    common = traces[top.traces.most_common(1)[0][0]]
    return SampleSummary(
        impl=impl,
        prompt=prompt,
        prompt_text=text,
        n=n,
        failed=len(completions) - n,
        distinct_completions=len(groups),
        distinct_traces=len(relatives),
        agree=Interval(top.count, n, 1.0 - high, 1.0 - low, method, len(held)),
        rate=Interval(n - top.count, n, low, high, method, len(held)),
        disagreement=pair_disagreement([g.count for g in groups]) if n > 1 else None,
        new_share=new_share([g.count for g in groups]),
        first_fork=forks[0] if forks else None,
        forks=forks,
        completions=tuple(
            DistinctCompletion(
                digest=tokens_digest(list(g.tokens)),
                count=g.count,
                token_ids=g.tokens,
                pieces=tuple(pieces.get(t, "") for t in g.tokens),
                text=traces[next(iter(g.traces))].text,
                parts_at=None if g is top else lengths[g.tokens],
            )
            for g in groups
        ),
        tree=grown.tree,
        survival=_survival(groups, lengths, n),
        has_logprobs=any(trace.logprobs for trace, _, _ in members),
        logprob_spread=grown.spread,
        batch_min=min(c.batch_min for c in good),
        batch_max=max(c.batch_max for c in good),
        distinct_batches=len(batch_sizes(batches, good)),
        tokens_per_second=median_rate(r for r in run.rounds if r.impl == impl),
        rounds=len(texts),
        held_rounds={r: tuple(sorted(lengths[tokens] for tokens in texts[r].elements())) for r in held},
        confidence=confidence,
        margins=flip_margins(members) if forks and not drawn else None,
        draws=flip_draws(members, forks[0].index) if forks else None,
        flips=None if drawn else token_flips(common, relatives, _exposed(texts, top, lengths), held, confidence),
        k3=k3_of(common, relatives),
    )


def _first_seen(texts: _Rounds) -> dict[tuple[int, ...], int]:
    """Tokens -> their number, from 1, by round, then count, then tokens, so that the file's order does not matter."""
    came: dict[tuple[int, ...], int] = {}
    for _, counts in sorted(texts.items()):
        for tokens in sorted(sorted(counts), key=counts.__getitem__, reverse=True):
            came.setdefault(tokens, len(came) + 1)
    return came


def _rate_interval(
    top: Group, n: int, held: Sequence[Counter[tuple[int, ...]]], confidence: float
) -> tuple[float, float, str]:
    """Bounds of the share that differs from the most common completion, and the method: see `Interval`."""
    if top.count == n:
        # if the most common has the probability p, all n are equal with a probability of at most p^(n-1): the first is
        # the reference, so that n of them make n - 1 comparisons
        return 0.0, one_sided_bound(n - 1) if n > 1 else 1.0, ONE_SIDED
    if not held:
        return 0.0, 1.0, TOO_FEW
    share, sizes = (n - top.count) / n, [counts.total() for counts in held]
    low, high = round_interval([counts.total() - counts[top.tokens] for counts in held], sizes, confidence)
    return min(low, share), max(high, share), ANYTIME


def _exposed(texts: _Rounds, top: Group, lengths: Mapping[tuple[int, ...], int]) -> dict[int, tuple[int, int, int]]:
    """Of each round the completions that differ from the most common, tokens compared, and completions."""
    return {
        r: (
            counts.total() - counts[top.tokens],
            sum((lengths[t] + (t != top.tokens)) * count for t, count in counts.items()),
            counts.total(),
        )
        for r, counts in texts.items()
    }


def _survival(groups: Sequence[Group], lengths: Mapping[tuple[int, ...], int], n: int) -> tuple[float, ...]:
    # completions that agree with exactly the first i tokens of the most common
    agree = np.zeros(len(groups[0].tokens) + 1, dtype=np.int64)
    for group in groups:
        agree[lengths[group.tokens]] += group.count
    return tuple((np.cumsum(agree[::-1])[::-1] / n).tolist())
