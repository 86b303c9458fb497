"""Blocks: one document, three renderers, and what each format leaves out."""

from __future__ import annotations

from io import StringIO

from rich.console import Console

from nondet.reports import document
from nondet.reports.document import BRIEF, VERBOSE, Bit, Block, Code, Details, Heading, Items, Paragraph, Table
from nondet.reports.html import render_page
from nondet.reports.markdown import blocks as as_markdown
from nondet.reports.terminal import renderables

NASTY = "<script>alert(1)</script>|`x`\x1b[31m"


def printed(blocks: list[Block], form: str = VERBOSE, width: int = 60) -> str:
    console = Console(file=StringIO(), width=width)
    for part in renderables(blocks, console, form):
        console.print(part)
    return console.file.getvalue()  # type: ignore[attr-defined] # a StringIO


def page(blocks: list[Block]) -> str:
    return render_page("diff.html.j2", first="a", second="b", answer="no", headline="", blocks=blocks)


def test_every_kind_of_block_is_printed_by_every_renderer() -> None:
    blocks: list[Block] = [
        Heading("a heading", "place", "in the contents"),
        Paragraph(("a paragraph: ", Bit(NASTY))),
        Items([Bit(f"an item {NASTY}")], [[f"a note {NASTY}"]]),
        Table(("one", "two"), [(Bit(NASTY, "code"), Bit("cell", "bad"))]),
        Code(f"their text {NASTY}"),
        Details("a fold", [Paragraph("inside it")]),
        Details("a part", [Paragraph("inside the part")], "part"),
    ]
    for text in (printed(blocks), "\n\n".join(as_markdown(blocks)), page(blocks)):
        for words in ("a heading", "a paragraph", "an item", "a note", "two", "cell", "their text", "a fold", "a part"):
            assert words in text
        assert "inside it" in text
        assert "inside the part" in text
        assert "\x1b" not in text
    assert "<script" not in page(blocks)


def test_a_block_is_of_its_formats_alone() -> None:
    blocks: list[Block] = [
        Details("empty here", [Paragraph("for pages", only="p")]),
        Paragraph("x" * 500, only=BRIEF, lines=1),
    ]
    assert printed(blocks) == ""
    assert list(as_markdown(blocks)) == []
    assert "for pages" in page(blocks)
    assert printed(blocks, BRIEF).count("x") == 58
    assert document.plain(("a ", Bit("b", "below"))) == "a ; b"
    for text, said in [
        ("a `b` c", [("a ", ""), ("b", "code"), (" c", "")]),
        ("one ` alone", [("one ` alone", "")]),
        (Bit("`x`"), [("`x`", "")]),
        ((Bit("a", "strong"), ": b"), [("a", "strong"), (": b", "")]),
    ]:
        assert [tuple(bit) for bit in document.bits(text)] == said  # type: ignore[arg-type] # each kind of it


def test_a_table_too_wide_for_a_terminal_is_sentences() -> None:
    wide = tuple(f"column {i}" for i in range(9))
    text = printed([Table(wide, [[str(i) for i in range(9)]], unshown=("column 8",))])
    said = "0: column 1 1, column 2 2, column 3 3, column 4 4, column 5 5, column 6 6, column 7 7"
    assert " ".join(text.split()) == said
    clipped = printed([Table(("a", "b"), [["x", "y" * 200]], clipped=True)])
    assert max(map(len, clipped.splitlines())) <= 60
    assert "…" in clipped
    made = list(as_markdown([Details("fold", [Table(("n",), [[str(i)] for i in range(150)])])]))
    assert len(made) == 3
    rows = [line for part in made for line in part.splitlines() if line.strip("| ").isdigit()]
    assert rows == [f"| {i} |" for i in range(150)]
