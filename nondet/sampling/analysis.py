"""What the completions of a run show: how many differ, where they diverge, how small the margins are, at what speed.

Reads only a run file and its side file: no torch, no model, no tokenizer. Failed completions are only counted.
"""

from __future__ import annotations

import math
import statistics
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from nondet.core.records import Completion, EmbedPass, Role, Round, Run, families_of, role_of
from nondet.core.statistics import (
    CONFIDENCE,
    confidence_sequence,
    k3,
    mcnemar,
    median_interval,
    one_sided_bound,
    round_interval,
)
from nondet.core.traces import Trace, shared_length
from nondet.errors import one_line

# The speed of a sampled run, and the ratio of two implementations. Tokens per second are the median over rounds,
# because one-time costs (compiling, proving, filling caches) fall into a few of them.

# The least and the largest ratio of a diagnosis' timed rounds, where several were timed.
_SPAN = ("invariant_ratio_low", "invariant_ratio_high")
# Figures of a round whose session captured CUDA graphs: the steps without a capture.
TIMED_TOKENS, TIMED_US = "tokens beside captures", "µs beside captures"

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
    """Invariant against the fastest stock that ran, `baseline`, both in tokens per second."""

    baseline: str
    stock: float
    invariant: float
    # of the ratio of a round, at 95%; of a diagnosis the least and the largest of its few timed rounds
    interval: tuple[float, float] | None = None
    rounds: int = 0  # rounds that both completed
    no_cost: str = TOO_FEW_ROUNDS  # why the ratio may not be reported as the cost of the fix; "" where it may

    @property
    def ratio(self) -> float:
        """Invariant over stock; above 1 invariant is faster."""
        return self.invariant / self.stock


def _rates(run: Run) -> dict[str, dict[tuple[int, int], float]]:
    """Implementation -> (round, steps) -> tokens per second; if a round captured CUDA graphs, of its other steps."""
    found: dict[str, dict[tuple[int, int], float]] = {}
    for r in run.rounds:
        tokens = r.figures.get(TIMED_TOKENS, r.tokens)
        seconds = r.figures[TIMED_US] / 1e6 if TIMED_US in r.figures else r.seconds
        if tokens > 0 and seconds > 0:
            found.setdefault(r.impl, {})[r.round, r.steps] = tokens / seconds
    return found


def speed_ratio_of(run: Run) -> SpeedRatio | None:
    """The ratio of a run's rounds, or of a diagnosis' timed warm rounds; None unless invariant and a stock ran."""
    timed, rounds = _timed(run), _rates(run)
    rates = {impl: statistics.median(mine.values()) for impl, mine in rounds.items()}
    if run.steps:
        rates = {impl: float(timed.get(f"{impl}_tokens_per_second", 0.0)) for impl in ("stock", "invariant")}
    stocks = [impl for impl, rate in rates.items() if role_of(impl) in (Role.STOCK, Role.BACKEND) and rate > 0]
    invariant = next((impl for impl, rate in rates.items() if role_of(impl) == Role.INVARIANT and rate > 0), None)
    if not stocks or invariant is None:
        return None
    baseline = max(stocks, key=rates.__getitem__)
    load = run.header.plan.get("load")
    graphs = isinstance(load, dict) and bool(load.get("graphs"))
    host_bound = baseline == Role.STOCK and run.header.plan.get("device") == "cuda" and not graphs
    interval, count, no_cost = None, 0, HOST_NOTE if host_bound else ""
    if not run.steps:
        ours, stock = rounds[invariant], rounds[baseline]
        ratios = [ours[same] / stock[same] for same in ours.keys() & stock.keys()]
        count = len(ratios)
        if run.header.plan.get("turns"):
            interval = median_interval(ratios)
        else:
            no_cost = no_cost or NOT_IN_TURN
    elif {"rounds", *_SPAN} <= timed.keys():
        interval, count = (float(timed[_SPAN[0]]), float(timed[_SPAN[1]])), int(timed["rounds"])
    no_cost = no_cost or ("" if interval else TOO_FEW_ROUNDS)
    return SpeedRatio(baseline, rates[baseline], rates[invariant], interval, count, no_cost)


