"""A report as plain blocks, made once and printed by three renderers: terminal, markdown, HTML. Untrusted text stays
text in every block: a renderer escapes or makes printable its content."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any, NamedTuple

from nondet.errors import one_line

# Where a block is printed: a terminal's 25 lines, the whole of it on a terminal (-v), markdown, a page.
BRIEF, VERBOSE, MARKDOWN, PAGE = "bvmp"
WHOLE = VERBOSE + MARKDOWN + PAGE
ALL = BRIEF + WHOLE


class Bit(NamedTuple):
    """Text in a style: "" as it is, code, strong, soft, good, bad, dull, or below: on a line of its own."""

    text: str
    style: str = ""


Inline = str | Bit | tuple["str | Bit", ...]
Cells = Sequence[Inline]


def bits(text: Inline) -> Iterator[Bit]:
    """The stretches of a text. A plain string is prose: the part between a pair of backticks is code."""
    for part in (text,) if isinstance(text, str | Bit) else text:
        if isinstance(part, Bit):
            yield part
        elif part.count("`") % 2:  # an unpaired backtick
            yield Bit(part)
        else:
            yield from (Bit(piece, "code" if i % 2 else "") for i, piece in enumerate(part.split("`")) if piece)


def flat(words: str, limit: int = 6000) -> str:
    """A stretch on one line, made printable; a space at its ends, which separates it from its neighbours, is kept."""
    made = one_line(words, limit)
    return f"{' ' * words[:1].isspace()}{made}{' ' * words[-1:].isspace()}" if made else ""


def plain(text: Inline) -> str:
    """Without styles."""
    return "".join(f"; {bit.text}" if bit.style == "below" else bit.text for bit in bits(text))


@dataclass(frozen=True)
class Heading:
    """A title inside a run's part; `id` is its anchor on a page, `toc` its name in the page's contents."""

    text: Inline
    id: str = ""
    toc: str = ""
    level: int = 3
    only: str = WHOLE


@dataclass(frozen=True)
class Paragraph:
    """A paragraph; `style` as of a `Bit`, or a page's class (warn, headline). At most `lines` lines are brief."""

    text: Inline
    style: str = ""
    only: str = WHOLE
    lines: int = 2


@dataclass(frozen=True)
class Items:
    """A list; `notes` are what belongs under each item."""

    items: Sequence[Inline]
    notes: Sequence[Sequence[str]] = ()
    only: str = WHOLE

    def noted(self) -> Iterator[tuple[Inline, Sequence[str]]]:
        """Each item with its notes."""
        yield from zip_longest(self.items, self.notes, fillvalue=())


@dataclass(frozen=True)
class Table:
    """A table."""

    head: Cells
    rows: Sequence[Cells]
    kinds: Sequence[str] = ()  # for each column its page's class, if any: num, wide, nowrap, cell, kernels
    marks: Sequence[dict[str, str]] = ()  # for each row the keys of a page's filter: data attribute -> value
    unshown: Sequence[str] = ()  # names of columns that a terminal has no lines for
    clipped: bool = False  # a terminal cuts the last column off at its width, and folds none
    lines: int = 2  # most lines of a row that a brief terminal has as a sentence, for lack of width
    brief: int = 16  # most rows there
    only: str = WHOLE


@dataclass(frozen=True)
class Figure:
    """A picture: the page's macro `name` draws `data`. Other formats have blocks of their own next to it. `of` is its
    subject: where a page's first screen has a picture of the same subject, only that one is drawn."""

    name: str
    data: Any
    id: str = ""
    title: str = ""
    of: Any = None
    only: str = PAGE


@dataclass(frozen=True)
class Code:
    """Text of others, unchanged; `mark` is a part that is set off, and `after` what follows it."""

    text: str
    mark: str = ""
    after: str = ""
    only: str = WHOLE

    @property
    def marked(self) -> str:
        """All of it, where a part can't be set off by a colour."""
        return f"{self.text}⟦{self.mark}⟧{self.after}" if self.mark else f"{self.text}{self.after}"


@dataclass(frozen=True)
class Details:
    """Blocks behind a title."""

    title: Inline
    blocks: Sequence[Block]
    id: str = ""  # of a part of a run: it has a heading, and `said` next to it on a page; markdown does not fold it
    said: Inline = ""
    toc: str = ""
    fold: bool = False  # whether markdown folds it although it has an id
    opened: bool = False  # whether a page shows it from the start
    only: str = WHOLE


Block = Heading | Paragraph | Items | Table | Figure | Code | Details


def shown(blocks: Iterable[Block], form: str) -> Iterator[Block]:
    """The blocks that a format prints. Empty ones are left out, and a brief format shows a fold's brief content."""
    for block in blocks:
        if form == BRIEF and isinstance(block, Details) and form not in block.only:
            yield from shown(block.blocks, form)
        elif form in block.only and _holds_anything(block, form):
            yield block


def _holds_anything(block: Block, form: str) -> bool:
    match block:
        case Details(blocks=inner):
            return any(shown(inner, form))
        case Table(rows=held) | Items(items=held) | Paragraph(text=held) | Figure(data=held):
            return bool(held)
    return True  # a heading; a text of others, which may be empty
