"""Runs to a terminal: at most 25 lines, with the verdict last, where the eye is; with -v everything.

Untrusted text is only given to rich as `Text` (never as markup), on one line and made printable, so that no escape
sequence in a completion or a name reaches the terminal.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from itertools import accumulate
from typing import Any

from rich.cells import cell_len
from rich.console import Console, RenderableType
from rich.padding import Padding
from rich.table import Table as Grid
from rich.text import Text

from nondet.core.records import Run
from nondet.errors import one_line
from nondet.reports import document as doc
from nondet.reports import text as figures
from nondet.reports.content import INCOMPLETE, build
from nondet.reports.document import Bit, bits, flat, plain, shown
from nondet.reports.endpoint import issue_lines
from nondet.reports.first_screen import FirstScreen

_STYLES = {"strong": "bold", "soft": "dim", "env": "dim", "below": "dim", "mark": "reverse", "warn": "bold yellow"}
_STYLES |= {"good": "green", "bad": "red", "dull": "yellow", "headline": "bold", "label": "bold"}
_ROWS_MOST = 200  # of a table
_ITEMS_BRIEF = 3  # of 25 lines
_NOTHING = ("", "–", "none", "nowhere")  # cells that a row leaves out where it is a sentence


def inline(text: doc.Inline, style: str = "") -> Text:
    """Stretches of text on one line."""
    line = Text(overflow="fold", style=_STYLES.get(style, ""))
    for words, kind in bits(text):
        said = flat(words, 6000)
        line.append(f"; {said}" if kind == "below" else f"{said:9}" if kind == "label" else said, _STYLES.get(kind))
    return line


def renderables(parts: Iterable[doc.Block], console: Console, form: str) -> Iterator[RenderableType]:
    """Blocks as rich prints them, one below the other."""
    brief = form == doc.BRIEF
    for block in shown(parts, form):
        if isinstance(block, doc.Heading):
            yield Text()
            yield inline(block.text, "strong")
        elif isinstance(block, doc.Paragraph):
            line = inline(block.text, block.style)
            yield _fitted(line, console, block.lines) if brief else line
        elif isinstance(block, doc.Items):
            for item, notes in list(block.noted())[: _ITEMS_BRIEF if brief else None]:
                line = inline(item)
                yield Padding(_fitted(line, console, 3, 2) if brief else line, (0, 0, 0, 2))
                yield from (Padding(inline(Bit(note), "soft"), (0, 0, 0, 4)) for note in notes)
        elif isinstance(block, doc.Table):
            parts_of = _table(block, console.width, block.brief if brief else _ROWS_MOST)
            yield from _lines(parts_of, console, block.lines) if brief else parts_of
        elif isinstance(block, doc.Code):
            yield Padding(Text(one_line(block.marked, 2000), overflow="fold"), (0, 0, 0, 2))
        elif isinstance(block, doc.Details):
            if block.id and not brief:
                yield Text()
            yield inline(block.title, "strong")
            yield from renderables(block.blocks, console, form)


def _lines(parts: Iterable[RenderableType], console: Console, most: int) -> Iterator[Text]:
    """A table's parts as lines, each one of a brief terminal's 25."""
    for part in parts:
        if isinstance(part, Text):
            yield _fitted(part, console, most)
            continue
        for segments in console.render_lines(part, pad=False):
            yield Text("".join(segment.text for segment in segments).rstrip(), no_wrap=True)


def _fitted(line: Text, console: Console, most: int, left: int = 0) -> Text:
    """At most `most` lines of it: whole clauses, if there is one of more than half a line, else whole words."""
    width = console.width - left
    if len(line.wrap(console, width)) <= most:
        return line
    for end in [found.end() for found in re.finditer(r"[.;](?= )", line.plain)][::-1]:
        shorter = line[:end].append(" …")
        if end > width / 2 and len(shorter.wrap(console, width)) <= most:
            return shorter
    *kept, last = line.wrap(console, width)[:most]
    last.rstrip()
    while last.cell_len > width - 2 and " " in last.plain:
        last.right_crop(len(last) - last.plain.rindex(" "))
    if " " not in last.plain and kept:  # the first piece of a name that is longer than a line
        *kept, last = kept
    last.truncate(width - 2)
    return Text("\n").join([*kept, last.append(" …")])


def _table(block: doc.Table, width: int, most: int) -> Iterator[RenderableType]:
    columns = [i for i, name in enumerate(block.head) if plain(name) not in block.unshown]
    kinds = dict(enumerate(block.kinds))
    head = [flat(plain(block.head[i])) for i in columns]
    rows = [[inline(row[i]) for i in columns] for row in block.rows[:most]]
    texts = [head, *([cell.plain for cell in row] for row in rows)]
    widths = [max(map(cell_len, column)) for column in zip(*texts, strict=True)]
    least = sum(min(w, 40) + 1 for w in widths[:-1]) + 6 if block.clipped else sum(widths) + len(widths)
    if (len(columns) > 4 or "wide" in block.kinds) and least > width:
        for first, *cells in rows:
            line, mark = Text.assemble("  ", first, overflow="fold"), ": "
            for i, name, cell in zip(columns[1:], head[1:], cells, strict=True):
                if cell.plain not in _NOTHING:
                    prose = kinds.get(i) == "wide"  # says by itself what it is
                    mark = "; " if prose and mark != ": " else mark
                    line.append_text(Text.assemble(mark, f"{name} " if name and not prose else "", cell))
                    mark = ", "
            yield line
    else:
        grid = Grid(expand=False, pad_edge=False, box=None, padding=(0, 1, 0, 0), header_style="dim")
        for place, i in enumerate(columns):
            figure = kinds.get(i) == "num"
            shape: dict[str, Any] = {"justify": "right" if figure else "left", "no_wrap": figure, "overflow": "fold"}
            if block.clipped and place < len(columns) - 1:  # figures whole, names give way
                shape["width"] = min(widths[place], 40)
            elif block.clipped:
                rest = max(6, width - sum(min(w, 40) + 1 for w in widths[:-1]))
                shape |= {"no_wrap": True, "overflow": "ellipsis", "max_width": rest}
            grid.add_column(Text(head[place]), **shape)
        for row in rows:
            if block.clipped:
                row[-1].overflow = "ellipsis"
            grid.add_row(*row)
        yield grid
    if len(block.rows) > most:
        yield Text(f"… and {len(block.rows) - most} more: see the .html or .md report.", style="dim")


LINES_MOST = 25
DIAGNOSIS_MOST = 20  # its steps have shown the evidence


def render(runs: list[Run], console: Console, *, verbose: bool = False, quiet: bool = False) -> None:
    """Print the report: all of it with `verbose`, only the verdict with `quiet`. Raises UserError: a sampled run's side
    file is missing, malformed or another run's."""
    report = build(runs)
    screen = FirstScreen(report)
    servers = report.runs[0].endpoint if len(runs) == 1 and runs[0].header.plan.get("quick") else None
    if servers is not None and not (verbose or quiet):
        for line in issue_lines(servers, figures.sentence(screen.section.headline)):
            console.print(Text(line), soft_wrap=True)
        return
    tail = _last_words(screen, console, next_too=not quiet)
    body: list[RenderableType] = []
    if verbose and not quiet:
        body = [part for blocks in report.blocks for part in renderables(blocks, console, doc.VERBOSE)]
    elif not quiet:
        body = list(_body(screen, console))
        most = DIAGNOSIS_MOST if len(report.runs) == 1 and screen.section.story else LINES_MOST
        heights = [len(console.render_lines(part)) for part in [*tail, *body]]
        space = most - sum(heights[: len(tail)])
        ends = list(accumulate(heights[len(tail) :]))
        if ends[-1] > space:
            more = Text("… more with -v, or in a report: --out report.html", style="dim")
            body = [*body[: sum(end < space for end in ends)], more]
    for part in [*body, *tail]:
        console.print(part)