def ratio_text(speed: SpeedRatio) -> str:
    """ "speed ratio 0.98 against stock-no-cudnn (0.95 to 1.02, 25 rounds)", or that the ratio is not a cost."""
    if speed.no_cost or speed.interval is None:
        return f"cost not measured: {speed.no_cost}"
    span, stock = f"{speed.interval[0]:.2f} to {speed.interval[1]:.2f}", one_line(speed.baseline, 40)
    if speed.rounds < _MEDIAN_LEAST:  # of a diagnosis: too few rounds for a result
        return f"speed ratio {span} against {stock} ({speed.rounds} rounds)"
    return f"speed ratio {speed.ratio:.2f} against {stock} ({span}, {speed.rounds} rounds)"


def diagnosed_cost(run: Run) -> str:
    """The cost that a diagnosis reports from its timed rounds; "" without any."""
    speed, timed = speed_ratio_of(run), _timed(run)
    if speed is None or not timed:
        return ""
    if not speed.no_cost:
        return f"S{ratio_text(speed)[1:]}."
    rates = f"{speed.invariant:,.0f} against {speed.stock:,.0f} tokens/s, warm"
    return f"Not measured: {speed.no_cost} ({rates})."


def _timed(run: Run) -> Mapping[str, Any]:
    return next((s.figures for s in run.steps if s.name == "cost" and s.outcome == "yes"), {})


# Which operators of a sampled run were batch-invariant: rounds, and an encoder's passes, hold the counts of
# `batch_invariant()` ("replaced: mm" -> calls) and of the launchers. "certified stock" is stock that is proven here to
# give each row the bits that it has solo; the bits of the last two groups may depend on the batch.
_GROUPS = ("replaced", "certified stock", "left stock", "at risk")


def coverages(run: Run) -> dict[str, dict[str, Counter[str]]]:
    """Implementation -> group -> operator -> calls, over all rounds; the groups in order, those with calls."""
    found: dict[str, dict[str, Counter[str]]] = {}
    records: list[Round | EmbedPass] = [*run.rounds, *run.embed_passes]
    for record in records:
        groups = found.setdefault(record.impl, {group: Counter() for group in _GROUPS})
        for name, calls in record.ran.items():
            group, _, operator = name.partition(": ")
            if group in groups:
                groups[group][operator] += calls
    return {impl: {group: counts for group, counts in groups.items() if counts} for impl, groups in found.items()}


def coverage_rows(run: Run) -> list[tuple[str, str, str, int]]:
    """(implementation, group, operator, calls) of all rounds, by falling calls within a group."""
    return [
        (one_line(impl, 80), group, one_line(name, 160), calls)
        for impl, groups in coverages(run).items()
        for group, counts in groups.items()
        for name, calls in counts.most_common()
    ]


def coverage_text(run: Run) -> list[str]:
    """For each implementation that has a coverage, a phrase with the calls in each group."""
    lines = []
    for impl, groups in coverages(run).items():
        named = [f"{counts.total():,} calls {group}" for group, counts in groups.items()]
        named += [] if {"left stock", "at risk"} & set(groups) else ["none left stock unproven or at risk"]
        lines += [f"{one_line(impl, 80)}: {', '.join(named)}"] if groups else []
    return lines


# The completions of one prompt under one implementation, as plain data that `nondet.reports` draws.

ANYTIME, ONE_SIDED, TOO_FEW = "anytime-valid", "0 of n, one-sided", "no interval: too few rounds"
# Completions that are not a sample of one thing, as those of a server's arms together, have counts and no interval.
COUNTS = "counts only"

Floats = npt.NDArray[np.float32]
_NO_FLOATS: Floats = np.zeros(0, dtype=np.float32)


@dataclass(frozen=True)
class Interval:
    """A rate, k of n, with its 95% interval."""

    k: int
    n: int
    low: float
    high: float
    # `ANYTIME` for two-sided ones, see `nondet.core.statistics.round_interval`; `ONE_SIDED` where nothing was seen, so
    # that only `high` is a bound; `TOO_FEW` where no round was compared with another; `COUNTS` of no single sample
    method: str
    # rounds that were compared with an earlier one. The interval assumes only that these are independent.
    rounds: int = 0


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

    count: int
    token_ids: tuple[int, ...]
    pieces: tuple[str, ...]
    text: str
    parts_at: int | None


