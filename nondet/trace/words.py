"""What a trace says, in sentences: no further than its records go."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from nondet.core.records import Culprit
from nondet.trace.arms import Site
from nondet.trace.events import Sizes

__all__ = ["AGREE", "culprit_sentence", "late_sentence", "place_of", "substitution_sentence", "verdict_sentences"]

AGREE = "hidden states, K, V, logits and logprobs agree in every position"


def place_of(site: Site) -> str:
    """ "layer 4, its output"."""
    what = {"k": ", K as written", "v": ", V as written", "out": ", its output"}
    named = what.get(site.record.partition(".")[2], "")
    return f"layer {site.region}{named}" if site.region.isdigit() else f"the {site.region}"


def culprit_sentence(culprit: Culprit, sizes: Sequence[Sizes]) -> str:
    """ "position 37, layer 4, `linear` of down_proj: inputs equal bit for bit, 3 of 1,024 outputs differ ..."."""
    difference = next(iter(culprit.differences.values()))
    far = f"by at most {difference.max_ulp:,} ULP"
    if difference.nonfinite:
        far += f", {difference.nonfinite} of them NaN or infinite on one side"
    parts = [
        f"position {culprit.position}, {_where(culprit)}, `{culprit.call}` of {culprit.module} (call "
        f"{culprit.occurrence + 1} there): inputs equal bit for bit, {difference.mismatched:,} of "
        f"{difference.compared:,} outputs differ {far}"
    ]
    reads_keys = any("keys" in roles for roles in culprit.axes.values())
    arms = []
    for size, kernels in zip(sizes, culprit.kernels or [[] for _ in sizes], strict=False):
        ran = ", ".join(kernels[:4]) or "kernels unknown"
        arms.append(f"{ran} at {size.tokens:,} rows" + (f" and {size.keys:,} keys" if reads_keys else ""))
    return "; ".join([*parts, " against ".join(arms)])


def substitution_sentence(families: Sequence[str], site: Site | None, before: Culprit | None) -> str:
    """Where the arms part with families replaced; with `before`, where they parted until then."""
    named = " and ".join(families)
    if site is None:
        return f"with {named} invariant {AGREE}: the divergence is gone"
    sentence = f"with {named} invariant the arms part at position {site.position}, {place_of(site)}"
    return sentence if before is None else f"{sentence}; before that at position {before.position}, {_where(before)}"


def late_sentence(families: Collection[str]) -> str:
    """What a trace that ran out of time has not asked.

    Args:
        families: The fewest replacements under which the arms agreed; empty where there were none by then.
    """
    if families:
        named = " and ".join(sorted(families))
        return f"with {named} invariant the arms agree; whether fewer do was not asked to its end, for want of time"
    return "which replacements make the arms agree was not asked to its end, for want of time"


def verdict_sentences(
    finding: str, culprits: Sequence[Culprit], families: Sequence[str] | None, notes: Sequence[str], late: str = ""
) -> list[str]:
    """The verdict, the first sentence being the shortest answer.

    Args:
        late: What was left out for want of time, as a sentence.
    """
    if finding != "batch-dependent":
        return [f"{finding}: {note}" for note in notes] or [finding]
    first = culprits[0]
    named = f"is `{first.call}` of {first.module}" if first.call else f"could not be named; it is in {_where(first)}"
    lines = [f"batch-dependent: the first guilty operator {named}, at position {first.position}"]
    listed = [f"{c.number}. `{c.call}` of {c.module}, position {c.position}" for c in culprits if c.call]
    if len(listed) > 1:
        lines.append(f"in the order in which replacing one showed the next: {'; '.join(listed)}")
    if late:
        lines.append(late)
    elif families is None:
        lines.append("no set of replacements that is at hand makes the arms agree on this load")
    elif len(families) < 2:
        lines.append(f"replacing {families[0]} alone makes the arms agree on this load")
    else:
        lines.append(
            f"the smallest set of replacements that makes the arms agree on this load: {', '.join(families)} (with any "
            "one left out the arms part again)"
        )
    return lines


def _where(culprit: Culprit) -> str:
    return f"layer {culprit.layer}" if culprit.layer.isdigit() else f"the {culprit.layer}"
