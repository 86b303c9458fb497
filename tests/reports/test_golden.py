"""What the reports of kept run files say is what they said: see golden.py for how to look at a difference."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.reports import golden

PATHS = {golden.name_of(p, golden.ROOT / golden.KEPT): p for p in golden.run_files(golden.ROOT / golden.KEPT)}
DIGESTS = golden.read_digests()


def test_every_kept_run_has_its_digests() -> None:
    """A run file that is added or renamed is looked at."""
    assert sorted(PATHS) == sorted(DIGESTS)
    assert sum(len(set(digests.values())) == len(golden.FORMATS) for digests in DIGESTS.values()) > 60


@pytest.mark.parametrize("name", sorted(PATHS))
def test_a_report_says_what_it_said(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a terminal of 80 columns, in markdown, and on the page without scripts, styles and embedded data."""
    monkeypatch.chdir(golden.ROOT)
    made = golden.reports([str(PATHS[name].relative_to(golden.ROOT))])
    changed = [form for form, text in made.items() if golden.digest(text) != DIGESTS[name][form]]
    assert changed == [], "python -m tests.reports.golden --write DIR, in both trees, and diff -r; or --update"


def test_a_page_without_what_shows_it() -> None:
    """Scripts, styles and embedded pictures go; words, tables and figures drawn by tags stay."""
    page = (
        '<style>p { color: red }</style><p class="x">said</p><script type="a">\nlet x = 1;\n</script>'
        '<img src="data:image/png;base64,AAAA/+8="><svg><text>2</text></svg>'
    )
    assert golden.content(page) == '<p class="x">said</p><img src="data:"><svg><text>2</text></svg>'


@pytest.mark.parametrize("path", [Path("a/b.jsonl"), Path("a/b.jsonl.gz")])
def test_a_packed_file_has_the_name_of_the_plain_one(path: Path) -> None:
    """So that packing evidence changes no name."""
    assert golden.name_of(path, Path()) == "a/b"