class FlipMargins(NamedTuple):
    """Top-1 minus top-2 logit where completions diverge, compared with the other positions."""

    flips: int  # margins at forks, one for each distinct trace and fork that it takes part in
    median: float
    largest: float
    ties: int  # completions whose margin at a fork is exactly 0
    elsewhere: int  # margins at all other positions of all distinct traces
    elsewhere_median: float
    as_close: float  # share of these that are no larger than the largest at a fork


@dataclass(frozen=True)
class TokenFlips:
    """Greedy tokens compared with the most common completion's up to the first difference."""

    flips: int  # completions that differ from the first most common one
    tokens: int  # tokens that are compared until they do
    interval: tuple[float, float] | None  # 95%, of flips over tokens; None where no round was compared with another
    rounds: int


class FlipDraws(NamedTuple):
    """How near the draws were to another token where completions first diverge; see `nondet.sampling.engine.Draw`."""

    border: float  # median distance of the draw from a boundary between tokens
    border_elsewhere: float | None
    nearest: float
    cut: float | None  # the smallest gap at the boundary of top-k there, in logits; None without top-k
    cut_ties: int  # traces with an exact tie there
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
    rate: Interval  # share of completions that differ from the most common
    first_fork: Fork | None  # the fork with the fewest tokens before it
    completions: tuple[DistinctCompletion, ...]  # the most common first
    survival: tuple[float, ...]  # [i]: share of completions whose first i tokens are those of the most common one
    has_logprobs: bool  # whether any trace has logprobs; without them (some servers) a trace is its tokens
    logprob_spread: float  # largest difference of the logprob of one token with one history between traces
    # of the steps that the completions took part in: fewest and most query tokens, and different numbers of them
    batch_min: int
    batch_max: int
    distinct_batches: int
    tokens_per_second: float  # of all requests, the median over rounds; 0.0 without one
    rounds: int
    # rounds after the first with the most common completion: for each completion of the round, in rising order, the
    # number of tokens shared with the most common one
    held_rounds: Mapping[int, tuple[int, ...]]
    # of the intervals. It accounts for choosing the most common from the same data: the j-th text to occur has 0.05 /
    # (j (j + 1)), over all texts together 0.05.
    confidence: float
    margins: FlipMargins | None  # None where nothing diverged, or no margins were recorded
    draws: FlipDraws | None  # None where nothing diverged, or the draws are not known
    flips: TokenFlips | None  # None of drawn tokens, and where nothing was compared
    k3: float | None  # mean K3 of the other traces against the most common one, over the tokens shared; None if equal

    @property
    def agree(self) -> Interval:
        """The share of the most common completion."""
        r = self.rate
        return replace(r, k=r.n - r.k, low=1.0 - r.high, high=1.0 - r.low)

    def band(self, index: int) -> tuple[float, float]:
        """The interval of survival[index]; 0 to 1 where no round was compared with another."""
        held = list(self.held_rounds.values())
        if not held:
            return 0.0, 1.0
        agreeing = [sum(shared >= index for shared in lengths) for lengths in held]
        return round_interval(agreeing, [len(lengths) for lengths in held], self.confidence)


# The forks of distinct completions, from their sorted order, in which texts with a common beginning are adjacent: a
# node of their tree is a range of the sorted texts, and no step looks at single tokens in Python.


@dataclass
class Span:
    """Tokens `start` to `end` that the texts `first` to `last` (exclusive, in sorted order) have in common. Where they
    diverge at `end`, `ways` has the span of each continuation; a text that ends there has one of its own."""

    first: int
    last: int
    start: int
    end: int
    ways: list[Span] = field(default_factory=list)
    forks: tuple[int, ...] = ()  # the ends of the spans that it continues
    # of the finite logprobs of each token up to `end`, over all traces of the texts
    low: Floats = field(default_factory=lambda: _NO_FLOATS)
    high: Floats = field(default_factory=lambda: _NO_FLOATS)


