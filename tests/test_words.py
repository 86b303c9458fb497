"""Plain words: what users read is in the field's English, and words that are out stay out."""

from __future__ import annotations

from pathlib import Path

import pytest

from nondet.core.registry import PROBES
from tests.words import prose, words_out

ROOT = Path(__file__).resolve().parent.parent
# page -> why its words are not looked at
NOT_READ = {
    "docs/notebook.md": "made of docs/notebook.ipynb, whose outputs are reports",
}
# page -> words that it keeps, and why
KEPT = {
    "docs/architecture.md": ("is asked",),  # its tables follow the code, and change with it
    "docs/axes.md": ("moved",),  # the name of a report's column
    "docs/commands.md": ("moved",),  # a value of `nondet diff --fail-on`
    "docs/embed.md": ("alone",),  # the names of a report's arms
}
# What follows this line of docs/classes.md is printed from the declarations of the kernels, and changes with them.
GENERATED = "## The classes\n"
PAGES = sorted(
    str(page.relative_to(ROOT))
    for page in [ROOT / "README.md", *(ROOT / "docs").glob("*.md"), *(ROOT / "docs" / "probes").glob("*.md")]
    if str(page.relative_to(ROOT)) not in NOT_READ
)


@pytest.mark.parametrize("page", PAGES)
def test_the_pages_are_in_plain_words(page: str) -> None:
    """README and docs: no idiom of the project's own where the field has a word."""
    text = (ROOT / page).read_text(encoding="utf-8")
    kept = tuple(f"'{word}'" for word in KEPT.get(page, ()))
    found = words_out(prose(text.partition(GENERATED)[0]))
    assert [use for use in found if not use.startswith(kept)] == []
    assert all(any(use.startswith(word) for use in found) for word in kept), "kept for nothing"


def test_what_probes_test_is_in_plain_words() -> None:
    """As `nondet list` shows it; every option's help is on docs/commands.md."""
    assert words_out("; ".join(text for _, text in PROBES.values())) == []


@pytest.mark.parametrize(
    "text",
    [
        "tokens and logprobs part under load",
        "stock parted in 6 of 28 cases",
        "it parts in 191 of 192 traces",
        "a neighbour's company",
        "each is held bit for bit against the first",
        "a row at its place",
        "the same prompt alone",
        "the guilty operator",
    ],
)
def test_words_that_are_out_are_found(text: str) -> None:
    """The list sees what it was made for."""
    assert words_out(text)


def test_ordinary_words_are_not_found() -> None:
    """A part of a whole, a thing in place, a standalone page and code are left in peace."""
    text = (
        "K in 1 to 16 parts; a part of its keys; written in place; what takes place; a standalone page; we ask again; "
        "compared with the first; prefill in parts at a time"
    )
    assert words_out(text) == []
    assert words_out(prose("`--fail-on moved`\n\n```\nparted\n```\n\n    held against\n\n[run](alone.md)\n")) == []
