"""Which family of operators is to blame, from completions with a family or a few replaced at a time."""

from __future__ import annotations

from collections.abc import Sequence

from nondet.core.records import Role, families_of, role_of
from nondet.sampling.summary import SampleSummary

__all__ = ["guilty"]


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
