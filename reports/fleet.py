"""A fleet of machines: which differ, by what level, and a matrix of machines by classes."""

from __future__ import annotations

import json
from dataclasses import asdict

from nondet.errors import one_line
from nondet.fleet.compare import FAILS, Fleet, Level, Machine
from nondet.reports.classes import letter
from nondet.reports.document import ALL, VERBOSE, WHOLE, Bit, Block, Cells, Figure, Heading, Items, Paragraph, Table
from nondet.reports.fingerprint import column
from nondet.reports.html import render_page
from nondet.reports.markdown import blocks as as_markdown
from nondet.reports.text import escape

_STYLES = {Level.UNCOMPARED: "dull", Level.EXPECTED: "good"}
_SHOWN = 200  # machines of a matrix, findings of a list


def matrix(fleet: Fleet) -> tuple[list[str], list[tuple[Machine, int, list[int | None]]]]:
    """(columns, a row for each machine: its group and, by column, the number of its bits there, the most
    common first; None where it has none)."""
    there = [m for group in fleet.groups for m in group]
    columns = list(dict.fromkeys(column(p) for m in there for p in m.prints.values()))
    labels: dict[str, dict[tuple[str, ...], int]] = {name: {} for name in columns}
    rows: list[tuple[Machine, int, list[int | None]]] = []
    for number, group in enumerate(fleet.groups):
        for m in group[:_SHOWN]:
            bits: dict[str, list[str]] = {}
            for key in sorted(m.prints.keys() - {*fleet.unsteady}):
                bits.setdefault(column(m.prints[key]), []).append(f"{key}{m.prints[key].given}{m.prints[key].digest}")
            numbers = ((labels[name], tuple(bits.get(name, ()))) for name in columns)
            cells = [known.setdefault(held, len(known)) if held else None for known, held in numbers]
            rows.append((m, number, cells))
    return columns, rows


def blocks(fleet: Fleet) -> list[Block]:
    """What stands below the headline."""
    columns, rows = matrix(fleet)
    items = [(Bit(str(f.level), _STYLES.get(f.level, "bad")), ": ", Bit(f.text)) for f in fleet.findings[:_SHOWN]]
    head: Cells = ("machine", "group", *(Bit(name) for name in columns))
    shown: list[Cells] = []
    for m, group, cells in rows[:_SHOWN]:
        marks = ["–" if c is None else Bit(letter(c), "bad" if c else "good") for c in cells]
        shown.append((Bit(m.name), letter(group), *marks))
    lost: list[Cells] = [(Bit(m.name), Bit(m.lost)) for m in fleet.lost]
    made: list[Block] = [
        Heading("What separates them", level=2, only=ALL if items else WHOLE),
        Items(items, only=ALL),
        Heading("Machines by what they compute", level=2),
        Paragraph("Equal letters in a column: equal bits. A is what the largest group has.", "soft"),
        Table(head, shown, only=VERBOSE + "m"),
        Figure("fleet", (columns, [(one_line(m.name, 80), group, cells) for m, group, cells in rows[:_SHOWN]])),
    ]
    if len(rows) > _SHOWN:
        made.append(Paragraph(f"{len(rows) - _SHOWN} more machines are not shown; --json has all.", "soft"))
    if fleet.unsteady:
        said = f"{len(fleet.unsteady)} stock results change from run to run on some machine and are not compared."
        made.append(Paragraph(said, "soft", ALL))
    if lost:
        made += [Heading("Without a fingerprint", level=2, only=ALL), Table(("machine", "why"), lost, only=ALL)]
    return made


def markdown(fleet: Fleet) -> str:
    """For a pull request or a ticket."""
    return "\n\n".join(["# Fleet", f"**{escape(fleet.headline, 1500)}**", *as_markdown(blocks(fleet))]) + "\n"


def render(fleet: Fleet) -> str:
    """The page."""
    answer = {0: "no", 3: "yes"}.get(fleet.code, "not known")
    return render_page("fleet.html.j2", answer=answer, headline=fleet.headline, blocks=blocks(fleet))


def as_json(fleet: Fleet) -> str:
    """One JSON object on a line."""
    data = {
        "code": fleet.code,
        "headline": fleet.headline,
        "groups": [[m.name for m in group] for group in fleet.groups],
        "lost": {m.name: m.lost for m in fleet.lost},
        "unsteady": [list(key) for key in fleet.unsteady],
        "findings": [asdict(f) | {"fails": f.level in FAILS} for f in fleet.findings],
    }
    return json.dumps(data, ensure_ascii=True)
