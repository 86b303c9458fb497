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

from nondet.result import Completion, Role, Run, families_of, role_of
from nondet.sampling.speed import median_rate
from nondet.sampling.summary import Branch, DistinctCompletion, Fork, Interval, SampleSummary, TreeNode
from nondet.statistics import Clustered, clustered_interval, new_share, one_sided_bound, pair_disagreement
from nondet.traces import Trace, tokens_digest

__all__ = ["guilty", "prompt_text", "summarize"]

_BEFORE, _AFTER = 120, 80
Ids = npt.NDArray[np.int32]
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
    good = [c for c in asked if c.status == "ok"]
    groups = _groups(good, traces)
    n = len(good)
    text = prompt_text(run, prompt)
    tree, forks = _grow(groups, traces, pieces, text)
    top = groups[0] if groups else _Group(())
    # completions of one round ride in one batch: what sets one off sets off its neighbours
    sizes = Counter(c.round for c in good)
    hits = Counter(c.round for c in good if tuple(traces[c.trace].token_ids) != top.tokens)
    share = clustered_interval([hits[r] for r in sizes], list(sizes.values())) if n else Clustered(0.0, 1.0, 0.0, 1.0)
    if top.count < n:
        rate = Interval(n - top.count, n, share.low, share.high, "Wilson", share.effect)
    else:
        # if the commonest has the chance p, all n are equal with a chance of at most p^(n-1): the first one is what
        # the others are compared with, so that n of them make n - 1 comparisons
        rate = Interval(0, n, 0.0, one_sided_bound(n - 1) if n > 1 else 1.0, "0 of n, one-sided")
    return SampleSummary(
        impl=impl,
        prompt=prompt,
        prompt_text=text,
        n=n,
        failed=len(asked) - n,
        distinct_completions=len(groups),
        distinct_traces=len({c.trace for c in good}),
        agree=Interval(top.count, n, 1.0 - share.high, 1.0 - share.low, "Wilson", share.effect),
        rate=rate,
        disagreement=pair_disagreement([g.count for g in groups]) if n > 1 else None,
        new_share=new_share([g.count for g in groups]) if n else None,
        first_fork=forks[0] if forks else None,
        forks=tuple(forks),
        completions=tuple(_distinct(g, top, traces, pieces) for g in groups),
        tree=tree,
        survival=_survival(groups, n),
        logprob_spread=_logprob_spread([traces[d] for g in groups for d in g.traces]),
        batch_min=min((c.batch_min for c in good), default=0),
        batch_max=max((c.batch_max for c in good), default=0),
        distinct_batches=len(_batch_sizes(run, impl, good)),
        tokens_per_second=median_rate(r for r in run.rounds if r.impl == impl),
    )


def prompt_text(run: Run, prompt: int) -> str:
    """The prompt of that index, from the run's header."""
    text: str = run.header.plan["prompts"][prompt]["text"]
    return text


def guilty(summaries: Sequence[SampleSummary]) -> tuple[str, ...]:
    """The families whose replacement removes the divergence, from runs with a family or a few replaced at a time.

    "attention" means: with attention alone replaced and all else stock, one trace was left. "attention+matmul": no part
    of it that was tried was enough. () where stock did not diverge (there is nothing to blame), or where nothing tried
    was enough.

    Args:
        summaries: Of one prompt: stock, and invariant:FAMILY[+FAMILY] for what was tried.
    """
    by_name = {s.impl: s for s in summaries}
    stock = by_name.get("stock")
    if stock is None or stock.distinct_traces < 2:
        return ()
    enough = {
        name: frozenset(families_of(name).split("+"))
        for name, s in by_name.items()
        if role_of(name) == Role.PART and s.distinct_traces == 1 and s.n >= stock.n  # fewer trials prove less
    }
    return tuple(families_of(n) for n, families in enough.items() if not any(f < families for f in enough.values()))


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
) -> tuple[TreeNode, list[Fork]]:
    """The tree of completions, and every fork in it. A loop: forks may nest deeper than Python recurses."""
    root = TreeNode(0, 0, 0, "")
    forks: list[Fork] = []
    pending: list[tuple[TreeNode, Sequence[_Group]]] = [(root, groups)] if groups else []
    while pending:
        node, members = pending.pop()
        tokens = members[0].tokens
        end = _shared([g.ids for g in members], node.start)
        node.length, node.count = end - node.start, sum(g.count for g in members)
        node.text = _text(tokens[node.start : end], pieces)
        if len(members) == 1:
            continue
        ways: dict[int, list[_Group]] = {}
        for group in members:
            ways.setdefault(group.token(end), []).append(group)
        ordered = sorted(ways.items(), key=lambda way: (-sum(g.count for g in way[1]), way[0]))
        # a token may have no text of its own, but hardly four in a row
        before = (prompt + _text(tokens[max(0, end - 4 * _BEFORE) : end], pieces))[-_BEFORE:]
        forks.append(Fork(end, before, tuple(_branch(token, way, end, traces, pieces) for token, way in ordered)))
        node.children = [TreeNode(end, 0, 0, "") for _ in ordered]
        pending += [(child, way) for child, (_, way) in zip(node.children, ordered, strict=True)]
    return root, sorted(forks, key=lambda f: (f.index, -sum(b.count for b in f.branches), f.before))


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
        parts_at = _shared([group.ids, top.ids], 0)
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
        parting[_shared([group.ids, top.ids], 0)] += group.count
    return tuple((np.cumsum(parting[::-1])[::-1] / n).tolist())


