"""All prompts of a run together: how many part, when, and whether one implementation parts more than another.

Prompts are what a set samples, so prompts are the unit of every comparison between implementations; completions of one
prompt are held against each other and never against another prompt's.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

from nondet.core.statistics import (
    LogRank,
    SurvivalStep,
    confidence_sequence,
    kaplan_meier,
    log_rank,
    mcnemar,
    one_sided_bound,
    paired_permutation,
)
from nondet.sampling.summary import SampleSummary

__all__ = ["Comparison", "Overall", "compared", "overall"]


@dataclass(frozen=True)
class Overall:
    """The prompts of one implementation.

    Attributes:
        parted_traces, parted_tokens: Prompts with two or more logprob traces, and completions.
        share_low, share_high: 95% interval of the share of prompts whose traces part, under such loads.
        n, failed: Completions of all prompts.
        rounds: Rounds that they ran in.
        bound_rounds, bound_completions: One-sided 95% bounds where no trace parted; None where one did, or too little
            was compared. The second holds only if completions are independent.
        disagreement: Mean over prompts of the share of pairs that differ; new: of the chance of a new completion.
        curve: Kaplan-Meier of the first token that differs from the prompt's commonest completion; the end of an equal
            text is censoring. Intervals by round, as `effect`.
        effect: Completions that are worth one independent trial: all, over the rounds that were held against another,
            of the largest of them. Infinite where there is none.
        summaries: The prompts' own, by prompt.
        unit: What a prompt is called: a prompt with its seed is a subject of its own.
    """

    impl: str
    parted_traces: int
    parted_tokens: int
    share_low: float
    share_high: float
    n: int
    failed: int
    rounds: int
    bound_rounds: float | None
    bound_completions: float | None
    disagreement: float | None
    new: float | None
    curve: tuple[SurvivalStep, ...]
    effect: float
    summaries: Mapping[int, SampleSummary]
    unit: str = "prompt"

    @property
    def prompts(self) -> int:
        """How many have completions."""
        return len(self.summaries)


@dataclass(frozen=True)
class Comparison:
    """Two implementations on the prompts that both completed.

    Attributes:
        prompts: How many.
        only_first, only_second: Prompts whose completions part under the first alone, and under the second alone.
        mcnemar, permutation: Two-sided p over prompts: of these counts, and of the shares of pairs that differ.
        log_rank: Of when completions first part, stratified by prompt, divided by the larger effect.
    """

    first: str
    second: str
    unit: str
    prompts: int
    only_first: int
    only_second: int
    mcnemar: float
    permutation: float
    log_rank: LogRank


def overall(summaries: Sequence[SampleSummary], rounds: Mapping[str, int], unit: str = "prompt") -> list[Overall]:
    """One for each implementation, in the order of the summaries.

    Args:
        rounds: Implementation -> rounds with a completion that succeeded. The bound by round counts those alone in
            which a completion was held against an earlier one of its prompt.
    """
    by_impl: dict[str, dict[int, SampleSummary]] = {}
    for s in summaries:
        by_impl.setdefault(s.impl, {})[s.prompt] = s
    return [_overall(impl, members, rounds.get(impl, 0), unit) for impl, members in by_impl.items()]


def _overall(impl: str, members: Mapping[int, SampleSummary], rounds: int, unit: str) -> Overall:
    parted = sum(s.distinct_traces > 1 for s in members.values())
    n = sum(s.n for s in members.values())
    comparisons = sum(max(0, s.n - 1) for s in members.values())  # a prompt's first is what its others are held against
    clean = not parted and comparisons > 0
    pairs = [s.disagreement for s in members.values() if s.disagreement is not None]
    news = [s.new_share for s in members.values() if s.new_share is not None]
    low, high = confidence_sequence(parted, len(members))
    times, ends = [], []
    for s in members.values():
        t, e = _times(s)
        times += t
        ends += e
    held: Counter[int] = Counter()
    for s in members.values():
        held.update({number: len(lengths) for number, lengths in s.held_rounds.items()})
    effect = n * max(held.values()) / held.total() if held else math.inf
    return Overall(
        impl=impl,
        parted_traces=parted,
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


def compared(first: Overall, second: Overall) -> Comparison:
    """The first against the second, on the prompts that both have."""
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
    """For each completion the tokens that it shares with the commonest, and whether it parts there."""
    times, ends = [], []
    for c in summary.completions:
        parts = c.parts_at is not None
        times += [c.parts_at if c.parts_at is not None else len(c.token_ids)] * c.count
        ends += [parts] * c.count
    return times, ends
