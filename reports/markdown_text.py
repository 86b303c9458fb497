"""Untrusted text in markdown: code spans, fences, escaped text; and tables and details of what is escaped already."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from nondet.errors import one_line, printable

__all__ = ["code", "details", "escape", "fence", "table"]

# All but what starts nothing in markdown, or only at the start of a line, where escaped text never stands.
_HARMFUL = re.compile(r"(?<![A-Za-z0-9])_|_(?![A-Za-z0-9])|[^A-Za-z0-9\s.,:;()=+%/_-]")
_WORD_JOINER = "&#8288;"


def escape(text: str, limit: int = 2000) -> str:
    """Text on one line in which nothing is markup, link or mention.

    GitHub looks for mentions and references in the rendered text, where a character reference is the character
    itself: a word joiner after @ and # keeps them from being taken for one.
    """

    def reference(match: re.Match[str]) -> str:
        char = match.group()
        if not char.isascii():
            return char
        return f"&#{ord(char)};" + (_WORD_JOINER if char in "@#" else "")

    plain = _HARMFUL.sub(reference, one_line(text, limit))
    return re.sub(r"(?i)(www)\.", r"\1&#46;", plain.replace(":/", "&#58;/"))


def code(text: str, limit: int = 400, *, cell: bool = True) -> str:
    """A code span on one line. In a table cell a pipe must be escaped even inside it."""
    flat = one_line(text, limit) or " "
    ticks = "`" * (1 + max((len(run) for run in re.findall(r"`+", flat)), default=0))
    pad = " " if flat.startswith(("`", " ")) or flat.endswith(("`", " ")) else ""
    span = f"{ticks}{pad}{flat}{pad}{ticks}"
    return span.replace("|", "\\|") if cell else span


def fence(text: str) -> str:
    """A fenced block that nothing in the text can end."""
    shown = printable(text)
    ticks = "`" * max(3, 1 + max((len(run) for run in re.findall(r"`+", shown)), default=0))
    return f"{ticks}text\n{shown}\n{ticks}"


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table; cells are escaped already."""
    lines = [f"| {' | '.join(cells)} |" for cells in (head, *rows)]
    return "\n".join([lines[0], f"|{'---|' * len(head)}", *lines[1:]])


def details(summary: str, blocks: Sequence[str]) -> str:
    """Blocks behind a summary, escaped already."""
    return "\n\n".join([f"<details><summary>{summary}</summary>", *blocks, "</details>"])
