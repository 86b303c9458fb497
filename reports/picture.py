"""The picture of answers: a panel for each implementation, one below the other, with its answers as a tree over tokens.

Each branch ends in the number of requests that it answered and in its first different words; one answer to all is one
straight line. A picture is lines and words on a plane, which a page and `nondet.export.figures` draw.
"""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
from rich.cells import cell_len, set_cell_size

from nondet.errors import one_line
from nondet.reports import text
from nondet.reports.classes import hue, tint
from nondet.sampling.analysis import DistinctCompletion, SampleSummary, Span, spans_of
from nondet.verdict.findings import plural

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
    for root in spans_of([np.asarray(c.token_ids, dtype=np.int32) for c in texts])[:1]:
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
        return text.token(piece, completion.token_ids[at])
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