def spans_of(texts: Sequence[Sequence[int]]) -> list[Span]:
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
        span.ways = [Span(a, b, span.end, span.end, forks=(*span.forks, span.end)) for a, b in pairwise(edges)]
        spans += span.ways
    return spans


def _spread(spans: Sequence[Span], logprobs: Sequence[Sequence[Floats]]) -> float:
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


_BEFORE, _AFTER = 120, 80  # characters around a fork
_END = -1  # the "next token" of a completion that ends where others continue


@dataclass
class Group:
    """Completions with one text: a distinct completion with all its traces (digest -> how often)."""

    tokens: tuple[int, ...]
    count: int = 0
    traces: Counter[str] = field(default_factory=Counter)

    def token(self, index: int) -> int:
        """The token there; `_END` where the completion has ended."""
        return self.tokens[index] if index < len(self.tokens) else _END


class Forks(NamedTuple):
    """The first fork of distinct completions; the positions of each completion's own forks; see `_spread`."""

    first: Fork | None
    positions: list[tuple[int, ...]]
    spread: float


def forks_of(
    groups: Sequence[Group], traces: Mapping[str, Trace], pieces: Mapping[int, str], prompt: str, *, drawn: bool = False
) -> Forks:
    """The forks of these distinct completions, the most common first. If tokens were `drawn`, branches get no margins,
    because these decide nothing."""
    ranks = sorted(range(len(groups)), key=lambda rank: groups[rank].tokens)  # a text before its continuations
    ordered = [groups[rank] for rank in ranks]
    spans = spans_of([g.tokens for g in ordered])
    positions: list[tuple[int, ...]] = [()] * len(groups)
    for span in spans:
        if not span.ways:
            positions[ranks[span.first]] = span.forks

    def text_of(tokens: Sequence[int]) -> str:
        return "".join(pieces.get(t, "") for t in tokens)

    def branch(way: Span) -> Branch:
        index, members, margins = way.start, ordered[way.first : way.last], list[float]()
        for member in members:
            for digest, count in () if drawn else member.traces.items():
                here = traces[digest].margin_array[index : index + 1]
                margins += [float(margin) for margin in here if math.isfinite(margin)] * count
        most_common = groups[min(ranks[way.first : way.last])]
        token, count = most_common.token(index), sum(member.count for member in members)
        # a token may have no text of its own, but hardly four in a row
        following = text_of(most_common.tokens[index + 1 : index + 1 + 4 * _AFTER])[:_AFTER]
        middle = statistics.median(margins) if margins else None
        return Branch(token, pieces.get(token, ""), count, following, min(margins, default=None), middle)

    first = None
    if len(groups) > 1:  # where the root of the tree ends
        before = prompt + text_of(groups[0].tokens[max(0, spans[0].end - 4 * _BEFORE) : spans[0].end])
        branches = sorted(map(branch, spans[0].ways), key=lambda b: (-b.count, b.token_id))
        first = Fork(spans[0].end, before[-_BEFORE:], tuple(branches))
    logprobs = [[traces[digest].logprob_array for digest in g.traces] for g in ordered]
    return Forks(first, positions, _spread(spans, logprobs))


class Member(NamedTuple):
    """A distinct trace: how often it occurred, its forks, and the tokens that it shares with the most common text."""

    trace: Trace
    times: int
    forks: tuple[int, ...]
    shared: int


class RoundTally(NamedTuple):
    """The completions of a round: those unlike the most common, tokens compared until they are, and all."""

    differ: int
    tokens: int
    n: int


def flip_margins(members: Sequence[Member]) -> FlipMargins | None:
    """Margins where completions diverge, compared with those elsewhere; None where either is not recorded."""
    at, elsewhere, ties = [_NO_FLOATS], [_NO_FLOATS], 0
    for m in members:
        margins = m.trace.margin_array
        finite, forked = np.isfinite(margins), np.zeros(len(margins), dtype=bool)
        forked[[index for index in m.forks if index < len(margins)]] = True
        at.append(margins[forked & finite])
        elsewhere.append(margins[~forked & finite])
        ties += m.times * int((at[-1] == 0.0).sum())
    flips, others = np.concatenate(at), np.concatenate(elsewhere)
    if not len(flips) or not len(others):
        return None
    middles, as_close = (float(np.median(flips)), float(np.median(others))), float((others <= flips.max()).mean())
    return FlipMargins(len(flips), middles[0], float(flips.max()), ties, len(others), middles[1], as_close)


