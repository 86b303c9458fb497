"""The tree of completions by sorting and ranges, against the same figures by brute force."""

from __future__ import annotations

import itertools
import math
import random
import time
from statistics import median

import numpy as np

from nondet.core.traces import Trace, trace_digest
from nondet.sampling.analysis import Group, Grower, Grown


def forest(seed: int) -> tuple[list[Group], dict[str, Trace]]:
    """Few tokens, so that many texts share beginnings and some end where others go on; some traces lack figures."""
    rng = random.Random(seed)  # noqa: S311 - an example, not a secret
    groups: dict[tuple[int, ...], Group] = {}
    traces: dict[str, Trace] = {}
    for _ in range(rng.randint(1, 12)):
        tokens = tuple(rng.randint(0, 1) for _ in range(rng.randint(0, 6)))
        group = groups.setdefault(tokens, Group(tokens))
        for _ in range(rng.randint(1, 3)):
            values = [rng.choice((-0.5, -0.25, -1.5, math.nan, -math.inf)) for _ in tokens]
            logprobs = np.array(values, dtype="<f4").tobytes() if rng.random() < 0.8 else b""
            margins = [rng.choice((0.0, 0.5, 1.0, math.inf)) for _ in tokens]
            made = np.array(margins, dtype="<f4").tobytes() if rng.random() < 0.8 else b""
            digest = trace_digest(list(tokens), logprobs)
            traces.setdefault(digest, Trace(digest=digest, token_ids=list(tokens), logprobs=logprobs, margins=made))
            group.traces[digest] += 1
            group.count += 1
    return sorted(groups.values(), key=lambda g: (-g.count, g.tokens)), traces


def grown(groups: list[Group], traces: dict[str, Trace]) -> Grown:
    return Grower(groups, traces, {0: "a", 1: "b"}, "P").grow()


def widest(groups: list[Group], traces: dict[str, Trace]) -> float:
    """Over every pair of traces, every token up to the first that differs."""
    spread = 0.0
    members = [(g.tokens, traces[d].logprob_array) for g in groups for d in g.traces if traces[d].logprobs]
    for (one, mine), (other, theirs) in itertools.combinations(members, 2):
        for i, (x, y) in enumerate(zip(one, other, strict=False)):
            if x != y:
                break
            if np.isfinite(mine[i]) and np.isfinite(theirs[i]):
                spread = max(spread, abs(float(mine[i]) - float(theirs[i])))
    return spread


def histories(groups: list[Group]) -> dict[tuple[int, ...], dict[int, int]]:
    """Every history after which texts go on in several ways: token (-1: the end) -> completions."""
    ways: dict[tuple[int, ...], dict[int, int]] = {}
    for g in groups:
        for i in range(len(g.tokens) + 1):
            on = ways.setdefault(g.tokens[:i], {})
            token = g.tokens[i] if i < len(g.tokens) else -1
            on[token] = on.get(token, 0) + g.count
    return {history: on for history, on in ways.items() if len(on) > 1}


def test_forks_and_spread_are_those_of_brute_force() -> None:
    """300 small forests: each fork's place, ways, counts and margins, who takes part in it, and the widest spread."""
    forked = spread = 0
    for seed in range(300):
        groups, traces = forest(seed)
        result = grown(groups, traces)
        expected = histories(groups)
        shown = sorted((f.index, f.before, tuple((b.token_id, b.count) for b in f.branches)) for f in result.forks)
        text = {history: ("P" + "".join("ab"[t] for t in history))[-120:] for history in expected}
        assert shown == sorted(
            (len(h), text[h], tuple(sorted(on.items(), key=lambda way: (-way[1], way[0]))))
            for h, on in expected.items()
        )
        for group, places in zip(groups, result.places, strict=True):
            assert places.tolist() == sorted(len(h) for h in expected if group.tokens[: len(h)] == h)
        assert result.spread == widest(groups, traces)
        for fork in result.forks:
            history = next(h for h in expected if text[h] == fork.before)
            for branch in fork.branches:
                margins = [
                    float(traces[d].margin_array[fork.index])
                    for g in groups
                    if g.tokens[: fork.index] == history and g.token(fork.index) == branch.token_id
                    for d, count in g.traces.items()
                    for _ in range(count)
                    if fork.index < len(traces[d].margin_array) and np.isfinite(traces[d].margin_array[fork.index])
                ]
                assert branch.margin_min == (min(margins) if margins else None)
                assert branch.margin_median == (median(margins) if margins else None)
        forked += len(result.forks)
        spread += result.spread > 0
    assert forked > 500
    assert spread > 100


def test_many_nested_forks_take_no_time() -> None:
    """2,000 traces of 400 tokens that leave one text at 400 places: no step in Python for each token of each."""
    groups, traces = [], {}
    for i in range(400):
        tokens = tuple([1] * i + [2] * (400 - i))
        group = Group(tokens)
        for j in range(5):
            logprobs = np.full(400, -0.5 - j, dtype="<f4").tobytes()
            digest = trace_digest(list(tokens), logprobs)
            traces[digest] = Trace(digest=digest, token_ids=list(tokens), logprobs=logprobs, margins=logprobs)
            group.traces[digest], group.count = 1, group.count + 1
        groups.append(group)
    before = time.process_time()
    result = grown(groups, traces)
    assert time.process_time() - before < 2.0
    assert (len(result.forks), result.spread) == (399, 4.0)
