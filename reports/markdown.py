"""Runs to markdown that reads well in a pull request: headline, small tables, details for what is long.

Untrusted text is only ever printed as a code span, inside a fence, or with its ASCII punctuation as character
references: there it can't open a link, a mention, a table cell or a tag.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import pairwise

from nondet.core.records import Run
from nondet.errors import one_line
from nondet.reports import document as doc
from nondet.reports.content import build
from nondet.reports.document import bits, flat, shown
from nondet.reports.first_screen import FirstScreen
from nondet.reports.text import code, escape, fence

_ROWS_MOST = 60  # of one block: a longer table is several, of which some may have to be left out
_KEPT = 6  # of a run's blocks: title, name, machine, headline, verdicts stay
# Characters by default: what a reader takes in a pull request. The other is GitHub's limit.
BRIEF_MOST = 20_000
FULL_MOST = 65_536


def inline(text: doc.Inline, *, cell: bool = False) -> str:
    """Stretches of text, escaped."""
    made = []
    for words, style in bits(text):
        if style == "code":
            made.append(code(words, 400 if cell else 1500, cell=cell))
            continue
        shape = "**{}**" if style in ("strong", "good", "bad", "dull") else "; {}" if style == "below" else "{}"
        inner = escape(words, 6000)
        made.append(flat(words).replace(one_line(words, 6000), shape.format(inner)) if inner else "")
    return "".join(made)


def blocks(parts: Iterable[doc.Block]) -> Iterator[str]:
    """Each block as markdown; a part of a run gives one for each block in it."""
    for block in shown(parts, doc.MARKDOWN):
        if isinstance(block, doc.Heading):
            yield f"{'#' * block.level} {inline(block.text)}"
        elif isinstance(block, doc.Paragraph):
            strong = block.style == "warn"
            yield f"**{inline(block.text)}**" if strong else inline(block.text)
        elif isinstance(block, doc.Items):
            lines = [(f"- {inline(item)}", *(f"  - {escape(note)}" for note in notes)) for item, notes in block.noted()]
            yield "\n".join(line for item in lines for line in item)
        elif isinstance(block, doc.Table):
            for start in range(0, len(block.rows), _ROWS_MOST):
                rows = [block.head, *block.rows[start : start + _ROWS_MOST]]
                first, *others = [f"| {' | '.join(inline(cell, cell=True) for cell in row)} |" for row in rows]
                yield "\n".join([first, f"|{'---|' * len(block.head)}", *others])
        elif isinstance(block, doc.Code):
            yield fence(block.marked)
        elif isinstance(block, doc.Details):
            inner = list(blocks(block.blocks))
            if block.id and not block.fold:
                yield f"### {inline(block.title)}"
                yield from inner
            else:  # a long table is several folds
                folds = [[made] for made in inner] if len(block.blocks) == 1 else [inner]
                summary = f"<details><summary>{inline(block.title)}</summary>"
                yield from ("\n\n".join([summary, *fold, "</details>"]) for fold in folds)


def render(runs: list[Run], *, full: bool = False) -> str:
    """The document: the answer, then each run's blocks. What does not fit is left out, the longest blocks first, which
    the end says. With `full` the limit is GitHub's. Raises UserError: a sampled run's side file is missing, malformed
    or another run's."""
    report = build(runs)
    head = list(blocks(FirstScreen(report).blocks))
    bodies = [list(blocks(parts)) for parts in report.blocks]
    most = FULL_MOST if full else BRIEF_MOST
    left_out = [0] * len(bodies)

    def document() -> str:
        cut = [f"{count} of {code(r.name)}" for r, count in zip(report.runs, left_out, strict=True) if count]
        rest = "" if full else " `nondet report --full` writes more;"
        note = f"Left out for length: blocks, {', '.join(cut)}.{rest} an .html report holds everything."
        parts = [*head, *(block for body in bodies for block in body if block), *([note] if cut else [])]
        levels = [len(part) - len(part.lstrip("#")) or 9 for part in [*parts, "#"]]
        steps = zip(parts, pairwise(levels), strict=True)
        # without the titles of what was left out
        return "\n\n".join(part for part, (level, after) in steps if level > 6 or after > level) + "\n"

    excess = len(document()) - most
    longest = [(len(block), i, j) for i, body in enumerate(bodies) for j, block in enumerate(body) if j >= _KEPT]
    for length, i, j in sorted(longest, reverse=True):
        if excess <= 0 and (excess := len(document()) - most) <= 0:
            break
        bodies[i][j] = ""
        left_out[i] += 1
        excess -= length + 2
    text = document()
    return text if len(text) <= most else text[: most - 60].rpartition("\n")[0] + "\n\nCut off here for length.\n"