def token_flips(
    length: int, tallies: Mapping[int, RoundTally], held: Sequence[int], confidence: float
) -> TokenFlips | None:
    """How often a token flips; None where nothing was compared. `length` is that of the most common completion; `held`
    are the rounds that were compared with an earlier one.

    The interval is of a completion's probability to diverge over the tokens it is expected to be compared for. Both
    have intervals by round, as a share of completions and of the most tokens that one may take, each at half of the
    error; the quotients of their ends hold with both."""
    flips = sum(tally.differ for tally in tallies.values())
    # the first most common completion is the reference
    tokens = sum(tally.tokens for tally in tallies.values()) - length
    if tokens <= 0:
        return None
    interval = None
    if held:
        rounds, most, each = [tallies[r] for r in held], length + 1, 1.0 - (1.0 - confidence) / 2
        low, high = round_interval([r.differ for r in rounds], [r.n for r in rounds], each)
        short, long = round_interval([r.tokens for r in rounds], [r.n * most for r in rounds], each)
        upper = min(1.0, high / (short * most)) if short else 1.0  # of empty completions nothing
        interval = min(low / (long * most), flips / tokens), max(upper, flips / tokens)
    return TokenFlips(flips, tokens, interval, len(held))


def flip_draws(members: Sequence[Member], first: int) -> FlipDraws | None:
    """How near the draws were at the first fork, at index `first`; None where they are not known."""

    drawn = [m for m in members if m.trace.border]
    there = [m.trace for m in drawn if first in m.forks]
    if not there:
        return None
    borders, cuts, nuclei = (
        [value for t in there if math.isfinite(value := float(np.frombuffer(getattr(t, name), "<f4")[first]))]
        for name in ("border", "cut", "nucleus")
    )
    rest = [np.delete(np.frombuffer(m.trace.border, "<f4"), [first] if first in m.forks else []) for m in drawn]
    elsewhere = np.concatenate(rest)
    beyond, nucleus = float(np.median(elsewhere)) if len(elsewhere) else None, min(nuclei, default=None)
    border = float(np.median(borders))
    return FlipDraws(border, beyond, min(borders), min(cuts, default=None), cuts.count(0.0), nucleus)


def k3_of(common: Trace, others: Sequence[Member]) -> float | None:
    """Mean K3 of the other traces against the most common one, over the tokens that each shares with it from the start.
    None where no other trace shares a token, or logprobs are missing."""
    total, tokens = 0.0, 0
    for trace, count, _, shared in others:
        if not trace.logprobs or not common.logprobs:
            continue
        here, there = common.logprob_array[:shared], trace.logprob_array[:shared]
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
        change = np.zeros(max((first + steps for first, steps, _ in parts), default=0) + 1, dtype=np.int64)
        for first, steps, tokens in parts:
            change[first] += tokens
            change[first + steps] -= tokens
        totals[number] = np.cumsum(change)
    return totals


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


# All prompts of a run together. Prompts are the unit of every comparison between implementations, because a set is a
# sample of prompts.


@dataclass(frozen=True)
class PromptSet:
    """The prompts of one implementation."""

    impl: str
    differing_traces: int  # prompts with two or more logprob traces
    differing_texts: int  # prompts with two or more completions
    share: tuple[float, float]  # 95% interval of the share of prompts whose traces diverge, under such loads
    # of all prompts together
    n: int
    failed: int
    rounds: int
    # one-sided 95% bounds where no trace diverged; None where one did, or too little was compared. The second holds
    # only if completions are independent.
    bound_rounds: float | None
    bound_completions: float | None
    summaries: Mapping[int, SampleSummary]
    unit: str = "prompt"  # what a prompt is called: a prompt with its seed is a subject of its own

    @property
    def prompts(self) -> int:
        """How many have completions."""
        return len(self.summaries)


