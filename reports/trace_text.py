"""Traces and replays in words and tables, the same for every reporter."""

from __future__ import annotations

from dataclasses import dataclass

from nondet.core.records import Culprit, Run
from nondet.verdict.findings import plural

__all__ = ["Block", "trace_blocks", "trace_headline"]


@dataclass(frozen=True)
class Block:
    """A title, sentences, and what belongs in a fold: lines of detail."""

    title: str
    lines: tuple[str, ...]
    details: tuple[str, ...] = ()


def trace_headline(run: Run) -> str:
    """The finding of a trace or of replays in one sentence, without its full stop; "" for other runs."""
    if run.trace_verdicts:
        verdict = run.trace_verdicts[-1]
        cure = ""
        if verdict.families:
            cure = (
                f"; replacing {' and '.join(verdict.families)} by the invariant implementation removes the divergence"
            )
        return verdict.sentences[0] + cure if verdict.sentences else verdict.finding
    again = [r for r in run.replayed if r.how == "as recorded"]
    if again:
        return f"{sum(r.same for r in again)} of {plural(len(again), 'completion')} came again bit for bit"
    if run.culprits:
        return f"the first guilty operator: {run.culprits[0].sentence}"
    if run.controls:
        return "no operator was named yet"
    return ""


def trace_blocks(run: Run) -> list[Block]:
    """Controls, culprits with their replays, substitutions, the verdict; or what was played again."""
    blocks = []
    if run.trace_verdicts:
        verdict = run.trace_verdicts[-1]
        lines = [*verdict.sentences, *([verdict.repro] if verdict.repro else [])]
        blocks.append(Block("Verdict", tuple(lines)))
    if run.controls:
        marks = {True: "holds", False: "FAILS", None: "noted"}
        blocks.append(Block("Controls", tuple(f"{c.name} ({marks[c.passed]}): {c.sentence}" for c in run.controls)))
    for culprit in run.culprits:
        title = f"Guilty operator {culprit.number}" if culprit.call else f"Place {culprit.number}, no operator named"
        lines = [culprit.sentence, *(f"{r.name}: {r.sentence}" for r in culprit.replays)]
        blocks.append(Block(title, tuple(lines), tuple(_details(culprit))))
    if run.substitutions:
        blocks.append(
            Block(
                "Substitutions: the whole run again",
                tuple(s.sentence for s in run.substitutions),
                tuple(
                    f"left stock with {'+'.join(s.families)}: {', '.join(s.at_risk[:8])}"
                    for s in run.substitutions
                    if s.at_risk
                ),
            )
        )
    if run.replayed:
        blocks.append(Block("Played again", tuple(r.sentence for r in run.replayed)))
    return blocks


def _details(culprit: Culprit) -> list[str]:
    lines = []
    for arm, shapes in zip(("first", "second"), culprit.shapes, strict=False):
        shown = ", ".join(f"{place} {'x'.join(map(str, shape))}" for place, shape in shapes.items())
        lines.append(f"shapes of the {arm} arm: {shown}")
    axes = [f"{p}: {', '.join(a or 'fixed' for a in roles)}" for p, roles in culprit.axes.items()]
    if axes:
        lines.append(f"what the axes count: {'; '.join(axes)}")
    if culprit.digests:
        lines.append("inputs of this request: " + ", ".join(f"{p} {d}" for p, d in culprit.digests.items()))
    for replay in culprit.replays:
        if replay.labels and replay.distinct > 1:
            pairs = [f"{v}: {chr(65 + label % 26)}" for v, label in zip(replay.values, replay.labels, strict=False)]
            lines.append(f"classes over {replay.name}: {', '.join(pairs)}")
    if culprit.unmatched:
        lines.append(f"calls that only one arm made: {', '.join(culprit.unmatched[:12])}")
    if culprit.not_understood:
        lines.append(f"tensors of which no claim is made: {', '.join(culprit.not_understood)}")
    return lines
