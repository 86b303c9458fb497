"""Which operators of a sampled run were batch-invariant, and at what speed. Pure figures from the run file, no torch.

The rounds hold what `batch_invariant()` counted ("replaced: mm" -> calls) beside what its launchers launched.
"""

from __future__ import annotations

from collections import Counter

from nondet.result import Run

__all__ = ["GROUPS", "coverage_lines", "coverage_of", "speed_lines"]

# group, as in the records -> what it means to a reader
GROUPS: dict[str, str] = {
    "replaced": "batch-invariant kernels",
    "certified stock": "stock, proven here to give each row the bits that it has alone",
    "left stock": "stock, since no kernel takes this call: its bits may depend on the batch",
    "at risk": "stock without a batch-invariant kernel: its bits may depend on the batch",
}
_MOST = 6


def coverage_of(run: Run, impl: str) -> dict[str, Counter[str]]:
    """Group -> operator -> calls, over all rounds of that implementation; the groups in order, those with calls."""
    total: Counter[str] = Counter()
    for record in run.rounds:
        if record.impl == impl:
            total.update(record.ran)
    groups: dict[str, Counter[str]] = {}
    for group in GROUPS:
        head = f"{group}: "
        found = Counter({name.removeprefix(head): n for name, n in total.items() if name.startswith(head)})
        if found:
            groups[group] = found
    return groups


def coverage_lines(run: Run) -> list[str]:
    """For people: a line for each implementation and group."""
    lines = []
    for impl in dict.fromkeys(r.impl for r in run.rounds):
        groups = coverage_of(run, impl)
        for group, counts in groups.items():
            named = [f"{name} ({n:,})" for name, n in counts.most_common(_MOST)]
            more = len(counts) - len(named)
            rest = f", and {more} more" if more else ""
            lines.append(f"{impl}, {group} ({GROUPS[group]}): {', '.join(named)}{rest}")
        if groups and not {"left stock", "at risk"} & set(groups):
            lines.append(f"{impl}: nothing left stock unproven, nothing at risk")
    return lines


def speed_lines(run: Run) -> list[str]:
    """Invariant against each kind of stock, where the first round was run again: nothing is compiled or proven then."""
    again = {
        row.impl: float(row.extra["tokens_per_second_again"])
        for row in run.rows
        if row.varied == "run" and row.extra.get("tokens_per_second_again")
    }
    ours = again.get("invariant")
    if ours is None:
        return []
    return [
        f"first round, run again with everything compiled and proven: invariant {ours:,.0f} tokens/s, "
        f"{impl} {theirs:,.0f}: ratio {ours / theirs:.2f}"
        for impl, theirs in again.items()
        if impl.startswith("stock")
    ]