class Comparison(NamedTuple):
    """Two implementations on the prompts that both completed."""

    prompts: int
    only_first: int  # prompts whose completions diverge under the first only
    only_second: int  # and under the second only
    p: float  # two-sided, over prompts, of these counts: McNemar's


def prompt_sets(summaries: Sequence[SampleSummary], rounds: Mapping[str, int], unit: str = "prompt") -> list[PromptSet]:
    """One for each implementation, in the order of the summaries. `rounds` counts rounds with a completion that
    succeeded; the bound by round counts only those in which one was compared with an earlier one of its prompt."""
    sets = []
    for impl in dict.fromkeys(s.impl for s in summaries):
        members = [s for s in summaries if s.impl == impl]
        held = {number for s in members for number in s.held_rounds}  # compared with another
        n, diverged = sum(s.n for s in members), sum(s.distinct_traces > 1 for s in members)
        comparisons = n - len(members)  # a prompt's first completion is the reference
        clean = not diverged and comparisons > 0
        sets.append(
            PromptSet(
                impl=impl,
                n=n,
                failed=sum(s.failed for s in members),
                rounds=rounds.get(impl, 0),
                unit=unit,
                differing_traces=diverged,
                differing_texts=sum(s.distinct_completions > 1 for s in members),
                share=confidence_sequence(diverged, len(members)),
                summaries={s.prompt: s for s in members},
                bound_rounds=one_sided_bound(len(held)) if clean and held else None,
                bound_completions=one_sided_bound(comparisons) if clean else None,
            )
        )
    return sets


def compared(first: PromptSet, second: PromptSet) -> Comparison:
    """Compare two implementations on the prompts that both have."""
    both = [(first.summaries[p], second.summaries[p]) for p in first.summaries if p in second.summaries]
    only_first = sum(a.distinct_completions > 1 >= b.distinct_completions for a, b in both)
    only_second = sum(b.distinct_completions > 1 >= a.distinct_completions for a, b in both)
    return Comparison(len(both), only_first, only_second, mcnemar(only_first, only_second))


def summarize_all(run: Run, traces: Mapping[str, Trace], pieces: Mapping[int, str]) -> list[SampleSummary]:
    """A summary of each prompt under each implementation, if it completed anything, in the order of the file.
    `traces` (by digest) and `pieces`: see `nondet.core.traces.read_traces`. Raises KeyError: a trace is missing."""
    subjects: dict[tuple[str, int], list[Completion]] = defaultdict(list)
    for c in run.completions:
        subjects[c.impl, c.prompt].append(c)
    rates = {impl: statistics.median(mine.values()) for impl, mine in _rates(run).items()}
    batches = {impl: batch_totals(run, impl) for impl in dict.fromkeys(impl for impl, _ in subjects)}
    return [
        _summarize(run, traces, pieces, mine, batches[impl], rates.get(impl, 0.0))
        for (impl, _), mine in subjects.items()
        if any(c.status == "ok" for c in mine)
    ]


