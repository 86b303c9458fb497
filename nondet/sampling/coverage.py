"""Which operators of a sampled run were batch-invariant, and at what speed. Pure figures from the run file, no torch.

The rounds, and an encoder's passes, hold what `batch_invariant()` counted ("replaced: mm" -> calls) beside what its
launchers launched.
"""

from __future__ import annotations

from collections import Counter

from nondet.core.records import EmbedPass, Round, Run
from nondet.errors import one_line
from nondet.sampling.speed import HOST_NOTE, NAME, speed_ratio_of

__all__ = ["GROUPS", "coverage_lines", "coverage_of", "coverage_rows", "coverage_text", "speed_lines"]

# group, as in the records -> what it means to a reader
GROUPS: dict[str, str] = {
    "replaced": "batch-invariant kernels",
    "certified stock": "stock, proven here to give each row the bits that it has alone",
    "left stock": "stock, since no kernel takes this call: its bits may depend on the batch",
    "at risk": "stock without a batch-invariant kernel, or over the batch itself: its bits may depend on the batch",
}
_MOST = 6


def coverage_of(run: Run, impl: str) -> dict[str, Counter[str]]:
    """Group -> operator -> calls, over all rounds of that implementation; the groups in order, those with calls."""
    total: Counter[str] = Counter()
    for record in _counted(run):
        if record.impl == impl:
            total.update(record.ran)
    groups: dict[str, Counter[str]] = {}
    for group in GROUPS:
        head = f"{group}: "
        found = Counter({name.removeprefix(head): n for name, n in total.items() if name.startswith(head)})
        if found:
            groups[group] = found
    return groups


def _counted(run: Run) -> list[Round | EmbedPass]:
    """What holds such counts: rounds of completions, and passes of an encoder."""
    return [*run.rounds, *run.embed_passes]


def coverage_rows(run: Run) -> list[tuple[str, str, str, int]]:
    """(implementation, group, operator, calls) of all rounds, by falling calls within a group."""
    return [
        (one_line(impl, 80), group, one_line(name, 160), calls)
        for impl in dict.fromkeys(r.impl for r in _counted(run))
        for group, counts in coverage_of(run, impl).items()
        for name, calls in counts.most_common()
    ]


def coverage_text(run: Run) -> list[str]:
    """A phrase for each implementation that has a coverage: calls in each group."""
    lines = []
    for impl in dict.fromkeys(r.impl for r in _counted(run)):
        groups = coverage_of(run, impl)
        if groups:
            named = [f"{sum(counts.values()):,} calls {group}" for group, counts in groups.items()]
            named += [] if {"left stock", "at risk"} & set(groups) else ["none left stock unproven or at risk"]
            lines.append(f"{one_line(impl, 80)}: {', '.join(named)}")
    return lines


def coverage_lines(run: Run) -> list[str]:
    """For people: a line for each implementation and group."""
    lines = []
    for impl in dict.fromkeys(r.impl for r in _counted(run)):
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
    """Invariant against the fastest stock, and what that ratio is."""
    speed = speed_ratio_of(run)
    if speed is None:
        return []
    figures = f"{speed.invariant:,.0f} tokens/s against {speed.stock:,.0f} of {speed.baseline}"
    lines = [f"{NAME} {speed.ratio:.2f}: invariant {figures}"]
    return [*lines, f"that is no cost: {HOST_NOTE}"] if speed.host_bound else lines
