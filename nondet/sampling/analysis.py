"""What the completions of one prompt show: how many differ, where they part, how close the race was. Pure figures.

Works on a run file and its side file alone: no torch, no model, no tokenizer. Completions that failed are counted and
are in no other figure.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from statistics import median

import numpy as np
import numpy.typing as npt

from nondet.result import Completion, Run
from nondet.sampling.batch_sizes import batch_sizes, batch_totals
from nondet.sampling.closeness import Ids, flip_draws, flip_margins, k3_of, logprob_spread, shared_length
from nondet.sampling.speed import median_rate
from nondet.sampling.summary import (
    ANYTIME,
    ONE_SIDED,
    Branch,
    DistinctCompletion,
    Fork,
    Interval,
    SampleSummary,
    TreeNode,
)
from nondet.statistics import (
    Clustered,
    clustered_interval,
    new_share,
    one_sided_bound,
    pair_disagreement,
    rounds_compared,
)
from nondet.traces import Trace, tokens_digest

__all__ = ["prompt_text", "summarize", "summarize_all"]

_BEFORE, _AFTER = 120, 80
# The "next token" of a completion that ends where others go on.
_END = -1


@dataclass
class _Group:
    """Completions with one text: a distinct completion with all its traces."""

    tokens: tuple[int, ...]
    count: int = 0
    traces: Counter[str] = field(default_factory=Counter)

    @cached_property
    def ids(self) -> Ids:
        """The tokens as an array."""
        return np.asarray(self.tokens, dtype=np.int32)

    def token(self, index: int) -> int:
        return self.tokens[index] if index < len(self.tokens) else _END


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
        traces: By digest, as `nondet.traces.read_traces` gives them; every completion's must be there.
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
    groups = _groups(good, traces)
    n = len(good)
    text = prompt_text(run, prompt)
    tree, forks, places = _grow(groups, traces, pieces, text)
    top = groups[0] if groups else _Group(())
    # completions of one round ride in one batch: what sets one off sets off its neighbours
    sizes = Counter(c.round for c in good)
    hits = Counter(c.round for c in good if tuple(traces[c.trace].token_ids) != top.tokens)
    share = clustered_interval([hits[r] for r in sizes], list(sizes.values())) if n else Clustered(0.0, 1.0, 0.0, 1.0)
    if top.count < n:
        rate = Interval(n - top.count, n, share.low, share.high, ANYTIME, share.effect)
    else:
        # if the commonest has the chance p, all n are equal with a chance of at most p^(n-1): the first one is what
        # the others are compared with, so that n of them make n - 1 comparisons
        rate = Interval(
            0, n, 0.0, one_sided_bound(n - 1) if n > 1 else 1.0, ONE_SIDED, rounds=rounds_compared(n, sizes)
        )
    # every distinct trace of a completion took the same way at the same forks
    members = [(traces[d], count, places.get(id(g), [])) for g in groups for d, count in g.traces.items()]
    reference = traces[top.traces.most_common(1)[0][0]] if n else None
    return SampleSummary(
        impl=impl,
        prompt=prompt,
        prompt_text=text,
        n=n,
        failed=len(asked) - n,
        distinct_completions=len(groups),
        distinct_traces=len({c.trace for c in good}),
        agree=Interval(top.count, n, 1.0 - share.high, 1.0 - share.low, ANYTIME, share.effect),
        rate=rate,
        disagreement=pair_disagreement([g.count for g in groups]) if n > 1 else None,
        new_share=new_share([g.count for g in groups]) if n else None,
        first_fork=forks[0] if forks else None,
        forks=tuple(forks),
        completions=tuple(_distinct(g, top, traces, pieces) for g in groups),
        tree=tree,
        survival=_survival(groups, n),
        has_logprobs=any(traces[d].logprobs for g in groups for d in g.traces),
        logprob_spread=logprob_spread([traces[d] for g in groups for d in g.traces]),
        batch_min=min((c.batch_min for c in good), default=0),
        batch_max=max((c.batch_max for c in good), default=0),
        distinct_batches=len(batch_sizes(batches, good)),
        tokens_per_second=median_rate(r for r in run.rounds if r.impl == impl),
        rounds=len(sizes),
        # the first completion is what others are held against: its round compares nothing unless it has another
        held_rounds=frozenset(r for r, size in sizes.items() if r != min(sizes) or size > 1),
        # of drawn tokens the margin says little: what counts is how near the draw was to a border
        margins=flip_margins(members) if forks and not any(t.seed is not None for t, _, _ in members) else None,
        draws=flip_draws(members, forks[0].index) if forks else None,
        k3=k3_of(reference, {t.digest: (t, count) for t, count, _ in members}) if reference is not None else None,
    )


def prompt_text(run: Run, prompt: int) -> str:
    """The prompt of that index, from the run's header."""
    text: str = run.header.plan["prompts"][prompt]["text"]
    return text


