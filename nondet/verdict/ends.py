"""How completions ended: one that ended otherwise than another of the same tokens and logprobs is another answer.

Ids of an end-of-text token are not always among the tokens, so the reason can differ where nothing else does: one
request went on to its limit, and one stopped there.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from nondet.core.records import Completion

__all__ = ["Ends", "ended_otherwise", "ends_of", "ends_text"]

# Trace -> reason -> completions.
Ends = Mapping[str, Mapping[str, int]]


def ends_of(completions: Iterable[Completion]) -> Ends:
    """Of the completions that succeeded."""
    ends: dict[str, Counter[str]] = {}
    for c in completions:
        if c.status == "ok":
            ends.setdefault(c.trace, Counter())[c.finish] += 1
    return ends


def _together(parts: Sequence[Ends]) -> dict[str, Counter[str]]:
    total: dict[str, Counter[str]] = {}
    for ends in parts:
        for trace, reasons in ends.items():
            total.setdefault(trace, Counter()).update(reasons)
    return total


def ended_otherwise(parts: Sequence[Ends]) -> int:
    """Completions that ended otherwise than most of those with the same tokens and logprobs."""
    return sum(reasons.total() - max(reasons.values()) for reasons in _together(parts).values())


def ends_text(parts: Sequence[Ends]) -> str:
    """A sentence where completions ended for several reasons; "" where they did not."""
    total = _together(parts)
    reasons: Counter[str] = Counter()
    for some in total.values():
        reasons.update(some)
    if len(reasons) < 2:
        return ""
    odd = ended_otherwise(parts)
    alike = f"; {odd:,} of them otherwise than most with the same tokens and logprobs" if odd else ""
    named = ", ".join(f"{reason} {count:,}" for reason, count in sorted(reasons.items()))
    return f"Completions ended for different reasons: {named}{alike}."
