"""Pictures as numbers: plots, and the tree of answers, which a page's macros and `nondet.export.figures` draw.

Positions in a plot are shares of its width and, from its foot, of its height. On a page they are thousandths of the
width and hundredths of the height, so that a plot stretches to any screen while its text does not. The picture of
answers is lines and words on a plane: a panel for each implementation, one below the other, with its answers as a tree
over tokens. Each branch ends in the number of requests that it answered and in its first different words.
"""

from __future__ import annotations

import math
import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

from rich.cells import cell_len, set_cell_size

from nondet.core.records import Role, Row, role_of
from nondet.errors import one_line
from nondet.reports.text import token
from nondet.sampling.analysis import DistinctCompletion, SampleSummary, Span, spans_of
from nondet.verdict.findings import plural

WIDTH = 1000.0


class Tick(NamedTuple):
    """A mark on the horizontal axis, in thousandths, its text, and whether a class ends there and another begins."""

    x: float
    text: str
    border: bool = False


class Scale(NamedTuple):
    """The texts along an axis, each with its value, and the position of a value: 0 at the foot, 1 at the end."""

    marks: Mapping[str, float]
    at: Callable[[float], float]

    @property
    def ticks(self) -> list[Tick]:
        """Along the horizontal axis."""
        return [Tick(WIDTH * self.at(value), text) for text, value in self.marks.items()]

    @property
    def levels(self) -> list[tuple[str, float]]:
        """(text, height) of the horizontal lines of a grid."""
        return [(text, self.at(value)) for text, value in self.marks.items()]


Points = Sequence[tuple[float, float]]


class Mark(NamedTuple):
    """Points of one style: curve, thin (a seed's curve), spot, band, hit (where words are read) or limit. `impl` is the
    number of its implementation, whose colour it has; `words` appear under the pointer."""

    style: str
    impl: int | None
    points: Points
    words: str = ""

    @property
    def path(self) -> str:
        """As a page draws it: spots separately, other points joined."""
        places = [f"{WIDTH * x:.1f} {100.0 - 100.0 * y:.2f}" for x, y in self.points]
        if self.style == "spot":
            return " ".join(f"M{place}h0" for place in places)
        return f"M{' '.join(places)}{'Z' if self.style == 'band' else ''}"


class Plot(NamedTuple):
    """Marks over the levels of a grid; `unit` is that of the levels, `label` the text for a screen reader."""

    unit: str
    height: int
    levels: Sequence[tuple[str, float]]
    marks: Sequence[Mark]
    label: str


class Panel(NamedTuple):
    """Plots above one horizontal axis."""

    title: str
    plots: Sequence[Plot]
    ticks: Sequence[Tick]
    axis: str


class Plots(NamedTuple):
    """Panels with one legend: (implementation, the text after its name); `limit` says what a dotted line is."""

    impls: Sequence[tuple[str, str]]
    panels: Sequence[Panel]
    limit: str = ""
    caption: str = ""


def linear(low: float, high: float, marks: Mapping[str, float] | None = None) -> Scale:
    """A scale that draws values beyond its ends at them; without marks its ends and its middle are labelled."""
    span = high - low or 1.0
    written = {f"{v:g}": v for v in (low, (low + high) / 2, high)} if marks is None else marks
    return Scale(written, lambda value: (min(max(value, low), high) - low) / span)


