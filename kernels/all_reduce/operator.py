"""Declarations of the collectives over the ranks of a process group."""

from __future__ import annotations

from nondet.core.operator import ANY, Family, Implementation, Operator

ALL_REDUCES = Family(
    "all-reduce",
    "sums over the ranks of a process group: torch.distributed.all_reduce and reduce_scatter, in place and functional",
)


_REFERENCE = "nondet.ranks.operators:reference"
_IMPLEMENTATIONS = (
    Implementation(name="stock", stock=True, targets={ANY: "nondet.ranks.operators:stock"}),
    Implementation(name="invariant", invariant=True, targets={ANY: "nondet.ranks.operators:invariant"}),
)
# Under batch_invariant() the family is registered for c10d's operators, which are not aten's: see
# `nondet.kernels.dispatch.replacements`.
ALL_REDUCE = Operator(name="all_reduce", reference=_REFERENCE, implementations=_IMPLEMENTATIONS, family=ALL_REDUCES)
REDUCE_SCATTER = Operator(name="reduce_scatter", reference=_REFERENCE, implementations=_IMPLEMENTATIONS)
ALL_GATHER = Operator(name="all_gather", reference=_REFERENCE, implementations=_IMPLEMENTATIONS)
