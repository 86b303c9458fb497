"""What each varied axis changes, as a table: distinct texts and traces, which requests followed the axis, where first.

Numbers in brackets are those of the value with the most traces: there only the batch changes.
"""

from __future__ import annotations

from collections.abc import Mapping

from nondet.core.records import Run
from nondet.core.traces import Trace
from nondet.reports.document import ALL, Bit, Block, Code, Details, Heading, Inline, Items, Paragraph, Table
from nondet.reports.endpoint import divergence_of
from nondet.verdict.findings import plural, sort_impls
from nondet.verdict.samples import AxisTally, tally_axes


class AxisEffect:
    """One axis under one implementation; `first`: the first generated token at which anything differed, or None."""

    def __init__(self, impl: str, tally: AxisTally, first: int | None) -> None:
        self.impl, self.tally, self.first = impl, tally, first
        # what was recorded of each value, those that took effect first
        self.values = [v.record for v in (*tally.values, *tally.idle)]
        # whether requests followed the axis, or, at one value, the batch
        self.differs = tally.moved > 0 if tally.held else tally.traces_within > 1

    @property
    def cells(self) -> list[Inline]:
        """Its columns of the table: traces, texts, changed, first."""
        t = self.tally
        if not t.tried:
            return [Bit("not compared", "soft"), "", "", ""]
        traces = Bit(f"{t.traces:,} ({t.traces_within:,})", "bad" if self.differs else "")
        changed = f"{t.moved:,} of {t.compared:,}" if t.held else "may differ"
        return [traces, f"{t.texts:,} ({t.texts_within:,})", changed, "–" if self.first is None else str(self.first)]


Effects = Mapping[str, Mapping[str, AxisEffect]]  # axis -> implementation -> its effect


def axes_of(run: Run, traces: Mapping[str, Trace]) -> Effects:
    """The effects of a run of `nondet sample --vary`."""
    effects: dict[str, dict[str, AxisEffect]] = {}
    for impl in sort_impls(record.impl for record in run.axis_values):
        for tally in tally_axes(run, impl):
            groups = [set(v.traces) for v in tally.values]
            firsts = []
            for group in [set[str]().union(*groups)] if tally.held else groups:
                known = [traces[digest] for digest in sorted(group) if digest in traces]
                found = [divergence_of(known[0], other) for other in known[1:]]
                firsts += [index for d in found for index in (d.token, d.bits) if index is not None]
            effects.setdefault(tally.axis, {})[impl] = AxisEffect(impl, tally, min(firsts, default=None))
    return effects


def _values_text(effects: Mapping[str, AxisEffect]) -> str:
    """The values that took effect and those that did not, or why no value was tried."""
    if note := next((e.tally.note for e in effects.values() if e.tally.note), ""):
        return note
    records = [(impl, record) for impl, effect in effects.items() for record in effect.values]
    proven = dict.fromkeys(record.value for _, record in records if record.proven)
    lacking: dict[str, list[str]] = {}
    for impl, record in records:
        if not record.proven:
            lacking.setdefault(record.value, []).append(impl)
    unproven = [v if len(impls) == len(effects) else f"{v} ({', '.join(impls)})" for v, impls in lacking.items()]
    text = ", ".join(proven) or "–"
    return text + (f"; unproven, not counted: {', '.join(unproven)}" if unproven else "")


def axes_blocks(run: Run, effects: Effects, number: int) -> list[Block]:
    """The prompt, a line per axis, and what proves that each value took effect."""
    plan, impls = run.header.plan, sort_impls(impl for of in effects.values() for impl in of)
    head: list[Inline] = ["axis", "values"]
    for impl in impls:
        head += [(Bit(impl, "code"), ": traces"), "texts", "changed", "first"]
    rows, proofs = [], []
    for axis, of in effects.items():
        row: list[Inline] = [axis, Bit(_values_text(of))]
        for impl in impls:
            row += of[impl].cells if impl in of else [Bit("not compared", "soft"), "", "", ""]
        rows.append(row)
        for impl, effect in of.items():
            for v in effect.values:
                took = "yes" if v.proven else "unproven"
                proofs.append((axis, Bit(v.value), Bit(impl, "code"), took, Bit(v.proof)))
    most = max((v.n for of in effects.values() for e in of.values() for v in e.tally.values), default=0)
    legend = (
        f"{most:,} completions at each value. Traces and texts: distinct over all values, in brackets at the value "
        "with most, where only the batch changes. Where the axis may change the arithmetic itself (dtype, attention, "
        "threads; ranks, but for rank-free) only the brackets count against it. Changed: requests whose trace is not "
        "that of the same request at the base: there the axis is the cause. First: the first generated token with "
        "other bits."
    )
    changes = {record.axis: record.changes for record in run.axis_values}
    explained = Items([f"{axis}: {changes.get(axis, '')}" for axis in effects], only="p")
    kinds = ("", "", *("num",) * 4 * len(impls))
    made: list[Block] = [
        Heading("One setting of the engine changed at a time", f"axes-run-{number}", "axes"),
        *(Code(str(prompt["text"])) for prompt in plan.get("prompts", [])[:1]),
        Table(head, rows, kinds, unshown=("values", "texts"), only=ALL),
        Paragraph(legend, "soft"),
        Details(
            "What each axis changes, and what proves that it took effect",
            [explained, Table(("axis", "value", "under", "took effect", "proof"), proofs)],
        ),
    ]
    longer = plan.get("prompt_lengthened_by", 0)
    if isinstance(longer, int) and longer:
        said = f"The prompt is followed by {plural(longer, 'token')} of its own completion, to be cut and shared."
        made.append(Paragraph(said, "soft"))
    return made
