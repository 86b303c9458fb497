"""What the completions of one prompt show: how many differ, where they part, how close the race was. Pure figures.

Works on a run file and its side file alone: no torch, no model, no tokenizer. Completions that failed are counted and
are in no other figure.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median

from nondet.result import Completion, Role, Run, families_of, role_of
from nondet.sampling.summary import Branch, DistinctCompletion, Fork, Interval, SampleSummary, TreeNode
from nondet.statistics import one_sided_bound, wilson
from nondet.traces import Trace, tokens_digest

__all__ = ["guilty", "prompt_text", "summarize"]

_BEFORE, _AFTER = 120, 80
# The "next token" of a completion that ends where others go on.
_END = -1


@dataclass
class _Group:
    """Completions with one text: a distinct completion with all its traces."""

    tokens: tuple[int, ...]
    count: int = 0
    traces: Counter[str] = field(default_factory=Counter)

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
    if top.count < n:
        rate = Interval(n - top.count, n, *wilson(n - top.count, n), "Wilson")
    else:
        # if the commonest has the chance p, all n are equal with a chance of at most p^(n-1): the first one is what
        # the others are compared with, so that n of them make n - 1 comparisons
        rate = Interval(0, n, 0.0, one_sided_bound(n - 1) if n > 1 else 1.0, "0 of n, one-sided")
    rounds = [r for r in run.rounds if r.impl == impl]
    seconds = sum(r.seconds for r in rounds)
    return SampleSummary(
        impl=impl,
        prompt=prompt,
        prompt_text=text,
        n=n,
        failed=len(asked) - n,
        distinct_completions=len(groups),
        distinct_traces=len({c.trace for c in good}),
        agree=Interval(top.count, n, *(wilson(top.count, n) if n else (0.0, 1.0)), "Wilson"),
        rate=rate,
        first_fork=forks[0] if forks else None,
        forks=tuple(forks),
        completions=tuple(_distinct(g, top, traces, pieces) for g in groups),
        tree=tree,
        survival=_survival(groups, n),
        logprob_spread=_logprob_spread([traces[d] for g in groups for d in g.traces]),
        batch_min=min((c.batch_min for c in good), default=0),
        batch_max=max((c.batch_max for c in good), default=0),
        distinct_batches=len(_batch_sizes(run, impl, good)),
        tokens_per_second=sum(r.tokens for r in rounds) / seconds if seconds > 0 else 0.0,
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
        end = node.start
        while end < len(tokens) and len({g.token(end) for g in members}) == 1:
            end += 1
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
            if index < len(recorded):
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
        longest = max(len(group.tokens), len(top.tokens))
        parts_at = next(i for i in range(longest) if group.token(i) != top.token(i))
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
    alive = [0] * (len(top.tokens) + 1)
    for group in groups:
        agreed = 0
        while agreed < len(top.tokens) and group.token(agreed) == top.tokens[agreed]:
            agreed += 1
        for i in range(agreed + 1):
            alive[i] += group.count
    return tuple(count / n for count in alive)


def _logprob_spread(distinct: Sequence[Trace]) -> float:
    """Largest spread of one token's logprob over traces that share it and everything before it."""
    widest = 0.0
    # history -> the traces that have it; a history is named by the first trace that had it
    together: list[list[Trace]] = [list(distinct)]
    index = 0
    while together:
        following: list[list[Trace]] = []
        for group in together:
            by_token: dict[int, list[Trace]] = {}
            for trace in group:
                if index < len(trace.token_ids):
                    by_token.setdefault(trace.token_ids[index], []).append(trace)
            for members in by_token.values():
                if len(members) > 1:
                    values = [float(t.logprob_array[index]) for t in members]
                    widest = max(widest, max(values) - min(values))
                    following.append(members)
        together, index = following, index + 1
    return widest


def _batch_sizes(run: Run, impl: str, good: Sequence[Completion]) -> set[int]:
    """Sizes, in query tokens, of the steps that the completions took part in: from the schedules of all requests."""
    steps: dict[int, Counter[int]] = {}
    for completion in run.completions:
        if completion.impl == impl:
            _add(steps.setdefault(completion.round, Counter()), completion.schedule)
    for record in run.rounds:
        if record.impl == impl:
            for schedule in record.background.values():
                _add(steps.setdefault(record.round, Counter()), schedule)
    return {
        steps[completion.round][step]
        for completion in good
        for first, count, _ in completion.schedule
        for step in range(first, first + count)
    }


def _add(sizes: Counter[int], schedule: list[list[int]]) -> None:
    for first, count, tokens in schedule:
        for step in range(first, first + count):
            sizes[step] += tokens


def _text(tokens: Sequence[int], pieces: Mapping[int, str]) -> str:
    return "".join(pieces.get(t, "") for t in tokens)