def decades(values: Iterable[float], foot: float = 0.0) -> Scale:
    """Powers of ten around all values above 0; the others are at the foot, which takes that share of the height."""
    above = [math.log10(v) for v in values if 0 < v < math.inf]
    low = max(-16, math.floor(min(above, default=-6.0)))
    high = max(low + 1, math.ceil(max(above, default=-3.0) - 1e-9))

    def at(value: float) -> float:
        if value <= 0:
            return 0.0
        return foot + (1.0 - foot) * (min(high, max(low, math.log10(value))) - low) / (high - low)

    written = {"1" if e == 0 else f"1e{e}": 10.0**e for e in range(low, high + 1, max(1, (high - low) // 3))}
    return Scale({"0": 0.0} | written if foot else written, at)


def doublings(low: float, high: float) -> Scale:
    """Powers of two, about seven of them written."""
    first, span = math.log2(low), math.log2(high / low) or 1.0
    powers = range(math.ceil(first), math.floor(math.log2(high)) + 1)
    written = {f"{2**e:,}": 2.0**e for e in powers[:: max(1, -(-len(powers) // 7))]}
    return Scale(written, lambda value: (math.log2(max(low, value)) - first) / span)


def placed(points: Iterable[tuple[float, float]], across: Scale, up: Scale) -> Points:
    """The positions of these values."""
    return [(across.at(x), up.at(y)) for x, y in points]


def hue(impl: str, index: int = 0) -> int:
    """The number of an implementation's colour: orange is stock's in every chart, and blue is invariant's."""
    role = Role.STOCK if impl == "best stock" else role_of(impl)
    return {Role.STOCK: 0, Role.BACKEND: 0, Role.INVARIANT: 1}.get(role, 2 + index % 2)


def tint(label: int, row: Row | None = None) -> str:
    """The colour of a class; the only class of a row has that of its implementation."""
    return f"c{label % 8}" if row is None or row.distinct > 1 else f"r{hue(row.impl)}"


# The picture of answers.

WIDE = 680.0
_TREE, _COUNTS, _WORDS = 240.0, 350.0, 362.0  # where the lines and the counts end, where the words begin
_ROW = 36.0
_LEAVES_MOST = 8
_LETTERS = 26  # that have room after a count
_NAMES = {"stock": "Stock kernels", "invariant": "Batch-invariant kernels"}


class Stroke(NamedTuple):
    """A line of so many units in the colour of a class ("c0") or of an implementation ("r1")."""

    x0: float
    y0: float
    x1: float
    y1: float
    width: float
    colour: str


class Words(NamedTuple):
    """A line of text from (or, with `end`, up to) x, on the base line y; `colour`: ink, faded, or as of a stroke."""

    x: float
    y: float
    text: str
    size: float = 22
    colour: str = "ink"
    bold: bool = False
    end: bool = False


class Picture(NamedTuple):
    """Lines and words, `height` units high; `label` says it to who does not see it."""

    height: float
    strokes: list[Stroke]
    words: list[Words]
    label: str


def answers_picture(summaries: Sequence[SampleSummary]) -> Picture:
    """A panel for each of these implementations, which answered one prompt."""
    strokes, words, titles, foot = list[Stroke](), list[Words](), list[str](), 0.0
    forked = next((s for s in summaries if s.distinct_completions > 1), None)
    at = forked.completions[1].parts_at if forked else None
    for s in summaries:
        name, counts = _NAMES.get(s.impl, one_line(s.impl, 40)), counts_text(s)
        titles.append(f"{name}: {counts}")
        words.append(Words(0, foot + 22, name, 22, f"r{hue(s.impl)}", bold=True))
        words.append(Words(0, foot + 53, counts, 24, bold=True))
        foot = _panel(s, at or 0, foot + 64, strokes, words) + 30
    return Picture(foot - 14, strokes, words, "; ".join(titles))


def counts_text(s: SampleSummary) -> str:
    """ "1,000 requests, 6 different answers"."""
    if s.distinct_completions > 1:
        return f"{plural(s.n, 'request')}, {s.distinct_completions:,} different answers"
    return f"{plural(s.n, 'request')}, 1 answer{'; logprobs differ' if s.distinct_traces > 1 else ''}"


def _panel(s: SampleSummary, at: int, top: float, strokes: list[Stroke], words: list[Words]) -> float:
    """Draw the most common answers below `top`; returns the foot. `at`: the token whose words a lone answer shows."""
    shown, rest = s.completions[:_LEAVES_MOST], s.completions[_LEAVES_MOST:]
    length = max((len(c.token_ids) for c in shown), default=0) or 1
    colours = {id(c): tint(i) if len(shown) > 1 else f"r{hue(s.impl)}" for i, c in enumerate(shown)}
    leaves: list[tuple[DistinctCompletion, int]] = []  # with the token at which each leaves its branch

    def height(row: int) -> float:
        return top + _ROW * (row + 0.5)

    def weight(span: Span) -> int:
        return sum(c.count for c in texts[span.first : span.last])

    def walk(span: Span, left: int) -> tuple[int, str]:
        """Draw what these answers share; returns the row and the colour of the most common one."""
        row, stop = len(leaves), span.end if span.ways else length
        x = _TREE * stop / length
        colour = ""
        if not span.ways:
            leaves.append((texts[span.first], left))
            colour = colours[id(texts[span.first])]
        for number, way in enumerate(sorted(span.ways, key=weight, reverse=True)):
            child, its = walk(way, stop if number else left)
            colour = colour or its
            if number:
                strokes.append(Stroke(x, height(row), x, height(child), 2, its))
        width = 2 + 6 * weight(span) / max(1, s.n)
        strokes.append(Stroke(_TREE * span.start / length, height(row), x, height(row), width, colour))
        return row, colour

    texts = sorted(shown, key=lambda c: c.token_ids)
    for root in spans_of([c.token_ids for c in texts])[:1]:
        walk(root, at if len(shown) > 1 or at < len(shown[0].pieces) else 0)
    for row, (c, left) in enumerate(leaves):
        words.append(Words(_COUNTS, height(row) + 8, f"{c.count:,}", 22, bold=True, end=True))
        words.append(Words(_WORDS, height(row) + 8, first_words(c, left), 22))
    foot, notes = top + _ROW * max(1, len(leaves)), []
    if len(shown) > 1:
        first = min(c.parts_at for c in shown if c.parts_at is not None)
        notes.append(f"they differ from token {first} of {length} on")
    if rest:
        count = plural(sum(c.count for c in rest), "request")
        notes.append(f"not drawn: {plural(len(rest), 'rarer answer')} to {count}")
    for note in notes:
        foot += 20 if note is notes[0] else 28
        words.append(Words(0, foot, note, 20, "faded"))
    return foot


def first_words(completion: DistinctCompletion, at: int) -> str:
    """What the answer says from a token on, in quotes; "(ends here)" where it has ended."""
    if at >= len(completion.pieces):
        return "(ends here)"
    piece, said = completion.pieces[at], one_line("".join(completion.pieces[at:]), 200)
    if not said or (piece.strip(" ") == piece and not piece.strip("\ufffd\n\t")):  # a line end, a token without a text
        return token(piece, completion.token_ids[at])
    if cell_len(said) <= _LETTERS - 2:
        return f"“{said}”"
    cut = set_cell_size(said, _LETTERS - 3)
    return f"“{(cut.rpartition(' ')[0] or cut).rstrip(' .,;:')}…”"


def card_of(picture: Picture, title: str, verdict: str, facts: Mapping[str, str]) -> Picture:
    """The picture as something to post: what was tested and the verdict above it, and facts with their names below."""
    head = [*_wrapped(f"nondet · {title}", 0, 22, 22, "faded"), Words(0, 0, verdict, 30, bold=True)]
    head[-1] = head[-1]._replace(y=head[-2].y + 42)
    down = head[-1].y + 26
    strokes = [line._replace(y0=line.y0 + down, y1=line.y1 + down) for line in picture.strokes]
    words = [*head, *(one._replace(y=one.y + down) for one in picture.words)]
    foot = down + picture.height + 16
    for name, said in facts.items():
        words.append(Words(0, foot + 20, name, 20, "faded", bold=True))
        lines = _wrapped(said.replace("`", ""), 110, foot + 20, 20, "ink")
        words += lines
        foot = lines[-1].y + 12
    return Picture(foot + 6, strokes, words, picture.label)


def _wrapped(said: str, x: float, y: float, size: float, colour: str) -> list[Words]:
    lines = textwrap.wrap(said, int((WIDE - x) / (0.56 * size)), max_lines=3, placeholder=" …") or [""]
    return [Words(x, y + 1.3 * size * i, line, size, colour) for i, line in enumerate(lines)]
