"""What the completions of one prompt show: how many differ, where they part, how close the race was. Pure figures.

Works on a run file and its side file alone: no torch, no model, no tokenizer. Completions that failed are counted and
are in no other figure.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt

from nondet.core.records import Completion, Run
from nondet.core.statistics import CONFIDENCE, new_share, one_sided_bound, pair_disagreement, round_interval
from nondet.core.traces import Trace, tokens_digest
from nondet.sampling.batch_sizes import batch_sizes, batch_totals
from nondet.sampling.closeness import flip_draws, flip_margins, k3_of
from nondet.sampling.forks import Group, grow
from nondet.sampling.prefixes import shared_length
from nondet.sampling.speed import median_rate
from nondet.sampling.summary import (
    ANYTIME,
    ONE_SIDED,
    TOO_FEW,
    DistinctCompletion,
    Interval,
    SampleSummary,
)

__all__ = ["prompt_text", "summarize", "summarize_all"]


def summarize_all(run: Run, traces: Mapping[str, Trace], pieces: Mapping[int, str]) -> list[SampleSummary]:
    """`summarize` for each implementation and prompt that completed anything, in the order of the file; in one pass."""
    subjects: dict[tuple[str, int], list[Completion]] = defaultdict(list)
    for c in run.completions:
        subjects[c.impl, c.prompt].append(c)
    batches = {impl: batch_totals(run, impl) for impl in dict.fromkeys(impl for impl, _ in subjects)}
    return [
        _summary(run, traces, pieces, mine, batches[impl])
        for (impl, _), mine in subjects.items()
        if any(c.status == "ok" for c in mine)
    ]


def summarize(
    run: Run, traces: Mapping[str, Trace], pieces: Mapping[int, str], impl: str, prompt: int
) -> SampleSummary:
    """Everything about the completions of `prompt` under `impl`.

    Args:
        traces: By digest, as `nondet.core.traces.read_traces` gives them; every completion's must be there.
        pieces: Text of single tokens, from the same place.

    Raises:
        KeyError: a completion's trace is missing: the two files are not of one run.
    """
    asked = [c for c in run.completions if c.impl == impl and c.prompt == prompt]
    return _summary(run, traces, pieces, asked, batch_totals(run, impl), impl=impl, prompt=prompt)


def _summary(
    run: Run,
    traces: Mapping[str, Trace],
    pieces: Mapping[int, str],
    asked: Sequence[Completion],
    batches: Mapping[int, npt.NDArray[np.int64]],
    impl: str = "",
    prompt: int = 0,
) -> SampleSummary:
    """Of the completions asked for; `impl` and `prompt` are needed where there are none."""
    if asked:
        impl, prompt = asked[0].impl, asked[0].prompt
    good = [c for c in asked if c.status == "ok"]
    texts = _texts_by_round(good, traces)
    # the texts as they came, those of one round by their count; ties by their tokens: the file's order does not matter
    came: dict[tuple[int, ...], int] = {}
    for _, counts in sorted(texts.items()):
        for tokens in sorted(sorted(counts), key=counts.__getitem__, reverse=True):
            came.setdefault(tokens, len(came) + 1)
    groups = _groups(good, traces, came)
    n = len(good)
    text = prompt_text(run, prompt)
    # of drawn tokens the margin says little: what counts is how near the draw was to a border
    drawn = bool(run.header.plan.get("sampling"))
    grown = grow(groups, traces, pieces, text, margins=not drawn)
    forks = grown.forks
    top = groups[0] if groups else Group(())
    # completions of one round ride in one batch: what sets one off sets off its neighbours. So rounds are held against
    # the round in which the commonest first came, and its own says nothing of rounds
    begin = min((r for r in texts if top.tokens in texts[r]), default=0)
    held = [r for r in sorted(texts) if r > begin]
    hits, sizes = [texts[r].total() - texts[r][top.tokens] for r in held], [texts[r].total() for r in held]
    place = came.get(top.tokens, 1)
    confidence = 1.0 - (1.0 - CONFIDENCE) / (place * (place + 1))
    low, high, method = 0.0, 1.0, TOO_FEW
    if top.count == n:
        # if the commonest has the chance p, all n are equal with a chance of at most p^(n-1): the first one is what
        # the others are compared with, so that n of them make n - 1 comparisons
        high, method = one_sided_bound(n - 1) if n > 1 else 1.0, ONE_SIDED
    elif held:
        share = (n - top.count) / n
        low, high = round_interval(hits, sizes, confidence)
        low, high, method = min(low, share), max(high, share), ANYTIME
    rate = Interval(n - top.count, n, low, high, method, len(held))
    # every distinct trace of a completion took the same way at the same forks
    members = [
        (traces[d], count, places)
        for g, places in zip(groups, grown.places, strict=True)
        for d, count in g.traces.items()
    ]
    reference = traces[top.traces.most_common(1)[0][0]] if n else None
    shared = [shared_length(g.ids, top.ids) for g in groups]
    lengths = {g.tokens: s for g, s in zip(groups, shared, strict=True)}
    relatives = {d: (traces[d], c, s) for g, s in zip(groups, shared, strict=True) for d, c in g.traces.items()}
    return SampleSummary(
        impl=impl,
        prompt=prompt,
        prompt_text=text,
        n=n,
        failed=len(asked) - n,
        distinct_completions=len(groups),
        distinct_traces=len({c.trace for c in good}),
        agree=Interval(top.count, n, 1.0 - high, 1.0 - low, method, len(held)),
        rate=rate,
        disagreement=pair_disagreement([g.count for g in groups]) if n > 1 else None,
        new_share=new_share([g.count for g in groups]) if n else None,
        first_fork=forks[0] if forks else None,
        forks=forks,
        completions=tuple(
            _distinct(g, None if g is top else s, traces, pieces) for g, s in zip(groups, shared, strict=True)
        ),
        tree=grown.tree,
        survival=_survival(groups, shared, n),
        has_logprobs=any(traces[d].logprobs for g in groups for d in g.traces),
        logprob_spread=grown.spread,
        batch_min=min((c.batch_min for c in good), default=0),
        batch_max=max((c.batch_max for c in good), default=0),
        distinct_batches=len(batch_sizes(batches, good)),
        tokens_per_second=median_rate(r for r in run.rounds if r.impl == impl),
        rounds=len(texts),
        held_rounds={
            r: tuple(sorted(length for t, k in texts[r].items() for length in [lengths[t]] * k)) for r in held
        },
        confidence=confidence,
        margins=flip_margins(members) if forks and not drawn else None,
        draws=flip_draws(members, forks[0].index) if forks else None,
        k3=k3_of(reference, relatives) if reference is not None else None,
    )


def prompt_text(run: Run, prompt: int) -> str:
    """The prompt of that index, from the run's header."""
    text: str = run.header.plan["prompts"][prompt]["text"]
    return text