def _groups(good: Sequence[Completion], traces: Mapping[str, Trace]) -> list[_Group]:
    """Distinct completions, the commonest first; ties by their tokens, so that the file's order does not matter."""
    found: dict[tuple[int, ...], _Group] = {}
    for completion in good:
        tokens = tuple(traces[completion.trace].token_ids)
        group = found.setdefault(tokens, _Group(tokens))
        group.count += 1
        group.traces[completion.trace] += 1
    return sorted(found.values(), key=lambda g: (-g.count, g.tokens))


def _grow(
    groups: Sequence[_Group], traces: Mapping[str, Trace], pieces: Mapping[int, str], prompt: str
) -> tuple[TreeNode, list[Fork], dict[int, list[int]]]:
    """The tree of completions, every fork in it, and at which of them each group (by its `id`) takes its way.

    A loop: forks may nest deeper than Python recurses.
    """
    root = TreeNode(0, 0, 0, "")
    forks: list[Fork] = []
    places: dict[int, list[int]] = defaultdict(list)
    pending: list[tuple[TreeNode, Sequence[_Group]]] = [(root, groups)] if groups else []
    while pending:
        node, members = pending.pop()
        tokens = members[0].tokens
        end = shared_length([g.ids for g in members], node.start)
        node.length, node.count = end - node.start, sum(g.count for g in members)
        node.text = _text(tokens[node.start : end], pieces)
        if len(members) == 1:
            continue
        ways: dict[int, list[_Group]] = {}
        for group in members:
            ways.setdefault(group.token(end), []).append(group)
            places[id(group)].append(end)
        ordered = sorted(ways.items(), key=lambda way: (-sum(g.count for g in way[1]), way[0]))
        # a token may have no text of its own, but hardly four in a row
        before = (prompt + _text(tokens[max(0, end - 4 * _BEFORE) : end], pieces))[-_BEFORE:]
        forks.append(Fork(end, before, tuple(_branch(token, way, end, traces, pieces) for token, way in ordered)))
        node.children = [TreeNode(end, 0, 0, "") for _ in ordered]
        pending += [(child, way) for child, (_, way) in zip(node.children, ordered, strict=True)]
    return root, sorted(forks, key=lambda f: (f.index, -sum(b.count for b in f.branches), f.before)), places


def _branch(
    token: int, members: Sequence[_Group], index: int, traces: Mapping[str, Trace], pieces: Mapping[int, str]
) -> Branch:
    margins: list[float] = []
    for group in members:
        for digest, count in group.traces.items():
            recorded = traces[digest].margin_array
            if index < len(recorded) and math.isfinite(recorded[index]):
                margins.extend([float(recorded[index])] * count)
    return Branch(
        token_id=token,
        text=pieces.get(token, ""),
        count=sum(g.count for g in members),
        continuation=_text(members[0].tokens[index + 1 : index + 1 + 4 * _AFTER], pieces)[:_AFTER],
        margin_min=min(margins) if margins else None,
        margin_median=median(margins) if margins else None,
    )


def _distinct(group: _Group, top: _Group, traces: Mapping[str, Trace], pieces: Mapping[int, str]) -> DistinctCompletion:
    parts_at = None
    if group is not top:
        parts_at = shared_length([group.ids, top.ids], 0)
    any_trace = traces[next(iter(group.traces))]
    return DistinctCompletion(
        digest=tokens_digest(list(group.tokens)),
        count=group.count,
        token_ids=group.tokens,
        pieces=tuple(pieces.get(t, "") for t in group.tokens),
        text=any_trace.text,
        parts_at=parts_at,
    )


def _survival(groups: Sequence[_Group], n: int) -> tuple[float, ...]:
    if not groups:
        return ()
    top = groups[0]
    parting = np.zeros(len(top.tokens) + 1, dtype=np.int64)  # completions that agree with the first i tokens, no more
    for group in groups:
        parting[shared_length([group.ids, top.ids], 0)] += group.count
    return tuple((np.cumsum(parting[::-1])[::-1] / n).tolist())


def _text(tokens: Sequence[int], pieces: Mapping[int, str]) -> str:
    return "".join(pieces.get(t, "") for t in tokens)
