"""Two runs side by side as one HTML page: self-contained, no script; the same rows as in markdown."""

from __future__ import annotations

from dataclasses import dataclass

from nondet.diffing.runs import RunDiff
from nondet.errors import one_line
from nondet.reports.diff_text import Parting, Sheet, headline, sheets
from nondet.reports.html import render_page

__all__ = ["render"]


@dataclass(frozen=True)
class _Page:
    """What the template prints.

    Attributes:
        answer: "yes" where something of B is another thing than in A, "no" where all that was compared is the same,
            "not known" where something was not compared.
    """

    a: str
    b: str
    answer: str
    headline: str
    sheets: list[Sheet]
    notes: tuple[str, ...]


def render(diff: RunDiff, names: tuple[str, str], parting: Parting) -> str:
    """The page."""
    moved = diff.changes or diff.parted or diff.failed_more
    answer = "yes" if moved else "no" if diff.compared else "not known"
    a, b = (one_line(name, 200) for name in names)
    page = _Page(a, b, answer, one_line(headline(diff), 1500), sheets(diff, parting), diff.notes)
    return render_page("diff.html.j2", page=page)