def _summarize(
    run: Run,
    traces: Mapping[str, Trace],
    pieces: Mapping[int, str],
    completions: Sequence[Completion],
    batches: Mapping[int, npt.NDArray[np.int64]],
    rate: float,
) -> SampleSummary:
    """Of all completions of one prompt under one implementation; at least one succeeded."""
    impl, prompt = completions[0].impl, completions[0].prompt
    good = [c for c in completions if c.status == "ok"]
    rounds: dict[int, Counter[tuple[int, ...]]] = {}
    distinct: dict[tuple[int, ...], Group] = {}
    for c in good:
        tokens = tuple(traces[c.trace].token_ids)
        rounds.setdefault(c.round, Counter())[tokens] += 1
        group = distinct.setdefault(tokens, Group(tokens))
        group.count += 1
        group.traces[c.trace] += 1
    seen = _first_seen(rounds)
    groups = sorted(distinct.values(), key=lambda g: (-g.count, seen[g.tokens]))
    n, top, text = len(good), groups[0], run.header.plan["prompts"][prompt]["text"]
    lengths = {g.tokens: shared_length(g.tokens, top.tokens) for g in groups}
    # a draw does not depend on the margin, but on its distance from a boundary
    drawn = bool(run.header.plan.get("sampling"))
    first, positions, spread = forks_of(groups, traces, pieces, text, drawn=drawn)
    members = [  # every distinct trace of a completion has the same forks
        Member(traces[digest], count, mine, lengths[g.tokens])
        for g, mine in zip(groups, positions, strict=True)
        for digest, count in g.traces.items()
    ]
    common = traces[top.traces.most_common(1)[0][0]]
    others = [m for m in members if m.trace.digest != common.digest]
    # completions of one round share batches, so what changes one changes its neighbours. Rounds are therefore compared
    # with the round in which the most common completion first occurred, which itself does not count
    begin = min(r for r in rounds if top.tokens in rounds[r])
    held = [r for r in sorted(rounds) if r > begin]
    tallies = {}
    for r, counts in rounds.items():
        compared_tokens = sum((lengths[t] + (t != top.tokens)) * count for t, count in counts.items())
        tallies[r] = RoundTally(counts.total() - counts[top.tokens], compared_tokens, counts.total())
    confidence = 1.0 - (1.0 - CONFIDENCE) / (seen[top.tokens] * (seen[top.tokens] + 1))
    # completions that agree with exactly the first i tokens of the most common
    agree = np.bincount([lengths[g.tokens] for g in groups], [g.count for g in groups], len(top.tokens) + 1)
    sizes = {size for c in good for at, steps, _ in c.schedule for size in batches[c.round][at : at + steps].tolist()}
    listed = []
    for g in groups:
        words, own = tuple(pieces.get(t, "") for t in g.tokens), traces[next(iter(g.traces))].text
        listed.append(DistinctCompletion(g.count, g.tokens, words, own, None if g is top else lengths[g.tokens]))
    return SampleSummary(
        impl=impl,
        prompt=prompt,
        prompt_text=text,
        n=n,
        failed=len(completions) - n,
        rounds=len(rounds),
        distinct_completions=len(groups),
        distinct_traces=len(members),
        completions=tuple(listed),
        first_fork=first,
        rate=_rate_interval(n - top.count, n, [tallies[r] for r in held], confidence),
        confidence=confidence,
        survival=tuple((np.cumsum(agree[::-1])[::-1] / n).tolist()),
        has_logprobs=any(m.trace.logprobs for m in members),
        logprob_spread=spread,
        batch_min=min(c.batch_min for c in good),
        batch_max=max(c.batch_max for c in good),
        distinct_batches=len(sizes),
        tokens_per_second=rate,
        held_rounds={r: tuple(sorted(lengths[tokens] for tokens in rounds[r].elements())) for r in held},
        margins=flip_margins(members) if first and not drawn else None,
        draws=flip_draws(members, first.index) if first else None,
        flips=None if drawn else token_flips(len(top.tokens), tallies, held, confidence),
        k3=k3_of(common, others),
    )


def _first_seen(rounds: Mapping[int, Counter[tuple[int, ...]]]) -> dict[tuple[int, ...], int]:
    """Tokens -> their number, from 1, by round, then count, then tokens, so that the file's order does not matter."""
    seen: dict[tuple[int, ...], int] = {}
    for _, counts in sorted(rounds.items()):
        for tokens in sorted(sorted(counts), key=counts.__getitem__, reverse=True):
            seen.setdefault(tokens, len(seen) + 1)
    return seen


def _rate_interval(k: int, n: int, held: Sequence[RoundTally], confidence: float) -> Interval:
    """The share that differs from the most common completion."""
    if k == 0:
        # if the most common has the probability p, all n are equal with a probability of at most p^(n-1): the first is
        # the reference, so that n of them make n - 1 comparisons
        return Interval(k, n, 0.0, one_sided_bound(n - 1) if n > 1 else 1.0, ONE_SIDED, len(held))
    if not held:
        return Interval(k, n, 0.0, 1.0, TOO_FEW)
    low, high = round_interval([r.differ for r in held], [r.n for r in held], confidence)
    return Interval(k, n, min(low, k / n), max(high, k / n), ANYTIME, len(held))
