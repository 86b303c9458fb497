"""How close completions were to parting, and how far apart their numbers are. Pure figures."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt

from nondet.core.statistics import k3, superiority
from nondet.core.traces import Trace
from nondet.sampling.summary import FlipDraws, FlipMargins

__all__ = ["Member", "flip_draws", "flip_margins", "k3_of"]

# A distinct trace, its count, and the positions, rising, at which it takes one of several ways.
Member = tuple[Trace, int, npt.NDArray[np.int64]]


def flip_margins(traces: Sequence[Member]) -> FlipMargins | None:
    """Margins where completions part, against those where they go on together; None where either is not recorded."""
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
    others = np.concatenate(elsewhere) if elsewhere else np.zeros(0, dtype=np.float32)
    flips = np.concatenate(at) if at else np.zeros(0, dtype=np.float32)
    if not len(flips) or not len(others):
        return None
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


def flip_draws(traces: Sequence[Member], first: int) -> FlipDraws | None:
    """How near the draws were at the first fork; None where they are not known.

    Args:
        first: Index of the first fork.
    """
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


def _floats(data: bytes) -> npt.NDArray[np.float32]:
    return np.frombuffer(data, dtype="<f4")


def k3_of(reference: Trace, others: Mapping[str, tuple[Trace, int, int]]) -> float | None:
    """Mean K3 of the other traces against the reference, over the tokens that each shares with it from the start.

    None where no other trace shares a token, or logprobs are missing.

    Args:
        others: Digest -> (trace, how often it came, tokens that it shares with the reference).
    """
    total, tokens = 0.0, 0
    for digest, (trace, count, length) in others.items():
        if digest == reference.digest or not trace.logprobs or not reference.logprobs:
            continue
        here, there = reference.logprob_array[:length], trace.logprob_array[:length]
        finite = np.isfinite(here) & np.isfinite(there)
        if finite.any():
            number = int(finite.sum())
            total += count * number * k3(here[finite], there[finite])
            tokens += count * number
    # to six digits: further ones follow the CPU's exp, and a report is the same on every machine
    return float(f"{total / tokens:.6g}") if tokens else None