def _last_words(screen: FirstScreen, console: Console, *, next_too: bool) -> list[Text]:
    words, runs = [], screen.runs
    if next_too and screen.next.command:
        said = one_line(screen.next.command, 200)
        words.append(Text.assemble(("next: ", "dim"), said, (f"  {screen.next.why}", "dim")))
    words += [Text()] * next_too  # the last paragraph is what was found
    if any(not section.run.complete for section in runs):
        words.append(Text(INCOMPLETE, style="bold yellow"))
    text = figures.sentence(screen.section.headline)
    if len(runs) > 1:
        text = f"{screen.effect}. {screen.answer}" if screen.effect else screen.answer
    style = "bold red" if screen.style == "bad" else "bold"
    return [*words, Text(one_line(text, 12 * console.width), style=style)]


def _body(screen: FirstScreen, console: Console) -> Iterator[RenderableType]:
    """Lines, the most important first: what does not fit is cut off at the end."""
    runs = screen.runs
    if len(runs) > 1:
        yield from renderables(screen.blocks, console, doc.BRIEF)
        for section in runs:
            yield Text(one_line(f"{section.name}: {section.headline}", console.width))
    else:
        title, name, machine, *rest = screen.report.blocks[0]
        chained = [] if runs[0].story else screen.blocks
        yield from renderables([title, name, machine, *chained, *rest], console, doc.BRIEF)
