"""What is known of the completions of one prompt under one implementation: plain data.

Made by `nondet.sampling.analysis`, drawn by `nondet.reports`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from nondet.core.statistics import CONFIDENCE, round_interval

__all__ = [
    "ANYTIME",
    "COUNTS",
    "ONE_SIDED",
    "TOO_FEW",
    "Branch",
    "DistinctCompletion",
    "FlipDraws",
    "FlipMargins",
    "Fork",
    "Interval",
    "SampleSummary",
    "TreeNode",
]

ANYTIME, ONE_SIDED, TOO_FEW = "anytime-valid", "0 of n, one-sided", "no interval: too few rounds"
# Of completions that are no sample of one thing, as those of a server's arms together: counts, and no interval.
COUNTS = "counts alone"


@dataclass(frozen=True)
class Interval:
    """A rate with its 95% interval: k of n.

    Attributes:
        method: `ANYTIME` for two-sided ones, see `nondet.core.statistics.round_interval`; `ONE_SIDED` where nothing was
            seen; `TOO_FEW` where no round was held against another; `COUNTS` of what is no sample of one thing.
        rounds: Rounds that were held against an earlier one: what the interval needs to be independent, and no more.
    """

    k: int
    n: int
    low: float
    high: float
    method: str
    rounds: int = 0

    @property
    def two_sided(self) -> bool:
        """Whether both ends are bounds; else nothing was seen, and `high` alone is one."""
        return self.method == ANYTIME


@dataclass(frozen=True)
class Branch:
    """One way on at a fork.

    Attributes:
        text: The token's own text.
        continuation: The text that follows on this branch (about 80 characters of its commonest completion).
        margin_min, margin_median: top-1 minus top-2 logit at the fork over the completions of this branch; None if not
            recorded.
    """

    token_id: int
    text: str
    count: int
    continuation: str
    margin_min: float | None = None
    margin_median: float | None = None


@dataclass(frozen=True)
class Fork:
    """A place where completions with one history part.

    Attributes:
        index: Index of the first token that differs, counted from 0 over generated tokens.
        before: Text before it (about 120 characters).
        branches: By falling count.
    """

    index: int
    before: str
    branches: tuple[Branch, ...]


@dataclass(frozen=True)
class DistinctCompletion:
    """One distinct completion.

    Attributes:
        parts_at: Index of the first token that differs from the commonest completion; None for the commonest itself.
        pieces: Text of each token.
    """

    digest: str
    count: int
    token_ids: tuple[int, ...]
    pieces: tuple[str, ...]
    text: str
    parts_at: int | None


@dataclass
class TreeNode:
    """A run of tokens shared by `count` completions, from `start`; the children begin where they part.

    A node without children ends its completions. Together the leaves' counts sum to n.
    """

    start: int
    length: int
    count: int
    text: str
    children: list[TreeNode] = field(default_factory=list)


@dataclass(frozen=True)
class FlipMargins:
    """Top-1 minus top-2 logit where completions part, against the places where they go on together.

    Attributes:
        flips: Margins at forks, one for each distinct trace and fork that it takes part in.
        ties: Completions whose margin at a fork is exactly 0.
        elsewhere: Margins at all other places of all distinct traces.
        as_close: Share of these that are no larger than the largest at a fork: how many races as close were not lost.
        apart: Chance that a margin elsewhere exceeds one at a fork; 0.5 if margins say nothing.
    """

    flips: int
    median: float
    largest: float
    ties: int
    elsewhere: int
    elsewhere_median: float
    as_close: float
    apart: float


@dataclass(frozen=True)
class FlipDraws:
    """How near the draws were to another token where completions first part; see `nondet.sampling.sampler.Draw`.

    Attributes:
        border, border_elsewhere: Median distance of the draw from a border between tokens, there and at all other
            places of all distinct traces.
        nearest: The smallest distance there.
        cut, cut_ties: The smallest gap at the border of top-k there, in logits, and how many traces are exactly tied;
            None without top-k.
        nucleus: The smallest distance of the kept mass from top_p there; None without.
    """

    border: float
    border_elsewhere: float | None
    nearest: float
    cut: float | None
    cut_ties: int
    nucleus: float | None


@dataclass(frozen=True)
class SampleSummary:
    """All of it.

    Attributes:
        failed: Requests that ended in an error; they are in no other figure.
        agree: Share of the commonest completion.
        rate: Share of completions that differ from the commonest; where none does, the one-sided bound
            1 - 0.05^(1/(n-1)): n completions make n - 1 comparisons.
        survival: survival[i] is the share of completions whose first i tokens are those of the commonest one.
        batch_min, batch_max: Query tokens in the steps that the completions took part in: what "the batch" really was.
        distinct_batches: Number of different batch sizes met.
        tokens_per_second: See `nondet.sampling.speed.median_rate`.
        disagreement: Share of pairs of completions that differ, which does not grow with n; None of fewer than two.
        new_share: Good's estimate of the chance that the next completion is a new one: those seen once, over n.
        has_logprobs: Whether any trace has logprobs; a server may give none, and then a trace is its tokens.
        logprob_spread: Largest difference of the logprob of one token with one history between traces; 0.0 if all
            traces are equal.
        rounds: Rounds that the completions ran in.
        held_rounds: Those after the one in which the commonest first came, which is what they are held against: for
            each completion of the round, in rising order, the tokens that it shares with the commonest.
        confidence: That of the intervals, which pays for the choice of the commonest by the same data: the j-th text to
            come has 0.05 / (j (j + 1)), over all texts together 0.05.
        margins: None where nothing parted, or no margins were recorded.
        draws: None where nothing parted, or the draws are not known.
        k3: Mean K3 of the other traces against the commonest one, over the tokens shared; None where all are equal.
    """

    impl: str
    prompt: int
    prompt_text: str
    n: int
    failed: int
    distinct_completions: int
    distinct_traces: int
    agree: Interval
    rate: Interval
    first_fork: Fork | None
    forks: tuple[Fork, ...]
    completions: tuple[DistinctCompletion, ...]
    tree: TreeNode
    survival: tuple[float, ...]
    has_logprobs: bool
    logprob_spread: float
    batch_min: int
    batch_max: int
    distinct_batches: int
    tokens_per_second: float
    disagreement: float | None = None
    new_share: float | None = None
    rounds: int = 0
    held_rounds: Mapping[int, tuple[int, ...]] = field(default_factory=dict)
    confidence: float = CONFIDENCE
    margins: FlipMargins | None = None
    draws: FlipDraws | None = None
    k3: float | None = None

    def band(self, index: int) -> tuple[float, float]:
        """The interval of survival[index]; 0 to 1 where no round was held against another."""
        held = list(self.held_rounds.values())
        if not held:
            return 0.0, 1.0
        agreeing = [sum(shared >= index for shared in lengths) for lengths in held]
        return round_interval(agreeing, [len(lengths) for lengths in held], self.confidence)
