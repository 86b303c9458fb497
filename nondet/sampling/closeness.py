"""How close completions were to parting, and how far apart their numbers are. Pure figures."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt

from nondet.paired import k3, superiority
from nondet.sampling.summary import FlipDraws, FlipMargins
from nondet.traces import Trace

__all__ = ["flip_draws", "flip_margins", "k3_of", "logprob_spread", "shared_length"]

Ids = npt.NDArray[np.int32]


def shared_length(members: Sequence[Ids], start: int) -> int:
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


def logprob_spread(distinct: Sequence[Trace]) -> float:
    """Largest spread of one token's logprob over traces that share it and everything before it."""
    widest = 0.0
    traces = [(np.asarray(t.token_ids, dtype=np.int32), t.logprob_array) for t in distinct if t.logprobs]
    pending = [(traces, 0)]
    while pending:
        members, start = pending.pop()
        if len(members) < 2:
            continue
        end = shared_length([ids for ids, _ in members], start)
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


def flip_margins(traces: Sequence[tuple[Trace, int, Sequence[int]]]) -> FlipMargins | None:
    """Margins where completions part, against those where they go on together; None where either is not recorded.

    Args:
        traces: Each distinct trace, its count, and the positions at which it takes one of several ways.
    """
    at, ties, elsewhere = [], 0, []
    for trace, count, places in traces:
        margins = trace.margin_array
        if not len(margins):
            continue
        known = [p for p in places if p < len(margins)]
        here = margins[known]
        here = here[np.isfinite(here)]
        at += here.tolist()
        ties += count * int((here == 0.0).sum())
        rest = np.delete(margins, known)
        elsewhere.append(rest[np.isfinite(rest)])
    others = np.concatenate(elsewhere) if elsewhere else np.zeros(0, dtype=np.float32)
    if not at or not len(others):
        return None
    flips = np.asarray(at, dtype=np.float32)
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


def flip_draws(traces: Sequence[tuple[Trace, int, Sequence[int]]], first: int) -> FlipDraws | None:
    """How near the draws were at the first fork; None where they are not known.

    Args:
        traces: As for `flip_margins`.
        first: Index of the first fork.
    """
    known = [(t, first in places) for t, _, places in traces if t.border]
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


def _floats(data: bytes) -> npt.NDArray[np.float32]:
    return np.frombuffer(data, dtype="<f4")


def k3_of(reference: Trace, others: Mapping[str, tuple[Trace, int]]) -> float | None:
    """Mean K3 of the other traces against the reference, over the tokens that each shares with it from the start.

    None where no other trace shares a token, or logprobs are missing.

    Args:
        others: Digest -> (trace, how often it came).
    """
    total, tokens = 0.0, 0
    ids = np.asarray(reference.token_ids, dtype=np.int32)
    for digest, (trace, count) in others.items():
        if digest == reference.digest or not trace.logprobs or not reference.logprobs:
            continue
        if not trace.token_ids or not reference.token_ids:
            continue
        length = shared_length([ids, np.asarray(trace.token_ids, dtype=np.int32)], 0)
        here, there = reference.logprob_array[:length], trace.logprob_array[:length]
        finite = np.isfinite(here) & np.isfinite(there)
        if finite.any():
            number = int(finite.sum())
            total += count * number * k3(here[finite], there[finite])
            tokens += count * number
    return total / tokens if tokens else None