def _texts_by_round(good: Sequence[Completion], traces: Mapping[str, Trace]) -> dict[int, Counter[tuple[int, ...]]]:
    """Round -> tokens -> how many completions."""
    texts: dict[int, Counter[tuple[int, ...]]] = {}
    for completion in good:
        texts.setdefault(completion.round, Counter())[tuple(traces[completion.trace].token_ids)] += 1
    return texts


def _groups(
    good: Sequence[Completion], traces: Mapping[str, Trace], came: Mapping[tuple[int, ...], int]
) -> list[Group]:
    """Distinct completions, the commonest first; ties as they came."""
    found: dict[tuple[int, ...], Group] = {}
    for completion in good:
        tokens = tuple(traces[completion.trace].token_ids)
        group = found.setdefault(tokens, Group(tokens))
        group.count += 1
        group.traces[completion.trace] += 1
    return sorted(found.values(), key=lambda g: (-g.count, came[g.tokens]))


def _distinct(
    group: Group, parts_at: int | None, traces: Mapping[str, Trace], pieces: Mapping[int, str]
) -> DistinctCompletion:
    any_trace = traces[next(iter(group.traces))]
    return DistinctCompletion(
        digest=tokens_digest(list(group.tokens)),
        count=group.count,
        token_ids=group.tokens,
        pieces=tuple(pieces.get(t, "") for t in group.tokens),
        text=any_trace.text,
        parts_at=parts_at,
    )


def _survival(groups: Sequence[Group], shared: Sequence[int], n: int) -> tuple[float, ...]:
    if not groups:
        return ()
    top = groups[0]
    parting = np.zeros(len(top.tokens) + 1, dtype=np.int64)  # completions that agree with the first i tokens, no more
    for group, length in zip(groups, shared, strict=True):
        parting[length] += group.count
    return tuple((np.cumsum(parting[::-1])[::-1] / n).tolist())