def _shared(members: Sequence[Ids], start: int) -> int:
    """Index of the first token from `start` on that not all of them have, or have alike."""
    length = min(len(ids) for ids in members)
    for _ in range(4):  # where forks stand close together, a look at single tokens is all that is needed
        if start < length:
            token = members[0].item(start)
            if any(ids.item(start) != token for ids in members):
                return start
            start += 1
    width = 64  # a stretch that is shared is taken in ever longer strides
    while start < length:
        block = np.stack([ids[start : min(start + width, length)] for ids in members])
        same = (block == block[0]).all(axis=0)
        if not same.all():
            return start + int(same.argmin())
        start, width = start + block.shape[1], min(2 * width, 1024)
    return length


def _logprob_spread(distinct: Sequence[Trace]) -> float:
    """Largest spread of one token's logprob over traces that share it and everything before it."""
    widest = 0.0
    traces = [(np.asarray(t.token_ids, dtype=np.int32), t.logprob_array) for t in distinct if t.logprobs]
    pending = [(traces, 0)]
    while pending:
        members, start = pending.pop()
        if len(members) < 2:
            continue
        end = _shared([ids for ids, _ in members], start)
        if end > start:
            low, high = np.full(end - start, np.inf), np.full(end - start, -np.inf)
            for _, logprobs in members:
                values = logprobs[start:end].astype(np.float64)
                np.minimum(low, values, out=low, where=np.isfinite(values))
                np.maximum(high, values, out=high, where=np.isfinite(values))
            widest = max(widest, float((high - low)[high >= low].max(initial=0.0)))
        ways: dict[int, list[tuple[Ids, npt.NDArray[np.float32]]]] = {}
        for ids, logprobs in members:
            if end < len(ids):
                ways.setdefault(int(ids[end]), []).append((ids, logprobs))
        # each way has its own token at `end`, so that it gets on by one at least
        pending += [(way, end) for way in ways.values()]
    return widest


def _batch_sizes(run: Run, impl: str, good: Sequence[Completion]) -> set[int]:
    """Sizes, in query tokens, of the steps that the completions took part in: from the schedules of all requests."""
    everybody: dict[int, list[list[int]]] = defaultdict(list)
    for completion in run.completions:
        if completion.impl == impl:
            everybody[completion.round] += completion.schedule
    for record in run.rounds:
        if record.impl == impl:
            for schedule in record.background.values():
                everybody[record.round] += schedule
    under_study: dict[int, list[list[int]]] = defaultdict(list)
    for completion in good:
        under_study[completion.round] += completion.schedule
    sizes: set[int] = set()
    for number, parts in under_study.items():
        batch = _per_step(everybody[number], [tokens for _, _, tokens in everybody[number]])
        taken = _per_step(parts, [1] * len(parts))
        sizes.update(np.unique(batch[: len(taken)][taken > 0]).tolist())
    return sizes


def _per_step(parts: Sequence[list[int]], amounts: Sequence[int]) -> npt.NDArray[np.int64]:
    """[steps] the amounts of the parts, [first step, steps, ...] each, summed at every step that they cover."""
    change = np.zeros(max((first + steps for first, steps, _ in parts), default=0) + 1, dtype=np.int64)
    for (first, steps, _), amount in zip(parts, amounts, strict=True):
        change[first] += amount
        change[first + steps] -= amount
    return np.cumsum(change)


def _text(tokens: Sequence[int], pieces: Mapping[int, str]) -> str:
    return "".join(pieces.get(t, "") for t in tokens)
