"""What was varied alone, in markdown: the table, then what proves that each value took effect."""

from __future__ import annotations

from nondet.reports.axes_text import AxesTable
from nondet.reports.markdown_text import code, details, escape, table

__all__ = ["axes_blocks"]

_PROOF_HEAD = ("axis", "value", "under", "took effect", "proof")


def axes_blocks(axes: AxesTable) -> list[str]:
    """Blocks of a run's section."""
    columns = [f"{code(i)}: {name}" for i in axes.impls for name in ("traces", "texts", "moved", "first")]
    rows = []
    for line in axes.lines:
        values = ", ".join(line.values) + (f"; unproven: {', '.join(line.unproven)}" if line.unproven else "")
        row = [escape(line.axis), escape(line.note or values)]
        for impl in axes.impls:
            cell = line.cells.get(impl)
            if cell is None:
                row += ["", "", "", ""]
            else:
                row += [
                    cell.traces,
                    cell.texts,
                    cell.moved or "may differ",
                    "–" if cell.first is None else str(cell.first),
                ]
        rows.append(row)
    proofs = [
        (escape(line.axis), escape(value), code(impl), "yes" if holds else "unproven", escape(proof))
        for line in axes.lines
        for value, impl, holds, proof in line.proofs
    ]
    return [
        "### One thing about the engine varied at a time",
        f"Prompt: {code(axes.prompt, cell=False)}. {escape(axes.made_longer)}",
        table(["axis", "values", *columns], rows),
        escape(axes.legend),
        details("What proves that each value took effect", [table(_PROOF_HEAD, proofs)]),
    ]
