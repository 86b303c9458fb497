"""An encoder's arms in words, the same for every reporter."""

from __future__ import annotations

from collections.abc import Sequence

from nondet.core.records import EmbedPass, Neighbours, Run
from nondet.reports.figures import counted, number, ulp_text
from nondet.reports.trace_text import Block
from nondet.verdict.findings import Finding, Verdict, plural

__all__ = ["embed_blocks", "embed_headline", "embed_steps"]


def embed_headline(run: Run, verdicts: Sequence[Verdict]) -> str:
    """The finding of an encoder's run in one sentence, without its full stop."""
    parts = []
    for verdict in verdicts:
        mine = [n for n in run.neighbours if n.impl == verdict.impl]
        if not mine:
            parts.append(f"{verdict.impl}: {verdict.brief or verdict.text}")
            continue
        worst = max(mine, key=lambda n: n.parted)
        if verdict.finding == Finding.CLEAN or not worst.parted:
            arms = len({n.arm for n in mine})
            parts.append(
                f"{verdict.impl}: {verdict.finding}: {plural(worst.texts, 'vector')} the same, bit for bit, alone and "
                f"in {plural(arms, 'other arm')}"
            )
            continue
        top1, topk = (max(getattr(n, field) for n in mine) for field in ("top1_changed", "topk_changed"))
        parts.append(
            f"{verdict.impl}: {', '.join(verdict.findings)}: up to {counted(worst.parted)} of "
            f"{plural(worst.texts, 'vector')} have other bits in a batch than alone, 1 - cosine up to "
            f"{number(max(n.cosine_distance for n in mine))}; another nearest neighbour for {counted(top1)}, "
            f"another set of {worst.k} for {counted(topk)}"
        )
    return "; ".join(parts)


def embed_steps(run: Run) -> tuple[tuple[str, str, bool, str], ...]:
    """The chain from the vector to the cure, as the first screen has it: (label, text, known, what would tell)."""
    stock = [n for n in run.neighbours if n.impl.startswith("stock")]
    cured = [n for n in run.neighbours if n.impl == "invariant"]
    parts = sorted({n.impl for n in run.neighbours if n.impl.startswith("invariant:")})
    command = "nondet embed --impl stock --impl invariant:matmul --impl invariant:attention --impl invariant:norm"
    steps: list[tuple[str, str, bool, str]] = []
    if stock:
        worst, felt = max(stock, key=lambda n: n.parted), max(stock, key=lambda n: (n.top1_changed, n.topk_changed))
        steps.append(("vectors", _line(worst), True, ""))
        steps.append(("felt", _felt(felt), True, ""))
        if worst.parted:
            cures = [name for name in parts if not any(n.parted for n in run.neighbours if n.impl == name)]
            text = f"replacing {', '.join(cures)} alone removed it" if cures else "which operator is not known"
            steps.append(("operator", text, bool(cures), "" if cures else command))
    if cured:
        steps.append(("cure", f"invariant: {_line(max(cured, key=lambda n: n.parted))}", True, ""))
    else:
        steps.append(("cure", "the invariant implementation was not run here", False, "nondet embed --impl both"))
    return tuple(steps)


def _felt(n: Neighbours) -> str:
    return (
        f"nearest neighbour changed for at most {counted(n.top1_changed)} of {plural(n.texts, 'text')}, the set of "
        f"{n.k} nearest for {counted(n.topk_changed)} ({n.arm}, {n.pooling})"
    )


def embed_blocks(run: Run) -> list[Block]:
    """For each implementation its arms against the texts alone, and what the passes took."""
    blocks = []
    plan = run.header.plan
    for impl in dict.fromkeys(p.impl for p in run.embed_passes):
        passes = [p for p in run.embed_passes if p.impl == impl]
        lines = []
        for record in passes:
            lines += _arm(record, [n for n in run.neighbours if n.impl == impl and n.arm == record.arm])
        details = [_took(p) for p in passes if not p.reason]
        blocks.append(Block(f"{impl}: vectors in batches against vectors alone", tuple(lines), tuple(details)))
    if blocks and plan.get("cut"):
        note = f"{plural(plan['cut'], 'text was', 'texts were')} longer than the model's context, and cut."
        blocks.append(Block("Texts", (note,)))
    return blocks


def _arm(record: EmbedPass, neighbours: Sequence[Neighbours]) -> list[str]:
    if record.reason:
        return [f"{record.arm}: not measured: {record.reason}"]
    return [_line(n) for n in neighbours]


def _line(n: Neighbours) -> str:
    head = f"{n.arm}, {n.pooling}"
    if not n.parted:
        return f"{head}: {plural(n.texts, 'vector')} the same, bit for bit"
    return (
        f"{head}: {counted(n.parted)} of {counted(n.texts)} have other bits, up to {ulp_text(n.max_ulp)}, 1 - cosine "
        f"up to {number(n.cosine_distance)}; nearest neighbour changed for {counted(n.top1_changed)}, the set of {n.k} "
        f"nearest for {counted(n.topk_changed)}, its order alone for {counted(n.topk_reordered)}"
    )


def _took(p: EmbedPass) -> str:
    rate = f", {p.texts / p.seconds:,.0f} texts/s" if p.seconds > 0 else ""
    padding = p.computed - p.tokens
    padded = f" and {counted(padding)} of padding" if padding else ""
    return f"{p.arm}: {plural(p.batches, 'pass', 'passes')}, {counted(p.tokens)} tokens{padded}{rate}"
