"""Markdown: reads as tables and details, and untrusted text is nothing but text."""

from __future__ import annotations

import re
from pathlib import Path

from markdown_it import MarkdownIt

from nondet.core.runfile import read_run
from nondet.reports.markdown import render
from nondet.reports.text import code, escape, fence
from tests import build as hostile
from tests.build import failed, h200_sweep, row, run_of, sampled
from tests.reports.test_html import Page
from tests.reports.test_terminal import hostile_runs


def rendered(markdown: str) -> Page:
    """As GitHub would show it: tables on, HTML let through."""
    return Page(MarkdownIt("commonmark", {"html": True}).enable(["table", "strikethrough"]).render(markdown))


OURS = {"h2", "h3", "h4", "p", "ul", "li", "code", "pre", "strong", "details", "summary"}
OURS |= {"table", "thead", "tbody", "tr", "th", "td"}


def test_hostile_text_stays_text(tmp_path: Path) -> None:
    text = render(hostile_runs(tmp_path), full=True)
    assert set(rendered(text).tags) <= OURS
    assert not re.search("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2028]", text)
    # outside code, GitHub would act on these even if they were written as character references
    bare = re.sub(r"<code.*?</code>", "", MarkdownIt("commonmark").enable("table").render(text), flags=re.DOTALL)
    assert not re.search(r"@[A-Za-z]|#\d", re.sub(r"&#?\w+;", "", bare))


def test_every_table_row_has_its_columns(tmp_path: Path) -> None:
    run = sampled(tmp_path, impls=("stock",), variants=hostile.parts, pieces=hostile.PIECES, n=20)
    text = render([run, run_of(row([0, 1], case="a | b \\| c", impl="m:f|g"), failed(reason="x | y"))])
    width = tables = 0
    for line in text.splitlines():
        cells = len(re.findall(r"(?<!\\)\|", line)) - 1 if line.startswith(("| ", "|-")) else 0
        assert not (width and cells) or cells == width, line
        tables += cells > width == 0
        width = cells
    assert tables > 2


def test_code_spans_and_fences_hold_anything() -> None:
    odd = ("a`b", "``", "`", "a|b", " lead", "trail ", "", "\\", "a\\", "<b>", "x\ny", "@u #1", "```", "a|`b`|\\")
    for text in odd:
        shown = rendered(f"| x | y |\n|---|---|\n| {code(text)} | z |\n")
        assert (shown.tags.count("code"), shown.tags.count("td")) == (1, 2)
        assert " ".join(text.split()) in shown.text
    for text in ["```\n# out\n```", "````", "plain", "", "~~~"]:
        shown = rendered(f"{fence(text)}\n\nafter\n")
        assert shown.tags == ["pre", "code", "p"]
        assert text in shown.text


def test_escaped_text_is_shown_as_it_is() -> None:
    for text in ["<b>", "[a](b)", "**x**", "_x_", "`x`", "a|b", "http://x.y", "&lt;", "~~x~~", "$x$", "\\*"]:
        shown = rendered(f"so: {escape(text)}")
        assert shown.tags == ["p"]
        assert shown.text.strip() == f"so: {text}"
    # @user and #1 are held apart by an invisible joiner, addresses lose their colon or dot; index_add is left as it is
    assert escape("@user #1") == "&#64;&#8288;user &#35;&#8288;1"
    assert not re.search(r"://|www\.", escape("http://evil.example WWW.evil.example www.evil.example"))
    assert escape("index_add, K=4096 (3 of 4)") == "index_add, K=4096 (3 of 4)"


def test_a_document_fits_where_it_is_posted() -> None:
    run = run_of(*(row([0, 1] * 20, case=f"case {i} of a long run, {'K' * 60}={i}") for i in range(250)))
    brief, full = render([run]), render([run], full=True)
    assert len(brief) <= 20_000 < len(full) <= 65_536
    for text in (brief, full):
        assert text.startswith("## ")
        assert "Left out for length" in text
        assert text.count("<details>") == text.count("</details>")
    assert "Left out" not in render([run_of(*h200_sweep())])


def test_no_heading_is_empty_or_there_twice() -> None:
    folder = Path(__file__).resolve().parents[2] / "docs" / "evidence"
    served, diagnosed = (read_run(folder / f"{name}.jsonl.gz") for name in ("servers/llamacpp/sample", "h200/diagnose"))
    for runs in ([served], [diagnosed], [served, diagnosed]):
        text = render(runs)
        for part in re.split(r"^## ", text, flags=re.MULTILINE):
            titles = re.findall(r"^#+ .*$", part, flags=re.MULTILINE)
            assert len(titles) == len(set(titles))
        empty = re.findall(r"^#### .*\n+#|^### .*\n+#{1,3} |^## .*\n+#{1,2} |^#.*\n*\Z", text, flags=re.MULTILINE)
        assert empty == []
        assert "&#96;" not in text
